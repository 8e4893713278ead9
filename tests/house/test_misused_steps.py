"""Steps that a PyTorch user writes out of habit: each of these went wrong silently. It is right now, or refused."""

import itertools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import Coder, by_stage, by_stage_and_world, by_world, draw, refused
from thorough import sample
from torch import nn, optim

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.extensions.averages import Average
from zero_minimal.extensions.join import together
from zero_minimal.kept_units import Kept3
from zero_minimal.late_gather import Late2
from zero_minimal.offload import Offloaded2

SHARDED = pytest.mark.parametrize("stage", (1, 2, 3))


def wrap(stage, optimizer=optim.SGD, model=None, **options):
    torch.manual_seed(0)
    return toys.STAGES[stage](model or Coder(), optimizer, lr=0.1, bucket_bytes=600, **options)


def loss_of(zero, step=0):
    return zero.model(draw(step, dist.get_rank())).logsumexp(-1).mean()


def weights(zero):
    with zero.gather_parameters():
        return torch.cat([param.detach().reshape(-1) for param in zero.model.parameters()])


# ------------------------------------------------------------------------------------------------------ the loss scaler


def two_models(stage, scaled):
    one, other, scaler = wrap(stage), wrap(stage), LossScaler(1024.0)
    for step in range(2):
        for zero in (one, other):
            (scaler.scale(loss_of(zero, step)) if scaled else loss_of(zero, step)).backward()
        if scaled:
            assert scaler.step(one) and scaler.step(other)
            scaler.update()
        else:
            one.step()
            other.step()
        one.zero_grad()
        other.zero_grad()
    return weights(one), weights(other)


@by_stage_and_world
def test_a_scaler_for_two_models(stage, world_size):
    runs = [toys.run(two_models, world_size, stage, scaled) for scaled in (True, False)]
    for scaled, plain in zip(*runs, strict=True):
        torch.testing.assert_close(scaled, plain)


def one_of_two_overflows(stage, first):
    zeros, scaler = (wrap(stage), wrap(stage)), LossScaler(1024.0)
    for zero in zeros:
        loss = scaler.scale(loss_of(zero))
        (loss * float("inf") if (zero is zeros[0]) == first else loss).backward()
    taken = [scaler.step(zero) for zero in zeros]
    scaler.update()
    return taken, scaler.scale_value


@by_world
@pytest.mark.parametrize("first", (True, False))
def test_any_overflow_halves_the_scale(first, world_size):
    assert toys.run(one_of_two_overflows, world_size, 2, first) == [([not first, first], 512.0)] * world_size


def drop_a_batch(stage, scaled, update):
    zero, scaler, norms = wrap(stage), LossScaler(1024.0), []
    for step in range(3):
        loss = loss_of(zero, step)
        (scaler.scale(loss) if scaled else loss).backward()
        if scaled:
            scaler.unscale_(zero)
        norms.append(zero.clip_grad_norm_(0.5).item())
        if step != 1:
            if scaled:
                scaler.step(zero)
                scaler.update()
            else:
                zero.step()
        elif update:
            scaler.update()
        zero.zero_grad()
    return torch.tensor(norms), weights(zero), scaler.state_dict()["good_steps"]


@by_world
@pytest.mark.parametrize("update", (True, False))
def test_a_batch_that_is_dropped_after_unscaling(update, world_size):
    scaled, plain = (toys.run(drop_a_batch, world_size, 2, scaled, update)[0] for scaled in (True, False))
    torch.testing.assert_close(scaled[:2], plain[:2])
    assert scaled[2] == 2


def forget_update(stage, unscale):
    zero, scaler = wrap(stage), LossScaler(1024.0)
    for step in range(2):
        scaler.scale(loss_of(zero, step)).backward()
        if unscale:
            scaler.unscale_(zero)
        scaler.step(zero)
        zero.zero_grad()


@by_world
@pytest.mark.parametrize("unscale", (True, False))
def test_an_update_that_is_forgotten(unscale, world_size):
    assert "call scaler.update() after it" in refused(forget_update, 1, unscale, world_size=world_size)


def clip_each_micro_batch(stage, how):
    zero, scaler = wrap(stage), LossScaler(1024.0)
    for micro in range(2):
        loss_of(zero, micro).backward()
        if how == "clip":
            zero.clip_grad_norm_(0.01)
        else:
            scaler.unscale_(zero)
            zero.reduced_gradients()


