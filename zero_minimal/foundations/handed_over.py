"""Handed over: what a parameter's .grad is once its gradient lives in shards. Reading it is an
error.

At stages 1 to 3 no rank holds the averaged gradient of a whole parameter. If .grad were None then,
torch's clip_grad_norm_ would find no gradient and clip nothing; if it were what this rank alone has
computed, it would clip by another norm on each rank. Both go on without a word. So between a
backward pass and zero_grad(), .grad is of a class of its own: whether it is there, and its shape,
can be asked; what it holds cannot.
"""

import torch
from torch import nn

from zero_minimal.foundations.released import ALLOWED


class HandedOver(torch.Tensor):
    """Stands in for the gradient of a parameter."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError(
            "a rank holds no whole gradient after backward, only its shards of the average, so "
            ".grad cannot be read or changed. Clip with zero.clip_grad_norm_(max_norm), which "
            "returns the norm; drop a batch with zero.zero_grad(); read, or change in place, what "
            "zero.reduced_gradients() returns; or change a parameter's gradient on its way: "
            "param.register_hook(lambda gradient: …)"
        )

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"a gradient of shape {tuple(self.shape)}, handed over"


def stand_in(placeholder: torch.Tensor) -> HandedOver:
    """A gradient that nobody can read, in the shape of a placeholder."""
    return placeholder.as_subclass(HandedOver)


def has_gradient(param: nn.Parameter) -> bool:
    """Whether .grad holds a gradient."""
    return param.grad is not None and type(param.grad) is not HandedOver
