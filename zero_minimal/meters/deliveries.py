"""Deliveries: what every message of a ring algorithm carried. So any implementation can be drawn.

    seen = deliveries.watch(mine, "reduce_scatter")     on each rank; `mine` is a module
    story = deliveries.told(world["seen"])              who held what, step by step: pictures/ring_chart.py draws it

An algorithm may work in several tensors, or copies. So this reads only the numbers, which are marked: chunk c of rank r
starts as (2c+1)·16^r. So the base-16 digits of any sum tell which ranks' parts are in it, and of which chunk. (fp32
holds such sums of up to 6 ranks exactly.)
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.meters.traffic import OPERATORS

BASE = 16
SIZE = 2  # elements of a chunk
CHUNKS = 4  # chunks of a broadcast
ALGORITHMS = ("reduce_scatter", "all_gather", "broadcast")
UNKNOWN = object()
MOST_MESSAGES = 100  # messages recorded per rank

Parts = tuple[int, ...] | None  # ranks whose parts are in a chunk, twice if added twice; None: not a sum


# ------------------------------------------------------------------------------------------------------- on the ranks


def marked(rank: int, chunks: int) -> Tensor:
    """A rank's marked tensor [SIZE · chunks]."""
    return torch.tensor([float((2 * chunk + 1) * BASE**rank) for chunk in range(chunks) for _ in range(SIZE)])


class Deliveries(TorchDispatchMode):
    """Records what this rank sends, through any function of torch.distributed.

    sent: (receiver, numbers) of each message, in order. collectives: names of torch's collectives that were called.
    """

    def __init__(self):
        super().__init__()
        self.sent: list[tuple[int, list[float]]] = []
        self.collectives: list[str] = []

    def __enter__(self):
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        fill_new_memory_with_nan(True)  # so that unwritten memory is not mistaken for a rank's part
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        fill_new_memory_with_nan(self._deterministic)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = OPERATORS.get(operator.__name__.split(".")[0]) if operator.namespace == "c10d" else None
        if name == "send" and len(self.sent) < MOST_MESSAGES:
            (tensor,), _, receiver, *_ = args
            self.sent.append((receiver, tensor.flatten().tolist()))
        elif name not in (None, "send", *self.collectives):
            self.collectives.append(name)
        return operator(*args, **kwargs or {})


def fill_new_memory_with_nan(on: bool) -> None:
    """torch.use_deterministic_algorithms does this, too, but first loads torch's compiler, which takes seconds."""
    torch._C._set_deterministic_algorithms(on)


def watch(module, name: str, start: list[float] | None = None) -> dict:
    """Run module.reduce_scatter, .all_gather or .broadcast on marked numbers, or on `start`, what another
    one left ("end" of its record); return this rank's record for `told`. The root of the broadcast is rank 1."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    root, own = 1 % world_size, marked(rank, world_size)
    tensor, chunks, options = {
        "reduce_scatter": (own, world_size, {}),
        "all_gather": (own.view(world_size, SIZE)[rank].clone(), world_size, {}),
        "broadcast": (marked(rank, CHUNKS) if rank == root else torch.full((CHUNKS * SIZE,), torch.nan), CHUNKS,
                      {"root": root}),
    }[name]
    if start is not None:
        tensor = torch.tensor(start)
    start = tensor.tolist()
    with Deliveries() as seen:
        result = getattr(module, name)(tensor, **options)
    end = result if isinstance(result, torch.Tensor) else tensor
    return {"chunks": chunks, "start": start, "sent": seen.sent, "collectives": seen.collectives,
            "end": end.flatten().tolist()}


# ------------------------------------------------------------------------------------------------------ what it means


class Story(NamedTuple):
    """Who held what: states [step][rank][chunk], Parts; sends [step][rank], (receiver, chunks) of the message sent
    then, or None; names of torch's collectives that were called."""

    states: list
    sends: list
    collectives: list[str]


