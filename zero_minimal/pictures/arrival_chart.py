"""Arrivals: what one rank does in backward, in order, and which messages are under way meanwhile."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.meters.events import Event, overlapped
from zero_minimal.meters.latency_probe import Cost
from zero_minimal.paper.quantities import size_text
from zero_minimal.pictures import style
from zero_minimal.pictures.latency_chart import measured_points

COMES, WAITS = style.LOOKS["gradients"], ("white", "")
UNDER_WAY = (style.SENT[0], "xx")


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
            style.flat_bars(axis, 0, 1, COMES, "a gradient comes", left=now)
            now += 1
        elif event.kind == "start":
            started[event.number] = now
        elif event.kind == "end":
            style.flat_bars(axis, 0, 1, WAITS, "waits", left=now, edge="black")
            now += 1
            begin = started[event.number]
            style.flat_bars(axis, 1, now - begin, UNDER_WAY, "an all-reduce, from its start to its end", 0.7, begin)


def draw_bucket_cost(points: Sequence[tuple[int, float]], whole: int, cost: Cost) -> Figure:
    """Seconds to all-reduce all gradients against the bucket size: measured, and by the fit.

    Args: points (bucket bytes, seconds); whole, bytes of all gradients; cost of one all-reduce: α, and β per byte.
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 4.0)
    sizes = [bytes for bytes, _ in points]
    fine = [min(sizes) * (max(sizes) / min(sizes)) ** (step / 100) for step in range(101)]
    axis.plot(fine, [whole / bytes * cost.alpha + whole * cost.beta for bytes in fine], label="predicted from α and β",
              **style.FORMULA)
    axis.plot(fine, [whole * cost.beta] * len(fine), color="black", linestyle=":", linewidth=1.2,
              label="β of all bytes: what no bucket can save")
    measured_points(axis, points)
    axis.axvline(cost.half, label=f"n½ = {size_text(cost.half, 2)}: half of the time is α", **style.DEVICE)
    axis.set(xlabel="size of a bucket",
             ylim=(10 ** math.floor(math.log10(whole * cost.beta)),
                   10 ** math.ceil(math.log10(max(seconds for _, seconds in points)))),
             ylabel=f"time to all-reduce {size_text(whole, 3)}")
    axis.legend(fontsize=9, framealpha=1, edgecolor="none")
    return result
