"""Saved state: a checkpoint of a run, which goes on under any stage and any number of ranks; and
this rank's part of the state, which fits the same run alone.

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
and no others, so that no rank ever holds the whole model. Parts of matrices are boxes (boxes.py), a
rank's are its pieces (pieces.py), torch.distributed.checkpoint finds which of them overlap
(resharding.py), and state_folder.py says why a kill does no harm.

A checkpoint has parameters (of those in 16 bit the fp32 masters, from which they come by rounding),
optimizer state and options, buffers, what modules give in get_extra_state(), the state of each
rank's random numbers (torch's), and `extra`. It holds no code.
"""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist

from zero_minimal.foundations import layout, loading, optimizers, pieces, precision, saving
from zero_minimal.foundations.saving import NotSaved, Saving
from zero_minimal.foundations.state_folder import Damaged

__all__ = [
    "Damaged", "NotSaved", "Saving", "any_in", "async_save", "load", "load_plain", "load_shards",
    "refuse_other_shards", "save", "shard_state",
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

    from zero_minimal.foundations.resharding import PieceLoader, Reader

    saving.finish_earlier()
    holding = pieces.holding_of(zero)
    saving.meet("load", holding.group)
    group = saving.group_to_save(holding.group)
    contents = loading.newest_good(Path(folder).absolute(), group)
    loading.check(contents.facts, pieces.facts_of(holding))
    state, wanted = loading.to_fill(holding, contents)
    asked = dict(storage_reader=Reader(contents), planner=PieceLoader(wanted), process_group=group)
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
    holding = pieces.holding_of(zero)
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
    loading.fill_buffers(model, buffers)
    loading.fill_extra_states(model, contents)
    if optimizer is not None:
        optimizer.load_state_dict(state)
    loading.restore_random_state(contents.facts, 0)
    return loading.extra_of(contents)


# ------------------------------------------------------------------------------ this rank's part


def shard_state(stage) -> dict:
    """What a rank must save: its shards (the fp32 masters where there are any), optimizer state,
    frozen parameters and buffers, but no random state, and not a LossScaler's.

    As in torch, tensors are not copied; but a shard that is a view of a whole bucket is, since
    torch.save would write all of that.
    Raises: RuntimeError where gradients wait for a step: they are in no state.
    """
    saving.check_moment(stage)
    for bucket in stage.buckets:
        precision.keep_changes(bucket)
    shards = [bucket.master.data if bucket.trained else bucket.parameter_shard
              for bucket in stage.all_buckets]
    return _facts(stage) | {
        "shards": [shard.clone() if _is_part(shard) else shard for shard in shards],
        "optimizer": stage.optimizer.state_dict(),
    }


@torch.no_grad()
def load_shards(stage, state: dict) -> None:
    """Put a rank's part back; the stage then gathers what it holds whole.

    Raises: ValueError, before anything is changed, if it was saved by another stage, rank, world
        size, optimizer or model.
    """
    expected = _facts(stage)
    for key in ("stage", "world_size", "rank", "optimizer_class"):
        if state.get(key) != expected[key]:
            raise ValueError(f"this state was saved with {key} {state.get(key)}, and is loaded "
                             f"with {expected[key]}: load each rank's own part, with the same "
                             "stage, world size, model and optimizer")
    for key in ("buckets", "parameters", "frozen", "buffers"):
        _compare(key, _names(state.get(key, ())), _names(expected[key]))
    here = [bucket.parameter_shard for bucket in stage.all_buckets]
    _compare("shards", _shapes(state.get("shards", ())), _shapes(here))
    _compare_optimizers(state.get("optimizer", {}), stage.optimizer)
    for bucket in stage.buckets:
        layout.wait_until_left(bucket)
    stage.optimizer.load_state_dict(state["optimizer"])
    for bucket, shard in zip(stage.all_buckets, state["shards"], strict=True):
        if bucket.trained:
            bucket.master.copy_(shard)
        bucket.parameter_shard.copy_(shard)
        optimizers.tell_autograd(bucket)
    loading.fill_buffers(stage.model, state["buffers"])
    for name, param in expected["frozen"].items():
        param.copy_(state["frozen"][name])
    stage.backward.loads += 1  # by which ranks that have not loaded are told


def refuse_other_shards(stage) -> None:
    """Let stage.optimizer.state_dict() say whose it is, and load_state_dict() refuse another
    rank's: it would fit, and momentum would go on with what belongs to other elements."""
    shards = [bucket.parameter_shard for bucket in stage.buckets]
    if all(shard is bucket.parameters for shard, bucket in zip(shards, stage.buckets, strict=True)):
        return  # stage 0: they are alike on all ranks
    own = f"rank {stage.rank} of {stage.world_size}"

    def say(optimizer, state):
        state["shards_of"] = own

    def look(optimizer, state):
        if (whose := state.get("shards_of", own)) != own:
            raise ValueError(f"this optimizer state belongs to the shards of {whose}, and is "
                             f"loaded on {own}: on every rank save its own zero.state_dict(), and "
                             "give it to zero.load_state_dict() there")

    stage.optimizer.register_state_dict_post_hook(say)
    stage.optimizer.register_load_state_dict_pre_hook(look)


def _facts(stage) -> dict:
    """What must be alike where a state is saved and where it is loaded, and what no shard holds."""
    return {
        "stage": type(stage).__name__,
        "rank": dist.get_rank(stage.group),
        "world_size": dist.get_world_size(stage.group),
        "buckets": [(bucket.name, bucket.numel, bucket.padded) for bucket in stage.all_buckets],
        "parameters": _layout_of(stage),
        "optimizer_class": type(stage.optimizer).__name__,
        "frozen": _frozen(stage),
        "buffers": dict(stage.model.named_buffers()),
    }


def _frozen(stage) -> dict:
    """Parameters that no bucket holds."""
    packed = {param for bucket in stage.all_buckets for param in bucket.params}
    named = stage.model.named_parameters()
    return {name: param.data for name, param in named if param not in packed}


def _layout_of(stage) -> list[tuple]:
    """Of each parameter in a bucket: its name, and where in the bucket it begins. Two models may
    have the same sizes and other names."""
    names = {param: name for name, param in stage.model.named_parameters()}
    return [(names[param], bucket.flat.offsets[param] - bucket.start)
            for bucket in stage.all_buckets for param in bucket.params]


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether its memory holds more than this tensor."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _names(content) -> list[tuple]:
    """What can be compared: entries of a list, or names and shapes of tensors in a dict."""
    if isinstance(content, dict):
        return [(name, tuple(tensor.shape)) for name, tensor in content.items()]
    return [tuple(entry) for entry in content]


def _compare(key: str, saved: list[tuple], here: list[tuple]) -> None:
    """Raise ValueError, with the first difference, if two lists are not the same."""
    for one, other in itertools.zip_longest(saved, here):
        if one != other:
            raise ValueError(f"this state was saved with other {key}: the first that differs was "
                             f"{_words(one)}, and is {_words(other)} here. Load it with the same "
                             "model and bucket_bytes")


def _compare_optimizers(saved: dict, optimizer: torch.optim.Optimizer) -> None:
    """torch checks the number of groups and of their parameters; a moment of another shape it
    would take over, and fail in the next step."""
    groups = saved.get("param_groups", ()), optimizer.param_groups
    sizes = [[len(group["params"]) for group in its_groups] for its_groups in groups]
    if sizes[0] != sizes[1]:
        raise ValueError(f"this state was saved with optimizer groups of {sizes[0]} shards, and is "
                         f"loaded with {sizes[1]}: give the same param_groups")
    numbers, masters = [[param for group in its_groups for param in group["params"]]
                        for its_groups in groups]
    for number, master in zip(numbers, masters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape != master.shape:
                raise ValueError(f"this state was saved with other optimizer state: {name} of "
                                 f"{list(value.shape)}, for a shard of {list(master.shape)} here")


def _shapes(tensors) -> list[tuple]:
    return [tuple(tensor.shape) for tensor in tensors]


def _words(entry: tuple | None) -> str:
    return "missing" if entry is None else " ".join(map(str, entry))
