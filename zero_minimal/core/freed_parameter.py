"""Freed parameter: at stage 3, a parameter whose values are freed for now."""

import torch
from torch import nn

from zero_minimal.core import seams


def release(param: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Let the parameter point to a placeholder of its shape."""
    restore(param, placeholder)
    param._zero_released = True
    seams.tell("parameter_released", param)


def restore(param: nn.Parameter, data: torch.Tensor) -> None:
    """Let it point to its values again."""
    seams.tell("parameter_restored", param)
    param.data, param._zero_released = data, False


def is_released(param: nn.Parameter) -> bool:
    """Whether its values are gone for now."""
    return getattr(param, "_zero_released", False)
