"""Memory: whether the ledger agrees with CUDA's allocator, now and at the peak."""

import gc

from zero_minimal.meters import gpu
from zero_minimal.meters.memory import Ledger
from zero_minimal.processes import ranks
from zero_minimal.programs.gpu.place import Check, Place, result
from zero_minimal.programs.registry import STAGES
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

NOW, AT_THE_PEAK = 0.02, 0.05  # tolerances: only the allocator's peak includes a kernel's own scratch


def run(place: Place) -> dict:
    """The part: check each stage, on a rank for each GPU."""
    world_size = 1 if place.dry else place.gpus
    rows = place.run(count, world_size, place.settings(dtype="fp32", steps=3))[0]
    checks = [check(row, *rest) for row in rows
              for rest in (("now", NOW, "after a step"), ("peak", AT_THE_PEAK, "at the peak"))]
    return result(checks, ranks=world_size, rows=rows)


def check(row: dict, key: str, limit: float, when: str) -> Check:
    """Compare the ledger with the allocator."""
    ledger, allocator = row["ledger"][key], row["allocator"][key]
    what = f"{row['name']}, {when}: the ledger, against torch.cuda"
    if not allocator:
        return Check(what, f"{ledger / 1e6:,.1f} MB in the ledger", f"within {limit:.0%}", None)
    apart = abs(ledger - allocator) / allocator
    return Check(what, f"{ledger / 1e6:,.1f} of {allocator / 1e6:,.1f} MB, {apart:.2%} apart", f"within {limit:.0%}",
                 apart <= limit)


def count(settings: Settings) -> list[dict]:
    """Run on each rank: bytes by ledger and by allocator, for each stage."""
    rows = []
    with ranks.start() as rank:
        meter = gpu.of(rank.device)
        gpu.warm_up(rank.device)
        for number, stage in enumerate(STAGES):
            gc.collect()
            meter.forget()
            before = meter.allocated()
            with Ledger(rank.device) as ledger:
                there = ledger.rounded(512)
                zero = loop.build(stage, settings, rank)
                ledger.watch(zero.model, zero)
                batches = list(_batches(settings, rank))
                for _ in loop.steps(zero, batches, settings):
                    pass
                meter.synchronize()
                row = {"name": f"stage {number}", "ledger": {"now": ledger.rounded(512) - there},
                       "allocator": {"now": meter.allocated() - before}, "categories": ledger.states()}
            # measure the peak in a separate unwatched step: the ledger briefly keeps alive what it looks at
            with Ledger(rank.device) as ledger:
                ledger.watch(zero.model, zero)
                ledger.reset()
                meter.synchronize()
                meter.forget()
                for _ in loop.steps(zero, batches, settings, first=settings.steps - 1):
                    pass
                meter.synchronize()
                row["ledger"]["peak"] = ledger.peak.total - there
            row["allocator"]["peak"] = meter.highest() - before if meter.is_there else 0
            rows.append(row)
            del zero, batches
    return rows


def _batches(settings: Settings, rank):
    source = loop.training_batches(settings, rank.rank)
    for _ in range(settings.steps):
        inputs, targets = next(source)
        yield inputs.to(rank.device), targets.to(rank.device)
