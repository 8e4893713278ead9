"""Parameters read and edited outside their unit's forward at stage 3: as in plain torch, or an error."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toys
from misuse import in_ranks
from torch import nn, optim

from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

pytestmark = pytest.mark.thorough


class Blocks(nn.Module):
    def __init__(self, penalty=None):
        super().__init__()
        self.first, self.head = nn.Linear(7, 7), nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.penalty = penalty

    def forward(self, x):
        x, penalty = self.first(x), 0.0
        for block in self.blocks:
            x = x + block(x).tanh()
            if self.penalty:
                added = self.penalty(block, x)
                if added.shape == x.shape:
                    x = x + added
                else:
                    penalty = penalty + added
        return self.head(x).square().mean() + 0.05 * penalty


PENALTIES = {
    "abs": lambda block, x: block.weight.abs().sum(),
    "clamp": lambda block, x: block.weight.clamp(-0.1, 0.1).sum(),
    "relu of a view": lambda block, x: F.relu(block.weight.view(-1)[3:]).sum(),
    "norm": lambda block, x: block.weight.norm() + block.bias.norm(p=1),
    "both": lambda block, x: torch.cat([block.weight.flatten(), block.bias]).abs().sum(),
    "linear again": lambda block, x: F.linear(x, block.weight),
    "times": lambda block, x: x * block.bias,
    "transposed": lambda block, x: (x @ block.weight.t().tanh()).clamp(-1, 1),
}


def batch(step):
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(stage, penalty=None, prepare=None, loss_of=None, after=None, steps=3, dtype=torch.float32, make=None):
    torch.manual_seed(0)
    model = make() if make else Blocks(PENALTIES.get(penalty))
    zero = stage(model.to(dtype), optim.SGD, lr=0.1)
    if prepare:
        prepare(model)
    for step in range(steps):
        x = batch(step).to(dtype)
        loss = loss_of(model, x) if loss_of else model(x)
        loss.backward()
        if after:
            after(model)
        zero.step()
        zero.zero_grad()
    with zero.gather_parameters():
        return [param.detach().clone() for param in model.parameters()]


def agree(world_size, *args, **options):
    expected = toys.run(train, world_size, Stage2, *args, **options)[0]
    for here in toys.run(train, world_size, Stage3, *args, **options):
        for one, other in zip(here, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_block_s_weight_is_read_after_its_turn(penalty):
    agree(2, penalty)


def test_on_three_ranks():
    agree(3, "abs")


def hooked(model, x):
    found = []
    handles = [block.register_forward_hook(lambda module, *_: found.append(module.weight.clamp(-0.1, 0.1).sum()))
               for block in model.blocks]
    loss = model(x)
    for handle in handles:
        handle.remove()
    return loss + 0.1 * sum(found)


def evaluated_between(model, x):
    loss = model(x) + 0.1 * sum(part.weight.abs().sum() for part in (model.first, model.head))
    with torch.no_grad():
        model(2 * x)
    return loss


def last_block_and_root(model, x):
    return model(x) + 0.1 * (model.blocks[-1].weight.abs() + model.head.weight.abs()).sum()


@pytest.mark.parametrize("loss_of", (hooked, evaluated_between, last_block_and_root))
@pytest.mark.parametrize("world_size", (2, 3))
def test_penalties_elsewhere(loss_of, world_size):
    agree(world_size, loss_of=loss_of)


# -------------------------------------------------------------------------------------------------------------- edits


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


def clamped_blocks():
    model = Blocks()
    model.blocks = nn.ModuleList(Clamped(7, 7) for _ in range(3))
    return model


def clamp_before(model):
    def clamp(module, _):
        module.weight.data.clamp_(-0.2, 0.2)

    for block in model.blocks:
        block.register_forward_pre_hook(clamp)


def clamp_head(model):
    with torch.no_grad():
        model.head.weight.clamp_(-0.1, 0.1)
    model.first.weight.data.mul_(0.5)


EDITS = {"in forward": {"make": clamped_blocks}, "in a pre-hook": {"prepare": clamp_before},
         "before step": {"after": clamp_head}}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world_size", (2, 3))
def test_edits_in_place_are_kept(edit, world_size):
    agree(world_size, **EDITS[edit])


@in_ranks(2)
def test_edits_in_16_bit():
    """In 16 bit an edit reaches the master, and an element that is not edited keeps its full precision there."""
    torch.manual_seed(0)
    model = Blocks().bfloat16()
    zero = Stage3(model, optim.SGD, lr=1e-4)
    for step in range(4):
        model(batch(step).bfloat16()).backward()
        with torch.no_grad():
            model.head.weight[0].fill_(2.0)
        zero.step()
        zero.zero_grad()
    masters = [bucket.master.detach().clone() for bucket in zero.buckets]
    assert any((master != master.bfloat16()).any() for master in masters)
    with zero.gather_parameters():
        assert (model.head.weight[0] > 1.9).all() and (model.head.weight[1:] < 1).all()


# -------------------------------------------------------------------------------------------- what the user has kept


def keep(look):
    torch.manual_seed(0)
    model = Blocks()
    zero = Stage3(model, optim.SGD, lr=0.1)
    model(batch(0)).backward()
    with torch.no_grad():
        kept = look(model.head.weight)
    before = torch.as_tensor(kept).sum().item()
    zero.step()
    return before, torch.as_tensor(kept).sum().item()


VIEWS = (lambda weight: weight.detach(), lambda weight: weight.data[1:], lambda weight: weight.t())


@pytest.mark.parametrize("look", VIEWS)
def test_a_view_that_is_kept_says_that_its_memory_is_gone(look):
    with pytest.raises(Exception, match="read after the parameter was released"):
        toys.run(keep, 2, look)


@pytest.mark.parametrize("look", (lambda weight: weight.detach().clone(), lambda weight: weight.detach().numpy()))
def test_copies_stay(look):
    for before, after in toys.run(keep, 2, look):
        assert before == after


@in_ranks(2)
def test_a_copy_of_a_whole_model_is_plain():
    model = nn.Linear(3, 3)
    zero = Stage3(model, optim.SGD, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    copied = copy.deepcopy(model)
    zero.step()
    assert type(copied.weight) is nn.Parameter and copied(torch.ones(2, 3)).isfinite().all()


def inside_gather():
    model = Blocks()
    zero = Stage3(model, optim.SGD, lr=0.1)
    with zero.gather_parameters():
        penalty = sum(param.abs().sum() for param in model.parameters())
    (model(batch(0)) + penalty).backward()


def test_a_penalty_made_inside_gather_parameters():
    with pytest.raises(Exception, match=r"computed inside gather_parameters\(\)"):
        toys.run(inside_gather, 2)
