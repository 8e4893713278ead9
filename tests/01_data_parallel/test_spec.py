"""Lesson 1, the naive way: it trains what stage 0 trains, and differs in when it sends, and in how many messages."""

import contextlib

import checks
import pytest
import torch.distributed as dist
import toys
from thorough import sample
from torch import nn, optim
from toys import Recipe

from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.naive import Naive
from zero_minimal.stage0 import Stage0

worlds = pytest.mark.parametrize("world_size", sample((1, 2, 3), [3]))


class Whole(Naive):
    """With the one thing more that toys.train asks of a stage. Here all parameters are whole anyway."""

    def gather_parameters(self):
        return contextlib.nullcontext()


class Normed(nn.Module):
    """With running statistics that differ from rank to rank before a stage has it. model(x, y) is a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x, y):
        return (self.last(self.norm(self.first(x))) - y).square().mean()


RECIPES = {name: checks.RECIPES[name] for name in (
    "AdamW", "SGD with momentum", "clipping", "accumulation", "accumulation without no_sync", "tied weights",
    "frozen, tied and unused parameters", "another order in each step",
)} | {"batch norm": Recipe(make=Normed, batch=toys.numbers, options=checks.ADAM)}


@pytest.mark.thorough
@worlds
def test_trains_as_stage_0_does(world_size):
    ranks = toys.run(checks.train_all, world_size, RECIPES, Whole, Stage0)
    for name, recipe in RECIPES.items():
        before = list(toys.build(recipe.make, 0).parameters())
        for results in ranks:
            naive, stage0 = results[name]
            assert naive.losses == pytest.approx(stage0.losses, abs=1e-6), name
            assert naive.norms == pytest.approx(stage0.norms, rel=1e-6), name
            assert toys.distance(naive.parameters, stage0.parameters) < 1e-5 * toys.distance(naive.parameters, before)
            assert toys.identical(naive.parameters, ranks[0][name][0].parameters), f"{name}: drifted from rank 0"


# -------------------------------------------------------------------------------------------------------------- traffic


def parameters_of(model):
    return len(list(model.parameters()))


@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", (1, 3))
@pytest.mark.parametrize("world_size", (2, 3))
def test_sends_each_parameters_gradient_once_and_nothing_before_step(world_size, accumulate):
    for events, psi, _ in toys.run(checks.events_of_a_step, world_size, Naive, accumulate=accumulate):
        begins = [event.kind for event in events].index("step")
        starts = [place for place, event in enumerate(events) if event.kind == "start"]
        assert starts and min(starts) > begins, "something was sent before step()"
        assert [events[place].name for place in starts] == ["all_reduce"] * parameters_of(toys.Transformer())
        assert checks.sent_in(events) == psi, "not every gradient, or one of them twice"
        kinds = [event.kind for event in events[begins + 1 :]]
        assert kinds == ["start", "wait"] * len(starts), "two were under way at once"


def sent_in_a_step(clip):
    zero = Naive(toys.build(toys.Transformer, dist.get_rank()), optim.AdamW, lr=1e-2)
    for step in range(2):
        with TrafficMeter() as meter:
            zero.model(*toys.tokens(dist.get_rank(), step)).backward()
            if clip:
                zero.clip_grad_norm_(clip)
            zero.step()
            zero.zero_grad()
    return meter.sent_bytes, sum(param.nbytes for param in zero.params)


@pytest.mark.parametrize("clip", sample((0.0, 0.1), [0.1]))
@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_sent_bytes_equal_the_formula(world_size, clip):
    for sent, psi in toys.run(sent_in_a_step, world_size, clip):
        assert sent == pytest.approx(2 * psi * (world_size - 1) / world_size, rel=1e-12)


@pytest.mark.parametrize("world_size", (2, 3))
def test_the_wire_carries_what_the_formula_says(world_size):
    checks.assert_traffic(Naive, world_size, volume=2)
