"""DeepSpeed beside us: the same file through DeepSpeed and through our stages, and what DeepSpeed gave, recorded.

    python tests/deepspeed_runs.py      # record anew, where DeepSpeed 0.19.8 is installed (a minute)

deepspeed_recorded.json has losses, learning rates and loss scales of DeepSpeed, so that tests compare our side with
them where DeepSpeed is not installed."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import tempfile
from pathlib import Path

import torch

from zero_minimal.processes import ranks
from zero_minimal.programs import deepspeed_keys, peers
from zero_minimal.programs.deepspeed import Wanted
from zero_minimal.programs.registry import STAGES
from zero_minimal.workload import deepspeed_settings, loop
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import DTYPES, Settings

RECORDED = Path(__file__).with_name("deepspeed_recorded.json")
RANKS = 2
TEXT = " ".join(str(number * number) for number in range(3000))  # the same for every Python, unlike its documentation
SMALL = Settings(layers=2, hidden=32, heads=4, sequence=32, steps=10)
DEFAULTS = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(Settings)} | {"offload": None}
ZERO = "zero_optimization"


# ------------------------------------------------------------------------------------------------------------ the files

FILE = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1,
                                              "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 3,
                                                      "total_num_steps": 12}},
}
FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}  # it overflows at first


def of(stage, dtype, **more):
    """A file. more: other keys, which replace those of FILE."""
    precision = {} if dtype == "fp32" else {dtype: FP16 if dtype == "fp16" else {"enabled": True}}
    return FILE | precision | {ZERO: {"stage": stage, "reduce_bucket_size": 20000, "allgather_bucket_size": 20000,
                                      "stage3_param_persistence_threshold": 0}} | more


def scheduled(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


CASES = {f"stage {stage}, {dtype}": of(stage, dtype) for stage in range(4) for dtype in DTYPES} | {
    "no clipping, no accumulation": of(2, "fp32", gradient_clipping=0.0, gradient_accumulation_steps=1),
    "Adam, not AdamW": of(1, "fp32", optimizer={"type": "Adam", "params": {
        "lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1, "torch_adam": True}}),
    "fp16, two overflows halve the scale": of(2, "fp16", fp16=FP16 | {"hysteresis": 2}),
    "fp16, a fixed scale": of(1, "fp16", fp16={"enabled": True, "loss_scale": 128}),
    "fp16, WarmupLR": of(2, "fp16", **scheduled("WarmupLR", warmup_num_steps=6, warmup_type="linear")),
    "fp16, WarmupCosineLR": of(2, "fp16", **scheduled("WarmupCosineLR", warmup_num_steps=2, total_num_steps=8)),
    "fp16, LRRangeTest": of(1, "fp16", **scheduled("LRRangeTest", lr_range_test_min_lr=1e-3,
                                                   lr_range_test_step_size=2, lr_range_test_step_rate=0.5)),
    "fp16, OneCycle": of(2, "fp16", **scheduled("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=4e-3,
                                                cycle_first_step_size=3, cycle_second_step_size=2, decay_step_size=1,
                                                decay_lr_rate=0.5)),
    "fp32, OneCycle": of(3, "fp32", **scheduled("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=4e-3,
                                                cycle_first_step_size=4, cycle_momentum=False)),
}


# ----------------------------------------------------------------------------------------------------------- both sides


@contextlib.contextmanager
def written(contents):
    """{name: path} of files, and of the text; they are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_text(TEXT)
        for number, content in enumerate(contents.values()):
            (Path(folder) / f"{number}.json").write_text(json.dumps(content))
        yield {name: str(Path(folder) / f"{number}.json") for number, name in enumerate(contents)}


def asked_for(path, world_size):
    """Stage and settings of a file."""
    wanted = Wanted(deepspeed_keys.read(path), {}, DEFAULTS, world_size)
    flags = {name: value for name, value in wanted.flags.items() if name in Settings.__dataclass_fields__}
    text = str(Path(path).with_name("text"))
    return wanted.stage, wanted.settings(dataclasses.replace(SMALL, text=text, **flags))


class Unused(deepspeed_settings.DeepSpeedScaler):
    """The loss scale of DeepSpeed's stage 0: nothing multiplies the loss by it, and gradients are divided by it even
    so, by the one of the next step already."""

    def scale(self, loss):
        return loss

    def unscale_(self, zero):
        if zero not in self._unscaled:
            self.grow()
        super().unscale_(zero)

    def update(self):
        assert self.decide() == (True, False), "nothing overflows where no loss is scaled"


def first_step_of_zeros(zero, settings):
    """What DeepSpeed's stage 0 in 16 bit does as it is set up: an update of its masters, with gradients of 0."""
    for group in zero.optimizer.param_groups:
        group["lr"] = settings.lr  # the schedule is made later
        for master in group["params"]:
            master.grad = torch.zeros_like(master)
    zero.optimizer.step()
    for group in zero.optimizer.param_groups:
        for master in group["params"]:
            master.grad = None


