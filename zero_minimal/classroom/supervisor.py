"""Supervisor: the judge's side of the ranks that run a submission. It starts and times them, measures their memory and
traffic through the kernel, reads their results as data, and ends all processes that they leave.

Nothing here trusts a rank (sandboxed_ranks.py). Time while other programs have the processors does not count.
"""

import json
import secrets
import select
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle

from zero_minimal.classroom import hosts, results
from zero_minimal.classroom.accounts import BUSY, Busy, Clock, end_all_below, lives
from zero_minimal.classroom.course_copy import stage
from zero_minimal.classroom.fork_server import DATA, HERE
from zero_minimal.classroom.guard import Fault
from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.messages import DIED_AT
from zero_minimal.classroom.sandboxed_ranks import START, ForkServer, Process, RankHandle
from zero_minimal.processes.failures import GRACE, Failure, raise_first

LOOK = 0.01  # seconds between two readings of the ranks' memory
TICK = 0.2  # seconds between two readings of their time
SLOWEST = 10  # wall-clock time, as a multiple of a run's limit, at which the machine is too busy to judge


class Supervisor:
    """Runs functions on ranks that have a submission. Close it: it has processes and a folder.

    places, fork_server: the result of `stage`, and a fork server there, if they are ready (plugin.py); by
        default it makes its own.
    """

    def __init__(self, lesson: Lesson, submission: Path, places: dict | None = None,
                 fork_server: ForkServer | None = None):
        self.folder = None if places else tempfile.TemporaryDirectory(prefix="grading-")
        self.places = places or stage(lesson, submission, Path(self.folder.name))
        self.fork_server = fork_server
        self.accounts, self.left = [], 0
        self.spent = 0.0  # seconds of all runs so far, as Clock counts them
        self.beat = lambda: None  # called regularly while ranks run
        self.secrets, self.data_secrets = ({rank: secrets.randbelow(2**40) for rank in range(16)} for _ in range(2))

    def run(self, function, world_size: int, *args, timeout: float, fresh: bool = False, counted: bool = False) -> list:
        """function(*args) on each of world_size new ranks; their results, rank 0's first.

        fresh: each rank has its own fork server, with another hash seed of Python; otherwise they share one.
        counted: `accounts` then has what the kernel counted.
        timeout: seconds as Clock counts them.
        Raises: RankError and TimeoutError as `ranks.run`; ChildProcessError if a fork server was ended; Busy.
        """
        work, handles = cloudpickle.dumps((function, args)), []
        fork_servers = self._fork_servers(world_size, fresh)
        folder = f"{self.places['runs']}/{secrets.token_hex(8)}"  # a new one, which the ranks make
        clock = Clock()
        try:
            for rank, fork_server in enumerate(fork_servers):
                handles.append(fork_server.fork(dict(
                    rank=rank, world_size=world_size, timeout=SLOWEST * timeout + START, folder=folder,
                    secret=self.secrets[rank])))
            return self._gather(handles, work, clock, timeout, counted)
        finally:
            clock.look()
            self.spent += clock.spent
            for handle in handles:
                handle.close()
            self.left = sum(end_all_below(fork_server.pid) for fork_server in set(fork_servers) if fork_server.lives())
            for fork_server in fork_servers if fresh else ():
                fork_server.close()

    def _fork_servers(self, world_size: int, fresh: bool) -> list[ForkServer]:
        """A fork server for each rank."""
        if fresh:
            fork_servers = [ForkServer(self.places, hash_seed=rank + 1) for rank in range(world_size)]
            for fork_server in fork_servers:
                fork_server.wait_until_ready(self.beat)
            return fork_servers
        if not (self.fork_server and self.fork_server.lives()):
            self._end_fork_server()
            self.fork_server = ForkServer(self.places)
            self.fork_server.wait_until_ready(self.beat)
        return [self.fork_server] * world_size

    def _end_fork_server(self) -> None:
        if self.fork_server:
            self.fork_server.close()

    def close(self) -> None:
        if self.folder:  # otherwise they belong to the caller
            self._end_fork_server()
            self.folder.cleanup()

    def _gather(self, handles: list[RankHandle], work: bytes, clock: Clock, timeout: float, counted: bool) -> list:
        """One answer from each rank, or the failure that came first."""
        until, answers, failures = timeout, {}, {}
        while len(answers) + len(failures) < len(handles):
            pending = {handle.line: rank for rank, handle in enumerate(handles) if rank not in answers | failures}
            if time.monotonic() > clock.looked + TICK:
                clock.look(process for handle in handles for process in handle.processes())
                self.beat()
            if clock.spent >= until and failures:
                break
            if clock.spent >= until:
                raise TimeoutError(_where_they_stand(handles, sorted(pending.values()), timeout))
            if clock.passed > SLOWEST * timeout:
                raise Busy(BUSY.format(f"other programs had its processors for most of {clock.passed:.0f} s while "
                                       "ranks stood ready to run"))
            ready, _, _ = select.select(list(pending), [], [], LOOK if counted else TICK)
            for handle in handles if counted else ():
                handle.look()
            for rank in map(pending.get, ready):
                self._hear(rank, handles[rank], work, answers, failures)
                if failures:
                    until = min(until, clock.spent + GRACE)
        if failures:
            raise_first(failures, len(handles))
        self.accounts = [handle.account(answers[rank]) for rank, handle in enumerate(handles)] if counted else []
        for handle in handles:
            handle.send(b"!")  # all are done
        return [_decoded(rank, answers[rank]) for rank in range(len(handles))]

    def _hear(self, rank: int, handle: RankHandle, work: bytes, answers: dict, failures: dict) -> None:
        try:
            message = handle.line.recv_bytes(results.MOST)  # half a message: ended with this judge
        except (EOFError, OSError):  # it died without a message
            until = time.monotonic() + GRACE  # it may only have closed its line
            while lives(handle.process) and time.monotonic() < until:
                time.sleep(0.005)
            handle.signal(signal.SIGKILL)
            death = Failure.of_death(handle.ended())
            stack = handle.stack()
            failures[rank] = replace(death, words=f"{death.words}{DIED_AT}{stack}") if stack else death
            return
        if message == HERE and not handle.has_begun:
            handle.begin(work)
        elif message == DATA:
            handle.give_data(self.data_secrets[rank])
        elif message.startswith(hosts.REQUEST):
            size = int.from_bytes(message[len(hosts.REQUEST) :], "big")
            handle.lend_host(dict(rank=rank, folder=handle.folder), size)
        elif message.startswith(b"failure\n"):
            failures[rank] = _failure(message, handle.hosts)
        else:
            answers[rank] = message


