"""Plots: one look for every picture of the project.

A colour has one meaning everywhere. The palette is that of Okabe and Ito, which colour-blind readers can tell apart;
hatches and markers say the same again, for print in grey.
"""

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

CATEGORIES = {  # of memory, from the bottom of a stack to its top: colour, hatch
    "parameters": ("#0072B2", ""),
    "gradients": ("#E69F00", "//"),
    "optimizer": ("#009E73", ".."),
    "activations": ("#56B4E9", "\\\\"),
    "buffers": ("#F0E442", "xx"),
    "other": ("#BBBBBB", ""),
}
SENT, ON_THE_WIRE = ("#CC79A7", ""), ("#D55E00", "//")  # traffic: as a ring sends, and as the loopback saw it
SPEED = ("#777777", "")
FORMULA = {"color": "black", "linewidth": 2.2, "solid_capstyle": "butt"}
MARKERS = "osD^vPX*"  # one for each run, where runs share an axis


def figure(rows: int, columns: int, width: float, height: float):
    """A Figure and its axes, a list of rows; sizes in inches."""
    result = Figure(figsize=(width, height), layout="constrained")
    axes = result.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
    return result, axes


def save(result: Figure, path: str | Path) -> None:
    """Write a picture; the suffix chooses the format."""
    result.savefig(path, dpi=160)


def bars(axis: Axes, positions, heights, look, label: str | None = None, width: float = 0.7, bottom=None):
    """Bars in the look (colour, hatch) of their meaning."""
    colour, hatch = look
    return axis.bar(positions, heights, width, bottom=bottom, label=label,
                    color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)


def formula_marks(axis: Axes, positions, heights, width: float = 0.86, label: str = "formula of the paper") -> None:
    """A black line across each bar, at the height that the paper gives."""
    for position, height in zip(positions, heights, strict=True):
        axis.plot([position - width / 2, position + width / 2], [height, height], label=label, **FORMULA)
        label = None  # one entry in the legend is enough


def legend(axis: Axes, columns: int, headroom: float) -> None:
    """A legend above the data, marks after bars; `headroom` is the share of the axis that is kept free for it."""
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, bottom + (top - bottom) / (1 - headroom))
    entries = zip(*axis.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(entries, key=lambda entry: isinstance(entry[0], Line2D)), strict=True)
    axis.legend(handles, labels, fontsize=9, frameon=False, ncols=columns, loc="upper left", borderaxespad=0.2)


# ------------------------------------------------------------------------------------------------------------ compare


def compare(rows: list[dict], note: str) -> Figure:
    """The runs of `python -m zero_minimal compare`: memory, traffic, speed and losses, with a note on the losses."""
    result, axes = figure(2, 2, 12.0, 8.4)
    places = [index if row["stage"] is not None else index + 0.4 for index, row in enumerate(rows)]  # peers stand apart
    memory_panel(axes[0][0], rows, places)
    traffic_panel(axes[0][1], rows, places)
    speed_panel(axes[1][0], rows, places)
    loss_panel(axes[1][1], rows, note)
    for axis in (axes[0][0], axes[0][1], axes[1][0]):
        axis.set_xticks(places, [row["name"] for row in rows])
        axis.tick_params(axis="x", length=0)
        axis.yaxis.set_major_formatter("{x:,g}")
    first = rows[0]
    result.suptitle(f"GPT of {first['parameters']:,} parameters, {first['dtype']}, "
                    f"N = {first['ranks']} ranks on {first['device']}", fontsize=14)
    return result


def memory_panel(axis: Axes, rows: list[dict], places: list[float]) -> None:
    """Bytes at the highest moment, stacked by category, with the formula for the model states where there is one."""
    bottom = [0.0] * len(rows)
    for category, look in CATEGORIES.items():
        heights = [row["memory"]["peak_by_category"].get(category, 0) / 1e6 for row in rows]
        bars(axis, places, heights, look, category, bottom=bottom)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    if "theory" in rows[0]:
        formula_marks(axis, places, [sum(row["theory"].values()) / 1e6 for row in rows], label="formula, model states")
    for place, height in zip(places, bottom, strict=True):
        words = f"{height:,.0f}" if height >= 10 else f"{height:.2g}"
        axis.annotate(words, (place, height), (0, 3), textcoords="offset points", ha="center")
    axis.set_title("Memory of a rank at its peak")
    axis.set_ylabel("MB")
    legend(axis, columns=3, headroom=0.22)


def traffic_panel(axis: Axes, rows: list[dict], places: list[float]) -> None:
    """Bytes that a rank sends in a step: counted, measured, and by the formula."""
    sent = [row["traffic"]["sent_bytes"] / 1e6 for row in rows]
    wire = [(row["traffic"]["wire_bytes"] or 0) / 1e6 for row in rows]
    bars(axis, [place - 0.18 for place in places], sent, SENT, "sent, as a ring sends", width=0.34)
    bars(axis, [place + 0.18 for place in places], wire, ON_THE_WIRE, "crossed the loopback", width=0.34)
    formula_marks(axis, places, [row["traffic"]["theory_bytes"] / 1e6 for row in rows], label="formula")
    axis.set_title("Traffic of a rank in a step")
    axis.set_ylabel("MB")
    legend(axis, columns=3, headroom=0.12)


def speed_panel(axis: Axes, rows: list[dict], places: list[float]) -> None:
    """Tokens that all ranks together learn from in a second."""
    speeds = [row["tokens_per_second"] for row in rows]
    axis.bar_label(bars(axis, places, speeds, SPEED), [f"{speed:,.0f}" for speed in speeds], padding=2)
    axis.margins(y=0.1)
    axis.set_title("Throughput of all ranks together")
    axis.set_ylabel("tokens per second")


