"""Layer errors: how far the gradients of a tensor-parallel model are from those of one process, layer by layer.

    model(tokens, targets).backward()
    layer_errors(model, {name: gradient in one process})

The layer at which the errors begin tells what went wrong in backward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

LABELS = {"token_embedding": "tokens", "position_embedding": "positions", "norm": "norm", "attention_norm": "norm",
          "attention": "attention", "mlp_norm": "norm", "mlp": "MLP"}


@torch.no_grad()
def layer_errors(model: nn.Module, whole: dict[str, Tensor], group=None) -> list[dict]:
    """For each layer, in the order of forward: {"layer": its path, "error": how far its weights' gradient is from the
    right one, on the worst rank; "spread": how far the ranks differ if their gradients should be equal, else None}.
    Both are shares of the right gradient's norm. All ranks of the group call it.

    Args: model, a ParallelGPT after backward; whole, the gradients of the same GPT in one process, by name.
    """
    parts = model.shard_of(whole)
    found: dict[str, list] = {}  # in the order in which the model defines its layers: that of forward
    for name, param in model.named_parameters():
        if name.endswith(".weight"):
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            found.setdefault(layer_of(name), []).append((gradient, parts[name]))
    rows = []
    for layer, pairs in found.items():
        ours, theirs = (torch.cat([tensor.flatten() for tensor in side]) for side in zip(*pairs, strict=True))
        size = theirs.norm().clamp(min=1e-30)
        error = _worst((ours - theirs).norm() / size, group)
        rows.append({"layer": layer, "error": error, "spread": None})
        if layer.endswith("norm") or layer == "position_embedding":  # whole on every rank
            of_first = ours.clone()
            dist.broadcast(of_first, dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
            rows[-1]["spread"] = _worst((ours - of_first).norm() / size, group)
    return rows


def layer_of(name: str) -> str:
    """The path of a parameter's layer: blocks.0.mlp for blocks.0.mlp.expansion.weight."""
    words = name.split(".")
    return ".".join(words[:3]) if words[0] == "blocks" else words[0]


def label(layer: str) -> str:
    """A short label for a layer's path: "MLP"."""
    return LABELS[layer.split(".")[-1]]


def _worst(value: Tensor, group) -> float:
    value = value.double().clone()
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return value.item()
