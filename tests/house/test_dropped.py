"""Dropped: a collective that nobody waits for, since the user caught an error and let the stage go, stops no other."""

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.core import collectives

pytestmark = pytest.mark.thorough


def after_a_dropped_one():
    for count in range(1, 4):
        big = torch.full((2**22 * dist.get_world_size(),), float(count))
        pending = collectives.reduce_scatter(big[: 2**22], big, of="what is dropped", async_op=True)
        del pending, big  # most of it has not been written yet
        tensor = torch.ones(5)
        collectives.all_reduce(tensor, op="sum")
        assert (tensor == dist.get_world_size()).all()
    return "here"


def test_what_comes_after_a_dropped_collective_arrives():
    for world_size in (2, 3):
        assert toys.run(after_a_dropped_one, world_size, timeout=40) == ["here"] * world_size
