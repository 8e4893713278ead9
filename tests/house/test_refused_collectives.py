"""A collective that refuses its arguments has sent nothing: what comes next finds all ranks as they were."""

import contextlib

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import in_ranks

from zero_minimal.constant_buffers import ConstantBuffers, all_reduce
from zero_minimal.core import collectives

pytestmark = pytest.mark.thorough

REFUSED = {
    "an unknown op": lambda: collectives.all_reduce(torch.ones(3), op="mean"),
    "sizes of a reduce-scatter": lambda: collectives.reduce_scatter(torch.ones(4), torch.ones(4)),
    "sizes of an all-gather": lambda: collectives.all_gather(torch.ones(4), torch.ones(4)),
    "an unknown op of reduce-scatter": lambda: collectives.reduce_scatter(
        torch.ones(3), torch.ones(3 * dist.get_world_size()), op="max"),
    "an unknown op through buffers": lambda: all_reduce([torch.ones(300)], ConstantBuffers(400), op="mean"),
}


@pytest.mark.parametrize("world_size", (2, 3))
def test_the_next_collective_is_right(world_size):
    def look():
        sums = []
        for refused in REFUSED.values():
            for _ in range(2):
                with contextlib.suppress(ValueError):
                    refused()
                    raise AssertionError("it was to be refused")
            tensor = torch.tensor([1.0 + dist.get_rank()])
            collectives.all_reduce(tensor, op="sum")
            sums.append(tensor.item())
        return sums

    assert toys.run(look, world_size) == [[world_size * (world_size + 1) / 2] * len(REFUSED)] * world_size


@in_ranks(2)
def test_a_rank_that_is_not_in_the_group_is_told_so():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="this rank, 1 of the world, is not in group="):
            collectives.all_reduce(torch.ones(3), group=group)
