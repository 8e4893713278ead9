"""Saved tensors: what autograd keeps of a unit's parameters from forward to backward. They hold
their values when backward reads them, whatever way it comes.

Seam: torch.autograd.graph.saved_tensors_hooks, around each call of the model at stage 3.

Backward comes to a unit through the unit's output, and execution_order.py gathers the unit first.
But a tensor may leave a unit in ways that cannot be followed: an auxiliary loss in a dict, a
closure or a global variable. Then backward would read parameters that are freed, or still on their
way. So a saved tensor in a unit's memory asks for the unit when it is read. (Except what a unit
saves in its own forward under the user's hooks, with no module call in between.)
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from zero_minimal.guards.trained_by import LEFT_BEHIND

CHECKPOINT = "torch.utils.checkpoint"
FUNC_REFUSES = "support saved tensor hooks"  # in torch.func's own error
FUNC_IN_GATHER = (
    "torch.func (grad, vjp, jacrev, hessian) does not go inside gather_parameters() at stage 3, "
    "where what autograd saves is kept whole: copy there, `with zero.gather_parameters(): whole = "
    "copy.deepcopy(model)`, on all ranks, and call it outside, on the copy"
)


@contextmanager
def values_stay(gathered: AbstractContextManager) -> Iterator[None]:
    """gather_parameters(), in which a penalty on the weights may be computed: autograd saves the
    whole values, where it would save a parameter itself, which is freed before backward."""
    saved = SavedTensors([], needed=None)
    with gathered:
        saved.begin(0)
        try:
            yield
        except RuntimeError as error:
            if FUNC_REFUSES in str(error):
                error.args = (FUNC_IN_GATHER,)
            raise
        finally:
            saved.end()


class SavedTensors:
    """Calls needed(unit) before a saved tensor in that unit's memory is read. After the call the
    memory must hold the values.

    units: with their buckets, whose memory stays the same during a forward, whatever its size is.
    """

    def __init__(self, units: list, needed: Callable):
        self._units = [weakref.ref(unit) for unit in units]  # weakly: a graph keeps no stage alive
        self._unit_at: dict[int, weakref.ref] = {}  # by the storage's address
        self._needed = needed
        self._begun: list[tuple] = []  # (depth of the call, the hooks that it runs under)

    def begin(self, depth: int) -> None:
        """From here on autograd saves through this object, in a call at this depth. The user's
        hooks (save_on_cpu) get all but parameters. A checkpoint's hooks get all: they count what is
        saved, and compute it again."""
        theirs = _top_hooks()
        if theirs and getattr(theirs[0], "func", None) == self._pack:
            return  # autograd does so already
        if not self._begun:
            self._unit_at = {bucket.parameters.untyped_storage()._cdata: unit
                             for unit in self._units for bucket in unit().buckets
                             if bucket.parameters is not None}
        context = saved_tensors_hooks(functools.partial(self._pack, theirs), self._unpack)
        context.__enter__()
        self._begun.append((depth, context))

    def end(self, depth: int = 0) -> None:
        """End what begin() has begun, if anything, in calls at this depth or deeper."""
        while self._begun and self._begun[-1][0] >= depth:
            self._begun.pop()[1].__exit__()

    def _pack(self, theirs: tuple | None, tensor: torch.Tensor) -> tuple:
        """(the tensor, its unit or None, its version, None). If other hooks take it: (their result,
        its unit or None, None, their hook to unpack it)."""
        unit = None
        if tensor.layout == torch.strided:
            unit = self._unit_at.get(tensor.untyped_storage()._cdata)
        if unit and unit() is None:  # its stage is gone, and the memory has another owner
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
