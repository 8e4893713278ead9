"""P_os: optimizer state partitioned. A rank updates the shard whose state it holds (section 5.1).

Memory a rank, for Ψ parameters on N ranks:
    fp32     4Ψ parameters + 4Ψ gradients + 8Ψ/N Adam's momentum and variance
    16 bit   2Ψ            + 2Ψ           + 12Ψ/N, of which 4Ψ/N are the fp32 master parameters

Communication plan, a step; what each rank sends:
    start      broadcast rank 0's parameters, once
    backward   reduce-scatter each bucket of gradients as soon as it is complete  Ψ(N−1)/N elements
    step       update its own shard, all-gather the updated parameters           Ψ(N−1)/N elements
Together as much as data parallelism sends, since an all-reduce is a reduce-scatter and then an
all-gather: the update moves in between.
Not counted, since small: running statistics (batch norm) at each step, an order of the buckets
once, and a norm when clipping.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from zero_minimal.core import collectives, precision, replicas
from zero_minimal.core.layout import ALIGNMENT, Bucket
from zero_minimal.core.optimizers import changes_parameters, update
from zero_minimal.core.precision import Scale
from zero_minimal.core.reducer import Hooks, Reducer
from zero_minimal.core.set_up import set_up


def padded_size(elements: int, world_size: int) -> int:
    """`elements`, rounded up so that a vector can be cut into world_size equal shards, each a
    multiple of ALIGNMENT."""
    # step 1: return the smallest multiple of ALIGNMENT * world_size that is not below `elements`.
    # - ALIGNMENT: 16. Shards are multiples of it, so that vectorised kernels treat all shards
    #   alike.
    raise NotImplementedError("step 1: padded_size")


def shard_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's shard, [padded / N], of a vector [padded]: a view, in the same memory."""
    # step 1: return the rank-th of world_size equal parts, in rank order, without a copy.
    raise NotImplementedError("step 1: shard_of")


def over_shards(
    optimizer_class: type[Optimizer], options: dict, groups: list[dict], buckets: list[Bucket]
) -> Optimizer:
    """The user's optimizer, with the user's options and groups, over this rank's shards in place of
    the parameters."""
    # step 1: return the optimizer. It has as many groups as `groups`. Each group keeps every option
    # that the user set; its parameters are the bucket.master of all buckets of this group, and no
    # others.
    # - bucket.group_index: the number of the bucket's group in `groups`
    # - bucket.master [padded / N]: what the optimizer updates. In fp32 it is the shard itself, in
    #   16 bits what master_of() made of the shard.
    raise NotImplementedError("step 1: over_shards")


@changes_parameters
def update_shard(
    optimizer: Optimizer, bucket: Bucket, gradient_scale: precision.Scale = None
) -> None:
    """Step on one bucket's shard alone: so its parameters can be sent while the next is updated.

    16-bit gradients become fp32 for it, one bucket at a time; the fp32 master is rounded to the
    parameters' dtype. `gradient_scale` (clipping, loss scale), a number or a 0-dim tensor,
    multiplies the gradient; bucket.gradient_shard itself stays as it is.
    """
    # step 3: the optimizer has made one step on bucket.master alone, with gradient_scale (None: 1)
    # times this rank's gradient shard, computed in the dtype of bucket.master.
    # bucket.parameter_shard holds bucket.master, rounded to its own dtype. (In fp32 the two share
    # their memory.) Leave @changes_parameters there: it tells autograd that the parameters have
    # changed.
    # - update(optimizer, param_group, param, gradient): one optimizer step on this parameter alone.
    #   param_group is the dict of optimizer.param_groups that holds it.
    # - bucket.dtype: of bucket.parameters and bucket.gradients
    raise NotImplementedError("step 3: update_shard")


def master_of(shard: torch.Tensor) -> nn.Parameter:
    """What the optimizer updates in the place of a shard of 16 bits: an fp32 copy of it."""
    # step 4: return a parameter with memory of its own, which can hold updates too small for 16
    # bits.
    raise NotImplementedError("step 4: master_of")


def global_norm(
    gradients: list[torch.Tensor], gradient_scale: Scale = None, *,
    sharded: bool = True, group=None,
) -> torch.Tensor:
    """Euclidean norm of the whole model's gradient, a 0-dim tensor, the same on every rank.
    `sharded=False`: every rank holds all of it already.
    """
    # step 5: return the norm of gradient_scale (None: 1) times the whole gradient, of which each
    # rank of the group has shards: in fp32 at least, the same on every rank. (sharded=False: the
    # norm of these gradients alone, and nothing is sent.)
    # - collectives.all_reduce(tensor, op="avg" or "sum", group=…): in place
    raise NotImplementedError("step 5: global_norm")