def loss_panel(axis: Axes, rows: list[dict], note: str) -> None:
    """All losses in one place: curves that lie on one another show as one curve, with the markers of all."""
    steps = len(rows[0]["losses"])
    every = max(1, steps // 6)
    for index, row in enumerate(rows):
        marked = list(range(index * every // len(rows), steps, every))  # each run marks steps of its own
        axis.plot(range(steps), row["losses"], color="#777777", linewidth=0.9, marker=MARKERS[index], markersize=7,
                  markevery=marked, markerfacecolor="white", markeredgecolor="black", label=row["name"])
    axis.set_title("Training loss, all runs in one place")
    axis.set_xlabel("step")
    axis.set_ylabel("nats a byte")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axis, columns=3, headroom=0.15 + 0.05 * len(note.splitlines()))
    axis.text(0.01, 0.85, note, transform=axis.transAxes, ha="left", va="top", fontsize=9)


# ------------------------------------------------------------------------------------------------------------ configs


def configs(rows: list[dict]) -> Figure:
    """C1 to C5 of `compare --configs`: memory, throughput and, with a budget, the largest model that fits."""
    has_budget = "largest_layers" in rows[0]
    result, axes = figure(1, 3 if has_budget else 2, 15.0 if has_budget else 11.0, 4.6)
    places = list(range(len(rows)))
    memory_panel(axes[0][0], rows, places)
    speed_panel(axes[0][1], rows, places)
    if has_budget:
        blocks = [row["largest_layers"] for row in rows]
        axes[0][2].bar_label(bars(axes[0][2], places, blocks, SPEED), [str(count) for count in blocks], padding=2)
        axes[0][2].set_title(f"Largest model in {rows[0]['budget_bytes'] / 1e6:,.0f} MB a rank")
        axes[0][2].set_ylabel("blocks")
        axes[0][2].margins(y=0.1)
    for axis in axes[0]:
        axis.set_xticks(places, [row["name"] for row in rows])
        axis.tick_params(axis="x", length=0)
    first = rows[0]
    data_parallel = first["ranks"] // first["model_parallel"]
    result.suptitle(f"C1 to C5 of the paper's Table 3, D × M = {data_parallel} × {first['model_parallel']}, "
                    f"{first['dtype']}", fontsize=14)
    return result


# --------------------------------------------------------------------------------------------------------------- plan

STAGE_COLOURS = ("#777777", "#E69F00", "#009E73", "#0072B2")  # stages 0 to 3, where each is a line
DEVICE = {"color": "#D55E00", "linewidth": 1.8, "linestyle": "--"}  # what a device holds


def plan(told: dict) -> Figure:
    """The figures of `python -m zero_minimal plan`: memory on a device by stage, and how it falls with the ranks."""
    result, axes = figure(1, 2, 13.0, 5.0)
    by_stage, by_ranks = axes[0]
    rows, device = told["rows"], told["device_bytes"] / 1e9
    bottom = [0.0] * len(rows)
    looks = {name: CATEGORIES[name] for name in ("parameters", "gradients", "optimizer", "activations")}
    for category, look in (looks | {"units": CATEGORIES["buffers"]}).items():
        heights = [row[category] / 1e9 for row in rows]
        name = "whole units" if category == "units" else category
        bars(by_stage, range(len(rows)), heights, look, name, bottom=bottom)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, height in enumerate(bottom):
        by_stage.annotate(f"{height:,.4g}", (place, height), (0, 3), textcoords="offset points", ha="center",
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    by_stage.axhline(device, label=f"a device: {device:,.4g} GB", **DEVICE)
    by_stage.set_xticks(range(len(rows)), [f"stage {row['stage']}\n{row['name']}" for row in rows])
    by_stage.tick_params(axis="x", length=0)
    by_stage.set_ylabel("GB on a device")
    by_stage.set_title(f"on {told['ranks']:,} ranks")
    legend(by_stage, columns=3, headroom=0.16)
    counts = [2**power for power in range(11)]
    for row in rows:
        whole = sum(row[state] for state in row["whole"]) / 1e9
        shared = (row["states"] / 1e9 - whole) * told["ranks"] / told["model_parallel"]
        by_ranks.plot(counts, [whole + shared / count for count in counts], color=STAGE_COLOURS[row["stage"]],
                      marker=MARKERS[row["stage"]], markersize=5, label=f"stage {row['stage']}")
    by_ranks.axhline(device, **DEVICE)
    by_ranks.set_xscale("log", base=2)
    by_ranks.set_yscale("log")
    by_ranks.yaxis.set_major_formatter("{x:,g}")
    by_ranks.set_xticks(counts, counts)
    by_ranks.set_xlabel("data-parallel ranks N")
    by_ranks.set_ylabel("GB on a device")
    by_ranks.set_title("model states alone, on more or fewer ranks")
    by_ranks.legend(fontsize=9, frameon=False)
    result.suptitle(f"{told['parameters'] / 1e9:,.4g} billion parameters, {told['dtype']}, by formula",
                    fontsize=14)
    return result


# ----------------------------------------------------------------------------------------------------------- simulate


def simulation(run) -> Figure:
    """Memory of a simulated rank from building the model to the last step, by category; the highest moment marked."""
    result, axes = figure(1, 1, 12.0, 5.2)
    axis, places = axes[0][0], worth_drawing(run.timeline)
    levels = [[run.timeline[place].bytes[name] / 1e9 for place in places] for name in CATEGORIES if name != "other"]
    looks = [look for name, look in CATEGORIES.items() if name != "other"]
    areas = axis.stackplot(places, levels, colors=[colour for colour, _ in looks], step="post",
                           labels=[name for name in CATEGORIES if name != "other"])
    for area, (_, hatch) in zip(areas, looks, strict=True):
        area.set(hatch=hatch, edgecolor="white", linewidth=0)
    totals = [sum(level) for level in zip(*levels, strict=True)]
    highest = max(range(len(places)), key=totals.__getitem__)
    axis.set_ylim(0, 1.3 * totals[highest])
    for number, (name, begin) in enumerate(run.phases):
        place = next((place for place in places if run.timeline[place].seconds > begin), places[-1])
        axis.axvline(place, color="black", linewidth=0.7, linestyle=":")
        is_last, height = number == len(run.phases) - 1, (1.08, 1.15)[number % 2] * totals[highest]
        axis.annotate(name, (place, height), (-3 if is_last else 3, 0), textcoords="offset points", fontsize=9,
                      ha="right" if is_last else "left")
    axis.plot(places[highest], totals[highest], color="black", marker="v", markersize=7, linestyle="none",
              label=f"highest: {totals[highest]:,.4g} GB")
    axis.set_xlim(places[0], places[-1])
    axis.set_xlabel("allocations and frees, in order")
    axis.set_ylabel("GB")
    axis.legend(fontsize=9, frameon=False, ncols=6, loc="upper left", borderaxespad=0.2)
    told = run.report
    axis.set_title(f"{told['name']}: rank {told['rank']} of {told['ranks']:,}, {told['parameters'] / 1e9:,.4g} billion "
                   f"parameters in {told['dtype']}, simulated")
    return result


def worth_drawing(timeline: list, most: int = 1200) -> list[int]:
    """Places in a timeline, at most so many: the highest moment of each stretch."""
    length = -(-len(timeline) // most)
    stretches = (range(start, min(start + length, len(timeline))) for start in range(0, len(timeline), length))
    return [max(stretch, key=lambda place: timeline[place].total) for stretch in stretches]


# ---------------------------------------------------------------------------------------------------------- reproduce

PAPER = {"color": "black", "linestyle": "none", "marker": "x", "markersize": 9, "markeredgewidth": 1.6}


def table1(result: dict) -> Figure:
    """Model states over N, for each size: lines of the formula, the code's as markers, the paper's as crosses."""
    models = list(dict.fromkeys(cell["model"] for cell in result["cells"]))
    picture, axes = figure(1, len(models), 5.0 * len(models), 4.8)
    for axis, model in zip(axes[0], models, strict=True):
        cells = [cell for cell in result["cells"] if cell["model"] == model]
        for stage in (1, 2, 3):
            own = [cell for cell in cells if cell["stage"] == stage]
            places, look = [cell["ranks"] for cell in own], {"color": STAGE_COLOURS[stage]}
            axis.plot(places, [cell["formula_gb"] for cell in own], linewidth=1.2, **look)
            axis.plot(places, [cell["code_gb"] for cell in own], linestyle="none", marker=MARKERS[stage], markersize=9,
                      label=f"stage {stage}, code", **look)
            label = "the paper" if stage == 3 else None
            axis.plot(places, [float(cell["paper"]) for cell in own], label=label, **PAPER)
        log_ranks(axis, sorted({cell["ranks"] for cell in cells}))
        axis.axhline(32, label="32 GB", **DEVICE)
        axis.set_title(model)
        axis.set_ylabel("GB of model states on a device")
    axes[0][0].legend(fontsize=9, frameon=False, loc="lower left")
    picture.suptitle("Table 1: the stages' code on fake tensors; lines are the formulas, crosses the paper's numbers",
                     fontsize=14)
    return picture


def log_ranks(axis: Axes, counts: list[int]) -> None:
    """Logarithmic axes: ranks to the right, GB upwards."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xticks(counts, counts)
    axis.set_xlabel("data-parallel ranks N")


def figure1(result: dict) -> Figure:
    """Bars of the model states by kind, as the code holds them; a line at the paper's number."""
    picture, axes = figure(1, 1, 8.0, 5.0)
    axis, rows = axes[0][0], result["bars"]
    bottom = [0.0] * len(rows)
    for state in ("parameters", "gradients", "optimizer"):
        heights = [row["states"][state] / 1e9 for row in rows]
        bars(axis, range(len(rows)), heights, CATEGORIES[state], f"{state}, code", bottom=bottom)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    formula_marks(axis, range(len(rows)), [float(row["paper"]) for row in rows], label="the paper")
    for place, height in enumerate(bottom):
        axis.annotate(f"{height:.4g} GB", (place, height), (0, 4), textcoords="offset points", ha="center")
    axis.set_xticks(range(len(rows)), ["data parallel", "P_os", "P_os+g", "P_os+g+p"])
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("GB on a device")
    axis.set_title("Figure 1: 7.5 billion parameters on 64 ranks, as the stages' code holds them")
    legend(axis, columns=2, headroom=0.16)
    return picture


def table2(result: dict) -> Figure:
    """The largest model for each MP and stage: the code's bars, the paper's theory and what it measured."""
    picture, axes = figure(1, 1, 10.0, 5.0)
    axis, cells = axes[0][0], result["cells"]
    groups = sorted({cell["model_parallel"] for cell in cells})
    for stage in sorted({cell["stage"] for cell in cells}):
        own = [cell for cell in cells if cell["stage"] == stage]
        places = [groups.index(cell["model_parallel"]) + 0.2 * (stage - 1.5) for cell in own]
        label = ("data parallel", "P_os", "P_os+g", "P_os+g+p")[stage]
        bars(axis, places, [cell["code"] / 1e9 for cell in own], (STAGE_COLOURS[stage], ""), f"{label}, code", 0.18)
        formula_marks(axis, places, [cell["paper"] for cell in own], 0.2, None if stage else "the paper, theory")
        measured = [(place, cell["paper_measured"]) for place, cell in zip(places, own, strict=True)
                    if cell["paper_measured"]]
        if measured:
            axis.plot(*zip(*measured, strict=True), label=None if stage else "the paper, measured", **PAPER)
    axis.set_yscale("log")
    axis.set_ylim(1, 10_000)
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xticks(range(len(groups)), [f"MP {group}" for group in groups])
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("billions of parameters")
    axis.set_title("Table 2: the largest model whose states fit into 32 GB, 64 data-parallel ranks")
    axis.legend(fontsize=9, frameon=False, ncols=3, loc="upper left")
    return picture


def figure2(result: dict) -> Figure:
    """Speeds of the paper, and what arithmetic expects of the links."""
    picture, axes = figure(1, 2, 13.0, 4.8)
    rows, places = result["rows"], range(len(result["rows"]))
    for axis, who, title, colour in (
        (axes[0][0], "zero", "ZeRO-100B, 400 GPUs", "#0072B2"),
        (axes[0][1], "baseline", "Megatron, the baseline", "#777777"),
    ):
        bars(axis, places, [row[f"{who}_paper"] for row in rows], (colour, ""), "quoted from the paper")
        axis.plot(places, [row[f"{who}_estimate"] for row in rows], color="black", marker="_", markersize=22,
                  markeredgewidth=2.2, linestyle="none", label="arithmetic: peak of the GPU, one link")
        axis.set_xticks(places, [f"{row['name_billions']:g}B\nMP {row[f'{who}_model_parallel']}" for row in rows])
        axis.tick_params(axis="x", length=0)
        axis.set_yscale("log")
        axis.set_ylim(1, 400)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.set_ylabel("TFLOP/s a GPU")
        axis.set_title(title)
        axis.legend(fontsize=9, frameon=False, loc="upper right")
    picture.suptitle("Figure 2: speeds are the paper's; no speed is reproduced here", fontsize=14)
    return picture


def figure7(result: dict) -> Figure:
    """C1 to C5: what the code allocates, by category, what an allocator would cache, and the paper's bars."""
    models = list(dict.fromkeys(bar["model"] for bar in result["bars"]))
    picture, axes = figure(1, len(models), 6.5 * len(models), 5.0)
    for axis, model in zip(axes[0], models, strict=True):
        own = [bar for bar in result["bars"] if bar["model"] == model]
        places, bottom = list(range(len(own))), [0.0] * len(own)
        for category in ("parameters", "gradients", "optimizer", "activations", "buffers"):
            heights = [bar["by_category_gb"][category] for bar in own]
            bars(axis, places, heights, CATEGORIES[category], category, 0.6, bottom)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        cached = [bar["cached_gb"] for bar in own]
        axis.plot(places, cached, color="#D55E00", marker="D", markersize=7, linestyle="none",
                  label="cached by the model of the allocator")
        printed = [(place, bar["paper_cached_gb"]) for place, bar in zip(places, own, strict=True)
                   if bar["paper_cached_gb"]]
        formula_marks(axis, *zip(*printed, strict=True), 0.8, "cached in the paper")
        axis.axhline(32, label="32 GB", **DEVICE)
        axis.set_xticks(places, [bar["config"] for bar in own])
        axis.tick_params(axis="x", length=0)
        axis.set_ylabel("GB on a device")
        axis.set_title(f"{model}, MP 16")
        legend(axis, columns=2, headroom=0.22)
    picture.suptitle("Figure 7: the code of C1 to C5 on fake tensors, beside the paper's bars", fontsize=14)
    return picture


REPRODUCTIONS = {"table1": table1, "table2": table2, "figure1": figure1, "figure2": figure2, "figure7": figure7}


# -------------------------------------------------------------------------------------------------------------- bench

LEDGER, RESIDENT = ("#444444", ""), ("#AAAAAA", "xx")  # peak memory: as the ledger counts, and as the system saw it
OURS = {"color": "black", "linewidth": 1.6, "markerfacecolor": "black", "markeredgecolor": "black"}
TORCHS = {"color": "#777777", "linewidth": 1.2, "markerfacecolor": "white", "markeredgecolor": "black"}
DEEPSPEEDS = TORCHS | {"linestyle": "--", "markerfacecolor": "#BBBBBB"}
FLOOR = {"color": "black", "linewidth": 1.0, "linestyle": ":"}
PEER_OF = {"DDP": 0, "ZeroRedundancy": 1, "FSDP2 kept": 2, "FSDP2": 3}  # the stage that a peer of torch is closest to
CURVES = {  # of a sweep: the field that grows, label of its axis, title of the panel on growth
    "weak": ("ranks", "ranks, each with its own batch", "Weak scaling: time of a step, times that of one rank"),
    "strong": ("ranks", "ranks that share one batch", "Strong scaling: times as fast as one rank"),
    "size": ("parameters", "parameters", "Time of a step, ms"),
    "sequence": ("sequence_tokens", "tokens in a sequence", "Time of a step, ms"),
}


def benchmark(rows: list[dict]) -> Figure:
    """The rows of `python -m zero_minimal bench`: a line of panels for each model or, if it was a sweep, each curve."""
    curves = list(dict.fromkeys(curve for row in rows for curve in row["sweeps"]))
    return benchmark_models(rows) if curves == [""] else benchmark_curves(rows, curves)


def benchmark_models(rows: list[dict]) -> Figure:
    """For each model: times beside DDP's, traffic, and memory; a line for each contender."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = max(sum(row["model"] == model for row in rows) for model in models)
    result, axes = figure(len(models), 3, 15.0, 1.4 + (0.8 + 0.36 * lines) * len(models))
    for panels, model in zip(axes, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        spread_panel(panels[0], own)
        bench_traffic_panel(panels[1], own)
        bench_memory_panel(panels[2], own)
        panels[0].set_ylabel(f"{own[0]['parameters'] / 1e6:.3g} million parameters", fontsize=11)
        for axis in panels:
            axis.grid(visible=False, axis="y")
            axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
            axis.set_yticks(range(len(own)), [row["name"] for row in own] if axis is panels[0] else [])
            axis.tick_params(axis="y", length=0)
            axis.set_ylim(len(own) - 0.4, -0.6)  # the first on top
    entries = [axis.get_legend_handles_labels() for axis in axes[0]]
    handles, labels = ([item for entry in entries for item in entry[part]] for part in (0, 1))
    result.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    first = rows[0]
    result.suptitle(f"GPT, {first['dtype']}, N = {first['ranks']} ranks on {first['device']}, "
                    f"{first['batch_sequences_per_rank']} × {first['sequence_tokens']} tokens a rank", fontsize=14)
    return result


def spread_panel(axis: Axes, rows: list[dict]) -> None:
    """Times of a step over DDP's of the same round: median, quartiles (thick) and extremes (thin)."""
    thick = {"color": "#999999", "linewidth": 5, "solid_capstyle": "butt"}
    axis.axvline(1.0, color="black", linewidth=0.8)
    for place, row in enumerate(rows):
        ratio = row["ratios"]["DDP"]
        axis.plot([ratio["min"], ratio["max"]], [place, place], color="#999999", linewidth=1.2,
                  label=None if place else "lowest to highest round")
        axis.plot([ratio["lower_quartile"], ratio["upper_quartile"]], [place, place], **thick,
                  label=None if place else "quartiles")
        axis.plot([ratio["median"]], [place], **({"marker": "d", "markersize": 5} | run_look(row["name"])))
        axis.annotate(f"{ratio['median']:.3f}", (ratio["max"], place), (7, 0), textcoords="offset points",
                      va="center", fontsize=9)
    axis.margins(x=0.14)
    axis.set_title("Time of a step, times DDP's")


def bench_traffic_panel(axis: Axes, rows: list[dict]) -> None:
    """Bytes that a rank sends in a step: counted, measured, and by the formula."""
    bar_pairs(axis, {
        "sent, as a ring sends": ([row["sent_bytes_per_step"] for row in rows], SENT),
        "crossed the loopback": ([row["wire_bytes_per_step"] for row in rows], ON_THE_WIRE),
    })
    for place, row in enumerate(rows):
        reach = row["theory_bytes_per_step"] / 1e6
        axis.plot([reach, reach], [place - 0.42, place + 0.42], label=None if place else "formula", **FORMULA)
    axis.set_title("MB that a rank sends in a step")


def bench_memory_panel(axis: Axes, rows: list[dict]) -> None:
    """Bytes of a rank at its peak."""
    bar_pairs(axis, {
        "peak by the ledger": ([row["peak_ledger_bytes"] for row in rows], LEDGER),
        "peak of resident memory": ([row["peak_resident_bytes"] for row in rows], RESIDENT),
    })
    axis.set_title("MB that a rank holds at its peak")


def bar_pairs(axis: Axes, pair: dict[str, tuple]) -> None:
    """Two horizontal bars on each line. pair: {label: (bytes of each line, look)}; None, not known, is no bar."""
    for shift, (label, (values, (colour, hatch))) in zip((-0.2, 0.2), pair.items(), strict=True):
        axis.barh([place + shift for place in range(len(values))], [(value or 0) / 1e6 for value in values], 0.38,
                  label=label, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)


def run_look(name: str) -> dict:
    """Line and marker of a contender. The marker says the stage; it is black for ours, white for torch's, else grey."""
    if name == "floor":
        return FLOOR
    look = OURS if name.startswith("stage") else TORCHS if name in PEER_OF else DEEPSPEEDS
    stage = PEER_OF[name] if name in PEER_OF else int(name[-1])
    return look | {"marker": MARKERS[stage], "markersize": 6}


def benchmark_curves(rows: list[dict], curves: list[str]) -> Figure:
    """For each curve of a sweep: how the times grow, and how they stand beside DDP's."""
    result, axes = figure(len(curves), 2, 13.0, 4.4 * len(curves))
    for (growth, beside), curve in zip(axes, curves, strict=True):
        field, words, title = CURVES[curve]
        own = sorted((row for row in rows if curve in row["sweeps"]), key=lambda row: row[field])
        places = sorted({row[field] for row in own})
        for name in dict.fromkeys(row["name"] for row in own):
            line = [row for row in own if row["name"] == name]
            growth_curve(growth, curve, [row[field] for row in line], line)
            ratio_curve(beside, [row[field] for row in line], line)
        for axis in (growth, beside):
            axis.set_xscale("log")
            axis.set_xticks(places, [f"{place / 1e6:.3g} M" if field == "parameters" else place for place in places])
            axis.minorticks_off()
            axis.set_xlabel(words)
            if field == "ranks" and places[-1] > rows[0]["cores"]:
                axis.axvspan(rows[0]["cores"], places[-1], color="#EEEEEE", label="more ranks than cores")
        if curve == "strong":
            growth.plot(places, [place / places[0] for place in places], color="#BBBBBB", label="ideal")
        if curve in ("size", "sequence"):
            log_milliseconds(growth)
        beside.axhline(1.0, color="black", linewidth=0.8)
        growth.set_title(title)
        beside.set_title("Time of a step, times DDP's: medians and quartiles")
        growth.legend(fontsize=8, frameon=False, ncols=2)
    first = rows[0]
    result.suptitle(f"GPT, {first['dtype']}, on {first['device']} with {first['cores']} cores", fontsize=14)
    return result


def growth_curve(axis: Axes, curve: str, places: list, line: list[dict]) -> None:
    """One contender's times, or what its ranks make of them, over what grows."""
    seconds = [row["step_seconds"] for row in line]
    if curve == "weak":
        values = [value / seconds[0] for value in seconds]
    elif curve == "strong":
        values = [seconds[0] / value for value in seconds]
    else:
        values = [1000 * value for value in seconds]
    axis.plot(places, values, label=line[0]["name"], **run_look(line[0]["name"]))


def ratio_curve(axis: Axes, places: list, line: list[dict]) -> None:
    """One contender's times over DDP's, with quartiles."""
    ratios = [row["ratios"]["DDP"] for row in line]
    medians = [ratio["median"] for ratio in ratios]
    below = [ratio["median"] - ratio["lower_quartile"] for ratio in ratios]
    above = [ratio["upper_quartile"] - ratio["median"] for ratio in ratios]
    axis.errorbar(places, medians, [below, above], elinewidth=0.8, capsize=2, **run_look(line[0]["name"]))


def log_milliseconds(axis: Axes) -> None:
    """A logarithmic axis with plain figures on it: 5, 10, 20, 50, …"""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())


# ------------------------------------------------------------------------------------------- notebook 00, collectives

HELD = ("#FFFFFF", "#D6E6F2", "#A6CBE3", "#6FAAD0", "#0072B2")  # of a sum: nothing, … , everybody's part in it
NEXT = {"edgecolor": "#D55E00", "linewidth": 2.6, "facecolor": "none"}  # what is sent in the next step


def ring(states: list, sends: list, title: str) -> Figure:
    """Who holds what, step by step: a panel for each step, in it a line for each rank and a column for each chunk.

    Args:
        states: [step][rank][chunk], sums of 10^r over the ranks r that have added their part; NaN: nothing there yet.
        sends: [step][rank], the chunk that the rank sends next, or None.
    """
    world_size, chunks = len(states[0]), len(states[0][0])
    size = 0.62 * chunks + 0.35, 0.44 * world_size + 0.75  # inches of a panel
    columns = min(len(states), int(11.8 / size[0]))
    rows = -(-len(states) // columns)
    result, axes = figure(rows, columns, max(5.0, columns * size[0] + 0.6), rows * size[1] + 1.0)
    for panel, axis in enumerate(axes.flat):
        axis.set_visible(panel < len(states))
        if panel >= len(states):
            continue
        for rank in range(world_size):
            for chunk in range(chunks):
                held_cell(axis, rank, chunk, states[panel][rank][chunk], world_size)
            if panel < len(sends) and sends[panel][rank] is not None:
                axis.add_patch(Rectangle((sends[panel][rank] - 0.44, rank - 0.42), 0.88, 0.84, zorder=3, **NEXT))
        axis.set(xlim=(-0.55, chunks - 0.45), ylim=(world_size - 0.5, -0.5))
        axis.set_title("at the start" if panel == 0 else f"after step {panel}", fontsize=10)
        names = [f"rank {rank}" for rank in range(world_size)]
        axis.set_yticks(range(world_size), names if panel % columns == 0 else [])
        axis.set_xticks(range(chunks))
        axis.tick_params(length=0, labelsize=9)
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        if panel + columns >= len(states):
            axis.set_xlabel("chunk", fontsize=9)
    result.suptitle(title, fontsize=12)
    result.supxlabel("0+2: the sum of what ranks 0 and 2 had at the start. "
                     "Outlined: what a rank sends to its right neighbour in the next step.", fontsize=9)
    return result


def held_cell(axis: Axes, rank: int, chunk: int, value: float, world_size: int) -> None:
    """One chunk of one rank: darker with each rank whose part is in it, and their numbers."""
    parts = [] if value != value else [other for other in range(world_size) if int(value) // 10**other % 10]
    shade = HELD[-1] if len(parts) == world_size else HELD[min(len(parts), len(HELD) - 2)]
    axis.add_patch(Rectangle((chunk - 0.44, rank - 0.42), 0.88, 0.84, facecolor=shade, edgecolor="#999999",
                             linewidth=0.6))
    words = "all" if len(parts) == world_size > 1 else "+".join(map(str, parts))
    axis.text(chunk, rank, words, ha="center", va="center", fontsize=8 if len(words) > 4 else 9,
              color="white" if shade == HELD[-1] else "black")


def ring_traffic(measured: dict[str, dict[int, float]], formulas: dict) -> Figure:
    """Bytes that a rank sends, in payloads, over the number of ranks: measured (marks) on the formula (lines).

    Args: measured {algorithm: {ranks: share of the payload}}; formulas {algorithm: function of the number of ranks}.
    """
    result, axes = figure(1, 1, 6.4, 3.4)
    axis = axes[0][0]
    fine = [1 + place / 50 for place in range(7 * 50 + 1)]
    for index, (name, points) in enumerate(measured.items()):
        axis.plot(fine, [formulas[name](count) for count in fine], color="black", linewidth=1.0,
                  linestyle=("-", "--", ":")[index % 3], label=f"formula, {name}")
        axis.plot(list(points), list(points.values()), linestyle="", marker=MARKERS[index], markersize=8,
                  markerfacecolor=SENT[0], markeredgecolor="black", label=f"measured, {name}")
    axis.set_xlabel("ranks N")
    axis.set_ylabel("sent by a rank, payloads")
    axis.set_xticks(range(1, 9))
    axis.set_ylim(0, 2.1)
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.22))
    return result


# ---------------------------------------------------------------------------------------------- notebook 03, gradients

STATES = ("parameters", "gradients", "optimizer")
COMPUTING = {"forward": ("#DDDDDD", ""), "backward": ("#AAAAAA", ""), "update": ("#777777", "")}
UNDER_WAY = {"reduce_scatter": ("#CC79A7", ""), "all_gather": ("#CC79A7", "//"), "all_reduce": ("#CC79A7", "xx")}


def holdings(measured: dict[str, list], whole: dict[str, float]) -> Figure:
    """Who holds what: a panel for each stage and moment, a line for each rank, a column for each model state.

    Args:
        measured: {stage: [rank][moment], bytes by category}; the moments are before and after a step.
        whole: bytes of each state that is not divided. A cell is filled as far as the rank holds it.
    The length of a bar is measured; it stands where the rank's shard lies.
    """
    stages, world_size = list(measured), len(next(iter(measured.values())))
    result, axes = figure(2, len(stages), 2.6 * len(stages) + 0.6, 2 * (0.36 * world_size + 0.75) + 0.5)
    for moment, words in enumerate(("before the step", "after the step")):
        for axis, stage in zip(axes[moment], stages, strict=True):
            for rank, moments in enumerate(measured[stage]):
                for column, state in enumerate(STATES):
                    share = moments[moment][state] / whole[state]
                    held_bar(axis, rank, column, share, rank / (world_size - 1) if world_size > 1 else 0.0, state)
                    axis.text(column, rank, f"{moments[moment][state] / 1e6:.1f}", ha="center", va="center", fontsize=9,
                              bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})
            axis.set(xlim=(-0.5, 2.5), ylim=(world_size - 0.5, -0.5))
            axis.set_title(f"{stage}, {words}", fontsize=10)
            axis.set_xticks(range(3), STATES)
            axis.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)]
                            if axis is axes[moment][0] else [])
            axis.tick_params(length=0, labelsize=9)
            axis.grid(visible=False)
            axis.spines[:].set_visible(False)
    result.supxlabel("Numbers are MB, measured. A cell is full where the rank holds all of it.", fontsize=9)
    return result


