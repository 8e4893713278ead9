"""Toys: small models of awkward sizes, data that differs on every rank, and a plain training loop to compare with.

    def check():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        model = toys.build(toys.Transformer, rank)          # other values on every rank
        zero = Stage2(model, torch.optim.AdamW, lr=1e-2)    # ... until here
        inputs, targets = toys.tokens(rank, step=0)         # other data on every rank and in every step
        ...
    toys.run(check, world_size=3)

No size here divides by 2, 3 or 4, or by the 16 elements on which the layout aligns.
"""

import contextlib
import functools
import gc
import importlib
import math
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zero_minimal.processes import ranks

WORLDS = (1, 2, 3, 4)
VOCABULARY, SEQUENCE = 31, 9


def __getattr__(name):
    """STAGES: the reference's classes, imported when a test asks for them. A grader may have none, or hide them."""
    if name != "STAGES":
        raise AttributeError(f"module 'toys' has no attribute {name!r}")
    globals()[name] = tuple(
        getattr(importlib.import_module(f"zero_minimal.stage{number}"), f"Stage{number}") for number in range(4)
    )
    return globals()[name]


def run(function, world_size, *args, **options):
    """Call the function on new ranks; return their results. See `run_strictly`."""
    return runner(function, world_size, *args, **options)


def run_counted(function, world_size, *args):
    """run(), and what the kernel counted meanwhile, for each rank: bytes .sent, and bytes .held at most, from its
    first batch on, beyond what it held before there was a model. Outside the grader there is no such account: []."""
    if runner is run_strictly:
        return run(function, world_size, *args), []
    return runner(function, world_size, *args, counted=True), runner.accounts


def run_strictly(function, world_size, *args, **options):
    """ranks.run on the CPU, with every warning in a rank an error."""
    return ranks.run(_strictly(function), world_size, *args, device="cpu", **options)


# While a submission is graded: {rank: number}, in a rank its own alone, and there the one for data comes when the first
# batch is asked for.
secrets: dict = {}  # for models
data_secrets: dict = {}


def seed(rank, number):
    """For random numbers of a rank's own. While a submission is graded nobody knows them before, and no other rank."""
    return number + (secrets[rank] if secrets else 0)


def data_seed(rank, number):
    """The same for its data: what is computed from them is not there before the first of them is."""
    return number + (data_secrets[rank] if secrets else 0)


runner = run_strictly  # the grader puts its own here, which is careful with what a submission may do


def _strictly(function):
    @functools.wraps(function)
    def strict(*args, **kwargs):
        warnings.simplefilter("error")
        gc.freeze()  # what a rank has imported is no garbage: collections look at what comes now, and take no time
        torch.set_num_threads(1)  # sums in the same order whatever the world, and no rank waits for another's threads
        return function(*args, **kwargs)

    return strict


# ------------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden + 7), nn.Linear(2 * hidden + 7, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):  # [batch, sequence, hidden] -> the same
        batch, sequence, hidden = x.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """model(inputs, targets) is the mean cross-entropy; model(inputs) are the logits. Three blocks in an
    nn.ModuleList."""

    def __init__(self, blocks=3, hidden=15, heads=3, dropout=0.0, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, inputs, targets=None):
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class MLP(nn.Module):
    """model(x, y) is the mean squared error; model(x) the prediction. No module list: stage 3 sees the root unit
    alone."""

    def __init__(self, *sizes):
        super().__init__()
        sizes = sizes or (7, 13, 11, 3)
        layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x, y=None):
        x = self.layers(x)
        return x if y is None else F.mse_loss(x.float(), y.float())


def build(make, rank, dtype=torch.float32):
    """make() with a seed of the rank's own: rank 0's values are what all ranks must end up with."""
    torch.manual_seed(seed(rank, 100 + rank))
    return make().to(dtype)


# --------------------------------------------------------------------------------------------------------------- data


def tokens(rank, step, batch=3, sequence=SEQUENCE, vocabulary=VOCABULARY):
    """Inputs and targets [batch, sequence]: something to learn, different for each rank and step."""
    generator = torch.Generator().manual_seed(data_seed(rank, 1_000_003 * (rank + 1) + step))
    start = torch.randint(vocabulary, (batch, 1), generator=generator)
    stride = torch.randint(1, 4, (batch, 1), generator=generator)
    line = (start + stride * torch.arange(sequence + 1)) % vocabulary
    return line[:, :-1].contiguous(), line[:, 1:].contiguous()


def numbers(rank, step, inputs=7, outputs=3, batch=5, dtype=torch.float32):
    """x [batch, inputs] and y [batch, outputs], different for each rank and step."""
    generator = torch.Generator().manual_seed(data_seed(rank, 1_000_003 * (rank + 1) + step))
    x = torch.randn(batch, inputs, generator=generator)
    y = torch.sin(x[:, :1] * torch.arange(1, outputs + 1)) + 0.1 * torch.randn(batch, outputs, generator=generator)
    return x.to(dtype), y.to(dtype)


# ----------------------------------------------------------------------------------------------------------- training


