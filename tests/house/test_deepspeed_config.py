"""--deepspeed-config: what is taken of a file, said of the rest, and refused; and what `plan` writes as one.

test_deepspeed_recorded.py has the same file beside DeepSpeed itself."""

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
from zero_minimal.programs import configs, deepspeed_written, train
from zero_minimal.programs.planning import plan
from zero_minimal.programs.registry import STAGES
from zero_minimal.stage0 import Stage0
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import deepspeed_file, deepspeed_settings, loop
from zero_minimal.workload.deepspeed_config import Wanted
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import System

SMALL = Settings(layers=2, hidden=32, heads=4, sequence=32, steps=6)
ALL_FLAGS = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(Settings)} | {"offload": None}


def file_of(tmp_path, content):
    file = tmp_path / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def wanted(tmp_path, content, ranks=1, mesh=False, **given):
    found = deepspeed_file.read(file_of(tmp_path, content))
    return Wanted(found, given, ALL_FLAGS | given, ranks, mesh)


def settings_of(path, world_size):
    asked = Wanted(deepspeed_file.read(path), {}, ALL_FLAGS, world_size)
    flags = {name: value for name, value in asked.flags.items() if name in Settings.__dataclass_fields__}
    return asked.settings(dataclasses.replace(SMALL, **flags))


# ---------------------------------------------------------------------------------------------------- what is taken


BF16 = {"bf16": {"enabled": True}}
ZERO = "zero_optimization"


@pytest.mark.parametrize(("content", "ranks", "flags"), [
    ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, 3, {"batch": 4, "accumulate": 2}),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, {"batch": 4, "accumulate": 3}),
    ({"train_batch_size": 24}, 4, {"batch": 6, "accumulate": 1}),
    ({"train_micro_batch_size_per_gpu": 5}, 4, {"batch": 5, "accumulate": 1}),
    ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, 4, {"batch": SMALL.batch}),
    ({}, 1, {"batch": SMALL.batch, "accumulate": 1, "dtype": "fp32", "clip": 1.0}),
    ({"gradient_clipping": 0}, 1, {"clip": 0.0}),
    (BF16 | {ZERO: {"reduce_bucket_size": 5e5}}, 1, {"dtype": "bf16", "bucket_mb": 5e5 * 2 / 2**20}),
    ({ZERO: {"reduce_bucket_size": 2**20}}, 1, {"dtype": "fp32", "bucket_mb": 4.0}),
    ({ZERO: {"allgather_bucket_size": 2**20, "reduce_bucket_size": "auto"}}, 1, {"bucket_mb": 4.0}),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, 1, {"dtype": "fp16"}),
    ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, 1, {"dtype": "fp32"}),
    ({ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}, 1, {"offload": "cpu"}),
    ({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}, 1, {"offload": "disk:/n"}),
    ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, 1, {"lr": SMALL.lr}),
    ({"optimizer": {"type": "AdamW", "params": {}}}, 1, {"lr": 1e-3}),
])
def test_keys_become_flags(tmp_path, content, ranks, flags):
    asked = wanted(tmp_path, content, ranks)
    assert {name: asked.flags.get(name) for name in flags} == flags


def test_auto_is_what_the_command_line_says(tmp_path):
    asked = wanted(tmp_path, {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 32,
                              "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}, 2, batch=8, dtype="bf16",
                   clip=0.5)
    assert asked.flags == {"batch": 8, "accumulate": 2, "dtype": "bf16", "clip": 0.5}


def test_what_no_flag_says_is_in_the_settings(tmp_path):
    content = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 3},
               "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False, "betas": [0.8, 0.9]}}}
    path = file_of(tmp_path, content)
    settings = settings_of(path, 1)
    assert settings.optimizer_class() is torch.optim.Adam
    assert settings.optimizer_options() == {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0,
                                            "fused": True}
    scaler = settings.loss_scaler()
    assert (scaler.scale_value, scaler.growth_interval, scaler.hysteresis) == (256, 1000, 3)
    assert [settings.learning_rate(step) for step in (0, 3)] == [1e-2, 1e-2]  # DeepSpeed holds it, without a scheduler
    plain = settings_of(file_of(tmp_path, {}), 1)
    assert plain.optimizer_options() == SMALL.optimizer_options() and plain.optimizer_class() is torch.optim.AdamW
    assert [plain.learning_rate(step) for step in range(6)] == [SMALL.learning_rate(step) for step in range(6)]


