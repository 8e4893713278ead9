"""The grader's part inside pytest: run a lesson's graded tests against a submission, and report each one as it ends.

A line of JSON a test goes to the pipe that --report names: {"test", "step", "points", "passed", "message"}; one
with "begins" says which test is next, so that the grader knows it should pytest itself be killed.
"""

import ast
import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from zero_minimal.classroom import messages
from zero_minimal.classroom.guard import children_of_this_process, guarded, unwritten
from zero_minimal.classroom.lessons import UNWRITTEN, found
from zero_minimal.classroom.starters import functions_of
from zero_minimal.classroom.submission import Submission
from zero_minimal.foundations import ranks

PATIENCE = 15.0  # seconds that ranks may take for one test: some 10 times what they need
LESS_PATIENCE = 3.0  # once a test has run out of time: the learner waits too
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def pytest_addoption(parser):
    group = parser.getgroup("grading")
    group.addoption("--submission", help="the learner's file")
    group.addoption("--lesson", help="its lesson")
    group.addoption("--report", type=int, help="file descriptor to write results to")
    group.addoption("--seconds", type=float, help="time for all tests together")


def pytest_configure(config):
    config.submission = Submission(Path(config.option.submission), found()[config.option.lesson])
    config.pluginmanager.register(Grading(config), "grading")


class Runner:
    """What tests use as toys.run while a submission is graded: guarded in the ranks, never for long, nothing left."""

    def __init__(self, submission: Submission, seconds: float):
        self.submission, self.until, self.patience = submission, time.monotonic() + seconds, PATIENCE
        self.ours = None  # processes, once they have started

    def _start(self) -> None:
        ranks.run(os.getpid, 1, device="cpu")  # the server that forks ranks is up: what comes later is not ours
        self.ours = _children()

    def __call__(self, function, world_size, *args, timeout=float("inf"), fresh=False):
        left = self.until - time.monotonic()
        if left < 1:
            pytest.fail("not looked at: the time for this lesson was used up before", pytrace=False)
        if self.ours is None or self.ours - _children():
            self._start()
        try:
            limit = min(timeout, self.patience + 15 * fresh, left)  # to import torch takes its time
            return ranks.run(guarded(function, self.submission), world_size, *args, timeout=limit, device="cpu",
                             fresh=fresh)
        except TimeoutError:
            self.patience = LESS_PATIENCE
            raise
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        """End what the ranks left behind. Raises: a failure of the test if they ended what is ours."""
        children = _children()
        for process in children - self.ours:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        if self.ours - children:
            self._start()
            pytest.fail("a process of the grader's was killed while this test ran: a submission may not signal other "
                        "processes", pytrace=False)


def in_words(error: BaseException, path: str, hints: dict) -> str:
    """A test's failure as a message for the learner; `hints` are those of its mark."""
    if isinstance(error, (ranks.RankError, TimeoutError)):
        words = messages.of_failure(error, path)
        return messages.brief(words) + messages.hint(error, words, hints)
    return str(error).split("\nassert ")[0].strip() or type(error).__name__


class Grading:
    """Hooks of pytest: only graded tests, each reported as it ends. Once a test finds that a function is not written
    yet, the other tests of its step are not run: they would say the same."""

    def __init__(self, config):
        self.config, self.submission = config, config.submission
        self.unwritten = unwritten_steps(self.submission)  # step: message
        self.reports = os.fdopen(config.option.report, "w", buffering=1)

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.get_closest_marker("step")]

    def pytest_collection_finish(self, session):
        import toys  # conftest has made it importable

        _adopt_orphans()
        toys.runner = Runner(self.submission, self.config.option.seconds)

    def pytest_runtest_protocol(self, item):
        self._tell(begins=item.nodeid, **_worth(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if message := self.unwritten.get(_worth(pyfuncitem)["step"]):
            pytest.fail(message, pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or report.failed:
            hints = item.get_closest_marker("step").kwargs
            message = "" if report.passed else in_words(call.excinfo.value, self.submission.path, hints)
            if UNWRITTEN in message:
                self.unwritten.setdefault(_worth(item)["step"], message)
            self._tell(test=item.nodeid, passed=report.passed, message=message, **_worth(item))
        return report

    def pytest_sessionfinish(self):
        self._tell(end=True)

    def _tell(self, **entries):
        self.reports.write(json.dumps(entries) + "\n")


def unwritten_steps(submission: Submission) -> dict[int, str]:
    """{step: message} of the steps whose functions are all as the starter has them."""
    found = {}
    functions = functions_of(ast.parse(submission.source))
    for step in submission.lesson.steps:
        holes = [functions[name] for name in step.tasks if name in functions and _is_hole(functions[name])]
        if len(holes) == len(step.tasks):
            found[step.number] = unwritten(holes[0].name, step.number, holes[0].body[-1].lineno)
    return found


def _is_hole(function) -> bool:
    body = [line for line in function.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.dump(body[0])


def _worth(item) -> dict:
    marker = item.get_closest_marker("step")
    return {"step": marker.args[0], "points": marker.kwargs["points"], "check": item.originalname}


def _adopt_orphans() -> None:
    """What a rank leaves behind becomes a child of ours, so that we can end it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1)


def _children() -> set[int]:
    """Processes that this one has started or adopted, and that live."""
    return {process for process in children_of_this_process() if _lives(process)}


def _lives(process: int) -> bool:
    with suppress(OSError), open(f"/proc/{process}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"
    return False
