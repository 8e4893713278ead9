"""Sharded state: this rank's part of what a stage trains. It fits only the same stage, rank, number
of ranks, model and optimizer; saved_state.py fits any stage and number of ranks.

Seams: the base class of the stages, which gets the methods; wrapped, update_begins.
"""

import functools
import itertools
import weakref
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.core import collectives, precision, seams
from zero_minimal.core.reducer import Hooks
from zero_minimal.extensions.saved_tensors import values_stay
from zero_minimal.guards.training_moment import date_gather
from zero_minimal.guards.used_gradients import accumulated


def state_dict(stage) -> dict:
    """What a rank must save: its shards (the fp32 masters where there are any), optimizer state,
    frozen parameters and buffers, but not random state or a LossScaler's.

    As in torch, tensors are not copied, except a shard that is a view of a whole bucket: torch.save
    would write the whole bucket.
    Raises: RuntimeError while gradients wait for a step: a state holds no gradients.
    """
    check_moment(stage)
    keep_edits(stage)
    shards = [bucket.master.data if bucket.trained else bucket.parameter_shard
              for bucket in stage.all_buckets]
    return _facts(stage) | {
        "shards": [shard.clone() if shard.untyped_storage().nbytes() > shard.nbytes else shard
                   for shard in shards],
        "optimizer": stage.optimizer.state_dict(),
    }


@torch.no_grad()
def load_state_dict(stage, state: dict) -> None:
    """Put back what `state_dict` returned on this rank; then the stage gathers what it holds whole.

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
    load_shards(stage, state["shards"], state["optimizer"])
    fill_buffers(stage.model, state["buffers"])
    for name, param in expected["frozen"].items():
        param.copy_(state["frozen"][name])


@torch.no_grad()
def load_shards(stage, shards: list[torch.Tensor], optimizer_state: dict | None = None) -> None:
    """The parameters become those of `shards`, this rank's of each of stage.all_buckets. The stage
    gathers what it holds whole. None: the optimizer keeps the state that it has."""
    if hasattr(stage, "evaluation_done"):
        stage.evaluation_done()  # then stage 3 holds nothing whole
    for bucket in stage.buckets:
        wait_until_left(bucket)
    # counted, so that ranks which have not loaded get an error
    if optimizer_state is None:
        stage.reducer.loads += 1
    else:
        stage.optimizer.load_state_dict(optimizer_state)  # guards/training_moment.py counts it
    for bucket, shard in zip(stage.all_buckets, shards, strict=True):
        if bucket.trained:
            bucket.master.copy_(shard)
        bucket.parameter_shard.copy_(shard)
        seams.tell("update_ends", bucket)
    for bucket in stage.buckets:
        held = bucket.parameters.untyped_storage().nbytes() and bucket.parameters.numel()
        if held > bucket.parameter_shard.numel():
            collectives.all_gather(
                bucket.parameters, bucket.parameter_shard, group=stage.group, of=bucket.name
            )


Hooks.state_dict, Hooks.load_state_dict = state_dict, load_state_dict
Hooks.load_shards = load_shards


@seams.at("wrapped")
def give_methods(stage) -> None:
    """Give them to a stage that has another base class: an assignment's."""
    for method in (state_dict, load_state_dict, load_shards):
        if not hasattr(stage, method.__name__):
            setattr(type(stage), method.__name__, method)


@seams.at("update_begins")
def wait_until_left(bucket) -> None:
    """Before a bucket changes, wait until a checkpoint under way, if any, has written it."""
    leaving = getattr(bucket, "leaving", None)  # a threading.Event
    if leaving is not None:
        leaving.wait()
        bucket.leaving = None


@seams.at("wrapped")
def wrap_gather_parameters(stage) -> None:
    """Let gather_parameters(), inside which the user may edit, wait in the same way. At stage 3 one
    inside another does nothing, and a graph that is made inside keeps the values."""
    gather, owner = type(stage).gather_parameters, weakref.ref(stage)

    @functools.wraps(gather)
    def gather_parameters():
        if getattr(owner(), "inside_gather_parameters", False):
            return nullcontext()
        date_gather(owner())
        for bucket in owner().buckets:
            wait_until_left(bucket)
        return values_stay(gather(owner())) if hasattr(owner(), "units") else gather(owner())

    stage.gather_parameters = gather_parameters


