"""P_os: optimizer state partitioned. A rank updates the shard whose state it holds (section 5.1).

Memory a rank, for Ψ parameters on N ranks:
    fp32     4Ψ parameters + 4Ψ gradients + 8Ψ/N Adam's momentum and variance
    16 bit   2Ψ            + 2Ψ           + 12Ψ/N, of which 4Ψ/N are the fp32 master parameters

Communication plan, a step; what each rank sends:
    start      broadcast rank 0's parameters, once
    backward   reduce-scatter each bucket of gradients as soon as it is complete  Ψ(N−1)/N elements
    step       update the own shard, all-gather the updated parameters            Ψ(N−1)/N elements
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
    """How long a vector is that has room for so many elements, and can be cut into world_size
    shards of equal size, each a multiple of ALIGNMENT."""
    # step 1: the least number that is not below `elements` and is a multiple of ALIGNMENT times
    # world_size.
    raise NotImplementedError("step 1: padded_size")


def shard_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's shard, [padded / N], of a vector [padded]: a view, in the same memory."""
    # step 1: the rank-th of world_size equal parts, in rank order: no copy.
    raise NotImplementedError("step 1: shard_of")


def master_of(shard: torch.Tensor) -> nn.Parameter:
    """What the optimizer updates in the place of a shard of 16 bits: an fp32 copy of it."""
    # step 4: a parameter of its own memory, which an optimizer can update by less than 16 bits can
    # tell.
    raise NotImplementedError("step 4: master_of")


def global_norm(
    gradients: list[torch.Tensor], gradient_scale: Scale = None, *,
    sharded: bool = True, group=None,
) -> torch.Tensor:
    """Euclidean norm of the whole model's gradient, a 0-dim tensor, the same on every rank.
    `sharded=False`: every rank holds all of it already.
    """
    # step 5: the norm of gradient_scale (None: 1) times the gradient of which each rank of the
    # group has a shard; the same 0-dim tensor on every rank. (Not sharded: of these gradients
    # alone.)
    raise NotImplementedError("step 5: global_norm")


def over_shards(
    optimizer_class: type[Optimizer], options: dict, groups: list[dict], buckets: list[Bucket]
) -> Optimizer:
    """The user's optimizer, with the user's options and groups, in which this rank's shards stand
    in the place of the parameters."""
    # step 1: the optimizer has as many groups as `groups`, each with all that the user set for it,
    # but for the parameters: these are bucket.master of all buckets of this group
    # (bucket.group_index), and no others.
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
    # times the gradient of this rank's shard, and bucket.parameter_shard holds what bucket.master
    # does, rounded to its own dtype. (In fp32 they are the same memory. Step 4 is about 16 bits.)
    raise NotImplementedError("step 3: update_shard")


class Stage1(Hooks):
    """Data parallelism over the ranks of `group`, with sharded optimizer state.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values. It stays yours:
            call it as before.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4,
            fused=True, …).
        bucket_bytes: gradients are reduced in buckets of about this size; None: as few as can be.
        param_groups: as torch.optim takes them; by default all parameters of the model.
    A parameter that gets no gradient on a rank counts there as one whose gradient is zero. If no
    rank has one, earlier momentum and weight decay still move it, unlike in plain torch.
    After backward only reduced_gradients() can be read, and .grad not: clip with clip_grad_norm_().
    Raises: ValueError for a model that is empty or wrapped already, or an optimizer that is not
        element-wise; TypeError for what is no module, no optimizer class or no option of it;
        RuntimeError if there are no ranks, or if their models differ. set_up() names the rest.
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
        """A rank updates a shard of every bucket, and keeps optimizer state for that alone
        (core/set_up.py calls this at the start)."""
        # step 1: bucket.gradients has room for the gradients of the whole bucket.
        # bucket.parameter_shard and bucket.gradient_shard are this rank's shards of
        # bucket.parameters and bucket.gradients.
        raise NotImplementedError("step 1: own")

    # during backward: core/reducer.py calls these

    def backward_begins(self):
        if self.reducer.reduced:  # a second backward since zero_grad(); Reducer clears this next
            # a shard holds an average A, and will be averaged again. Its owner puts in N·A, the
            # other ranks 0, so A comes back: (N·A + 0 + … + 0) / N = A. New gradients add to that.
            for bucket in self.buckets:
                own = bucket.gradient_shard * self.world_size
                bucket.gradients.zero_()
                bucket.gradient_shard.copy_(own)
                bucket.show_gradients()

    def gradient_arrived(self, param, flat):
        flat.keep_gradient(param)  # in its buckets, where later micro-batches add to it

    def bucket_complete(self, bucket, done):
        # step 2: a gradient that did not come counts as zero; the mean of this bucket's gradients
        # over the ranks is on its way to their shards, and self.reducing says so. The bucket before
        # has arrived when the function returns.
        raise NotImplementedError("step 2: bucket_complete")

    def _wait(self):
        # step 2: nothing is on its way: what was has arrived.
        raise NotImplementedError("step 2: _wait")

    def backward_ends(self):
        self._wait()
        for bucket in self.buckets:
            for param in bucket.params:
                param.grad = None  # a view of bucket.gradients, averaged in the own shard alone

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
        # step 5: the norm of self.gradient_scale times the gradient, over all ranks, is at most
        # max_norm; it was returned as it was before.
        raise NotImplementedError("step 5: clip_grad_norm_")

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards and gather everybody's: a bucket travels while the next is
        updated."""
        # step 3: every rank has all new parameters, each updated by the rank that owns it, with
        # self.gradient_scale; and rank 0's running statistics. A backward before zero_grad is
        # refused.
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
