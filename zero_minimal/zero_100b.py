"""ZeRO-100B: the system that the paper ran, P_os+g with all of ZeRO-R, together with model
parallelism (section 10, Table 3).

    torchrun --nproc-per-node 4 zero_minimal/zero_100b.py --config C4 --model-parallel 2

The ranks are a mesh: M neighbours share one model (tensor parallelism), the D ranks at the same
place in each model are data-parallel, and ZeRO-DP cuts over these.

    D × M = 2 × 2    rank 0 ─ rank 1     one model: activations are the same on both,
                       │        │                   P_a cuts their checkpoints
                     rank 2 ─ rank 3     another one
                       │
                       └── the same part of the weights: stages 1 and 2 cut its optimizer state,
                                                         stage 2 its gradients too

              ZeRO-DP     ZeRO-R
    C1        P_os        C_B, M_D
    C2        P_os        C_B, M_D, P_a
    C3        P_os+g      C_B, M_D
    C4        P_os+g      C_B, M_D, P_a
    C5        P_os+g      C_B, M_D, P_a+cpu

All of them checkpoint activations, block by block.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.checkpoint.chunks import Place
from zero_minimal.checkpoint.local_chunks import Holding
from zero_minimal.constant_buffers import ConstantBuffers
from zero_minimal.core import collectives, precision
from zero_minimal.core.gradient_memory import GradientMemory
from zero_minimal.core.layout import Bucket
from zero_minimal.core.reducer import Reducer
from zero_minimal.defragmentation import Slab
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.tensor_parallel import (
    ColumnParallelLinear,
    ParallelGPT,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)


class ConstantMemory(GradientMemory):
    """Whole gradients go through two constant buffers (C_B), their shards stay in a slab (M_D).

    buckets: of one dtype and device. Raises: ValueError if they are not.
    """

    def __init__(self, buckets: list[Bucket], group=None):
        """Makes `constant_buffers`, the two buffers, and `slab`, which holds all shards."""
        dtype, device = kind_of(buckets)
        largest = max(bucket.padded for bucket in buckets) * dtype.itemsize
        self.constant_buffers = ConstantBuffers(largest, dtype=dtype, device=device, group=group)
        shards = [bucket.parameter_shard.numel() for bucket in buckets]
        self.slab = torch.zeros(sum(shards), dtype=dtype, device=device)
        self.home_of = dict(zip(buckets, self.slab.split(shards), strict=True))

    def whole(self, bucket: Bucket) -> torch.Tensor:
        """Zeros [padded], into which the bucket's gradients are copied."""
        return self.constant_buffers.take()[: bucket.padded].zero_()

    def give_back(self, whole: torch.Tensor) -> None:
        pass  # the buffer stays, for a later bucket

    def shard(self, bucket: Bucket) -> torch.Tensor:
        """Memory for this rank's shard of the average, [padded / D]. It becomes
        bucket.gradient_shard, or is added to it where there is one already."""
        # later micro-batches of a step are added to the first one's, which is in the slab
        is_first = bucket.gradient_shard is None
        return self.home_of[bucket] if is_first else torch.empty_like(self.home_of[bucket])


def kind_of(buckets: list[Bucket]) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of them all. Raises: ValueError if they have several."""
    kinds = {(bucket.dtype, bucket.device) for bucket in buckets}
    if len(kinds) > 1:
        raise ValueError("the constant buffers are of one dtype and device, and this model's "
                         "parameters are not")
    return kinds.pop()


@dataclass(frozen=True)
class Config:
    """A row of Table 3. Stage 1 keeps gradients in one allocation and reduces them in place, so
    there is nothing for C_B and M_D to do."""

    stage: type
    options: dict = field(default_factory=dict)  # of the stage
    partition: bool = False  # P_a
    to_host: bool = False  # P_a+cpu


C_B_AND_M_D = {"memory": ConstantMemory}
CONFIGS = {
    "C1": Config(Stage1),
    "C2": Config(Stage1, partition=True),
    "C3": Config(Stage2, C_B_AND_M_D),
    "C4": Config(Stage2, C_B_AND_M_D, partition=True),
    "C5": Config(Stage2, C_B_AND_M_D, partition=True, to_host=True),
}


def places(model: ParallelGPT) -> dict[str, Place]:
    """For each parameter that is cut: where this rank's part is in the whole one."""
    ranks, rank = dist.get_world_size(model.group), dist.get_rank(model.group)
    found = {}
    for path, layer in model.named_modules():
        rows = None  # (which dimension is cut, how many equal blocks it has, its whole size)
        if isinstance(layer, ColumnParallelLinear):
            rows = 0, layer.blocks, len(layer.weight) * ranks
        elif isinstance(layer, RowParallelLinear):
            rows = 1, 1, layer.weight.shape[1] * ranks
        elif isinstance(layer, VocabularyParallelEmbedding):
            rows = 0, 1, layer.vocabulary
        for name, param in layer.named_parameters(recurse=False) if rows else ():
            dim, blocks, whole = rows
            if dim < param.ndim:  # a row-parallel bias is whole everywhere
                part = param.shape[dim] // blocks
                pairs = [(block * part, (block * ranks + rank) * part) for block in range(blocks)]
                stretches = [(here, there, min(part, whole - there)) for here, there in pairs]
                shape = (*param.shape[:dim], whole, *param.shape[dim + 1 :])
                found[f"{path}.{name}"] = Place(shape, dim, tuple(stretches))
    return found


