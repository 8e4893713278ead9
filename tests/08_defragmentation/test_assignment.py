"""Lesson 8's assignment, M_D, in steps: which block is taken, what merges, what lies where, and what moves.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import gc
import json
import random
import tracemalloc
import weakref

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from stock import Stock
from torch import nn

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.meters.allocator import CachingAllocator, OutOfMemory

MIB = 2**20
KINDS = ((torch.float32, "fp32"), (torch.float64, "fp64"), (torch.bfloat16, "bf16"))


def measured():
    """measured.json: the recorded trainings, and what replaying them came to."""
    return json.loads((HOUSE / "lessons/08_defragmentation/measured.json").read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------- in a rank: what a pool has done


def pool_of(assignment, *ranges, slack=0):
    """A Pool with these ranges (address, size)."""
    pool = assignment.Pool(slack)
    for address, size in ranges:
        pool.add(address, size)
    return pool


def in_numbers(block):
    """(address, size) of what take() returned; None stays; of anything else what it is."""
    if block is None:
        return None
    if not hasattr(block, "address") or not hasattr(block, "size"):
        return f"a {type(block).__name__}"
    return int(block.address), int(block.size)


def after_each(pool, sizes):
    """[(what take(size) gave, all holes then)] for each size."""
    return [(in_numbers(pool.take(size)), list(pool.holes)) for size in sizes]


def told(holes):
    """Free blocks in words."""
    return ", ".join(f"{size} at {address}" for address, size in holes) or "none"


# ------------------------------------------------------------------------------------------------------ step 1: take

RANGES = ((0, 100), (200, 50), (400, 80), (600, 60), (800, 50))
ASKED = (60, 20, 70, 31)
POOLS = ((RANGES, ASKED, 0), (((0, 12), (100, 10), (200, 9)), (8, 9), 5))  # ranges, sizes, slack


def taken(assignment):
    return [after_each(pool_of(assignment, *ranges, slack=slack), sizes) for ranges, sizes, slack in POOLS]


def is_block(found, call):
    assert not isinstance(found, str), f"{call} returned {found}: return a Block, which has address and size, or None"


@pytest.mark.step(1, points=6)
def test_the_smallest_block_that_is_large_enough(assignment):
    """It is asked where neither splitting nor merging matters."""
    for (ranges, sizes, slack), pool in zip(POOLS, *once(taken, 1, assignment), strict=True):
        before = sorted(ranges)
        for size, (found, holes) in zip(sizes, pool, strict=True):
            fitting = [hole for hole in before if hole[1] >= size]
            best = min(fitting, key=lambda hole: (hole[1], hole[0]))
            is_block(found, f"take({size})")
            assert found is not None, (
                f"take({size}) returned None, and there was a free block that is large enough (free were "
                f"{told(before)})")
            place = next((tuple(hole) for hole in before if hole[0] <= found[0] < hole[0] + hole[1]), None)
            assert place, f"take({size}) gave address {found[0]}, which was not free: free were {told(before)}"
            assert place[1] >= size, (
                f"take({size}) took the block of {place[1]} at {place[0]}, which is too small (free were "
                f"{told(before)})")
            assert place[1] == best[1], (
                f"take({size}) took the block of {place[1]} at {place[0]}; the smallest that is large enough has "
                f"{best[1]}, at {best[0]} (free were {told(before)}). Large blocks are for large requests: best fit"
                f"{f', with a slack of {slack} too, which says what is split off and not what is taken' * bool(slack)}")
            assert place == tuple(best), (
                f"take({size}) took the block of {place[1]} at {place[0]}, and there is one as large at {best[0]}: of "
                "blocks of one size the one at the lowest address is taken, as CUDA does")
            assert found[0] == place[0], (
                f"take({size}) took address {found[0]} inside of the free block of {place[1]} at {place[0]}: take its "
                "front, and leave the rest behind it")
            before = sorted(holes)


class Plain:
    """A pool as it must be, slowly: lists [address, size, whether it is used, its range], by address."""

    def __init__(self, slack, ranges):
        self.slack, self.blocks = slack, [[*each, False, each] for each in sorted(ranges)]

    def take(self, size):
        fitting = [block for block in self.blocks if not block[2] and block[1] >= size]
        if not fitting:
            return None
        block = min(fitting, key=lambda block: (block[1], block[0]))
        address, room, _, whole = block
        if room - size > self.slack:
            self.blocks.insert(self.blocks.index(block) + 1, [address + size, room - size, False, whole])
            block[1] = size
        block[2] = True
        return block

    def give(self, block):
        block[2] = False
        blocks, self.blocks = self.blocks, []
        for one in blocks:
            if self.blocks and self.blocks[-1][2:] == one[2:] and not one[2]:
                self.blocks[-1][1] += one[1]
            else:
                self.blocks.append(one)

    def holes(self):
        return [(address, size) for address, size, used, _ in self.blocks if not used]


PLAIN_RANGES = (5000, 3000), (0, 5000), (9000, 60), (9100, 60)


def beside_a_plain_one(assignment, gives):
    """What a pool does first otherwise than a Plain one, in random requests, with and without a slack; "" if nothing.
    gives: blocks are given back, too."""
    chance = random.Random(toys.seed(0, 9))
    for slack in (0, 7, 64):
        pool, plain, live = pool_of(assignment, *PLAIN_RANGES, slack=slack), Plain(slack, PLAIN_RANGES), []
        for _ in range(400 if gives else 60):
            free = told(plain.holes())
            if gives and live and chance.random() < 0.48:
                block, right = live.pop(chance.randrange(len(live)))
                what = f"give() of {right[1]} at {right[0]}"
                pool.give(block)
                plain.give(right)
            else:
                size = chance.randint(1, chance.choice((20, 70, 600)))
                block, right = pool.take(size), plain.take(size)
                what = f"take({size})"
                got, wanted = in_numbers(block), right and tuple(right[:2])
                if got != wanted:
                    return f"slack {slack}, free are {free}: {what} gave {_block(got)}, and {_block(wanted)} is right"
                live += [(block, right)] * (right is not None)
            if list(pool.holes) != plain.holes():
                return (f"slack {slack}, free are {free}: after {what} there are {told(pool.holes)}, and "
                        f"{told(plain.holes())} is right")
    return ""


def split(assignment):
    """Of one range, taken piece by piece; with slack; and a size that fits exactly."""
    plain = after_each(pool_of(assignment, (1000, 100)), (30, 20, 50))
    slack = after_each(pool_of(assignment, (0, 100), slack=10), (60, 30))
    border = after_each(pool_of(assignment, (0, 100), slack=10), (89,))
    return plain, slack, border


@pytest.mark.step(1, points=6)
def test_what_is_too_much_is_split_off(assignment):
    ((plain, slack, border),) = once(split, 1, assignment)
    rest = 100
    for size, (found, holes) in zip((30, 20, 50), plain, strict=True):
        is_block(found, f"take({size})")
        start = 1100 - rest
        assert found == (start, size), (
            f"of a free block of {rest} at {start}, take({size}) gave {_block(found)}: the block must be as large as "
            "what was asked for, and begin where the free one did. The rest is another block")
        rest -= size
        assert all(bytes > 0 for _, bytes in holes), (
            f"after take({size}) there is a free block of size 0: where a request fits exactly nothing is split off")
        wanted = [(1100 - rest, rest)] if rest else []
        assert list(holes) == wanted, (
            f"after take({size}), of a free block of {rest + size} at {start}, free are: {told(holes)}. It must be: "
            f"{told(wanted)}")
    (found, holes), (second, after) = slack
    assert found == (0, 60) and holes == [(60, 40)], (
        f"in a pool with slack 10, take(60) of a block of 100 gave {_block(found)} and left {told(holes)}: 40 too much "
        "is more than the slack, so it is split off")
    assert second == (60, 40) and not after, (
        f"in a pool with slack 10, take(30) of a block of 40 gave {_block(second)} and left {told(after)}: 10 too much "
        "is within the slack. Then nothing is split off, and the block is larger than what was asked for")
    found, holes = border[0]
    assert found == (0, 89) and holes == [(89, 11)], (
        f"in a pool with slack 10, take(89) of a block of 100 gave {_block(found)} and left {told(holes)}: 11 too much "
        "is more than the slack")
    (other,) = once(beside_a_plain_one, 1, assignment, False)
    assert not other, f"of random requests in four ranges, with {other}"


def _block(found):
    return found if isinstance(found, str) else "None" if found is None else f"{found[1]} at {found[0]}"


def refused(assignment):
    pool = pool_of(assignment, (0, 40), (40, 40), (200, 30))
    return after_each(pool, (50, 41, 30))


@pytest.mark.step(1, points=3)
def test_a_request_that_is_too_large_gets_none(assignment):
    ((first, second, third),) = once(refused, 1, assignment)
    whole = [(0, 40), (40, 40), (200, 30)]
    for size, (found, holes) in zip((50, 41), (first, second), strict=True):
        assert found is None, (
            f"take({size}) gave {_block(found)}, and no free block is so large: free were {told(whole)}. (Ranges that "
            "were added one by one stay apart, though their addresses touch.) It must return None")
        assert list(holes) == whole, f"take({size}) returned None, and changed what is free: {told(holes)} now"
    assert third[0] == (200, 30), f"take(30) gave {_block(third[0])} after two requests that were refused"


# ------------------------------------------------------------------------------------------------------- step 2: give

FREED = {  # in which order four blocks of 25 are freed, and what must be free then
    "the block before it was free": ([0, 1], [(0, 50)]),
    "the block behind it was free": ([1, 0], [(0, 50)]),
    "both its neighbours were free": ([0, 2, 1], [(0, 75)]),
    "no neighbour was free": ([0, 2], [(0, 25), (50, 25)]),
    "it is the last of its range": ([2, 3], [(50, 50)]),
    "all were free but it": ([0, 3, 2, 1], [(0, 100)]),
}


def merged(assignment):
    """What is free after each of these, and what one request of all that was freed gets then."""
    found = {}
    for name, (order, wanted) in FREED.items():
        pool = pool_of(assignment, (0, 100))
        blocks = [pool.take(25) for _ in range(4)]
        for number in order:
            pool.give(blocks[number])
        holes = list(pool.holes)
        found[name] = holes, in_numbers(pool.take(max(size for _, size in wanted)))
    pool = pool_of(assignment, (0, 40), (40, 40))
    one, other = pool.take(40), pool.take(40)
    pool.give(one)
    pool.give(other)
    return found, list(pool.holes), in_numbers(pool.take(80))


@pytest.mark.step(2, points=6)
def test_free_neighbours_are_one_block(assignment):
    ((found, apart, over_the_border),) = once(merged, 1, assignment)
    for name, (holes, again) in found.items():
        order, wanted = FREED[name]
        size = max(size for _, size in wanted)
        assert sum(size for _, size in holes) == sum(size for _, size in wanted), (
            f"of four blocks of 25, {_numbers(order)} were freed in this order; free are then {told(holes)}: that is "
            f"{sum(size for _, size in holes)} in all, and {25 * len(order)} were freed")
        assert list(holes) == wanted, (
            f"of four blocks of 25, {_numbers(order)} were freed in this order ({name}); free are then {told(holes)}, "
            f"and {told(wanted)} is right: a block that is freed becomes one with free neighbours, on both sides")
        assert again is not None and again[1] == size, (
            f"of four blocks of 25, {_numbers(order)} were freed; then take({size}) gave {_block(again)}, though "
            f"{told(holes)} is free")
    assert apart == [(0, 40), (40, 40)] and over_the_border is None, (
        f"two ranges of 40 were added, whose addresses touch; when both are free again, free are: {told(apart)}. "
        "Blocks of different ranges (CUDA's segments) never become one: memory of two allocations")


def _numbers(order):
    return "the " + ", then the ".join(("first", "second", "third", "fourth")[number] for number in order)


def freed_twice(assignment):
    """What a second give() does: to a block that stands alone, and to one that another has swallowed."""
    seen = {}
    for name, first in (("which is free", [0]), ("which is free and merged with its neighbour", [0, 1]),
                        ("which is free and merged with the one before", [1, 0]),
                        ("which is free and merged with both neighbours", [0, 2, 1])):
        for again in first:
            pool = pool_of(assignment, (0, 100))
            blocks = [pool.take(25) for _ in range(4)]
            for number in first:
                pool.give(blocks[number])
            before = list(pool.holes)
            try:
                pool.give(blocks[again])
                error = ""
            except Exception as raised:
                error = type(raised).__name__
            holes = list(pool.holes)
            for number in {0, 1, 2, 3} - set(first):
                pool.give(blocks[number])
            seen[f"{name}, number {again + 1}"] = error, before, holes, list(pool.holes)
    return seen


@pytest.mark.step(2, points=4)
def test_a_block_is_freed_once(assignment):
    (seen,) = once(freed_twice, 1, assignment)
    for name, (error, before, holes, later) in seen.items():
        point = "a block that is freed twice is part of what this step is about"
        what = f"{point}. A block {name} of four, was given back a second time, and give()"
        assert error, (
            f"{what} took it; then free are {told(holes)}. "
            "Two owners would get the same memory: raise ValueError")
        assert error == "ValueError", (
            f"{what} raised {error}: raise ValueError "
            "before anything else is done")
        assert holes == before, (
            f"{what} raised ValueError, and changed what is free: {told(before)} before, {told(holes)} after it")
        assert later == [(0, 100)], (
            f"{what} raised ValueError. Then the other ones were given back, and free are {told(later)}: 100 at 0 is "
            "right, as if nothing had been refused")


def random_requests(assignment):
    """[(what happened, address, size, all holes)] of some hundred requests in two ranges."""
    chance, log, live = random.Random(toys.seed(0, 8)), [], []
    pool = pool_of(assignment, (0, 5000), (5000, 3000))
    for _ in range(400):
        if live and chance.random() < 0.47:
            block, address, size = live.pop(chance.randrange(len(live)))
            pool.give(block)
            log.append(("give", address, size, list(pool.holes)))
            continue
        size = chance.randint(1, 600)
        block = pool.take(size)
        if block is not None:
            live.append((block, int(block.address), int(block.size)))
        log.append(("take", *(live[-1][1:] if block is not None else (-1, size)), list(pool.holes)))
    return log


@pytest.mark.step(2, points=4, raised="do the blocks around one that was merged, or split off in `take`, know "
                  "that it is their neighbour now?")
def test_used_and_free_are_all_there_is(assignment):
    (log,) = once(random_requests, 1, assignment)
    used, free = {}, [(0, 5000), (5000, 3000)]
    for number, (kind, address, size, holes) in enumerate(log, 1):
        where = f"after {number} requests (the last: {kind}, {size})"
        if kind == "take" and address < 0:
            assert all(bytes < size for _, bytes in free), (
                f"request {number}, take({size}), got None, though free were {told(free)[:200]}")
        elif kind == "take":
            other = next((a for a, b in used.items() if a < address + size and address < a + b), None)
            assert other is None, (
                f"{where} two used blocks overlap: {size} at {address}, and {used[other]} at {other}")
            used[address] = size
        else:
            del used[address]
        total = sum(used.values()) + sum(bytes for _, bytes in holes)
        assert total == 8000, (
            f"{where} {sum(used.values())} are used and {total - sum(used.values())} free: together {total}, and the "
            "ranges have 8000. Nothing may get lost, or be counted twice")
        lying = sorted([*used.items(), *map(tuple, holes)])
        for (one, bytes), (other, _) in zip(lying, lying[1:], strict=False):
            assert one + bytes <= other, f"{where} the block of {bytes} at {one} reaches into the one at {other}"
        for (one, bytes), (other, _) in zip(sorted(map(tuple, holes)), sorted(map(tuple, holes))[1:], strict=False):
            assert one + bytes < other or other == 5000, (
                f"{where} two free blocks touch, at {one} and {other}: they must be one")
        free = holes
    (other,) = once(beside_a_plain_one, 1, assignment, True)
    assert not other, f"of random requests in four ranges, of which two touch, with {other}"


def replayed(assignment, requests, capacity):
    """What CUDA's allocator does with the learner's pools: [(address, size)] of each request, bytes allocated and
    reserved at most, and how it ended."""
    allocator, got, failure = CachingAllocator(capacity, assignment.Pool), [], None
    try:
        for number in requests:
            if number > 0:
                block = allocator.allocate(number)
                got.append((block, int(block.address), int(block.size)))
            else:
                allocator.free(got[-number - 1][0])
    except OutOfMemory as error:
        failure = [error.request, error.requested, error.free, error.largest_free]
    return [place[1:] for place in got], allocator.peak_allocated, allocator.peak_reserved, failure


def wanted_of(name, figures):
    """(bytes in use at most, bytes held at most, a capacity, how it ends there or None) for a trace."""
    row, failure = figures["rows"][name], figures["failure"]
    ending = [failure[key] for key in ("request", "requested", "free", "largest_free")]
    capacity = figures["capacity"] if name in ("without slabs", "with slabs") else row["least"]
    return row["allocated"], row["reserved"], capacity, ending if name == "without slabs" else None


@pytest.mark.step(2, points=6)
def test_recorded_trainings_are_served(assignment):
    figures = measured()
    for name, trace in figures["traces"].items():
        allocated, reserved, capacity, ending = wanted_of(name, figures)
        (places, used, held, failure), = once(replayed, 1, assignment, tuple(trace["requests"]), 2**62)
        assert failure is None, f"the recorded training {name!r} ran out of memory on a device without end"
        _assert_apart(name, trace["requests"], places)
        assert used == allocated, (
            f"the recorded training {name!r} had {used / MIB:.1f} MiB in use at its peak with your pool, and "
            f"{allocated / MIB:.1f} MiB is right")
        assert held == reserved, (
            f"for the recorded training {name!r} the allocator held {held / MIB:.0f} MiB at most with your pool, and "
            f"{reserved / MIB:.0f} MiB with best fit, splitting and merging")
        (*_, failure), = once(replayed, 1, assignment, tuple(trace["requests"]), capacity)
        said = f"the recorded training {name!r} on {capacity / MIB:.0f} MiB"
        if ending is None:
            assert failure is None, f"{said} is out of memory at event {failure[0]} with your pool; it must go through"
        else:
            assert failure is not None, f"{said} goes through with your pool: best fit fails there, at {ending[0]}"
            assert failure == ending, (
                f"{said} ends at event {failure[0]} with {failure[2] / MIB:.1f} MiB free, the largest block of "
                f"{failure[3] / MIB:.1f} MiB; best fit ends at event {ending[0]} with {ending[2] / MIB:.1f} MiB free, "
                f"the largest block of {ending[3] / MIB:.1f} MiB")


def _assert_apart(name, requests, places):
    """At no moment two requests have the same memory."""
    live, number = {}, 0
    for event, request in enumerate(requests):
        if request < 0:
            del live[-request]
            continue
        address, size = places[number]
        number += 1
        assert size >= request, f"in {name!r} a request of {request} bytes got a block of {size}"
        other = next((one for one, (start, bytes) in live.items()
                      if start < address + size and address < start + bytes), None)
        assert other is None, (
            f"in the recorded training {name!r}, at event {event}, request {number} got memory that request {other} "
            "has and uses still")
        live[number] = address, size


# ------------------------------------------------------------------------------------------------------ step 3: a slab


def extent(tensor):
    """(first byte, number of bytes) of a tensor."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def kept_in_a_slab(assignment):
    """For tensors of all kinds: what keep() gave, where, and whether it stays as it is."""
    found = {}
    for dtype, name in KINDS:
        torch.manual_seed(toys.seed(0, 11))
        sources = [torch.randn(3, 5), torch.randn(5, 4).t(), torch.randn(()), torch.randn(2, 6)[:, ::2], torch.randn(7),
                   torch.randn(2, 3, 4).permute(2, 0, 1)]
        sources = [source.to(dtype) for source in sources]
        sources[0].requires_grad_()
        wanted = [source.detach().clone() for source in sources]
        slab = assignment.Slab(sum(source.numel() for source in sources), dtype)
        storage = slab.memory.untyped_storage()
        start, room, kept, used = slab.memory.data_ptr(), storage.nbytes(), [], []
        for source in sources:
            kept.append(slab.keep(source))
            used.append(int(slab.used))
        with torch.no_grad():
            for source in sources:
                source.zero_()
        places = [extent(tensor) for tensor in kept]
        found[name] = {
            "values": [torch.equal(one, other) if one.shape == other.shape else None
                       for one, other in zip(kept, wanted, strict=True)],
            "shapes": [(list(tensor.shape), str(tensor.dtype)) for tensor in kept],
            "wanted": [(list(tensor.shape), str(tensor.dtype)) for tensor in wanted],
            "in it": [tensor.untyped_storage().data_ptr() == storage.data_ptr() for tensor in kept],
            "places": [(address - start, size) for address, size in places], "used": used,
            "room": room, "same": slab.memory.data_ptr() == start, "memory": slab.memory.untyped_storage().nbytes(),
            "history": [tensor.requires_grad for tensor in (*kept, slab.memory)],
        }
    return found


