"""What PyTorch users do, at every stage and on 1 to 4 ranks: right, or refused; never wrong, NaN, stuck or broken."""

import functools

import pytest
import toys
from house.scenarios import models, passes, stand, states, training  # noqa: F401  (they fill the table)
from house.scenarios.stand import TABLE, WORLDS, judge
from thorough import companions, sample

CASES = [(name, world_size) for name, what in TABLE.items() for world_size in WORLDS if world_size in what.worlds]
IN_TURN = [(name, 2 + place % 2) for place, name in enumerate(TABLE)]  # on 2 ranks, the next on 3, and so on
TOGETHER = 8  # scenarios that share their ranks, which take time to start


@functools.cache
def outcomes(names, world_size):
    """What the ranks of each stage saw, and what plain PyTorch did."""
    scenarios = [TABLE[name] for name in names]
    staged = toys.run(stand.play_staged, world_size, scenarios, timeout=90)
    return staged, toys.run(stand.play_plainly, 1, scenarios, world_size, timeout=60)[0]


def marked():
    for case in sample(CASES, IN_TURN):
        name, world_size = case.values
        what = TABLE[name]
        mend = [pytest.mark.xfail(strict=True, reason=what.mend)] if what.mend and world_size in what.mend_in else []
        yield pytest.param(*case.values, marks=[*case.marks, *mend])


@pytest.mark.parametrize("name, world_size", marked())
def test_scenario(name, world_size):
    names = [other for other, size in companions((name, world_size), CASES, IN_TURN) if size == world_size]
    place = names.index(name) // TOGETHER * TOGETHER
    staged, plain = outcomes(tuple(names[place : place + TOGETHER]), world_size)
    what = TABLE[name]
    for stage in what.stages:
        letter, why = judge(what, stage, [of_rank[name, stage] for of_rank in staged], plain[name])
        wanted = ("R",) if stage in what.refused else ("A", "R") if what.or_refused else ("A",)
        assert letter in wanted, f"{stage}: {letter} and not {' or '.join(wanted)}: {why}"
