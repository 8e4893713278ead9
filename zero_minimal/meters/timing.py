"""Timing: what a rank does to be measured, for one stage or peer. programs/bench.py starts the ranks and compares.

    time_steps     nothing but the steps, a clock, and the highest memory the operating system saw
    watch_steps    a short run under the memory ledger and the traffic meter, which slow it
"""

import gc
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from zero_minimal.meters.observer import Observer
from zero_minimal.meters.traffic import wire_bytes
from zero_minimal.processes import ranks
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

# Linux's; elsewhere what they tell stays unknown
STATUS, FORGET_PEAK, MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/stat")


def time_steps(stage_class, settings: Settings, warm_up: int, *, one_by_one: bool = True, **options) -> dict:
    """Train on this rank, `warm_up` steps and then settings.steps more.

    one_by_one: let all ranks meet after each step. Else they meet at the end alone: what a step leaves under way
        travels while the next begins, and all steps count as one of their mean time.
    options: of the stage.

    Returns, with None for what this machine does not tell:
        seconds: of each step after the warm-up, from one barrier to the next.
        losses: of all steps, of this rank's batches.
        wire_bytes: what this rank's connections carried away in a step after the warm-up.
        resident_bytes: the peak of memory from before the model was built, less what was there then.
        elapsed_seconds: of the steps and of building the model.
        cpu_seconds: what all threads of this rank worked in that time.
        machine_seconds: what all processors of this machine worked in that time, for anybody.
    """
    with ranks.start() as rank:
        stay_on_one_core(rank)
        batches = list(draw_batches(settings, rank, warm_up + settings.steps))
        prepare(stage_class, rank.device)
        memory, began = start_of_memory(rank.device), together(rank.device)
        own, machine, wire = time.process_time(), machine_seconds(), wire_bytes()
        zero = loop.build(stage_class, settings, rank, **options)
        losses, marks, first = [], [together(rank.device)], 0  # marks: seconds, when each step was over on all ranks
        for parts in loop.steps(zero, batches, replace(settings, steps=warm_up + settings.steps)):
            losses += parts
            if one_by_one or len(losses) in (warm_up, warm_up + settings.steps):
                marks.append(together(rank.device))
            if len(losses) == warm_up:
                wire, first = wire_bytes(), len(marks) - 1
        now_wire = wire_bytes()
        return {
            "seconds": [(end - start) / (1 if one_by_one else settings.steps)
                        for start, end in itertools.pairwise(marks[first:])],
            "losses": [loss.item() for loss in losses],
            "wire_bytes": None if wire is None else (now_wire - wire) / settings.steps,
            "resident_bytes": None if memory is None else peak_of_memory(rank.device) - memory,
            "elapsed_seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - own,
            "machine_seconds": None if machine is None else machine_seconds() - machine,
        }


def watch_steps(stage_class, settings: Settings, **options) -> dict:
    """A short run under the ledger and the traffic meter: the observer's report of this rank."""
    with ranks.start() as rank:
        batches = list(draw_batches(settings, rank, settings.steps))
        prepare(stage_class, rank.device)
        zero = loop.build(stage_class, settings, rank, **options)
        observer = Observer(zero, rank, settings)
        for _ in loop.steps(zero, batches, settings, observers=[observer]):
            pass
        return observer.report()


def draw_batches(settings: Settings, rank: ranks.Rank, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches, drawn before any clock runs: (inputs, targets), int64 [batch, sequence] on its device."""
    batches = loop.training_batches(settings, rank.rank)
    for _ in range(count):
        inputs, targets = next(batches)
        yield inputs.to(rank.device), targets.to(rank.device)


def prepare(stage_class, device: torch.device) -> None:
    """What has to be there before the model is: DeepSpeed imports itself."""
    if hasattr(stage_class, "prepare"):
        stage_class.prepare(device)
    gc.collect()


def together(device: torch.device) -> float:
    """Wait until every rank is here and its device has nothing left to do; the time, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def stay_on_one_core(rank: ranks.Rank) -> None:
    """Compute in one thread, and keep all threads of this process, gloo's too, on one core. Not for a GPU's host."""
    if rank.device.type != "cpu":
        return
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[rank.rank % len(cores)]})


def start_of_memory(device: torch.device) -> int | None:
    """Bytes this rank holds now, and the peak begins anew. None where nobody can tell.

    That is resident memory as Linux counts it (VmRSS); on a GPU, what torch's allocator has taken from it.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved()
    try:
        FORGET_PEAK.write_text("5")  # VmHWM begins anew at VmRSS
        return _status("VmRSS")
    except OSError:
        return None


def peak_of_memory(device: torch.device) -> int:
    """The most bytes this rank held since start_of_memory()."""
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else _status("VmHWM")


def machine_seconds() -> float | None:
    """Seconds that all processors of this machine together have worked since it came up, or that its host took away."""
    try:
        user, nice, system, _idle, _waiting, _irq, _softirq, stolen, *_ = MACHINE.read_text().split()[1:]
    except OSError:
        return None
    return (int(user) + int(nice) + int(system) + int(stolen)) / os.sysconf("SC_CLK_TCK")


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
