"""Allocator: a model of CUDA's caching allocator, which replays the allocations of a real training step.

    replay(ledger.trace, CachingAllocator(capacity))        # may raise OutOfMemory, which says how much was free

The trace is the memory ledger's: every allocation and free of a storage in training, in order. The model follows
torch's CUDACachingAllocator with its default settings:

    rounding    a request is rounded up to a multiple of 512 bytes
    segments    come from the driver: shared ones of 2 MiB for requests up to 1 MiB; shared ones of 20 MiB for those
                below 10 MiB; for each larger request its own, rounded up to a multiple of 2 MiB
    best fit    a request takes the smallest free block that is large enough. The excess is split off: always in a 2 MiB
                segment, in others if it is more than 1 MiB
    merging     a freed block merges with free neighbours in its segment
    giving back if the driver has no memory left, all unused segments are returned to it and it is asked again; if that
                fails, OutOfMemory is raised

Left out: streams, and torch's options against fragmentation (max_split_size, expandable_segments). The driver's memory
does not fragment: it maps pages, so any free pages can form a segment.

    record = packed(ledger.trace)       # a dict for JSON: the allocations of a run in a small file
    trace = unpacked(record)            # Events again, which can be replayed without the run

In a record, `requests` has a number for each event: n above 0 allocates n bytes, −k frees the k-th allocation, counted
from 1. `categories` has a letter for each allocation, the first letter of the ledger's category.
"""

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from zero_minimal.core.block_pool import Block, Pool
from zero_minimal.meters.memory import CATEGORIES, Event
from zero_minimal.paper.quantities import number

MIB = 2**20
ROUND = 512  # bytes
SMALL, SMALL_SEGMENT = 1 * MIB, 2 * MIB
LARGE, LARGE_SEGMENT, LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB


