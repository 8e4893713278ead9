"""What tests save: a model with a catch of each kind, and its optimizer groups."""

import torch
import torch.nn.functional as F
import toys
from torch import nn


class Model(toys.Transformer):
    """Dropout, tied weights, a frozen parameter, a buffer that each forward changes, and one that is not saved."""

    def __init__(self, **sizes):
        super().__init__(**{"dropout": 0.1, "tied": True} | sizes)
        self.frozen = nn.Parameter(torch.randn(15), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(3), persistent=False)

    def forward(self, inputs, targets=None):
        self.seen += 1
        x = self.embedding(inputs) + self.frozen
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten())


def groups_of(model):
    """Weights decay, all else does not."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": [param for param in params if param.ndim > 1], "weight_decay": 0.2},
            {"params": [param for param in params if param.ndim < 2], "lr": 3e-3, "betas": (0.8, 0.9)}]


class Wide(Model):
    """Without dropout, and computing the loss in its own dtype."""

    def __init__(self):
        super().__init__(dropout=0.0)

    def forward(self, inputs, targets):
        return F.cross_entropy(super().forward(inputs).flatten(0, 1), targets.flatten())
