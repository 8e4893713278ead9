"""Odd models: what people build and a sharded stage could stumble over, each with the way in which it is trained.

    Case(make, backward)      make() -> nn.Module;  backward(model, rank, step) -> the loss, after loss.backward()

The same Case trains under a stage and plainly. All is fp64: what a correct stage gets wrong by rounding is then below
1e-12, and what a wrong one gets wrong is not.
"""

import types
from collections import namedtuple
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
    steps: int = 4
    bucket_bytes: int = 600  # several buckets also for these small models
    passes: int = 1  # backward passes a step; with more, stages sum in other orders, so that they agree up to rounding
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


PLAYED: list = []  # the plain run puts the rank here whose batch it computes


def rank_of():
    """The rank whose part is computed: a stage's own, or the one that the plain run plays."""
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

    def __init__(self, layer=Layer, count=3, head=True):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.head = nn.Linear(WIDTH, 3) if head else nn.Identity()

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


class TiedEnds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


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


class BranchInRoot(Chain):
    """Each rank uses another root parameter, and rank 0 none of them."""

    def __init__(self):
        super().__init__(count=2)
        self.choices = nn.ParameterList(torch.rand(WIDTH) for _ in range(3))

    def forward(self, x):
        return super().forward(x * self.choices[rank_of() - 1] if rank_of() else x)


# ------------------------------------------------------------------------------------------------------ buffers


class Norms(Chain):
    """Batch-norm in the root and in units: each rank's own statistics, rank 0's after the step."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), nn.Tanh()), count=2, head=False)
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


class UsedAgain(Chain):
    """Units that are called several times, with others in between; a root layer too."""

    def forward(self, x):
        for number in (0, 1, 0, 2, 2, 1):
            x = self.layers[number](self.first(x))
        return self.head(x)


class TwiceInTheList(Chain):
    def __init__(self):
        super().__init__(count=2)
        self.layers.append(self.layers[0])


class ListInList(nn.Module):
    """Lists and dicts that have no forward of their own, inside a list."""

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

    def forward(self, x):
        stack, named, factors, last = self.stacks
        for layer in [*stack, named["one"], *named["more"]]:
            x = layer(x * factors[0])
        return last(x) + factors[1]


class Outer(nn.Module):
    """A block that has parameters before its own list of layers, and after it, if it has an `end`."""

    def __init__(self, end=True, layer=Layer):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.end = nn.Linear(WIDTH, WIDTH) if end else None

    def forward(self, x):
        x = torch.tanh(x * self.gain)
        for layer in self.layers:
            x = layer(x)
        return x if self.end is None else self.end(x) * self.gain


class PassedOn(nn.Module):
    """Layers that give back what they got: skipped ones, and a tensor that all hand on (as T5's position bias)."""

    class Skipping(Layer):
        def forward(self, x, bias=None, skip=False):
            bias = self.linear(x) if bias is None else bias
            return (x if skip else super().forward(x) * torch.tanh(bias)), bias

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Skipping() for _ in range(4))

    def forward(self, x):
        bias = None
        for number, layer in enumerate(self.layers):
            x, bias = layer(x, bias=bias, skip=number % 2 == 1)
        return x


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


class InPlace(Layer):
    """Adds to its input in place: the output is the same tensor."""

    def forward(self, x):
        x += super().forward(x.clone())
        return x


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


# --------------------------------------------------------------------------------------------- outputs and arguments


@dataclass
class Answer:
    value: torch.Tensor
    note: str = ""
    more: object = None


Pair = namedtuple("Pair", "left right")


class Structures(nn.Module):
    """Units that take keywords and return tensors inside other things."""

    class Piece(Layer):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def forward(self, *, given, factor=1.0, nothing=None):
            x = Layer.forward(self, given) * factor
            return {
                "tuple": lambda: (None, (x, 3)),
                "dict": lambda: {"x": x, "text": "y", "empty": {}},
                "dataclass": lambda: Answer(x, more=[x]),
                "named": lambda: Pair(x, Layer),
                "object": lambda: types.SimpleNamespace(x=x, self=None),
            }[self.kind]()

    def __init__(self):
        super().__init__()
        kinds = ("tuple", "dict", "dataclass", "named", "object")
        self.pieces = nn.ModuleDict({kind: self.Piece(kind) for kind in kinds})
        self.list = nn.ModuleList(self.pieces.values())

    def forward(self, x, scale):
        x = self.pieces["tuple"](given=x, factor=scale)[1][0]
        x = self.pieces["dict"](given=x)["x"]
        x = self.pieces["dataclass"](given=x, nothing=None).value
        x = self.pieces["named"](given=x).left
        return {"all": [Answer(self.pieces["object"](given=x, factor=scale).x)], "scale": scale}


