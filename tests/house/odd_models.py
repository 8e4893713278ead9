"""Odd models: what a sharded stage could stumble over, or a checkpoint, each with the way in which it is trained.

    Case(make, backward)      make() -> nn.Module;  backward(model, rank, step) -> the loss, after loss.backward()

More kinds of models, and more ways to train, are in scenarios/. All is fp64.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 7


@dataclass
class Case:
    """A model and how one step of it is computed."""

    make: object
    backward: object = None
    bucket_bytes: int = 600  # several buckets also for these small models
    options: dict = field(default_factory=lambda: dict(lr=0.1, momentum=0.9, weight_decay=0.1))

    def __post_init__(self):
        self.backward = self.backward or fit


def vectors(rank, step, *shape):
    """Random numbers, different for each rank and step."""
    generator = torch.Generator().manual_seed(7919 * (rank + 1) + step)
    return torch.randn(*(shape or (5, WIDTH)), generator=generator, dtype=torch.float64)


def whole_numbers(rank, step, below, *shape):
    generator = torch.Generator().manual_seed(7919 * (rank + 1) + step)
    return torch.randint(below, shape, generator=generator)


def backward(loss):
    loss.backward()
    return loss.item()


def fit(model, rank, step, inputs=None):
    """The usual step."""
    return backward(model(vectors(rank, step) if inputs is None else inputs).square().mean())


PLAYED: list = []  # who plays all ranks in one process puts the rank here whose batch is computed


def rank_of():
    """The rank whose part is computed: this one, or the one that is played."""
    return PLAYED[0] if PLAYED else dist.get_rank()


# ---------------------------------------------------------------------------------------------------------- pieces


class Layer(nn.Module):
    """A layer whose backward needs its weights, some of them in elementwise kernels."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.norm(torch.tanh(self.linear(x)) * self.gain)


class Chain(nn.Module):
    """Root parameters before and after a list of layers."""

    def __init__(self, layer=Layer, count=3, head=3):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.head = nn.Linear(WIDTH, head) if head else nn.Identity()

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---------------------------------------------------------------------------------------- parameters of all kinds


class OneNumber(nn.Module):
    """Every bucket is smaller than the world."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor([[0.5]]))

    def forward(self, x):
        return self.b * torch.tanh(self.a * x)


class Frozen(Chain):
    """A frozen root layer, a frozen unit, a frozen bias, and a frozen parameter of integers."""

    def __init__(self):
        super().__init__(count=4)
        self.first.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].linear.bias.requires_grad_(False)
        self.steps = nn.Parameter(torch.randint(-3, 4, (WIDTH,), dtype=torch.int8), requires_grad=False)
        self.chosen = nn.Parameter(torch.rand(WIDTH) > 0.3, requires_grad=False)

    def forward(self, x):
        return super().forward(x * self.steps * self.chosen)


def words(model, rank, step):
    return fit(model, rank, step, whole_numbers(rank, step, 11, 3, 4))


class TiedUnits(Chain):
    """One weight in two units, one in a unit and the root, one twice in the same unit."""

    def __init__(self):
        super().__init__(count=4)
        self.layers[2].linear.weight = self.layers[0].linear.weight
        self.layers[1].linear.weight = self.first.weight
        self.layers[3].gain = self.layers[3].norm.weight


class NonContiguous(nn.Module):
    """Transposed and strided parameters, and a convolution in channels_last."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t())
        self.strided = nn.Parameter(torch.randn(5, 6)[:, ::2])
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        x = torch.tanh(x @ self.transposed) @ self.strided
        image = x.reshape(1, 3, 5, 1).expand(1, 3, 5, 5)
        return self.convolution(image)


class Empty(Chain):
    """Parameters without elements and without dimensions."""

    def __init__(self):
        super().__init__(count=2)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.nothing_else = nn.Parameter(torch.empty(0, dtype=torch.float32))
        self.layers[0].factor = nn.Parameter(torch.tensor(0.7))
        self.layers[0].nothing = nn.Parameter(torch.empty(4, 0))

    def forward(self, x):
        return super().forward(x) + self.nothing.sum()


