"""No buckets: each parameter is cut into N shards, and travels alone, by torch's own collectives, which block."""
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from zero_minimal.core import optimizers, precision, set_up
from zero_minimal.core.reducer import Hooks, Reducer

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sharded:
    def __init__(self, param, group_index, group):
        rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.params, self.group_index, self.group, self.flat = [param], group_index, group, None
        self.device, self.dtype, self.size = param.device, param.dtype, param.numel()
        padded = -(-self.size // self.count) * self.count
        self.parameters = torch.zeros(padded, dtype=param.dtype)
        self.parameters[: self.size] = param.data.flatten()
        dist.broadcast(self.parameters, 0, group=group)
        param.data = self.parameters[: self.size].view(param.shape)
        self.parameter_shard = self.parameters.chunk(self.count)[rank]
        self.master = precision.master_of(self.parameter_shard)
        self.gradient_shard = None

    def reduce(self):
        param = self.params[0]
        wide = torch.promote_types(self.dtype, torch.float32)
        whole = torch.zeros(self.parameters.shape, dtype=wide)
        if param.grad is not None:
            whole[: self.size] = param.grad.flatten()
            param.grad = None
        mine = torch.zeros(self.parameter_shard.shape, dtype=wide)
        reduce_scatter(mine, whole, group=self.group)
        mine = (mine / self.count).to(self.dtype)
        self.gradient_shard = mine if self.gradient_shard is None else self.gradient_shard + mine


class Stage2(Hooks):
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=None, param_groups=None, **options):
        groups = set_up.parameter_groups(model, param_groups)
        self.model, self.group, self.gradient_scale = model, group, None
        index = {param: place for place, entry in enumerate(groups) for param in entry["params"]}
        params = [param for param in model.parameters() if param in index]
        self.buckets = [Sharded(param, index[param], group) for param in reversed(params)]
        for param in model.parameters():
            if param not in index:
                dist.broadcast(param.data, 0, group=group)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0, group=group)
        self.optimizer = optimizers.over_shards(optimizer_class, options, groups, self.buckets)
        self.reducer = Reducer(self)

    def bucket_complete(self, bucket, done):
        bucket.reduce()

    def no_sync(self):
        return nullcontext()

    def reduced_gradients(self):
        if not self.reducer.reduced:
            self.reducer.finish()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        square = sum(shard.float().norm() ** 2 for shard in self.reduced_gradients())
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt() * (self.gradient_scale or 1.0)
        if norm > max_norm:
            self.gradient_scale = (self.gradient_scale or 1.0) * max_norm / norm
        return norm

    @torch.no_grad()
    def step(self):
        self.reduced_gradients()
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
        for bucket in self.buckets:
            all_gather(bucket.parameters, bucket.parameter_shard.clone(), group=self.group)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0, group=self.group)
        self.reducer.needs_zero_grad = True

    def zero_grad(self):
        self.reducer.forget()
        self.gradient_scale = None
        for bucket in self.buckets:
            bucket.gradient_shard = bucket.params[0].grad = None

    @contextmanager
    def gather_parameters(self):
        yield
