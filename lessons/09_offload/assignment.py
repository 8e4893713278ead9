"""Offload: masters, momentum, variance and the update live on the rank's host (ZeRO-Offload,
arXiv:2101.06840, under the stages of ZeRO).

Memory a rank, for Ψ parameters on N ranks, in 16 bit:

    Offloaded1   2Ψ   parameters + 2Ψ gradients     the host: 4Ψ/N masters + 8Ψ/N state + 2Ψ/N
    Offloaded2   2Ψ   parameters + buckets                    gradients
    Offloaded3   2Ψ/N parameters + units, buckets
and four buffers of one bucket's shard, through which all goes (offloading/host_link.py).

Over the bus, a step and rank; what the ranks send each other stays as it is:

    backward     a bucket is reduced, its gradient shard leaves for the host     2Ψ/N bytes
    step         the host updates its fp32 masters with torch's own optimizer,
                 and sends the parameters back in 16 bit                         2Ψ/N bytes
In fp32 4Ψ/N each way. Both overlap: a gradient shard is on its way while backward makes the next
bucket; a parameter shard while the host updates the next and the ranks gather the one before. At
stage 3 units are gathered when they work again: there all goes on beside the next forward.

With k micro-batches a step gradients cross once at stage 1, which adds them up where they are, and
k times at stages 2 and 3, where the host adds them up. Crossing once would keep 2Ψ/N bytes of them
on the rank: k times more on the bus is the price of none.

The host of a rank on a CPU is a process beside it (offloading/host_process.py), that of a rank with
a GPU a thread and pinned memory. The bits are those of the stage by itself; with a GPU those of an
update on the CPU.
"""

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import cloudpickle
import torch
from torch import Tensor, nn

from zero_minimal.core import collectives, optimizers, precision, replicas, seams
from zero_minimal.offloading import disk_set_up
from zero_minimal.offloading.async_fetch import AsyncFetch
from zero_minimal.offloading.disk import OnDisk
from zero_minimal.offloading.files import Buffer, File, Stretch
from zero_minimal.offloading.host_link import Bus, Parcel, speed
from zero_minimal.offloading.host_process import Host
from zero_minimal.offloading.offloaded_state import (
    Kept,
    OffloadedState,
    Shard,
    all_here,
    put_all,
    refuse_alone,
    stand_in,
)
from zero_minimal.offloading.read_ahead import BUFFERS
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

# ------------------------------------------------------------------------------------- on the host


class ReadAhead:
    """Two lanes, to a file and from it, and buffers that take turns.

    Args:
        file: its read(begin, memory) and write(begin, memory) return when that is done.
        size: bytes of the largest stretch.
    Counts what it has begun to move: .read and .written, in bytes.
    """

    def __init__(self, file: File, size: int):
        self.file = file
        self.buffers = [Buffer(size) for _ in range(BUFFERS)]
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.read = self.written = 0
        self._turns = itertools.cycle(self.buffers)

    def through(self, stretches: Sequence[Stretch]) -> Iterator[Buffer]:
        """Of each stretch in its turn the buffer that has it. What the caller changes in it is
        written from stretch.changes on. Raises: what the file raises."""
        # step 5: yields, for each stretch in its turn, the buffer that has it. While the caller has
        # one, the next is being read (no more than that one), and the one before is being written.
        # After the last one nothing is left to begin: all changes are in the file, or on their way
        # to it.
        raise NotImplementedError("step 5: through")

    def _begin_to_read(self, stretch: Stretch) -> Future:
        """Its result will be the buffer that has the stretch."""
        self.read += stretch.size
        return self.reader.submit(self._read, stretch, next(self._turns))

    def _read(self, stretch: Stretch, buffer: Buffer) -> Buffer:
        """In the reading thread: wait for what is still on its way to the file."""
        # step 5: buffer.memory begins with what the file has at the stretch, and the buffer is
        # returned. Nothing was read that is still on its way to the file, and nothing was
        # overwritten that is still on its way from this buffer.
        raise NotImplementedError("step 5: _read")

    def begin_to_write(self, stretch: Stretch, buffer: Buffer) -> None:
        """A buffer's stretch, from its changes on."""
        # step 5: what buffer.memory has of the stretch, from stretch.changes on, is on its way to
        # where it belongs in the file: buffer.written and stretch.written are that Future.
        # self.written has counted its bytes. Nobody has waited.
        raise NotImplementedError("step 5: begin_to_write")

    # without a thread

    def free_buffer(self) -> Buffer:
        """The next in turn, when nothing in it is needed any more."""
        buffer = next(self._turns)
        buffer.written.result()
        return buffer

    def read_now(self, stretch: Stretch, name: str) -> Tensor:
        """One tensor of a stretch, [numel], in a buffer: until two others were asked for."""
        stretch.written.result()
        view = stretch.view(self.free_buffer().memory, name)
        self.read += view.nbytes
        self.file.read(stretch.start + stretch.parts[name][0], view)
        return view

    def write_now(self, stretch: Stretch, name: str, tensor: Tensor) -> None:
        """One tensor of a stretch."""
        self.written += tensor.nbytes
        self.file.write(stretch.start + stretch.parts[name][0], tensor)


