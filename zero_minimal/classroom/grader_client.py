"""Grader client: the grader's handle of the judging process (grader_server.py). With a waiting judge, a grade begins at
once; `grade` has one for one grade, `grade --watch` (watch.py) for all.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom.accounts import Busy, end_all_below
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.judging import SILENCE, UNREAD, Reported, lines, reports
from zero_minimal.classroom.lessons import HOUSE, Lesson, Step
from zero_minimal.classroom.submission import text_of
from zero_minimal.programs import progress

START = 120.0  # seconds for importing torch, twice, on a busy machine
NEVER = float("inf")


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
        with client.reports(text_of(file), tests, reported) as following:
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
        self.control, theirs = socket.socketpair()
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
        try:
            line = next(lines(self.control.fileno(), START))
        except StopIteration as ended:
            if ended.value:  # it was late: try again
                raise Busy(UNREAD.format(START)) from None
            said = self.printed()
            raise RuntimeError(f"the tests of lesson {self.lesson.name} could not run:\n{said}") from None
        self.tests = {entry.pop("test"): entry for entry in json.loads(line)["tests"]}

    def reports(self, source: str, tests: list[str], reported: Reported, tick: float = NEVER) -> contextlib.closing:
        """Grade this text of the file with these tests, in this order: a context with the iterator of
        judging.reports()."""
        reported.announced({test: self.tests[test] for test in tests})
        return contextlib.closing(reports(self, source, reported, tick))

    @contextlib.contextmanager
    def begin(self, source: str, tests: list[str], seconds: float, tick: float) -> Iterator["Run"]:
        """One run of a judge. Leaving the context ends it at any point."""
        if not self.is_ready():
            self.wait_until_ready()
        self.output.truncate(0)
        reads, writes = os.pipe()
        run = Run(reads, tick)
        try:
            try:
                self.ask({"source": source, "tests": tests, "seconds": seconds}, writes)
            finally:
                os.close(writes)
            yield run
        finally:
            os.close(reads)
            run.printed = self.printed()
            try:
                self.ask({})
                run.code = json.loads(next(lines(self.control.fileno(), SILENCE)))["code"]
            except (RuntimeError, StopIteration):  # gone or stuck: the next grade starts another judge
                self.process.kill()
                self.process.wait()

    def ask(self, request: dict, *descriptors: int) -> None:
        """Raises: RuntimeError if it is gone."""
        line = json.dumps(request).encode() + b"\n"
        try:
            sent = socket.send_fds(self.control, [line], descriptors)
            self.control.sendall(line[sent:])
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

    pipe: int  # with its reports
    tick: float
    is_late: bool = False  # it was silent for too long
    printed: str = ""
    code: int | None = None

    def lines(self) -> Iterator[bytes]:
        """The judge's reports; b"" if none came for a tick."""
        self.is_late = yield from lines(self.pipe, tick=self.tick)
