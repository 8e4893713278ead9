"""Latency: the time of a message against its size, and the two straight lines that it approaches; and of buckets."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.meters.latency_probe import Cost
from zero_minimal.paper.quantities import seconds_text, size_text
from zero_minimal.pictures import style

PIECE = {"color": "black", "linewidth": 1.2}


def draw_latency(points: Sequence[tuple[int, float]], alpha: float, beta: float) -> Figure:
    """Times of messages against their sizes, on logarithmic axes, with the fitted line α + β·bytes.

    Args: points (bytes, seconds); alpha, seconds before the first byte; beta, seconds per byte
        (meters/latency_probe.py).
    """
    cost = Cost(alpha, beta)
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 4.2)
    sizes = [bytes for bytes, _ in points]
    first, last = min(sizes) / 2, max(sizes) * 2
    fine = [first * (last / first) ** (step / 200) for step in range(201)]
    whole = [cost.seconds(bytes) for bytes in fine]
    shortest, longest = min(seconds for _, seconds in points), max(seconds for _, seconds in points)
    axis.plot(fine, whole, label="α + β·bytes", **style.FORMULA)
    axis.plot(fine, [alpha] * len(fine), label=f"α = {time_text(alpha)} before the first byte", linestyle="--", **PIECE)
    axis.plot(fine, [beta * bytes for bytes in fine], linestyle=":", **PIECE,
              label=f"β·bytes, {size_text(1 / beta, 2)} a second" if beta else "β = 0: bytes cost nothing")
    measured_points(axis, points)
    axis.set(xlim=(first, last), ylim=(shortest / 4, 3 * longest), xlabel="size of the message", ylabel="time, one way")
    if first < cost.half < last:  # where the two lines cross
        axis.axvline(cost.half, **style.DEVICE)
        words = f"n½ = {size_text(cost.half, 2)}: half of the time is α"
        style.note(axis, words, (cost.half, axis.get_ylim()[0]), (6, 8))
    axis.legend(fontsize=9, framealpha=1, edgecolor="none", loc="upper left")
    return result


def measured_points(axis: Axes, points: Sequence[tuple[int, float]]) -> None:
    """Points (bytes, seconds) on logarithmic axes, which name powers of ten: 1 KB, 100 µs."""
    axis.plot(*zip(*points, strict=True), linestyle="", marker="o", markersize=8, markerfacecolor=style.SENT[0],
              markeredgecolor="black", label="measured")
    axis.set(xscale="log", yscale="log")
    axis.xaxis.set_major_formatter(lambda bytes, _: size_text(bytes))
    axis.yaxis.set_major_formatter(lambda seconds, _: time_text(seconds))
    axis.minorticks_off()


def time_text(seconds: float) -> str:
    """A message's time as text: 35.2 µs, 1.2 ms."""
    return seconds_text(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


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
