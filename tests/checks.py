"""Checks that several lessons make. Each takes the class under test and knows of it only what a user does, so that it
serves the reference as well as a learner's own: what it trains to, what lives in memory, what it sends and when.

Functions that run in a rank come first, then those that a test calls.
"""

import contextlib
import copy
import functools
import gc
import math
import os
import sys
import threading
import time
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Recipe

from zero_minimal.guards import collective_fingerprint as notes

# torch 2.6's own fully_shard asks for what its CPU streams do not have
FSDP2_RUNS_ON_THE_CPU = hasattr(torch.cpu.Stream, "record_event")

# ---------------------------------------------------------------------------------------------------- in a rank: memory


def live_bytes(until=math.inf, looks=100):
    """Bytes of all storages that a Python object on this rank holds: no ledger, no book-keeping, just a look.

    until: look again, for some seconds, while there is more than that: gloo's threads let go of a tensor a moment late.
    looks: how often at most.
    """
    for _ in range(looks):
        total = sum(_storages().values())
        if total <= until:
            break
        time.sleep(0.05)
    return total


def _storages():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # one that another thread is just letting go of
                gradient = thing.grad if thing.is_leaf else None
                for tensor in (thing,) if gradient is None else (thing, gradient):
                    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return storages


def most_padding(model, world_size):
    """Elements of padding that a layout may need at most: each parameter may start on a boundary of 16 elements, and
    lie in a bucket of its own that is padded to a multiple of 16 N."""
    return len(list(model.parameters())) * (16 + 16 * world_size)


# -------------------------------------------------------------------------------------------------- in a rank: traffic

Event = namedtuple("Event", "kind name bytes", defaults=("", 0))


class Watch:
    """Lists the collectives of ours that this rank starts and waits for, in order, and what the test notes in between.

    An event's kind is "start", "wait" or the test's own word; a collective's `bytes` are those of the whole vector, the
    larger of input and output.
    """

    def __init__(self):
        self.events = []

    def note(self, kind, name=""):
        self.events.append(Event(kind, name))

    def __enter__(self):
        from zero_minimal.core import seams  # here: lesson 0 is graded where there are no collectives

        self._listening = seams.heard_by("collective", self._hear)
        self._listening.__enter__()
        return self

    def __exit__(self, *error):
        self._listening.__exit__(*error)

    def _hear(self, moment, call):
        if moment != "end":
            self.events.append(Event(moment, call.name, call.bytes))


def events_of_a_step(stage_class, accumulate=1, make=toys.Transformer, **options):
    """What happens in the third step, in order: a "gradient" comes, a micro-batch has "ended", the "step" begins, and
    the collectives in between. And the bytes of the parameters."""
    rank = dist.get_rank()
    model = toys.build(make, rank)
    zero = stage_class(model, optim.AdamW, **options)
    watch = Watch()
    for name, param in model.named_parameters():
        param.register_hook(lambda gradient, name=name: watch.note("gradient", name))
    for step in range(3):
        watch.events.clear()
        with watch:
            for micro in range(accumulate):
                with zero.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                    zero.model(*toys.tokens(rank, step * accumulate + micro)).backward()
                watch.note("ended")
            watch.note("step")
            zero.step()
        zero.zero_grad()
    psi, padding = sum(param.nbytes for param in model.parameters()), 4 * most_padding(model, dist.get_world_size())
    return watch.events, psi, padding


def written_bytes():
    """Bytes that this process has written so far, as the kernel counts them, without what it printed; 0 where it does
    not tell."""
    sys.stdout.flush()
    with contextlib.suppress(OSError), open("/proc/self/io") as counts:
        written = next(int(line.split()[1]) for line in counts if line.startswith("wchar:"))
        return written - os.fstat(1).st_size
    return 0


