"""The classroom: starters come from the reference; the grader names each mistake, and cannot be fooled or hung."""

import functools
import importlib.util
import inspect
import json
import re
import subprocess
import sys

import checks
import cloudpickle
import pytest
import submissions.collectives
import submissions.conduct
import submissions.gradients
import torch
import toys

from zero_minimal.classroom import grade as grader
from zero_minimal.classroom import plugin, starters
from zero_minimal.classroom.grade import Grades
from zero_minimal.classroom.lessons import COLLECTIVES, GRADIENTS, HOUSE, LESSONS
from zero_minimal.classroom.submission import Submission

FOLDERS = (
    (COLLECTIVES, submissions.collectives), (GRADIENTS, submissions.gradients), (GRADIENTS, submissions.conduct)
)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux tells of processes and memory")
WRONG = [
    pytest.param(lesson, wrong, id=name, marks=[on_linux] if folder is submissions.conduct else [])
    for lesson, folder in FOLDERS for name, wrong in folder.WRONG.items()
]
RIGHT = [pytest.param(lesson, right, id=name) for lesson, folder in FOLDERS for name, right in folder.RIGHT.items()]


# ------------------------------------------------------------------------------------------------------------ starters


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
def test_starters_come_from_the_reference(lesson):
    wanted = starters.starter(lesson, starters.reference_file(lesson).read_text())
    assert lesson.starter.read_text() == wanted, "run python -m zero_minimal starters"


@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
def test_starters_hold_no_answer(lesson):
    """What is to be written is gone: only the docstring, what must hold, and the error that names the step are left."""
    source, starter = starters.reference_file(lesson).read_text(), lesson.starter.read_text()
    assert starter.count("raise NotImplementedError") == len(lesson.tasks)
    gone = set(map(str.strip, source.splitlines())) - set(map(str.strip, starter.splitlines()))
    assert 30 <= len(gone) <= 80, "lines that a learner writes"
    compile(starter, "starter", "exec")


def test_a_function_that_the_reference_has_not_got():
    with pytest.raises(ValueError, match="03_gradients: the reference has no function Stage2.step"):
        starters.starter(GRADIENTS, GRADIENTS.starter.read_text().replace("def step(", "def stride("))


# ------------------------------------------------------------------------------------------------- wrong and right ones


