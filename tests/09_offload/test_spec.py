"""Lesson 9, offload: the same bits as without it, whatever the speed of the bus; less memory; the formula's bytes."""

import sys
import time
from pathlib import Path

import pytest
import torch
import toys
from thorough import sample
from torch import nn

from zero_minimal.meters.crossings import settled_bytes

sys.path.insert(0, str(Path(__file__).parent))  # ranks import it too
from offloaded import OFFLOADED, RECIPES, both, edits_and_states, in_proc, pair, same  # noqa: E402


def all_recipes(stage):
    for name in RECIPES:
        same(*both(stage, RECIPES[name], bus=None))
    same(*both(stage, RECIPES["bf16"], bus=1e6))  # a slow one


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "world_size"), sample(
    [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3)], [(2, 3), (3, 2)]))
def test_same_bits(stage, world_size):
    toys.run(all_recipes, world_size, stage)


def bus_of_all():
    """Bytes of a step over a slow bus, each way, and the formula; the seconds of the step, and those of the bus."""
    found = []
    for stage in (1, 2, 3):
        zero = pair(stage, bus=2e5)[1]
        bus, start = zero.host.bus, time.monotonic()
        before = bus.sent, bus.received
        toys.step_of(zero, 0)
        zero.host.settle()  # at stage 3 parameters may still be on their way
        elapsed, crossed = time.monotonic() - start, (bus.sent - before[0], bus.received - before[1])
        shards = sum(bucket.padded for bucket in zero.buckets) * 2 // zero.world_size
        found.append((crossed, shards, elapsed, sum(crossed) / 2e5))
    return found


@pytest.mark.thorough
def test_bytes_over_the_bus_and_its_speed():
    for found in toys.run(bus_of_all, 2):
        for crossed, shards, elapsed, needed in found:
            assert crossed == (shards, shards)
            assert elapsed > 0.9 * needed - 0.02


@pytest.mark.parametrize("stage", sample((1, 2, 3), (2,)))
def test_edits_states_and_checkpoints(stage, tmp_path):
    toys.run(edits_and_states, 2, str(tmp_path), stage)


class Wide(nn.Module):
    """20 million parameters, which compute little."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(20))

    def forward(self, x):
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x.float().square().mean()


def resident(kind):
    """Bytes that this rank's process has more than before there was a model, after two steps, gradients and all."""
    before = settled_bytes()
    zero = kind(Wide().bfloat16(), torch.optim.AdamW, lr=1e-3, fused=True)
    for _ in range(2):
        zero.zero_grad()
        zero.model(torch.randn(2, 1000, dtype=torch.bfloat16)).backward()
        zero.step()
    # what is free and still the C library's is held by nobody: 20 to 150 MB of it, another amount in each run
    return settled_bytes() - before


@pytest.mark.thorough
@in_proc
@pytest.mark.parametrize(("stage", "world_size"), sample([(s, w) for s in (1, 2, 3) for w in (1, 2)], [(2, 1)]))
def test_resident_memory_falls(stage, world_size):
    plain, away = (toys.run(resident, world_size, kind)[0] for kind in (toys.STAGES[stage], OFFLOADED[stage]))
    leaves = 12 if stage == 1 else 14  # bytes a parameter; stage 1 keeps its whole gradients
    assert plain - away > 0.9 * leaves * 20e6 / world_size
