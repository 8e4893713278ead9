"""Models of `transformers` train right at every stage, unchanged."""

import functools

import pytest
import toys
from house.scenarios import stand
from house.scenarios.stand import check
from house.scenarios.zoo import ZOO
from thorough import companions, sample

CASES = [(name, 2 + place % 2) for place, name in enumerate(ZOO)]
ALWAYS = [CASES[list(ZOO).index(name)] for name in ("GPT-2", "Mixtral", "T5")]


@functools.cache
def outcomes(names, world_size):
    models = [ZOO[name] for name in names]
    staged = toys.run(stand.play_staged, world_size, models, timeout=110)
    return staged, toys.run(stand.play_plainly, 1, models, world_size, timeout=110)[0]


@pytest.mark.parametrize("name, world_size", sample(CASES, ALWAYS))
def test_model(name, world_size):
    pytest.importorskip("transformers")
    names = [other for other, size in companions((name, world_size), CASES, ALWAYS) if size == world_size]
    place = names.index(name) // 4 * 4
    staged, plain = outcomes(tuple(names[place : place + 4]), world_size)
    check(ZOO[name], staged, plain[name])
