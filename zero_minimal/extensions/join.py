"""Join (torch's name for it): ranks with different numbers of batches stop together.

    for x, y in together(batches):
        loss = model(x, y)
        ...

Every rank must take part in every collective, so a rank that has no batch left would hold up the
others. So all ranks exchange one number before each batch; when one rank has no batch, all stop.
Ranks with more batches leave a few unread, and warn where they stopped.
"""

import itertools
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from zero_minimal.core import collectives


def together(batches: Iterable, group=None) -> Iterator:
    """This rank's batches, as long as every rank of the group has one. Call it on all ranks."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    nothing, source = object(), iter(batches)
    for number in itertools.count():
        batch = next(source, nothing)
        ended = torch.tensor(float(batch is nothing), device=device)
        collectives.all_reduce(ended, op="max", group=group, of="who has a batch left")
        if ended:
            if batch is not nothing:
                # the unread batches are not counted: they may be endless
                warnings.warn(f"rank {dist.get_rank(group)} stops after {number} batches with "
                              "others unread, since another rank has none left", stacklevel=2)
            return
        yield batch
