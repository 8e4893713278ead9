"""Plain torch, with hooks of its own in forward and backward; of the house only what makes it an error to read a
released parameter. Units are the elements of module lists, and the rest."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.core.units import release, restore

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Part:
    """Parameters of one unit, one dtype and one optimizer group (-1: frozen), side by side."""

    def __init__(self, params, index, group):
        self.params, self.index, self.group = params, index, group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        size = sum(param.numel() for param in params)
        self.whole = torch.zeros(-(-size // self.count) * self.count, dtype=params[0].dtype)
        for param, view in self.views(self.whole):
            view.copy_(param.data)
        self.shard = self.mine(self.whole).clone()
        self.master = nn.Parameter(self.shard.float() if self.shard.element_size() < 4 else self.shard)
        self.gradient, self.work = None, None
        self.free()

    def views(self, whole):
        begin = 0
        for param in self.params:
            yield param, whole[begin : begin + param.numel()].view(param.shape)
            begin += param.numel()

    def mine(self, whole):
        return whole.chunk(self.count)[self.rank]

    def free(self):
        for param in self.params:
            release(param, torch.zeros((), dtype=param.dtype).expand(param.shape))
        self.whole.untyped_storage().resize_(0)

    def fetch(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        self.work = all_gather(self.whole, self.shard, group=self.group, async_op=True)

    def arrive(self):
        self.work.wait()
        for param, view in self.views(self.whole):
            restore(param, view)

    def reduce(self):
        wide = torch.promote_types(self.shard.dtype, torch.float32)
        gradients = torch.zeros(self.whole.shape, dtype=wide)
        for param, view in self.views(gradients):
            if param.grad is not None:
                view.copy_(param.grad)
                param.grad = None
        own = torch.empty(self.shard.shape, dtype=wide)
        reduce_scatter(own, gradients, group=self.group)
        own = (own / self.count).to(self.shard.dtype)
        self.gradient = own if self.gradient is None else self.gradient + own


class Unit:
    def __init__(self, module, inside, parts):
        self.module, self.inside, self.parts, self.state = module, inside, parts, "away"

    def fetch(self):
        if self.state == "away":
            for part in self.parts:
                part.fetch()
            self.state = "coming"

    def arrive(self):
        self.fetch()
        if self.state == "coming":
            for part in self.parts:
                part.arrive()
            self.state = "here"

    def leave(self):
        if self.state != "away":
            self.arrive()
            for part in self.parts:
                part.shard.copy_(part.mine(part.whole))
                part.free()
            self.state = "away"


class Stage3:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):
        self.model, self.group, self.gradient_scale = model, group, None
        root = dist.get_global_rank(group or dist.group.WORLD, 0)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, root, group=group)
        groups = param_groups or [{"params": list(model.parameters())}]
        index = {param: place for place, entry in enumerate(groups) for param in entry["params"] if param.requires_grad}
        self.units = self.find_units(index)
        self.parts = [part for unit in self.units for part in unit.parts if part.index >= 0]
        self.optimizer = optimizer_class([
            {**entry, "params": [part.master for part in self.parts if part.index == place]}
            for place, entry in enumerate(groups)], **options)
        self.before, self.now = {"forward": [], "backward": []}, []
        self.kind, self.calls, self.running, self.needs_zero_grad = "forward", [], False, False
        self.inside_gather_parameters = False
        self.reduced = set()
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda module, _, unit=unit: self.forward_begins(unit), prepend=True)
            unit.module.register_forward_hook(lambda _, __, output, unit=unit: self.forward_ended(unit, output))

    def find_units(self, index):
        modules = [self.model]
        for container in self.model.modules():
            if isinstance(container, nn.ModuleList):
                modules += [module for module in container if module not in modules]
        owners = {}
        for module in modules:  # inner ones come later
            for param in module.parameters():
                around = [other for other in owners.get(param, []) if module not in other.modules()]
                owners[param] = [*around, module]
        found = []
        for module in modules:
            kinds = {}
            for param, of in owners.items():
                if (of[0] if len(of) == 1 else self.model) is module:
                    kinds.setdefault((param.dtype, index.get(param, -1)), []).append(param)
            parts = [Part(params, place, self.group) for (_, place), params in kinds.items()]
            found.append(Unit(module, [m for m in modules if m is not module and m in set(module.modules())], parts))
        return found

    # whose turn it is

    def turn(self, unit):
        last, place = self.before[self.kind], len(self.now)
        if self.now[-1:] == [unit]:
            return
        following = last[place + 1] if last[place : place + 1] == [unit] and place + 1 < len(last) else None
        self.now.append(unit)
        needed = [unit, *(other for other in self.units if unit.module in other.inside)]
        for other in self.units:
            if other is not following and other not in needed and other.module not in unit.inside:
                other.leave()
        for other in needed:
            other.fetch()
        for other in needed:
            other.arrive()
        if following:
            following.fetch()

    def begin(self, kind):
        self.before[self.kind], self.kind, self.now = self.now, kind, []

    def forward_begins(self, unit):
        if self.inside_gather_parameters:
            return
        if not self.running:
            if unit is self.units[0]:
                self.begin("forward")
                self.calls = []
            if unit not in self.calls:
                self.calls.append(unit)
        self.turn(unit)

    def forward_ended(self, unit, output):
        if self.inside_gather_parameters:
            return
        if output.requires_grad:
            output.register_hook(lambda gradient: self.backward_comes_to(unit))
        elif unit is self.units[0] and not torch.is_grad_enabled():
            self.release_all()

    def backward_comes_to(self, unit):
        if not self.running:
            if self.needs_zero_grad:
                raise RuntimeError("zero_grad() first")
            self.running = True
            self.begin("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        for later in reversed(self.calls[self.calls.index(unit) + 1 :]):
            if later.module not in unit.inside:
                self.reduce(later)
        self.turn(unit)

    def reduce(self, unit):
        if unit not in self.reduced:
            self.reduced.add(unit)
            for part in unit.parts:
                if part.index >= 0:
                    part.reduce()

    def finish(self):
        for unit in self.units:
            self.reduce(unit)
        self.running, self.reduced = False, set()

    def release_all(self):
        for unit in self.units:
            unit.leave()

    # what users call

    def no_sync(self):
        return contextlib.nullcontext()

    def reduced_gradients(self):
        return [part.gradient for part in self.parts]

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
        if self.inside_gather_parameters:
            raise RuntimeError("step() after gather_parameters(), not inside")
        self.release_all()
        for part in self.parts:
            scale = 1 if self.gradient_scale is None else self.gradient_scale
            gradient = torch.zeros_like(part.shard) if part.gradient is None else part.gradient  # nobody ran a backward
            part.master.grad = gradient.to(part.master.dtype) * scale
        self.optimizer.step()
        for part in self.parts:
            part.master.grad = None
            part.shard.copy_(part.master)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, dist.get_global_rank(self.group or dist.group.WORLD, 0), group=self.group)
        self.needs_zero_grad = True

    def zero_grad(self):
        for part in self.parts:
            part.gradient = None
        self.gradient_scale, self.needs_zero_grad = None, False

    @contextlib.contextmanager
    def gather_parameters(self):
        self.release_all()
        self.inside_gather_parameters = True
        for unit in self.units:
            unit.arrive()
            for part in unit.parts:
                for param, view in part.views(part.whole):
                    param.data = view.clone()  # who keeps it keeps its memory
        before = [part.shard.clone() for unit in self.units for part in unit.parts]
        try:
            yield
            for unit in self.units:
                for part in unit.parts:
                    for param, view in part.views(part.whole):
                        view.copy_(param.data)
            sums = torch.tensor([part.whole.double().sum() for unit in self.units for part in unit.parts])
            first = sums.clone()
            dist.broadcast(first, dist.get_global_rank(self.group or dist.group.WORLD, 0), group=self.group)
            unlike = (first != sums).any().int()
            dist.all_reduce(unlike, group=self.group)
            if unlike:
                raise RuntimeError("edits must be alike on all ranks")
        except BaseException:
            self.inside_gather_parameters = False
            self.release_all()
            for part, shard in zip([part for unit in self.units for part in unit.parts], before, strict=True):
                part.shard.copy_(shard)
            raise
        self.inside_gather_parameters = False
        self.release_all()
