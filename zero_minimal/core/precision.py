"""Precision: fp32 masters for 16-bit parameters, the global gradient norm.

Mixed precision keeps 2 + 2 + 12 bytes a parameter (ZeRO, section 3.1): parameter and gradient in 16
bit; fp32 master, momentum and variance. The master exists because an update is often smaller than
the spacing of 16-bit numbers: added to a bf16 parameter it would vanish. ZeRO shards it like all
optimizer state.
"""

import functools

import torch
from torch import nn

from zero_minimal.core import collectives
from zero_minimal.core.layout import Bucket

Scale = torch.Tensor | float | None  # what the update multiplies gradients with; None: 1


def master_of(shard: torch.Tensor) -> nn.Parameter:
    """What the optimizer updates in the place of a shard of 16 bits: an fp32 copy of it."""
    return nn.Parameter(shard.float())


def keep_changes(bucket: Bucket) -> None:
    """Carry a user's edit of the parameters (loaded weights, say) over to the fp32 master. Elements
    that were not edited keep their full precision."""
    if getattr(bucket, "away", None) is not None:  # its master is on a host
        bucket.away.keep_changes(bucket)
        return
    shard, master = bucket.parameter_shard, bucket.master.data
    if master.dtype != shard.dtype:
        torch.where(shard == master.to(shard.dtype), master, shard, out=master)


def global_norm(
    gradients: list[torch.Tensor], gradient_scale: Scale = None, *,
    sharded: bool = True, group=None,
) -> torch.Tensor:
    """Euclidean norm of the whole model's gradient, a 0-dim tensor, the same on every rank.
    `sharded=False`: every rank holds all of it already.
    """
    real = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    dtypes = [gradient.dtype for gradient in real]
    wide = functools.reduce(torch.promote_types, dtypes, torch.float32)  # fp32 at least
    norms = [torch.linalg.vector_norm(gradient.flatten(), dtype=wide) for gradient in real]
    squares = torch.stack(norms).square().sum()  # shards add their squares, not their norms
    if sharded:
        collectives.all_reduce(squares, op="sum", group=group)
    norm = squares.sqrt()
    return norm if gradient_scale is None else norm * gradient_scale


def clip(gradient_scale: Scale, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The new gradient scale: the old one times max_norm / norm, if the norm is larger. The
    gradients stay as they are; the update multiplies them."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return factor if gradient_scale is None else gradient_scale * factor
