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
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from zero_minimal.pictures.memory_chart import memory_panel
from zero_minimal.pictures.style import DOTS, LOOKS, PAGE, figure, name_bars
from zero_minimal.pictures.traffic_chart import traffic_panel

WIDTH, HEIGHT = 16.54, 11.69  # inches: A3
MARGIN, GUTTER, HEAD = 0.45, 0.5, 1.05
COLUMN = (WIDTH - 2 * MARGIN - GUTTER) / 2
GROUND, INK, QUIET = "white", "#1b1b1b", "#555555"
HEADLINE, TEXT, LINE = 15, 10.5, 0.24  # points, points, inches


class Panel(NamedTuple):
    """A picture of the poster."""

    lesson: str  # the lesson that explains it
    headline: str
    words: str
    picture: np.ndarray  # [height, width, 4]
    share: float = 1.0  # of the column's width


def draw_poster(title: str, subtitle: str, columns: Sequence[Sequence[Panel]], table: list[list[str]],
                foot: str) -> Figure:
    """The poster. Args: columns, two lists of panels from top to bottom; table, of formulas, below the first column."""
    result = Figure(figsize=(WIDTH, HEIGHT), facecolor=GROUND)
    page = result.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))  # in inches
    page.axis("off")
    page.add_patch(Rectangle((0, HEIGHT - HEAD), WIDTH, HEAD, facecolor=LOOKS["parameters"][0]))
    page.text(MARGIN, HEIGHT - 0.4, title, fontsize=30, weight="bold", color="white", va="center")
    page.text(MARGIN, HEIGHT - 0.8, subtitle, fontsize=13, color="white", va="center")
    room = HEIGHT - HEAD - 0.5
    for number, panels in enumerate(columns):
        left = MARGIN + number * (COLUMN + GUTTER)
        tall = [_height(panel) for panel in panels] + ([_table_height(table)] if number == 0 else [])
        gap = (room - sum(tall)) / max(1, len(tall) - 1)
        if gap < 0:
            raise ValueError(f"column {number + 1} is {-gap * (len(tall) - 1):.2f} inches too long for the poster")
        top = HEIGHT - HEAD - 0.2
        for panel, height in zip(panels, tall, strict=False):
            _draw_panel(result, page, panel, left, top)
            top -= height + min(gap, 0.45)
        if number == 0:
            _draw_table(page, table, left, top)
    page.text(WIDTH - MARGIN, 0.2, foot, fontsize=9, color=QUIET, ha="right", va="center")
    return result


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


def _lines(panel: Panel) -> list[str]:
    """A panel's words in lines as wide as the column. Numbers stay with their units."""
    return textwrap.wrap(re.sub(r"(?<=\d) (?=M)", "\N{NO-BREAK SPACE}", panel.words), 96)


def _height(panel: Panel) -> float:
    rows, columns = panel.picture.shape[:2]
    return 0.42 + LINE * len(_lines(panel)) + 0.06 + panel.share * COLUMN * rows / columns


def _draw_panel(result: Figure, page: Axes, panel: Panel, left: float, top: float) -> None:
    page.plot([left, left + COLUMN], [top, top], color="#c9c9c9", linewidth=0.8)
    page.text(left, top - 0.24, panel.headline, fontsize=HEADLINE, weight="bold", color=INK, va="center")
    page.text(left + COLUMN, top - 0.24, panel.lesson, fontsize=9, color=QUIET, ha="right", va="center")
    lines = _lines(panel)
    for number, line in enumerate(lines):
        page.text(left, top - 0.52 - LINE * number, line, fontsize=TEXT, color=INK, va="center")
    width, under = panel.share * COLUMN, top - _height(panel)
    height = width * panel.picture.shape[0] / panel.picture.shape[1]
    axis = result.add_axes(((left + (COLUMN - width) / 2) / WIDTH, under / HEIGHT, width / WIDTH, height / HEIGHT))
    axis.imshow(panel.picture, aspect="auto")
    axis.axis("off")


def _table_height(table: list[list[str]]) -> float:
    return 0.42 + 0.27 * len(table)


def _draw_table(page: Axes, table: list[list[str]], left: float, top: float) -> None:
    page.plot([left, left + COLUMN], [top, top], color="#c9c9c9", linewidth=0.8)
    page.text(left, top - 0.24, "The formulas behind it", fontsize=HEADLINE, weight="bold", color=INK, va="center")
    places = np.linspace(0, COLUMN, len(table[0]) + 1)[:-1]
    for number, row in enumerate(table):
        for place, words in zip(places, row, strict=True):
            page.text(left + place, top - 0.56 - 0.27 * number, words, fontsize=TEXT, va="center",
                      color=INK if number else QUIET)
