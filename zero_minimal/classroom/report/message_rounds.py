"""Rounds: messages of several ranks brought into an order that all of them share.

Ranks have no common clock. But a rank sends after what it did before, and a message arrives after it was sent: so each
message has an earliest round, and the messages of a ring that run side by side have the same one. What is counted is
what must wait for what, not seconds.
"""

from collections import defaultdict
from dataclasses import dataclass

from zero_minimal.classroom.report.rings import PADDING, Read, Ring, read


@dataclass
class Event:
    """What a rank wrote down, and its round; None: no message, or one that never arrived."""

    entry: dict
    round: int | None = None

    @property
    def what(self) -> str:
        return self.entry["what"]


def in_rounds(ranks: list[list[dict]]) -> list[list[Event]]:
    """[rank][event]: sends, collectives and what was received, with their rounds."""
    events = [[Event(entry) for entry in rank] for rank in ranks]
    sent, posted = defaultdict(list), defaultdict(int)  # by (from, to): rounds of sends; receives so far
    place, last = [0] * len(ranks), [0] * len(ranks)
    source: dict = {}  # (rank, number of a receive): (from, to), and the how manieth of these
    patient = True
    while any(place[rank] < len(events[rank]) for rank in range(len(ranks))):
        moved = False
        for rank, own in enumerate(events):
            while place[rank] < len(own):
                event = own[place[rank]]
                if event.what in ("send", "collective"):
                    event.round = last[rank] = last[rank] + 1
                    sent[rank, event.entry.get("peer")].append(event.round)
                elif event.what == "receive":
                    way = event.entry["peer"], rank
                    source[rank, event.entry["number"]] = way, posted[way]
                    posted[way] += 1
                elif event.what == "received":
                    way, count = source[rank, event.entry["number"]]
                    if count >= len(sent[way]) and patient:
                        break  # until the other rank's events are read so far
                    event.round = sent[way][count] if count < len(sent[way]) else max(1, last[rank])
                    last[rank] = max(last[rank], event.round)
                place[rank], moved = place[rank] + 1, True
        patient = moved
    return events


def state_after(events: list[Event], round: int) -> list[dict]:
    """The tensors that a rank holds when its messages of this round are done, as it wrote them down."""
    seen: list[dict] = []
    for event in events:
        later = event.round is not None and event.round > round
        if "holds" in event.entry and not (later and event.what == "received"):
            # when a function has returned its variables are gone: what they held before counts where nothing else is
            seen = event.entry["holds"] + (seen if event.what == "returned" else [])
        if later:
            break
    return seen


def reads(values: list | None, ring: Ring) -> list[Read | None] | None:
    """What each element of a tensor is, as recorded; of a tensor with copies, one of each."""
    if values is None:
        return None
    return [read(value, ring.size) for value, count in values for _ in range(1 if ring.copies > 1 else min(count, 64))]


def held(tensors: list[dict], ring: Ring) -> dict[int, Read]:
    """{element: the fullest sum of it that a rank holds}. Where two are alike, the one that it was not given counts."""
    best: dict = {}
    for tensor in tensors:
        for found in reads(tensor["values"], ring) or ():
            if found and found != PADDING:
                score = sum(found.parts), not tensor["given"]
                if found.element not in best or score > best[found.element][0]:
                    best[found.element] = score, found
    return {element: found for element, (_, found) in best.items()}