def structured(model, rank, step):
    return backward(model(x=vectors(rank, step), scale=0.5)["all"][0].value.square().mean())


def with_insides(model, rank, step):
    x, kept = model(vectors(rank, step))
    return backward(x.square().mean() + sum(tensor.sin().mean() for tensor in kept))


class RootObject(Chain):
    """The model's output is hidden in a plain object."""

    def forward(self, x):
        return types.SimpleNamespace(x=super().forward(x))


def with_evaluations(model, rank, step, of=lambda output: output):
    """Evaluate wherever that is allowed: before forward, between forward and backward, after backward."""
    check = vectors(rank, 1000 + step)
    with torch.no_grad():
        model(check)
    loss = of(model(vectors(rank, step))).square().mean()
    with torch.inference_mode():
        model(check)
    model.eval()
    with torch.no_grad():
        model(check)
    model.train()
    loss.backward()
    with torch.inference_mode():
        model(check)
    return loss.item()


# -------------------------------------------------------------------------------------------------- ways to train


def two_forwards(model, rank, step):
    return backward(model(vectors(rank, step)).square().mean() + model(vectors(rank, 100 + step, 3, WIDTH)).sum())


def two_backwards(model, rank, step):
    """Two graphs at once, gone through one after the other; a third one in between."""
    one, two = model(vectors(rank, step)).square().mean(), model(vectors(rank, 100 + step)).square().mean()
    one.backward()
    three = model(vectors(rank, 200 + step)).square().mean()
    two.backward()
    three.backward()
    return one.item()


def retained(model, rank, step):
    loss = model(vectors(rank, step)).square().mean()
    loss.backward(retain_graph=True)
    return backward(loss)


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


def forgotten_graphs(model, rank, step):
    """A forward with gradients that no backward follows, and gradients of the input alone."""
    model(vectors(rank, 100 + step))
    x = vectors(rank, 200 + step).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model.zero_grad()
    return fit(model, rank, step)


def parts(model, rank, step):
    """Layers called by themselves, without the model; only a part of the model in the loss."""
    x = vectors(rank, step)
    loss = model.layers[step % 3](x).square().mean()
    if step % 2:
        loss = loss + model.layers[0](model.layers[2](x)).square().mean()
    return backward(loss)


class Recomputed(nn.Module):
    """Two layers, recomputed in backward, or not."""

    def __init__(self, again):
        super().__init__()
        self.one, self.two, self.again = Layer(), Layer(), again

    def both(self, x):
        return self.two(self.one(x))

    def forward(self, x):
        return self.both(x) if self.again is None else checkpoint(self.both, x, use_reentrant=self.again)


class Recomputing(Chain):
    """torch.utils.checkpoint inside each unit, around each unit, or around two units at once."""

    def __init__(self, where, reentrant):
        inside = reentrant if where == "inside" else None
        super().__init__(layer=lambda: Recomputed(inside), count=4, head=where != "around")
        self.where, self.reentrant = where, reentrant

    def again(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x):
        x = self.first(x)
        if self.where == "two":
            x = self.again(lambda y: self.layers[1](self.layers[0](y)), x)
            return self.head(self.layers[3](self.again(self.layers[2], x)))
        for layer in self.layers:
            x = self.again(layer, x) if self.where == "around" else layer(x)
        return self.head(x)


def recompute_all(reentrant):
    """torch.utils.checkpoint around the whole model."""

    def again(model, rank, step):
        x = vectors(rank, step).requires_grad_()
        return backward(checkpoint(model, x, use_reentrant=reentrant).square().mean())

    return again


def recomputing(where, reentrant):
    return Case(lambda: Recomputing(where, reentrant))


def attention(model, rank, step):
    """nn.TransformerEncoder with padded sequences, evaluated too (torch has other code for that)."""
    x = vectors(rank, step, 3, 5, 8)
    padding = torch.arange(5).expand(3, 5) > torch.tensor([[4], [2 + rank], [3]])
    loss = model(x, src_key_padding_mask=padding).square().mean()
    loss.backward()
    model.eval()
    with torch.no_grad():
        model(x)
        evaluated = model(x, src_key_padding_mask=padding).nan_to_num()
    model.train()
    return loss.item() + evaluated.sum().item()


