"""What a DeepSpeed file asks for: its keys as flags of these programs, and what else is to say.

    found = deepspeed_file.read("ds.json")      # {"zero_optimization.stage": 2, …}
    wanted = Wanted(found, given, defaults, ranks=4)
    wanted.flags                                # {"batch": 4, "dtype": "bf16", …}
    wanted.settings(settings)                   # with the file's optimizer, schedule, loss scale
    wanted.notes                                # a line for each key that is ignored, and why

deepspeed_keys.py is the table of all keys. What the file leaves open, or calls "auto", the flags
say, as Hugging Face's Trainer fills it in. What both say must agree.
"""

import json
from dataclasses import fields
from typing import Any

from zero_minimal.workload.deepspeed_file import check_kind, row_of
from zero_minimal.workload.deepspeed_keys import DEFAULTS, OFF
from zero_minimal.workload.deepspeed_schedules import (
    CHOICES,
    NEEDED,
    OF_OPTIMIZER,
    PARAMETERS,
    WHOLE,
)
from zero_minimal.workload.deepspeed_settings import FromDeepSpeed
from zero_minimal.workload.settings import DTYPES, Settings

AUTO = "auto"
SAME_DTYPE = ("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype")


_OF_LR = "scheduler.params.warmup_max_lr"  # "auto" is --lr


