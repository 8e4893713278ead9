"""Offload: the same bits as without it, whatever the speed of the bus; less memory; the bytes of the formula."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample

from zero_minimal import offload

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
