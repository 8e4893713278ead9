"""P_a: activation checkpoints cut over the model-parallel group, and P_a+cpu: kept in host memory
(section 6.1).

Checkpointing keeps the input of a block, and computes its inside again in backward. Model
parallelism cuts the weights, not this input: each of its ranks computes with all of it, so each
would keep the same copy.

Memory a rank, for blocks of input [b, s, h] and model parallelism over M ranks:
    without checkpoints    (4 + 12/M)·b·s·h a block of our GPT
    checkpoints            b·s·h   a block, a copy on each of the M ranks
    P_a                    b·s·h/M a block
    P_a+cpu                nothing on the device, b·s·h/M in host memory

Communication plan, for each block:
    forward    cut this rank's part out of the input: nothing is sent
               (P_a+cpu: the part goes to host memory)
    backward   all-gather the input, compute the block again            b·s·h(M−1)/M elements
Megatron sends 12 b·s·h a block with checkpoints (two all-reduces in forward, two again, two in
backward); P_a adds 1/12 of that.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_minimal.foundations import checkpoints, collectives, host
from zero_minimal.foundations.mesh import Group
from zero_minimal.foundations.random_state import (
    autocast_as,
    autocast_state,
    random_state,
    random_state_of,
)

Place = Callable[[Tensor], Tensor]


def checkpoint(
    function: Callable, *args, group: Group = None, to_host: bool = False,
    place: Place | None = None, **kwargs
):
    """function(*args, **kwargs), of which only the arguments are kept, to compute it again in
    backward.

    Args:
        function: dropout inside is fine: the random state is put back for the second time.
        args, kwargs: anything; tensors may be inside of tuples, lists and dicts, and so may those
            that it returns. What wants a gradient must come in here, parameters aside, not through
            a closure.
        group: P_a. The model-parallel group, on each of whose ranks the floating-point tensors
            among the arguments have the same values; they are cut over it. Integers, booleans and
            parameters stay whole. In a module's first pass a checksum of them is compared.
        to_host: keep the tensors in host memory, pinned where they come from a GPU. With a group
            that is P_a+cpu.
        place: where on the device to keep the floating-point tensors: a function that copies a
            tensor there and returns the copy (M_D).
    A group of one rank saves nothing, and gets a warning that says so. The function runs twice:
    what it counts (the statistics of batch-norm) it counts twice. Under stages 1 to 3 a weight may
    be used by one checkpoint only.
    Raises: RuntimeError if the function changes an argument in place, if ranks of the group have
        other values, and in backward for what is not a plain backward(), such as autograd.grad or
        create_graph=True; TypeError for tensors hidden in other objects.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    checkpoints.refuse_hidden(leaves)
    checkpoints.check_group(function, leaves, group)
    structure_of_output = [None]  # known once it has run

    def run(leaves):
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        flat, structure_of_output[0] = pytree.tree_flatten(function(*args, **kwargs))
        checkpoints.refuse_hidden(flat)
        return tuple(flat)

    # Autograd calls _Checkpoint.backward only if one of its arguments wants a gradient. The first
    # block's input wants none, though the parameters inside do; so an empty argument wants one.
    anchor = torch.empty(0, requires_grad=True)
    flat = _Checkpoint.apply(run, _Keeper(group, to_host, place), anchor, *leaves)
    return pytree.tree_unflatten(flat, structure_of_output[0])


