"""Benchmark: step times compared with DDP's, traffic and memory, and how times grow along a sweep."""

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from zero_minimal.meters.timing import ratios, run_seconds
from zero_minimal.pictures import style

LEDGER, RESIDENT = ("#444444", ""), ("#AAAAAA", "xx")  # peak memory: by the ledger, and by the operating system
OURS = {"color": "black", "linewidth": 1.6, "markerfacecolor": "black", "markeredgecolor": "black"}
LATE = OURS | {"linestyle": "--"}
TORCHS = {"color": "#777777", "linewidth": 1.2, "markerfacecolor": "white", "markeredgecolor": "black"}
DEEPSPEEDS = TORCHS | {"linestyle": "--", "markerfacecolor": "#BBBBBB"}
FLOOR = {"color": "black", "linewidth": 1.0, "linestyle": ":"}
PEER_OF = {"DDP": 0, "ZeroRedundancy": 1, "FSDP2 kept": 2, "FSDP2": 3}  # the stage closest to a peer of torch
CURVES = {  # of a sweep: the field that grows, label of its axis, title of the panel on growth
    "weak": ("ranks", "ranks, each with its own batch", "Weak scaling: time of a step, times that of one rank"),
    "strong": ("ranks", "ranks that share one batch", "Strong scaling: times as fast as one rank"),
    "size": ("parameters", "parameters", "Time of a step, ms"),
    "link": ("link_bits_per_second", "link between two nodes, Mbit/s", "Time of a step, ms"),
    "sequence": ("sequence_tokens", "tokens in a sequence", "Time of a step, ms"),
}


def draw_benchmark(rows: list[dict]) -> Figure:
    """The rows of `python -m zero_minimal bench`: a row of panels for each model or, for a sweep, each curve."""
    curves = list(dict.fromkeys(curve for row in rows for curve in row["sweeps"]))
    return draw_models(rows) if curves == [""] else draw_curves(rows, curves)


def draw_speeds(runs: list[dict[str, list]]) -> Figure:
    """Step times divided by DDP's of the same round, and bytes on the wire.

    Args: runs [rank] {contender: a report of timing.time_steps for each round}.
    """
    result, axes = style.figure(1, 2, style.PAGE, 0.5 + 0.55 * len(runs[0]) + 0.9)
    seconds = {
        name: [run_seconds([rank[name][turn] for rank in runs]) for turn in range(len(rounds))]
        for name, rounds in runs[0].items()
    }
    spread_panel(axes[0][0], [
        {"name": name, "ratios": {"DDP": ratios(times, seconds["DDP"])}} for name, times in seconds.items()
    ])
    wire = [[each["wire_bytes"] for each in rounds] for rounds in runs[0].values()]
    wire = [None if None in counts else statistics.median(counts) / 1e6 for counts in wire]
    drawn = style.flat_bars(axes[0][1], range(len(wire)), [count or 0 for count in wire], style.ON_THE_WIRE, height=0.5)
    words = ["not known here" if count is None else f"{count:.1f}" for count in wire]
    axes[0][1].bar_label(drawn, words, padding=4, fontsize=9)
    axes[0][1].margins(x=0.14)
    axes[0][1].set_title("MB of a rank on the wire, a step")
    style.name_lines(axes[0], list(seconds))
    return result


def run_look(name: str) -> dict:
    """Line and marker of a contender. The marker shows the stage; it is black for ours, white for torch's, or grey."""
    if name == "floor":
        return FLOOR
    ours = {"stage": OURS, "late": LATE, "kept": LATE}.get(name.split()[0])
    look = ours or (TORCHS if name in PEER_OF else DEEPSPEEDS)
    stage = PEER_OF[name] if name in PEER_OF else int(name[-1])
    return look | {"marker": style.MARKERS[stage], "markersize": 6}


# -------------------------------------------------------------------------------------------- a line for each contender