class HostState(Kept):
    """Masters, gradients and optimizer state of a rank's shards, and the update."""

    def keep(self, parcel: Parcel, number: int, group_index: int) -> None:
        """Masters live here: a bucket's shard has come, at the start."""
        # step 1: self.shards[number] is a Shard of what came: its dtype; group_index; the master,
        # an nn.Parameter, in fp32 if the shard is in 16 bit, else in the shard's own dtype; a
        # gradient of zeros in the shard's dtype. None of it lies in the parcel's buffer, and that
        # can be filled again.
        raise NotImplementedError("step 1: keep")

    def make_optimizer(self, parcel: Parcel, pickled: bytes) -> None:
        """The user's optimizer, over these masters."""
        optimizer_class, options, groups = cloudpickle.loads(pickled)
        self.shards = dict(sorted(self.shards.items()))  # in the order of zero.in_turn()
        self.optimizer = optimizers.over_shards(
            optimizer_class, options, groups, list(self.shards.values())
        )

    def gradient(self, parcel: Parcel, number: int, adds: bool) -> None:
        """A gradient shard has come; adds: to that of earlier micro-batches."""
        # step 2: shard.gradient is what came; if `adds` and shard.has_gradient, the sum of what
        # came since the last forget(). shard.has_gradient says so. The parcel's buffer can be
        # filled again.
        raise NotImplementedError("step 2: gradient")

    def forget(self, parcel: Parcel) -> None:
        """zero_grad(): the next gradients are the first again."""
        for shard in self.shards.values():
            shard.has_gradient = False

    @torch.no_grad()
    def update(self, parcel: Parcel, options: list[dict], scale: precision.Scale) -> None:
        """Update all shards; each goes back as soon as it is done, in the parameters' dtype."""
        # step 1: the optimizer's groups have these options. Each shard of self.in_turn() was in
        # memory for its turn: its master was updated with its gradient times `scale`, computed in
        # the master's dtype, and was sent: one parcel a shard, in that order, its words
        # ("parameters",). Shard.gradient is as it was.
        raise NotImplementedError("step 1: update")


class DiskState(OnDisk, HostState):
    """The same in a file: only a few shards are in memory."""

    lanes = ReadAhead


def serve(bus: Bus, kind: type = HostState) -> None:
    """What a host does: what it is told, one parcel after the other."""
    state = kind(bus)
    while (parcel := bus.receive()).words[0] != "end":
        order, *words = parcel.words
        getattr(state, order)(parcel, *words)


# ------------------------------------------------------------------------------------- on the rank


