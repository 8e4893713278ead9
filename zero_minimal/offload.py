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
import weakref
from collections.abc import Iterator

import cloudpickle
import torch
from torch import Tensor, nn

from zero_minimal.core import collectives, optimizers, precision, replicas, seams
from zero_minimal.offloading import disk_set_up
from zero_minimal.offloading.async_fetch import AsyncFetch
from zero_minimal.offloading.disk import OnDisk
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
from zero_minimal.offloading.read_ahead import ReadAhead
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

# ------------------------------------------------------------------------------------- on the host


class HostState(Kept):
    """Masters, gradients and optimizer state of a rank's shards, and the update."""

    def keep(self, parcel: Parcel, number: int, group_index: int) -> None:
        """Masters live here: a bucket's shard has come, at the start."""
        own = parcel.tensor.clone()
        master = precision.master_of(own) if own.element_size() < 4 else nn.Parameter(own)
        self.shards[number] = Shard(own.dtype, group_index, master, torch.zeros_like(own))
        self.bus.emptied(parcel)

    def make_optimizer(self, parcel: Parcel, pickled: bytes) -> None:
        """The user's optimizer, over these masters."""
        optimizer_class, options, groups = cloudpickle.loads(pickled)
        self.shards = dict(sorted(self.shards.items()))  # in the order of zero.in_turn()
        self.optimizer = optimizers.over_shards(
            optimizer_class, options, groups, list(self.shards.values())
        )

    def gradient(self, parcel: Parcel, number: int, adds: bool) -> None:
        """A gradient shard has come; adds: to that of earlier micro-batches."""
        shard = self.shards[number]
        if adds and shard.has_gradient:
            shard.gradient += parcel.tensor
        else:
            shard.gradient.copy_(parcel.tensor)
        shard.has_gradient = True
        self.bus.emptied(parcel)

    def forget(self, parcel: Parcel) -> None:
        """zero_grad(): the next gradients are the first again."""
        for shard in self.shards.values():
            shard.has_gradient = False

    @torch.no_grad()
    def update(self, parcel: Parcel, options: list[dict], scale: precision.Scale) -> None:
        """Update all shards; each goes back as soon as it is done, in the parameters' dtype."""
        for group, its_options in zip(self.optimizer.param_groups, options, strict=True):
            group.update(its_options)
        for shard in self.in_turn():
            gradient = shard.gradient.to(shard.master.dtype)
            if scale is not None:
                gradient = gradient * scale
            group = self.optimizer.param_groups[shard.group_index]
            optimizers.update(self.optimizer, group, shard.master, gradient)
            self.bus.send(("parameters",), shard.master.data.to(shard.dtype))


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
        number = bucket.away.number
        self.host.send(("keep", number, bucket.group_index), bucket.parameter_shard)
        dtype = torch.float32 if bucket.dtype.itemsize < 4 else bucket.dtype
        bucket.master = nn.Parameter(stand_in(bucket.parameter_shard.numel(), dtype))

    def in_turn(self) -> list:
        """The trained buckets in the order in which the host updates them."""
        return self.buckets

    def _leave(self, bucket, gradient_shard: Tensor) -> None:
        """A gradient shard leaves."""
        self.host.send(("gradient", bucket.away.number, self.adds), gradient_shard)

    def _returned(self) -> Iterator:
        """Let the host update; yields each bucket when its parameters are back."""
        scale = self.gradient_scale
        scale = scale.cpu() if isinstance(scale, Tensor) else scale
        self.host.send(("update", _options_of(self.optimizer), scale))
        self.optimizer._opt_called = True  # a scheduler asks whether the optimizer came first
        for bucket in self.in_turn():
            parcel = self.host.receive()
            bucket.parameter_shard.copy_(parcel.tensor)
            self.host.emptied(parcel)
            bucket.away.know(bucket)
            optimizers.tell_autograd(bucket)
            yield bucket

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
        self.reducer.complete()
        for bucket in self.buckets:
            seams.tell("update_begins", bucket)
            precision.keep_changes(bucket)
        gathering = [
            collectives.all_gather(
                bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket,
                async_op=True,
            )
            for bucket in self._returned()
        ]
        for pending in gathering:
            pending.wait()
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.spent = True


class Offloaded1(Offloaded, GatheredAfter, Stage1):
    __doc__ = Offloaded.__doc__
    adds = False  # whole gradients add up on the rank
    reduced = None  # the bucket whose reduction is under way, or over

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)  # waits for the bucket before
        self.reduced = bucket

    def _wait(self):
        super()._wait()
        if self.reduced:
            self._leave(self.reduced, self.reduced.gradient_shard)
            self.reduced = None


class LeavesAtOnce:
    """Gradients of stages 2 and 3: a shard that has left is freed."""

    def _wait(self):
        if self.reducing:
            bucket = self.reducing.bucket
            super()._wait()
            self._leave(bucket, bucket.gradient_shard)
            bucket.gradient_shard = None


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