def _failure(message: bytes, of_rank: list[Process]) -> Failure:
    try:
        told = json.loads(message.partition(b"\n")[2])
        words, kind = str(told["words"])[:10_000], str(told["kind"])
        if "the host process of rank" in words and "is gone" in words:
            until = time.monotonic() + GRACE
            while all(lives(host.process) for host in of_rank) and time.monotonic() < until:
                time.sleep(0.005)
            words = "\n".join([words.partition(",")[0], *filter(None, map(_how_it_ended, of_rank))])
        fault = cloudpickle.dumps(Fault(words)) if kind == Fault.__name__ else None
        return Failure(float(told["seconds"]), bool(told["lost_a_peer"]), f"{kind}: {words}", fault)
    except (ValueError, TypeError, KeyError):
        return Failure(time.time(), False, "it answered with what no rank sends")


def _decoded(rank: int, answer: bytes):
    try:
        return results.decode(answer.removeprefix(b"result\n"))
    except ValueError as error:
        raise_first({rank: Failure(time.time(), False, str(error))}, rank + 1)


def _where_they_stand(handles: list[RankHandle], late: list[int], timeout: float) -> str:
    """Ask the unfinished ranks for their stacks."""
    for rank in late:
        for process in (handles[rank], *handles[rank].hosts):
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGUSR1)
    stacks = {process.stacks for rank in late for process in (handles[rank], *handles[rank].hosts)}
    patience = time.monotonic() + GRACE
    while stacks and time.monotonic() < patience:
        stacks -= set(select.select(list(stacks), [], [], GRACE)[0])
    time.sleep(0.3)  # for the rest of the stacks
    lines = [f"after {timeout:g} s rank {', '.join(map(str, late))} of {len(handles)} had not finished"]
    for rank in late:
        lines.append(f"\nrank {rank} stands here (innermost first):\n{handles[rank].stack()}")
        lines += [f"\nhost of rank {rank} stands here (innermost first):\n{host.stack()}"
                  for host in handles[rank].hosts if lives(host.process)]
    return "\n".join(lines)


def _how_it_ended(host: Process) -> str:
    """How a host was killed or crashed."""
    if lives(host.process):
        return ""
    code = host.ended()
    return f"{Failure.of_death(code).words}{DIED_AT}{host.stack()}" if code else ""
