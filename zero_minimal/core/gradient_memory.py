"""Gradient memory: where gradients of stages 2 and 3 lie, whole for a moment and then as shards."""

from dataclasses import dataclass

import torch

from zero_minimal.core import collectives
from zero_minimal.core.layout import Bucket


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduce-scatter under way."""

    bucket: Bucket
    whole: torch.Tensor  # [padded] this rank's gradients; they are being sent from here
    shard: torch.Tensor  # [padded / N] where this rank's shard of the average arrives
    pending: collectives.Work


class GradientMemory:
    """New memory for every bucket, freed as soon as its reduction has been waited for.
    zero_100b.py has another one."""

    def __init__(self, buckets: list[Bucket], group=None):
        pass

    def whole(self, bucket: Bucket) -> torch.Tensor:
        """Zeros [padded], into which the bucket's gradients are copied."""
        return bucket.zeros()

    def give_back(self, whole: torch.Tensor) -> None:
        """Called after the wait for the reduction: `whole` is not needed any more."""
        collectives.free(whole)

    def shard(self, bucket: Bucket) -> torch.Tensor:
        """New memory for this rank's shard of the average, [padded / N]. It becomes
        bucket.gradient_shard, or is added to it where there is one already."""
        return torch.empty_like(bucket.parameter_shard)