def ours(path, rank, copied=False):
    """Losses of a file in our stage, and learning rate and loss scale of each step. copied: with what DeepSpeed's
    stage 0 does otherwise in 16 bit."""
    stage, settings = asked_for(path, rank.world_size)
    zero = loop.build(STAGES[stage], settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
    scaler, rates, scales = settings.loss_scaler(), [], []
    if copied:
        first_step_of_zeros(zero, settings)
        scaler = scaler and Unused(**settings.fp16)
    losses, batches = [], loop.training_batches(settings, rank.rank)

    class Noted:  # an observer
        @contextlib.contextmanager
        def step(self):
            rates.append(zero.optimizer.param_groups[0]["lr"])
            scales.append(scaler.scale_value if scaler else 1.0)
            yield

    for parts in loop.steps(zero, batches, settings, scaler=scaler, observers=[Noted()]):
        losses.append(sum(part.item() for part in parts))
    return {"losses": loop.mean_over_ranks(losses, rank), "rates": rates, "scales": scales}


def theirs(path, rank):
    """The same of DeepSpeed itself, as its users write a loop."""
    import deepspeed

    _, settings = asked_for(path, rank.world_size)
    torch.manual_seed(settings.seed)
    model = GPT(settings.model_config()).to(DTYPES[settings.dtype])
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=path)
    batches, losses, rates, scales = iter(loop.training_batches(settings, rank.rank)), [], [], []
    for _ in range(settings.steps):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        scales.append(float(getattr(engine.optimizer, "loss_scale", 1.0)))
        losses.append(0.0)
        for _ in range(settings.accumulate):
            loss = engine(*next(batches))
            engine.backward(loss)
            engine.step()
            losses[-1] += loss.item() / settings.accumulate
    return {"losses": loop.mean_over_ranks(losses, rank), "rates": rates, "scales": scales}


def copied(path, rank):
    """Our stage 0, with what DeepSpeed's does otherwise in 16 bit."""
    return ours(path, rank, copied=True)


def all_of(side, paths):
    """{name: figures} of files on one side, on each rank."""
    with ranks.start() as rank:
        if side is theirs:
            peers.DeepSpeed.prepare(rank.device)
        return {name: side(path, rank) for name, path in paths.items()}


def run(side, contents):
    """{name: figures} of files on one side, two ranks on the CPU."""
    with written(contents) as paths:
        return ranks.run(all_of, RANKS, side, paths, device="cpu", timeout=110)[0]


# ------------------------------------------------------------------------------------------------------------ schedules


def grid(kind, **values):
    """Every combination of values."""
    return [(kind, dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())]


STEPS, LR = 30, 2e-3
WARM = {"warmup_num_steps": [1, 2, 7, 40], "warmup_type": ["log", "linear"]}
SCHEDULES = [
    *grid("WarmupLR", warmup_min_lr=[0.0, 1e-5], warmup_max_lr=[3e-3], **WARM), ("WarmupLR", {}),
    *grid("WarmupDecayLR", total_num_steps=[5, 20, 100], warmup_min_lr=[1e-5], **WARM),
    *grid("WarmupDecayLR", total_num_steps=[20], warmup_max_lr=[3e-3, 1e-5], warmup_num_steps=[5]),
    *grid("WarmupCosineLR", total_num_steps=[5, 20, 100], warmup_min_ratio=[0.1], **WARM),
    *grid("WarmupCosineLR", total_num_steps=[20], warmup_num_steps=[3], cos_min_ratio=[0.0, 0.2]),
    *grid("LRRangeTest", lr_range_test_min_lr=[1e-4, 1e-2], lr_range_test_step_size=[1, 7],
          lr_range_test_step_rate=[1.0, 0.3], lr_range_test_staircase=[False, True]), ("LRRangeTest", {}),
    *grid("OneCycle", cycle_min_lr=[1e-4], cycle_max_lr=[1e-2], cycle_first_step_size=[5, 8],
          cycle_second_step_size=[3, 14, 0], decay_step_size=[0, 2], decay_lr_rate=[0.0, 0.5]),
    *grid("OneCycle", cycle_min_lr=[0.0], cycle_max_lr=[3e-3], cycle_first_step_size=[7],
          cycle_first_stair_count=[0, 3], cycle_second_stair_count=[0, 4], cycle_min_mom=[0.7], cycle_max_mom=[0.95],
          decay_mom_rate=[0.0, 0.01], decay_step_size=[5]),
    *grid("OneCycle", cycle_min_lr=[1e-4], cycle_max_lr=[1e-2], cycle_momentum=[False]),
]
assert {kind for kind, _ in SCHEDULES} == set(deepspeed_settings.SCHEDULES)


def their_schedule(kind, params):
    """Learning rates and first betas of DeepSpeed's class."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR, betas=(0.9, 0.999))
    its, rates, betas = getattr(lr_schedules, kind)(optimizer, **params), [], []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        betas.append(optimizer.param_groups[0]["betas"][0])
        its.step()
    return {"rates": rates, "betas": betas if len(set(betas)) > 1 else betas[:1]}


def main():
    import deepspeed

    def rows(figures):
        return [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in figures.items()]

    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__.partition("+")[0]}
    cases = rows(run(theirs, CASES))
    schedules = [f"  {json.dumps([kind, params, their_schedule(kind, params)])}" for kind, params in SCHEDULES]
    RECORDED.write_text(f'{{"versions": {json.dumps(versions)},\n"cases": {{\n' + ",\n".join(cases)
                        + '\n},\n"schedules": [\n' + ",\n".join(schedules) + "\n]}\n")


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
