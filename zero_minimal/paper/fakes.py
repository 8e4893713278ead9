"""Fakes: run code on tensors that have a shape, a dtype, a device and a storage size, but no values.

    with without_values():
        model = GPT(config)        # a trillion parameters, if you like
        model(tokens, tokens).backward()

torch's FakeTensorMode does it. The algorithm runs unchanged on one rank: nothing is sent, and no guard reads values.
"""

import contextlib
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_minimal import guards
from zero_minimal.core import seams, work
from zero_minimal.core.reducer import Reducer
from zero_minimal.extensions import meta_device
from zero_minimal.guards import activation_checkpoints as checkpoints
from zero_minimal.guards import same_on_all_ranks
from zero_minimal.offloading import offloaded_state


@contextlib.contextmanager
def new_tensors_in(dtype: torch.dtype) -> Iterator[None]:
    """A model built inside this context has this dtype: fake parameters cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """FakeTensorMode, and the algorithm without its guards."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(guards.off())
        undo.enter_context(seams.heard_by("collective", _nothing_travels))
        for owner, name, instead in NOT_READ:
            undo.enter_context(mock.patch.object(owner, name, instead))
        undo.enter_context(FakeTensorMode())
        yield


def _nothing_travels(moment: str, call: work.Call) -> None:
    call.travels = False


def _own_order(reducer: Reducer) -> None:
    """Fix the bucket order for all later passes: this rank stands for rank 0, whose order counts."""
    incomplete = [bucket for bucket in reducer.buckets if bucket not in reducer._completed]
    reducer.buckets, reducer._ordered = [*reducer._completed, *incomplete], True


NOT_READ = (  # functions that read values
    (same_on_all_ranks, "numbers_of_all_ranks",
     lambda numbers, group=None, of="": [numbers] * dist.get_world_size(group)),
    (Reducer, "_agree_on_order", _own_order),
    (offloaded_state, "fingerprint", lambda shard: None),
    (meta_device, "has_no_value", lambda tensor: False),
    (checkpoints, "checksum", lambda leaves: 0),
    # torch's swap_tensors refuses tensors that have weak references, and fake tensors have some of torch's own
    (weakref, "getweakrefs", lambda tensor: []),
)
