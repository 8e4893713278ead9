"""GPU: torch's figures for a GPU's memory and time, and a stand-in for a CPU.

A measurement calls `of(device)` and never torch.cuda, so that its own code also runs without a GPU. The stand-in
reports no memory, and its clock is the CPU's.
"""

import time

import torch


class Cuda:
    """The current GPU, through torch."""

    is_there = True

    def synchronize(self) -> None:
        """Wait until the GPU has done all its work."""
        torch.cuda.synchronize()

    def now(self) -> torch.cuda.Event:
        """A moment in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start, end) -> float:
        """Seconds between two moments, which both must have passed."""
        return start.elapsed_time(end) / 1000

    def allocated(self) -> int:
        """Bytes in tensors, each rounded up to 512."""
        return torch.cuda.memory_allocated()

    def highest(self) -> int:
        """The peak of allocated() since forget()."""
        return torch.cuda.max_memory_allocated()

    def forget(self) -> None:
        """Return free memory to the driver, and reset the peaks."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def stats(self) -> dict[str, int]:
        """The allocator since forget(): peak bytes reserved, allocated, and free in partly used segments; how often it
        had to return all free memory and ask the driver again."""
        stats = torch.cuda.memory_stats()
        return {
            "reserved": stats.get("reserved_bytes.all.peak", 0),
            "allocated": stats.get("allocated_bytes.all.peak", 0),
            "split": stats.get("inactive_split_bytes.all.peak", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }


class StandIn(Cuda):
    """No GPU: `--dry`. Torch then reports no memory."""

    is_there = False

    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start, end) -> float:
        return end - start

    def forget(self) -> None:
        pass


def of(device: torch.device) -> Cuda | StandIn:
    """The Cuda or StandIn for this device."""
    return Cuda() if device.type == "cuda" else StandIn()


def warm_up(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces now, in forward's and backward's threads: tens of MB outside any tensor."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(256, 256, device=device, dtype=dtype)
        layer(torch.ones(256, 256, device=device, dtype=dtype)).sum().backward()
    of(device).synchronize()