@by_stage
@pytest.mark.parametrize("how", sample(("clip", "unscale"), ["clip"]))
def test_clipping_each_micro_batch(stage, how):
    assert "once, after the last micro-batch" in refused(clip_each_micro_batch, stage, how)


def forget_zero_grad(stage, whose):
    """Of one of two models, as a GAN has them."""
    generator, critic = wrap(stage, model=nn.Linear(3, 3)), wrap(stage, model=nn.Sequential(nn.Linear(3, 1)))
    for _ in range(2):
        critic.model(generator.model(torch.ones(2, 3))).sum().backward()
        for name, zero in (("generator", generator), ("critic", critic)):
            zero.step()
            if name != whose:
                zero.zero_grad()


@by_stage
@pytest.mark.parametrize("whose, words", (("generator", "of model 1, a Linear:"),
                                          ("critic", "of model 2, a Sequential:")))
def test_whose_zero_grad_is_forgotten(stage, whose, words):
    assert f"call zero.zero_grad() after zero.step() {words}" in refused(forget_zero_grad, stage, whose)


# -------------------------------------------------------------------------------------------------------- saved and put


def load_rank_0s_optimizer(stage):
    zero = wrap(stage, optim.Adam)
    loss_of(zero).backward()
    zero.step()
    box = [zero.optimizer.state_dict()]
    zero.optimizer.load_state_dict(box[0])
    dist.broadcast_object_list(box, 0)
    zero.optimizer.load_state_dict(box[0])


@by_world
@SHARDED
def test_the_optimizer_state_of_another_rank(stage, world_size):
    words = refused(load_rank_0s_optimizer, stage, world_size=world_size)
    assert f"belongs to the shards of rank 0 of {world_size}" in words and "zero.load_state_dict()" in words


def test_at_stage_0_it_is_everybodys():
    toys.run(load_rank_0s_optimizer, 2, 0)


def load_before_backward(stage):
    zero = wrap(stage)
    state = {**zero.state_dict(), "shards": [shard.clone() for shard in zero.state_dict()["shards"]]}
    loss_of(zero).backward()
    zero.step()
    zero.zero_grad()
    loss = loss_of(zero)
    zero.load_state_dict(state)
    loss.backward()


@by_stage
def test_a_state_that_is_loaded_between_forward_and_backward(stage):
    assert "modified by an inplace operation" in refused(load_before_backward, stage)


def average_before_backward(stage):
    zero = wrap(stage)
    average = Average(zero, 0.5)
    for step in range(2):
        loss = loss_of(zero, step)
        with average.in_place(), torch.no_grad():
            loss_of(zero)
        loss.backward()
        zero.step()
        zero.zero_grad()
        average.update()
    return weights(zero)


def plain_steps(stage):
    zero = wrap(stage)
    for step in range(2):
        loss_of(zero, step).backward()
        zero.step()
        zero.zero_grad()
    return weights(zero)


@by_stage
def test_averages_between_forward_and_backward_leave_the_graph_as_it_is(stage):
    assert torch.equal(toys.run(average_before_backward, 2, stage)[0], toys.run(plain_steps, 2, stage)[0])


def swap_data(stage):
    zero = wrap(stage)
    loss_of(zero).backward()
    zero.model.head.weight.data = torch.ones(11, 16)
    zero.step()


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_data_that_is_replaced_before_the_step(stage):
    assert "change values in place, param.data.copy_(" in refused(swap_data, stage)


# ------------------------------------------------------------------------------------------------------- what is given


CALLS = {
    "step(lambda: 1)": "call loss.backward() before it",
    "zero_grad(1, 2)": "takes nothing, and drops all gradients",
    "clip_grad_norm_(1.0, norm_type=1)": "clips by their Euclidean norm",
    "clip_grad_norm_(1.0, error_if_nonfinite=True)": "if not norm.isfinite()",
    "clip_grad_norm_(zero.model.parameters(), 1.0)": "zero.clip_grad_norm_(max_norm) knows the parameters",
    "optimizer.load_state_dict(plain.state_dict())": "give it to zero.load_state_dict() there",
    "optimizer.step(lambda: 1)": "call zero.step()",
    "clip_grad_norm_(max_norm=1.0, norm_type=2.0, error_if_nonfinite=False, foreach=True)": "",
    "step(closure=None)": "",
    "zero_grad(set_to_none=True)": "",
}


