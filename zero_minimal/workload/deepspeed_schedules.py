"""DeepSpeed's schedules: the learning rate of a step, as a file's section "scheduler" describes it.

    rate = SCHEDULES["WarmupLR"](step, lr, **parameters)
    betas = momentum(step, **parameters)                # OneCycle moves Adam's, too

A step is the number of updates before it: DeepSpeed's schedules stand still while fp16 skips. They
do what DeepSpeed 0.19 does with the same parameters, its odd first steps too: a test holds each
beside its own class, and beside figures recorded from that (tests/deepspeed_recorded.json).
"""

import math
from typing import Any

NEEDED = "needed"  # a parameter without a default
OF_OPTIMIZER = "of the optimizer"  # its learning rate is the default

_WARM_UP = {"warmup_num_steps": 1000, "warmup_type": "log"}

PARAMETERS: dict[str, dict[str, Any]] = {  # of each schedule, with DeepSpeed's defaults
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": OF_OPTIMIZER, **_WARM_UP},
    "WarmupDecayLR": {
        "total_num_steps": NEEDED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARM_UP},
    "WarmupCosineLR": {
        "total_num_steps": NEEDED, "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4, **_WARM_UP},
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False},
    "OneCycle": {
        "cycle_min_lr": NEEDED, "cycle_max_lr": NEEDED, "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000, "cycle_second_step_size": None,
        "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0,
        "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0},
}
CHOICES = {"warmup_type": ("log", "linear")}
WHOLE = {  # parameters that count, and the least that they may be
    "warmup_num_steps": 1, "total_num_steps": 1, "lr_range_test_step_size": 1,
    "cycle_first_step_size": 1, "cycle_second_step_size": 0, "cycle_first_stair_count": 0,
    "cycle_second_stair_count": 0, "decay_step_size": 0,
}


def constant(step: int, lr: float) -> float:
    """What DeepSpeed does without a scheduler."""
    return lr


# ------------------------------------------------------------------------------------------ warm-up


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


# ------------------------------------------------------------------------------- ranges and a cycle


def range_test(step: int, lr: float, *, lr_range_test_min_lr: float, lr_range_test_step_size: int,
               lr_range_test_step_rate: float, lr_range_test_staircase: bool) -> float:
    """LRRangeTest: up without end, to see where training breaks."""
    gone = step / lr_range_test_step_size
    return lr_range_test_min_lr * (
        1 + lr_range_test_step_rate * (math.floor(gone) if lr_range_test_staircase else gone))


def one_cycle(step: int, lr: float, *, cycle_min_lr: float, cycle_max_lr: float,
              decay_lr_rate: float, **cycle: Any) -> float:
    """OneCycle: up, down, and then less and less."""
    decayed = decay_steps(step, **cycle)
    if decayed is None:
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height(step, **cycle)
    return cycle_min_lr / (1 + decay_lr_rate * decayed)


def momentum(step: int, *, cycle_min_mom: float, cycle_max_mom: float, decay_mom_rate: float,
             **cycle: Any) -> tuple[float, float]:
    """Adam's betas in OneCycle: the first moves against the learning rate, the second is 0.99. (At
    the very first step DeepSpeed has the smallest, and goes on from the largest.)"""
    decayed = decay_steps(step, **cycle)
    if step == 0:
        beta = cycle_min_mom
    elif decayed is None:
        beta = cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height(step, **cycle)
    else:
        beta = cycle_max_mom * (1 + decay_mom_rate * decayed)
    return beta, 0.99


def halves(cycle: dict) -> tuple[int, int]:
    """Steps up, steps down."""
    first, second = cycle["cycle_first_step_size"], cycle["cycle_second_step_size"]
    return first, first if second is None else second


def decay_steps(step: int, **cycle: Any) -> float | None:
    """How often it has decayed since the cycle ended; None while it lasts."""
    past = step - sum(halves(cycle))
    if past <= 0:
        return None
    size = cycle["decay_step_size"]
    return past / size if size else 0.0


def height(step: int, **cycle: Any) -> float:
    """How high in the cycle, from 0 to 1."""
    first, second = halves(cycle)
    stairs = cycle["cycle_first_stair_count"]
    within = step % (first + second)
    rises = within <= first
    if not rises and cycle["cycle_second_stair_count"] is not None:
        stairs = cycle["cycle_second_stair_count"]
    part = within / first if rises else (first + second - within) / second
    return math.floor(part * stairs) / stairs if stairs else part


SCHEDULES = {"constant": constant, "WarmupLR": warmup, "WarmupDecayLR": warmup_decay,
             "WarmupCosineLR": warmup_cosine, "LRRangeTest": range_test, "OneCycle": one_cycle}
