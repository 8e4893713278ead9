"""Changed in forward: a forward pass may change parameters in place, if all ranks do so alike.

A layer that sets its parameters by the first batch (ActNorm), or F.embedding(max_norm=1), changes
them by what a rank sees. Shards would then be put together from different values, and at stage 0
each rank would train a model of its own. So what a forward has changed is summed up, and travels in
the note of the bucket (notes.py): ranks that differ are told before step().
"""

from collections.abc import Iterable

import torch

from zero_minimal.foundations import notes, values
from zero_minimal.foundations.layout import Bucket
from zero_minimal.foundations.ties import Tie


class Frozen:
    """Parameters of a module that are not trained: they stand in no bucket that backward sends."""

    def __init__(self, params: list):
        self.params, self.changed = params, ""


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
        module.register_forward_pre_hook(Tie(ChangedInForward._begin, self))
        module.register_forward_hook(Tie(ChangedInForward._end, self))

    def _begin(self, *_) -> None:
        self.before = [self._seen(bucket) for bucket in self.buckets]

    def _end(self, *_) -> None:
        for bucket, before in zip(self.buckets, self.before, strict=False):
            if self._seen(bucket) != before:
                bucket.changed = f"{notes.CHANGED} (sum {_sum(bucket)!r})"
        self.before, self.is_first = [], self.is_first and torch.jit.is_tracing()

    def _seen(self, bucket: Bucket | Frozen) -> tuple:
        looks = self.is_first and not torch.jit.is_tracing()  # a sum would be traced, too
        return sum(map(_edits, bucket.params)), _sum(bucket) if looks else None


def edited_by_hand(bucket: Bucket) -> str:
    """In words, what became of its parameters, if somebody has edited them in place since the last
    note, and not under gather_parameters(), which compares them itself."""
    if not any(map(_edits, bucket.params)):
        return ""
    all_alike(bucket.params)
    return "" if bucket.changed else f"{notes.EDITED} (sum {_sum(bucket)!r})"


def all_alike(params: Iterable[torch.nn.Parameter]) -> None:
    """From here on edits are counted."""
    for param in params:
        param._zero_edits = param._version


def _edits(param: torch.nn.Parameter) -> int:
    return param._version - getattr(param, "_zero_edits", param._version)


def _sum(bucket: Bucket | Frozen) -> float | None:
    if not values.present() or any(param.is_meta for param in bucket.params):
        return None
    precise = {True: torch.complex128, False: torch.float64}
    return sum(param.detach().sum(dtype=precise[param.is_complex()]).item()
               for param in bucket.params)
