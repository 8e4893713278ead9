"""--deepspeed-config: what is taken of a file, said of the rest, and refused; and what `plan` writes as one.

test_deepspeed_recorded.py has the same files beside DeepSpeed itself."""

import contextlib
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from types import SimpleNamespace

import checks
import deepspeed_runs as runs
import pytest
import torch

from zero_minimal import __main__ as program_main
from zero_minimal.processes import ranks
from zero_minimal.programs import configs, deepspeed_keys, deepspeed_written, train
from zero_minimal.programs.deepspeed import Wanted
from zero_minimal.programs.deepspeed_keys import TABLE, Ignored, OfMesh, Refused, Taken
from zero_minimal.programs.planning import plan
from zero_minimal.programs.registry import STAGES
from zero_minimal.stage0 import Stage0
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import loop
from zero_minimal.workload.deepspeed_settings import FromDeepSpeed
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import System

SMALL = dataclasses.replace(runs.SMALL, steps=6)
AUTO, MB, ZERO = "auto", 2**20, "zero_optimization"
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}


@pytest.fixture
def file_of(tmp_path):
    def write(content):
        file = tmp_path / "ds.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(file)

    return write


def wanted(file, ranks=1, given=None):
    given = given or {}
    return Wanted(deepspeed_keys.read(file), given, runs.DEFAULTS | given, ranks)


def settings_of(file):
    asked = wanted(file)
    return asked.settings(dataclasses.replace(SMALL, **{
        name: value for name, value in asked.flags.items() if name in Settings.__dataclass_fields__}))


def zero(stage, **more):
    return {ZERO: {"stage": stage, **more}}


def adam(kind="AdamW", **params):
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


# ----------------------------------------------------------------------------------------------------- all the keys

BESIDE = {"optimizer": {"optimizer.type": "Adam"}, "scheduler": {"scheduler.type": "WarmupLR"}}  # what a key needs


def test_the_table_has_each_key_once():
    assert Counter(map(type, TABLE.values())) == {Refused: 33, Ignored: 86, OfMesh: 3, Taken: 51}


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if not isinstance(row, Taken)])
def test_a_key_is_refused_or_ignored_and_why(name):
    """With any value but those with which there is nothing to say."""
    row, beside = TABLE[name], BESIDE.get(name.partition(".")[0], {})
    if isinstance(row, Refused):
        with pytest.raises(ValueError, match=re.escape(f'{name} = "other" is not possible here: {row.why}')):
            Wanted(beside | {name: "other"}, {}, runs.DEFAULTS, 1)
    else:
        of_stage, of_mesh = (Wanted(beside | {name: "other"}, {}, runs.DEFAULTS, 1, mesh).notes
                             for mesh in (False, True))
        said = f"{name} is ignored: {row.why}"
        assert said in of_stage and (said in of_mesh) != isinstance(row, OfMesh)
    for value in row.same:
        notes = Wanted(beside | {name: value}, {}, runs.DEFAULTS, 1).notes
        assert not [note for note in notes if note.startswith(f"{name} ")]


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if isinstance(row, Taken)])
def test_a_key_that_is_taken_refuses_values_of_another_kind(name, file_of):
    words, _ = TABLE[name].kind
    for value in ({}, [], -2, *(["other"] if "folder" not in words else []), *([True] if "true" not in words else [])):
        content = value
        for key in reversed(name.split(".")):
            content = {key: content}
        with pytest.raises(ValueError, match=re.escape(f"{name} {words}, not {json.dumps(value)}")):
            deepspeed_keys.read(file_of(content))