@pytest.mark.parametrize(("kind", "weight_decay"), [
    ({"type": "AdamW", "params": {}}, 0.0), ({"type": "adamw", "params": {"torch_adam": True}}, 0.01),
    ({"type": "AdamW", "params": {"torch_adam": True, "weight_decay": 0.3}}, 0.3),
])
def test_the_weight_decay_that_nobody_gives(tmp_path, kind, weight_decay):
    assert wanted(tmp_path, {"optimizer": kind}).optimizer["weight_decay"] == weight_decay


# ----------------------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(("content", "said"), [
    ({ZERO: {"overlap_comm": False}}, "zero_optimization.overlap_comm is ignored: a bucket always travels"),
    ({ZERO: {"stage": 3, "stage3_prefetch_bucket_size": 5e7}}, "stage3_prefetch_bucket_size is ignored: a unit"),
    ({ZERO: {"stage": 3, "reduce_bucket_size": 5e7}}, "reduce_bucket_size is ignored: at stage 3 a unit"),
    ({ZERO: {"reduce_bucket_size": 5e7, "allgather_bucket_size": 5e8}}, "reduce_bucket_size is for both"),
    ({ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param is ignored: parameters stay"),
    ({"steps_per_print": 10}, "steps_per_print is ignored: this program has its own progress"),
    ({"activation_checkpointing": {"partition_activations": True}}, "zero_100b.py --config C1"),
    ({}, "gradient_clipping is not there: clipped at 1.0"),
    ({"optimizer": {"type": "AdamW"}}, "no scheduler: the learning rate stays"),
])
def test_what_is_ignored_is_said_and_why(tmp_path, content, said):
    assert said in " | ".join(wanted(tmp_path, content).notes)


