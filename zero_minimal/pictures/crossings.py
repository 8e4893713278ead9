"""Crossings: what a rank computes, what it sends to other ranks, and what crosses the bus to its host meanwhile."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from zero_minimal.pictures.style import GRID, LOOKS, PAGE, entries_of, figure, legend_outside
from zero_minimal.pictures.time_line import COMPUTING, UNDER_WAY, WAITING, span_bar

LANES = ("computes", "messages", "bus to the host", "bus from the host")
STANDS = "stands at a message or at the bus"


def draw_crossings(steps: dict[str, tuple]) -> Figure:
    """A panel for each step: four lanes of one rank, over one axis of time.

    Args: steps, {title: (computing, collectives, crossings)} as in meters/spans.py and meters/crossings.py.
    """
    result, axes = figure(len(steps), 1, PAGE, 0.9 + 1.75 * len(steps))
    longest = max(max(span[2] for span in computing) for computing, _, _ in steps.values())
    for (title, (computing, under_way, crossings)), axis in zip(steps.items(), axes[:, 0], strict=True):
        for name, start, end in computing:
            span_bar(axis, 0, start, end, COMPUTING[name], name)
        for name, start, wait, end, _ in under_way:
            span_bar(axis, 1, start, end, UNDER_WAY[name], f"{name} under way", 0.55)
            span_bar(axis, 0, wait, end, WAITING, STANDS, 0.45, edge="black")
        for each in crossings:
            lane, look, label = ((2, LOOKS["gradients"], "gradients leave") if each.leaves else
                                 (3, LOOKS["parameters"], "parameters return"))
            span_bar(axis, lane, each.start, each.end, look, label, 0.55)
            if each.had - each.asked > 1e-3:
                span_bar(axis, 0, each.asked, each.had, WAITING, STANDS, 0.45, edge="black")
        axis.set_yticks(range(len(LANES)), LANES)
        axis.set_ylim(len(LANES) - 0.4, -0.6)
        axis.set_xlim(0, 1000 * longest)
        axis.set_title(title, fontsize=10, loc="left")
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
        axis.grid(axis="x", **GRID)
    axes[-1][0].set_xlabel("ms")
    legend_outside(result, entries_of(axes[:, 0]), side="upper", columns=4)
    return result
