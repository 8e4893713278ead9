"""DeepSpeed: what --deepspeed-config does in the programs that train: a JSON that DeepSpeed reads is read here, too.

    torchrun --nproc-per-node 2 zero_minimal/stage2.py --deepspeed-config ds.json

deepspeed_keys.py is the table of all keys. What the file leaves open, or calls "auto", the flags say, as Hugging Face's
Trainer fills it in; what both say must agree. The first rank says what the file became, and what is ignored.
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
from zero_minimal.programs.deepspeed_keys import OFF, TABLE, OfMesh, Refused, Taken, kind_of, read
from zero_minimal.programs.offload_flags import OFFLOADED
from zero_minimal.workload.deepspeed_settings import SCHEDULES, DeepSpeedScaler, FromDeepSpeed
from zero_minimal.workload.settings import DTYPES, Parser, Settings
from zero_minimal.zero_100b import CONFIGS

AUTO = "auto"
ZERO = "zero_optimization"
BATCHES = TOTAL, MICRO, TIMES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
KEPT = ("partition_activations", "cpu_checkpointing")  # of "activation_checkpointing": P_a and P_a+cpu
CLIP = 1.0  # DeepSpeed's default
ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # its default, with a learning rate of 0.001


class Wanted:
    """What a file asks of a program.

    Args:
        found: what read() returned.
        given: {name: value} of the flags on the command line, and `defaults` of all flags.
        ranks: data-parallel ones, by which the batch is divided.
        mesh: whether the program has ranks that share a model (zero_100b.py).
    flags: what the file says of them. notes: a line for each key that is ignored, and why. optimizer, scheduler, fp16:
    as FromDeepSpeed has them. Raises: ValueError, for what contradicts itself, the flags or what can be done here.
    """

    def __init__(self, found: dict, given: dict, defaults: dict, ranks: int, mesh: bool = False):
        self.found, self.given, self.defaults, self.ranks = found, given, defaults, ranks
        self.notes: list[str] = []
        self.left_open: list[str] = []  # keys that are "auto", and that no flag says
        self.flags: dict[str, Any] = {}
        for name, value in found.items():
            self._look_up(name, value, mesh)
        self.stage = self._value(f"{ZERO}.stage") or 0
        self._batch()
        self.dtype = self._dtype()
        self._clipping()
        self._buckets()
        self._offload()
        self.optimizer = self._optimizer()
        self.scheduler = self._scheduler()
        self.fp16 = self._all("fp16", DeepSpeedScaler) if self.dtype == "fp16" and self._says("fp16") else {}
        if self.left_open:
            self.notes.append(f'"auto" is DeepSpeed\'s default for {", ".join(self.left_open)}: no flag says it')

    def settings(self, settings: Settings) -> FromDeepSpeed:
        """Those of the flags, with what the file has beside them."""
        return FromDeepSpeed(**asdict(settings), optimizer=self.optimizer, scheduler=self.scheduler, fp16=self.fp16)

    def _look_up(self, name: str, value: Any, mesh: bool) -> None:
        """A note for a key that is ignored. Raises: ValueError for one that is refused."""
        row = TABLE[name]
        is_off = isinstance(value, dict) and value.get("enabled", value.get("device", True)) in OFF
        if isinstance(row, Taken) or value in row.same or is_off and row.same == OFF:
            return
        if isinstance(row, Refused):
            raise ValueError(f"{name} = {json.dumps(value)} is not possible here: {row.why}")
        if not (isinstance(row, OfMesh) and mesh):
            self.notes.append(f"{name} is ignored: {row.why}")

    def _value(self, name: str) -> Any:
        """That of the file; for "auto" that of the flag; None if the file leaves it open."""
        value, row = self.found.get(name), TABLE[name]
        if value == AUTO and row.flag:
            return self._flag(row.flag)
        if value == AUTO and name.partition(".")[0] in ("optimizer", "scheduler", "fp16"):
            self.left_open.append(name)
        if value in (None, AUTO):
            return None
        words, fits = row.kind
        if not fits(value):
            raise ValueError(f"{name} {words}, not {json.dumps(value)}")
        return int(value) if "whole" in words else value

    def _flag(self, flag: str) -> Any:
        return (self.defaults | self.flags).get(flag)

    def _say(self, name: str, flag: str, value: Any) -> None:
        """The flag has this value. Raises: ValueError if the command line says otherwise."""
        if flag in self.given and self.given[flag] != value:
            shown = "--" + flag.replace("_", "-")
            raise ValueError(f"{name} makes {shown} {_shown(value)}, and the command line has {shown} "
                             f"{_shown(self.given[flag])}: leave one of them out")
        self.flags[flag] = value

    def _batch(self) -> None:
        """As DeepSpeed does: any of the three may be missing, and follows from the others."""
        total, micro, times = map(self._value, BATCHES)
        micro = self.given.get("batch") if micro is None else micro
        times = self.given.get("accumulate") if times is None else times
        if total is None:
            micro, times = micro or self.defaults["batch"], times or self.defaults["accumulate"]
        elif micro is None:
            times = times or 1
            micro = self._share(total, times, f"{times} micro-batches")
        elif times is None:
            times = self._share(total, micro, f"{micro} sequences")
        if total not in (None, micro * times * self.ranks):
            raise ValueError(f"{TOTAL} is {total}, but {MICRO} {micro} × {TIMES} {times} × {self.ranks} data-parallel "
                             f"ranks = {micro * times * self.ranks}: one of the three is wrong, or the number of ranks")
        self._say(MICRO if MICRO in self.found else TOTAL, "batch", micro)
        self._say(TIMES if TIMES in self.found else TOTAL, "accumulate", times)

    def _share(self, total: int, other: int, words: str) -> int:
        if total % (other * self.ranks):
            raise ValueError(f"{TOTAL} {total} cannot be {words} × {self.ranks} data-parallel ranks × a whole number")
        return total // (other * self.ranks)

    def _says(self, dtype: str) -> bool | None:
        """Whether a section of 16 bit is on; None if it leaves that open."""
        name = f"{dtype}.enabled"
        return self._flag("dtype") == dtype if self.found.get(name) == AUTO else self._value(name)

    def _dtype(self) -> str:
        on = {dtype: self._says(dtype) for dtype in ("fp16", "bf16")}
        if all(on.values()):
            raise ValueError("fp16 and bf16 are both enabled: parameters have one dtype")
        says = [dtype for dtype, enabled in on.items() if enabled is not None]
        dtype = next((dtype for dtype in says if on[dtype]), "fp32") if says else self._flag("dtype")
        self._say(f"{says[0]}.enabled" if says else "the file", "dtype", dtype)
        for name in ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"):
            other = self.found.get(name)
            if other not in (None, AUTO, dtype):
                raise ValueError(f"{name} is {json.dumps(other)}, and parameters are {dtype}: gradients are kept and "
                                 "reduced in that, and no other")
        if self.stage == 0 and dtype != "fp32":  # a test copies what DeepSpeed does, and then makes its losses
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
            self._say("gradient_clipping", "clip", float(largest))

    def _buckets(self) -> None:
        """Elements there, MiB here."""
        sizes = {key: self._value(f"{ZERO}.{key}") for key in ("reduce_bucket_size", "allgather_bucket_size")}
        sizes = {key: elements for key, elements in sizes.items() if elements is not None}
        if sizes and self.stage == 3:
            self.notes.append(f"{ZERO}.{' and '.join(sizes)} is ignored: at stage 3 a unit (a block) is a bucket")
        elif sizes:
            key, elements = next(iter(sizes.items()))
            if len(set(sizes.values())) > 1:
                self.notes.append(f"{ZERO}.allgather_bucket_size is ignored: a bucket here is reduced and gathered, so "
                                  "reduce_bucket_size is for both")
            self._say(f"{ZERO}.{key}", "bucket_mb", elements * DTYPES[self.dtype].itemsize / 2**20)

    def _offload(self) -> None:
        name = f"{ZERO}.offload_optimizer"
        device, folder = self._value(f"{name}.device"), self.found.get(f"{name}.nvme_path")
        if device == "nvme" and (not isinstance(folder, str) or folder == AUTO):
            raise ValueError(f"{name}.device is nvme: nvme_path must name a folder")
        if device is not None:
            place = {"none": None, "cpu": "cpu", "nvme": f"disk:{folder}"}[device]
            self._say(f"{name}.device", "offload", place)
        if device == "nvme" and self.stage in (1, 2):
            self.notes.append(f"{name}.device is nvme, and at stage {self.stage} DeepSpeed (0.19) keeps the state in "
                              "memory all the same: here it goes to disk")

    def _optimizer(self) -> dict:
        """Its type in torch, and its options; {} if the file has none."""
        if not any(key.startswith("optimizer.") for key in self.found):
            return {}
        kind = kind_of("optimizer", self.found.get("optimizer.type"))
        adam_w_mode, torch_adam, lr, *options = (self._value(f"optimizer.params.{key}") for key in (
            "adam_w_mode", "torch_adam", "lr", *ADAM))
        decoupled = kind == "AdamW" or adam_w_mode is not False
        own = ADAM | ({"weight_decay": 0.01} if decoupled and torch_adam else {})  # torch's own
        self._say("optimizer.params.lr", "lr", float(1e-3 if lr is None else lr))
        given = {key: value for key, value in zip(ADAM, options, strict=True) if value is not None}
        return {"type": "AdamW" if decoupled else "Adam"} | own | given

    def _scheduler(self) -> dict:
        """Its type, and all parameters; {} if the program's own goes on."""
        kind = self.found.get("scheduler.type")
        if kind is None:
            if self.optimizer:
                self.notes.append("no scheduler: the learning rate stays as it is, as in DeepSpeed")
            return {"type": "constant"} if self.optimizer else {}
        return {"type": kind} | self._all("scheduler.params", SCHEDULES[kind], kind)

    def _all(self, section: str, function: Callable, kind: str = "") -> dict:
        """The values of a section for what its keys become: a schedule or a scaler, which have DeepSpeed's defaults."""
        known = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()
                 if parameter.kind == parameter.KEYWORD_ONLY}
        for key in sorted(name.removeprefix(f"{section}.") for name in self.found if name.startswith(f"{section}.")):
            if kind and key not in known and key != "last_batch_iteration":
                raise ValueError(f"{kind} has no {section}.{key}: it has {', '.join(known)}")
        values = {}
        for key, default in known.items():
            value = self._value(f"{section}.{key}")
            if value is None and default is inspect.Parameter.empty:
                auto = ', or "auto" for --steps' if key == "total_num_steps" else ""
                raise ValueError(f"{kind} needs {section}.{key}: a number{auto}")
            own = self._flag("lr") if key == "warmup_max_lr" and default is None else default
            values[key] = own if value is None else value
        return values


