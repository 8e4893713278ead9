"""What tests of misuse share: a model whose parts people call by themselves, and the message of a refusal."""

import re

import pytest
import torch
import toys
from thorough import sample
from torch import nn

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


def refused(function, *args, world_size=2):
    """The message of a refusal."""
    with pytest.raises(ranks.RankError) as caught:
        toys.run(function, world_size, *args, timeout=60)
    return re.sub(r"\s+", " ", str(caught.value))
