"""Saved state: a checkpoint of a run, which goes on under any stage and any number of ranks.

    saved_state.save(zero, "runs/a", extra={"epoch": 3})     on all ranks, at stage 2 on 4 of them
    extra = saved_state.load(zero, "runs/a")                 on all ranks, at stage 3 on 3 of them

Each rank of stages 1 to 3 has a shard of every bucket. How could a run with other shards read them?
Cut the shards of 4 ranks again into 3, and think of the padding, of other buckets, of units? No:
what is saved has nothing of shards in it. On the way to the disk a rank says of each of its
elements what it is, by the name of the parameter and the place in it:

    bucket            | b₂ | w₂ ··············|············ | padding |
    shards            |rank 0 |rank 1 |rank 2 |rank 3 |
    rank 1 writes     w₂, from row 1, column 3 to row 4, column 2
    in the checkpoint      w₂ [rows, columns], and where in which file each part of it lies

On the way back each rank looks for the elements that it owns now, wherever they lie. It reads these
and no others, so that no rank ever holds the whole model. Parts of matrices are chunks
(chunks.py), local_chunks.py has those of a rank, torch.distributed.checkpoint finds which of them
overlap (resharding.py), and state_folder.py says why a kill does no harm.

A checkpoint has parameters (of those in 16 bit the fp32 masters, from which they come by rounding),
optimizer state and options, buffers, what modules give in get_extra_state(), the state of each
rank's random numbers (torch's), and `extra`. It holds no code.
"""

from pathlib import Path

import torch

from zero_minimal.checkpoint import loading, local_chunks, saving
from zero_minimal.checkpoint.saving import NotSaved, Saving
from zero_minimal.checkpoint.sharded_state import fill_buffers
from zero_minimal.checkpoint.state_folder import Damaged

__all__ = [
    "Damaged", "NotSaved", "Saving", "any_in", "async_save", "load", "load_plain", "save",
]


def save(zero, folder: str | Path, extra=None, *, step: int | None = None, keep: int = 3) -> Path:
    """Write a checkpoint, folder/step-…; all ranks must call this, after step(). Returns its path.
    It is the newest one there then, whatever its step: load() goes on from it.

    Args:
        zero: a stage, or a zero_100b.System.
        folder: of all checkpoints of a run, on a disk that all ranks see.
        extra: what the program needs to go on, alike on all ranks: state_dict() of a scheduler and
            a LossScaler, a position in the data; of numbers, words, tensors, lists, tuples, dicts.
        step: the number in its name; by default one more than the newest's.
        keep: how many checkpoints stay, without those that load() found damaged; those that were
            written earlier are deleted when this one is on the disk.
    Raises: TypeError for what cannot be in `extra`; ValueError if that differs among the ranks;
        RuntimeError inside gather_parameters(), or where gradients wait for step(); NotSaved, on
        all ranks, if one could not write.
    """
    return saving.start(zero, Path(folder), extra, step, keep, meanwhile=False).wait()


def async_save(
    zero, folder: str | Path, extra=None, *, step: int | None = None, keep: int = 3
) -> Saving:
    """As save(), but it is written while training goes on. Returns at once; .wait() waits, and
    raises what save() raises. Until the next step() change no weight by hand.

    The state that is saved is that of this moment: step() waits for the bucket it is about to
    update, if that has not been written yet. The next checkpoint, and the end of the ranks, wait
    for the whole. An offloaded stage writes all of it before this returns.
    """
    return saving.start(zero, Path(folder), extra, step, keep, meanwhile=True)


def load(zero, folder: str | Path):
    """Go on from the newest checkpoint in a folder, or from the one that it is; all ranks must call
    this. Returns `extra`. Random numbers of a rank go on, too; those of ranks that are new have a
    seed of their own.

    A checkpoint that is damaged, or not the same on all ranks, is passed over, with a warning, for
    the one before it.
    Raises: Damaged if none is whole; ValueError, with all names that differ, if it is not of this
        model and optimizer. Both on all ranks, and then nothing has been changed.
    """
    from torch.distributed import checkpoint as dcp

    from zero_minimal.checkpoint.resharding import ChunkLoader, Reader

    saving.finish_earlier()
    holding = local_chunks.holding_of(zero)
    saving.meet("load", holding.group)
    group = saving.group_to_save(holding.group)
    contents = loading.newest_good(Path(folder).absolute(), group)
    loading.check(contents.facts, local_chunks.facts_of(holding))
    state, wanted = loading.to_fill(holding, contents)
    asked = dict(storage_reader=Reader(contents), planner=ChunkLoader(wanted), process_group=group)
    try:
        dcp.load({}, **asked)
    except dcp.CheckpointException as error:  # no Exception: `except Exception` would miss it
        rank, reason = saving.first_of(error)
        raise Damaged(f"{contents.folder} could not be read on rank {rank}: {reason}") from None
    zero.load_state_dict(state)
    loading.fill_extra_states(holding.stage.model, contents)
    loading.restore_random_state(contents.facts, holding.data_rank)
    return loading.extra_of(contents)


def any_in(zero, folder: str | Path) -> bool:
    """Whether there is a checkpoint in a folder, good or not, as rank 0 sees it; all ranks must
    ask."""
    holding = local_chunks.holding_of(zero)
    saving.meet("look for", holding.group)
    return bool(loading.candidates(Path(folder), saving.group_to_save(holding.group)))


@torch.no_grad()
def load_plain(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path
):
    """The same for plain torch, in one process without ranks: the whole model, and an optimizer
    over its parameters, or None. Random numbers go on as rank 0's."""
    contents = loading.newest_good(Path(folder))
    loading.check(contents.facts, loading.plain_facts(model, optimizer, contents.facts))
    state, buffers, wanted = loading.plain_to_fill(model, optimizer, contents)
    loading.read_alone(contents, wanted)
    fill_buffers(model, buffers)
    loading.fill_extra_states(model, contents)
    if optimizer is not None:
        optimizer.load_state_dict(state)
    loading.restore_random_state(contents.facts, 0)
    return loading.extra_of(contents)
