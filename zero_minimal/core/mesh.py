"""Mesh: the ranks as D × M. M neighbours share a model; D such models train on different data.

With 4 ranks and M = 2:

    model_group   (0, 1) and (2, 3)   they talk most, so they are neighbours
    data_group    (0, 2) and (1, 3)   they hold the same shards of the model
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None  # ranks that work together; None: all of them


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands among D × M ranks, and the two groups it belongs to."""

    model_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    model_rank: int  # within model_group: says which shards this rank holds
    data_rank: int  # within data_group: says which data it reads


def make_mesh(model_parallel: int) -> Mesh:
    """Split all ranks into model-parallel groups of this size, M. Every rank must call it.

    Raises: ValueError on every rank if the world is not D × M.
    """
    world_size = dist.get_world_size()
    if not isinstance(model_parallel, int) or model_parallel < 1 or world_size % model_parallel:
        raise ValueError(f"{world_size} ranks cannot be split into model-parallel groups of "
                         f"{model_parallel}: the world must be D × M; accepted here: "
                         f"{', '.join(map(str, divisors(world_size)))}")
    ranks = torch.arange(world_size).view(-1, model_parallel)  # [D, M]
    model_group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    data_group, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    return Mesh(model_group, data_group, dist.get_rank(model_group), dist.get_rank(data_group))


def divisors(number: int, most: int = 1024) -> list[int]:
    """What divides a number, up to `most`: the groups into which ranks or heads can be cut."""
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
