"""Host memory: where a rank keeps what its GPU has no room for.

On a CPU device memory and host memory are one, and nobody could tell by looking at a tensor which
of the two it stands for. So whoever counts memory asks to be told:

    with host.announced(listener):      # listener(tensor), for each tensor that goes to the host
        ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_listeners: list[Callable[[torch.Tensor], None]] = []


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory [same shape and dtype], pinned if it comes from a GPU.

    From a GPU the copy is under way when this returns, behind all that the current stream has to do
    before. What that stream does later finds it complete; the CPU must wait for the stream to read
    it.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu",
                       pin_memory=tensor.is_cuda and torch.cuda.is_available())
    copy.copy_(tensor, non_blocking=True)
    announce(copy)
    return copy


def announce(copy: torch.Tensor) -> None:
    """Tell who counts that this tensor stands for one in host memory."""
    for listener in _listeners:
        listener(copy)


@contextmanager
def announced(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Context in which listener(copy) is called for each copy that is announced."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
