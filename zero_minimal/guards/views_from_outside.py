"""Views from outside: tensors that share a parameter's memory when its model is wrapped, and are
not part of the model.

Wrapping moves the parameter to its flat. A view from before (`ref = weight.detach()` in a closure,
say) stays behind, with the old values. refused_models.py refuses views in attributes of the model.
For others, such as an earlier state_dict(), the rank that holds one gets a warning.

Seam: model_given.
"""

import gc
import warnings
from collections import Counter

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.layout import Bucket


@seams.at("model_given")
def warn_of_views(model: nn.Module, *_) -> None:
    """Warn if a tensor from outside the model shares memory with a parameter that is trained.

    A storage counts its holders. If they are more than the model's own tensors, this looks at all
    objects of the process, for some tenths of a second: what autograd saved in an earlier forward
    is a holder, too, but no Python object.
    """
    own = {*model.parameters(), *model.buffers()}
    # attributes: refused, or made anew before each forward, as torch.nn.utils.spectral_norm does
    own |= {value for module in model.modules() for value in vars(module).values()
            if isinstance(value, torch.Tensor)}
    strided = [tensor for tensor in own if tensor.layout == torch.strided]
    ours = Counter(map(_place, strided))
    more = holders(torch.empty(1)) - 1  # which is the only holder of its memory
    held = {_place(tensor) for tensor in strided if holders(tensor) > ours[_place(tensor)] + more}
    if not held:
        return
    gc.collect()  # a view that nothing refers to does not count
    tensors = []
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:
            tensors.append(each)
        elif type(each) is Bucket:  # of a failed wrap, whose traceback is still held
            its = [value for value in vars(each).values() if isinstance(value, torch.Tensor)]
            own.update(its, [tensor._base for tensor in its])
    looking = {_place(tensor) for tensor in tensors if tensor not in own}
    stale = [name for name, param in model.named_parameters()
             if param.requires_grad and _place(param) in held & looking]
    if stale:
        more = f" and {len(stale) - 1} more" if stale[1:] else ""
        warnings.warn(
            f"somebody holds a view of parameter {stale[0]!r}{more}, from before wrapping, "
            "which moves parameters: weight.detach(), weight.data or a state_dict(), say. It keeps "
            "the values of now, and no training changes them: make it where you use it, or clone() "
            "it if you want these values",
            stacklevel=5,
        )


def holders(tensor: torch.Tensor) -> int:
    """How many tensors share its memory."""
    return torch._C._storage_Use_Count(_place(tensor))


def _place(tensor: torch.Tensor) -> int:
    """Its storage, as a number."""
    return tensor.untyped_storage()._cdata
