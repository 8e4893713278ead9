"""Unit rules: where a recorded training departs from what stage 3 holds of its units. Each rule yields (title of a
moment, sentence). At the other stages they find nothing.

A unit of the small model is one of its blocks: layers 1 and 2 together, and each other layer by itself.
"""

from collections.abc import Iterator

from zero_minimal.classroom.report.small_model import RANKS, SIZES, UNITS
from zero_minimal.classroom.report.stage_rules import SPARE, Rules
from zero_minimal.classroom.report.training_phases import END, Phase, layers_in_words

ALIGNED = 16 * RANKS  # elements: a unit may be padded to a multiple of so many


def departures(phase: Phase, rules: Rules, between: list[int | None]) -> Iterator[tuple[str, str]]:
    """between: [rank] bytes of parameters that a rank holds between steps; None as long as that is not known."""
    if rules.stage != 3:
        return
    for rank in range(RANKS):
        yield from _left(phase, rules, rank)
    for moment, ranks in phase.moments:
        for rank, events in enumerate(ranks):
            for unit, following in _turns(events):
                yield from ((moment, words) for words in _at_a_turn(phase, rank, unit, following, between[rank]))
            yield from ((moment, words) for event in events for words in _at_a_gather(rank, event))


def _left(phase: Phase, rules: Rules, rank: int) -> Iterator[tuple[str, str]]:
    """When the stage is made, and after step(), a rank has shards alone."""
    last = phase.last(rank)
    if phase.ends not in ("made", "stepped") or last is None:
        return
    if last["left"]:
        yield END, (f"Rank {rank} can still read {layers_in_words(last['left'])} when "
                    f"{'the stage is made' if phase.ends == 'made' else 'step() is over'}: shards alone must be left.")
    elif last["memory"]["parameters"] > rules.states["parameters"] + len(UNITS) * 4 * 16 + SPARE:
        yield END, (f"Rank {rank} holds {last['memory']['parameters']:,} bytes of parameters between its steps, and "
                    f"{rules.states['parameters']:,.0f} are expected, with padding a little more: its shard. Nobody "
                    "can read the rest, but its memory is there.")


def _turns(events: list[dict]) -> Iterator[tuple[dict, tuple[int, ...]]]:
    """(event, the layers of the unit at work, those of the unit that comes next) of each event that shows a turn."""
    for event in events:
        if event["what"] == "turn":
            place = UNITS.index(tuple(event["layers"]))
            yield event, UNITS[place + 1] if place + 1 < len(UNITS) else ()
        elif event["what"] == "gradient":
            place = next(place for place, layers in enumerate(UNITS) if event["layer"] in layers)
            yield event, UNITS[place - 1] if place else ()


def _at_a_gather(rank: int, event: dict) -> Iterator[str]:
    """When a gather begins, what came before is freed already: two units have memory at most."""
    if event["what"] in ("start", "collective") and event["name"] == "all_gather":
        layers = sorted({*event["here"], *event["idle"]})
        if sum(not set(unit).isdisjoint(layers) for unit in UNITS) > 2:
            yield (f"Rank {rank} begins a gather while {layers_in_words(layers)} have memory: more than two units at "
                   "once. What is not needed any more is freed before the next gather begins.")


def _at_a_turn(phase: Phase, rank: int, event: dict, following: tuple[int, ...], between: int | None) -> Iterator[str]:
    """The first that is wrong at a turn."""
    own = next(layers for layers in UNITS if event.get("layer", event.get("layers", [0])[0]) in layers)
    when = (f"in {'forward' if event['what'] == 'turn' else 'backward'}, while {layers_in_words(own)} "
            f"work{'s' * (len(own) == 1)}")
    most, least = (_bytes(own, multiple) + _bytes(following, multiple) for multiple in (ALIGNED, 1))
    others = [layer for layer in event["here"] if layer not in (*own, *following)]
    extra = most if between is None else event["memory"]["parameters"] - between
    if others:
        yield (f"Rank {rank} can read {layers_in_words(others)}, too, {when}: a unit is freed when the turn of the "
               "next one begins.")
    elif left := [layer for layer in event["idle"] if layer not in (*own, *following)]:
        yield (f"Rank {rank} still has memory of {layers_in_words(left)}, {when}, though nobody can read it: who drops "
               "a reference frees nothing as long as there is another one, autograd's say.")
    elif extra > most:
        yield (f"Rank {rank} holds {extra:,} bytes of whole parameters, {when}, and at most {most:,} are expected: "
               "this unit and the next one. Nobody can read the rest, but its memory is there.")
    elif set(following) & set(event["here"]):
        yield (f"Rank {rank} can read {layers_in_words(following)} already, {when}: somebody has waited for it, in "
               "place of letting it travel while this unit computes.")
    elif following and phase.updates and extra < least:
        yield (f"Rank {rank} has not begun to gather {layers_in_words(following)}, {when}: the next unit must be on "
               "its way by then.")


def _bytes(layers: tuple[int, ...], multiple: int = 1) -> int:
    """Of the parameters of a unit, or of none."""
    elements = sum(-(-SIZES[layer - 1] // 16) * 16 if multiple > 1 else SIZES[layer - 1] for layer in layers)
    return 4 * -(-elements // multiple) * multiple
