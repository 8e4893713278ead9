"""Crossings: what a rank computes, what it sends to other ranks, and what crosses the bus to its host meanwhile."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from zero_minimal.paper.formulas import STATES
from zero_minimal.pictures import style
from zero_minimal.pictures.time_line import COMPUTING, UNDER_WAY, WAITING, name_lanes, span_bar

BUS = style.LOOKS["buffers"]
HOST = ("#BBBBBB", "..")
LANES = ("computes", "messages", "bus to the host", "bus from the host")
STANDS = "stands at a message or at the bus"


def draw_crossings(steps: dict[str, tuple]) -> Figure:
    """A panel for each step: four lanes of one rank, on one time axis.

    Args: steps, {title: (computing, collectives, crossings)} as in meters/events.py and meters/host_link_times.py.
    """
    result, axes = style.figure(len(steps), 1, style.PAGE, 0.9 + 1.75 * len(steps))
    longest = max(max(span[2] for span in computing) for computing, _, _ in steps.values())
    for (title, (computing, under_way, crossings)), axis in zip(steps.items(), axes[:, 0], strict=True):
        for name, start, end in computing:
            span_bar(axis, 0, start, end, COMPUTING[name], name)
        for name, start, wait, end, _ in under_way:
            span_bar(axis, 1, start, end, UNDER_WAY[name], f"{name} under way", 0.55)
            span_bar(axis, 0, wait, end, WAITING, STANDS, 0.45, edge="black")
        for each in crossings:
            lane, look, label = ((2, style.LOOKS["gradients"], "gradients leave") if each.leaves else
                                 (3, style.LOOKS["parameters"], "parameters return"))
            span_bar(axis, lane, each.start, each.end, look, label, 0.55)
            if each.had - each.asked > 1e-3:
                span_bar(axis, 0, each.asked, each.had, WAITING, STANDS, 0.45, edge="black")
        name_lanes(axis, range(len(LANES)), LANES)
        axis.set_xlim(0, 1000 * longest)
        axis.set_title(title, fontsize=10, loc="left")
    axes[-1][0].set_xlabel("ms")
    style.legend_outside(result, style.entries_of(axes[:, 0]), side="upper", columns=4)
    return result


def draw_elsewhere(rungs: dict[str, dict[str, float]]) -> Figure:
    """Bytes per parameter, a bar for each rung: on the device by category, upward; on the host, downward. The number
    above a bar counts the model states.

    Args: rungs, {name: {state: bytes per parameter on the device, "bus": of its buffers, "host": on the host}}.
    """
    result, ((axis,),) = style.figure(1, 1, 7.5, 4.0)
    places = range(len(rungs))
    tops = style.stacked_bars(axis, places, [
        (state, style.LOOKS.get(state, BUS), [held[state] for held in rungs.values()]) for state in (*STATES, "bus")
    ], width=0.6)
    below = [held["host"] for held in rungs.values()]
    style.bars(axis, places, [-size for size in below], HOST, "on the host", width=0.6)
    states = [sum(held[state] for state in STATES) for held in rungs.values()]
    style.words_above(axis, places, tops, [f"{size:.3g}" for size in states])
    style.words_above(axis, places, [-size for size in below], [f"{size:.3g}" if size else "" for size in below],
                      gap=-12)
    axis.axhline(0, color="black", linewidth=1)
    axis.set_ylim(-1.15 * max(below) - 1, 1.1 * max(tops))
    axis.set_yticks(range(-12, 17, 4), [abs(value) for value in range(-12, 17, 4)])
    axis.set_ylabel("bytes a parameter: host below, device above", fontsize=9)
    style.name_bars(axis, places, list(rungs))
    style.legend_outside(result, style.entries_of([axis]), side="upper")
    return result


def draw_slowed(slowed: dict[int, Sequence]) -> Figure:
    """How much longer a step takes with a slow bus, a line for each number of tokens.

    Args: slowed, {tokens of a rank: [(GB/s, step time divided by that with an infinitely fast bus)]}.
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 4.3)
    for (tokens, line), marker, colour in zip(slowed.items(), style.MARKERS, style.STAGE_COLOURS[1:], strict=False):
        speeds, times = zip(*line, strict=True)
        axis.plot(speeds, times, marker=marker, color=colour, label=f"{tokens:,} tokens a rank")
    axis.axhline(1, color="black", linewidth=1, label="a bus that takes no time")
    axis.set_xscale("log")
    axis.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("GB/s of a bus beside a GPU; here as much slower as this machine computes")
    axis.set_ylabel("times as long a step")
    axis.legend(fontsize=9, frameon=False)
    return result


def draw_turns(found: dict[str, Sequence]) -> Figure:
    """Which buffer is read into, worked on and written over time; the number in a box is the shard's.

    Args: found, {title: list of meters.turns_of_buffers.Turn}.
    """
    result, axes = style.figure(len(found), 1, style.PAGE, 0.8 + 1.4 * len(found))
    lanes, longest = ("read", "work", "write"), max(turn.end for turns in found.values() for turn in turns)
    for (title, turns), axis in zip(found.items(), axes[:, 0], strict=True):
        for turn in turns:
            colour = style.STAGE_COLOURS[1 + turn.buffer]
            span_bar(axis, lanes.index(turn.what), turn.start, turn.end, (colour, ""), f"buffer {turn.buffer}")
            if turn.end - turn.start > 0.02 * longest:
                axis.text(500 * (turn.start + turn.end), lanes.index(turn.what), str(turn.shard), fontsize=8,
                          ha="center", va="center")
        name_lanes(axis, range(len(lanes)), lanes)
        axis.set_xlim(0, 1000 * longest)
        axis.set_title(title, fontsize=10, loc="left")
    axes[-1][0].set_xlabel("ms")
    style.legend_outside(result, dict(sorted(style.entries_of(axes[:, 0]).items())), side="upper")
    return result
