"""Pinned link: the bus between a GPU and its host (host_link.py), which are two threads of one
process.

    rank's thread    queues a copy, and goes on     GPU → pinned buffer, on a stream of the bus
    host's thread    waits for the copy's event, reads the buffer, computes, fills another
    rank's thread    queues a copy, and goes on     pinned buffer → GPU, on that stream
    GPU              computes meanwhile, on the current stream

A copy is still under way when its function returns. Three promises keep that safe:

    a sender may change its tensor at once        a clone is sent, made in the order of the current
                                                  stream
    a parcel that is read on the GPU is whole     the current stream waits for the copy's event, the
                                                  CPU does not
    no buffer is filled while it is read          it comes with the event of the copy that reads it
"""

import copy
from dataclasses import dataclass, replace

import torch

from zero_minimal.offloading.host_link import Bus, Parcel


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy between GPU and pinned memory. It ran from the event `start` to the event `end`."""

    leaves: bool
    bytes: int
    start: torch.cuda.Event
    end: torch.cuda.Event


@dataclass(frozen=True, eq=False)
class Emptied:
    """A buffer that may be filled again as soon as the event has happened."""

    buffer: int
    read: torch.cuda.Event


class PinnedBus(Bus):
    """One end of the bus, and its stream. The real bus sets the speed.

    Args: memory is pinned; the others are those of Bus.
    To learn when each copy ran, set .copies to a list: a Copy for each is put into it.
    """

    copies: list[Copy] | None = None

    def __init__(self, pipe, memory: torch.Tensor, side: int, device: torch.device):
        super().__init__(pipe, memory, side, None)
        self.is_ranks = side == 0
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._read: dict[int, torch.cuda.Event] = {}  # by the buffer that the copy reads

    def send(self, words: tuple, tensor: torch.Tensor | None = None) -> None:
        # the other thread gets words of its own, as another process would
        super().send(copy.deepcopy(words), tensor)

    def receive(self) -> Parcel:
        """As in Bus. The rank's tensor is on the GPU, ready for its current stream."""
        parcel = super().receive()
        if parcel.tensor is None or not self.is_ranks:
            return parcel
        with torch.cuda.stream(self.stream):
            start = self._now()
            here = parcel.tensor.to(self.device, non_blocking=True)
            done = self._now()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        here.record_stream(current)  # it was made on the bus's stream, and is dropped on this one
        self._read[parcel.buffer] = done
        self._note(False, here, start, done)
        return replace(parcel, tensor=here)

    def receive_all(self, into: torch.Tensor) -> None:
        """Fill `into` from the buffers. It may be on the CPU or the GPU; when this returns it is
        full."""
        for piece in into.view(-1).split(self._elements(into)):
            parcel = super().receive()
            piece.copy_(parcel.tensor)
            self.emptied(parcel)

    def emptied(self, parcel: Parcel) -> None:
        read = self._read.pop(parcel.buffer, None)
        self.pipe.put(parcel.buffer if read is None else Emptied(parcel.buffer, read))

    def _is_unused(self, message: object) -> int:
        if isinstance(message, Emptied):
            message.read.synchronize()
            return message.buffer
        return message

    def _fill(self, place, tensor, start):
        if not tensor.is_cuda:
            return super()._fill(place, tensor, start)
        leaving = tensor.clone()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # where the clone is made
        with torch.cuda.stream(self.stream):
            begin = self._now()
            place.copy_(leaving, non_blocking=True)
            done = self._now()
        leaving.record_stream(self.stream)  # its memory is not reused before
        self._note(True, leaving, begin, done)
        return done

    def _until(self, done):
        if done is not None:
            done.synchronize()

    def _now(self) -> torch.cuda.Event:
        """An event of the bus's stream. A thread that waits for it sleeps: the CPU is free."""
        timed = self.copies is not None
        return self.stream.record_event(torch.cuda.Event(enable_timing=timed, blocking=True))

    def _note(self, leaves: bool, tensor: torch.Tensor, start, end) -> None:
        if self.copies is not None:
            self.copies.append(Copy(leaves, tensor.nbytes, start, end))