@pytest.mark.step(3, points=5, raised="keep() takes tensors of any shape and stride; the copy has the shape")
def test_what_is_kept_lies_side_by_side_in_one_allocation(assignment):
    (found,) = once(kept_in_a_slab, 1, assignment)
    for kind, seen in found.items():
        assert seen["shapes"] == seen["wanted"], (
            f"keep() of tensors of shapes {[shape for shape, _ in seen['wanted']]} in {kind} gave "
            f"{[shape for shape, _ in seen['shapes']]}: a copy has shape and dtype of what it is a copy of")
        assert all(seen["in it"]), (
            f"the copy of a tensor {seen['wanted'][seen['in it'].index(False)][0]} does not lie in slab.memory: "
            "it has memory of its own, which would lie anywhere between the short-lived tensors")
        assert seen["same"] and seen["memory"] == seen["room"], (
            f"slab.memory is another tensor after keep(), of {seen['memory']} bytes in place of {seen['room']}: the "
            "slab is allocated once")
        at = 0
        for number, (place, size) in enumerate(seen["places"], 1):
            assert place == at, (
                f"in {kind} tensor {number} lies {place} bytes from the front of the slab; it must lie at {at}, right "
                "behind those before it (lay the first at the front, and let `used` say where the next one goes)")
            at += size
        assert all(seen["values"]), (
            f"in {kind} copy number {seen['values'].index(False) + 1} is not what was kept, once the sources were "
            "overwritten with zeros: keep() must copy the numbers into the slab")
        sums = [sum(size for _, size in seen["places"][: number + 1]) // seen["places"][2][1]
                for number in range(len(seen["places"]))]
        assert seen["used"] == sums, (
            f"after each keep() in {kind}, slab.used was {seen['used']}, and {sums} is right: it counts elements")
        assert not any(seen["history"]), (
            "what keep() gave for a tensor that wants a gradient, or slab.memory, wants one, too: it is a plain copy, "
            "and its keeper knows what the tensor was")


