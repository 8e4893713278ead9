"""Set-up: what the constructors of all stages have in common.

    1. refuse what cannot be trained, while the model is still as it was
    2. plan the buckets, and check that all ranks have the same model (but for its values) and
       the same buckets
    3. move the parameters into flat tensors, and broadcast rank 0's values
    4. stage.own(bucket): the stage decides what of the bucket this rank keeps;
       the rank's shard gets an fp32 master if it is in 16 bit
    5. make the user's optimizer, over the shards

Stage 3 does steps 3 and 4 for one unit, then for the next, since no rank may be able to hold the
whole model.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import nn

from zero_minimal.foundations import collectives, layout, meta, optimizers, ownership, precision
from zero_minimal.foundations.released import is_released
from zero_minimal.foundations.sharded_state import refuse_other_shards
from zero_minimal.foundations.units import Unit, give_back


def set_up(
    stage, model: nn.Module, optimizer_class: type, optimizer_options: dict, *,
    group, bucket_bytes: int | None, param_groups, units: list[Unit] | None = None,
    padded_size: Callable = layout.padded_size, master_of: Callable = precision.master_of,
    over_shards: Callable = optimizers.over_shards,
) -> None:
    """Give a stage its

        .model, .group, .rank, .world_size
        .buckets         those that are trained, in the order in which backward completes them
        .all_buckets     with those of frozen parameters, which only stage 3 makes
        .optimizer
        .gradient_scale  what the update multiplies gradients with; None: with nothing

    Args:
        group: of ranks. param_groups are the optimizer's groups.
        bucket_bytes: the size of a bucket; not used with units.
        units: each becomes one bucket (or several, if its parameters differ in dtype, device or
            optimizer group).
        padded_size, master_of, over_shards: functions that do what those of layout, precision and
            optimizers do. Stage 1, which introduces them, names them.
    Raises: what ownership.parameter_groups, optimizers.check_element_wise, optimizers.check_groups,
        ownership.check_member, meta.check, layout.pack, ownership.adopt and meta.materialise raise.
    """
    groups = ownership.parameter_groups(model, param_groups)
    ownership.check_member(group)
    ownership.check_forward(model)
    optimizers.check_element_wise(optimizer_class, optimizer_options)
    optimizers.check_groups(optimizer_class, optimizer_options, groups)
    meta.check(model, by_units=units is not None)
    stage.model, stage.group = model, group
    stage.rank, stage.world_size = dist.get_rank(group), dist.get_world_size(group)

    # without units= the whole model is a single one, which bucket_bytes cuts into buckets
    parts = units or [Unit("", model, ownership.trained(model, groups))]
    size, nameless = (None, "the root unit") if units else (bucket_bytes, "bucket {}")
    _plan_buckets(stage, parts, groups, size, padded_size, nameless)
    ownership.adopt(stage, model, stage.all_buckets, optimizer_class, [optimizer_options, *groups],
                    group)

    with _whole_if_it_fails(stage), meta.back_if_it_fails(model):
        for part in parts:
            if units:
                meta.materialise(part, model)  # gives it memory, if it is on the meta device
            layout.flatten(part.buckets)  # sets bucket.parameters, [padded]
            for bucket in part.buckets:
                collectives.broadcast(bucket.parameters, group=group, of=bucket)
                stage.own(bucket)  # sets bucket.parameter_shard; at stages 0 and 1 gradients too
                if bucket.trained and bucket.master is None:  # the stage has made none itself
                    own = bucket.parameter_shard
                    narrow = own.element_size() < 4
                    bucket.master = master_of(own) if narrow else nn.Parameter(own)
        ownership.broadcast_rest(model, stage.all_buckets, group)
        stage.optimizer = optimizers.on_shards(
            optimizer_class, optimizer_options, groups, stage.buckets, over_shards
        )
    refuse_other_shards(stage)
    drop = weakref.WeakMethod(stage.zero_grad)
    stage.optimizer.zero_grad = lambda set_to_none=True: drop()()
    stage.gradient_scale: precision.Scale = None
    ownership.mark(stage, model)  # last: a wrap that fails leaves the model free


def _plan_buckets(
    stage, parts: list[Unit], groups: list[dict], bucket_bytes: int | None, padded_size: Callable,
    nameless: str,
) -> None:
    """Give a stage its buckets, in the order in which backward completes them, with names.
    `nameless`: how one is called whose part has no name, with its number for {}."""
    for part in parts:
        part.buckets = layout.pack(
            part.params, groups, stage.world_size, bucket_bytes, part.name, padded_size
        )
    # backward comes to the last part of the model first
    stage.all_buckets = [bucket for part in reversed(parts) for bucket in part.buckets]
    stage.buckets = [bucket for bucket in stage.all_buckets if bucket.trained]
    model_number = _next_model(stage.group)
    for number, bucket in enumerate(stage.all_buckets):
        bucket.name = bucket.name or nameless.format(number)
        bucket.model = model_number


_models = weakref.WeakKeyDictionary()  # process group → how many models were wrapped over it


def _next_model(group) -> str:
    """What tells the buckets of several models apart: a batch may go through two of them."""
    group = group or dist.group.WORLD
    _models[group] = number = _models.get(group, 0) + 1
    return f" of model {number}" if number > 1 else ""


@contextlib.contextmanager
def _whole_if_it_fails(stage) -> Iterator[None]:
    """Context that an error on all ranks leaves with a model that can be wrapped again. Its values
    may be rank 0's by then."""
    try:
        yield
    except Exception:
        lost = [bucket for bucket in stage.all_buckets if any(map(is_released, bucket.params))]
        with contextlib.suppress(RuntimeError):  # the others may be elsewhere, or gone
            give_back(lost, stage.group)
        raise
