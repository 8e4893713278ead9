"""Latency: the time that a message costs before its first byte, and the time that each byte adds.

    seconds of a message = α + β · bytes

α is the latency: the other rank wakes, the operating system is passed, the place for the data is found. β is one over
the bandwidth. At n½ = α/β bytes both terms are equal: latency dominates smaller messages, bandwidth larger ones.

    points = ranks.run(latency.measure, 2)[0]        in a notebook's rank: points = latency.measure()
    cost = latency.fit(points)
    cost.alpha, cost.beta, cost.half, cost.seconds(25_000_000)      and draw it: pictures/latency_chart.py
"""

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = tuple(8 * 4**power for power in range(11))  # bytes: 8, 32, 128, … 8 MiB
THROWS = 3  # round trips in a row: the caches are cold in the first one


class Cost(NamedTuple):
    """The straight line through the points: alpha is in seconds a message, beta in seconds a byte."""

    alpha: float
    beta: float

    @property
    def half(self) -> float:
        """n½ in bytes: half of the time of such a message is α. Infinite if beta is 0."""
        return self.alpha / self.beta if self.beta else math.inf

    def seconds(self, bytes: float) -> float:
        """The time of one message of this size."""
        return self.alpha + self.beta * bytes


# ------------------------------------------------------------------------------------------------------- on the ranks


def measure(sizes: Iterable[int] = SIZES, rounds: int = 20) -> list[tuple[int, float]]:
    """Rank 0 and rank 1 exchange messages; every rank gets the points (bytes, seconds), from the smallest size to the
    largest.

    All ranks call it. Ranks above 1 wait meanwhile. The tensors are on the CPU.

    A time is half of a round trip, so one clock is enough. A size keeps its smallest time: a disturbance, such as
    another program or the first use of a connection, only makes a message slower. Each round has every size, a few
    round trips in a row, so that one disturbance does not affect all round trips of a size.

    Raises ValueError if there is only one rank, or if a size or the number of rounds is not above 0.
    """
    if dist.get_world_size() < 2:
        raise ValueError("a message needs two ranks: start 2 or more, for example with ranks.run(latency.measure, 2)")
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < 1 or rounds < 1:
        raise ValueError(f"give sizes of 1 byte or more, and 1 round or more, not sizes {sizes} and {rounds} rounds")
    best = torch.full((len(sizes),), math.inf, dtype=torch.float64)  # seconds
    if dist.get_rank() < 2:
        balls = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for _, (place, ball) in itertools.product(range(rounds), enumerate(balls)):
            best[place] = min(best[place], *(_throw(ball) for _ in range(THROWS)))
    dist.broadcast(best, 0)  # the others wait here; rank 1's own times include waiting for rank 0
    return list(zip(sizes, best.tolist(), strict=True))


def _throw(ball: Tensor) -> float:
    """Half of the seconds of a round trip from rank 0 to rank 1 and back."""
    began = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(ball, 1)
        dist.recv(ball, 1)
    else:
        dist.recv(ball, 0)
        dist.send(ball, 0)
    return (time.perf_counter() - began) / 2


def measure_pieces(counts: Iterable[int], bytes: int = 2**20, rounds: int = 40) -> dict[int, float]:
    """Seconds in which this rank all-reduces a tensor of this size, one piece after the other, for each number of
    pieces: {pieces: seconds}, the smallest of the rounds. All ranks call it; the collective is torch's own.
    """
    tensor, counts = torch.zeros(bytes // 4), list(counts)
    best = dict.fromkeys(counts, math.inf)
    for _, count in itertools.product(range(rounds), counts):
        dist.barrier()
        began = time.perf_counter()
        for piece in tensor.chunk(count):
            dist.all_reduce(piece)
        best[count] = min(best[count], time.perf_counter() - began)
    return best


# -------------------------------------------------------------------------------------------------------- what it means


def fit(points: Sequence[tuple[int, float]]) -> Cost:
    """The α and β, neither below 0, whose line is nearest to the points (bytes, seconds).

    The candidates are the lines through two points, and those through one point with α or β 0. The nearest has the
    smallest sum, over all points, of the absolute logarithm of the ratio of line to point. So 8 bytes count as much as
    8 MB; in seconds, large messages would hide α. Nothing is squared, so that an outlier does not dominate.

    Raises ValueError if the points have fewer than two sizes, or a size or time that is not above 0.
    """
    if len({bytes for bytes, _ in points}) < 2 or any(bytes <= 0 or seconds <= 0 for bytes, seconds in points):
        raise ValueError(f"a line needs points of two sizes or more, sizes and times above 0, not {list(points)}")
    lines = [Cost(0.0, seconds / bytes) for bytes, seconds in points]
    lines += [Cost(seconds, 0.0) for _, seconds in points]
    for (few, short), (many, long) in itertools.combinations(sorted(points), 2):
        beta = (long - short) / (many - few) if many > few else -1.0
        lines.append(Cost(short - beta * few, beta))
    return min((line for line in lines if line.alpha >= 0 and line.beta >= 0), key=lambda line: _distance(line, points))


def _distance(line: Cost, points: Sequence[tuple[int, float]]) -> float:
    return sum(abs(math.log(line.seconds(bytes) / seconds)) for bytes, seconds in points)
