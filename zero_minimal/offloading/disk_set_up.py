"""Set-up of the disk: take space for all that will be kept, and memory for three shards, and check
that this is within the budget (disk.py).

This happens before training, and all ranks get its errors. How much memory an update takes for a
moment depends on the optimizer. So the host rehearses a step, with zeros in place of the largest
shards, and measures how far its memory has grown.
"""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import torch
from torch import nn

from zero_minimal.core import optimizers
from zero_minimal.core.set_up import parameter_groups
from zero_minimal.core.weak_hooks import nothing
from zero_minimal.guards import same_on_all_ranks
from zero_minimal.guards.refused_optimizers import STEPS
from zero_minimal.offloading import files
from zero_minimal.offloading.host_link import Parcel
from zero_minimal.offloading.memory_budget import Budget
from zero_minimal.offloading.offloaded_state import Kept

TRIED = 16  # elements of the shard that an optimizer is tried on


@dataclass(frozen=True)
class Asked:
    """What a rank asks of its host.

    folder: for the file. budget: bytes of memory, None for no limit.
    optimizer: its class, its options and those of each group, pickled.
    shards: by number: elements, dtype of the parameters, index of the optimizer's group.
    """

    folder: str
    budget: int | None
    optimizer: bytes
    shards: dict[int, tuple[int, torch.dtype, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Bytes of the disk that are needed, and that are free; an errno, or 0; and the smallest budget
    that is enough."""

    needed: int
    free: int
    error: int
    smallest: int


# ------------------------------------------------------------------------------------- on the rank


def asked(
    folder: str | Path | None, budget: int | None, model: nn.Module, optimizer_class: type,
    optimizer_options: dict, options: dict,
) -> Asked | None:
    """A stage's arguments as an Asked; None: no disk. Raises: ValueError if they are invalid.

    options: the stage's others. Their param_groups may be readable only once: so the list that was
        read takes their place.
    """
    if folder is None:
        if budget is not None:
            raise ValueError("host_budget= is for a host that keeps its state on a disk: give "
                             "disk=FOLDER, too")
        return None
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (is_number and budget >= 1):
        raise ValueError(f"host_budget is {budget!r}: give bytes, 200e6 say, or None")
    if not folder:
        raise ValueError(f"disk is {folder!r}: give a folder, \".\" for the current one")
    groups = parameter_groups(model, options.get("param_groups"))
    options["param_groups"] = groups
    of_groups = [{name: value for name, value in group.items() if name != "params"}
                 for group in groups]
    chosen = cloudpickle.dumps((optimizer_class, optimizer_options, of_groups))
    return Asked(os.fsdecode(folder), budget, chosen)


def set_up(stage, asked: Asked, buckets: list) -> None:
    """Let a stage's host keep its shards on the disk. buckets: in the order of their numbers.

    Raises, on all ranks: OSError if the folder does not exist, cannot be written to, or has no room
        for the state of one of them; ValueError for a budget that is too small.
    """
    if asked.budget is not None and stage.host.process is None:
        raise ValueError("host_budget= is for ranks on CPUs: with a GPU the host is a thread, and "
                         "its memory that of the rank; leave host_budget= out")
    asked.shards.update({
        number: (bucket.padded // stage.world_size, bucket.dtype, bucket.group_index)
        for number, bucket in enumerate(buckets)
    })
    answer = stage.host.ask("on_disk", asked)
    own = [answer.needed, answer.free, answer.error, answer.smallest]
    every = same_on_all_ranks.numbers_of_all_ranks(own, stage.group, of="set-up of the disk tier")
    try:
        _check_answers(asked, [Answer(*numbers) for numbers in every])
    except BaseException:
        stage.host.end()
        raise


def _check_answers(asked: Asked, every: list[Answer]) -> None:
    folder, needed = asked.folder, sum(answer.needed for answer in every)
    for rank, answer in enumerate(every):
        if answer.error in FULL:
            raise OSError(f"the disk of {folder} is too full: rank {rank} keeps "
                          f"{_mb(answer.needed)} there, all {len(every)} ranks {_mb(needed)}, and "
                          f"{_mb(answer.free)} were free when rank {rank} asked: make room, or "
                          "take a folder of another disk")
        if answer.error:
            raise OSError(f"the disk tier cannot keep a file in {folder} on rank {rank}: "
                          f"{os.strerror(answer.error)}. Give a folder that is there, and that can "
                          "be written to")
    smallest = max(answer.smallest for answer in every)
    if asked.budget is not None and smallest > asked.budget:
        largest = max(numel for numel, *_ in asked.shards.values())
        raise ValueError(f"a host budget of {_mb(asked.budget)} cannot be met: {_mb(smallest)} is "
                         f"the smallest, for shards of up to {largest:,} parameters, three of "
                         "which are in memory with all their state. Give as much, or smaller "
                         "buckets: --bucket-mb, bucket_bytes=; at stage 3 smaller units, or more "
                         "ranks")


FULL = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


# ------------------------------------------------------------------------------------- on the host


def prepare(state: Kept, asked: Asked) -> Answer:
    """Give a host's state its .places in a file, its .files (of the class state.lanes) and its
    .budget."""
    kind, options, groups = cloudpickle.loads(asked.optimizer)
    tensors = {(dtype, group): _tensors(kind, options, groups[group], dtype)
               for _, dtype, group in dict.fromkeys(asked.shards.values())}
    state.budget = Budget(None)  # no limit until all is set up
    laid_out = files.laid_out((numel, tensors[dtype, group])
                              for numel, dtype, group in asked.shards.values())
    state.places = dict(zip(asked.shards, laid_out, strict=True))
    needed, free = sum(place.size for place in laid_out), files.free_bytes(asked.folder)
    try:
        file = files.File(asked.folder, needed)
    except OSError as error:
        return Answer(needed, free, error.errno, 0)
    state.files = state.lanes(file, max(place.size for place in laid_out))
    if asked.budget is None:
        return Answer(needed, free, 0, 0)
    _rehearse(state, asked)
    state.budget.limit = asked.budget
    return Answer(needed, free, 0, state.budget.smallest())


def _tensors(kind: type, options: dict, group: dict, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The tensors of a shard, the gradient first, with their dtypes: found with a small one."""
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    param = nn.Parameter(torch.zeros(TRIED, dtype=wide))
    optimizer = kind([group | {"params": [param]}], **options)
    for _ in range(STEPS):
        optimizers.update(optimizer, optimizer.param_groups[0], param, torch.ones_like(param))
    state = {name: value.dtype for name, value in optimizer.state[param].items()
             if isinstance(value, torch.Tensor) and value.shape == param.shape}
    return {"gradient": dtype, "master": wide, **state}


def _rehearse(state: Kept, asked: Asked) -> None:
    """Do what a step does, with zeros, for the largest shard of each group."""
    by_size = sorted(asked.shards, key=lambda number: asked.shards[number][0])
    largest = {asked.shards[number][2]: number for number in by_size}
    bus, state.bus = state.bus, SimpleNamespace(send=nothing, emptied=nothing)
    bus.outgoing.zero_()  # so that they are resident
    bus.incoming.zero_()
    for number in largest.values():
        numel, dtype, group = asked.shards[number]
        zeros = bus.incoming[0][: numel * dtype.itemsize].view(dtype)
        state.keep(Parcel((), zeros), number, group)
    state.make_optimizer(Parcel(()), asked.optimizer)
    options = [{} for _ in state.optimizer.param_groups]
    for adds in (False, True):
        for number in largest.values():
            numel, dtype, _ = asked.shards[number]
            zeros = bus.incoming[0][: numel * dtype.itemsize].view(dtype)
            state.gradient(Parcel((), zeros), number, adds)
        state.update(Parcel(()), options, torch.ones(()))
    for place in state.places.values():
        place.written.result()
    state.shards, state.optimizer, state.bus = {}, None, bus
    state.files.read = state.files.written = 0
