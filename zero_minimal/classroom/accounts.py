"""Accounts: what the kernel says of processes, in /proc, where no submission can write. (Linux: elsewhere None.)"""

import contextlib
import os
import signal
import time


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
