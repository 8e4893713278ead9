"""DeepSpeed: implements --deepspeed-config in the programs that train, which reads DeepSpeed's JSON configuration.

    torchrun --nproc-per-node 2 zero_minimal/stage2.py --deepspeed-config ds.json

deepspeed_keys.py is the table of all keys. Flags fill in what the file leaves out or calls "auto", as Hugging Face's
Trainer does; values in both must agree. The first rank prints the resulting flags, and what is ignored.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from zero_minimal.meters.observer import stage_in
from zero_minimal.programs.deepspeed_keys import AUTO, OFF, TABLE, OfMesh, Refused, Taken, read
from zero_minimal.programs.offload_flags import OFFLOADED
from zero_minimal.workload.deepspeed_settings import SCHEDULES, DeepSpeedScaler, FromDeepSpeed
from zero_minimal.workload.settings import DTYPES, Parser, Settings
from zero_minimal.zero_100b import CONFIGS

BATCHES = TOTAL, MICRO, TIMES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BUCKETS = "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"
HOST = "zero_optimization.offload_optimizer"
CLIP = 1.0  # DeepSpeed's default
ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # DeepSpeed's defaults, with a learning rate of 0.001


class Wanted:
    """What a file requests from a program.

    Args:
        found: the result of read().
        given: {name: value} of the flags on the command line, and `defaults` of all flags.
        ranks: data-parallel ranks, among which the batch is divided.
        mesh: whether the program has ranks that share a model (zero_100b.py).
    flags: their values in the file. notes: a line for each ignored key, with the reason. optimizer, scheduler, fp16: as
    FromDeepSpeed has them. Raises: ValueError if the file contradicts itself or the flags, or is not supported.
    """

    def __init__(self, found: dict, given: dict, defaults: dict, ranks: int, mesh: bool = False):
        self.found, self.given, self.defaults, self.ranks = found, given, defaults, ranks
        self.notes: list[str] = []
        self.left_open: list[str] = []  # keys that are "auto" and have no flag
        self.flags: dict[str, Any] = {}
        self.sections = {name.partition(".")[0] for name in found}
        for name, value in found.items():
            self._look_up(name, value, mesh)
        self.stage = self._value("zero_optimization.stage") or 0
        self._batch()
        self.dtype = self._dtype()
        self._clipping()
        self._buckets()
        self._offload()
        self.optimizer = self._optimizer()
        self.scheduler = self._scheduler()
        scaler = inspect.getfullargspec(DeepSpeedScaler).kwonlydefaults
        self.fp16 = self._options("fp16", scaler) if self._value("fp16.enabled") in (True, "fp16") else {}
        if self.left_open:
            self.notes.append(f'"auto" is DeepSpeed\'s default for {", ".join(self.left_open)}: no flag says it')

    def settings(self, settings: Settings) -> FromDeepSpeed:
        """The settings of the flags, with those that only the file has."""
        return FromDeepSpeed(**asdict(settings), optimizer=self.optimizer, scheduler=self.scheduler, fp16=self.fp16)

    def say(self, name: str, flag: str, value: Any) -> None:
        """Set a flag to this value. Raises: ValueError if the command line has another value."""
        if flag in self.given and self.given[flag] != value:
            shown = "--" + flag.replace("_", "-")
            raise ValueError(f"{name} makes {shown} {_shown(value)}, and the command line has {shown} "
                             f"{_shown(self.given[flag])}: leave one of them out")
        self.flags[flag] = value

    def _look_up(self, name: str, value: Any, mesh: bool) -> None:
        """Add a note for an ignored key. Raises: ValueError for a refused key."""
        row = TABLE[name]
        is_off = isinstance(value, dict) and value.get("enabled", value.get("device", True)) in OFF
        if isinstance(row, Taken) or value in row.same or is_off and row.same == OFF:
            return
        if isinstance(row, Refused):
            raise ValueError(f"{name} = {json.dumps(value)} is not possible here: {row.why}")
        if not (isinstance(row, OfMesh) and mesh):
            self.notes.append(f"{name} is ignored: {row.why}")

    def _value(self, name: str) -> Any:
        """The value in the file; for "auto", that of the flag; None if neither has one."""
        value, flag = self.found.get(name), TABLE[name].flag
        if value == AUTO and not flag and name.startswith(("optimizer.", "scheduler.", "fp16.")):
            self.left_open.append(name)
        if value == AUTO:
            value = (self.defaults | self.flags).get(flag)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def _batch(self) -> None:
        """As in DeepSpeed, any of the three values may be missing, and follows from the others."""
        total, micro, times = map(self._value, BATCHES)
        micro = self.given.get("batch") if micro is None else micro
        times = self.given.get("accumulate") if times is None else times
        for name, value in ((MICRO, micro), (TIMES, times)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if total is None:
            micro, times = micro or self.defaults["batch"], times or self.defaults["accumulate"]
        elif micro is None:
            times = times or 1
            micro = total // (times * self.ranks)
        elif times is None:
            times = total // (micro * self.ranks)
        if total not in (None, micro * times * self.ranks):
            raise ValueError(f"{TOTAL} {total} is not {MICRO} × {TIMES} × {self.ranks} data-parallel ranks: {micro} × "
                             f"{times} × {self.ranks} = {micro * times * self.ranks}; one of the three is wrong, or "
                             "the number of ranks")
        self.say(MICRO if MICRO in self.found else TOTAL, "batch", micro)
        self.say(TIMES if TIMES in self.found else TOTAL, "accumulate", times)

    def _dtype(self) -> str:
        on = {name: value in (True, name) for name in ("fp16", "bf16")
              if (value := self._value(f"{name}.enabled")) is not None}
        if sum(on.values()) == 2:
            raise ValueError("fp16 and bf16 are both enabled: parameters have one dtype")
        dtype = next((name for name in on if on[name]), "fp32") if on else self.defaults["dtype"]
        self.say(f"{next(iter(on))}.enabled" if on else "the file", "dtype", dtype)
        for name in ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"):
            if (other := self._value(name)) not in (None, dtype):
                raise ValueError(f"{name} is {json.dumps(other)}, and parameters are {dtype}: gradients are kept and "
                                 "reduced in that, and no other")
        if self.stage == 0 and dtype != "fp32":  # a test imitates DeepSpeed here, and gets its losses
            scale = ", and divides gradients by a loss scale that its loss never had" if dtype == "fp16" else ""
            self.notes.append(f"stage 0 in {dtype}: DeepSpeed's own begins with an Adam step on gradients of 0{scale}, "
                              "so its losses are others; at stages 1 to 3 they are those here")
        return dtype

    def _clipping(self) -> None:
        largest = self._value("gradient_clipping")
        if largest is None and "clip" not in self.given:
            largest = CLIP
            self.notes.append(f"gradient_clipping is not there: clipped at {largest}, DeepSpeed's default (0.19; older "
                              "ones have 0); --clip 0 does not clip")
        if largest is not None:
            self.say("gradient_clipping", "clip", float(largest))

    def _buckets(self) -> None:
        """DeepSpeed counts elements, we count MiB."""
        sizes = {name: size for name in BUCKETS if (size := self._value(name)) is not None}
        for name, size in sizes.items():
            if self.stage == 3:
                self.notes.append(f"{name} is ignored: at stage 3 a unit (a block) is a bucket")
            elif name == next(iter(sizes)):
                self.say(name, "bucket_mb", size * DTYPES[self.dtype].itemsize / 2**20)
            elif size != sizes[BUCKETS[0]]:
                self.notes.append(f"{name} is ignored: a bucket here is reduced and gathered, so reduce_bucket_size is "
                                  "for both")

    def _offload(self) -> None:
        device = self._value(f"{HOST}.device")
        if device is None:
            return
        folder = self._needed(f"{HOST}.nvme_path", "nvme") if device == "nvme" else ""
        self.say(f"{HOST}.device", "offload", {"none": None, "cpu": "cpu", "nvme": f"disk:{folder}"}[device])
        if device == "nvme" and self.stage in (1, 2):
            self.notes.append(f"{HOST}.device is nvme, and at stage {self.stage} DeepSpeed (0.19) keeps the state in "
                              "memory all the same: here it goes to disk")

    def _optimizer(self) -> dict:
        """The optimizer's type in torch and its options; {} if the file has none."""
        if "optimizer" not in self.sections:
            return {}
        kind, lr = self._needed("optimizer.type", "an optimizer"), self._value("optimizer.params.lr")
        decoupled = kind.lower() == "adamw" or self._value("optimizer.params.adam_w_mode") is not False
        # torch_adam: torch's default decay
        decay = {"weight_decay": 0.01} if decoupled and self._value("optimizer.params.torch_adam") else {}
        self.say("optimizer.params.lr", "lr", float(1e-3 if lr is None else lr))
        return {"type": "AdamW" if decoupled else "Adam"} | self._options("optimizer.params", ADAM | decay)

    def _scheduler(self) -> dict:
        """The scheduler's type and all parameters; {} keeps the program's own."""
        if "scheduler" not in self.sections:
            if self.optimizer:
                self.notes.append("no scheduler: the learning rate stays as it is, as in DeepSpeed")
            return {"type": "constant"} if self.optimizer else {}
        kind = self._needed("scheduler.type", "a scheduler")
        spec = inspect.getfullargspec(SCHEDULES[kind])
        for name in self.found:
            key = name.removeprefix("scheduler.params.")
            if key not in (name, *spec.kwonlyargs) and isinstance(TABLE[name], Taken):
                raise ValueError(f"{kind} has no {name}: it has {', '.join(spec.kwonlyargs)}")
        needed = {key: self._needed(f"scheduler.params.{key}", kind)
                  for key in spec.kwonlyargs if key not in spec.kwonlydefaults}
        return {"type": kind} | needed | self._options("scheduler.params", spec.kwonlydefaults)

    def _needed(self, name: str, whose: str) -> Any:
        """A key's value. Raises: ValueError if neither the file nor a flag has it."""
        value, row = self._value(name), TABLE[name]
        if value is None:
            auto = f', or be "auto", for --{row.flag}' if row.flag else ""
            raise ValueError(f"{whose} needs {name}: it {row.kind[0]}{auto}")
        return value

    def _options(self, section: str, defaults: dict[str, Any]) -> dict[str, Any]:
        """The values of these keys in the file, or their defaults."""
        found = {key: self._value(f"{section}.{key}") for key in defaults}
        return defaults | {key: value for key, value in found.items() if value is not None}


