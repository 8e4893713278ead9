"""Whole scripts of strangers come out as plain PyTorch's, or are refused at once, at every stage."""

import functools

import pytest
import toys
from house.scenarios import stand
from house.scenarios.stand import check_stage
from house.scenarios.strangers import STRANGERS

pytestmark = pytest.mark.thorough

CASES = [(name, stage, world_size)
         for name, what in STRANGERS.items() for stage in what.stages for world_size in what.worlds]


@functools.cache
def outcomes(world_size):
    """What the ranks of each stage saw, and what plain PyTorch did."""
    scripts = list(STRANGERS.values())
    staged = toys.run(stand.play_staged, world_size, scripts, timeout=180)
    return staged, toys.run(stand.play_plainly, 1, scripts, world_size, timeout=90)[0]


@pytest.mark.parametrize("name, stage, world_size", CASES)
def test_script(name, stage, world_size):
    staged, plain = outcomes(world_size)
    check_stage(STRANGERS[name], stage, staged, plain[name])
