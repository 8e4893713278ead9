"""Settings from a DeepSpeed file: its optimizer, schedule and loss scale, which no flag can say.

They do what DeepSpeed 0.19 does with the same values; a test holds them beside its own classes.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.workload import deepspeed_schedules
from zero_minimal.workload.settings import OPTIMIZER, Settings


@dataclass(frozen=True)
class FromDeepSpeed(Settings):
    """Settings of flags, and beside them those of the file.

    optimizer: its "type", AdamW or Adam, and options for it; {}: the program's own.
    scheduler: its "type" and all its parameters; {"type": "constant"}; {}: the program's own.
    fp16: all values of the section of that name; {}: the program's own.
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    fp16: dict[str, Any] = field(default_factory=dict)

    def optimizer_class(self) -> type:
        """torch's class."""
        return getattr(torch.optim, self.optimizer.get("type", "AdamW"))

    def optimizer_options(self) -> dict:
        """What it is made with."""
        if not self.optimizer:
            return super().optimizer_options()
        options = {name: value for name, value in self.optimizer.items() if name != "type"}
        options["betas"] = tuple(options["betas"])
        return {"lr": self.lr, **options, "fused": OPTIMIZER["fused"]}

    def learning_rate(self, step: int) -> float:
        """Of a step, from 0 on. With a schedule of the file steps that fp16 skips do not count."""
        schedule = deepspeed_schedules.SCHEDULES.get(self.scheduler.get("type", ""))
        if schedule is None:
            return super().learning_rate(step)
        return schedule(step, self.lr, **self._parameters())

    def scheduled(self, step: int, skipped: int) -> dict:
        """A step's options: DeepSpeed's schedules stand still while fp16 skips."""
        if not self.scheduler:
            return super().scheduled(step, skipped)
        options = {"lr": self.learning_rate(step - skipped)}
        if self.scheduler.get("cycle_momentum"):
            options["betas"] = deepspeed_schedules.momentum(step - skipped, **self._parameters())
        return options

    def _parameters(self) -> dict:
        return {name: value for name, value in self.scheduler.items() if name != "type"}

    def loss_scaler(self, groups: list | None = None) -> LossScaler | None:
        """For fp16."""
        if self.dtype != "fp16" or not self.fp16:
            return super().loss_scaler(groups)
        return DeepSpeedScaler(**self.fp16, groups=groups)


# ---------------------------------------------------------------------------------------- the scale


class DeepSpeedScaler(LossScaler):
    """A loss scale as the section "fp16" describes it. Used like LossScaler, and differs in when it
    moves: only the `hysteresis`-th overflow since the scale last grew halves it.

    loss_scale: a fixed one, that no overflow moves (the step is skipped even so); 0: one that does.
    """

    def __init__(self, loss_scale: float, initial_scale_power: int, loss_scale_window: int,
                 hysteresis: int, consecutive_hysteresis: bool, min_loss_scale: float,
                 groups: list | None = None):
        super().__init__(loss_scale or 2.0**initial_scale_power, loss_scale_window, groups)
        self.fixed, self.smallest = loss_scale > 0, min_loss_scale
        self.hysteresis, self.consecutive = hysteresis, consecutive_hysteresis
        self.left = hysteresis  # overflows from here to the one that halves the scale

    def update(self) -> None:
        """Choose the scale of the next step. Raises: RuntimeError if none is small enough."""
        stepped, overflow = self.decide()
        if stepped and not self.fixed:
            (self.shrink if overflow else self.grow)()

    def shrink(self) -> None:
        """After an overflow."""
        self._good_steps = 0
        if self.left > 1:
            self.left -= 1
        elif self.scale_value == self.smallest:
            raise RuntimeError(f"gradients are infinite or NaN even at a loss scale of "
                               f"{self.scale_value:g}, the file's min_loss_scale: lower the "
                               "learning rate, or train in bf16, which needs no loss scale")
        else:
            self.scale_value = max(self.scale_value / 2, self.smallest)

    def grow(self) -> None:
        """After a good step."""
        self._good_steps += 1
        before = self._good_steps - 1  # DeepSpeed's window begins after the first good step
        full = before > 0 and before % self.growth_interval == 0
        if self.consecutive or full:
            self.left = self.hysteresis
        if full:
            self.scale_value *= 2

    def state_dict(self) -> dict:
        return super().state_dict() | {"left": self.left}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.left = state.get("left", self.hysteresis)
