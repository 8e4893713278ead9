"""Place: where a part of check-gpu runs, what it trains there, and how it says what it found."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from zero_minimal.processes import ranks
from zero_minimal.workload.settings import Settings

SMALL = dict(layers=2, hidden=32, heads=2, sequence=16, batch=2)  # --dry, and what compares bits


@dataclass(frozen=True)
class Place:
    """gpus: how many there are. dry: none is used, all is on the CPU and small. trace: where a trace shall be kept.
    limit: seconds for this part."""

    gpus: int = 0
    dry: bool = False
    trace: str = ""
    limit: float = 60.0

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def run(self, function: Callable, world_size: int, *args) -> list:
        """The function's results, of new ranks. If they hang it says where, before this process has to end."""
        rest = dict(device=self.device, timeout=self.limit - 5)
        if self.dry:  # small, so that threads would only wait for each other
            return ranks.run(in_one_thread, world_size, function, *args, **rest)
        return ranks.run(function, world_size, *args, **rest)

    def settings(self, **others) -> Settings:
        """What a GPU has something to do with, so that it is no slower to compute than Python is to ask for it: 302
        million parameters where memory takes them, else 85, and as many tokens as it takes."""
        if self.dry:
            return Settings(**{**SMALL, "dtype": "bf16"} | others)
        sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(self.gpus)]
        batch = max(1, min(16, int(min(sizes) // 4e9)))
        layers, hidden = (6, 2048) if min(sizes) > 60e9 else (12, 768)
        return Settings(**dict(layers=layers, hidden=hidden, heads=hidden // 64, sequence=1024, batch=batch,
                               dtype="bf16") | others)

    def small(self, **others) -> Settings:
        """What is quick, whatever has to be compared."""
        return Settings(**(SMALL if self.dry else dict(layers=4, hidden=256, heads=4, sequence=64, batch=4)) | others)


def in_one_thread(function: Callable, *args) -> object:
    """What the function returns."""
    torch.set_num_threads(1)
    return function(*args)


@dataclass(frozen=True)
class Check:
    """What was measured, and whether it is what was wanted: True, False, or None where there was nothing to measure."""

    what: str
    measured: str
    wanted: str
    ok: bool | None


def result(checks: list[Check], **more) -> dict:
    """What a part writes: its checks, and the numbers for table and pictures."""
    return {"checks": [asdict(check) for check in checks], **more}


def one_gpu_only() -> None:
    """From here on this process, and what it starts, sees one GPU: so that several ranks have to share it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]


def same_bits() -> None:
    """From here on, in this process and in what it starts, the same computation gives the same bits."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def ask_for_same_bits() -> None:
    """The same, in a rank. Attention is plain products of matrices: backward of the fused kernels adds in any order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