def rounded(bytes: int, unit: int = ROUND) -> int:
    """`bytes` rounded up to a multiple of `unit`."""
    return -(-bytes // unit) * unit


# ---------------------------------------------------------------------------------------------------------- allocator


@dataclass(eq=False)
class Segment:
    """Memory from the driver, held from request number `begin` to `end` (None: still held)."""

    address: int
    bytes: int
    begin: int
    pool: Pool = field(repr=False)  # the pool of its blocks
    end: int | None = None


class OutOfMemory(MemoryError):
    """A request that could not be served. Bytes: .requested, .capacity, .allocated, .free = capacity − allocated,
    .largest_free. .request is its number among all allocations and frees, from 0."""

    def __init__(self, requested: int, segment: int, allocator: "CachingAllocator"):
        self.requested, self.capacity, self.allocated = requested, allocator.capacity, allocator.allocated
        self.free, self.largest_free = self.capacity - self.allocated, allocator.largest_free
        self.request = allocator.requests
        which = "" if self.is_for_want_of_a_block else ", which a request of this size cannot use"
        super().__init__(
            f"{number(requested)} bytes do not fit: of {number(self.capacity)} bytes {number(self.free)} are free "
            f"({self.free_share:.0%}), but the largest free block has {number(self.largest_free)}{which}, and the "
            f"driver, asked for a segment of {number(segment)}, has {number(self.capacity - allocator.reserved)} left"
        )

    @property
    def is_for_want_of_a_block(self) -> bool:
        """Whether no free block is large enough. If False, one is, but requests of this size cannot use it."""
        return self.largest_free < self.requested

    @property
    def free_share(self) -> float:
        """The free share of the capacity."""
        return self.free / self.capacity


class CachingAllocator:
    """Serves requests from `capacity` bytes as the module's docstring says.

    allocated, reserved: bytes in used blocks, and in segments; peak_allocated, peak_reserved: their maxima. requests:
    the number of allocations and frees so far.
    pool: the class that finds, splits and merges blocks: Pool, or one with the same interface.
    """

    def __init__(self, capacity: int, pool: type[Pool] = Pool):
        if capacity < 1:
            raise ValueError(f"an allocator needs a capacity of at least one byte, not {capacity}")
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.requests = 0
        self.segments: list[Segment] = []  # held now, sorted by address
        self.past_segments: list[Segment] = []  # returned to the driver
        self._small, self._large = pool(), pool(slack=SMALL)

    def allocate(self, bytes: int) -> Block:
        """A block of at least `bytes` bytes. Raises OutOfMemory, and ValueError for a request of 0 bytes."""
        if bytes < 1:
            raise ValueError(f"a request is for at least one byte, not {bytes}")
        bytes = rounded(bytes)
        pool = self._small if bytes <= SMALL else self._large
        block = pool.take(bytes)
        if block is None:
            self._ask_driver(bytes, pool)
            block = pool.take(bytes)
        self.requests += 1
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block. Raises ValueError if it is already free."""
        place = bisect.bisect_right(self.segments, block.address, key=lambda segment: segment.address)
        size = block.size  # it may grow when free blocks merge
        self.segments[place - 1].pool.give(block)
        self.requests += 1
        self.allocated -= size

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(address, bytes) of each free block in the segments, by address."""
        return sorted(self._small.holes + self._large.holes)

    @property
    def free_blocks(self) -> list[int]:
        """Bytes of each free block in the segments, ascending."""
        return sorted(bytes for _, bytes in self.holes)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest block that is free, or would be if all unused segments were returned."""
        idle = sum(segment.bytes for segment in self._idle())
        return max([*self.free_blocks, self.capacity - self.reserved + idle])

    def _idle(self) -> list[Segment]:
        """Unused segments."""
        holes = set(self.holes)
        return [segment for segment in self.segments if (segment.address, segment.bytes) in holes]

    def _ask_driver(self, bytes: int, pool: Pool) -> None:
        """Request a large enough segment from the driver, and add it to the pool."""
        size = SMALL_SEGMENT if bytes <= SMALL else LARGE_SEGMENT if bytes < LARGE else rounded(bytes, LARGE_ROUND)
        if self.reserved + size > self.capacity:
            self._give_back()
        if self.reserved + size > self.capacity:
            raise OutOfMemory(bytes, size, self)
        address = 0
        for segment in self.segments:  # take the lowest gap: addresses matter only for pictures
            if segment.address - address >= size:
                break
            address = segment.address + segment.bytes
        segment = Segment(address, size, self.requests, pool)
        bisect.insort(self.segments, segment, key=lambda segment: segment.address)
        pool.add(address, size)
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Return unused segments to the driver."""
        for segment in self._idle():
            segment.pool.remove(segment.address, segment.bytes)
            segment.end = self.requests
            self.segments.remove(segment)
            self.past_segments.append(segment)
            self.reserved -= segment.bytes


# ------------------------------------------------------------------------------------------------------------- replay


class Row(NamedTuple):
    """One block's lifetime, from event number `begin` up to `end`, at `address`. `category` as in the ledger."""

    begin: int
    end: int
    address: int
    bytes: int
    category: str


def replay(trace: list[Event], allocator: CachingAllocator) -> CachingAllocator:
    """Let the allocator serve a ledger's trace; return the allocator. Raises OutOfMemory where training would have.

    Storages that were allocated before the trace began are left out.
    """
    for _ in _play(trace, allocator):
        pass
    return allocator


def _play(trace, allocator):
    """Yield, for each event, its number, storage, and the block that was allocated or is freed."""
    blocks = {}
    for index, (_, storage, bytes, _) in enumerate(trace):
        if bytes > 0:
            blocks[storage] = allocator.allocate(bytes)
            yield index, storage, blocks[storage]
        elif storage in blocks:
            yield index, storage, blocks[storage]  # before the block merges with its neighbours
            allocator.free(blocks.pop(storage))


def memory_map(trace: list[Event], allocator: CachingAllocator) -> tuple[list[Row], OutOfMemory | None]:
    """Replay as `replay` does; return each block's Row, sorted by begin, and the OutOfMemory that ended it, or None."""
    rows, begun, failure, last = [], {}, None, 0
    try:
        for last, storage, block in _play(trace, allocator):
            if storage in begun:
                rows.append(Row(begun.pop(storage)[0], last, block.address, block.size, storage.category))
            else:
                begun[storage] = last, block
    except OutOfMemory as error:
        failure = error
    rows += [Row(begin, last + 1, block.address, block.size, storage.category)
             for storage, (begin, block) in begun.items()]
    return sorted(rows), failure


class Finding(NamedTuple):
    """The capacities that two traces need, and one at which one trace succeeds and the other fails.

    smallest_without, smallest_with: the smallest capacity at which each trace succeeds.
    capacity, failure: that capacity, and the failure there. None: there is no such capacity.
    """

    smallest_without: int
    smallest_with: int
    capacity: int | None = None
    failure: OutOfMemory | None = None


def find_capacity(without: list[Event], with_slabs: list[Event], unit: int = 2 * MIB, tries: int = 48) -> Finding:
    """Find a capacity at which `without` runs out of memory because of holes, while `with_slabs` succeeds.

    Tries about `tries` multiples of `unit`. It takes the clearest: enough is free in total, and the largest free block
    is smallest compared with the request. A request may also fail although a block is large enough, because the
    allocator does not mix small and large requests; such a failure counts only if there is no other.
    """
    smallest_without, smallest_with = smallest_capacity(without, unit), smallest_capacity(with_slabs, unit)
    step = max(1, (smallest_without - smallest_with) // unit // tries) * unit
    failures = [failure for capacity in range(smallest_with, smallest_without, step)
                if (failure := fails(without, capacity)) and not fails(with_slabs, capacity)]
    best = max(failures, key=_clearness, default=None)
    return Finding(smallest_without, smallest_with, best and best.capacity, best)


def _clearness(failure: OutOfMemory) -> tuple:
    enough_in_all = failure.is_for_want_of_a_block and failure.requested <= failure.free
    return enough_in_all, failure.requested / max(1, failure.largest_free), failure.free_share


def smallest_capacity(trace: list[Event], unit: int = 2 * MIB, pool: type[Pool] = Pool) -> int:
    """A multiple of `unit` that suffices for the trace, while one `unit` less does not."""
    generous = replay(trace, CachingAllocator(2**62, pool))
    low, high = generous.peak_allocated // unit, rounded(generous.peak_reserved, unit) // unit  # may fail, succeeds
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fails(trace, middle * unit, pool) else (low, middle)
    return high * unit


def fails(trace: list[Event], capacity: int, pool: type[Pool] = Pool) -> OutOfMemory | None:
    """The OutOfMemory that the trace ends with at this capacity, or None."""
    try:
        replay(trace, CachingAllocator(capacity, pool))
    except OutOfMemory as failure:
        return failure.with_traceback(None)


# ------------------------------------------------------------------------------------------------------ traces in files

LETTERS = {"scalars": "s", "other": "x"} | {name: name[0] for name in CATEGORIES if name not in ("scalars", "other")}


@dataclass(eq=False)
class Request:
    """Replaces the ledger's Storage in an Event of a recorded trace."""

    category: str
    bytes: int


def packed(trace: list[Event]) -> dict:
    """A ledger's trace as a record. Storages that were allocated before the trace began are left out."""
    numbers: dict = {}
    requests, categories = [], []
    for event in trace:
        if event.bytes > 0:
            categories.append(LETTERS[event.storage.category])
            numbers[event.storage] = len(categories)
            requests.append(event.bytes)
        elif event.storage in numbers:
            requests.append(-numbers.pop(event.storage))
    return {"requests": requests, "categories": "".join(categories)}


def unpacked(record: dict) -> list[Event]:
    """The Events of a record."""
    names = {letter: name for name, letter in LETTERS.items()}
    trace, asked = [], []
    for request in record["requests"]:
        if request > 0:
            asked.append(Request(names[record["categories"][len(asked)]], request))
            trace.append(Event(0.0, asked[-1], request, "recorded"))
        else:
            trace.append(Event(0.0, asked[-request - 1], -asked[-request - 1].bytes, "recorded"))
    return trace
