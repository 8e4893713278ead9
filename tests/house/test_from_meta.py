"""Models of the meta device, which stage 3 brings into being: they draw their values in reset_parameters(),
initialise() or _init_weights(module), as those of Hugging Face's transformers."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import in_ranks
from thorough import sample
from torch import nn, optim

from zero_minimal.meters.memory import Ledger
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload.model import GPT, GPTConfig


class RMSNorm(nn.Module):
    """No reset_parameters: its model draws it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class Rotary(nn.Module):
    """A buffer that is computed, and two in which no number can say "not yet"."""

    def __init__(self, size, base=100.0):
        super().__init__()
        self.base = base
        for name, buffer in zip(("frequencies", "mask", "bytes"), self.computed(size), strict=True):
            self.register_buffer(name, buffer, persistent=False)

    def computed(self, size):
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        return self.base ** -(torch.arange(size) / size), mask, mask.byte()


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.c_proj = RMSNorm(size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)

    def forward(self, x):
        return x + self.c_proj(self.up(self.norm(x)).relu())


class Pretrained(nn.Module):
    """As a model of transformers: it draws all its modules from a distribution of its own, some once more."""

    STD = 0.02

    def __init__(self, size=24, layers=3):
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(toys.VOCABULARY, size), Rotary(size)
        self.layers = nn.ModuleList([Layer(size) for _ in range(layers)])
        self.norm, self.head = RMSNorm(size), nn.Linear(size, toys.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, self.STD)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            for buffer, value in zip(module.buffers(), module.computed(len(module.frequencies)), strict=True):
                buffer.copy_(value)
        for name, param in module.named_parameters():
            if name == "c_proj.weight":  # of the residual stream: narrower, as GPT-2's
                param.data.normal_(0.0, self.STD / math.sqrt(2 * len(self.layers)))

    def forward(self, x, y=None):
        h = self.embedding(x) * self.rotary.frequencies
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h).where(self.rotary.mask.any(0), 0))
        return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Wide(Pretrained):
    STD = 0.5


class Around(nn.Module):
    """A model of one's own around two of theirs, each with its own distribution."""

    def __init__(self):
        super().__init__()
        self.backbone, self.wide = Pretrained(), Wide()
        self.head = nn.Linear(toys.VOCABULARY, 5)

    def forward(self, x, y):
        return self.head(self.backbone(x) + self.wide(x)).square().mean()


def on_meta(make):
    with torch.device("meta"):
        return make()


def from_meta(make):
    """Parameters and buffers as drawn, and losses."""
    torch.manual_seed(7 * (1 + dist.get_rank()))  # rank 0's values count
    model = on_meta(make)
    zero = Stage3(model, optim.AdamW, lr=1e-2)
    first = dict(zip([name for name, _ in model.named_parameters()], toys.whole_parameters(zero), strict=True))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return first, buffers, [toys.learn(zero, model(*toys.tokens(0, step))) for step in range(4)]


def gpt():
    return GPT(GPTConfig(layers=4, hidden=64, heads=2, sequence=32, dropout=0.0))


@pytest.mark.thorough
@pytest.mark.parametrize("make", sample((Pretrained, Around, gpt), [gpt]))
def test_a_model_draws_its_modules(make):
    worlds = {world: toys.run(from_meta, world, make) for world in (1, 2, 3)}
    first, buffers, losses = worlds[1][0]
    torch.manual_seed(0)
    built = make()
    for name, param in built.named_parameters():
        drawn = first[name]
        if param.std() == 0:
            assert torch.equal(drawn, param), name
        elif param.numel() > 100:  # the rest is too few to compare
            few = param.numel() < 1000
            assert drawn.std().item() == pytest.approx(param.std().item(), rel=0.25 if few else 0.1), name
    for name, buffer in built.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    for outcomes in worlds.values():
        for other, its_buffers, its_losses in outcomes:
            assert toys.identical(first.values(), other.values()), "the values depend on the number of ranks"
            assert toys.identical(buffers.values(), its_buffers.values())
            assert its_losses == pytest.approx(losses, rel=1e-5)


def never_whole(make):
    """Losses, the first parameters of all ranks, and the peak of construction over the bytes of the model."""
    torch.manual_seed(100 + dist.get_rank())  # each rank draws other values, and rank 0's count
    model = on_meta(make).bfloat16()
    names = dict(model.named_parameters())
    with Ledger() as ledger:
        before = ledger.total
        zero = Stage3(model, optim.AdamW, lr=1e-2)
        peak = ledger.peak.total - before
    assert dict(model.named_parameters()) == names  # the same objects: others may refer to them
    first = toys.whole_parameters(zero)
    losses = [toys.learn(zero, model(*toys.tokens(dist.get_rank(), step=0))) for _ in range(8)]
    return losses, first, peak, sum(param.nbytes for param in first)


