"""A GPT that is cut over the ranks of a model, as lesson 05 cuts it, done by hand: what the checks of lessons 05 and 10
compare with. Runs in a rank too, and travels there by value, as sharded.py does."""

import sys

import cloudpickle
import torch
import torch.nn.functional as F

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def part_of(name, whole, ranks, rank):
    """A rank's part of a parameter of the GPT, or of its gradient."""
    if name.endswith("token_embedding.weight"):
        size = -(-len(whole) // ranks)
        return F.pad(whole, (0, 0, 0, size * ranks - len(whole)))[rank * size : (rank + 1) * size]
    if "query_key_value" in name:
        return torch.cat([block.chunk(ranks)[rank] for block in whole.chunk(3)])
    if "expansion" in name:
        return whole.chunk(ranks)[rank]
    if name.endswith("projection.weight"):
        return whole.chunk(ranks, 1)[rank]
    return whole


def is_cut(name):
    return any(word in name for word in ("token_embedding", "query_key_value", "expansion", "projection.weight"))
