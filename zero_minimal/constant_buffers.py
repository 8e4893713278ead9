"""C_B: fused buffers of a constant size, however large the model is (section 6.2).

Collectives are fast on large vectors, so gradients are fused before they are sent: copied side by
side into a buffer, in fp32 where sums must be precise. One buffer for all of them takes 4Ψ bytes:
12 GB for a model of 3B parameters, on top of everything that ZeRO-DP has just saved. A constant
size is enough: beyond some MB nothing gets faster.

    fused      | g₁ | g₂ ······· | g₃ | g₄ ·· |              one buffer, 4Ψ bytes, one collective
    constant   | g₁ | g₂ ·· |   →   | ·· g₂ | g₃ | g₄ |  →   two buffers that take turns,
                                                             2 × `size` bytes, whatever Ψ is

A tensor larger than what is left of the buffer goes through in pieces. While one buffer is on its
way, the other is filled.

The buckets of stages 0 to 2 are the first half of this idea: their size does not depend on the
model either. What they lack is that the memory stays: stage 2 takes new memory for each bucket and
gives it back, between activations that come and go. There it leaves holes, which the next lesson is
about.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from zero_minimal.foundations import collectives, fused
from zero_minimal.foundations.mesh import Group


class ConstantBuffers:
    """Two buffers, allocated once, that take turns.

    Args:
        size: bytes of each of the two.
        dtype: of the buffers, floating-point; fp32 sums 16-bit gradients precisely.
        group: the ranks whose collectives the buffers serve.
    Raises: ValueError for a size that does not hold one element a rank.
    """

    def __init__(
        self, size: float, *, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", group: Group = None,
    ):
        self.group = group
        world_size = dist.get_world_size(group)
        self.elements = int(size) // dtype.itemsize // world_size * world_size  # equal shards
        if self.elements < 1:
            raise ValueError(f"a buffer of {size} bytes does not hold one element for each of "
                             f"{world_size} ranks: {world_size * dtype.itemsize} bytes are the "
                             "least")
        self.buffers = [torch.zeros(self.elements, dtype=dtype, device=device) for _ in range(2)]
        self._under_way = [None, None]  # what to call before a buffer may be filled again
        self._turn = 0

    def take(self) -> Tensor:
        """The buffer whose turn it is [elements], once the collective that used it is over."""
        self._turn = 1 - self._turn
        self._finish(self._turn)
        return self.buffers[self._turn]

    def send(self, pending: collectives.Pending, then: Callable[[], None]) -> None:
        """The buffer that was taken is on its way: `then()` reads the result, when its turn comes
        again."""
        self._under_way[self._turn] = pending, then

    def wait(self) -> None:
        """Until both are back."""
        self._finish(1 - self._turn)  # it left first
        self._finish(self._turn)

    def _finish(self, turn: int) -> None:
        if self._under_way[turn]:
            pending, then = self._under_way[turn]
            pending.wait()
            then()
            self._under_way[turn] = None


@torch.no_grad()
def all_reduce(tensors: Iterable[Tensor], buffers: ConstantBuffers, op: str = "avg") -> None:
    """Average (or sum) tensors of any shapes over the ranks, in place, through constant buffers.

    They are one long vector, cut wherever a buffer is full. All ranks must give the same shapes.
    Raises: what fused.flat_views raises, while all tensors are as they were: for dtypes that the
        buffers would round, among others.
    """
    buffer, filled, pieces = None, 0, []

    def send():
        pending = collectives.all_reduce(
            buffer[:filled], op=op, group=buffers.group, async_op=True
        )
        buffers.send(pending, lambda pieces=pieces, buffer=buffer: _unpack(buffer, pieces))

    like = buffers.buffers[0]
    for flat in fused.flat_views(tensors, like.dtype, like.device):
        start = 0
        while start < flat.numel():
            if buffer is None:
                buffer, filled, pieces = buffers.take(), 0, []
            piece = flat[start : start + buffers.elements - filled]
            buffer[filled : filled + piece.numel()] = piece
            pieces.append(piece)
            start, filled = start + piece.numel(), filled + piece.numel()
            if filled == buffers.elements:
                send()
                buffer = None
    if buffer is not None:
        send()
    buffers.wait()


@torch.no_grad()
def fused_all_reduce(tensors: Iterable[Tensor], op: str = "avg", group: Group = None) -> None:
    """The same without C_B: one fp32 buffer as large as all tensors together."""
    pieces = fused.flat_views(tensors, torch.float32)
    buffer = torch.cat([piece.float() for piece in pieces])
    collectives.all_reduce(buffer, op=op, group=group)
    _unpack(buffer, pieces)


def _unpack(buffer: Tensor, pieces: list[Tensor]) -> None:
    start = 0
    for piece in pieces:
        piece.copy_(buffer[start : start + piece.numel()])
        start += piece.numel()


if __name__ == "__main__":
    from zero_minimal.programs.constant_buffers import main

    main()
