"""What tests save, and how: a model with a catch of each kind, its optimizer groups, steps, a disk that is full."""

import resource
import signal

import torch
import torch.distributed as dist
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


def wrapped(stage=2, seed=1, make=Wide, optimizer=torch.optim.AdamW, groups=None, **options):
    torch.manual_seed(seed)
    model = make()
    return toys.STAGES[stage](model, optimizer, param_groups=groups and groups(model),
                              **{"lr": 0.01, "bucket_bytes": 3000} | options)


def part(step, rank, ranks):
    """A rank's sequences, of the 12 of a step."""
    return [whole.chunk(ranks)[rank] for whole in toys.tokens(0, step, batch=12)]


def steps(zero, first, last):
    """Train from step to step. Losses, means of all data-parallel ranks, which share the sequences of a step."""
    group, losses = zero.mesh.data_group if hasattr(zero, "mesh") else None, []
    share = dist.get_world_size(group)
    for step in range(first, last):
        loss = zero.model(*part(step, dist.get_rank(group), share))
        toys.learn(zero, loss)
        every = [torch.zeros_like(loss) for _ in range(share)]
        dist.all_gather(every, loss.detach(), group=group)
        losses.append(torch.stack(every).mean().item())
    return losses


def disk_has(room=None):
    """From here on this process writes no file of more bytes than that (None: all it likes)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then it is an error of write()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if room is None else room, most))


def names(folder):
    return sorted(path.name for path in folder.iterdir())
