"""Gold, and written otherwise: stage 3's turns as they stand, but that a layer is not freed before its time. Each layer
of a block is a unit; the last ones stay from forward to backward, as many as a rough estimate allows."""

import torch.distributed as dist
from torch.optim import AdamW

from zero_minimal.stage3 import Stage3


class Refuses(Stage3):
    stay = ()

    def __init__(self, *arguments, **options):
        self.reduced = set()
        super().__init__(*arguments, **options)

    def unit_turn(self, unit, following):
        super().unit_turn(unit, None)  # nothing ahead of its turn

    def _release(self, unit):
        if self.reducer.running and unit in self.units[1:] or unit in self.stay:
            if not self.reduced.issuperset(unit.buckets):
                return
        super()._release(unit)

    def _arrive(self, unit):
        super()._arrive(unit)
        for bucket in unit.buckets if unit.whole else ():
            bucket.parameter_shard = bucket.shard(bucket.parameters, self.rank)  # one memory for both

    def _free(self, bucket):
        if bucket.parameters.untyped_storage().nbytes():  # else it is free already
            bucket.parameter_shard = bucket.shard(bucket.parameters, self.rank).clone()
        super()._free(bucket)

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        self.reduced.add(bucket)

    def zero_grad(self):
        super().zero_grad()
        self.reduced.clear()


def nbytes(unit):
    return sum(bucket.padded * 2 for bucket in unit.buckets)


def build(model, group, budget):
    layers = [layer for block in model.blocks for layer in block.modules() if hasattr(layer, "weight")]
    zero = Refuses(model, AdamW, group=group, units=layers, **budget.options)
    ranks, whole = dist.get_world_size(group), sum(map(nbytes, zero.units))
    if budget.memory is None:
        room = whole - nbytes(zero.units[0]) - max(0, 0.994 * budget.sent * ranks / (ranks - 1) - 2 * whole)
    else:
        split = dist.get_world_size(model.group) if hasattr(model, "group") else 1
        logits = 4 * 3.6 * budget.batch * budget.sequence * model.config.vocabulary / split
        inputs = 2 * budget.batch * budget.sequence * model.config.hidden * (model.config.layers + 8)
        room = 0.985 * budget.memory - 7 * whole / ranks - logits - inputs - nbytes(zero.units[0])
    kept = []
    for unit in zero.units[:0:-1]:
        room -= nbytes(unit)
        kept += [unit] * (room > 0)
    zero.stay = set(kept)
    return zero
