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
from zero_minimal.classroom.accounts import end_all_below, held_by, lives, sent_by
from zero_minimal.classroom.guard import Fault
from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.nursery import DATA, HERE, LENGTH, READY
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

    nursery: "Nursery"
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

    def ended(self) -> int | None:
        """Its exit code, once it has ended or was killed."""
        code, self.process = self.nursery.ended(self.process) if self.process else None, None
        return code

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.line.close()
        os.close(self.stacks)
        if self.nursery.lives():
            self.ended()

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


class Nursery:
    """The judge's handle of a nursery.

    hash_seed: Python's, in it and all that it forks; None for one by chance.
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
            [sys.executable, "-m", "zero_minimal.classroom.nursery", str(theirs.fileno()), json.dumps(places)],
            cwd=places["house"], env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            stdout=self.printed, stderr=subprocess.STDOUT)
        theirs.close()

    def wait_until_ready(self) -> None:
        self.control.settimeout(START)
        if self.control.recv(100) != READY:
            self.printed.seek(0)
            raise RuntimeError(f"no ranks can be started:\n{self.printed.read().decode(errors='replace')[-3000:]}")
        self.control.settimeout(ANSWER)

    def lives(self) -> bool:
        return self.process.poll() is None

    def fork(self, setup: dict) -> Ward:
        ours, theirs = socket.socketpair()
        stacks, writes = os.pipe()
        os.set_blocking(stacks, False)
        try:
            return Ward(self, self._ask({"start": setup}, theirs.fileno(), writes), ours, stacks)
        finally:
            theirs.close()
            os.close(writes)

    def ended(self, process: int) -> int:
        """The exit code of a process of its own that has ended, or was killed."""
        return self._ask({"ended": process})

    def _ask(self, request: dict, *descriptors: int):
        try:
            socket.send_fds(self.control, [json.dumps(request).encode()], descriptors)
            answer = self.control.recv(100)
        except OSError:
            answer = b""
        if not answer.endswith(b"\n"):
            self.close()
            raise ChildProcessError("a process of the grader's was killed while this test ran")
        return json.loads(answer)

    def close(self) -> None:
        end_all_below(self.process.pid)
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.printed.close()


class Supervisor:
    """Runs functions on ranks that hold a submission. Close it: it has processes and a folder."""

    def __init__(self, lesson: Lesson, submission: Path):
        self.folder = tempfile.TemporaryDirectory(prefix="grading-")
        self.places = stage(lesson, submission, Path(self.folder.name))
        self.nursery: Nursery | None = None
        self.number, self.accounts, self.left = 0, [], 0
        self.secrets, self.data_secrets = ({rank: secrets.randbelow(2**40) for rank in range(16)} for _ in range(2))

    def run(self, function, world_size: int, *args, timeout: float, fresh: bool = False, counted: bool = False) -> list:
        """function(*args) on each of world_size new ranks; their results, rank 0's first.

        fresh: each rank from a nursery of its own, with another seed of Python's hashes; others share one.
        counted: `accounts` are then what the kernel counted.
        Raises: RankError and TimeoutError as `foundations.ranks.run`; ChildProcessError if a nursery was ended.
        """
        work, wards = cloudpickle.dumps((function, args)), []
        nurseries = self._nurseries(world_size, fresh)
        self.number += 1
        folder = f"{self.places['runs']}/{self.number}"
        try:
            for rank, nursery in enumerate(nurseries):
                wards.append(nursery.fork(dict(rank=rank, world_size=world_size, timeout=timeout, folder=folder,
                                               secret=self.secrets[rank])))
            return self._gather(wards, work, timeout, counted)
        finally:
            for ward in wards:
                ward.close()
            self.left = sum(end_all_below(nursery.process.pid) for nursery in set(nurseries) if nursery.lives())
            for nursery in nurseries if fresh else ():
                nursery.close()

    def _nurseries(self, world_size: int, fresh: bool) -> list[Nursery]:
        """One for each rank."""
        if fresh:
            nurseries = [Nursery(self.places, hash_seed=rank + 1) for rank in range(world_size)]
        else:
            if self.nursery and self.nursery.lives():
                return [self.nursery] * world_size
            self.close_nursery()
            self.nursery = Nursery(self.places)
            nurseries = [self.nursery] * world_size
        for nursery in dict.fromkeys(nurseries):
            nursery.wait_until_ready()
        return nurseries

    def close_nursery(self) -> None:
        if self.nursery:
            self.nursery.close()
            self.nursery = None

    def close(self) -> None:
        self.close_nursery()
        self.folder.cleanup()

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
            failures[rank] = Failure.of_death(ward.ended())
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
