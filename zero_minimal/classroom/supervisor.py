"""Supervisor: the judge's side of the ranks that run a submission. It starts them, times them, counts with the kernel
what they hold and send, takes their results as data, and ends whatever they leave.

Nothing here believes a rank. What it sends is data of limited size; what it holds and sends is read in /proc, where it
cannot write; and its processes are looked for there until none is left.
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
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle

from zero_minimal.classroom import results
from zero_minimal.classroom.guard import Fault
from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.nursery import DATA, HERE, LENGTH
from zero_minimal.classroom.staging import stage
from zero_minimal.foundations.failures import GRACE, Failure, raise_first

LOOK = 0.01  # seconds between two looks at the ranks' memory
START = 60.0  # seconds that a nursery may take to import torch, on a machine that has much else to do
ANSWER = 10.0  # seconds that it may take to fork
STACK = 2**15  # bytes of a rank's stack that are read
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")


@dataclass
class Account:
    """What the kernel counted for one rank from the submission's first line on; None where it does not count."""

    sent: int | None  # bytes that the rank wrote, to whomever
    held: int | None  # bytes of memory of its own at most, once it had data, beyond what it had before


@dataclass(eq=False)
class Ward:
    """A rank, as the judge sees it."""

    process: int | None  # None once it is known to have ended
    line: socket.socket
    stacks: int  # a pipe
    received: bytearray = field(default_factory=bytearray)
    sent_before: int | None = None
    held_before: int | None = None
    most: int = 0
    has_data: bool = False

    def read(self) -> bytes | None:
        """What has come so far; the whole message once it is there. Raises: EOFError if the rank is gone."""
        part = self.line.recv(2**20)
        if not part:
            raise EOFError
        self.received += part
        length = int.from_bytes(self.received[:LENGTH], "big")
        if len(self.received) < LENGTH or len(self.received) < LENGTH + min(length, results.MOST):
            return None
        if length > results.MOST:
            raise EOFError
        message = bytes(self.received[LENGTH : LENGTH + length])
        del self.received[: LENGTH + length]
        return message

    def signal(self, number: int) -> None:
        if self.process:  # 0 would mean ourselves
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, number)

    def begin(self, work: bytes) -> None:
        self.sent_before, self.held_before = sent_by(self.process), held_by(self.process)
        self._send(work)

    def give_data(self, secret: int) -> None:
        """What is held counts from now on; who asks again is given it again, and nothing else changes."""
        self.most = self.most if self.has_data else 0
        self.has_data = True
        self._send(secret.to_bytes(LENGTH, "big"))

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # gone, as will be seen
            self.line.sendall(len(message).to_bytes(LENGTH, "big") + message)

    def look(self) -> None:
        self.most = max(self.most, held_by(self.process) or 0)

    def account(self, answer: bytes) -> Account:
        """Without the bytes of its answer."""
        after = sent_by(self.process)
        sent = None if self.sent_before is None or after is None else after - self.sent_before - LENGTH - len(answer)
        return Account(sent, None if self.held_before is None else self.most - self.held_before)


