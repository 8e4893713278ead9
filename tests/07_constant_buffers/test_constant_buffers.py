"""Lesson 7, C_B: gradients of any size go through two buffers of a fixed size, with the same result."""

import checks
import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.constant_buffers import ConstantBuffers, all_reduce, fused_all_reduce
from zero_minimal.meters.memory import Ledger

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
    """From buffers smaller than most tensors to one that holds them all."""
    exact = [sum(parts) / (world_size if op == "avg" else 1)
             for parts in zip(*(gradients(rank, dtype) for rank in range(world_size)), strict=True)
             ] if dtype == torch.float32 else None
    for ours, fused in toys.run(both, world_size, size, dtype, op):
        assert toys.identical(ours, fused)
        if exact:
            assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, exact, strict=True))


def memory(millions):
    """Bytes of buffers at the peak of two rounds: through constant buffers, and through one for all."""
    tensors = [torch.ones(1000, 250) for _ in range(4 * millions)]
    found = []
    for reduce in (lambda buffers: all_reduce(tensors, buffers), lambda buffers: fused_all_reduce(tensors)):
        ledger = Ledger()
        with ledger:
            buffers, begin = ConstantBuffers(2**18), ledger.states()["other"]
            for _ in range(2):
                reduce(buffers)
        found.append(ledger.peak.total - begin)
    return found


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_model():
    small, large = ([toys.run(memory, 2, millions)[rank] for rank in range(2)] for millions in (1, 4))
    for (constant, fused), (constant_of_large, fused_of_large) in zip(small, large, strict=True):
        assert constant == constant_of_large < 4 * 2**18 + 2**20
        assert fused_of_large - fused >= 3 * 4 * 10**6


def order():
    watch, buffers = checks.Watch(), ConstantBuffers(400)
    with watch:
        all_reduce([torch.ones(350)], buffers)
    return [event.kind for event in watch.events], [buffer.data_ptr() for buffer in buffers.buffers]


def test_one_buffer_is_filled_while_the_other_is_on_its_way():
    for events, places in toys.run(order, 2):
        assert events == ["start", "start", "wait", "start", "wait", "start", "wait", "wait"]
        assert len(set(places)) == 2


def test_a_buffer_too_small_for_one_element_a_rank():
    def look():
        with pytest.raises(ValueError, match="12 bytes are the least"):
            ConstantBuffers(11)

    toys.run(look, 3)


def test_a_tensor_that_cannot_be_written_flat():
    def look():
        with pytest.raises(ValueError, match="contiguous"):
            all_reduce([torch.ones(3, 4).t()], ConstantBuffers(100))

    toys.run(look, 2)
