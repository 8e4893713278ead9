"""What PyTorch users do, at every stage and on 1 to 4 ranks: right, or refused; never wrong, NaN, stuck or broken."""

import functools

import pytest
import toys
from house.scenarios import models, passes, stand, states, training  # noqa: F401  (they fill the table)
from house.scenarios.stand import TABLE, check
from thorough import companions, sample

CASES = [(name, world_size) for name, what in TABLE.items() for world_size in what.worlds]
# what the plain run has, each on one number of ranks: one of each kind, and what has failed before
ALWAYS = [
    (name, what.worlds[place % len(what.worlds)]) for place, (name, what) in enumerate(TABLE.items())
    if what.mend or place % 12 == 0
]
TOGETHER = 8  # scenarios that share their ranks, which take time to start


@functools.cache
def outcomes(names, world_size):
    """What the ranks of each stage saw, and what plain PyTorch did."""
    scenarios = [TABLE[name] for name in names]
    staged = toys.run(stand.play_staged, world_size, scenarios, timeout=90)
    return staged, toys.run(stand.play_plainly, 1, scenarios, world_size, timeout=60)[0]


def marked():
    for case in sample(CASES, ALWAYS):
        mend = TABLE[case.values[0]].mend
        expected = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=mend)] if mend else []
        yield pytest.param(*case.values, marks=[*case.marks, *expected])


@pytest.mark.parametrize("name, world_size", list(marked()))
def test_scenario(name, world_size):
    names = [other for other, size in companions((name, world_size), CASES, ALWAYS) if size == world_size]
    place = names.index(name) // TOGETHER * TOGETHER
    staged, plain = outcomes(tuple(names[place : place + TOGETHER]), world_size)
    check(TABLE[name], staged, plain[name])
