"""Place: where a part of check-gpu runs, what it trains there, how it reports results; and the first part, which says
what the place has: hardware, versions, and whether a GPU computes the same as the CPU."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from zero_minimal.processes import ranks
from zero_minimal.workload.settings import Settings

BUCKET = 25 * 2**20  # bytes, as in DDP: our 4 MiB are for CPUs, and make a GPU wait for Python
SMALL = dict(layers=2, hidden=32, heads=2, sequence=16, batch=2)  # for --dry, and for comparing bits


@dataclass(frozen=True)
class Place:
    """gpus: how many there are. dry: use none, run small versions on the CPU. trace: where to save a trace. limit:
    seconds for this part."""

    gpus: int = 0
    dry: bool = False
    trace: str = ""
    limit: float = 60.0

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def run(self, function: Callable, world_size: int, *args) -> list:
        """The function's results from new ranks. If they hang, it reports where before its own time is up."""
        rest = dict(device=self.device, timeout=self.limit - 5)
        if self.dry:  # the models are so small that threads would only wait for each other
            return ranks.run(in_one_thread, world_size, function, *args, **rest)
        return ranks.run(function, world_size, *args, **rest)

    def settings(self, **others) -> Settings:
        """Settings that keep a GPU busy, so that Python is not the bottleneck: 302 million parameters if memory allows,
        else 85 million, and as many tokens as needed."""
        if self.dry:
            return Settings(**{**SMALL, "dtype": "bf16"} | others)
        sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(self.gpus)]
        batch = max(1, min(16, int(min(sizes) // 4e9)))
        layers, hidden = (6, 2048) if min(sizes) > 60e9 else (12, 768)
        return Settings(**dict(layers=layers, hidden=hidden, heads=hidden // 64, sequence=1024, batch=batch,
                               dtype="bf16") | others)

    def small(self, **others) -> Settings:
        """Small and quick settings, for comparisons."""
        return Settings(**(SMALL if self.dry else dict(layers=4, hidden=256, heads=4, sequence=64, batch=4)) | others)


def in_one_thread(function: Callable, *args) -> object:
    """Run a function in one thread; return its result."""
    torch.set_num_threads(1)
    return function(*args)


@dataclass(frozen=True)
class Check:
    """A measurement, and whether it is as wanted: True, False, or None if there was nothing to measure."""

    what: str
    measured: str
    wanted: str
    ok: bool | None


def result(checks: list[Check], **more) -> dict:
    """The results of a part: its checks, and the numbers for table and pictures."""
    return {"checks": [asdict(check) for check in checks], **more}


def machine(place: Place) -> dict:
    """The part: names, versions, memory; a product of two matrices."""
    torch.manual_seed(0)
    one, other = torch.randn(2, 256, 256, dtype=torch.float64)
    device = torch.device(place.device)
    furthest = (one.to(device) @ other.to(device)).cpu().sub(one @ other).abs().max().item()
    what = "a product of two fp64 matrices, against the CPU's"
    check = Check(what, f"{furthest:.1g}", "at most 1e-10", furthest <= 1e-10)
    return result([check], machine=facts(place))


def facts(place: Place) -> dict:
    """For the JSON: versions, and each GPU."""
    told = {"python": platform.python_version(), "torch": torch.__version__, "gpus": []}
    if place.dry:
        return told
    told["cuda"] = torch.version.cuda
    told["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        told["gpus"].append({"name": properties.name, "bytes": properties.total_memory,
                             "capability": f"{properties.major}.{properties.minor}",
                             "processors": properties.multi_processor_count})
    return told