class Offloaded:
    """What Offloaded1 to Offloaded3 have in common. They are used like Stage1 to Stage3.

    Args:
        bus: bytes a second in each direction; None: as fast as it goes.
        disk: a folder, for a host that keeps all in a file there (offloading/disk.py).
        host_budget: bytes of memory that its process may then have (offloading/memory_budget.py).
        The others are the stage's.
    zero.optimizer holds the options (lr, …), which go along with each update, so that a scheduler
    attaches to it; its state is on the host. Refused are its step hooks, and reduced_gradients().
    Raises: what the stage raises. On all ranks OSError if the disk has no room, and ValueError for
        a budget that is too small. RuntimeError, at the next use of the bus, if the host is gone.
    """

    host: Host | None = None
    adds = True  # whether gradients of several passes add up on the host

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, bus: float | None = None,
        disk: str | None = None, host_budget: int | None = None, **options,
    ):
        self.bandwidth = speed(bus)
        own = {name: value for name, value in options.items() if name not in STAGE_OPTIONS}
        self.disk = disk_set_up.asked(disk, host_budget, model, optimizer_class, own, options)
        super().__init__(model, optimizer_class, **options)
        chosen = cloudpickle.dumps((optimizer_class, own, _options_of(self.optimizer)))
        self.host.send(("make_optimizer", chosen))
        refuse_alone(self.optimizer)

    def _start_host(self, device: torch.device) -> None:
        """It ends with the stage."""
        largest = max(bucket.padded // self.world_size * bucket.dtype.itemsize
                      for bucket in self.buckets)
        serving = functools.partial(serve, kind=DiskState) if self.disk else serve
        self.host = Host(serving, largest, device, self.bandwidth)
        weakref.finalize(self, self.host.end)
        self.returning = AsyncFetch(self.host)
        if self.disk:
            disk_set_up.set_up(self, self.disk, self.in_turn())

    def own(self, bucket):
        """What the stage keeps of a bucket, but its master."""
        super().own(bucket)
        if bucket.trained:
            if self.host is None:
                self._start_host(bucket.parameter_shard.device)
            bucket.away = OffloadedState(self.host, self.in_turn().index(bucket))
            self._hand_over(bucket)
            bucket.away.know(bucket)

    def _hand_over(self, bucket):
        """Masters live on the host: let it keep() this rank's shard, once, at the start."""
        # step 1: the host has been sent ("keep", bucket.away.number, bucket.group_index) with this
        # rank's shard. bucket.master is an nn.Parameter of the master's shape and dtype that has no
        # memory of its own: away.stand_in makes such a tensor.
        raise NotImplementedError("step 1: _hand_over")

    def in_turn(self) -> list:
        """The trained buckets in the order in which the host updates them."""
        return self.buckets

    def _leave(self, bucket, gradient_shard: Tensor) -> None:
        """A gradient shard leaves."""
        # step 2: the host has been sent ("gradient", bucket.away.number, self.adds) with this
        # gradient shard. Nobody has waited until it is there.
        raise NotImplementedError("step 2: _leave")

    def _returned(self) -> Iterator:
        """Let the host update; yields each bucket when its parameters are back."""
        # step 3: the host has been sent ("update", _options_of(self.optimizer), scale), the scale
        # as a number, None, or a tensor on the CPU. Yields each of self.in_turn(), in that order,
        # as soon as bucket.parameter_shard holds what came back for it, the bus's buffer can be
        # filled again, bucket.away knows the new values, and optimizers.tell_autograd was told.
        # self.optimizer._opt_called is True before the first parcel is asked for: Offloaded3 asks
        # for the others in its next forward.
        raise NotImplementedError("step 3: _returned")

    # what needs the gradients asks the host

    def reduced_gradients(self) -> list[Tensor]:
        raise RuntimeError("the gradients have left for the host: clip with "
                           "zero.clip_grad_norm_(), and change one on its way, in "
                           "param.register_hook()")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As at the stage. The host computes the norms of this rank's shards."""
        self.reducer.complete()
        norms, dtype = self.host.ask("norms")
        norms = [norms[bucket.away.number] for bucket in self.buckets]  # sums have an order
        squares = torch.tensor(norms, dtype=dtype, device=self.buckets[0].device).square().sum()
        collectives.all_reduce(squares, op="sum", group=self.group)
        norm = squares.sqrt()
        norm = norm if self.gradient_scale is None else norm * self.gradient_scale
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    def gradients_are_finite(self) -> Tensor:
        """Whether none of this rank's is infinite or NaN, []: what LossScaler asks."""
        self.reducer.complete()
        return torch.tensor(self.host.ask("finite"), device=self.buckets[0].device)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        self.host.send(("forget",))

    def state_dict(self) -> dict:
        """This rank's training state, for a restart with the same number of ranks. It is fetched,
        and the rank grows by all of it while it is kept."""
        with all_here(self):
            return super().state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned on this rank. ValueError if it does not fit."""
        with all_here(self):
            super().load_state_dict(state)
            put_all(self)


class GatheredAfter:
    """The step of stages 1 and 2: parameters that are back are gathered."""

    @torch.no_grad()
    def step(self) -> None:
        """Let the host update this rank's shards, and gather everybody's: a bucket travels between
        the ranks while the next crosses the bus, and the one after that is updated."""
        # step 4: every rank has all updated parameters, and nothing is on its way. A bucket is
        # being gathered while the next crosses the bus. Before the host is asked: backward is
        # complete, and a user's edits went along (precision.keep_changes). Running statistics are
        # rank 0's. A backward before zero_grad is refused.
        raise NotImplementedError("step 4: step")


class Offloaded1(Offloaded, GatheredAfter, Stage1):
    __doc__ = Offloaded.__doc__
    adds = False  # whole gradients add up on the rank
    reduced = None  # the bucket whose reduction is under way, or over

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)  # waits for the bucket before
        self.reduced = bucket

    def _wait(self):
        # step 2: nothing is being reduced. If self.reduced is a bucket, its gradient shard has
        # left, and self.reduced is None.
        raise NotImplementedError("step 2: _wait")


class LeavesAtOnce:
    """Gradients of stages 2 and 3: a shard that has left is freed."""

    def _wait(self):
        # step 2: nothing is being reduced. If something was, the gradient shard of that bucket has
        # left, and no memory of it is here: bucket.gradient_shard is None.
        raise NotImplementedError("step 2: _wait")


class Offloaded2(Offloaded, GatheredAfter, LeavesAtOnce, Stage2):
    __doc__ = Offloaded.__doc__


class Offloaded3(Offloaded, LeavesAtOnce, Stage3):
    __doc__ = Offloaded.__doc__

    def in_turn(self):
        return self.buckets[::-1]  # forward needs those first for which backward came last

    @torch.no_grad()
    def step(self) -> None:
        """Let the host update its shards. All but the first come beside the next forward."""
        self._release_all()
        self.reducer.complete()
        for bucket in self.buckets:
            seams.tell("update_begins", bucket)
        self.returning.begin(self._returned(), self.buckets)
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.spent = True

    def _gather(self, unit):
        self.returning.take_until_back(unit.buckets)
        super()._gather(unit)

    def _release_all(self):
        self.returning.take_all()
        super()._release_all()


# the other options are the optimizer's
STAGE_OPTIONS = ("group", "bucket_bytes", "param_groups", "memory", "units")


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Of each of its groups."""
    return [{name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups]


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Offloaded2)