@dataclass
class Recipe:
    """How to train: everything but the stage and the number of ranks."""

    make: object = Transformer
    batch: object = tokens  # (rank, step) -> inputs, targets
    optimizer: type = torch.optim.AdamW
    options: dict = field(default_factory=lambda: dict(lr=1e-2))
    groups: object = None  # model -> param_groups
    schedule: object = None  # optimizer -> LR scheduler
    steps: int = 5
    accumulate: int = 1
    no_sync: bool = True  # in the micro-batches before the last
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    scale: float = 0.0  # the loss scale, for fp16
    bucket_bytes: int = 4096


@dataclass
class Run:
    """What came of it: this rank's losses (plain: those of every rank), gradient norms, all parameters."""

    losses: list
    norms: list
    parameters: list


def train(stage_class, recipe):
    """Train on this rank, as any user would; return a Run."""
    rank = dist.get_rank()
    model = build(recipe.make, rank, recipe.dtype)
    groups = {"param_groups": recipe.groups(model)} if recipe.groups else {}
    zero = stage_class(model, recipe.optimizer, bucket_bytes=recipe.bucket_bytes, **groups, **recipe.options)
    scheduler = recipe.schedule(zero.optimizer) if recipe.schedule else None
    scaler = None
    if recipe.scale:
        from zero_minimal.core.loss_scaler import LossScaler  # lesson 0 is graded where there is none

        scaler = LossScaler(recipe.scale)
    torch.manual_seed(200 + rank)  # dropout
    losses, norms = [], []
    for step in range(recipe.steps):
        losses.append(_micro_batches(zero, recipe, rank, step, scaler))
        if scaler:
            scaler.unscale_(zero)
        if recipe.clip:
            norms.append(zero.clip_grad_norm_(recipe.clip).item())
        if scaler:
            scaler.step(zero)
            scaler.update()
        else:
            zero.step()
        if scheduler:
            scheduler.step()
        zero.zero_grad()
    return Run(losses, norms, whole_parameters(zero))


def _micro_batches(zero, recipe, rank, step, scaler):
    total = 0.0
    for micro in range(recipe.accumulate):
        local = recipe.no_sync and micro + 1 < recipe.accumulate
        with zero.no_sync() if local else contextlib.nullcontext():
            loss = zero.model(*recipe.batch(rank, step * recipe.accumulate + micro)) / recipe.accumulate
            (scaler.scale(loss) if scaler else loss).backward()
        total += loss.item()
    return total


def learn(zero, loss):
    """Backward from this loss, a step and zero_grad. Returns it as a number."""
    loss.backward()
    zero.step()
    zero.zero_grad()
    return loss.item()


def step_of(zero, step):
    """One training step on this rank's tokens of that step. Returns its loss."""
    return learn(zero, zero.model(*tokens(dist.get_rank(), step)))


def whole_parameters(zero):
    """Copies of all parameters, in the order of the model."""
    # not there in the lesson that builds the collectives
    from zero_minimal.guards.trained_by import is_released

    gather = zero.gather_parameters if any(map(is_released, zero.model.parameters())) else contextlib.nullcontext
    with gather():
        return [param.detach().clone() for param in zero.model.parameters()]


def plain(recipe, world_size, dtype=None):
    """The same training without ZeRO and without ranks: one process that averages the gradients of all ranks' batches.

    16-bit parameters have fp32 masters. A parameter without a gradient counts as one whose gradient is zero.
    dtype: compute in another one, to see what rounding does.
    """
    dtype = dtype or recipe.dtype
    model = build(recipe.make, 0, recipe.dtype).to(dtype)
    params = [param for param in model.parameters() if param.requires_grad]
    masters = [nn.Parameter(param.detach().clone().float()) if dtype.itemsize < 4 else param for param in params]
    groups = recipe.groups(model) if recipe.groups else [{"params": params}]
    master_of = dict(zip(params, masters, strict=True))
    groups = [{**group, "params": [master_of[param] for param in group["params"]]} for group in groups]
    optimizer = recipe.optimizer(groups, **recipe.options)
    scheduler = recipe.schedule(optimizer) if recipe.schedule else None
    losses, norms = [[] for _ in range(world_size)], []
    for step in range(recipe.steps):
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(world_size):
            losses[rank].append(_plain_micro_batches(model, recipe, rank, step, dtype))
            for total, param in zip(sums, params, strict=True):
                total += 0 if param.grad is None else param.grad
        for total, param, master in zip(sums, params, masters, strict=True):
            master.grad = (total / world_size).to(param.dtype).to(master.dtype) / (recipe.scale or 1)
        if recipe.clip:
            norms.append(nn.utils.clip_grad_norm_(masters, recipe.clip).item())
        optimizer.step()
        if scheduler:
            scheduler.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return Run(losses, norms, [param.detach() for param in model.parameters()])


def _plain_micro_batches(model, recipe, rank, step, dtype):
    model.zero_grad()
    total = 0.0
    for micro in range(recipe.accumulate):
        batch = recipe.batch(rank, step * recipe.accumulate + micro)
        loss = model(*(_as(dtype, part) for part in batch)) / recipe.accumulate
        (loss * (recipe.scale or 1)).backward()
        total += loss.item()
    return total


def _as(dtype, part):
    return part.to(dtype) if isinstance(part, torch.Tensor) and part.is_floating_point() else part


def distance(ours, theirs):
    """Euclidean distance of two lists of tensors, computed in fp64."""
    return math.sqrt(sum((a.double() - b.double()).square().sum().item() for a, b in zip(ours, theirs, strict=True)))


def identical(ours, theirs):
    """Whether two lists of tensors are the same bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
