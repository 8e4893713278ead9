"""Plots: one look for every picture of the project.

A colour has one meaning everywhere. The palette is that of Okabe and Ito, which colour-blind readers can tell apart;
hatches and markers say the same again, for print in grey.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
        axis.yaxis.set_major_formatter("{x:,.0f}")
    first = rows[0]
    result.suptitle(f"GPT of {first['parameters'] / 1e6:.1f} million parameters, {first['dtype']}, "
                    f"N = {first['ranks']} ranks on {first['device']}", fontsize=14)
    return result


def memory_panel(axis: Axes, rows: list[dict], places: list[float]) -> None:
    """Bytes at the highest moment, stacked by category, with the formula for the model states."""
    bottom = [0.0] * len(rows)
    for category, look in CATEGORIES.items():
        heights = [row["memory"]["peak_by_category"].get(category, 0) / 1e6 for row in rows]
        bars(axis, places, heights, look, category, bottom=bottom)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    formula_marks(axis, places, [sum(row["theory"].values()) / 1e6 for row in rows], label="formula, model states")
    for place, height in zip(places, bottom, strict=True):
        axis.annotate(f"{height:,.0f}", (place, height), (0, 3), textcoords="offset points", ha="center")
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
    legend(axis, columns=3, headroom=0.15)
    axis.text(0.98, 0.84, note, transform=axis.transAxes, ha="right", va="top", fontsize=9)