@pytest.fixture
def messages(tmp_path, monkeypatch):
    """messages(lesson, source, test=None, world_size=None): what the tests tell a learner, run as the grader does, but
    in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(lesson, source, only=None, world_size=3, patience=30.0):
        file = tmp_path / "assignment.py"
        file.write_text(source)
        submission = Submission(file, lesson.name)
        runner = the_runner()
        runner.submission, runner.patience = submission, patience
        monkeypatch.setattr(toys, "runner", runner)
        return [message for name, test in vars(graded_tests(lesson)).items() if name.startswith("test_")
                if only in (None, name) for message in told_by(test, submission, world_size)]

    yield run
    torch.set_num_threads(threads)
    checks._runs.clear()


@functools.cache
def the_runner():
    """One for all submissions: to start it takes a while."""
    return plugin.Runner(None, seconds=3600)


@functools.cache
def graded_tests(lesson):
    """The module with the lesson's tests."""
    spec = importlib.util.spec_from_file_location("graded_" + lesson.name, lesson.tests)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def told_by(test, submission, world_size):
    """Messages of one test's failures, in a world of this size, or in the largest if it does not ask for this one."""
    worlds = [mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"]
    step = next(mark for mark in test.pytestmark if mark.name == "step")
    for size in [world_size if world_size in worlds[0] else max(worlds[0])] if worlds else [None]:
        try:
            test(submission, size) if "world_size" in inspect.signature(test).parameters else test(submission)
        except (Exception, pytest.fail.Exception) as error:
            yield plugin.in_words(error, submission.path, step.kwargs.get("stuck", ""))


@pytest.mark.parametrize("lesson, wrong", WRONG)
def test_a_mistake_is_caught_and_named(messages, lesson, wrong):
    told = messages(lesson, submissions.changed(lesson, wrong.changes), wrong.check, wrong.world_size or 3,
                    patience=2.5 if wrong.hangs else 30.0)
    assert told, f"{wrong.check} did not catch it"
    assert re.search(wrong.message, told[0]), f"it said: {told[0]}"
    assert "Traceback" not in told[0]


@pytest.mark.parametrize("lesson, right", RIGHT)
def test_other_ways_are_right_too(messages, lesson, right):
    source = right if isinstance(right, str) else submissions.changed(lesson, right)
    assert messages(lesson, source) == []


# ----------------------------------------------------------------------------------------------------------- the whole


def grade(*arguments):
    """python -m zero_minimal grade: exit code, what it printed."""
    done = subprocess.run([sys.executable, "-m", "zero_minimal", "grade", *map(str, arguments)], cwd=HOUSE, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def test_an_untouched_starter_fails_every_test(messages):
    told = messages(COLLECTIVES, COLLECTIVES.starter.read_text())
    assert len(told) == sum(name.startswith("test_") for name in vars(graded_tests(COLLECTIVES)))
    assert all("() is not written yet (step" in message for message in told)


def test_an_untouched_starter_has_no_points(tmp_path):
    code, printed = grade(GRADIENTS.starter, "--json", tmp_path / "results.json")
    assert code == 1 and "0 of 100 points" in printed and printed.count("is not written yet (step 1") == 4
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == 0 and results["execution_time"] > 0
    assert sum(test["max_score"] for test in results["tests"]) == 100
    assert all(test["score"] == 0 and "not written yet" in test["output"] for test in results["tests"])


@on_linux
def test_tests_go_on_when_the_graders_process_is_killed(tmp_path):
    """What came before counts, and what comes after is looked at."""
    file = tmp_path / "mine.py"
    file.write_text(submissions.changed(COLLECTIVES, [
        ("import torch\n", "import multiprocessing\nimport os\nimport signal\n\nimport torch\n"),
        ("    chunks = part.new_", "    if part.dtype == torch.int64:\n"
         "        grader = os.pidfd_open(multiprocessing.parent_process().pid)\n"
         "        signal.pidfd_send_signal(grader, signal.SIGKILL)\n    chunks = part.new_"),
    ]))
    grades = Grades(COLLECTIVES)
    grader.grade(COLLECTIVES, file, grades, only="all_gather or all_reduce")
    assert [grades.of(step)[0] for step in COLLECTIVES.steps] == [0, 0, 16, 15, 0]
    assert "the grader's own process was brought down while this test ran" in grades.of(COLLECTIVES.steps[2])[1]


def test_points_are_as_announced():
    """The marks of a lesson's tests add up to the points of its steps."""
    for lesson in LESSONS.values():
        points = dict.fromkeys((step.number for step in lesson.steps), 0)
        for name, test in vars(graded_tests(lesson)).items():
            if name.startswith("test_"):
                step = next(mark for mark in test.pytestmark if mark.name == "step")
                points[step.args[0]] += step.kwargs["points"]
        assert points == {step.number: step.points for step in lesson.steps}
        assert sum(points.values()) == 100


@pytest.mark.parametrize("arguments, says", [
    (["nothing.py"], "nothing.py is not a file: name the assignment.py that you filled in"),
    (["pyproject.toml"], "which lesson is pyproject.toml"),
    (["pyproject.toml", "--lesson", "03"], "invalid choice: '03'"),
    (["pyproject.toml", "--lesson", "03_gradients", "--json", "nowhere/results.json"], "cannot be written"),
])
def test_wrong_calls(arguments, says):
    code, printed = grade(*arguments)
    assert code == 2 and says in " ".join(printed.split())


def test_a_file_that_is_not_python(tmp_path):
    (tmp_path / "mine.py").write_text("def step(:\n")
    code, printed = grade(tmp_path / "mine.py", "--lesson", "03_gradients")
    assert code == 1 and "the file is not Python, line 1" in printed and "0 of 100 points" in printed
