"""No flat layout, and no class of the house: lists of parameters, counters, and torch's own all-reduce."""
from contextlib import contextmanager

import torch
import torch.distributed as dist


def share(tensors, group):
    root = dist.get_global_rank(group, 0) if group is not None else 0
    for tensor in tensors:
        dist.broadcast(tensor.data, root, group=group)


class Naive:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=None, **options):
        self.model, self.group = model, group
        share((*model.parameters(), *model.buffers()), group)
        self.optimizer = optimizer_class(self.trained(), **options)

    def trained(self):
        return [param for param in self.model.parameters() if param.requires_grad]

    def reduced_gradients(self):
        count = dist.get_world_size(self.group)
        for param in self.trained():
            mean = torch.zeros_like(param) if param.grad is None else param.grad / count
            dist.all_reduce(mean, group=self.group)
            param.grad = mean
        return [param.grad for param in self.trained()]


class Stage0:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=2**20, param_groups=None, **options):
        self.model, self.group, self.gradient_scale = model, group, None
        share((*model.parameters(), *model.buffers()), group)
        self.buckets, size = [[]], 0
        for param in reversed([param for param in model.parameters() if param.requires_grad]):
            if size + param.nbytes > bucket_bytes and self.buckets[-1]:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(param)
            size += param.nbytes
            param.register_post_accumulate_grad_hook(self.came)
        self.home = {param: place for place, bucket in enumerate(self.buckets) for param in bucket}
        self.optimizer = optimizer_class(param_groups or list(self.home), **options)
        self.quiet, self.ended = False, True

    def begin(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.going, self.ended = [], False

    def came(self, param):
        if self.quiet:
            return
        if self.ended:
            self.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        self.missing[self.home[param]] -= 1
        while len(self.going) < len(self.buckets) and self.missing[len(self.going)] == 0:
            self.launch()

    def launch(self):
        bucket = self.buckets[len(self.going)]
        pieces = [torch.zeros_like(param) if param.grad is None else param.grad for param in bucket]
        flat = torch.cat([piece.flatten() for piece in pieces]) / dist.get_world_size(self.group)
        self.going.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))

    def end(self):
        while len(self.going) < len(self.buckets):
            self.launch()
        for bucket, (flat, work) in zip(self.buckets, self.going, strict=True):
            work.wait()
            for param, piece in zip(bucket, flat.split([param.numel() for param in bucket]), strict=True):
                param.grad = piece.view(param.shape)
        self.ended, self.reduced = True, True

    @contextmanager
    def no_sync(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False

    reduced = False

    def reduced_gradients(self):
        if not self.reduced:
            self.begin()
            self.end()
        return [param.grad for param in self.home]

    def clip_grad_norm_(self, max_norm):
        self.reduced_gradients()
        return torch.nn.utils.clip_grad_norm_(list(self.home), max_norm)

    def step(self):
        self.reduced_gradients()
        self.optimizer.step()
        share(filter(torch.is_floating_point, self.model.buffers()), self.group)

    def zero_grad(self):
        self.reduced = False
        self.optimizer.zero_grad()
