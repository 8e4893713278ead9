"""Pictures as they are seen: on a page 830 pixels wide, and on screens that have two dots for each of these pixels."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from zero_minimal.pictures import style
from zero_minimal.pictures.benchmark import draw_benchmark
from zero_minimal.pictures.comparison import draw_comparison, draw_configs
from zero_minimal.pictures.ring_chart import draw_ring, meaning
from zero_minimal.programs import lesson03_figures, lesson04_figures, lesson05_figures, lesson07_figures
from zero_minimal.programs.compare import agreement

HOUSE = Path(__file__).parents[2]
LESSONS = HOUSE / "lessons"
PAGES = [HOUSE / "README.md", *sorted(LESSONS.rglob("*.md"))]
PAGE = 830  # pixels
LEGIBLE = 10  # pixels
NAN = float("nan")


@pytest.mark.thorough
@pytest.mark.parametrize("file", sorted(LESSONS.rglob("*.png")), ids=lambda file: file.name)
def test_a_committed_picture_is_sharp_and_on_a_page(file):
    assert imread(file).shape[1] >= 2 * PAGE, "blurred where a pixel has two dots"
    assert any(file.name in page.read_text() for page in PAGES), "nobody sees it"


def recorded(name):
    return json.loads((LESSONS / "pictures" / f"{name}.json").read_text())["rows"]


def a_ring():
    start = [[10.0**rank if chunk == rank else NAN for chunk in range(4)] for rank in range(4)]
    return draw_ring([start] * 4, [list(range(4))] * 3, "all-gather")


def of_gradients(name):
    return lesson03_figures.pictures(json.loads((LESSONS / "03_gradients/measured.json").read_text()))[name]


def of_parameters(name):
    return lesson04_figures.pictures(json.loads((LESSONS / "04_parameters/measured.json").read_text()))[name]


def of_buffers(name):
    return lesson07_figures.pictures(json.loads((LESSONS / "07_constant_buffers/measured.json").read_text()))[name]


def of_patients(name):
    return lesson05_figures.pictures(json.loads((LESSONS / "05_tensor_parallel/measured.json").read_text()))[name]


DRAWN = {
    "benchmark": lambda: draw_benchmark(recorded("bench")),
    "buckets": lambda: of_gradients("buckets.png"),
    "memory of a step": lambda: of_gradients("gradients.png"),
    "comparison": lambda: draw_comparison(recorded("compare"), agreement(recorded("compare"))),
    "conveyor": lambda: of_parameters("conveyor.png"),
    "blocks kept": lambda: of_parameters("kept.png"),
    "configs": lambda: draw_configs(recorded("configs")),
    "parallel region": lambda: of_patients("region.png"),
    "patients": lambda: of_patients("patients.png"),
    "ring": a_ring,
    "two buffers": lambda: of_buffers("trays.png"),
    "sizes of buffers": lambda: of_buffers("sizes.png"),
    "a sum of ones": lambda: of_buffers("ones.png"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAWN)
def test_text_can_be_read_on_a_page_and_nothing_is_cut(name):
    picture = DRAWN[name]()
    assert picture.get_figwidth() <= style.PAGE
    picture.draw_without_rendering()
    shown = [text for text in picture.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert len(shown) > 10
    scale = PAGE / (72 * style.PAGE)  # pixels a point
    small = {text.get_text() for text in shown if text.get_fontsize() * scale < LEGIBLE}
    assert not small
    box, (width, height) = picture.get_tightbbox(), picture.get_size_inches()  # inches
    assert -0.02 < min(box.x0, box.y0) and box.x1 < width + 0.02 and box.y1 < height + 0.02


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAWN)
def test_names_below_bars_do_not_touch(name):
    picture = DRAWN[name]()
    picture.draw_without_rendering()
    for axis in picture.axes:
        boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
        assert all(left.x1 <= right.x0 for left, right in zip(boxes, boxes[1:], strict=False))


def test_a_caption_speaks_of_sums_only_where_there_are_some():
    gathered = [[[1.0, NAN], [NAN, 10.0]], [[1.0, 10.0], [1.0, 10.0]]]
    assert "sum" not in meaning(gathered) and "had this chunk" in meaning(gathered)
    assert meaning([[[1.0, 1.0, 1.0], [10.0] * 3, [100.0] * 3], [[1.0, 101.0, 1.0], [10.0] * 3, [100.0] * 3]]) == (
        "0+2: the sum of what ranks 0 and 2 had at the start.")
    assert meaning([[[1.0], [10.0]], [[11.0], [11.0]]]) == "all: the sum of what all ranks had at the start."


# ---------------------------------------------------------------------------------------------------------- their pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOUSE)))
def test_code_blocks_fit_a_page_and_tables_have_heads(page):
    """A page of 830 pixels shows some 95 characters of code; what is longer is cut, or has to be scrolled."""
    fenced, text = False, page.read_text()
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if fenced or line.startswith("    "):
            assert len(line) - (0 if fenced else 4) <= 90, line
    heads = re.findall(r"^(\|.*\|)\n\|[-| ]+\|$", text, re.MULTILINE)
    for head in heads:
        assert head.strip("| "), "a head without a word"