def _shown(value: Any) -> str:
    return "no value" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def words(wanted: Wanted) -> str:
    """The file's contents as flags, and those that have no flag."""
    flags = [f"--{name.replace('_', '-')} {_shown(value)}" for name, value in wanted.flags.items() if value is not None]
    more = [f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in part.items() if value is not None)
            for name in ("optimizer", "scheduler", "fp16") if (part := getattr(wanted, name))]
    return "; ".join(["it says " + " ".join(flags), *more])


# -------------------------------------------------------------------------------------------------------- the flag


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Give the parser --deepspeed-config."""
    parser.add_argument("--deepspeed-config", metavar="FILE.json", help="take from a DeepSpeed configuration what it "
                        "has of all this; flags say the rest, and what both say must agree")


def read_flag(parser: Parser, arguments: argparse.Namespace,
              stage_class: type | None) -> Callable[[Settings], Settings]:
    """Fill in a program's flags from the file, if any; return a function that extends its settings. Ends the program,
    saying what is accepted, if the file does not fit. stage_class: of a stage's program; None: zero_100b.py.
    """
    path = arguments.deepspeed_config
    if path is None:
        return lambda settings: settings
    ranks = int(os.environ.get("WORLD_SIZE", 1)) // (1 if stage_class else arguments.model_parallel)
    ranks = max(ranks, 1)  # too few are refused later, by the mesh
    try:
        wanted = Wanted(read(path), parser.given_values(), vars(arguments), ranks, mesh=not stage_class)
        if stage_class:
            _check_stage(wanted, stage_class.__name__)
        else:
            _choose_config(wanted)
    except ValueError as error:
        parser.error(f"--deepspeed-config {path}: {error}")
    vars(arguments).update(wanted.flags)
    if int(os.environ.get("RANK", 0)) == 0:
        for line in (words(wanted), *wanted.notes):
            print(f"{os.path.basename(path)}: {line}", file=sys.stderr)
    return wanted.settings


def _check_stage(wanted: Wanted, name: str) -> None:
    stage, stays = stage_in(name), name in OFFLOADED and wanted.flags.get("offload", "") is None
    if stays or wanted.stage != stage:
        there = "offload_optimizer.device is none" if stays else f"zero_optimization.stage is {wanted.stage}"
        raise ValueError(f"{there}, and {name} {'offloads' if stays else f'is stage {stage}'}: start "
                         f"zero_minimal/stage{wanted.stage}.py with this file")


def _choose_config(wanted: Wanted) -> None:
    """Choose one of C1 to C5 by the stage and the checkpoint settings."""
    if wanted.flags.pop("offload", None):
        raise ValueError("zero_100b.py has no offload of optimizer state: start zero_minimal/stage"
                         f"{wanted.stage}.py with this file")
    cut, to_host = (wanted.found.get(f"activation_checkpointing.{key}") is True
                    for key in ("partition_activations", "cpu_checkpointing"))
    fitting = [each for each, config in CONFIGS.items() if stage_in(config.stage.__name__) == wanted.stage
               and (config.partition, config.to_host) == (cut or to_host, to_host)]
    if not fitting:
        raise ValueError(f"none of {', '.join(CONFIGS)} is stage {wanted.stage}{' with cpu_checkpointing' * to_host}: "
                         "C1 and C2 are stage 1 (C2 with partition_activations), C3 to C5 stage 2 (C4 with "
                         "partition_activations, C5 with cpu_checkpointing, too)")
    wanted.say("the file", "config", fitting[0])
