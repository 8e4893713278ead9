"""Memory budget: how much memory a host process may have, and whether it keeps to it.

The budget counts the process's resident bytes (offloaded_state.py) beyond those of the program:
what it had after it imported Python and torch, and tried the optimizer on a few numbers, about 220
MB. So it counts all that comes with a model: buffers, the process's side of the bus, and what an
update needs for a moment. It does not count pages of files in the system's own cache: the system
frees these when memory is needed.
"""

import contextlib
import ctypes
import os

from zero_minimal.offloading.offloaded_state import in_status, resident_bytes

SPARE = 4 * 10**6  # bytes that Python and torch may need beyond what the rehearsal measured
AT_ONCE = 2**20  # blocks of this many bytes go back to the system when they are freed


class Budget:
    """The budget of this process, from now on. `limit`: bytes, None for no limit."""

    def __init__(self, limit: int | None):
        self.limit = limit
        _give_back_at_once()
        _forget_highest()
        self.program = resident_bytes() or 0

    def highest(self) -> int:
        """The most bytes in use so far."""
        known = in_status("VmHWM", "RssFile")
        return known["VmHWM"] - known["RssFile"] - self.program if known else 0

    def smallest(self) -> int:
        """The smallest limit that is enough for what was used so far, in whole MB."""
        return -(-(self.highest() + SPARE) // 10**6) * 10**6

    def check(self) -> None:
        """Raises: RuntimeError if more than the limit was in use."""
        if self.limit is not None and self.highest() > self.limit:
            raise RuntimeError(f"the host process had {self.highest() / 1e6:.1f} MB at once, and "
                               f"its budget is {self.limit / 1e6:.1f} MB: the optimizer takes more "
                               "than it did in the rehearsal at the start. Go on from the newest "
                               "checkpoint, with a larger budget")


def _give_back_at_once() -> None:
    """The C library keeps some freed memory for reuse: with buckets of 4 MiB 150 MB, more than was
    ever used at once. Make large blocks go back at once."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, AT_ONCE)  # M_MMAP_THRESHOLD


def _forget_highest() -> None:
    with contextlib.suppress(OSError):
        with open(f"/proc/{os.getpid()}/clear_refs", "w") as file:
            file.write("5")
