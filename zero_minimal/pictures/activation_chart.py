"""Activation chart: what checkpoints and P_a change in activations, one block's input on all ranks, and messages."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from zero_minimal.pictures import style
from zero_minimal.pictures.memory_chart import held_bar

PHASES = {  # phases of a block: the look of their messages, and their labels
    "forward": (style.SENT, "forward"),
    "again": (("#E7BFD6", "//"), "forward again, in backward"),
    "backward": (("#8C4A73", ""), "backward"),
    "gather": (("#F0E442", "xx"), "the input is gathered, for P_a"),
}


def draw_staircase(stairs: dict[str, dict]) -> Figure:
    """Activations during a step, a panel for each mode.

    Args: stairs, {mode: {"activations": bytes after each allocation and free, "backward": the index where it begins}}.
    """
    result, axes = style.figure(1, len(stairs), style.PAGE, 3.3)
    highest = max(max(one["activations"]) for one in stairs.values()) / 1e6
    for axis, (mode, one) in zip(axes[0], stairs.items(), strict=True):
        heights, begin = [count / 1e6 for count in one["activations"]], one["backward"]
        style.stacked_areas(axis, range(len(heights)), {"activations": heights})
        axis.axvline(begin, color="black", linewidth=0.8, linestyle=":")
        for words, side, shift in (("forward", "right", -3), ("backward", "left", 3)):
            style.note(axis, words, (begin, 1.0), (shift, 0), xycoords=("data", "axes fraction"), ha=side, va="top")
        kept = heights[begin - 1]
        axis.plot(begin - 1, kept, "kv", markersize=6)
        style.note(axis, f"kept: {kept:.1f} MB", (begin - 1, kept), (-6, 6), ha="right", bbox=style.WHITE)
        axis.set(xlim=(0, len(heights) - 1), ylim=(0, 1.18 * highest), xticks=[])
        axis.set_title(mode, fontsize=11)
        axis.set_xlabel("allocations and frees, in order →", fontsize=9)
    axes[0][0].set_ylabel("MB of activations")
    return result


def draw_copies(copies: dict[str, list], moments: Sequence[str], numbers: int) -> Figure:
    """One block's input: a panel for each mode, a line for each rank, a column for each moment.

    Args: copies, {mode: [rank][moment], [first, count] of the elements that this rank holds}; numbers: how many in all.
    """
    world_size = len(next(iter(copies.values())))
    result, axes = style.figure(1, len(copies), style.PAGE, 0.42 * world_size + 1.3)
    for axis, (mode, held) in zip(axes[0], copies.items(), strict=True):
        for rank, line in enumerate(held):
            for column, (first, count) in enumerate(line):
                rest = numbers - count
                held_bar(axis, rank, column, count / numbers, first / rest if rest else 0.0, "activations")
        style.rank_cells(axis, world_size, [words.replace(" in ", "\nin ") for words in moments], margin=0.5,
                   named=axis is axes[0][0])
        axis.set_title(mode, fontsize=11)
    return result


def draw_messages(messages: dict[str, list], size: int) -> Figure:
    """The messages of one block in a step, in order, a line for each mode. One square is what an all-gather of the
    block's input sends; an all-reduce sends two.

    Args: messages, {mode: [phase, name, bytes of the whole vector]}; size: bytes of the block's input.
    """
    result, ((axis,),) = style.figure(1, 1, style.PAGE, 0.62 * len(messages) + 1.1)
    longest = 0
    for line, calls in enumerate(messages.values()):
        place = 0
        for phase, name, count in calls:
            for _ in range(round(count / size * (2 if name == "all_reduce" else 1))):
                style.cell(axis, place, line - 0.36, 0.96, 0.72, PHASES[phase][0])
                place += 1
        axis.text(place + 0.2, line, f"{place}", va="center", fontsize=11)
        longest = max(longest, place)
    axis.set(xlim=(-0.1, longest + 0.8), ylim=(len(messages) - 0.4, -0.6), xticks=[])
    axis.set_yticks(range(len(messages)), messages)
    style.bare(axis)
    style.legend_outside(result, style.keys({words: look for look, words in PHASES.values()}))
    return result