class Wanted:
    """What a file asks of a program.

    Args:
        found: what read() returned.
        given: {name: value} of the flags on the command line, and `defaults` of all flags.
        ranks: data-parallel ones, by which the batch is divided.
        mesh: whether the program has ranks that share a model (zero_100b.py).
    flags: what the file says of them. Raises: ValueError, for what contradicts itself, the flags
        or what can be done here.
    """

    def __init__(self, found: dict, given: dict, defaults: dict, ranks: int, mesh: bool = False):
        self.found, self.given, self.defaults, self.ranks = found, given, defaults, ranks
        self.notes: list[str] = []
        self.left_open: list[str] = []  # keys that are "auto", and that no flag says
        self.flags: dict[str, Any] = {}
        for name, value in found.items():
            self._look_up(name, value, mesh)
        self.stage = self._whole("zero_optimization.stage", least=0) or 0
        if self.stage > 3:
            raise ValueError(f"zero_optimization.stage is 0, 1, 2 or 3, not {self.stage}")
        self._batch()
        self.dtype = self._dtype()
        self._without_zero()
        self._clipping()
        self._buckets()
        self._offload()
        self.optimizer = self._optimizer()
        self.scheduler = self._scheduler()
        self.fp16 = self._fp16()
        if self.left_open:
            self.notes.append(f'"auto" is DeepSpeed\'s default for {", ".join(self.left_open)}: no '
                              "flag says it")

    def settings(self, settings: Settings) -> FromDeepSpeed:
        """Those of the flags, with what the file has beside them."""
        plain = {each.name: getattr(settings, each.name) for each in fields(Settings)}
        return FromDeepSpeed(**plain, optimizer=self.optimizer, scheduler=self.scheduler,
                             fp16=self.fp16)

    def _look_up(self, name: str, value: Any, mesh: bool) -> None:
        """A note for a key that is ignored. Raises: ValueError for one that is refused."""
        does, why, same = row_of(name)
        if value in OFF and same == OFF or value in same or _is_off(value) and same == OFF:
            return
        if does == "refused":
            raise ValueError(f"{name} = {json.dumps(value)} is not possible here: {why}")
        if does == "ignored" or does == "mesh" and not mesh:
            self.notes.append(f"{name} is ignored: {why}")

    # values, and where they come from

    def _value(self, name: str, flag: str = "") -> Any:
        """That of the file; for "auto" that of the flag; None if the file leaves it open."""
        value = self.found.get(name)
        if value != AUTO:
            return value
        if flag:
            return self.given.get(flag, self.defaults.get(flag))
        if name.partition(".")[0] in ("optimizer", "scheduler", "fp16") and name != _OF_LR:
            self.left_open.append(name)
        return None

    def _say(self, name: str, flag: str, value: Any) -> None:
        """The flag has this value. Raises: ValueError if the command line says otherwise."""
        if flag in self.given and self.given[flag] != value:
            shown = "--" + flag.replace("_", "-")
            raise ValueError(f"{name} makes {shown} {_shown(value)}, and the command line has "
                             f"{shown} {_shown(self.given[flag])}: leave one of them out")
        self.flags[flag] = value

    def _whole(self, name: str, flag: str = "", least: int = 1) -> int | None:
        """A whole number; 5e8 is one."""
        value = self._number(name, flag, least)
        if value is not None and value != int(value):
            raise ValueError(f"{name} must be a whole number from {least} up, not {value}")
        return None if value is None else int(value)

    def _number(self, name: str, flag: str = "", least: float = 0) -> float | None:
        value = self._value(name, flag)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value < float("inf")):
            raise ValueError(f"{name} must be a number from {least} up, not {json.dumps(value)}")
        return value

    def _truth(self, name: str, flag_says: bool | None = None) -> bool | None:
        value = self.found.get(name)
        if value == AUTO:
            return flag_says
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, not {json.dumps(value)}")
        return value

    # what becomes of them

    def _batch(self) -> None:
        """As DeepSpeed does: any of the three may be missing, and follows from the others."""
        total_key, micro_key, times_key = (
            "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        total = self._whole(total_key)
        micro, times = self._whole(micro_key, "batch"), self._whole(times_key, "accumulate")
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
            raise ValueError(
                f"{total_key} is {total}, but {micro_key} {micro} × {times_key} {times} × "
                f"{self.ranks} data-parallel ranks = {micro * times * self.ranks}: one of the "
                "three is wrong, or the number of ranks")
        self._say(micro_key if micro_key in self.found else total_key, "batch", micro)
        self._say(times_key if times_key in self.found else total_key, "accumulate", times)

    def _share(self, total: int, other: int, words: str) -> int:
        if total % (other * self.ranks):
            raise ValueError(f"train_batch_size {total} cannot be {words} × {self.ranks} "
                             "data-parallel ranks × a whole number")
        return total // (other * self.ranks)

    def _dtype(self) -> str:
        flag = self.given.get("dtype", self.defaults["dtype"])
        on = {dtype: self._truth(f"{dtype}.enabled", flag == dtype) for dtype in ("fp16", "bf16")}
        if all(on.values()):
            raise ValueError("fp16 and bf16 are both enabled: parameters have one dtype")
        says = [dtype for dtype, enabled in on.items() if enabled is not None]
        dtype = next((dtype for dtype in says if on[dtype]), "fp32") if says else flag
        self._say(f"{says[0]}.enabled" if says else "the file", "dtype", dtype)
        for name in SAME_DTYPE:
            other = self.found.get(name)
            if other not in (None, AUTO, dtype):
                raise ValueError(f"{name} is {json.dumps(other)}, and parameters are {dtype}: "
                                 "gradients are kept and reduced in that, and no other")
        return dtype

    def _without_zero(self) -> None:
        """What DeepSpeed itself does otherwise: a test copies it, and then makes its losses."""
        if self.stage == 0 and self.dtype != "fp32":
            scale = ", and divides gradients by a loss scale that its loss never had"
            self.notes.append(f"stage 0 in {self.dtype}: DeepSpeed's own begins with an Adam step "
                              f"on gradients of 0{scale if self.dtype == 'fp16' else ''}, so its "
                              "losses are others; at stages 1 to 3 they are those here")

    def _clipping(self) -> None:
        largest = self._number("gradient_clipping", "clip")
        if largest is None and "clip" not in self.given:
            largest = DEFAULTS["gradient_clipping"]
            self.notes.append(f"gradient_clipping is not there: clipped at {largest}, DeepSpeed's "
                              "default (0.19; older ones have 0); --clip 0 does not clip")
        if largest is not None:
            self._say("gradient_clipping", "clip", float(largest))

    def _buckets(self) -> None:
        """Elements there, MiB here."""
        section = "zero_optimization"
        sizes = {key: self._whole(f"{section}.{key}") for key in
                 ("reduce_bucket_size", "allgather_bucket_size")}
        sizes = {key: elements for key, elements in sizes.items() if elements is not None}
        if not sizes:
            return
        if self.stage == 3:
            self.notes.append(f"{section}.{' and '.join(sizes)} is ignored: at stage 3 a unit (a "
                              "block) is a bucket")
            return
        key, elements = next(iter(sizes.items()))
        if len(set(sizes.values())) > 1:
            self.notes.append(f"{section}.allgather_bucket_size is ignored: a bucket here is "
                              "reduced and gathered, so reduce_bucket_size is for both")
        bucket_mb = elements * DTYPES[self.dtype].itemsize / 2**20
        self._say(f"{section}.{key}", "bucket_mb", bucket_mb)

    def _offload(self) -> None:
        section = "zero_optimization.offload_optimizer"
        device, folder = (self._value(f"{section}.{key}") for key in ("device", "nvme_path"))
        if device not in (None, "none", "cpu", "nvme"):
            raise ValueError(f"{section}.device is none, cpu or nvme, not {json.dumps(device)}")
        if device == "nvme" and not isinstance(folder, str):
            raise ValueError(f"{section}.device is nvme: nvme_path must name a folder")
        if device is not None:
            self._say(f"{section}.device", "offload",
                      {"none": None, "cpu": "cpu", "nvme": f"disk:{folder}"}[device])
        if device == "nvme" and self.stage in (1, 2):
            self.notes.append(f"{section}.device is nvme, and at stage {self.stage} DeepSpeed "
                              "(0.19) keeps the state in memory all the same: here it goes to disk")

    def _optimizer(self) -> dict:
        """Its type in torch, and its options; {} if the file has none."""
        if not any(key.startswith("optimizer.") for key in self.found):
            return {}
        kind = check_kind("optimizer", self.found.get("optimizer.type"))
        adam_w_mode = self._truth("optimizer.params.adam_w_mode") is not False
        decoupled = kind == "AdamW" or adam_w_mode
        options = dict(DEFAULTS["optimizer"])
        if decoupled and self._truth("optimizer.params.torch_adam"):
            options["weight_decay"] = 0.01  # torch's own
        default, lr = options.pop("lr"), self._number("optimizer.params.lr", "lr")
        self._say("optimizer.params.lr", "lr", float(default if lr is None else lr))
        for key in ("eps", "weight_decay"):
            value = self._number(f"optimizer.params.{key}")
            options[key] = options[key] if value is None else value
        betas = self._value("optimizer.params.betas")
        if betas is not None and not _are_betas(betas):
            raise ValueError(f"optimizer.params.betas must be two numbers from 0 to below 1, not "
                             f"{json.dumps(betas)}")
        options["betas"] = list(betas or options["betas"])
        return {"type": "AdamW" if decoupled else "Adam", **options}

    def _scheduler(self) -> dict:
        """Its type, and all parameters; {} if the program's own goes on."""
        kind = self.found.get("scheduler.type")
        start = "scheduler.params."
        params = {key.removeprefix(start) for key in self.found if key.startswith(start)}
        if kind is None:
            if self.optimizer:
                self.notes.append("no scheduler: the learning rate stays as it is, as in DeepSpeed")
            return {"type": "constant"} if self.optimizer else {}
        wanted = PARAMETERS[kind]
        for name in sorted(params - set(wanted) - {"last_batch_iteration"}):
            raise ValueError(f"{kind} has no scheduler.params.{name}: it has {', '.join(wanted)}")
        return {"type": kind} | {name: self._of_schedule(kind, name, default)
                                 for name, default in wanted.items()}

    def _of_schedule(self, kind: str, name: str, default: Any) -> Any:
        key = f"scheduler.params.{name}"
        if name in CHOICES:
            value = self._value(key)
            if value not in (None, *CHOICES[name]):
                raise ValueError(f"{key} is {' or '.join(CHOICES[name])}, not {json.dumps(value)}")
        elif isinstance(default, bool):
            value = self._truth(key)
        elif name in WHOLE:
            value = self._whole(key, "steps" if name == "total_num_steps" else "", WHOLE[name])
        else:
            value = self._number(key)
        if value is not None:
            return value
        if default == NEEDED:
            auto = ', or "auto" for --steps' if name == "total_num_steps" else ""
            raise ValueError(f"{kind} needs {key}: a number{auto}")
        if default == OF_OPTIMIZER or name == "warmup_max_lr" and self.found.get(key) == AUTO:
            return self.flags.get("lr", self.given.get("lr", self.defaults["lr"]))
        return default

    def _fp16(self) -> dict:
        """All values of its section; {} if it is not on."""
        if not self._truth("fp16.enabled", self.dtype == "fp16"):
            return {}
        values = {}
        for key, default in DEFAULTS["fp16"].items():
            name = f"fp16.{key}"
            if isinstance(default, bool):
                value = self._truth(name)
            elif key in ("loss_scale_window", "hysteresis"):
                value = self._whole(name)
            else:
                value = self._number(name, least=2.0**-24 if key == "min_loss_scale" else 0)
            values[key] = default if value is None else value
        return values


def _is_off(value: Any) -> bool:
    """Whether it is a section that is turned off."""
    if not isinstance(value, dict):
        return False
    return value.get("enabled", value.get("device", True)) in OFF


def _are_betas(value: Any) -> bool:
    return (isinstance(value, list) and len(value) == 2
            and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in value))


def _shown(value: Any) -> str:
    return "no value" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
