"""Settings from a DeepSpeed file: its optimizer, schedule and loss scale, which no flag can set.

They do what DeepSpeed 0.19 does with the same values, even a schedule's odd first steps. Tests
compare each with DeepSpeed's own class and recorded figures (tests/deepspeed_recorded.json).
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.workload.settings import OPTIMIZER, Settings


@dataclass(frozen=True)
class FromDeepSpeed(Settings):
    """Settings of the flags, and those of the file; {}: the program's own defaults.

    optimizer: its "type", AdamW or Adam, and options for it.
    scheduler: its "type" and all its parameters; {"type": "constant"} is allowed, too.
    fp16: all values of the section of that name.
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    fp16: dict[str, Any] = field(default_factory=dict)

    def optimizer_class(self) -> type:
        """The optimizer's class in torch."""
        return getattr(torch.optim, self.optimizer.get("type", "AdamW"))

    def optimizer_options(self) -> dict:
        """The optimizer's keyword arguments."""
        if not self.optimizer:
            return super().optimizer_options()
        options = {name: value for name, value in self.optimizer.items() if name != "type"}
        return {"lr": self.lr, **options, "betas": tuple(options["betas"]),
                "fused": OPTIMIZER["fused"]}

    def scheduled(self, step: int, skipped: int) -> dict:
        """The options in a step: DeepSpeed's schedules ignore steps that fp16 skips."""
        if not self.scheduler:
            return super().scheduled(step, skipped)
        parameters = {name: value for name, value in self.scheduler.items() if name != "type"}
        schedule = SCHEDULES.get(self.scheduler["type"], constant)
        return schedule(step - skipped, self.lr, **parameters)

    def loss_scaler(self, groups: list | None = None) -> LossScaler | None:
        """The loss scaler, for fp16 only."""
        if self.dtype != "fp16" or not self.fp16:
            return super().loss_scaler(groups)
        return DeepSpeedScaler(groups, **self.fp16)


# ------------------------------------------------------------------------------------ the schedules
# `step` is the number of updates before it, `lr` the optimizer's. A schedule returns the
# optimizer's options in that step; its parameters have DeepSpeed's names and defaults.


def constant(step: int, lr: float) -> dict:
    """What DeepSpeed does without a scheduler."""
    return {"lr": lr}


def warm(step: int, steps: int, kind: str) -> float:
    """The progress of a warm-up of `steps` steps, from 0 to 1; kind: log or linear."""
    done, steps = step - 1, max(2, steps)  # DeepSpeed starts a step late: the first two are equal
    if not 0 <= done < steps:
        return float(done >= steps)
    return 1 / math.log(steps) * math.log(done + 1) if kind == "log" else done / steps


def warmup(step: int, lr: float, *, warmup_min_lr: float = 0.0, warmup_max_lr: float | None = None,
           warmup_num_steps: int = 1000, warmup_type: str = "log") -> dict:
    """WarmupLR: from one learning rate to another (None: lr), then constant."""
    largest = lr if warmup_max_lr is None else warmup_max_lr
    part = warm(step, warmup_num_steps, warmup_type)
    return {"lr": warmup_min_lr + (largest - warmup_min_lr) * part}


def warmup_decay(step: int, lr: float, *, total_num_steps: int, warmup_min_lr: float = 0.0,
                 warmup_max_lr: float = 0.001, warmup_num_steps: int = 1000,
                 warmup_type: str = "log") -> dict:
    """WarmupDecayLR: the same, then down in a straight line to warmup_min_lr."""
    part, first = warm(step, warmup_num_steps, warmup_type), max(2, warmup_num_steps)
    if step > first:
        part = max(0.0, (total_num_steps - step + 1) / max(1.0, total_num_steps - first))
    return {"lr": warmup_min_lr + (warmup_max_lr - warmup_min_lr) * part}


