"""Cell: code that runs on every rank of a notebook, watched until all are through or stuck."""

import contextlib
import os
import signal
import time
from multiprocessing import connection
from pathlib import Path

import ipyparallel

from zero_minimal.notebook import rank as notebook_rank

PATIENCE = 5.0  # seconds in which no rank computes, until a cell counts as stuck
LOOK_EVERY = 0.25  # seconds
WORKED = 0.03  # seconds of computing between two looks, all ranks together: less is waiting
GRACE = 3.0  # seconds in which a rank must let go of a cell, once its connections are cut and it is interrupted


class CellError(RuntimeError):
    """A %%px cell failed, or was stuck. A notebook shows the message alone: the ranks' own tracebacks are in
    `world.tracebacks`."""

    def _render_traceback_(self):
        return str(self).splitlines()


class Cell:
    """A %%px cell under way.

    Args:
        client: ipyparallel's, connected to the ranks.
        folder: where a rank listens (RANK.socket), and where it is noted that one has ended (RANK.ended).
        processes: the ranks' process ids.
        code, name: what to run, and the file name it goes by in tracebacks.
    """

    def __init__(self, client: ipyparallel.Client, folder: Path, processes: list[int], code: str, name: str):
        self.folder, self.processes, self.name = folder, processes, name
        self.everybody = range(len(processes))
        self.answers = [client[rank].apply_async(notebook_rank.run_cell, code, name) for rank in self.everybody]
        self.stuck: dict[int, dict] = {}  # where each rank stood, when all waited for each other
        self.lost: dict[int, str] = {}  # ranks that ended, or could not be woken, and how
        self.interrupted = False
        self.cut_at: float | None = None

    def wait(self, patience: float) -> None:
        """Until every rank is through. Whoever waits for a rank that failed, or for one that waits too, is woken."""
        worked, worked_at = -1.0, time.monotonic()
        while self._open():
            try:
                self._pause()
                positions, now = self._ask(self._open(), "where"), time.monotonic()
                total = sum(position["worked"] for position in positions.values())
                if abs(total - worked) > WORKED:
                    worked, worked_at = total, now
                if self.cut_at is None and self._open() and (self.failures() or self.lost):
                    self._cut()
                elif self.cut_at is None and now - worked_at > patience:
                    self.stuck = positions
                    self._cut()
            except KeyboardInterrupt:
                self.interrupted = True
                self._cut()
            if self.cut_at is not None and time.monotonic() - self.cut_at > GRACE:
                self.lost |= {rank: "could not be woken" for rank in self._open() if rank not in self.lost}
                return

    def _open(self) -> list[int]:
        """The ranks that are not through, and can still be."""
        return [rank for rank in self.everybody if rank not in self.lost and not self.answers[rank].ready()]

    def _pause(self) -> None:
        """A moment, or less if all ranks are through."""
        end = time.monotonic() + LOOK_EVERY
        while time.monotonic() < end and self._open():
            time.sleep(0.005)

    def _ask(self, ranks: list[int], request: str) -> dict[int, dict]:
        """Where these ranks stand: {rank: its line, and the seconds it has worked}. One that has ended is lost."""
        positions = {}
        for rank in ranks:
            note = self.folder / f"{rank}.ended"
            if note.exists():
                self.lost[rank] = note.read_text()
                continue
            with contextlib.suppress(OSError, EOFError):
                with connection.Client(str(self.folder / f"{rank}.socket"), "AF_UNIX") as line:
                    line.send((request, self.name))
                    if line.poll(1.0):
                        positions[rank] = line.recv()
        return positions

    def _cut(self) -> None:
        """End what the ranks do: waiting for messages by an error, all else by an interrupt."""
        self.cut_at = time.monotonic()
        self._ask(self._open(), "cut")
        self._pause()
        for rank in self._open():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank], signal.SIGINT)

    # --------------------------------------------------------------------------------------------------------- telling

    def failures(self) -> dict[int, dict]:
        """{rank: how it failed}, of those that have."""
        told = {rank: self._told(rank)[1] for rank in self.everybody}
        return {rank: failure for rank, failure in told.items() if failure}

    def _told(self, rank: int) -> tuple[str, dict | None]:
        answer = self.answers[rank]
        if rank in self.lost or not answer.ready():
            return "", None
        try:
            return answer.get()
        except ipyparallel.error.IPythonError as error:  # an interrupt that came too late for the cell
            return "", {"kind": type(error).__name__, "message": str(error), "traceback": str(error), "lost": True,
                        "line": None, "source": "", "earlier": False, "inside": ""}

    def show(self) -> None:
        """What the ranks have printed: once, where it is the same on all of them."""
        texts = [self._told(rank)[0].rstrip() for rank in self.everybody]
        if len(texts) > 1 and len(set(texts)) == 1:
            _print_beside("all ranks", texts[0])
            return
        for rank, text in enumerate(texts):
            _print_beside(f"rank {rank}", text)

    def describe(self, failures: dict[int, dict]) -> str:
        """What went wrong, in words."""
        own = {rank: failure for rank, failure in failures.items() if not failure["lost"]}
        others = {rank: failure for rank, failure in failures.items() if failure["lost"]}
        if self.interrupted:
            return "\n".join(["interrupted. Then", *_stand(failures)])
        if self.lost:
            return "\n".join([f"rank {rank}: {how}." for rank, how in self.lost.items()])
        if self.stuck:
            through = [f"  rank {rank} is through with the cell" for rank in self.everybody if rank not in self.stuck]
            return "\n".join([
                "stuck: no rank computes, so they wait for each other.", *_stand(self.stuck), *through,
                "Do all ranks call the same collectives, in the same order? Is there a send for each receive?",
                "If they are to wait longer: %%px --patience 60 (seconds).",
            ])
        lines = []
        for rank, failure in (own or others).items():
            lines += [f"rank {rank} failed: {failure['kind']}: {failure['message']}", *_stand({rank: failure})]
        same = {(failure["kind"], failure["message"], failure["line"]) for failure in own.values()}
        if len(same) == 1 and len(own) == len(self.everybody) > 1:
            lines = [lines[0].replace("rank 0", "all ranks"), lines[1].replace("rank 0", "all ranks")]
        if own and others:
            lines += ["and so these waited for nothing:", *_stand(others)]
        return "\n".join(lines)


def _stand(positions: dict[int, dict]) -> list[str]:
    """A line a rank: where in the cell it was, and in which function below."""
    lines = []
    for rank, position in positions.items():
        cell = " of an earlier cell" if position["earlier"] else ""
        where = f"line {position['line']}{cell}: {position['source']}" if position["line"] else "not in the cell"
        lines.append(f"  rank {rank}, {where}" + (f"    (in {position['inside']})" if position["inside"] else ""))
    return lines


def _print_beside(name: str, text: str) -> None:
    for line in text.splitlines():
        print(f"{name} │ {line}")