# in the order in which they are looked for in the name of an operator: "_reduce_scatter_base_", "allgather_", …
_CALLS = {
    "reduce_scatter": "reduce_scatter", "allgather": "all_gather", "all_gather": "all_gather",
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "alltoall": "all_to_all", "all_to_all": "all_to_all",
    "broadcast": "broadcast", "scatter": "scatter", "gather": "gather", "reduce": "reduce", "barrier": "barrier",
    "send": "send", "recv": "recv",
}
# at: time.monotonic(), the same clock on all ranks; numbers: a copy of a message, if that was asked for
Call = namedtuple("Call", "name bytes peer at numbers", defaults=(None,))


class Calls(TorchDispatchMode):
    """Lists in `made` what this rank asks torch.distributed for, however it is called: what it sends does not depend on
    what a backend makes of it. `bytes` are those of the message, or of a collective's whole vector; `peer` is the
    other rank of a message, in its group. `pause`: seconds to wait before anything is sent. `look` is called then.
    `copies`: keep the numbers of what is sent.
    """

    def __init__(self, pause=0.0, look=None, copies=False):
        super().__init__()
        self.made, self.pause, self.look, self.copies = [], pause, look or (lambda: None), copies

    def __enter__(self):
        _listening.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        _listening.remove(self)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.hear(function, args)
        return function(*args, **kwargs or {})

    def hear(self, function, args):
        if function.namespace not in ("c10d", "_c10d_functional"):
            return
        operator = function.__name__.split(".")[0]
        name = next((word for part, word in _CALLS.items() if part in operator), None)
        size = max(map(_bytes_in, args[:2]), default=0)
        is_note = name in ("send", "recv") and size == notes.LENGTH and args[3] == notes.TAG
        if name and not is_note:
            peer = args[2] if name in ("send", "recv") and "any_source" not in operator else None
            if name != "recv":
                time.sleep(self.pause)
                self.look()
            numbers = args[0][0].detach().clone() if self.copies and name == "send" else None
            self.made.append(Call(name, size, peer, time.monotonic(), numbers))

    def sent(self) -> float:
        """Bytes that a ring sends for these calls, the mean over the ranks where a collective has a root."""
        return sum(sent_for(call, dist.get_world_size()) for call in self.made)


def sent_for(call: Call, world_size: int) -> float:
    """Bytes that a ring sends for a Call."""
    rounds = {"send": world_size / (world_size - 1), "recv": 0, "all_reduce": 2} if world_size > 1 else {}
    return rounds.get(call.name, 1) * call.bytes * (world_size - 1) / world_size


_listening: list = []  # Calls that are open


class _InThread(TorchDispatchMode):
    """Tells all open Calls what another thread asks for: a dispatch mode is its own thread's alone."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for calls in list(_listening):
            calls.hear(function, args)
        return function(*args, **kwargs or {})


def listen_in_threads():
    """Threads that this process starts from now on are heard, too."""

    def begins(*event):
        sys.setprofile(None)  # its first event is enough
        _InThread().__enter__()

    threading.setprofile(begins)


def _bytes_in(value):
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes_in, value)) if isinstance(value, (list, tuple)) else 0


@contextlib.contextmanager
def poisoned_memory():
    """Freed memory is filled with NaN first: who reads it, or frees what a collective still works on, is sure to be
    seen."""
    from zero_minimal.core import collectives  # here: lesson 0 is graded where there are none

    free = collectives.free

    def poison(tensor):
        if tensor.untyped_storage().nbytes():  # it may be free already
            tensor.fill_(torch.nan)
        free(tensor)

    collectives.free = poison
    try:
        yield
    finally:
        collectives.free = free


@contextlib.contextmanager
def slow_motion(model):
    """Every rank is a bit slower in backward than the one before it, and freed memory is poisoned: who frees or reads a
    tensor while a collective still works on it is sure to be seen."""
    pause = 0.002 * dist.get_rank()
    hooks = [param.register_hook(lambda gradient: time.sleep(pause)) for param in model.parameters()
             if param.requires_grad]
    try:
        with poisoned_memory():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def after_zero_grad():
    """Around a backward that comes after zero_grad(): an error that says to call it would lead astray."""
    try:
        yield
    except RuntimeError as error:
        if "zero_grad()" not in str(error):
            raise
        raise AssertionError(
            f"zero_grad() was called before this backward, and it was refused as if it had not been ({error}): what "
            "step() has set and backward has counted must start afresh in zero_grad() (self.reducer.forget())"
        ) from None


def in_words(size):
    """Bytes for people: 4.2 MB (a million bytes)."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} bytes"


