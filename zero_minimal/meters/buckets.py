"""Buckets: the memory that each bucket's gradients take while one backward pass fills bucket after bucket.

    with Lanes(zero) as lanes:
        loss.backward()
    lanes.record["shard"][0]       # first bucket: before the first gradient, after each one, after the pass

The clock counts gradients, not time: so every machine records the same. And which elements of the parameters a rank
writes in step(), before it receives the others':

    with Written(zero) as written:
        zero.step()
    written.masks       # for each parameter, in the order of the model: True where this rank wrote, in its shape

A stage gathers bucket after bucket. When this rank begins to gather one, it has itself made all changes in it.
"""

import torch

from zero_minimal.core import work
from zero_minimal.core.gradient_memory import Reduction
from zero_minimal.guards.grad_placeholder import has_gradient
from zero_minimal.meters.events import Events

KINDS = (
    "coming",  # gradients that this rank has computed, not yet sent
    "sent",  # the same while they are reduced, when other ranks read them
    "shard",  # this rank's shard of the mean, once it has its own memory
    "idle",  # memory that is kept although nothing in it will be read
)


class Lanes(Events):
    """Watches one backward pass of a stage (1 or 2) on this rank.

    record: bytes, {kind of KINDS: [bucket, in the order in which they are reduced][moment]}; the moments are before the
    first gradient, after each one, and after the pass. And {"padded": [bucket]}, a whole bucket's bytes.
    """

    def __init__(self, zero):
        super().__init__()
        self.zero, self.buckets = zero, list(zero.reducer.buckets)
        self.record: dict = {kind: [[] for _ in self.buckets] for kind in KINDS}
        self.record["padded"] = [bucket.parameters.nbytes for bucket in self.buckets]
        self._started = self._ended = 0  # reduce-scatters, which run in the order of the buckets

    def __enter__(self):
        super().__enter__()
        for param in {param for bucket in self.buckets for param in bucket.params}:
            # the stage's hooks were registered first, so this one sees their effect
            self._undo.callback(param.register_post_accumulate_grad_hook(lambda _: self._look()).remove)
        self._look()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._look()

    def hear(self, moment: str, call: work.Call) -> None:
        if call.name == "reduce_scatter":
            self._started += moment == "start"
            self._ended += moment == "end"

    def _look(self) -> None:
        for number, bucket in enumerate(self.buckets):
            for kind, count in zip(KINDS, self._held(number, bucket), strict=True):
                self.record[kind][number].append(count)

    def _held(self, number: int, bucket) -> tuple[int, int, int, int]:
        """Bytes of each kind now. `number`: the bucket's position in the order."""
        own = sum(piece(bucket, param) for param in bucket.params if has_gradient(param))
        if bucket.gradients is not None:  # stage 1: one tensor for the whole bucket, from the start
            sent = own if self._ended <= number < self._started else 0
            shard = bucket.gradient_shard.nbytes if number < self._ended else 0
            coming = own if self._started <= number else 0
            return coming, sent, shard, bucket.gradients.nbytes - coming - sent - shard
        under_way = self.zero.reducing
        if not isinstance(under_way, Reduction) or under_way.bucket is not bucket:
            return own, 0, 0 if bucket.gradient_shard is None else bucket.gradient_shard.nbytes, 0
        return own, under_way.whole.nbytes, under_way.shard.nbytes, 0


def place(bucket, param) -> tuple[int, int]:
    """Where this bucket's part of a parameter begins and ends in the flat vector."""
    offset = bucket.flat.offsets[param]
    return max(offset, bucket.start), min(offset + param.numel(), bucket.start + bucket.padded)


def piece(bucket, param) -> int:
    """Bytes of a parameter's gradient that belong to this bucket."""
    begin, end = place(bucket, param)
    return (end - begin) * param.element_size()


# -------------------------------------------------------------------------------------------- who writes what in step()


class Written(Events):
    """Watches one step() of a stage whose whole parameters are in zero.buckets, in the order in which it gathers them.
    A stage that gathers nothing has itself written all changes."""

    def __init__(self, zero):
        super().__init__()
        self.zero, self.buckets = zero, list(zero.buckets)
        self._before = [bucket.parameters.clone() for bucket in self.buckets]
        self._changed: list[torch.Tensor] = []

    def __exit__(self, *error):
        super().__exit__(*error)
        while len(self._changed) < len(self.buckets):
            self._look()
        self.masks = [self._mask(param) for param in self.zero.model.parameters()]

    def hear(self, moment: str, call: work.Call) -> None:
        if (moment, call.name) == ("start", "all_gather") and len(self._changed) < len(self.buckets):
            self._look()

    def _look(self) -> None:
        number = len(self._changed)
        self._changed.append(self.buckets[number].parameters != self._before[number])

    def _mask(self, param) -> torch.Tensor:
        mask = torch.zeros(param.numel(), dtype=torch.bool)
        for bucket, changed in zip(self.buckets, self._changed, strict=True):
            if any(param is other for other in bucket.params):
                offset, (begin, end) = bucket.flat.offsets[param], place(bucket, param)
                mask[begin - offset : end - offset] = changed[begin - bucket.start : end - bucket.start].cpu()
        return mask.view(param.shape)
