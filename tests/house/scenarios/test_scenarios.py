"""What PyTorch users do, at every stage and on 1 to 4 ranks: right, or refused; never wrong, NaN, stuck or broken."""

import functools
from collections import Counter

import pytest
import toys
from house.scenarios import models, passes, stand, states, training  # noqa: F401  (they fill the table)
from house.scenarios.stand import TABLE, check
from thorough import companions, sample


def two(worlds, turn):
    """Of more than two: 3 ranks, which no size here is a multiple of, and one of the others, in turn. Neighbours in the
    table are of one kind, and so each kind is seen in every world."""
    others = [size for size in worlds if size != 3]
    return (3, others[turn % len(others)]) if len(worlds) > 2 else worlds


WORLDS = {name: two(what.worlds, place) for place, (name, what) in enumerate(TABLE.items())}
CASES = [(name, world_size) for name, worlds in WORLDS.items() for world_size in worlds]
# what the plain run has, each on one number of ranks, in turn: one of each kind, and what has failed before
ALWAYS = [(name, worlds[place // 11 % len(worlds)]) for place, (name, worlds) in enumerate(WORLDS.items())
          if TABLE[name].mend or place % 11 == 0]
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


def test_every_world_has_its_share():
    """And every scenario of the table runs."""
    sizes = Counter(world_size for _, world_size in CASES)
    assert {name for name, _ in CASES} == TABLE.keys() and sizes.keys() == set(stand.WORLDS)
    assert min(sizes.values()) > len(TABLE) / 5 and {size for _, size in ALWAYS} == set(stand.WORLDS)
    assert two((1, 2, 3, 4), 5) == (3, 4) and two((2, 3, 4), 5) == (3, 4) and two((1, 2), 5) == (1, 2)


@pytest.mark.parametrize("name, world_size", list(marked()))
def test_scenario(name, world_size):
    names = [other for other, size in companions((name, world_size), CASES, ALWAYS) if size == world_size]
    place = names.index(name) // TOGETHER * TOGETHER
    staged, plain = outcomes(tuple(names[place : place + TOGETHER]), world_size)
    check(TABLE[name], staged, plain[name])