def rounds(assignment):
    """Storage and place of what is kept, in several rounds; and a round that is refused."""
    slab = assignment.Slab(10)
    storage, room, seen = slab.memory.untyped_storage().data_ptr(), slab.memory.untyped_storage().nbytes(), []
    for number in range(4):
        try:
            first = slab.keep(torch.full((6,), float(number)))
            with contextlib.suppress(MemoryError):
                slab.keep(torch.ones(5))
            second = slab.keep(torch.full((4,), -1.0))
        except MemoryError as error:
            return [*seen, str(error)], room
        place = first.data_ptr() - slab.memory.data_ptr(), second.data_ptr() - slab.memory.data_ptr()
        values = first.tolist() == [number] * 6 and second.tolist() == [-1.0] * 4
        try:
            slab.keep(torch.ones(1))
            refused = ""
        except Exception as error:
            refused = type(error).__name__
        slab.reset()
        seen.append((place, values, refused, int(slab.used), slab.memory.untyped_storage().data_ptr() == storage,
                     slab.memory.untyped_storage().nbytes()))
    return seen, room


def drawn_tensor(chance, most=4):
    """A tensor of 0 to 4 dimensions whose numbers and strides are drawn: some dimensions are exchanged, and some have
    every other element alone."""
    steps = [chance.choice((1, 1, 2)) for _ in range(chance.randrange(5))]
    whole = torch.randn([chance.randint(1, most) * step for step in steps])
    part = whole[tuple(slice(None, None, step) for step in steps)]
    return part.permute(chance.sample(range(part.dim()), part.dim()))


def kept_by_lot(assignment):
    """What a slab does first otherwise than it must with drawn tensors, of which some are kept twice, some are copies
    that lie there, and some fill it to the last element; "" if nothing is."""
    chance = random.Random(toys.seed(0, 12))
    torch.manual_seed(toys.seed(0, 13))
    for dtype, name in KINDS * 2:
        room = chance.randint(60, 90)
        slab = assignment.Slab(room, dtype)
        live, used, source = [], 0, torch.ones(1, dtype=dtype)
        for number in range(80):
            if used == room or chance.random() < 0.1:
                slab.reset()
                live, used, source = [], 0, torch.ones(1, dtype=dtype)
            kind, left = chance.randrange(6) if number > 1 else 3, room - used
            if kind == 0 and live:
                source, what = chance.choice(live)[0], "a copy that lies in the slab already, "
            elif kind == 1:
                what = "a tensor that was kept before, "
            elif kind == 2:
                source, what = torch.randn([1] * chance.randrange(4)), ""
            elif number == 0:  # all but one element, which comes next
                source, what = torch.randn(left - 1), ""
            elif kind == 3 and left < 12:
                source, what = torch.randn([left] if left > 1 else []), ""
            else:
                source, what = drawn_tensor(chance), ""
            if kind > 1 or not what:
                source = source.to(dtype).requires_grad_(chance.random() < 0.5)
            told = f"of {room} elements in {name} {used} are used; keep() of {what}of shape {list(source.shape)} "
            try:
                copy, error = slab.keep(source), ""
            except Exception as raised:
                error = type(raised).__name__
            if source.numel() > left:
                if error != "MemoryError":
                    return told + (f"raised {error}" if error else "took it") + ", and MemoryError is right"
                continue
            if error:
                return f"{told}raised {error}, and {source.numel()} fit"
            place = (copy.data_ptr() - slab.memory.data_ptr()) // dtype.itemsize
            if place != used:
                return f"{told}gave a tensor that lies at {place}, and {used} is right, right behind what is kept"
            if copy.requires_grad:
                return f"{told}gave a tensor that wants a gradient, and a plain copy is right"
            live, used = [*live, (copy, source.detach().clone())], used + source.numel()
            for each, value in live:
                if each.shape != value.shape or not torch.equal(each, value):
                    return (f"{told}was called; then {'it' if each is copy else 'an earlier copy'} has shape "
                            f"{list(each.shape)} and other numbers than were kept, of shape {list(value.shape)}")
    return ""


