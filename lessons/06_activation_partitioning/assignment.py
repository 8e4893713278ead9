"""P_a: activation checkpoints are cut over the model-parallel group. P_a+cpu: they are kept in host
memory (section 6.1).

Checkpointing keeps the input of a block, and recomputes the block in backward. Model parallelism
cuts the weights, not this input: each of its ranks computes with all of it, so each would keep the
same copy.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_minimal.core import collectives
from zero_minimal.core.mesh import Group
from zero_minimal.core.random_state import autocast_state, random_state, set_random_state
from zero_minimal.guards import activation_checkpoints as checkpoints
from zero_minimal.offloading import host
from zero_minimal.offloading.host import announce, beside_computation

Place = Callable[[Tensor], Tensor]


@contextmanager
def random_state_of(states: list[torch.Tensor]) -> Iterator[None]:
    """Context in which random numbers come as they did from these states on. Afterwards the old
    state is restored."""
    # step 3: inside, random numbers come as from `states` on; afterwards as if nothing had been
    # drawn inside, also if an error ended it. _Checkpoint.backward runs the function inside of it:
    # add it there.
    # - random_state(), set_random_state(states): the state of the generators; from here on as from
    #   these states on
    raise NotImplementedError("step 3: random_state_of")


@contextmanager
def autocast_as(states: list[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """Context with such a setting."""
    # step 3: inside, torch.autocast is set as `states` say, for each device type, on or off.
    # _Checkpoint.backward runs the function inside of it: add it there.
    # - torch.autocast(kind, enabled=…, dtype=…): torch's context
    # - ExitStack(): a context in which others are entered one by one: stack.enter_context(…)
    raise NotImplementedError("step 3: autocast_as")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory [same shape and dtype], pinned if it comes from a GPU.

    From a GPU the copy is under way when this returns: it runs beside the computation, after the
    work that is already queued on the current stream. Read it with back(), which waits for it.
    """
    # step 5: returns a copy of the tensor in host memory, of the same dtype, announced once. From a
    # GPU: the copy is pinned, and under way, inside of beside_computation(tensor).
    # - announce(copy): tells whoever counts memory that this tensor stands for one in host memory
    # - torch.empty(shape, dtype=…, device="cpu", pin_memory=…), copy_(…, non_blocking=True):
    #   torch's
    raise NotImplementedError("step 5: to_host")


def checkpoint(
    function: Callable, *args, group: Group = None, to_host: bool = False,
    place: Place | None = None, **kwargs
):
    """Call function(*args, **kwargs), and keep only its arguments: backward calls it again.

    Args:
        function: dropout inside is fine: the random state is put back for the second call.
        args, kwargs: anything; tensors may be inside of tuples, lists and dicts, and so may those
            that it returns. A tensor that needs a gradient must be an argument, unless it is a
            parameter: a closure would lose the gradient.
        group: for P_a, the model-parallel group. Floating-point tensors among the arguments must
            have the same values on all its ranks, and are cut over it. Integers, booleans and
            parameters stay whole. A module's first pass compares a checksum of what is cut.
        to_host: keep the tensors in host memory, pinned if they come from a GPU. With a group, this
            is P_a+cpu.
        place: where on the device to keep the floating-point tensors: a function that copies a
            tensor there and returns the copy (M_D).
    A group of one rank saves nothing, and gets a warning that says so. The function runs twice, so
    it counts twice what it counts (batch-norm's statistics). Under stages 1 to 3 a weight may be
    used by one checkpoint only.
    Raises: RuntimeError if the function changes an argument in place, if ranks of the group have
        other values, and in backward for anything but a plain backward(), such as autograd.grad or
        create_graph=True; TypeError for tensors hidden in other objects.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    checkpoints.refuse_hidden(leaves)
    tensors = [leaf for leaf in leaves if _is_input(leaf)]
    checkpoints.check_group(function, tensors, group)
    call = _Call(function, leaves, structure)
    # Autograd calls _Checkpoint.backward only if one of its arguments needs a gradient. The first
    # block's input needs none, though the parameters inside do. So an empty argument needs one.
    anchor = torch.empty(0, requires_grad=True)
    keeper = _Keeper(group, to_host, place)
    return call.result(_Checkpoint.apply(call.run, keeper, anchor, *tensors))


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


def _is_input(leaf) -> bool:
    """Whether an argument is kept, and may get a gradient here. Parameters exist anyway."""
    return isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)


class _Call:
    """A function and its arguments, for autograd, which does not look into lists and dicts: `run`
    takes tensors, and returns a tuple. It must not hold these tensors itself: it lives as long as
    the graph."""

    def __init__(self, function: Callable, leaves: list, structure):
        self.function, self._structure = function, structure
        self._places = [place for place, leaf in enumerate(leaves) if _is_input(leaf)]
        self._others = [None if _is_input(leaf) else leaf for leaf in leaves]
        self._structure_of_result = None  # known once it has run

    def run(self, tensors: Sequence[Tensor]) -> tuple:
        """Call the function with these as its tensors; return the leaves of its result, in order.

        Raises: RuntimeError if it changes one of them, TypeError for tensors hidden in its result.
        """
        leaves = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        with checkpoints.unchanged(tensors):
            result = self.function(*args, **kwargs)
        flat, self._structure_of_result = pytree.tree_flatten(result)
        checkpoints.refuse_hidden(flat)
        return tuple(flat)

    def result(self, flat: tuple):
        """The function's result, rebuilt from what `run` returned."""
        return pytree.tree_unflatten(flat, self._structure_of_result)


