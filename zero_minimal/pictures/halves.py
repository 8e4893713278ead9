"""Halves: an all-reduce in its two halves, and where the update stands: after them, or between them."""

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zero_minimal.pictures.memory_chart import held_bar
from zero_minimal.pictures.style import LOOKS, PAGE, Look, figure, rank_cells

KINDS: dict[str, tuple[Look, str, str]] = {  # kind: look, letter in a cell, words of the legend
    "own": (("#FBE3B0", ""), "g", "g: a rank's own gradient"),
    "mean": (LOOKS["gradients"], "ḡ", "ḡ: the mean of all ranks"),
    "new": (LOOKS["parameters"], "p′", "p′: the updated parameter"),
    "old": (("#EEEEEE", ""), "", "empty: an old parameter"),
}
STATES = ("parameters", "gradients", "optimizer")
SHORT = {"parameters": "p", "gradients": "g", "optimizer": "os"}


def draw_halves(passes: dict[str, dict[str, list]], held: dict[str, list]) -> Figure:
    """A line for each way to train. To the left what each rank's vector holds after one phase and the next, cut into
    shards; at the right end what a rank holds after the step.

    Args:
        passes: {way: {phase: [rank][shard], a kind of KINDS}}.
        held: {way: [rank]: {state: share of all of it}}.
    """
    columns = max(map(len, passes.values())) + 1
    result, axes = figure(len(passes), columns, PAGE, 2.35 * len(passes) + 0.3)
    for line, (way, phases) in zip(axes, passes.items(), strict=True):
        for axis, (phase, ranks) in zip(line, phases.items(), strict=False):
            cells(axis, ranks, named=axis is line[0])
            axis.set_title(phase, fontsize=10)
        line[0].set_ylabel(way, fontsize=11)
        world_size = len(held[way])
        for rank, shares in enumerate(held[way]):
            for column, state in enumerate(STATES):
                held_bar(line[-1], rank, column, shares[state], rank / (world_size - 1), state)
        rank_cells(line[-1], world_size, [SHORT[state] for state in STATES], 0.6, named=False)
        line[-1].set_title("held after the step", fontsize=10)
    result.supxlabel("   ".join(words for _, _, words in KINDS.values())
                     + "\nAt the right: parameters, gradients, optimizer state; a cell is full where a rank holds all.",
                     fontsize=9)
    return result


def cells(axis, ranks: list[list[str]], named: bool) -> None:
    """A line for each rank, a cell for each shard."""
    for rank, shards in enumerate(ranks):
        for number, kind in enumerate(shards):
            (colour, hatch), letter, _ = KINDS[kind]
            axis.add_patch(Rectangle((number - 0.46, rank - 0.42), 0.92, 0.84, facecolor=colour, hatch=hatch,
                                     edgecolor="white", linewidth=0))
            axis.text(number, rank, letter, ha="center", va="center", fontsize=9,
                      color="white" if kind == "new" else "black",
                      bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8} if hatch else None)
    rank_cells(axis, len(ranks), [""] * len(ranks[0]), 0.6, named)
