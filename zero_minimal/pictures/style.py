"""Style: one look for every picture of the project.

A colour has one meaning everywhere. The palette is that of Okabe and Ito, which colour-blind readers can distinguish;
hatches and markers repeat the meaning for grey print.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

Look = tuple[str, str]  # colour, hatch

LOOKS: dict[str, Look] = {  # of the categories of memory, from the bottom of a stack to its top
    "parameters": ("#0072B2", ""),
    "gradients": ("#E69F00", "//"),
    "optimizer": ("#009E73", ".."),
    "activations": ("#56B4E9", "\\\\"),
    "buffers": ("#F0E442", "xx"),
    "other": ("#BBBBBB", ""),
}
SENT, ON_THE_WIRE = ("#CC79A7", ""), ("#D55E00", "//")  # traffic: as a ring sends it, and as measured on connections
PLAIN = ("#777777", "")  # what has no category: speeds, numbers of blocks
COMING, IDLE = ("#CFE3F2", "////"), ("white", "...")  # memory that waits for messages; memory that is never read
HATCHED = {COMING: "#5B9BC8", IDLE: "#808080"}  # the colour of their hatches; others are white
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # background of text that a line crosses
STAGE_COLOURS = ("#777777", "#E69F00", "#009E73", "#0072B2")  # stages 0 to 3, if each is a line
MARKERS = "osD^vPX*"  # one for each run, if runs share an axis
FORMULA = {"color": "black", "linewidth": 2.2, "solid_capstyle": "butt"}
DEVICE = {"color": "#D55E00", "linewidth": 1.8, "linestyle": "--"}  # the line at a device's memory
PAGE = 10.0  # inches: the widest picture. A page shows it 830 pixels wide: 9-point text is then 10 pixels high
DOTS = 200  # per inch: more than twice as many pixels, for high-density screens
LEGIBLE = 8.7  # points: text 10 pixels high on a page
GRID = {"color": "#DDDDDD", "linewidth": 0.6}


def figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    """A Figure and its axes, [rows, columns]; sizes in inches, the width at most PAGE."""
    result = Figure(figsize=(width, height), layout="constrained")
    axes = result.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", **GRID)
        axis.set_axisbelow(True)
    return result, axes


def save(picture: Figure, path: str | Path) -> None:
    """Write a picture and print its path; the suffix chooses the format."""
    picture.savefig(path, dpi=DOTS)
    print(f"picture: {path}", file=sys.stderr)


def faults(picture: Figure) -> list[str]:
    """Why a picture is unreadable on a page: it is too wide, or text is too small, cut off, or overlaps other text."""
    picture.draw_without_rendering()
    shown = [text for text in picture.findobj(Text) if text.get_visible() and text.get_text().strip()]
    found = [f"too small: {text.get_text()}" for text in shown if text.get_fontsize() < LEGIBLE]
    box, (width, height) = picture.get_tightbbox(), picture.get_size_inches()  # inches
    if width > PAGE:
        found.append(f"too wide: {width:g} inches, and a page has {PAGE:g}")
    if min(box.x0, box.y0) < -0.02 or box.x1 > width + 0.02 or box.y1 > height + 0.02:
        found.append("cut: something lies outside of it")
    for axis in picture.axes:
        names = [label for label in axis.get_xticklabels() if label.get_text() and not label.get_rotation()]
        boxes = [label.get_window_extent() for label in names]
        found += [f"touches the next one: {name.get_text()}" for name, left, right in zip(names, boxes, boxes[1:])
                  if left.x1 > right.x0]
    return found


# ----------------------------------------------------------------------------------------------------------------- bars


def bars(axis: Axes, positions: Sequence[float], heights: Sequence[float], look: Look, label: str | None = None,
         width: float = 0.7, bottom: Sequence[float] | None = None) -> BarContainer:
    """Vertical bars with the look of their meaning."""
    colour, hatch = look
    return axis.bar(positions, heights, width, bottom=bottom, label=label,
                    color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)


def flat_bars(axis: Axes, positions: float | Sequence[float], lengths: float | Sequence[float], look: Look,
              label: str | None = None, height: float = 0.8, left: float = 0.0, edge: str = "white") -> BarContainer:
    """Horizontal bars with the look of their meaning. One position and one length make one bar."""
    colour, hatch = look
    return axis.barh(positions, lengths, height, left=left, label=label,
                     color=colour, hatch=hatch, edgecolor=edge, linewidth=0.5)


def stacked_bars(axis: Axes, positions: Sequence[float], layers: Iterable[tuple[str, Look, Sequence[float]]],
                 width: float = 0.7) -> list[float]:
    """Stacked bars. layers, from the bottom: (label, look, heights). Returns the height of each stack."""
    tops = [0.0] * len(positions)
    for label, look, heights in layers:
        bars(axis, positions, heights, look, label, width, tops)
        tops = [below + height for below, height in zip(tops, heights, strict=True)]
    return tops


def stacked_areas(axis: Axes, positions: Sequence[float], layers: dict[str, Sequence[float]]) -> None:
    """Categories of memory, stacked along an axis. layers: {category: its value from each position on}."""
    looks = [LOOKS[category] for category in layers]
    areas = axis.stackplot(positions, list(layers.values()), colors=[colour for colour, _ in looks],
                           labels=list(layers), step="post")
    for area, (_, hatch) in zip(areas, looks, strict=True):
        area.set(hatch=hatch, edgecolor="white", linewidth=0)


def formula_marks(axis: Axes, positions: Sequence[float], values: Sequence[float], width: float = 0.86,
                  label: str | None = "formula", flat: bool = False) -> None:
    """A black line across each bar at the formula's or the paper's value. flat: for horizontal bars."""
    for position, value in zip(positions, values, strict=True):
        along, across = [position - width / 2, position + width / 2], [value, value]
        axis.plot(*((across, along) if flat else (along, across)), label=label, **FORMULA)
        label = None  # one entry in the legend is enough


def words_above(axis: Axes, positions: Sequence[float], heights: Sequence[float], words: Iterable[str],
                gap: float = 3, **options) -> None:
    """A word above each bar, at a distance of `gap` points, readable even if a line crosses it."""
    for position, height, word in zip(positions, heights, words, strict=True):
        axis.annotate(word, (position, height), (0, gap), textcoords="offset points", ha="center",
                      **{"bbox": WHITE, **options})


def note(axis: Axes, words: str, place: tuple[float, float], shift: tuple[float, float], **options) -> None:
    """Words beside a place, `shift` points to the right and up of it."""
    axis.annotate(words, place, shift, textcoords="offset points", **{"fontsize": 9, **options})


# ---------------------------------------------------------------------------------------------------------------- cells


def cell(axis: Axes, left: float, bottom: float, width: float, height: float, look: Look, line: float = 0.0) -> None:
    """A rectangle with the look of its meaning."""
    colour, hatch = look
    axis.add_patch(Rectangle((left, bottom), width, height, facecolor=colour, hatch=hatch,
                             edgecolor=HATCHED.get(look, "white"), linewidth=line))


def keys(looks: dict[str, Look]) -> dict[str, Artist]:
    """A legend's entries for cells: {label: its symbol}."""
    return {words: Patch(facecolor=look[0], hatch=look[1], edgecolor=HATCHED.get(look, "white"), linewidth=0)
            for words, look in looks.items()}


