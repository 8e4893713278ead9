"""`python -m zero_minimal progress`: every lesson of the course on one screen, and what is next."""

import json
import re
import subprocess
import sys

import pytest

from zero_minimal.classroom import course
from zero_minimal.classroom.lessons import HOUSE, found
from zero_minimal.programs import record
from zero_minimal.programs.words import COLUMNS

COLLECTIVES, GRADIENTS = found()["00_collectives"], found()["03_gradients"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_PROGRESS", str(tmp_path / "mine.json"))
    return tmp_path / "mine.json"


def earned(lesson, **points):
    """Keep points, of all steps or of some: earned(lesson, step_1=15)."""
    record.add_points(lesson.name, {int(name[5:]): number for name, number in points.items()},
                      {step.number: step.points for step in lesson.steps})


def full(lesson, **others):
    return earned(lesson, **{f"step_{step.number}": step.points for step in lesson.steps} | others)


def shown(capsys, *arguments):
    assert course.main(list(arguments)) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= COLUMNS for line in printed.splitlines())
    return printed


def test_all_lessons_of_the_course_are_shown_on_one_screen(file, capsys):
    printed = shown(capsys)
    assert [line[:2] for line in printed.splitlines() if line[:2].isdigit()] == [f"{n:02}" for n in range(12)]
    assert len(printed.splitlines()) <= 24
    for entry in course.course(HOUSE / "lessons"):
        assert ("not written yet" in next(line for line in printed.splitlines() if line.startswith(entry.number))) == (
            entry.folder is None)
    assert printed.endswith("Next: read lessons/00_collectives/README.md\n")


def test_points_guesses_and_what_is_next(file, capsys):
    full(COLLECTIVES)
    full(COLLECTIVES, step_2=10)
    earned(GRADIENTS, step_1=40, step_2=20)
    for guess in (16, 24):  # the first one counts
        record.add_guess(COLLECTIVES.name, "MB?", guess, 24, unit="MB")
    record.add_guess(COLLECTIVES.name, "messages?", 6, 6)
    lines = shown(capsys).splitlines()
    first, fourth = (next(line for line in lines if line.startswith(number)) for number in ("00", "03"))
    assert "15 10* 20 15 20" in first and " 80, " in first and "100, " in first and first.endswith("1 of 2")
    assert "40 20* – –" in fourth and " 60, " in fourth
    assert lines[-1] == f"Next: step 2 of lesson 00, {COLLECTIVES.steps[1].title}"  # where something was done last
    whole = shown(capsys, "00")
    assert "step 2, 30 points: last 10, " in whole and "best 30, " in whole
    assert "guessed 16 MB (1 more), measured 24 MB: 1.5 times too little" in whole
    assert "guessed 6, measured 6: near" in whole


def test_the_best_is_never_below_the_last(file, capsys):
    """A grade of one step, or a watch, changes the points of some steps only."""

    def last_and_best():
        line = next(line for line in shown(capsys).splitlines() if line.startswith("00"))
        return [int(number) for number in re.findall(r"(\d+), \d+ \w+", line)]

    earned(COLLECTIVES, step_1=15)
    assert last_and_best() == [15, 15]
    full(COLLECTIVES, step_2=8, step_3=0, step_4=0, step_5=0)
    assert last_and_best() == [23, 23]
    earned(COLLECTIVES, step_2=30)
    earned(COLLECTIVES, step_3=20, step_4=15)
    assert last_and_best() == [80, 80]
    earned(COLLECTIVES, step_4=0)
    assert last_and_best() == [65, 80]
    kept = json.loads(file.read_text())
    kept["lessons"][COLLECTIVES.name]["together"] = None  # a file of before
    file.write_text(json.dumps(kept))
    assert last_and_best() == [65, 65]


def test_what_is_next_when_one_lesson_is_done_and_when_all_are(file, capsys):
    full(COLLECTIVES)
    assert shown(capsys).endswith(f"Next: read lessons/{list(found())[1]}/README.md\n")
    for step in GRADIENTS.steps:  # each alone, perhaps in other texts of the file
        earned(GRADIENTS, **{f"step_{step.number}": step.points})
    assert shown(capsys).endswith("Next: grade the whole of lesson 03 once more\n")
    for lesson in found().values():
        full(lesson)
    assert "full marks in all lessons" in shown(capsys).splitlines()[-1]


def test_a_lesson_is_found_by_its_folder(tmp_path):
    """Also if the table does not name it, or there is no table; and one without an assignment is one."""
    for name in ("12_norms_of_ranks", "13_reading"):
        (tmp_path / name).mkdir()
    (tmp_path / "12_norms_of_ranks" / "lesson.toml").write_text((GRADIENTS.folder / "lesson.toml").read_text())
    entries = course.course(tmp_path)
    assert [(entry.number, entry.title, bool(entry.lesson)) for entry in entries] == [
        ("12", "norms of ranks", True), ("13", "reading", False)]
    (tmp_path / "README.md").write_text("| 12 other | x |\n| [14 next](14_next/README.md) | y |\n| 00 | 1 step | 5 |\n")
    assert [(entry.number, entry.title) for entry in course.course(tmp_path)] == [
        ("12", "norms of ranks"), ("13", "reading"), ("14", "next")]
    assert "no assignment" in "\n".join(course.overview(course.course(tmp_path)))


@pytest.mark.parametrize("guess, says", [(12, "near"), (24, "2 times too much"), (1.2, "10 times too little"),
                                         (0, "far off"), (-3, "far off")])
def test_how_near_a_guess_is(file, capsys, guess, says):
    record.add_guess(COLLECTIVES.name, "how much?", guess, 12)
    assert shown(capsys, "00_collectives").endswith(f"measured 12: {says}\n")


@pytest.mark.thorough
def test_the_command():
    done = subprocess.run([sys.executable, "-m", "zero_minimal", "progress"], cwd=HOUSE, text=True, capture_output=True)
    assert done.returncode == 0 and "00 collectives" in done.stdout
    done = subprocess.run([sys.executable, "-m", "zero_minimal", "progress", "77"], cwd=HOUSE, text=True,
                          capture_output=True)
    assert done.returncode == 2 and "there is no lesson 77" in done.stderr
