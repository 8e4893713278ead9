"""Host link: the bus between a rank and its host. It has a speed, counts what crosses, and takes
constant memory.

    rank   ── gradient shards ──►  two buffers  ──►  host
           ◄──  two buffers  ◄── parameter shards ──

Each direction has two buffers that take turns, each of one bucket's shard: one is read while the
other is filled (as in constant_buffers.py). A side that finds both in use waits. So however much
crosses, neither side holds more than two shards of the other's.

Data on the bus arrives at the pace of `bandwidth`: one byte after the other, each direction by
itself. Only the side that wants to read it waits, so a transfer goes on while both sides compute.

On a CPU the two sides are processes, and the buffers are shared memory. On a GPU the host is a
thread of the rank, the buffers are pinned, and a separate stream copies: pinned_link.py.
"""

import contextlib
import mmap
import os
import pickle
import queue
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cloudpickle
import torch

BUFFERS = 2  # in each direction


@dataclass(frozen=True, eq=False)
class Parcel:
    """What has arrived: words, and a tensor, or None. The tensor is in a buffer of the bus: call
    bus.emptied(parcel) as soon as it has been read, or the other side waits for ever."""

    words: tuple
    tensor: torch.Tensor | None = None  # [n]
    buffer: int = -1


@dataclass(frozen=True)
class Crossing:
    """A tensor that was sent (`leaves`) or received here. It was on the bus from `start` to `end`;
    the call that moved it took from `asked` to `had`. Seconds of time.monotonic()."""

    leaves: bool
    bytes: int
    start: float
    end: float
    asked: float
    had: float


class OtherSideGone(Exception):
    """The pipe has ended."""


class NotSent(ValueError):
    """It cannot be put on the bus, and no part of it was."""


def speed(bandwidth: float | None) -> float | None:
    """A stage's bus=, checked. Raises: ValueError if it is not a number of bytes a second."""
    is_number = isinstance(bandwidth, (int, float)) and not isinstance(bandwidth, bool)
    if bandwidth is not None and not (is_number and bandwidth > 0):
        raise ValueError(f"bus is {bandwidth!r}: give bytes a second, 12e9 say, or None")
    return bandwidth


class Bus:
    """One end of the bus; both ends have the same methods.

    Args:
        pipe: for words, Words or Queues.
        memory: uint8 [2, BUFFERS, bytes], shared by both ends; memory[0] is what the rank sends.
        side: 0 for the rank's end, 1 for the host's.
        bandwidth: bytes a second in each direction; None: no limit.
    Counts what has crossed: .sent and .received, in bytes; and .waited, the seconds in which this
    end only waited for the other, or for the bus. Set .hear, a function of a Crossing, to be told
    of each tensor.
    """

    hear: Callable | None = None

    def __init__(self, pipe, memory: torch.Tensor, side: int, bandwidth: float | None):
        self.pipe, self.bandwidth = pipe, bandwidth
        self.outgoing, self.incoming = memory[side], memory[1 - side]
        self.sent = self.received = 0
        self.waited = 0.0
        self._unused = deque(range(BUFFERS))  # of the outgoing ones
        self._arrived: deque[Parcel] = deque()  # not received yet
        self._busy_until = 0.0  # when all that was sent has crossed

    def send(self, words: tuple, tensor: torch.Tensor | None = None) -> None:
        """Put words and a tensor on the bus; wait only if both buffers are in use. The tensor may
        be changed when this returns."""
        if tensor is None:
            return self.pipe.put((words, None))
        if tensor.nbytes > self.outgoing.shape[-1]:
            raise NotSent(f"{tensor.nbytes} bytes do not fit into a buffer of the bus, of "
                          f"{self.outgoing.shape[-1]}: send shards, in the parameters' dtype")
        asked = time.monotonic()
        while not self._unused:
            self._look()
        buffer, start = self._unused.popleft(), time.monotonic()
        place = _view(self.outgoing[buffer], tensor.dtype, tensor.numel())
        done = self._fill(place, tensor.detach().view(-1), start)
        self.sent += tensor.nbytes
        self._tell(True, tensor.nbytes, done, asked)
        self.pipe.put((words, (buffer, tensor.dtype, tensor.numel(), done)))

    def receive(self) -> Parcel:
        """The next parcel, once all of it is here."""
        asked = time.monotonic()
        while not self._arrived:
            self._look()
        words, load = self._arrived.popleft()
        if load is None:
            return Parcel(words)
        buffer, dtype, numel, done = load
        start = time.monotonic()
        self._until(done)
        self.waited += time.monotonic() - start
        tensor = _view(self.incoming[buffer], dtype, numel)
        self.received += tensor.nbytes
        self._tell(False, tensor.nbytes, done, asked)
        return Parcel(words, tensor, buffer)

    def emptied(self, parcel: Parcel) -> None:
        """The parcel's buffer may be filled again."""
        self.pipe.put(parcel.buffer)

    def close(self) -> None:
        """Close the bus for both sides: a later use raises OtherSideGone."""
        self.pipe.close()

    def drop(self) -> None:
        """Give the next parcel's buffer back at once, unread."""
        while not self._arrived:
            self._look()
        _, load = self._arrived.popleft()
        if load:
            self.pipe.put(load[0])

    def last_words(self) -> list[tuple]:
        """After OtherSideGone: what that side had sent, and this side has not received."""
        with contextlib.suppress(OtherSideGone):
            while True:
                self._look()
        return [words for words, _ in self._arrived]

    # what is larger than a buffer goes in pieces

    def send_all(self, tensor: torch.Tensor) -> None:
        """Send a tensor of any size."""
        for piece in tensor.detach().view(-1).split(self._elements(tensor)):
            self.send((), piece)

    def receive_all(self, into: torch.Tensor) -> None:
        """Fill a tensor with what send_all() sent."""
        for piece in into.view(-1).split(self._elements(into)):
            parcel = self.receive()
            piece.copy_(parcel.tensor)
            self.emptied(parcel)

    def _elements(self, tensor: torch.Tensor) -> int:
        return self.outgoing.shape[-1] // tensor.element_size()

    # how a tensor gets into a buffer, and when it is there

    def _fill(self, place: torch.Tensor, tensor: torch.Tensor, start: float) -> object:
        """Copy the tensor. Returns what the other end waits for: a time, of a clock that all
        processes of a machine share."""
        place.copy_(tensor)
        if self.bandwidth is None:
            return None
        self._busy_until = max(start, self._busy_until) + tensor.nbytes / self.bandwidth
        return self._busy_until

    def _until(self, done: float | None) -> None:
        if done is not None:
            time.sleep(max(0.0, done - time.monotonic()))

    def _tell(self, leaves: bool, size: int, done: object, asked: float) -> None:
        if self.hear:
            now = time.monotonic()
            seconds = size / self.bandwidth if self.bandwidth else 0.0
            end = done if isinstance(done, float) else now
            self.hear(Crossing(leaves, size, end - seconds, end, asked, now))

    # the pipe

    def _look(self) -> None:
        """Wait for the next message: a parcel, or the number of a buffer that was emptied."""
        start = time.monotonic()
        message = self.pipe.get()
        self.waited += time.monotonic() - start
        if isinstance(message, tuple):
            self._arrived.append(message)
        else:
            self._unused.append(self._is_unused(message))

    def _is_unused(self, message: int) -> int:
        """The number of a buffer that may be filled, from the message that says so."""
        return message


