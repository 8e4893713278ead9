"""Loss scaler: fp16's small gradients, saved by scaling the loss; ranks that skip a step together.

A stage knows nothing of the scaler, which divides through the stage's gradient_scale.
"""

import weakref

import torch

from zero_minimal.core import collectives

SMALLEST_SCALE = 2.0**-24  # a gradient that overflows even so is infinite or NaN by itself


class LossScaler:
    """Dynamic loss scale for fp16, whose smallest number is 6e-8: it multiplies the loss, and later
    divides the gradients.

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
        zero.gradient_scale changes here, once, also if called twice. Raises: RuntimeError after
        step(), until update()."""
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
        elif hasattr(zero, "reducer"):
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
    """Whether no gradient of this rank's is infinite or NaN: a 0-dim tensor."""
    if hasattr(zero, "gradients_are_finite"):  # they lie elsewhere, and zero asks there
        return zero.gradients_are_finite()
    return torch.stack([torch.isfinite(each).all() for each in zero.reduced_gradients()]).all()
