"""Settings from a DeepSpeed file: its optimizer, schedule and loss scale, which no flag can say.

They do what DeepSpeed 0.19 does with the same values; a test holds them beside its own classes.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_minimal.foundations.precision import LossScaler
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
        """Of a step, from 0 on. (A step that fp16 skips counts here, and not in DeepSpeed.)"""
        schedule = SCHEDULES.get(self.scheduler.get("type", ""))
        if schedule is None:
            return super().learning_rate(step)
        return schedule(step, self.lr, **{k: v for k, v in self.scheduler.items() if k != "type"})

    def loss_scaler(self, groups: list | None = None) -> LossScaler | None:
        """For fp16."""
        if self.dtype != "fp16" or not self.fp16:
            return super().loss_scaler(groups)
        return DeepSpeedScaler(**self.fp16, groups=groups)


# --------------------------------------------------------------------------------------- schedules


def constant(step: int, lr: float) -> float:
    """What DeepSpeed does without a scheduler."""
    return lr


def warmup(step: int, lr: float, *, warmup_min_lr: float, warmup_max_lr: float,
           warmup_num_steps: int, warmup_type: str) -> float:
    """WarmupLR: from one learning rate to another, and there it stays."""
    done = step - 1  # the first two steps have the smallest rate: DeepSpeed moves on after a step
    gamma = warm(done, warmup_num_steps, warmup_type) if done < max(2, warmup_num_steps) else 1.0
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma


def warmup_decay(step: int, lr: float, *, total_num_steps: int, warmup_min_lr: float,
                 warmup_max_lr: float, warmup_num_steps: int, warmup_type: str) -> float:
    """WarmupDecayLR: the same, and then down in a straight line."""
    done, first = step - 1, max(2, warmup_num_steps)
    if done < first:
        gamma = warm(done, warmup_num_steps, warmup_type)
    else:
        gamma = max(0.0, (total_num_steps - done) / max(1.0, total_num_steps - first))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma


def warmup_cosine(step: int, lr: float, *, total_num_steps: int, warmup_min_ratio: float,
                  warmup_num_steps: int, cos_min_ratio: float, warmup_type: str) -> float:
    """WarmupCosineLR: in parts of lr, and down in half a cosine."""
    done, first = step - 1, max(2, warmup_num_steps)
    if done < 0:
        return 0.0
    if done < first:
        ratio = warm(done, warmup_num_steps, warmup_type)
        return lr * (warmup_min_ratio + ratio * (1.0 - warmup_min_ratio))
    progress = min(1.0, (done - first + 1) / max(1, total_num_steps - first))
    half = (1 + math.cos(math.pi * progress)) / 2
    return lr * max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * half)


def warm(done: int, steps: int, kind: str) -> float:
    """How far warm-up is, from 0 to 1, when so many steps were scheduled."""
    steps = max(2, steps)
    if done < 0:
        return 0.0
    return 1 / math.log(steps) * math.log(done + 1) if kind == "log" else done / steps


SCHEDULES = {"constant": constant, "WarmupLR": warmup, "WarmupDecayLR": warmup_decay,
             "WarmupCosineLR": warmup_cosine}


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
        stepped, overflow = bool(self._overflows), any(self._overflows.values())
        self._unscaled.clear()
        self._overflows.clear()
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
