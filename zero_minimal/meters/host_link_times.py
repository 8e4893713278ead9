"""Host link times: when each tensor crosses a rank's bus, and the process's resident memory (offload.py)."""

import contextlib
import ctypes
import gc
import time
from dataclasses import replace

from zero_minimal.offloading.host_link import Crossing
from zero_minimal.offloading.offloaded_state import resident_bytes


class Crossings:
    """Records each tensor that crosses a rank's bus while this is open; seconds count from its opening.

        with Crossings(zero.host.bus) as crossings, Events() as seen:
            ...
        crossings.seen      a list of bus.Crossing
    """

    def __init__(self, bus):
        self.bus = bus
        self.seen: list[Crossing] = []

    def __enter__(self):
        began = time.monotonic()

        def hear(crossing: Crossing) -> None:
            times = {name: getattr(crossing, name) - began for name in ("start", "end", "asked", "had")}
            self.seen.append(replace(crossing, **times))

        self.bus.hear = hear
        return self

    def __exit__(self, *error):
        self.bus.hear = None


def settled_bytes() -> int | None:
    """resident_bytes() of this process after freed memory is returned to the system, if the system can do that."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not every libc has malloc_trim
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()
