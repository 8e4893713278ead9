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
        # step 1: the mean of this bucket's gradients over the ranks is on its way to their shards,
        # and self.reducing, a Reduction, says so. At most one bucket is on its way, and at most one
        # has whole gradients in self.memory. No .grad is left that no later bucket needs.
        # - done: a list of the parameters whose .grad no later bucket needs. Go over it: `param in
        #   done` compares numbers
        # - self.memory.whole(bucket): a new vector [padded] of zeros
        # - self.memory.shard(bucket): a new vector [padded / N], not filled
        # - bucket.fuse_gradients(whole [padded]): copies what is in param.grad to its place in
        #   whole, and leaves the rest of it
        # - collectives.reduce_scatter(output [s], input [N·s], op="avg" or "sum", group=…,
        #   async_op=True): the mean or the sum of all ranks' inputs, of which this rank's part goes
        #   to output; 16 bits are added in fp32. Returns a Work at once.
        # - Reduction(bucket, whole, shard, pending): its four fields have these names
        raise NotImplementedError("step 1: bucket_complete")

    def _wait(self):
        # step 1: nothing is on its way. What was on its way has arrived: bucket.gradient_shard is
        # this rank's shard of the mean, or of the sum over all backward passes since zero_grad()
        # (step 3 grades this sum), and no memory of whole gradients is left of it.
        # - work.wait(): returns when the collective has ended
        # - bucket.gradient_shard: None after zero_grad(). You set it.
        # - self.memory.give_back(whole): frees a vector at once. Dropping your own reference is not
        #   enough: threads of gloo may hold another one for a moment.
        raise NotImplementedError("step 1: _wait")

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
        # step 4: return the norm of self.gradient_scale times the whole gradient. From now on this
        # norm is at most max_norm.
        # - precision.global_norm(shards, scale, group=…): the norm of scale times the gradient of
        #   all ranks; a collective
        # - precision.clip(scale, norm, max_norm): the new scale: the old one (None: 1), or a
        #   smaller one
        raise NotImplementedError("step 4: clip_grad_norm_")

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards and all-gather: a bucket travels while the next is updated."""
        # step 2: every rank has all new parameters, each updated by its owner with
        # self.gradient_scale times the mean gradient. Buffers (running statistics of batch norm)
        # are those of rank 0. It also works on a rank that ran no backward. Another backward before
        # zero_grad() is refused.
        # - self.reduced_gradients(): ends what is left of backward
        # - self.gradient_scale: None, or what gradients are multiplied with
        # - optimizers.update_shard(optimizer, bucket, scale): one optimizer step on this rank's
        #   shard of a bucket, with scale times its gradient; rounds the master
        # - bucket.parameters [padded], bucket.parameter_shard [padded / N]: the model's; this
        #   rank's part of them, a view
        # - collectives.all_gather(output [N·s], input [s], group=…, async_op=True): the inputs of
        #   all ranks, in rank order. input may be this rank's part of output. Returns a Work at
        #   once.
        # - replicas.broadcast_statistics(model, group): running statistics of rank 0, to all ranks
        # - self.reducer.needs_zero_grad: while it is True, backward raises; self.reducer.forget()
        #   sets it back
        raise NotImplementedError("step 2: step")

    def zero_grad(self) -> None:
        """Forget the gradients."""
        # step 3: nothing is on its way, nothing is left of this step's gradients, nor of their
        # scale, and the next backward starts afresh.
        # - self.reducer.forget(): the next backward starts afresh
        raise NotImplementedError("step 3: zero_grad")

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
