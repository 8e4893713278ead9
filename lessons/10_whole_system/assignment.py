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
        # step 1: `constant_buffers` are two buffers, each of which holds any of the buckets and no
        # more. `slab` is one allocation, with a place for this rank's shard of each bucket. All is
        # made here, once. ValueError for buckets of several dtypes or devices.
        # - kind_of(buckets): (dtype, device) of them all, or ValueError
        # - ConstantBuffers(size, dtype=…, device=…, group=…): lesson 07's two buffers. size: bytes
        #   of each
        # - bucket.padded: elements of the bucket
        # - bucket.parameter_shard [padded / D]: this rank's shard of its parameters
        raise NotImplementedError("step 1: __init__")

    def whole(self, bucket: Bucket) -> torch.Tensor:
        """Zeros [padded], into which the bucket's gradients are copied."""
        # step 1: return zeros [padded], in the buffer whose turn it is.
        # - self.constant_buffers.take(): all of the buffer whose turn it is, with what was in it
        raise NotImplementedError("step 1: whole")

    def give_back(self, whole: torch.Tensor) -> None:
        pass  # the buffer stays, for a later bucket

    def shard(self, bucket: Bucket) -> torch.Tensor:
        """Memory for this rank's shard of the average, [padded / D]. It becomes
        bucket.gradient_shard, or is added to it where there is one already."""
        # step 1: return the bucket's place in the slab, [padded / D]. Where an earlier micro-batch
        # lies there already, return memory beside it, as long.
        # - bucket.gradient_shard [padded / D]: None before the first micro-batch of a step
        raise NotImplementedError("step 1: shard")


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
        # step 2: in forward each block of the model keeps its input alone, [b, s, h]. With
        # config.partition each rank keeps its part, over the ranks that have copies. With
        # config.to_host it goes to host memory; else into self.slab, a Slab that has room for what
        # one forward pass keeps, no more, is made here, and is used anew in each (begin_forward).
        # - checkpoint_blocks(model, group=…, to_host=…, place=…): lesson 06's. Over `group` an
        #   input is cut, into parts of b·s·h/M numbers, rounded up; None: it is not cut. `place`
        #   copies a tensor to where it is kept; None: each gets memory of its own.
        # - Slab(elements, dtype=…, device=…), slab.keep(tensor): lesson 08's
        # - self.mesh.model_group or self.mesh.data_group, one of them: the ranks that share this
        #   model; those with the same part of it. dist.get_world_size(group): how many they are
        # - self.model.config: has .layers, .sequence and .hidden
        # - self.model.register_forward_pre_hook(function): torch's. The function is called before
        #   each forward pass.
        raise NotImplementedError("step 2: keep_checkpoints")

    def begin_forward(self, *_) -> None:
        """Before a forward pass: the checkpoints of the last one are not needed any more."""
        if torch.is_grad_enabled():
            self.slab.reset()

    def over_replicas(self, config: Config, optimizer_class: type, **options):
        """The model wrapped by config.stage, with its config.options, and `options`."""
        # step 3: return a config.stage, made with config.options and `options`, over the ranks that
        # hold the same part of the model. Of each of its buckets it can be told whether it holds
        # parameters that are cut, or parameters that all ranks of a model hold whole: two
        # param_groups do that.
        # - config.stage(model, optimizer_class, group=…, param_groups=…, **options): Stage1 or
        #   Stage2, over the ranks of `group`. param_groups as torch.optim takes them.
        # - self.model.replicated(): a list of the parameters that all ranks of a model hold whole
        raise NotImplementedError("step 3: over_replicas")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """If the norm of the whole model's gradients is above max_norm, let step() scale them down
        to it. Returns the norm before, a 0-dim tensor, the same on all ranks of the mesh. Only
        gradient_scale changes."""
        # step 4: return the norm of the gradient of the model that all ranks of the mesh train,
        # times self.gradient_scale. Each of its elements counts once. self.gradient_scale, which
        # step() multiplies with, has become smaller where the norm is larger than max_norm. The
        # gradients are as they were. A norm that is inf or NaN is returned, too.
        # - self.zero.reduced_gradients(): ends what is left of backward, with its collectives. Then
        #   each bucket of self.zero.buckets has its shard.
        # - bucket.gradient_shard [padded / D], bucket.group_index: the number of its param_group,
        #   from 0
        # - self.mesh.model_group, self.mesh.data_group: as in step 2. self.mesh.model_rank: this
        #   rank's number among those that share its model
        # - precision.global_norm(gradients, scale, group=…): 0-dim, the root of the sum of squares
        #   over the group, times scale
        # - collectives.all_reduce(tensor, op="sum", group=…): in place
        # - precision.clip(scale, norm, max_norm): the new scale: the old one (None: 1), or a
        #   smaller one
        raise NotImplementedError("step 4: clip_grad_norm_")

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
