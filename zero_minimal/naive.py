"""Data parallelism, the naive way: each rank works on its own batch, then all average gradients.

The first rung: it trains what stage0.py trains, and is shorter. It has three faults, and stage 0
has an answer to each:

    fault                                                        answer of stage 0
    nothing is sent before backward ends: first the network      overlap: gradients travel
    waits, then the processor                                    while backward goes on
    a message for each parameter, and each costs time to start   buckets: many in one message
    in 16 bit an update can be too small to change a parameter   fp32 masters: parameters once
    (such models are refused here)                               more, in 32 bit, to be updated

Words of all files: a rank is one of the N processes that train together; Ψ is the number of the
model's parameters; a step's batch may come in parts, called micro-batches.

Communication plan, a step; what each rank sends:
    start      broadcast rank 0's parameters, once
    step       all-reduce each parameter's gradient, one after the other         2Ψ(N−1)/N elements
Not counted, since small: running statistics (batch norm) at each step.
"""

from contextlib import nullcontext

import torch
from torch import nn

from zero_minimal.core import collectives, replicas, seams


class Naive:
    """Data parallelism over the ranks of `group`, for a model in fp32.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values.
        optimizer_class: a torch optimizer; `optimizer_options` go to it (lr=3e-4, …).
        bucket_bytes: accepted as in the stages, but unused: there are no buckets.
    .grad is this rank's own until step() or clip_grad_norm_() averages it.
    Raises: ValueError for trained parameters of less than 32 bits.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = None, **optimizer_options,
    ):
        self.params = [param for param in model.parameters() if param.requires_grad]
        if any(param.element_size() < 4 for param in self.params):
            raise ValueError("the naive way keeps no fp32 masters, so 16-bit parameters would lose "
                             "small updates: use Stage0")
        self.model, self.group = model, group
        self.start_alike()
        self.optimizer = optimizer_class(self.params, **optimizer_options)
        self.averaged = False
        seams.tell("naive_wrapped", self)

    def start_alike(self) -> None:
        """Copy rank 0's parameters and buffers to every rank."""
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            collectives.broadcast(tensor.data, group=self.group)

    def average(self) -> None:
        """Each .grad becomes its mean over the ranks."""
        for param in self.params:
            if param.grad is None:  # on another rank there may be one
                param.grad = torch.zeros_like(param)
            collectives.all_reduce(param.grad, op="avg", group=self.group)

    def no_sync(self) -> nullcontext:
        """Context for the micro-batches before the last: gradients add up in .grad anyway."""
        return nullcontext()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """The gradients, averaged over the ranks. A backward pass between this and zero_grad()
        raises RuntimeError: nobody would average its gradients."""
        if not self.averaged:
            seams.tell("naive_averages", self)
            self.average()
            self.averaged = True
        return [param.grad for param in self.params]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this norm, if theirs is larger. Returns theirs, a 0-dim
        tensor."""
        self.reduced_gradients()
        return nn.utils.clip_grad_norm_(self.params, max_norm)

    def step(self) -> None:
        """Update the parameters: the gradients are equal on all ranks."""
        self.reduced_gradients()
        self.optimizer.step()
        replicas.broadcast_statistics(self.model, self.group)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()
        self.averaged = False


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Naive)
