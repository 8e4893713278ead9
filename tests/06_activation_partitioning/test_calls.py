"""checkpoint() in use: what a function may take and return, what is refused, which blocks are wrapped, host memory."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from zero_minimal.activation_partitioning import checkpoint, checkpoint_blocks
from zero_minimal.offloading import host

SHAPE = (3, 7, 5)


def of_many_kinds(x, pair, where, *, scale=1.0):
    name, weight = pair
    y = torch.tanh(x * weight) * scale * where[name]
    return {"y": y, "index": where["index"] + 1, "nothing": None, "both": (y.sum(), 3)}


def with_many_kinds(call, **options):
    """Gradients and results of a function that is given a parameter in a tuple, a string, a number and integers."""
    x, weight = torch.arange(-17.0, 18).div(9).view(7, 5).requires_grad_(), nn.Parameter(torch.full((5,), 0.7))
    where = {"gain": torch.full((5,), 1.3), "index": torch.arange(7)}
    output = call(of_many_kinds, x, ("gain", weight), where, scale=2.0, **options)
    assert output["nothing"] is None and output["both"][1] == 3
    assert torch.equal(output["index"], torch.arange(1, 8)) and not output["index"].requires_grad
    (output["y"].square().sum() + output["both"][0]).backward()
    return [x.grad, weight.grad, output["y"].detach()]


def test_parameters_strings_and_numbers_are_taken_and_none_and_numbers_returned():
    def look():
        group = dist.group.WORLD
        return [with_many_kinds(lambda function, *args, **kwargs: function(*args, **kwargs)),
                *(with_many_kinds(checkpoint, **options)
                  for options in ({}, dict(group=group), dict(group=group, to_host=True)))]

    for plain, *others in toys.run(look, 3):
        for other in others:
            assert toys.identical(other, plain)


def test_several_uses_of_one_module():
    torch.manual_seed(0)
    block, x = nn.Linear(5, 5), torch.randn(2, 5)
    twin = copy.deepcopy(block)
    twin(twin(x)).sum().backward()
    checkpoint(block, checkpoint(block, x)).sum().backward()
    assert torch.equal(block.weight.grad, twin.weight.grad)


def test_an_argument_changed_in_place_is_refused():
    """Silently wrong otherwise: backward would begin from what the first run has changed."""
    weight = nn.Parameter(torch.eye(3))
    for x in (torch.zeros(2, 3), torch.arange(6).view(2, 3)):
        with pytest.raises(RuntimeError, match="in place"):
            checkpoint(lambda x: x.add_(1).float() @ weight, x)


@dataclass
class Output:
    hidden: torch.Tensor


def test_a_tensor_hidden_in_an_object_is_refused():
    weight = nn.Parameter(torch.eye(3))
    with pytest.raises(TypeError, match="Output"):
        checkpoint(lambda x: Output(x @ weight), torch.ones(2, 3))


def test_blocks_are_wrapped_once():
    runs = []

    class Counting(nn.Linear):
        def forward(self, x):
            runs.append(1)
            return super().forward(x)

    block, model = Counting(5, 5), nn.Module()
    model.blocks = nn.ModuleList([block, block])
    checkpoint_blocks(model)
    block(torch.ones(2, 5)).sum().backward()
    assert len(runs) == 2  # forward, and again in backward
    with pytest.raises(ValueError, match="already"):
        checkpoint_blocks(model)
    with pytest.raises(ValueError, match="no nn.ModuleList"):
        checkpoint_blocks(nn.Sequential(nn.Linear(3, 3)))


# --------------------------------------------------------------------------------------------------------- host memory


def test_what_goes_to_host_memory_is_announced():
    heard, block = [], nn.Linear(5, 5)
    x, index = torch.randn(SHAPE), torch.arange(7)

    def call(**options):
        return checkpoint(lambda x, index, weight: x @ weight, x, index, block.weight, **options)

    with host.announced(heard.append):
        call()
        assert heard == [], "nothing went there"
        output = call(to_host=True)
    call(to_host=True)
    assert toys.identical(heard, [x, index]), "the tensors; the parameter stays, and outside nobody listens"
    kept = {tensor.data_ptr() for tensor in output.grad_fn.saved_tensors}
    assert {tensor.data_ptr() for tensor in heard} == kept and x.data_ptr() not in kept


def test_a_listener_that_fails_is_not_asked_again():
    def fails(tensor):
        raise KeyError("in the listener")

    with pytest.raises(KeyError), host.announced(fails):
        host.to_host(torch.ones(3))
    assert torch.equal(host.to_host(torch.ones(3)), torch.ones(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_host_memory_is_pinned():
    block = nn.Linear(5, 5).cuda()
    x = torch.ones(SHAPE, device="cuda", requires_grad=True)
    output = checkpoint(block, x, to_host=True)
    assert all(kept.is_pinned() for kept in output.grad_fn.saved_tensors)
    assert all(kept.device.type == "cpu" for kept in output.grad_fn.saved_tensors)
    output.sum().backward()
