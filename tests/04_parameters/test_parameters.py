"""Lesson 4, P_os+g+p: parameters live in shards too; a unit is whole only while it works."""

import functools

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from torch import optim

from zero_minimal.meters.memory import Ledger
from zero_minimal.stage0 import Stage0
from zero_minimal.stage3 import Stage3

BLOCKS = 16
deep = functools.partial(toys.Transformer, BLOCKS, hidden=63)


def between_forward_and_backward(stage_class):
    """Bytes that live after forward, beyond those from before. By the ledger: autograd keeps what no Python object
    holds."""
    rank = dist.get_rank()
    with Ledger() as ledger:
        model = toys.build(deep, rank)
        whole, block = (sum(param.nbytes for param in part.parameters()) for part in (model, model.blocks[0]))
        zero = stage_class(model, optim.SGD, lr=0.1)
        before = ledger.total
        loss = zero.model(*toys.tokens(rank, 0))
        kept = ledger.total - before
        loss.backward()
    return kept, whole, block


@pytest.mark.thorough
def test_parameters_are_released_though_autograd_saved_them():
    data_parallel = toys.run(between_forward_and_backward, 2, Stage0)
    for (activations, _, _), (kept, whole, block) in zip(
        data_parallel, toys.run(between_forward_and_backward, 2, Stage3), strict=True
    ):
        root = whole - BLOCKS * block
        blocks = (kept - activations - root) / block
        assert blocks <= 1.1, f"{blocks:.1f} blocks' parameters stay in memory after forward"  # the last one may


def shown():
    """What evaluation and gather_parameters() show after two steps: the loss, the model's state dict, and what the
    model gives outside: a state dict, or None where it refuses."""
    rank = dist.get_rank()
    model = toys.build(toys.Transformer, rank)
    zero = Stage3(model, optim.SGD, lr=0.3)
    for step in range(2):
        zero.model(*toys.tokens(rank, step)).backward()
        zero.step()
        zero.zero_grad()
    with torch.no_grad():
        loss = zero.model(*toys.tokens(rank, 9)).item()
    with zero.gather_parameters():
        state = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        outside = {name: value.clone() for name, value in model.state_dict().items()}
    except RuntimeError:
        outside = None
    return loss, state, outside


def test_evaluation_and_state_dicts_are_of_the_trained_model():
    recipe = toys.Recipe(optimizer=optim.SGD, options=dict(lr=0.3), steps=2)
    parameters = toys.plain(recipe, 2, torch.float64).parameters
    names = [name for name, _ in toys.Transformer().named_parameters()]
    trained = dict(zip(names, parameters, strict=True))
    model = toys.Transformer().double()
    model.load_state_dict(trained)
    for rank, (loss, state, outside) in enumerate(toys.run(shown, 2)):
        # fp32 against fp64, two steps of SGD: some hundred roundings of values around 1
        assert loss == pytest.approx(model(*toys.tokens(rank, 9)).item(), abs=200 * 2**-24)
        for given in (state, outside):
            if given is not None:
                assert list(given) == names
                assert all(torch.allclose(given[name].double(), trained[name], atol=200 * 2**-24) for name in names), (
                    "a state dict holds other values than the trained ones: of placeholders?"
                )


def test_the_next_unit_travels_while_this_one_works():
    blocks = 5
    make = functools.partial(toys.Transformer, blocks)
    for events, _, _ in toys.run(checks.events_of_a_step, 2, Stage3, make=make):
        backward = events[[event.kind for event in events].index("gradient") :]
        ahead, open_gathers = 0, 0  # gradients that come while an all-gather is under way
        for event in backward:
            open_gathers += (event.name == "all_gather") * {"start": 1, "wait": -1}.get(event.kind, 0)
            ahead += event.kind == "gradient" and open_gathers > 0
        assert ahead >= blocks, "in backward no unit is gathered before its turn: everybody waits for it"
