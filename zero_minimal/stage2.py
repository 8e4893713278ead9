"""P_os+g: gradients partitioned too. A rank keeps those of the shard it updates (section 5.2).

Memory a rank, for Ψ parameters on N ranks:
    fp32     4Ψ parameters + 4Ψ/N gradients + 8Ψ/N Adam's momentum and variance
    16 bit   2Ψ            + 2Ψ/N           + 12Ψ/N, of which 4Ψ/N are the fp32 master parameters
and, for a while, whole gradients of two buckets: one that autograd computes, one being reduced. A
parameter larger than a bucket keeps its .grad until its last bucket is reduced; complete buckets
keep theirs while they wait behind an incomplete one. On gloo, what the other ranks send takes
another (N−1)/N of a bucket.

Communication plan, a step; what each rank sends:
    start      broadcast rank 0's parameters, once
    backward   reduce-scatter each bucket of gradients as soon as it is complete,
               and free it                                                        Ψ(N−1)/N elements
    step       update its own shard, all-gather the updated parameters           Ψ(N−1)/N elements
Together as much as data parallelism sends. With gradient accumulation the reduce-scatter comes once
for each micro-batch: no rank keeps whole gradients to add to. Not counted, since small: running
statistics (batch norm) at each step, an order of the buckets once, and a norm when clipping.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from zero_minimal.core import collectives, optimizers, precision, replicas
from zero_minimal.core.gradient_memory import GradientMemory, Reduction
from zero_minimal.core.reducer import Hooks, Reducer
from zero_minimal.core.set_up import set_up


class Stage2(Hooks):
    """Data parallelism over the ranks of `group`, with sharded optimizer state and gradients.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values. It stays yours:
            call it as before.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4,
            fused=True, …).
        bucket_bytes: gradients are reduced in buckets of about this size; None: as few as can be.
        param_groups: as torch.optim takes them; by default all parameters of the model.
        memory: a class that says where gradients lie; zero_100b.py has another one.
    If a parameter gets no gradient on a rank, its gradient there counts as zero. If no rank has
    one, earlier momentum and weight decay still move it, unlike in plain torch. After backward only
    reduced_gradients() can be read, and .grad not: clip with clip_grad_norm_().
    Raises: ValueError for a model that is empty or wrapped already, or an optimizer that is not
        element-wise; TypeError for a wrong model, optimizer class or optimizer option; RuntimeError
        if there are no ranks, or if their models differ. set_up() names the rest.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = 4 * 2**20, param_groups=None, memory: type = GradientMemory,
        **optimizer_options,
    ):
        set_up(
            self, model, optimizer_class, optimizer_options,
            group=group, bucket_bytes=bucket_bytes, param_groups=param_groups,
        )
        self.reducer = Reducer(self)
        self.memory = memory(self.buckets, group)
        self.reducing = None  # the Reduction under way, if any

    def own(self, bucket):
        """A rank updates a shard of every bucket, and keeps optimizer state and gradients for that
        alone (core/set_up.py calls this at the start)."""
        bucket.parameter_shard = bucket.shard(bucket.parameters, self.rank)  # [padded / N]

    # during backward: core/reducer.py calls these

    def bucket_complete(self, bucket, done):
        # first wait for the bucket before, under way while autograd made these gradients: its
        # memory is free before this one takes as much
        self._wait()
        whole = self.memory.whole(bucket)  # [padded], zeros: what a missing gradient counts as
        bucket.fuse_gradients(whole)
        for param in done:
            param.grad = None  # frees what autograd made: all of it has been copied
        shard = self.memory.shard(bucket)  # [padded / N]
        pending = collectives.reduce_scatter(
            shard, whole, op="avg", group=self.group, of=bucket, async_op=True
        )
        self.reducing = Reduction(bucket, whole, shard, pending)

    def _wait(self):
        if self.reducing:
            bucket, shard = self.reducing.bucket, self.reducing.shard
            self.reducing.pending.wait()
            self.memory.give_back(self.reducing.whole)  # not before: it was being sent
            if bucket.gradient_shard is None:
                bucket.gradient_shard = shard
            else:
                bucket.gradient_shard += shard  # from an earlier micro-batch
            self.reducing = None

    def backward_ends(self):
        self._wait()

    def no_sync(self) -> nullcontext:
        """Context for the micro-batches before the last. Here each of them is reduced too."""
        return nullcontext()

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
        for bucket in self.buckets:
            bucket.gradient_shard = None
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

    main(Stage2)
