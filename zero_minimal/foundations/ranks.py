"""Ranks: N processes that run the same program and speak through collectives.

A program becomes a rank in one of three ways, and its code is the same in all of them:

    torchrun --nproc-per-node 4 program.py      torchrun starts the ranks, `start()` joins them
    python program.py                           `start()` makes a world of one rank
    ranks.run(function, 4)                      from a Python process or a notebook: four warm ranks run `function`

Which backend carries the collectives:

    NCCL                      when every rank of this machine has a GPU of its own
    gloo                      on CPU
    gloo with host staging    when several ranks share a GPU (NCCL refuses that)
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass
from datetime import timedelta

import cloudpickle
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  imported while a group is up, its default arguments would keep the group alive

COLLECTIVE_TIMEOUT = 300  # seconds a collective waits for the other ranks before it fails
GRACE = 2.0  # seconds in which the other ranks may still tell their side of a failure


@dataclass(frozen=True)
class Rank:
    """One process among world_size; `device` is where it computes."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


class RankError(RuntimeError):
    """A rank failed. `.rank` says which one failed first; its own exception, where it has one, is `__cause__`."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def choose(device: str = "auto", backend: str | None = None, local_world_size: int = 1) -> tuple[str, str]:
    """Device type and backend for this many ranks on one machine.

    Args: device is "auto", "cpu" or "cuda"; backend is None (choose), "gloo" or "nccl".
    Raises: ValueError where the machine does not have what was asked for.
    """
    gpus = torch.cuda.device_count()
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {device!r}: use auto, cpu or cuda")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"unknown backend {backend!r}: use gloo or nccl")
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus:
        raise ValueError("device cuda was asked for, but this machine has no GPU: use --device cpu")
    if backend == "nccl" and (device == "cpu" or gpus < local_world_size):
        raise ValueError(
            f"backend nccl needs a GPU for each of the {local_world_size} ranks, and this machine has {gpus}: "
            "start fewer ranks, or use --backend gloo, which lets ranks share a GPU or run on the CPU"
        )
    if backend is None:
        backend = "nccl" if device == "cuda" and gpus >= local_world_size else "gloo"
    return device, backend


# ---------------------------------------------------------------------------------------------- joining the world


@contextlib.contextmanager
def start(device: str = "auto", backend: str | None = None, timeout: float = COLLECTIVE_TIMEOUT):
    """Join the ranks that torchrun started, or make a world of one; yield this process's `Rank`.

    On the way out the process group is destroyed. If the body raises, this rank tells the others through the store,
    and every rank ends with exit code 1 and a line that names the rank that failed first.
    Inside `ranks.run` the group is up already, and is used as it is.
    """
    if dist.is_initialized():
        yield _describe()
        return
    environment = os.environ
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", 1))
    try:
        choose(device, backend, local_world_size)
    except ValueError as error:  # the same on every rank, before any of them waits for another
        if int(environment.get("LOCAL_RANK", 0)) > 0:
            time.sleep(1)  # torchrun ends all ranks when the first one is gone: let rank 0 speak
            sys.exit(1)
        sys.exit(f"error: {error}")
    if "RANK" in environment:
        if local_world_size == int(environment["WORLD_SIZE"]):
            _stay_on_this_machine()
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    _join(store, rank, world_size, device, backend, timeout, int(environment.get("LOCAL_RANK", 0)), local_world_size)
    try:
        yield _describe()
        dist.barrier()
        time.sleep(0.1)  # gloo's threads drop their last tensors; torch 2.6 may lock up if the group goes meanwhile
        dist.destroy_process_group()
    except (Exception, KeyboardInterrupt) as error:
        _fail_together(dist.PrefixStore("failure", store), rank, error)


_local: dict = {}  # device and local rank of this process, for _describe


def _join(store, rank, world_size, device, backend, timeout, local_rank, local_world_size) -> None:
    device, backend = choose(device, backend, local_world_size)
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    else:
        _do_not_preempt()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout),
        device_id=place if backend == "nccl" else None,
    )
    _local.update(local_rank=local_rank, device=place)


def _do_not_preempt() -> None:
    """A message that arrives wakes a thread of gloo's; Linux then often stops the thread that computes, of this rank or
    another's. With more ranks than cores most time went there: as a batch process a rank finishes its turn first."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it: slower, and else the same
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _describe() -> Rank:
    return Rank(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=_local.get("local_rank", dist.get_rank()),
        device=_local.get("device", torch.device("cpu")),
        backend=dist.get_backend(),
    )


def _stay_on_this_machine() -> None:
    """All ranks are here: speak over the loopback, whatever the host calls itself."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _fail_together(notes, rank: int, error: BaseException) -> None:
    """Say which rank failed first, then exit. A rank that only lost its peer waits a moment for the peer's word."""
    words = f"rank {rank} failed: {type(error).__name__}: {error}"
    if not _lost_a_peer(error):
        with contextlib.suppress(Exception):  # the store itself may be gone
            if notes.add("count", 1) == 1:
                notes.set("first", words)
        traceback.print_exc()
        print(f"\n{words}", file=sys.stderr, flush=True)
    else:
        first = None
        with contextlib.suppress(Exception):
            notes.wait(["first"], timedelta(seconds=GRACE))
            first = notes.get("first").decode()
        reason = first or f"another rank is gone without a word or never came ({str(error).strip().splitlines()[0]})"
        if not first:
            traceback.print_exc()
        print(f"rank {rank} stops: {reason}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # not sys.exit: a collective that waits for a lost rank would hold the interpreter's shutdown


def _lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away or never came."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "connection refused", "timed out", "timeout")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


# --------------------------------------------------------------------------------- ranks from a Python process

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["zero_minimal.foundations.warm"])


