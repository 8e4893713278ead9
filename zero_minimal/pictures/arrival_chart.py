"""Arrivals: what one rank does in backward, in order, and which messages are under way meanwhile."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.meters.events import Event, overlapped
from zero_minimal.meters.latency_probe import Cost
from zero_minimal.paper.quantities import size_text
from zero_minimal.pictures.latency_chart import time_text
from zero_minimal.pictures.style import FORMULA, LOOKS, PAGE, SENT, entries_of, figure, flat_bars, legend_outside

COMES, WAITS = LOOKS["gradients"], ("white", "")
UNDER_WAY = (SENT[0], "xx")


def draw_arrivals(ways: dict[str, Sequence[Event]]) -> Figure:
    """Two lanes for each way: what the rank does, a slot for each gradient and each wait; and its messages.

    The slots show events, not time: all have the same width. Args: ways {name: Events of a pass}.
    """
    result, axes = figure(len(ways), 1, PAGE, 0.9 + 1.25 * len(ways))
    longest = max(_slots(events) for events in ways.values())
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
    legend_outside(result, entries_of(axes.flat), side="upper", columns=3)
    return result


def _slots(events: Sequence[Event]) -> int:
    return sum(event.kind in ("gradient", "end") for event in events)


def _lanes(axis: Axes, events: Sequence[Event]) -> None:
    now, started = 0, {}
    for event in events:
        if event.kind == "gradient":
            flat_bars(axis, 0, 1, COMES, "a gradient comes", 0.8, now, "white")
            now += 1
        elif event.kind == "start":
            started[event.number] = now
        elif event.kind == "end":
            flat_bars(axis, 0, 1, WAITS, "waits", 0.8, now, "black")
            now += 1
            begin = started[event.number]
            flat_bars(axis, 1, now - begin, UNDER_WAY, "an all-reduce, from its start to its end", 0.7, begin, "white")


def draw_bucket_cost(points: Sequence[tuple[int, float]], whole: int, cost: Cost) -> Figure:
    """Seconds to all-reduce all gradients against the bucket size: measured, and by the fit.

    Args: points (bucket bytes, seconds); whole, bytes of all gradients; cost of one all-reduce: α, and β per byte.
    """
    result, axes = figure(1, 1, PAGE, 4.0)
    axis, sizes = axes[0][0], [bytes for bytes, _ in points]
    fine = [min(sizes) * (max(sizes) / min(sizes)) ** (step / 100) for step in range(101)]
    axis.plot(fine, [whole / bytes * cost.alpha + whole * cost.beta for bytes in fine], label="predicted from α and β",
              **FORMULA)
    axis.plot(fine, [whole * cost.beta] * len(fine), color="black", linestyle=":", linewidth=1.2,
              label="β of all bytes: what no bucket can save")
    axis.plot(*zip(*points, strict=True), linestyle="", marker="o", markersize=8, markerfacecolor=SENT[0],
              markeredgecolor="black", label="measured")
    axis.axvline(cost.half, color="#D55E00", linewidth=1.8, linestyle="--",
                 label=f"n½ = {size_text(cost.half, 2)}: half of the time is α")
    axis.set(xscale="log", yscale="log", xlabel="size of a bucket",
             ylim=(10 ** math.floor(math.log10(whole * cost.beta)),
                   10 ** math.ceil(math.log10(max(seconds for _, seconds in points)))),
             ylabel=f"time to all-reduce {size_text(whole, 3)}")
    axis.xaxis.set_major_formatter(lambda bytes, _: size_text(bytes))
    axis.yaxis.set_major_formatter(lambda seconds, _: time_text(seconds))
    axis.minorticks_off()
    axis.legend(fontsize=9, framealpha=1, edgecolor="none")
    return result
