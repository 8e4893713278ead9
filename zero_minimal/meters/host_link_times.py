"""Host link times: when each tensor crosses a rank's bus, and what its process has resident (offload.py)."""

import contextlib
import ctypes
import gc
import time
from dataclasses import replace

from zero_minimal.offloading.host_link import Crossing
from zero_minimal.offloading.offloaded_state import resident_bytes


class Crossings:
    """Each tensor that crosses a rank's bus while this is open, in seconds since then.

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
    """resident_bytes() of this process when what it has freed has gone back to the system, where the system can."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()
