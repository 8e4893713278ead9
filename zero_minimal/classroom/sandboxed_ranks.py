"""Sandboxed ranks: the judge's handles of ranks that run a submission, of their hosts, and of their fork server.

Nothing here trusts a rank. It can send only data of limited size; its memory and traffic are read in /proc, where it
cannot write.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from zero_minimal.classroom import hosts
from zero_minimal.classroom.accounts import BUSY, Busy, end_all_below, held_by, sent_by
from zero_minimal.classroom.fork_server import READY
from zero_minimal.offloading import host_link

START = 60.0  # seconds for a fork server to import torch, on a busy machine
ANSWER = 60.0  # seconds to fork, likewise
HEAD = 4  # bytes at the start of a message that give its length
STACK = 2**15  # the most bytes of a rank's stack that are read
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")


@dataclass
class Account:
    """What the kernel counted for one rank from the submission's first line on; None if it does not count that."""

    sent: int | None  # bytes that the rank wrote, to any target
    held: int | None  # peak bytes of its own memory after it got data, minus those before
    host: int | None = None  # the same for all its hosts together


@dataclass(eq=False)
class Process:
    """A process that runs a submission: a rank's host, or a rank."""

    fork_server: "ForkServer"
    process: int | None  # None once it is known to have ended
    stacks: int  # a pipe with its stack
    held_before: int | None = None  # bytes of its own memory before the submission ran
    most: int = 0  # the most bytes of it since

    def signal(self, number: int) -> None:
        if self.process:  # 0 would be our own process group
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, number)

    def ended(self) -> int | None:
        """Wait for its end; return its exit code."""
        code, self.process = self.fork_server.ended(self.process) if self.process else None, None
        return code

    def look(self) -> None:
        self.most = max(self.most, held_by(self.process) or 0)

    def stack(self) -> str:
        """The stack that it has written, on request or when it crashed."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.stacks, STACK).decode(errors="replace").rstrip()
        return ""

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        os.close(self.stacks)
        if self.fork_server.lives():
            self.ended()


@dataclass(eq=False, kw_only=True)
class RankHandle(Process):
    """The judge's handle of a rank."""

    line: Connection
    folder: str  # for this run
    hosts: list[Process] = field(default_factory=list)
    sent_before: int | None = None
    has_begun: bool = False
    has_data: bool = False

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.line.close()
        super().close()

    def lend_host(self, setup: dict, size: int) -> None:
        """Give the rank a host process, a line to it, and shared memory. Gives nothing if it has had too many."""
        with socket.fromfd(self.line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            if size > hosts.MOST_BYTES or len(self.hosts) >= hosts.MOST_HOSTS:
                line.sendall(b"!")
                return
            (ours, theirs), (ends, writes) = socket.socketpair(), os.pipe()
            memory = host_link.shared_file(size)
            try:
                self.hosts.append(self.fork_server.fork_host(setup, theirs.fileno(), writes, memory))
                socket.send_fds(line, [b"!"], [ours.fileno(), ends, memory])
            finally:
                ours.close()
                theirs.close()
                for descriptor in (ends, writes, memory):
                    os.close(descriptor)

    def begin(self, work: bytes) -> None:
        self.has_begun = True
        self.sent_before, self.held_before = sent_by(self.process), held_by(self.process)
        self.send(work)

    def give_data(self, secret: int) -> None:
        """Send the secret; memory counts from the first time on. A second request only sends it again."""
        self.most = self.most if self.has_data else 0
        self.has_data = True
        self.send(secret.to_bytes(8, "big"))

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is noticed later
            self.line.send_bytes(message)

    def processes(self) -> list[int]:
        """Numbers of its own and its hosts' processes that have not ended."""
        return [process.process for process in (self, *self.hosts) if process.process]

    def look(self) -> None:
        super().look()
        for host in self.hosts:
            host.look()

    def account(self, answer: bytes) -> Account:
        """The rank's Account, without the bytes of its answer."""
        after = sent_by(self.process)
        sent = None if self.sent_before is None or after is None else after - self.sent_before - HEAD - len(answer)
        if self.held_before is None:
            return Account(sent, None)
        of_hosts = sum(max(0, host.most - (host.held_before or 0)) for host in self.hosts)
        return Account(sent, self.most - self.held_before, of_hosts)


class ForkServer:
    """The judge's handle of a fork server.

    hash_seed: Python's hash seed for it and all that it forks; None for a random one.
    """

    def __init__(self, places: dict, hash_seed: int | None = None):
        self.control, theirs = socket.socketpair()
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | {
            "PYTHONPATH": places["house"], "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "HOME": places["runs"], "TMPDIR": places["runs"]}
        if hash_seed is not None:
            environment["PYTHONHASHSEED"] = str(hash_seed)
        self.printed = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zero_minimal.classroom.fork_server", str(theirs.fileno()), json.dumps(places)],
            cwd=places["house"], env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=self.printed, stderr=subprocess.STDOUT)
        self.pid = self.process.pid
        theirs.close()

    def wait_until_ready(self, beat: Callable[[], None] = lambda: None) -> None:
        """beat: called regularly meanwhile. Raises: Busy if torch is not imported in time."""
        until = time.monotonic() + START
        while not select.select([self.control], [], [], 1.0)[0]:
            beat()
            if time.monotonic() > until:
                raise Busy(BUSY.format(f"ranks could not be started within {START:.0f} s"))
        if self.control.recv(100) != READY:
            self.printed.seek(0)
            raise RuntimeError(f"no ranks can be started:\n{self.printed.read().decode(errors='replace')[-3000:]}")
        self.control.settimeout(ANSWER)

    def lives(self) -> bool:
        try:
            return not select.select([self.control], [], [], 0)[0]  # when it ends, its line closes
        except (OSError, ValueError):  # closed
            return False

    def fork(self, setup: dict) -> RankHandle:
        ours, theirs = Pipe()
        with theirs:
            return RankHandle(self, *self._start({"start": setup}, theirs.fileno()), line=ours, folder=setup["folder"])

    def fork_host(self, setup: dict, *descriptors: int) -> Process:
        """descriptors: its line, the end of a pipe that closes when it ends, the memory of its bus."""
        process, stacks = self._start({"host": setup}, *descriptors)
        return Process(self, process, stacks, held_by(process))

    def _start(self, request: dict, line: int, *others: int) -> tuple[int, int]:
        """A process, and the pipe into which it writes its stack."""
        stacks, writes = os.pipe()
        os.set_blocking(stacks, False)
        try:
            return self._ask(request, line, writes, *others), stacks
        finally:
            os.close(writes)

    def begin_anew(self) -> None:
        """Prepare for another judge, at whatever point the last one ended."""
        mark = secrets.token_hex(8)
        if self._ask({"anew": mark}) != mark:  # this was an answer to the last judge
            self._answer()

    def ended(self, process: int) -> int:
        """Wait for a forked process to end; return its exit code."""
        return self._ask({"ended": process})

    def _ask(self, request: dict, *descriptors: int):
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
            return self._answer()
        except OSError:
            self.close()
            raise ChildProcessError("a process of the grader's was killed while this test ran") from None

    def _answer(self):
        """Read an answer. Raises: OSError if the server is gone."""
        answer = self.control.recv(100)
        if not answer.endswith(b"\n"):
            raise ConnectionResetError
        return json.loads(answer.splitlines()[-1])

    def close(self) -> None:
        """End the server, which need not be a child of this process."""
        if self.control.fileno() < 0:
            return  # it is closed
        end_all_below(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        self.control.close()
        self.printed.close()
