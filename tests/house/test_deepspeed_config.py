"""--deepspeed-config: what is taken of a file, said of the rest, and refused; and what `plan` writes as one.

test_deepspeed_recorded.py has the same files beside DeepSpeed itself."""

import contextlib
import dataclasses
import inspect
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
from zero_minimal.workload.deepspeed_settings import SCHEDULES, FromDeepSpeed
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import System

SMALL = dataclasses.replace(runs.SMALL, steps=6)
AUTO = "auto"
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
MB, ZERO = 2**20, "zero_optimization"


def file_of(tmp_path, content):
    file = tmp_path / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def wanted(tmp_path, content, ranks=1, given=None):
    given = given or {}
    return Wanted(deepspeed_keys.read(file_of(tmp_path, content)), given, runs.DEFAULTS | given, ranks)


def settings_of(tmp_path, content):
    asked = wanted(tmp_path, content)
    return asked.settings(dataclasses.replace(SMALL, **{
        name: value for name, value in asked.flags.items() if name in Settings.__dataclass_fields__}))


def zero(stage, **more):
    return {ZERO: {"stage": stage, **more}}


def adam(kind="AdamW", **params):
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


# ----------------------------------------------------------------------------------------------------- all the keys


def alone(name, value):
    """What read() gives of a file that has a key, and what it needs beside it."""
    section, _, key = name.rpartition(".")
    optimizer = {"optimizer.type": "AdamW"}
    found = {"fp16": {"fp16.enabled": True}, "optimizer": optimizer, "optimizer.params": optimizer}.get(section, {})
    if section == "scheduler.params":
        signatures = {kind: inspect.signature(rate).parameters for kind, rate in SCHEDULES.items()}
        kind = next((kind for kind, names in signatures.items() if key in names), "WarmupLR")
        found = {"scheduler.type": kind} | {f"{section}.{each}": 9 for each, parameter in signatures[kind].items()
                                            if parameter.kind == parameter.KEYWORD_ONLY
                                            and parameter.default is parameter.empty}
    return found | {name: value}


REFUSED_KEYS = """
    managed_gradient_accumulation torch_autocast amp gradient_allreduce_op quantize_training weight_quantization
    compression_training sparse_attention progressive_layer_drop curriculum_learning data_efficiency eigenvalue
    tensor_parallel sequence_parallel_size expert_parallel elasticity disable_allgather bfloat16
    fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    optimizer.params.bias_correction optimizer.params.amsgrad optimizer.params.fp32_optimizer_states
    optimizer.params.max_grad_norm scheduler.params.last_batch_iteration zero_optimization.zenflow
    zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_nontrainable_weights
    zero_optimization.zero_quantized_gradients zero_optimization.zeropp_loco_param zero_optimization.cpu_offload
    zero_optimization.cpu_offload_param""".split()


def test_what_would_change_the_numbers_is_refused():
    assert sorted(REFUSED_KEYS) == sorted(name for name, row in TABLE.items() if isinstance(row, Refused))
    assert Counter(map(type, TABLE.values())) == {Refused: len(REFUSED_KEYS), Ignored: 86, OfMesh: 3, Taken: 51}


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if not isinstance(row, Taken)])
def test_a_key_is_refused_or_ignored_and_why(name):
    """With any value but those with which there is nothing to say."""
    row, found = TABLE[name], alone(name, "other")
    if isinstance(row, Refused):
        with pytest.raises(ValueError, match=re.escape(f'{name} = "other" is not possible here: {row.why}')):
            Wanted(found, {}, runs.DEFAULTS, 1)
    else:
        of_stage, of_mesh = (Wanted(found, {}, runs.DEFAULTS, 1, mesh).notes for mesh in (False, True))
        said = f"{name} is ignored: {row.why}"
        assert said in of_stage and (said in of_mesh) != isinstance(row, OfMesh)
    for value in row.same:
        notes = Wanted(alone(name, value), {}, runs.DEFAULTS, 1).notes
        assert not [note for note in notes if note.startswith(f"{name} ")]


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if getattr(row, "kind", None)])
def test_a_key_that_is_taken_refuses_values_of_another_kind(name):
    words, _ = TABLE[name].kind
    for value in ("other", {}, [], -2, *([True] if "true" not in words else [])):
        with pytest.raises(ValueError, match=re.escape(f"{name} {words}, not {json.dumps(value)}")):
            Wanted(alone(name, value), {}, runs.DEFAULTS, 1)


