"""M_D: long-lived tensors go into memory that was allocated once, up front (section 6.3).

A step with activation checkpoints mixes two kinds of tensors. Forward keeps the checkpoints and
drops all other activations; backward keeps the gradients of parameters and drops those of
activations. Kept tensors end up between tensors that are dropped a moment later, and each hole
around them is too small for the next large tensor: an allocation fails though more than 30% of the
memory is free (section 3.2).

Memory a rank, for L blocks with an input of [b, s, h] and Ψ parameters:
    checkpoint slab    L·b·s·h elements, for the largest b and s that will come
    gradient slab      Ψ elements
The tensors take as much without slabs. But slabs stay for good, and a tensor exists twice while it
is copied there.

Communication plan: none. The training step:
    start      slab = Slab(L·b·s·h);  gradient_slab = gradients_in_slab(model)
    forward    x = checkpoint(block, x, place=slab.keep), for each block
               (checkpoint is that of activation_partitioning.py: with group= it cuts what is kept)
    backward   each gradient goes into its slab as soon as it is complete
    step       optimizer.step();  optimizer.zero_grad();  slab.reset();  gradient_slab.reset()
With accumulation each micro-batch has checkpoints of its own: reset their slab after each backward.
A backward that comes after the reset fails: what it needs may be overwritten.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn


@dataclass(eq=False)
class Block:
    """A part of a range, with those right before and after it there (None: the range ends)."""

    address: int
    size: int
    used: bool = False
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)


class Pool:
    """Blocks of one range of addresses, or of several. The blocks of a range touch, and cover it.

    slack: a rest of at most this size is no block of its own: the one who asked gets it, too.
    """

    def __init__(self, slack: int = 0):
        self.slack = slack
        self._free: list[tuple[int, int, Block]] = []  # (size, address, block), in this order

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(address, size) of each free block, by address. No two of a range touch."""
        return sorted((address, size) for size, address, _ in self._free)

    def add(self, address: int, size: int) -> None:
        """One more range, which is free. It never merges with another, though their addresses may
        touch."""
        self._insert(Block(address, size))

    def remove(self, address: int, size: int) -> None:
        """Take out a range of which nothing is used."""
        self._take_out(size, address)

    def take(self, size: int) -> Block | None:
        """A used block of `size` to `size + slack`. None if no free block is so large."""
        # step 1: the smallest free block that is large enough is used, of several the one at the
        # lowest address. If it has more than `slack` too much, the rest behind it is a free block
        # of its own, and both its neighbours know it. None, and nothing has changed, if no free
        # block is large enough.
        # - self._free: the free blocks, (size, address, block), sorted
        # - bisect.bisect_left(entries, (size,)): the place of the first entry that does not begin
        #   with less than `size`
        # - Block(address, size, before=…, after=…): a free block, with its neighbours in the range
        # - block.address, .size, .used, .before, .after: yours to read and to set
        # - self._insert(block): it is among the free blocks from now on
        raise NotImplementedError("step 1: take")

    def give(self, block: Block) -> None:
        """Take a block back. Raises: ValueError if it is free already."""
        # step 2: the block is free, and merged with its free neighbours of the same range. No two
        # free blocks of a range touch. ValueError, and nothing has changed, if it was free already.
        # - self._take_out(size, address): this block is no longer among the free ones
        # - self._insert(block): it is among them from now on
        raise NotImplementedError("step 2: give")

    def _insert(self, block: Block) -> None:
        """Among the free blocks."""
        bisect.insort(self._free, (block.size, block.address, block))

    def _take_out(self, size: int, address: int) -> None:
        """A block of the free ones."""
        del self._free[bisect.bisect_left(self._free, (size, address))]


