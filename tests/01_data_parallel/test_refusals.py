"""What Naive refuses: 16 bits, a backward that nobody would average, and what stages alone can do."""

import pytest
import torch
import torch.distributed as dist
import toys
from torch import optim

from zero_minimal.checkpoint import saved_state
from zero_minimal.extensions import averages
from zero_minimal.naive import Naive


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