def calls_as_in_torch(kind):
    torch.manual_seed(0)
    zero, said = kind(Coder(), optim.Adam, lr=0.1, bucket_bytes=600), []
    names = {"zero": zero, "plain": optim.Adam(zero.model.parameters(), lr=0.1)}
    before = weights(zero)
    loss_of(zero).backward()
    for call in CALLS:
        try:
            eval(f"zero.{call}", names)
            said.append("")
        except (TypeError, ValueError, RuntimeError) as error:
            said.append(str(error))
    assert not torch.equal(weights(zero), before)
    return said


@pytest.mark.parametrize("kind", sample([*toys.STAGES, Late2, Offloaded2, Kept3], [toys.STAGES[2]]))
def test_calls_as_torch_takes_them_are_answered(kind):
    for call, words, said in zip(CALLS, CALLS.values(), toys.run(calls_as_in_torch, 2, kind)[0], strict=True):
        assert words in said and bool(words) == bool(said), (call, said)


class Trust(optim.SGD):
    """Steps by the norm of a parameter, in groups that ask for it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and group.get("trust"):
                    param.grad.mul_(param.detach().norm() / param.grad.norm())
        return super().step(closure)


def trust_in_one_group(stage, trust):
    model = Coder()
    matrices, others = ([param for param in model.parameters() if (param.ndim > 1) == large] for large in (True, False))
    wrap(stage, Trust, model, param_groups=[{"params": matrices, "trust": trust, "name": "matrices"},
                                            {"params": others, "lr": 0.0, "weight_decay": 0.1}])


@by_stage
def test_an_option_of_one_group_that_is_not_element_wise(stage):
    assert "Trust is not element-wise" in refused(trust_in_one_group, stage, True)
    toys.run(trust_in_one_group, 2, stage, False)


def endless_data():
    batches = range(3) if dist.get_rank() == 0 else itertools.count()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = list(together(batches))
    return seen, [str(warning.message) for warning in caught]


@by_world
def test_a_rank_whose_data_never_ends(world_size):
    first, *others = toys.run(endless_data, world_size, timeout=30)
    assert first == ([0, 1, 2], [])
    for rank, (seen, (words,)) in enumerate(others, start=1):
        assert seen == [0, 1, 2] and f"rank {rank} stops after 3 batches with others unread" in words


def outside_the_group(stage):
    group = dist.new_group([1, 2])
    toys.STAGES[stage](nn.Linear(2, 2), optim.SGD, lr=0.1, group=group)


@by_stage
def test_a_rank_outside_the_group(stage):
    assert "this rank, 0 of the world, is not in group=" in refused(outside_the_group, stage, world_size=3)


def rates_that_differ(stage, how):
    zero = wrap(stage)
    if how == "in a tensor":
        zero.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(zero.optimizer, patience=0, factor=0.5)
    for step in range(3):
        loss = loss_of(zero, step)
        loss.backward()
        zero.step()
        zero.zero_grad()
        if how != "by hand":
            plateau.step(step if dist.get_rank() else -step)
        else:
            zero.optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())


@by_stage_and_world
def test_learning_rates_that_differ(stage, world_size):
    for how in ("scheduled", "in a tensor", "by hand"):
        words = refused(rates_that_differ, stage, how, world_size=world_size)
        assert "the learning rates differ" in words and "collectives.all_reduce(loss)" in words


def clipped_on_one_rank():
    zero = wrap(0)
    for step in range(2):
        loss_of(zero, step).backward()
        if not dist.get_rank():
            zero.clip_grad_norm_(0.01)
        zero.step()
        zero.zero_grad()


@by_world
def test_clipping_on_one_rank_alone(world_size):
    """At stage 0, where clipping sends nothing."""
    words = refused(clipped_on_one_rank, world_size=world_size)
    assert re.search(r"rank 0 called clip_grad_norm_\(\) .* and rank [12] did not.*print what it returns on one", words)


def equal_rates_under_long_names():
    model = nn.ModuleDict({"a_name_of_a_module_that_is_long" * 8: nn.Linear(4, 4)})
    model.forward = lambda x: next(iter(model.values()))(x)
    zero = toys.STAGES[3](model, optim.SGD, lr=1 / 3, units=list(model.values()))
    for _ in range(2):
        zero.model(torch.ones(1, 4)).sum().backward()
        zero.step()
        zero.zero_grad()


@by_world
def test_a_note_that_is_too_long(world_size):
    toys.run(equal_rates_under_long_names, world_size)
