"""Files: tensors on a disk, and the buffers through which they pass (disk.py).

A file never has a name: when the process ends, in any way, the system frees its space. All of that
space is reserved at the start, so a full disk is an error then, and not in the middle of a run.
Nothing is mapped into memory, since mapped pages count as the process's own.
"""

import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

BORDER = 64  # bytes, a cache line: each tensor begins at a multiple


NOTHING = Future()  # no write is under way
NOTHING.set_result(None)


@dataclass(eq=False)
class Stretch:
    """Where the tensors of a shard are, one after the other: in the file from byte `start` on, and
    alike in a buffer. `written`: their last write to the file."""

    start: int
    numel: int  # elements of each
    parts: dict[str, tuple[int, torch.dtype]]  # by name: the first byte, from `start` on
    size: int  # bytes
    changes: int  # the first byte, from `start` on, that an update changes
    written: Future = NOTHING

    @classmethod
    def of(cls, start: int, numel: int, dtypes: dict[str, torch.dtype]) -> "Stretch":
        """The gradient comes first: it is the only one that an update reads but does not change."""
        parts, size = {}, 0
        for name, dtype in dtypes.items():
            parts[name] = size, dtype
            size += -(-numel * dtype.itemsize // BORDER) * BORDER
        return cls(start, numel, parts, size, parts["master"][0])

    def view(self, memory: Tensor, name: str) -> Tensor:
        """One of them in a buffer's memory, [numel]."""
        begin, dtype = self.parts[name]
        return memory[begin : begin + self.numel * dtype.itemsize].view(dtype)


class Buffer:
    """Memory for any one shard. `written`: the last write from it to the file."""

    def __init__(self, size: int):
        self.memory = torch.empty(size, dtype=torch.uint8).fill_(0)  # so it is resident now
        self.written = NOTHING


class File:
    """Space for `size` bytes in a folder.

    Raises: OSError if the folder does not exist, cannot be written to, or has no room.
    """

    def __init__(self, folder: str, size: int):
        self.folder = folder
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)
        _reserve(self.file.fileno(), size)

    def read(self, begin: int, into: Tensor) -> None:
        self._move(os.preadv, "read from", begin, into)

    def write(self, begin: int, tensor: Tensor) -> None:
        self._move(os.pwritev, "write to", begin, tensor)

    def _move(self, call, words: str, begin: int, tensor: Tensor) -> None:
        """Move all of it: the system may do a part at a time. Raises: RuntimeError."""
        left = memoryview(tensor.view(torch.uint8).numpy())
        try:
            while left:
                done = call(self.file.fileno(), [left], begin)
                if not done:
                    raise OSError(0, "the file has ended")
                begin, left = begin + done, left[done:]
        except OSError as error:
            raise RuntimeError(f"the disk tier could not {words} its file in {self.folder}: "
                               f"{error.strerror}. What it kept is lost: go on from the newest "
                               "checkpoint, with another folder") from None


def _reserve(number: int, size: int) -> None:
    """Reserve the space with zeros. A file that is merely long would have holes, and the disk might
    be full when they are filled."""
    if hasattr(os, "posix_fallocate"):
        return os.posix_fallocate(number, 0, max(size, 1))
    zeros = bytes(2**20)
    for begin in range(0, size, len(zeros)):
        os.pwrite(number, zeros[: size - begin], begin)


def free_bytes(folder: str) -> int:
    """Free bytes of the disk on which a folder is; 0 if there is no such folder."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


def laid_out(shards: Iterable[tuple[int, dict[str, torch.dtype]]]) -> list[Stretch]:
    """A stretch for each shard, one after the other: (elements, dtypes of its tensors)."""
    stretches, start = [], 0
    for numel, dtypes in shards:
        stretches.append(Stretch.of(start, numel, dtypes))
        start += stretches[-1].size
    return stretches
