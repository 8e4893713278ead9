"""P_a: activation checkpoints cut over the model-parallel group, and P_a+cpu: kept in host memory (section 6.1).

Checkpointing keeps the input of a block, and computes its inside again in backward. Model parallelism cuts the weights,
not this input: each of its ranks computes with all of it, so each would keep the same copy.

Memory a rank, for blocks of input [b, s, h] and model parallelism over M ranks:
    without checkpoints    about 12 b·s·h a block, some of it divided by M
    checkpoints            b·s·h   a block, a copy on each of the M ranks
    P_a                    b·s·h/M a block
    P_a+cpu                nothing on the device, b·s·h/M in host memory

Communication plan, for each block:
    forward    cut this rank's part out of the input: nothing is sent (P_a+cpu: the part goes to host memory)
    backward   all-gather the input, compute the block again                          b·s·h(M−1)/M elements
Megatron sends 12 b·s·h a block with checkpoints (two all-reduces in forward, two again, two in backward); P_a adds
1/12 of that.
"""

import functools
import warnings
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from zero_minimal.foundations import collectives
from zero_minimal.foundations.backward import tensors_in


def checkpoint(function, *args, group=None, to_host=False, place=None, **kwargs):
    """function(*args, **kwargs), of which only the arguments are kept, to compute it again in backward.

    Args:
        function: dropout inside is fine: the random state is put back for the second time.
        args, kwargs: anything; tensors may be inside of tuples, lists and dicts, and so may those that it returns.
            What wants a gradient must come in here, parameters aside, not through a closure.
        group: P_a. The model-parallel group, on each of whose ranks the floating-point tensors among the arguments have
            the same values; they are cut over it. Integers, booleans and parameters stay whole.
        to_host: keep the tensors in host memory, pinned where they come from a GPU. With a group that is P_a+cpu.
        place: where on the device to keep them: a function that copies a tensor there and returns the copy (M_D).
    A group of one rank saves nothing, and gets a warning that says so. The function runs twice: what it counts (the
    statistics of batch-norm) it counts twice. Under stages 1 to 3 a weight may be used by one checkpoint only.
    Raises: RuntimeError if the function changes an argument in place; TypeError for tensors hidden in other objects.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if group is not None and dist.get_world_size(group) == 1:
        warnings.warn(
            "P_a saves nothing here: it cuts what several ranks hold a copy of, and the model-parallel group has one "
            "rank. Data-parallel ranks have batches of their own, so they have no copies to cut.", stacklevel=2
        )
    leaves, structure = pytree.tree_flatten((args, kwargs))
    _refuse_hidden(leaves)
    structure_of_output = [None]  # known once it has run

    def run(leaves):
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        flat, structure_of_output[0] = pytree.tree_flatten(function(*args, **kwargs))
        _refuse_hidden(flat)
        return tuple(flat)

    # autograd calls backward only if an input wants a gradient. The block's parameters do, and are no inputs.
    anchor = torch.empty(0, requires_grad=True)
    flat = _Checkpoint.apply(run, _Keeper(group, to_host, place), anchor, *leaves)
    return pytree.tree_unflatten(flat, structure_of_output[0])


def checkpoint_blocks(model: nn.Module, group=None, to_host=False, place=None) -> None:
    """Let every element of the model's module lists (its blocks) run under `checkpoint`, in place.

    Raises: ValueError if the model has no module list.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks if type(block).forward is not nn.Module.forward]
    if not blocks:
        raise ValueError("the model has no nn.ModuleList, so it is not known what its blocks are: call "
                         "checkpoint(block, x) in its forward")
    for block in dict.fromkeys(blocks):  # one that stands in two places is wrapped once
        if getattr(block.forward, "func", None) is checkpoint:
            raise ValueError("the blocks of this model are checkpointed already")
        block.forward = functools.partial(checkpoint, block.forward, group=group, to_host=to_host, place=place)


class _Checkpoint(torch.autograd.Function):
    """Forward without a graph; backward builds it, once the arguments are whole again, and goes through it."""

    @staticmethod
    def forward(ctx, run, keeper, anchor, *leaves):
        ctx.run, ctx.keeper, ctx.random, ctx.precision = run, keeper, random_state(), autocast_state()
        ctx.set_materialize_grads(False)
        ctx.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        ctx.how = {place: keeper.describe(leaf) for place, leaf in tensors.items()}
        # autograd frees what is saved here as soon as backward has used it
        ctx.save_for_backward(*(keeper.keep(leaf) for leaf in tensors.values()))
        versions = [leaf._version for leaf in tensors.values()]
        output = run(leaves)
        if versions != [leaf._version for leaf in tensors.values()]:
            raise RuntimeError("a checkpointed function must not change its arguments in place: it runs again in "
                               "backward, on what it would have changed")
        return output

    @staticmethod
    def backward(ctx, *gradients):
        leaves = list(ctx.leaves)
        for (place, how), kept in zip(ctx.how.items(), ctx.saved_tensors, strict=True):
            leaves[place] = ctx.keeper.bring_back(kept, how)
        with random_state_of(ctx.random), autocast_as(ctx.precision), torch.enable_grad():
            outputs = ctx.run(leaves)
        pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)
                 if gradient is not None and output.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        # a parameter among the arguments has its gradient already
        is_copy = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter) for leaf in leaves]
        return None, None, None, *(leaf.grad if copy else None for leaf, copy in zip(leaves, is_copy, strict=True))