def warmup_cosine(step: int, lr: float, *, total_num_steps: int, warmup_min_ratio: float = 0.0,
                  cos_min_ratio: float = 1e-4, warmup_num_steps: int = 1000,
                  warmup_type: str = "log") -> dict:
    """WarmupCosineLR: ratios of lr; after warm-up, half a cosine down. Step 0 has ratio 0."""
    part, first = warm(step, warmup_num_steps, warmup_type), max(2, warmup_num_steps)
    ratio = warmup_min_ratio + part * (1.0 - warmup_min_ratio) if step else 0.0
    if step > first:
        progress = min(1.0, (step - first) / max(1, total_num_steps - first))
        half = (1 + math.cos(math.pi * progress)) / 2
        ratio = max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * half)
    return {"lr": lr * ratio}


def range_test(step: int, lr: float, *, lr_range_test_min_lr: float = 1e-3,
               lr_range_test_step_size: int = 2000, lr_range_test_step_rate: float = 1.0,
               lr_range_test_staircase: bool = False) -> dict:
    """LRRangeTest: up without end, in a line or in stairs, to see where training diverges."""
    gone = step / lr_range_test_step_size
    gone = math.floor(gone) if lr_range_test_staircase else gone
    return {"lr": lr_range_test_min_lr * (1 + lr_range_test_step_rate * gone)}


def one_cycle(
    step: int, lr: float, *, cycle_min_lr: float, cycle_max_lr: float, decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0, cycle_momentum: bool = True, cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9, decay_mom_rate: float = 0.0,
) -> dict:
    """OneCycle: up, down (None: as many steps and stairs as up; 0 stairs: a line), then slow decay.
    Adam's first beta moves the opposite way, the second is 0.99. (The first beta is the smallest at
    the first step, then the largest.)"""
    up, stairs = cycle_first_step_size, cycle_first_stair_count
    down = up if cycle_second_step_size is None else cycle_second_step_size
    past, within = step - up - down, step % (up + down)
    part = within / up
    if within > up:
        part = (up + down - within) / down
        stairs = stairs if cycle_second_stair_count is None else cycle_second_stair_count
    height = math.floor(part * stairs) / stairs if stairs else part
    rate = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height
    beta = cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height if step else cycle_min_mom
    if past > 0:
        decays = past / decay_step_size if decay_step_size else 0.0
        rate = cycle_min_lr / (1 + decay_lr_rate * decays)
        beta = cycle_max_mom * (1 + decay_mom_rate * decays)
    return {"lr": rate} | ({"betas": (beta, 0.99)} if cycle_momentum else {})


SCHEDULES = {"WarmupLR": warmup, "WarmupDecayLR": warmup_decay, "WarmupCosineLR": warmup_cosine,
             "LRRangeTest": range_test, "OneCycle": one_cycle}


# ---------------------------------------------------------------------------------------- the scale


class DeepSpeedScaler(LossScaler):
    """A loss scale as the section "fp16" describes it. It differs from LossScaler in when it
    changes: only the `hysteresis`-th overflow since the scale last grew halves it.

    loss_scale: a fixed scale, which no overflow changes (the step is still skipped); 0: dynamic.
    consecutive_hysteresis: whether a good step resets the count of overflows.
    """

    def __init__(self, groups: list | None = None, *, loss_scale: float = 0,
                 initial_scale_power: float = 16, loss_scale_window: int = 1000,
                 hysteresis: int = 2, consecutive_hysteresis: bool = False,
                 min_loss_scale: float = 1):
        super().__init__(loss_scale or 2.0**initial_scale_power, loss_scale_window, groups)
        self.fixed, self.smallest = loss_scale > 0, min_loss_scale
        self.hysteresis, self.consecutive = hysteresis, consecutive_hysteresis
        self.left = hysteresis  # overflows until the scale is halved, that one included

    def update(self) -> None:
        """Choose the scale of the next step. Raises: RuntimeError if none is small enough."""
        stepped, overflow = self.decide()
        if stepped and not self.fixed:
            (self.shrink if overflow else self.grow)()

    def shrink(self) -> None:
        """Change the scale after an overflow."""
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
        """Change the scale after a good step."""
        before = self._good_steps  # DeepSpeed's window begins after the first good step
        self._good_steps += 1
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
