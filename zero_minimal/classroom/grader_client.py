"""Grader client: the grader's handle of the judge, a process in which the lesson's tests run.

The judge (plugin.py) names its tests and their points before a line of the submission runs, and each
result is accepted once. The submission itself runs in sandboxed ranks (fork_server.py). If the judge still crashes, the
current test has failed, and another judge continues. With a waiting judge, a grade begins at once; `grade` has one for
one grade, `grade --watch` (watch.py) for all.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path

from zero_minimal.classroom.accounts import BUSY, Busy, end_all_below
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import HOUSE, USED_UP, Lesson, Step
from zero_minimal.classroom.submission import text_of
from zero_minimal.programs import progress

START = 120.0  # seconds for importing torch, twice, on a busy machine
SECONDS = 120  # for a whole lesson, as accounts.Clock counts them
SILENCE = 60.0  # seconds without a report after which a judge counts as stopped: it reports while ranks start and run
NOT_RUN = "the tests of lesson {} could not run:\n{}"
UNREAD = BUSY.format("the tests could not be read within {:.0f} s, and nothing of the submission ran")
LATE = ("this test did not come to an end: the machine may be busy, or what is run too large (a simulation of many "
        "layers?). Look at this step alone: --step {}")
DOWN = ("the grader's own process was brought down while this test ran{}: memory may have run out (what is run may be "
        "too large), or somebody has ended it")
SIGNALLED = ". A submission may not signal other processes"


def grade(lesson: Lesson, file: Path, grades: Grades, show: Callable[[Step], object] = print, only: str = "") -> None:
    """Run the lesson's tests against the file and fill `grades`. `show(step)` is called after each step.

    Args: only: a pattern, to run only some of the tests.
    Raises: RuntimeError if the tests themselves cannot run; Busy.
    """
    reported, left = Reported(lesson, grades, whole=not only), list(grades.steps)
    with contextlib.closing(GraderClient(lesson, file)) as client:
        client.wait_until_ready()
        numbers = {step.number for step in grades.steps}
        tests = [test for test, worth in client.tests.items() if worth["step"] in numbers and re.search(only, test)]
        with contextlib.closing(client.reports(text_of(file), tests, reported)) as following:
            for _ in following:
                while left and (reported.ended or left[0].number < reported.step):
                    progress.take_back()
                    show(left.pop(0))
                if left and sys.stderr.isatty():
                    progress.announce(f"{left[0].label}: {len(reported.done)} of {len(tests)} checks are done")


class GraderClient:
    """A waiting judge: pytest on a lesson's tests, with our plugin, with its own session and folder, which end with it.
    `tests`: the tests that it can run, and what each is worth. Close it."""

    def __init__(self, lesson: Lesson, file: Path):
        self.lesson, self.file = lesson, file
        self._start()

    def _start(self) -> None:
        self.tests: dict[str, dict] = {}
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        os.chmod(self.folder.name, 0o711)  # ranks that run as nobody must reach their folders in it
        self.output = tempfile.TemporaryFile("ab+")  # append mode: truncation leaves no hole
        self.control, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", str(self.lesson.tests), "-q", "--rootdir", str(HOUSE),
                 "-p", "no:cacheprovider", "-p", "zero_minimal.classroom.plugin", "--submission", str(self.file),
                 "--lesson", self.lesson.name, "--serve", str(theirs.fileno())],
                cwd=HOUSE, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self.output,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": self.folder.name})

    def is_ready(self) -> bool:
        """Whether it can begin at once. A judge that has ended is started again."""
        if self.process.poll() is not None:
            self.close()
            self._start()
        return bool(self.tests)

    def wait_until_ready(self) -> None:
        """Raises: Busy if they are not read in time; RuntimeError if the tests themselves cannot run."""
        if not self.control.poll(START):
            raise Busy(UNREAD.format(START))
        try:
            told = json.loads(self.control.recv_bytes())
        except (EOFError, OSError):
            raise RuntimeError(NOT_RUN.format(self.lesson.name, self.printed())) from None
        self.tests = {entry.pop("test"): entry for entry in told["tests"]}

    def reports(self, source: str, tests: list[str], reported: "Reported", tick: float = SILENCE) -> Iterator[None]:
        """Grade this text of the file with these tests, in this order: read the reports of one judge after the other,
        until all tests are done; yield after each report, and at each tick. Close it.

        A judge that crashes has used up its wall-clock time.
        Raises: RuntimeError if the tests themselves cannot run; Busy.
        """
        reported.announced({test: self.tests[test] for test in tests})
        left = SECONDS
        while not reported.ended:
            began, tests = time.monotonic(), [test for test in tests if test not in reported.done]
            with self.begin(source, tests, left) as judge:
                for report in judge.reports(tick):
                    if report:
                        reported.take(report)
                    yield
            if reported.ended:
                break
            if reported.under_way is None and judge.is_late:
                raise Busy(UNREAD.format(SILENCE))
            if reported.under_way is None:
                raise RuntimeError(NOT_RUN.format(self.lesson.name, judge.printed))
            reported.fail(judge.why_it_ended(reported.step))
            yield
            left -= time.monotonic() - began
            if left <= 0:
                reported.fail_the_rest(USED_UP)
                yield

    @contextlib.contextmanager
    def begin(self, source: str, tests: list[str], seconds: float) -> Iterator["Run"]:
        """One run of a judge. Leaving the context ends it at any point."""
        if not self.is_ready():
            self.wait_until_ready()
        self.output.truncate(0)
        reads, writes = Pipe(duplex=False)
        run = Run(reads)
        try:
            with writes:
                self.ask({"source": source, "tests": tests, "seconds": seconds}, writes)
            yield run
        finally:
            reads.close()
            run.printed = self.printed()
            try:
                self.ask({})
                if not self.control.poll(SILENCE):
                    raise TimeoutError
                run.code = json.loads(self.control.recv_bytes())["code"]
            except (RuntimeError, EOFError, OSError):  # gone or stuck: the next grade starts another judge
                self.process.kill()
                self.process.wait()

    def ask(self, request: dict, *pipes: Connection) -> None:
        """Raises: RuntimeError if it is gone."""
        try:
            self.control.send_bytes(json.dumps(request).encode())
            for pipe in pipes:
                reduction.send_handle(self.control, pipe.fileno(), self.process.pid)
        except OSError:
            raise RuntimeError(f"the grader's own process is gone:\n{self.printed()}") from None

    def printed(self) -> str:
        """The end of the judge's output."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")[-3000:]

    def close(self) -> None:
        """End the judge and all its descendants."""
        self.control.close()
        end_all_below(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()
        self.output.close()


@dataclass
class Run:
    """One grade by a judge. `printed` and `code` are the judge's, once it has ended."""

    pipe: Connection  # with its reports
    is_late: bool = False  # it was silent for too long
    printed: str = ""
    code: int | None = None

    def reports(self, tick: float) -> Iterator[bytes]:
        """The judge's reports, until it closes the pipe or is silent for too long; b"" if none came for a tick."""
        heard = time.monotonic()
        while (left := heard + SILENCE - time.monotonic()) > 0:
            if not self.pipe.poll(min(left, tick)):
                yield b""
                continue
            try:
                report = self.pipe.recv_bytes()
            except (EOFError, OSError):
                return
            heard = time.monotonic()
            yield report
        self.is_late = True

    def why_it_ended(self, step: int) -> str:
        """Why a judge did not finish, in words. A signal is named if it is known."""
        if self.is_late:
            return LATE.format(step)
        if self.code is not None and self.code < 0:
            return DOWN.format(f" ({signal.Signals(-self.code).name})") + SIGNALLED
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
