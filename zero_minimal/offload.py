"""Offload: master weights, momentum, variance and the update are on the rank's host (ZeRO-Offload,
arXiv:2101.06840, at each stage of ZeRO).

Memory a rank, for Ψ parameters on N ranks, in 16 bit:

    Offloaded1   2Ψ   parameters + 2Ψ gradients     the host: 4Ψ/N masters + 8Ψ/N state + 2Ψ/N
    Offloaded2   2Ψ   parameters + buckets                    gradients
    Offloaded3   2Ψ/N parameters + units, buckets
and four buffers, each of one bucket's shard, through which all passes (offloading/host_link.py).

Over the bus, a step and rank; the traffic between the ranks stays the same:

    backward     a bucket is reduced, its gradient shard leaves for the host     2Ψ/N bytes
    step         the host updates its fp32 masters with torch's own optimizer,
                 and sends the parameters back in 16 bit                         2Ψ/N bytes
In fp32 4Ψ/N each way. Both overlap with work: a gradient shard crosses while backward makes the
next bucket; a parameter shard while the host updates the next and the ranks gather the one before.
Stage 3 gathers units when they work again, so there the shards cross during the next forward.

With k micro-batches a step, gradients cross once at stage 1, which adds them up on the rank, and k
times at stages 2 and 3, where the host adds them up. To cross once there would keep 2Ψ/N bytes of
gradients on the rank: k times the traffic saves that memory.

On a CPU the host is a process beside the rank (offloading/host_process.py); on a GPU it is a
thread, with pinned memory. The results equal the plain stage's, bit for bit; with a GPU they equal
those of an update on the CPU.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zero_minimal.core import collectives, optimizers, precision, replicas, seams
from zero_minimal.offloading.disk import OnDisk
from zero_minimal.offloading.host_link import Parcel
from zero_minimal.offloading.offloaded_state import Kept, Shard, stand_in
from zero_minimal.offloading.rank_side import RankSide, options_of
from zero_minimal.offloading.read_ahead import ReadAhead
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

# ------------------------------------------------------------------------------------- on the host


class HostState(Kept):
    """Masters, gradients and optimizer state of a rank's shards, and the update."""

    def keep(self, parcel: Parcel, number: int, group_index: int) -> None:
        """At the start a bucket's shard comes: keep its master here."""
        own = parcel.tensor.clone()
        master = precision.master_of(own) if own.element_size() < 4 else nn.Parameter(own)
        self.shards[number] = Shard(own.dtype, group_index, master, torch.zeros_like(own))
        self.bus.emptied(parcel)

    def gradient(self, parcel: Parcel, number: int, adds: bool) -> None:
        """A gradient shard has come; adds: it is added to that of earlier micro-batches."""
        shard = self.shards[number]
        if adds and shard.has_gradient:
            shard.gradient += parcel.tensor
        else:
            shard.gradient.copy_(parcel.tensor)
        shard.has_gradient = True
        self.bus.emptied(parcel)

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


# ------------------------------------------------------------------------------------- on the rank


class Offloaded(RankSide):
    """What crosses the bus, for Offloaded1 to Offloaded3. RankSide says how to use them."""

    kinds = HostState, DiskState
    adds = True  # whether gradients of several passes add up on the host

    def _hand_over(self, bucket):
        """Let the host keep() this rank's shard, and its master, once, at the start."""
        number = bucket.away.number
        self.host.send(("keep", number, bucket.group_index), bucket.parameter_shard)
        dtype = torch.float32 if bucket.dtype.itemsize < 4 else bucket.dtype
        bucket.master = nn.Parameter(stand_in(bucket.parameter_shard.numel(), dtype))

    def _leave(self, bucket, gradient_shard: Tensor) -> None:
        """Send a gradient shard to the host."""
        self.host.send(("gradient", bucket.away.number, self.adds), gradient_shard)

    def _returned(self) -> Iterator:
        """Let the host update, and yield each bucket when its parameters are back."""
        scale = self.gradient_scale
        scale = scale.cpu() if isinstance(scale, Tensor) else scale
        self.host.send(("update", options_of(self.optimizer), scale))
        self.optimizer._opt_called = True  # a scheduler asks whether the optimizer came first
        for bucket in self.in_turn():
            parcel = self.host.receive()
            bucket.parameter_shard.copy_(parcel.tensor)
            self.host.emptied(parcel)
            bucket.away.know(bucket)
            seams.tell("update_ends", bucket)
            yield bucket


class GatheredAfter:
    """The step of stages 1 and 2: gather parameters that are back."""

    @torch.no_grad()
    def step(self) -> None:
        """Let the host update this rank's shards, and gather all ranks': the ranks gather a bucket
        while the next crosses the bus and the host updates the one after that."""
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
        self.reducer.needs_zero_grad = True


class Offloaded1(Offloaded, GatheredAfter, Stage1):
    __doc__ = RankSide.__doc__
    adds = False  # whole gradients add up on the rank
    reduced = None  # the bucket whose reduction is under way, or done

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
    __doc__ = RankSide.__doc__


class Offloaded3(Offloaded, LeavesAtOnce, Stage3):
    __doc__ = RankSide.__doc__

    def in_turn(self):
        return self.buckets[::-1]  # forward first needs the ones that backward finished last

    @torch.no_grad()
    def step(self) -> None:
        """Let the host update its shards. All but the first come back during the next forward."""
        self._release_all()
        self.reducer.complete()
        for bucket in self.buckets:
            seams.tell("update_begins", bucket)
            precision.keep_changes(bucket)
        self.returning.begin(self._returned(), self.buckets)
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = True

    def _gather(self, unit):
        self.returning.take_until_back(unit.buckets)
        super()._gather(unit)

    def _release_all(self):
        self.returning.take_all()
        super()._release_all()


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Offloaded2)
