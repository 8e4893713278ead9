"""How to write a lesson: the sample in the text is a lesson, as it stands."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import submissions

from zero_minimal.classroom import lessons
from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.classroom.references import reference
from zero_minimal.classroom.starters import starter

PAGE = (HOUSE / "lessons/how-to-write-a-lesson.md").read_text()
TOML, CHECKS, MISTAKES = re.findall(r"^```(?:toml|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def house(tmp_path):
    """A checkout with the sample in it: its folder."""
    shutil.copytree(HOUSE / "zero_minimal", tmp_path / "zero_minimal", ignore=shutil.ignore_patterns("__pycache__"))
    for file in [HOUSE / "pyproject.toml", *HOUSE.glob("tests/*.py")]:
        (tmp_path / file.relative_to(HOUSE)).parent.mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / file.relative_to(HOUSE))
    for file, text in (("lessons/98_norm/lesson.toml", TOML), ("tests/98_norm/test_assignment.py", CHECKS),
                       ("tests/98_norm/mistakes.py", MISTAKES)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def test_the_sample_is_a_lesson(house):
    lesson = lessons.read(house / "lessons/98_norm/lesson.toml")
    cut = starter(lesson, reference(lesson))
    assert 'raise NotImplementedError("step 1: global_norm")' in cut and "class Stage1" in cut
    mistakes = submissions.mistakes(lesson)
    checks = set(re.findall(r"^def (test_\w+)", CHECKS, re.MULTILINE))
    assert {wrong.check for wrong in mistakes.WRONG.values()} == checks >= set(lesson.steps[0].core)
    points = sum(map(int, re.findall(r"mark.step\(1, points=(\d+)", CHECKS)))
    assert points == lesson.steps[0].points == 100


@pytest.mark.parametrize("signature", [
    "def global_norm(a, b):", "def global_norm(\n    a,\n    b=3,\n):",
    "def global_norm(\n    a, b,\n) -> list[\n    int\n]:",
    "def global_norm():  # no: argument", "def global_norm(\n    a, b,  # of: two\n):",
])
def test_a_starter_keeps_the_whole_signature(house, signature):
    lesson = lessons.read(house / "lessons/98_norm/lesson.toml")
    cut = starter(lesson, f"{signature}\n    # how\n    return a\n\n\nlast = 1\n")
    assert cut.startswith(signature + "\n    # step 1: ") and cut.endswith('step 1: global_norm")\n\n\nlast = 1\n')
    assert "how" not in cut and "return a" not in cut
    compile(cut, "starter", "exec")


@pytest.mark.thorough
def test_the_sample_grades_its_right_and_wrong_ones(house):
    lesson = lessons.read(house / "lessons/98_norm/lesson.toml")
    mistakes, file = submissions.mistakes(lesson), house / "mine.py"
    texts = {"reference": reference(lesson)} | submissions.right(lesson)
    for name, text in texts.items():
        assert "100 of 100 points" in graded(house, file, text), name
    for name, wrong in mistakes.WRONG.items():
        printed = graded(house, file, submissions.spliced(lesson, wrong.code))
        assert re.search(wrong.message, printed) or wrong.check == "test_ranks_agree", f"{name}: {printed}"
        assert "0 of 100 points" in printed


def graded(house, file, text):
    file.write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "zero_minimal", "grade", str(file), "--lesson", "98_norm"], cwd=house, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(house)},
    ).stdout
