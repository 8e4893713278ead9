"""What a PyTorch user does with gradients: it works at every stage, or is refused with the line to write instead."""

import functools

import misuse
import pytest
import torch
import torch.distributed as dist
import toys
from misuse import Coder, by_stage, by_world, draw, in_ranks, refused, what_is_said
from thorough import sample
from torch import nn, optim

from zero_minimal.offload import Offloaded2

sharded = pytest.mark.parametrize("stage", sample((1, 2, 3), [3]))


wrap = functools.partial(misuse.wrap, momentum=0.9)


def loss(zero, step):
    return zero.model(draw(step, dist.get_rank())).logsumexp(-1).square().mean()


# ------------------------------------------------------------------------------------------ reading, clipping, changing


def after_backward(*uses):
    """Something to do with a stage's number: these with the stage after a backward pass, one after the other."""
    def use_all(stage):
        zero = wrap(stage)
        loss(zero, 0).backward()
        for use in uses:
            use(zero)

    return use_all


READING = {
    "clip_grad_norm_": lambda zero: nn.utils.clip_grad_norm_(zero.model.parameters(), 1.0),
    "clip_grad_norm_, one by one": lambda zero: nn.utils.clip_grad_norm_(zero.model.parameters(), 1.0, foreach=False),
    "clip_grad_value_": lambda zero: nn.utils.clip_grad_value_(zero.model.parameters(), 1.0),
    "norm": lambda zero: sum(p.grad.norm() for p in zero.model.parameters() if p.grad is not None),
    "scale": lambda zero: zero.model.head.weight.grad.mul_(2),
    "index": lambda zero: zero.model.head.weight.grad[0],
    "numpy": lambda zero: zero.model.head.weight.grad.numpy(),
    "item": lambda zero: zero.model.head.bias.grad.max().item(),
    "data": lambda zero: zero.model.head.weight.grad.data,
    "stack": lambda zero: torch.cat([p.grad.flatten() for p in zero.model.parameters()]),
    "zeros": lambda zero: zero.model.zero_grad(set_to_none=False),
}


@sharded
def test_what_is_in_shards_cannot_be_read(stage):
    uses = {name: after_backward(use) for name, use in READING.items()}
    for said in toys.run(what_is_said, 1 + stage % 2, uses, stage):
        for name, words in said.items():
            assert "Clip with zero.clip_grad_norm_(max_norm)" in words and "zero.zero_grad()" in words, name


def clip_with_torch(stage, ours):
    zero, norms = wrap(stage), []
    for step in range(3):
        loss(zero, step).backward()
        clip = zero.clip_grad_norm_ if ours else functools.partial(nn.utils.clip_grad_norm_, zero.model.parameters())
        norms.append(clip(0.05).item())
        zero.step()
        zero.zero_grad()
    return norms, toys.whole_parameters(zero)


@by_world
def test_torch_clips_at_stage_0(world_size):
    for (norms, params), (others, expected) in zip(toys.run(clip_with_torch, world_size, 0, False),
                                                   toys.run(clip_with_torch, world_size, 0, True), strict=True):
        assert norms == pytest.approx(others, rel=1e-5) and norms[0] > 0.05
        for param, other in zip(params, expected, strict=True):
            torch.testing.assert_close(param, other)


REPLACING = {
    "replaced": lambda zero: setattr(zero.model.head.weight, "grad", torch.ones(zero.model.head.weight.shape)),
    "left out": lambda zero: setattr(zero.model.head.weight, "grad", None),
}
GOING_ON = {
    "step": lambda zero: zero.step(),
    "clip": lambda zero: zero.clip_grad_norm_(1.0),
    "backward": lambda zero: loss(zero, 1).backward(),
}


@pytest.mark.thorough
@by_stage
def test_a_gradient_that_is_replaced(stage):
    uses = {f"{how}, {then}": after_backward(replace, go_on)
            for how, replace in REPLACING.items() for then, go_on in GOING_ON.items()}
    for said in toys.run(what_is_said, 1 + stage % 2, uses, stage):
        for name, words in said.items():
            assert "the gradient of parameter 'head.weight' was replaced after backward" in words, name
            assert "param.register_hook(lambda gradient: …)" in words and "in zero.reduced_gradients()" in words, name


def replace_under_offload():
    torch.manual_seed(0)
    zero = Offloaded2(Coder(), optim.SGD, lr=0.1)
    loss(zero, 0).backward()
    REPLACING["replaced"](zero)
    zero.step()


@pytest.mark.thorough
@by_world
def test_a_gradient_that_is_replaced_under_offload(world_size):
    words = refused(replace_under_offload, world_size=world_size)
    assert "was replaced after backward" in words and "reduced_gradients" not in words


# ----------------------------------------------------------------------------------------------------- dropping a batch


def drop_on_one_rank(stage):
    zero = wrap(stage)
    loss(zero, 0).backward()
    if dist.get_rank():
        zero.model.zero_grad()
    zero.step()


@pytest.mark.thorough
@sharded
def test_one_rank_alone_drops_a_batch(stage):
    words = refused(drop_on_one_rank, stage)
    assert "not in the same collective" in words or "rank 0 has finished, and rank 1 waits for it" in words


# --------------------------------------------------------------------------------------------- gradients made by hand


def by_hand(stage, through_autograd):
    """SGD's step on the gradient rank + 1, which autograd computes, or the user assigns."""
    zero = wrap(stage, momentum=0.0)
    before, rank = toys.whole_parameters(zero), dist.get_rank()
    params = list(zero.model.parameters())
    for _ in range(2):
        if through_autograd:
            torch.autograd.backward(params, [torch.full(param.shape, rank + 1.0) for param in params])
        else:
            for param in params:
                param.grad = torch.full(param.shape, rank + 1.0)
        zero.step()
        zero.zero_grad()
    return [after - old for after, old in zip(toys.whole_parameters(zero), before, strict=True)]


@pytest.mark.parametrize("stage", (0, 1, 2))
@by_world
@pytest.mark.parametrize("through_autograd", sample((True, False), [False]))
def test_gradients_made_by_hand(stage, world_size, through_autograd):
    mean = sum(range(1, world_size + 1)) / world_size
    for moved in toys.run(by_hand, world_size, stage, through_autograd):
        assert all(torch.allclose(each, torch.tensor(-0.2 * mean), atol=1e-5) for each in moved)


@pytest.mark.thorough
@sharded
@in_ranks(2)
def test_what_stands_in_for_gradients_takes_no_memory(stage):
    zero = wrap(stage)
    loss(zero, 0).backward()
    storages = {param.grad.untyped_storage()._cdata: param.grad.untyped_storage().nbytes()
                for param in zero.model.parameters()}
    zero.zero_grad()
    assert all(param.grad is None for param in zero.model.parameters())
    assert sum(storages.values()) <= 4 * len(zero.buckets)