class Supervisor:
    """Runs functions on ranks that hold a submission. Close it: it has a process and a folder."""

    def __init__(self, lesson: Lesson, submission: Path):
        self.lesson, self.submission = lesson, submission
        self.folder = tempfile.TemporaryDirectory(prefix="grading-")
        self.places = stage(lesson, submission, Path(self.folder.name))
        self.nursery: subprocess.Popen | None = None
        self.number, self.accounts, self.left = 0, [], 0
        self.secrets, self.data_secrets = ({rank: secrets.randbelow(2**40) for rank in range(16)} for _ in range(2))

    def run(self, function, world_size: int, *args, timeout: float, counted: bool = False) -> list:
        """function(*args) on each of world_size new ranks; their results, rank 0's first.

        counted: `accounts` are then what the kernel counted.

        Raises: RankError and TimeoutError as `foundations.ranks.run`; ChildProcessError if the nursery was ended.
        """
        work, wards = cloudpickle.dumps((function, args)), []
        self._start()
        self.number += 1
        folder = f"{self.places['runs']}/{self.number}"
        try:
            for rank in range(world_size):
                wards.append(self._fork(dict(rank=rank, world_size=world_size, timeout=timeout, folder=folder,
                                             secret=self.secrets[rank])))
            return self._gather(wards, work, timeout, counted)
        finally:
            self._end(wards)

    def close(self) -> None:
        if self.nursery:
            end_all_below(self.nursery.pid)
            self.nursery.kill()
            self.nursery.wait()
            self.control.close()
            self.nursery = None
        self.folder.cleanup()

    # -------------------------------------------------------------------------------------------------- the nursery

    def _start(self) -> None:
        if self.nursery and self.nursery.poll() is None:
            return
        self.control, theirs = socket.socketpair()
        house = self.places["house"]
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | {
            "PYTHONPATH": house, "PYTHONDONTWRITEBYTECODE": "1", "HOME": self.places["runs"],
            "TMPDIR": self.places["runs"], "OMP_NUM_THREADS": "1"}
        self.printed = tempfile.TemporaryFile()
        self.nursery = subprocess.Popen(
            [sys.executable, "-m", "zero_minimal.classroom.nursery", str(theirs.fileno()), json.dumps(self.places)],
            cwd=house, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self.printed,
            stderr=subprocess.STDOUT)
        theirs.close()
        self.control.settimeout(START)
        if self.control.makefile().readline() != "ready\n":
            self.printed.seek(0)
            raise RuntimeError(f"no ranks can be started:\n{self.printed.read().decode(errors='replace')[-3000:]}")
        self.control.settimeout(ANSWER)

    def _ask(self, request: dict, *descriptors: int):
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
            answer = self.control.recv(100)
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            self.nursery.kill()
            self.nursery.wait()
            raise ChildProcessError("a process of the grader's was killed while this test ran")
        return json.loads(answer)

    def _fork(self, setup: dict) -> Ward:
        ours, theirs = socket.socketpair()
        stacks, writes = os.pipe()
        os.set_blocking(stacks, False)
        try:
            return Ward(self._ask({"start": setup}, theirs.fileno(), writes), ours, stacks)
        finally:
            theirs.close()
            os.close(writes)

    def _end(self, wards: list[Ward]) -> None:
        for ward in wards:
            ward.signal(signal.SIGKILL)
            ward.line.close()
            os.close(ward.stacks)
        if self.nursery.poll() is None:
            for ward in wards:
                self._ended(ward)
            self.left = end_all_below(self.nursery.pid)

    def _ended(self, ward: Ward) -> int | None:
        """The exit code of a rank that has ended, or was killed."""
        code, ward.process = self._ask({"ended": ward.process}) if ward.process else None, None
        return code

    # ---------------------------------------------------------------------------------------------------- the ranks

    def _gather(self, wards: list[Ward], work: bytes, timeout: float, counted: bool) -> list:
        """One answer a rank, or the failure that came first."""
        deadline, begun = time.monotonic() + timeout, set()
        answers, failures = {}, {}
        while len(answers) + len(failures) < len(wards):
            pending = {ward.line: rank for rank, ward in enumerate(wards) if rank not in answers | failures}
            left = deadline - time.monotonic()
            if left <= 0 and failures:
                break
            if left <= 0:
                raise TimeoutError(_where_they_stand(wards, sorted(pending.values()), timeout))
            ready, _, _ = select.select(list(pending), [], [], LOOK if counted else left)
            for ward in wards if counted else ():
                ward.look()
            for rank in map(pending.get, ready):
                with contextlib.suppress(BlockingIOError):
                    self._hear(rank, wards, work, begun, answers, failures)
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise_first(failures, len(wards))
        self.accounts = [ward.account(answers[rank]) for rank, ward in enumerate(wards)] if counted else []
        for ward in wards:
            with contextlib.suppress(OSError):
                ward.line.sendall(b"!")  # all are done
        return [_decoded(rank, answers[rank]) for rank in range(len(wards))]

    def _hear(self, rank: int, wards: list[Ward], work: bytes, begun: set, answers: dict, failures: dict) -> None:
        ward = wards[rank]
        try:
            message = ward.read()
        except (EOFError, OSError):  # it died without a word
            until = time.monotonic() + GRACE  # it may only have closed the line
            while lives(ward.process) and time.monotonic() < until:
                time.sleep(0.005)
            ward.signal(signal.SIGKILL)
            failures[rank] = Failure.of_death(self._ended(ward))
            return
        if message is None:
            return
        if message == HERE and rank not in begun:
            begun.add(rank)
            ward.begin(work)
        elif message == DATA:
            ward.give_data(self.data_secrets[rank])
        elif message.startswith(b"failure\n"):
            failures[rank] = _failure(message)
        else:
            answers[rank] = message


def _failure(message: bytes) -> Failure:
    try:
        told = json.loads(message.partition(b"\n")[2])
        words, kind = str(told["words"])[:10_000], str(told["kind"])
        fault = cloudpickle.dumps(Fault(words)) if kind == Fault.__name__ else None
        return Failure(float(told["seconds"]), bool(told["lost_a_peer"]), f"{kind}: {words}", fault)
    except (ValueError, TypeError, KeyError):
        return Failure(time.time(), False, "it answered with what no rank sends")


def _decoded(rank: int, answer: bytes):
    try:
        return results.decode(answer.removeprefix(b"result\n"))
    except ValueError as error:
        raise_first({rank: Failure(time.time(), False, str(error))}, rank + 1)


def _where_they_stand(wards: list[Ward], late: list[int], timeout: float) -> str:
    """Ask the ranks that are not done for their stacks."""
    for rank in late:
        wards[rank].signal(signal.SIGCONT)
        wards[rank].signal(signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"after {timeout:g} s rank {', '.join(map(str, late))} of {len(wards)} had not finished"]
    for rank in late:
        stack = b""
        with contextlib.suppress(BlockingIOError):
            stack = os.read(wards[rank].stacks, STACK)
        lines.append(f"\nrank {rank} stands here (innermost first):\n{stack.decode(errors='replace').rstrip()}")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------- the kernel's word


def sent_by(process: int) -> int | None:
    """Bytes that a process has written so far, by whichever of its threads and wherever to."""
    return _figure(f"/proc/{process}/io", "wchar:")


def held_by(process: int) -> int | None:
    """Bytes of memory that are a process's own now: what it allocated by whatever means, not the files it maps."""
    anonymous = _figure(f"/proc/{process}/status", "RssAnon:")
    return None if anonymous is None else 1024 * (anonymous + _figure(f"/proc/{process}/status", "RssShmem:"))


def _figure(file: str, label: str) -> int | None:
    with contextlib.suppress(OSError), open(file) as lines:
        for line in lines:
            if line.startswith(label):
                return int(line.split()[1])
    return None


def end_all_below(process: int) -> int:
    """Kill all that descends from a process, until none is left. Returns how many there were."""
    ended, until = set(), time.monotonic() + 5
    while (found := [child for child in descendants(process) if lives(child)]) and time.monotonic() < until:
        for child in found:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        ended |= set(found)
        time.sleep(0.01)
    return len(ended)


def descendants(process: int) -> list[int]:
    """Children of a process, their children, and so on. (Linux only: elsewhere none is seen.)"""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as listed:
                found += map(int, listed.read().split())
    return found + [below for child in found for below in descendants(child)]


def lives(process: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"
    return False
