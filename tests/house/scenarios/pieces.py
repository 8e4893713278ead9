"""Pieces: models that several scenarios train, and the usual loop."""

import torch
import torch.nn.functional as F
from house.odd_models import WIDTH, Chain, Layer  # noqa: F401
from torch import nn
from torch.optim import SGD

MOMENTUM = dict(lr=0.1, momentum=0.9, weight_decay=0.1)


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


def wrapped(me, model=None, optimizer=SGD, units=None, **options):
    """A model, a Chain if none is given, and its stage."""
    model = model or Chain()
    return model, me.wrap(model, optimizer, units=units, **(options or MOMENTUM))


def go_on(me, zero, steps, loss=squares, backward=None, each=None, after=None):
    """The usual loop, with a stage that is there. backward(zero, step): forward and backward, if they are not those of
    loss(model, me, step). each(zero, step) and after(zero, step): what else is done before the update, and after it."""
    for step in steps:
        if backward:
            backward(zero, step)
        else:
            value = loss(zero.model, me, step)
            value.backward()
            me.note(value)
        if each:
            each(zero, step)
        zero.step()
        zero.zero_grad()
        if after:
            after(zero, step)


def train(me, model=None, optimizer=SGD, steps=4, loss=squares, backward=None, each=None, after=None, **options):
    """The usual loop with a new stage, which it returns."""
    _, zero = wrapped(me, model, optimizer, **options)
    go_on(me, zero, range(steps), loss, backward, each, after)
    return zero
