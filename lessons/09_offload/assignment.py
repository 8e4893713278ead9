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

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zero_minimal.core import collectives, optimizers, precision, replicas, seams
from zero_minimal.offloading.disk import OnDisk
from zero_minimal.offloading.files import Buffer, Stretch
from zero_minimal.offloading.host_link import Parcel
from zero_minimal.offloading.offloaded_state import Kept, Shard, stand_in
from zero_minimal.offloading.rank_side import RankSide, options_of
from zero_minimal.offloading.read_ahead import Lanes
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

# ------------------------------------------------------------------------------------- on the host


class ReadAhead(Lanes):
    """Stretches of a file pass through the lanes, one after the other."""

    def through(self, stretches: Sequence[Stretch]) -> Iterator[Buffer]:
        """Yields the buffer of each stretch in turn. The caller's changes are written, from
        stretch.changes on. Raises: what the file raises."""
        # step 5: yields, for each stretch in its turn, the buffer that has it. While the caller has
        # one, the next is being read (no more than that one), and the one before is being written.
        # After the last one nothing is left to begin: all changes are in the file, or on their way
        # to it.
        # - self._begin_to_read(stretch): a Future, whose result() waits and is the buffer. It calls
        #   _read in a thread.
        # - Lanes, in read_ahead.py: read that class alone, since the solution stands below it
        raise NotImplementedError("step 5: through")

    def _read(self, stretch: Stretch, buffer: Buffer) -> Buffer:
        """In the reading thread: wait for writes that are still under way, then read."""
        # step 5: buffer.memory begins with what the file has at the stretch, and the buffer is
        # returned. Nothing was read that is still on its way to the file, and nothing was
        # overwritten that is still on its way from this buffer.
        # - buffer.memory: uint8 [size of the largest stretch]
        # - buffer.written, stretch.written: a Future each, of their last way to the file; result()
        #   waits
        # - stretch.start, stretch.size: first byte in the file; bytes
        # - self.file.read(begin, memory): returns when all of memory is filled. (self.read is
        #   counted elsewhere.)
        raise NotImplementedError("step 5: _read")

    def begin_to_write(self, stretch: Stretch, buffer: Buffer) -> None:
        """Write a buffer's stretch, from its changes on."""
        # step 5: what buffer.memory has of the stretch, from stretch.changes on, is on its way to
        # where it belongs in the file: buffer.written and stretch.written are that Future.
        # self.written has counted its bytes. Nobody has waited.
        # - stretch.changes: the byte of the stretch from which on an update changes it
        # - self.writer.submit(function, *arguments): calls it in the writing thread; a Future
        # - self.file.write(begin, memory): returns when all of memory is written
        raise NotImplementedError("step 5: begin_to_write")


