"""Patients of lesson 05: tensor-parallel GPTs with a mistake in one MLP, and the right result of one process."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from zero_minimal.tensor_parallel import ParallelMLP, f, g, shard
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

ILL = 1  # the block whose MLP has the mistake


def forget_f(mlp: ParallelMLP) -> None:
    """x enters the first matrix without f."""
    layer = mlp.expansion
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)


def forget_g(mlp: ParallelMLP) -> None:
    """The second matrix's result stays partial."""
    layer = mlp.projection
    layer.forward = lambda x: F.linear(x, layer.weight) + layer.bias


def split_before_gelu(mlp: ParallelMLP) -> None:
    """The first matrix is split by its inputs, so that GELU gets a partial sum on each rank."""
    group, ranks_, first = mlp.expansion.group, dist.get_world_size(mlp.expansion.group), mlp.expansion
    rank = dist.get_rank(group)

    def forward(x):
        own = f(x, group).chunk(ranks_, -1)[rank]
        hidden = g(F.gelu(F.linear(own, first.weight, first.bias / ranks_), approximate="tanh"), group)
        return mlp.projection(f(hidden, group).chunk(ranks_, -1)[rank])

    first.cut = lambda name, whole: shard(whole, 1, group) if name == "weight" else whole
    outputs, inputs = first.weight.shape[0] * ranks_, first.weight.shape[1]
    first.weight = torch.nn.Parameter(torch.zeros(outputs, inputs // ranks_))
    first.bias = torch.nn.Parameter(torch.zeros(outputs))
    mlp.forward = forward


MISTAKES: dict[str, Callable[[ParallelMLP], None]] = {
    "f forgotten": forget_f, "g forgotten": forget_g, "split before GELU": split_before_gelu,
    "no mistake": lambda mlp: None,
}


def trained(settings: Settings) -> tuple[dict, dict, float, list]:
    """A GPT after some steps in one process: its weights; for the next batch, gradients, loss, and the batch."""
    torch.manual_seed(settings.seed)
    model, batches = GPT(settings.model_config()), loop.training_batches(settings, 0)
    optimizer = torch.optim.AdamW(model.parameters(), **settings.optimizer_options())
    for _ in range(settings.steps):
        optimizer.zero_grad()
        model(*next(batches)).backward()
        optimizer.step()
    optimizer.zero_grad()
    batch = next(batches)
    loss = model(*batch)
    loss.backward()
    return model.state_dict(), {name: param.grad for name, param in model.named_parameters()}, loss.item(), list(batch)
