"""Memory, beside the figures of CUDA's allocator.

    memory       the ledger, now and at the peak
    fragments    M_D, and our model of that allocator. A training with sequences of many lengths is recorded on the CPU,
                 with slabs and without (programs/lesson08_program.py). Then the GPU's allocator serves the same tensors
                 in the same order, and reports what it held
"""

import gc

import torch

from zero_minimal.meters import gpu
from zero_minimal.meters.allocator import CachingAllocator, replay
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.timing import draw_batches
from zero_minimal.processes import ranks
from zero_minimal.programs.gpu.place import Check, Place, result
from zero_minimal.programs.lesson08_program import record, varied_lengths
from zero_minimal.programs.registry import STAGES
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Settings

NOW, AT_THE_PEAK = 0.02, 0.05  # tolerances: only the allocator's peak includes a kernel's own scratch
NEAR = 20 * 2**20  # bytes of a segment. Addresses decide among equal blocks, and the model does not know them
BATCH, ACCUMULATE = 8, 3  # of the recorded training


def memory(place: Place) -> dict:
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
                batches = list(draw_batches(settings, rank, settings.steps))
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


# ------------------------------------------------------------------------------------------------------------ fragments


def fragments(place: Place) -> dict:
    """The part: used and unused bytes of the allocator at the peak, with and without slabs."""
    sizes = dict(layers=2, hidden=32, sequence=32, vocabulary=256) if place.dry else \
        dict(layers=3, hidden=128, sequence=192, vocabulary=16384)
    config = GPTConfig(heads=2, **sizes)
    lengths = varied_lengths(ACCUMULATE, config.sequence, 4)
    device, rows, checks = torch.device(place.device), [], []
    for name, slabs in (("without slabs", False), ("with slabs", True)):
        trace = record(config, lengths, BATCH, ACCUMULATE, slabs, 4, name, shown=False).trace
        model = replay(trace, CachingAllocator(2**62))
        stats = asked_for(trace, device)
        rows.append({"name": name, "events": len(trace), "model": {"reserved": model.peak_reserved,
                     "allocated": model.peak_allocated}, "allocator": stats})
        apart = abs(stats["reserved"] - model.peak_reserved)
        checks.append(Check(f"{name}: what the allocator holds at the peak, against our model of it",
                            f"{stats['reserved'] / 2**20:.0f} and {model.peak_reserved / 2**20:.0f} MiB",
                            f"within {NEAR / 2**20:.0f} MiB", apart <= NEAR if stats["reserved"] else None))
    without, with_slabs = (row["allocator"] for row in rows)
    checks.append(Check("held and not in use, at the peak, with slabs",
                        f"{unused(with_slabs) / 2**20:.0f} MiB", f"less than {unused(without) / 2**20:.0f}, as without",
                        unused(with_slabs) < unused(without) if without["reserved"] else None))
    return result(checks, rows=rows)


def unused(stats: dict) -> int:
    """Bytes that the allocator held at the peak but were not in use."""
    return stats["reserved"] - stats["allocated"]


def asked_for(trace: list, device: torch.device) -> dict[str, int]:
    """The allocator's peaks when it serves these tensors, minus what it had before."""
    meter, tensors = gpu.of(device), {}
    if meter.is_there:
        torch.empty(1, device=device)
    meter.forget()
    before = meter.stats()
    for event in trace:
        if event.bytes > 0:
            tensors[event.storage] = torch.empty(event.bytes, dtype=torch.uint8, device=device)
        else:
            tensors.pop(event.storage, None)
    after = meter.stats()
    return {name: after[name] - before[name] for name in after}