def run(function, world_size: int, *args, timeout: float = 60, device: str = "auto", **kwargs) -> list:
    """Call function(*args, **kwargs) on each of world_size new ranks; return their results, rank 0's first.

    The ranks are forked from a server that has imported torch once, so that a start takes a fraction of a second.
    Inside, the process group is up and `start()` yields this rank. Functions from a notebook, lambdas and closures
    are fine. Random state, threads and memory are fresh: nothing of an earlier run is left.

    Raises:
        RankError: a rank raised, or died; the message names the rank that was first and shows its traceback.
        TimeoutError: not all ranks were done after `timeout` seconds; the message says where each one stands.
    Either way all ranks have ended when this returns.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: at least one rank is needed")
    device, backend = choose(device, None, world_size)
    work = cloudpickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = _context.Pipe()
                setup = dict(rank=rank, world_size=world_size, device=device, backend=backend, timeout=timeout,
                             folder=folder, environment=dict(os.environ), path=sys.path)
                process = _context.Process(target=_rank_main, args=(theirs, setup, work))
                with _main_hidden():
                    process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _gather_results(pipes, processes, timeout, folder)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@contextlib.contextmanager
def _main_hidden():
    """multiprocessing would run the caller's script again in every rank; cloudpickle carries what is needed of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _rank_main(pipe, setup: dict, work: bytes) -> None:
    """What a rank does: join, call the function, send its result, wait until every rank is done."""
    os.environ.update(setup["environment"])
    sys.path[:] = setup["path"]
    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # our server is not for what a rank starts: data loaders
    rank, world_size = setup["rank"], setup["world_size"]
    faulthandler.register(signal.SIGUSR1, file=open(f"{setup['folder']}/{rank}", "w"), all_threads=False)
    try:
        _stay_on_this_machine()
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        store = dist.FileStore(f"{setup['folder']}/store", world_size)  # they meet here: no port to fix
        # the parent keeps the time limit; a collective that gives up first would only blur which rank is missing
        _join(store, rank, world_size, setup["device"], setup["backend"], 2 * setup["timeout"] + 10, rank, world_size)
        function, args, kwargs = pickle.loads(work)
        answer = ("result", cloudpickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # SystemExit too: the parent must hear of it
        answer = ("error", (time.time(), _lost_a_peer(error), traceback.format_exc(), _pickled(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(answer)
    if answer[0] == "result":  # after an error the others shall see at once that this rank is gone
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


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return None


def _gather_results(pipes, processes, timeout: float, folder: str) -> list:
    """One answer a rank, or the failure that came first."""
    deadline = time.monotonic() + timeout
    results, failures = {}, {}
    while len(results) + len(failures) < len(pipes):
        pending = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures}
        ready = multiprocessing.connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            raise TimeoutError(_where_they_stand(processes, sorted(pending.values()), timeout, folder))
        for pipe in ready:
            rank = pending[pipe]
            try:
                kind, content = pipe.recv()
            except (EOFError, OSError):  # it died without a word
                processes[rank].join(GRACE)
                kind, content = "error", (time.time(), False, _death(processes[rank].exitcode), None)
            if kind == "result":
                results[rank] = content
            else:
                failures[rank] = content
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        _raise_first(failures, len(pipes))
    for pipe in pipes:
        pipe.send("all done")
    for process in processes:
        process.join(GRACE)
    return [pickle.loads(results[rank]) for rank in range(len(pipes))]


def _raise_first(failures: dict, world_size: int) -> None:
    # a rank that only lost its peer is a consequence, however early it noticed
    rank = min(failures, key=lambda rank: (failures[rank][1], failures[rank][0]))
    _, _, text, pickled = failures[rank]
    others = sorted(set(failures) - {rank})
    after = f"\n(after it, rank {', '.join(map(str, others))} failed too)" if others else ""
    raise RankError(rank, f"rank {rank} of {world_size} failed:\n{text.rstrip()}{after}") from (
        pickle.loads(pickled) if pickled else None
    )


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"it was killed by {signal.Signals(-exitcode).name}"
    return f"it ended with exit code {exitcode} before its function returned"


def _where_they_stand(processes, late: list[int], timeout: float, folder: str) -> str:
    """Ask the ranks that are not done for their stacks."""
    for rank in late:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"after {timeout:g} s rank {', '.join(map(str, late))} of {len(processes)} had not finished"]
    for rank in late:
        with contextlib.suppress(OSError), open(f"{folder}/{rank}") as stack:
            lines.append(f"\nrank {rank} stands here (innermost first):\n{stack.read().rstrip()}")
    return "\n".join(lines)
