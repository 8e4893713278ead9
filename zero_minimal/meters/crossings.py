"""Crossings: what a rank's bus carries in a step, what lies on either side of it (offload.py), and what of that is in
a file (offloading/disk.py)."""

from contextlib import contextmanager

from zero_minimal.offloading.offloaded_state import resident_bytes


class BusMeter:
    """Watches the bus of an offloaded stage through the steps of a run, as an observer of the loop."""

    def __init__(self, zero):
        self.zero, self.steps = zero, 0
        self.to_host = self.to_device = self.read = self.written = 0  # bytes

    @contextmanager
    def step(self):
        """Around one optimizer step."""
        bus = self.zero.host.bus
        sent, received, disk = bus.sent, self._came(), self._disk()
        yield
        self.steps += 1
        self.read += self._disk().get("read", 0) - disk.get("read", 0)
        self.written += self._disk().get("written", 0) - disk.get("written", 0)
        self.to_host += bus.sent - sent
        self.to_device += self._came() - received

    def _came(self) -> int:
        """Bytes that have crossed to the device, or are on their way to the next forward."""
        later = [bucket.parameter_shard.nbytes for bucket in self.zero.buckets
                 if bucket.away and not bucket.away.is_back]
        return self.zero.host.bus.received + sum(later)

    def crossed(self) -> dict[str, float]:
        """Bytes of a step, each way."""
        return {"to_host": self.to_host / self.steps, "to_device": self.to_device / self.steps}

    def _disk(self) -> dict:
        """What the host says of its file; empty without one."""
        return self.zero.host.ask("moved") if self.zero.disk else {}

    def report(self, memory: dict) -> dict:
        """What --json has of this rank under --offload. Bytes: device_memory and host_memory of model states, bus of a
        step, resident of the two processes as the system counts them (null where it does not say). With a disk also
        what is kept there, what a step reads and writes; and of memory the host's budget, and the most that it took.

        memory: what the observer measured on the device.
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
