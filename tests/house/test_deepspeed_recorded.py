"""What a DeepSpeed file makes of a run, beside DeepSpeed itself: recorded figures, and a run where it is installed.

DeepSpeed is an optional dependency: what needs it is skipped without it."""

import dataclasses
import importlib.util
import inspect
import json
import random

import deepspeed_runs as runs
import pytest

from zero_minimal.programs import deepspeed_written
from zero_minimal.programs.deepspeed_keys import TABLE
from zero_minimal.programs.planning import plan
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import deepspeed_settings
from zero_minimal.workload.deepspeed_settings import SCHEDULES

pytestmark = pytest.mark.thorough

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None,
                                     reason="DeepSpeed, an optional dependency, is not installed")
RECORDED = json.loads(runs.RECORDED.read_text())
ONLY_THEIRS = {"stage 0, bf16", "stage 0, fp16"}  # of what DeepSpeed does there no other stage does anything
NEAR = {"fp32": 1e-6, "bf16": 3e-4, "fp16": 1e-4}  # measured: 2.4e-7, 6.3e-5, 1.8e-5
GROUPS = {"fp32": [], "bf16": [], "fp16": []}
for each, content in runs.CASES.items():
    GROUPS[next((dtype for dtype in ("bf16", "fp16") if dtype in content), "fp32")].append(each)


def largest(one, other):
    return max(abs(mine - its) for mine, its in zip(one, other, strict=True))


def compared(side, names, recorded=RECORDED["cases"]):
    """(name, figures, recorded ones) of files on a side; learning rates and loss scales agree."""
    for name, found in runs.run(side, {name: runs.CASES[name] for name in names}).items():
        its = recorded[name]
        assert found["scales"] == its["scales"], name
        assert found["rates"] == pytest.approx(its["rates"], rel=1e-12, abs=1e-18), name
        yield name, found, its


# --------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("dtype", GROUPS)
def test_the_stages_make_the_losses_that_deepspeed_made(dtype):
    """All stages, with clipping and accumulation; fp16 with a scale that adapts, and so with skipped steps."""
    names = [name for name in GROUPS[dtype] if name not in ONLY_THEIRS]
    for name, mine, its in compared(runs.ours, names):
        assert largest(mine["losses"], its["losses"]) < NEAR[dtype], name
        assert mine["losses"][-1] < mine["losses"][0] - 0.1, name
        skips = [later < before for before, later in zip(mine["scales"], mine["scales"][1:], strict=False)]
        if dtype == "fp16" and "fixed" not in name:
            assert sum(skips) > 1 and mine["rates"][0] == mine["rates"][1], "the schedule stands still"


def test_deepspeeds_stage_0_in_16_bit_begins_with_a_step_of_zeros():
    """With that step, and fp16's loss scale that divides only, our losses are DeepSpeed's; without they are not."""
    for name, mine, its in compared(runs.copied, sorted(ONLY_THEIRS)):
        assert largest(mine["losses"], its["losses"]) < NEAR[name[-4:]], name
    plain = runs.run(runs.ours, {"stage 0, bf16": runs.CASES["stage 0, bf16"]})["stage 0, bf16"]
    assert largest(plain["losses"], RECORDED["cases"]["stage 0, bf16"]["losses"]) > 0.01


@needs_deepspeed
def test_the_step_of_zeros_is_the_whole_difference():
    """On one machine not a bit differs."""
    contents = {name: runs.CASES[name] for name in ONLY_THEIRS}
    mine, its = runs.run(runs.copied, contents), runs.run(runs.theirs, contents)
    assert mine == its


@needs_deepspeed
@pytest.mark.parametrize("dtype", GROUPS)
def test_deepspeed_makes_what_was_recorded(dtype):
    for name, anew, recorded in compared(runs.theirs, GROUPS[dtype]):
        assert largest(anew["losses"], recorded["losses"]) < NEAR[dtype], name


# --------------------------------------------------------------------------------------------- what `plan` writes


def written(stage, dtype, offload=None):
    """A file of `plan`, with torch's AdamW: DeepSpeed's own wants a GPU, or a compiler."""
    shape = runs.SMALL.model_config()
    told = plan(dataclasses.replace(shape, vocabulary=256), runs.RANKS, 32e9, dtype, 2)
    content = deepspeed_written.deepspeed(shape, told, stage, 2, offload)
    content["optimizer"]["params"]["torch_adam"] = True
    return content


@needs_deepspeed
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_trains_what_is_written(stage):
    """Each dtype; at stage 0 in 16 bit beside our copy of what it does otherwise."""
    contents = {dtype: written(stage, dtype) for dtype in NEAR}
    its = runs.run(runs.theirs, contents)
    mine = runs.run(runs.ours, contents)
    if stage == 0:
        mine |= runs.run(runs.copied, {dtype: contents[dtype] for dtype in ("bf16", "fp16")})
    for dtype, near in NEAR.items():
        assert largest(mine[dtype]["losses"], its[dtype]["losses"]) < near, dtype
        assert mine[dtype]["scales"] == its[dtype]["scales"]


