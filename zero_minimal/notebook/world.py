"""Notebook: ranks for a notebook. One line starts them, and cells marked %%px run on each.

    from zero_minimal import notebook
    world = notebook.start(4)

    %%px
    x = torch.full((2,), float(rank))
    collectives.all_reduce(x, op="sum")

    world["x"]          the x of each rank, a list

A rank is an engine of ipyparallel, in a process group with the others. A cell finds there `rank`, `world_size`,
`device`, `torch`, `dist`, `collectives`, `ring`, and what cells before it have made. When a cell fails on a rank, or
all ranks wait for each other, the cell ends with a message that says where each rank stood; the ranks meet in a new
process group, and keep their variables. The ranks end with the notebook's kernel, in whatever way that ends
(guardian.py).
"""

import argparse
import atexit
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import connection
from pathlib import Path

import ipyparallel
from IPython import get_ipython
from IPython.core.pylabtools import select_figure_formats

from zero_minimal.notebook import rank as notebook_rank

START_SECONDS = 60  # the longest that a start may take
PATIENCE = 5.0  # seconds in which no rank computes, until a cell counts as stuck
LOOK_EVERY = 0.25  # seconds
WORKED = 0.03  # seconds of computing between two looks, all ranks together: less is waiting
GRACE = 3.0  # seconds in which a rank must let go of a cell, once its connections are cut and it is interrupted
MEET_SECONDS = 20  # the longest that a new process group may take
ALL_NEW = "All ranks were started again, and their variables are gone: run the notebook from its start line."

_world = None


def start(world_size: int, device: str = "auto") -> "World":
    """Start ranks, and let %%px run cells on them. Those of an earlier call are ended.

    Args:
        world_size: how many. The environment variable ZERO_RANKS, if there is one, has the last word.
        device: "cpu", "cuda", or "auto": a GPU for each rank where there are as many, else what ranks.choose chooses.
    """
    global _world
    if _world:
        _world.stop()
    _world = World(_count(os.environ.get("ZERO_RANKS", world_size)), device)
    shell = get_ipython()
    if shell:
        shell.register_magic_function(_px_cell, "cell", "px")
        shell.register_magic_function(_px_line, "line", "px")
        select_figure_formats(shell, {"png"}, dpi=90)
    print(_world)
    return _world


def how_far(guess: float, measured: float, unit: str = "") -> None:
    """Say how far a prediction is from what was measured."""
    words = f"measured: {float(measured):,.6g} {unit}".rstrip()
    if guess == measured:
        print(f"{words}. You said exactly that.")
    elif measured == 0:
        print(f"{words}. You said {guess:,.6g}.")
    else:
        side = "low" if guess < measured else "high"
        print(f"{words}. You said {guess:,.6g}: {abs(guess / measured - 1):.1%} too {side}.")


class CellError(RuntimeError):
    """A %%px cell failed, or was stuck. A notebook shows the message alone: the ranks' own tracebacks are in
    `world.tracebacks`."""

    def _render_traceback_(self):
        return str(self).splitlines()


