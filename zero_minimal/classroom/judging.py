"""Judging: the lesson's tests run in a separate process, the judge, which reports through a pipe.

The judge (plugin.py, grader_server.py) names its tests and their points before a line of the submission runs, and each
result is accepted once. The submission itself runs in sandboxed ranks (fork_server.py). If the judge still crashes, the
current test has failed, and another judge continues.
"""

import json
import os
import select
import signal
import time
from collections.abc import Generator, Iterator

from zero_minimal.classroom.accounts import BUSY, Busy
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import USED_UP, Lesson

SECONDS = 120  # for a whole lesson, as accounts.Clock counts them
SILENCE = 60.0  # seconds without a report after which a judge counts as stopped: it reports while ranks start and run
UNREAD = BUSY.format("the tests could not be read within {:.0f} s, and nothing of the submission ran")
LATE = ("this test did not come to an end: the machine may be busy, or what is run too large (a simulation of many "
        "layers?). Look at this step alone: --step {}")
DOWN = ("the grader's own process was brought down while this test ran{}: memory may have run out (what is run may be "
        "too large), or somebody has ended it")
SIGNALLED = ". A submission may not signal other processes"


def reports(client, source: str, reported: "Reported", tick: float) -> Iterator[None]:
    """Read the reports of one judge after the other on this text, until all announced tests are done; yield after each
    line, and at each tick.

    Args: client.begin(source, tests, seconds, tick): a context with a judge (grader_client.py). A judge that crashes
        has used up its wall-clock time.
    Raises: RuntimeError if the tests themselves cannot run; Busy.
    """
    left = SECONDS
    while not reported.ended:
        began, tests = time.monotonic(), [test for test in reported.tests if test not in reported.done]
        with client.begin(source, tests, left, tick) as judge:
            for line in judge.lines():
                if line:
                    reported.take(line)
                yield
        if reported.ended:
            break
        if reported.under_way is None and judge.is_late:
            raise Busy(UNREAD.format(SILENCE))
        if reported.under_way is None:
            raise RuntimeError(f"the tests of lesson {reported.lesson.name} could not run:\n{judge.printed}")
        reported.fail(_why_it_ended(judge, reported.step))
        yield
        left -= time.monotonic() - began
        if left <= 0:
            reported.fail_the_rest(USED_UP)
            yield


def _why_it_ended(judge, step: int) -> str:
    """Why a judge did not finish, in words. A signal is named if it is known."""
    if judge.is_late:
        return LATE.format(step)
    if judge.code is not None and judge.code < 0:
        return DOWN.format(f" ({signal.Signals(-judge.code).name})") + SIGNALLED
    return DOWN.format("")


class Reported:
    """The judges' reports so far, checked: each test is announced before it begins, and is accepted once.

    whole: the tests are all those of the graded steps.
    """

    def __init__(self, lesson: Lesson, grades: Grades, whole: bool):
        self.lesson, self.grades, self.whole = lesson, grades, whole
        self.tests: dict[str, dict] = {}  # name: its step, check and points
        self.done: list[str] = []
        self.failed: list[str] = []
        self.under_way, self.step, self.ended = None, 1, False

    def take(self, line: bytes) -> None:
        """Raises: RuntimeError for a line that no judge writes; Busy."""
        try:
            report = json.loads(line)
            if "begins" in report:
                self.under_way = self._known(report["begins"])
                self.step = self.tests[self.under_way]["step"]
            elif "end" in report:
                self.ended = True
            elif "busy" in report:
                raise Busy(str(report["busy"]))
            elif "runs" in report:
                pass  # only to show that it is alive
            else:
                self._add(self._known(report["test"]), report["passed"] is True, str(report["message"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeError(f"what came through the grader's pipe is no report ({type(error).__name__}: {error}): "
                               f"{line[:100]!r}") from None

    def fail(self, message: str) -> None:
        """The current test has failed."""
        self._add(self.under_way, False, message)

    def fail_the_rest(self, message: str) -> None:
        """Fail the tests that could not begin, one by one: a step whose core did not run earns what it earns without
        its core."""
        for test in self.tests:
            if test not in self.done:
                self._add(test, False, message)
        self.ended = True

    def announced(self, tests: dict[str, dict]) -> None:
        """Only these tests will be run. Raises: RuntimeError if their points do not match those of their steps."""
        worth = {step.number: 0.0 for step in self.grades.steps}
        for step, _, points in {(test["step"], test["check"], test["points"]) for test in tests.values()}:
            worth[step] += points
        if self.whole and worth != {step.number: step.points for step in self.grades.steps}:
            raise RuntimeError(f"the tests of the steps are worth {worth}")
        self.tests = tests

    def _known(self, test: str) -> str:
        if test not in self.tests or test in self.done:
            raise ValueError("a test that is not known, or a second time")
        return test

    def _add(self, test: str, passed: bool, message: str) -> None:
        worth = self.tests[test]
        self.grades.add(worth["step"], worth["check"], worth["points"], passed, message)
        self.done.append(test)
        self.failed += [] if passed else [test]
        self.under_way = None


def lines(pipe: int, silence: float = SILENCE, tick: float = float("inf")) -> Generator[bytes, None, bool]:
    """Lines from a pipe, until its other end is closed, or nothing has come for `silence` seconds.

    tick: yield b"" after this many seconds without a line.
    Returns: whether it stopped before the other side closed the pipe.
    """
    rest, heard = b"", time.monotonic()
    while True:
        left = max(0.0, heard + silence - time.monotonic())
        if select.select([pipe], [], [], min(left, tick))[0]:
            received, heard = os.read(pipe, 2**16), time.monotonic()
            if not received:
                return False
            *whole, rest = (rest + received).split(b"\n")
            yield from whole
        elif left <= tick:
            return True
        else:
            yield b""
