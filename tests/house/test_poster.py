"""The poster: one page of A3 that can be read on a wall, whose numbers are those that the lessons measured."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from zero_minimal import __main__ as program
from zero_minimal.pictures.poster_page import A3
from zero_minimal.pictures.style import DOTS
from zero_minimal.programs import poster

LESSONS = Path(__file__).parents[2] / "lessons"
FOLDER = LESSONS / "10_whole_system"
SMALL = 9  # points: the smallest letters of a picture, before it is scaled


def test_the_committed_files_are_one_page_of_a3():
    png, pdf = FOLDER / "poster.png", (FOLDER / "poster.pdf").read_bytes()
    height, width = imread(png).shape[:2]
    assert width / height == pytest.approx(2**0.5, rel=0.01) and width >= 2400
    assert png.stat().st_size < 1.5e6
    assert len(re.findall(rb"/Type /Page\b", pdf)) == 1
    (box,) = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+)", pdf)
    assert [float(side) / 72 for side in box] == pytest.approx(A3, abs=0.01)


@pytest.mark.thorough
def test_its_words_say_what_was_measured():
    rows = json.loads((LESSONS / "pictures/compare.json").read_text())["rows"][:4]
    assert [row["name"] for row in rows] == [f"stage {number}" for number in range(4)]
    panel = poster.ladder()
    for row in rows:
        assert f"{row['memory']['peak'] / 1e6:.0f}" in panel.words
        assert f"{row['traffic']['sent_bytes'] / 1e6:.1f} MB" in panel.words
    assert len({row["traffic"]["sent_bytes"] for row in rows[:3]}) == 1, "it says that stages 0 to 2 send the same"
    kept = json.loads((LESSONS / "06_activation_partitioning/measured.json").read_text())["two"]
    words = poster.staircase().words
    for mode in poster.STEPS:
        assert f"{kept[mode]['kept'] / 1e6:.1f} MB" in words


@pytest.mark.thorough
def test_the_committed_poster_is_what_the_command_draws(tmp_path):
    """But for the edges of letters, which may be another grey elsewhere; and its letters have at least 6.5 points."""
    program.main(["poster", str(tmp_path)])
    drawn, kept = (imread(folder / "poster.png") for folder in (tmp_path, FOLDER))
    assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 0.002, (
        "figures of a lesson are others now: python -m zero_minimal poster lessons/10_whole_system")
    page = poster.poster()
    page.draw_without_rendering()
    pictures = [axis for axis in page.axes if axis.images]
    assert len(pictures) == 5
    for axis in pictures:
        inches, pixels = axis.get_window_extent().width / page.dpi, axis.images[0].get_array().shape[1]
        assert SMALL * inches / (pixels / DOTS) >= 6.5, axis.get_title(loc="left")


def test_a_folder_that_is_not_there_is_answered_with_what_to_do(capsys):
    with pytest.raises(SystemExit):
        program.main(["poster", "no/such/folder"])
    assert "name one that exists" in capsys.readouterr().err
