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
        # step 1: self.group, self.elements and self.buffers are as the docstring says, and nothing
        # is on its way. (A multiple of the number of ranks: then each of them sums an equal part,
        # and nothing has to be padded.) ValueError if there is no element for each rank. `size` may
        # be a float, and `elements` is an int.
        # - dist.get_world_size(group): how many ranks share the buffers
        # - dtype.itemsize: bytes of an element
        # - torch.zeros(elements, dtype=…, device=…): new memory [elements]
        raise NotImplementedError("step 1: __init__")

    def take(self) -> Tensor:
        """The buffer whose turn it is [elements], once it may be filled again."""
        # step 1: the other buffer than the last time is returned. It is not on its way any more,
        # and its result was read. The one that was sent last may still be on its way.
        raise NotImplementedError("step 1: take")

    def send(self, pending: collectives.Work, then: Callable[[], object]) -> None:
        """The buffer that was taken last is on its way. Once `pending` is over, `then()` is called
        to read the result: not now, but before the buffer is taken again."""
        # step 1: it is noted what the buffer taken last waits for. Nothing has been waited for or
        # read.
        raise NotImplementedError("step 1: send")

    def wait(self) -> None:
        """Wait until both are back, and their results are read."""
        # step 1: both buffers are back, and each result was read, once.
        raise NotImplementedError("step 1: wait")

    def _finish(self, turn: int) -> None:
        """Wait until buffer 0 or 1 is back, and its result is read."""
        # step 1: buffer 0 or 1 is not on its way any more. If it was, its result was read, and what
        # it waited for is forgotten. (A helper: take() and wait() need it.)
        # - pending.wait(): returns when the collective has ended
        # - then(): reads the result
        raise NotImplementedError("step 1: _finish")


def loads(flats: Iterable[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Flat tensors of any sizes, end to end as one long vector, cut into loads of `elements`.

    A load is the list of its pieces, in order, each a view of a tensor. The last load is what is
    left; no load is empty.
    """
    # step 2: every element is in one load, in order, and every load but the last has `elements` of
    # them.
    # - flat[start : end]: a view of these elements, or of fewer where the tensor ends before
    # - tensor.numel(): how many elements it has
    raise NotImplementedError("step 2: loads")


def fill(buffer: Tensor, load: list[Tensor]) -> Tensor:
    """Copy the pieces into the buffer, side by side from its start, in the buffer's dtype.

    Returns: the part of the buffer that is filled, a view.
    """
    # step 3: the pieces' numbers stand in the buffer, one piece behind the other; what is behind
    # them is untouched.
    # - tensor.split([3, 1, 4]): views of 3, 1 and 4 elements, one behind the other
    # - place.copy_(piece): writes the numbers of piece into the memory of place, in the dtype of
    #   place
    raise NotImplementedError("step 3: fill")


def unpack(filled: Tensor, load: list[Tensor]) -> None:
    """Copy what was filled back into the pieces, each in its own dtype."""
    # step 3: each piece holds its part of `filled`, in the memory in which it lies. (The calls are
    # those of fill.)
    raise NotImplementedError("step 3: unpack")


@torch.no_grad()
def all_reduce(tensors: Iterable[Tensor], buffers: ConstantBuffers, op: str = "avg") -> None:
    """Average (or sum) tensors of any shapes over the ranks, in place, through constant buffers.

    All ranks must give the same shapes in the same order.
    Raises: what fused.flat_views raises, before any tensor is changed: for dtypes that the buffers
        would round, among others.
    """
    # step 4: each tensor holds the mean (or the sum) over the ranks, rounded once; nothing is on
    # its way. The buffers took turns: one was filled while the other travelled.
    # - fused.flat_views(tensors, dtype, device): a list with a flat view of each tensor. It raises,
    #   while all are as they were, if one of them does not fit into buffers of this dtype on this
    #   device
    # - collectives.all_reduce(tensor, op="avg" or "sum", group=…, async_op=True): in place. Returns
    #   a Work at once: a `pending`
    # - functools.partial(f, a, b): a function without arguments. It calls f(a, b), with what a and
    #   b are now
    raise NotImplementedError("step 4: all_reduce")


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
