"""Changed in forward: a forward pass may change parameters in place, if all ranks do so alike.

A layer that sets its parameters by the first batch (ActNorm), or F.embedding(max_norm=1), changes
them by what a rank sees. Shards would then be put together from different values, and at stage 0
each rank would train a model of its own. So what a forward has changed is summed up, and travels in
the fingerprint of the bucket: ranks that differ are told before step().

Seams: wrapped, followed, backward_begins, gradients_asked, gradients_dropped, update_ends,
parameters_edited.
"""

from collections.abc import Iterable

import torch

from zero_minimal.core import seams
from zero_minimal.core.layout import Bucket
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.collective_fingerprint import CHANGED, EDITED, VALUES


class Frozen:
    """Parameters of a module that are not trained: they stand in no bucket that backward sends."""

    def __init__(self, params: list):
        self.params = params


class ChangedInForward:
    """Looks at the parameters of `buckets` around each forward of `module`, and says in
    bucket.changed what became of those that it has changed.

    In the first forward the values are looked at, since edits of .data leave no other trace; then
    only autograd's count of changes.
    """

    def __init__(self, module: torch.nn.Module, buckets: list[Bucket | Frozen]):
        self.buckets = buckets
        self.is_first = True  # forward
        self.before = []  # what was seen of each bucket when it began
        for bucket in buckets:
            bucket.changed = bucket.edited = ""  # in words; the second of what was edited by hand
        module.register_forward_pre_hook(WeakHook(ChangedInForward._begin, self))
        module.register_forward_hook(WeakHook(ChangedInForward._end, self))

    def _begin(self, *_) -> None:
        self.before = [self._seen(bucket) for bucket in self.buckets]

    def _end(self, *_) -> None:
        for bucket, before in zip(self.buckets, self.before, strict=False):
            if self._seen(bucket) != before:
                bucket.changed = f"{CHANGED} (sum {_sum(bucket)!r})"
        self.before, self.is_first = [], self.is_first and torch.jit.is_tracing()

    def _seen(self, bucket: Bucket | Frozen) -> tuple:
        looks = self.is_first and not torch.jit.is_tracing()  # a sum would be traced, too
        return sum(map(_edits, bucket.params)), _sum(bucket) if looks else None


def edited_by_hand(bucket: Bucket | Frozen) -> str:
    """In words, what became of its parameters, if somebody has edited them in place since the last
    note, and not under gather_parameters(), which compares them itself."""
    if not any(map(_edits, bucket.params)):
        return ""
    all_alike(bucket.params)
    return "" if bucket.changed else f"{EDITED} (sum {_sum(bucket)!r})"


def all_alike(params: Iterable[torch.nn.Parameter]) -> None:
    """From here on edits are counted."""
    for param in params:
        param._zero_edits = param._version


def _edits(param: torch.nn.Parameter) -> int:
    return param._version - getattr(param, "_zero_edits", param._version)


def _sum(bucket: Bucket | Frozen) -> float | None:
    if any(param.is_meta for param in bucket.params):
        return None
    precise = {True: torch.complex128, False: torch.float64}
    return sum(param.detach().sum(dtype=precise[param.is_complex()]).item()
               for param in bucket.params)


@seams.at("followed")
def follow(reducer) -> None:
    stage = reducer.stage
    reducer.frozen, reducer.watched, reducer.values = [], [], ""
    for one in stage.units if reducer.by_turns else [stage]:
        module = one.module if reducer.by_turns else one.model
        held = one.params if reducer.by_turns else module.parameters()
        frozen = Frozen([param for param in held if param not in reducer.buckets_of])
        trained = [bucket for bucket in one.buckets if bucket in stage.buckets]
        reducer.frozen.append(frozen)
        reducer.watched.append(ChangedInForward(module, [*trained, frozen]))


@seams.at("backward_begins", "gradients_asked")
def look_for_edits(reducer) -> None:
    if not reducer.by_turns:  # step() mixes shards
        for bucket in (*reducer.stage.buckets, *reducer.frozen):
            bucket.edited = bucket.edited or edited_by_hand(bucket)
        values = values_of(reducer)
        if reducer.values not in ("", values):  # by .data, which autograd does not count
            reducer.stage.buckets[0].edited = f"{EDITED} (sum {values.split()[-1]})"
        reducer.values = values


def changes_of(reducer, bucket: Bucket) -> str:
    """In words, what forward or somebody's hand has changed."""
    changed = bucket.changed or "".join(frozen.changed for frozen in reducer.frozen)
    edited = bucket.edited or "".join(frozen.edited for frozen in reducer.frozen)
    for each in (bucket, *reducer.frozen):
        each.edited = ""
    return changed + edited


def values_of(reducer) -> str:
    """In words, a checksum of the parameters' bits: of all where they are few, else of samples,
    also where each parameter begins. They are the same on all ranks where these gather each other's
    shards. (Not at stage 0: two machines may round differently.) Nothing for an assignment, nor on
    a GPU, for which it would wait."""
    stage, total = reducer.stage, 0
    first = stage.buckets[0]
    ours = stage.step.__module__.startswith("zero_minimal.") and not reducer.by_turns
    if not ours or first.parameter_shard is first.parameters or stage.world_size == 1:
        return ""
    for flat, bucket in {bucket.flat: bucket for bucket in stage.buckets}.items():
        next(iter(flat.offsets)).detach()  # with late_gather.py it waits until all are here
        if bucket.parameters.is_cpu and flat.size * flat.dtype.itemsize % 8 == 0:
            bits = bucket.parameters.as_strided((flat.size,), (1,), 0).view(torch.int64)
            begins = [offset * flat.dtype.itemsize // 8
                      for param, offset in flat.offsets.items() if param.numel()]
            samples = bits[:: 1 + len(bits) // 8192]  # 0.2% of a step of 11M parameters
            total += samples.sum().item() + bits[begins].sum().item()
    return f"{VALUES}{total % 2**64}"


@seams.at("gradients_dropped")
def forget(reducer) -> None:
    for bucket in (*reducer.stage.buckets, *reducer.frozen):
        bucket.changed = ""
    reducer.values = ""


@seams.at("wrapped")
def begin_to_count(stage) -> None:
    all_alike(stage.model.parameters())


@seams.at("parameters_edited")
def compared(model: torch.nn.Module, group) -> None:
    all_alike(model.parameters())


@seams.at("update_ends")
def update_is_no_edit(bucket: Bucket) -> None:
    for param in bucket.params:
        if hasattr(param, "_zero_edits"):
            param._zero_edits += 1
