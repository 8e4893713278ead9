"""Averages: an exponential moving average of the weights (EMA), cut into shards like the weights.

    average = Average(zero, decay=0.999)
    for x, y in batches:
        ...
        zero.step()
        average.update()
    with average.in_place():        # on all ranks: the model computes with the averages
        evaluate(model)
        saved_state.save(zero, "runs/averages")
    saved_state.save(zero, "runs/a")

A rank averages the weights that it updates: 4Ψ/N bytes at stages 1 to 3. It sends nothing. For
16-bit weights the averages are in fp32: 16 bits would round small changes away.

A run that resumes, at any stage and on any number of ranks, loads both, the averages first:

    saved_state.load(zero, "runs/averages")
    average = Average(zero, decay=0.999)    # begins at the weights that are there
    saved_state.load(zero, "runs/a")

torch's AveragedModel and copy.deepcopy(model) work too, under zero.gather_parameters(): they make
plain models, whole on every rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero_minimal.guards.changed_in_forward import as_before
from zero_minimal.guards.training_moment import steps_taken
from zero_minimal.guards.used_gradients import accumulated


class Average:
    """The average of the weights that a stage trains: mean ← decay · mean + (1 − decay) · weights,
    at each update().

    `shards` has this rank's shard of each of zero.buckets. It cannot be a checkpoint's `extra`,
    which must be the same on all ranks.
    """

    def __init__(self, zero, decay: float = 0.999):
        if not hasattr(zero, "load_shards"):
            raise TypeError("averages lie in a stage's shards: take Stage0 in place of Naive, the "
                            ".zero of a System of zero_100b, or torch's AveragedModel")
        if any(bucket.away is not None for bucket in zero.buckets):
            raise RuntimeError("the weights to average are on the host: average whole ones, with "
                               "torch's AveragedModel, under zero.gather_parameters()")
        self.zero, self.decay = zero, decay
        self.shards = [bucket.master.detach().clone() for bucket in zero.buckets]

    @torch.no_grad()
    def update(self) -> None:
        """Call it after zero.step()."""
        for mean, bucket in zip(self.shards, self.zero.buckets, strict=True):
            mean.lerp_(bucket.master, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the averages take the place of the weights. All ranks must enter it.
        Raises: RuntimeError if step() was called inside, since the end of the context undoes it."""
        if accumulated(self.zero.reducer):
            raise RuntimeError("gradients wait for the next zero.step(): enter in_place() after it")
        steps = steps_taken(self.zero)
        weights = [shard.clone() for shard in self.zero.state_dict()["shards"]]
        means = dict(zip(self.zero.buckets, self.shards, strict=True))
        pairs = zip(self.zero.all_buckets, weights, strict=True)
        averaged = [means.get(bucket, shard) for bucket, shard in pairs]  # frozen ones stay
        with as_before(param for bucket in self.zero.all_buckets for param in bucket.params):
            self.zero.load_shards(averaged)
            try:
                yield
                if steps_taken(self.zero) != steps:
                    raise RuntimeError("the averages are for evaluation: call zero.step() outside "
                                       "in_place()")
            finally:
                self.zero.load_shards(weights)