@pytest.mark.parametrize(("name", "good", "bad", "words"), [
    ("train_batch_size", (1, 8.0), (0, 2.5, math.inf), "must be a whole number from 1 up"),
    ("scheduler.params.decay_step_size", (0, 3), (-1, 0.5), "must be a whole number from 0 up"),
    ("gradient_clipping", (0, 0.5), (-0.1, math.nan), "must be a number from 0 up"),
    ("fp16.min_loss_scale", (2.0**-24, 1), (0, 1e-9), "must be a number from 5.960464477539063e-08 up"),
    ("optimizer.params.betas", ([0, 0.99],), ([0.9], [0.9, 1], [True, 0.5], 0.9), "must be two numbers from 0 to"),
    ("zero_optimization.stage", (0, 3), (4, 1.5), "must be one of 0, 1, 2, 3"),
    ("bf16.enabled", (True, False), (1, 0), "must be one of false, true"),
    ("scheduler.params.warmup_type", ("log", "linear"), ("cosine",), 'must be one of "log", "linear"'),
    ("optimizer.type", ("AdamW", "adam"), ("AdamX", 3), 'must be one of "AdamW", "Adam"'),
    ("zero_optimization.offload_optimizer.device", ("none", "cpu"), ("gpu",), 'must be one of "none", "cpu", "nvme"'),
])
def test_a_key_takes_values_of_its_kind(name, good, bad, words):
    said, fits = TABLE[name].kind
    assert said.startswith(words)
    assert all(map(fits, good)) and not any(map(fits, bad))


# ------------------------------------------------------------------------------------- files as people write them
# the keys and values of public repositories and DeepSpeed's documentation, each in a file of our own

TRAINER = {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "train_batch_size": AUTO,
           "train_micro_batch_size_per_gpu": AUTO}
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
ADAMW = adam(lr=AUTO, betas=AUTO, eps=AUTO, weight_decay=AUTO)
WARM_UP = schedule("WarmupLR", warmup_min_lr=AUTO, warmup_max_lr=AUTO, warmup_num_steps=AUTO)
CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = {"allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
           "reduce_bucket_size": 2e8, "contiguous_gradients": True}
UNITS = {"sub_group_size": 1e9, "stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO,
         "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
         "stage3_gather_16bit_weights_on_model_save": True}
OF_ACTIVATIONS = {"partition_activations": True, "cpu_checkpointing": False, "profile": False, "number_checkpoints": 4}
SAID = "gradient_clipping is not there: clipped at 1.0"
CONSTANT = "no scheduler: the learning rate stays"
NO_FLAG = ('"auto" is DeepSpeed\'s default for optimizer.params.betas, optimizer.params.eps, '
           "optimizer.params.weight_decay, scheduler.params.warmup_min_lr, scheduler.params.warmup_num_steps: no flag")