def kept_longer(assignment):
    """Whether a copy keeps its numbers when nobody holds the slab any more; and bytes that keep() makes at most in a
    slab of 40 kB, of a tensor of 4 kB that is transposed."""
    slab, source = assignment.Slab(10_000), torch.ones(50, 20).t()
    first = slab.keep(source)
    with Stock([slab.memory, source, first]) as stock:
        slab.keep(source)
    slab.reset()
    copy = slab.keep(torch.full((10_000,), 3.0))
    del slab, first
    gc.collect()
    others = []
    for _ in range(500):  # whatever is free now goes to them
        others.append(torch.zeros(9_900))
    return bool((copy == 3.0).all()), stock.highest


@pytest.mark.step(3, points=4)
def test_reset_goes_back_to_the_front_and_frees_nothing(assignment):
    ((seen, room),) = once(rounds, 1, assignment)
    for number, one in enumerate(seen, 1):
        assert not isinstance(one, str), (
            f"in round {number} keep() raised MemoryError ({one}). 6 and 4 elements fit into a slab of 10: after a "
            "reset() nothing is kept any more, and 5 elements, which were refused in between, take no room")
        place, values, refused, used, same, bytes = one
        assert same and bytes == room, (
            f"after reset() number {number} slab.memory is other memory, or of other size ({bytes} bytes, and {room} "
            "before): a slab is allocated once, and keeps its place")
        assert used == 0, f"after reset() number {number} slab.used is {used}: nothing is kept any more"
        assert place == (0, 24), (
            f"in round {number} two tensors were kept {place[0]} and {place[1]} bytes from the front, and 0 and 24 is "
            "right: after a reset() the next tensor goes to the front")
        assert values, f"in round {number} what was kept has other values"
        assert refused == "MemoryError", (
            f"a slab of 10 elements was full, and keep() of one more {'raised ' + refused if refused else 'took it'}: "
            "it must raise MemoryError (_end_of does)")
    (other,) = once(kept_by_lot, 1, assignment)
    assert not other, (
        f"{other}. keep() makes a copy each time, of tensors of any shape, also of what lies in the slab already: that "
        "may be there from before a reset(), and is overwritten soon. What fits exactly fits")
    ((lasts, most),) = once(kept_longer, 1, assignment)
    assert lasts, (
        "a copy had other numbers once nobody held its slab: the memory was freed while the copy was in use. What "
        "keep() returns must be a tensor of slab.memory's storage, such as a view, which keeps it alive")
    assert most <= 4000 + 1024, (
        f"while keep() copied a tensor of 4.0 kB into a slab of 40.0 kB, {in_words(most)} more were allocated. The "
        "slab is there so that nothing else is: copy the tensor straight to its place")


SIZES = dict(blocks=3, hidden=15, heads=3, dropout=0.1)
BATCHES = 3
INPUT = 3 * toys.SEQUENCE * 15  # elements of a block's input: batch, sequence, hidden


def make_transformer():
    return toys.Transformer(**SIZES)


def trained_with_a_slab(assignment):
    """Losses and gradients of some steps, plain and with blocks whose inputs the slab keeps; and bytes held more than
    the slab after forward."""
    plain, checkpointed = (toys.build(make_transformer, 0) for _ in range(2))
    slab = assignment.Slab(SIZES["blocks"] * INPUT)
    places = []

    def keep(tensor):
        kept = slab.keep(tensor)
        places.append(extent(kept))
        return kept

    checkpoint_blocks(checkpointed, place=keep)
    results = {"plain": [], "slab": []}
    for step in range(BATCHES):
        for name, model in (("plain", plain), ("slab", checkpointed)):
            torch.manual_seed(toys.seed(0, 40 + step))
            places.clear()
            model.zero_grad()
            loss = model(*toys.tokens(0, step))
            loss.backward()
            results[name].append((loss.item(), [param.grad.clone() for param in model.parameters()]))
        kept = list(places)
        slab.reset()
    start, room = slab.memory.data_ptr(), slab.memory.untyped_storage().nbytes()
    return results, [(address - start, size) for address, size in kept], room


@pytest.mark.step(3, points=5, raised="backward reads what keep() has returned: is it as it was? For autograd it has "
                  "changed if anything was written through the same tensor or a view of it since")
def test_a_training_step_with_its_checkpoints_in_the_slab(assignment):
    ((results, kept, room),) = once(trained_with_a_slab, 1, assignment)
    for step, ((loss, gradients), (other, others)) in enumerate(zip(*results.values(), strict=True), 1):
        assert loss == other, f"in step {step} the loss with checkpoints in your slab is {other}, and {loss} is right"
        assert toys.identical(gradients, others), (
            f"in step {step} gradients with checkpoints in your slab are others than without. In backward a block is "
            "computed again from what keep() had returned: do two of them share memory?")
    assert len(set(kept)) == SIZES["blocks"] and all(0 <= place and place + size <= room for place, size in kept), (
        f"in step {BATCHES} the {SIZES['blocks']} blocks' inputs lie {[place for place, _ in kept]} bytes from the "
        f"slab's front, which has {room} bytes")


