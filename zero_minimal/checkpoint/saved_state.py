"""Saved state: a checkpoint from which a run resumes at any stage and on any number of ranks.

    saved_state.save(zero, "runs/a", extra={"epoch": 3})     on all ranks, at stage 2 on 4 of them
    extra = saved_state.load(zero, "runs/a")                 on all ranks, at stage 3 on 3 of them

At stages 1 to 3 each rank has a shard of every bucket, but a later run may have other shards. To
cut the shards of 4 ranks into 3 again would involve padding, other buckets and units. So a
checkpoint has no shards in it. To save, a rank names each of its elements by the parameter and the
place in it:

    bucket            | b₂ | w₂ ··············|············ | padding |
    shards            |rank 0 |rank 1 |rank 2 |rank 3 |
    rank 1 writes     w₂, from row 1, column 3 to row 4, column 2
    in the checkpoint      w₂ [rows, columns], and the file and position of each part

To load, each rank looks for the elements that it owns now, in any file. It reads only these, so no
rank ever holds the whole model. Parts of matrices are chunks (chunks.py), local_chunks.py has those
of a rank, torch.distributed.checkpoint finds which of them overlap (resharding.py), and
state_folder.py says why a kill does no harm.

A checkpoint has parameters (for 16-bit ones the fp32 masters, which round to them), optimizer state
and options, buffers, what modules return from get_extra_state(), each rank's random state
(torch's), and `extra`. It holds no code.
"""

from pathlib import Path

import torch

from zero_minimal.checkpoint import as_json, loading, local_chunks, saving
from zero_minimal.checkpoint.saving import NotSaved, Saving
from zero_minimal.checkpoint.sharded_state import fill_buffers
from zero_minimal.checkpoint.state_folder import Damaged

__all__ = [
    "Damaged", "NotSaved", "Saving", "any_in", "async_save", "load", "load_plain", "save",
]


def save(zero, folder: str | Path, extra=None, *, step: int | None = None, keep: int = 3) -> Path:
    """Write a checkpoint, folder/step-…; all ranks must call this, after step(). Returns its path.
    It is the folder's newest then, whatever its step: load() resumes from it.

    Args:
        zero: a stage, or a zero_100b.System.
        folder: of all checkpoints of a run, on a disk that all ranks see.
        extra: what the program needs to resume, alike on all ranks: state_dict() of a scheduler and
            a LossScaler, a position in the data; numbers, strings, tensors, lists, tuples, dicts.
        step: the number in its name; by default one more than the newest's.
        keep: how many checkpoints stay, not counting those that load() found damaged; older ones
            are deleted when this one is on the disk.
    Raises: TypeError for what cannot be in `extra`; ValueError if `extra` differs among the ranks;
        RuntimeError inside gather_parameters(), or while gradients wait for step(); NotSaved, on
        all ranks, if one could not write.
    """
    return saving.start(zero, Path(folder), extra, step, keep, meanwhile=False).wait()


def async_save(
    zero, folder: str | Path, extra=None, *, step: int | None = None, keep: int = 3
) -> Saving:
    """Like save(), but it writes while training goes on. Returns at once; .wait() waits, and raises
    what save() raises.

    It saves the state of this moment: before step() updates a bucket, it waits until that is
    written, and gather_parameters() waits for all. Edit weights, buffers or the optimizer's state
    in no other way before .wait() has returned. The next checkpoint, and the end of the ranks, wait
    for all of it. An offloaded stage writes all of it before this returns.
    """
    return saving.start(zero, Path(folder), extra, step, keep, meanwhile=True)


def load(zero, folder: str | Path):
    """Resume from the newest checkpoint in a folder, or from `folder` if it is one; all ranks must
    call this. Returns `extra`. Each rank's random numbers continue, too; new ranks get seeds of
    their own.

    If a checkpoint is damaged, or not the same on all ranks, this warns, and takes the one before
    it.
    Raises: Damaged if there is no undamaged one; ValueError, with all names that differ, if it is
        not of this model and optimizer. Both come on all ranks, before anything is changed.
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
    return as_json.decoded(contents.facts["extra"])


def any_in(zero, folder: str | Path) -> bool:
    """Whether there is a checkpoint in a folder, damaged or not, as rank 0 sees it; all ranks must
    call this."""
    holding = local_chunks.holding_of(zero)
    saving.meet("look for", holding.group)
    return bool(loading.candidates(Path(folder), saving.group_to_save(holding.group)))


@torch.no_grad()
def load_plain(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path
):
    """load() for plain torch, in one process without ranks: the whole model, and an optimizer over
    its parameters, or None. Random numbers continue as rank 0's."""
    contents = loading.newest_good(Path(folder))
    loading.check(contents.facts, loading.plain_facts(model, optimizer, contents.facts))
    state, buffers, wanted = loading.plain_to_fill(model, optimizer, contents)
    loading.read_alone(contents, wanted)
    fill_buffers(model, buffers)
    loading.fill_extra_states(model, contents)
    if optimizer is not None:
        optimizer.load_state_dict(state)
    loading.restore_random_state(contents.facts, 0)
    return as_json.decoded(contents.facts["extra"])