READ = {  # (file, ranks, flags on the command line, what it becomes, how all notes begin); "auto" is a flag or named
    "Trainer, stage 2 with offload": (
        TRAINER | {"fp16": {"enabled": AUTO} | SCALE} | ADAMW | WARM_UP | zero(2, offload_optimizer=CPU, **BUCKETS)
        | {"steps_per_print": 2000, "wall_clock_breakdown": False}, 2,
        {"dtype": "fp16", "batch": 3, "lr": 5e-4, "clip": 0.5},
        {"dtype": "fp16", "batch": 3, "accumulate": 1, "offload": "cpu", "bucket_mb": 4e8 / MB, "lr": 5e-4, "clip": 0.5,
         "warmup_max_lr": 5e-4, "betas": [0.9, 0.999], "warmup_num_steps": 1000}, ["steps_per_print", NO_FLAG]),
    "Trainer, stage 3 with both offloads": (
        TRAINER | {"fp16": {"enabled": AUTO} | SCALE, "bf16": {"enabled": AUTO}}
        | zero(3, offload_optimizer=CPU, offload_param=CPU, overlap_comm=True, reduce_bucket_size=AUTO, **UNITS), 4,
        {"dtype": "bf16", "clip": 0.5}, {"dtype": "bf16", "clip": 0.5, "offload": "cpu", "batch": 4},
        [*(f"{ZERO}.{key}" for key in UNITS), f"{ZERO}.offload_param"]),
    "Trainer, stage 3, NVMe": (
        TRAINER | BF16 | {"aio": {"block_size": 262144, "single_submit": False}} | zero(3, offload_optimizer={
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}),
        1, {}, {"offload": "disk:/local_nvme", "dtype": "bf16", "clip": 0.0},
        ["aio", f"{ZERO}.offload_optimizer.buffer_count"]),
    "Accelerate, no optimizer": (
        {"train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0} | BF16
        | {"zero_allow_untested_optimizer": True, "sparse_attention": None} | zero(
            2, offload_optimizer={"device": "none"}, offload_param={"device": "none"}), 2, {},
        {"accumulate": 2, "offload": None, "clip": 1.0}, []),
    "DeepSpeed's tutorial, CIFAR": (
        {"train_batch_size": 16, "gradient_clipping": 1.0, "prescale_gradients": False,
         "fp16": {"enabled": True, "fp16_master_weights_and_grads": False, "auto_cast": False} | SCALE}
        | adam("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7)
        | schedule("WarmupLR", last_batch_iteration=-1, warmup_min_lr=0, warmup_max_lr=0.001, warmup_num_steps=1000)
        | zero(0, cpu_offload=False, **BUCKETS), 2, {},
        {"batch": 8, "lr": 0.001, "dtype": "fp16", "bucket_mb": 4e8 / MB}, ["stage 0 in fp16: DeepSpeed's own begins "
         "with an Adam step on gradients of 0, and divides gradients by a loss scale that its loss never had, so"]),
    "DeepSpeed's 1-cycle tutorial": (
        {"train_batch_size": 8} | adam("Adam") | schedule(
            "OneCycle", cycle_first_step_size=16000, cycle_first_stair_count=8000, decay_step_size=16000,
            cycle_min_lr=0.0001, cycle_max_lr=0.001, decay_lr_rate=0.001, cycle_min_mom=0.85, cycle_max_mom=0.99,
            decay_mom_rate=0.0), 1, {}, {"batch": 8, "lr": 1e-3, "cycle_max_mom": 0.99}, [SAID]),
    "DeepSpeed's range test tutorial": (
        {"train_micro_batch_size_per_gpu": 4} | schedule(
            "LRRangeTest", lr_range_test_min_lr=0.0001, lr_range_test_step_size=200, lr_range_test_step_rate=5,
            lr_range_test_staircase=False) | zero(1), 2, {}, {"batch": 4, "accumulate": 1, "clip": 1.0}, [SAID]),
    "DeepSpeed-Chat": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0,
         "hybrid_engine": {"enabled": False, "max_out_tokens": 512}, "tensorboard": {"enabled": False},
         "elasticity": {"enabled": False}, "amp": {"enabled": False}, "fp16": {"enabled": False, "auto_cast": True}}
        | BF16 | zero(3, offload_param={"device": "none"}, offload_optimizer={"device": "none", "pin_memory": False},
                      memory_efficient_linear=False), 8, {},
        {"accumulate": 2, "batch": 2, "offload": None, "clip": 0.0}, [f"{ZERO}.memory_efficient_linear"]),
    "a profiled run with monitors, and activations in parts": (
        {"train_batch_size": 8, "dump_state": True, "prescale_gradients": True, "flops_profiler": {"enabled": True},
         "wandb": {"enabled": True, "project": "p"}, "activation_checkpointing": OF_ACTIVATIONS} | zero(
            2, allgather_bucket_size=MB, reduce_bucket_size=AUTO), 2, {}, {"batch": 4, "clip": 1.0, "bucket_mb": 4.0},
        ["dump_state", "prescale_gradients", "flops_profiler", "wandb", SAID,
         *(f"activation_checkpointing.{key}" for key in ("partition_activations", "number_checkpoints"))]),
    "two sizes of buckets": (
        {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}} | BF16 | zero(
            1, reduce_bucket_size=500000000, allgather_bucket_size=200000000, round_robin_gradients=True), 2, {},
        {"bucket_mb": 1e9 / MB}, [SAID, f"{ZERO}.allgather_bucket_size is ignored: a bucket here is reduced and"]),
    "stage 3 with buckets": (
        BF16 | zero(3, reduce_bucket_size=5e8, zero_hpz_partition_size=8, mics_shard_size=-1), 2, {},
        {"bucket_mb": None}, [SAID, f"{ZERO}.reduce_bucket_size is ignored: at stage 3 a unit (a block) is a bucket",
                              f"{ZERO}.zero_hpz_partition_size"]),
    "24 sequences, in 2 micro-batches": (
        {"train_batch_size": 24, "gradient_accumulation_steps": 2}, 3, {}, {"batch": 4, "accumulate": 2}, [SAID]),
    "24 sequences, 4 at once": (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, {}, {"batch": 4, "accumulate": 3}, [SAID]),
    "24 sequences": ({"train_batch_size": 24}, 4, {}, {"batch": 6, "accumulate": 1}, [SAID]),
    "32 sequences, as many at once as the flag says": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": AUTO}, 2, {"batch": 8},
        {"batch": 8, "accumulate": 2}, [SAID]),
    "nothing": ({}, 1, {}, {"batch": SMALL.batch, "accumulate": 1, "dtype": "fp32", "clip": 1.0}, [SAID]),
    "fp16": (FP16 | {"bf16": {"enabled": False}} | zero(1), 1, {"clip": 1.0}, {"dtype": "fp16"}, []),
    "neither": ({"fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}}, 1, {"clip": 1.0}, {"dtype": "fp32"}, []),
    "stage 0 in bf16": (BF16 | zero(0), 1, {"clip": 1.0}, {}, ["stage 0 in bf16: DeepSpeed's own begins with an Adam "
                                                             "step on gradients of 0, so its losses are others"]),
    "AdamW": (adam("AdamW"), 1, {"clip": 1.0}, {"weight_decay": 0.0, "type": "AdamW", "lr": 1e-3}, [CONSTANT]),
    "torch's": (adam("adamw", torch_adam=True), 1, {"clip": 1.0}, {"weight_decay": 0.01, "type": "AdamW"}, [CONSTANT]),
    "Adam": (adam("Adam", weight_decay=0.3), 1, {"clip": 1.0}, {"weight_decay": 0.3, "type": "AdamW"}, [CONSTANT]),
    "a decay as long as the run": (
        schedule("WarmupDecayLR", total_num_steps=AUTO, warmup_max_lr=AUTO), 1, {"steps": 30, "lr": 1e-2},
        {"total_num_steps": 30, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 1000,
         "warmup_type": "log"}, [SAID]),
    "a scale that is auto": (
        {"fp16": {"enabled": AUTO} | dict.fromkeys(SCALE, AUTO)} | zero(1), 1, {"dtype": "fp16", "clip": 1.0},
        {"initial_scale_power": 16}, ['"auto" is DeepSpeed\'s default for fp16.loss_scale, fp16.initial_scale_power, '
                                      "fp16.loss_scale_window, fp16.hysteresis, fp16.min_loss_scale: no flag says it"]),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_and_each_key_it_has_for_nothing_is_named(name, file_of):
    content, world_size, given, becomes, notes = READ[name]
    asked = wanted(file_of(content), world_size, given)
    found = asked.scheduler | asked.optimizer | asked.fp16 | asked.flags
    assert {each: found.get(each) for each in becomes} == becomes
    assert asked.stage == content.get(ZERO, {}).get("stage", 0) and len(asked.notes) == len(notes)
    assert all(any(note.startswith(begins) for note in asked.notes) for begins in notes)


TOTAL = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
REFUSED = [  # (file, flags on the command line, the line); two ranks
    (TOTAL, {}, "train_batch_size 24 is not train_micro_batch_size_per_gpu × gradient_accumulation_steps × 2 data"),
    ({"train_batch_size": 9}, {}, "2 data-parallel ranks: 4 × 1 × 2 = 8"),
    ({"train_batch_size": 16}, {"batch": 3}, "3 × 2 × 2 = 12; one of the three is wrong"),
    ({"train_micro_batch_size_per_gpu": 4}, {"batch": 8}, "makes --batch 4, and the command line has --batch 8"),
    ({"gradient_clipping": 1}, {"clip": 0.5}, "makes --clip 1, and the command line has --clip 0.5"),
    (BF16, {"dtype": "fp16"}, "bf16.enabled makes --dtype bf16, and the command line has --dtype fp16"),
    ({"bf16": {"enabled": False}}, {"dtype": "bf16"}, "makes --dtype fp32"),
    (zero(0, reduce_bucket_size=MB), {"bucket_mb": 25.0}, "makes --bucket-mb 4,"),
    (zero(1, offload_optimizer={"device": "cpu"}), {"offload": "disk:/x"}, "makes --offload cpu"),
    (adam(lr=1e-5), {"lr": 1e-4}, "makes --lr 1e-05, and the command line has"),
    (BF16 | FP16, {}, "fp16 and bf16 are both enabled"),
    (BF16 | {"communication_data_type": "fp32"}, {}, 'communication_data_type is "fp32", and parameters are bf16'),
    (BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, {}, 'data_types.grad_accum_dtype is "fp32", and parameters'),
    ({"data_types": {"param_dtype": "fp16"}}, {}, 'data_types.param_dtype is "fp16", and parameters are fp32'),
    ({ZERO: 2}, {}, "zero_optimization must be an object, {…}, of DeepSpeed's keys, not 2"),
    (zero(0, stge=2), {}, "DeepSpeed has no key zero_optimization.stge: did you mean zero_optimization.stage?"),
    ({"train_batchsize": 2}, {}, "did you mean train_batch_size?"),
    ({"zero_optimisation": {}}, {}, "did you mean zero_optimization?"),
    ({"gradient_checkpointing": True}, {}, "DeepSpeed has no key gradient_checkpointing"),
    ({"stage": 2}, {}, "DeepSpeed has no key stage: did you mean zero_optimization.stage?"),
    (zero(0, gradient_clipping=1), {}, "no key zero_optimization.gradient_clipping: did you mean gradient_clipping?"),
    ({"bf16": {"enabled": True, "loss_scale": 0}}, {}, "no key bf16.loss_scale: did you mean fp16.loss_scale?"),
    (zero(0, cpu_offload=True), {}, "cpu_offload = true is not possible here: an old name: write offload_optimizer"),
    (adam(max_grad_norm=1.0), {}, "optimizer.params.max_grad_norm = 1.0 is not possible here: write gradient_clipping"),
    ({"curriculum_learning": {"enabled": True}}, {}, 'curriculum_learning = {"enabled": true} is not possible here'),
    (zero(0, offload_optimizer={"device": "nvme"}), {}, "nvme_path: it must name a folder"),
    ({"optimizer": {"params": {"freeze": 1}, "type": "OneBitAdam"}}, {}, 'must be one of "AdamW", "Adam", not "OneBit'),
    ({"optimizer": {"params": {"lr": 1}}}, {}, 'an optimizer needs optimizer.type: it must be one of "AdamW", "Adam"'),
    ({"scheduler": {"params": {"warmup_min_lr": 1}}}, {}, "a scheduler needs scheduler.type: it must be one of"),
    (schedule("CosineAnnealingLR", T_max=10), {}, 'must be one of "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRR'),
    (schedule("OneCycle"), {}, "OneCycle needs scheduler.params.cycle_min_lr: it must be a number from 0 up"),
    (schedule("WarmupDecayLR"), {}, 'total_num_steps: it must be a whole number from 1 up, or be "auto", for --steps'),
    (schedule("WarmupLR", last_batch_iteration=9), {}, "a run goes on with --resume"),
    (schedule("WarmupLR", total_num_steps=3), {}, "WarmupLR has no scheduler.params.total_num_steps: it has warmup"),
    ("{", {}, "it is not JSON"), ("[]", {}, "it must be an object"), ('{"bf16": {"enabled": True}}', {}, "not JSON"),
    ('{"bf16": {},\n  // of all\n  "fp16": {}}', {}, "comments and commas at an end are not read here"),
    ('{"bf16": {"enabled": true,},}', {}, "comments and commas at an end"),
    ('{"zero_optimization": {"stage": 3, "stage": 3}}', {}, "stage stands there twice"),
]


@pytest.mark.parametrize(("content", "given", "line"), REFUSED)
def test_a_file_is_refused_with_the_right_line(content, given, line, file_of):
    with pytest.raises(ValueError) as refused:
        wanted(file_of(content), 2, given)
    assert line in str(refused.value)


def test_what_no_flag_says_is_in_the_settings(file_of):
    settings = settings_of(file_of({"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 3}} | adam(
        "Adam", lr=1e-2, adam_w_mode=False, betas=[0.8, 0.9])))
    assert settings.optimizer_class() is torch.optim.Adam
    assert settings.optimizer_options() == {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0,
                                            "fused": True}
    scaler = settings.loss_scaler()
    assert (scaler.scale_value, scaler.growth_interval, scaler.hysteresis) == (256, 1000, 3)
    assert [settings.scheduled(step, 0) for step in (0, 3)] == [{"lr": 1e-2}] * 2  # as DeepSpeed, without a scheduler
    plain = settings_of(file_of({}))
    assert plain.optimizer_options() == SMALL.optimizer_options() and plain.optimizer_class() is torch.optim.AdamW
    assert [plain.scheduled(step, 1) for step in range(6)] == [SMALL.scheduled(step, 1) for step in range(6)]


# ----------------------------------------------------------------------------------------------------- the programs

TO_HOST, CUT = ({"activation_checkpointing": {key: True}} for key in ("cpu_checkpointing", "partition_activations"))
IS_CUT = "--config C4"  # by its keys; it goes as far as to see that one rank is no mesh


@pytest.mark.parametrize(("main", "argument", "content", "flags", "said"), [
    (train.main, Stage2, zero(3), "", "Stage2 is stage 2: start zero_minimal/stage3.py with this file"),
    (train.main, Stage3, {}, "", "start zero_minimal/stage0.py"),
    (train.main, Stage0, {ZERO: {"offload_optimizer": {"device": "cpu"}}}, "", "--offload is for stage1.py, stage2.py"),
    (train.main, Stage0, {"train_batch_size": 3}, "--batch 2", "2 × 1 × 1 = 2; one of the three is wrong"),
    (train.main, Stage0, {}, "--deepspeed-config none.json", "none.json: it cannot be read: No such file"),
    (configs.main, System, zero(3), "", "none of C1, C2, C3, C4, C5 is stage 3"),
    (configs.main, System, zero(2), "--config C4", "makes --config C3, and the command line has --config C4"),
    (configs.main, System, zero(1, offload_optimizer={"device": "cpu"}), "", "no offload of optimizer"),
    (configs.main, System, zero(1) | TO_HOST, "", "stage 1 with cpu_checkpointing"),
    (configs.main, System, zero(2) | CUT, "", IS_CUT),
])
def test_a_program_that_does_not_fit_says_so(main, argument, content, flags, said, file_of, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "--deepspeed-config", file_of(content), *flags.split()])
    with pytest.raises(SystemExit):
        main(argument)
    words = capsys.readouterr().err
    assert said in words
    assert said != IS_CUT or "1 ranks are not D × 2" in words and "partition_activations" not in words


# ------------------------------------------------------------------------------------------------------ what is written


SHAPE = SMALL.model_config()


def planned(dtype="fp32", batch=2):
    return plan(dataclasses.replace(SHAPE, vocabulary=256), 2, 32e9, dtype, batch)


def fsdp2_losses(lines, stage, accumulate, rank):
    """Losses of three steps of the lines that are printed, run as they are; and what the last of them gathers and
    reduces, in units."""
    same = dataclasses.replace(SMALL, batch=2)
    torch.manual_seed(same.seed)
    losses, batches = [], iter(loop.training_batches(same, rank.rank))
    with_grad = GPT.__call__

    class Told(GPT):
        def __call__(self, *tokens):
            loss = with_grad(self, *tokens)
            losses.append(loss.item())
            return loss

    found = {"model": Told(same.model_config()), "batches": batches}
    set_up, step = lines.split("\n\nfor micro")
    exec(set_up, found)
    for _ in range(3):
        with checks.Calls() as calls:
            exec("for micro" + step, found)
    made, units = Counter(call.name for call in calls.made), same.layers + 1
    return loop.mean_over_ranks(losses, rank), [made[name] / units for name in ("all_gather", "reduce_scatter")]


def beside_fsdp2(cases):
    """{case: losses of micro-batches of FSDP2's lines, and of the stage}"""
    with ranks.start() as rank:
        found = {}
        for stage, accumulate in cases:
            lines = deepspeed_written.fsdp2(planned(), stage, accumulate)
            theirs, sent = fsdp2_losses(lines, stage, accumulate, rank)
            same = dataclasses.replace(SMALL, batch=2, accumulate=accumulate, steps=3)
            same = FromDeepSpeed(**vars(same), scheduler={"type": "constant"})
            zero = loop.build(STAGES[stage], same, rank)
            mine = [part.item() * accumulate for parts in loop.steps(zero, loop.training_batches(same, rank.rank), same)
                    for part in parts]
            found[stage, accumulate] = theirs, loop.mean_over_ranks(mine, rank), sent
        return found


@pytest.mark.thorough
def test_fsdp2s_lines_run_and_train_as_the_stage_does():
    """The printed lines, executed: at stage 1 with micro-batches that are not reduced."""
    units = SMALL.layers + 1
    # in units: all-gathers and reduce-scatters of a step. At stage 3 backward finds the root whole
    cases = {(0, 2): (0, 0), (1, 2): (1, 1), (2, 2): (1, 2), (3, 2): (2 * (2 - 1 / units), 2)}
    for case, (theirs, mine, sent) in ranks.run(beside_fsdp2, 2, list(cases), device="cpu", timeout=100)[0].items():
        assert len(theirs) == 3 * case[1] and sent == pytest.approx(cases[case]), (case, sent)
        assert theirs == pytest.approx(mine, abs=1e-5), case


@pytest.mark.parametrize(("dtype", "stage", "offload", "accumulate"), [
    ("fp32", 0, None, 1), ("bf16", 1, "cpu", 2), ("fp16", 2, None, 4), ("bf16", 3, None, 1), ("fp16", 3, "disk", 2),
])
def test_what_is_written_is_read_as_the_stages_own_defaults(dtype, stage, offload, accumulate, file_of):
    content = deepspeed_written.deepspeed(SHAPE, planned(dtype), stage, accumulate, offload)
    asked = wanted(file_of(content), ranks=2)
    flags = {"batch": 2, "accumulate": accumulate, "dtype": dtype, "clip": 0.0, "lr": Settings.lr}
    if stage < 3:
        flags["bucket_mb"] = Settings.bucket_mb
    place = {"cpu": "cpu", "disk": "disk:/local_nvme"}.get(offload)
    assert asked.flags == flags | ({"offload": place} if place else {}) and asked.stage == stage
    settings = asked.settings(dataclasses.replace(SMALL, dtype=dtype))
    assert settings.optimizer_options() == SMALL.optimizer_options() | {"eps": 1e-8}
    if dtype == "fp16":
        scaler = settings.loss_scaler()
        assert (scaler.scale_value, scaler.growth_interval, scaler.left) == (2.0**16, 2000, 1)
        assert all(isinstance(value, int) for value in content["fp16"].values()), "DeepSpeed takes whole numbers only"
    assert all("is ignored: at stage 3" in note or "stage3_" in note or "no scheduler" in note for note in asked.notes)


ON_DISK = "DeepSpeed (0.19) keeps the state in memory all the same"
BILLION = "--params 1B --ranks 2 --dtype bf16"
LARGE = "--params 7.5B --ranks 64 --dtype bf16 --accumulate 4"


@pytest.mark.parametrize(("asked", "stage", "batch", "device", "said"), [
    # Its stage_1_and_2.py (0.19.8) does the same for any device
    *((f"{BILLION} --offload disk --stage {stage}", stage, 2, "nvme", [f"At stage {stage} {ON_DISK}"])
      for stage in (1, 2)), (f"{BILLION} --offload disk --stage 3", 3, 2, "nvme", []),
    (f"{BILLION} --mp 2 --stage 3", 3, 1, None, ["The stage scripts refuse it: they cut no model (--mp)"]),
    (LARGE, 2, 256, None, ["stage 2 is written", "(but its vocabulary is bytes, 256): torchrun --nnodes 4 "
                           "--nproc-per-node 16 \\ ", "fully_shard(block, reshard_after_forward=False, mp_policy="]),
    (f"{LARGE} --stage 3 --offload disk", 3, 256, "nvme", ["CPUOffloadPolicy()", "reshard_after_forward=True"]),
])
def test_plan_writes_the_stage_that_fits_or_the_one_asked_for(asked, stage, batch, device, said, tmp_path, capsys):
    file = tmp_path / "ds.json"
    program_main.main(["plan", *asked.split(), "--write-deepspeed-config", str(file)])
    words, content = " ".join(capsys.readouterr().out.split()), json.loads(file.read_text())
    assert content[ZERO]["stage"] == stage and content["train_batch_size"] == batch
    assert content[ZERO].get("offload_optimizer", {}).get("device") == device
    assert all(part in words for part in said) and (ON_DISK in words) == (device == "nvme" and stage < 3)
    notes = wanted(str(file), batch // content["gradient_accumulation_steps"]).notes
    assert (ON_DISK in " ".join(notes)) == (ON_DISK in words)


@pytest.mark.parametrize(("asked", "said"), [
    ("--params 1T --ranks 64 --write-deepspeed-config ds.json", "no stage fits"),
    ("--params 1B --stage 2", "--write-deepspeed-config"),
    (f"{LARGE} --stage 0 --offload cpu --write-deepspeed-config ds.json", "stage 0 has no shards"),
])
def test_plan_writes_nothing_else(asked, said, capsys):
    with pytest.raises(SystemExit):
        program_main.main(["plan", *asked.split()])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("asked", (
    "", "--recompute", "--heads 4 --ranks 6 --node 4", "--stage 3 --batch 3 --accumulate 2 --dtype fp16 --offload cpu",
    "--params 3M --sequence 128 --stage 1"))
def test_the_command_that_plan_prints_trains_what_was_planned(asked, tmp_path, capsys, monkeypatch):
    """Layers, heads, recomputation … of the model, and what is in the file: batch, dtype, ranks."""
    file, told = tmp_path / "ds.json", tmp_path / "plan.json"
    sizes = "" if "--params" in asked else "--layers 6 --hidden 256 --vocabulary 256 --sequence 64"
    program_main.main(["plan", *f"{sizes} --batch 4 --ranks 2 --dtype bf16 --stage 2 {asked}".split(),
                       "--json", str(told), "--write-deepspeed-config", str(file)])
    [command] = re.findall(r"    torchrun .*?\n\n", capsys.readouterr().out, re.DOTALL)
    launcher, flags = command.replace("\\\n", " ").split(" zero_minimal/stage")
    stage, flags = flags.split(".py ")
    planned = json.loads(told.read_text())
    assert math.prod(map(int, re.findall(r"--\S+ (\d+)", launcher))) == planned["ranks"]

    seen = []
    monkeypatch.setattr(train, "train", lambda *given: seen.append(given) or {})
    monkeypatch.setattr(train.ranks, "start", lambda *_: contextlib.nullcontext(SimpleNamespace(rank=1)))
    monkeypatch.setenv("WORLD_SIZE", str(planned["ranks"]))
    monkeypatch.setattr(sys, "argv", ["stage", *flags.split()])
    train.main(STAGES[int(stage)])
    [(_, settings, _, _, away)] = seen
    for name in ("layers", "hidden", "heads", "sequence", "batch", "dtype", "recompute"):
        assert getattr(settings, name) == planned[name], name
    assert settings.accumulate == planned["accumulate"]
    assert away.cpu == ("--offload" in asked)
