"""Changed in forward: forward may change parameters in place, if all ranks make the same change.

A layer that sets its parameters from the first batch (ActNorm), or F.embedding(max_norm=1), changes
them by the rank's own data. Gathered parameters would then mix different values, and at stage 0
each rank would train a model of its own. So a sum of the changed parameters travels in the bucket's
fingerprint: ranks that differ get an error before step(). Where .grad was changed before step(), at
stage 0, a sum of the gradients travels with the next backward.

Seams: wrapped, followed, backward_begins, gradients_reduced, gradients_asked, gradients_dropped,
update_begins, update_ends, parameters_edited, parameter_moves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from zero_minimal.core import seams
from zero_minimal.core.layout import Bucket
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.collective_fingerprint import CHANGED, EDITED, REWRITTEN, VALUES
from zero_minimal.guards.trained_by import home_of, trained_by


class Frozen:
    """A module's parameters in no bucket that backward sends: those that are not trained, or all of
    Naive's."""

    def __init__(self, params: list):
        self.params = params


class ChangedInForward:
    """Compares the parameters of `buckets` before and after each forward of `module`. If forward
    has changed some, bucket.changed says so, with their sum.

    The first forward compares values, too, since edits of .data leave no other trace; later ones
    compare only autograd's count of changes.
    """

    def __init__(self, module: torch.nn.Module, buckets: list[Bucket | Frozen]):
        self.buckets = buckets
        self.is_first = True  # no forward has run yet
        self.before = []  # what _seen() returned for each bucket when forward began
        for bucket in buckets:
            bucket.changed = bucket.edited = ""  # in words; `edited` is for edits by hand
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
    """In words, an edit in place of its parameters since the last all_alike(), or "". Edits under
    gather_parameters() do not count: it compares them itself."""
    if not any(map(_edits, bucket.params)):
        return ""
    all_alike(bucket.params)
    return "" if bucket.changed else f"{EDITED} (sum {_sum(bucket)!r})"


def all_alike(params: Iterable[torch.nn.Parameter]) -> None:
    """Count edits from here on."""
    for param in params:
        param._zero_edits = param._version


@contextmanager
def as_before(params: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Context at whose end the parameters have the values of before. So autograd's versions are as
    before, too (a graph from before stays valid), and what happens inside counts as no edit."""
    params = tuple(params)
    edits = {param: param._zero_edits for param in params if hasattr(param, "_zero_edits")}
    with torch.autograd._unsafe_preserve_version_counter(params):
        try:
            yield
        finally:
            for param, counted in edits.items():
                param._zero_edits = counted


def _edits(param: torch.nn.Parameter) -> int:
    return param._version - getattr(param, "_zero_edits", param._version)


def _sum(bucket: Bucket | Frozen) -> float | None:
    if any(param.is_meta for param in bucket.params):
        return None
    return sum(map(_total, bucket.params))


def _total(tensor: torch.Tensor) -> float | complex:
    precise = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().sum(dtype=precise).item()


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
        # by .data, which autograd does not count; after step() it is the update
        if reducer.values not in ("", values) and not reducer.needs_zero_grad:
            reducer.stage.buckets[0].edited = f"{EDITED} (sum {values.split()[-1]})"
        reducer.values = values


@seams.at("parameter_moves")
def look_before_release(param: torch.nn.Parameter) -> None:
    """At stage 3 edits count from a unit's turn until its parameters are freed."""
    unit, bucket = home_of(param)
    if unit is None:
        return
    if unit.whole and _edits(param):
        stage = trained_by(param)
        if not any(getattr(part, "changed", "") for part in (bucket, *stage.reducer.frozen)):
            # what is not trained is told with the first bucket that is
            told = bucket if bucket.trained else stage.buckets[0]
            told.edited_sum = _total(param) + (told.edited_sum if told.edited else 0)
            told.edited = f"{EDITED} (sum {told.edited_sum!r})"
    all_alike([param])


def changes_of(reducer, bucket: Bucket) -> str:
    """In words, what forward or a user's edit has changed, also of the last step's gradients."""
    changed = bucket.changed or "".join(frozen.changed for frozen in reducer.frozen)
    edited = bucket.edited or "".join(frozen.edited for frozen in reducer.frozen)
    for each in (bucket, *reducer.frozen):
        each.edited = ""
    return changed + edited + getattr(bucket, "rewritten", "")


def values_of(reducer) -> str:
    """In words, a checksum of the parameters' bits: of all if they are few, else of samples and of
    where each parameter begins. Ranks that gather each other's shards have the same bits. (Not at
    stage 0: two machines may round differently.) It leaves out assignments, and GPUs, for which the
    CPU would wait."""
    stage, total = reducer.stage, 0
    first = stage.buckets[0]
    ours = stage.step.__module__.startswith("zero_minimal.") and not reducer.by_turns
    if not ours or first.parameter_shard is first.parameters or stage.world_size == 1:
        return ""
    for flat, bucket in {bucket.flat: bucket for bucket in stage.buckets}.items():
        next(iter(flat.offsets)).detach()  # with late_gather.py this waits until all are here
        if bucket.parameters.is_cpu and flat.size * flat.dtype.itemsize % 8 == 0:
            bits = bucket.parameters.as_strided((flat.size,), (1,), 0).view(torch.int64)
            begins = [offset * flat.dtype.itemsize // 8
                      for param, offset in flat.offsets.items() if param.numel()]
            samples = bits[:: 1 + len(bits) // 8192]  # takes 0.2% of a step of 11M parameters
            total += samples.sum().item() + bits[begins].sum().item()
    return f"{VALUES}{total % 2**64}"


@seams.at("gradients_reduced")
def count_rewrites(reducer) -> None:
    for bucket in reducer.stage.buckets:
        gradients = getattr(bucket, "gradients", None)
        if gradients is not None and gradients is bucket.gradient_shard:  # stage 0
            bucket.reduced_version = gradients._version


@seams.at("update_begins")
def look_for_rewrites(bucket: Bucket) -> None:
    before = getattr(bucket, "reduced_version", None)
    changed = before is not None and bucket.gradients._version != before
    compared = changed and bucket.gradients.is_cpu  # for a GPU the CPU would wait
    bucket.rewritten = f"{REWRITTEN} (sum {_total(bucket.gradients):.9g})" if compared else ""


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