_runs: dict = {}


def once(function, world_size, *args):
    """toys.run(function, world_size, *args), once for all the checks that look at its results; so is its failure."""
    key = (function, world_size, args)
    if key not in _runs:
        try:
            _runs[key] = toys.run(function, world_size, *args), None
        except Exception as error:
            _runs[key] = None, error
    results, error = _runs[key]
    if error:
        raise error.with_traceback(None)
    return results


# ------------------------------------------------------------------------------------------------- does it learn right?


class Awkward(nn.Module):
    """Few parameters, each with a catch: one frozen, one tied, one of a single element, one that nobody uses, one that
    only rank 0 uses. model(x, y) is a loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.blocks[1].weight = self.blocks[0].weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.of_rank_0 = nn.Parameter(torch.randn(3))
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x, y, uses_all=True):
        x = torch.tanh(self.first(x)) + self.frozen
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.last(x) * self.scale
        return (x + self.of_rank_0 - y if uses_all else x - y).square().mean()


def awkward_batch(rank, step):
    return *toys.numbers(rank, step), rank == 0


class Chain(nn.Module):
    """A module list whose first element works on the model's input, which needs no gradient. `skip` leaves one out."""

    def __init__(self, width=7, length=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(length))
        self.last = nn.Linear(width, 3)

    def forward(self, x, y, skip=None):
        for place, block in enumerate(self.blocks):
            x = x if place == skip else torch.tanh(block(x))
        return (self.last(x) - y).square().mean()


def matrices_decay(model):
    """Two parameter groups: matrices decay strongly, vectors do not and learn faster."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.5},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 2e-2},
    ]


def warm_up(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


class AllFall:
    """A scheduler under which each option of each group falls, not the learning rate alone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group.update(fallen(group))


def fallen(group, factor=0.5):
    """Each option of a group that is a number, or a pair of them, times this factor."""
    return {name: value * factor if isinstance(value, float) else tuple(factor * each for each in value)
            for name, value in group.items() if isinstance(value, (float, tuple))}


class Warm(optim.AdamW):
    """AdamW with an option that no list of names has: lr is multiplied with its square."""

    def __init__(self, params, warmth=1.0, **options):
        super().__init__(params, **options)
        self.defaults["warmth"] = warmth  # of groups that are added later
        for group in self.param_groups:
            group.setdefault("warmth", warmth)

    def step(self, closure=None):
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= group["warmth"] ** 2
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


Warm([torch.zeros(1)])  # torch wraps step() when the first is made: so that none looks replaced later


# Adam divides by the size of the gradient. eps keeps it from blowing up gradients that are zero but for rounding (a
# key's bias has no effect): with them, no bound on the parameters would hold.
ADAM = dict(lr=1e-2, eps=1e-4)

RECIPES = {
    "AdamW": Recipe(options=dict(ADAM, weight_decay=0.1)),
    "SGD with momentum": Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9)),
    "parameter groups": Recipe(options=ADAM, groups=matrices_decay),
    "LR scheduler": Recipe(options=ADAM, schedule=warm_up),
    "clipping": Recipe(options=ADAM, clip=0.1),
    "accumulation": Recipe(options=ADAM, accumulate=3),
    "accumulation without no_sync": Recipe(optimizer=optim.SGD, options=dict(lr=0.3), accumulate=2, no_sync=False),
    "one bucket for all": Recipe(options=ADAM, bucket_bytes=2**30),
    "many small buckets": Recipe(options=ADAM, bucket_bytes=256),
    "no module list": Recipe(make=toys.MLP, batch=toys.numbers, options=ADAM),
    "frozen, tied and unused parameters": Recipe(
        make=Awkward, batch=awkward_batch, options=dict(ADAM, weight_decay=0.5), bucket_bytes=100
    ),
    "tied weights": Recipe(make=functools.partial(toys.Transformer, tied=True), options=ADAM),
    "bf16": Recipe(options=ADAM, dtype=torch.bfloat16),
    "bf16 and all the rest": Recipe(
        options=ADAM, dtype=torch.bfloat16, clip=0.1, accumulate=2, groups=matrices_decay, schedule=warm_up
    ),
    "fp16": Recipe(options=ADAM, dtype=torch.float16, scale=1024.0),
    "fp16 with clipping and accumulation": Recipe(
        options=ADAM, dtype=torch.float16, scale=1024.0, clip=0.1, accumulate=2
    ),
    "input without gradient": Recipe(make=Chain, batch=toys.numbers, options=ADAM),
    "another order in each step": Recipe(
        make=Chain, batch=lambda rank, step: (*toys.numbers(rank, step), step % 3), options=ADAM, steps=7
    ),
}


