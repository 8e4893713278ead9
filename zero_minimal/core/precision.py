"""Precision: fp32 masters for 16-bit parameters, the global gradient norm, fp16's loss scale.

Mixed precision keeps 2 + 2 + 12 bytes a parameter (ZeRO, section 3.1): parameter and gradient in 16
bit; fp32 master, momentum and variance. The master exists because an update is often smaller than
the spacing of 16-bit numbers: added to a bf16 parameter it would vanish. ZeRO shards it like all
optimizer state.
"""

import functools
import weakref

import torch
from torch import nn

from zero_minimal.core import collectives
from zero_minimal.core.layout import Bucket

Scale = torch.Tensor | float | None  # what the update multiplies gradients with; None: nothing


def master_of(shard: torch.Tensor) -> nn.Parameter:
    """What the optimizer updates in the place of a shard of 16 bits: an fp32 copy of it."""
    return nn.Parameter(shard.float())


def keep_changes(bucket: Bucket) -> None:
    """Carry a user's edit of the parameters (loaded weights, say) over to the fp32 master. Elements
    that were not edited keep their full precision."""
    if getattr(bucket, "away", None) is not None:  # its master is on a host
        bucket.away.keep_changes(bucket)
        return
    shard, master = bucket.parameter_shard, bucket.master.data
    if master.dtype != shard.dtype:
        master.copy_(torch.where(shard == master.to(shard.dtype), master, shard.float()))


def global_norm(
    gradients: list[torch.Tensor], gradient_scale: Scale = None, *,
    sharded: bool = True, group=None,
) -> torch.Tensor:
    """Euclidean norm of the whole model's gradient, a 0-dim tensor, the same on every rank.
    `sharded=False`: every rank holds all of it already.
    """
    real = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    dtypes = [gradient.dtype for gradient in real]
    wide = functools.reduce(torch.promote_types, dtypes, torch.float32)  # fp32 at least
    norms = [torch.linalg.vector_norm(gradient.flatten(), dtype=wide) for gradient in real]
    squares = torch.stack(norms).square().sum()  # shards add their squares, not their norms
    if sharded:
        collectives.all_reduce(squares, op="sum", group=group)
    norm = squares.sqrt()
    return norm if gradient_scale is None else norm * gradient_scale


def clip(gradient_scale: Scale, norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The new gradient scale: the old one times max_norm / norm, if the norm is larger. The
    gradients stay as they are; the update multiplies them."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return factor if gradient_scale is None else gradient_scale * factor


SMALLEST_SCALE = 2.0**-24  # gradients that overflow even so are not too large: they are not finite


class LossScaler:
    """Dynamic loss scale for fp16, whose smallest number is 6e-8: the loss is multiplied by it, and
    the gradients are divided by it again.

    A gradient that overflows anywhere makes *all* ranks skip the step and halve the scale;
    `growth_interval` good steps in a row double it.

    groups: the process groups that skip together, by default the stage's alone. Where the model
        itself is cut over ranks, their group is needed too.

    Use it like torch.amp.GradScaler:

        scaler.scale(loss).backward()
        scaler.unscale_(zero)            # only needed before clipping
        zero.clip_grad_norm_(1.0)
        scaler.step(zero)                # False if the step was skipped
        scaler.update()

    Of several stages (a GAN's, say) each has its own unscale_() and step(), and then one update()
    is for all: an overflow in any halves the scale.
    """

    def __init__(
        self, initial_scale: float = 2.0**16, growth_interval: int = 2000,
        groups: list | None = None,
    ):
        self.scale_value, self.growth_interval = float(initial_scale), growth_interval
        self.groups = groups
        self.skipped = 0  # steps, so far
        self._good_steps = 0
        # since the last update(): stages whose gradients the update will divide, and of those that
        # came as far as step() whether a gradient had overflowed
        self._unscaled = weakref.WeakSet()
        self._overflows = weakref.WeakKeyDictionary()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on."""
        return loss * self.scale_value

    def unscale_(self, zero) -> None:
        """Let the next update divide the gradients, in fp32: in fp16 small ones would vanish. Only
        zero.gradient_scale changes here, once however often it is asked for. Raises: RuntimeError
        after step(), until update()."""
        if zero in self._overflows:
            raise RuntimeError("step() was called already for this stage since the last update(): "
                               "call scaler.update() after it, once for all stages, and before "
                               "the next loss is scaled")
        before = zero.gradient_scale
        if before is None or zero not in self._unscaled:  # None: after zero_grad(), a new batch
            inverse = 1.0 / self.scale_value
            zero.gradient_scale = inverse if before is None else before * inverse
            self._unscaled.add(zero)

    def step(self, zero) -> bool:
        """zero.step(), unless a gradient is infinite or NaN on any rank. Whether it was taken."""
        self.unscale_(zero)
        overflow = (~_finite(zero)).float()
        # this rank sees its own shards only, and all must decide alike
        for group in self.groups or [zero.group]:
            collectives.all_reduce(overflow, op="max", group=group)
        self._overflows[zero] = skipped = bool(overflow)
        if not skipped:
            zero.step()
        elif hasattr(zero, "backward"):
            zero.reducer.skipped = True
        return not skipped

    def update(self) -> None:
        """Choose the scale of the next step; without a step() since the last update() it stays.
        Raises: RuntimeError, on all ranks alike, if none is small enough."""
        stepped, overflow = self.decide()
        if overflow and self.scale_value <= SMALLEST_SCALE:
            raise RuntimeError(f"gradients are infinite or NaN even at a loss scale of "
                               f"{self.scale_value:g}, so the loss itself is, or a part of the "
                               "model: look for it with torch.autograd.detect_anomaly(), lower the "
                               "learning rate, or train in bf16, which needs no loss scale")
        if overflow:
            self.scale_value, self._good_steps = self.scale_value / 2, 0
        elif stepped:
            self._good_steps += 1
            if self._good_steps % self.growth_interval == 0:
                self.scale_value *= 2

    def decide(self) -> tuple[bool, bool]:
        """Whether there was a step() since the last update(), and whether it was skipped. Both are
        forgotten then."""
        stepped, overflow = bool(self._overflows), any(self._overflows.values())
        self._unscaled.clear()
        self._overflows.clear()
        self.skipped += overflow
        return stepped, overflow

    def state_dict(self) -> dict:
        return {"scale": self.scale_value, "good_steps": self._good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        self.scale_value, self._good_steps = state["scale"], state["good_steps"]
        self.skipped = state.get("skipped", 0)  # older states have none


def _finite(zero) -> torch.Tensor:
    """Whether no gradient of this rank's is infinite or NaN, []."""
    if hasattr(zero, "gradients_are_finite"):  # they lie elsewhere, and zero asks there
        return zero.gradients_are_finite()
    return torch.stack([torch.isfinite(each).all() for each in zero.reduced_gradients()]).all()
