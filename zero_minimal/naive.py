"""Data parallelism, the naive way: each rank works on its own batch, then all average gradients.

The first rung. It trains what stage0.py trains, in a third of the lines, and everything that
stage 0 adds is an answer to a fault of this one:

    nothing is sent before backward ends          the network idles, then the processor: overlap
    a message for each parameter, small or large  each one costs its start: buckets
    no fp32 masters                               small updates vanish in 16 bit: refused here

Communication plan, a step:
    start      broadcast rank 0's parameters, once
    step       all-reduce each parameter's gradient, one after the other         2Ψ(N−1)/N elements
"""

from contextlib import nullcontext

import torch
from torch import nn

from zero_minimal.foundations import collectives


class Naive:
    """Data parallelism over the ranks of `group`, for a model in fp32.

    Args:
        model: any nn.Module, the same on every rank.
        optimizer_class: a torch optimizer; `optimizer_options` go to it (lr=3e-4, …).
        bucket_bytes: taken as at the stages, and not used: there are no buckets.
    Raises: ValueError for parameters of less than 32 bits.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = None, **optimizer_options,
    ):
        if any(param.element_size() < 4 for param in model.parameters()):
            raise ValueError("the naive way keeps no fp32 masters, so 16-bit parameters would lose "
                             "small updates: use Stage0")
        self.model, self.group = model, group
        for tensor in [*model.parameters(), *model.buffers()]:
            collectives.broadcast(tensor.data, group=group)  # all start alike
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.optimizer = optimizer_class(self.params, **optimizer_options)
        self.averaged = False

    def no_sync(self) -> nullcontext:
        """Context for the micro-batches before the last: gradients add up in .grad anyway."""
        return nullcontext()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """The gradients, averaged over the ranks."""
        if not self.averaged:
            for param in self.params:
                if param.grad is None:  # on another rank there may be one
                    param.grad = torch.zeros_like(param)
                collectives.all_reduce(param.grad, op="avg", group=self.group)
            self.averaged = True
        return [param.grad for param in self.params]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this norm, if theirs is larger; return theirs, []."""
        self.reduced_gradients()
        return nn.utils.clip_grad_norm_(self.params, max_norm)

    def step(self) -> None:
        """Make the update; on every rank alike, since the gradients are."""
        self.reduced_gradients()
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()
        self.averaged = False


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Naive)