@pytest.mark.parametrize(("name", "good", "bad", "words"), [
    ("train_batch_size", (1, 8.0), (0, 2.5, math.inf), "must be a whole number from 1 up"),
    ("scheduler.params.decay_step_size", (0, 3), (-1, 0.5), "must be a whole number from 0 up"),
    ("gradient_clipping", (0, 0.5), (-0.1, math.nan), "must be a number from 0 up"),
    ("fp16.min_loss_scale", (2.0**-24, 1), (0, 1e-9), "must be a number from 5.960464477539063e-08 up"),
    ("optimizer.params.betas", ([0, 0.99],), ([0.9], [0.9, 1], [True, 0.5], 0.9), "must be two numbers from 0 to"),
    ("zero_optimization.stage", (0, 3), (4, 1.5), "is 0, 1, 2 or 3"),
    ("bf16.enabled", (True, False), (1, 0), "must be true or false"),
    ("scheduler.params.warmup_type", ("log", "linear"), ("cosine",), "is log or linear"),
    ("zero_optimization.offload_optimizer.device", ("none", "cpu"), ("gpu",), "is none, cpu or nvme"),
])
def test_a_key_takes_values_of_its_kind(name, good, bad, words):
    for value in good:
        assert Wanted(alone(name, value), {}, runs.DEFAULTS, 1)
    for value in bad:
        with pytest.raises(ValueError, match=re.escape(f"{name} {words}")):
            Wanted(alone(name, value), {}, runs.DEFAULTS, 1)


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
OF_UNITS = [f"{ZERO}.{key}" for key in UNITS]
PRINTS = {"steps_per_print": 2000, "wall_clock_breakdown": False}
READ = {  # name: (file, ranks, flags on the command line, flags that it becomes, keys that are ignored)
    "Trainer, stage 2 with offload": (
        TRAINER | {"fp16": {"enabled": AUTO} | SCALE} | ADAMW | WARM_UP | PRINTS
        | zero(2, offload_optimizer=CPU, **BUCKETS), 2, {"dtype": "fp16", "batch": 3},
        {"dtype": "fp16", "batch": 3, "accumulate": 1, "offload": "cpu", "bucket_mb": 4e8 / MB, "lr": 2e-3},
        ["steps_per_print"]),
    "Trainer, stage 3 with both offloads": (
        TRAINER | {"fp16": {"enabled": AUTO} | SCALE, "bf16": {"enabled": AUTO}} | ADAMW | WARM_UP
        | zero(3, offload_optimizer=CPU, offload_param=CPU, overlap_comm=True, reduce_bucket_size=AUTO, **UNITS), 4,
        {"dtype": "bf16", "clip": 0.5}, {"dtype": "bf16", "clip": 0.5, "offload": "cpu", "batch": 4},
        [*OF_UNITS, f"{ZERO}.offload_param"]),
    "Trainer, stage 3, NVMe": (
        TRAINER | BF16 | {"aio": {"block_size": 262144, "single_submit": False}} | zero(3, offload_optimizer={
            "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}),
        1, {}, {"offload": "disk:/local_nvme", "dtype": "bf16", "clip": 0.0},
        ["aio", f"{ZERO}.offload_optimizer.buffer_count"]),
    "Trainer, stage 1, scale from 2^32": (
        {"train_batch_size": AUTO, "bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO, "auto_cast": False} | SCALE
         | {"initial_scale_power": 32}} | ADAMW | zero(1, overlap_comm=True), 2, {"lr": 1e-4, "dtype": "fp16"},
        {"lr": 1e-4, "dtype": "fp16"}, []),
    "Accelerate, no optimizer": (
        {"train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0} | BF16
        | {"zero_allow_untested_optimizer": True, "sparse_attention": None} | zero(
            2, offload_optimizer={"device": "none"}, offload_param={"device": "none"}), 2, {},
        {"accumulate": 2, "offload": None, "clip": 1.0}, []),
    "DeepSpeed's tutorial, CIFAR": (
        {"train_batch_size": 16, "gradient_clipping": 1.0, "prescale_gradients": False,
         "fp16": {"enabled": True, "fp16_master_weights_and_grads": False} | SCALE} | PRINTS
        | adam("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7)
        | schedule("WarmupLR", last_batch_iteration=-1, warmup_min_lr=0, warmup_max_lr=0.001, warmup_num_steps=1000)
        | zero(0, cpu_offload=False, **BUCKETS), 2, {},
        {"batch": 8, "lr": 0.001, "dtype": "fp16", "bucket_mb": 4e8 / MB}, ["steps_per_print"]),
    "DeepSpeed's 1-cycle tutorial": (
        {"train_batch_size": 8} | adam("Adam") | schedule(
            "OneCycle", cycle_first_step_size=16000, cycle_first_stair_count=8000, decay_step_size=16000,
            cycle_min_lr=0.0001, cycle_max_lr=0.001, decay_lr_rate=0.001, cycle_min_mom=0.85, cycle_max_mom=0.99,
            decay_mom_rate=0.0), 1, {}, {"batch": 8, "lr": 1e-3}, []),
    "DeepSpeed's range test tutorial": (
        {"train_micro_batch_size_per_gpu": 4} | schedule(
            "LRRangeTest", lr_range_test_min_lr=0.0001, lr_range_test_step_size=200, lr_range_test_step_rate=5,
            lr_range_test_staircase=False) | zero(1), 2, {}, {"batch": 4, "accumulate": 1, "clip": 1.0}, []),
    "DeepSpeed-Chat": (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0,
         "hybrid_engine": {"enabled": False, "max_out_tokens": 512}, "tensorboard": {"enabled": False},
         "elasticity": {"enabled": False}, "amp": {"enabled": False}, "fp16": {"enabled": False, "auto_cast": True}}
        | BF16 | zero(3, offload_param={"device": "none"}, offload_optimizer={"device": "none", "pin_memory": False},
                      memory_efficient_linear=False), 8, {},
        {"accumulate": 2, "batch": 2, "offload": None, "clip": 0.0}, [f"{ZERO}.memory_efficient_linear"]),
    "a profiled run with monitors": (
        {"train_batch_size": 8, "dump_state": True, "prescale_gradients": True, "flops_profiler": {"enabled": True},
         "comms_logger": {"enabled": True}, "wandb": {"enabled": True, "project": "p"}} | BF16 | zero(2), 2, {},
        {"batch": 4, "clip": 1.0}, ["dump_state", "prescale_gradients", "flops_profiler", "comms_logger", "wandb"]),
    "activations in parts": (
        {"train_micro_batch_size_per_gpu": 1} | zero(2, allgather_bucket_size=MB, reduce_bucket_size=AUTO)
        | {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False, "profile": False,
                                        "number_checkpoints": 4}}, 2, {}, {"batch": 1, "bucket_mb": 4.0},
        [f"activation_checkpointing.{key}" for key in ("partition_activations", "number_checkpoints")]),
    "two sizes of buckets": (
        {"train_batch_size": 4, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}} | BF16
        | zero(1, reduce_bucket_size=500000000, allgather_bucket_size=200000000, round_robin_gradients=True), 2, {},
        {"bucket_mb": 1e9 / MB}, [f"{ZERO}.allgather_bucket_size"]),
    "stage 3 with buckets": (
        BF16 | zero(3, reduce_bucket_size=5e8, zero_hpz_partition_size=8, mics_shard_size=-1), 2, {},
        {"bucket_mb": None}, [f"{ZERO}.reduce_bucket_size", f"{ZERO}.zero_hpz_partition_size"]),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_and_each_key_it_has_for_nothing_is_named(name, tmp_path):
    content, world_size, given, flags, ignored = READ[name]
    asked = wanted(tmp_path, content, world_size, given)
    assert {flag: asked.flags.get(flag) for flag in flags} == flags
    assert sorted(note.split()[0] for note in asked.notes if " is ignored: " in note) == sorted(ignored)
    assert asked.stage == content.get(ZERO, {}).get("stage", 0)


@pytest.mark.parametrize(("content", "world_size", "given", "flags"), [
    ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, 3, {}, {"batch": 4, "accumulate": 2}),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, {}, {"batch": 4, "accumulate": 3}),
    ({"train_batch_size": 24}, 4, {}, {"batch": 6, "accumulate": 1}),
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": AUTO}, 2, {"batch": 8}, {"batch": 8, "accumulate": 2}),
    ({}, 1, {}, {"batch": SMALL.batch, "accumulate": 1, "dtype": "fp32", "clip": 1.0}),
    (FP16 | {"bf16": {"enabled": False}}, 1, {}, {"dtype": "fp16"}),
    ({"fp16": {"enabled": AUTO}, "bf16": {"enabled": AUTO}}, 1, {}, {"dtype": "fp32"}),
    *((({dtype: {"enabled": True}} if size < 4 else {}) | zero(1, reduce_bucket_size=5e8), 1, {},
       {"bucket_mb": 5e8 * size / MB}) for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2))),
])
def test_keys_become_flags(tmp_path, content, world_size, given, flags):
    asked = wanted(tmp_path, content, world_size, given)
    assert {name: asked.flags.get(name) for name in flags} == flags