def draw_models(rows: list[dict]) -> Figure:
    """For each model: times compared with DDP's, traffic, and memory; a line for each contender."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = max(sum(row["model"] == model for row in rows) for model in models)
    result, axes = style.figure(len(models), 3, style.PAGE, 1.6 + (0.8 + 0.36 * lines) * len(models))
    for panels, model in zip(axes, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        spread_panel(panels[0], own)
        sent_panel(panels[1], own)
        peak_panel(panels[2], own)
        panels[0].set_ylabel(f"{own[0]['parameters'] / 1e6:.3g} million parameters", fontsize=11)
        style.name_lines(panels, [row["name"] for row in own])
        for axis in panels:
            axis.grid(axis="x", **style.GRID)
    style.legend_outside(result, style.entries_of(axes[0]), columns=4)
    first = rows[0]
    bits = first.get("link_bits_per_second")
    link = f", link of {bits / 1e6:g} Mbit/s" if bits else ""
    result.suptitle(f"GPT, {first['dtype']}, N = {first['ranks']} ranks on {first['device']}, "
                    f"{first['batch_sequences_per_rank']} × {first['sequence_tokens']} tokens a rank{link}",
                    fontsize=13)
    return result


def spread_panel(axis: Axes, rows: list[dict]) -> None:
    """Step times divided by DDP's of the same round: median, quartiles (thick) and extremes (thin).

    rows: {"name", "ratios": {"DDP": as from timing.ratios}}, from top to bottom.
    """
    thick = {"color": "#999999", "linewidth": 5, "solid_capstyle": "butt"}
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--", label="DDP's time")
    for position, row in enumerate(rows):
        ratio = row["ratios"]["DDP"]
        axis.plot([ratio["min"], ratio["max"]], [position, position], color="#999999", linewidth=1.2,
                  label=None if position else "lowest to highest round")
        axis.plot([ratio["lower_quartile"], ratio["upper_quartile"]], [position, position], **thick,
                  label=None if position else "quartiles")
        axis.plot([ratio["median"]], [position], **({"marker": "d", "markersize": 5} | run_look(row["name"])))
        style.note(axis, f"{ratio['median']:.3f}", (ratio["max"], position), (7, 0), va="center")
    axis.margins(x=0.2)
    axis.set_title("Time of a step, times DDP's", fontsize=11)


def sent_panel(axis: Axes, rows: list[dict]) -> None:
    """Bytes that a rank sends in a step: counted, measured, and by the formula."""
    bar_pairs(axis, {
        "sent, as a ring sends": ([row["sent_bytes_per_step"] for row in rows], style.SENT),
        "on the wire": ([row["wire_bytes_per_step"] for row in rows], style.ON_THE_WIRE),
    })
    style.formula_marks(axis, range(len(rows)), [row["theory_bytes_per_step"] / 1e6 for row in rows], 0.84, flat=True)
    axis.set_title("MB sent by a rank in a step", fontsize=11)


def peak_panel(axis: Axes, rows: list[dict]) -> None:
    """Bytes that a rank holds at its peak."""
    bar_pairs(axis, {
        "peak by the ledger": ([row["peak_ledger_bytes"] for row in rows], LEDGER),
        "peak of resident memory": ([row["peak_resident_bytes"] for row in rows], RESIDENT),
    })
    axis.set_title("MB held by a rank at its peak", fontsize=11)


def bar_pairs(axis: Axes, pair: dict[str, tuple[list[float | None], style.Look]]) -> None:
    """Two bars on each line. pair: {label: (bytes of each line, look)}; None, unknown, gives no bar."""
    for shift, (label, (values, look)) in zip((-0.2, 0.2), pair.items(), strict=True):
        lengths = [(value or 0) / 1e6 for value in values]
        style.flat_bars(axis, [position + shift for position in range(len(values))], lengths, look, label, 0.38)


# -------------------------------------------------------------------------------------------------------- along a sweep


def draw_curves(rows: list[dict], curves: list[str]) -> Figure:
    """For each curve of a sweep: how the times grow, and how they compare with DDP's."""
    result, axes = style.figure(len(curves), 2, style.PAGE, 4.2 * len(curves))
    for (growth, beside), curve in zip(axes, curves, strict=True):
        field, words, title = CURVES[curve]
        own = sorted((row for row in rows if curve in row["sweeps"]), key=lambda row: row[field])
        sizes = sorted({row[field] for row in own})  # the values of the field that grows
        for name in dict.fromkeys(row["name"] for row in own):
            line = [row for row in own if row["name"] == name]
            growth_curve(growth, curve, [row[field] for row in line], line)
            ratio_curve(beside, [row[field] for row in line], line)
        for axis in (growth, beside):
            axis.set_xscale("log")
            axis.set_xticks(sizes, [tick_words(field, size) for size in sizes])
            axis.minorticks_off()
            axis.set_xlabel(words)
            if field == "ranks" and sizes[-1] > rows[0]["cores"]:
                axis.axvspan(rows[0]["cores"], sizes[-1], color="#EEEEEE", label="more ranks than cores")
        if curve == "strong":
            growth.plot(sizes, [size / sizes[0] for size in sizes], color="#BBBBBB", label="ideal")
        if curve in ("size", "sequence", "link"):  # milliseconds, with plain numbers: 5, 10, 20, 50, …
            growth.set_yscale("log")
            growth.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            growth.yaxis.set_major_formatter("{x:g}")
            growth.yaxis.set_minor_locator(NullLocator())
        beside.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        style.note(beside, "DDP", (1.0, 1.0), (-2, 2), xycoords=("axes fraction", "data"), ha="right")
        growth.set_title(title, fontsize=11)
        beside.set_title("Time of a step, times DDP's: medians, quartiles", fontsize=11)
        growth.legend(fontsize=9, frameon=False, ncols=2)
    first = rows[0]
    result.suptitle(f"GPT, {first['dtype']}, on {first['device']} with {first['cores']} cores", fontsize=14)
    return result


def tick_words(field: str, size: float) -> str:
    """A tick's label on the axis of the field that grows."""
    if field in ("parameters", "link_bits_per_second"):
        return f"{size / 1e6:.4g}" + (" M" if field == "parameters" else "")
    return str(size)


def growth_curve(axis: Axes, curve: str, sizes: list[int], line: list[dict]) -> None:
    """One contender's times, or their ratio to the first time, against the field that grows."""
    seconds = [row["step_seconds"] for row in line]
    if curve == "weak":
        values = [value / seconds[0] for value in seconds]
    elif curve == "strong":
        values = [seconds[0] / value for value in seconds]
    else:
        values = [1000 * value for value in seconds]
    axis.plot(sizes, values, label=line[0]["name"], **run_look(line[0]["name"]))


def ratio_curve(axis: Axes, sizes: list[int], line: list[dict]) -> None:
    """One contender's times divided by DDP's, with quartiles."""
    beside = [row["ratios"]["DDP"] for row in line]
    medians = [ratio["median"] for ratio in beside]
    below = [ratio["median"] - ratio["lower_quartile"] for ratio in beside]
    above = [ratio["upper_quartile"] - ratio["median"] for ratio in beside]
    axis.errorbar(sizes, medians, [below, above], elinewidth=0.8, capsize=2, **run_look(line[0]["name"]))
