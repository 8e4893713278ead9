"""Ranks: N processes that run the same program and communicate through collectives.

A program becomes a rank in one of three ways, and its code is the same in all of them:

    torchrun --nproc-per-node 4 program.py      torchrun starts the ranks, `start()` joins them
    python program.py                           `start()` makes a world of one rank
    ranks.run(function, 4)                      four new ranks run `function`, and this Python
                                                process or notebook gets their results

This file is about the third. joining.py has how a process joins the others, failures.py how they
end together when one of them fails; the names that a program needs from both are here, too.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

import cloudpickle
import torch
import torch.distributed as dist

from zero_minimal.processes import interrupts
from zero_minimal.processes.failures import GRACE, Failure, RankError, lost_a_peer, raise_first
from zero_minimal.processes.joining import Rank, choose, come_to_the_end, join, start

__all__ = ["Rank", "RankError", "choose", "join", "lost_a_peer", "run", "start"]

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["zero_minimal.processes.warm"])
_fresh_context = multiprocessing.get_context("spawn")


def run(
    function: Callable, world_size: int, *args, timeout: float = 60, device: str = "auto",
    fresh: bool = False, before_join: Callable[[int, int], dict] | None = None, **kwargs
) -> list:
    """Call function(*args, **kwargs) on each of world_size new ranks; return their results, rank
    0's first.

    The ranks are forked from a server that has imported torch once, so that a start takes a
    fraction of a second. Inside, the process group is up and `start()` yields this rank. Functions
    from a notebook, lambdas and closures are fine. Random state, threads and memory are fresh:
    nothing of an earlier run is left.

    fresh: each rank is a Python of its own from the start, as under torchrun, which takes seconds.
        Forked ones share the server's hash seed, and with it the order of a set of strings.
    before_join: called in each rank with its number and world_size; it may put the rank elsewhere
        (programs/two_nodes.py) and returns further options of joining.join.

    Raises:
        RankError: a rank raised, or died; the message names the rank that failed first and shows
            its traceback.
        TimeoutError: not all ranks were done after `timeout` seconds; the message says where each
            one is.
    Either way all ranks have ended when this returns.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: at least one rank is needed")
    device, backend = choose(device, None, world_size)
    try:
        work = cloudpickle.dumps((function, args, kwargs))
    except (TypeError, pickle.PicklingError) as error:
        name = getattr(function, "__qualname__", function)
        raise TypeError(f"{name} or its arguments cannot be sent to the ranks ({error}). What the "
                        "main file defines travels with all that it names, torch.ops too: put it "
                        "into a file of its own, and import that") from None
    before_join = cloudpickle.dumps(before_join)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                context = _fresh_context if fresh else forked
                ours, theirs = context.Pipe()
                setup = dict(
                    rank=rank, world_size=world_size, device=device, backend=backend,
                    timeout=timeout, folder=folder, environment=dict(os.environ), path=sys.path,
                    before_join=before_join,
                )
                with _hash_seed(rank) if fresh else contextlib.nullcontext():
                    processes.append(begin(context, _rank_main, theirs, setup, work))
                theirs.close()
                pipes.append(ours)
            return _gather_results(pipes, processes, timeout, folder)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def begin(context: BaseContext, function: Callable, *args) -> BaseProcess:
    """A new process that calls function(*args): forked from the server, or a fresh Python,
    depending on the context."""
    process = context.Process(target=function, args=args)
    with main_hidden():
        with interrupts.held_off():  # until they are ranks
            forkserver.ensure_running()
        process.start()
    return process


@contextlib.contextmanager
def main_hidden() -> Iterator[None]:
    """Context that hides the caller's script, which multiprocessing would run again in every rank;
    cloudpickle carries what is needed of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _hash_seed(rank: int) -> Iterator[None]:
    """Context in which a Python that starts gets a hash seed of the rank's own."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(rank + 1)
    try:
        yield
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


# -------------------------------------------------------------------------------------- in a rank


def _rank_main(pipe: Connection, setup: dict, work: bytes) -> None:
    """What a rank does: join, call the function, send its result, wait until every rank is done."""
    import zero_minimal.processes.warm  # noqa: F401  (what the server of forked ranks has done)

    os.environ.update(setup["environment"])
    sys.path[:] = setup["path"]
    _end_with_parent()
    # what a rank starts (data loaders) must not use our server
    multiprocessing.set_start_method(None, force=True)
    rank, world_size, folder = setup["rank"], setup["world_size"], setup["folder"]
    # _where_they_stand asks with this signal
    faulthandler.register(signal.SIGUSR1, file=open(f"{folder}/{rank}", "w"), all_threads=False)
    try:
        interrupts.let_in()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        store = dist.FileStore(f"{folder}/store", world_size)  # no port to choose
        # the parent enforces the time limit; a collective that gives up first would only hide which
        # rank is missing
        patience = 2 * setup["timeout"] + 10
        place = pickle.loads(setup["before_join"])
        options = place(rank, world_size) if place else {}
        device, backend = setup["device"], setup["backend"]
        join(store, rank, world_size, device, backend, timeout=patience, **options)
        function, args, kwargs = pickle.loads(work)
        answer = cloudpickle.dumps(function(*args, **kwargs))
        come_to_the_end()
    except BaseException as error:  # SystemExit too: the parent must hear of it
        answer = Failure.of(error)
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(answer)
    if not isinstance(answer, Failure):  # after one, the others must see at once that we are gone
        with contextlib.suppress(EOFError):
            pipe.recv()  # leaving earlier would close connections that the others still use
    os._exit(0)


def _end_with_parent() -> None:
    """A rank never outlives the process that asked for it."""
    parent = multiprocessing.parent_process()

    def watch():
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ----------------------------------------------------------------------- in the process that asked


def _gather_results(pipes: list[Connection], processes: list, timeout: float, folder: str) -> list:
    """The results of all ranks. Raises: RankError for the failure that came first."""
    deadline = time.monotonic() + timeout
    results, failures = {}, {}
    while len(results) + len(failures) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes)
                   if rank not in results and rank not in failures}
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(pending), left)
        if not ready and failures:
            break
        if not ready:
            late = sorted(pending.values())
            raise TimeoutError(_where_they_stand(processes, late, timeout, folder))
        for pipe in ready:
            rank = pending[pipe]
            try:
                answer = pipe.recv()
            except (EOFError, OSError):  # it died without a word
                processes[rank].join(GRACE)
                answer = Failure.of_death(processes[rank].exitcode)
            if isinstance(answer, Failure):
                failures[rank] = answer
                deadline = min(deadline, time.monotonic() + GRACE)
            else:
                results[rank] = answer
    if failures:
        raise_first(failures, len(pipes))
    for pipe in pipes:
        pipe.send("all done")
    for process in processes:
        process.join(GRACE)
    return [pickle.loads(results[rank]) for rank in range(len(pipes))]


def _where_they_stand(processes: list, late: list[int], timeout: float, folder: str) -> str:
    """Ask the ranks that are not done for their stacks."""
    for rank in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"after {timeout:g} s rank {', '.join(map(str, late))} of {len(processes)} had not "
             "finished"]
    for rank in late:
        with contextlib.suppress(OSError), open(f"{folder}/{rank}") as stack:
            lines.append(f"\nrank {rank} stands here (innermost first):\n{stack.read().rstrip()}")
    return "\n".join(lines)
