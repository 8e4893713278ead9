"""Gradient memory: where gradients of stages 2 and 3 lie, whole for a moment and then as shards."""

from dataclasses import dataclass

import torch

from zero_minimal.foundations import collectives
from zero_minimal.foundations.layout import Bucket


@dataclass(frozen=True, eq=False)
class Reduction:
    """A reduce-scatter under way."""

    bucket: Bucket
    whole: torch.Tensor  # [padded] this rank's gradients, which the other ranks are reading
    part: torch.Tensor  # [padded / N] where the average arrives
    pending: collectives.Pending


class GradientMemory:
    """New memory for every bucket, freed when it is reduced. zero_100b.py has another one."""

    def __init__(self, buckets: list[Bucket], group=None):
        pass

    def whole(self, bucket: Bucket) -> torch.Tensor:
        """Zeros [padded], into which the bucket's gradients are copied."""
        return bucket.zeros()

    def give_back(self, whole: torch.Tensor) -> None:
        """Called when `whole` was reduced, and is not needed any more."""
        collectives.free(whole)

    def shard(self, bucket: Bucket) -> torch.Tensor:
        """Where this rank's part of the average goes, [padded / N]. It becomes
        bucket.gradient_shard, or is added to it where there is one already."""
        return torch.empty_like(bucket.parameter_shard)
