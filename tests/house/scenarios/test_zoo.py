"""Models of `transformers` train right at every stage, unchanged."""

import functools
import warnings

import pytest
import torch
import toys
from house.scenarios import stand
from house.scenarios.stand import check
from house.scenarios.zoo import ZOO, build
from thorough import companions, sample, sharing

pytestmark = pytest.mark.thorough

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
    staged, plain = outcomes(sharing(name, names, 4), world_size)
    check(ZOO[name], staged, plain[name])


def spreads(names):
    """Of each model built in memory, and on the meta device: the mean and the deviation of each large parameter."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        me = stand.Staged("stage3", None)
        torch.manual_seed(me.rank)
        for device in ("cpu", "meta"):
            with torch.device(device):
                model = build(name)
            zero = me.wrap(model, torch.optim.AdamW, lr=0.01)
            with zero.gather_parameters():
                found[name, device] = {param_name: (param.mean().item(), param.std().item())
                                       for param_name, param in model.named_parameters() if param.numel() >= 100}
    return found


@pytest.mark.parametrize("name", sample(ZOO, ("GPT-2", "OPT")))
def test_built_on_meta_starts_as_the_library_starts_it(name):
    """Weights come from the model's own _init_weights, not from torch's."""
    pytest.importorskip("transformers")
    for found in toys.run(spreads, 2, [name], timeout=100):
        ordinary, on_meta = found[name, "cpu"], found[name, "meta"]
        assert ordinary.keys() == on_meta.keys() and ordinary
        for param, (mean, spread) in ordinary.items():
            # of 100 numbers or more: five standard errors of the mean, and of the deviation (1 / sqrt(200))
            assert abs(on_meta[param][0] - mean) <= 5 * 2**0.5 * spread / 10, param
            assert abs(on_meta[param][1] - spread) <= 5 * 2**0.5 * spread / 200**0.5, param
