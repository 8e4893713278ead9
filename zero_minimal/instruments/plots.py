"""Plots: one look for every picture of the project.

A colour has one meaning everywhere. The palette is that of Okabe and Ito, which colour-blind readers can tell apart;
hatches and markers say the same again, for print in grey.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