def train_all(recipes, *classes):
    """{recipe: [the Run of each class]}, in a rank."""
    return {name: [toys.train(stage_class, recipe) for stage_class in classes] for name, recipe in recipes.items()}


def plain_all(recipes, world_size):
    """{recipe: (a plain loop's Run in the same precision, and in fp64)}, on one rank."""
    return {
        name: (toys.plain(recipe, world_size), toys.plain(recipe, world_size, torch.float64))
        for name, recipe in recipes.items()
    }


@functools.cache
def plainly(world_size, names=tuple(RECIPES)):
    return toys.run(plain_all, 1, {name: RECIPES[name] for name in names}, world_size)[0]


def assert_trains_as_one_process(stage_class, world_size):
    """Each recipe gives the parameters, losses and norms of a plain loop that averages over all ranks' data.

    The bound: both do the same operations in the same precision, and sum in another order. So they may differ by no
    more than the plain loop differs, by rounding, from the same loop in fp64. A loss may also round to its neighbour.
    """
    ranks = toys.run(train_all, world_size, RECIPES, stage_class)
    for name, recipe in RECIPES.items():
        plain, exact = plainly(world_size)[name]
        rounding = toys.distance(plain.parameters, exact.parameters)
        moved = toys.distance(exact.parameters, list(toys.build(recipe.make, 0).parameters()))
        assert rounding < 0.05 * moved, "a bound as large as this would let mistakes through"
        losses = torch.tensor(exact.losses, dtype=torch.float64)
        loss_rounding = (torch.tensor(plain.losses, dtype=torch.float64) - losses).abs().max().item()
        near = 2 * loss_rounding + torch.finfo(torch.float32).eps * losses.abs().max().item()
        for rank, results in enumerate(ranks):
            run, where = results[name][0], f"{name}: rank {rank} of {world_size}"
            assert toys.distance(run.parameters, plain.parameters) <= rounding, f"{where} has other parameters"
            assert run.losses == pytest.approx(plain.losses[rank], abs=near), where
            assert run.norms == pytest.approx(plain.norms, rel=1e-5 if recipe.dtype.itemsize == 4 else 2**-8), where
            assert toys.identical(run.parameters, ranks[0][name][0].parameters), f"{where} has drifted from rank 0"


def one_sgd_step(stage_class):
    """The gradient that the update used, as a list of tensors: with SGD and lr 1 it is what parameters lose."""
    rank = dist.get_rank()
    zero = stage_class(toys.build(toys.Transformer, rank), optim.SGD, lr=1.0, bucket_bytes=4096)
    before = toys.whole_parameters(zero)
    zero.model(*toys.tokens(rank, 0)).backward()
    zero.step()
    return [old - new for old, new in zip(before, toys.whole_parameters(zero), strict=True)]


