"""Data parallelism: every rank holds everything, and works on its own batch. ZeRO starts here
(section 3 of the paper).

Memory a rank, for Ψ parameters:
    fp32     4Ψ parameters + 4Ψ gradients + 8Ψ Adam's momentum and variance
    16 bit   2Ψ            + 2Ψ           + 12Ψ, of which 4Ψ are the fp32 master parameters

Communication plan, a step; what each rank sends:
    start      broadcast rank 0's parameters, once
    backward   all-reduce each bucket of gradients as soon as it is complete     2Ψ(N−1)/N elements
    step       every rank makes the same update: nothing is sent
Not counted, since small: running statistics (batch norm) at each step, and an order of the buckets
once.

naive.py trains the same in fp32, without these, which lie in core/:
    buckets       many gradients in one message         layout.py
    overlap       messages travel during backward       reducer.py
    fp32 masters  so that 16-bit parameters can train   precision.py, optimizers.py
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from zero_minimal.core import collectives, optimizers, precision, replicas
from zero_minimal.core.reducer import Hooks, Reducer
from zero_minimal.core.set_up import set_up


class Stage0(Hooks):
    """Data parallelism over the ranks of `group`.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values. It stays yours:
            call it as before.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4,
            fused=True, …).
        bucket_bytes: gradients are reduced in buckets of about this size; None: as few as can be.
        param_groups: as torch.optim takes them; by default all parameters of the model.
    If a parameter gets no gradient on a rank, its gradient there counts as zero. If no rank has
    one, earlier momentum and weight decay still move it, unlike in plain torch. After backward
    .grad holds the average of all ranks; clip with clip_grad_norm_().
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
        )
        self.reducer = Reducer(self)
        self.reducing = None  # the all-reduce under way, if any

    def own(self, bucket):
        """A rank keeps all of every bucket (core/set_up.py calls this at the start)."""
        bucket.gradients = bucket.whole_gradients()  # [padded]
        bucket.parameter_shard, bucket.gradient_shard = bucket.parameters, bucket.gradients

    # during backward: core/reducer.py calls these

    def gradient_arrived(self, param, flat):
        flat.keep_gradient(param)  # in its buckets, where later micro-batches add to it

    def bucket_complete(self, bucket, done):
        # first wait for the previous bucket, reduced while autograd computed this one: on gloo
        # wait() sends the second half of the all-reduce, and it should go before new messages
        self._wait()
        bucket.zero_missing()
        self.reducing = collectives.all_reduce(
            bucket.gradients, op="avg", group=self.group, of=bucket, async_op=True
        )

    def _wait(self):
        if self.reducing:
            self.reducing.wait()
            self.reducing = None

    def backward_ends(self):
        self._wait()
        for bucket in self.buckets:
            bucket.show_gradients()

    def no_sync(self) -> AbstractContextManager:
        """Context for the micro-batches before the last: gradients add up here, nothing is sent."""
        return self.reducer.accumulate()

    # after backward

    def reduced_gradients(self) -> list[torch.Tensor]:
        """What the update reads: the averaged gradient of each bucket, [padded]."""
        self.reducer.complete()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Let step() scale the gradients down to this global norm, if theirs is larger. Returns
        theirs, a 0-dim tensor. Only gradient_scale changes: the gradients stay as they are."""
        gradients = self.reduced_gradients()
        norm = precision.global_norm(gradients, self.gradient_scale, sharded=False)
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters; on every rank alike, since the gradients are."""
        self.reduced_gradients()
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
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

    main(Stage0)
