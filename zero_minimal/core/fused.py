"""Fused: checks of tensors that share one buffer."""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor


def flat_views(
    tensors: Iterable[Tensor], dtype: torch.dtype, device: torch.device | None = None
) -> list[Tensor]:
    """A flat view of each tensor, once it is sure that a buffer of this dtype can carry them all.

    device: the buffer's; None: any.
    Raises: TypeError for what is not a tensor; ValueError for one that is not contiguous, lies on
        another device or in memory of another one, is not floating-point, or has values that the
        dtype would round.
    """
    tensors = list(tensors)
    for tensor in tensors:
        _check(tensor, dtype, device)
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
                   for tensor in tensors if tensor.numel())
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        raise ValueError("two of the tensors share memory, whose result would be written twice: "
                         "give each tensor once")
    return [tensor.view(-1) for tensor in tensors]


def _check(tensor: Tensor, dtype: torch.dtype, device: torch.device | None) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"among the tensors is a {type(tensor).__name__}. Where a parameter has no "
                        "gradient give zeros: all ranks must send the same shapes")
    if not tensor.is_contiguous():
        raise ValueError("a tensor that is not contiguous has no flat view to write the result to: "
                         "pass .contiguous()")
    if device is not None and tensor.device != device:
        raise ValueError(f"a tensor on {tensor.device} cannot go through buffers on {device}: make "
                         f"buffers with device={str(tensor.device)!r}")
    for kind in (tensor.dtype, dtype):
        if not kind.is_floating_point:
            raise ValueError(f"buffers carry floating-point numbers, and {kind} is none: use "
                             "torch.distributed.all_reduce for such a tensor")
    if not holds(dtype, tensor.dtype):
        raise ValueError(f"{tensor.dtype} does not fit into buffers of {dtype}, which would round "
                         "it: use buffers of a dtype that holds all values of both")


def holds(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a floating-point dtype has every value of another one."""
    ours, others = torch.finfo(wide), torch.finfo(dtype)
    return (ours.eps <= others.eps and ours.max >= others.max
            and ours.smallest_normal * ours.eps <= others.smallest_normal * others.eps)