def assert_gradient_is_the_mean(stage_class, world_size):
    """The update uses the mean of the ranks' gradients. Adam would hardly notice one N times as large: hence SGD."""
    gradients = []
    for rank in range(world_size):
        model = toys.build(toys.Transformer, 0, torch.float64)
        model(*toys.tokens(rank, 0)).backward()
        gradients.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    mean = sum(gradients) / world_size
    for rank, pieces in enumerate(toys.run(one_sgd_step, world_size, stage_class)):
        used = torch.cat([piece.flatten() for piece in pieces]).double()
        if torch.allclose(used, gradients[rank], atol=1e-5):
            pytest.fail(f"rank {rank} used its own gradient alone: nothing was reduced")
        ratio = (used @ mean / (mean @ mean)).item()
        assert ratio != pytest.approx(world_size, rel=0.02), "gradients were summed, not averaged: N times too large"
        assert ratio != pytest.approx(1 / world_size, rel=0.02), "gradients were averaged twice: N times too small"
        # parameters of size 1 lose a gradient: each rounds to fp32, as do some hundred additions before
        assert (used - mean).abs().max() < 100 * 2**-24 * (1 + mean.abs().max()), f"rank {rank} used another gradient"


def overflow_on_one_rank(stage_class):
    """Steps taken (or not), scales and whether parameters moved, where one element of one rank's gradient overflows."""
    from zero_minimal.core.loss_scaler import LossScaler

    rank = dist.get_rank()
    model = toys.build(toys.Transformer, rank, torch.float16)
    zero = stage_class(model, optim.AdamW, bucket_bytes=4096, lr=1e-2)
    scaler, steps = LossScaler(initial_scale=64.0, growth_interval=2), []
    for step in range(4):
        before = toys.whole_parameters(zero)
        loss = scaler.scale(zero.model(*toys.tokens(rank, step)))
        if step == 1 and rank == 1:
            loss = loss + float("inf") * model.norm.bias[-1]  # one rank, and there one element
        loss.backward()
        taken = scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        steps.append((taken, scaler.scale_value, not toys.identical(before, toys.whole_parameters(zero))))
    return steps


def at_the_start(stage_class):
    model = toys.build(Awkward, dist.get_rank())
    model.register_buffer("statistics", torch.full((3,), float(dist.get_rank() + 7)))
    zero = stage_class(model, optim.AdamW)
    return toys.whole_parameters(zero), model.statistics


def assert_starts_from_rank_0(stage_class, world_size):
    """Whatever values a rank's model began with: all ranks start from rank 0's, buffers and frozen parameters
    included."""
    wanted = [param.detach() for param in toys.build(Awkward, 0).parameters()]
    for rank, (parameters, statistics) in enumerate(toys.run(at_the_start, world_size, stage_class)):
        assert toys.identical(parameters, wanted), f"rank {rank} starts from other parameters than rank 0"
        assert torch.equal(statistics, torch.full((3,), 7.0)), f"rank {rank} has a buffer of its own"


# ------------------------------------------------------------------------------------------------ clipping, checkpoints


def norms(stage_class, max_norm):
    """What clip_grad_norm_ returns, and the change of an SGD step with lr 1. New memory comes filled with NaN."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN: padding must not leak into norms
    rank = dist.get_rank()
    zero = stage_class(toys.build(toys.Transformer, rank), optim.SGD, lr=1.0, bucket_bytes=4096)
    before = toys.whole_parameters(zero)
    zero.model(*toys.tokens(rank, 0)).backward()
    norm = zero.clip_grad_norm_(max_norm)
    zero.step()
    return norm, toys.distance(before, toys.whole_parameters(zero))


def assert_clips_by_the_global_norm(stage_class, world_size):
    """The norm is that of the whole averaged gradient, on all ranks, and clipping scales the update to it."""
    _, exact = plainly(world_size)["clipping"]
    true = exact.norms[0]
    for max_norm, size in ((0.1, 0.1), (1e6, true)):
        for rank, (norm, change) in enumerate(toys.run(norms, world_size, stage_class, max_norm)):
            # The sum of n squares in fp32 has an error below n/2 * 2^-24 in the worst order, its root half of that;
            # kernels add in 16 lanes or more, so n/16 stands for n = 7,700. The rest are the gradients' own errors.
            assert norm.item() == pytest.approx(true, rel=2e-5), f"rank {rank} returned another norm"
            assert norm.ndim == 0
            assert change == pytest.approx(size, rel=1e-4), f"rank {rank}: clipping to {max_norm} gave {change}"


def restarted(stage_class, dtype):
    """Losses and parameters of three steps that follow on three others, in one go, and after a restart in between."""
    rank = dist.get_rank()

    def start(seed):
        model = toys.build(toys.Transformer, rank + seed, dtype)
        return stage_class(model, optim.AdamW, bucket_bytes=4096, param_groups=matrices_decay(model), **ADAM)

    def go_on(zero, steps):
        losses = []
        for step in steps:
            loss = zero.model(*toys.tokens(rank, step))
            loss.backward()
            zero.step()
            zero.zero_grad()
            losses.append(loss.item())
        return losses

    zero = start(0)
    go_on(zero, range(3))
    state = copy.deepcopy(zero.state_dict())
    whole = go_on(zero, range(3, 6)), toys.whole_parameters(zero)
    zero = start(1000)
    zero.load_state_dict(state)
    return whole, (go_on(zero, range(3, 6)), toys.whole_parameters(zero))


def assert_restarts(stage_class, world_size, dtype=torch.float32):
    """A model of other values that loads each rank's state goes on bit for bit."""
    for rank, (whole, again) in enumerate(toys.run(restarted, world_size, stage_class, dtype)):
        assert again[0] == whole[0], f"rank {rank}: other losses after a restart"
        assert toys.identical(again[1], whole[1]), f"rank {rank}: other parameters after a restart"