class Stage1(Hooks):
    """Data parallelism over the ranks of `group`, with sharded optimizer state.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values. It stays yours:
            call it as before.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4,
            fused=True, …).
        bucket_bytes: gradients are reduced in buckets of about this size; None: as few as can be.
        param_groups: as torch.optim takes them; by default all parameters of the model.
    If a parameter gets no gradient on a rank, its gradient there counts as zero. If no rank has
    one, earlier momentum and weight decay still move it, unlike in plain torch. After backward only
    reduced_gradients() can be read, and .grad not: clip with clip_grad_norm_().
    Raises: ValueError for a model that is empty or wrapped already, or an optimizer that is not
        element-wise; TypeError for a wrong model, optimizer class or optimizer option; RuntimeError
        if there are no ranks, or if their models differ. set_up() names the rest.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = 4 * 2**20, param_groups=None, **optimizer_options,
    ):
        set_up(
            self, model, optimizer_class, optimizer_options,
            group=group, bucket_bytes=bucket_bytes, param_groups=param_groups,
            # what makes shards, and an optimizer that sees them alone
            padded_size=padded_size, master_of=master_of,
            over_shards=over_shards,
        )
        self.reducer = Reducer(self)
        self.reducing = None  # the reduce-scatter under way, if any

    def own(self, bucket):
        """A rank updates a shard of every bucket, and keeps optimizer state only for it
        (core/set_up.py calls this at the start)."""
        # step 1: bucket.gradients has room for the gradients of the whole bucket.
        # bucket.parameter_shard and bucket.gradient_shard are this rank's shards of
        # bucket.parameters and bucket.gradients. You set these three; bucket.master is set from
        # them afterwards.
        # - bucket.parameters [padded]: the model's parameters lie here
        # - bucket.whole_gradients(): memory for the gradients of the bucket, [padded], zeros at the
        #   start
        # - self.rank, self.world_size: in self.group
        raise NotImplementedError("step 1: own")

    # during backward: core/reducer.py calls these

    def backward_begins(self):
        if self.reducer.reduced:  # a second backward since zero_grad(); Reducer clears this next
            # the shard holds the average A and will be averaged again. Its owner gives N·A, the
            # others 0; the mean is A: (N·A + 0 + … + 0) / N = A. New gradients add to that.
            for bucket in self.buckets:
                own = bucket.gradient_shard * self.world_size
                bucket.gradients.zero_()
                bucket.gradient_shard.copy_(own)
                bucket.show_gradients()

    def gradient_arrived(self, param, flat):
        flat.keep_gradient(param)  # in its buckets, where later micro-batches add to it

    def bucket_complete(self, bucket, done):
        # step 2: a missing gradient counts as zero. The mean of this bucket's gradients over the
        # ranks is on its way to their shards, and self.reducing is the Work of it. The bucket
        # before has arrived when the function returns. (`done` matters from lesson 03 on.)
        # - bucket.zero_missing(): writes zeros into bucket.gradients [padded] where a parameter has
        #   no gradient in this pass
        # - collectives.reduce_scatter(output [s], input [N·s], op="avg" or "sum", group=…,
        #   async_op=True): the mean or the sum of all ranks' inputs, of which this rank's part goes
        #   to output. output may be a part of input. Returns a Work at once.
        # - work.wait(): returns when the collective has ended
        raise NotImplementedError("step 2: bucket_complete")

    def _wait(self):
        # step 2: nothing is on its way: what was on its way has arrived.
        raise NotImplementedError("step 2: _wait")

    def backward_ends(self):
        self._wait()
        for bucket in self.buckets:
            for param in bucket.params:
                param.grad = None  # a view of bucket.gradients: only this rank's shard is averaged

    def no_sync(self) -> AbstractContextManager:
        """Context for the micro-batches before the last: gradients add up here, nothing is sent."""
        return self.reducer.accumulate()

    # after backward

    def reduced_gradients(self) -> list[torch.Tensor]:
        """What the update reads: this rank's shard of each bucket's average, [padded / N]."""
        self.reducer.complete()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Let step() scale the gradients down to this global norm, if theirs is larger. Returns
        theirs, a 0-dim tensor. Only gradient_scale changes: the gradients stay as they are."""
        # step 5: return the norm of self.gradient_scale times the whole gradient. From now on this
        # norm is at most max_norm.
        # - precision.clip(scale, norm, max_norm): the new scale: the old one (None: 1), or a
        #   smaller one
        raise NotImplementedError("step 5: clip_grad_norm_")

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards and all-gather: a bucket travels while the next is updated."""
        # step 3: every rank has all new parameters, each updated by its owner with
        # self.gradient_scale. Buffers (running statistics of batch norm) are those of rank 0. It
        # also works on a rank that ran no backward. Another backward before zero_grad() is refused.
        # - self.reduced_gradients(): ends what is left of backward
        # - collectives.all_gather(output [N·s], input [s], group=…, async_op=True): the inputs of
        #   all ranks, in rank order. input may be this rank's part of output. Returns a Work at
        #   once.
        # - replicas.broadcast_statistics(model, group): running statistics of rank 0, to all ranks
        # - self.reducer.needs_zero_grad: while it is True, backward raises; zero_grad() sets it
        #   back
        raise NotImplementedError("step 3: step")

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._wait()
        self.reducer.forget()
        self.gradient_scale = None
        for param in self.model.parameters():
            param.grad = None

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Context in which every parameter is whole: here it always is. All ranks must enter it.
        Edits are kept: make them alike on all ranks, else RuntimeError."""
        try:
            yield
            replicas.check_alike(self.model, self.group)
        finally:
            for bucket in self.buckets:
                precision.keep_changes(bucket)


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Stage1)
