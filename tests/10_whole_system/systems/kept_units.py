"""Gold on all tracks: every layer is a unit, some stay whole from forward to backward, and each goes when it is done.

Compared with stage 3: units are single layers, so gradients are copied layer by layer. Nothing is prefetched. A unit
that is gathered for backward stays until its gradients are reduced, and goes then. While a unit is whole, the rank's
shard of it is a part of that, and has no memory of its own. The last layers are kept: backward comes to them first,
while activations are highest, and would need them then anyway.
"""

import torch.distributed as dist
from torch.optim import AdamW

from zero_minimal.paper.moments import Work
from zero_minimal.stage3 import Stage3


class KeptUnits(Stage3):
    def __init__(self, model, optimizer_class, kept, **options):
        self.kept = set(kept)
        super().__init__(model, optimizer_class, **options)

    def unit_turn(self, unit, following):
        needed = [unit, *unit.parents]
        if not self.reducer.running:
            for other in self.units:
                if other.whole and other not in needed and other.module not in self.kept:
                    self._release(other)
        for one in needed:
            self._gather(one)
            self._arrive(one)

    def _arrive(self, unit):
        arrives = bool(unit.gathering)
        super()._arrive(unit)
        for bucket in unit.buckets if arrives else ():
            bucket.parameter_shard = bucket.shard(bucket.parameters, self.rank)

    def _release(self, unit):
        self._arrive(unit)
        for bucket in unit.buckets if unit.whole else ():
            bucket.parameter_shard = bucket.shard(bucket.parameters, self.rank).clone()
            self._free(bucket)
        unit.whole = False

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        for unit in self.units[1:]:
            if bucket in unit.buckets:
                self._release(unit)


def layers(model):
    """The layers inside blocks, in the order of forward. The rest is the root: the head uses the embedding's weight."""
    return [module for block in model.blocks for module in block.modules()
            if any(True for _ in module.parameters(recurse=False))]


def size(module):
    return sum(param.nbytes for param in module.parameters(recurse=False))


def fitting(modules, room):
    """Of modules, some that take at most so many bytes: the first ones of each size, large ones first."""
    chosen = []
    for module in sorted(modules, key=size, reverse=True):
        if size(module) <= room:
            chosen.append(module)
            room -= size(module)
    return chosen


def room_for_units(model, group, budget):
    """Bytes that are left for whole units at the peaks, when backward begins; 1% is for what is small."""
    config, ranks = model.config, dist.get_world_size(group)
    parallel = dist.get_world_size(model.group) if hasattr(model, "group") else 1
    work = Work(config, budget.batch, "bf16", parallel)
    elements = sum(param.numel() for param in model.parameters())
    head = 2 * config.vocabulary * config.hidden / parallel
    gradients = head + 2 * 2 * 4 * config.hidden**2 / parallel  # of the head, and of the layer at work twice
    highest = work.kept() + max(work.logits() + head / 2, work.at_work() + gradients)
    shards = 14 * elements / ranks
    root = sum(param.nbytes for param in model.parameters()) - sum(map(size, layers(model)))
    return (0.99 * budget.memory - shards - highest - root) * ranks / (ranks - 1)


def build(model, group, budget):
    units, ranks = layers(model), dist.get_world_size(group)
    if budget.memory is not None:
        kept = fitting(units[::-1], room_for_units(model, group, budget))
    else:
        whole = sum(param.nbytes for param in model.parameters())
        spare = budget.sent * ranks / (ranks - 1) - 2 * whole
        twice = fitting(units, 0.99 * spare)  # padding travels, too
        kept = [module for module in units if module not in twice]
    return KeptUnits(model, AdamW, kept, group=group, units=units, **budget.options)
