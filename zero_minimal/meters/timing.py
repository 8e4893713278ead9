"""Timing: the measured run of one rank, for one stage or peer. programs/bench.py starts the ranks and compares them.

    time_steps     only the steps, a clock, and the peak of memory that the operating system saw
    watch_steps    a short run under the memory ledger and the traffic meter, which slow it down

Runs are timed in turn, A B C, A B C, …: a machine's speed drifts over minutes, so a run is divided by another run of
its own round. The median and the spread of these ratios can be trusted.
"""

import gc
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from zero_minimal.meters.observer import Observer
from zero_minimal.meters.traffic import wire_bytes
from zero_minimal.offloading.offloaded_state import in_status
from zero_minimal.processes import ranks
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

# Linux only; on other systems these figures are unknown
FORGET_PEAK, MACHINE = Path("/proc/self/clear_refs"), Path("/proc/stat")


def time_steps(stage_class, settings: Settings, warm_up: int, *, one_by_one: bool = True, **options) -> dict:
    """Train on this rank, `warm_up` steps and then settings.steps more.

    one_by_one: let all ranks meet after each step. Otherwise they meet only at the end: collectives that a step leaves
        under way overlap with the next step, and every step counts as the mean.
    options: for the stage.

    Returns a dict, with None for figures that this machine does not report:
        seconds: for each step after the warm-up, from one barrier to the next.
        losses: of all steps, for this rank's batches.
        wire_bytes: bytes that this rank's connections sent per step after the warm-up.
        resident_bytes: peak memory minus the memory before the model was built.
        elapsed_seconds: the time of the steps and of building the model.
        cpu_seconds: processor time of all threads of this rank in that time.
        machine_seconds: processor time of the whole machine in that time.
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
    """Let a peer prepare before the model is built: DeepSpeed is imported here."""
    if hasattr(stage_class, "prepare"):
        stage_class.prepare(device)
    gc.collect()


def together(device: torch.device) -> float:
    """Wait until every rank is here and its device is idle; return the time, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def stay_on_one_core(rank: ranks.Rank) -> None:
    """Compute in one thread, and keep all threads of this process, even gloo's, on one core. Does nothing on a GPU."""
    if rank.device.type != "cpu":
        return
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # Linux
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[rank.rank % len(cores)]})


def start_of_memory(device: torch.device) -> int | None:
    """Bytes this rank holds now; resets the peak. None if unknown.

    The bytes are resident memory as Linux counts it (VmRSS); on a GPU, what torch's allocator has reserved.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_reserved()
    try:
        FORGET_PEAK.write_text("5")  # resets VmHWM to VmRSS
        return in_status("VmRSS")["VmRSS"]
    except OSError:
        return None


def peak_of_memory(device: torch.device) -> int:
    """The most bytes that this rank held since start_of_memory()."""
    return torch.cuda.max_memory_reserved() if device.type == "cuda" else in_status("VmHWM")["VmHWM"]


def machine_seconds() -> float | None:
    """Seconds that all processors of this machine together have worked since boot, or that its host took away."""
    try:
        user, nice, system, _idle, _waiting, _irq, _softirq, stolen, *_ = MACHINE.read_text().split()[1:]
    except OSError:
        return None
    return (int(user) + int(nice) + int(system) + int(stolen)) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------ what times tell


def run_seconds(results: list[dict]) -> float:
    """Seconds per step of one run: the median step, where the slowest rank determines a step's time.

    results: [rank], what time_steps returns.
    """
    return statistics.median(max(step) for step in zip(*(result["seconds"] for result in results), strict=True))


def ratios(own: list[float], theirs: list[float]) -> dict[str, float]:
    """The spread of own / theirs, round by round: {"min", "lower_quartile", "median", "upper_quartile", "max"}; for a
    single round, all are its ratio. own, theirs: [round]."""
    values = [mine / other for mine, other in zip(own, theirs, strict=True)]
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return dict(zip(("min", "lower_quartile", "median", "upper_quartile", "max"),
                    (min(values), *quartiles, max(values)), strict=True))