@pytest.mark.parametrize(("content", "said"), [
    (zero(3, reduce_bucket_size=5e7), "reduce_bucket_size is ignored: at stage 3 a unit (a block) is a bucket"),
    (zero(2, reduce_bucket_size=5e7, allgather_bucket_size=5e8), "reduce_bucket_size is for both"),
    ({}, "gradient_clipping is not there: clipped at 1.0"),
    ({"optimizer": {"type": "AdamW"}}, "no scheduler: the learning rate stays"),
    (BF16 | zero(0), "in bf16: DeepSpeed's own begins with an Adam step on gradients of 0, so its losses are others"),
    (FP16 | zero(0), "and divides gradients by a loss scale that its loss never had, so its losses are others"),
    *((content | zero(stage) | {"gradient_clipping": 1.0} | adam(lr=1e-3) | schedule("WarmupLR"), "") for content, stage
      in (({}, 0), (BF16, 1), (FP16, 1))),  # nothing
])
def test_what_is_otherwise_is_said(tmp_path, content, said):
    notes = wanted(tmp_path, content).notes
    assert [note for note in notes if said in note] if said else notes == []


REFUSED = [  # (file, flags on the command line, the line); two ranks
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, {},
     "train_batch_size is 24, but train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 2 × 2 data-parallel"),
    ({"train_batch_size": 9}, {}, "train_batch_size 9 cannot be 1 micro-batches × 2 data-parallel ranks"),
    ({"train_batch_size": 16}, {"batch": 3}, "cannot be 3 sequences × 2"),
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
    ({ZERO: 2}, {}, "zero_optimization must be an object, {…}, not 2"),
    (zero(0, stge=2), {}, "DeepSpeed has no key zero_optimization.stge: did you mean stage?"),
    ({"train_batchsize": 2}, {}, "did you mean train_batch_size?"),
    ({"zero_optimisation": {}}, {}, "did you mean zero_optimization?"),
    ({"gradient_checkpointing": True}, {}, "DeepSpeed has no key gradient_checkpointing"),
    ({"stage": 2}, {}, "stage belongs into zero_optimization"),
    (zero(0, gradient_clipping=1), {}, "gradient_clipping belongs outside of sections"),
    ({"bf16": {"enabled": True, "loss_scale": 0}}, {}, "no key bf16.loss_scale: loss_scale belongs into fp16"),
    ({"optimizer": {"type": "Adam", "adam_w_mode": True}}, {}, "adam_w_mode belongs into optimizer.params"),
    ({"data_types": {"params_dtype": "fp32"}}, {}, "no key data_types.params_dtype: did you mean param_dtype?"),
    (zero(0, cpu_offload=True), {}, "cpu_offload = true is not possible here: an old name: write offload_optimizer"),
    (adam(max_grad_norm=1.0), {}, "optimizer.params.max_grad_norm = 1.0 is not possible here: write gradient_clipping"),
    ({"curriculum_learning": {"enabled": True}}, {}, 'curriculum_learning = {"enabled": true} is not possible here'),
    (zero(0, offload_optimizer={"device": "nvme"}), {}, "nvme_path must name a folder"),
    (adam("OneBitAdam", freeze_step=23000), {}, 'optimizer.type is "OneBitAdam": there are AdamW, Adam here'),
    (adam("AdamX"), {}, "there are AdamW, Adam here: did you mean Adam?"),
    ({"optimizer": {"params": {"lr": 1}}}, {}, "optimizer.type is null: there are AdamW, Adam here"),
    (schedule("CosineAnnealingLR", T_max=10), {}, 'is "CosineAnnealingLR": there are WarmupLR, WarmupDecayLR, Warmup'),
    (schedule("OneCycle"), {}, "OneCycle needs scheduler.params.cycle_min_lr: a number"),
    (schedule("WarmupDecayLR"), {}, 'needs scheduler.params.total_num_steps: a number, or "auto" for --steps'),
    (schedule("WarmupLR", last_batch_iteration=9), {}, "a run goes on with --resume"),
    (schedule("WarmupLR", total_num_steps=3), {}, "WarmupLR has no scheduler.params.total_num_steps: it has warmup"),
    ("{", {}, "it is not JSON"), ("[]", {}, "it must be an object"), ('{"bf16": {"enabled": True}}', {}, "not JSON"),
    ('{"bf16": {},\n  // of all\n  "fp16": {}}', {}, "comments and commas at an end are not read here"),
    ('{"bf16": {"enabled": true,},}', {}, "comments and commas at an end"),
    ('{"zero_optimization": {"stage": 3, "stage": 3}}', {}, "stage stands there twice"),
]


