"""Averages: an exponential moving average of the weights (EMA), cut into shards as they are.

    average = Average(zero, decay=0.999)
    for x, y in batches:
        ...
        zero.step()
        average.update()
    with average.in_place():        # on all ranks: the model computes with the averages
        evaluate(model)
        saved_state.save(zero, "runs/averages")
    saved_state.save(zero, "runs/a")

A rank averages what it updates: 4Ψ/N bytes at stages 1 to 3, and sends nothing. For weights in 16
bit the averages are in fp32: a small part of a change would be rounded away.

A run that goes on, under any stage and any number of ranks, loads both, the averages first:

    saved_state.load(zero, "runs/averages")
    average = Average(zero, decay=0.999)    # begins at the weights that are there
    saved_state.load(zero, "runs/a")

torch's AveragedModel and copy.deepcopy(model) work too, under zero.gather_parameters(): they make
plain models, whole on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Average:
    """The average of the weights that a stage trains: mean ← decay · mean + (1 − decay) · weights,
    at each update().

    `shards` are this rank's, one of each of zero.buckets; so they cannot be `extra` of a
    checkpoint, which has one for all ranks.
    """

    def __init__(self, zero, decay: float = 0.999):
        if any(bucket.away is not None for bucket in zero.buckets):
            raise RuntimeError("the weights to average are on the host: average whole ones, with "
                               "torch's AveragedModel, under zero.gather_parameters()")
        self.zero, self.decay = zero, decay
        self.shards = [bucket.master.detach().clone() for bucket in zero.buckets]

    @torch.no_grad()
    def update(self) -> None:
        """After zero.step()."""
        for mean, bucket in zip(self.shards, self.zero.buckets, strict=True):
            mean.lerp_(bucket.master, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the averages stand in place of the weights. All ranks must enter it.
        Raises: RuntimeError if step() was called inside, since that is undone."""
        state, steps = self.zero.state_dict(), self._steps()
        params = tuple(param for bucket in self.zero.all_buckets for param in bucket.params)
        # at the end they are as before, and a graph from before may be used
        kept = torch.autograd._unsafe_preserve_version_counter(params)
        weights = [shard.clone() for shard in state["shards"]]
        means = dict(zip(self.zero.buckets, self.shards, strict=True))
        pairs = zip(self.zero.all_buckets, weights, strict=True)
        averaged = [means.get(bucket, shard) for bucket, shard in pairs]  # frozen ones stay
        self.zero.load_state_dict(state | {"shards": averaged})
        try:
            yield
            if self._steps() != steps:
                raise RuntimeError("the averages are for evaluation: call zero.step() outside "
                                   "in_place()")
        finally:
            with kept:
                self.zero.load_state_dict(state | {"shards": weights})

    def _steps(self) -> int:
        return self.zero.reducer.steps + self.zero.reducer.spent
