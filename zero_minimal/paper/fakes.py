"""Fakes: code that runs on tensors with shape, dtype, device and a storage of the right size, and without values.

    with without_values():
        model = GPT(config)        # a trillion parameters, if you like
        model(tokens, tokens).backward()

torch's FakeTensorMode does most of it. A few places of this project read a value, and nobody there shall have to ask
whether there are any. So they are answered from outside, while this is open:

    do all ranks hold the same model?     what this rank says, all say
    is the optimizer element-wise?        not asked: ask before, with values
    was every parameter given a value?    yes
    are the tokens in the vocabulary?     they are
"""

import contextlib
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_minimal.foundations import collectives, layout, meta, optimizers, units
from zero_minimal.tensor_parallel import ParallelGPT


@contextlib.contextmanager
def new_tensors_in(dtype: torch.dtype):
    """A model that is built inside has this dtype: fake parameters cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_values():
    """FakeTensorMode, and an answer for whoever asks for a value."""
    with contextlib.ExitStack() as stack:
        for place, name, answer in (
            (layout, "numbers_of_all_ranks", lambda numbers, group=None: [numbers] * dist.get_world_size(group)),
            (optimizers, "check_element_wise", lambda optimizer_class, options: None),
            (meta, "has_no_value", lambda tensor: False),
            (ParallelGPT, "check", lambda model, tokens, targets: None),
            (weakref, "getweakrefs", lambda tensor: []),  # fake tensors have some, which torch's swap_tensors refuses
        ):
            stack.enter_context(mock.patch.object(place, name, answer))
        if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"):  # torch 2.6
            for place, name in ((collectives, "_native_all_gather"), (collectives, "_native_reduce_scatter"),
                                (dist, "all_reduce"), (dist, "broadcast")):
                stack.enter_context(mock.patch.object(place, name, lambda *args, **options: collectives.Pending([])))
        stack.enter_context(mock.patch.dict(units._placeholders, clear=True))  # each mode needs its own
        stack.enter_context(FakeTensorMode())
        yield
