"""Processes that a test has started, seen from outside: do they run, have they ended?"""

import time
from pathlib import Path


def alive(pid) -> bool:
    """Whether a process runs: one that has ended and whose parent has not asked for it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended(pids, seconds: float = 4) -> bool:
    """Whether all of these processes have ended, or do so soon."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
