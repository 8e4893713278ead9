"""Host memory: where a rank keeps what its GPU has no room for.

On a CPU, device memory and host memory are the same, and a tensor does not show which of the two it
stands for. So code that counts memory registers a listener:

    with host.announced(listener):      # listener(tensor), for each tensor that goes to the host
        ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_listeners: list[Callable[[torch.Tensor], None]] = []


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory [same shape and dtype], pinned if it comes from a GPU.

    From a GPU the copy is under way when this returns: it runs beside the computation, after the
    work that is already queued on the current stream. Read it with back(), which waits for it.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu",
                       pin_memory=tensor.is_cuda and torch.cuda.is_available())
    with beside_computation(tensor):
        copy.copy_(tensor, non_blocking=True)
    announce(copy)
    return copy


def back(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bring a copy in host memory back to a device. On a GPU the current stream waits for both
    copies; the CPU waits for neither."""
    if device in _streams:
        torch.cuda.current_stream(device).wait_stream(_streams[device])
    return copy.to(device, non_blocking=True)


_streams: dict[torch.device, torch.cuda.Stream] = {}  # for copies to the host, one for each GPU


@contextmanager
def beside_computation(tensor: torch.Tensor) -> Iterator[None]:
    """Context in which a copy of this tensor runs beside what the current stream is given next. On
    a CPU it does nothing."""
    if not (tensor.is_cuda and torch.cuda.is_available()):
        yield
        return
    if tensor.device not in _streams:
        _streams[tensor.device] = torch.cuda.Stream(tensor.device)
    stream = _streams[tensor.device]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))  # where the tensor is made
    with torch.cuda.stream(stream):
        yield
    tensor.record_stream(stream)  # its memory is not reused before the copy is done


def announce(copy: torch.Tensor) -> None:
    """Tell the listeners that this tensor stands for one in host memory."""
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