@pytest.mark.parametrize(("content", "given", "line"), REFUSED)
def test_a_file_is_refused_with_the_right_line(tmp_path, content, given, line):
    with pytest.raises(ValueError) as refused:
        wanted(tmp_path, content, 2, given)
    assert line in str(refused.value)


def test_auto_is_the_flag_or_named(tmp_path):
    """What Hugging Face's Trainer fills in from its arguments: batch, clipping, rates and steps have flags here."""
    asked = wanted(tmp_path, *READ["Trainer, stage 2 with offload"][:2],
                   {"dtype": "fp16", "batch": 3, "lr": 5e-4, "clip": 0.5})
    assert asked.flags["lr"] == asked.scheduler["warmup_max_lr"] == 5e-4 and asked.flags["clip"] == 0.5
    assert asked.notes[-1] == ('"auto" is DeepSpeed\'s default for optimizer.params.betas, optimizer.params.eps, '
                               "optimizer.params.weight_decay, scheduler.params.warmup_min_lr, "
                               "scheduler.params.warmup_num_steps: no flag says it")
    assert asked.optimizer["betas"] == [0.9, 0.999] and asked.scheduler["warmup_num_steps"] == 1000
    decay = schedule("WarmupDecayLR", total_num_steps=AUTO, warmup_max_lr=AUTO)
    assert wanted(tmp_path, decay, 1, {"steps": 30, "lr": 1e-2}).scheduler == {
        "type": "WarmupDecayLR", "total_num_steps": 30, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-2,
        "warmup_num_steps": 1000, "warmup_type": "log"}
    every = wanted(tmp_path, {"fp16": {"enabled": AUTO} | dict.fromkeys(SCALE, AUTO)}, 1, {"dtype": "fp16"})
    assert all(f"fp16.{key}" in every.notes[-1] for key in SCALE) and every.fp16["initial_scale_power"] == 16
    assert not [note for note in wanted(tmp_path, TRAINER, 1).notes if "auto" in note]


