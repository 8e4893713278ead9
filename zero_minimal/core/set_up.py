"""Set-up: what the constructors of all stages have in common.

    1. plan the buckets
    2. move the parameters into flat tensors, and broadcast rank 0's values
    3. stage.own(bucket): the stage decides what of the bucket this rank keeps;
       the rank's shard gets an fp32 master if it is in 16 bit
    4. make the user's optimizer, over the shards

Stage 3 does steps 2 and 3 for one unit, then for the next, since no rank may be able to hold the
whole model. zero_minimal/guards refuses what cannot be trained, before the model is changed.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.core import collectives, layout, optimizers, precision
from zero_minimal.core.seams import tell


def set_up(
    stage, model: nn.Module, optimizer_class: type, optimizer_options: dict, *,
    group, bucket_bytes: int | None, param_groups, units: list | None = None,
    padded_size: Callable = layout.padded_size, master_of: Callable = precision.master_of,
    over_shards: Callable = optimizers.over_shards,
) -> None:
    """Give a stage its

        .model, .group, .rank, .world_size
        .buckets         those that are trained, in the order in which backward completes them
        .all_buckets     with those of frozen parameters, which only stage 3 makes
        .optimizer
        .gradient_scale  what the update multiplies gradients with; None: 1

    Args:
        group: of ranks. param_groups are the optimizer's groups.
        bucket_bytes: the size of a bucket; not used with units.
        units: stage 3's (units.py). Each becomes one bucket (or several, if its parameters differ
            in dtype, device or optimizer group).
        padded_size, master_of, over_shards: may replace the functions of layout, precision and
            optimizers. Stage 1 passes the defaults, to show them.
    Raises: what layout.pack raises, and whatever zero_minimal/guards refuses.
    """
    tell("model_given", model, group, units, bucket_bytes)
    groups = parameter_groups(model, param_groups)
    tell("optimizer_given", optimizer_class, optimizer_options, groups)
    stage.model, stage.group = model, group
    stage.rank, stage.world_size = dist.get_rank(group), dist.get_world_size(group)

    # without units= the whole model is a single one, which bucket_bytes cuts into buckets
    chosen = {param for each in groups for param in each["params"]}
    trained = [param for param in model.parameters() if param in chosen]
    single = SimpleNamespace(name="", module=model, params=trained, buckets=[])
    most = None if units else bucket_bytes
    units = units or [single]
    for unit in units:
        unit.buckets = layout.pack(unit.params, groups, stage.world_size, most, padded_size)
    # backward comes to the last unit of the model first
    stage.all_buckets = [bucket for unit in reversed(units) for bucket in unit.buckets]
    stage.buckets = [bucket for bucket in stage.all_buckets if bucket.trained]
    tell("buckets_planned", stage, units, optimizer_class, [optimizer_options, *groups])
    try:
        for unit in units:
            tell("unit_to_flatten", unit, model)
            layout.flatten(unit.buckets)  # sets bucket.parameters, [padded]
            for bucket in unit.buckets:
                collectives.broadcast(bucket.parameters, group=group, of=bucket)
                stage.own(bucket)  # sets bucket.parameter_shard; at stages 0 and 1 gradients too
                if bucket.trained and bucket.master is None:  # the stage has made none itself
                    own = bucket.parameter_shard
                    narrow = own.element_size() < 4
                    bucket.master = master_of(own) if narrow else nn.Parameter(own)
        _broadcast_rest(model, stage.all_buckets, group)
        stage.optimizer = over_shards(optimizer_class, optimizer_options, groups, stage.buckets)
    except Exception:
        tell("wrap_failed", stage)
        raise
    stage.gradient_scale: precision.Scale = None
    tell("wrapped", stage)


def parameter_groups(model: nn.Module, param_groups: Iterable | None = None) -> list[dict]:
    """What the user asked to train, as torch.optim takes it: dicts with "params" and options.
    Frozen parameters are left out."""
    given = list(model.parameters() if param_groups is None else param_groups)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = [dict(group) for group in given]
    for group in groups:
        params = group["params"]
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        # torch.optim takes (name, parameter) pairs too
        group["params"] = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
    tell("groups_given", model, groups)
    return [{**group, "params": [param for param in group["params"] if param.requires_grad]}
            for group in groups]


def _broadcast_rest(model: nn.Module, buckets: list, group=None) -> None:
    """Rank 0's values for what no bucket holds: parameters that are not trained, and buffers."""
    packed = {param for bucket in buckets for param in bucket.params}
    for param in model.parameters():
        if param not in packed:
            collectives.broadcast(param.data, group=group)
    for buffer in model.buffers():
        collectives.broadcast(buffer, group=group)
