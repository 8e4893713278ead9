"""The broken code of the twelve hunts. A learner who reads this has no hunt left."""

import random
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_minimal.core import collectives, optimizers, precision, seams
from zero_minimal.core.gradient_memory import GradientMemory, Reduction
from zero_minimal.core.layout import shard_of
from zero_minimal.meters import run_record
from zero_minimal.stage0 import Stage0
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import DTYPES, Settings

STEPS = 16
SMALL = dict(layers=4, hidden=64, heads=4, sequence=32, bucket_mb=0.125, steps=STEPS, lr=2e-2, clip=1.0)


@dataclass(frozen=True)
class Side:
    """A run: the stage, its options, its batches, and what else is done around each step."""

    stage: Callable
    options: Callable = field(default=lambda model: {})  # of the model
    batches: Callable = loop.training_batches  # (settings, rank's number)
    before: Callable = field(default=lambda model, settings, rank: None)  # the model is wrapped
    after: Callable = field(default=lambda model, settings, rank: None)
    around: Callable = field(default=lambda zero, settings, rank: [])  # observers


@dataclass(frozen=True)
class Hunt:
    """One of the twelve: `cause` as the checker names it."""

    cause: str
    ranks: int
    settings: Settings
    healthy: Side
    broken: Side


def build(side: Side, settings: Settings, rank, watched: Callable):
    """loop.build(), with what a side does before and after the model is wrapped."""
    torch.manual_seed(settings.seed)
    model = GPT(settings.model_config()).to(rank.device, DTYPES[settings.dtype])
    side.before(model, settings, rank)
    options = {"bucket_bytes": int(settings.bucket_mb * 2**20), **settings.optimizer_options(), **side.options(model)}
    zero = watched(side.stage)(model, torch.optim.AdamW, **options)
    side.after(model, settings, rank)
    loop.seed_dropout(settings, rank.rank)
    return zero


# ------------------------------------------------------------------------------------------------------------ the bugs


class Validation:
    """A batch of the held-out text after each step; its loss is kept for a plot."""

    def __init__(self, zero, settings, rank, recorded: bool):
        self.zero, self.recorded, self.losses = zero, recorded, []
        self.batch = loop.validation_batches(settings, rank.rank, rank.world_size)[0]

    @contextmanager
    def step(self):
        yield
        with nullcontext() if self.recorded else torch.no_grad():
            self.losses.append(self.zero.model(*self.batch))


def trained_before(model, settings, rank) -> None:
    """Gives the model the weights of a short training of one rank."""
    batches = loop.training_batches(settings, 99)
    other = GPT(settings.model_config())
    optimizer = torch.optim.AdamW(other.parameters(), lr=2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        other(*next(batches)).backward()
        optimizer.step()
    with torch.no_grad():
        for param, trained in zip(model.parameters(), other.parameters(), strict=True):
            param.copy_(trained)


class SyncsAlways(Stage0):
    def no_sync(self):
        return nullcontext()


class Sums(Stage0):
    def bucket_complete(self, bucket, done):
        self._wait()
        bucket.zero_missing()
        self.reducing = collectives.all_reduce(bucket.gradients, op="sum", group=self.group, of=bucket, async_op=True)


class Views(GradientMemory):
    """The shard is a part of the whole bucket."""

    def __init__(self, buckets, group=None):
        self.latest = {}

    def whole(self, bucket):
        self.latest[bucket] = bucket.zeros()
        return self.latest[bucket]

    def give_back(self, whole):
        pass

    def shard(self, bucket):
        return bucket.shard(self.latest.pop(bucket), torch.distributed.get_rank())


class WaitsAtOnce(Stage0):
    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        self._wait()


def shuffled_anew(settings, number):
    """Batches; on rank 1 all windows of the text are put into a new order for each."""
    batches, order = loop.training_batches(settings, number), random.Random(0)

    def shuffled():
        for batch in batches:
            if number == 1:
                order.sample(range(200_000), 200_000)
            yield batch

    return shuffled()


class ClipsByItsOwn(Stage2):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        gradients = self.reduced_gradients()
        norm = precision.global_norm(gradients, self.gradient_scale, sharded=False)
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm


class NoMasters(Stage1):
    def own(self, bucket):
        super().own(bucket)
        bucket.master = nn.Parameter(bucket.parameter_shard)


class SkipsSpikes(Stage0):
    """No update after a batch whose loss is above the mean of those before."""

    def __init__(self, model, *rest, **options):
        super().__init__(model, *rest, **options)
        self.usual, self.latest = None, None
        model.register_forward_hook(lambda module, inputs, loss: self._note(loss.item()))

    def _note(self, loss):
        self.latest = loss

    def step(self):
        spike = self.usual is not None and self.latest > 1.02 * self.usual
        self.usual = self.latest if self.usual is None else 0.7 * self.usual + 0.3 * self.latest
        if spike:
            self.reduced_gradients()
            self.reducer.needs_zero_grad = True
        else:
            super().step()


# ----------------------------------------------------------------------------------- causes that none of the twelve has


class AveragesTwice(Stage0):
    def _wait(self):
        if self.reducing:
            bucket = self.under_way
            super()._wait()
            bucket.gradients /= self.world_size

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        self.under_way = bucket


class ReducesNothing(Stage0):
    def bucket_complete(self, bucket, done):
        bucket.zero_missing()


class ForgetsTheLast(Stage1):
    """The last bucket is updated, and not gathered."""

    @torch.no_grad()
    def step(self):
        self.reduced_gradients()
        for number, bucket in enumerate(self.buckets):
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
            if number < len(self.buckets) - 1:
                collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket)
        self.reducer.needs_zero_grad = True


