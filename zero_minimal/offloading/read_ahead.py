"""Read ahead, write behind: stretches of a file pass through a few buffers, one after the other.

While the caller works on a stretch, one thread reads the next, and another writes the one before:

    buffer 0    read 0 │ work on 0 │ write 0   │ read 3 …
    buffer 1             read 1    │ work on 1 │ write 1
    buffer 2                         read 2    │ work on 2

A stretch must not be read again, nor a buffer filled again, before it has been written. With few
stretches both would happen without a wait.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from zero_minimal.offloading.files import Buffer, File, Stretch

BUFFERS = 3  # one is read, one is worked on, one is written


class Lanes:
    """A thread that reads from a file, one that writes to it, and buffers that take turns.

    Args:
        file: its read(begin, memory) and write(begin, memory) return when that is done.
        size: bytes of the largest stretch.
    Counts what it has begun to move: .read and .written, in bytes.
    """

    def __init__(self, file: File, size: int):
        self.file = file
        self.buffers = [Buffer(size) for _ in range(BUFFERS)]
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.read = self.written = 0
        self._turns = itertools.cycle(self.buffers)

    def _begin_to_read(self, stretch: Stretch) -> Future:
        """Its result will be the buffer that has the stretch."""
        self.read += stretch.size
        return self.reader.submit(self._read, stretch, next(self._turns))

    # without a thread

    def free_buffer(self) -> Buffer:
        """The next in turn, once its last write is done."""
        buffer = next(self._turns)
        buffer.written.result()
        return buffer

    def read_now(self, stretch: Stretch, name: str) -> Tensor:
        """One tensor of a stretch, [numel], in a buffer; valid until two others were asked for."""
        stretch.written.result()
        view = stretch.view(self.free_buffer().memory, name)
        self.read += view.nbytes
        self.file.read(stretch.start + stretch.parts[name][0], view)
        return view

    def write_now(self, stretch: Stretch, name: str, tensor: Tensor) -> None:
        """Write one tensor of a stretch."""
        self.written += tensor.nbytes
        self.file.write(stretch.start + stretch.parts[name][0], tensor)


class ReadAhead(Lanes):
    """Stretches of a file pass through the lanes, one after the other."""

    def through(self, stretches: Sequence[Stretch]) -> Iterator[Buffer]:
        """Yields the buffer of each stretch in turn. The caller's changes are written, from
        stretch.changes on. Raises: what the file raises."""
        reading = self._begin_to_read(stretches[0])
        for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
            buffer = reading.result()
            if following is not None:
                reading = self._begin_to_read(following)
            yield buffer
            self.begin_to_write(stretch, buffer)

    def _read(self, stretch: Stretch, buffer: Buffer) -> Buffer:
        """In the reading thread: wait for writes that are still under way, then read."""
        buffer.written.result()
        stretch.written.result()
        self.file.read(stretch.start, buffer.memory[: stretch.size])
        return buffer

    def begin_to_write(self, stretch: Stretch, buffer: Buffer) -> None:
        """Write a buffer's stretch, from its changes on."""
        changed = buffer.memory[stretch.changes : stretch.size]
        self.written += changed.nbytes
        buffer.written = stretch.written = self.writer.submit(
            self.file.write, stretch.start + stretch.changes, changed
        )
