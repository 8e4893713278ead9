"""Lesson 7, C_B: gradients of any size go through two buffers of a fixed size, with the same result as through one."""

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.constant_buffers import ConstantBuffers, all_reduce, fused_all_reduce

SHAPES = [(3, 5), (1,), (40, 7), (), (0, 3), (2, 129), (17,)]


def gradients(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def both(size, dtype, op):
    rank = dist.get_rank()
    ours, fused = gradients(rank, dtype), gradients(rank, dtype)
    all_reduce(ours, ConstantBuffers(size), op=op)
    fused_all_reduce(fused, op=op)
    return ours, fused


@pytest.mark.thorough
@pytest.mark.parametrize("op", ("avg", "sum"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("world_size, size", [(1, 64), (2, 8), (2, 100), (3, 100), (4, 1000), (3, 10**6)])
def test_same_as_one_buffer_for_all(world_size, size, dtype, op):
    """From buffers smaller than most tensors to one that holds them all. That the sums are right, the graded checks
    say."""
    for ours, fused in toys.run(both, world_size, size, dtype, op):
        assert toys.identical(ours, fused)


def refusals():
    with pytest.raises(ValueError, match="12 bytes are the least"):
        ConstantBuffers(11)
    with pytest.raises(ValueError, match="contiguous"):
        all_reduce([torch.ones(3, 4).t()], ConstantBuffers(100))


def test_a_buffer_too_small_and_a_tensor_that_cannot_be_written_flat_are_refused():
    toys.run(refusals, 3)
