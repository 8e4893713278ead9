"""Double buffer trace: two constant buffers as they are filled, travel and are unpacked, in order.

    with Trays(buffers) as trays:
        all_reduce(tensors, trays)         # trays stand for the buffers
    trays.record["events"]

The clock is what the rank does, not time: so any machine sees the same. Which part of which tensor a load holds is read
off the buffer when its collective begins. So `tensors` must hold numbers that tell them apart: numbered() makes such.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_minimal.core import seams, work

EVENTS = (
    "fill",  # the buffer was taken, and will be sent next
    "send",  # its collective has begun
    "wait",  # the rank waits for it
    "unpack",  # it is back, and its result is read
    "free",  # that is done
)


def numbered(sizes: Sequence[int]) -> list[Tensor]:
    """Tensors of so many elements, of which number k holds k and nothing else, on every rank: so does their mean."""
    return [torch.full((size,), float(number)) for number, size in enumerate(sizes, 1)]


class Trays:
    """Stands for two constant buffers on this rank, and watches them while it is open.

    record: {"elements": of a buffer, "ranks": how many share it, "events": [one of EVENTS, number of the buffer or None
    for one that is none of the two, number of the load from 0], "loads": [load][piece] of [number in it, how often]}.
    """

    def __init__(self, buffers):
        self._watched, self._place, self._load = buffers, None, -1
        self._pending: list = []
        self.record: dict = {"elements": buffers.elements, "ranks": dist.get_world_size(buffers.group), "events": [],
                             "loads": []}

    def __getattr__(self, name: str):
        return getattr(self._watched, name)

    def __enter__(self):
        self._listening = seams.heard_by("collective", self._hear)
        self._listening.__enter__()
        return self

    def __exit__(self, *error):
        self._listening.__exit__(*error)
        for pending in self._pending:  # what nobody has waited for would meet later messages
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
        """Of the buffer in which it begins."""
        return next((number for number, buffer in enumerate(self._watched.buffers)
                     if 0 <= tensor.data_ptr() - buffer.data_ptr() < buffer.nbytes), None)

    def _hear(self, moment: str, call: work.Call) -> None:
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
