"""Buckets: how the gradients of bucket after bucket are computed, sent, and become shards; which rank wrote each
element of the parameters; the fate of updates too small for 16 bits."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero_minimal.pictures import style

KINDS: dict[str, tuple[style.Look, str]] = {  # from the bottom of a lane to its top
    "shard": (("#6B3A00", ""), "own shard of the mean"),
    "sent": (style.LOOKS["gradients"], "whole, on its way to the other ranks"),
    "coming": (("#FBE3B0", ""), "whole, as backward makes it"),
    "idle": (style.IDLE, "kept, and nobody reads it"),  # in grey print it must not look like computed gradients
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
    result, axes = style.figure(1, len(stages), style.PAGE, 1.1 + 0.54 * lanes)
    for axis, (name, record) in zip(axes[0], stages.items(), strict=True):
        for number in range(len(record["padded"])):
            lane(axis, {kind: [count / whole for count in record[kind][number]] for kind in KINDS}, -STEP * number)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("one backward pass: the last layer's gradients come first →", fontsize=9)
        axis.set_xticks([])
        axis.margins(x=0.01)
        axis.set_yticks([0.4 - STEP * number for number in range(lanes)],
                        [f"bucket {number}" for number in range(lanes)] if axis is axes[0][0] else [])
        style.bare(axis)
        axis.set_ylim(-STEP * (lanes - 1) - 0.05, STEP - 0.05)
    style.legend_outside(result, style.entries_of([axes[0][0]]))
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
                          edgecolor=style.HATCHED.get(look, "white"))
        bottom = top
    axis.plot(times, bottom, color="#555555", linewidth=0.7, drawstyle="steps-post")
    axis.axhline(floor, color="#555555", linewidth=0.7)


# ------------------------------------------------------------------------------------------------------- who wrote what

NOBODY, MANY = "#EEEEEE", "#000000"
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#777777")


def writers(masks: list[dict[str, list]]) -> dict[str, list]:
    """{parameter: [row][column] the rank that wrote it, -1 for none, -2 for several}. masks: [rank], {parameter:
    [row][column] whether it wrote}."""
    found = {}
    for name in masks[0]:
        wrote = np.array([one[name] for one in masks])  # [rank, row, column]
        count = wrote.sum(0)
        found[name] = np.where(count == 1, wrote.argmax(0), np.where(count, -2, -1)).tolist()
    return found


def draw_written(maps: dict[str, Sequence[Sequence[int]]], world_size: int, title: str) -> Figure:
    """A panel for each parameter, a cell for each element, coloured by the rank that wrote it.

    Args: maps, {parameter: [row][column], the number of the rank, -1 for none, -2 for several}.
    """
    colours = [MANY, NOBODY, *(RANKS[rank % len(RANKS)] for rank in range(world_size))]
    widths = [max(len(rows[0]), 6) for rows in maps.values()]
    heights = max(len(rows) for rows in maps.values())
    tall = min(6.0, 1.3 + style.PAGE * heights / (1.25 * sum(widths)))
    result = Figure(figsize=(style.PAGE, tall), layout="constrained")
    axes = result.subplots(1, len(maps), squeeze=False, width_ratios=widths)[0]
    for axis, (name, rows) in zip(axes, maps.items(), strict=True):
        axis.pcolormesh(list(rows), cmap=ListedColormap(colours), vmin=-2.5, vmax=world_size - 0.5,
                        edgecolors="white", linewidth=0.3)
        for place in [(row, column) for row, line in enumerate(rows) for column in range(len(line))
                      if starts(rows, row, column)]:
            rank = rows[place[0]][place[1]]
            axis.text(place[1] + 0.5, place[0] + 0.5, str(rank) if rank >= 0 else "", ha="center", va="center",
                      fontsize=9, color="white" if rank in (0, 2) else "black")
        axis.invert_yaxis()
        axis.set_aspect("equal")
        axis.set_title(name, fontsize=9)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    kinds = {f"rank {rank} wrote it": Patch(facecolor=RANKS[rank % len(RANKS)]) for rank in range(world_size)}
    found = {number for rows in maps.values() for line in rows for number in line}
    kinds |= {"nobody": Patch(facecolor=NOBODY)} if -1 in found else {}
    kinds |= {"several ranks": Patch(facecolor=MANY)} if -2 in found else {}
    style.legend_outside(result, kinds)
    result.suptitle(title, fontsize=11)
    return result


def starts(rows: Sequence[Sequence[int]], row: int, column: int) -> bool:
    """Whether a rank's run of elements begins here, in memory order."""
    if row == column == 0:
        return True
    before = rows[row][column - 1] if column else rows[row - 1][-1]
    return before != rows[row][column]


def draw_small_steps(runs: dict[str, list[float]], every: int = 1) -> Figure:
    """A parameter during many small updates, a line for each run. runs: {name: its value every `every` steps}."""
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 3.6)
    for number, (name, values) in enumerate(runs.items()):
        steps = [every * place for place in range(len(values))]
        axis.plot(steps, values, label=name, color=RANKS[number], marker=style.MARKERS[number], markersize=5,
                  markevery=max(1, len(values) // 8), linewidth=1.5)
    axis.set_xlabel("updates")
    axis.set_ylabel("the parameter")
    style.legend_outside(result, dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True)))
    return result
