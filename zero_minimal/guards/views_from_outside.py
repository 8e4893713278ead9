"""Views from outside: who looks into a parameter's memory when its model is wrapped, and is no part
of the model.

The parameter moves to its flat then. A view from before (`ref = weight.detach()` in a closure, say)
stays behind, with the old values. Attributes of the model refused_models.py refuses; of the rest,
as of a state_dict() that somebody has taken, the rank that holds it is warned.

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
    """Warn if a tensor that is not the model's lies in the memory of a parameter that is trained.

    Storage counts who holds it. Only if these are more than tensors of the model are all objects of
    this process looked at, for some tenths of a second: what autograd saved in an earlier forward
    holds it, too, and is no object.
    """
    own = {*model.parameters(), *model.buffers()}
    # attributes: refused, or made anew before each forward, as torch.nn.utils.spectral_norm does
    own |= {value for module in model.modules() for value in vars(module).values()
            if isinstance(value, torch.Tensor)}
    places = [_place(tensor) for tensor in own if tensor.layout == torch.strided]
    one = torch.empty(1)  # whose memory it holds alone
    more = torch._C._storage_Use_Count(_place(one)) - 1
    held = {place for place, count in Counter(places).items()
            if torch._C._storage_Use_Count(place) > count + more}
    if not held:
        return
    gc.collect()  # a view that nobody can reach any more is none
    tensors = []
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout == torch.strided:
            tensors.append(each)
        elif type(each) is Bucket:  # of a wrap that has failed, whose traceback is held
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


def _place(tensor: torch.Tensor) -> int:
    """Its storage, as a number."""
    return tensor.untyped_storage()._cdata