def held_bar(axis: Axes, rank: int, column: int, share: float, place: float, state: str) -> None:
    """A cell of the grid of holdings, filled by `share`; what is left of the cell lies by `place` before the bar."""
    colour, hatch = CATEGORIES[state]
    left, width = column - 0.45, 0.9
    share = min(share, 1.0)
    axis.add_patch(Rectangle((left + (1 - share) * width * place, rank - 0.4), share * width, 0.8, facecolor=colour,
                             hatch=hatch, edgecolor="white", linewidth=0.0))
    axis.add_patch(Rectangle((left, rank - 0.4), width, 0.8, facecolor="none", edgecolor="#777777", linewidth=0.7))


def memory_of_a_step(timelines: dict[str, list]) -> Figure:
    """Memory through one step, stacked by category: a line of panels for each stage, a panel for each rank. Of one rank
    alone, the stages stand side by side.

    Args: timelines {stage: [rank], a ledger's timeline}.
    """
    world_size = len(next(iter(timelines.values())))
    lines, columns = (1, len(timelines)) if world_size == 1 else (len(timelines), world_size)
    result, axes = figure(lines, columns, min(11.0, 1.2 + 4.4 * columns), 2.7 * lines + 0.4)
    panels = [(stage, rank) for stage in timelines for rank in range(world_size)]
    highest = max(moment.total for ranks in timelines.values() for timeline in ranks for moment in timeline)
    for axis, (stage, rank) in zip(axes.flat, panels, strict=True):
        memory_panel_of(axis, timelines[stage][rank])
        axis.set_ylim(0, 1.18 * highest / 1e6)
        axis.set_title(f"{stage}, rank {rank}", fontsize=11)
    for line in axes:
        line[0].set_ylabel("MB")
    for axis in axes[-1]:
        axis.set_xlabel("ms (the ledger slows the step)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    result.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    return result


def memory_panel_of(axis: Axes, timeline: list) -> None:
    """One rank's memory through one step, the phases of the step marked by lines."""
    times = [1000 * moment.seconds for moment in timeline]
    layers = {name: [moment.bytes[name] / 1e6 for moment in timeline] for name in CATEGORIES}  # scalars: a few bytes
    for patch, (colour, hatch) in zip(
        axis.stackplot(times, list(layers.values()), labels=list(layers), step="post"), CATEGORIES.values(), strict=True
    ):
        patch.set(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.0)
    backward = [time for time, moment in zip(times, timeline, strict=True) if moment.what.endswith("backward")]
    top = max(moment.total for moment in timeline) / 1e6
    for time, words, side in ((backward[0], "forward ", "right"), (backward[-1], " update", "left")):
        axis.axvline(time, color="black", linewidth=0.8, linestyle=":")
        axis.annotate(words, (time, 1.0), xycoords=("data", "axes fraction"), ha=side, va="top", fontsize=9)
    axis.annotate("backward", ((backward[0] + backward[-1]) / 2, 1.0), xycoords=("data", "axes fraction"), ha="center",
                  va="top", fontsize=9)
    axis.axhline(top, color="black", linewidth=0.8)
    axis.annotate(f"{top:.0f} MB", (times[0], top), (0, 2), textcoords="offset points", fontsize=9)


def time_line(ranks: list) -> Figure:
    """Two lanes a rank: what it does itself, with its waiting; and the collectives that are under way meanwhile.

    Args: ranks, [rank] (computing, collectives) as in meters/spans.py.
    """
    result, axes = figure(1, 1, 11.0, 1.3 + 0.95 * len(ranks))
    axis = axes[0][0]
    for rank, (computing, under_way) in enumerate(ranks):
        own, lane = 2.4 * rank, 2.4 * rank + 0.95
        for name, start, end in computing:
            span_bar(axis, own, start, end, COMPUTING[name], name)
        for place, each in enumerate(sorted(under_way, key=lambda each: each.start)):
            height = 0.4 * (place % 2)  # one and the next are under way at the same time
            look, label = UNDER_WAY[each.name], f"{each.name} under way"
            span_bar(axis, lane - 0.2 + height, each.start, each.end, look, label, 0.36)
            span_bar(axis, own, each.wait, each.end, ("white", ""), "waits for a message, sums", edge="black")
    axis.set_yticks([place for rank in range(len(ranks)) for place in (2.4 * rank, 2.4 * rank + 0.95)],
                    [words for rank in range(len(ranks)) for words in (f"rank {rank} computes", "messages")])
    axis.set_ylim(2.4 * len(ranks) - 0.8, -0.6)
    axis.set_xlabel("ms")
    axis.tick_params(axis="y", length=0)
    axis.grid(visible=False, axis="y")
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    entries = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    result.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=6, fontsize=9, frameon=False)
    return result


