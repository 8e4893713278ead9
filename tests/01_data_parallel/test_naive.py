"""The first rung: naive.py trains what stage 0 trains. It differs in when it sends, and in how many messages."""

import contextlib

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample
from torch import nn, optim
from toys import Recipe

from zero_minimal.checkpoint import saved_state
from zero_minimal.extensions import averages
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


def test_a_parameter_without_a_gradient_on_one_rank_gets_the_mean_all_the_same():
    """Only rank 0 uses it: its gradient there, over two ranks, is what both must see."""
    for own, seen in toys.run(gradients_of_one_rank, 2):
        assert torch.equal(seen, own / 2)


def gradients_of_one_rank():
    zero = Naive(toys.build(checks.Awkward, dist.get_rank()), optim.SGD, lr=0.1)
    zero.model(*checks.awkward_batch(dist.get_rank(), 0)).backward()
    gradient = zero.model.of_rank_0.grad
    assert (gradient is None) == (dist.get_rank() > 0)
    own = [None if gradient is None else gradient.clone()]
    dist.broadcast_object_list(own)
    zero.reduced_gradients()
    return own[0], zero.model.of_rank_0.grad


def test_starts_from_rank_0_buffers_too():
    """Parameters that are not trained as well."""
    for make in (Normed, checks.Awkward):
        expected = toys.build(make, 0).state_dict()
        for state in toys.run(state_at_the_start, 3, make):
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def state_at_the_start(make):
    return Naive(toys.build(make, dist.get_rank()), optim.SGD, lr=0.1).model.state_dict()


def statistics_after_a_step(stage_class):
    zero = stage_class(toys.build(Normed, 0), optim.SGD, lr=0.1)
    zero.model(*toys.numbers(dist.get_rank(), 0)).backward()
    before = zero.model.norm.running_mean.clone()
    zero.step()
    return before, zero.model.norm.running_mean


def test_running_statistics_are_rank_0_after_a_step():
    for stage_class in (Naive, Stage0):
        (of_rank_0, same), (own, after) = toys.run(statistics_after_a_step, 2, stage_class)
        assert torch.equal(of_rank_0, same) and torch.equal(after, of_rank_0)
        assert not torch.equal(own, of_rank_0), "the ranks saw the same data, so this shows nothing"


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


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(dtype):
    with pytest.raises(ValueError, match="no fp32 masters"):
        Naive(toys.build(toys.MLP, dist.get_rank(), dtype), optim.SGD, lr=0.1)
    mixed = toys.build(toys.MLP, dist.get_rank())
    mixed.layers[0].to(dtype)
    with pytest.raises(ValueError, match="use Stage0"):
        Naive(mixed, optim.SGD, lr=0.1)
    return True


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_refuses_16_bit(dtype):
    assert toys.run(refused, 1, dtype) == [True]


def refuses_what_nobody_would_average(average):
    zero = Naive(toys.build(toys.MLP, dist.get_rank()), optim.SGD, lr=0.1)
    for step in range(3):
        for _ in range(2):  # gradients add up as long as they are not averaged
            zero.model(*toys.numbers(dist.get_rank(), step)).backward()
        getattr(zero, average[0])(*average[1:])
        with pytest.raises(RuntimeError, match="zero_grad.. before the next backward"):
            zero.model(*toys.numbers(dist.get_rank(), step)).backward()
        zero.zero_grad()
    return True


@pytest.mark.parametrize("average", (("step",), ("reduced_gradients",), ("clip_grad_norm_", 1.0)))
def test_refuses_backward_after_averaging(average):
    assert all(toys.run(refuses_what_nobody_would_average, 2, average))


def what_only_stages_have(folder):
    zero = Naive(toys.build(toys.MLP, 0), optim.SGD, lr=0.1)
    save, load = (lambda zero: saved_state.save(zero, folder)), (lambda zero: saved_state.load(zero, folder))
    for use in (averages.Average, save, load):
        with pytest.raises(TypeError, match="take Stage0 in place of Naive"):
            use(zero)
    zero.model(*toys.numbers(dist.get_rank(), 0)).backward()
    zero.step()
    zero.zero_grad()
    if dist.get_rank():
        with torch.no_grad():
            zero.model.layers[0].weight.add_(1.0)
    zero.model(*toys.numbers(dist.get_rank(), 0)).backward()
    with pytest.raises(RuntimeError, match="edited, or loaded, on some ranks only.* Edit alike on all ranks$"):
        zero.step()
    return True


def test_what_only_stages_have_is_refused(tmp_path):
    assert all(toys.run(what_only_stages_have, 2, tmp_path))
