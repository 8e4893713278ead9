"""Peers: torch's own data parallelism behind the API of our stages, so that one training loop runs them all.

    DDP                DistributedDataParallel                                 to compare with stage 0
    ZeroRedundancy     the same, its optimizer a ZeroRedundancyOptimizer       to compare with stage 1
    FSDP2              fully_shard on each block, then on the whole            to compare with stage 3

They offer what a loop calls, no state_dict. 16-bit runs are mixed precision with fp32 masters here too.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero_minimal.foundations.precision import clip, global_norm


class Peer:
    """What the peers share: after backward their gradients are reduced, and the optimizer reads them from .grad."""

    sharded = False  # whether a rank holds a shard of the gradients, or all of them
    group = None  # all ranks
    gradient_scale = None  # what the update multiplies gradients with, if anything

    def no_sync(self):
        """Context for the micro-batches before the last."""
        return self.model.no_sync()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """This rank's part of the averaged gradients."""
        return [param.grad for param in self.model.parameters()]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this global norm, if theirs is larger; return the norm they had, []."""
        norm = global_norm(self.reduced_gradients(), self.gradient_scale, sharded=self.sharded)
        self.gradient_scale = clip(self.gradient_scale, norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self):
        """Update the parameters."""
        if self.gradient_scale is not None:
            for gradient in self.reduced_gradients():
                gradient.mul_(self.gradient_scale)
        self.optimizer.step()

    def zero_grad(self):
        """Forget the gradients."""
        self.gradient_scale = None
        for param in self.model.parameters():
            param.grad = None


class DDP(Peer):
    """torch's DistributedDataParallel; gradients are views of its buckets, which spares it a copy and 4Ψ bytes."""

    theory_stage = 0

    def __init__(self, model, optimizer_class, *, bucket_bytes=25 * 2**20, **optimizer_options):
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True)
        self.params = list(model.parameters())
        self.masters = [param if param.element_size() >= 4 else param.detach().float() for param in self.params]
        self.optimizer = self.make_optimizer(optimizer_class, optimizer_options)

    def make_optimizer(self, optimizer_class, options: dict):
        """The optimizer of all parameters, or of their fp32 masters."""
        return optimizer_class(self.masters, **options)

    @torch.no_grad()
    def step(self):
        """Update the masters, and round them to the parameters' dtype where that is another."""
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                master.grad = param.grad.float()
            if self.gradient_scale is not None:
                master.grad.mul_(self.gradient_scale)
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            if master is not param:
                param.copy_(master)
                master.grad = None


class ZeroRedundancy(DDP):
    """DistributedDataParallel, with the optimizer's state divided by torch's ZeroRedundancyOptimizer."""

    theory_stage = 1

    def make_optimizer(self, optimizer_class, options: dict):
        """The optimizer of this rank's share of the parameters; after a step each rank broadcasts its share."""
        return ZeroRedundancyOptimizer(self.masters, optimizer_class, parameters_as_bucket_view=True, **options)


class FSDP2(Peer):
    """torch's fully_shard, blocks and then the root. It reduces each micro-batch, as our stage 3 does.

    In 16 bit it keeps fp32 shards of parameters and gradients, and gathers and reduces in 16 bit: 4 + 4 + 8 bytes a
    parameter where stage 3 counts 2 + 2 + 12. Units are the model's `blocks`; it has no use for bucket_bytes.
    """

    theory_stage = 3
    sharded = True

    def __init__(self, model, optimizer_class, *, bucket_bytes=None, **optimizer_options):
        first = next(model.parameters())
        dtype = first.dtype
        mesh = init_device_mesh(first.device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if first.element_size() < 4 else MixedPrecisionPolicy()
        model.float()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = optimizer_class(model.parameters(), **optimizer_options)

    def no_sync(self):
        """Nothing to put off: gradients have no place to wait but their shards."""
        return nullcontext()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the averaged gradients."""
        return [param.grad.to_local() for param in self.model.parameters()]
