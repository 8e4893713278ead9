"""Phases: a recorded training, cut where every rank has come to the same point; and in each phase its moments."""

from dataclasses import dataclass

from zero_minimal.classroom.report.small_model import RANKS

PHASES = (  # (title, the event that ends it, the batches whose gradients are there then, update steps so far)
    ("The stage is made", "made", (), 0),
    ("Step 1: backward", "backward", (1,), 0),
    ("Step 1: update", "stepped", (1,), 1),
    ("Step 1: zero_grad", "forgot", (), 1),
    ("Step 2: first micro-batch", "micro", (0,), 1),
    ("Step 2: second micro-batch", "backward", (0, 1), 1),
    ("Step 2: clipping", "clipped", (0, 1), 1),
    ("Step 2: update", "stepped", (0, 1), 2),
    ("Step 2: zero_grad", "forgot", (), 2),
)


END = "At its end"  # the title of a phase's last moment


@dataclass(frozen=True)
class Phase:
    """What each rank did between two points. `over`: [rank] whether it came to the end."""

    title: str
    ends: str
    batches: tuple[int, ...]
    updates: int
    ranks: list[list[dict]]
    over: list[bool]

    def last(self, rank: int) -> dict | None:
        """The event that ends it, if the rank came there."""
        return self.ranks[rank][-1] if self.over[rank] else None

    @property
    def moments(self) -> list[tuple[str, list[list[dict]]]]:
        """(title, [rank][event]): from one gradient to the next, and at stage 3 from one unit's turn in forward to the
        next; the end by itself. Of two ranks, one may get a gradient that the other does not."""
        found: dict[str, list[list[dict]]] = {}
        cuts = [_cut(rank, over) for rank, over in zip(self.ranks, self.over, strict=True)]
        order = sorted({key for cut in cuts for key in cut}, key=lambda key: key[0])
        for key in order:
            found[key[1]] = [cut.get(key, []) for cut in cuts]
        return list(found.items())


def _cut(events: list[dict], over: bool) -> dict[tuple, list[dict]]:
    """{(place in the order, title): events}"""
    found: dict = {}
    turns = [layers_in_words(event["layers"]) for event in events if event["what"] == "turn"]  # at stage 3, in forward
    titles = iter([f"Forward comes to {layers}" for layers in turns] + ["Backward begins" if turns else "On the way"])
    key = (0, next(titles))
    for place, event in enumerate(events):
        if event["what"] == "gradient":
            key = (1000 - event["layer"], f"Layer {event['layer']}'s gradient arrives")
        elif over and place == len(events) - 1:
            key = (2000, END)
        found.setdefault(key, []).append(event)
        if event["what"] == "turn":  # what a stage does for a turn comes before it
            key = (key[0] + 1, next(titles))
    return found


def layers_in_words(layers: list[int]) -> str:
    """layer 3; layers 1 and 2; layers 1, 2 and 3"""
    *others, last = map(str, layers)
    return f"layers {', '.join(others)} and {last}" if others else f"layer {last}"


def phases(ranks: list[list[dict]]) -> list[Phase]:
    """All that any rank has begun."""
    found, place = [], [next((index + 1 for index, event in enumerate(rank) if event["what"] == "empty"), 0)
                        for rank in ranks]
    for title, ends, batches, updates in PHASES:
        parts, over = [], []
        for rank in range(RANKS):
            rest = ranks[rank][place[rank]:]
            end = next((index for index, event in enumerate(rest) if event["what"] == ends), None)
            parts.append(rest if end is None else rest[: end + 1])
            over.append(end is not None)
            place[rank] += len(parts[-1])
        if not any(parts):
            break
        found.append(Phase(title, ends, batches, updates, parts, over))
    return found
