"""Another way: no operator of its own. The function runs with a graph, and hooks drop all that the graph would save;
whoever asks for the first of it makes the function run again. Parts go round by broadcasts."""
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from zero_minimal.offloading import host


def checkpoint(function, *args, group=None, to_host=False, place=None, **kwargs):
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    frame = Frame(function, [Kept(leaf, group, to_host, place) for leaf in leaves], structure)
    del leaves
    with saved_tensors_hooks(frame.drop, frame.fetch):
        return function(*args, **kwargs)


def checkpoint_blocks(model, group=None, to_host=False, place=None):
    for blocks in list(model.modules()):
        for block in blocks if isinstance(blocks, nn.ModuleList) else ():
            block.forward = functools.partial(checkpoint, block.forward, group=group, to_host=to_host, place=place)


class Kept:
    """An argument between forward and backward."""

    def __init__(self, leaf, group, to_host, place):
        self.is_tensor = isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)
        self.group, self.value = group, leaf
        if not self.is_tensor:
            return
        self.shape, self.wants, self.dtype = leaf.shape, leaf.requires_grad, leaf.dtype
        self.is_cut = group is not None and leaf.is_floating_point()
        self.value = leaf.detach()
        if self.is_cut:
            self.count, self.size = leaf.numel(), dist.get_world_size(group)
            each = -(-self.count // self.size)
            self.value = leaf.detach().reshape(-1)[each * dist.get_rank(group) :][:each].clone()
        if to_host:
            self.value = self.value.clone()
            host.announce(self.value)
        elif place and leaf.is_floating_point():
            self.value = place(self.value)
        self.version = self.value._version

    def back(self):
        if not self.is_tensor:
            return self.value
        if self.value._version != self.version:
            raise RuntimeError("a block's input was changed in place between forward and backward")
        whole = self.value
        if self.is_cut:
            each = -(-self.count // self.size)
            parts = []
            for rank in range(self.size):
                length = max(0, min(each, self.count - rank * each))
                mine = rank == dist.get_rank(self.group)
                parts.append(self.value.clone() if mine else torch.empty(length, dtype=self.dtype))
                source = rank if self.group is None else dist.get_global_rank(self.group, rank)
                if length:
                    dist.broadcast(parts[-1], source, group=self.group)
            whole = torch.cat(parts).view(self.shape)
        return whole.detach().requires_grad_(self.wants)


class Frame:
    """One call: what the graph saved is known by its number."""

    def __init__(self, function, kept, structure):
        self.function, self.kept, self.structure = function, kept, structure
        self.random = torch.get_rng_state()
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.dropped, self.again = 0, None

    def drop(self, tensor):
        self.dropped += 1
        return self.dropped - 1

    def fetch(self, number):
        if self.again is None:
            self.again = []
            args, kwargs = pytree.tree_unflatten([kept.back() for kept in self.kept], self.structure)
            enabled, dtype = self.autocast
            with torch.random.fork_rng([]), torch.autocast("cpu", enabled=enabled, dtype=dtype), torch.enable_grad():
                torch.set_rng_state(self.random)
                with saved_tensors_hooks(self.remember, lambda number: None):
                    self.function(*args, **kwargs)
            self.kept = []
        tensor, self.again[number] = self.again[number], None
        return tensor

    def remember(self, tensor):
        self.again.append(tensor.detach())
        return len(self.again) - 1
