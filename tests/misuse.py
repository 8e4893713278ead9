"""What tests of misuse share: a model whose parts people call by themselves, and the message of a refusal."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample
from torch import nn, optim

from zero_minimal.processes import ranks

by_stage = pytest.mark.parametrize("stage", sample(range(4), [3]))
by_stage_and_world = pytest.mark.parametrize("stage, world_size", sample([(0, 3), (1, 2), (2, 3), (3, 2)], [(2, 3)]))
by_world = pytest.mark.parametrize("world_size", [3])  # a refusal is that of any world


class Coder(nn.Module):
    """Units between an embedding and a head that people call by themselves."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 11)

    def encode(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x):
        return self.head(self.encode(x))


def draw(step, rank):
    return torch.randint(11, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def wrap(stage, make=Coder, optimizer=optim.SGD, **options):
    """In a rank: a model, with the same values on all ranks, and its stage, with many small buckets."""
    torch.manual_seed(0)
    return toys.STAGES[stage](make(), optimizer, **{"lr": 0.1, "bucket_bytes": 600} | options)


def loss_of(zero, step=0):
    """Of a Coder, on this rank's numbers of that step."""
    return zero.model(draw(step, dist.get_rank())).logsumexp(-1).mean()


def in_ranks(world_size):
    """For a test whose body runs on so many ranks: what it expects, it expects on each of them."""

    def decorated(check):
        @functools.wraps(check)
        def test(**arguments):
            toys.run(check, world_size, timeout=60, **arguments)

        return test

    return decorated


def on_two_ranks(check, stages=toys.STAGES):
    """The same on two ranks for each stage, a class, and in fp64."""

    @functools.wraps(check)
    def in_fp64(stage):
        torch.set_default_dtype(torch.float64)
        check(stage)

    return pytest.mark.parametrize("stage", sample(stages, toys.STAGES[3:]))(in_ranks(2)(in_fp64))


on_stage_3 = functools.partial(on_two_ranks, stages=toys.STAGES[3:])


def refused(function, *args, world_size=2):
    """The message of a refusal."""
    with pytest.raises(ranks.RankError) as caught:
        toys.run(function, world_size, *args, timeout=60)
    return in_one_line(caught.value)


def what_is_said(uses, stage):
    """In a rank: to each of these, by its name; "" if it is not refused. A refusal comes before anything is sent: the
    next one finds the ranks as they were."""
    said = {}
    for name, use in uses.items():
        said[name] = ""
        try:
            use(stage)
        except (RuntimeError, ValueError) as error:
            said[name] = in_one_line(error)
        dist.barrier()
    return said


def in_one_line(words):
    return re.sub(r"\s+", " ", str(words))