def encoder(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 13, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(8), enable_nested_tensor=False)


def hugging_face(kind):
    """A tiny model of the `transformers` library: gpt2, llama, bert, t5, with one of its own ways to recompute."""
    import transformers

    small = dict(vocab_size=37, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    sizes = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
                 max_position_embeddings=16)
    if kind.startswith("gpt2"):
        config = transformers.GPT2Config(n_positions=16, n_embd=12, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0,
                                         attn_pdrop=0, **small)
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=1, **sizes, **small)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "bert":
        config = transformers.BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes, **small)
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.T5Config(d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0,
                                       decoder_start_token_id=0, **small)
        model = transformers.T5ForConditionalGeneration(config)
    if "recompute" in kind:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(dict(use_reentrant="reentrant" in kind))
    return model.double()


def labelled(model, rank, step):
    words = whole_numbers(rank, step, 37, 3, 9)
    loss = model(input_ids=words, labels=words).loss
    loss.backward()
    with torch.no_grad():
        model.eval()
        model(input_ids=words, labels=words)
        model.train()
    return loss.item()


CASES = {
    "no world divides it": Case(lambda: nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 3))),
    "world larger than a bucket": Case(OneNumber, bucket_bytes=8),
    "one bucket for all": Case(Chain, bucket_bytes=2**20),
    "a bucket for each": Case(Chain, bucket_bytes=1),
    "frozen": Case(Frozen),
    "tied ends": Case(TiedEnds, words),
    "tied across units": Case(TiedUnits),
    "non-contiguous": Case(NonContiguous),
    "empty": Case(Empty),
    "sparse": Case(Sparse, words),
    "never used": Case(NeverUsed),
    "used every second step": Case(branching(lambda rank, call: "ab" if call % 2 else "b")),
    "missing in a unit on one rank": Case(branching(lambda rank, call: "ab" if rank else "a")),
    "missing in a unit, ranks in turn": Case(branching(lambda rank, call: "ab" if (rank + call) % 2 else "b")),
    "missing in the root on a rank": Case(BranchInRoot),
    "batch norm": Case(Norms, with_evaluations),
    "buffers": Case(Buffers),
    "used again": Case(UsedAgain),
    "twice in the list": Case(TwiceInTheList),
    "lists in a list": Case(ListInList),
    "blocks with lists": Case(lambda: Chain(Outer, 2)),
    "blocks that end in their list": Case(lambda: Chain(lambda: Outer(end=False), 2, head=False)),
    "tensors passed on": Case(PassedOn),
    "inner tensors handed out": Case(Inside, with_insides),
    "notes": Case(FingerprintChannel, with_insides),
    "in place": Case(lambda: Chain(InPlace, head=False)),
    "reordered": Case(Reordered, steps=6),
    "recurrent": Case(lambda: Chain(Recurrent, 2)),
    "structures": Case(Structures, structured),
    "evaluations": Case(Chain, with_evaluations),
    "evaluations, one unit": Case(lambda: Chain(count=1), with_evaluations),
    "plain object, evaluations": Case(
        RootObject, lambda m, rank, step: with_evaluations(m, rank, step, lambda output: output.x)
    ),
    "two forwards": Case(Chain, two_forwards),
    "two backwards": Case(Chain, two_backwards, passes=3),
    "retained": Case(Chain, retained, passes=2),
    "kept graph": Case(Reordered, kept_graph, passes=3),
    "forgotten graphs": Case(Chain, forgotten_graphs),
    "parts": Case(Chain, parts, steps=6),
    "recompute inside": recomputing("inside", False),
    "recompute inside, reentrant": recomputing("inside", True),
    "recompute around": recomputing("around", False),
    "recompute around, reentrant": recomputing("around", True),
    "recompute two": recomputing("two", False),
    "recompute two, reentrant": recomputing("two", True),
    "recompute all": Case(Chain, recompute_all(False)),
    "recompute all, reentrant": Case(Chain, recompute_all(True)),
    "torch's encoder": Case(lambda: encoder(False), attention),
    "torch's encoder, norm first": Case(lambda: encoder(True), attention),
}

HUGGING_FACE = {
    f"hugging face, {kind}": Case(lambda kind=kind: hugging_face(kind), labelled, steps=3)
    for kind in ("gpt2", "gpt2, recompute", "gpt2, recompute reentrant", "llama", "bert", "t5")
}

ALL = CASES | HUGGING_FACE
