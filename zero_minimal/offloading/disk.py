"""Disk: a host that keeps its shards in a file, and no more than three of them in memory (the NVMe
tier of ZeRO-Infinity, arXiv:2104.07857).

The file holds all of a rank's shards: gradient, master, and each tensor of the optimizer's state.
They pass through buffers of one shard each (read_ahead.py): while the host updates a shard, the
next is read and the one before is written. disk_set_up.py makes the file and the buffers.

    bytes a step, for each 16-bit parameter whose state is here, with Adam:
    2 are written when its gradient comes; at the update 14 are read and 12 written
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import cloudpickle
import torch
from torch import Tensor, nn

from zero_minimal.core import optimizers
from zero_minimal.offloading.disk_set_up import Asked, prepare
from zero_minimal.offloading.files import Buffer
from zero_minimal.offloading.host_link import Parcel
from zero_minimal.offloading.offloaded_state import Kept, Shard, resident_bytes, stand_in


@dataclass(eq=False)
class Small:
    """Takes the place of a shard while an optimizer is made."""

    master: nn.Parameter  # [1]
    group_index: int


class OnDisk(Kept):
    """Keeps in a file what the next class (HostState) keeps in memory.

    disk_set_up.prepare() sets .files, a ReadAhead, made by .lanes; .places, a Stretch for each
    shard, by number; .budget.
    """

    lanes: type  # ReadAhead, read_ahead.py
    lent: dict[str, Tensor] = {}  # the state of the shard that is in memory, by name

    def in_turn(self, numbers: list[int] | None = None) -> Iterator[Shard]:
        """The shards. Each is in memory until the next is asked for; changes to it are kept."""
        shards = [self.shards[number] for number in numbers or self.shards]
        buffers = self.files.through([shard.place for shard in shards])
        for buffer, shard in zip(buffers, shards, strict=True):  # buffers first, to run to its end
            self._lend(shard, buffer)
            yield shard
            self._take_back(shard)

    # between a buffer, and the host's optimizer

    def _lend(self, shard: Shard, buffer: Buffer) -> None:
        """Let master, gradient and state be views of the buffer."""
        views = {name: shard.place.view(buffer.memory, name) for name in shard.place.parts}
        shard.gradient, shard.master.data = views.pop("gradient"), views.pop("master")
        state = self._state(shard)
        state.update({name: view for name, view in views.items() if name in state})
        self.lent = views

    def _take_back(self, shard: Shard) -> None:
        """Put stand-ins in their place. State that the optimizer has made goes to the buffer."""
        state, views = self._state(shard), self.lent
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != shard.master.shape:
                continue
            if name not in views or views[name].dtype != value.dtype:
                raise RuntimeError(f"the optimizer keeps {name!r} of {value.dtype} for each "
                                   "element, which it did not in the steps that were tried at the "
                                   "start: there is no room for it in the file")
            if value is not views[name]:
                views[name].copy_(value)
            state[name] = stand_in(value.numel(), value.dtype)
        shard.gradient = stand_in(shard.place.numel, shard.dtype)
        shard.master.data = stand_in(shard.place.numel, shard.master.dtype)

    def _state(self, shard: Shard) -> dict:
        return self.optimizer.state[shard.master] if self.optimizer else {}

    # what Kept asks for, and the host's orders

    def keep(self, parcel: Parcel, number: int, group_index: int) -> None:
        super().keep(parcel, number, group_index)
        shard, buffer = self.shards[number], self.files.free_buffer()
        shard.place = self.places[number]
        shard.place.view(buffer.memory, "master").copy_(shard.master.data)
        self._take_back(shard)
        self.files.begin_to_write(shard.place, buffer)

    def make_optimizer(self, parcel: Parcel, pickled: bytes) -> None:
        """Some optimizers make state for each element at once. That of all shards must not be in
        memory at once: so make one over parameters of one element, and its state shard by shard."""
        kind, options, groups = cloudpickle.loads(pickled)
        self.shards = dict(sorted(self.shards.items()))
        small = {number: Small(nn.Parameter(torch.zeros(1)), shard.group_index)
                 for number, shard in self.shards.items()}
        self.optimizer = optimizers.over_shards(kind, options, groups, list(small.values()))
        begins_with_state = any(self.optimizer.state.get(each.master) for each in small.values())
        self.optimizer.state.clear()
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [shard.master for shard in self.shards.values()
                               if shard.group_index == index]
        for shard in self.in_turn() if begins_with_state else ():
            own = kind([groups[shard.group_index] | {"params": [shard.master]}], **options)
            self.optimizer.state[shard.master].update(own.state.get(shard.master, {}))

    def gradient(self, parcel: Parcel, number: int, adds: bool) -> None:
        """A gradient shard has come, and goes to the file; adds: it is added to the one there."""
        shard, gradient = self.shards[number], parcel.tensor
        if adds and shard.has_gradient:
            gradient = self.stored(number, "gradient").add_(gradient)
        self.files.write_now(shard.place, "gradient", gradient)
        shard.has_gradient = True
        self.bus.emptied(parcel)

    def stored(self, number: int, name: str | None) -> Tensor:
        return self.files.read_now(self.shards[number].place, name or "master")

    def gradients(self) -> Iterator[Tensor]:
        return (self.stored(number, "gradient") for number in self.shards)

    @contextlib.contextmanager
    def at_hand(self, number: int) -> Iterator[Shard]:
        yield from self.in_turn([number])

    def room(self, number: int, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self.lent:
            raise RuntimeError(f"the state that is loaded has {name!r} for each element, and this "
                               "optimizer keeps none: there is no room for it in the file. Give "
                               "it the options of the one that was saved")
        return self.lent[name]

    def update(self, parcel: Parcel, options: list[dict], scale) -> None:
        super().update(parcel, options, scale)
        self.budget.check()

    def on_disk(self, parcel: Parcel, asked: Asked) -> None:
        """The first order."""
        self.bus.send((prepare(self, asked),))

    def memory(self, parcel: Parcel) -> None:
        """Send the bytes of the buffers, and the resident bytes of the process."""
        buffers = sum(buffer.memory.nbytes for buffer in self.files.buffers)
        self.bus.send(((buffers, resident_bytes()),))

    def moved(self, parcel: Parcel) -> None:
        """Send bytes of the file: kept, read and written so far; and of memory: what the program
        takes, the budget, and the most that was used of it."""
        kept = sum(place.size for place in self.places.values())
        self.bus.send(({"kept": kept, "read": self.files.read, "written": self.files.written,
                        "program": self.budget.program, "budget": self.budget.limit,
                        "used": self.budget.highest()},))
