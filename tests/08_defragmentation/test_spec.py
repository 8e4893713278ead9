"""Lesson 8, M_D: checkpoints and gradients lie in slabs, an arena closes its holes; and who asks too much is told."""

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.defragmentation import Arena, Slab, gradients_in_slab
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = GPTConfig(layers=3, hidden=30, heads=3, sequence=23, vocabulary=31, dropout=0.1)


def test_slab_says_what_does_not_fit():
    with pytest.raises(ValueError, match="at least one element, not 0"):
        Slab(0)
    slab = Slab(10)
    kept = slab.keep(torch.ones(7))
    with pytest.raises(MemoryError, match="4 elements do not fit behind the 7 of 10.*largest step.*reset"):
        slab.keep(torch.ones(4))
    with pytest.raises(ValueError, match="float32 on cpu, and was given torch.float64.*one slab for each"):
        slab.keep(torch.ones(1, dtype=torch.float64))
    assert slab.holds(kept) and not slab.holds(torch.ones(7))


def test_gradient_slab_says_what_it_cannot_do():
    layer = nn.Linear(2, 3)
    slab = gradients_in_slab(layer)
    layer(torch.ones(1, 2)).sum().backward()
    slab.reset()
    with pytest.raises(RuntimeError, match="set gradients to None first"):
        layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="has none that wants a gradient"):
        gradients_in_slab(nn.Linear(2, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="has torch.bfloat16 on cpu, torch.float32 on cpu"):
        gradients_in_slab(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3).bfloat16()]))


def stage2_losses(in_slab):
    rank = dist.get_rank()
    model, slab = toys.build(lambda: GPT(SIZES), rank), Slab()
    if in_slab:
        checkpoint_blocks(model, place=slab.keep)
    zero = Stage2(model, torch.optim.AdamW, lr=1e-2, bucket_bytes=4096)
    torch.manual_seed(200 + rank)
    losses = []
    for step in range(3):
        loss = model(*toys.tokens(rank, step))
        losses.append(loss.item())
        loss.backward()
        zero.step()
        zero.zero_grad()
        slab.reset()
        assert not in_slab or len(slab.memory) == SIZES.layers * 3 * toys.SEQUENCE * SIZES.hidden
    return losses


@pytest.mark.thorough
def test_checkpoints_in_a_slab_go_with_stage_2():
    without, within = (toys.run(stage2_losses, 3, in_slab) for in_slab in (False, True))
    assert without == within
    assert len({tuple(losses) for losses in within}) == 3, "each rank has its own data"


def test_arena_says_what_does_not_fit():
    arena = Arena(100)
    parts = [arena.allocate((20,)) for _ in range(5)]
    arena.free(parts[1])
    arena.free(parts[3])
    with pytest.raises(MemoryError, match=r"\(30,\) needs 120 bytes; 160 are free, the largest block has 80: call"):
        arena.allocate((30,))
    with pytest.raises(MemoryError, match="needs 200 bytes; 160 are free.*free tensors that are not needed, or make"):
        arena.allocate((50,))
    arena.compact()
    arena.allocate((30,))
    with pytest.raises(ValueError, match="at least one element, not of shape"):
        arena.allocate((3, 0))
    with pytest.raises(ValueError, match="at least one element, not 0"):
        Arena(0)


def test_arena_refuses_a_second_free():
    arena = Arena(10)
    tensor, other = arena.allocate((4,)), arena.allocate((4,))
    arena.free(tensor)
    assert tensor.numel() == 0, "nobody can write by mistake to what is someone else's"
    for wrong in (tensor, torch.ones(4), other[:2], Arena(10).allocate((4,))):
        with pytest.raises(ValueError, match="once: it is none, or it was freed before"):
            arena.free(wrong)
    assert arena.free_bytes == 4 * 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_slabs_are_two_blocks_on_cuda():
    model = GPT(SIZES).cuda()
    slab = Slab(SIZES.layers * 3 * 23 * SIZES.hidden, device="cuda")
    gradient_slab = gradients_in_slab(model)
    checkpoint_blocks(model, place=slab.keep)
    inputs, targets = toys.tokens(0, 0, sequence=23)
    model(inputs.cuda(), targets.cuda()).backward()
    blocks = [(block["address"], block["address"] + block["size"]) for segment in torch.cuda.memory_snapshot()
              for block in segment["blocks"] if block["state"] == "active_allocated"]
    for memory, inside in ((slab.memory, []), (gradient_slab.memory, [param.grad for param in model.parameters()])):
        low, high = next((low, high) for low, high in blocks if low <= memory.data_ptr() < high)
        assert all(low <= tensor.data_ptr() <= high - tensor.nbytes for tensor in (memory, *inside))
