"""Fakes: code that runs on tensors with shape, dtype, device and a storage of the right size, and without values.

    with without_values():
        model = GPT(config)        # a trillion parameters, if you like
        model(tokens, tokens).backward()

torch's FakeTensorMode does it. What reads a value, or sends one, asks foundations/values.py first.
"""

import contextlib
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_minimal.foundations import values


@contextlib.contextmanager
def new_tensors_in(dtype: torch.dtype) -> Iterator[None]:
    """A model that is built inside has this dtype: fake parameters cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """FakeTensorMode, and everybody knows."""
    # torch's swap_tensors refuses tensors that have weak references, and fake tensors have some of torch's own
    with values.absent(), mock.patch.object(weakref, "getweakrefs", lambda tensor: []), FakeTensorMode():
        yield
