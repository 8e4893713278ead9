"""Points of a step: what is unwritten in it, in a later one, and what its core leaves."""

from types import SimpleNamespace

import pytest

from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import UNWRITTEN, Step

FIRST = Step(1, "first", 20, {"Stage.begin": ""}, {"core": 5})
SECOND = Step(2, "second", 10, {"Stage.end": ""}, {})
STUCK = ("the ranks had not come to an end after 15 s.\n"
         "    ranks 0 and 1 stood at line 7 of my file.py ({}): while True:")
LATER, OWN = f"rest{UNWRITTEN}2, line 9)", f"own{UNWRITTEN}1, line 3)"


@pytest.mark.parametrize("results, points, message", [
    ([("core", 12, True, ""), ("other", 8, True, "")], 20, ""),
    ([("core", 12, True, ""), ("other", 8, False, "wrong")], 12, "wrong"),
    ([("core", 12, False, "missed"), ("other", 8, True, "")], 5, "missed\nWhat this step is about is not reached"),
    ([("core", 12, True, ""), ("other", 8, False, OWN)], 0, OWN),
    # a later step disturbs no more than what needs it
    ([("core", 0, False, LATER), ("other", 20, True, "")], 20, ""),
    ([("core", 12, True, ""), ("other", 8, False, LATER)], 12, LATER),
    ([("core", 0, False, STUCK.format("end")), ("other", 20, True, "")], 20, ""),
    ([("core", 12, False, STUCK.format("begin")), ("other", 8, True, "")], 5, STUCK.format("begin")),
    ([("core", 12, False, STUCK.format("helper")), ("other", 8, True, "")], 5, STUCK.format("helper")),
    ([("core", 12, True, ""), ("other", 8, False, STUCK.format("end"))], 12, STUCK.format("end")),
    ([("core", 12, True, ""), ("other", 4, False, LATER), ("third", 4, False, "wrong")], 12, "wrong"),
])
def test_points_and_message_of_a_step(results, points, message):
    grades = Grades(SimpleNamespace(steps=(FIRST, SECOND), draw=0))
    for check, worth, passed, words in results:
        grades.add(1, check, worth, passed, words)
    earned, said = grades.of(FIRST)
    assert earned == points and said.startswith(message) and bool(said) == bool(message)


def test_each_step_that_loses_points_says_why(capsys):
    grades = Grades(SimpleNamespace(steps=(FIRST, SECOND), draw=0))
    grades.fail_all("no memory is left")
    for step in grades.steps:
        grades.show(step)
    said = capsys.readouterr().out
    assert said.count("no memory is left") == 1
    assert said.endswith("step 2    0 of 10   second\n        The reason is the one of step 1.\n")
