"""A model and its stage: who edits it alone is told, copies are plain models, and each can go before the other."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import by_stage, by_stage_and_world, in_one_line, in_ranks
from thorough import sample
from torch import optim
from torch.optim.swa_utils import AveragedModel

from zero_minimal.core import collectives
from zero_minimal.processes import ranks


def wrap(stage, make=toys.Transformer, dtype=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    model = make().to(dtype)
    options = {"lr": 1e-2, "bucket_bytes": 4096, **options}
    return model, toys.STAGES[stage](model, options.pop("optimizer", optim.AdamW), **options)


# ------------------------------------------------------------------------------------ edits inside gather_parameters()


def load(model, values):
    model.load_state_dict({name: torch.full_like(tensor, values) for name, tensor in model.state_dict().items()})


def load_differently(stage, dtype):
    """What is said to this rank after rank 0 alone has loaded weights, after ranks have loaded different ones, and
    after one element of one parameter differs on the last rank."""
    rank, last, said = dist.get_rank(), dist.get_world_size() - 1, []
    model, zero = wrap(stage, dtype=dtype)
    toys.step_of(zero, 0)
    before = toys.whole_parameters(zero)

    def one_element():
        if rank == last:
            with torch.no_grad():
                model.head.weight[3, 1] += 1

    for edit in (lambda: rank or load(model, 1.0), lambda: load(model, float(rank)), one_element):
        with pytest.raises(RuntimeError, match=r"leaves gather_parameters\(\) with other values") as caught:
            with zero.gather_parameters():
                edit()
        said.append(in_one_line(caught.value))
        if stage == 3:
            assert toys.identical(toys.whole_parameters(zero), before), "there the edit is undone"
        else:
            for param, value in zip(model.parameters(), before, strict=True):
                param.data.copy_(value)
    return said


@pytest.mark.thorough
@by_stage_and_world
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_ranks_that_edit_differently_are_told(world_size, stage, dtype):
    for said in toys.run(load_differently, world_size, stage, dtype):
        for words in said[:2]:
            assert "rank 1 leaves" in words and "of 'embedding.weight' and 39 more than rank 0" in words
        assert f"rank {world_size - 1} leaves" in said[2] and "of 'head.weight' than rank 0" in said[2]


def load_on_rank_0(stage, dtype):
    """As the message says: rank 0 loads, and sends."""
    model, zero = wrap(stage, dtype=dtype)
    toys.step_of(zero, 0)
    with zero.gather_parameters():
        if dist.get_rank() == 0:
            load(model, 0.25)
        for param in model.parameters():
            collectives.broadcast(param.data)
    loaded = toys.whole_parameters(zero)
    toys.step_of(zero, 1)
    return loaded, toys.whole_parameters(zero)


@pytest.mark.thorough
@by_stage_and_world
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rank_0_may_load_and_send(world_size, stage, dtype):
    (loaded, after), *others = toys.run(load_on_rank_0, world_size, stage, dtype)
    assert all(bool((value == 0.25).all()) for value in loaded)
    assert 0 < toys.distance(loaded, after) < 5  # a step of AdamW, from there on
    for other in others:
        assert toys.identical(other[0], loaded) and toys.identical(other[1], after)


@by_stage
@in_ranks(2)
def test_an_error_inside(stage):
    """An error in the block comes out as it is, and at stage 3 undoes what was edited."""
    model, zero = wrap(stage)
    before = toys.whole_parameters(zero)
    with pytest.raises(ZeroDivisionError):
        with zero.gather_parameters():
            load(model, 1.0)
            raise ZeroDivisionError
    assert toys.identical(toys.whole_parameters(zero), before) == (stage == 3)
    toys.step_of(zero, 0)


def enter_alone(stage):
    _, zero = wrap(stage)
    if dist.get_rank() == 0:
        with zero.gather_parameters():
            pass
    toys.step_of(zero, 0)


@by_stage
def test_one_rank_alone_enters(stage):
    with pytest.raises(ranks.RankError, match="the ranks are not in the same collective"):
        toys.run(enter_alone, 2, stage, timeout=60)


# ------------------------------------------------------------------------------------------------ copies of the model


def same_losses(model, plain):
    with torch.no_grad():
        return torch.equal(model(*toys.tokens(0, 7)), plain(*toys.tokens(0, 7)))


def trains_alone(plain):
    """As any model: forward, backward, step; no rank waits for it."""
    if dist.get_rank() == 0:
        optimizer, before = optim.SGD(plain.parameters(), lr=0.1), [param.clone() for param in plain.parameters()]
        plain(*toys.tokens(0, 8)).backward()
        optimizer.step()
        assert toys.distance(before, plain.parameters()) > 0


def by_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = (copy.deepcopy, lambda model: AveragedModel(model).module, by_pickle)


@by_stage
@pytest.mark.parametrize("how", sample(range(3), [0]), ids=("deepcopy", "AveragedModel", "pickle"))
@in_ranks(2)
def test_a_copy_is_a_plain_model(stage, how):
    model, zero = wrap(stage)
    toys.step_of(zero, 0)
    with zero.gather_parameters():
        plain = COPIES[how](model)
        assert same_losses(model, plain)
        assert set(map(id, plain.parameters())).isdisjoint(map(id, model.parameters()))
    trains_alone(plain)
    kept = [param.detach().clone() for param in plain.parameters()]
    first = [toys.step_of(zero, step) for step in range(1, 3)]
    assert toys.identical(plain.parameters(), kept), "a copy goes its own way"
    # and it may belong to a stage of its own
    again, twin = copy.deepcopy(plain), toys.STAGES[stage](plain, optim.SGD, lr=0.1)
    toys.step_of(twin, 0)
    assert not toys.identical(toys.whole_parameters(twin), again.parameters())
    # what was copied from has not noticed
    _, other = wrap(stage)
    toys.step_of(other, 0)
    assert first == [toys.step_of(other, step) for step in range(1, 3)]


@pytest.mark.thorough
@by_stage
@in_ranks(2)
def test_a_copy_outside(stage):
    """Outside gather_parameters(): right, or refused with the line to write."""
    model, zero = wrap(stage)
    toys.step_of(zero, 0)
    parts = {"model": model, "block": model.blocks[1], "head": model.head}
    for part in parts.values():
        for make in (copy.deepcopy, by_pickle):
            if stage < 3:
                copied = make(part)
                assert toys.identical(copied.parameters(), part.parameters())
            else:
                with pytest.raises(RuntimeError, match="gather_parameters"):
                    make(part)
        for use in (lambda: part.state_dict(), lambda: part.load_state_dict({})):  # noqa: B023
            if stage == 3:
                with pytest.raises(RuntimeError, match=r"gather_parameters\(\).*zero\.state_dict\(\)"):
                    use()
    if stage == 3:
        with pytest.raises(RuntimeError, match="gather_parameters"):
            AveragedModel(model)
        with zero.gather_parameters():
            average = AveragedModel(model)
        with pytest.raises(RuntimeError, match="gather_parameters"):
            average.update_parameters(model)
    toys.step_of(zero, 1)
    for refused in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"zero\.state_dict\(\)"):
            refused(zero)


# -------------------------------------------------------------------------------------------- a model without its stage


def drop_the_stage(stage):
    gc.disable()  # nothing here waits for a collection
    model, zero = wrap(stage, optimizer=optim.Adam)
    toys.step_of(zero, 0)
    loss = model(*toys.tokens(0, 1))  # a graph that stays: people keep their losses
    loss.backward()
    gone = [weakref.ref(part) for part in (zero, zero.reducer, zero.buckets[0], zero.optimizer)]
    values = toys.whole_parameters(zero)
    scheduler = optim.lr_scheduler.StepLR(zero.optimizer, 10)
    del zero
    assert [type(part()) for part in gone if part()] == [optim.Adam], "a scheduler keeps the optimizer, and no more"
    del scheduler
    assert not gone[-1](), "the model keeps the optimizer alive"
    gc.enable()
    return model, loss, values


@pytest.mark.thorough
@pytest.mark.parametrize("stage", sample(range(3), [2]))
@in_ranks(2)
def test_the_model_is_plain_when_its_stage_is_gone(stage):
    model, _, values = drop_the_stage(stage)
    assert toys.identical(model.parameters(), values)
    if stage > 1:
        assert all(param.grad is None for param in model.parameters())
    model.zero_grad()
    trains_alone(model)
    trains_alone(copy.deepcopy(model))
    for other in range(4):  # a new stage, whichever it is, takes rank 0's values
        if other:
            model, _, _ = drop_the_stage(stage)
        model.zero_grad()
        again = toys.STAGES[other](model, optim.AdamW, lr=1e-2)
        fresh, zero = wrap(other)
        with zero.gather_parameters():
            fresh.load_state_dict(dict(zip(fresh.state_dict(), toys.whole_parameters(again), strict=True)))
        assert [toys.step_of(again, step) for step in range(3)] == [toys.step_of(zero, step) for step in range(3)]


@in_ranks(2)
def test_at_stage_3_its_values_are_gone_too():
    model, loss, _ = drop_the_stage(3)
    uses = (lambda: model(*toys.tokens(0, 2)), lambda: model.head(torch.ones(15)), lambda: model.state_dict(),
            lambda: model.blocks[0].load_state_dict({}), lambda: model.blocks[2].up.weight.sum(),
            lambda: copy.deepcopy(model), lambda: toys.STAGES[3](model, optim.SGD, lr=0.1),
            lambda: toys.STAGES[1](model, optim.SGD, lr=0.1))
    for use in uses:
        with pytest.raises((RuntimeError, ValueError), match=r"the stage of this model is gone \(del zero\)"):
            use()
    assert loss.isfinite()


@in_ranks(2)
def test_backward_comes_too_late():
    model, zero = wrap(3)
    loss = model(*toys.tokens(0, 1))
    del zero
    with pytest.raises(RuntimeError, match=r"comes too late: the stage of this model is gone \(del zero\)"):
        loss.backward()
