"""Throughput: our stages compared with torch's DDP and FSDP2 on GPUs."""

import gc
import statistics

from zero_minimal.meters import gpu
from zero_minimal.meters.timing import time_steps
from zero_minimal.processes import ranks
from zero_minimal.programs.gpu.place import BUCKET, Check, Place, result
from zero_minimal.programs.registry import CONTENDERS
from zero_minimal.workload.settings import Settings

NAMES = ("DDP", "stage 0", "stage 1", "stage 2", "stage 3", "FSDP2")
WARM_UP, STEPS = 5, 20
CLOSE = 2e-2  # relative: for bf16, and sums in another order


def throughput(place: Place) -> dict:
    """The part: milliseconds per step and tokens per second, each contender in turn, in the same ranks."""
    world_size = 1 if place.dry else place.gpus
    settings = place.settings(steps=2 if place.dry else STEPS)
    rows = place.run(time_all, world_size, settings)[0]
    first = rows[0]["losses"][-1]
    checks = [Check(f"{row['name']}: its last loss beside DDP's", f"{row['losses'][-1]:.4f}",
                    f"{first:.4f}, within {CLOSE:.0%}", abs(row["losses"][-1] - first) <= CLOSE * first)
              for row in rows[1:]]
    return result(checks, ranks=world_size, rows=rows, settings=f"{settings}")


def time_all(settings: Settings) -> list[dict]:
    """Run on each rank: time all contenders."""
    rows = []
    for name in NAMES:
        with ranks.start() as rank:
            meter = gpu.of(rank.device)
            gc.collect()
            meter.forget()
            timed = time_steps(CONTENDERS[name], settings, WARM_UP, bucket_bytes=BUCKET)
            seconds = statistics.median(timed["seconds"])
            rows.append({"name": name, "losses": timed["losses"], "allocated": meter.highest(), "step_seconds": seconds,
                         "tokens_per_second": settings.tokens_per_step(rank.world_size) / seconds})
    return rows