class HostState(Kept):
    """Masters, gradients and optimizer state of a rank's shards, and the update."""

    def keep(self, parcel: Parcel, number: int, group_index: int) -> None:
        """At the start a bucket's shard comes: keep its master here."""
        # step 1: self.shards[number] is a Shard of what came: its dtype; group_index; the master,
        # an nn.Parameter, in fp32 if the shard is in 16 bit, else in the shard's own dtype; a
        # gradient of zeros in the shard's dtype. None of it lies in the parcel's buffer, and that
        # can be filled again.
        # - parcel.tensor [n]: what came, in a buffer of the bus
        # - precision.master_of(shard): an nn.Parameter in fp32 with these values, for a shard of 16
        #   bits
        # - Shard(dtype, group_index, master, gradient): master and gradient have [padded / N]
        #   elements
        # - self.bus.emptied(parcel): the buffer can be filled again
        raise NotImplementedError("step 1: keep")

    def gradient(self, parcel: Parcel, number: int, adds: bool) -> None:
        """A gradient shard has come; adds: it is added to that of earlier micro-batches."""
        # step 2: shard.gradient is what came; if `adds` and shard.has_gradient, the sum of what
        # came since the last forget(). shard.has_gradient is True. The parcel's buffer can be
        # filled again.
        # - self.shards: {number: Shard}
        raise NotImplementedError("step 2: gradient")

    @torch.no_grad()
    def update(self, parcel: Parcel, options: list[dict], scale: precision.Scale) -> None:
        """Update all shards; each goes back as soon as it is done, in the parameters' dtype."""
        # step 1: the optimizer's groups have these options. Each shard of self.in_turn() was in
        # memory for its turn: its master was updated with its gradient times `scale`, computed in
        # the master's dtype, and was sent: one parcel a shard, in that order, in shard.dtype, its
        # words ("parameters",). shard.gradient is as it was.
        # - parcel: words alone, and no buffer to be emptied
        # - self.optimizer.param_groups: a list of dicts, by shard.group_index; `options` has a dict
        #   for each
        # - scale: None, a number or a tensor. None alone says that there is none: 0 counts.
        # - self.in_turn(): all shards. Use a shard before you ask for the next.
        # - optimizers.update(optimizer, group, master, gradient): one optimizer step on this master
        #   alone; `group` is a dict
        # - self.bus.send(words, tensor): to the rank. It has copied the tensor when it returns.
        raise NotImplementedError("step 1: update")


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
        # step 1: the host has been sent ("keep", bucket.away.number, bucket.group_index) with this
        # rank's shard. bucket.master, which you set, is an nn.Parameter of the master's shape and
        # dtype (as in keep), without memory of its own. RankSide.own then calls bucket.away.know.
        # - self.host.send(words, tensor): to the host; words alone will do, too. It has copied the
        #   tensor when it returns.
        # - bucket.parameter_shard [padded / N], bucket.dtype
        # - stand_in(numel, dtype): a tensor [numel] in the memory of one element
        raise NotImplementedError("step 1: _hand_over")

    def _leave(self, bucket, gradient_shard: Tensor) -> None:
        """Send a gradient shard to the host."""
        # step 2: the host has been sent ("gradient", bucket.away.number, self.adds) with this
        # gradient shard. Nobody has waited until it is there.
        raise NotImplementedError("step 2: _leave")

    def _returned(self) -> Iterator:
        """Let the host update, and yield each bucket when its parameters are back."""
        # step 3: the host has been sent ("update", options_of(self.optimizer), scale), the scale as
        # a number, None, or a tensor on the CPU. Yields each bucket of self.in_turn(), in that
        # order, as soon as bucket.parameter_shard holds what came back for it, the buffer can be
        # filled again, bucket.away knows the new values, and autograd was told.
        # self.optimizer._opt_called is True before the first parcel is asked for: Offloaded3 asks
        # for the others in its next forward.
        # - self.gradient_scale: None, a number or a tensor
        # - self.host.receive(): waits for the next parcel. self.host.emptied(parcel): its buffer
        #   can be filled again.
        # - bucket.away.know(bucket): the rank's shard is what the host has
        # - seams.tell("update_ends", bucket): its parameters were changed
        raise NotImplementedError("step 3: _returned")


class GatheredAfter:
    """The step of stages 1 and 2: gather parameters that are back."""

    @torch.no_grad()
    def step(self) -> None:
        """Let the host update this rank's shards, and gather all ranks': the ranks gather a bucket
        while the next crosses the bus and the host updates the one after that."""
        # step 4: every rank has all updated parameters, and nothing is on its way. A bucket was
        # gathered while the next crossed the bus. Before the host was asked, backward was complete,
        # and a user's edits went along. Running statistics are rank 0's. Another backward before
        # zero_grad() is refused.
        # - self.reducer.complete(): ends what is left of backward
        # - seams.tell("update_begins", bucket): tells who listens that the bucket changes now
        # - precision.keep_changes(bucket): edits of its parameters go to the host
        # - self._returned(): each bucket, as soon as it is back
        # - collectives.all_gather(output [N·s], input [s], group=…, async_op=True): from
        #   bucket.parameter_shard to bucket.parameters. Returns a Work at once; work.wait().
        # - replicas.broadcast_statistics(model, group): running statistics of rank 0, to all ranks
        # - self.reducer.needs_zero_grad: while it is True, backward raises; zero_grad() sets it
        #   back
        raise NotImplementedError("step 4: step")


class Offloaded1(Offloaded, GatheredAfter, Stage1):
    __doc__ = RankSide.__doc__
    adds = False  # whole gradients add up on the rank
    reduced = None  # the bucket whose reduction is under way, or done

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)  # waits for the bucket before
        self.reduced = bucket

    def _wait(self):
        # step 2: nothing is being reduced. If self.reduced is a bucket, its gradient shard has
        # left, and self.reduced is None.
        # - super()._wait(): the stage's. It waits, and the shard of the mean is in
        #   bucket.gradient_shard [padded / N].
        raise NotImplementedError("step 2: _wait")


class LeavesAtOnce:
    """Gradients of stages 2 and 3: a shard that has left is freed."""

    def _wait(self):
        # step 2: nothing is being reduced. If something was, the gradient shard of that bucket has
        # left, and no memory of it is here: bucket.gradient_shard is None.
        # - self.reducing: None, or what is under way; self.reducing.bucket
        # - super()._wait(): the stage's, as in Offloaded1. It sets self.reducing to None.
        raise NotImplementedError("step 2: _wait")


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
