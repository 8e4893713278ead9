"""Poster: the course on one A3 page, with pictures of its lessons side by side, each below its message."""

import io
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from zero_minimal.pictures.memory_chart import memory_panel
from zero_minimal.pictures.style import DOTS, LOOKS, PAGE, figure, name_bars
from zero_minimal.pictures.traffic_chart import traffic_panel

A3 = 16.54, 11.69  # inches
QUIET = "#555555"
LINE = 16.5  # points, of a panel's words


class Panel(NamedTuple):
    """A picture of the poster."""

    lesson: str  # the lesson that explains it
    headline: str
    words: str
    picture: np.ndarray  # [height, width, 4]


def draw_poster(title: str, subtitle: str, columns: Sequence[Sequence[Panel]], table: list[list[str]],
                foot: str) -> Figure:
    """The poster. Args: columns, of panels from top to bottom; table, of formulas, below the first column."""
    page = Figure(figsize=A3, layout="constrained")
    page.get_layout_engine().set(w_pad=0.3, h_pad=0.05)  # inches
    head, body, end = page.subfigures(3, 1, height_ratios=(1, 10.1, 0.25))
    head.set_facecolor(LOOKS["parameters"][0])
    head.text(0.023, 0.62, title, fontsize=30, weight="bold", color="white", va="center")
    head.text(0.023, 0.23, subtitle, fontsize=13, color="white", va="center")
    end.text(0.977, 0.5, foot, fontsize=9, color=QUIET, ha="right", va="center")
    for part, panels in zip(body.subfigures(1, len(columns)), columns, strict=True):
        tall = [panel.picture.shape[0] / panel.picture.shape[1] for panel in panels]
        has_table = panels is columns[0]
        axes = part.subplots(len(panels) + has_table, 1, height_ratios=tall + [0.18] * has_table)
        for axis, panel in zip(axes, panels, strict=False):
            axis.imshow(panel.picture)
            headed(axis, panel.headline, panel.words, panel.lesson)
        if has_table:
            headed(axes[-1], "The formulas behind it")
            cells = axes[-1].table(table, cellLoc="left", edges="open", bbox=(-0.01, 0, 1, 1))
            cells.auto_set_font_size(False)
            cells.set_fontsize(10.5)
    return page


def headed(axis: Axes, headline: str, words: str = "", lesson: str = "") -> None:
    """Write a headline above the axis, and words below it. Numbers stay with their units."""
    lines = textwrap.wrap(re.sub(r"(?<=\d) (?=M)", "\N{NO-BREAK SPACE}", words), 100)
    axis.axis("off")
    axis.set_anchor("NW")
    pad = LINE * len(lines) + 11
    axis.set_title(headline, loc="left", fontsize=15, weight="bold", pad=pad)
    axis.set_title(lesson, loc="right", fontsize=9, color=QUIET, pad=pad)
    axis.annotate("\n".join(lines), (0, 1), (0, 6), "axes fraction", "offset points", fontsize=10.5, linespacing=1.4,
                  in_layout=False)  # the title leaves room for it


def image_of(picture: Figure, parts: Sequence[Axes] = (), height: float | None = None) -> np.ndarray:
    """A Figure's pixels, or only those of `parts`, in its full width, down to its lower edge. height: replaces its own,
    in inches."""
    file, box = io.BytesIO(), None
    picture.set_figheight(height or picture.get_figheight())
    if parts:
        picture.draw_without_rendering()
        top = max(axis.get_tightbbox().y1 for axis in parts) / picture.dpi
        box = Bbox([[0, 0], [picture.get_figwidth(), top + 0.05]])
    picture.savefig(file, format="png", dpi=DOTS, bbox_inches=box)
    file.seek(0)
    return imread(file)


def draw_ladder(rows: list[dict]) -> Figure:
    """Memory and traffic of the stages. rows: from `compare --json`."""
    result, axes = figure(1, 2, PAGE, 3.4)
    memory_panel(axes[0][0], rows, range(len(rows)))
    traffic_panel(axes[0][1], rows, range(len(rows)))
    for axis in axes[0]:
        name_bars(axis, range(len(rows)), [row["name"] for row in rows])
    return result
