"""Chunks: a stretch of a tensor's elements, as blocks with a start and a shape.

A rank's shard is a stretch of a bucket, and may begin and end in the middle of a matrix's row.
Elements 3 to 16 of a matrix [4, 5] are three chunks:

    · · · a a      a   from row 0, column 3   [1, 2]
    b b b b b      b   from row 1, column 0   [2, 5]
    b b b b b
    c c · · ·      c   from row 3, column 0   [1, 2]

So however a run cuts its tensors, each rank has chunks of the same whole tensors. To resume with
other ranks, find the saved chunks that overlap with the new ones, and copy what they share. Neither
run has to know how the other one cuts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """A part of a whole tensor: where it begins, and its shape: a number for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of a tensor that is this part of it."""
        places = zip(self.offsets, self.sizes, strict=True)
        return whole[tuple(slice(start, start + size) for start, size in places)]


def chunks(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Chunk]:
    """The chunks, in order, of the elements from begin up to, but without, end of a tensor of this
    shape. (A tensor without dimensions counts as one of shape [1].)"""
    if begin >= end:
        return
    if len(shape) < 2:
        yield Chunk((begin,), (end - begin,))
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows between them
    if first > last:  # begin and end lie within the same row
        yield from _in_row(shape, last, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield Chunk((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Chunk]:
    start = row * math.prod(shape[1:])
    for chunk in chunks(shape[1:], begin - start, end - start):
        yield Chunk((row, *chunk.offsets), (1, *chunk.sizes))


@dataclass(frozen=True)
class Place:
    """Where a model-parallel rank's tensor is in the whole one, which was cut along `dim`.

    shape: of the whole tensor.
    stretches: (first row in this rank's tensor, first row in the whole one, number of rows); a
        query, key and value matrix has three. Rows in none of them are padding, and are not saved.
    """

    shape: tuple[int, ...]
    dim: int
    stretches: tuple[tuple[int, int, int], ...]

    def chunks(self, chunk: Chunk) -> Iterator[tuple[Chunk, Chunk]]:
        """Cut a chunk of this rank's tensor at the stretches. Yields each part, with offsets from
        the chunk's beginning, and the same part as a chunk of the whole tensor."""
        begin, size = chunk.offsets[self.dim], chunk.sizes[self.dim]
        for here, there, rows in self.stretches:
            low, high = max(begin, here), min(begin + size, here + rows)
            if low < high:
                sizes = _with(chunk.sizes, self.dim, high - low)
                inside = _with(tuple(0 for _ in sizes), self.dim, low - begin)
                whole = _with(chunk.offsets, self.dim, low - here + there)
                yield Chunk(inside, sizes), Chunk(whole, sizes)


def _with(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])
