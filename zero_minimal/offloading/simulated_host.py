"""Simulated host: a rank's host in the rank's own process, where tensors have no values.

A simulation runs one rank of many, on tensors that cannot be sent to another process. So rank and
host take turns: when the rank has to wait, the host obeys its orders until there is an answer. The
bus between them is that of host_link.py, with its buffers and its counts.

    with simulated_host.instead_of_processes(HostState):
        zero = Offloaded2(model, AdamW)
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

import torch

from zero_minimal.offloading import host_process
from zero_minimal.offloading.host_link import BUFFERS, Bus, Parcel

_working = 0  # hosts at work, one inside another


def at_work() -> bool:
    """Whether a host runs now, and not the rank. Code that counts a rank's memory asks this."""
    return _working > 0


@contextlib.contextmanager
def instead_of_processes(kind: Callable) -> Iterator[list["HostEnd"]]:
    """Context in which a rank's host starts no process. Gives the hosts that it has made.

    Args:
        kind: function(bus); its result has a method for each order, like offload.HostState.
    """
    hosts: list[HostEnd] = []

    def new(size: int) -> Bus:
        bus = bus_to_host(kind, size)
        hosts.append(bus.pipe.there)
        return bus

    before, host_process.here = host_process.here, new
    try:
        yield hosts
    finally:
        host_process.here = before


def bus_to_host(kind: Callable, size: int) -> Bus:
    """The rank's end of a bus to a new host. size: of a buffer, in bytes."""
    memory = torch.zeros(2, BUFFERS, size, dtype=torch.uint8, device="cpu")
    to_rank: deque = deque()
    there = HostEnd(kind, to_rank, memory)
    return Bus(RankPipe(there, to_rank), memory, 0, None)


class HostEnd(Bus):
    """The host's end of the bus, and the host. Orders stay in .told until the rank waits.

    It cannot wait itself, since the rank would not go on. What it sends while both buffers are in
    use stays in its memory, and follows when they are emptied.
    """

    def __init__(self, kind: Callable, to_rank: deque, memory: torch.Tensor):
        self.told: deque = deque()
        super().__init__(HostPipe(to_rank), memory, 1, None)
        self.state = kind(self)
        self._held: deque = deque()

    def send(self, words: tuple, tensor: torch.Tensor | None = None) -> None:
        if self._held or tensor is not None and not self._unused:
            self._held.append((words, tensor))
        else:
            super().send(words, tensor)

    def go_on(self) -> None:
        """Look at the next message, and do what it says. RuntimeError if there is none."""
        global _working
        if not self.told:
            raise RuntimeError("the rank waits for its host, which has nothing to do")
        message = self.told.popleft()
        _working += 1
        try:
            if isinstance(message, int):
                self._unused.append(message)
                self._send_held()
            else:
                self._arrived.append(message)
                self._obey(self.receive())
        finally:
            _working -= 1

    def kept_bytes(self) -> int:
        """Bytes of masters, gradients and optimizer state, once all orders are done."""
        while self.told:
            self.go_on()
        return self.state.kept_bytes()

    def _obey(self, parcel: Parcel) -> None:
        order, *words = parcel.words
        if order != "end":
            getattr(self.state, order)(parcel, *words)

    def _send_held(self) -> None:
        while self._held and (self._unused or self._held[0][1] is None):
            super().send(*self._held.popleft())


class HostPipe:
    """The host's side of the pipe: it can put, but not wait."""

    def __init__(self, to_rank: deque):
        self.put = to_rank.append

    def get(self) -> object:
        raise RuntimeError("a host in the rank's process cannot wait for the rank: state_dict() "
                           "and what else takes several parcels is not for a simulation")


class RankPipe:
    """The rank's side: when it waits, the host goes on."""

    def __init__(self, there: HostEnd, to_rank: deque):
        self.put, self.there, self.to_rank = there.told.append, there, to_rank

    def get(self) -> object:
        while not self.to_rank:
            self.there.go_on()
        return self.to_rank.popleft()

    def close(self) -> None:
        """Nothing is open."""
