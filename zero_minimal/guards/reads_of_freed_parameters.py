"""Reads of freed parameters: at stage 3 it is an error to read one between its unit's turns.

Seams: parameter_released, parameter_moves, wrapped.

Its values are gone, and any number in their place would spread to losses and weights. So a released
parameter has a class of its own: a program may ask for its shape, dtype, …, but not for its values.
A unit is released when the turn of another begins, or later; the root in step(), or when an
evaluation ends.

torch.func takes a parameter's memory in C++, and would find the placeholder: it is made to ask.

Two readers of torch's do not see the class, and are refused outside gather_parameters(): a state
dict of placeholders would be a checkpoint of NaN, and an encoder that reads its first layer's
parameters would return other results.
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch.utils._pytree import tree_leaves

from zero_minimal.core import seams
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.trained_by import LEFT_BEHIND, called_from, is_released, trained_by

MAY_ASK = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes",
    "retains_grad", "output_nr", "_version", "_base", "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
MAY_CALL = (
    "size", "stride", "numel", "dim", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "is_shared", "storage_offset", "untyped_storage", "data_ptr", "get_device",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "__hash__",
)
ALLOWED = {getattr(torch.Tensor, name).__get__ for name in MAY_ASK}
ALLOWED |= {getattr(torch.Tensor, name) for name in MAY_CALL}
ALLOWED |= {torch.Tensor.grad.__set__, torch.Tensor.requires_grad.__set__, torch.numel}
ALLOWED |= {torch.is_floating_point, torch.is_complex}


class Absent(nn.Parameter):
    """A parameter whose values are not here. Its class answers for it: it refuses, or waits."""


def asking(wrap: Callable) -> Callable:
    """What torch.func calls to take a parameter in. Its class does not hear of that: so ask it."""

    @functools.wraps(wrap)
    def ask(tensor, *given):
        if not torch.compiler.is_compiling() and isinstance(tensor, Absent):
            tensor.view_as(tensor)
        return wrap(tensor, *given)

    return ask


for place, name in ((vmap, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad"),
                    (eager_transforms, "_wrap_functional_tensor")):
    if hasattr(place, name):
        setattr(place, name, asking(getattr(place, name)))


class FreedParameter(Absent):
    """A parameter whose memory is gone for now."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        found = next((value for value in given if isinstance(value, FreedParameter)), None)
        words = "a parameter" if found is None else f"parameter {found.name!r}"
        if found is not None and trained_by(found) is None:
            raise RuntimeError(f"{words} is released: {LEFT_BEHIND}")
        if called_from("torch.nn.parallel.distributed"):
            raise RuntimeError(f"{words} is released: leave DistributedDataParallel out, since a "
                               "stage sends gradients by itself")
        raise RuntimeError(
            f"{words} is released: at stage 3 a rank holds it only while its unit works. Read or "
            "change it under `with zero.gather_parameters():`, on all ranks (but its dtype and "
            "device before wrapping). For a gradient, use it in the forward of the module that "
            "holds it. If a module uses a parameter of another one, name a module around both in "
            "units=. What differentiates by parameters itself (torch.func, torch.autograd.grad) "
            "trains at stages 0 to 2"
        )

    @property
    def name(self) -> str:
        return vars(self).get("_zero_name", "")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Freed parameter {self.name!r} of shape {tuple(self.shape)}, {self.dtype}"


@seams.at("parameter_released")
def becomes_released(param: nn.Parameter) -> None:
    """A parameter of another class keeps it: then its placeholder can be read."""
    if type(param) is nn.Parameter:
        param.__class__ = FreedParameter


@seams.at("parameter_moves")
def becomes_plain(param: nn.Parameter) -> None:
    if isinstance(param, FreedParameter):
        param.__class__ = nn.Parameter


def refuse_left_behind(module: nn.Module, *_) -> None:
    """Raise RuntimeError if a parameter of the module is released, and its stage is gone."""
    for param in module.parameters():
        if is_released(param) and trained_by(param) is None:
            raise RuntimeError(LEFT_BEHIND)


@seams.at("wrapped")
def refuse_state_dict(stage) -> None:
    """Let state_dict() and load_state_dict() of stage.model, and of each module in it, raise an
    error that says what to do, unless stage.inside_gather_parameters: a state dict of placeholders
    would be a checkpoint of NaN."""

    if not hasattr(stage, "units"):  # not stage 3
        return

    def refuse(stage, module, *_):
        if not stage.inside_gather_parameters and any(True for _ in module.parameters()):
            raise RuntimeError("at stage 3 a rank holds shards only: put model.state_dict() or "
                               "model.load_state_dict() under `with zero.gather_parameters():`, "
                               "on all ranks; or save zero.state_dict(), this rank's part")

    tie = WeakHook(refuse, stage, left=refuse_left_behind)
    for module in stage.model.modules():
        module.register_state_dict_pre_hook(tie)
        module.register_load_state_dict_pre_hook(tie)


@seams.at("wrapped")
def refuse_nested_tensors(stage) -> None:
    """Let each nn.TransformerEncoder of stage.model refuse a call with another result here. In
    evaluation it reads its first layer's parameters: released ones turn off a fast path that leaves
    zeros where the padding is."""

    if not hasattr(stage, "units"):
        return

    def refuse(stage, module, args, kwargs):
        padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        plain = module.training or torch.is_grad_enabled() or stage.inside_gather_parameters
        if padding is not None and module.use_nested_tensor and not plain:
            raise RuntimeError("at stage 3 an evaluation with src_key_padding_mask would not put "
                               "zeros where the padding is, as nested tensors do: build "
                               "nn.TransformerEncoder(…, enable_nested_tensor=False), or evaluate "
                               "under `with zero.gather_parameters():`, on all ranks")

    for module in stage.model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.register_forward_pre_hook(WeakHook(refuse, stage), with_kwargs=True)