def fill_buffers(model: nn.Module, new: dict[str, torch.Tensor]) -> None:
    """Give buffers new values; only where they differ, since an expanded one (a mask, say) cannot
    be written."""
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in new and not torch.equal(buffer, new[name].to(buffer.device)):
            buffer.copy_(new[name])


def keep_edits(stage) -> None:
    """What was edited by hand comes to the shards, at stage 3 from the units that are whole; and
    from shards to masters in another dtype, or on a host."""
    for unit in getattr(stage, "units", ()):
        for bucket in unit.buckets if unit.whole else ():
            bucket.parameter_shard.copy_(bucket.shard(bucket.parameters, stage.rank))
    for bucket in stage.buckets:
        precision.keep_changes(bucket)


def check_moment(stage) -> None:
    """Raises: RuntimeError if a checkpoint would lose what was done since the last step()."""
    if getattr(stage, "inside_gather_parameters", False):
        raise RuntimeError("leave gather_parameters() before you save: what is changed inside of "
                           "it comes to the shards at its end")
    if accumulated(stage.reducer) and not stage.reducer.skipped:
        raise RuntimeError("a checkpoint has no gradients, and those of the backward passes since "
                           "the last zero.step() would be lost: save and load after zero.step(); "
                           "or call zero.zero_grad() first, if they are not needed")


@seams.at("wrapped")
def refuse_other_shards(stage) -> None:
    """Let stage.optimizer.state_dict() name its rank, and load_state_dict() refuse another rank's
    state: that would fit, but its momentum belongs to other elements. It refuses the state of an
    optimizer of whole parameters, too."""
    own = f"rank {stage.rank} of {stage.world_size}"

    def say(optimizer, state):
        state["shards_of"] = own

    def look(optimizer, state):
        if "shards_of" not in state:
            try:
                _compare_optimizers(state, optimizer)
            except ValueError:
                raise ValueError("zero.optimizer holds a shard of each bucket, and this is the "
                                 "state of an optimizer that holds something else, whole "
                                 "parameters say: save zero.state_dict() on every rank, and give "
                                 "it to zero.load_state_dict() there") from None
        elif (whose := state.get("shards_of", own)) != own:
            raise ValueError(f"this optimizer state belongs to the shards of {whose}, and is "
                             f"loaded on {own}: on every rank save its own zero.state_dict(), and "
                             "give it to zero.load_state_dict() there")

    if any(bucket.parameter_shard is not bucket.parameters for bucket in stage.buckets):
        stage.optimizer.register_state_dict_post_hook(say)  # at stage 0 all ranks have the same
    stage.optimizer.register_load_state_dict_pre_hook(look)


def _facts(stage) -> dict:
    """What must be the same at saving and at loading, and what no shard holds."""
    return {
        "stage": type(stage).__name__,
        "rank": dist.get_rank(stage.group),
        "world_size": dist.get_world_size(stage.group),
        "buckets": [(bucket.name, bucket.numel, bucket.padded) for bucket in stage.all_buckets],
        "parameters": _layout_of(stage),
        "optimizer_class": type(stage.optimizer).__name__,
        "frozen": in_no_bucket(stage),
        "buffers": dict(stage.model.named_buffers()),
    }


def in_no_bucket(stage) -> dict[str, torch.Tensor]:
    """The values of frozen parameters, by name, that every rank holds whole."""
    packed = {param for bucket in stage.all_buckets for param in bucket.params}
    named = stage.model.named_parameters()
    return {name: param.data for name, param in named if param not in packed}


def _layout_of(stage) -> list[tuple]:
    """Of each parameter in a bucket: its name, and where in the bucket it begins. Two models may
    have the same sizes and other names."""
    names = {param: name for name, param in stage.model.named_parameters()}
    return [(names[param], bucket.flat.offsets[param] - bucket.start)
            for bucket in stage.all_buckets for param in bucket.params]


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
    """torch checks only the numbers of groups and of their parameters: it would accept a moment of
    another shape, and fail in the next step."""
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
