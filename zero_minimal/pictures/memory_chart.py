"""Memory: what a rank holds at its peak, in the phases of a step, during a step, and with several bucket sizes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zero_minimal.paper.formulas import STATES
from zero_minimal.pictures import style


def memory_panel(axis: Axes, rows: list[dict], positions: Sequence[float], columns: int = 3) -> None:
    """Bytes at the peak, stacked by category, with the formula for the model states if there is one.

    rows: reports of runs, as `compare --json` writes them; a bar for each. columns: of the legend.
    """
    held = [row["memory"]["peak_by_category"] for row in rows]
    tops = style.stacked_bars(axis, positions, [
        (category, look, [own.get(category, 0) / 1e6 for own in held]) for category, look in style.LOOKS.items()
    ])
    if "theory" in rows[0]:
        theory = [sum(row["theory"].values()) / 1e6 for row in rows]
        style.formula_marks(axis, positions, theory, label="states, formula")
    style.words_above(axis, positions, tops, [f"{top:,.0f}" if top >= 10 else f"{top:.2g}" for top in tops])
    axis.set_title("Memory of a rank at its peak", fontsize=11)
    axis.set_ylabel("MB")
    style.legend(axis, columns, headroom=0.22)


# ------------------------------------------------------------------------------------------------------- who holds what


def draw_holdings(measured: dict[str, list], whole: dict[str, float]) -> Figure:
    """Who holds what: a panel for each stage and moment, a line for each rank, a column for each model state.

    Args:
        measured: {stage: [rank][moment], bytes by category}; the moments are before and after a step.
        whole: bytes of each undivided state. A cell is filled by the share that the rank holds. The length of a bar is
    measured; its position is that of the rank's shard.
    """
    stages, world_size = list(measured), len(next(iter(measured.values())))
    width, height = min(style.PAGE, 2.6 * len(stages) + 0.6), 2 * (0.36 * world_size + 0.75) + 0.5
    result, axes = style.figure(2, len(stages), width, height)
    for moment, words in enumerate(("before the step", "after the step")):
        for axis, stage in zip(axes[moment], stages, strict=True):
            for rank, moments in enumerate(measured[stage]):
                for column, state in enumerate(STATES):
                    held = moments[moment][state]
                    shard = rank / (world_size - 1) if world_size > 1 else 0.0
                    held_bar(axis, rank, column, held / whole[state], shard, state)
                    axis.text(column, rank, f"{held / 1e6:.1f}", ha="center", va="center", fontsize=9,
                              bbox=style.WHITE | {"pad": 0.8, "alpha": 0.85})
            style.rank_cells(axis, world_size, STATES, margin=0.5, named=axis is axes[moment][0])
            axis.set_title(f"{stage}, {words}", fontsize=10)
    result.supxlabel("Numbers are MB, measured. A cell is full where the rank holds all of it.", fontsize=9)
    return result


def held_bar(axis: Axes, rank: int, column: int, share: float, position: float, state: str) -> None:
    """A cell of the table of holdings, filled by `share`.

    position: of the filled part, from 0, the left end of the cell, to 1, the right end.
    """
    left, width = column - 0.45, 0.9
    share = min(share, 1.0)
    style.cell(axis, left + (1 - share) * width * position, rank - 0.4, share * width, 0.8, style.LOOKS[state])
    axis.add_patch(Rectangle((left, rank - 0.4), width, 0.8, facecolor="none", edgecolor="#777777", linewidth=0.7))


# ------------------------------------------------------------------------------------------ an all-reduce in two halves

KINDS: dict[str, tuple[style.Look, str, str]] = {  # kind: look, letter in a cell, label in the legend
    "own": (("#FBE3B0", ""), "g", "g: a rank's own gradient"),
    "mean": (style.LOOKS["gradients"], "ḡ", "ḡ: the mean of all ranks"),
    "new": (style.LOOKS["parameters"], "p′", "p′: the updated parameter"),
    "old": (("#EEEEEE", ""), "", "empty: an old parameter"),
}
SHORT = {"parameters": "p", "gradients": "g", "optimizer": "os"}


def draw_halves(passes: dict[str, dict[str, list]], held: dict[str, list]) -> Figure:
    """A line for each way to train. Left: what each rank's vector holds after each phase, cut into shards. Right: what
    a rank holds after the step.

    Args:
        passes: {way: {phase: [rank][shard], a kind of KINDS}}.
        held: {way: [rank]: {state: share of the whole}}.
    """
    columns = max(map(len, passes.values())) + 1
    result, axes = style.figure(len(passes), columns, style.PAGE, 2.35 * len(passes) + 0.3)
    for line, (way, phases) in zip(axes, passes.items(), strict=True):
        for axis, (phase, ranks) in zip(line, phases.items(), strict=False):
            cells(axis, ranks, named=axis is line[0])
            axis.set_title(phase, fontsize=10)
        line[0].set_ylabel(way, fontsize=11)
        world_size = len(held[way])
        for rank, shares in enumerate(held[way]):
            for column, state in enumerate(STATES):
                held_bar(line[-1], rank, column, shares[state], rank / (world_size - 1), state)
        style.rank_cells(line[-1], world_size, [SHORT[state] for state in STATES], 0.6, named=False)
        line[-1].set_title("held after the step", fontsize=10)
    result.supxlabel("   ".join(words for _, _, words in KINDS.values())
                     + "\nAt the right: parameters, gradients, optimizer state; a cell is full where a rank holds all.",
                     fontsize=9)
    return result


def cells(axis, ranks: list[list[str]], named: bool) -> None:
    """Draw a line for each rank, a cell for each shard."""
    for rank, shards in enumerate(ranks):
        for number, kind in enumerate(shards):
            look, letter, _ = KINDS[kind]
            style.cell(axis, number - 0.46, rank - 0.42, 0.92, 0.84, look)
            axis.text(number, rank, letter, ha="center", va="center", fontsize=9,
                      color="white" if kind == "new" else "black",
                      bbox=style.WHITE | {"facecolor": look[0], "pad": 0.8} if look[1] else None)
    style.rank_cells(axis, len(ranks), [""] * len(ranks[0]), 0.6, named)


# ------------------------------------------------------------------------------------------------------- through a step


def draw_memory_of_a_step(timelines: dict[str, list], timed: bool = True) -> Figure:
    """Memory during one step, stacked by category: a row of panels for each stage, a panel for each rank. With only one
    rank, the stages are side by side.

    Args: timelines {stage: [rank], a ledger's timeline}; timed: the axis shows time, otherwise moments in order.
    """
    world_size = len(next(iter(timelines.values())))
    lines, columns = (1, len(timelines)) if world_size == 1 else (len(timelines), world_size)
    result, axes = style.figure(lines, columns, min(style.PAGE, 1.2 + 4.4 * columns), 2.7 * lines + 0.4)
    panels = [(stage, rank) for stage in timelines for rank in range(world_size)]
    highest = max(moment.total for ranks in timelines.values() for timeline in ranks for moment in timeline)
    for axis, (stage, rank) in zip(axes.flat, panels, strict=True):
        step_panel(axis, timelines[stage][rank], timed)
        axis.set_ylim(0, 1.18 * highest / 1e6)
        axis.set_title(f"{stage}, rank {rank}", fontsize=11)
    for line in axes:
        line[0].set_ylabel("MB")
    for axis in axes[-1]:
        axis.set_xlabel("ms (the ledger slows the step)" if timed else "what takes and frees memory, in order →")
        if not timed:
            axis.set_xticks([])
    style.legend_outside(result, style.entries_of([axes[0][0]]))
    return result


def step_panel(axis: Axes, timeline: list, timed: bool) -> None:
    """One rank's memory during one step, with lines between its phases. timeline: a ledger's."""
    began = [number for number, moment in enumerate(timeline) if moment.seconds == 0.0]  # all that existed before
    timeline = timeline[began[-1] if began else 0 :]
    times = [1000 * moment.seconds if timed else number for number, moment in enumerate(timeline)]
    # leave out the ledger's scalars: a few bytes
    style.stacked_areas(axis, times, {
        category: [moment.bytes[category] / 1e6 for moment in timeline] for category in style.LOOKS})
    backward = [time for time, moment in zip(times, timeline, strict=True) if moment.what.endswith("backward")]
    for time, words, side in ((backward[0], "forward ", "right"), (backward[-1], " update", "left")):
        axis.axvline(time, color="black", linewidth=0.8, linestyle=":")
        axis.annotate(words, (time, 1.0), xycoords=("data", "axes fraction"), ha=side, va="top", fontsize=9)
    axis.annotate("backward", ((backward[0] + backward[-1]) / 2, 1.0), xycoords=("data", "axes fraction"), ha="center",
                  va="top", fontsize=9)
    top = max(moment.total for moment in timeline) / 1e6
    axis.axhline(top, color="black", linewidth=0.8)
    style.note(axis, f"highest: {top:.0f} MB", (times[0], top), (0, 2), bbox=style.WHITE)


# ----------------------------------------------------------------------------------------------------- sizes of buckets


def draw_bucket_sizes(rows: list[dict], shards: float, whole: float) -> Figure:
    """Peaks of gradients and scratch, against the bucket size.

    Args: rows, a dict for each size: bucket_bytes, gradients, buffers (bytes); shards and whole: bytes of gradients
    that a rank keeps at stage 2, and of all.
    """
    result, ((axis,),) = style.figure(1, 1, 7.0, 3.6)
    positions = range(len(rows))
    style.stacked_bars(axis, positions, [
        ("gradients", style.LOOKS["gradients"], [row["gradients"] / 1e6 for row in rows]),
        ("scratch of reductions", style.LOOKS["buffers"], [row["buffers"] / 1e6 for row in rows]),
    ], width=0.55)
    for height, words in ((shards, "its own shard, 4Ψ/N"), (whole, "whole gradients, 4Ψ")):
        axis.axhline(height / 1e6, color="black", linewidth=1.0, linestyle="--")
        style.note(axis, words, (1.0, height / 1e6), (0, 3), xycoords=("axes fraction", "data"), ha="right")
    axis.set_xlim(-0.5, len(rows) + 0.6)  # room for these labels
    axis.set_xticks(positions, [bucket_words(row["bucket_bytes"]) for row in rows])
    axis.set_xlabel("size of a bucket")
    axis.set_ylabel("MB at the peak")
    style.legend(axis, columns=2, headroom=0.2)
    return result


def bucket_words(size: int) -> str:
    """Bytes as text in KiB or MiB."""
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
