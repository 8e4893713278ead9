"""Peers: other implementations of data parallelism behind the API of our stages, so that one loop trains them all.

    DDP                DistributedDataParallel                                 to compare with stage 0
    ZeroRedundancy     the same with a ZeroRedundancyOptimizer                 to compare with stages 1 and 2
    FSDP2              fully_shard on each block, then on the whole            to compare with stage 3
    FSDP2Kept          the same, keeping parameters from forward to backward   to compare with stage 2
    DEEPSPEED[0 … 3]   if DeepSpeed can be imported                            to compare with the stage of that number
    Floor              no communication at all: a lower bound for every stage

They have the methods that a loop calls, but no state_dict. 16-bit runs also use fp32 masters here.
"""

import importlib.util
import io
import logging
import os
import warnings
from contextlib import nullcontext, redirect_stdout

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zero_minimal.core.precision import clip, global_norm
from zero_minimal.core.units import find_units


class Peer:
    """The base of all peers: after backward, gradients are reduced, and the optimizer reads them from .grad."""

    sharded = False  # whether a rank holds only a shard of the gradients
    group = None  # all ranks
    gradient_scale = None  # the update's factor for gradients, if any

    def no_sync(self):
        """A context for the micro-batches before the last."""
        return self.model.no_sync()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """This rank's part of the averaged gradients."""
        return [param.grad for param in self.model.parameters()]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this global norm if theirs is larger; return the norm that they had, 0-dim."""
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
        """Drop the gradients."""
        self.gradient_scale = None
        for param in self.model.parameters():
            param.grad = None


class DDP(Peer):
    """torch's DistributedDataParallel, by default with torch's bucket sizes (25 MiB, the first one 1 MiB).

    Gradients are views of the buckets, which saves 4Ψ bytes.
    """

    theory_stage = 0

    def __init__(self, model, optimizer_class, *, bucket_bytes=None, **optimizer_options):
        bucket_mb = None if bucket_bytes is None else bucket_bytes / 2**20
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        self.params = list(model.parameters())
        is_16_bit = self.params[0].element_size() < 4
        self.masters = [nn.Parameter(param.detach().float()) if is_16_bit else param for param in self.params]
        self.optimizer = self.make_optimizer(optimizer_class, optimizer_options)

    def make_optimizer(self, optimizer_class, options: dict):
        """The optimizer of all parameters, or of their fp32 masters."""
        return optimizer_class(self.masters, **options)

    @torch.no_grad()
    def step(self):
        """Update the masters, and round them to the parameters' dtype if that differs."""
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
    """DistributedDataParallel; torch's ZeroRedundancyOptimizer divides the optimizer's state (but not fp32 masters)."""

    theory_stage = 1

    @staticmethod
    def prepare(device: torch.device) -> None:
        """Import it, before the model is built: that takes time, and memory that is not the model's."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its module runs torch.jit.script, which is deprecated
            import torch.distributed.optim  # noqa: F401

    def make_optimizer(self, optimizer_class, options: dict):
        """The optimizer of this rank's share of the parameters; after a step each rank broadcasts its share."""
        self.prepare(self.params[0].device)
        sharded = torch.distributed.optim.ZeroRedundancyOptimizer
        return sharded(self.masters, optimizer_class, parameters_as_bucket_view=True, **options)


