"""Crossings: what a rank's bus carries in a step, and what lies on either side of it (offload.py)."""

import contextlib
import ctypes
import gc
import time
from contextlib import contextmanager
from dataclasses import replace

from zero_minimal.foundations.away import resident_bytes
from zero_minimal.meters.spans import covered


def settled_bytes() -> int | None:
    """resident_bytes() of this process when what it has freed has gone back to the system, where the system can."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


class BusMeter:
    """Watches the bus of an offloaded stage through the steps of a run, as an observer of the loop."""

    def __init__(self, zero):
        self.zero, self.steps = zero, 0
        self.to_host = self.to_device = 0  # bytes

    @contextmanager
    def step(self):
        """Around one optimizer step."""
        bus = self.zero.host.bus
        sent, received = bus.sent, bus.received
        yield
        self.steps += 1
        self.to_host += bus.sent - sent
        self.to_device += bus.received - received

    def report(self, memory: dict) -> dict:
        """What --json has of this rank under --offload. Bytes: device_memory and host_memory of model states, bus of a
        step, resident of the two processes as the system counts them (null where it does not say).

        memory: what the observer measured on the device.
        """
        kept, resident = self.zero.host.ask("memory")
        return {
            "device_memory": sum(memory[state] for state in ("parameters", "gradients", "optimizer")),
            "host_memory": kept,
            "bus": {"to_host": self.to_host / self.steps, "to_device": self.to_device / self.steps},
            "resident": {"device": resident_bytes(), "host": resident},
        }


class Crossings:
    """Each tensor that crosses a rank's bus while this is open, in seconds since then.

        with Crossings(zero.host.bus) as crossings, Spans() as spans:
            ...
        crossings.seen      a list of foundations.bus.Crossing
    """

    def __init__(self, bus):
        self.bus, self.seen = bus, []

    def __enter__(self):
        began = time.monotonic()

        def hear(crossing):
            times = {name: getattr(crossing, name) - began for name in ("start", "end", "asked", "had")}
            self.seen.append(replace(crossing, **times))

        self.bus.hear = hear
        return self

    def __exit__(self, *error):
        self.bus.hear = None

    @property
    def under_way(self) -> float:
        """Seconds in which a tensor was on the bus, one way or the other."""
        return covered([(each.start, each.end) for each in self.seen])

    @property
    def standing(self) -> float:
        """Seconds in which the rank stood at the bus: it copied, or waited."""
        return covered([(each.asked, each.had) for each in self.seen])
