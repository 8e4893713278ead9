"""Pictures as they are seen: on a page 830 pixels wide, and on screens that have two dots for each of these pixels."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.image import imread
from matplotlib.text import Text
from thorough import each

from zero_minimal.meters.deliveries import Story
from zero_minimal.pictures import style
from zero_minimal.pictures.benchmark import draw_benchmark
from zero_minimal.pictures.comparison import draw_comparison, draw_configs
from zero_minimal.pictures.ring_chart import draw_ring, meaning
from zero_minimal.programs.compare import agreement

HOUSE = Path(__file__).parents[2]
LESSONS = HOUSE / "lessons"
PAGES = [HOUSE / "README.md", *sorted(LESSONS.rglob("*.md"))]
PAGE = 830  # pixels


@pytest.mark.thorough
@pytest.mark.parametrize("file", sorted(LESSONS.rglob("*.png")), ids=lambda file: file.name)
def test_a_committed_picture_is_sharp_and_on_a_page(file):
    assert imread(file).shape[1] >= 2 * PAGE, "blurred where a pixel has two dots"
    assert any(file.name in page.read_text() for page in PAGES), "nobody sees it"


def recorded(name):
    return json.loads((LESSONS / "pictures" / f"{name}.json").read_text())["rows"]


def a_ring():
    start = [[(rank,) if chunk == rank else () for chunk in range(4)] for rank in range(4)]
    return draw_ring(Story([start] * 4, [[((rank + 1) % 4, [rank]) for rank in range(4)]] * 3, []), "all-gather")


DRAWN = {
    "benchmark": lambda: draw_benchmark(recorded("bench")),
    "comparison": lambda: draw_comparison(recorded("compare"), agreement(recorded("compare"))),
    "configs": lambda: draw_configs(recorded("configs")),
    "ring": a_ring,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAWN)
def test_text_can_be_read_on_a_page_and_nothing_is_cut(name):
    """Those of a notebook are looked at when they are taken (programs/figures.py)."""
    picture = DRAWN[name]()
    assert not style.faults(picture)
    assert len([text for text in picture.findobj(Text) if text.get_visible() and text.get_text().strip()]) > 10


def broken(what):
    picture, ((axis,),) = style.figure(1, 1, 12 if what == "wide" else 6, 2)
    axis.set_title("a title", fontsize=6 if what == "small" else 10)
    picture.text(1.2 if what == "cut" else 0.5, 0.5, "words")
    axis.set_xticks([0, 0.01 if what == "touching" else 1], ["one name", "another name"])
    return picture


@pytest.mark.parametrize("what, says", [("small", "too small: a title"), ("wide", "too wide"), ("cut", "cut:"),
                                        ("touching", "touches the next one: one name"), ("", None)])
def test_what_cannot_be_read_is_told(what, says):
    found = style.faults(broken(what))
    assert len(found) == 1 and found[0].startswith(says) if says else not found


def test_a_caption_speaks_of_sums_only_where_there_are_some():
    gathered = [[[(0,), ()], [(), (1,)]], [[(0,), (1,)], [(0,), (1,)]]]
    assert "sum" not in meaning(gathered) and "had this chunk" in meaning(gathered)
    start = [[(rank,)] * 3 for rank in range(3)]
    then = [[(0,), (0, 2), (0,)], *start[1:]]
    assert meaning([start, then]) == "0+2: the sum of what ranks 0 and 2 had at the start."
    assert meaning([[[(0,)], [(1,)]], [[(0, 1)], [(0, 1)]]]) == "all: the sum of what all ranks had at the start."


# ---------------------------------------------------------------------------------------------------------- their pages


@each(PAGES, lambda page: str(page.relative_to(HOUSE)))
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
