"""Agreement: whether all stages compute the same bits on GPUs, as they do on CPUs.

    nccl      a rank for each GPU. NCCL's order of summation depends on an element's position: with more than two ranks,
              stages may differ in the last bits
    shared    several ranks on one GPU, gloo with host staging: sums are in rank order, and bits must agree
"""

import gc
import os
import zlib
from collections.abc import Sequence

import torch

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.guards.same_on_all_ranks import checksum
from zero_minimal.offload import Offloaded1, Offloaded2, Offloaded3
from zero_minimal.processes import ranks
from zero_minimal.programs.gpu.place import Check, Place, result
from zero_minimal.programs.registry import STAGES
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

STEPS = 4
SHARING = 2  # ranks on one GPU
CLOSE = 1e-4  # relative: for sums in another order, or an update on the CPU
WAYS = {  # name: the stage, and its options for checkpoints
    **{f"stage {number}": (stage, None) for number, stage in enumerate(STAGES)},
    "stage 2, checkpoints": (Stage2, {}),
    "stage 3, checkpoints": (Stage3, {}),
    "stage 3, checkpoints on the host": (Stage3, {"to_host": True}),
}
AWAY = {"stage 1, offloaded": (Offloaded1, None), "stage 2, offloaded": (Offloaded2, None),
        "stage 3, offloaded": (Offloaded3, None), "stage 3, offloaded, checkpoints": (Offloaded3, {})}
IN_DRY = ("stage 0", "stage 3, checkpoints on the host", "stage 1, offloaded", "stage 3, offloaded, checkpoints")


def nccl(place: Place) -> dict:
    """The part: a rank for each GPU."""
    world_size = 1 if place.dry else place.gpus
    return compared(place, world_size, bits=world_size <= 2)


def shared(place: Place) -> dict:
    """The part: ranks that share a GPU."""
    # this process and its child processes see one GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return compared(place, SHARING, bits=True)


def compared(place: Place, world_size: int, bits: bool) -> dict:
    """Train in all ways, and compare losses and parameters. bits: they must be the same to the bit."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the ranks: cuBLAS gives the same bits each time
    names = IN_DRY if place.dry else [*WAYS, *AWAY]
    rows, checks = [], []
    for dtype in ("fp32",) if place.dry else ("fp32", "bf16"):
        own = place.run(train_all, world_size, place.small(dtype=dtype, steps=STEPS), names)[0]
        here, away = ([row for row in own if row["name"] in ways] for ways in (WAYS, AWAY))
        checks.append(alike(f"{dtype}: stages 0 to 3, with checkpoints and without", here, bits))
        checks.append(alike(f"{dtype}: offloaded stages, updated on the CPU", away, bits))
        furthest, limit = apart(away[0], here[0]), CLOSE if dtype == "fp32" else 1e-2
        checks.append(Check(f"{dtype}: offloaded beside stage 0", f"losses within {furthest:.1g}", f"within {limit:g}",
                            furthest <= limit))
        rows += own
    return result(checks, ranks=world_size, backend=rows[0]["backend"], rows=rows)


def alike(what: str, rows: list[dict], bits: bool) -> Check:
    """Whether all have the first one's losses and parameters."""
    odd = [row["name"] for row in rows if (row["losses"], row["sum"]) != (rows[0]["losses"], rows[0]["sum"])]
    furthest = max(apart(row, rows[0]) for row in rows)
    measured = "the same bits" if not odd else f"{', '.join(odd)}: other bits, losses within {furthest:.1g}"
    wanted = "the same bits" if bits else f"losses within {CLOSE:g}"
    return Check(what, measured, wanted, not odd if bits else furthest <= CLOSE)


def apart(row: dict, reference: dict) -> float:
    """The largest relative difference of two runs' losses; infinite if a loss is NaN."""
    pairs = list(zip(row["losses"], reference["losses"], strict=True))
    apart = [abs(loss - right) / abs(right) for loss, right in pairs]
    return max(one if one == one else float("inf") for one in apart)


def train_all(settings: Settings, names: Sequence[str]) -> list[dict]:
    """Run on each rank: train in all these ways, one after the other."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # attention by plain matrix products, since backward of fused kernels adds in any order
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows = []
    for name in names:
        stage_class, kept = (WAYS | AWAY)[name]
        with ranks.start() as rank:
            zero = loop.build(stage_class, settings, rank)
            if kept is not None:
                checkpoint_blocks(zero.model, **kept)
            steps = loop.steps(zero, loop.training_batches(settings, rank.rank), settings)
            losses = [sum(part.item() for part in parts) for parts in steps]
            with zero.gather_parameters():
                sums = [checksum(param) for param in zero.model.parameters()]
            rows.append({"name": name, "dtype": settings.dtype, "losses": loop.mean_over_ranks(losses, rank),
                         "backend": rank.backend, "sum": zlib.crc32(repr(sums).encode())})
            del zero, steps
            gc.collect()
            if rank.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows
