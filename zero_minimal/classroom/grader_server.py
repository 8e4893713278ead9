"""Grader server: a judge that waits for submissions. It has already done all slow work.

    grade.py → judge that waits → fork server                 the tests are collected, torch is imported
                    ↓ forks           ↓ forks             for each grade:
                  judge     ───────►  ranks                   all that ends with it

So each grade starts from a clean state, and its ranks come from a process that never held an answer. A request is a
line of JSON with the pipe for reports; one without a source ends the current grade, and is answered by its judge's exit
code.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom import sandbox
from zero_minimal.classroom.course_copy import bring_helpers, stage
from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.sandboxed_ranks import ForkServer


@dataclass
class Request:
    """What one judge has to do, and its resources."""

    source: str
    tests: list[str]  # in this order
    seconds: float
    reports: int  # file descriptor
    fork_server: ForkServer


class Server:
    """The waiting judge: `places` are its ranks' folders."""

    def __init__(self, control: socket.socket, lesson: Lesson, file: Path):
        self.control, self.file = control, file
        self.places = stage(lesson, file, Path(tempfile.mkdtemp(prefix="grading-")))  # in the judge's own folder
        self.fork_server = ForkServer(self.places)
        self.judge = 0

    def announce(self, tests: list[dict]) -> None:
        """Tell the grader which tests can be run."""
        self._tell({"tests": tests})
        self.fork_server.wait_until_ready()

    def _tell(self, entries: dict) -> None:
        self.control.sendall(json.dumps(entries).encode() + b"\n")

    def serve(self) -> Request:
        """Returns in a new process for each request; never returns in this one."""
        while True:
            line, descriptors, *_ = socket.recv_fds(self.control, 2**16, 1)
            code = self._end_judge()
            while line and not line.endswith(b"\n"):
                part = self.control.recv(2**16)
                line = part and line + part
            if not line:  # the grader is gone
                self.fork_server.close()
                shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
                os._exit(0)
            request = json.loads(line)
            if "source" in request:
                bring_helpers(self.file, Path(self.places["work"]))
                self.judge = os.fork()
                if not self.judge:
                    sandbox.end_with_parent()
                    self.control.close()
                    return Request(**request, reports=descriptors[0], fork_server=self.fork_server)
                os.close(descriptors[0])
            else:
                self._tell({"code": code})

    def _end_judge(self) -> int | None:
        """End the current judge; return its exit code. The signal does not change one that has already ended."""
        if not self.judge:
            return None
        os.kill(self.judge, signal.SIGKILL)  # its number is not reused until we have waited for it
        _, status = os.waitpid(self.judge, 0)
        self.judge = 0
        with contextlib.suppress(OSError):  # it was ended: each later judge starts another one (supervisor.py)
            self.fork_server.begin_anew()
        return os.waitstatus_to_exitcode(status)
