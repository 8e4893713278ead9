"""ZeRO-100B: the system that the paper ran, P_os+g with all of ZeRO-R, beside model parallelism (section 10, Table 3).

    torchrun --nproc-per-node 4 zero_minimal/zero_100b.py --config C4 --model-parallel 2

The ranks are a mesh: M neighbours share one model (tensor parallelism), the D ranks at the same place in each model are
data-parallel, and ZeRO-DP works among these.

    D × M = 2 × 2    rank 0 ─ rank 1     one model: activations are the same on both, P_a cuts their checkpoints
                       │        │
                     rank 2 ─ rank 3     another one
                       └── the same part of the weights: stages 1 and 2 cut optimizer state and gradients

              ZeRO-DP     ZeRO-R
    C1        P_os        C_B, M_D
    C2        P_os        C_B, M_D, P_a
    C3        P_os+g      C_B, M_D
    C4        P_os+g      C_B, M_D, P_a
    C5        P_os+g      C_B, M_D, P_a+cpu

In all of them activations are checkpointed, a block each.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.constant_buffers import ConstantBuffers
from zero_minimal.defragmentation import Slab
from zero_minimal.foundations import collectives, precision
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.tensor_parallel import ParallelGPT


class Stage1R(Stage1):
    """P_os. Its gradients lie in one allocation, and are reduced where they lie: C_B and M_D have nothing to add."""


class Stage2R(Stage2):
    """P_os+g whose gradients travel through two constant buffers (C_B) and end in one slab (M_D)."""

    def __init__(self, model, optimizer_class, **options):
        super().__init__(model, optimizer_class, **options)
        first = self.buckets[0]
        if any((bucket.dtype, bucket.device) != (first.dtype, first.device) for bucket in self.buckets):
            raise ValueError("the constant buffers are of one dtype and device, and this model's parameters are not")
        largest = max(bucket.padded for bucket in self.buckets) * first.dtype.itemsize
        self.constant_buffers = ConstantBuffers(largest, dtype=first.dtype, device=first.device, group=self.group)
        shards = [bucket.parameter_shard.numel() for bucket in self.buckets]
        self.gradient_slab = torch.zeros(sum(shards), dtype=first.dtype, device=first.device)
        self.home_of = dict(zip(self.buckets, self.gradient_slab.split(shards), strict=True))  # of its gradient shard
        self.pieces = Counter(param for bucket in self.buckets for param in bucket.params)
        self.to_go = Counter(self.pieces)

    def backward_begins(self):
        self.to_go = Counter(self.pieces)

    def gradient_arrived(self, param, buckets):
        for bucket in buckets:  # until they are complete it waits as autograd made it
            self.backward.filled(bucket, param)

    def bucket_complete(self, bucket):
        buffer = self.constant_buffers.take()[: bucket.padded].zero_()
        bucket.gradients = buffer
        for param in bucket.params:
            if param.grad is not None:
                bucket.put_gradient(param)
            self.to_go[param] -= 1
            if not self.to_go[param]:  # no later bucket holds a piece of it
                param.grad = None
        bucket.gradients = None
        home = self.home_of[bucket]
        is_first = bucket.gradient_shard is None  # micro-batch of this step
        part = home if is_first else torch.empty_like(home)
        pending = collectives.reduce_scatter(part, buffer, op="avg", group=self.group, async_op=True)

        def arrived():
            bucket.gradient_shard = home if is_first else home.add_(part)

        self.constant_buffers.send(pending, arrived)

    def _wait(self):
        self.constant_buffers.wait()
        self.to_go = Counter(self.pieces)


@dataclass(frozen=True)
class Config:
    """A row of Table 3."""

    stage: type
    partition: bool = False  # P_a
    to_host: bool = False  # P_a+cpu


CONFIGS = {
    "C1": Config(Stage1R),
    "C2": Config(Stage1R, partition=True),
    "C3": Config(Stage2R),
    "C4": Config(Stage2R, partition=True),
    "C5": Config(Stage2R, partition=True, to_host=True),
}


class System:
    """A GPT cut over the model-parallel group, trained by ZeRO over the data-parallel one, as CONFIGS[name] says.

    Args:
        sizes: what ParallelGPT takes.
        batch: sequences of a micro-batch, from which the size of the checkpoints' slab follows.
    `system.model` and `system.zero` are used like any model and stage; call `system.begin()` before each forward.
    """

    def __init__(self, name, sizes, mesh, batch, dtype, device, optimizer_class, **options):
        if name not in CONFIGS:
            raise ValueError(f"there is no config {name!r}: choose from {', '.join(CONFIGS)}")
        config = CONFIGS[name]
        self.mesh = mesh
        self.model = ParallelGPT(sizes, mesh.model_group).to(device, dtype)
        world_size = torch.distributed.get_world_size(mesh.model_group)
        elements = batch * sizes.sequence * sizes.hidden  # of a block's input
        part = -(-elements // world_size) if config.partition else elements
        self.slab = None if config.to_host else Slab(part * sizes.layers, dtype=dtype, device=device)
        checkpoint_blocks(
            self.model, group=mesh.model_group if config.partition else None, to_host=config.to_host,
            place=self.slab.keep if self.slab else None,
        )
        replicated = self.model.replicated()  # in a group, and so in buckets, of their own
        cut = [param for param in self.model.parameters() if param not in set(replicated)]
        groups = [{"params": cut}, {"params": replicated}]
        self.zero = config.stage(
            self.model, optimizer_class, group=mesh.data_group, param_groups=groups, **options
        )
        # a stage knows the ranks that hold its part of the model, and these are not all that hold a part
        self.zero.clip_grad_norm_ = self.clip_grad_norm_
        self.zero.groups = [mesh.data_group, mesh.model_group]  # a loss scaler asks both for an overflow

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients down to this global norm, if theirs is larger; return the norm they had, [].

        Squares add up over both groups. What all ranks of the model-parallel group hold counts once: on the first.
        """
        self.zero.reduced_gradients()
        counted = [bucket.gradient_shard for bucket in self.zero.buckets
                   if bucket.group_index == 0 or self.mesh.model_rank == 0]
        norm = precision.global_norm(counted, self.zero.gradient_scale, group=self.mesh.data_group)
        squares = norm.square()
        collectives.all_reduce(squares, op="sum", group=self.mesh.model_group)
        norm = squares.sqrt()
        self.zero.gradient_scale = precision.clip(self.zero.gradient_scale, norm, max_norm)
        return norm

    def begin(self):
        """Before a forward pass: the checkpoints of the last one are not needed any more."""
        if self.slab:
            self.slab.reset()


if __name__ == "__main__":
    from zero_minimal.programs.configs import main

    main()
