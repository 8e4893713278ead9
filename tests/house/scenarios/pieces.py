"""Pieces: models that several scenarios train, and the usual loop."""

import torch
import torch.nn.functional as F
from house.odd_models import WIDTH, Layer
from torch import nn
from torch.optim import SGD

MOMENTUM = dict(lr=0.1, momentum=0.9, weight_decay=0.1)


class Chain(nn.Module):
    """Root parameters before and after a list of layers."""

    def __init__(self, layer=Layer, count=3, head=3):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.head = nn.Linear(WIDTH, head)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Writer(nn.Module):
    """A language model: words to logits of the next word."""

    def __init__(self, words=11, tied=False, count=2):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def encode(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, words):
        return self.head(self.encode(words))

    @torch.no_grad()
    def generate(self, words, count=3):
        for _ in range(count):
            following = self.head(self.encode(words))[:, -1].argmax(-1, keepdim=True)
            words = torch.cat([words, following], 1)
        return words


def squares(model, me, step):
    return model(me.x(step)).square().mean()


def next_word(model, me, step):
    words = me.words(step)
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def train(me, model, optimizer=SGD, steps=4, loss=squares, each=None, units=None, groups=None, **options):
    """The usual loop. each(zero, step): what else is done before the update."""
    options = options or MOMENTUM
    if groups is not None:
        options = {**options, "param_groups": groups}
    zero = me.wrap(model, optimizer, units=units, **options)
    for step in range(steps):
        value = loss(model, me, step)
        value.backward()
        me.note(value)
        if each:
            each(zero, step)
        zero.step()
        zero.zero_grad()
    return zero