# --------------------------------------------------------------------------------------------------- memory and traffic


def on_the_wire(stage_class, accumulate=1):
    """Bytes that this rank's sockets deliver in a step; those of the parameters. A model of 7.7 MB without module
    list."""
    # not above: a lesson whose grader does not count has no meters
    from zero_minimal.meters.traffic import wire_bytes

    rank = dist.get_rank()
    model = toys.build(lambda: toys.MLP(7, 500, 1300, 900, 3), rank)
    zero = stage_class(model, optim.SGD, lr=0.01)
    for step in range(2):
        before = wire_bytes(quiet=True)
        for micro in range(accumulate):
            with zero.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                model(*toys.numbers(rank, step)).backward()
        zero.step()
        zero.zero_grad()
        after = wire_bytes(quiet=True)
    return None if after is None else after - before, sum(param.nbytes for param in model.parameters())


def assert_traffic(stage_class, world_size, volume, accumulate=1):
    """A rank sends `volume` times Psi (N-1)/N bytes in a step: so says the kernel, within 2%, whatever was called."""
    for rank, (sent, psi) in enumerate(toys.run(on_the_wire, world_size, stage_class, accumulate)):
        if sent is not None:
            share = sent / (psi * (world_size - 1) / world_size)
            assert share == pytest.approx(volume, rel=0.02), f"rank {rank} sent {share:.2f} Psi (N-1)/N, not {volume}"


def assert_reduces_during_backward(stage_class, world_size, *names):
    """Reductions (collectives of these names) begin while gradients are still to come, and backward goes on
    meanwhile."""
    for events, psi, padding in toys.run(events_of_a_step, world_size, stage_class, bucket_bytes=4096):
        kinds = [(event.kind, event.name in names) for event in events]
        starts = [place for place, kind in enumerate(kinds) if kind == ("start", True)]
        sent = sum(events[place].bytes for place in starts)
        assert psi <= sent <= psi + padding, f"{sent} bytes of gradients were reduced in a step, of {psi}"
        last_gradient = max(place for place, event in enumerate(events) if event.kind == "gradient")
        early = [place for place in starts if place < last_gradient]
        assert len(early) >= len(starts) / 2, "reductions begin only when backward is all but over"
        waits = [place for place, kind in enumerate(kinds) if kind == ("wait", True)]  # in the order of the starts
        overlapped = 0
        for start, wait in zip(early, waits, strict=False):
            overlapped += any(event.kind == "gradient" for event in events[start:wait])
        assert overlapped >= len(starts) / 2, "each reduction is waited for at once: nothing overlaps"


def sent_in(events, *names):
    """Bytes of the collectives of these names (of all without names)."""
    return sum(event.bytes for event in events if event.kind == "start" and (not names or event.name in names))