def checkpoint_blocks(
    model: nn.Module, group: Group = None, to_host: bool = False, place: Place | None = None
) -> None:
    """Let every element of the model's module lists (its blocks) run under `checkpoint`, in place.

    Raises: ValueError if the model has no module list.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks
              if type(block).forward is not nn.Module.forward]
    if not blocks:
        raise ValueError("the model has no nn.ModuleList, so it is not known what its blocks are: "
                         "call checkpoint(block, x) in its forward")
    options = dict(group=group, to_host=to_host, place=place)
    for block in dict.fromkeys(blocks):  # one that is in two lists is wrapped once
        if getattr(block.forward, "func", None) is checkpoint:
            raise ValueError("the blocks of this model are checkpointed already")
        block.forward = functools.partial(checkpoint, block.forward, **options)


class _Checkpoint(torch.autograd.Function):
    """The whole function as one operator of autograd's. Forward runs it without a graph, and keeps
    its arguments; backward runs it again, with a graph, and goes back through that."""

    @staticmethod
    def forward(ctx, run, keeper, anchor, *leaves):
        ctx.run, ctx.keeper = run, keeper
        ctx.random, ctx.precision = random_state(), autocast_state()
        ctx.set_materialize_grads(False)
        ctx.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        ctx.before = {index: keeper.describe(leaf) for index, leaf in tensors.items()}
        # autograd frees what is saved here as soon as backward has used it
        ctx.save_for_backward(*(keeper.keep(leaf) for leaf in tensors.values()))
        versions = [leaf._version for leaf in tensors.values()]
        output = run(leaves)
        if versions != [leaf._version for leaf in tensors.values()]:
            raise RuntimeError("a checkpointed function must not change its arguments in place: it "
                               "runs again in backward, on what it would have changed")
        return output

    @staticmethod
    def backward(ctx, *gradients):
        checkpoints.check_pass()
        leaves = list(ctx.leaves)
        for (index, before), kept in zip(ctx.before.items(), ctx.saved_tensors, strict=True):
            leaves[index] = ctx.keeper.bring_back(kept, before)
        with random_state_of(ctx.random), autocast_as(ctx.precision), torch.enable_grad():
            outputs = ctx.run(leaves)
        pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
                 if gradient is not None and output.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        # a parameter among the arguments has its gradient already
        is_copy = [isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
                   for leaf in leaves]
        return None, None, None, *(leaf.grad if copy else None
                                   for leaf, copy in zip(leaves, is_copy, strict=True))


class _Description(NamedTuple):
    """What a tensor was like before only a part of it was kept, or a copy elsewhere."""

    shape: torch.Size
    device: torch.device
    requires_grad: bool
    is_cut: bool


class _Keeper:
    """Keeps a tensor from forward to backward: whole or this rank's part, here or on the host."""

    def __init__(self, group: Group, to_host: bool, place: Place | None):
        self.group, self.to_host, self.place = group, to_host, place

    def describe(self, tensor: Tensor) -> _Description:
        is_cut = (self.group is not None and tensor.is_floating_point()
                  and not isinstance(tensor, nn.Parameter))
        return _Description(tensor.shape, tensor.device, tensor.requires_grad, is_cut)

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor [...], or a copy of its part [numel / M, rounded up]: the whole shall go."""
        if isinstance(tensor, nn.Parameter):
            return tensor  # it lives anyway
        kept = self._part(tensor) if self.describe(tensor).is_cut else tensor.detach()
        if self.to_host:
            return host.to_host(kept)  # from a GPU, while the next block computes
        return self.place(kept) if self.place and kept.is_floating_point() else kept

    def bring_back(self, kept: Tensor, before: _Description) -> Tensor:
        """The tensor as it was, but for its past: autograd begins here."""
        if isinstance(kept, nn.Parameter):
            return kept
        tensor = kept.to(before.device, non_blocking=True)
        if before.is_cut:
            whole = tensor.new_empty(tensor.numel() * dist.get_world_size(self.group))
            collectives.all_gather(whole, tensor, group=self.group)
            tensor = whole[: before.shape.numel()].view(before.shape)
        return tensor.detach().requires_grad_(before.requires_grad)

    def _part(self, tensor: Tensor) -> Tensor:
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        size = -(-tensor.numel() // world_size)  # the last part may be shorter: it is filled up
        mine = tensor.detach().reshape(-1)[rank * size : (rank + 1) * size]
        part = tensor.new_zeros(size)
        part[: mine.numel()] = mine
        return part


if __name__ == "__main__":
    from zero_minimal.programs.activation_partitioning import main

    main()