class Slab:
    """One allocation for long-lived tensors of one kind, which are put side by side until reset().

    Args:
        elements: its size. By default the first round in which something is kept measures it: until
            reset() tensors get memory of their own, and then the slab is allocated for as many
            elements as were kept.
        dtype, device: those of the tensors.
    `memory` is the allocation, [elements] (None while it measures); `used` counts the elements kept
    in this round.
    """

    def __init__(
        self, elements: int | None = None, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        self.dtype, self.device = dtype, torch.device(device or "cpu")
        self.memory: Tensor | None = None
        self.used = 0
        if elements is not None:
            self._allocate(elements)

    def _allocate(self, elements: int) -> None:
        if elements < 1:
            raise ValueError(f"a slab must hold at least one element, not {elements}")
        self.memory = torch.empty(elements, dtype=self.dtype, device=self.device)
        self._kept = self.memory.data  # the same memory; autograd counts its changes separately

    @torch.no_grad()
    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in the slab, of the same shape. It is valid until reset().

        Raises: ValueError for another dtype or device than the slab's; MemoryError if the slab is
            full.
        """
        # step 3: the result is a copy of the tensor, in its shape, right behind what was kept
        # before it in this round. What was kept before is as it was, for autograd too. `used`
        # counts it. (While the slab measures, memory is None: then the copy has memory of its own.)
        # - self._end_of(tensor): what `used` will be; raises if the tensor may not be kept
        # - self.memory [elements], self._kept [elements]: the same memory, with two version
        #   counters: write through one, hand out views of the other
        raise NotImplementedError("step 3: keep")

    def _end_of(self, tensor: Tensor) -> int:
        """What `used` will be with this tensor. Raises as keep() does."""
        if tensor.dtype != self.dtype or tensor.device.type != self.device.type:
            raise ValueError(
                f"this slab holds {self.dtype} on {self.device}, and was given {tensor.dtype} on "
                f"{tensor.device}: make one slab for each dtype and device"
            )
        end = self.used + tensor.numel()
        if self.memory is not None and end > len(self.memory):
            raise MemoryError(
                f"the slab is full: {tensor.numel()} elements do not fit behind the {self.used} of "
                f"{len(self.memory)} that are used. Make it as large as the largest step needs, "
                "and reset() it after each step"
            )
        return end

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the slab's memory."""
        return self.memory is not None and (
            tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()
        )

    def reset(self) -> None:
        """Forget all that was kept: the next tensor goes to the front again. Nothing is freed."""
        # step 3: nothing is kept any more, and the next tensor goes to the front; no memory was
        # given back. A backward that still needs what was kept in self.memory fails. (After the
        # round that measured, memory is allocated for as much as was kept. A round without anything
        # goes on measuring.)
        # - tensor[:0].zero_(): changes no number, and counts as a change
        # - self._allocate(elements): makes memory and _kept
        raise NotImplementedError("step 3: reset")


def gradients_in_slab(model: nn.Module) -> Slab:
    """From now on each parameter's .grad is in one slab, in the order in which backward completes
    them.

    Returns: the Slab, with room for one gradient of each parameter. Set the gradients to None, then
        reset() it.
    Raises: ValueError if no parameter needs a gradient, or if those that need one differ in dtype
        or device; RuntimeError in backward, if it adds to a gradient that was kept before the last
        reset().
    """
    # step 4: the slab has room for one gradient of each parameter that wants one. In backward, as
    # soon as a gradient is complete, it lies there, and nowhere else. A second backward adds to
    # what lies there. RuntimeError in backward, where it adds in place to a gradient from before
    # the last reset(), anywhere in the slab. (`_kind_of` finds dtype and device.)
    # - param.register_post_accumulate_grad_hook(hook): hook(param) runs in backward, whenever
    #   param.grad is complete
    # - slab.holds(tensor): whether it lies in the slab's memory
    # - slab.used: after a reset it is not what your last hook has left
    # - id(param): a number to remember it by. (A hook that holds its parameter keeps it alive for
    #   good.)
    raise NotImplementedError("step 4: gradients_in_slab")


def _kind_of(params: list[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of them all."""
    kinds = {(param.dtype, param.device) for param in params}
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError("a gradient slab is for parameters of one dtype on one device; this model "
                         f"has {found or 'none that wants a gradient'}")
    return kinds.pop()


# A slab is emptied all at once. If tensors come and go one by one, holes appear again. An arena can
# close them:


class Arena:
    """One allocation in which tensors come and go one by one, and which can be compacted.

    Args:
        elements: its size.
        dtype, device: those of all tensors in it.
    `memory` is the allocation, [elements]; `pool` knows which blocks of it are free, and `lent`
    which tensors have the others.
    """

    def __init__(
        self, elements: int, dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        if elements < 1:
            raise ValueError(f"an arena must hold at least one element, not {elements}")
        self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.pool = self._empty_pool()
        self.lent: dict[int, tuple[Tensor, Block]] = {}  # by id of the tensor

    def _empty_pool(self) -> Pool:
        """All of the memory as one free block; addresses and sizes are in elements."""
        pool = Pool()
        pool.add(0, len(self.memory))
        return pool

    @property
    def free_bytes(self) -> int:
        """Bytes that no tensor uses, in all."""
        return sum(size for _, size in self.pool.holes) * self.memory.element_size()

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block: no larger tensor fits now."""
        largest = max((size for _, size in self.pool.holes), default=0)
        return largest * self.memory.element_size()

    def allocate(self, shape: Sequence[int]) -> Tensor:
        """A tensor of this shape that is a view of the arena's memory, not initialised.

        It stays valid until free(): if compact() moves it, it follows. Views of it do not follow.
        Raises: MemoryError if no free block is large enough; ValueError for a shape without
            elements.
        """
        shape = torch.Size(shape)
        if shape.numel() < 1:
            raise ValueError("an arena hands out tensors of at least one element, not of shape "
                             f"{tuple(shape)}")
        block = self.pool.take(shape.numel())
        if block is None:
            self._refuse(shape)
        tensor = torch.empty(0, dtype=self.memory.dtype, device=self.memory.device)
        self._lend(tensor, block, shape)
        return tensor

    def _refuse(self, shape: torch.Size) -> NoReturn:
        wanted = shape.numel() * self.memory.element_size()
        advice = ("call compact(), then it fits" if wanted <= self.free_bytes
                  else "free tensors that are not needed, or make the arena larger")
        raise MemoryError(f"a tensor of shape {tuple(shape)} needs {wanted} bytes; "
                          f"{self.free_bytes} are free, the largest block has "
                          f"{self.largest_free}: {advice}")

    @torch.no_grad()
    def _lend(self, tensor: Tensor, block: Block, shape: torch.Size, stride: Sequence[int] = ()):
        """Put the tensor, of this shape, into this block."""
        # set_ counts as a change, unlike .data = …: if autograd saved the tensor for backward,
        # backward raises an error
        tensor.set_(self.memory.untyped_storage(), block.address, shape, stride)
        self.lent[id(tensor)] = tensor, block

    @torch.no_grad()
    def free(self, tensor: Tensor) -> None:
        """Give a tensor's memory back. The tensor becomes empty, so that nobody uses it by mistake.

        Raises: ValueError if it is not one that this arena handed out, or was freed before.
        """
        if id(tensor) not in self.lent:
            raise ValueError("free() takes a tensor that allocate() of this arena returned, once: "
                             "it is none, or it was freed before")
        _, block = self.lent.pop(id(tensor))
        self.pool.give(block)
        tensor.set_()

    @torch.no_grad()
    def compact(self) -> None:
        """Move all tensors to the front, in place: the free memory becomes one block. The tensors
        follow.

        Call it between steps: backward cannot use a tensor that was saved in forward and moved
        since, and raises an error.
        """
        # step 5: all tensors lie at the front, in the order in which they lay, with the values that
        # they had: the same tensor objects, of the same shapes and strides. What is free is one
        # block.
        # - self.lent: {id: (tensor, block)}, what the arena has handed out
        # - self._empty_pool(): a pool in which all of the arena is one free block
        # - self._lend(tensor, block, shape, stride): the tensor lies in this block from now on, and
        #   autograd counts that as a change
        raise NotImplementedError("step 5: compact")

    def _move(self, source: int, target: int, size: int, piece: int = 2**18) -> None:
        """Move elements from `source` on to `target`, further in front. Both may overlap, and no
        more than a `piece` of them exists twice."""
        # step 5: the `size` elements that were at `source` are at `target`, which is not behind it.
        # What else it needs is memory for `piece` elements at most.
        raise NotImplementedError("step 5: _move")


if __name__ == "__main__":
    from zero_minimal.programs.lesson08_program import main

    main()
