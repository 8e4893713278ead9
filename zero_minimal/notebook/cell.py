"""Cell: code that runs on every rank of a notebook, watched until all ranks finish or are stuck."""

import contextlib
import itertools
import pickle
import signal
import time
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import ipyparallel

from zero_minimal.notebook import rank as notebook_rank
from zero_minimal.notebook import stack_inspection
from zero_minimal.notebook.errors import NotHere, Told
from zero_minimal.notebook.printed import Printed, Screen, stand

PATIENCE = 5.0  # seconds of all ranks waiting for each other after which a cell counts as stuck
LOOK_EVERY = 0.25  # seconds
ANSWER_WITHIN = 1.0  # seconds: a rank may be deep in C code
IDLE = 0.05  # share of a processor that a waiting rank may use, for heartbeats and incoming messages
GRACE = 5.0  # seconds in which a rank must leave a cell after its connections are cut and it is interrupted

_numbers = itertools.count()  # of the files that ranks print into


class CellError(Told):
    """A %%px cell failed, or was stuck. The ranks' own tracebacks are in `world.tracebacks`."""


class Stillness:
    """Measures how long all ranks have waited for each other: each was in the same wait at every look, and its process
    did not compute."""

    def __init__(self):
        self.begin, self.since = {}, time.monotonic()  # where the ranks were at its start, and the time

    def seconds(self, positions: dict[int, dict], ranks: list[int]) -> float:
        """Seconds until now. positions: where each of these ranks that answered is."""
        now = time.monotonic()
        allowed = IDLE * (1 + now - self.since)  # grows with time, as heartbeats add up
        if positions.keys() != self.begin.keys() or any(
            position["stack"] != self.begin[rank]["stack"] or position["worked"] - self.begin[rank]["worked"] > allowed
            for rank, position in positions.items()
        ):
            self.begin, self.since = positions, now
        if len(positions) < len(ranks) or not all(position["waits"] for position in positions.values()):
            self.begin, self.since = {}, now
        return now - self.since


