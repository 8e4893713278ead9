"""Buckets: how the gradients of bucket after bucket are computed, sent, and become shards."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_minimal.pictures.style import HATCHED, IDLE, LOOKS, PAGE, Look, bare, entries_of, figure, legend_outside

KINDS: dict[str, tuple[Look, str]] = {  # from the bottom of a lane to its top
    "shard": (("#6B3A00", ""), "own shard of the mean"),
    "sent": (LOOKS["gradients"], "whole, on its way to the other ranks"),
    "coming": (("#FBE3B0", ""), "whole, as backward makes it"),
    "idle": (IDLE, "kept, and nobody reads it"),  # in grey print it must not look like computed gradients
}
STEP = 1.65  # distance of lanes, in heights of a whole bucket: a bucket being sent takes more than one
AFTER = 0.06  # share of the pass: how much longer the picture shows what remains


def draw_buckets(stages: dict[str, dict]) -> Figure:
    """A panel for each stage, with a lane for each bucket. From left to right: one backward pass, gradient by gradient.
    The height of a lane is memory.

    Args: stages, {name: the record of meters/buckets.py}.
    """
    whole = max(max(record["padded"]) for record in stages.values())
    lanes = max(len(record["padded"]) for record in stages.values())
    result, axes = figure(1, len(stages), PAGE, 1.1 + 0.54 * lanes)
    for axis, (name, record) in zip(axes[0], stages.items(), strict=True):
        for number in range(len(record["padded"])):
            lane(axis, {kind: [count / whole for count in record[kind][number]] for kind in KINDS}, -STEP * number)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("one backward pass: the last layer's gradients come first →", fontsize=9)
        axis.set_xticks([])
        axis.margins(x=0.01)
        axis.set_yticks([0.4 - STEP * number for number in range(lanes)],
                        [f"bucket {number}" for number in range(lanes)] if axis is axes[0][0] else [])
        bare(axis)
        axis.set_ylim(-STEP * (lanes - 1) - 0.05, STEP - 0.05)
    legend_outside(result, entries_of([axes[0][0]]))
    return result


def lane(axis: Axes, heights: dict[str, list[float]], floor: float) -> None:
    """One bucket: its kinds of memory, stacked from `floor` up. heights: {kind: [moment]}."""
    moments = len(heights["shard"])
    times = [*range(moments), moments * (1 + AFTER)]
    bottom = [floor] * len(times)
    for kind, (look, words) in KINDS.items():
        values = [*heights[kind], heights[kind][-1]]
        top = [low + value for low, value in zip(bottom, values, strict=True)]
        axis.fill_between(times, bottom, top, step="post", facecolor=look[0], hatch=look[1], linewidth=0, label=words,
                          edgecolor=HATCHED.get(look, "white"))
        bottom = top
    axis.plot(times, bottom, color="#555555", linewidth=0.7, drawstyle="steps-post")
    axis.axhline(floor, color="#555555", linewidth=0.7)
