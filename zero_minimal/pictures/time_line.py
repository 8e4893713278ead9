"""Time line: when ranks compute, when their collectives are under way, and what crosses the bus to their hosts."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.meters.events import Collective, Event, Span, overlapped
from zero_minimal.pictures import style

COMPUTING = {"forward": ("#DDDDDD", ""), "backward": ("#AAAAAA", ""), "update": ("#777777", "")}
UNDER_WAY = {"reduce_scatter": ("#CC79A7", ""), "all_gather": ("#CC79A7", "//"), "all_reduce": ("#CC79A7", "xx"),
             "broadcast": ("#CC79A7", "..")}  # of the bucket order, once
WAITING = ("white", "")


def draw_time_line(ranks: list) -> Figure:
    """Two lanes for each rank: its own work and waits; and the collectives that are under way meanwhile.

    Args: ranks, [rank] (computing, collectives) as in meters/events.py.
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 1.3 + 0.95 * len(ranks))
    lanes = [(2.4 * rank, 2.4 * rank + 0.95) for rank in range(len(ranks))]  # positions, in rank's order
    for (own, messages), (computing, under_way) in zip(lanes, ranks, strict=True):
        rank_lanes(axis, own, messages, computing, under_way, 0.36, 0.2, "waits for a message, sums")
    name_lanes(axis, [position for pair in lanes for position in pair],
               [words for rank in range(len(ranks)) for words in (f"rank {rank} computes", "messages")])
    axis.set_xlabel("ms")
    style.legend_outside(result, style.entries_of([axis]), side="upper", columns=6)
    return result


def rank_lanes(axis: Axes, own: float, messages: float, computing: Sequence[Span], under_way: Sequence[Collective],
               height: float, apart: float, waits: str) -> None:
    """A rank's two lanes, at these positions. height: of a message's bar, which is `apart` above or below its lane."""
    for name, start, end in computing:
        span_bar(axis, own, start, end, COMPUTING[name], name)
    for index, each in enumerate(sorted(under_way, key=lambda each: each.start)):
        position = messages - apart + 2 * apart * (index % 2)  # neighbours may be under way at the same time
        span_bar(axis, position, each.start, each.end, UNDER_WAY[each.name], f"{each.name} under way", height)
        span_bar(axis, own, each.wait, each.end, WAITING, waits, edge="black")


def name_lanes(axis: Axes, positions: Sequence[float], names: Sequence[str]) -> None:
    """Name lanes from the top down, at the left."""
    axis.set_yticks(positions, names)
    axis.set_ylim(positions[-1] + 0.6, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.grid(axis="x", **style.GRID)


def span_bar(axis: Axes, position: float, start: float, end: float, look: style.Look, label: str, height: float = 0.8,
             edge: str = "white") -> None:
    """A bar on a time line, from start to end (seconds)."""
    style.flat_bars(axis, position, 1000 * (end - start), look, label, height, 1000 * start, edge)


# -------------------------------------------------------------------------------------------------- a rank and its host

LANES = ("computes", "messages", "bus to the host", "bus from the host")
STANDS = "stands at a message or at the bus"


def draw_crossings(steps: dict[str, tuple]) -> Figure:
    """A panel for each step: four lanes of one rank, on one time axis.

    Args: steps, {title: (computing, collectives, crossings)} as in meters/events.py and meters/crossings.py.
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


# ------------------------------------------------------------------------------------------------------ events in order


def draw_arrivals(ways: dict[str, Sequence[Event]]) -> Figure:
    """Two lanes for each way: what the rank does, a slot for each gradient and each wait; and its messages.

    The slots show events, not time: all have the same width. Args: ways {name: Events of a pass}.
    """
    result, axes = style.figure(len(ways), 1, style.PAGE, 0.9 + 1.25 * len(ways))
    longest = max(sum(event.kind in ("gradient", "end") for event in events) for events in ways.values())
    for axis, (name, events) in zip(axes.flat, ways.items(), strict=True):
        _lanes(axis, events)
        meanwhile, count = overlapped(events)
        axis.set_title(f"{name}: {meanwhile} of {count} gradients came while a message was under way", loc="left",
                       fontsize=10)
        axis.set(xlim=(-0.01 * longest, 1.01 * longest), ylim=(1.55, -0.55), xticks=[])
        axis.set_yticks([0, 1], ["the rank itself", "messages"])
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False)
    axes.flat[-1].set_xlabel("what happens, in order → (not time: each gradient and each wait is one slot)")
    style.legend_outside(result, style.entries_of(axes.flat), side="upper", columns=3)
    return result


def _lanes(axis: Axes, events: Sequence[Event]) -> None:
    now, started = 0, {}
    for event in events:
        if event.kind == "gradient":
            style.flat_bars(axis, 0, 1, style.LOOKS["gradients"], "a gradient comes", left=now)
            now += 1
        elif event.kind == "start":
            started[event.number] = now
        elif event.kind == "end":
            style.flat_bars(axis, 0, 1, WAITING, "waits", left=now, edge="black")
            now += 1
            begin = started[event.number]
            style.flat_bars(axis, 1, now - begin, UNDER_WAY["all_reduce"], "an all-reduce, from its start to its end",
                            0.7, begin)
