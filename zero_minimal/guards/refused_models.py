"""Models that cannot be trained are refused before anything in them is changed. A wrap that fails
later, on all ranks, leaves a model that can be wrapped again. (Its values may be rank 0's by then.)

Seams: model_given, groups_given, units_given, wrapped, wrap_failed.
Mistakes: two parameters over the same memory, a parameter that has no shape yet, one of another
model, a wrapper that sends gradients itself, a model whose forward changes its parameters, a
bucket_bytes that is no number of bytes, …
"""

import contextlib
import itertools

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from zero_minimal.core import seams
from zero_minimal.core.units import gather_anew
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards.ownership import check_module
from zero_minimal.guards.trained_by import is_released


@seams.at("model_given")
def refuse_model(model: nn.Module, *_) -> None:
    """Raises: ValueError for a model with a wrapper around or inside it, two parameters over the
    same memory, one that cannot be in a flat tensor, or a forward that changes parameters."""
    refuse_wrapped(model)
    for name, param in model.named_parameters():
        _refuse_odd("parameter", name, param)
    for name, buffer in model.named_buffers():
        _refuse_odd("buffer", name, buffer)
    _refuse_shared_memory(model)
    _refuse_max_norm(model)


@seams.at("model_given")
def refuse_bucket_bytes(model: nn.Module, group, units, bucket_bytes: int | None) -> None:
    """Raises: ValueError if it is less than 1, TypeError if it is no number."""
    if units or bucket_bytes is None:
        return
    if not isinstance(bucket_bytes, (int, float)):
        raise TypeError(f"bucket_bytes is {bucket_bytes!r}: give a number of bytes, or None")
    if not 1 <= bucket_bytes < float("inf"):
        raise ValueError(f"bucket_bytes is {bucket_bytes}: at least one byte is needed")


@seams.at("groups_given")
def refuse_groups(model: nn.Module, groups: list[dict]) -> None:
    """Raises: ValueError if there is nothing to train, for a parameter of another model, or one
    that is in two groups."""
    own, seen = set(model.parameters()), set()
    for param in [param for group in groups for param in group["params"]]:
        if param not in own:
            raise ValueError(f"param_groups holds a parameter of shape {tuple(param.shape)} that "
                             "the model does not have. One of a criterion, say: put both into one "
                             "module, and wrap that")
        if param in seen:
            raise ValueError("a parameter stands twice in param_groups")
        seen.add(param)
    if not any(param.requires_grad for param in seen):
        raise ValueError("the model has no parameter to train: it is empty, or all of them are "
                         "frozen")


def _refuse_odd(kind: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that cannot be in a flat tensor, or cannot be sent."""
    if is_lazy(tensor):
        raise ValueError(f"{kind} {name!r} has no shape yet: run a batch through the model, then "
                         "wrap it")
    if tensor.layout != torch.strided:
        raise ValueError(f"{kind} {name!r} is sparse, and ranks exchange dense tensors: make it "
                         "dense, or let it be no part of the model")
    if tensor.is_inference():
        raise ValueError(f"{kind} {name!r} was made under torch.inference_mode(), and cannot be "
                         "changed any more: build the model outside of it")


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raise ValueError if a trained parameter shares memory with another tensor of the model: each
    would get memory of its own, and their values would differ from then on."""
    named = [("parameter", *each) for each in model.named_parameters()]
    named += [("buffer", *each) for each in model.named_buffers()]
    known = {tensor for _, _, tensor in named}
    named += [("attribute", f"{prefix}.{name}".lstrip("."), tensor)
              for prefix, module in model.named_modules() for name, value in vars(module).items()
              if not name.startswith("_") and name not in _made_anew(module)
              for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)
              and tensor not in known and tensor.layout == torch.strided]
    places: dict[int, list[tuple]] = {}
    for kind, name, tensor in named:
        if tensor.numel():
            there = places.setdefault(tensor.untyped_storage()._cdata, [])
            there.append((tensor, f"{kind} {name!r}"))
    for there in places.values():
        for (one, words), (other, others_words) in itertools.combinations(there, 2):
            if (one.requires_grad or other.requires_grad) and _overlap(one, other):
                raise ValueError(f"{words} and {others_words} share memory, and here each would "
                                 "get its own, and other values in training: make them one "
                                 "parameter (head.weight = embedding.weight; in forward, write "
                                 ".t() or a slice of it), or clone() one of them")