class _Keeper:
    """What is kept of a tensor from forward to backward: all of it or this rank's part, here or in host memory."""

    def __init__(self, group, to_host, place):
        self.group, self.to_host, self.place = group, to_host, place

    def describe(self, tensor):
        """What bring_back needs to know, beside what was kept."""
        is_cut = self.group is not None and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        return tensor.shape, tensor.device, tensor.requires_grad, is_cut

    def keep(self, tensor):
        """The tensor [...], or its part [numel / M, rounded up], a copy: the whole shall go."""
        *_, is_cut = self.describe(tensor)
        if isinstance(tensor, nn.Parameter):
            return tensor  # it lives anyway
        kept = self._part(tensor) if is_cut else tensor.detach()
        if not self.to_host:
            return self.place(kept) if self.place and kept.is_floating_point() else kept
        host = torch.empty(kept.shape, dtype=kept.dtype, device="cpu",
                           pin_memory=kept.is_cuda and torch.cuda.is_available())
        return host.copy_(kept, non_blocking=True)  # on a GPU the copy goes on while the next block computes

    def bring_back(self, kept, how):
        """The tensor as it was, without a past."""
        shape, device, requires_grad, is_cut = how
        if isinstance(kept, nn.Parameter):
            return kept
        tensor = kept.to(device, non_blocking=True)
        if is_cut:
            whole = tensor.new_empty(tensor.numel() * dist.get_world_size(self.group))
            collectives.all_gather(whole, tensor, group=self.group)
            tensor = whole[: shape.numel()].view(shape)
        return tensor.detach().requires_grad_(requires_grad)

    def _part(self, tensor):
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        size = -(-tensor.numel() // world_size)  # the last part may be shorter: it is filled up
        mine = tensor.detach().reshape(-1)[rank * size : (rank + 1) * size]
        part = tensor.new_zeros(size)
        part[: mine.numel()] = mine
        return part


def _refuse_hidden(leaves) -> None:
    """Of a tensor inside some other object autograd would know nothing: its gradient would be lost without a word."""
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, nn.Module)) and any(t.is_floating_point() for t in tensors_in(leaf)):
            raise TypeError(f"a checkpointed function takes and returns tensors in tuples, lists and dicts, not in a "
                            f"{type(leaf).__name__}: take them out of it")


# -------------------------------------------------------------------------------------------- random state, precision


def autocast_state() -> list[tuple]:
    """What torch.autocast is set to: (device type, on or off, dtype)."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


@contextmanager
def autocast_as(states: list[tuple]):
    """Context with such a setting."""
    with ExitStack() as stack:
        for kind, enabled, dtype in states:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        yield


def random_state() -> list[torch.Tensor]:
    """Of torch's generator on the CPU, and of the GPU at hand if there is one in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


@contextmanager
def random_state_of(states: list[torch.Tensor]):
    """Context in which random numbers come as they did from that state on; afterwards as if nothing had been."""
    gpus = [torch.cuda.current_device()] if len(states) > 1 else []
    with torch.random.fork_rng(gpus):
        torch.set_rng_state(states[0])
        if gpus:
            torch.cuda.set_rng_state(states[1])
        yield


if __name__ == "__main__":
    from zero_minimal.foundations import ranks
    from zero_minimal.meters.memory import Ledger
    from zero_minimal.meters.traffic import TrafficMeter
    from zero_minimal.programs.report import table
    from zero_minimal.workload.model import GPT, GPTConfig

    def measure(name, options, device):
        """A step of a model that all ranks compute alike, as model-parallel ranks do: what is kept, sent, learned."""
        torch.manual_seed(0)
        model = GPT(GPTConfig(sequence=256, dropout=0.1)).to(device)
        tokens = torch.randint(256, (8, 257), device=device)
        if options is not None:
            checkpoint_blocks(model, **options)
        with Ledger(device) as ledger, TrafficMeter() as meter:
            ledger.watch(model)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            kept = ledger.states()["activations"]
            loss.backward()
        norm = sum(param.grad.square().sum() for param in model.parameters()).sqrt()
        return [name, f"{kept / 1e6:.1f}", f"{meter.sent_bytes / 1e6:.1f}", f"{loss:.6f}", f"{norm:.6f}"]

    with ranks.start() as rank:
        everybody = dist.group.WORLD
        modes = {"no checkpoints": None, "checkpoints": {}, "P_a": dict(group=everybody),
                 "P_a+cpu": dict(group=everybody, to_host=True)}
        rows = [measure(name, options, rank.device) for name, options in modes.items()]
        if rank.rank == 0:
            print(f"model-parallel group of {rank.world_size}; a block's input has 8 × 256 × 256 elements, 2.1 MB\n")
            print(table([["", "MB kept for backward", "MB sent", "loss", "norm of the gradient"], *rows]))
            print("\nOn a CPU, device and host memory are the same: P_a+cpu shows no less here.")
