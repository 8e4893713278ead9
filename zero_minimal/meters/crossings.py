"""Crossings: what a rank's bus carries in a step, and what lies on either side of it (offload.py)."""

from contextlib import contextmanager

from zero_minimal.foundations.away import resident_bytes


class BusMeter:
    """Watches the bus of an offloaded stage through the steps of a run, as an observer of the loop."""

    def __init__(self, zero):
        self.zero, self.steps = zero, 0
        self.to_host = 0  # bytes

    @contextmanager
    def step(self):
        """Around one optimizer step."""
        host = self.zero.host
        if not self.steps:
            host.take_all()
            self.came_before = host.came
        sent = host.bus.sent
        yield
        self.steps += 1
        self.to_host += host.bus.sent - sent

    def crossed(self) -> dict[str, float]:
        """Bytes of a step, each way."""
        self.zero.host.take_all()  # what the last step has left to cross
        to_device = self.zero.host.came - self.came_before
        return {"to_host": self.to_host / self.steps, "to_device": to_device / self.steps}

    def report(self, memory: dict) -> dict:
        """What --json has of this rank under --offload. Bytes: device_memory and host_memory of model states, bus of a
        step, resident of the two processes as the system counts them (null where it does not say).

        memory: what the observer measured on the device.
        """
        kept, resident = self.zero.host.ask("memory")
        return {
            "device_memory": sum(memory[state] for state in ("parameters", "gradients", "optimizer")),
            "host_memory": kept,
            "bus": self.crossed(),
            "resident": {"device": resident_bytes(), "host": resident},
        }
