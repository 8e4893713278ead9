"""Random state: what makes a computation come out the same again, or differ from rank to rank.

Dropout draws from generators, whose states decide every number to come; torch.autocast decides in
which precision operators compute. Recomputing in backward needs both as they were.
"""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from zero_minimal.core.mesh import Group


def random_state() -> list[torch.Tensor]:
    """Of torch's generator on the CPU, and of the current GPU's if one is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def set_random_state(states: list[torch.Tensor]) -> None:
    """From here on random numbers come as they did from these states on."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])


def seed_from(states: list[torch.Tensor], number: int) -> None:
    """From here on random numbers come that depend on these states and on a number alone."""
    torch.manual_seed(zlib.crc32(f"{states[0].tolist()} {number}".encode()))


@contextmanager
def random_state_of(states: list[torch.Tensor]) -> Iterator[None]:
    """Context in which random numbers come as they did from these states on. Afterwards the old
    state is restored."""
    gpus = [torch.cuda.current_device()] if len(states) > 1 else []
    with torch.random.fork_rng(gpus):
        set_random_state(states)
        yield


@contextmanager
def parallel_random(group: Group = None) -> Iterator[None]:
    """Context in which each rank of a group draws random numbers of its own.

    For dropout inside the region of tensor parallelism. Seed all ranks of the group alike: then
    outside the region all drop the same values, and what they compute stays the same. Inside, each
    rank has other heads, so it needs other masks. Afterwards the outside state, of the CPU and of
    the current GPU, is the same on all ranks again, and further on than before. The inside depends
    on nothing but the outside state: checkpointing that restores torch's own random state before it
    recomputes gets the same masks again.
    """
    # drawn from the outside, which so moves on; by the CPU's generator: no wait for a GPU
    seed = int(torch.randint(2**31, (), device="cpu")) + dist.get_rank(group)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        torch.default_generator.manual_seed(seed)
        if gpus:
            torch.cuda.manual_seed(seed)
        yield


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    """What torch.autocast is set to: (device type, on or off, dtype)."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds]


@contextmanager
def autocast_as(states: list[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """Context with such a setting."""
    with ExitStack() as stack:
        for kind, enabled, dtype in states:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        yield