class KeepsAllState(Stage1):
    """Every rank updates everything: a shard is the whole bucket."""

    def own(self, bucket):
        bucket.gradients = bucket.whole_gradients()
        bucket.parameter_shard, bucket.gradient_shard = bucket.parameters, bucket.gradients

    def bucket_complete(self, bucket, done):
        bucket.zero_missing()
        part = shard_of(bucket.gradients, self.rank, self.world_size)
        pending = collectives.reduce_scatter(part, bucket.gradients, op="avg", group=self.group, of=bucket,
                                             async_op=True)
        self._wait()
        self.reducing = pending
        self.parts = (*getattr(self, "parts", ()), (bucket, part))

    def backward_ends(self):
        super().backward_ends()
        for bucket, part in self.parts:
            collectives.all_gather(bucket.gradients, part, group=self.group, of=bucket)
        self.parts = ()

    def clip_grad_norm_(self, max_norm):
        return Stage0.clip_grad_norm_(self, max_norm)

    def step(self):
        Stage0.step(self)


class ReducesLate(Stage2):
    late = ()

    def bucket_complete(self, bucket, done):
        self.late = (*self.late, (bucket, done))

    def backward_ends(self):
        for bucket, done in self.late:
            super().bucket_complete(bucket, done)
        self.late = ()
        super().backward_ends()


class ReleasesNothing(Stage3):
    def _release(self, unit):
        self._arrive(unit)
        for bucket in unit.buckets:
            if unit.whole:
                bucket.parameter_shard.copy_(bucket.shard(bucket.parameters, self.rank))
        unit.whole = False


class ReducesAndSlices(Stage2):
    def bucket_complete(self, bucket, done):
        self._wait()
        whole = self.memory.whole(bucket)
        bucket.fuse_gradients(whole)
        for param in done:
            param.grad = None
        part = self.memory.shard(bucket)
        collectives.all_reduce(whole, group=self.group, of=bucket)
        part.copy_(bucket.shard(whole, self.rank))
        self.reducing = Reduction(bucket, whole, part, collectives.Work([]))


@contextmanager
def slow_link(seconds=0.02):
    """Every message of this process waits."""

    def hear(moment, call):
        if moment == "end":  # so that what watches the run, and began to listen later, counts it as a wait
            time.sleep(seconds)

    with seams.heard_by("collective", hear):
        yield


class Slow(Stage1):
    def __init__(self, *rest, **options):
        super().__init__(*rest, **options)
        self.link = slow_link()
        self.link.__enter__()


class TenTimesFaster(Stage0):
    """lr is ten times what was meant."""

    @torch.no_grad()
    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] *= 10
        super().step()


