"""Odd outputs: a model may return a dataclass or an object of the user's, not a tensor, list, tuple
or dict. A backward pass begins at the tensors inside, too.

Seam: followed.
"""

from torch import Tensor
from torch.utils._pytree import tree_leaves

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.outputs import tensors_in


@seams.at("followed")
def follow(reducer) -> None:
    reducer.stage.model.register_forward_hook(WeakHook(begin_inside, reducer))


def begin_inside(reducer, module, inputs, output) -> None:
    odd = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, Tensor)]
    reducer.watch_output(module, inputs, list(tensors_in(odd)))
