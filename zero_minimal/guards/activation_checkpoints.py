"""Checkpoints: activation_partitioning.checkpoint refuses what would go wrong without an error."""

import functools
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_minimal.core.mesh import Group
from zero_minimal.guards import same_on_all_ranks
from zero_minimal.guards.outputs import tensors_in

# function → the groups over which its arguments were compared
_compared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def plain_backward_only(backward: Callable) -> Callable:
    """A decorator for the backward of a checkpoint. That backward runs a pass of its own through
    the inside, which adds to .grad of every parameter there, and its gradients have no graph.
    Raises: RuntimeError if the pass around it asks for anything else."""

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        asked = "create_graph=True" if torch.is_grad_enabled() else ""
        if not torch.autograd._is_checkpoint_valid():
            asked = "autograd.grad(), backward(inputs=…)"
        if asked:
            raise RuntimeError(f"{asked} cannot go through activation_partitioning.checkpoint: its "
                               "backward adds to .grad of all parameters inside, and makes no "
                               "graph. Call backward() alone; or use "
                               "torch.utils.checkpoint.checkpoint(function, *args, "
                               "use_reentrant=False) there, which can do it")
        return backward(ctx, *gradients)

    return checked


def check_group(function: Callable, leaves: list, group: Group) -> None:
    """P_a cuts tensors of which every rank of the group holds a copy. So compare a checksum of the
    floating-point leaves over the group, once for each module, in its first pass.

    A group of one rank has no copies, and gets a warning.
    Raises: RuntimeError on every rank of the group if they differ.
    """
    if group is None:
        return
    if dist.get_world_size(group) == 1:
        warnings.warn(
            "P_a saves nothing here: it cuts what several ranks hold a copy of, and the "
            "model-parallel group has one rank. Data-parallel ranks have batches of their own, so "
            "they have no copies to cut.", stacklevel=4
        )
    elif _is_first(function, group):
        sums = same_on_all_ranks.numbers_of_all_ranks([checksum(leaves)], group)
        odd = [rank for rank, other in enumerate(sums) if other != sums[0]]
        if odd:
            raise RuntimeError(
                "P_a cuts an input of which each rank of its group has a copy, but rank "
                f"{odd[0]}'s differs from rank 0's: group= must be the model-parallel group "
                "(mesh.model_group). Data-parallel ranks have batches of their own: without "
                "group= each keeps its own checkpoints. If it is the model-parallel group, give "
                "its ranks the same batch and the same seed"
            )


def checksum(leaves: list) -> int:
    """A checksum of all floating-point tensors but parameters: of shapes, dtypes and every bit."""
    total = 0
    for tensor in leaves:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            if not isinstance(tensor, nn.Parameter):
                total = zlib.crc32(repr((tensor.dtype, tuple(tensor.shape))).encode(), total)
                total = same_on_all_ranks.checksum(tensor, total)
    return total


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Context around the checkpointed function. Raises: RuntimeError if the function changed its
    arguments, these tensors, in place."""
    versions = [tensor._version for tensor in tensors]
    yield
    if versions != [tensor._version for tensor in tensors]:
        raise RuntimeError("a checkpointed function must not change its arguments in place: it "
                           "runs again in backward, on what it would have changed")


def refuse_hidden(leaves: list) -> None:
    """Autograd would not see a tensor inside any other object: its gradient would be lost.

    Raises: TypeError if there is one.
    """
    for leaf in leaves:
        if isinstance(leaf, (Tensor, nn.Module)):
            continue
        if any(tensor.is_floating_point() for tensor in tensors_in(leaf)):
            raise TypeError("a checkpointed function takes and returns tensors in tuples, lists "
                            f"and dicts, not in a {type(leaf).__name__}: take them out of it")


def _is_first(function: Callable, group: Group) -> bool:
    """Whether this is the function's first call with this group. A method is recognised by its
    object, and a function by its code, since a lambda is a new object in each pass."""
    owner = getattr(function, "__self__", getattr(function, "__code__", function))
    try:
        groups = _compared.setdefault(owner, weakref.WeakSet())
    except TypeError:  # not hashable, or takes no weak reference: compare in each pass
        return True
    is_first = group not in groups
    groups.add(group)
    return is_first
