"""Grader server: a judge that waits for what it is to judge. Whatever takes long it has done already.

    grade.py → judge that waits → fork server                 the tests are collected, torch is imported
                    ↓ forks           ↓ forks             for each grade:
                  judge     ───────►  ranks                   all that ends with it

So each grade begins as from nothing, and its ranks come from a process that never held an answer. A request is a
line of JSON with the pipe for reports beside it; one without a source ends the grade that is under way, and is
answered by how its judge ended.
"""

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
    """What one judge is to do, and what it has for that."""

    source: str
    tests: list[str]  # in this order
    seconds: float
    reports: int  # file descriptor
    fork_server: ForkServer


class Server:
    """The judge that waits: `places` are its ranks' folders."""

    def __init__(self, control: socket.socket, lesson: Lesson, file: Path):
        self.control, self.file = control, file
        self.places = stage(lesson, file, Path(tempfile.mkdtemp(prefix="grading-")))  # goes with the judge's own folder
        self.fork_server = ForkServer(self.places)
        self.judge = 0

    def announce(self, tests: list[dict]) -> None:
        """It can begin with any of these."""
        self._tell({"tests": tests})
        self.fork_server.wait_until_ready()

    def _tell(self, entries: dict) -> None:
        self.control.sendall(json.dumps(entries).encode() + b"\n")

    def serve(self) -> Request:
        """Returns in a new process for each request that comes; in this one never."""
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
        """The exit code of the one that there was. A signal from here changes nothing of one that has ended."""
        if not self.judge:
            return None
        os.kill(self.judge, signal.SIGKILL)  # until we have waited for it, the number is its own
        _, status = os.waitpid(self.judge, 0)
        self.judge = 0
        try:
            self.fork_server.begin_anew()
        except OSError:  # it was ended
            self.fork_server = ForkServer(self.places)
            self.fork_server.wait_until_ready()
        return os.waitstatus_to_exitcode(status)