@needs_deepspeed
@pytest.mark.parametrize("stage", range(1, 4))
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("offload", [None, "cpu", "disk"])
def test_deepspeeds_own_sections_take_what_is_written(stage, dtype, offload):
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    content = written(stage, dtype, offload)
    assert DeepSpeedZeroConfig(**content["zero_optimization"]).stage == stage
    assert DeepSpeedFP16Config(**content.get("fp16", {})).enabled == (dtype == "fp16")


# ---------------------------------------------------------------------------------------------------------- schedules


def parameters_of(function):
    """{name: default} of what a section gives to a schedule, or to the scaler; None: none."""
    return {name: None if each.default is each.empty else each.default
            for name, each in inspect.signature(function).parameters.items() if each.kind == each.KEYWORD_ONLY}


@pytest.mark.parametrize(("kind", "params", "recorded"), RECORDED["schedules"])
def test_a_schedule_is_deepspeeds(kind, params, recorded):
    """30 steps of the learning rate, and of Adam's first beta where that moves, as DeepSpeed's class gave them."""
    options = [SCHEDULES[kind](step, runs.LR, **params) for step in range(runs.STEPS)]
    assert [each["lr"] for each in options] == pytest.approx(recorded["rates"], rel=1e-12, abs=1e-18)
    betas = [each["betas"] for each in options if "betas" in each]
    assert bool(betas) == (len(recorded["betas"]) > 1) and {second for _, second in betas} <= {0.99}
    if betas:
        assert [first for first, _ in betas] == pytest.approx(recorded["betas"], rel=1e-12)


def test_every_schedule_is_recorded_with_every_parameter():
    for kind, function in SCHEDULES.items():
        recorded = [params for its_kind, params, _ in RECORDED["schedules"] if its_kind == kind]
        assert set().union(*recorded) == set(parameters_of(function)) and len(recorded) > 10


@needs_deepspeed
def test_deepspeeds_schedules_are_as_recorded():
    assert [[kind, params] for kind, params in runs.SCHEDULES] == [row[:2] for row in RECORDED["schedules"]]
    for kind, params, recorded in RECORDED["schedules"]:
        assert runs.their_schedule(kind, params) == recorded, (kind, params)


@needs_deepspeed
def test_the_defaults_are_deepspeeds():
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config

    for kind, function in SCHEDULES.items():
        its = {name: None if each.default is each.empty else each.default
               for name, each in inspect.signature(getattr(lr_schedules, kind)).parameters.items()}
        of_optimizer = {"warmup_max_lr": its["warmup_max_lr"]} if kind == "WarmupLR" else {}
        assert parameters_of(function) | of_optimizer == {
            name: value for name, value in its.items() if name not in ("optimizer", "last_batch_iteration")}
    its = {name: field.default for name, field in DeepSpeedFP16Config.model_fields.items()}
    ours = parameters_of(deepspeed_settings.DeepSpeedScaler)
    assert ours == {name: its[name] for name in ours}


# ------------------------------------------------------------------------------------------- keys, and the loss scale


@needs_deepspeed
def test_the_table_has_deepspeeds_own_keys():
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, DeepSpeedZeroOffloadOptimizerConfig

    for section, kind in {"fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config, runs.ZERO: DeepSpeedZeroConfig,
                          f"{runs.ZERO}.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig}.items():
        names = {field.alias or name for name, field in kind.model_fields.items()}
        missing = [name for name in names if f"{section}.{name}" not in TABLE]
        assert set(missing) <= {"offload_optimizer"}, missing


@needs_deepspeed
def test_the_scale_moves_as_deepspeeds_does():
    """Over overflows drawn at random, with every kind of hysteresis."""
    from deepspeed import comm
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    draw = random.Random(1)
    comm.get_rank, before = (lambda: 0), comm.get_rank
    try:
        for hysteresis, consecutive, window in ((1, False, 3), (2, False, 4), (3, True, 2)):
            mine = deepspeed_settings.DeepSpeedScaler(
                initial_scale_power=20, loss_scale_window=window, hysteresis=hysteresis,
                consecutive_hysteresis=consecutive, min_loss_scale=2.0)
            its = DynamicLossScaler(2.0**20, window, 2.0, hysteresis, consecutive, raise_error_at_min_scale=False)
            for _ in range(300):
                overflow = draw.random() < 0.3 and its.cur_scale > 2.0
                mine._overflows[Stage2] = overflow  # as its step() does
                mine.update()
                its.update_scale(overflow)
                assert mine.scale_value == its.cur_scale
    finally:
        comm.get_rank = before


def test_a_fixed_scale_stays_and_the_smallest_is_an_end():
    fixed = deepspeed_settings.DeepSpeedScaler(loss_scale=128, loss_scale_window=1)
    for overflow in (False, True, True, False):
        fixed._overflows[Stage2] = overflow
        fixed.update()
    assert fixed.scale_value == 128
    small = deepspeed_settings.DeepSpeedScaler(initial_scale_power=1, hysteresis=1)
    for _ in range(2):
        small._overflows[Stage2] = True
        if small.scale_value == 1:
            with pytest.raises(RuntimeError, match="min_loss_scale"):
                small.update()
        else:
            small.update()
    other = deepspeed_settings.DeepSpeedScaler(hysteresis=3)
    other.left = 2
    small.load_state_dict(other.state_dict())
    assert small.left == 2
