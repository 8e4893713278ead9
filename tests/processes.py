"""Processes that a test has started, seen from outside: do they run, have they ended?"""

import time

from zero_minimal.classroom.accounts import lives as alive


def ended(pids, seconds: float = 4) -> bool:
    """Whether all of these processes have ended, or do so soon."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))
