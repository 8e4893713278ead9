"""Set-up: what all stages begin with, until each decides what of a bucket its rank holds.

    1. refuse what cannot be trained, while the model is still as it was
    2. pack the parameters into buckets; make sure that all ranks have the same
    3. move the parameters into their flats, and broadcast rank 0's
    4. stage.own(bucket), for each bucket: what of it is this rank's?
    5. fp32 masters where there are none, and the user's optimizer over the shards

A model that no rank can hold comes unit by unit: steps 3 and 4 for one, then for the next.
"""

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.foundations import collectives, layout, meta, optimizers, ownership, precision
from zero_minimal.foundations.units import Unit


def set_up(
    stage, model: nn.Module, optimizer_class: type, optimizer_options: dict, *, group, bucket_bytes: int | None,
    param_groups, units: list[Unit] | None = None,
) -> None:
    """Give a stage its .model, .group, .rank, .world_size, .buckets (those that are trained, in the
    order in which backward completes them), .all_buckets and .optimizer.

    Args:
        bucket_bytes: the size of a bucket; not used with units.
        units: a bucket is a whole unit (or several, if its parameters differ in dtype or optimizer
            group).
    Raises: what ownership.parameter_groups, optimizers.check_element_wise and ownership.adopt
        raise.
    """
    groups = ownership.parameter_groups(model, param_groups)
    optimizers.check_element_wise(optimizer_class, optimizer_options)
    stage.model, stage.group = model, group
    stage.rank, stage.world_size = dist.get_rank(group), dist.get_world_size(group)

    # without units all is one, cut by bytes
    pieces = units or [Unit("", model, ownership.trained(model, groups))]
    for piece in pieces:
        size = None if units else bucket_bytes
        piece.buckets = layout.pack(piece.params, groups, stage.world_size, size, piece.name)
    stage.all_buckets = [bucket for piece in reversed(pieces) for bucket in piece.buckets]
    stage.buckets = [bucket for bucket in stage.all_buckets if bucket.trained]
    ownership.adopt(stage, model, stage.all_buckets, group)

    for piece in pieces:
        if units:
            meta.materialise(piece, model)  # if it is on the meta device
        layout.flatten(piece.buckets)  # bucket.parameters, [padded]
        for bucket in piece.buckets:
            collectives.broadcast(bucket.parameters, group=group)
            stage.own(bucket)
            if bucket.trained:
                bucket.master = precision.master_of(bucket.parameter_shard)
    ownership.broadcast_rest(model, stage.all_buckets, group)
    stage.optimizer = optimizers.on_shards(optimizer_class, optimizer_options, groups, stage.buckets)
    # what the update multiplies gradients with, if anything
    stage.gradient_scale: torch.Tensor | None = None