class Cell:
    """A running %%px cell.

    Args:
        client: an ipyparallel client, connected to the ranks.
        folder: holds the sockets of the ranks (RANK.socket).
        processes: those of the ranks.
        code, name: the code to run, and its file name in tracebacks.
        value: the code is an expression, and its value on each rank is returned.
    """

    def __init__(self, client, folder: Path, processes: list[BaseProcess], code: str, name: str, value: bool = False):
        self.folder, self.name, self.processes, self.everybody = folder, name, processes, range(len(processes))
        files = [folder / f"{rank}.printed{next(_numbers)}" for rank in self.everybody]
        self.printed = [Printed(file) for file in files]
        self.answers = [client[rank].apply_async(notebook_rank.run_cell, code, name, files[rank], value)
                        for rank in self.everybody]
        self.positions: dict[int, dict] = {}  # where each rank was when it last answered
        self.stuck: dict[int, dict] = {}  # where each rank was when all waited for each other
        self.waited = 0.0  # seconds of waiting before the cell counted as stuck
        self.lost: dict[int, str] = {}  # ranks that ended or could not be interrupted, and how
        self.interrupted = False
        self.cut_at: float | None = None

    def wait(self, patience: float, screen: Screen | None = None) -> None:
        """Wait until every rank has finished. Ranks that wait for a failed or waiting rank are interrupted. Meanwhile
        the screen, if any, shows what the ranks print and where they are."""
        stillness = Stillness()
        while self._open():
            try:
                self._pause()
                asked = self._open()
                positions = self._ask(asked, "where")
                self.positions |= positions
                if screen:
                    self.read()
                    screen.update(self.printed, {rank: self.positions.get(rank) for rank in self._open()})
                still = stillness.seconds(positions, asked)
                if self.cut_at is None and self._open() and (self.failures() or self.lost):
                    self._cut()
                elif self.cut_at is None and still > patience:
                    self.stuck, self.waited = positions, patience
                    self._cut()
            except KeyboardInterrupt:
                self.interrupted = True
                self._cut()
            if self.cut_at is not None and time.monotonic() - self.cut_at > GRACE:
                self.lost |= {rank: "could not be woken" for rank in self._open() if rank not in self.lost}
                break
        self.read()

    def read(self) -> None:
        """Read what the ranks have printed."""
        for rank in self.printed:
            rank.read()

    def _open(self) -> list[int]:
        """The ranks that have not finished, and still can."""
        return [rank for rank in self.everybody if rank not in self.lost and not self.answers[rank].ready()]

    def _pause(self) -> None:
        """Sleep briefly, or less if all ranks finish."""
        end = time.monotonic() + LOOK_EVERY
        while time.monotonic() < end and self._open():
            time.sleep(0.005)

    def _ask(self, ranks: list[int], request: str) -> dict[int, dict]:
        """Where these ranks are: {rank: see stack_inspection.here}, if they answer. A rank that has ended is lost."""
        lines, positions = {}, {}
        for rank in ranks:
            if (code := self.processes[rank].exitcode) is not None:
                self.lost[rank] = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended, exit code {code}"
                continue
            with contextlib.suppress(OSError):
                line = connection.Client(str(self.folder / f"{rank}.socket"), "AF_UNIX")
                lines[line] = rank
                line.send((request, self.name))
        end = time.monotonic() + ANSWER_WITHIN
        while lines and (ready := connection.wait(list(lines), max(0.0, end - time.monotonic()))):
            for line in ready:
                with line, contextlib.suppress(OSError, EOFError):
                    positions[lines.pop(line)] = line.recv()
        for line in lines:
            line.close()
        return positions

    def _cut(self) -> None:
        """Stop the ranks: waits for messages by an error, all else by an interrupt."""
        self.cut_at = time.monotonic()
        self._ask(self._open(), "cut")
        self._pause()
        self._ask(self._open(), "interrupt")

    # --------------------------------------------------------------------------------------------------------- telling

    def failures(self) -> dict[int, dict]:
        """{rank: how it failed}, for the ranks that failed."""
        told = {rank: self._told(rank)[1] for rank in self.everybody}
        return {rank: failure for rank, failure in told.items() if failure}

    def _told(self, rank: int) -> tuple[bytes, dict | None, tuple[int, int]]:
        """A rank's answer: see rank.run_cell."""
        answer = self.answers[rank]
        if rank in self.lost or not answer.ready():
            return b"", None, (0, 0)
        try:
            return answer.get()
        except ipyparallel.error.IPythonError as error:  # an interrupt that arrived after the cell
            return b"", stack_inspection.NOWHERE | {
                "kind": type(error).__name__, "message": str(error), "traceback": str(error), "lost": True,
                "in_a_stage": True, "told": False}, (0, 0)

    def left_half_done(self) -> bool:
        """Whether stages may have been stopped in the middle of their work (see recovery.py)."""
        counts = {count for rank in self.everybody for count in self._told(rank)[2]}
        return len(counts) > 1 or any(failure["in_a_stage"] for failure in self.failures().values())

    def in_an_attempt(self) -> bool:
        """Whether the failure or the wait is in the learner's own file, or that file cannot be run."""
        places = [*self.failures().values(), *self.stuck.values()]
        return any(place["attempt"] or place.get("told") for place in places)

    def asked_for_what_is_withheld(self) -> bool:
        """Whether the only failure is that a teacher withholds a module that the cell needs."""
        return {failure["kind"] for failure in self.failures().values()} == {NotHere.__name__}

    def values(self) -> list:
        """The expression's value on each rank. Raises: CellError if it cannot be unpickled here."""
        try:
            return [pickle.loads(self._told(rank)[0]) for rank in self.everybody]
        except Exception as error:
            raise CellError(f"what the ranks sent cannot be read here: {type(error).__name__}: {error}") from None

    def in_one_line(self, failures: dict[int, dict]) -> str:
        """For an expression: where it failed, and why."""
        own = {rank: failure for rank, failure in failures.items() if not failure["lost"]}
        why = {rank: _why(failure) for rank, failure in (own or failures).items()}
        first = next(iter(why.values()))
        where = ", ".join(f"rank {rank}" for rank, words in why.items() if words == first)
        return first if len(set(why.values())) == 1 and len(why) == len(self.everybody) else f"{first} ({where})"

    def describe(self, failures: dict[int, dict]) -> str:
        """What went wrong, in words."""
        own = {rank: failure for rank, failure in failures.items() if not failure["lost"]}
        others = {rank: failure for rank, failure in failures.items() if failure["lost"]}
        lost = [f"rank {rank}: {how}." for rank, how in self.lost.items()]
        if self.interrupted:
            return "\n".join(["interrupted. Then", *stand(failures), *lost])
        if self.stuck:
            return "\n".join([*self._describe_stuck(), *lost])
        if lost:
            return "\n".join(lost)
        lines = []
        for rank, failure in (own or others).items():
            lines += [f"rank {rank} failed: {_why(failure)}", *stand({rank: failure})]
        same = {(failure["kind"], failure["message"], failure["line"]) for failure in own.values()}
        if {failure["kind"] for failure in own.values()} == {"Mismatch"}:  # the error names all ranks: once
            lines = [lines[0].partition("Mismatch: ")[2], *stand(own)]
        elif len(same) == 1 and len(own) == len(self.everybody) > 1:
            lines = [lines[0].replace("rank 0", "all ranks"), lines[1].replace("rank 0", "all ranks")]
        if own and others:
            lines += ["and so these waited for nothing:", *stand(others)]
        return "\n".join(lines)

    def _describe_stuck(self) -> list[str]:
        waits = {rank: position | {"inside": f"waits in {position['waits']}"} for rank, position in self.stuck.items()}
        through = [f"  rank {rank} is through with the cell" for rank in self.everybody if rank not in self.stuck]
        return [
            f"stuck: for {self.waited:g} s each rank has waited for another one.", *stand(waits), *through,
            "Do all ranks call the same collectives, in the same order? Is there a send for each receive?",
            "If they are to wait longer: %%px --patience 60 (seconds).",
        ]


def _why(failure: dict) -> str:
    """The error in one line. An error that was written for the reader needs no class name."""
    return failure["message"] if failure["told"] else f"{failure['kind']}: {failure['message']}"
