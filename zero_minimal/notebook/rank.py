"""A rank of a notebook: an ipyparallel engine that has joined a process group, and runs the cells marked %%px.

Its main thread runs cells, and cannot answer while it waits in a collective; so a second thread answers when the
notebook asks where the rank is. On request it cuts the connections to the other ranks, so that waits fail, or
interrupts the main thread.
"""

import ast
import contextlib
import gc
import linecache
import os
import re
import signal
import socket
import stat
import threading
import traceback
from multiprocessing.connection import Listener
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist
from ipyparallel.engine.app import IPEngine
from IPython import get_ipython

from zero_minimal.core import collectives, seams
from zero_minimal.notebook import printed, recovery, stack_inspection
from zero_minimal.notebook.errors import Told, Withheld
from zero_minimal.offloading import host_process
from zero_minimal.processes import interrupts, ranks

HOURS = 24 * 3600  # the process group's timeout: the notebook watches ranks itself

names = {"torch": torch, "dist": dist, "collectives": collectives, "seams": seams}  # in every cell's namespace
try:
    from zero_minimal.core import ring
except ImportError:  # a teacher may withhold ring.py: it solves lesson 00
    ring = Withheld("ring")
names["ring"] = ring
_here: dict = {}  # folder, rank, world_size, device
_running: list[str] = []  # the running cell, if any
_changes = threading.Lock()  # to _running: a cell must not end while it is being cut or interrupted


def main(folder: str, rank: int, world_size: int, device: str, environment: dict[str, str]) -> None:
    """Join the other ranks, then wait for cells."""
    gc.freeze()  # imported objects are not garbage: the ledger skips them
    interrupts.let_in()
    os.environ.update(environment)
    _here.update(folder=folder, rank=rank, world_size=world_size, device=device)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # plt.show() means display(figure)
    printed.bars_as_text()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    host_process.many = True
    join(0)
    threading.Thread(target=_answer, daemon=True).start()
    engine = IPEngine.instance(user_ns=names)
    engine.initialize([f"--profile-dir={folder}", f"--IPEngine.id={rank}", "--IPEngine.enable_nanny=False",
                       "--log-level=WARN"])
    with seams.heard_by("collective", recovery.hear):
        engine.start()


def join(attempt: int) -> None:
    """Join the others in a new process group, which replaces an earlier one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world_size = _here["rank"], _here["world_size"]
    store = dist.FileStore(f"{_here['folder']}/store{attempt}", world_size)
    joined = ranks.join(store, rank, world_size, _here["device"], timeout=HOURS)
    names.update(rank=rank, world_size=world_size, device=joined.device)


def meet_again(attempt: int, half_done: bool) -> tuple[list[str], list[str]]:
    """Join a new process group after a failed cell. Returns names of unusable objects (recovery.close)."""
    closed = recovery.close(get_ipython().user_ns, half_done)
    recovery.forget()
    join(attempt)
    gc.collect()  # the error's stack holds the old group in a reference cycle: close its connections now
    return closed


def facts() -> tuple[str, str]:
    """Device type and backend, for the notebook's first line."""
    return names["device"].type, dist.get_backend()


# --------------------------------------------------------------------------------------------------------------- cells


def run_cell(code: str, name: str, file: Path, value: bool = False) -> tuple[bytes, dict | None, tuple[int, int]]:
    """Run a cell under its own file name. Its output goes to `file` (see printed.py).

    Returns: the pickled value, if `value` is True; the failure, or None (see `_failure`); the numbers of collectives
    that this rank has begun and ended (see recovery.py).
    """
    answer, failure, shell = b"", None, get_ipython()
    stack_inspection.begin()
    _running[:] = [name]
    with printed.into(file, shell):
        try:
            code = code.strip() if value else shell.transform_cell(code)  # magics
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            if value:
                answer = _pickled(eval(compile(code, name, "eval"), shell.user_ns))
            else:
                _execute(code, name, shell)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt
            failure = _failure(error, name)
        with _changes:
            _running.clear()
    return answer, failure, recovery.exchanged()


def _pickled(value) -> bytes:
    """A value with the classes and functions of cells that it needs. Tensors are copied to host memory."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().clone()
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"an object of type {kind} cannot be sent to the notebook ({error}): ask for a part of it, or "
                        "for its repr()") from None


def _execute(code: str, name: str, shell) -> None:
    """Run the code, and print the value of its last line if that is an expression, as a notebook does."""
    with stack_inspection.parsing:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        statements = compile(tree, name, "exec")
        expression = compile(ast.Expression(last.value), name, "eval") if last else None
    exec(statements, shell.user_ns)
    if expression:
        result = eval(expression, shell.user_ns)
        if result is not None and not code.rstrip().endswith(";"):
            printed.show_value(result, shell)
    printed.show_figures()


def _failure(error: BaseException, name: str) -> dict:
    if isinstance(error, SyntaxError) and error.filename == name:
        position = stack_inspection.NOWHERE | {"line": error.lineno, "source": (error.text or "").strip()}
    else:
        position = stack_inspection.position(traceback.extract_tb(error.__traceback__), name)
    text = "".join(traceback.format_exception(error))
    because_of_another = ranks.lost_a_peer(error) or isinstance(error, KeyboardInterrupt)
    return position | {
        "kind": type(error).__name__, "message": str(error), "traceback": text, "lost": because_of_another,
        "in_a_stage": recovery.in_a_stage(error.__traceback__), "told": isinstance(error, Told),
    }


# ------------------------------------------------------------------------------------------ what the second thread does


def _answer() -> None:
    with Listener(f"{_here['folder']}/{_here['rank']}.socket", "AF_UNIX") as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as caller:
                request, cell = caller.recv()
                with _changes:  # neither may affect what the main thread does after this cell
                    if request == "cut" and cell in _running:
                        cut()
                    if request == "interrupt" and cell in _running:
                        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                caller.send(stack_inspection.here(cell))


def cut() -> None:
    """Close the connections to other ranks: every wait for a message on them, here or there, fails at once."""
    controller = Path(_here["folder"], "security", "ipcontroller-engine.json").read_text()
    ports = set(map(int, re.findall(r" (\d+),?$", controller, re.MULTILINE)))
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # listdir's own descriptor is closed by now
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and connection.getpeername()[1] not in ports:
                    connection.shutdown(socket.SHUT_RDWR)
