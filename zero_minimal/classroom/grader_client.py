"""Grader client: the grader's end of a judge that waits (grader_server.py): a grade with it begins at once."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.fork_server import LENGTH
from zero_minimal.classroom.judging import SECONDS, UNREAD, Process, Reported, lines, reports
from zero_minimal.classroom.lessons import Lesson

START = 120.0  # seconds that it may take to import torch, twice, on a machine that has much else to do


class GraderClient:
    """A judge that waits. `tests` are those that it can begin with, and what each is worth. Close it."""

    def __init__(self, lesson: Lesson, file: Path):
        self.lesson, self.file = lesson, file
        self._start()

    def _start(self) -> None:
        self.control, theirs = socket.socketpair()
        self.process = Process(self.lesson.tests, ["--submission", str(self.file), "--lesson", self.lesson.name,
                                                   "--serve", str(theirs.fileno())], theirs.fileno())
        theirs.close()
        self.tests: dict[str, dict] = {}

    def is_ready(self) -> bool:
        """Whether it can begin at once. One that was ended starts anew."""
        if self.process.process.poll() is not None:
            self.close()
            self._start()
        return bool(self.tests)

    def wait_until_ready(self) -> None:
        """Raises: Busy if they are not read in time; RuntimeError if the tests themselves cannot run."""
        try:
            line = next(lines(self.control.fileno(), START))
        except StopIteration as ended:
            if ended.value:  # it was late
                raise Busy(UNREAD.format(START)) from None
            said = self.process.printed()
            raise RuntimeError(f"the tests of lesson {self.lesson.name} could not run:\n{said}") from None
        self.tests = {entry.pop("test"): entry for entry in json.loads(line)["tests"]}

    def reports(self, source: str, tests: list[str], reported: Reported, tick: float) -> contextlib.closing:
        """Grade this text of the file by these tests, in this order: a context with the iterator of judging.reports(),
        which yields at each tick too."""
        def begin(done: list[str], seconds: float) -> Run:
            return self.begin(source, [test for test in tests if test not in done], seconds, tick)

        reported.tests = {test: self.tests[test] for test in tests}
        return contextlib.closing(reports(begin, reported, SECONDS))

    def begin(self, source: str, tests: list[str], seconds: float, tick: float) -> "Run":
        """One judge: a context with `lines()`."""
        return Run(self, source, tests, seconds, tick)

    def ask(self, request: dict, *descriptors: int) -> None:
        """Raises: RuntimeError if it is gone."""
        message = json.dumps(request).encode()
        try:
            head = len(message).to_bytes(LENGTH, "big")
            if descriptors:
                socket.send_fds(self.control, [head], descriptors)
            else:
                self.control.sendall(head)
            self.control.sendall(message)
        except OSError:
            raise RuntimeError(f"the grader's own process is gone:\n{self.process.printed()}") from None

    def close(self) -> None:
        self.control.close()
        self.process.end()


class Run:
    """One grade by a judge that waits. When the context is left it has ended, wherever it was."""

    def __init__(self, standby: GraderClient, source: str, tests: list[str], seconds: float, tick: float):
        self.standby, self.source, self.tests, self.seconds, self.tick = standby, source, tests, seconds, tick
        self.code = None  # it is not our child: how it ended is not told

    def __enter__(self) -> "Run":
        self.pipe, theirs = os.pipe()
        self.standby.process.output.truncate(0)
        try:
            self.standby.ask({"source": self.source, "tests": self.tests, "seconds": self.seconds}, theirs)
        except RuntimeError:
            os.close(self.pipe)
            raise
        finally:
            os.close(theirs)
        return self

    def lines(self) -> Iterator[bytes]:
        """What it reports; b"" where nothing came for a tick."""
        self.is_late = yield from lines(self.pipe, tick=self.tick)

    def __exit__(self, *error) -> None:
        os.close(self.pipe)
        with contextlib.suppress(RuntimeError):
            self.standby.ask({})
        self.printed = self.standby.process.printed()