class World:
    """The ranks of this notebook.

    world["name"] or world["any expression"]: its value on each rank, as a list.
    """

    def __init__(self, world_size: int, device: str):
        self.world_size, self.device = world_size, device
        self.tracebacks: dict[int, str] = {}  # of the ranks that failed in the last cell, in full
        self._cells = self._groups = 0
        self._guardian = None
        atexit.register(self.stop)
        self._start()

    def __str__(self):
        return f"{self._words()} on {self.place[0]}, {self.place[1]}: cells that begin with %%px run on each"

    def _words(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"

    def __getitem__(self, expression: str) -> list:
        return self._on_each(notebook_rank.value, expression)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="zero_ranks_"))
        with open(self._folder / "log.txt", "w") as log:
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "zero_minimal.notebook.guardian", str(self._folder),
                 str(self.world_size), self.device],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            )
        self._client = self._connect()
        self.place = self._on_each(notebook_rank.facts)[0]
        self.processes = self._on_each(os.getpid)

    def _connect(self):
        file = self._folder / "security" / "ipcontroller-client.json"
        deadline = time.monotonic() + START_SECONDS
        client = None
        while client is None or len(client.ids) < self.world_size:
            ended = list(self._folder.glob("*.ended"))
            if ended or self._guardian.poll() is not None or time.monotonic() > deadline:
                lines = (self._folder / "log.txt").read_text().splitlines()
                told = [line for line in dict.fromkeys(lines) if "[IP" not in line]  # not ipyparallel's own
                self.stop()
                reason = "\n".join(told) or "no answer in time"
                raise RuntimeError(f"{self._words()} could not be started:\n{reason}")
            if client is None and file.exists():
                with contextlib.suppress(ValueError):  # half written
                    client = ipyparallel.Client(str(file))
            time.sleep(0.02)
        return client

    def stop(self) -> None:
        """End the ranks. To be called as often as one likes."""
        if self._guardian is None:
            return
        with contextlib.suppress(Exception):
            self._client.close()
        self._guardian.stdin.close()  # the guardian reads the end of the file, and ends all
        self._guardian.wait()
        self._guardian = None

    def _on_each(self, function, *args) -> list:
        if self._guardian is None:
            raise CellError("there are no ranks: start them with `world = notebook.start(4)`")
        return self._client[:].apply_sync(function, *args)

    def _meet_again(self) -> None:
        """A new process group, in place of the one whose connections are cut."""
        self._groups += 1
        try:
            self._client[:].apply_async(notebook_rank.join, self._groups).get(timeout=MEET_SECONDS)
        except (TimeoutError, ipyparallel.error.IPythonError) as error:
            self._start_again()
            raise CellError(f"the ranks could not meet again ({error}). {ALL_NEW}") from None

    def _start_again(self) -> None:
        self.stop()
        self._start()

    # ----------------------------------------------------------------------------------------------------------- cells

    def run(self, code: str, patience: float = PATIENCE) -> None:
        """Run a cell on all ranks, and print what they print. Raises CellError if it fails, or is stuck."""
        if self._guardian is None:
            raise CellError("there are no ranks: start them with `world = notebook.start(4)`")
        self._cells += 1
        cell = Cell(self, code, f"<%%px {self._cells}>")
        cell.wait(patience)
        cell.show()
        failures, self.tracebacks = cell.failures(), {}
        if cell.lost:
            self._start_again()
            raise CellError(f"{cell.describe(failures)}\n{ALL_NEW}")
        if cell.cut_at is not None or failures:
            self.tracebacks = {rank: failure["traceback"] for rank, failure in failures.items()}
            self._meet_again()
        if failures or cell.interrupted:
            raise CellError(cell.describe(failures) + "\nThe ranks have met in a new process group, and keep their "
                            "variables: mend the cell, and run it again.")


class Cell:
    """A %%px cell under way."""

    def __init__(self, world: World, code: str, name: str):
        self.world, self.name = world, name
        self.everybody = range(world.world_size)
        self.answers = [world._client[rank].apply_async(notebook_rank.run_cell, code, name) for rank in self.everybody]
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
                places, now = self._ask(self._open(), "where"), time.monotonic()
                total = sum(place["worked"] for place in places.values())
                if abs(total - worked) > WORKED:
                    worked, worked_at = total, now
                if self.cut_at is None and self._open() and (self.failures() or self.lost):
                    self._cut()
                elif self.cut_at is None and now - worked_at > patience:
                    self.stuck = places
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
        places = {}
        for rank in ranks:
            note = self.world._folder / f"{rank}.ended"
            if note.exists():
                self.lost[rank] = note.read_text()
                continue
            with contextlib.suppress(OSError, EOFError):
                with connection.Client(str(self.world._folder / f"{rank}.socket"), "AF_UNIX") as line:
                    line.send((request, self.name))
                    if line.poll(1.0):
                        places[rank] = line.recv()
        return places

    def _cut(self) -> None:
        """End what the ranks do: waiting for messages by an error, all else by an interrupt."""
        self.cut_at = time.monotonic()
        self._ask(self._open(), "cut")
        self._pause()
        for rank in self._open():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.world.processes[rank], signal.SIGINT)

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


def _stand(places: dict[int, dict]) -> list[str]:
    """A line a rank: where in the cell it was, and in which function below."""
    lines = []
    for rank, place in places.items():
        cell = " of an earlier cell" if place["earlier"] else ""
        where = f"line {place['line']}{cell}: {place['source']}" if place["line"] else "not in the cell"
        lines.append(f"  rank {rank}, {where}" + (f"    (in {place['inside']})" if place["inside"] else ""))
    return lines


def _print_beside(name: str, text: str) -> None:
    for line in text.splitlines():
        print(f"{name} │ {line}")


# ---------------------------------------------------------------------------------------------------------------- %%px


class _Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise CellError(f"%%px: {message}. It is `%%px`, or `%%px --patience 60`")


def _px_cell(line: str, cell: str) -> None:
    """Run this cell on every rank. --patience S: let ranks wait for each other for so many seconds."""
    arguments = _Arguments(add_help=False)
    arguments.add_argument("--patience", type=float, default=PATIENCE)
    options = arguments.parse_args(shlex.split(line))
    _current().run(cell, options.patience)


def _px_line(line: str) -> None:
    """Run this line on every rank."""
    _current().run(line)


def _current() -> World:
    if _world is None:
        raise CellError("there are no ranks: start them with `world = notebook.start(4)`")
    return _world


def _count(words) -> int:
    try:
        count = int(words)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ValueError(f"the number of ranks is a whole number from 1 up, not {words!r}")
    return count
