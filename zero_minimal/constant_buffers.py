"""C_B: fused buffers of a constant size, however large the model is (section 6.2).

Collectives are fast on large vectors, so gradients are fused before they are sent: copied side by
side into a buffer, in fp32 where sums must be precise. One buffer for all of them takes 4Ψ bytes:
12 GB for a model of 3B parameters, on top of everything that ZeRO-DP has just saved. A constant
size is enough: beyond some MB a larger buffer is hardly faster.

    fused      | g₁ | g₂ ······· | g₃ | g₄ ·· |              one buffer, 4Ψ bytes, one collective
    constant   | g₁ | g₂ ·· |   →   | ·· g₂ | g₃ | g₄ |  →   two buffers that take turns,
                                                             2 × `size` bytes, whatever Ψ is

A tensor that does not fit into the rest of the buffer is sent in pieces. While one buffer is on its
way, the other is filled. The price: one collective for each load, with its fixed cost, and two
buffers that stay, even if all gradients together are smaller.

The buckets of stages 0 to 2 are the first half of this idea: their size does not depend on the
model either. But their memory does not stay: stage 2 takes new memory for each bucket and gives it
back, between activations that come and go. This leaves holes, the subject of the next lesson.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from zero_minimal.core import collectives, fused
from zero_minimal.core.mesh import Group


class ConstantBuffers:
    """Two buffers, allocated once, that take turns.

    Args:
        size: bytes of each of the two.
        dtype: of the buffers, floating-point; fp32 sums 16-bit gradients precisely.
        group: the ranks whose collectives the buffers serve.
    Attributes: `buffers`, the two [elements]; `elements`, as many as fit into `size` bytes and the
        ranks can share equally; `group`.
    Raises: ValueError for a size that does not hold one element a rank.
    """

    def __init__(
        self, size: float, *, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", group: Group = None,
    ):
        self.group = group
        world_size = dist.get_world_size(group)
        self.elements = int(size) // dtype.itemsize // world_size * world_size
        if self.elements < 1:
            raise ValueError(f"a buffer of {size} bytes does not hold one element for each of "
                             f"{world_size} ranks: {world_size * dtype.itemsize} bytes are the "
                             "least")
        self.buffers = [torch.zeros(self.elements, dtype=dtype, device=device) for _ in range(2)]
        self._under_way = [None, None]  # what to call before a buffer may be filled again
        self._turn = 0

    def take(self) -> Tensor:
        """The buffer whose turn it is [elements], once it may be filled again."""
        self._turn = 1 - self._turn
        self._finish(self._turn)
        return self.buffers[self._turn]

    def send(self, pending: collectives.Work, then: Callable[[], object]) -> None:
        """The buffer that was taken last is on its way. Once `pending` is over, `then()` is called
        to read the result: not now, but before the buffer is taken again."""
        self._under_way[self._turn] = pending, then

    def wait(self) -> None:
        """Wait until both are back, and their results are read."""
        self._finish(1 - self._turn)  # it left first
        self._finish(self._turn)

    def _finish(self, turn: int) -> None:
        """Wait until buffer 0 or 1 is back, and its result is read."""
        if self._under_way[turn]:
            pending, then = self._under_way[turn]
            pending.wait()
            then()
            self._under_way[turn] = None


def loads(flats: Iterable[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Flat tensors of any sizes, end to end as one long vector, cut into loads of `elements`.

    A load is the list of its pieces, in order, each a view of a tensor. The last load is what is
    left; no load is empty.
    """
    load, room = [], elements
    for flat in flats:
        start = 0
        while start < flat.numel():
            piece = flat[start : start + room]
            load.append(piece)
            start, room = start + piece.numel(), room - piece.numel()
            if room == 0:
                yield load
                load, room = [], elements
    if load:
        yield load


def fill(buffer: Tensor, load: list[Tensor]) -> Tensor:
    """Copy the pieces into the buffer, side by side from its start, in the buffer's dtype.

    Returns: the part of the buffer that is filled, a view.
    """
    sizes = [piece.numel() for piece in load]
    filled = buffer[: sum(sizes)]
    for place, piece in zip(filled.split(sizes), load, strict=True):
        place.copy_(piece)
    return filled


def unpack(filled: Tensor, load: list[Tensor]) -> None:
    """Copy what was filled back into the pieces, each in its own dtype."""
    sizes = [piece.numel() for piece in load]
    for piece, place in zip(load, filled.split(sizes), strict=True):
        piece.copy_(place)


@torch.no_grad()
def all_reduce(tensors: Iterable[Tensor], buffers: ConstantBuffers, op: str = "avg") -> None:
    """Average (or sum) tensors of any shapes over the ranks, in place, through constant buffers.

    All ranks must give the same shapes in the same order.
    Raises: what fused.flat_views raises, before any tensor is changed: for dtypes that the buffers
        would round, among others.
    """
    like = buffers.buffers[0]
    flats = fused.flat_views(tensors, like.dtype, like.device)
    for load in loads(flats, buffers.elements):
        filled = fill(buffers.take(), load)
        pending = collectives.all_reduce(filled, op=op, group=buffers.group, async_op=True)
        buffers.send(pending, functools.partial(unpack, filled, load))
    buffers.wait()


@torch.no_grad()
def fused_all_reduce(tensors: Iterable[Tensor], op: str = "avg", group: Group = None) -> None:
    """The same without C_B: one fp32 buffer as large as all tensors together."""
    pieces = fused.flat_views(tensors, torch.float32)
    buffer = torch.cat([piece.float() for piece in pieces])
    collectives.all_reduce(buffer, op=op, group=group)
    unpack(buffer, pieces)


if __name__ == "__main__":
    from zero_minimal.programs.lesson07_program import main

    main(ConstantBuffers, all_reduce, fused_all_reduce)
