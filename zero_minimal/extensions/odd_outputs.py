"""Odd outputs: what a model returns that is no tensor, list, tuple or dict: a dataclass, or an
object of the user's. A backward pass begins at the tensors inside, too.

Seam: followed.
"""

import torch

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.outputs import tensors_in


@seams.at("followed")
def follow(reducer) -> None:
    reducer.stage.model.register_forward_hook(WeakHook(begin_there, reducer))


def begin_there(reducer, module, inputs, output) -> None:
    in_func = torch._C._functorch.peek_interpreter_stack() is not None  # its passes are its own
    for tensor in tensors_in(output):
        if tensor.grad_fn is not None and not in_func:
            tensor.grad_fn.register_prehook(WeakHook(lambda reducer, *_: reducer.begin(), reducer))
