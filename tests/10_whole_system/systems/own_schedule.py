"""Right, and written otherwise: stage 3 as it stands, but that it refuses to free some blocks until their gradients are
on their way. How many, says a rough estimate."""

import torch.distributed as dist
from torch.optim import AdamW

from zero_minimal.stage3 import Stage3


class Blocks(Stage3):
    stay = ()

    def __init__(self, *arguments, **options):
        self.reduced = set()
        super().__init__(*arguments, **options)

    def _release(self, unit):
        if unit not in self.stay or self.reduced.issuperset(unit.buckets):
            super()._release(unit)

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        self.reduced.add(bucket)

    def zero_grad(self):
        super().zero_grad()
        self.reduced.clear()


def build(model, group, budget):
    zero = Blocks(model, AdamW, group=group, **budget.options)
    block, whole = zero.units[-1].buckets[0].padded * 2, sum(bucket.padded * 2 for bucket in zero.buckets)
    count = len(zero.units) - 1
    if budget.memory is not None:
        working = 3 * budget.batch * budget.sequence * model.config.vocabulary * 4 + 7 * block
        free = budget.memory - 8 * whole / dist.get_world_size(group) - working
        count = max(0, min(count, int(free / block)))
    zero.stay = set(zero.units[len(zero.units) - count :])
    return zero