def _made_anew(module: nn.Module) -> set[str]:
    """Attributes that a hook makes anew before each forward, as torch.nn.utils.spectral_norm does:
    what they hold now is never read."""
    return {getattr(hook, "name", "") for hook in module._forward_pre_hooks.values()}


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors over the same storage, transposed or strided in any way, have an element
    in common."""
    begins = [tensor.storage_offset() * tensor.itemsize for tensor in (one, other)]
    ends = [begin + tensor.itemsize * (1 + sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())))
            for begin, tensor in zip(begins, (one, other))]
    if ends[0] <= begins[1] or ends[1] <= begins[0]:
        return False
    if one.dtype != other.dtype or one.is_contiguous() and other.is_contiguous():
        return True
    # of the elements in their storage
    places = torch.arange(max(ends) // one.itemsize, device="cpu")
    taken, asked = (places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                    for tensor in (one, other))
    return bool(torch.isin(taken.flatten(), asked.flatten()).any())


def _refuse_max_norm(model: nn.Module) -> None:
    """Raise ValueError if the model's forward changes its parameters: each rank by its own batch,
    so the ranks would drift apart."""
    for name, module in model.named_modules():
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and module.max_norm is not None:
            raise ValueError(f"{name or 'the model'} has max_norm={module.max_norm:g}, with which "
                             "forward changes its weight, on each rank by its own batch: set "
                             "max_norm to None, and after step() call weight.renorm_(2, 0, "
                             "maxnorm) under torch.no_grad() and zero.gather_parameters()")


@seams.at("units_given")
def refuse_units(model: nn.Module, modules: list | None) -> None:
    """At stage 3. Raises: TypeError if `model` is not a module; ValueError for TorchScript, or a
    unit that is not a part of the model."""
    check_module(model)
    refuse_script(model)
    for stranger in set(modules or ()) - set(model.modules()):
        raise ValueError(f"units= holds a {type(stranger).__name__} that is not a part of the "
                         "model")


def refuse_wrapped(model: nn.Module) -> None:
    """Raises: ValueError, with what to write instead."""
    if torch.is_inference_mode_enabled():
        raise ValueError("a stage cannot train what it makes under torch.inference_mode(): wrap "
                         "the model outside of it")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            kind = type(module).__name__
            raise ValueError(f"{where} is a {kind}, which sends its gradients itself: give the "
                             f"stage the model in it, its .module, and leave {kind} out")
    for name, param in model.named_parameters():
        if type(param).__name__ == "DTensor":
            raise ValueError(f"parameter {name!r} is a DTensor, cut by fully_shard() or "
                             "distribute_tensor(): leave that out, since a stage cuts by itself; "
                             "or train without the stage")


def refuse_script(model: nn.Module) -> None:
    """At stage 3. Raises: ValueError, with what to write instead."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            what = f"module {name!r}" if name else "the model"
            raise ValueError(f"{what} is TorchScript, in which no hook can gather what "
                             "stage 3 has freed: give the module that it was made of, and "
                             "torch.compile() that for speed; or train at stage 2")


@seams.at("wrapped")
def refuse_ddp_around(stage) -> None:
    """Raises: RuntimeError in the forward of a DistributedDataParallel."""
    stage.model.register_forward_pre_hook(WeakHook(_refuse_inside_ddp, stage))


def _refuse_inside_ddp(*_) -> None:
    if DistributedDataParallel._active_ddp_module is not None:
        raise RuntimeError("DistributedDataParallel is around a model that has a stage, so both "
                           "would send its gradients: leave DistributedDataParallel out, and call "
                           "zero.model")


@seams.at("wrap_failed")
def make_whole(stage) -> None:
    lost = [bucket for bucket in stage.all_buckets if any(map(is_released, bucket.params))]
    with contextlib.suppress(RuntimeError):  # other ranks may be elsewhere, or gone
        gather_anew(lost, stage.group)
