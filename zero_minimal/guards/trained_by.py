"""Trained by: which stage trains a parameter, whether its values are here, and who asks.

At stage 3 the parameters are lost with the stage: to use the model after that is an error.
"""

import traceback
import weakref

import torch

from zero_minimal.core.weak_hooks import nothing

LEFT_BEHIND = (
    "the stage of this model is gone (del zero), and with it went the parameters, of which the "
    "model itself holds none at stage 3: keep `zero` as long as the model, or copy the model "
    "before, under `with zero.gather_parameters():`, on all ranks"
)


class Mark:
    """On a parameter: which stage trains it."""

    def __init__(self, stage=None):
        self._stage = nothing if stage is None else weakref.ref(stage)

    @property
    def stage(self):
        """None if it is gone."""
        return self._stage()

    def __reduce__(self):  # what a copy has, and what torch.load() takes by default
        return set, ()


def trained_by(param: torch.Tensor):
    """The stage that trains a parameter, or None."""
    mark = vars(param).get("_zero_stage")
    return mark.stage if isinstance(mark, Mark) else None


def home_of(param: torch.Tensor) -> tuple:
    """At stage 3 (unit, bucket) that hold a parameter; elsewhere (None, None)."""
    return getattr(trained_by(param), "home_of", {}).get(param, (None, None))


def is_released(param: torch.Tensor) -> bool:
    """Whether its values are gone for now."""
    return getattr(param, "_zero_released", False)


def called_from(module: str) -> bool:
    """Whether a function of this module is among the callers."""
    return any(frame.f_globals.get("__name__") == module for frame, _ in traceback.walk_stack(None))
