"""One page's stages with the names that the contracts of lessons 02 to 04 ask for: a submission, beside a copy of
one_page.py. It adds what takes a few lines; test_one_page.py lists what is left out, and the points that this costs."""

from contextlib import contextmanager, nullcontext

import one_page
import torch
import torch.distributed as dist

from zero_minimal.core.units import release, restore


class Unit(one_page.Unit):
    def reduce(self):  # step() of stage 1 does not reduce again what reduced_gradients() has reduced
        if self.gradient is None:
            super().reduce()


one_page.Unit = Unit


class Names:
    """What all stages have. Each backward ends its reductions, and micro-batches add up in the shards."""

    no_sync, in_backward = nullcontext, False

    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):
        if group is not None:
            raise NotImplementedError("one page trains on all ranks")
        super().__init__(model, optimizer_class, **options)
        self.model, self.group, self.gradient_scale = model, group, None

    def came(self, unit, param):
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        super().came(unit, param)

    def reduce(self, unit):
        before, unit.gradient = unit.gradient, None
        super().reduce(unit)
        if before is not None:
            unit.gradient += before

    def finish(self):
        if self.in_backward or self.units[0].gradient is None:  # None: no backward ran on this rank
            super().finish()
        self.in_backward = False

    def reduced_gradients(self):
        self.finish()
        return [unit.gradient for unit in self.units]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        scale = 1.0 if self.gradient_scale is None else self.gradient_scale
        square = sum((scale * shard.float()).square().sum() for shard in self.reduced_gradients())
        dist.all_reduce(square)
        self.gradient_scale = scale * torch.clamp(max_norm / square.sqrt(), max=1.0)
        return square.sqrt()

    def update(self):
        shards = [unit.gradient for unit in self.units]
        if self.gradient_scale is not None:
            for unit in self.units:
                unit.gradient = unit.gradient.to(unit.master.dtype) * self.gradient_scale
        super().update()
        for unit, shard in zip(self.units, shards, strict=True):
            unit.gradient = shard  # until zero_grad()

    def zero_grad(self):
        self.gradient_scale = None
        self.waiting, self.in_backward = self.units[::-1], False  # a backward may have failed
        for unit in self.units:
            unit.gradient, unit.missing = None, set(unit.params)
            for param in unit.params:
                param.grad = None


class Stage1(Names, one_page.Stage1):
    """Micro-batches add up in .grad, until reduced_gradients() or step() reduces them."""

    def finish(self):
        for unit in self.units:
            unit.reduce()


class Stage2(Names, one_page.Stage2):
    pass


class Stage3(Names, one_page.Stage3):
    """Of a freed parameter the shape stays, and to read it is an error: the checks see by this what is freed. One page
    leaves an empty tensor there; 7 points of step 1 are for this alone."""

    def gather(self, unit):
        if unit.whole.untyped_storage().size() == 0:
            for param in unit.params:
                restore(param, unit.shard.new_empty(0))
        super().gather(unit)

    def free(self, unit):
        if unit.whole.untyped_storage().size():
            super().free(unit)
            for param, shape in zip(unit.params, unit.shapes, strict=True):
                release(param, unit.shard.new_full((), torch.nan).expand(shape))

    @contextmanager
    def gather_parameters(self):
        for unit in self.units:
            self.gather(unit)
        yield
        for unit in self.units:
            self.free(unit)
