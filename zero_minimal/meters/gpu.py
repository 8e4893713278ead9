"""GPU: what torch says of a GPU's memory and time, and stand-ins that say it of a CPU.

A measurement asks `of(device)` and never torch.cuda, so that its own code runs where there is no GPU. What the
stand-in says of memory is what torch's own ledger of a process would be: nothing; its clock is the CPU's.
"""

import time

import torch


class Cuda:
    """The current GPU, through torch."""

    is_there = True

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was given."""
        torch.cuda.synchronize()

    def now(self) -> torch.cuda.Event:
        """A moment of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start, end) -> float:
        """From one moment to another; both must have come."""
        return start.elapsed_time(end) / 1000

    def allocated(self) -> int:
        """Bytes in tensors, each rounded up to 512."""
        return torch.cuda.memory_allocated()

    def highest(self) -> int:
        """The most of them since forget()."""
        return torch.cuda.max_memory_allocated()

    def forget(self) -> None:
        """Give back what is free, and begin the peaks anew."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def stats(self) -> dict[str, int]:
        """Of the allocator, since forget(): bytes held at the peak, in use at the peak, and the most that lay in
        pieces beside used ones; how often it had to give all back and ask again."""
        stats = torch.cuda.memory_stats()
        return {
            "reserved": stats.get("reserved_bytes.all.peak", 0),
            "allocated": stats.get("allocated_bytes.all.peak", 0),
            "split": stats.get("inactive_split_bytes.all.peak", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }


class StandIn:
    """No GPU: `--dry`."""

    is_there = False

    def synchronize(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start, end) -> float:
        return end - start

    def allocated(self) -> int:
        return 0

    highest = allocated

    def forget(self) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {"reserved": 0, "allocated": 0, "split": 0, "retries": 0}


def of(device: torch.device) -> Cuda | StandIn:
    """What speaks for this device."""
    return Cuda() if device.type == "cuda" else StandIn()


def warm_up(device: torch.device) -> None:
    """Let cuBLAS take its workspaces now, for forward and for backward's thread: no tensor's memory, and tens of MB."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(256, 256, device=device, dtype=dtype)
        layer(torch.ones(256, 256, device=device, dtype=dtype)).sum().backward()
    of(device).synchronize()
