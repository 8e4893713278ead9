"""Fragments: compares M_D, and our model of CUDA's allocator, with torch.cuda.memory_stats.

A training with sequences of many lengths is recorded on the CPU, with slabs and without (programs/lesson08_program.py).
Then the GPU's allocator serves the same tensors in the same order, and reports what it held.
"""

import torch

from zero_minimal.meters import gpu
from zero_minimal.meters.allocator import CachingAllocator, replay
from zero_minimal.programs.gpu.place import Check, Place, result
from zero_minimal.programs.lesson08_program import record, varied_lengths
from zero_minimal.workload.model import GPTConfig

NEAR = 20 * 2**20  # bytes of a segment. Addresses decide among equal blocks, and the model does not know them
BATCH, ACCUMULATE = 8, 3


def run(place: Place) -> dict:
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
