"""Each parameter has one owner: gradients are reduced to it, it updates, and broadcasts. Uses nothing of the house."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn


class Stage2:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):
        self.model, self.group, self.gradient_scale = model, group, None
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, self.world_rank(0), group=group)
        groups = param_groups or [{"params": list(model.parameters())}]
        groups = [{**entry, "params": [p for p in entry["params"] if p.requires_grad]} for entry in groups]
        chosen = {param for entry in groups for param in entry["params"]}
        self.params = [param for param in reversed(list(model.parameters())) if param in chosen]
        self.owner, load = {}, [0] * self.world_size
        for param in sorted(self.params, key=lambda param: -param.numel()):
            self.owner[param] = load.index(min(load))
            load[self.owner[param]] += param.numel()
        self.mine = {
            param: nn.Parameter(param.data.float() if param.element_size() < 4 else param.data)
            for param in self.params if self.owner[param] == self.rank
        }
        self.optimizer = optimizer_class(
            [{**entry, "params": [self.mine[p] for p in entry["params"] if p in self.mine]} for entry in groups],
            **options,
        )
        self.gradients, self.ready, self.waiting, self.running = {}, set(), list(self.params), False
        self.needs_zero_grad = self.reduced = False
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.arrived)

    def world_rank(self, rank):
        return dist.get_global_rank(self.group or dist.group.WORLD, rank)

    def arrived(self, param):
        if self.needs_zero_grad:
            raise RuntimeError("zero_grad() first")
        if not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.ready.add(param)
        while self.waiting and self.waiting[0] in self.ready:
            self.reduce(self.waiting.pop(0))

    def finish(self):
        for param in self.waiting:
            self.reduce(param)
        self.waiting, self.ready, self.running, self.reduced = list(self.params), set(), False, True

    def reduce(self, param):
        gradient = torch.zeros_like(param.data) if param.grad is None else param.grad
        gradient = gradient.to(torch.promote_types(param.dtype, torch.float32))
        param.grad = None
        dist.reduce(gradient, self.world_rank(self.owner[param]), group=self.group)
        if param in self.mine:
            gradient = (gradient / self.world_size).to(param.dtype)
            self.gradients[param] = self.gradients.get(param, 0) + gradient

    def no_sync(self):
        return contextlib.nullcontext()

    def reduced_gradients(self):
        if not self.reduced:  # no backward ran here: the others' may wait for this rank
            self.finish()
        return [self.gradients[param] for param in self.mine]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        total = torch.stack([gradient.float().square().sum() for gradient in self.reduced_gradients()]).sum()
        dist.all_reduce(total, group=self.group)
        before = 1.0 if self.gradient_scale is None else self.gradient_scale
        norm = total.sqrt() * before
        self.gradient_scale = before * torch.clamp(max_norm / norm, max=1.0)
        return norm

    @torch.no_grad()
    def step(self):
        self.reduced_gradients()
        for param, master in self.mine.items():
            scale = 1 if self.gradient_scale is None else self.gradient_scale
            master.grad = self.gradients[param].to(master.dtype) * scale
            self.optimizer.step()  # of this one alone: no other has a gradient
            master.grad = None
            param.copy_(master)
        for param in self.params:
            dist.broadcast(param.data, self.world_rank(self.owner[param]), group=self.group)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, self.world_rank(0), group=self.group)
        self.needs_zero_grad = True

    def zero_grad(self):
        self.gradients.clear()
        self.gradient_scale, self.needs_zero_grad, self.reduced = None, False, False
        self.waiting, self.ready, self.running = list(self.params), set(), False  # a backward may have failed

    @contextlib.contextmanager
    def gather_parameters(self):
        yield
