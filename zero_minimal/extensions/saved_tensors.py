"""Saved tensors: what autograd keeps of a unit's parameters from forward to backward. They find
their values there, whatever way backward comes.

Seam: torch.autograd.graph.saved_tensors_hooks, around each call of the model at stage 3.

Backward comes to a unit through what the unit returned, and execution_order.py gathers it first.
But a tensor may leave a unit on ways that nobody can follow: an auxiliary loss in a dict, in a
closure, in a global variable. Then backward would read parameters that are freed, or still on their
way. So each saved tensor that lies in the memory of a unit asks for the unit when it is read. (Not
what a unit saves in its own forward under hooks of the user's, with no module's call between.)
"""

import functools
import weakref
from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks

from zero_minimal.guards.trained_by import LEFT_BEHIND

CHECKPOINT = "torch.utils.checkpoint"


class SavedTensors:
    """Calls needed(unit) before a saved tensor is read that lies in the memory of this unit, which
    must hold the values then.

    units: with their buckets, whose memory stays the same during a forward, whatever its size is.
    """

    def __init__(self, units: list, needed: Callable):
        self._units = [weakref.ref(unit) for unit in units]  # a graph keeps no stage alive
        self._unit_at: dict[int, weakref.ref] = {}  # by the place of the storage
        self._needed = needed
        self._begun: list[tuple] = []  # (depth of the call, the hooks that it runs under)

    def begin(self, depth: int) -> None:
        """From here on autograd saves through this object, in a call inside so many others. Hooks
        of the user's (save_on_cpu) get what is no parameter. A checkpoint's get all: they count
        what is saved, and compute it again."""
        theirs = _top_hooks()
        if theirs and getattr(theirs[0], "func", None) == self._pack:
            return  # it does already
        if not self._begun:
            self._unit_at = {bucket.parameters.untyped_storage()._cdata: unit
                             for unit in self._units for bucket in unit().buckets
                             if bucket.parameters is not None}
        context = saved_tensors_hooks(functools.partial(self._pack, theirs), self._unpack)
        context.__enter__()
        self._begun.append((depth, context))

    def end(self, depth: int = 0) -> None:
        """What begin() has begun, if anything, in calls inside so many others or more."""
        while self._begun and self._begun[-1][0] >= depth:
            self._begun.pop()[1].__exit__()

    def _pack(self, theirs: tuple | None, tensor: torch.Tensor) -> tuple:
        """(the tensor, its unit or None, how often it was changed in place, None). Or what other
        hooks made of it, its unit or None, None, and theirs to unpack it."""
        unit = None
        if tensor.layout == torch.strided:
            unit = self._unit_at.get(tensor.untyped_storage()._cdata)
        if unit and unit() is None:  # its stage is gone, and the memory is somebody else's
            unit = None
        if theirs and (unit is None or theirs[0].__module__ == CHECKPOINT):
            return theirs[0](tensor), unit, None, theirs[1]
        # detached, since it may be what the node returns: a node that holds itself is never freed
        return tensor.detach(), unit, tensor._version, None

    def _unpack(self, packed: tuple) -> torch.Tensor:
        tensor, unit, version, unpack = packed
        if unpack:  # a checkpoint goes through its units, and frees all but the last
            tensor = unpack(tensor)
        elif tensor._version != version:  # autograd compares only where there are no hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is at "
                f"version {tensor._version}; expected version {version} instead"
            )
        if unit is not None:
            if unit() is None:
                raise RuntimeError(f"backward() comes too late: {LEFT_BEHIND}")
            self._needed(unit())
        return tensor


def _top_hooks():
    """The hooks that autograd saves through here, or None. (Older versions of torch cannot say.)"""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top and top(True)
