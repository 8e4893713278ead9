"""Comparison: runs of the same work side by side: stages and peers, and C1 to C5."""

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zero_minimal.pictures.memory_chart import memory_panel
from zero_minimal.pictures.style import MARKERS, PAGE, PLAIN, bars, figure, legend, name_bars
from zero_minimal.pictures.traffic_chart import traffic_panel


def draw_comparison(rows: list[dict], note: str) -> Figure:
    """The runs of `python -m zero_minimal compare`: memory, traffic, speed and losses, with a note on the losses."""
    result, axes = figure(2, 2, PAGE, 7.8)
    stages = [row["stage"] is not None for row in rows]
    positions = [index + (0 if is_stage else 0.4) for index, is_stage in enumerate(stages)]  # a gap before the peers
    memory_panel(axes[0][0], rows, positions)
    traffic_panel(axes[0][1], rows, positions)
    speed_panel(axes[1][0], rows, positions)
    loss_panel(axes[1][1], rows, note)
    for axis in (axes[0][0], axes[0][1], axes[1][0]):
        name_bars(axis, positions, [row["name"] for row in rows])
        axis.yaxis.set_major_formatter("{x:,g}")
    first = rows[0]
    result.suptitle(f"GPT of {first['parameters']:,} parameters, {first['dtype']}, "
                    f"N = {first['ranks']} ranks on {first['device']}", fontsize=14)
    return result


def draw_configs(rows: list[dict]) -> Figure:
    """C1 to C5 of `compare --configs`: memory, throughput and, with a budget, the largest model that fits."""
    has_budget = "largest_layers" in rows[0]
    result, axes = figure(1, 3 if has_budget else 2, PAGE, 4.2)
    positions = range(len(rows))
    memory_panel(axes[0][0], rows, positions, columns=2)
    speed_panel(axes[0][1], rows, positions)
    if has_budget:
        blocks = [row["largest_layers"] for row in rows]
        bars_with_labels(axes[0][2], positions, blocks)
        axes[0][2].set_title(f"Largest model in {rows[0]['budget_bytes'] / 1e6:,.0f} MB a rank", fontsize=11)
        axes[0][2].set_ylabel("blocks")
    for axis in axes[0]:
        name_bars(axis, positions, [row["name"] for row in rows])
    first = rows[0]
    data_parallel = first["ranks"] // first["model_parallel"]
    result.suptitle(f"C1 to C5 of the paper's Table 3, D × M = {data_parallel} × {first['model_parallel']}, "
                    f"{first['dtype']}", fontsize=14)
    return result


def speed_panel(axis: Axes, rows: list[dict], positions: Sequence[float]) -> None:
    """Tokens per second that all ranks together train on."""
    bars_with_labels(axis, positions, [row["tokens_per_second"] for row in rows])
    axis.set_title("Throughput of all ranks", fontsize=11)
    axis.set_ylabel("tokens per second")


def bars_with_labels(axis: Axes, positions: Sequence[float], heights: Sequence[float]) -> None:
    """Grey bars, each with its rounded number above it."""
    axis.bar_label(bars(axis, positions, heights, PLAIN), [f"{height:,.0f}" for height in heights], padding=2)
    axis.margins(y=0.1)


def loss_panel(axis: Axes, rows: list[dict], note: str) -> None:
    """All losses in one panel: equal curves look like one curve, with the markers of all."""
    steps = len(rows[0]["losses"])
    every = max(1, steps // 6)
    for index, row in enumerate(rows):
        marked = list(range(index * every // len(rows), steps, every))  # each run marks different steps
        axis.plot(range(steps), row["losses"], color="#777777", linewidth=0.9, marker=MARKERS[index], markersize=7,
                  markevery=marked, markerfacecolor="white", markeredgecolor="black", label=row["name"])
    axis.set_title("Training loss, mean of the ranks", fontsize=11)
    axis.set_xlabel("step")
    axis.set_ylabel("nats a byte")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    whole = note.replace("stage ", "stage\u00a0")  # keep "stage" and its number on one line
    note = "\n".join(part for line in whole.splitlines() for part in textwrap.wrap(line, 56, subsequent_indent="  "))
    legend(axis, columns=3, headroom=0.15 + 0.05 * len(note.splitlines()))
    axis.text(0.01, 0.85, note, transform=axis.transAxes, ha="left", va="top", fontsize=9)
