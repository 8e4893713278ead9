"""Double buffer trace: when two constant buffers are filled, sent and unpacked, in order.

    with Trays(buffers) as trays:
        all_reduce(tensors, trays)         # trays replace the buffers
    trays.record["events"]

The clock counts the rank's actions, not time: so every machine records the same. When a load's collective begins, its
buffer shows which part of which tensor it holds. So `tensors` must hold distinct numbers: numbered() makes them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_minimal.core import work
from zero_minimal.meters.events import Events

EVENTS = (
    "fill",  # the buffer was taken, to be sent next
    "send",  # its collective has begun
    "wait",  # the rank waits for it
    "unpack",  # the collective is done, and its result is read
    "free",  # the result has been read
)


def numbered(sizes: Sequence[int]) -> list[Tensor]:
    """Tensors of these sizes; every element of tensor k is k on every rank, and so is their mean."""
    return [torch.full((size,), float(number)) for number, size in enumerate(sizes, 1)]


class Trays(Events):
    """Replaces two constant buffers on this rank, and watches them while it is open.

    record: {"elements": of a buffer, "ranks": how many share it, "events": [one of EVENTS, number of the buffer or None
    for any other buffer, number of the load from 0], "loads": [load][piece] of [number in it, how often]}.
    """

    def __init__(self, buffers):
        super().__init__()
        self._watched, self._place, self._load = buffers, None, -1
        self._pending: list = []
        self.record: dict = {"elements": buffers.elements, "ranks": dist.get_world_size(buffers.group), "events": [],
                             "loads": []}

    def __getattr__(self, name: str):
        return getattr(self._watched, name)

    def __exit__(self, *error):
        super().__exit__(*error)
        for pending in self._pending:  # unfinished collectives would mix with later messages
            pending.wait()

    def take(self) -> Tensor:
        buffer = self._watched.take()
        self._load += 1
        self._place = self._number(buffer)
        self._note("fill", self._place, self._load)
        return buffer

    def send(self, pending, then: Callable[[], object]) -> None:
        load, place = self._load, self._place
        self._note("send", place, load)
        self._pending.append(pending)

        def read():
            self._note("unpack", place, load)
            then()
            self._note("free", place, load)

        self._watched.send(_Watched(pending, lambda: self._note("wait", place, load)), read)

    def wait(self) -> None:
        self._watched.wait()

    def _note(self, kind: str, place: int | None, load: int) -> None:
        self.record["events"].append([kind, place, load])

    def _number(self, tensor: Tensor) -> int | None:
        """The number of the buffer in which a tensor begins."""
        return next((number for number, buffer in enumerate(self._watched.buffers)
                     if 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.nbytes), None)

    def hear(self, moment: str, call: work.Call) -> None:
        if moment == "start" and self._load == len(self.record["loads"]):  # the first collective of this load
            values, counts = torch.unique_consecutive(max(call.tensors, key=Tensor.numel), return_counts=True)
            self.record["loads"].append([[round(value), count] for value, count in zip(
                values.tolist(), counts.tolist(), strict=True)])


class _Watched:
    """A Work whose wait() is noted."""

    def __init__(self, pending, note: Callable[[], None]):
        self.pending, self.note = pending, note

    def wait(self) -> None:
        self.note()
        self.pending.wait()
