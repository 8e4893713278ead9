"""Memory budget: how much memory a host process may have, and whether it keeps to it.

What counts is all that the process has resident (away.resident_bytes) beyond what it had when it
had imported Python and torch, and tried the optimizer on a few numbers: that is the program, about
220 MB whatever it does. So everything counts that comes with a model: buffers, the process's side
of the bus, what an update needs for a moment. Not counted are the pages of files that the system
keeps in its own cache: it gives them back when somebody needs memory.
"""

import contextlib
import ctypes
import os

from zero_minimal.offloading.offloaded_state import in_status, resident_bytes

SPARE = 4 * 10**6  # bytes that Python and torch may want beside what the rehearsal saw
AT_ONCE = 2**20  # memory of so many bytes goes back to the system when it is freed


class Budget:
    """Of this process, from now on. `limit`: bytes, None for no limit."""

    def __init__(self, limit: int | None):
        self.limit = limit
        _give_back_at_once()
        _forget_highest()
        self.program = resident_bytes() or 0

    def used(self) -> int:
        """Bytes, now."""
        return (resident_bytes() or 0) - self.program

    def highest(self) -> int:
        """Bytes, at most so far."""
        known = in_status("VmHWM", "RssFile")
        return known["VmHWM"] - known["RssFile"] - self.program if known else 0

    def smallest(self) -> int:
        """That would do, by what was seen so far; whole MB."""
        return -(-(self.highest() + SPARE) // 10**6) * 10**6

    def check(self) -> None:
        """Raises: RuntimeError if there was more than the limit."""
        if self.limit is not None and self.highest() > self.limit:
            raise RuntimeError(f"the host process had {self.highest() / 1e6:.1f} MB at once, and "
                               f"its budget is {self.limit / 1e6:.1f} MB: the optimizer takes more "
                               "than it did in the rehearsal at the start. Go on from the newest "
                               "checkpoint, with a larger budget")


def _give_back_at_once() -> None:
    """The C library keeps some of what is freed, in case it is asked for again: for buckets of
    4 MiB 150 MB, and more than was ever used at once."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, AT_ONCE)  # M_MMAP_THRESHOLD


def _forget_highest() -> None:
    with contextlib.suppress(OSError):
        with open(f"/proc/{os.getpid()}/clear_refs", "w") as file:
            file.write("5")
