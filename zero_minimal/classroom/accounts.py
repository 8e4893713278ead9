"""Accounts: what the kernel says of processes, in /proc, where no submission can write. (Linux: elsewhere None.)"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable


def sent_by(process: int) -> int | None:
    """Bytes that a process has written so far, by whichever of its threads and wherever to."""
    return _figure(f"/proc/{process}/io", "wchar:")


def held_by(process: int) -> int | None:
    """Bytes of memory that are a process's own now: what it allocated by whatever means, not the files it maps."""
    parts = [_figure(f"/proc/{process}/status", label) for label in ("RssAnon:", "RssShmem:")]
    return None if None in parts else 1024 * sum(parts)  # it may end between the two looks


def _figure(file: str, label: str) -> int | None:
    with contextlib.suppress(OSError), open(file) as lines:
        for line in lines:
            if line.startswith(label):
                return int(line.split()[1])
    return None


class Busy(RuntimeError):
    """Ranks had too little of the machine: nothing can be said of what they run."""


class Clock:
    """Time as processes have it that share the machine with others. `spent`: the seconds that they would have taken on
    a machine of their own, about; `passed`: those of the clock on the wall.

    While one of them, or this process, is ready to run and no processor is free, time does not count. One that waits
    for another, or sleeps, lets it pass; one that runs has at least spent what it ran.
    """

    def __init__(self):
        self.begun = self.looked = time.monotonic()
        self.known: dict[tuple[int, str], tuple[float, float]] = {}  # (process, thread): seconds it ran, stood ready
        self.ran: dict[int, float] = {}  # process: seconds
        self.free = 0.0  # seconds in which none of them stood ready
        self._ready([os.getpid()])

    def look(self, processes: Iterable[int] = ()) -> None:
        """Once in a while, and at these, which have begun since."""
        now = time.monotonic()
        self.free += max(0.0, now - self.looked - self._ready([os.getpid(), *processes]))
        self.looked = now

    def _ready(self, processes: Iterable[int]) -> float:
        """Seconds that their threads stood ready since the look before."""
        ready = 0.0
        for process in processes:
            for thread, times in _scheduled(process):
                before = self.known.get((process, thread), (0.0, 0.0))
                self.known[process, thread] = times
                self.ran[process] = self.ran.get(process, 0.0) + times[0] - before[0]
                ready += times[1] - before[1]
        return ready

    @property
    def spent(self) -> float:
        return max([self.free, *(ran for process, ran in self.ran.items() if process != os.getpid())])

    @property
    def passed(self) -> float:
        return time.monotonic() - self.begun


def _scheduled(process: int) -> list[tuple[str, tuple[float, float]]]:
    """Of each thread: its number, and the seconds that it ran and that it stood ready to run. (Empty where the kernel
    does not tell.)"""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat") as figures:
                ran, ready, _ = figures.read().split()
                found.append((thread, (int(ran) / 1e9, int(ready) / 1e9)))
    return found


def end_all_below(process: int) -> int:
    """Kill all that descends from a process, until none is left. Returns how many there were."""
    ended, until = set(), time.monotonic() + 5
    while (found := [child for child in descendants(process) if lives(child)]) and time.monotonic() < until:
        for child in found:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        ended |= set(found)
        time.sleep(0.01)
    return len(ended)


def descendants(process: int) -> list[int]:
    """Children of a process, their children, and so on. (Linux only: elsewhere none is seen.)"""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as listed:
                found += map(int, listed.read().split())
    return found + [below for child in found for below in descendants(child)]


def lives(process: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"
    return False