def _shown(value: Any) -> str:
    return "no value" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def words(wanted: Wanted) -> str:
    """What the file says, as flags; and what no flag says."""
    flags = [f"--{name.replace('_', '-')} {_shown(value)}" for name, value in wanted.flags.items() if value is not None]
    more = [f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in part.items()) for name, part in (
        ("optimizer", wanted.optimizer), ("scheduler", wanted.scheduler), ("fp16", wanted.fp16)) if part]
    return "; ".join(["it says " + " ".join(flags), *more])


# -------------------------------------------------------------------------------------------------------- the flag


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Give the parser --deepspeed-config."""
    parser.add_argument("--deepspeed-config", metavar="FILE.json", help="take from a DeepSpeed configuration what it "
                        "has of all this; flags say the rest, and what both say must agree")


def of_stage(parser: Parser, arguments: argparse.Namespace, stage_class: type) -> Callable[[Settings], Settings]:
    """Fill in the flags of a stage's program from the file, if there is one; what then adds to its settings. Ends the
    program, saying what is accepted, for a file that does not fit."""
    name = stage_class.__name__

    def fit(wanted: Wanted) -> None:
        stage = stage_in(name)
        if wanted.stage != stage:
            raise ValueError(f"zero_optimization.stage is {wanted.stage}, and {name} is stage {stage}: start "
                             f"zero_minimal/stage{wanted.stage}.py with this file")
        if name in OFFLOADED and wanted.flags.get("offload", "") is None:
            raise ValueError(f"offload_optimizer.device is none, and {name} offloads: start "
                             f"zero_minimal/stage{stage}.py with this file")

    return _read(parser, arguments, fit, model_parallel=1)


def of_config(parser: Parser, arguments: argparse.Namespace) -> Callable[[Settings], Settings]:
    """The same of zero_100b.py: stage and kept activations choose one of C1 to C5."""

    def fit(wanted: Wanted) -> None:
        if wanted.flags.pop("offload", None):
            raise ValueError("zero_100b.py has no offload of optimizer state: start zero_minimal/stage"
                             f"{wanted.stage}.py with this file")
        kept = tuple(wanted.found.get(f"activation_checkpointing.{key}") is True for key in KEPT)
        fitting = [each for each, config in CONFIGS.items() if stage_in(config.stage.__name__) == wanted.stage
                   and (config.partition, config.to_host) == (kept[0] or kept[1], kept[1])]
        if not fitting:
            raise ValueError(f"none of {', '.join(CONFIGS)} is stage {wanted.stage}"
                             f"{' with cpu_checkpointing' if kept[1] else ''}: C1 and C2 are stage 1 (C2 with "
                             "partition_activations), C3 to C5 stage 2 (C4 with partition_activations, C5 with "
                             "cpu_checkpointing, too)")
        if "config" in wanted.given and wanted.given["config"] != fitting[0]:
            raise ValueError(f"it asks for {fitting[0]}, and the command line has --config {wanted.given['config']}: "
                             "leave one of them out")
        wanted.flags["config"] = fitting[0]

    return _read(parser, arguments, fit, arguments.model_parallel, mesh=True)


def _read(parser: Parser, arguments: argparse.Namespace, fit: Callable[[Wanted], None], model_parallel: int,
          mesh: bool = False) -> Callable[[Settings], Settings]:
    path = arguments.deepspeed_config
    if path is None:
        return lambda settings: settings
    ranks = int(os.environ.get("WORLD_SIZE", 1)) // model_parallel
    try:
        wanted = Wanted(read(path), parser.given_values(), vars(arguments), ranks, mesh)
        fit(wanted)
    except ValueError as error:
        parser.error(f"--deepspeed-config {path}: {error}")
    vars(arguments).update(wanted.flags)
    if int(os.environ.get("RANK", 0)) == 0:
        for line in (words(wanted), *wanted.notes):
            print(f"{os.path.basename(path)}: {line}", file=sys.stderr)
    return wanted.settings
