"""Meta: a model that was built without memory comes into being unit by unit.

    with torch.device("meta"):
        model = GPT(config)                    # shapes, and nothing else
    zero = Stage3(model, torch.optim.AdamW)    # each unit gets memory and values, and is cut

So stage 3 can begin with a model that no rank could hold.

Seams: model_given, buckets_planned, unit_to_flatten, wrapped, wrap_failed.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.units import Unit, restore


@seams.at("unit_to_flatten")
@torch.no_grad()
def materialise(unit: Unit, model: nn.Module) -> None:
    """Give a unit's tensors on the meta device memory on torch's default device, and values.

    If the model has a method initialise(module), it draws the values, children first. Else each
    module's reset_parameters() does, and after it _init_weights(module) of the innermost module
    around it that has one, as in Hugging Face's transformers. What a constructor itself changes is
    not repeated.
    Raises: ValueError if something is left without a value.
    """
    coming = {param for param in unit.params if param.is_meta}
    modules = [module for module in unit.module.modules()
               if coming.intersection(module.parameters())
               or any(buffer.is_meta for buffer in module.buffers(recurse=False))]
    if not modules:
        return
    settled = {param for module in modules for param in module.parameters() if not param.is_meta}
    for param in coming:
        _become(param, _nothing_like(param))
    drawn = [(name, param) for name, param in unit.module.named_parameters() if param in coming]
    draw = drawers(model)
    with in_the_void(settled):  # a module would draw these again with its others
        for module in reversed(modules):
            drawn += _give_memory_to_buffers(module)
            for drawer in draw[module]:
                drawer()
    for name, tensor in drawn:
        if has_no_value(tensor):
            raise ValueError(f"the model is on the meta device, and nothing gave {name!r} a value: "
                             "neither reset_parameters(), nor initialise() or _init_weights(); "
                             f"{ADVICE}")


ADVICE = ("give it one that draws all it has, or the model a method initialise(module), or build "
          "the model on a real device")


@seams.at("model_given")
def check(model: nn.Module, group, units: list[Unit] | None, *_) -> None:
    """Raise ValueError for a model on the meta device if the stage is not stage 3, or if nothing
    draws the values of one of its modules."""
    draw = drawers(model)
    for path, module in model.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names = [name for name, tensor in tensors if tensor.is_meta]
        if names and units is None:
            raise ValueError(f"{f'{path}.{names[0]}'.lstrip('.')!r} is on the meta device: only "
                             "stage 3 can bring a model into being, unit by unit")
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(f"{f'{path}.{name}'.lstrip('.')!r} is a tensor on the meta device "
                                 "and no buffer, so nothing can give it values: "
                                 f"self.register_buffer({name!r}, …)")
        if names and not draw[module]:
            raise ValueError(f"the model is on the meta device, and its {type(module).__name__} "
                             f"has no reset_parameters() to draw its values with; {ADVICE}")


def drawers(model: nn.Module) -> dict[nn.Module, list[Callable[[], object]]]:
    """module → the functions that draw its values, in order."""
    if hasattr(model, "initialise"):
        return {module: [functools.partial(model.initialise, module)] for module in model.modules()}
    draw = {module: [module.reset_parameters] if hasattr(module, "reset_parameters") else []
            for module in model.modules()}
    innermost = {module: above for above in model.modules() if _initialises_others(above)
                 for module in above.modules()}
    for module, above in innermost.items():
        draw[module].append(functools.partial(above._init_weights, module))
    return draw


def _initialises_others(module: nn.Module) -> bool:
    """Whether it has a method _init_weights(module)."""
    method = getattr(module, "_init_weights", None)
    return callable(method) and len(inspect.signature(method).parameters) == 1


def has_no_value(tensor: torch.Tensor) -> bool:
    """Whether an element is still as `_nothing_like` made it."""
    if tensor.dtype in EACH_IS_DRAWN:
        return tensor._version == UNTOUCHED
    is_whole = tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return bool((tensor == _nothing(tensor.dtype) if is_whole else tensor.isnan()).any())


def _nothing(dtype: torch.dtype) -> float | int:
    has_nan = dtype.is_floating_point or dtype.is_complex
    return float("nan") if has_nan else torch.iinfo(dtype).min


def _nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory filled with a number that is never drawn, so that it differs from any value. Of bytes
    and bools each is drawn: torch counts whether they were written."""
    real = torch.empty_like(tensor, device=torch.get_default_device())
    return real if real.dtype in EACH_IS_DRAWN else real.fill_(_nothing(real.dtype))


EACH_IS_DRAWN = torch.bool, torch.uint8
UNTOUCHED = 0  # the version of a tensor that was not written since it was made


def _give_memory_to_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Give memory to those on the meta device; return them with their names."""
    given = []
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            real = _nothing_like(buffer)
            setattr(module, name, real)  # a tensor in a buffer's place stays a buffer
            given.append((f"{type(module).__name__}.{name}", real))
    return given


def _become(param: nn.Parameter, tensor: torch.Tensor) -> None:
    """Turn it into this tensor, on another device. It stays the same object: others refer to it."""
    other = nn.Parameter(tensor, param.requires_grad)
    attributes = {name: value for name, value in vars(param).items() if name not in vars(other)}
    torch.utils.swap_tensors(param, other)
    vars(param).update(attributes)


@contextlib.contextmanager
def in_the_void(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which each has memory that is dropped afterwards: code that draws values for all
    of a module then changes none of these."""
    before = {}
    for param in params:
        with torch._C.DisableTorchFunctionSubclass():
            before[param] = type(param), param.data
        restore(param, torch.empty(param.shape, dtype=param.dtype, device=param.device))
    try:
        yield
    finally:
        for param, (kind, data) in before.items():
            param.data, param.__class__ = data, kind


@seams.at("buckets_planned")
def remember(stage, *_) -> None:
    """Remember what is on the meta device now, as long as wrapping may fail."""
    stage._on_meta = (
        [param for param in stage.model.parameters() if param.is_meta],
        [(module, name) for module in stage.model.modules()
         for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta],
    )


@seams.at("wrapped")
def forget(stage) -> None:
    del stage._on_meta


@seams.at("wrap_failed")
def put_back(stage) -> None:
    """Put back on the meta device what was there before."""
    params, buffers = stage._on_meta
    for param in params:
        nowhere = torch.empty(param.shape, dtype=param.dtype, device="meta")
        if not param.is_meta:
            restore(param, torch.empty(0, dtype=param.dtype, device=param.device))
            _become(param, nowhere)
    for module, name in buffers:
        setattr(module, name, getattr(module, name).to("meta"))