def test_nothing_is_said_where_nothing_is_ignored(tmp_path):
    content = {
        "train_batch_size": 8, "gradient_clipping": 1.0, "prescale_gradients": False, "wall_clock_breakdown": False,
        "fp16": {"enabled": False, "auto_cast": True, "fp16_master_weights_and_grads": True}, **BF16,
        ZERO: {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
               "allgather_partitions": True, "offload_param": {"device": "none"},
               "offload_optimizer": {"device": "none", "pin_memory": False}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {}},
        "tensorboard": {"enabled": False}, "elasticity": {"enabled": False}, "amp": None,
    }
    assert wanted(tmp_path, content, 2).notes == []


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("content", "given", "said"), [
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, {},
     "train_batch_size is 24, but train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 2 × 2 data-parallel"),
    ({"train_batch_size": 9}, {}, "cannot be 1 micro-batches × 2 data-parallel ranks"),
    ({"train_batch_size": 16}, {"batch": 3}, "cannot be 3 sequences × 2"),
    ({"train_micro_batch_size_per_gpu": 0}, {}, "must be a number from 1 up, not 0"),
    ({"train_micro_batch_size_per_gpu": 2.5}, {}, "must be a whole number"),
    ({"train_micro_batch_size_per_gpu": True}, {}, "must be a number from 1 up, not true"),
    ({"train_micro_batch_size_per_gpu": 4}, {"batch": 8}, "makes --batch 4, and the command line has --batch 8"),
    ({"gradient_clipping": 1}, {"clip": 0.5}, "makes --clip 1, and the command line has --clip 0.5"),
    (BF16, {"dtype": "fp16"}, "bf16.enabled makes --dtype bf16, and the command line has --dtype fp16"),
    ({"bf16": {"enabled": False}}, {"dtype": "bf16"}, "makes --dtype fp32"),
    ({ZERO: {"reduce_bucket_size": 2**20}}, {"bucket_mb": 25.0}, "makes --bucket-mb 4,"),
    ({ZERO: {"offload_optimizer": {"device": "cpu"}}}, {"offload": "disk:/x"}, "makes --offload cpu"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {"lr": 2e-3}, "makes --lr 0.001"),
    (BF16 | {"fp16": {"enabled": True}}, {}, "fp16 and bf16 are both enabled"),
    ({"bf16": {"enabled": "yes"}}, {}, "bf16.enabled must be true or false"),
    (BF16 | {"communication_data_type": "fp32"}, {}, 'communication_data_type is "fp32", and parameters are bf16'),
    ({ZERO: {"stage": 4}}, {}, "is 0, 1, 2 or 3, not 4"),
    ({ZERO: 2}, {}, "zero_optimization must be an object"),
    ({ZERO: {"stge": 2}}, {}, "DeepSpeed has no key zero_optimization.stge: did you mean stage?"),
    ({"train_batchsize": 2}, {}, "did you mean train_batch_size?"),
    ({"zero_optimisation": {}}, {}, "did you mean zero_optimization?"),
    ({"stage": 2}, {}, "stage belongs into zero_optimization"),
    ({ZERO: {"gradient_clipping": 1}}, {}, "gradient_clipping belongs outside of sections"),
    ({ZERO: {"cpu_offload": True}}, {}, "an old name: write offload_optimizer"),
    ({ZERO: {"zero_quantized_gradients": True}}, {}, "nothing is quantized here"),
    ({ZERO: {"offload_optimizer": {"device": "gpu"}}}, {}, "device is none, cpu or nvme"),
    ({ZERO: {"offload_optimizer": {"device": "nvme"}}}, {}, "nvme_path must name a folder"),
    ({"optimizer": {"type": "Lamb"}}, {}, "there are AdamW, Adam here"),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, {}, "write gradient_clipping"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, {}, "must be two numbers"),
    ({"scheduler": {"type": "CosineAnnealingLR"}}, {}, "there are WarmupLR, WarmupDecayLR, WarmupCosineLR, LR"),
    ({"scheduler": {"type": "OneCycle"}}, {}, "OneCycle needs scheduler.params.cycle_min_lr: a number"),
    ({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 9}}}, {}, "a run goes on with --resume"),
    ({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}}, {}, "a number from 1 up"),
    ({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_staircase": 1}}}, {}, "must be true or false"),
    ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}}, {}, "WarmupLR has no scheduler.params.tot"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, {}, "needs scheduler.params.total_num_steps"),
    ({"tensor_parallel": {"autotp_size": 2}}, {}, "zero_100b.py --model-parallel M"),
    ("{", {}, "it is not JSON"), ("[]", {}, "it must be an object"),
    ('{"bf16": {}, "bf16": {}}', {}, "stands there twice"),
])
def test_contradictions_are_refused(tmp_path, content, given, said):
    with pytest.raises(ValueError) as refused:
        wanted(tmp_path, content, 2, **given)
    assert said in str(refused.value)


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
    path = file_of(tmp_path, content)
    assert said in program(monkeypatch, capsys, main, argument, "--deepspeed-config", path, *flags)


def test_no_file_is_a_sentence(tmp_path, monkeypatch, capsys):
    said = program(monkeypatch, capsys, train.main, Stage2, "--deepspeed-config", str(tmp_path / "none.json"))
    assert "none.json: it cannot be read: No such file" in said


def test_zero_100b_takes_what_is_kept_of_activations(tmp_path, monkeypatch, capsys):
    """C4 by its keys; it goes as far as to see that one rank is no mesh."""
    path = file_of(tmp_path, {ZERO: {"stage": 2}, "activation_checkpointing": {"partition_activations": True}})
    said = program(monkeypatch, capsys, configs.main, System, "--deepspeed-config", path)
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
            same = deepspeed_settings.FromDeepSpeed(**vars(same), scheduler={"type": "constant"})
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
