"""Time line: when ranks compute, and when their collectives are under way."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.pictures.style import GRID, PAGE, Look, entries_of, figure, flat_bars, legend_outside

COMPUTING = {"forward": ("#DDDDDD", ""), "backward": ("#AAAAAA", ""), "update": ("#777777", "")}
UNDER_WAY = {"reduce_scatter": ("#CC79A7", ""), "all_gather": ("#CC79A7", "//"), "all_reduce": ("#CC79A7", "xx"),
             "broadcast": ("#CC79A7", "..")}  # of the bucket order, once
WAITING = ("white", "")


def draw_time_line(ranks: list) -> Figure:
    """Two lanes for each rank: its own work and waits; and the collectives that are under way meanwhile.

    Args: ranks, [rank] (computing, collectives) as in meters/events.py.
    """
    result, ((axis,),) = figure(1, 1, PAGE, 1.3 + 0.95 * len(ranks))
    lanes = [(2.4 * rank, 2.4 * rank + 0.95) for rank in range(len(ranks))]  # positions, in rank's order
    for (own, messages), (computing, under_way) in zip(lanes, ranks, strict=True):
        for name, start, end in computing:
            span_bar(axis, own, start, end, COMPUTING[name], name)
        for index, each in enumerate(sorted(under_way, key=lambda each: each.start)):
            position = messages - 0.2 + 0.4 * (index % 2)  # neighbours may be under way at the same time
            span_bar(axis, position, each.start, each.end, UNDER_WAY[each.name], f"{each.name} under way", 0.36)
            span_bar(axis, own, each.wait, each.end, WAITING, "waits for a message, sums", edge="black")
    name_lanes(axis, [position for pair in lanes for position in pair],
               [words for rank in range(len(ranks)) for words in (f"rank {rank} computes", "messages")])
    axis.set_xlabel("ms")
    legend_outside(result, entries_of([axis]), side="upper", columns=6)
    return result


def name_lanes(axis: Axes, positions: Sequence[float], names: Sequence[str]) -> None:
    """Name lanes from the top down, at the left."""
    axis.set_yticks(positions, names)
    axis.set_ylim(positions[-1] + 0.6, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.grid(axis="x", **GRID)


def span_bar(axis: Axes, position: float, start: float, end: float, look: Look, label: str, height: float = 0.8,
             edge: str = "white") -> None:
    """A bar on a time line, from start to end (seconds)."""
    flat_bars(axis, position, 1000 * (end - start), look, label, height, 1000 * start, edge)