class Sparse(nn.Module):
    """Sparse gradients, and a sparse tensor among a unit's outputs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True, padding_idx=0)
        self.layers = nn.ModuleList([nn.EmbeddingBag(11, WIDTH, sparse=True, mode="sum"), Layer()])

    def forward(self, words):
        bag, layer = self.layers
        return layer(self.embedding(words).sum(1) + bag(words))


# ------------------------------------------------------------------------------------------------ missing gradients


class NeverUsed(Chain):
    """Parameters that no forward touches: in the root, in a unit, and a whole unit."""

    def __init__(self):
        super().__init__(count=3)
        self.spare = nn.Linear(WIDTH, 5)
        self.layers[1].spare = nn.Linear(WIDTH, 3)
        self.spares = nn.ModuleList([Layer()])


class Branch(nn.Module):
    """Uses one half, or both, as `which(rank, call)` says: "a", "b" or "ab"."""

    def __init__(self, which):
        super().__init__()
        self.a, self.b = Layer(), Layer()
        self.which, self.calls = which, 0

    def forward(self, x):
        which = self.which(rank_of(), self.calls)
        self.calls += 1
        for name in which:
            x = getattr(self, name)(x)
        return x


def branching(which):
    return lambda: Chain(lambda: Branch(which), count=3)


# ------------------------------------------------------------------------------------------------------ buffers


class Norms(Chain):
    """Batch-norm in the root and in units: each rank's own statistics, rank 0's after the step."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), nn.Tanh()), count=2, head=0)
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(WIDTH))


class Buffers(Chain):
    """Buffers of all kinds; each rank builds other values, rank 0's count."""

    def __init__(self):
        super().__init__(count=2)
        self.register_buffer("flags", torch.rand(WIDTH) > 0.3)
        self.register_buffer("whole", torch.randint(9, (3,)))
        self.register_buffer("short", torch.randint(9, (3,), dtype=torch.int16))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("transposed", torch.randn(3, 4).t())
        self.register_buffer("expanded", torch.arange(WIDTH).expand(2, WIDTH))
        self.register_buffer("number", torch.rand(()))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("hidden", torch.rand(WIDTH), persistent=False)
        self.layers[1].register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.layers[0].register_buffer("nothing", None)

    def forward(self, x):
        return super().forward(x * self.flags * self.number + self.hidden * self.layers[1].mask)


# ------------------------------------------------------------------------------------------------- shapes of models


class TwiceInTheList(Chain):
    def __init__(self):
        super().__init__(count=2)
        self.layers.append(self.layers[0])


class ListInList(nn.Module):
    """Lists and dicts that have no forward of their own, inside a list, and inside a dict."""

    def __init__(self):
        super().__init__()
        self.stacks = nn.ModuleList(
            [
                nn.ModuleList([Layer(), Layer()]),
                nn.ModuleDict({"one": Layer(), "more": nn.ModuleList([Layer()])}),
                nn.ParameterList([torch.rand(WIDTH), torch.rand(WIDTH)]),
                nn.Identity(),
            ]
        )
        self.named = nn.ModuleDict({"a": Layer(), "b": nn.ModuleDict({"c": Layer()})})

    def forward(self, x):
        stack, named, factors, last = self.stacks
        for layer in [*stack, named["one"], *named["more"], self.named["a"], self.named["b"]["c"]]:
            x = layer(x * factors[0])
        return last(x) + factors[1]


class Outer(nn.Module):
    """A block that has parameters before its own list of layers, and after it."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = torch.tanh(x * self.gain)
        for layer in self.layers:
            x = layer(x)
        return self.end(x) * self.gain


class Inside(Chain):
    """Hands out what its layers computed on the way and do not return themselves (as caches and attention maps)."""

    class Keeping(Layer):
        def forward(self, x):
            self.kept = torch.tanh(self.linear(x))
            return super().forward(self.kept) * self.gain

    def __init__(self):
        super().__init__(lambda: Outer(layer=self.Keeping), count=2)

    def forward(self, x):
        x = super().forward(x)
        return x, [layer.kept for outer in self.layers for layer in outer.layers]


class FingerprintChannel(nn.Module):
    """Layers write into a list that they are given; the next one returns it. Of the last, only the note is used."""

    class Writing(Layer):
        def forward(self, x, notes):
            notes.append(torch.tanh(self.linear(x)))
            return super().forward(notes[-1]), list(notes[:-1])

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Writing() for _ in range(4))

    def forward(self, x):
        notes, returned = [], []
        for layer in self.layers:
            x, returned = layer(x, notes)
        return returned[-1] * 2, notes


class Reordered(Chain):
    """The order of its layers changes from call to call, and one of them is left out in turn."""

    def __init__(self):
        super().__init__(count=4)
        self.calls = 0

    def forward(self, x):
        order = [(self.calls + number) % 4 for number in range(3)]
        self.calls += 1
        for number in order if self.calls % 2 else reversed(order):
            x = self.layers[number](x)
        return self.head(x)


class Recurrent(nn.Module):
    """Layers of torch that keep lists of their weights, or compute weights from others."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.linear(self.lstm(x)[0])


