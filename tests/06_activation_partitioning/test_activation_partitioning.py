"""Lesson 6, P_a: a checkpoint is cut over the ranks that would hold copies of it, and nothing else changes."""

import copy
import functools
import warnings
from dataclasses import dataclass

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from zero_minimal.activation_partitioning import checkpoint, checkpoint_blocks
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.offloading import host

MODES = {
    "plain": dict(),
    "P_a": dict(group="all"),
    "P_a+cpu": dict(group="all", to_host=True),
    "cpu": dict(to_host=True),
}


def options_of(mode):
    return {key: dist.group.WORLD if value == "all" else value for key, value in MODES[mode].items()}


# ---------------------------------------------------------------------------------------------------- the same training


def trained(mode):
    """Losses and parameters of some steps of one model that all ranks work on alike, as model-parallel ranks do."""
    torch.manual_seed(1)
    model = toys.Transformer(dropout=0.2)
    if mode != "no checkpoints":
        checkpoint_blocks(model, **options_of(mode))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(4):
        loss = model(*toys.tokens(0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()], torch.rand(1).item()


def all_modes():
    return {mode: trained(mode) for mode in ("no checkpoints", *MODES)}


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_losses_and_parameters_agree_bit_for_bit_with_dropout(world_size):
    for found in toys.run(all_modes, world_size):
        losses, parameters, drawn_after = found["no checkpoints"]
        assert losses[-1] < losses[0]
        for mode in MODES:
            assert found[mode][0] == losses, mode
            assert toys.identical(found[mode][1], parameters), mode
            assert found[mode][2] == drawn_after, f"{mode} leaves another random state behind"


# ------------------------------------------------------------------------------------------------- what stays in memory

SHAPE = (3, 7, 5)  # 105 elements: no world divides them


class Blocks(nn.Module):
    def __init__(self, count):
        super().__init__()
        inside = (nn.Sequential(nn.Linear(5, 20), nn.GELU(), nn.Linear(20, 5)) for _ in range(count))
        self.blocks = nn.ModuleList(inside)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def kept_bytes(mode, blocks):
    """Activation bytes between forward and backward, and after backward while the output still lives."""
    ledger = Ledger()
    with ledger:
        model = Blocks(blocks)
        ledger.watch(model)
        if mode != "no checkpoints":
            checkpoint_blocks(model, **options_of(mode))
        output = model(torch.ones(SHAPE))
        between = ledger.states()["activations"]
        output.sum().backward()
        return between, ledger.states()["activations"] - output.nbytes


def of_each_block(mode):
    (few, _), (many, after) = kept_bytes(mode, 2), kept_bytes(mode, 7)
    return (many - few) / 5, after


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_a_checkpoint_is_one_share_of_the_input(world_size):
    def look():
        warnings.simplefilter("ignore")  # one rank saves nothing
        return {mode: of_each_block(mode) for mode in ("no checkpoints", "plain", "P_a")}

    whole = 105 * 4
    for found in toys.run(look, world_size):
        assert found["plain"][0] == whole
        assert found["P_a"][0] == -(-105 // world_size) * 4
        assert found["no checkpoints"][0] > 4 * whole  # the wide inside
        assert found["plain"][1] <= whole and found["P_a"][1] <= whole, "checkpoints outlive backward"


def test_in_host_memory_the_input_itself_is_let_go():
    """Here host and device are the same memory; so what can be seen is that a copy is kept, and the input is not."""
    for to_host in (False, True):
        x = torch.ones(SHAPE, requires_grad=True) + 0
        output = checkpoint(nn.Linear(5, 5), x, to_host=to_host)
        (kept,) = [one for one in output.grad_fn.saved_tensors if one.numel() == x.numel()]
        assert kept.device.type == "cpu" and (kept.data_ptr() != x.data_ptr()) == to_host


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


# --------------------------------------------------------------------------------------------------------- what is sent


def sent(mode):
    model = Blocks(4)
    checkpoint_blocks(model, **options_of(mode))
    model(torch.ones(SHAPE))  # the first pass of a block compares checksums too
    with TrafficMeter() as forward:
        output = model(torch.ones(SHAPE))
    with TrafficMeter() as backward:
        output.sum().backward()
    return forward.collectives, backward.collectives


@pytest.mark.parametrize("world_size", (2, 3))
def test_each_block_gathers_its_input_once_in_backward(world_size):
    def look():
        return sent("plain"), sent("P_a")

    for plain, partitioned in toys.run(look, world_size):
        assert plain == ({}, {})
        padded = -(-105 // world_size) * world_size * 4
        assert partitioned == ({}, {"all_gather": {"calls": 4, "bytes": 4 * padded}})


# ------------------------------------------------------------------------------------------------------- odd arguments


class Odd(nn.Module):
    """Takes and returns whatever a block may."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, pair, where, *, mask=None, scale=1.0, options=()):
        x, index = pair
        x = torch.tanh(self.linear(x)) * scale * where["weight"]
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return {"x": x + options[1], "index": index + 1, "nothing": None, "both": (x.sum(), 3)}


def odd_arguments(**options):
    torch.manual_seed(3)
    module = Odd()
    x, weight = torch.randn(7, 5, requires_grad=True), torch.randn(5)
    index, mask = torch.arange(7), torch.rand(7, 5) < 0.3
    call = functools.partial(checkpoint, module, **options) if options.get("checkpoint", True) else module
    options.pop("checkpoint", None)
    extra = nn.Parameter(torch.ones(5))
    output = call((x, index), {"weight": weight}, mask=mask, scale=2.0, options=("sum", extra))
    assert output["nothing"] is None and output["both"][1] == 3
    assert torch.equal(output["index"], torch.arange(1, 8)) and not output["index"].requires_grad
    (output["x"].square().sum() + output["both"][0]).backward()
    return [x.grad, module.linear.weight.grad, extra.grad, output["x"].detach()]


def test_tuples_dicts_integers_masks_parameters_and_none():
    def look():
        return [odd_arguments(checkpoint=False), odd_arguments(), odd_arguments(group=dist.group.WORLD),
                odd_arguments(group=dist.group.WORLD, to_host=True)]

    for plain, *others in toys.run(look, 3):
        for other in others:
            assert toys.identical(other, plain)


def test_an_input_that_wants_no_gradient():
    block = nn.Linear(5, 3)
    checkpoint(block, torch.ones(2, 5)).sum().backward()
    assert torch.equal(block.weight.grad, torch.full((3, 5), 2.0))


def test_without_gradients_nothing_is_kept():
    with torch.no_grad():
        assert checkpoint(nn.Linear(5, 3), torch.ones(2, 5)).grad_fn is None


def test_several_uses_of_one_module():
    torch.manual_seed(0)
    block, x = nn.Linear(5, 5), torch.randn(2, 5)
    twin = copy.deepcopy(block)
    twin(twin(x)).sum().backward()
    checkpoint(block, checkpoint(block, x)).sum().backward()
    assert torch.equal(block.weight.grad, twin.weight.grad)


# ------------------------------------------------------------------------------------------------------------- mistakes


def test_a_group_of_one_rank_is_told_that_it_saves_nothing():
    def look():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint(nn.Linear(5, 5), torch.ones(2, 5), group=dist.group.WORLD)
        return [str(warning.message) for warning in caught]

    (message,) = toys.run(look, 1)[0]
    assert "saves nothing" in message and "model-parallel group has one rank" in message


def test_a_model_without_a_module_list():
    with pytest.raises(ValueError, match="no nn.ModuleList"):
        checkpoint_blocks(nn.Sequential(nn.Linear(3, 3)))


def test_an_error_in_a_block_leaves_the_random_state_alone():
    def fails(x):
        torch.rand(3)
        if torch.is_grad_enabled():
            raise RuntimeError("in backward only")
        return x * 2

    output = checkpoint(fails, torch.ones(2, requires_grad=True))
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="in backward only"):
        output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_left_of_a_step():
    def look():
        nothing = checks.live_bytes()
        for _ in range(3):
            model = Blocks(3)
            checkpoint_blocks(model, group=dist.group.WORLD)
            model(torch.ones(SHAPE)).sum().backward()
            del model
        return checks.live_bytes(until=nothing) - nothing

    assert toys.run(look, 2) == [0, 0]


def test_an_argument_changed_in_place_is_refused():
    """Silently wrong otherwise: backward would begin from what the first run has changed."""
    weight = nn.Parameter(torch.eye(3))
    for x in (torch.zeros(2, 3), torch.arange(6).view(2, 3)):
        with pytest.raises(RuntimeError, match="in place"):
            checkpoint(lambda x: x.add_(1).float() @ weight, x)


def test_a_tensor_hidden_in_an_object_is_refused():
    weight = nn.Parameter(torch.eye(3))
    with pytest.raises(TypeError, match="Output"):
        checkpoint(lambda x: Output(x @ weight), torch.ones(2, 3))


@dataclass
class Output:
    hidden: torch.Tensor


def test_autocast_is_the_same_the_second_time():
    found = []
    for call in (lambda function, x: function(x), checkpoint):
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(9, 9)), torch.randn(5, 9, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(lambda x, weight=weight: (x @ weight).relu() @ weight, x).float().square().mean()
        loss.backward()
        found.append([weight.grad, x.grad])
    assert toys.identical(*found)


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
