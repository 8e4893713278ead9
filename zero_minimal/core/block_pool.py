"""Block pool: who uses which part of a range of addresses. Sizes in bytes, elements, or any unit.

    pool = Pool()
    pool.add(0, 1000)           # the addresses 0 to 999, as one free block
    block = pool.take(300)      # used now: block.address, block.size; None if there is no such
    pool.give(block)            # free again

Every allocator is made of these: CUDA's (meters/allocator.py), and the arena of lesson 8.
"""

import bisect
from dataclasses import dataclass, field


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
        # best fit: large blocks are left for large requests
        index = bisect.bisect_left(self._free, (size,))
        if index == len(self._free):
            return None
        *_, block = self._free.pop(index)
        block.used = True
        if block.size - size > self.slack:
            rest = Block(block.address + size, block.size - size, before=block, after=block.after)
            if rest.after:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._insert(rest)
        return block

    def give(self, block: Block) -> None:
        """Take a block back. Raises: ValueError if it is free already."""
        if not block.used:
            raise ValueError(f"the block at {block.address} is free already")
        block.used = False
        before, after = block.before, block.after
        if before and not before.used:
            self._take_out(before.size, before.address)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before:
                block.before.after = block
        if after and not after.used:
            self._take_out(after.size, after.address)
            block.size += after.size
            block.after = after.after
            if block.after:
                block.after.before = block
        self._insert(block)

    def _insert(self, block: Block) -> None:
        """Among the free blocks."""
        bisect.insort(self._free, (block.size, block.address, block))

    def _take_out(self, size: int, address: int) -> None:
        """A block of the free ones."""
        del self._free[bisect.bisect_left(self._free, (size, address))]