class FSDP2(Peer):
    """torch's fully_shard on the blocks and then on the root. It reduces each micro-batch, as our stage 3 does.

    In 16 bit it keeps fp32 shards of parameters and gradients, and gathers and reduces in 16 bit: 4 + 4 + 8 bytes per
    parameter, where stage 3 counts 2 + 2 + 12. Its units are those of our stage 3, the blocks; it ignores bucket_bytes.
    """

    theory_stage = 3
    sharded = True
    reshard_after_forward = None  # torch's default: blocks release their parameters after forward, the root does not

    def __init__(self, model, optimizer_class, *, bucket_bytes=None, **optimizer_options):
        first = next(model.parameters())
        dtype = first.dtype
        mesh = init_device_mesh(first.device.type, (dist.get_world_size(),))
        # fp32 parameters keep their dtype
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        options = dict(mesh=mesh, mp_policy=policy)
        if self.reshard_after_forward is not None:
            options["reshard_after_forward"] = self.reshard_after_forward
        model.float()
        for unit in find_units(model)[1:]:
            fully_shard(unit.module, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = optimizer_class(model.parameters(), **optimizer_options)

    def no_sync(self):
        """Does nothing: each micro-batch reduces its gradients to shards, as at stages 2 and 3."""
        return nullcontext()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the averaged gradients."""
        return [param.grad.to_local() for param in self.model.parameters()]


class FSDP2Kept(FSDP2):
    """FSDP2 that keeps parameters whole from forward to backward: one all-gather per step, as in stage 2."""

    theory_stage = 2
    reshard_after_forward = False


# ----------------------------------------------------------------------------------------------------------- DeepSpeed


class DeepSpeed(Peer):
    """DeepSpeed's engine, in fp32 or bf16. Optional: it is used only if it is installed.

    DeepSpeed's buckets of 5e8 elements are meant for models a thousand times as large: here they have our stages' size.
    """

    @staticmethod
    def is_installed() -> bool:
        """Whether `import deepspeed` may work."""
        return importlib.util.find_spec("deepspeed") is not None

    @staticmethod
    def prepare(device: torch.device) -> None:
        """Import it: that takes seconds, and memory that is not the model's."""
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        warnings.simplefilter("ignore")  # it calls functions that torch has renamed
        with redirect_stdout(io.StringIO()):  # it prints what it builds
            import deepspeed

            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, dist_init_required=False)

    def __init__(self, model, optimizer_class, *, bucket_bytes=4 * 2**20, **optimizer_options):
        import deepspeed

        first = next(model.parameters())
        elements = bucket_bytes // first.element_size()  # DeepSpeed counts elements
        config = {
            "train_micro_batch_size_per_gpu": 1,  # has no effect: it does not make the batches
            "bf16": {"enabled": first.dtype == torch.bfloat16},
            "gradient_clipping": 0.0,  # its default would clip at 1.0
            "zero_optimization": {
                "stage": self.theory_stage,
                "reduce_bucket_size": elements,
                "allgather_bucket_size": elements,
                "stage3_prefetch_bucket_size": elements,
                "stage3_param_persistence_threshold": 0,
            },
        }
        optimizer = optimizer_class(model.parameters(), **optimizer_options)
        self.model, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def run_backward(self, loss: torch.Tensor) -> None:
        """Replaces loss.backward(), which its stage 0 refuses."""
        self.model.backward(loss)

    def step(self):
        """Update the parameters, and drop the gradients."""
        self.model.step()

    def zero_grad(self):
        """Does nothing: step() has dropped the gradients."""


DEEPSPEED = tuple(type(f"DeepSpeed{stage}", (DeepSpeed,), {"theory_stage": stage}) for stage in range(4))


# ----------------------------------------------------------------------------------------------------------- the floor


class Floor(Peer):
    """The same forward and backward, an update of 1/N of the elements, and nothing sent: no stage can be faster.

    With more than one rank its training is useless: each rank uses its own gradients, and updates only its share of the
    parameters. On one rank it is plain PyTorch.
    """

    theory_stage = 1  # by what it holds
    communicates = False

    def __init__(self, model, optimizer_class, *, bucket_bytes=None, **optimizer_options):
        self.model = model
        params = list(model.parameters())
        total, rank, world_size = sum(param.numel() for param in params), dist.get_rank(), dist.get_world_size()
        first, last = total * rank // world_size, total * (rank + 1) // world_size
        self.pieces = []  # (parameter, the slice of it that this rank updates, its master)
        start = 0
        for param in params:
            piece = slice(max(first - start, 0), min(last - start, param.numel()))
            start += param.numel()
            if piece.start < piece.stop:
                flat = param.detach().view(-1)[piece]
                master = nn.Parameter(flat if flat.element_size() >= 4 else flat.float())
                self.pieces.append((param, piece, master))
        self.optimizer = optimizer_class([master for _, _, master in self.pieces], **optimizer_options)

    def no_sync(self):
        """Does nothing: nothing is sent anyway."""
        return nullcontext()

    @torch.no_grad()
    def step(self):
        """Update this rank's share of the parameters."""
        for param, piece, master in self.pieces:
            master.grad = param.grad.view(-1)[piece].to(master.dtype)
        self.optimizer.step()
        for param, piece, master in self.pieces:
            master.grad = None
            if master.dtype != param.dtype:
                param.view(-1)[piece].copy_(master)
