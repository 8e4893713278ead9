"""Device trace: what a GPU did at which time, from torch's profiler, and how much two kinds of work overlapped.

    with recorded() as profiler:
        ...                                    # a step or two
    work = work_in(profiler, path)             # path: where to save the trace, for Perfetto (https://ui.perfetto.dev)
    hidden(copies(work), computation(work))    # the share of the copies' time in which the GPU also computed
"""

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from zero_minimal.meters.events import merged

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    """One kernel or copy: its times are in seconds of the profiler's clock."""

    kind: str
    name: str
    start: float
    end: float


@contextlib.contextmanager
def recorded() -> Iterator[profile]:
    """A context whose work is recorded, also on the GPU if there is one."""
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=kinds) as profiler:
        yield profiler
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def work_in(profiler: profile, path: str | Path | None = None) -> list[Work]:
    """What the GPU did, from a finished profile. `path`: where the whole trace is saved; it ends with .json."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(path) if path else Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(kept))
        return work_of(json.loads(kept.read_text(encoding="utf-8", errors="replace")))


def work_of(trace: dict) -> list[Work]:
    """What the GPU did, sorted by start, from a trace in Chrome's format (times in microseconds)."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in KINDS)
    return sorted(
        (Work(event["cat"], event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events),
        key=lambda work: work.start,
    )


def messages(work: Iterable[Work]) -> list[Work]:
    """NCCL's kernels."""
    return [one for one in work if one.kind == "kernel" and one.name.startswith("nccl")]


def computation(work: Iterable[Work]) -> list[Work]:
    """All other kernels."""
    return [one for one in work if one.kind == "kernel" and not one.name.startswith("nccl")]


def copies(work: Iterable[Work], way: str = "") -> list[Work]:
    """Copies between GPU and pinned host memory; way: "DtoH" or "HtoD"."""
    return [one for one in work if one.kind == "gpu_memcpy" and "Pinned" in one.name and way in one.name]


def seconds(work: Iterable[Work]) -> float:
    """Seconds in which any of this work ran."""
    return sum(end - start for start, end in merged((one.start, one.end) for one in work))


def hidden(some: list[Work], others: list[Work]) -> float | None:
    """The share of the seconds of `some` in which any of `others` also ran. None if `some` is empty."""
    total = seconds(some)
    both = total + seconds(others) - seconds([*some, *others])
    return both / total if total else None