def read(number: float, world_size: int) -> tuple[int | None, Parts]:
    """Decode a number: (chunk, parts). (None, ()): unwritten memory. (None, None): not a sum of one chunk's parts, but
    for example a mean, or a sum of different chunks."""
    if number != number:
        return None, ()
    if not 0 < number < BASE**world_size or number != int(number):
        return None, None
    digits = _digits(number, world_size)
    mark = next(mark for mark in range(BASE - 1, 0, -2) if all(digit % mark == 0 for digit in digits))
    times = [digit // mark for digit in digits]
    if max(times) > 2:
        return None, None
    return mark // 2, tuple(rank for rank, count in enumerate(times) for _ in range(count))


def told(records: list[dict]) -> Story:
    """The story of an algorithm, from what `watch` returned on each rank.

    In each step a rank sends one message, in its original order, and none before the message's parts can have arrived.
    So the story does not depend on the ranks' speed. What a rank holds is inferred from what it sends next, and at the
    end from the result.
    """
    world_size, chunks = len(records), records[0]["chunks"]
    starts = [_placed(record["start"], rank, world_size) for rank, record in enumerate(records)]
    ends = [_placed(record["end"], rank, world_size) for rank, record in enumerate(records)]
    queues = [[(to, _content(numbers, rank, world_size)) for to, numbers in record["sent"]]
              for rank, record in enumerate(records)]
    steps = _in_steps(starts, queues) or [[None] * world_size]
    columns = [[_history(starts[rank].get(chunk, ()), ends[rank].get(chunk, UNKNOWN), rank, chunk, steps)
                for chunk in range(chunks)] for rank in range(world_size)]
    states = [[[column[step] for column in held] for held in columns] for step in range(len(steps) + 1)]
    sends = [[sent and (sent[0], sorted(sent[1])) for sent in step] for step in steps]
    return Story(states, sends, sorted({name for record in records for name in record["collectives"]}))


def _digits(number: float, world_size: int) -> list[int]:
    return [int(number) // BASE**rank % BASE for rank in range(world_size)]


def _content(numbers: list[float], rank: int, world_size: int) -> dict[int, Parts]:
    """What a message of this rank carries, by chunk. A number that is not a sum counts as the rank's own chunk."""
    content = {}
    for number in numbers:
        chunk, parts = read(number, world_size)
        if parts is None and 0 < number < BASE**world_size:
            own = _digits(number, world_size)[rank]
            chunk = own // 2 if own % 2 else None
        if chunk is not None:
            content[chunk] = parts
    return content


def _placed(numbers: list[float], rank: int, world_size: int) -> dict[int, Parts]:
    """What a rank holds in a tensor, by chunk. A single chunk is identified by its numbers, or else is the rank's own;
    several chunks are identified by their positions."""
    pairs = [numbers[at : at + SIZE] for at in range(0, len(numbers), SIZE)]
    found = [[read(number, world_size) for number in pair] for pair in pairs]
    parts = [pair[0][1] if pair[0] == pair[-1] else pair[0][1] or pair[-1][1] for pair in found]
    if len(pairs) == 1:
        chunk = found[0][0][0]
        return {rank if chunk is None else chunk: parts[0]}
    return dict(enumerate(parts))


def _in_steps(starts: list[dict], queues: list[list]) -> list[list]:
    """[step][rank]: (receiver, content), or None if the rank sends nothing in that step."""
    known = [{chunk: set(parts or ()) for chunk, parts in start.items()} for start in starts]

    def can_send(rank: int) -> bool:
        return all(set(parts or ()) <= known[rank].get(chunk, set()) for chunk, parts in queues[rank][0][1].items())

    steps = []
    while any(queues):
        waiting = [rank for rank, queue in enumerate(queues) if queue]
        able = [rank for rank in waiting if can_send(rank)] or waiting  # parts of unknown origin are sent anyway
        step = [queues[rank].pop(0) if rank in able else None for rank in range(len(queues))]
        for receiver, content in filter(None, step):
            for chunk, parts in content.items():
                known[receiver].setdefault(chunk, set()).update(parts or ())
        steps.append(step)
    return steps


def _history(start: Parts, end, rank: int, chunk: int, steps: list[list]) -> list[Parts]:
    """What a rank holds of a chunk before each step, and at the end."""
    came = [[sent[1][chunk] for sent in step if sent and sent[0] == rank and chunk in sent[1]] for step in steps]
    held = [end]
    for step, arrived in zip(reversed(steps), reversed(came), strict=True):  # backwards from the end
        own = step[rank]
        held.append(own[1][chunk] if own and chunk in own[1] else UNKNOWN if arrived else held[-1])
    held = [start, *held[-2::-1]]
    for number, arrived in enumerate(came, 1):
        if held[number] is UNKNOWN:  # never seen again: keep what arrived, or what was there before
            held[number] = arrived[-1] if arrived and held[number - 1] == () else held[number - 1]
    return held