def test_what_no_flag_says_is_in_the_settings(tmp_path):
    content = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 3}} | adam(
        "Adam", lr=1e-2, adam_w_mode=False, betas=[0.8, 0.9])
    settings = settings_of(tmp_path, content)
    assert settings.optimizer_class() is torch.optim.Adam
    assert settings.optimizer_options() == {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0,
                                            "fused": True}
    scaler = settings.loss_scaler()
    assert (scaler.scale_value, scaler.growth_interval, scaler.hysteresis) == (256, 1000, 3)
    assert [settings.scheduled(step, 0) for step in (0, 3)] == [{"lr": 1e-2}] * 2  # as DeepSpeed, without a scheduler
    plain = settings_of(tmp_path, {})
    assert plain.optimizer_options() == SMALL.optimizer_options() and plain.optimizer_class() is torch.optim.AdamW
    assert [plain.scheduled(step, 1) for step in range(6)] == [SMALL.scheduled(step, 1) for step in range(6)]


@pytest.mark.parametrize(("kind", "params", "weight_decay"), [
    ("AdamW", {}, 0.0), ("adamw", {"torch_adam": True}, 0.01), ("Adam", {"weight_decay": 0.3}, 0.3)])
def test_the_weight_decay_that_nobody_gives(tmp_path, kind, params, weight_decay):
    asked = wanted(tmp_path, adam(kind, **params)).optimizer
    assert asked["weight_decay"] == weight_decay and asked["type"] == "AdamW"


