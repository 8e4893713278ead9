"""Nothing of this course: whole parameters side by side in vectors, reduced when the gradients are asked for, by
torch's own collectives. Shards are cut to the element, with no more padding than N - 1 elements."""
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def in_parts(params, bucket_bytes):
    """Lists of parameters of one dtype that follow on one another, of about so many bytes."""
    parts = []
    for param in params:
        if not parts or parts[-1][0].dtype != param.dtype or sum(one.nbytes for one in parts[-1]) >= bucket_bytes:
            parts.append([])
        parts[-1].append(param)
    return parts


class Part:
    """Parameters of one group and dtype in a vector [N * shard]."""

    def __init__(self, params, group):
        self.params, self.group, self.count = params, group, dist.get_world_size(group)
        self.size = sum(param.numel() for param in params)
        self.shard = -(-self.size // self.count)
        self.whole = torch.zeros(self.count * self.shard, dtype=params[0].dtype)
        place = 0
        for param in params:
            view = self.whole[place : place + param.numel()].view(param.shape)
            view.copy_(param.data)
            param.data = view
            place += param.numel()
        dist.broadcast(self.whole, group=group, group_src=0)
        self.own = self.whole.chunk(self.count)[dist.get_rank(group)]
        self.master = nn.Parameter(self.own if self.own.dtype == torch.float32 else self.own.float())
        self.mean = None

    def reduce(self):
        """What came since the last reduction, summed over ranks, is added to the mean."""
        wide = torch.promote_types(self.whole.dtype, torch.float32)
        flat = torch.zeros(self.whole.numel(), dtype=wide)
        place = 0
        for param in self.params:
            if param.grad is not None:
                flat[place : place + param.numel()] = param.grad.flatten()
                param.grad = None
            place += param.numel()
        mine = torch.zeros(self.shard, dtype=wide)
        reduce_scatter(mine, flat, group=self.group)
        mine = (mine / self.count).to(self.whole.dtype)
        self.mean = mine if self.mean is None else self.mean + mine


class Stage1:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=2**22, param_groups=None, **options):
        self.model, self.group, self.gradient_scale = model, group, None
        self.needs_zero_grad = self.fresh = self.quiet = False
        groups = param_groups or [{"params": list(model.parameters())}]
        self.parts, shards = [], []
        for entry in groups:
            params = [param for param in entry["params"] if param.requires_grad]
            parts = [Part(some, group) for some in in_parts(params, bucket_bytes)]
            self.parts += parts
            shards.append({**entry, "params": [part.master for part in parts]})
        self.optimizer = optimizer_class(shards, **options)
        for rest in [param.data for param in model.parameters() if not param.requires_grad] + list(model.buffers()):
            dist.broadcast(rest, group=group, group_src=0)
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(self.comes)

    def comes(self, gradient):
        if self.needs_zero_grad:
            raise RuntimeError("call zero_grad() after step()")
        self.fresh = True

    @contextmanager
    def no_sync(self):
        yield  # gradients add up in .grad, and nothing is sent before they are asked for

    def reduced_gradients(self):
        found = torch.tensor(float(self.fresh or self.parts[0].mean is None))
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        if found:
            for part in self.parts:
                part.reduce()
            self.fresh = False
        return [part.mean for part in self.parts]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        squares = sum(shard.float().square().sum() for shard in self.reduced_gradients())
        dist.all_reduce(squares, group=self.group)
        scale = 1.0 if self.gradient_scale is None else self.gradient_scale
        norm = squares.sqrt() * scale
        if norm > max_norm:
            self.gradient_scale = scale * max_norm / norm
        return norm

    @torch.no_grad()
    def step(self):
        scale = 1.0 if self.gradient_scale is None else self.gradient_scale
        for part, mean in zip(self.parts, self.reduced_gradients(), strict=True):
            part.master.grad = mean.float() * scale
        self.optimizer.step()
        for part in self.parts:
            part.master.grad = None
            part.own.copy_(part.master)
            all_gather(part.whole, part.own.clone(), group=self.group)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)
        self.needs_zero_grad = True

    def zero_grad(self):
        self.needs_zero_grad = self.fresh = False
        self.gradient_scale = None
        for part in self.parts:
            part.mean = None
            for param in part.params:
                param.grad = None

    @contextmanager
    def gather_parameters(self):
        yield
