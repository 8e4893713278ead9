"""Notebook: ranks for a notebook. One line starts them, and cells marked %%px run on each.

    from zero_minimal import notebook
    world = notebook.start(4)

    %%px
    x = torch.full((2,), float(rank))
    collectives.all_reduce(x, op="sum")

    world["x"]          each rank's x, in a list

A rank is an ipyparallel engine, in a process group with the others. A cell can use `rank`, `world_size`, `device`,
`torch`, `dist`, `collectives`, `ring`, and variables of earlier cells. What ranks print and draw is shown while the
cell runs.

If a cell fails on a rank, or all ranks wait for each other, the cell ends with a message that says where each rank was;
the ranks meet in a new process group, and keep their variables, except a few that the message names (recovery.py). A
cell that computes, prints or sleeps is never ended, however long it takes (stack_inspection.py). The ranks end with the
notebook's kernel, however that ends (guardian.py).
"""

import argparse
import atexit
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import ipyparallel
from IPython import get_ipython
from IPython.core.pylabtools import select_figure_formats

from zero_minimal.notebook import guardian, printed
from zero_minimal.notebook import rank as notebook_rank
from zero_minimal.notebook.ask import begin
from zero_minimal.notebook.cell import PATIENCE, Cell, CellError
from zero_minimal.paper.quantities import plural
from zero_minimal.processes import ranks

START_SECONDS = 60  # the maximum for a start
MEET_SECONDS = 20  # the maximum for a new process group
NO_RANKS = "there are no ranks: start them with `world = notebook.start(4)`"
ALL_NEW = "All ranks were started again, and their variables are gone: run the notebook from its start line."
KEPT = "The ranks have met in a new process group, and keep their variables"

ranks.forked.set_forkserver_preload(["zero_minimal.processes.warm", "zero_minimal.notebook.rank"])

_world = None


def start(world_size: int, device: str = "auto", lesson: str = "") -> "World":
    """Start ranks, and let %%px run cells on them. Ends the ranks of an earlier call.

    Args:
        world_size: how many. The environment variable ZERO_RANKS, if set, overrides it.
        device: "cpu", "cuda", or "auto": a GPU for each rank if there are enough, otherwise what ranks.choose chooses.
        lesson: the notebook's lesson, for the record of guesses (ask.py).
    """
    global _world
    begin(lesson)
    if _world:
        _world.stop()
    _world = World(_count(os.environ.get("ZERO_RANKS", world_size)), device)
    shell = get_ipython()
    if shell:
        shell.register_magic_function(_px_cell, "cell", "px")
        shell.register_magic_function(_px_line, "line", "px")
        select_figure_formats(shell, {"png"}, dpi=printed.DPI)
    print(_world)
    return _world


