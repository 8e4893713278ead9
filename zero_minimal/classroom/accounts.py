"""Accounts: the kernel's figures for processes, in /proc, where no submission can write. (Linux; elsewhere None.)"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable


def sent_by(process: int) -> int | None:
    """Bytes that a process has written so far, from any of its threads to any target."""
    return _figure(f"/proc/{process}/io", "wchar:")


def held_by(process: int) -> int | None:
    """Bytes of a process's own memory now: all that it allocated by any means, without mapped files."""
    parts = [_figure(f"/proc/{process}/status", label) for label in ("RssAnon:", "RssShmem:")]
    return None if None in parts else 1024 * sum(parts)  # it may end between the two reads


def _figure(file: str, label: str) -> int | None:
    with contextlib.suppress(OSError), open(file) as lines:
        for line in lines:
            if line.startswith(label):
                return int(line.split()[1])
    return None


BUSY = "this machine is too busy to judge: {}. No points are taken. End what else runs here, or grade later"


class Busy(RuntimeError):
    """Ranks got too little processor time for a judgement."""


class Clock:
    """Time for processes that share the machine with others. `spent`: about the seconds that they would have taken on
    their own machine; `passed`: seconds of wall-clock time.

    Time does not count while one of them, or this process, is ready to run and no processor is free. It counts while
    they wait for each other or sleep; a process has spent at least the time that it ran.
    """

    def __init__(self):
        self.begun = self.looked = time.monotonic()
        self.known: dict[tuple[int, str], tuple[float, float]] = {}  # (process, thread): seconds running, seconds ready
        self.ran: dict[int, float] = {}  # process: seconds
        self.free = 0.0  # seconds in which none of them was ready but waiting for a processor
        self._ready([os.getpid()])

    def look(self, processes: Iterable[int] = ()) -> None:
        """Update the times, also of `processes`, which have begun since. Call it regularly."""
        now = time.monotonic()
        self.free += max(0.0, now - self.looked - self._ready([os.getpid(), *processes]))
        self.looked = now

    def _ready(self, processes: Iterable[int]) -> float:
        """Seconds that their threads were ready to run since the last look."""
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
    """For each thread: its number, and the seconds that it ran and that it was ready to run. (Empty if the kernel does
    not report them.)"""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat") as figures:
                ran, ready, _ = figures.read().split()
                found.append((thread, (int(ran) / 1e9, int(ready) / 1e9)))
    return found


def end_all_below(process: int) -> int:
    """Kill all descendants of a process, until none is left. Returns how many there were."""
    ended, until = set(), time.monotonic() + 5
    while (found := [child for child in descendants(process) if lives(child)]) and time.monotonic() < until:
        for child in found:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        ended |= set(found)
        time.sleep(0.01)
    return len(ended)


def descendants(process: int) -> list[int]:
    """Children of a process, their children, and so on. (Linux only; elsewhere none are found.)"""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{task}/children") as listed:
                found += map(int, listed.read().split())
    return found + [below for child in found for below in descendants(child)]


def lives(process: int) -> bool:
    """Whether a process runs: one that has ended, and whose parent has not asked for it, does not."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"
    return False