# ----------------------------------------------------------------------------------------------------- the programs


def program(monkeypatch, capsys, main, argument, *flags):
    """What a program says as it refuses."""
    monkeypatch.setattr(sys, "argv", ["program", *flags])
    with pytest.raises(SystemExit):
        main(argument)
    return capsys.readouterr().err


@pytest.mark.parametrize(("main", "argument", "content", "flags", "said"), [
    (train.main, Stage2, {ZERO: {"stage": 3}}, (), "Stage2 is stage 2: start zero_minimal/stage3.py with this file"),
    (train.main, Stage3, {}, (), "start zero_minimal/stage0.py"),
    (train.main, Stage0, {ZERO: {"offload_optimizer": {"device": "cpu"}}}, (), "--offload is for stage1.py, stage2.py"),
    (train.main, Stage0, {"train_batch_size": 3}, ("--batch", "2"), "cannot be 2 sequences"),
    (configs.main, System, {ZERO: {"stage": 3}}, (), "none of C1, C2, C3, C4, C5 is stage 3"),
    (configs.main, System, {ZERO: {"stage": 2}}, ("--config", "C4"), "it asks for C3, and the command line has"),
    (configs.main, System, {ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, (), "no offload of optimizer"),
    (configs.main, System, {ZERO: {"stage": 1}, "activation_checkpointing": {"cpu_checkpointing": True}}, (),
     "stage 1 with cpu_checkpointing"),
])
def test_a_program_that_does_not_fit_says_which_does(main, argument, content, flags, said, tmp_path, monkeypatch,
                                                     capsys):
    file = file_of(tmp_path, content)
    assert said in program(monkeypatch, capsys, main, argument, "--deepspeed-config", file, *flags)


def test_no_file_is_a_sentence(tmp_path, monkeypatch, capsys):
    said = program(monkeypatch, capsys, train.main, Stage2, "--deepspeed-config", str(tmp_path / "none.json"))
    assert "none.json: it cannot be read: No such file" in said


def test_zero_100b_takes_what_is_kept_of_activations(tmp_path, monkeypatch, capsys):
    """C4 by its keys; it goes as far as to see that one rank is no mesh."""
    file = file_of(tmp_path, zero(2) | {"activation_checkpointing": {"partition_activations": True}})
    said = program(monkeypatch, capsys, configs.main, System, "--deepspeed-config", file)
    assert "--config C4" in said and "1 ranks are not D × 2" in said and "partition_activations" not in said


# ----------------------------------------------------------------------------------------------------- what comes of it


def losses_of_flags(text):
    """Losses of the flags that say what the file below says."""
    with ranks.start() as rank:
        same = dataclasses.replace(runs.SMALL, dtype="fp16", batch=2, accumulate=2, clip=0.5, text=text)
        zero = loop.build(STAGES[2], same, rank, bucket_bytes=40000)
        plain = loop.steps(zero, loop.training_batches(same, rank.rank), same, scaler=same.loss_scaler())
        return loop.mean_over_ranks([sum(part.item() for part in parts) for parts in plain], rank)


@pytest.mark.thorough
def test_a_file_trains_as_the_flags_that_say_the_same(tmp_path):
    content = {name: value for name, value in runs.of(2, "fp16").items() if name not in ("optimizer", "scheduler")}
    by_file = runs.run(runs.ours, {"": content | {"fp16": {"enabled": True, "loss_scale": 2**16}}})[""]["losses"]
    (tmp_path / "text").write_text(runs.TEXT)
    by_flags = ranks.run(losses_of_flags, runs.RANKS, str(tmp_path / "text"), device="cpu", timeout=60)[0]
    assert by_file == by_flags and len(by_file) == runs.SMALL.steps


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
def test_what_is_written_is_read_as_the_stages_own_defaults(tmp_path, dtype, stage, offload, accumulate):
    content = deepspeed_written.deepspeed(SHAPE, planned(dtype), stage, accumulate, offload)
    asked = wanted(tmp_path, content, ranks=2)
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


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_disk_is_deepspeeds_at_stage_3_alone(stage, tmp_path, capsys):
    """Its stage_1_and_2.py (0.19.8) does the same for any device."""
    file = tmp_path / "ds.json"
    program_main.main(["plan", "--params", "1B", "--ranks", "2", "--dtype", "bf16", "--stage", str(stage), "--offload",
                       "disk", "--write-deepspeed-config", str(file)])
    said = " ".join(capsys.readouterr().out.split())
    words = "DeepSpeed (0.19) keeps the state in memory all the same"
    assert (f"At stage {stage} {words}" in said) == (stage < 3)
    notes = wanted(tmp_path, json.loads(file.read_text()), ranks=2).notes
    assert any(words in note for note in notes) == (stage < 3)


def test_a_plan_that_cuts_the_model_is_not_for_the_stage_scripts(tmp_path, capsys):
    program_main.main(["plan", "--params", "1B", "--ranks", "4", "--mp", "2", "--stage", "3",
                       "--write-deepspeed-config", str(tmp_path / "ds.json")])
    assert "The stage scripts refuse it: they cut no model (--mp)" in " ".join(capsys.readouterr().out.split())


def test_plan_writes_the_stage_that_fits_or_the_one_asked_for(tmp_path, capsys):
    file = tmp_path / "ds.json"
    asked = ["plan", "--params", "7.5B", "--ranks", "64", "--dtype", "bf16", "--accumulate", "4",
             "--write-deepspeed-config", str(file)]
    program_main.main(asked)
    said, content = capsys.readouterr().out, json.loads(file.read_text())
    assert content[ZERO]["stage"] == 2 and content["train_batch_size"] == 256 and "stage 2 is written" in said
    assert "(but its vocabulary is bytes, 256): torchrun --nnodes 4 --nproc-per-node 16 \\ " in " ".join(said.split())
    assert "fully_shard(block, reshard_after_forward=False, mp_policy=policy)" in said
    program_main.main([*asked, "--stage", "3", "--offload", "disk"])
    said, content = capsys.readouterr().out, json.loads(file.read_text())
    assert content[ZERO]["stage"] == 3 and content[ZERO]["offload_optimizer"]["device"] == "nvme"
    assert "CPUOffloadPolicy()" in said and "reshard_after_forward=True" in said
    for wrong, words in (([*asked[:2], "1T", *asked[3:]], "no stage fits"), (["plan", "--params", "1B", "--stage", "2"],
                                                                           "--write-deepspeed-config"),
                         ([*asked, "--stage", "0", "--offload", "cpu"], "stage 0 has no shards")):
        with pytest.raises(SystemExit):
            program_main.main(wrong)
        assert words in capsys.readouterr().err


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