class System:
    """A GPT cut over the model-parallel group, trained by ZeRO over the data-parallel one, as
    CONFIGS[name] says. It is used like a stage.

    Args:
        sizes: what ParallelGPT takes.
        batch: sequences of a micro-batch, from which the size of the checkpoints' slab follows.
    Raises: ValueError for a name that CONFIGS does not have.
    """

    def __init__(
        self, name: str, sizes, mesh, batch: int, dtype: torch.dtype, device, optimizer_class: type,
        **options,
    ):
        if name not in CONFIGS:
            raise ValueError(f"there is no config {name!r}: choose from {', '.join(CONFIGS)}")
        config = CONFIGS[name]
        self.mesh = mesh
        self.groups = [mesh.data_group, mesh.model_group]  # whose ranks hold parts of the model
        self.model = ParallelGPT(sizes, mesh.model_group).to(device, dtype)
        self.slab = None  # where checkpoints are, if they stay on the device
        self.keep_checkpoints(config, batch)
        self.zero = self.over_replicas(config, optimizer_class, **options)

    def keep_checkpoints(self, config: Config, batch: int) -> None:
        """Let each block keep only its input, for `batch` sequences: as config.partition and
        config.to_host say, in `slab` if it stays on the device."""
        sizes, group = self.model.config, self.mesh.model_group
        elements = batch * sizes.sequence * sizes.hidden  # of a block's input
        if config.partition:
            elements //= dist.get_world_size(group)  # M divides hidden
        if not config.to_host:
            like = next(self.model.parameters())
            self.slab = Slab(elements * sizes.layers, dtype=like.dtype, device=like.device)
            self.model.register_forward_pre_hook(self.begin_forward)
        checkpoint_blocks(
            self.model, group=group if config.partition else None,
            to_host=config.to_host, place=self.slab.keep if self.slab else None,
        )

    def begin_forward(self, *_) -> None:
        """Before a forward pass: the checkpoints of the last one are not needed any more."""
        if torch.is_grad_enabled():
            self.slab.reset()

    def over_replicas(self, config: Config, optimizer_class: type, **options):
        """The model wrapped by config.stage, with its config.options, and `options`."""
        replicated = self.model.replicated()  # in a group, and so in buckets, of their own
        cut = [param for param in self.model.parameters() if param not in set(replicated)]
        return config.stage(
            self.model, optimizer_class, group=self.mesh.data_group,
            param_groups=[{"params": cut}, {"params": replicated}], **config.options, **options,
        )

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """If the norm of the whole model's gradients is above max_norm, let step() scale them down
        to it. Returns the norm before, a 0-dim tensor, the same on all ranks of the mesh. Only
        gradient_scale changes."""
        self.zero.reduced_gradients()
        # squares of all parts add up; what all ranks of a model hold whole counts on the first
        counted = [bucket.gradient_shard for bucket in self.zero.buckets
                   if bucket.group_index == 0 or self.mesh.model_rank == 0]
        norm = precision.global_norm(counted, self.gradient_scale, group=self.mesh.data_group)
        squares = norm.square()
        collectives.all_reduce(squares, op="sum", group=self.mesh.model_group)
        norm = squares.sqrt()
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    # everything else is the stage's

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.zero.optimizer

    @property
    def buckets(self) -> list[Bucket]:
        return self.zero.buckets

    @property
    def reducer(self) -> Reducer:
        return self.zero.reducer

    @property
    def gradient_scale(self) -> precision.Scale:
        return self.zero.gradient_scale

    @gradient_scale.setter
    def gradient_scale(self, scale: precision.Scale) -> None:
        self.zero.gradient_scale = scale

    def reduced_gradients(self) -> list[torch.Tensor]:
        return self.zero.reduced_gradients()

    def no_sync(self) -> AbstractContextManager:
        return self.zero.no_sync()

    def step(self) -> None:
        self.zero.step()

    def zero_grad(self) -> None:
        self.zero.zero_grad()

    def holding(self) -> Holding:
        """For a checkpoint (checkpoint/saved_state.py), from which any other mesh can resume."""
        mesh, also = self.mesh, {"head.weight": "token_embedding.weight"}  # as GPT has it
        return Holding(self.zero, places(self.model), None, mesh.data_rank, mesh.model_rank, also,
                       "zero_100b")

    def state_dict(self) -> dict:
        return self.zero.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.zero.load_state_dict(state)

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Context in which every parameter of this rank's part of the model is whole."""
        with self.zero.gather_parameters():
            yield


if __name__ == "__main__":
    from zero_minimal.programs.configs import main

    main(System)