def bare(axis: Axes) -> None:
    """Hide all of an axis except the names at its ticks."""
    axis.tick_params(length=0, labelsize=9)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)


# ----------------------------------------------------------------------------------------------------- axes and legends


def name_bars(axis: Axes, positions: Sequence[float], names: Sequence[str]) -> None:
    """Names below the bars."""
    axis.set_xticks(positions, names)
    axis.tick_params(axis="x", length=0, labelsize=9)


def name_lines(axes: Sequence[Axes], names: Sequence[str]) -> None:
    """Name the shared lines of panels side by side: at the left of the first panel, the first line on top."""
    for axis in axes:
        axis.grid(visible=False, axis="y")
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(names) - 0.4, -0.6)


def rank_cells(axis: Axes, world_size: int, columns: Sequence, margin: float, named: bool) -> None:
    """A table of cells instead of axes: a line for each rank, rank 0 on top, and the names of the columns below.

    Args: margin: from the middle of the outer columns to the edge; named: whether ranks are named at the left.
    """
    axis.set(xlim=(-margin, len(columns) - 1 + margin), ylim=(world_size - 0.5, -0.5))
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)] if named else [])
    bare(axis)


def log_ranks(axis: Axes, counts: Sequence[int]) -> None:
    """Logarithmic axes: ranks on the horizontal one, GB on the vertical one."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xticks(counts, counts)
    axis.set_xlabel("data-parallel ranks N")


def legend(axis: Axes, columns: int, headroom: float) -> None:
    """A legend above the data, marks after bars; `headroom` is the share of the axis kept free for it."""
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, bottom + (top - bottom) / (1 - headroom))
    entries = zip(*axis.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(entries, key=lambda entry: isinstance(entry[0], Line2D)), strict=True)
    axis.legend(handles, labels, fontsize=9, frameon=False, ncols=columns, loc="upper left", borderaxespad=0.2)


def entries_of(axes: Iterable[Axes]) -> dict[str, Artist]:
    """The legend entries of these axes, {label: its symbol}: each label once."""
    return {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}


def legend_outside(picture: Figure, entries: dict[str, Artist], side: str = "lower",
                   columns: int | None = None) -> None:
    """One legend for the whole picture, at its "lower" or "upper" side, in one line unless `columns` are given.

    entries: as from `entries_of`.
    """
    picture.legend(entries.values(), entries.keys(), loc=f"outside {side} center", ncols=columns or len(entries),
                   fontsize=9, frameon=False)