def span_bar(axis: Axes, place: float, start: float, end: float, look, label: str, height: float = 0.8, edge="white"):
    """A bar on a time line, from start to end (seconds)."""
    colour, hatch = look
    axis.barh(place, 1000 * (end - start), height, left=1000 * start, color=colour, hatch=hatch, edgecolor=edge,
              linewidth=0.5, label=label)


def sent_by_stage(sent: dict[str, float], formula: dict[str, float]) -> Figure:
    """Bytes that a rank sends in a step of each stage, with the formula."""
    result, axes = figure(1, 1, 6.0, 3.4)
    axis, places = axes[0][0], range(len(sent))
    drawn = bars(axis, places, [count / 1e6 for count in sent.values()], SENT, "sent, measured", width=0.5)
    axis.bar_label(drawn, [f"{count / 1e6:.1f}" for count in sent.values()], label_type="center",
                   bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, fontsize=9)
    formula_marks(axis, places, [count / 1e6 for count in formula.values()], width=0.7, label="formula")
    axis.set_xticks(places, list(sent))
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("MB that a rank sends in a step")
    legend(axis, columns=2, headroom=0.2)
    return result


def bucket_sizes(rows: list[dict], shards: float, whole: float) -> Figure:
    """Gradients and scratch at their highest, over the size of the buckets.

    Args: rows, a dict for each size: bucket_bytes, gradients, buffers (bytes); shards and whole: bytes of gradients
    that a rank keeps at stage 2, and of all.
    """
    result, axes = figure(1, 1, 7.0, 3.6)
    axis, places = axes[0][0], range(len(rows))
    gradients = [row["gradients"] / 1e6 for row in rows]
    bars(axis, places, gradients, CATEGORIES["gradients"], "gradients", width=0.55)
    bars(axis, places, [row["buffers"] / 1e6 for row in rows], CATEGORIES["buffers"], "scratch of reductions",
         width=0.55, bottom=gradients)
    for height, words in ((shards, "the own shard, 4Ψ/N"), (whole, "whole gradients, 4Ψ")):
        axis.axhline(height / 1e6, color="black", linewidth=1.0, linestyle="--")
        axis.annotate(words, (1.0, height / 1e6), (0, 3), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", fontsize=9)
    axis.set_xlim(-0.5, len(rows) + 0.6)  # room for these words
    axis.set_xticks(places, [bucket_words(row["bucket_bytes"]) for row in rows])
    axis.set_xlabel("size of a bucket")
    axis.set_ylabel("MB at the highest moment")
    legend(axis, columns=2, headroom=0.2)
    return result


def speeds(runs: list[dict[str, list]]) -> Figure:
    """Times of a step over DDP's of the same round, and what crossed the loopback.

    Args: runs [rank] {contender: a report of timing.time_steps for each round}.
    """
    result, axes = figure(1, 2, 10.0, 0.5 + 0.55 * len(runs[0]) + 0.9)
    seconds = {
        name: [statistics.median(map(max, zip(*(rank[name][turn]["seconds"] for rank in runs), strict=True)))
               for turn in range(len(rounds))] for name, rounds in runs[0].items()
    }
    ratios = [spread_of([own / other for own, other in zip(times, seconds["DDP"], strict=True)])
              for times in seconds.values()]
    rows = [{"name": name, "ratios": {"DDP": ratio}} for name, ratio in zip(seconds, ratios, strict=True)]
    spread_panel(axes[0][0], rows)
    wire = [statistics.median(each["wire_bytes"] or 0 for each in rounds) / 1e6 for rounds in runs[0].values()]
    colour, hatch = ON_THE_WIRE
    drawn = axes[0][1].barh(range(len(wire)), wire, 0.5, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
    axes[0][1].bar_label(drawn, [f"{count:.1f}" for count in wire], padding=4, fontsize=9)
    axes[0][1].margins(x=0.14)
    axes[0][1].set_title("MB of a rank on the loopback, a step")
    for axis in axes[0]:
        axis.grid(visible=False, axis="y")
        axis.set_yticks(range(len(rows)), list(seconds) if axis is axes[0][0] else [])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    return result


def spread_of(values: list[float]) -> dict[str, float]:
    """What spread_panel takes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "lower_quartile": low, "median": middle, "upper_quartile": high, "max": max(values)}


def bucket_words(size: int) -> str:
    """Bytes in KiB or MiB."""
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
