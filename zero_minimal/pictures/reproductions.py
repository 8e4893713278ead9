"""Reproductions: the paper's tables and figures, drawn from the results of `python -m zero_minimal reproduce`
(programs/reproduce.py)."""

from matplotlib.figure import Figure

from zero_minimal.paper.formulas import STATES
from zero_minimal.paper.published import STAGES
from zero_minimal.pictures import style

STAGE_NAMES = ("data parallel", *STAGES)
PAPER = {"color": "black", "linestyle": "none", "marker": "x", "markersize": 9, "markeredgewidth": 1.6}


def draw_table1(result: dict) -> Figure:
    """Model states against N, for each size: the formula as lines, the code's as markers, the paper's as crosses."""
    models = list(dict.fromkeys(cell["model"] for cell in result["cells"]))
    picture, axes = style.figure(1, len(models), style.PAGE, 4.2)
    for axis, model in zip(axes[0], models, strict=True):
        cells = [cell for cell in result["cells"] if cell["model"] == model]
        for stage in (1, 2, 3):
            own = [cell for cell in cells if cell["stage"] == stage]
            ranks, look = [cell["ranks"] for cell in own], {"color": style.STAGE_COLOURS[stage]}
            axis.plot(ranks, [cell["formula_gb"] for cell in own], linewidth=1.2, **look)
            axis.plot(ranks, [cell["code_gb"] for cell in own], label=f"stage {stage}, code", linestyle="none",
                      marker=style.MARKERS[stage], markersize=9, **look)
            label = "the paper" if stage == 3 else None
            axis.plot(ranks, [float(cell["paper"]) for cell in own], label=label, **PAPER)
        style.log_ranks(axis, sorted({cell["ranks"] for cell in cells}))
        axis.axhline(32, label="32 GB", **style.DEVICE)
        axis.set_title(model)
        axis.set_ylabel("GB of model states on a device")
    axes[0][0].legend(fontsize=9, frameon=False, loc="lower left")
    picture.suptitle("Table 1: the stages' code on fake tensors; lines are the formulas, crosses the paper's numbers",
                     fontsize=14)
    return picture


def draw_figure1(result: dict) -> Figure:
    """Bars of the model states that the code holds, by kind; a line at the paper's number."""
    picture, ((axis,),) = style.figure(1, 1, 8.0, 5.0)
    rows, positions = result["bars"], range(len(result["bars"]))
    tops = style.stacked_bars(axis, positions, [
        (f"{state}, code", style.LOOKS[state], [row["states"][state] / 1e9 for row in rows]) for state in STATES
    ])
    style.formula_marks(axis, positions, [float(row["paper"]) for row in rows], label="the paper")
    style.words_above(axis, positions, tops, [f"{top:.4g} GB" for top in tops], gap=4)
    style.name_bars(axis, positions, STAGE_NAMES)
    axis.set_ylabel("GB on a device")
    axis.set_title("Figure 1: 7.5 billion parameters on 64 ranks, as the stages' code holds them")
    style.legend(axis, columns=2, headroom=0.16)
    return picture


def draw_table2(result: dict) -> Figure:
    """The largest model for each MP and stage: the code's as bars, the paper's theory and measurements."""
    picture, ((axis,),) = style.figure(1, 1, style.PAGE, 5.0)
    cells = result["cells"]
    groups = sorted({cell["model_parallel"] for cell in cells})
    for stage in sorted({cell["stage"] for cell in cells}):
        own = [cell for cell in cells if cell["stage"] == stage]
        positions = [groups.index(cell["model_parallel"]) + 0.2 * (stage - 1.5) for cell in own]
        look, label = (style.STAGE_COLOURS[stage], ""), f"{STAGE_NAMES[stage]}, code"
        style.bars(axis, positions, [cell["code"] / 1e9 for cell in own], look, label, 0.18)
        style.formula_marks(axis, positions, [cell["paper"] for cell in own], 0.2,
                            None if stage else "the paper, theory")
        measured = [(position, cell["paper_measured"]) for position, cell in zip(positions, own, strict=True)
                    if cell["paper_measured"]]
        if measured:
            axis.plot(*zip(*measured, strict=True), label=None if stage else "the paper, measured", **PAPER)
    axis.set_yscale("log")
    axis.set_ylim(1, 10_000)
    axis.yaxis.set_major_formatter("{x:,g}")
    style.name_bars(axis, range(len(groups)), [f"MP {group}" for group in groups])
    axis.set_ylabel("billions of parameters")
    axis.set_title("Table 2: the largest model whose states fit into 32 GB, 64 data-parallel ranks")
    axis.legend(fontsize=9, frameon=False, ncols=3, loc="upper left")
    return picture


def draw_figure2(result: dict) -> Figure:
    """The paper's speeds, and those expected from the links by arithmetic."""
    picture, axes = style.figure(1, 2, style.PAGE, 4.6)
    rows, positions = result["rows"], range(len(result["rows"]))
    for axis, who, title, look in (
        (axes[0][0], "zero", "ZeRO-100B, 400 GPUs", ("#0072B2", "")),
        (axes[0][1], "baseline", "Megatron, the baseline", style.PLAIN),
    ):
        style.bars(axis, positions, [row[f"{who}_paper"] for row in rows], look, "quoted from the paper")
        axis.plot(positions, [row[f"{who}_estimate"] for row in rows], color="black", marker="_", markersize=22,
                  markeredgewidth=2.2, linestyle="none", label="arithmetic: peak of the GPU, one link")
        names = [f"{row['name_billions']:g}B\nMP {row[f'{who}_model_parallel']}" for row in rows]
        style.name_bars(axis, positions, names)
        axis.set_yscale("log")
        axis.set_ylim(1, 400)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_ylabel("TFLOP/s a GPU")
        axis.set_title(title)
        axis.legend(fontsize=9, frameon=False, loc="upper right")
    picture.suptitle("Figure 2: speeds are the paper's; no speed is reproduced here", fontsize=14)
    return picture


def draw_figure7(result: dict) -> Figure:
    """C1 to C5: what the code allocates, by category; what an allocator would cache; and the paper's bars."""
    models = list(dict.fromkeys(bar["model"] for bar in result["bars"]))
    picture, axes = style.figure(1, len(models), style.PAGE, 4.8)
    for axis, model in zip(axes[0], models, strict=True):
        own = [bar for bar in result["bars"] if bar["model"] == model]
        positions = range(len(own))
        style.stacked_bars(axis, positions, [
            (category, style.LOOKS[category], [bar["by_category_gb"][category] for bar in own])
            for category in (*STATES, "activations", "buffers")
        ], width=0.6)
        axis.plot(positions, [bar["cached_gb"] for bar in own], color="#D55E00", marker="D", markersize=7,
                  linestyle="none", label="cached by the model of the allocator")
        printed = [(position, bar["paper_cached_gb"]) for position, bar in zip(positions, own, strict=True)
                   if bar["paper_cached_gb"]]
        style.formula_marks(axis, *zip(*printed, strict=True), 0.8, "cached in the paper")
        axis.axhline(32, label="32 GB", **style.DEVICE)
        style.name_bars(axis, positions, [bar["config"] for bar in own])
        axis.set_ylabel("GB on a device")
        axis.set_title(f"{model}, MP 16")
        style.legend(axis, columns=2, headroom=0.22)
    picture.suptitle("Figure 7: the code of C1 to C5 on fake tensors, beside the paper's bars", fontsize=14)
    return picture