class World:
    """The ranks of this notebook.

    world["name"] or world["any expression"]: its values on all ranks, as a list.
    """

    def __init__(self, world_size: int, device: str):
        self.world_size, self.device = world_size, device
        self.tracebacks: dict[int, str] = {}  # full tracebacks of the ranks that failed in the last cell
        self._cells = self._groups = 0
        self._ranks: list[BaseProcess] = []
        atexit.register(self.stop)
        self._start()

    def __str__(self):
        ranks_here = plural(self.world_size, "rank")
        return f"{ranks_here} on {self.device_type}, {self.backend}: cells that begin with %%px run on each"

    def __getitem__(self, expression: str) -> list:
        """Raises: CellError if a rank cannot evaluate it, or the ranks wait for each other."""
        cell = self._cell(expression, f"<world[{expression!r}]>", value=True)
        failures = self._watch(cell, PATIENCE)
        kept = self._meet_again(cell) if cell.cut_at is not None else ""
        if cell.stuck or cell.interrupted:
            raise CellError(f"world[{expression!r}]: {cell.describe(failures)}\n{kept}")
        if failures:
            raise CellError(f"world[{expression!r}]: {cell.in_one_line(failures)}")
        return cell.values()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="zero_ranks_"))
        self._controller = self._begin(guardian.controller, 0)
        self._ranks = [self._begin(notebook_rank.main, self._controller.pid, rank, self.world_size, self.device,
                                   dict(os.environ)) for rank in range(self.world_size)]
        self._client = self._connect()
        self.device_type, self.backend = self._on_each(notebook_rank.facts)[0]
        self.processes = self._on_each(os.getpid)

    def _begin(self, function: Callable, *args) -> BaseProcess:
        return ranks.begin(ranks.forked, guardian.process, function, str(self._folder), *args)

    def _connect(self) -> ipyparallel.Client:
        file = self._folder / "security" / "ipcontroller-client.json"
        deadline = time.monotonic() + START_SECONDS
        client = None
        while client is None or len(client.ids) < self.world_size:
            ended = [process for process in (self._controller, *self._ranks) if process.exitcode is not None]
            if ended or time.monotonic() > deadline:
                lines = (self._folder / "log.txt").read_text().splitlines()
                told = [line for line in dict.fromkeys(lines) if "[IP" not in line]  # not ipyparallel's own
                self.stop()
                reason = "\n".join(told) or "no answer in time"
                raise RuntimeError(f"{plural(self.world_size, 'rank')} could not be started:\n{reason}")
            if client is None and file.exists():
                with contextlib.suppress(ValueError):  # half-written file
                    client = ipyparallel.Client(str(file))
            time.sleep(0.02)
        return client

    def stop(self) -> None:
        """End the ranks. May be called repeatedly."""
        if not self._ranks:
            return
        with contextlib.suppress(Exception):
            self._client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._controller.pid, signal.SIGKILL)
        for process in (self._controller, *self._ranks):
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ranks = []

    def _on_each(self, function: Callable, *args) -> list:
        if not self._ranks:
            raise CellError(NO_RANKS)
        return self._client[:].apply_sync(function, *args)

    def _meet_again(self, cell: Cell) -> str:
        """Replace the process group whose connections were cut after a failed cell. Returns what to run again."""
        self._groups += 1
        try:
            met = self._client[:].apply_async(notebook_rank.meet_again, self._groups, cell.left_half_done())
            gone = met.get(timeout=MEET_SECONDS)
        except (TimeoutError, KeyboardInterrupt, ipyparallel.error.IPythonError) as error:
            self._start_again()
            raise CellError(f"the ranks could not meet again ({error or 'interrupted'}). {ALL_NEW}") from None
        groups, stages = ([*dict.fromkeys(itertools.chain(*names))] for names in zip(*gone, strict=True))
        if cell.asked_for_what_is_withheld():
            return f"{KEPT}."
        this = "your file" if cell.in_an_attempt() else "the cell"
        if not stages and not groups:
            return f"{KEPT}: mend {this}, and run {'the cell' if cell.in_an_attempt() else 'it'} again."
        why = [f"{', '.join(stages)} (a step may be half done)"] if stages else []
        why += [f"{', '.join(groups)} (of the old group)"] if groups else []
        these = "these, and their models" if stages else "these"
        return (f"{KEPT}, but for {', '.join(why)}.\n"
                f"Mend {this}. Run again the cells that make {these}; then this one.")

    def _start_again(self) -> None:
        self.stop()
        self._start()

    # ----------------------------------------------------------------------------------------------------------- cells

    def run(self, code: str, patience: float = PATIENCE, screen: printed.Screen | None = None) -> None:
        """Run a cell on all ranks, and print their output. Raises CellError if it fails or is stuck."""
        self._cells += 1
        cell = self._cell(code, f"<%%px {self._cells}>")
        failures = self._watch(cell, patience, screen)
        self.tracebacks = {rank: failure["traceback"] for rank, failure in failures.items()}
        if failures or cell.cut_at is not None:
            raise CellError(f"{cell.describe(failures)}\n{self._meet_again(cell)}")

    def _cell(self, code: str, name: str, value: bool = False) -> Cell:
        if not self._ranks:
            raise CellError(NO_RANKS)
        return Cell(self._client, self._folder, self._ranks, code, name, value)

    def _watch(self, cell: Cell, patience: float, screen: printed.Screen | None = None) -> dict[int, dict]:
        """Wait until all ranks finish the cell or are stopped. Shows their output, and returns their failures."""
        cell.wait(patience, screen)
        failures = cell.failures()
        if screen:
            screen.clear(something_follows=any(pages.pieces for pages in cell.printed))
        printed.show(cell.printed)
        if cell.lost:
            self._start_again()
            raise CellError(f"{cell.describe(failures)}\n{ALL_NEW}")
        return failures


# ---------------------------------------------------------------------------------------------------------------- %%px


class _Arguments(argparse.ArgumentParser):
    def error(self, message):
        raise CellError(f"%%px: {message}. It is `%%px`, or `%%px --patience 60`")


def _px_cell(line: str, cell: str) -> None:
    """Run this cell on every rank. --patience S: let ranks wait for each other for S seconds.

    Meanwhile their output is shown. (Not for `%px LINE`, which shares its cell and so cannot clear it.)
    """
    arguments = _Arguments(add_help=False)
    arguments.add_argument("--patience", type=float, default=PATIENCE)
    options = arguments.parse_args(shlex.split(line))
    _current().run(cell, options.patience, printed.Screen() if printed.anybody_there() else None)


def _px_line(line: str) -> None:
    """Run this line on every rank."""
    _current().run(line)


def _current() -> World:
    if _world is None:
        raise CellError(NO_RANKS)
    return _world


def _count(words: str | int) -> int:
    try:
        count = int(words)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ValueError(f"the number of ranks is a whole number from 1 up, not {words!r}")
    return count
