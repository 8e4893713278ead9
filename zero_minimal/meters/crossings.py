"""Crossings: bytes that cross a rank's bus in a step, and when; bytes kept on its device and host (offload.py), and
bytes in a file (offloading/disk.py); a process's resident memory."""

import contextlib
import ctypes
import gc
import time
from dataclasses import replace

from zero_minimal.offloading.host_link import Crossing
from zero_minimal.offloading.offloaded_state import resident_bytes


class BusMeter:
    """Watches the bus of an offloaded stage during a run, as an observer of the loop."""

    def __init__(self, zero):
        self.zero, self.steps = zero, 0
        self.to_host = self.to_device = self.read = self.written = 0  # bytes

    @contextlib.contextmanager
    def step(self):
        """A context around one optimizer step."""
        bus = self.zero.host.bus
        sent, received, disk = bus.sent, self._came(), self._disk()
        yield
        self.steps += 1
        self.read += self._disk().get("read", 0) - disk.get("read", 0)
        self.written += self._disk().get("written", 0) - disk.get("written", 0)
        self.to_host += bus.sent - sent
        self.to_device += self._came() - received

    def _came(self) -> int:
        """Bytes that have crossed to the device, or will before the next forward."""
        later = [bucket.parameter_shard.nbytes for bucket in self.zero.buckets
                 if bucket.away and not bucket.away.is_back]
        return self.zero.host.bus.received + sum(later)

    def crossed(self) -> dict[str, float]:
        """Bytes per step in each direction."""
        return {"to_host": self.to_host / self.steps, "to_device": self.to_device / self.steps}

    def _disk(self) -> dict:
        """What the host reports about its file; empty without one."""
        return self.zero.host.ask("moved") if self.zero.disk else {}

    def report(self, memory: dict) -> dict:
        """This rank's entry in --json under --offload. Bytes: device_memory and host_memory of model states, bus per
        step, resident of the two processes as the system counts them (null if unknown). With a disk, also bytes kept
        there, read and written per step, the host's memory budget, and the most that it used.

        memory: the observer's measurement on the device.
        """
        kept, resident = self.zero.host.ask("memory")
        disk = self._disk()
        moved = {"read": self.read / self.steps, "written": self.written / self.steps}
        return {
            "device_memory": sum(memory[state] for state in ("parameters", "gradients", "optimizer")),
            "host_memory": kept,
            "bus": self.crossed(),
            "resident": {"device": resident_bytes(), "host": resident},
        } | ({"disk": disk | moved} if disk else {})


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
