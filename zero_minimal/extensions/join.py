"""Join (torch's name for it): ranks whose batches do not come out even stop together.

    for x, y in together(batches):
        loss = model(x, y)
        ...

Every rank must take part in every collective, so a rank that has no batch left would hold up the
others. Here all ranks ask each other before each batch, with one number; when one has none, all
stop. A few batches of the longer ranks stay unread, and those ranks say where they stopped.
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
                # how many there are is not counted: there may be no end of them
                warnings.warn(f"rank {dist.get_rank(group)} stops after {number} batches with "
                              "others unread, since another rank has none left", stacklevel=2)
            return
        yield batch
