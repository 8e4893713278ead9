"""Saved parameters: what autograd keeps of a unit's parameters from forward to backward. They find
their values there, whatever way backward comes.

Seam: torch.autograd.graph.saved_tensors_hooks, around each call of the model at stage 3.

Backward comes to a unit through what the unit returned, and turns.py gathers it first. But a tensor
may leave a unit on ways that nobody can follow: an auxiliary loss in a dict, in a closure, in a
global variable. Then backward would read parameters that are freed, or still on their way. So each
saved tensor that lies in the memory of a unit asks for the unit when it is read.
"""

import weakref
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

from zero_minimal.foundations.ties import LEFT_BEHIND


class SavedParameters:
    """Calls whole(unit) before a saved tensor is read that lies in the memory of this unit, which
    must hold the values then.

    units: with their buckets, whose memory stays the same during a forward, whatever its size is.
    """

    def __init__(self, units: list, whole: Callable):
        self._units = [weakref.ref(unit) for unit in units]  # a graph keeps no stage alive
        self._unit_at: dict[int, weakref.ref] = {}  # by the place of the storage
        self._whole, self._context = whole, None

    def begin(self) -> None:
        """From here on autograd saves through this object, unless it saves through hooks already:
        a checkpoint's compute again what is read, save_on_cpu keeps copies."""
        if self._context is None and _top_hooks() is None:
            self._unit_at = {bucket.parameters.untyped_storage()._cdata: unit
                             for unit in self._units for bucket in unit().buckets
                             if bucket.parameters is not None}
            self._context = saved_tensors_hooks(self._pack, self._unpack)
            self._context.__enter__()

    def end(self) -> None:
        """What begin() has begun, if anything."""
        context, self._context = self._context, None
        if context:
            context.__exit__()

    def _pack(self, tensor: torch.Tensor) -> tuple:
        """(the tensor, its unit or None, how often it was changed in place)"""
        unit = None
        if tensor.layout == torch.strided:
            unit = self._unit_at.get(tensor.untyped_storage()._cdata)
        if unit and unit() is None:  # its stage is gone, and the memory is somebody else's
            unit = None
        # detached, since it may be what the node returns: a node that holds itself is never freed
        return tensor.detach(), unit, tensor._version

    def _unpack(self, packed: tuple) -> torch.Tensor:
        tensor, unit, version = packed
        if tensor._version != version:  # autograd compares only where there are no hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is at "
                f"version {tensor._version}; expected version {version} instead"
            )
        if unit is not None:
            if unit() is None:
                raise RuntimeError(f"backward() comes too late: {LEFT_BEHIND}")
            self._whole(unit())
        return tensor


def _top_hooks():
    """The hooks that autograd saves through here, or None. (Older versions of torch cannot say.)"""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top and top(True)