class _Checkpoint(torch.autograd.Function):
    """The whole call as one autograd operator: forward runs it without a graph, and backward runs
    it again, with one."""

    @staticmethod
    def forward(ctx, run, keeper, anchor, *tensors):
        """What run(tensors) returns. `keeper` says what is kept of a tensor; `anchor` is empty."""
        # step 1: returns run(tensors), and keeps no graph of it. Of each tensor what keeper.keep
        # gives is kept until backward has used it, and what keeper.describe gives; so is the state
        # of random numbers and of autocast, as it was before the run. (Step 3 grades this state,
        # steps 2 and 4 also how a tensor is kept.) But for `run` and `keeper` nothing else is. An
        # output that gets no gradient will get None in backward, and no zeros.
        # - run(tensors): calls the function; a tuple of what is in its result
        # - keeper.keep(tensor): what stays of it until backward, without its past
        # - keeper.describe(tensor): what it was like: shape, device, requires_grad, is_cut
        # - random_state(), autocast_state(): lists; small
        # - ctx.save_for_backward(*tensors), ctx.set_materialize_grads(value): torch's. Other
        #   attributes of ctx live as long as the graph.
        raise NotImplementedError("step 1: forward")

    @staticmethod
    @checkpoints.plain_backward_only
    def backward(ctx, *gradients):
        """From a gradient (or None) for each output to one (or None) for each argument."""
        # step 2: the function has run once more, with a graph that begins at the tensors that were
        # kept, and backward has gone through that: parameters inside have their gradients. Returns
        # a gradient or None for each argument of forward: of a tensor that required one its
        # gradient, of `run`, `keeper` and `anchor` None. In the second run dropout drew the same
        # numbers, and autocast was as it was. (Step 3 grades these two; until then leave them out.)
        # - ctx.saved_tensors: what forward saved
        # - keeper.bring_back(kept, description): the whole tensor again, which may be the saved one
        #   itself; it requires no gradient
        # - torch.enable_grad(): a context in which a graph is recorded. An output may be an
        #   integer, or require no gradient; perhaps none does.
        # - torch.autograd.backward(tensors, gradients): goes back from several tensors at once, and
        #   adds to .grad
        raise NotImplementedError("step 2: backward")


class _Description(NamedTuple):
    """What a tensor was like before only a part of it, or a copy elsewhere, was kept."""

    shape: torch.Size
    device: torch.device
    requires_grad: bool
    is_cut: bool


class _Keeper:
    """Keeps a tensor from forward to backward: whole or this rank's part, here or on the host."""

    def __init__(self, group: Group, to_host: bool, place: Place | None):
        self.group, self.to_host, self.place = group, to_host, place

    def describe(self, tensor: Tensor) -> _Description:
        is_cut = self.group is not None and tensor.is_floating_point()
        return _Description(tensor.shape, tensor.device, tensor.requires_grad, is_cut)

    def keep(self, tensor: Tensor) -> Tensor:
        """What is kept of it until backward, without its graph."""
        kept = self.cut(tensor.detach()) if self.describe(tensor).is_cut else tensor.detach()
        if self.to_host:
            return to_host(kept)
        return self.place(kept) if self.place and kept.is_floating_point() else kept

    def bring_back(self, kept: Tensor, before: _Description) -> Tensor:
        """The whole tensor again, where it was."""
        here = host.back(kept, before.device)
        return self.gather(here, before.shape) if before.is_cut else here

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's part [numel / M, rounded up] of a tensor [...], in memory of its own."""
        # step 4: returns this rank's part [numel / M, rounded up] of the tensor's elements, in
        # order of rank; who has fewer is filled up. The whole tensor's memory can go.
        # - dist.get_rank(group), dist.get_world_size(group): this rank's number in the group; M
        # - self.group: the ranks that have copies
        raise NotImplementedError("step 4: cut")

    def gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        """The tensor [shape] of which each rank has cut a part [numel / M, rounded up]."""
        # step 4: returns the whole tensor [shape] of which each rank of self.group has such a part.
        # - collectives.all_gather(output [M·n], input [n], group=…): the inputs of all ranks, in
        #   rank order
        raise NotImplementedError("step 4: gather")


if __name__ == "__main__":
    from zero_minimal.programs.lesson06_program import main

    main(checkpoint_blocks)