def undivided(stage_class):
    """The loss of a micro-batch is not divided by their number, though the loop has done so."""

    class Undivided(stage_class):
        def __init__(self, model, *rest, **options):
            super().__init__(model, *rest, **options)
            self.run_backward = lambda loss: (loss * 2).backward()

    return Undivided


# ----------------------------------------------------------------------------------------------------------- the hunts

HUNTS = {
    "01": Hunt("graph-kept", 2, Settings(**SMALL),
               Side(Stage0, around=lambda *run: [Validation(*run, recorded=False)]),
               Side(Stage0, around=lambda *run: [Validation(*run, recorded=True)])),
    "02": Hunt("loaded-on-one-rank", 2, Settings(**SMALL), Side(Stage0, before=trained_before),
               Side(Stage0, after=lambda model, settings, rank: rank.rank or trained_before(model, settings, rank))),
    "03": Hunt("reduced-each-micro-batch", 2, Settings(**SMALL, accumulate=4, batch=1), Side(Stage0),
               Side(SyncsAlways)),
    "04": Hunt("same-data", 3, Settings(**SMALL), Side(Stage1),
               Side(Stage1, batches=lambda settings, number: loop.training_batches(settings, 0))),
    "05": Hunt("summed", 3, Settings(**SMALL, accumulate=2), Side(Stage0), Side(Sums)),
    "06": Hunt("one-unit", 4, Settings(**SMALL), Side(Stage3), Side(Stage3, options=lambda model: {"units": []})),
    "07": Hunt("view-of-the-whole", 4, Settings(**SMALL), Side(Stage2),
               Side(Stage2, options=lambda _: {"memory": Views})),
    "08": Hunt("waited-for-at-once", 2, Settings(steps=STEPS, lr=2e-2, clip=1.0, batch=8), Side(Stage0),
               Side(WaitsAtOnce)),
    "09": Hunt("straggler", 3, Settings(**SMALL), Side(Stage1), Side(Stage1, batches=shuffled_anew)),
    "10": Hunt("norm-of-a-shard", 3, Settings(**(SMALL | {"clip": 0.5})), Side(Stage2), Side(ClipsByItsOwn)),
    "11": Hunt("no-masters", 2, Settings(**(SMALL | {"steps": 160, "lr": 2e-4}), dtype="bf16"), Side(Stage1),
               Side(NoMasters)),
    "12": Hunt("skipped-on-one-rank", 2, Settings(**SMALL, batch=1), Side(Stage0), Side(SkipsSpikes)),
}

# causes on which nobody is sent: recorded too, so that the checker's signs of them are tried on what is real
TINY = SMALL | {"layers": 2, "hidden": 32, "sequence": 16, "bucket_mb": 0.03, "steps": run_record.STEPS}
OTHERS = {hunt.cause: hunt for hunt in (
    Hunt("averaged-twice", 3, Settings(**TINY), Side(Stage0), Side(AveragesTwice)),
    Hunt("micro-batches-not-divided", 3, Settings(**TINY, accumulate=2), Side(Stage0), Side(undivided(Stage0))),
    Hunt("never-reduced", 2, Settings(**TINY), Side(Stage0), Side(ReducesNothing)),
    Hunt("last-gather-missing", 2, Settings(**TINY), Side(Stage1), Side(ForgetsTheLast)),
    Hunt("whole-optimizer-state", 2, Settings(**TINY), Side(Stage1), Side(KeepsAllState)),
    Hunt("reduced-late", 3, Settings(**TINY), Side(Stage2), Side(ReducesLate)),
    Hunt("never-released", 2, Settings(**TINY), Side(Stage3), Side(ReleasesNothing)),
    Hunt("all-reduced-and-sliced", 2, Settings(**TINY), Side(Stage2), Side(ReducesAndSlices)),
    Hunt("tiny-buckets", 2, Settings(**TINY), Side(Stage1), Side(Stage1, options=lambda _: {"bucket_bytes": 2**12})),
    Hunt("one-bucket", 2, Settings(**TINY), Side(Stage0), Side(Stage0, options=lambda _: {"bucket_bytes": None})),
    Hunt("slow-network", 2, Settings(**TINY), Side(Stage1), Side(Slow)),
    Hunt("learning-rate", 2, Settings(**TINY), Side(Stage0), Side(TenTimesFaster)),
)}
