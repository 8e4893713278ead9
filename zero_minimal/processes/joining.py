"""Joining: a process becomes one of N ranks, which find each other in one store and form a group.

Which backend carries the collectives:

    NCCL                      when every rank of this machine has a GPU of its own
    gloo                      on CPU
    gloo with host staging    when several ranks share a GPU (NCCL refuses that)
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# if imported while a group is up, this module's default arguments would keep that alive
import torch.distributed.nn  # noqa: F401

from zero_minimal.core import seams
from zero_minimal.processes import failures, interrupts

SIOCGIFADDR = 0x8915  # Linux: the address of a network interface
COLLECTIVE_TIMEOUT = 300  # seconds a collective waits for the other ranks before it fails


@dataclass(frozen=True)
class Rank:
    """One process among world_size; `device` is where it computes."""

    rank: int
    world_size: int
    local_rank: int  # its number among the ranks of this machine
    device: torch.device
    backend: str
    local_world_size: int = 1  # ranks of this machine


def choose(
    device: str = "auto", backend: str | None = None, local_world_size: int = 1
) -> tuple[str, str]:
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
            f"backend nccl needs a GPU for each of the {local_world_size} ranks, and this machine "
            f"has {gpus}: start fewer ranks, or use --backend gloo, which lets ranks share a GPU "
            "or run on the CPU"
        )
    if backend is None:
        backend = "nccl" if device == "cuda" and gpus >= local_world_size else "gloo"
    return device, backend


@contextlib.contextmanager
def start(
    device: str = "auto", backend: str | None = None, timeout: float = COLLECTIVE_TIMEOUT
) -> Iterator[Rank]:
    """Join the ranks that torchrun started, or make a world of one; yield this process's `Rank`.

    At the end the process group is destroyed. If the body raises, this rank tells the others
    through the store, and every rank ends with exit code 1 and a line that names the rank that
    failed first. Inside `ranks.run` the group is up already, and is used as it is.
    """
    if dist.is_initialized():
        yield _describe()
        return
    environment = os.environ
    here = {"local_rank": int(environment.get("LOCAL_RANK", 0)),
            "local_world_size": int(environment.get("LOCAL_WORLD_SIZE", 1))}
    try:
        choose(device, backend, here["local_world_size"])
    except ValueError as error:  # the same on every rank, before any of them waits for another
        interrupts.refuse(f"error: {error}")
    interrupts.end_with_torchrun()
    try:
        store, rank, world_size = _meet(timeout)
        joined = join(store, rank, world_size, device, backend, timeout=timeout, **here)
    except (RuntimeError, OSError) as error:  # of the network
        if "RANK" not in environment:
            raise
        failures.end_alone(f"the ranks did not meet within {timeout:g} s, at "
                           f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}",
                           error)
    words = dist.PrefixStore("failure", store)
    try:
        try:
            yield joined
        except SystemExit as error:
            if error.code:
                failures.leave_word(words, rank, f"has ended by sys.exit({error.code!r})")
            else:
                _part()
            raise
        _part()
    except (Exception, KeyboardInterrupt) as error:
        failures.end_together(words, rank, error)


def _part() -> None:
    """The end of a rank that has done its work."""
    come_to_the_end()
    if not dist.is_initialized():  # the user has called destroy_process_group()
        return
    try:
        dist.barrier()
    except RuntimeError as error:  # another rank has left: at its end, or with an error of its own
        if "connection" not in str(error).lower():
            raise
    # gloo's threads drop their last tensors; torch 2.6 may lock up if the group goes meanwhile
    time.sleep(0.1)
    dist.destroy_process_group()


def _meet(timeout: float) -> tuple[dist.Store, int, int]:
    """The store in which torchrun's ranks find each other, rank and world_size. Without torchrun, a
    store of this process's own."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    _find_the_store(timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    # torchrun --max-restarts keeps its store: what an earlier attempt wrote is not for this one
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"attempt {attempt}", store), rank, world_size


def _find_the_store(seconds: float) -> None:
    """Wait until a process listens where the ranks meet. torch's own client would wait twice as
    long, and print the C++ functions that it was in.

    Raises: OSError if none does within `seconds`, or none ever will.
    """
    environment, until = os.environ, time.monotonic() + seconds
    where = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # this rank itself will listen
    while all(where):
        try:
            return socket.create_connection(where, timeout=seconds).close()
        except OSError:
            if "TORCHELASTIC_RUN_ID" in environment and os.getppid() == 1:
                raise ConnectionError(interrupts.GONE) from None
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


_before_the_end: list[Callable[[], object]] = []


def before_the_end(function: Callable[[], object]) -> None:
    """Call the function on each rank when the rank has done its work, before the ranks part."""
    _before_the_end.append(function)


def say_goodbye() -> None:
    """This rank ends: every rank that waits for it, now or later, gets an error."""
    if not seams.attached:  # else it has sent nothing
        seams.tell("rank_ends")


def come_to_the_end() -> None:
    """This rank has done its work."""
    for function in _before_the_end:
        function()
    say_goodbye()


_local: dict = {}  # device and local rank of this process, for _describe


def join(
    store: dist.Store, rank: int, world_size: int, device: str = "auto", backend: str | None = None,
    *, timeout: float = COLLECTIVE_TIMEOUT, local_rank: int | None = None,
    local_world_size: int | None = None,
) -> Rank:
    """Make this process rank `rank` of a process group, once all ranks are there.

    Args:
        store: the one in which all ranks find each other.
        device, backend: as `choose` takes them.
        timeout: seconds a collective waits for the other ranks before it fails.
        local_rank, local_world_size: among the ranks of this machine; by default all are here.
    Raises: ValueError where the machine does not have what was asked for.
    """
    local_rank = rank if local_rank is None else local_rank
    local_world_size = world_size if local_world_size is None else local_world_size
    kind, backend = choose(device, backend, local_world_size)
    if local_world_size == world_size:
        _speak_over_the_loopback()
    elif kind == "cpu" or backend == "gloo":
        _speak_over_the_network()
    if kind == "cuda":
        own = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
    else:
        own = torch.device("cpu")
        _do_not_preempt()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout),
        device_id=own if backend == "nccl" else None,
    )
    _local.update(local_rank=local_rank, device=own, local_world_size=local_world_size)
    return _describe()


def _describe() -> Rank:
    return Rank(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=_local.get("local_rank", dist.get_rank()),
        device=_local.get("device", torch.device("cpu")),
        backend=dist.get_backend(),
        local_world_size=_local.get("local_world_size", dist.get_world_size()),
    )


def _speak_over_the_loopback() -> None:
    """All ranks are on this machine: let them connect over the loopback, whatever its name is."""
    here = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):  # Linux's; that of macOS, whose host name may not resolve
        if loopback in here:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _speak_over_the_network() -> None:
    """Several machines: let gloo use the interface through which this one reaches the first, where
    ranks meet. By default gloo uses the one of this machine's host name: often the loopback, which
    reaches no other machine."""
    import fcntl  # not on Windows

    names = [name for _, name in socket.if_nameindex()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ.get("MASTER_ADDR", ""), 1))  # UDP: nothing is sent
        own = way.getsockname()[0]
        for name in names:
            with contextlib.suppress(OSError):  # it has no address
                question = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(way, SIOCGIFADDR, question)[20:24]
                if socket.inet_ntoa(found) == own and not own.startswith("127."):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _do_not_preempt() -> None:
    """Make the rank a batch process, which a waking thread does not interrupt.

    A message that arrives wakes a thread of gloo's; Linux then often stops a thread that computes,
    of this rank or another. With more ranks than cores most of the time was lost there.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it: that is only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