def cut_over_two_ranks(assignment):
    """Loss and gradients where a group of two keeps half of each input on each rank (P_a), in a slab and without one;
    elements in the slab after forward."""
    results = {}
    slab = assignment.Slab(SIZES["blocks"] * -(-INPUT // 2))
    generator = torch.Generator().manual_seed(5)  # a model-parallel group has one model, and one batch
    batch = [torch.randint(toys.VOCABULARY, (3, toys.SEQUENCE), generator=generator) for _ in range(2)]
    for name, place in (("plain", None), ("slab", slab.keep)):
        torch.manual_seed(7)
        model = make_transformer()
        checkpoint_blocks(model, group=dist.group.WORLD, place=place)
        loss = model(*batch)
        used = int(slab.used)
        loss.backward()
        results[name] = loss.item(), [param.grad.clone() for param in model.parameters()], used
    return results


@pytest.mark.step(3, points=2)
def test_with_p_a_the_slab_holds_a_part(assignment):
    for rank, results in enumerate(once(cut_over_two_ranks, 2, assignment)):
        (loss, gradients, _), (other, others, used) = results["plain"], results["slab"]
        wanted = SIZES["blocks"] * -(-INPUT // 2)
        assert used == wanted, (
            f"two ranks keep half of each block's input, {wanted} elements in all; slab.used is {used} on rank {rank}")
        assert loss == other and toys.identical(gradients, others), (
            f"rank {rank}: where two ranks keep half of each block's input in their slabs, gradients are others than "
            "without slabs")


def reset_before_backward(assignment):
    """What backward does with the second tensor that the slab has forgotten: error, and how far the gradient is off.
    Once the memory is as it was, once another tensor lies there; in a slab with a size, and in one that measured."""
    seen = {}
    for overwritten, measured in ((False, False), (True, False), (False, True)):
        torch.manual_seed(toys.seed(0, 21))
        weight, x = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
        slab = assignment.Slab(*[] if measured else [100])
        if measured:
            slab.keep(torch.ones(100))
            slab.reset()
        slab.keep(torch.ones(5))
        loss = (weight * slab.keep(x)).sum()
        slab.reset()
        if overwritten:
            slab.keep(torch.zeros(29))
        try:
            loss.backward()
            error = ""
        except RuntimeError as raised:
            error = str(raised)
        wrong = None if weight.grad is None else not torch.equal(weight.grad, x)
        slab.reset()
        fresh = (weight * slab.keep(x)).sum()  # the next round must work
        weight.grad = None
        fresh.backward()
        seen[overwritten, measured] = error, wrong, torch.equal(weight.grad, x)
    return seen


@pytest.mark.step(3, points=5, raised="after reset() the slab is used as before")
def test_a_backward_after_reset_fails(assignment):
    (seen,) = once(reset_before_backward, 1, assignment)
    for error, wrong, again in [seen[True, False], seen[False, False], seen[False, True]]:
        what = ("then another tensor was kept, and backward computed a gradient that is wrong without a word"
                if wrong else "then backward went through: the next keep() would have made it wrong without a word")
        assert error, (
            f"a second tensor was kept, a product of it was computed, and the slab was reset; {what}. Let reset() "
            "change what it has handed out, for autograd, so that backward says so")
        assert "modified by an inplace operation" in error, f"backward after reset() raised something else: {error}"
        assert again, "in the round after a reset() gradients are wrong"


def measuring(assignment):
    """A slab that measures: its first round, and the next; what it said in each to a tensor of another dtype; and bytes
    that live more than its memory, once nobody else holds what it kept in the first one."""
    slab, refused = assignment.Slab(), []

    def refuse():
        try:
            slab.keep(torch.ones(1, dtype=torch.float64))
            refused.append("took it")
        except Exception as error:
            refused.append(f"raised {type(error).__name__}")

    refuse()
    sources = [torch.full((size,), float(size)) for size in (5, 8)]
    first = [slab.keep(source) for source in sources]
    for source in sources:
        source.zero_()
    copies = [tensor.tolist() for tensor in first]
    own = slab.memory is None, int(slab.used), len({tensor.untyped_storage().data_ptr() for tensor in first})
    slab.reset()
    elements = None if slab.memory is None else slab.memory.numel()
    refuse()
    again = [slab.keep(tensor) for tensor in first]
    inside = elements is not None and all(
        tensor.untyped_storage().data_ptr() == slab.memory.untyped_storage().data_ptr() for tensor in again)
    idle = assignment.Slab()
    idle.reset()
    measured = [idle.memory is None]
    idle.keep(torch.ones(3))
    idle.reset()
    measured.append(idle.memory is not None and len(idle.memory) == 3)
    more = []
    for large in (assignment.Slab(), assignment.Slab(4000)):
        before = checks.live_bytes() - (0 if large.memory is None else large.memory.nbytes)
        large.keep(torch.ones(4000))
        if large.memory is None:
            large.reset()
        more.append(checks.live_bytes() - before - 4 * 4000)
    return own, copies, elements, inside, [tensor.tolist() for tensor in again], all(measured), refused, max(more)


@pytest.mark.step(3, points=4, raised="a slab without a size measures: memory is None until the first reset()")
def test_a_slab_without_a_size_measures_its_first_round(assignment):
    ((is_none, used, storages), copies, elements, inside, values, idle, refused, more), = once(
        measuring, 1, assignment)
    for said, when in zip(refused, ("while it measured", "in the round after that"), strict=True):
        assert said == "raised ValueError", (
            f"a slab of fp32 was given a tensor of fp64 {when}, and keep() {said}: it must raise ValueError, as "
            "_end_of does. There is one slab for each dtype")
    assert is_none and storages == 2, (
        "a slab that was made without a size has no memory in its first round: what it keeps then has its own")
    assert copies == [[5.0] * 5, [8.0] * 8], (
        "in the first round of a slab without a size two tensors were kept, and then the originals were overwritten "
        f"with zeros. What keep() had returned begins with {[copy[0] for copy in copies]} now, and [5.0, 8.0] was "
        "kept. Also while it measures, keep() returns a copy, with memory of its own, and not the original's")
    assert used == 13, f"in its first round a slab kept 5 and 8 elements, and slab.used is {used}"
    assert elements == 13, (
        f"in its first round a slab kept 5 and 8 elements. After reset() its memory must have 13, and "
        f"{'there is none' if elements is None else f'it has {elements}'}")
    assert inside and values == [[5.0] * 5, [8.0] * 8], (
        "in the round after the one that measured, what is kept does not lie in slab.memory with its values")
    assert idle, (
        "a round in which nothing was kept measured nothing: there is no memory to be allocated yet. The next one, in "
        "which something is kept, measures")
    assert more < 4000, (
        f"a slab of this size kept a tensor of 16.0 kB, or one without a size did in its first round, and nobody else "
        f"holds tensor or copy. Then {in_words(more)} live beside slab.memory: the slab holds what it handed out, or "
        "was given, and nothing frees it")


# ------------------------------------------------------------------------------------------------- step 4: gradients


class Late:
    """Notes, in backward, which gradients lie in the slab at the moment a gradient of another parameter is made."""

    def __init__(self, model, slab):
        self.model, self.slab, self.seen = model, slab, []

    def look(self):
        inside = self.slab.memory.untyped_storage().data_ptr()
        self.seen.append([param.grad.untyped_storage().data_ptr() == inside
                          for param in self.model.parameters() if param.grad is not None])


def gradients_kept(assignment):
    """Three steps of SGD with gradients in a slab and without: where they lie, and what they are."""
    plain, model = (toys.build(lambda: toys.Transformer(**SIZES, tied=True), 0) for _ in range(2))
    frozen = [list(each.parameters())[1].requires_grad_(False) for each in (plain, model)]
    slab = assignment.gradients_in_slab(model)
    wanted = [param for param in model.parameters() if param.requires_grad]
    order, late = [], Late(model, slab)
    for param in wanted:
        param.register_post_accumulate_grad_hook(lambda param: order.append(param))
        param.register_hook(lambda gradient: late.look())
    steps = []
    for step in range(3):
        order.clear()
        late.seen.clear()
        results = []
        for each in (plain, model):
            torch.manual_seed(toys.seed(0, 70 + step))
            each(*toys.tokens(0, step)).backward()
            results.append([None if param.grad is None else param.grad.clone() for param in each.parameters()
                            if param is not frozen[each is model]])
        start = slab.memory.data_ptr()
        places = [extent(param.grad) for param in order]
        inside = [param.grad.untyped_storage().data_ptr() == slab.memory.untyped_storage().data_ptr()
                  for param in wanted]
        steps.append({
            "same": toys.identical(*results), "inside": inside, "used": int(slab.used),
            "places": [(address - start, size) for address, size in places],
            "late": [all(one) for one in late.seen], "frozen": frozen[1].grad is None})
        for each in (plain, model):
            torch.optim.SGD([param for param in each.parameters() if param.requires_grad], lr=0.1).step()
            each.zero_grad()
        slab.reset()
    return steps, slab.memory.numel(), sum(param.numel() for param in wanted)


@pytest.mark.step(4, points=3, raised="a hook runs for each parameter, when its gradient is complete")
def test_gradients_lie_in_one_slab(assignment):
    ((steps, elements, wanted),) = once(gradients_kept, 1, assignment)
    assert elements == wanted, (
        f"the gradient slab has room for {elements} elements; the parameters that want a gradient have {wanted}")
    for number, step in enumerate(steps, 1):
        assert all(step["inside"]), (
            f"after the backward of step {number}, {step['inside'].count(False)} of {len(step['inside'])} gradients do "
            "not lie in the slab: param.grad must be what keep() returned")
        assert step["same"], f"in step {number} gradients in the slab are others than without a slab"
        assert step["frozen"], "a parameter that wants no gradient has one"
        assert step["used"] == wanted, f"after backward slab.used is {step['used']}, and {wanted} were kept"
        at = 0
        for place, (start, size) in enumerate(step["places"], 1):
            assert start == at, (
                f"in step {number} gradient {place}, in the order in which backward completed them, lies {start} bytes "
                f"from the slab's front, and {at} is right: one after the other, as they come")
            at += size


@pytest.mark.step(4, points=3)
def test_a_gradient_is_moved_as_soon_as_it_is_complete(assignment):
    ((steps, *_),) = once(gradients_kept, 1, assignment)
    late = sum(not moved for step in steps for moved in step["late"])
    total = sum(len(step["late"]) for step in steps)
    assert late == 0, (
        f"at {late} of {total} moments of backward a gradient that was complete did not lie in the slab yet. What is "
        "moved after backward has lain between the short-lived tensors in the meantime: use a hook for each parameter "
        "that runs when its gradient is there")


def held(assignment):
    """Bytes that live more after a backward, with its gradients in a slab, and bytes of these; whether a parameter
    lives on when nobody holds its model any more; and in how many memories gradients lie whose slab nobody else holds,
    after one backward and after two."""
    model = toys.build(toys.MLP, 0)
    slab, x = assignment.gradients_in_slab(model), toys.numbers(0, 0)
    room, before = slab.memory.nbytes, checks.live_bytes()
    model(*x).backward()
    more, param = checks.live_bytes() - before, weakref.ref(next(model.parameters()))
    del model, slab
    gc.collect()
    model, memories = toys.build(toys.MLP, 0), []
    assignment.gradients_in_slab(model)
    for _ in range(2):
        gc.collect()
        model(*x).backward()
        memories.append(len({param.grad.untyped_storage().data_ptr() for param in model.parameters()}))
    return more, room, param() is not None, max(memories)


@pytest.mark.step(4, points=1)
def test_gradients_are_held_once_and_models_not_at_all(assignment):
    ((more, room, lives, memories),) = toys.run(held, 1, assignment)
    assert more <= 0.1 * room, (
        f"the gradients of a model have {in_words(room)}, and lie in the slab. After backward {in_words(more)} more "
        "live than before it: who still holds what autograd made?")
    assert not lives, (
        "a model and its slab were deleted, and a parameter lives on: a hook that holds its parameter keeps it alive "
        "for good. Remember its id()")
    assert memories == 1, (
        f"gradients_in_slab(model) was called, and nobody held the slab that it returned. After backward the gradients "
        f"lie in {memories} memories, and in one is right: from then on they are moved into the slab, whoever else "
        "holds it. Hooks hold it, and not by a weak reference")


def with_a_frozen_layer(assignment):
    """A slab for a model whose frozen layer is in bf16, and the others in fp32: (dtype, elements), or what it raised;
    how many elements want a gradient; and what came of models that must be refused."""
    model = toys.build(toys.MLP, 0)
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    frozen.to(torch.bfloat16).requires_grad_(False)
    wanted = sum(param.numel() for param in model.parameters() if param.requires_grad)
    try:
        slab = assignment.gradients_in_slab(model)
    except ValueError as error:
        return str(error), wanted, []
    refused = []
    for name in ("of fp32 and bf16", "that is frozen"):
        other = toys.build(toys.MLP, 0)
        if name == "that is frozen":
            other.requires_grad_(False)
        other.layers[-1].to(torch.bfloat16)
        try:
            assignment.gradients_in_slab(other)
            refused.append((name, "took it"))
        except Exception as error:
            refused.append((name, f"raised {type(error).__name__}"))
    return (str(slab.memory.dtype), slab.memory.numel()), wanted, refused


@pytest.mark.step(4, points=1)
def test_a_frozen_layer_may_be_of_another_dtype(assignment):
    ((slab, wanted, refused),) = once(with_a_frozen_layer, 1, assignment)
    model = "of a model the first layer is frozen, and in bf16; all that want a gradient are in fp32"
    assert not isinstance(slab, str), (
        f"{model}. gradients_in_slab raised ValueError: {slab}. Only parameters that want a gradient have to be of one "
        "dtype on one device: which of them did you pass to `_kind_of`?")
    assert slab == ("torch.float32", wanted), (
        f"{model}. The gradient slab has {slab[1]} elements of {slab[0]}, and {wanted} of torch.float32 are right")
    for name, said in refused:
        assert said == "raised ValueError", (
            f"of a model {name} gradients_in_slab {said}: it must raise ValueError at once, as `_kind_of` does for the "
            "parameters that want a gradient, if they are of two dtypes or there are none")


def of_another_model(assignment):
    """Two rounds of a slab of its own."""
    layer = toys.build(lambda: nn.Linear(3, 3), 0)
    slab = assignment.gradients_in_slab(layer)
    for _ in range(2):
        layer(torch.ones(2, 3)).sum().backward()
        layer.zero_grad()
        slab.reset()


def micro_batches(assignment):
    """Gradients of two backward passes, in a slab and without; slab.used after each; whether they moved."""
    results, used, places = [], [], []
    for in_slab in (False, True):
        model = toys.build(make_transformer, 0)
        slab = assignment.gradients_in_slab(model) if in_slab else None
        for micro in range(3):
            torch.manual_seed(toys.seed(0, 90 + micro))
            model(*toys.tokens(0, micro)).backward()
            if in_slab:
                of_another_model(assignment)
                used.append(int(slab.used))
                places.append([param.grad.data_ptr() for param in model.parameters()])
        results.append([param.grad.clone() for param in model.parameters()])
    return results, used, places[0] == places[-1], sum(param.numel() for param in model.parameters())


@pytest.mark.step(4, points=3, raised="a second backward adds to a gradient that lies in the slab already: it has its "
                  "place. (Another model here has a slab of its own, which is reset meanwhile)")
def test_micro_batches_add_up_in_place(assignment):
    ((results, used, stay, wanted),) = once(micro_batches, 1, assignment)
    assert used == [wanted] * 3, (
        f"after each of three backward passes slab.used was {used}, and it must be {wanted} each time: autograd adds "
        "to the gradient that lies in the slab, so nothing new is kept")
    assert stay, "a gradient that lies in the slab was moved in a later backward: it has its place"
    assert toys.identical(*results), "gradients of three micro-batches in the slab are others than without a slab"


def drawn_rounds(assignment):
    """What goes wrong first where drawn parameters have gradients in a slab, in some rounds, of one to three backward
    passes each; "" if nothing does. In each pass others have one, and some of these are zero."""
    chance = random.Random(toys.seed(0, 35))
    for dtype, name in KINDS:
        shapes = [[chance.randint(1, 4) for _ in range(chance.randrange(5))] for _ in range(6)]
        plain, model = (toys.build(lambda shapes=shapes: nn.ParameterList(map(torch.randn, shapes)), 0, dtype)
                        for _ in range(2))
        slab = assignment.gradients_in_slab(model)
        for number, passes in enumerate((chance.randint(2, 3), *(chance.randint(1, 3) for _ in range(4))), 1):
            for micro in range(1, passes + 1):
                factors = [chance.choice((None, 0.0, 1.0, -2.0)) for _ in shapes]
                factors[chance.randrange(6)] = 0.0
                factors[chance.randrange(6)] = 3.0
                told = f"backward {micro} of round {number}, of parameters of {name} of shapes {shapes}"
                try:
                    for each in (plain, model):
                        sum(factor * param.square().sum() for factor, param in zip(factors, each, strict=True)
                            if factor is not None).backward()
                except Exception as raised:
                    return (f"{told}, raised {type(raised).__name__}: {raised}. The slab has elements of "
                            f"{slab.memory.dtype}")
                for shape, other, param in zip(shapes, plain, model, strict=True):
                    if (param.grad is None) != (other.grad is None) or (
                            other.grad is not None and not torch.equal(param.grad, other.grad)):
                        return f"after {told}, the gradient of shape {shape} is another one than without a slab"
                found = [param.grad for param in model if param.grad is not None]
                memory = slab.memory.untyped_storage().data_ptr()
                away = [grad for grad in found if grad.untyped_storage().data_ptr() != memory]
                if away:
                    return (f"after {told}, {len(away)} of {len(found)} gradients do not lie in the slab, such as "
                            f"{away[0].flatten()[:3].tolist()}, of shape {list(away[0].shape)}")
                ends = [0] + [place + size for place, size in sorted(map(extent, found))]
                starts = sorted(grad.data_ptr() for grad in found)
                if starts != [slab.memory.data_ptr(), *ends[1:-1]]:
                    return f"after {told}, the gradients do not lie side by side from the slab's front"
            for each in (plain, model):
                each.zero_grad()
            slab.reset()
    return ""


def forgotten_reset(assignment):
    """If gradients were set to None, and the slab was not reset: what backward raised, and how many lie elsewhere
    then."""
    model = nn.Sequential(*(toys.build(lambda: nn.Linear(3, 3, bias=False), 0) for _ in range(2)))
    slab = assignment.gradients_in_slab(model)
    try:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
        error = ""
    except Exception as raised:
        error = type(raised).__name__
    return error, sum(not slab.holds(param.grad) for param in model.parameters() if param.grad is not None)


@pytest.mark.step(4, points=1)
def test_each_round_begins_anew(assignment):
    (other,) = once(drawn_rounds, 1, assignment)
    assert not other, (
        f"{other}. After reset() each gradient is kept where there is room, in the order of this round, whatever its "
        "dtype, its shape and its numbers are. Later passes of a round add to it")
    ((error, elsewhere),) = toys.run(forgotten_reset, 1, assignment)
    assert error or not elsewhere, (
        f"all gradients were set to None, the slab was not reset, and the next backward went through, with {elsewhere} "
        "gradients that lie elsewhere. The slab is full then: let keep()'s MemoryError through, so that whoever forgot "
        "reset() hears of it")


def reset_too_early(assignment):
    """What backward says when the slab was reset while gradients were in use: all of them, all but the one that
    backward completes first, that one alone, one from 6 to 15, which the next round covers up to 8, or one up to 6,
    which the next round covers whole. And how many there are. Once all were set to None it must go on. And for how many
    elements it said nothing, if so many were kept by somebody else since the reset, fewer than backward had kept."""
    errors, order = [], []
    for forgotten in (slice(0), slice(1), slice(1, None)):
        model = toys.build(toys.MLP, 0)
        slab = assignment.gradients_in_slab(model)
        order.clear()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(order.append)
        model(*toys.numbers(0, 0)).backward()
        for param in order[forgotten]:
            param.grad = None
        total = len(order)
        slab.reset()
        try:
            model(*toys.numbers(0, 1)).backward()
            errors.append("")
        except RuntimeError as raised:
            errors.append(str(raised))
    for first, in_use in ((2, 1), (1, 0)):
        sizes = nn.ParameterList([torch.ones(6), torch.ones(9), torch.ones(8)])
        slab = assignment.gradients_in_slab(sizes)
        for param in sizes[:first]:
            param.square().sum().backward()
        for param in sizes[:in_use]:
            param.grad = None
        slab.reset()
        try:
            for param in (sizes[2], sizes[in_use]):
                param.square().sum().backward()
            errors.append("")
        except RuntimeError as raised:
            errors.append(str(raised))
    chance, silent = random.Random(toys.seed(0, 36)), []
    for parts in (1, 2):
        sizes = nn.ParameterList([torch.ones(6), torch.ones(11)])
        slab = assignment.gradients_in_slab(sizes)
        sizes[0].square().sum().backward()
        slab.reset()
        for _ in range(parts):
            slab.keep(torch.ones(chance.randint(1, 2)))
        try:
            sizes[0].square().sum().backward()
            silent.append(int(slab.used))
        except RuntimeError:
            pass
    other = toys.build(toys.MLP, 0)
    fine = assignment.gradients_in_slab(other)
    for _ in range(2):
        other(*toys.numbers(0, 0)).backward()
        other.zero_grad()
        fine.reset()
    return errors, total, silent


@pytest.mark.step(4, points=3)
def test_a_reset_while_gradients_are_in_use_is_refused(assignment):
    (((error, partly, first, covered, hidden), total, silent),) = once(reset_too_early, 1, assignment)
    assert error, (
        "gradients lay in the slab, it was reset, and the next backward added to them without a word. What is kept "
        "next would lie over them: raise RuntimeError in backward where it adds to a gradient from before the reset")
    assert partly, (
        f"of {total} gradients in the slab the one that backward completes first was set to None, and the slab was "
        f"reset. The next backward kept that one again, and added to the {total - 1} others without a word, though "
        "nothing is kept where they lie. slab.used is not 0 any more when their hooks run: remember whose gradients "
        "were kept since the reset")
    assert first, (
        f"of {total} gradients in the slab all but the one that backward completes first were set to None, and "
        "the slab was reset. The next backward added to that one without a word, at the slab's front, where the others "
        "are kept now: remember whose gradients were kept since the reset")
    assert covered, (
        "a gradient lies at 6 to 15, and the slab was reset. Another one was kept at 0 to 8, over its first two "
        "numbers, and backward added to both without a word: remember whose gradients were kept since the reset")
    assert hidden, (
        "a gradient lies at 0 to 6, and the slab was reset. Another one was kept at 0 to 8, over all of it, and "
        "backward added to both without a word. From where it lies nobody can tell: remember whose gradients were kept "
        "since the reset")
    assert not silent, (
        f"a gradient of 6 elements lies in the slab, which was reset. Then slab.keep() of {silent[0]} other elements "
        f"was called, and backward added to that gradient without a word. slab.used was {silent[0]} when its hook ran: "
        "not 0, and not the 6 that your last hook had left. This tells that there was a reset")


# --------------------------------------------------------------------------------------------------- step 5: compact


def arena_state(arena, tensors):
    """Where the tensors lie, in elements, and what is free."""
    step = arena.memory.element_size()
    return [(tensor.data_ptr() - arena.memory.data_ptr()) // step for tensor in tensors], list(arena.pool.holes)


def compacted(assignment):
    """An arena with holes, before and after compact(): places, holes, what can be allocated; then freed and again."""
    arena = assignment.Arena(100)
    parts = [arena.allocate((size,)) for size in (10, 20, 5, 15, 10, 30)]
    for number in (0, 2, 4):
        arena.free(parts[number])
    live = [parts[number] for number in (1, 3, 5)]
    before = arena_state(arena, live)
    arena.compact()
    after = arena_state(arena, live)
    free = arena.free_bytes, arena.largest_free
    try:
        rest = arena.allocate((35,))
        second = arena_state(arena, [rest])[0]
        arena.free(live[1])
        arena.free(live[0])
        arena.compact()
        third = arena_state(arena, [live[2], rest])
        error = ""
    except Exception as raised:
        second, third, error = None, None, f"{type(raised).__name__}: {raised}"
    nothing = assignment.Arena(50)
    nothing.compact()
    full = assignment.Arena(50)
    whole = full.allocate((50,)).fill_(3.0)
    full.compact()
    return (before, after, free, second, third, error, list(nothing.pool.holes), list(full.pool.holes),
            whole.tolist() == [3.0] * 50, [freed_after(assignment, times) for times in (1, 2)], overtaken(assignment))


def overtaken(assignment):
    """What two tensors hold after compact(), of which the younger one took a hole in front of the other."""
    arena = assignment.Arena(30)
    gap, older = arena.allocate((10,)), arena.allocate((6,)).fill_(5.0)
    arena.free(gap)
    younger = arena.allocate((3,)).fill_(6.0)
    arena.compact()
    return younger.tolist(), older.tolist()


def freed_after(assignment, times):
    """What is free when all is, after an arena was compacted so many times. The first tensor stays where it was, and
    the second time all do."""
    arena = assignment.Arena(100)
    first, gap, last = (arena.allocate((size,)) for size in (10, 20, 30))
    arena.free(gap)
    for _ in range(times):
        arena.compact()
    try:
        arena.free(first)
        arena.free(last)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return told(arena.pool.holes)


@pytest.mark.step(5, points=6, raised="self.lent says who has which block. A piece that overlaps its own new place "
                  "goes through memory of its own")
def test_compaction_leaves_one_free_block(assignment):
    ((before, after, free, second, third, error, nothing, full, whole, freed, held),) = once(compacted, 1, assignment)
    places, holes = after
    assert places == [0, 20, 35], (
        f"tensors of 20, 15 and 30 lay at {before[0]} with holes between them; after compact() they lie at {places}, "
        "and [0, 20, 35] is right: side by side, from the front, in the order in which they lay")
    assert holes == [(65, 35)], (
        f"after compact() the arena's pool has free: {told(holes)}; 35 at 65, in one block, is right. (self.pool must "
        "know where all tensors lie now)")
    assert free == (140, 140), f"after compact() {free[0]} bytes are free, the largest block has {free[1]}; 140 each"
    assert not error, f"after compact() the arena was used further, and raised {error}"
    assert second == [65], f"after compact() a tensor of 35 was allocated at {second[0]}, and 65 is right"
    assert third == ([0, 30], [(65, 35)]), (
        f"after a second compact() the two tensors left lie at {third[0]}, and free are {told(third[1])}; 0 and 30, "
        "and 35 at 65, are right")
    assert nothing == [(0, 50)] and full == [] and whole, (
        f"an empty arena of 50 has free {told(nothing)} after compact(), and 50 at 0 is right; "
        f"a full one has free {told(full)}, and none is right"
        + ("" if whole else ", and its tensor has lost its numbers"))
    for found, times, what in zip(freed, ("once", "twice"), ("leaves where it is", "finds in its place"), strict=True):
        assert found == told([(0, 100)]), (
            f"an arena of 100 held tensors of 10 at 0 and of 30 at 30; compact() was called {times}, and both were "
            f"freed. Then there is: {found}; free is 100 at 0, in one block. Which block does self.lent name for a "
            f"tensor that compact() {what}?")
    assert held == ([6.0] * 3, [5.0] * 6), (
        f"a tensor of three 6 took a hole in front of an older one of six 5. After compact() they hold {held[0]} and "
        f"{held[1]}: which of the two moves first? Go by where they lie, not by their age")


ROOMS = (2000, 150, 12)  # elements of arenas


def worked_in(assignment):
    """What is wrong first in arenas in which tensors of drawn shapes come and go, some of which want a gradient, and
    which are compacted now and then; "" if nothing is."""
    chance = random.Random(toys.seed(0, 33))
    for number in range(200 * len(ROOMS)):
        if number % 200 == 0:
            room, live = ROOMS[number // 200], []
            arena = assignment.Arena(room)
        act = chance.random() if number % 200 > 1 else 0.0
        left = arena.largest_free // 4
        if act < 0.55:
            shape = [chance.randint(1, 5) for _ in range(chance.randrange(5))]
            if act < 0.2 and 0 < left < 20:
                shape = [left] if left > 1 else []
            if number % 200 == 0:  # all but one, which comes next
                shape = [left - 1]
            if torch.Size(shape).numel() <= left:
                try:
                    tensor = arena.allocate(shape).fill_(number)
                except MemoryError:
                    return f"allocate({shape}) raised MemoryError, and the largest free block has {left} elements"
                for _ in shape[1:]:
                    tensor.transpose_(*chance.sample(range(len(shape)), 2))
                tensor.requires_grad_(chance.random() < 0.3)
                live.append((tensor, tensor.detach().clone(), tensor.stride(), tensor.requires_grad))
        elif act < 0.9 and live:
            arena.free(live.pop(chance.randrange(len(live)))[0].requires_grad_(False))
        else:
            live.sort(key=lambda entry: entry[0].data_ptr())
            arena.compact()
            places = [tensor.data_ptr() for tensor, *_ in live]
            if places != sorted(places):
                return "after a compact() they lie in another order than before"
            used = sum(tensor.numel() for tensor, *_ in live)
            if list(arena.pool.holes) != [(used, room - used)] * (used < room):
                return f"after a compact() {told(arena.pool.holes)} is free, and {room - used} at {used} is right"
        for tensor, value, stride, wants in live:
            if tensor.shape != value.shape or tensor.stride() != stride or not torch.equal(tensor, value):
                return f"a tensor of shape {list(value.shape)} has other numbers, another shape or other strides"
            if tensor.requires_grad != wants or not tensor.is_leaf:
                return (f"a tensor of shape {list(value.shape)} was a leaf that wants {'a' if wants else 'no'} "
                        f"gradient, and is {'one' if tensor.is_leaf else 'no leaf, and one'} that "
                        f"{'wants one' if tensor.requires_grad else 'wants none'}")
    return ""


def followed(assignment):
    """Tensors of many kinds after compact(): the same objects, shapes, strides, values."""
    arena = assignment.Arena(400)
    hole = arena.allocate((5,))
    torch.manual_seed(toys.seed(0, 31))
    turned = arena.allocate((3, 7)).normal_().t_()
    weight = arena.allocate((6, 4)).normal_().requires_grad_()
    small = arena.allocate(()).fill_(7.0)
    gap = arena.allocate((9,))
    behind = arena.allocate((2, 1, 5)).normal_()
    tensors = {"[7, 3], transposed": turned, "[6, 4], which wants a gradient": weight, "of one element": small,
               "[2, 1, 5]": behind}
    wanted = {name: (tensor.detach().clone(), list(tensor.shape), tensor.stride()) for name, tensor in tensors.items()}
    arena.free(hole)
    arena.free(gap)
    arena.compact()
    inside = arena.memory.untyped_storage().data_ptr()
    seen = {name: (torch.equal(tensor.detach(), wanted[name][0]) if list(tensor.shape) == wanted[name][1] else False,
                   list(tensor.shape), tuple(tensor.stride()) == tuple(wanted[name][2]),
                   tensor.untyped_storage().data_ptr() == inside) for name, tensor in tensors.items()}
    shapes = {name: shape for name, (_, shape, _) in wanted.items()}
    return seen, shapes, weight.is_leaf and weight.requires_grad, worked_in(assignment)


@pytest.mark.step(5, points=4, raised="every tensor that the arena has handed out must point to its new place")
def test_tensors_follow_where_they_are_moved(assignment):
    ((seen, shapes, leaf, other),) = once(followed, 1, assignment)
    for name, (same, shape, strides, inside) in seen.items():
        assert shape == shapes[name], f"after compact() the tensor {name} has shape {shape}"
        assert inside, (
            f"after compact() the tensor {name} does not lie in arena.memory: it must point to its new place there")
        assert strides, f"after compact() the tensor {name} has other strides: pass them on"
        assert same, (
            f"after compact() the tensor {name} has other values: do its holders see the new place, and did all of its "
            "numbers arrive there?")
    assert leaf, "a parameter in the arena is no parameter any more after compact()"
    assert not other, f"in an arena of 2000, 150 or 12, where many tensors come and go, {other}"


GAPS = (1, 3, 700, 2**18 - 1, 2**18 + 1)
NO_FP32_HOLDS = 2**40  # and what is added to it


def overlapped(assignment):
    """For each gap and dtype: how many elements of a large tensor, moved by it, differ afterwards; and of the one
    behind it."""
    wrong = {}
    for gap, dtype in [(gap, torch.float32) for gap in GAPS] + [
            (3, torch.float64), (700, torch.int64), (700, torch.bfloat16)]:
        size = 2**19 + 12345
        arena = assignment.Arena(gap + size + 5000, dtype)
        hole, large, behind = (arena.allocate((elements,)) for elements in (gap, size, 4000))
        values = [NO_FP32_HOLDS * (dtype.itemsize == 8) + torch.arange(tensor.numel(), dtype=dtype)
                  for tensor in (large, behind)]
        large.copy_(values[0])
        behind.copy_(values[1])
        arena.free(hole)
        arena.compact()
        wrong[gap, str(dtype)] = [int((tensor != value).sum()) for tensor, value in zip(
            (large, behind), values, strict=True)]
    return wrong


@pytest.mark.step(5, points=6)
def test_overlapping_moves_keep_the_values(assignment):
    (wrong,) = once(overlapped, 1, assignment)
    for (gap, dtype), (inside, behind) in wrong.items():
        assert dtype == "torch.float32" or not inside and not behind, (
            f"in an arena of {dtype} a tensor of {2**19 + 12345} elements was moved by {gap}, and {inside} of its "
            f"numbers are others now, and {behind} of the tensor behind it. In fp32 none was. Through what does a "
            "piece go, and of which dtype is that?")
        assert not inside, (
            f"a tensor of {2**19 + 12345} elements was moved by {gap} to the front, over itself, and {inside} of its "
            "numbers are others now. Old and new place overlap: copy front to back, piece by piece, and a piece that "
            "overlaps its own new place through memory of its own")
        assert not behind, (
            f"a tensor of 4000 behind a large one, moved by {gap}, has {behind} other numbers now: it was overwritten "
            "before it was moved")


def memory_of_a_compaction(assignment):
    """Of arenas of 32 MiB with holes of several sizes in front: elements of the hole, bytes that compact() holds at
    most beyond what was there, in tensors or of Python's own; whether the memory is the same, and its numbers are."""
    from zero_minimal.meters.memory import Ledger

    chance, found = random.Random(toys.seed(0, 37)), []
    for gap in (1000, chance.randint(2**18 + 1, 2**20), 3 * 2**20 - chance.randint(0, 999)):
        arena = assignment.Arena(2**23)
        hole, sizes = arena.allocate((gap,)), [2**21, *(chance.randint(1, 2**16) for _ in range(20)), 3 * 2**19]
        tensors = [arena.allocate((size,)).fill_(number) for number, size in enumerate(sizes)]
        arena.free(hole)
        start = arena.memory.data_ptr()
        tracemalloc.start()
        with Ledger("cpu") as ledger:
            before = ledger.total
            ledger.reset()
            arena.compact()
            peak = ledger.peak.total
        pythons = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found.append((gap, max(peak - before, pythons), arena.memory.data_ptr() == start,
                      all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))))
    return found


PIECE = 4 * 2**18  # bytes


@pytest.mark.step(5, points=5)
def test_compaction_takes_memory_for_one_piece(assignment):
    (found,) = once(memory_of_a_compaction, 1, assignment)
    for gap, more, same, stayed in found:
        assert same, "compact() has made other memory for the arena: it must move in place, there is no room for two"
        assert more <= PIECE + 65536, (
            f"compact() of an arena of 32 MiB with {gap} free elements in front, and tensors of 2097152 elements and "
            f"fewer, held {more / MIB:.1f} MiB more at its peak; a piece of 2**18 elements, 1 MiB, is enough. Who "
            "compacts has no memory left: move piece by piece, also where old and new place do not overlap")
        assert stayed, (
            f"after compact() of an arena of 32 MiB with {gap} free elements in front the values are others")


def moved_before_backward(assignment):
    """What backward does with a tensor that was saved in forward and has moved since."""
    arena = assignment.Arena(100)
    hole, x = arena.allocate((7,)), arena.allocate((20,)).fill_(1.5)
    behind = arena.allocate((7,)).fill_(9.0)
    weight = torch.ones(20, requires_grad=True)
    loss = (weight * x).sum()
    arena.free(hole)
    arena.compact()
    try:
        loss.backward()
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    wrong = weight.grad is not None and not torch.equal(weight.grad, torch.full((20,), 1.5))
    again = torch.ones(20, requires_grad=True)
    (again * x).sum().backward()
    return error, wrong, torch.equal(again.grad, torch.full((20,), 1.5)), behind.tolist() == [9.0] * 7


@pytest.mark.step(5, points=4)
def test_a_backward_that_needs_what_was_moved_fails(assignment):
    ((error, wrong, again, behind),) = once(moved_before_backward, 1, assignment)
    assert error, (
        "forward saved a tensor of the arena, compact() moved it, and backward went through"
        + (", with a wrong gradient: other numbers lie there now" if wrong else "")
        + ". It must fail: `_lend` counts as a change, `tensor.data = …` does not")
    assert "modified by an inplace operation" in error, f"backward raised something else: {error}"
    assert again and behind, "a tensor that was moved gives wrong gradients in the next forward and backward"
