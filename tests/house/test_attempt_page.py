"""The page of `grade --html`: the lesson's notebook draws the attempt, fenced in; points and messages stand above."""

import sys

import pytest

from zero_minimal.classroom import attempt_page
from zero_minimal.classroom.lessons import found
from zero_minimal.classroom.references import reference

pytestmark = pytest.mark.thorough

LESSONS = found()
POINTS = [{"name": "step 1", "score": 1.5, "max_score": 2, "output": "rank 0 < rank 1"}]


def page_of(lesson, source, folder):
    file = folder / "assignment.py"
    file.write_text(source)
    attempt_page.write(folder / "page.html", lesson, file, POINTS)
    return (folder / "page.html").read_text()


@pytest.mark.parametrize("name", ("02_optimizer_state", "05_tensor_parallel"))
def test_what_the_section_needs_of_its_notebook_runs(name, tmp_path):
    page = page_of(LESSONS[name], reference(LESSONS[name]), tmp_path)
    assert "Error" not in page and "All of it is written" in page
    assert '<img alt="' in page and "<h2" in page and "attempt.load" not in page, "pictures, and no code"
    assert "1.5 of 2" in page and "rank 0 &lt; rank 1" in page


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_an_attempt_writes_nowhere_and_its_error_is_on_the_page(tmp_path):
    lesson = LESSONS["00_collectives"]
    page = page_of(lesson, f"open({str(tmp_path / 'taken')!r}, 'w')\n" + reference(lesson), tmp_path)
    assert not (tmp_path / "taken").exists() and "line 1: PermissionError" in page


def test_a_starter_says_what_comes_next(tmp_path):
    lesson = LESSONS["03_gradients"]
    page = page_of(lesson, lesson.starter.read_text(), tmp_path)
    assert "Next comes step 1, bucket_complete" in page and '<img alt="' in page
