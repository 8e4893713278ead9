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

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from zero_minimal.core import collectives, layout, optimizers, precision, replicas
from zero_minimal.core.reducer import Hooks, Reducer
from zero_minimal.core.set_up import set_up


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
            padded_size=layout.padded_size, master_of=precision.master_of,
            over_shards=optimizers.over_shards,
        )
        self.reducer = Reducer(self)
        self.reducing = None  # the reduce-scatter under way, if any

    def own(self, bucket):
        """A rank updates a shard of every bucket, and keeps optimizer state only for it
        (core/set_up.py calls this at the start)."""
        bucket.gradients = bucket.whole_gradients()  # [padded]
        mine = self.rank, self.world_size
        bucket.parameter_shard = layout.shard_of(bucket.parameters, *mine)  # [padded / N]
        bucket.gradient_shard = layout.shard_of(bucket.gradients, *mine)  # [padded / N]

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
        bucket.zero_missing()
        pending = collectives.reduce_scatter(
            bucket.gradient_shard, bucket.gradients, op="avg", group=self.group, of=bucket,
            async_op=True,
        )
        # wait for the previous bucket only now: this one is already being sent, while autograd
        # computes the next
        self._wait()
        self.reducing = pending

    def _wait(self):
        if self.reducing:
            self.reducing.wait()
            self.reducing = None

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
        gradients = self.reduced_gradients()
        norm = precision.global_norm(gradients, self.gradient_scale, group=self.group)
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards and all-gather: a bucket travels while the next is updated."""
        self.reduced_gradients()
        gathering = []
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
            gathering.append(collectives.all_gather(
                bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket,
                async_op=True,
            ))
        for pending in gathering:
            pending.wait()
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = True

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
