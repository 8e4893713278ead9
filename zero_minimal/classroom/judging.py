"""Judging: the lesson's tests run in a process of their own, the judge, and what it finds comes through a pipe.

The judge (plugin.py) names its tests and their points before a line of the submission runs, and each is taken once. The
submission itself runs in ranks far below (fork_server.py). Should the judge go down all the same, the test under way
has failed, and another goes on.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from zero_minimal.classroom.accounts import Busy, end_all_below
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import HOUSE, USED_UP, Lesson
from zero_minimal.programs import progress

SECONDS = 120  # for a lesson, as accounts.Clock counts them
SILENCE = 60.0  # seconds after which a judge that reports nothing is taken for stopped: it does while ranks run
UNREAD = ("this machine is too busy to judge: the tests could not be read within {:.0f} s, and nothing of the "
          "submission ran. No points are taken. End what else runs here, or grade later")
LATE = ("this test did not come to an end: the machine may be busy, or what is run too large (a simulation of many "
        "layers?). Look at this step alone: --step {}")
DOWN = ("the grader's own process was brought down while this test ran{}: memory may have run out (what is run may be "
        "too large), or somebody has ended it")
SIGNALLED = ". A submission may not signal other processes"


def grade(lesson: Lesson, file: Path, grades: Grades, seconds: float = SECONDS, only: str = "", show=print) -> None:
    """Run the lesson's tests against the file and fill `grades`. `show(step)` is called when a step is done.

    Args: only: as pytest's -k takes it, to run some of the tests.
    Raises: RuntimeError if the tests themselves cannot run; Busy.
    """
    reported, shown = Reported(lesson, grades, whole=not only), 0
    for _ in reports(lambda done, left: Judge(grades, file, left, only, done), reported, seconds):
        for step in grades.steps[shown:]:
            if step.number < reported.step:
                progress.take_back()
                show(step)
                shown += 1
        if sys.stderr.isatty():
            label = grades.steps[shown].label
            progress.announce(f"{label}: {len(reported.done)} of {len(reported.tests)} checks are done")
    progress.take_back()
    for step in grades.steps[shown:]:
        show(step)


def reports(begin: Callable[[list[str], float], AbstractContextManager], reported: "Reported",
            seconds: float) -> Iterator[None]:
    """Take in what judges report, one judge after the other, until all tests are done; after each line the caller may
    look.

    Args: begin(done, left): a judge for all tests but those in `done`, with so many seconds left. One that is brought
        down has used up what the clock on the wall says.
    Raises: RuntimeError if the tests themselves cannot run; Busy.
    """
    left = seconds
    while not reported.ended:
        began = time.monotonic()
        with begin(reported.done, left) as judge:
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
    """Of one that has not come to its end, in words. A signal is named where it has been seen."""
    if judge.is_late:
        return LATE.format(step)
    if judge.code is not None and judge.code < 0:
        return DOWN.format(f" ({signal.Signals(-judge.code).name})") + SIGNALLED
    return DOWN.format("")


class Reported:
    """What judges have reported so far, checked: each test is known before it begins, and taken once.

    whole: these are all tests of the steps that are looked at.
    """

    def __init__(self, lesson: Lesson, grades: Grades, whole: bool):
        self.lesson, self.grades, self.whole = lesson, grades, whole
        self.tests: dict[str, dict] = {}  # name: what it is worth
        self.done: list[str] = []
        self.failed: list[str] = []
        self.under_way, self.step, self.ended = None, 1, False

    def take(self, line: bytes) -> None:
        """Raises: RuntimeError for a line that no judge writes; Busy."""
        try:
            report = json.loads(line)
            if "tests" in report:
                self._announced({entry.pop("test"): entry for entry in report["tests"]})
            elif "begins" in report:
                self.under_way = self._known(report["begins"])
                self.step = self.tests[self.under_way]["step"]
            elif "end" in report:
                self.ended = True
            elif "busy" in report:
                raise Busy(str(report["busy"]))
            elif "runs" in report:
                pass  # only a sign of life
            else:
                self._add(self._known(report["test"]), report["passed"] is True, str(report["message"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeError(f"what came through the grader's pipe is no report ({type(error).__name__}: {error}): "
                               f"{line[:100]!r}") from None

    def fail(self, message: str) -> None:
        """The test under way has failed."""
        self._add(self.under_way, False, message)

    def fail_the_rest(self, message: str) -> None:
        """Tests that could not begin. Each has failed as itself: a step whose core was not looked at earns what it
        earns without that."""
        for test in [test for test in self.tests if test not in self.done]:
            self._add(test, False, message)
        self.ended = True

    def _announced(self, tests: dict[str, dict]) -> None:
        if not self.tests:
            worth = {step.number: 0.0 for step in self.grades.steps}
            for check in {(test["step"], test["check"], test["points"]) for test in tests.values()}:
                worth[check[0]] += check[2]
            if self.whole and worth != {step.number: step.points for step in self.grades.steps}:
                raise ValueError(f"the tests of the steps are worth {worth}")
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


class Judge:
    """Runs pytest with a pipe for its reports, in a session and with a folder of its own that end with it."""

    def __init__(self, grades: Grades, file: Path, seconds: float, only: str, done: list[str]):
        self.arguments = [
            "--submission", str(file), "--lesson", grades.lesson.name, "--steps",
            ",".join(str(step.number) for step in grades.steps), "--seconds", str(seconds),
            *(["-k", only] if only else []), *(f"--deselect={test}" for test in done), "--report",
        ]
        self.tests = grades.lesson.tests

    def __enter__(self):
        self.reports, theirs = os.pipe()
        self.process = Process(self.tests, [*self.arguments, str(theirs)], theirs)
        os.close(theirs)
        return self

    def lines(self) -> Iterator[bytes]:
        """What it reports, line by line, until it ends or stands still."""
        self.is_late = yield from lines(self.reports)

    def __exit__(self, *error):
        os.close(self.reports)
        self.printed = self.process.end(0 if any(error) else 2)
        self.code = self.process.code


def lines(pipe: int, silence: float = SILENCE, tick: float = float("inf")) -> Generator[bytes, None, bool]:
    """What comes through a pipe, line by line, until its other end is closed, or nothing came for so many seconds.

    tick: after so many seconds without a line b"" is one.
    Returns: whether it came to an end before the other side did.
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


class Process:
    """pytest on a lesson's tests, with our plugin, in a session and with a folder of its own that end with it."""

    def __init__(self, tests: Path, arguments: list[str], descriptor: int):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        os.chmod(self.folder.name, 0o711)  # ranks that are nobody's come through it to theirs
        self.output = tempfile.TemporaryFile("ab+")  # who shortens it does not leave a hole
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", str(tests), "-q", "--rootdir", str(HOUSE), "-p", "no:cacheprovider",
             "-p", "zero_minimal.classroom.plugin", *arguments],
            cwd=HOUSE, pass_fds=[descriptor], stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": self.folder.name},
        )

    def printed(self) -> str:
        """The end of what it wrote."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-3000:]

    def end(self, patience: float = 0.0) -> str:
        """End it, after so many seconds, and all below it; returns what it had printed."""
        self.code = None  # its exit code, if it has ended by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self.process.wait(patience)
        end_all_below(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()
        printed = self.printed()
        self.output.close()
        return printed
