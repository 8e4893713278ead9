"""Wrappers: what torch can put around a model or into it that does a stage's work a second time, or
hides from it what a module does."""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


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
            raise ValueError(f"module {name!r} is TorchScript, in which no hook can gather what "
                             "stage 3 has freed: give the module that it was made of, and "
                             "torch.compile() that for speed; or train at stage 2")


def refuse_inside_ddp() -> None:
    """Raises: RuntimeError in the forward of a DistributedDataParallel."""
    if DistributedDataParallel._active_ddp_module is not None:
        raise RuntimeError("DistributedDataParallel is around a model that has a stage, so both "
                           "would send its gradients: leave DistributedDataParallel out, and call "
                           "zero.model")
