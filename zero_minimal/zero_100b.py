"""ZeRO-100B: the system that the paper ran, P_os+g with all of ZeRO-R, beside model parallelism
(section 10, Table 3).

    torchrun --nproc-per-node 4 zero_minimal/zero_100b.py --config C4 --model-parallel 2

The ranks are a mesh: M neighbours share one model (tensor parallelism), the D ranks at the same
place in each model are data-parallel, and ZeRO-DP works among these.

    D × M = 2 × 2    rank 0 ─ rank 1     one model: activations are the same on both, P_a cuts their checkpoints
                       │        │
                     rank 2 ─ rank 3     another one
                       └── the same part of the weights: stages 1 and 2 cut optimizer state and
                       gradients

              ZeRO-DP     ZeRO-R
    C1        P_os        C_B, M_D
    C2        P_os        C_B, M_D, P_a
    C3        P_os+g      C_B, M_D
    C4        P_os+g      C_B, M_D, P_a
    C5        P_os+g      C_B, M_D, P_a+cpu

In all of them activations are checkpointed, a block each.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.constant_buffers import ConstantBuffers
from zero_minimal.defragmentation import Slab
from zero_minimal.foundations import collectives, precision
from zero_minimal.foundations.gradient_memory import GradientMemory
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.tensor_parallel import ParallelGPT


class ConstantMemory(GradientMemory):
    """Whole gradients travel through two constant buffers (C_B); shards of them stay in one slab
    (M_D).

    buckets: of one dtype and device. Raises: ValueError if they are not.
    """

    def __init__(self, buckets, group=None):
        first = buckets[0]
        if any((bucket.dtype, bucket.device) != (first.dtype, first.device) for bucket in buckets):
            raise ValueError("the constant buffers are of one dtype and device, and this model's "
                             "parameters are not")
        largest = max(bucket.padded for bucket in buckets) * first.dtype.itemsize
        self.constant_buffers = ConstantBuffers(
            largest, dtype=first.dtype, device=first.device, group=group
        )
        shards = [bucket.parameter_shard.numel() for bucket in buckets]
        self.slab = torch.zeros(sum(shards), dtype=first.dtype, device=first.device)
        self.home_of = dict(zip(buckets, self.slab.split(shards), strict=True))

    def whole(self, bucket):
        return self.constant_buffers.take()[: bucket.padded].zero_()

    def give_back(self, whole):
        pass  # it stays where it is, for a later bucket

    def shard(self, bucket):
        is_first = bucket.gradient_shard is None  # micro-batch of this step
        return self.home_of[bucket] if is_first else torch.empty_like(self.home_of[bucket])


@dataclass(frozen=True)
class Config:
    """A row of Table 3. At stage 1 gradients lie in one allocation, and are reduced where they lie:
    C_B and M_D have nothing to add to them."""

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


class System:
    """A GPT cut over the model-parallel group, trained by ZeRO over the data-parallel one, as
    CONFIGS[name] says. It is used like a stage.

    Args:
        sizes: what ParallelGPT takes.
        batch: sequences of a micro-batch, from which the size of the checkpoints' slab follows.
    """

    def __init__(
        self, name, sizes, mesh, batch, dtype, device, optimizer_class, **options
    ):
        if name not in CONFIGS:
            raise ValueError(f"there is no config {name!r}: choose from {', '.join(CONFIGS)}")
        config = CONFIGS[name]
        self.mesh = mesh
        self.groups = [mesh.data_group, mesh.model_group]  # whose ranks hold parts of the model
        self.model = ParallelGPT(sizes, mesh.model_group).to(device, dtype)
        elements = batch * sizes.sequence * sizes.hidden  # of a block's input
        if config.partition:
            elements = -(-elements // dist.get_world_size(mesh.model_group))
        self.slab = None
        if not config.to_host:
            self.slab = Slab(elements * sizes.layers, dtype=dtype, device=device)
            self.model.register_forward_pre_hook(self._begin)
        checkpoint_blocks(
            self.model, group=mesh.model_group if config.partition else None,
            to_host=config.to_host, place=self.slab.keep if self.slab else None,
        )
        replicated = self.model.replicated()  # in a group, and so in buckets, of their own
        cut = [param for param in self.model.parameters() if param not in set(replicated)]
        self.zero = config.stage(
            self.model, optimizer_class, group=mesh.data_group,
            param_groups=[{"params": cut}, {"params": replicated}], **config.options, **options,
        )

    def _begin(self, *_):
        """Before a forward pass: the checkpoints of the last one are not needed any more."""
        if torch.is_grad_enabled():
            self.slab.reset()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients down to this global norm, if theirs is larger; return the norm they
        had, [].

        A stage knows the ranks that hold its part of the model, and these are not all that hold a
        part. So squares add up over both groups. What all ranks of the model-parallel group hold
        counts once: on the first.
        """
        self.zero.reduced_gradients()
        counted = [bucket.gradient_shard for bucket in self.zero.buckets
                   if bucket.group_index == 0 or self.mesh.model_rank == 0]
        norm = precision.global_norm(counted, self.gradient_scale, group=self.mesh.data_group)
        squares = norm.square()
        collectives.all_reduce(squares, op="sum", group=self.mesh.model_group)
        norm = squares.sqrt()
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    # all else is the stage's

    @property
    def optimizer(self):
        return self.zero.optimizer

    @property
    def buckets(self):
        return self.zero.buckets

    @property
    def gradient_scale(self):
        return self.zero.gradient_scale

    @gradient_scale.setter
    def gradient_scale(self, scale):
        self.zero.gradient_scale = scale

    def reduced_gradients(self):
        return self.zero.reduced_gradients()

    def no_sync(self):
        return self.zero.no_sync()

    def step(self):
        self.zero.step()

    def zero_grad(self):
        self.zero.zero_grad()

    def state_dict(self):
        return self.zero.state_dict()

    def load_state_dict(self, state):
        self.zero.load_state_dict(state)

    @contextmanager
    def gather_parameters(self):
        """Context in which every parameter of this rank's part of the model is whole."""
        with self.zero.gather_parameters():
            yield


if __name__ == "__main__":
    from zero_minimal.programs.configs import main

    main()
