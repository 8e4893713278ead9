"""Points of a step: what is unwritten in it, in a later one, and what its core leaves."""

from types import SimpleNamespace

import pytest

from zero_minimal.classroom.grader_client import Reported
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import UNWRITTEN, USED_UP, Step
from zero_minimal.classroom.messages import hint
from zero_minimal.classroom.plugin import LAMBDA, Functions

FIRST = Step(1, "first", 20, {"Stage.begin": ""}, {"core": 5})
SECOND = Step(2, "second", 10, {"Stage.end": ""}, {})
STUCK = ("the ranks had not come to an end after 15 s.\n"
         "    ranks 0 and 1 stood at line 7 of my file.py ({}): while True:")
CAPPED = '\nUntil its main check passes ("core"), this step earns 5 points at most.'
LATER, OWN = f"rest{UNWRITTEN}step 2, line 9)", f"own{UNWRITTEN}step 1, line 3)"


@pytest.mark.parametrize("results, points, message", [
    ([("core", 12, True, ""), ("other", 8, True, "")], 20, ""),
    ([("core", 12, True, ""), ("other", 8, False, "wrong")], 12, "wrong"),  # the cap is for its own check
    ([("core", 12, False, "missed"), ("other", 5, True, "")], 5, "missed"),  # nothing to take away
    ([("core", 12, False, "missed"), ("other", 8, True, "")], 5, "missed" + CAPPED),
    ([("core", 12, True, ""), ("other", 8, False, OWN)], 0, OWN),
    # a later step disturbs no more than what needs it
    ([("core", 0, False, LATER), ("other", 20, True, "")], 20, ""),
    ([("core", 12, True, ""), ("other", 8, False, LATER)], 12, LATER),
    ([("core", 0, False, STUCK.format("end")), ("other", 20, True, "")], 20, ""),
    ([("core", 12, False, STUCK.format("begin")), ("other", 8, True, "")], 5, STUCK.format("begin") + CAPPED),
    ([("core", 12, False, STUCK.format("helper")), ("other", 8, True, "")], 5, STUCK.format("helper") + CAPPED),
    ([("core", 12, True, ""), ("other", 8, False, STUCK.format("end"))], 12, STUCK.format("end")),
    ([("core", 12, True, ""), ("other", 4, False, LATER), ("third", 4, False, "wrong")], 12, "wrong"),
])
def test_points_and_message_of_a_step(results, points, message):
    grades = Grades(SimpleNamespace(steps=(FIRST, SECOND), draw=0))
    for check, worth, passed, words in results:
        grades.add(1, check, worth, passed, words)
    assert grades.of(FIRST) == (points, message)


def test_each_step_that_loses_points_says_why(capsys):
    grades = Grades(SimpleNamespace(steps=(FIRST, SECOND), draw=0))
    grades.fail_all("no memory is left")
    for step in grades.steps:
        grades.show(step)
    said = capsys.readouterr().out
    assert said.count("no memory is left") == 1
    assert said.endswith("step 2    0 of 10   second\n        The reason is the one of step 1.\n")


def test_what_nobody_looked_at_is_lost_as_itself():
    """A step whose core was not looked at, since the time was used up before, does not earn what the others earn."""
    lesson = SimpleNamespace(steps=(FIRST, SECOND), draw=0)
    grades = Grades(lesson)
    reported = Reported(lesson, grades, whole=True)
    reported.announced({"a": {"step": 1, "points": 20, "check": "other"},
                        "b": {"step": 1, "points": 0, "check": "core"},
                        "c": {"step": 2, "points": 10, "check": "third"}})
    reported.take(b'{"test": "a", "passed": true, "message": ""}')
    reported.fail_the_rest(USED_UP)
    assert grades.of(FIRST)[0] == 5 and grades.of(FIRST)[1].startswith(USED_UP)
    assert grades.of(SECOND) == (0, USED_UP)


WRITTEN = """
def own(x):
    y = {}
    return y[x]


def rest(x):
    if x > 10**6:
        raise NotImplementedError("step 2: rest")
    return own(x)
"""
RAISED = "rank 0: it raised KeyError: 1\n    line {} in {}: return y[x]"
LAMBDA_CALLED = "rank 0: it raised KeyError: 1\n    line 9 in <lambda>: lambda: own(x); line 4 in own: return y[x]"


@pytest.mark.parametrize("message, step, says", [
    (LATER, 1, "rest() is written, and raises NotImplementedError all the same: take that line out"),  # no excuse
    (f"rank 1: {LATER}", 1, "rest() is written, and raises NotImplementedError all the same: take that line out"),
    (LATER.replace("rest", "gone"), 1, "gone() is written, and raises NotImplementedError all the same: take that line "
                                       "out"),
    (LATER, 2, LATER), (OWN, 1, OWN),
    (RAISED.format(4, "own"), 2, RAISED.format(4, "own") + "\nown is a function of step 1: look there first."),
    (LAMBDA_CALLED, 2, f"{LAMBDA_CALLED}\n{LAMBDA}"),
    (RAISED.format(4, "own"), 1, RAISED.format(4, "own")), (RAISED.format(10, "rest"), 2, RAISED.format(10, "rest")),
    ("rank 0: the parameters differ", 2, "rank 0: the parameters differ"),
])
def test_a_message_is_weighed_by_what_is_written(message, step, says):
    steps = (Step(1, "first", 20, {"own": ""}, {}), Step(2, "second", 10, {"rest": ""}, {}))
    submission = SimpleNamespace(lesson=SimpleNamespace(steps=steps), source=WRITTEN)
    assert Functions(submission).judge(message, step) == says


def test_what_is_not_written_yet_is_waited_for():
    steps = (Step(1, "first", 20, {"own": ""}, {}), Step(2, "second", 10, {"rest": ""}, {}))
    source = 'def rest(x):\n    """What it does."""\n    raise NotImplementedError("step 2: rest")\n'
    assert Functions(SimpleNamespace(lesson=SimpleNamespace(steps=steps), source=source)).judge(LATER, 1) == LATER


@pytest.mark.parametrize("words, hinted", [
    ("AttributeError: 'NoneType' object has no attribute 'norm'", True), ("RuntimeError: sizes do not match", True),
    ("TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'", True),
    ("AttributeError: 'Bucket' object has no attribute 'gradient'", False),
    ("NameError: name 'x' is not defined", False),
    ("TypeError: take() missing 1 required positional argument: 'x'", False),
    ("TypeError: send() got an unexpected keyword argument 'y'", False),
    ("TypeError: 'Tensor' object is not callable", False)])
def test_an_error_that_says_what_is_wrong_gets_no_hint(words, hinted):
    said = hint(RuntimeError(), f"rank 0: it raised {words}", {"raised": "look there"}, "")
    assert bool(said) == hinted
