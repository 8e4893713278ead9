"""Meta: a model that was built without memory comes into being unit by unit.

    with torch.device("meta"):
        model = GPT(config)                    # shapes, and nothing else
    zero = Stage3(model, torch.optim.AdamW)    # each unit gets memory and values, and is cut

So stage 3 can begin with a model that no rank could hold.
"""

import torch
from torch import nn

from zero_minimal.foundations import values
from zero_minimal.foundations.released import in_the_void
from zero_minimal.foundations.units import Unit


@torch.no_grad()
def materialise(unit: Unit, model: nn.Module) -> None:
    """Give what a unit has on the meta device memory on torch's default device, and values.

    If the model has a method initialise(module), that draws them, children first; else each module
    does so in its reset_parameters().
    Raises: ValueError for a module that has none, or if something is left without a value.
    """
    coming = {param for param in unit.params if param.is_meta}
    modules = [module for module in unit.module.modules()
               if coming.intersection(module.parameters())
               or any(buffer.is_meta for buffer in module.buffers(recurse=False))]
    if not modules:
        return
    settled = {param for module in modules for param in module.parameters() if not param.is_meta}
    for param in coming:
        _give_memory(param)
    drawn = [(name, param) for name, param in unit.module.named_parameters() if param in coming]
    with in_the_void(settled):  # a module would draw these again, with its others
        for module in reversed(modules):
            drawn += _give_memory_to_buffers(module)
            _draw(module, model)
    for name, tensor in drawn:
        if has_no_value(tensor):
            raise ValueError(f"the model is on the meta device, and nothing gave {name!r} a value: "
                             f"neither reset_parameters() nor initialise(); {ADVICE}")


ADVICE = ("give it one that draws all it has, or the model a method initialise(module), or build "
          "the model on a real device")


def _draw(module: nn.Module, model: nn.Module) -> None:
    if hasattr(model, "initialise"):
        model.initialise(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise ValueError(f"the model is on the meta device, and its {type(module).__name__} has no "
                         f"reset_parameters() to draw its values with; {ADVICE}")


def has_no_value(tensor: torch.Tensor) -> bool:
    """Whether an element is still as `_nothing_like` made it."""
    if tensor.dtype == torch.bool or not values.present():
        return False
    is_whole = tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return bool((tensor == _nothing(tensor.dtype) if is_whole else tensor.isnan()).any())


def _nothing(dtype: torch.dtype) -> float | int:
    has_nan = dtype.is_floating_point or dtype.is_complex
    return float("nan") if has_nan else torch.iinfo(dtype).min


def _nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory, filled with what nobody draws, so that it can be told from a value. (A bool has no
    room for that.)"""
    real = torch.empty_like(tensor, device=torch.get_default_device())
    return real if real.dtype == torch.bool else real.fill_(_nothing(real.dtype))


def _give_memory_to_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """To those on the meta device; returns them with their names."""
    given = []
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            real = _nothing_like(buffer)
            setattr(module, name, real)  # a tensor in a buffer's place stays a buffer
            given.append((f"{type(module).__name__}.{name}", real))
    return given


def _give_memory(param: nn.Parameter) -> None:
    """It stays the same object: others refer to it already."""
    real = nn.Parameter(_nothing_like(param), param.requires_grad)
    attributes = {name: value for name, value in vars(param).items() if name not in vars(real)}
    torch.utils.swap_tensors(param, real)
    vars(param).update(attributes)
