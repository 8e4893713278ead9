"""Offload: the same bits as without it, whatever the speed of the bus; less memory; the bytes of the formula."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample

from zero_minimal import offload
from zero_minimal.foundations import saved_state

OFFLOADED = (None, offload.Offloaded1, offload.Offloaded2, offload.Offloaded3)
RECIPES = {
    "fp32": toys.Recipe(clip=0.5, steps=4),
    "bf16": toys.Recipe(dtype=torch.bfloat16, accumulate=2, steps=4,
                        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)),
    "fp16": toys.Recipe(dtype=torch.float16, scale=2.0**20, clip=0.5, steps=5),  # first overflows, then not
    "fused": toys.Recipe(options=dict(lr=1e-2, fused=True), steps=3),
}


def both(stage, recipe, **options):
    """A stage and the same offloaded: their Runs on this rank."""
    recipe = dataclasses.replace(recipe)
    plain = toys.train(toys.STAGES[stage], recipe)
    recipe.options = recipe.options | options
    return plain, toys.train(OFFLOADED[stage], recipe)


def pair(stage, **options):
    """A stage and the same offloaded, of one model each, bf16."""
    made = []
    for kind, extra in ((toys.STAGES[stage], {}), (OFFLOADED[stage], options)):
        model = toys.build(toys.Transformer, dist.get_rank(), torch.bfloat16)
        made.append(kind(model, torch.optim.AdamW, lr=1e-2, bucket_bytes=4096, **extra))
    return made


def step_of(zero, step):
    loss = zero.model(*toys.tokens(dist.get_rank(), step))
    loss.backward()
    zero.step()
    zero.zero_grad()
    return loss.item()


def same(plain, offloaded):
    assert offloaded.losses == plain.losses
    assert offloaded.norms == plain.norms
    assert toys.identical(offloaded.parameters, plain.parameters)


def all_recipes(stage, names, bus):
    for name in names:
        same(*both(stage, RECIPES[name], bus=bus))


@pytest.mark.parametrize(("stage", "world_size"), sample(
    [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3)], [(1, 1), (2, 3), (3, 2)]))
def test_same_bits(stage, world_size):
    toys.run(all_recipes, world_size, stage, tuple(RECIPES), None)


def bus_of(stage):
    """Bytes of a step over a slow bus, each way, and the formula; the seconds of the step, and those of the bus."""
    zero = pair(stage, bus=2e5)[1]
    bus, start = zero.host.bus, time.monotonic()
    before = bus.sent, bus.received
    step_of(zero, 0)
    elapsed, crossed = time.monotonic() - start, (bus.sent - before[0], bus.received - before[1])
    shards = sum(bucket.padded for bucket in zero.buckets) * 2 // zero.world_size
    return crossed, shards, elapsed, sum(crossed) / 2e5


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_bytes_over_the_bus_and_its_speed(stage):
    for crossed, shards, elapsed, needed in toys.run(bus_of, 2, stage):
        assert crossed == (shards, shards)
        assert elapsed > 0.9 * needed - 0.02


def through_a_slow_bus():
    for stage in (1, 2, 3):
        same(*both(stage, RECIPES["bf16"], bus=1e6))


def test_a_slow_bus_changes_nothing():
    toys.run(through_a_slow_bus, 2)


def edits_and_states(folder):
    for stage in (1, 2, 3):
        plain, away = pair(stage)
        assert [step_of(plain, step) for step in range(2)] == [step_of(away, step) for step in range(2)]
        for zero in (plain, away):  # an edit of a few elements; the others keep their full precision
            with zero.gather_parameters(), torch.no_grad():
                zero.model.head.weight[1:3] += 0.5
        assert step_of(plain, 2) == step_of(away, 2)
        if stage < 3:
            for zero in (plain, away):
                zero.model.head.weight.data[3] -= 0.25  # where no version counter sees it
        assert step_of(plain, 3) == step_of(away, 3)
        # this rank's part
        state, whole = away.state_dict(), plain.state_dict()
        assert toys.identical(state["shards"], whole["shards"])
        for key, held in whole["optimizer"]["state"].items():
            assert all(torch.equal(value, state["optimizer"]["state"][key][name]) for name, value in held.items())
        expected = [step_of(away, step) for step in (4, 5)]
        again = pair(stage)[1]
        again.load_state_dict(state)
        assert [step_of(again, step) for step in (4, 5)] == expected
        # a checkpoint, from the offloaded stage to the plain one and back
        saved_state.save(again, f"{folder}/{stage}")
        expected = [step_of(again, step) for step in (6, 7)]
        plain, away = pair(stage)
        for zero in (plain, away):
            saved_state.load(zero, f"{folder}/{stage}")
            assert [step_of(zero, step) for step in (6, 7)] == expected


def test_edits_states_and_checkpoints(tmp_path):
    toys.run(edits_and_states, 2, str(tmp_path))
