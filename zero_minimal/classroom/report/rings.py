"""Rings: the collectives that a report can step through message by message, and what is expected of each.

Each rank's numbers say whose they are, and where they belong: so a sum says which ranks are in it. What is expected
follows from the rules of a ring, not from anybody's code: a chunk that ends at some rank starts at the right neighbour
of that rank, and is passed on to the right until it is there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

RANKS, ROOT, CHUNKS = 3, 1, 4
LARGE = 2**18  # numbers: no system buffers so many, so that a send waits until somebody receives
LETTERS = "abcdefgh"


def number(rank: int, element: int) -> int:
    """What a rank has at the start in an element of the tensor."""
    return 10**rank + 1000 * (element + 1)


@dataclass(frozen=True)
class Read:
    """What a number is: a sum of so many `parts` [rank] of an element; `divided` by the number of ranks or not."""

    element: int
    parts: tuple[int, ...]
    divided: bool = False


PADDING = Read(-1, (0,) * RANKS)  # a zero


def read(value: float | int | None, size: int) -> Read | None:
    """None: nothing that a rank has had, or a sum of it."""
    if value is None:
        return None
    if value == 0:
        return PADDING
    for factor in (1, RANKS):
        whole = round(value * factor)
        if abs(value * factor - whole) < 1e-3 and 0 < whole < 10**9:
            parts = tuple(whole % 1000 // 10**rank % 10 for rank in range(RANKS))
            count = sum(parts)
            if count and whole // 1000 % count == 0 and 1 <= whole // 1000 // count <= size:
                return Read(whole // 1000 // count - 1, parts, factor > 1)
    return None


@dataclass(frozen=True)
class Sent:
    """A message that is expected: in which round, to whom, which chunk, and whose parts are in it."""

    round: int
    to: int
    chunk: int
    ranks: frozenset[int]


@dataclass(frozen=True)
class Ring:
    """A function that is called, with which tensors, and what must come of it."""

    size: int  # elements of the whole tensor
    dtype: torch.dtype
    sums: bool  # over the ranks; else tensors only travel
    arguments: Callable[[int], tuple]  # of a rank
    result: Callable  # (arguments, what was returned) → the tensor to look at
    sent: tuple[tuple[Sent, ...], ...]  # [rank]
    holds: tuple[tuple[int, ...], ...]  # [rank] the elements that the result holds
    right: Callable[[int, int], frozenset[int]]  # (element, rank) → whose parts are in it there
    about: str
    chunk: int = 1  # elements
    inputs: tuple[int, ...] = ()  # arguments that must stay as they were
    free: bool = False  # which elements a message carries is up to the author
    copies: int = 1  # how often each number stands in the tensor: a large one
    in_place: bool = False  # it returns the tensor that it was given

    @property
    def ranges(self) -> list[range]:
        """The elements of each chunk."""
        return [range(start, min(start + self.chunk, self.size)) for start in range(0, self.size, self.chunk)]

    @property
    def message_bytes(self) -> int:
        """Of a whole chunk, padded."""
        return self.chunk * self.copies * self.dtype.itemsize


def tensor(rank: int, elements: range, dtype: torch.dtype, copies: int = 1) -> torch.Tensor:
    """What a rank has at the start."""
    return torch.tensor([number(rank, element) for element in elements for _ in range(copies)], dtype=dtype)


ALL = frozenset(range(RANKS))


def reduced(rank: int) -> list[Sent]:
    """What a rank sends in a reduce-scatter, by following each chunk from the right neighbour of the rank where it
    ends, all the way round."""
    ways = ((chunk, hop, (chunk + 1 + hop) % RANKS) for chunk in range(RANKS) for hop in range(RANKS - 1))
    found = [Sent(hop + 1, (rank + 1) % RANKS, chunk, frozenset((chunk + 1 + back) % RANKS for back in range(hop + 1)))
             for chunk, hop, sender in ways if sender == rank]
    return sorted(found, key=lambda sent: sent.round)


def gathered(rank: int, sums: bool, later: int = 0) -> list[Sent]:
    """What a rank sends in an all-gather: each chunk starts at its own rank. `later`: rounds that come before."""
    ways = ((chunk, hop, (chunk + hop) % RANKS) for chunk in range(RANKS) for hop in range(RANKS - 1))
    found = [Sent(later + hop + 1, (rank + 1) % RANKS, chunk, ALL if sums else frozenset([chunk]))
             for chunk, hop, sender in ways if sender == rank]
    return sorted(found, key=lambda sent: sent.round)


def piped(rank: int) -> list[Sent]:
    """What a rank sends in a broadcast: each chunk as soon as it is there; the last rank of the ring nothing."""
    distance = (rank - ROOT) % RANKS
    return [Sent(distance + chunk + 1, (rank + 1) % RANKS, chunk, frozenset([ROOT]))
            for chunk in range(CHUNKS if distance < RANKS - 1 else 0)]


def _each(make: Callable) -> tuple:
    return tuple(make(rank) for rank in range(RANKS))


RINGS = {
    "exchange": Ring(
        1, torch.float32, False, copies=LARGE, inputs=(0,),
        arguments=lambda rank: (tensor(rank, range(1), torch.float32, LARGE), torch.full((LARGE,), torch.nan)),
        result=lambda arguments, returned: arguments[1],
        sent=_each(lambda rank: (Sent(1, (rank + 1) % RANKS, 0, frozenset([rank])),)),
        holds=_each(lambda rank: (0,)), right=lambda element, rank: frozenset([(rank - 1) % RANKS]),
        about=f"Each rank calls exchange(outgoing, incoming) with {LARGE:,} numbers."),
    "reduce_scatter": Ring(
        2 * RANKS, torch.float64, True, chunk=2, inputs=(0,),
        arguments=lambda rank: (tensor(rank, range(2 * RANKS), torch.float64),),
        result=lambda arguments, returned: returned, sent=_each(lambda rank: tuple(reduced(rank))),
        holds=_each(lambda rank: tuple(range(2 * rank, 2 * rank + 2))), right=lambda element, rank: ALL,
        about="Each rank calls reduce_scatter(tensor) with 6 numbers of float64: three chunks a, b and c of two."),
    "all_gather": Ring(
        2 * RANKS, torch.int64, False, chunk=2, inputs=(0,),
        arguments=lambda rank: (tensor(rank, range(2 * rank, 2 * rank + 2), torch.int64),),
        result=lambda arguments, returned: returned, sent=_each(lambda rank: tuple(gathered(rank, False))),
        holds=_each(lambda rank: tuple(range(2 * RANKS))), right=lambda element, rank: frozenset([element // 2]),
        about="Each rank calls all_gather(part) with 2 whole numbers (int64): rank 0 has a, rank 1 b, rank 2 c."),
    "all_reduce": Ring(
        7, torch.int64, True, chunk=3, inputs=(0,), free=True,
        arguments=lambda rank: (tensor(rank, range(7), torch.int64),),
        result=lambda arguments, returned: returned,
        sent=_each(lambda rank: tuple(reduced(rank) + gathered(rank, True, RANKS - 1))),
        holds=_each(lambda rank: tuple(range(7))), right=lambda element, rank: ALL,
        about="Each rank calls all_reduce(tensor) with 7 whole numbers (int64). 3 does not divide 7: filled up to 9 "
        "they make chunks of three, a, b and c."),
    "broadcast": Ring(
        10, torch.int64, False, chunk=3, free=True, in_place=True,
        arguments=lambda rank: (tensor(rank, range(10), torch.int64), ROOT, None, CHUNKS),
        result=lambda arguments, returned: arguments[0], sent=_each(lambda rank: tuple(piped(rank))),
        holds=_each(lambda rank: tuple(range(10))), right=lambda element, rank: frozenset([ROOT]),
        about=f"Each rank calls broadcast(tensor, root={ROOT}, chunk_count={CHUNKS}) with 10 whole numbers (int64): "
        "chunks a, b and c of three, and d of one."),
}
