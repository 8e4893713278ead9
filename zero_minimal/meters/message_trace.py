"""Message trace: each message that a rank sends or receives (send, recv), and what the rank holds meanwhile.

    with Messages() as messages:
        ring.all_reduce(tensor)
    messages.sent_bytes, messages.log, messages.states      and messages.record, to draw them: pictures/ring_chart.py

It wraps torch.distributed's send, isend and recv. At each send it records the whole tensor of which the message is a
part: so the states of a ring of N ranks are what a rank holds before each of its steps, and at the end. Memory that is
not yet written reads as NaN.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

DOORS = ("send", "isend", "recv")
MOST_ELEMENTS = 1000  # of a tensor whose states are recorded, for pictures


class Message(NamedTuple):
    """One message. `chunk`: its number in the whole tensor; None if it comes from or goes to a scratch tensor."""

    kind: str  # "send" or "receive"
    peer: int
    bytes: int
    chunk: int | None


class Messages:
    """Watches this rank's messages while it is open. Tensors are on the CPU.

    log: the Messages, in order.
    states: the whole tensor, flat, as a list of numbers: before each send, and when this is closed.
    """

    def __enter__(self):
        self.log: list[Message] = []
        self.states: list[list[float]] = []
        self._whole = None
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        fill_new_memory_with_nan(True)
        self._originals = {name: getattr(dist, name) for name in DOORS}
        for name in DOORS:
            setattr(dist, name, self._watched(name))
        return self

    def __exit__(self, *error):
        for name, original in self._originals.items():
            setattr(dist, name, original)
        fill_new_memory_with_nan(self._deterministic)
        self._note_state()

    @property
    def record(self) -> dict:
        """{"log", "states"}, which can be sent to another process."""
        return {"log": self.log, "states": self.states}

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent."""
        return sum(message.bytes for message in self.log if message.kind == "send")

    def _watched(self, name: str):
        def door(tensor, peer, *args, **kwargs):
            kind = "receive" if name == "recv" else "send"
            whole = tensor if tensor._base is None else tensor._base
            chunk = None
            if tensor._base is not None:
                chunk = tensor.storage_offset() // max(1, tensor.numel())
                self._whole = whole
            if kind == "send":
                self._note_state()
            self.log.append(Message(kind, peer, tensor.nbytes, chunk))
            return self._originals[name](tensor, peer, *args, **kwargs)

        return door

    def _note_state(self) -> None:
        if self._whole is not None and self._whole.numel() <= MOST_ELEMENTS:
            self.states.append(self._whole.flatten().tolist())


def fill_new_memory_with_nan(on: bool) -> None:
    """torch.use_deterministic_algorithms does this, too, but first loads torch's compiler, which takes seconds."""
    torch._C._set_deterministic_algorithms(on)


def steps(records: list[dict]) -> tuple[list, list]:
    """The steps of an algorithm in which every rank sends one message per step, from each rank's `record`.

    Returns, for draw_ring of pictures/ring_chart.py: states [step][rank][chunk], and sends [step][rank], the chunk
    that is sent then.
    """
    sent = [[message.chunk for message in record["log"] if message.kind == "send"] for record in records]
    states = zip(*(record["states"] for record in records), strict=True)
    return list(map(list, states)), list(map(list, zip(*sent, strict=True)))


def pipeline(records: list[dict]) -> tuple[list, list]:
    """The steps of a broadcast along a ring, from each rank's `record`; returns the same as `steps`.

    A chunk takes one step from a rank to the next; a rank sends one chunk per step, in the order of its log, and only
    once it has it. The root is the rank that receives nothing.
    """
    world_size = len(records)
    root = next(rank for rank, record in enumerate(records) if all(m.kind == "send" for m in record["log"]))
    values = records[root]["states"][0]
    came = {root: [0] * len(values)}  # {rank: the step after which it has each chunk}
    sent = {}
    for distance in range(world_size):
        rank, clock = (root + distance) % world_size, 0
        for message in records[rank]["log"]:
            if message.kind == "send":
                clock = max(clock, came[rank][message.chunk]) + 1
                came.setdefault(message.peer, [0] * len(values))[message.chunk] = clock
                sent[rank, clock - 1] = message.chunk
    count = max(map(max, came.values()))
    states = [[[value if came[rank][chunk] <= step else math.nan for chunk, value in enumerate(values)]
               for rank in range(world_size)] for step in range(count + 1)]
    return states, [[sent.get((rank, step)) for rank in range(world_size)] for step in range(count)]