DEEP = functools.partial(toys.Transformer, blocks=12, hidden=45)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [DEEP, functools.partial(DEEP, tied=True)], ids=["plain", "tied"])
def test_a_model_on_the_meta_device_trains_and_was_never_whole(make):
    every = toys.run(never_whole, 2, make)
    for losses, first, peak, whole in every:
        assert losses[-1] < 0.8 * losses[0]
        assert toys.identical(first, every[0][1])
        shards = (2 + 4) / 2 / 2 * whole  # of parameters and masters, over two ranks, in units of 2 bytes
        assert peak < shards + 0.35 * whole  # and a unit or two, and the root


# ------------------------------------------------------------------------------------------ what two units have, others


class Tied(nn.Module):
    """Two blocks share a weight, so it belongs to the root, and have biases of their own; the norm has statistics."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.blocks[2].weight = self.blocks[0].weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


class Recursive(nn.Module):
    """Draws what its child has, which belongs to the root, since another block has it too."""

    def __init__(self, shared):
        super().__init__()
        self.inner, self.own = shared, nn.Linear(6, 6)

    def reset_parameters(self):
        self.inner.reset_parameters()
        self.own.reset_parameters()

    def forward(self, x):
        return self.own(self.inner(x))


class WithoutArgument(nn.Linear):
    """Somebody else's _init_weights, which takes no module: it is not called."""

    def _init_weights(self):
        raise AssertionError("called")


def two_recursive():
    shared, model = nn.Linear(6, 6), nn.Module()
    model.blocks = nn.ModuleList([Recursive(shared), Recursive(shared)])
    return model


@in_ranks(1)
def test_each_value_is_drawn_once():
    torch.manual_seed(0)
    every = [Stage3(on_meta(make), optim.SGD, lr=0.1) for make in (
        Tied, two_recursive, lambda: nn.Sequential(WithoutArgument(6, 6)))]
    tied, recursive, without = map(toys.whole_parameters, every)
    toys.learn(every[0], every[0].model(torch.randn(5, 6)).square().sum())
    after, (mean, variance, seen) = toys.whole_parameters(every[0]), every[0].model.buffers()
    assert all(value.isfinite().all() for value in [*tied, *after, mean, variance]) and seen == 1
    for values in (tied[:1], recursive, without):  # nn.Linear's own initialisation
        assert all(value.isfinite().all() and value.abs().max() <= 6**-0.5 for value in values)
        assert values[0].std() > 0.1


# ------------------------------------------------------------------------------------------------- what is refused


class Unread(Pretrained):
    """It forgets the buffers: one of numbers, or one of bool."""

    def __init__(self, forgotten):
        self.forgotten = forgotten
        super().__init__()

    def _init_weights(self, module):
        if not isinstance(module, Rotary):
            super()._init_weights(module)
        elif self.forgotten == "mask":
            module.frequencies.fill_(1)
        else:
            module.mask.fill_(True)


class Scale(nn.Module):
    """A parameter of its own, and nothing that could draw it."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


class Forgetful(nn.Linear):
    """What it inherits draws weight and bias, and not what it adds."""

    def __init__(self, buffer):
        super().__init__(4, 4)
        if buffer:
            self.register_buffer("table", torch.arange(4.0))
        else:
            self.scale = nn.Parameter(torch.ones(4))


REFUSED = {  # what is said: a model, and a stage
    "Scale has no reset_parameters()": (lambda: nn.Sequential(Scale()), Stage3),
    "nothing gave 'Forgetful.table' a value": (functools.partial(Forgetful, True), Stage3),
    "nothing gave 'scale' a value": (functools.partial(Forgetful, False), Stage3),
    "nothing gave 'Rotary.frequencies' a value": (functools.partial(Unread, "frequencies"), Stage3),
    "nothing gave 'Rotary.mask' a value": (functools.partial(Unread, "mask"), Stage3),
    "only stage 3": (toys.MLP, Stage2),
}


@in_ranks(2)
def test_models_that_cannot_come_into_being_are_refused():
    for words, (make, stage) in REFUSED.items():
        model = on_meta(make)
        with pytest.raises(ValueError) as caught:
            stage(model, optim.AdamW)
        assert words in str(caught.value)
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]), "it is as it was"
