"""No buckets: each parameter is cut into N shards, and travels alone, by torch's own collectives. The house tells whose
turn it is, and when gradients are there."""
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.core import optimizers, precision, replicas, set_up
from zero_minimal.core.execution_order import ExecutionOrder
from zero_minimal.core.reducer import Hooks, Reducer
from zero_minimal.core.units import find_units, release, restore

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sharded:
    def __init__(self, param, group_index, group):
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.params, self.group_index, self.group, self.flat = [param], group_index, group, None
        self.device, self.dtype, self.size, self.shape = param.device, param.dtype, param.numel(), param.shape
        self.padded = -(-self.size // self.count) * self.count
        self.parameters = torch.zeros(self.padded, dtype=param.dtype)
        self.parameters[: self.size] = param.data.flatten()
        dist.broadcast(self.parameters, dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
        self.parameter_shard = self.parameters.chunk(self.count)[self.rank].clone()
        self.master = precision.master_of(self.parameter_shard) if group_index >= 0 else None
        self.gradient_shard, self.work = None, None
        self.placeholder = torch.full((), float("nan"), dtype=param.dtype).expand(param.shape)
        self.go()

    def go(self):
        release(self.params[0], self.placeholder)
        self.parameters.untyped_storage().resize_(0)

    def come(self):
        self.parameters.untyped_storage().resize_(self.padded * self.dtype.itemsize)
        self.work = all_gather(self.parameters, self.parameter_shard, group=self.group, async_op=True)

    def is_here(self):
        self.work.wait()
        restore(self.params[0], self.parameters[: self.size].view(self.shape))

    def keep(self):
        self.parameter_shard.copy_(self.parameters.chunk(self.count)[self.rank])

    def reduce(self):
        param = self.params[0]
        wide = torch.promote_types(self.dtype, torch.float32)
        whole = torch.zeros(self.padded, dtype=wide)
        if param.grad is not None:
            whole[: self.size] = param.grad.flatten()
            param.grad = None
        mine = torch.zeros(self.parameter_shard.shape, dtype=wide)
        reduce_scatter(mine, whole, group=self.group)
        mine = (mine / self.count).to(self.dtype)
        self.gradient_shard = mine if self.gradient_shard is None else self.gradient_shard + mine


class Stage3(Hooks):
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=None, param_groups=None, **options):
        groups = set_up.parameter_groups(model, param_groups)
        self.model, self.group, self.gradient_scale, self.inside_gather_parameters = model, group, None, False
        index = {param: place for place, entry in enumerate(groups) for param in entry["params"]}
        self.units = find_units(model)
        for unit in self.units:
            unit.buckets = [Sharded(param, index.get(param, -1), group) for param in reversed(unit.params)]
        self.buckets = [part for unit in reversed(self.units) for part in unit.buckets if part.group_index >= 0]
        for buffer in model.buffers():
            dist.broadcast(buffer, dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
        self.optimizer = optimizers.over_shards(optimizer_class, options, groups, self.buckets)
        self.reducer = Reducer(self, by_turns=True)
        self.execution_order = ExecutionOrder(self)

    def unit_turn(self, unit, following):
        for other in self.units:
            if other is not unit and other is not following and unit not in other.parents and other not in unit.parents:
                self.leave(other)
        for one in (unit, *unit.parents):
            self.come(one)
            if not one.whole:
                for part in one.buckets:
                    part.is_here()
                one.whole = True
        if following is not None:
            self.come(following)

    def come(self, unit):
        if not unit.whole and not unit.gathering:
            unit.gathering = [part.come() or part for part in unit.buckets]

    def leave(self, unit):
        if unit.gathering:
            for part in unit.gathering:
                part.work.wait()
                if unit.whole:
                    part.keep()
                part.go()
        unit.whole, unit.gathering = False, []

    def leave_all(self):
        for unit in self.units:
            self.leave(unit)

    evaluation_done = leave_all

    def backward_begins(self):
        self.execution_order.begin("backward")

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
        if self.inside_gather_parameters:
            raise RuntimeError("step() after gather_parameters(), not inside")
        self.leave_all()
        self.reduced_gradients()
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = True

    def zero_grad(self):
        self.reducer.forget()
        self.gradient_scale = None
        for bucket in self.buckets:
            bucket.gradient_shard = bucket.params[0].grad = None

    @contextmanager
    def gather_parameters(self):
        self.leave_all()
        self.inside_gather_parameters = True
        parts = [part for unit in self.units for part in unit.buckets]
        for part in parts:
            part.come()
            part.is_here()
            part.params[0].data = part.params[0].data.clone()  # who keeps it keeps its memory
        try:
            yield
            replicas.check_alike(self.model, self.group)
            for part in parts:
                whole = nn.functional.pad(part.params[0].data.flatten(), (0, part.padded - part.size))
                part.parameter_shard.copy_(whole.chunk(part.count)[part.rank])
        finally:
            self.inside_gather_parameters = False
            for part in parts:
                part.go()
