"""Owners: which tensors a model, an optimizer or a stage holds, and their categories.

The memory ledger sees storages; this finds their owners. It reads the public attributes of nn.Module, torch.optim and
stages: .model, .optimizer, and .buckets with their flat tensors (zero_minimal/core/layout.py); for zero_100b.py also
the .constant_buffers of a stage's .memory, and the .slab of checkpoints.
"""

import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

OF_A_BUCKET = ("gradients", "gradient_shard", "parameters", "parameter_shard")  # a bucket has these attributes


class Owners:
    """A collection of owners, held weakly: measuring memory must not keep it alive."""

    def __init__(self):
        self._references: list[weakref.ref] = []

    def __bool__(self):
        return bool(self._references)

    def add(self, *owners) -> None:
        """Modules (also DDP's and FSDP2's), torch optimizers, objects with .model, .optimizer or .buckets."""
        known = {id(owner) for owner in self._living()}
        self._references += [weakref.ref(owner) for owner in owners if id(owner) not in known]

    def buckets(self) -> list:
        """The buckets of the stages among the owners; peers have none. Buckets of an unknown class are left out."""
        found = [bucket for owner in self._living() for bucket in getattr(owner, "buckets", ())]
        return [bucket for bucket in found if all(hasattr(bucket, name) for name in OF_A_BUCKET)]

    def holdings(self) -> Iterator[tuple[str, list]]:
        """Pairs (category, nested tensors), of which the last one wins: an fp32 parameter may be its own master."""
        owners, buckets = self._living(), self.buckets()
        modules = [owner for owner in owners if isinstance(owner, nn.Module)]
        optimizers = [owner for owner in owners if isinstance(owner, Optimizer)]
        params = [param for module in modules for param in module.parameters()]
        masters = [param for optimizer in optimizers for param in parameters_of(optimizer)]
        here = [each for each in optimizers if getattr(each, "state_is_here", True)]  # not on a host
        states = list(strided_tensors([optimizer.state for optimizer in here]))

        yield "buffers", [list(module.buffers()) for module in modules]
        yield "optimizer", [masters, states]
        yield "gradients", [param.grad for param in params + masters]
        yield "gradients", [(bucket.gradients, bucket.gradient_shard) for bucket in buckets]
        yield "parameters", [params, [(bucket.parameters, bucket.parameter_shard) for bucket in buckets]]
        memories = [owner.memory for owner in owners if hasattr(owner, "memory")]
        yield "buffers", [memory.constant_buffers.buffers for memory in memories if hasattr(memory, "constant_buffers")]
        yield "activations", [owner.slab.memory for owner in owners if getattr(owner, "slab", None)]
        yield "scalars", [state for state in states if state.dim() == 0]
        yield "scalars", [master for master in masters if _is_smaller(master)]  # of an offloaded optimizer
        yield "scalars", [param for param in params if _is_smaller(param)]
        gradients = [param.grad for param in params + masters if param.grad is not None]
        yield "scalars", [gradient for gradient in gradients if _is_smaller(gradient)]

    def _living(self) -> list:
        """The owners that are still alive, and the models and optimizers inside them."""
        outer = [owner for owner in (reference() for reference in self._references) if owner is not None]
        inner = [getattr(owner, name, None) for owner in outer for name in ("zero", "model", "optimizer", "optim")]
        return outer + [part for part in inner if part is not None]


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that a torch optimizer updates."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def strided_tensors(value) -> Iterator[torch.Tensor]:
    """The plain tensors in nested lists, tuples and dicts; a DTensor's local tensor. Sparse ones are left out."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from strided_tensors(getattr(value, name))
        elif value.layout == torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from strided_tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from strided_tensors(part)


def address_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor uses: the address of its storage's C++ object, the same for all views."""
    return tensor.untyped_storage()._cdata


def _is_smaller(tensor: torch.Tensor) -> bool:
    """Whether a tensor has less storage than elements: one element replaces a parameter that stage 3 has released, or a
    gradient that was passed on."""
    return any(t.untyped_storage().nbytes() < t.numel() * t.element_size() for t in strided_tensors(tensor))
