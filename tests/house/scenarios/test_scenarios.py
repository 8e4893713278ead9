"""What PyTorch users do, at every stage and on 1 to 4 ranks: right, or refused; never wrong, NaN, stuck or broken."""

import functools
from collections import Counter

import pytest
import toys
from house.scenarios import models, passes, stand, states, training  # noqa: F401  (they fill the table)
from house.scenarios.stand import TABLE, check
from thorough import companions, sample, sharing


def world(worlds, turn):
    """3 ranks every other time, which no size here is a multiple of, else one of the others. Neighbours in the table
    are of one kind, and so each kind is seen in every world; the fuzzer's programs (test_fuzz.py) mix all of it."""
    others = [size for size in worlds if size != 3] or worlds
    return 3 if turn % 2 and 3 in worlds else others[turn // 2 % len(others)]


CASES = [(name, world(what.worlds, place)) for place, (name, what) in enumerate(TABLE.items())]
# what the plain run has: what nothing else there would see, some of each world, and what has failed before
PLAIN = {
    "batch norm", "blocks used twice", "other layers left out on each rank", "auxiliary losses that blocks keep",
    "two graphs backwards in the other order", "evaluations between all", "checkpointing", "hooks on parameters",
    "edited outside by copy_", "saved and restarted, AdamW", "a group of frozen parameters", "two models in turn",
    "accumulation, no_sync, clipped", "fp16, a rank overflows", "torch's clip_grad_norm_", "sparse gradients",
}
ALWAYS = [case for place, case in enumerate(CASES)
          if TABLE[case[0]].mend or place % 65 == 0 or case[0] in PLAIN]
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
    assert min(sizes.values()) > len(TABLE) / 9 and {size for _, size in ALWAYS} == set(stand.WORLDS)
    assert [world((1, 2, 3, 4), turn) for turn in range(6)] == [1, 3, 2, 3, 4, 3]
    assert [world((1, 2), turn) for turn in range(4)] == [1, 1, 2, 2] and world((3,), 0) == 3


@pytest.mark.parametrize("name, world_size", list(marked()))
def test_scenario(name, world_size):
    names = [other for other, size in companions((name, world_size), CASES, ALWAYS) if size == world_size]
    staged, plain = outcomes(sharing(name, names, TOGETHER), world_size)
    check(TABLE[name], staged, plain[name])
