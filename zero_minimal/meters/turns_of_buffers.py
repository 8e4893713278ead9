"""Turns of buffers: when each buffer is read into, worked on and written, as shards pass through them (read_ahead.py).

The file is a slow one in memory, so that a picture depends on the order of work and not on the machine.
"""

import time
from dataclasses import dataclass

import torch

from zero_minimal.offloading.files import Stretch

SHARD = 250_000  # elements, fp32: a megabyte


@dataclass(frozen=True)
class Turn:
    """What was done with a shard in a buffer: "read", "work" or "write"; in seconds since the first turn began."""

    what: str
    shard: int
    buffer: int
    start: float
    end: float


class SlowFile:
    """A file in memory that moves `speed` bytes a second, and records its reads and writes."""

    def __init__(self, size: int, speed: float):
        self.bytes, self.speed = torch.zeros(size, dtype=torch.uint8), speed
        self.moved: list[tuple] = []  # what, first byte, memory address, start, end

    def read(self, begin: int, memory: torch.Tensor) -> None:
        self._move("read", begin, memory)

    def write(self, begin: int, memory: torch.Tensor) -> None:
        self._move("write", begin, memory)

    def _move(self, what: str, begin: int, memory: torch.Tensor) -> None:
        start = time.monotonic()
        here = self.bytes[begin : begin + memory.nbytes]
        pairs = (memory.view(torch.uint8), here) if what == "read" else (here, memory.view(torch.uint8))
        pairs[0].copy_(pairs[1])
        time.sleep(memory.nbytes / self.speed)
        self.moved.append((what, begin, memory.data_ptr(), start, time.monotonic()))


def watched_turns(kind: type, shards: int, work: float, speed: float = 100e6) -> list[Turn]:
    """Pass `shards` shards of a megabyte through the buffers of a ReadAhead; work on each for `work` seconds.

    kind: the class, which may be a learner's. speed: of the file, bytes a second each way.
    """
    stretches, size = [], 0
    for _ in range(shards):
        stretches.append(Stretch.of(size, SHARD, {"master": torch.float32}))
        size += stretches[-1].size
    file = SlowFile(size, speed)
    lanes = kind(file, max(stretch.size for stretch in stretches))
    began, own = time.monotonic(), []
    for number, buffer in enumerate(lanes.through(stretches)):
        start = time.monotonic()
        time.sleep(work)
        own.append(("work", stretches[number].start, buffer.memory.data_ptr(), start, time.monotonic()))
    for buffer in lanes.buffers:
        buffer.written.result()
    order = [buffer.memory.data_ptr() for buffer in lanes.buffers]
    return [Turn(what, begin // stretches[0].size, order.index(memory), start - began, end - began)
            for what, begin, memory, start, end in own + file.moved]