def _view(buffer: torch.Tensor, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return buffer[: numel * dtype.itemsize].view(dtype)


# ---------------------------------------------------------------- what two processes have in common


class Words:
    """A pipe between two processes, for anything that can be pickled."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def put(self, message: object) -> None:
        try:
            pickled = pickle.dumps(message)
        except Exception:  # a function or class of __main__, a lambda
            pickled = self._by_value(message)
        try:
            self.connection.send_bytes(pickled)
        except OSError:
            raise OtherSideGone from None

    def _by_value(self, message: object) -> bytes:
        try:
            return cloudpickle.dumps(message)
        except Exception as error:
            raise NotSent("zero.optimizer.param_groups, or something else that goes to the host "
                          f"process, cannot be pickled: {error}") from error

    def get(self) -> object:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise OtherSideGone from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was closed before
            number = os.dup(self.connection.fileno())
            with socket.socket(fileno=number) as both:  # in forked children, too
                both.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def buffer_bytes(largest: int) -> int:
    """The size of a buffer for `largest` bytes, rounded up: the next one begins on a cache line."""
    return -(-max(largest, 1) // 64) * 64


def shared_file(size: int) -> int:
    """A file descriptor of memory that has no name: it is freed when the last process that has it
    ends, in any way."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("bus")
    else:
        with tempfile.TemporaryFile() as file:  # has lost its name already
            number = os.dup(file.fileno())
    os.ftruncate(number, 2 * BUFFERS * size)
    return number


def memory_of(number: int, size: int) -> torch.Tensor:
    """That memory as a tensor, uint8 [2, BUFFERS, size]. Closes the descriptor."""
    mapped = mmap.mmap(number, 2 * BUFFERS * size)
    os.close(number)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(2, BUFFERS, size)


# ----------------------------------------------------------------- what two threads have in common


CLOSED = object()


class Queues:
    """A pipe between two threads: one queue for each direction."""

    def __init__(self, out: queue.SimpleQueue, back: queue.SimpleQueue):
        self.out, self.back, self.closed = out, back, False

    def put(self, message: object) -> None:
        if self.closed:
            raise OtherSideGone
        self.out.put(message)

    def get(self) -> object:
        message = CLOSED if self.closed and self.back.empty() else self.back.get()
        if message is CLOSED:
            self.closed = True
            raise OtherSideGone
        return message

    def close(self) -> None:
        self.closed = True
        self.out.put(CLOSED)

    @classmethod
    def pair(cls) -> tuple["Queues", "Queues"]:
        one, other = queue.SimpleQueue(), queue.SimpleQueue()
        return cls(one, other), cls(other, one)