def with_insides(model, rank, step):
    x, kept = model(vectors(rank, step))
    return backward(x.square().mean() + sum(tensor.sin().mean() for tensor in kept))


# -------------------------------------------------------------------------------------------------- ways to train


def two_backwards(model, rank, step):
    """Two graphs at once, gone through one after the other; a third one in between."""
    one, two = model(vectors(rank, step)).square().mean(), model(vectors(rank, 100 + step)).square().mean()
    one.backward()
    three = model(vectors(rank, 200 + step)).square().mean()
    two.backward()
    three.backward()
    return one.item()


def kept_graph(model, rank, step):
    """A graph that is gone through again after another one, in which the layers had another order."""
    one = model(vectors(rank, step)).square().mean()
    one.backward(retain_graph=True)
    for number in (2, 0, 2, 3):
        model.layers[number](vectors(rank, 300 + step))
    two = model(vectors(rank, 100 + step)).square().mean()
    one.backward()
    two.backward()
    return one.item()


class Recomputed(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class Recomputing(Chain):
    """torch.utils.checkpoint around two units at once, and around one."""

    def __init__(self, reentrant):
        super().__init__(count=4)
        self.reentrant = reentrant

    def again(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.again(lambda y: self.layers[1](self.layers[0](y)), self.first(x))
        return self.head(self.layers[3](self.again(self.layers[2], x)))


def recompute_all(reentrant):
    """torch.utils.checkpoint around the whole model."""

    def again(model, rank, step):
        x = vectors(rank, step).requires_grad_()
        return backward(checkpoint(model, x, use_reentrant=reentrant).square().mean())

    return again


CASES = {
    "world larger than a bucket": Case(OneNumber, bucket_bytes=8),
    "one bucket for all": Case(Chain, bucket_bytes=2**20),
    "a bucket for each": Case(Chain, bucket_bytes=1),
    "frozen": Case(Frozen),
    "tied across units": Case(TiedUnits),
    "non-contiguous": Case(NonContiguous),
    "empty": Case(Empty),
    "sparse": Case(Sparse, words),
    "never used": Case(NeverUsed),
    "used every second step": Case(branching(lambda rank, call: "ab" if call % 2 else "b")),
    "missing in a unit on one rank": Case(branching(lambda rank, call: "ab" if rank else "a")),
    "batch norm": Case(Norms),
    "buffers": Case(Buffers),
    "twice in the list": Case(TwiceInTheList),
    "lists in a list": Case(ListInList),
    "blocks with lists": Case(lambda: Chain(Outer, 2)),
    "inner tensors handed out": Case(Inside, with_insides),
    "notes": Case(FingerprintChannel, with_insides),
    "reordered": Case(Reordered),
    "recurrent": Case(lambda: Chain(Recurrent, 2)),
    "two backwards": Case(Chain, two_backwards),
    "missing on ranks in turn": Case(branching(lambda rank, call: "ab" if call % 3 == rank else "a"), two_backwards),
    "kept graph": Case(Reordered, kept_graph),
    "recompute inside, reentrant": Case(lambda: Chain(Recomputed)),
    "recompute two": Case(lambda: Recomputing(False)),
    "recompute two, reentrant": Case(lambda: Recomputing(True)),
    "recompute all": Case(Chain, recompute_all(False)),
    "recompute all, reentrant": Case(Chain, recompute_all(True)),
}
