"""Lesson 9's assignment, offload, in steps: what is owned, sent and computed, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import dataclasses
import itertools
import random
import tempfile
import time
import warnings

import checks
import cloudpickle
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from sharded import BUCKET, Normed, assert_shards_hold, gradients_of, model
from torch import nn, optim

pytestmark = pytest.mark.usefixtures("one_thread")

WAITS = ("each parcel that was received must be given back, with emptied(parcel), once it was read: else the other "
         "side waits for a buffer. And who receives waits until something is sent")
DTYPES = (torch.float32, torch.float16, torch.float64)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def master_dtype(dtype):
    """Of the master of such a shard."""
    return torch.promote_types(dtype, torch.float32)


# ----------------------------------------------------------------------------------------------- in a rank: what we see


class Spy:
    """Lists what this rank's end of a stage's bus does: ("sent" or "back", words, place in
    zero.buckets, dtype, elements); .buffers: where the memory begins in which something came."""

    def __init__(self, zero, heard=lambda kind: None):
        self.zero, self.events, self.buffers, bus = zero, [], set(), zero.host.bus
        self.places = {bucket.away.number: place for place, bucket in enumerate(zero.buckets)}
        send, receive = bus.send, bus.receive

        def sends(words, tensor=None):
            self._note("sent", words, tensor)
            heard("sent")
            return send(words, tensor)

        def receives():
            parcel = receive()
            self._note("back", parcel.words, parcel.tensor)
            if parcel.tensor is not None:
                self.buffers.add(parcel.tensor.untyped_storage().data_ptr())
            heard("back")
            return parcel

        bus.send, bus.receive = sends, receives

    def _note(self, kind, words, tensor):
        if tensor is not None:
            number = words[1] if kind == "sent" and len(words) > 1 and isinstance(words[1], int) else -1
            number = self.places.get(number, -1)
            self.events.append((kind, str(words[0]) if words else "", number, name_of(tensor.dtype), tensor.numel()))

    def take(self):
        """What there was since the last time."""
        events, self.events = self.events, []
        return events


@contextlib.contextmanager
def buffers_filled_again():
    """As soon as a buffer of the bus is given back, something else lies in it: NaN."""
    from zero_minimal.offloading.host_link import Bus

    emptied = Bus.emptied

    def filled(bus, parcel):
        if parcel.tensor is not None:
            parcel.tensor.fill_(torch.nan)
        emptied(bus, parcel)

    Bus.emptied = filled
    try:
        yield
    finally:
        Bus.emptied = emptied


def alike(one, other):
    """The same numbers, or NaN on both sides."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def serving(assignment):
    """What a host does here: the submission's HostState, which can also be given gradients, and notes how many masters
    have changed whenever a shard leaves."""

    def serve(bus):
        class State(assignment.HostState):
            def given(self, parcel, number):
                self.shards[number].gradient.copy_(parcel.tensor)
                self.shards[number].has_gradient = True
                self.bus.emptied(parcel)

            def update(self, *given):
                masters = [shard.master for shard in self.shards.values()]
                first, send, self.changed = [master.detach().clone() for master in masters], self.bus.send, []

                def sends(*what):
                    self.changed.append(sum(not alike(*pair) for pair in zip(masters, first, strict=True)))
                    return send(*what)

                self.bus.send = sends
                super().update(*given)
                del self.bus.send

            def alive(self, parcel):
                self.bus.send(((checks.live_bytes() - before, self.changed),))

        before = checks.live_bytes()
        state = State(bus)
        with buffers_filled_again():
            while (parcel := bus.receive()).words[0] != "end":
                order, *words = parcel.words
                getattr(state, order)(parcel, *words)

    return serve


SIZES = {2: 7, 0: 33, 1: 20}  # elements of three shards, by their numbers, in the order in which they come
GROUPS = {0: 0, 1: 1, 2: 0}  # of which optimizer group


def values(number, dtype, times=0):
    """Those of a shard, and of its gradient of a step (times > 0)."""
    generator = torch.Generator().manual_seed(toys.seed(0, 10 * number + times))
    return torch.randn(SIZES[number], generator=generator).to(dtype)


def a_host(assignment, optimizer, options, groups, dtype):
    """A host that has been handed three shards."""
    from zero_minimal.offloading.host_process import Host

    host = Host(serving(assignment), 8 * max(SIZES.values()), torch.device("cpu"), None)
    for number in SIZES:
        host.send(("keep", number, GROUPS[number]), values(number, dtype))
    host.send(("make_optimizer", cloudpickle.dumps((optimizer, options, groups))))
    return host


def master_on(host, number):
    numel, dtype = host.ask("fetch", number, None)
    return host.receive_all(torch.empty(numel, dtype=dtype))


# -------------------------------------------------------------- step 1: masters, momentum and variance live on the host


def kept(assignment):
    """Of each dtype: the masters as the host has them, and how many bytes it keeps."""
    found = []
    for dtype in DTYPES:
        host = a_host(assignment, optim.SGD, {"lr": 1.0}, [{}, {}], dtype)
        found.append(([master_on(host, number) for number in sorted(SIZES)], host.ask("memory")[0]))
        host.end()
    return found


@pytest.mark.step(1, points=5, stuck=WAITS)
def test_the_host_keeps_its_own_copy(assignment):
    [found] = toys.run(kept, 1, assignment)
    for dtype, (masters, size) in zip(DTYPES, found, strict=True):
        for number, master in zip(sorted(SIZES), masters, strict=True):
            came, kind = values(number, dtype), name_of(master.dtype)
            assert master.dtype == master_dtype(dtype), (
                f"the host was handed a shard of {name_of(dtype)}, and its master is of {kind}: a master has 32 bits, "
                "or small updates vanish; if the shard has more, the shard's own dtype"
            )
            assert master.isfinite().all(), (
                f"of the shard of {name_of(dtype)} that came first the host has NaN now: its master lies in the bus's "
                "buffer, where the next parcel lies by now, or was read after the buffer was given back. Copy first"
            )
            assert torch.equal(master, came.to(master.dtype)), (
                f"the host was handed a shard of {name_of(dtype)} that begins {came[:3].tolist()}, and its master "
                f"begins {master[:3].tolist()}"
            )
        elements = sum(SIZES.values())
        wide = master_dtype(dtype).itemsize
        wanted = elements * (wide + dtype.itemsize)
        assert size == wanted, (
            f"of {elements} elements of {name_of(dtype)} the host keeps {size} bytes, and {wanted} are right: {wide} "
            f"each for the master, and {dtype.itemsize} each for a gradient in the shard's own dtype"
        )


HOST_GROUPS = [dict(lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), warmth=0.8),
               dict(lr=0.02, weight_decay=0.05, betas=(0.8, 0.9), warmth=1.0)]
SCALARS = 100  # bytes
UPDATED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MANY = 12  # updates of a host, and steps of a stage


@dataclasses.dataclass
class Update:
    factor: float  # of all options
    scale: object  # None, a number, or a pair: a tensor with this number
    gradients: int  # of which update: its own, or the one before
    infinite: tuple | None = None  # where one of them is: shard, element, what it is

    @property
    def number(self):
        """What gradients are multiplied with."""
        return 1.0 if self.scale is None else self.scale[1] if isinstance(self.scale, tuple) else self.scale

    def gradient(self, number, dtype):
        gradient = values(number, dtype, self.gradients)
        if self.infinite and self.infinite[0] == number:
            gradient[self.infinite[1]] = self.infinite[2]
        return gradient

    def __str__(self):
        kind = "a tensor of " if isinstance(self.scale, tuple) else ""
        scale = "None" if self.scale is None else f"{kind}{self.number:.2g}"
        return f"scale {scale}{', one gradient infinite or NaN' * bool(self.infinite)}"


def updates():
    """Drawn by lot: each kind of scale, also after another kind; an infinite gradient or NaN where the scale is 0."""
    lot, drawn = random.Random(toys.seed(0, 9)), []

    def between():
        return lot.uniform(0.1, 0.9)

    while not any(each.gradients < times for times, each in enumerate(drawn, 1)):
        scales = [None, None, None, between(), between(), ("tensor", between()), ("tensor", between()),
                  0, 0.0, ("tensor", 0.0), ("tensor", 0.0)]
        lot.shuffle(scales)
        drawn = [Update(1.0, None, 1)]
        for times, scale in enumerate(scales, 2):
            update, before = Update(lot.uniform(0.4, 0.9), scale, times), drawn[-1]
            if not update.number:
                shard = lot.choice(list(SIZES))
                update.infinite = shard, lot.randrange(SIZES[shard]), lot.choice((torch.inf, -torch.inf, torch.nan))
            elif before.scale is not None and lot.random() < 0.7:
                update.gradients, update.infinite = before.gradients, before.infinite
            drawn.append(update)
    return drawn


def updated(assignment):
    """Of each dtype: after each of the updates of AdamW, the parcels that came (words, and what was in them), the
    masters, the bytes that the host keeps, as it says and as tensors that live there, and how many masters had been
    updated when each shard left."""
    found = []
    for dtype in UPDATED_DTYPES:
        host, parts = a_host(assignment, checks.Warm, {"lr": 1.0}, HOST_GROUPS, dtype), []
        for times, update in enumerate(updates(), 1):
            for number in sorted(SIZES) if update.gradients == times else ():
                host.send(("given", number), update.gradient(number, dtype))
            options = [checks.fallen(group, update.factor) for group in HOST_GROUPS]
            scale = torch.tensor(update.number) if isinstance(update.scale, tuple) else update.scale
            host.send(("update", options, scale))
            host.send(("memory",))
            parcels = []
            while (parcel := host.receive()).tensor is not None:
                parcels.append((str(parcel.words), parcel.tensor.clone()))
                host.emptied(parcel)
            sizes = parcel.words[0][0], *host.ask("alive")
            parts.append((parcels, [master_on(host, number) for number in sorted(SIZES)], sizes))
        host.end()
        found.append(parts)
    return found


def updated_plainly(dtype, number=lambda update: update.number, stale=(), of=(), since=1, skips=False, stays=False):
    """The masters after each of the updates. number: what gradients are multiplied with. stale: these options of these
    groups are those of update `since` from then on. skips: a shard with a gradient that is not finite is not updated.
    stays: what was multiplied is the gradient now."""
    masters = [nn.Parameter(values(number, dtype).float()) for number in sorted(SIZES)]
    groups = [{**group, "params": [masters[number] for number in sorted(SIZES) if GROUPS[number] == index]}
              for index, group in enumerate(HOST_GROUPS)]
    optimizer, found, kept = checks.Warm(groups), [], {}
    for times, update in enumerate(updates(), 1):
        for index, (group, own) in enumerate(zip(optimizer.param_groups, HOST_GROUPS, strict=True)):
            group.update({name: value for name, value in checks.fallen(own, update.factor).items()
                          if name not in stale or index not in of or times <= since})
        for place, master in zip(sorted(SIZES), masters, strict=True):
            gradient = update.gradient(place, dtype).float()
            if stays and update.gradients < times:
                gradient = kept[place]
            master.grad = kept[place] = gradient * number(update)
            if skips and not gradient.isfinite().all():
                master.grad = None
        optimizer.step()
        found.append([master.detach().clone() for master in masters])
    return found


def near(ours, theirs):
    """But for the elements that are NaN in theirs: there an infinite gradient was, or NaN, times 0."""
    return all(torch.allclose(one[there], other[there], rtol=1e-5, atol=1e-6)
               for one, other in zip(ours, theirs, strict=True) for there in [other.isfinite()])


KNOWN = {  # mistakes, and what is told of them
    "gradients were not multiplied with `scale`, where clipping and the loss scale are": [
        {"number": lambda update: 1.0}],
    "a scale of 0 was taken for none. None alone says that there is none: ask `if scale is not None`, not `if scale` "
    "or `scale or 1`": [
        {"number": lambda update, kinds=kinds: update.number or float(isinstance(update.scale, kinds))}
        for count in (3, 2, 1) for kinds in itertools.combinations((int, float, tuple), count)],
    "a shard was not updated where one of its gradients is infinite or NaN. The other elements are updated all the "
    "same, here with gradients of 0: whether a step is taken is decided for all ranks together, before they come to "
    "their hosts": [{"skips": True}],
    "the gradient of the update before stays as it came, and what was multiplied with its scale came in its place. "
    "Multiply into a tensor of its own": [{"stays": True}],
}


def why_off(dtype, masters):
    """In words, if the masters after all updates are what comes of a mistake that is known."""
    for words, cases in KNOWN.items():
        if any(near(masters, updated_plainly(dtype, **case)[-1]) for case in cases):
            return words
    names = list(HOST_GROUPS[0])
    for count, of in itertools.product(range(1, len(names) + 1), ((0, 1), (0,), (1,))):
        for stale in itertools.combinations(names, count):
            if near(masters, updated_plainly(dtype, stale=stale, of=of)[-1]):
                return (f"of group {' and '.join(map(str, of))} {', '.join(stale)} are still the first ones: a "
                        "scheduler has changed them since, and a group takes over all options that came, whatever "
                        "their names are")
    for since in range(2, MANY):
        if near(masters, updated_plainly(dtype, stale=names, of=(0, 1), since=since)[-1]):
            return (f"the options are still those of update {since}: a scheduler has changed them since, and each "
                    "update takes over what came with it")
    return ""


@pytest.mark.step(1, points=8, stuck=WAITS)
def test_the_host_updates_its_masters(assignment):
    [found] = once(updated, 1, assignment)
    for dtype, parts in zip(UPDATED_DTYPES, found, strict=True):
        wanted, before = updated_plainly(dtype), [values(number, dtype).float() for number in sorted(SIZES)]
        for times, (update, (_, masters, _), right) in enumerate(zip(updates(), parts, wanted, strict=True)):
            if near(masters, right):
                before = masters
                continue
            words = why_off(dtype, parts[-1][1])
            still = sum(alike(one, other) for one, other in zip(before, masters, strict=True))
            off = max((one - other)[other.isfinite()].abs().max().item()
                      for one, other in zip(masters, right, strict=True))
            pytest.fail(
                f"after update {times + 1} of AdamW on shards of {name_of(dtype)} ({update}) "
                + (f"{still} of 3 masters are as they were before" if still else
                   f"the host's masters are off by {off:.2g} at most")
                + (f": {words}" if words else ": each master is updated with its own gradient, times scale "
                   "if there is one, in fp32, by the optimizer's group that it belongs to (optimizers.update). The "
                   "gradient itself stays as it is"),
                pytrace=False)


@pytest.mark.step(1, points=1, stuck=WAITS)
def test_each_shard_returns_as_soon_as_it_is_updated(assignment):
    [found] = once(updated, 1, assignment)
    for times, (*_, (_, _, changed)) in enumerate(itertools.chain(*found)):
        assert changed == [1, 2, 3], (
            f"in update {times % MANY + 1} of AdamW the shards were sent when {in_turn(changed)} of 3 masters "
            "had been updated, and 1, 2 and 3 are right: a shard goes back as soon as it is done, and crosses the bus "
            "while the next is updated"
        )


def in_turn(numbers):
    return " and ".join(", ".join(map(str, numbers)).rsplit(", ", 1)) or "none"


@pytest.mark.step(1, points=3, stuck=WAITS)
def test_each_shard_returns_in_its_dtype(assignment):
    [found] = once(updated, 1, assignment)
    for dtype, parts in zip(UPDATED_DTYPES, found, strict=True):
        before = None
        for parcels, masters, (size, lives, _) in parts:
            assert len(parcels) == 3, (
                f"an update of 3 shards sent {len(parcels)} parcels back: each shard goes back by itself"
            )
            for number, ((words, came), master) in enumerate(zip(parcels, masters, strict=True)):
                assert came.dtype == dtype, (
                    f"parameters of {name_of(dtype)} came back as {name_of(came.dtype)}: {came.dtype.itemsize} bytes "
                    f"each on the bus, and {dtype.itemsize} are needed. Round on the host"
                )
                was = values(number, dtype) if before is None else before[number].to(dtype)
                now = master.to(dtype)  # 16 bits may round it to what it was
                assert alike(came, now) or not alike(came, was), (
                    f"parcel {number} of an update is what shard {number}'s master was before it: a step old. A shard "
                    "is sent when it has been updated"
                )
                assert alike(came, now), (
                    f"parcel {number} of an update is not what shard {number}'s master is after it, rounded to "
                    f"{name_of(dtype)}: the rank takes them in the order of self.shards, and updated"
                )
                assert words == "('parameters',)", f"a parcel's words are {words}, and ('parameters',) are right"
            before, most = masters, sum(SIZES.values()) * (4 + 8 + dtype.itemsize)
            assert size == most, (
                f"after an update of AdamW the host keeps {size} bytes of {sum(SIZES.values())} elements, and {most} "
                "are right: master, momentum and variance in fp32, and the gradient"
            )
            assert lives <= most + SCALARS, (
                f"after an update of AdamW tensors of {lives} bytes live on the host, and {most} are right, with a few "
                "single numbers: what stays of an update, a gradient in fp32?"
            )


STAGES = ("Offloaded1", "Offloaded2", "Offloaded3")
WIDE, DEEP = 96, 6  # of blocks without a bias: no padding


class Blocks(nn.Module):
    """DEEP layers, each a bucket, or a unit, of its own."""

    def __init__(self, between=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP))
        self.between = between

    def forward(self, x, y=None):
        for block in self.blocks:
            x = x + 0.1 * block(x)
            x = x if self.between is None else Looked.apply(x, self.between)
        return x.float().square().mean()


class Looked(torch.autograd.Function):
    """Looks when backward comes by, and takes its time."""

    @staticmethod
    def forward(ctx, x, look):
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.look()
        time.sleep(0.01)
        return gradient, None


def wide(rank, step):
    return (toys.numbers(rank, step, WIDE, 1, batch=2, dtype=torch.bfloat16)[0],)


def blocks_of(kind, **options):
    """A stage over such a model in bf16, SGD if nothing else is said."""
    options = {"lr": 0.1, "bucket_bytes": 2 * WIDE * WIDE} | options
    return kind(toys.build(Blocks, dist.get_rank(), torch.bfloat16), options.pop("optimizer", optim.SGD), **options)


PSI = DEEP * WIDE * WIDE  # parameters
BUFFERS = 4 * 2 * WIDE * WIDE  # bytes of the bus's buffers, at most


def handed_over(assignment):
    """Of each stage, made and not used: bytes on this rank, those of the stand-ins for masters, and whether the host
    has all masters. And what stands for a master in fp64."""
    found = []
    for name in STAGES:
        before = checks.live_bytes()
        zero = blocks_of(getattr(assignment, name), optimizer=optim.AdamW)
        size = checks.live_bytes(until=before + most_held(name), looks=10) - before
        masters = [param for group in zero.optimizer.param_groups for param in group["params"]]
        own = sum(master.untyped_storage().nbytes() for master in masters)
        shapes = [(name_of(master.dtype), list(master.shape)) for master in masters]
        on_host = [bucket.away.fetch(None) for bucket in zero.buckets]
        right = [torch.equal(master, bucket.parameter_shard.float())
                 for master, bucket in zip(on_host, zero.buckets, strict=True)]
        found.append((size, own, shapes, right))
        zero.host.end()
        del zero, masters
    zero = assignment.Offloaded1(toys.build(Blocks, dist.get_rank(), torch.float64), optim.SGD, lr=0.1)
    wide = name_of(zero.optimizer.param_groups[0]["params"][0].dtype)
    zero.host.end()
    return found, wide


def most_held(name, world_size=2):
    """Bytes before the first gradient, and after a step: parameters, buffers of the bus, and gradients at stage 1."""
    return {"Offloaded1": 4, "Offloaded2": 2, "Offloaded3": 2 / world_size}[name] * PSI + BUFFERS + 0.3 * PSI


@pytest.mark.step(1, points=8, stuck=WAITS)
def test_a_rank_keeps_no_optimizer_state(assignment):
    for rank, (found, wide) in enumerate(once(handed_over, 2, assignment)):
        for name, (size, own, shapes, right) in zip(STAGES, found, strict=True):
            assert len(right) == DEEP and all(right), (
                f"{name}: of {len(right)} masters on the host of rank {rank} {sum(right)} are what the rank's "
                "parameter shards are: hand over bucket.parameter_shard, with the bucket's own number"
            )
            assert own <= 16 * DEEP and size <= most_held(name), (
                f"{name}: rank {rank} holds {in_words(size)} when the stage is made, and {in_words(most_held(name))} "
                f"are enough. {in_words(own)} of it are bucket.master: that lives on the host now, and what stands "
                "here in its place has no memory (stand_in)"
            )
            wanted = [("float32", [WIDE * WIDE // 2])] * DEEP
            assert shapes == wanted, (
                f"{name}: what stands for the masters on rank {rank} is {shapes[0]}, …, and {wanted[0]} is right: who "
                "asks sees what the host has, but for the numbers"
            )
        assert wide == "float64", (
            f"of a model in fp64 what stands for a master on rank {rank} is {wide}: it has the dtype of the host's "
            "master, fp32 for 16 bits, and the parameters' own for wider ones")


# ----------------------------------------------------------- step 2: a gradient shard leaves when its bucket is reduced


# gradients since forget(), and those of them that came since the update before
CAME = (([1], [1]), ([2, 3, 4], [2, 3, 4]), ([5], [5]), ([5, 6], [6]))
OVERFLOWED = 1  # after which of them, and before forget(), one comes that has overflowed, and is never used
ADDED = ((True, torch.float32), (False, torch.float32), (True, torch.bfloat16))


def added_up(assignment):
    """What SGD with lr 1 takes away on a host, after gradients came once, three times, again after forget(), and once
    more without it; the bytes that it keeps then; and whether it said that all are finite, before one has overflowed,
    and then. Where they add, and where the newest counts alone."""
    found, lot = [], random.Random(toys.seed(0, 11))
    for adds, dtype in ADDED:
        host, moved, finite = a_host(assignment, optim.SGD, {"lr": 1.0}, [{}, {}], dtype), [], []
        for case, (since, times) in enumerate(CAME):
            if times == since:
                host.send(("forget",))
            before = [master_on(host, number) for number in sorted(SIZES)]
            for time_ in times:
                for number in sorted(SIZES):
                    host.send(("gradient", number, adds), values(number, dtype, time_))
            host.send(("update", [{}, {}], None))
            for _ in SIZES:
                host.emptied(host.receive())
            moved.append([one - master_on(host, number) for number, one in zip(sorted(SIZES), before, strict=True)])
            if case == OVERFLOWED:
                finite.append(host.ask("finite"))
                number = lot.choice(list(SIZES))
                gradient = values(number, dtype, 9)
                gradient[lot.randrange(SIZES[number])] = lot.choice((torch.inf, torch.nan))
                host.send(("gradient", number, adds), gradient)
                finite.append(host.ask("finite"))
        found.append((moved, host.ask("memory")[0], finite))
        host.end()
    return found


@pytest.mark.step(2, points=5, stuck=WAITS)
def test_micro_batches_add_up_on_the_host(assignment):
    [found] = toys.run(added_up, 1, assignment)
    for (adds, dtype), (moved, size, finite) in zip(ADDED, found, strict=True):
        wanted = sum(SIZES.values()) * (4 + dtype.itemsize)
        assert size <= wanted, (
            f"gradients of {name_of(dtype)} came for {sum(SIZES.values())} elements, some of them three times, and the "
            f"host keeps {size} bytes: {wanted} are right, 4 each for the master and {dtype.itemsize} each for a "
            "gradient. In which dtype does a sum stay?"
        )
        for case, ((times, new), pieces) in enumerate(zip(CAME, moved, strict=True)):
            each = [torch.cat([values(number, dtype, time_) for number in sorted(SIZES)]) for time_ in times]
            right, ours = (sum(each) if adds else each[-1]).float(), torch.cat(pieces)
            so_far = sum(torch.cat([values(number, torch.float32, time_) for number in sorted(SIZES)])
                         for time_ in range(1, times[-1] + 1))
            told = (f"adds={adds}, and {len(times)} gradient{'s' * (len(times) > 1)} of {name_of(dtype)} came since "
                    f"forget(){', with an update between them' * (new != times)}")
            if case > OVERFLOWED:
                assert ours.isfinite().all(), (
                    f"{told}. Before forget() there was one in which an element is infinite or NaN, and the host's "
                    "gradient still is: 0 times infinity is NaN. What is forgotten is replaced, not multiplied by 0"
                )
            assert ours.isfinite().all(), (
                f"{told}: the host's gradient is NaN. It was read after its buffer was given back, or lies in that "
                "buffer: copy, or add, first"
            )
            if torch.allclose(ours, right, rtol=1e-4, atol=1e-5):
                continue
            why = {"that of the last one alone: each replaced the one before, and must be added to it": each[-1],
                   "that of the last two: each is added to the sum of all before it": sum(each[-2:]),
                   "that of the first one alone": each[0], "their sum, and the newest replaces": sum(each),
                   "that of all since the beginning: after forget() the next is the first again": so_far}
            words = next((words for words, wrong in why.items()
                          if torch.allclose(ours, wrong.float(), rtol=1e-4, atol=1e-5)),
                         "neither the last one nor their sum")
            pytest.fail(f"{told}: the host's gradient is {words}", pytrace=False)
        assert finite == [True, False], (
            f"adds={adds}: gradients of {name_of(dtype)} came, and then one in which an element is infinite or NaN. "
            f"Whether all are finite the host answered with {finite[0]} before, and {finite[1]} then; True and False "
            "are right. Keep what came as it came: else no loss scaler hears of an overflow, and no step is skipped"
        )


def gradients_there(zero):
    """This rank's gradient shards, from the host: what SGD with lr 1 takes away."""
    before = [bucket.away.fetch(None) for bucket in zero.buckets]
    zero.reducer.complete()
    zero.host.send(("update", [{} for _ in zero.optimizer.param_groups], None))
    for _ in zero.buckets:
        zero.host.emptied(zero.host.receive())
    return [one - bucket.away.fetch(None) for bucket, one in zip(zero.buckets, before, strict=True)]


def first_backward(assignment):
    """{stage: gradient shards on this rank's host after the first backward}"""
    torch.use_deterministic_algorithms(True)
    found, rank = {}, dist.get_rank()
    for name in STAGES if dist.get_world_size() == 2 else STAGES[1:2]:
        zero = getattr(assignment, name)(toys.build(model, rank), optim.SGD, lr=1.0, bucket_bytes=BUCKET)
        with checks.slow_motion(zero.model):
            zero.model(*toys.tokens(rank, 0)).backward()
        found[name] = gradients_there(zero)
        zero.host.end()
    return found


@pytest.mark.step(2, points=6, stuck=WAITS)
@pytest.mark.parametrize("world_size", (2, 3))
def test_the_host_has_the_mean_gradient(assignment, world_size):
    results, gradients = once(first_backward, world_size, assignment), gradients_of(world_size)
    for name in results[0]:
        for rank, found in enumerate(results):
            missing = [number for number, shard in enumerate(found[name]) if not shard.any()]
            assert len(missing) < len(found[name]), (
                f"{name}: after backward the host of rank {rank} had no gradient: no gradient shard was sent to the "
                "host. What super()._wait() sets back you must read before"
            )
            assert not missing, (
                f"{name}: of {len(found[name])} gradient shards the host of rank {rank} has nothing for bucket "
                f"{missing[0]}{' and others' * (len(missing) > 1)}: each leaves once it is reduced, the last one too"
            )
        assert_shards_hold([found[name] for found in results], gradients,
                           f"the mean gradient, where {name} let it go to the hosts,")


MICROS = 3


def crossings(assignment):
    """{stage: what crossed the bus in three micro-batches, and in the step after them, twice}; and bytes of gradients
    that this rank has after backward, beyond what it had before it."""
    found, rank = {}, dist.get_rank()
    for name in STAGES:
        zero, parts = blocks_of(getattr(assignment, name)), []
        spy, before = Spy(zero), checks.live_bytes()
        for step in range(2):
            for micro in range(MICROS):
                with zero.no_sync() if micro + 1 < MICROS else contextlib.nullcontext():
                    zero.model(*wide(rank, MICROS * step + micro)).backward()
            parts.append(spy.take())
            zero.zero_grad()
        zero.model(*wide(rank, 99)).backward()
        grown = checks.live_bytes(until=before + 0.5 * PSI, looks=10) - before
        found[name] = parts, grown
        zero.host.end()
        del zero, spy
    return found


@pytest.mark.step(2, points=6, stuck=WAITS, raised="what leaves is this rank's shard of a bucket, in its own 16 bits: "
                  "a buffer of the bus is as large as the largest of those")
def test_gradients_cross_as_shards_in_16_bit(assignment):
    for rank, found in enumerate(once(crossings, 2, assignment)):
        for name, (parts, _) in found.items():
            for events in parts:
                assert_crossed(rank, name, [event for event in events if event[0] == "sent"], 2)


def assert_crossed(rank, name, events, world_size):
    """Of the micro-batches of a step."""
    times = 1 if name == "Offloaded1" else MICROS
    told = f"{name}, a model of {in_words(2 * PSI)} in bf16 on {world_size} ranks, {MICROS} micro-batches: rank {rank}"
    kinds = {dtype for _, _, _, dtype, _ in events} - {"bfloat16"}
    assert not kinds, (
        f"{told} sent gradients as {', '.join(sorted(kinds))}: they have 16 bits, and so they cross. What the host "
        "computes in fp32 it widens there"
    )
    size, right = 2 * sum(numel for *_, numel in events), times * 2 * PSI // world_size
    numbers = [number for _, _, number, _, _ in events]  # places in zero.buckets
    lost = sorted(set(range(DEEP)) - set(numbers))
    assert events and not lost, (
        f"{told} sent the shards of {len(set(numbers))} of {DEEP} buckets to its host, in no pass that of bucket "
        f"{lost[0]}" + (", the last one that backward completes: nothing is complete after it" if lost == [DEEP - 1]
                        else "")
    )
    assert size == right, (
        f"{told} sent {in_words(size)} of gradients to its host, and {in_words(right)} are right: "
        + (f"its shards, {in_words(right // times)}, " + ("once: Offloaded1 adds up where gradients are whole"
           if times == 1 else "once for each micro-batch"))
        + (". These are whole buckets" if size == right * world_size else "")
    )


@pytest.mark.step(2, points=3, stuck=WAITS)
def test_no_gradient_shard_stays(assignment):
    for rank, found in enumerate(once(crossings, 2, assignment)):
        for name, (_, grown) in found.items():
            assert name == "Offloaded1" or grown <= 0.5 * PSI, (
                f"{name}: after backward rank {rank} holds {in_words(grown)} that it did not hold before, and its "
                f"gradient shards are {in_words(PSI)}: what has left for the host is freed here"
            )


CROSSING = 0.04, 0.4  # seconds, of a shard: the second for a busy machine, whose backward takes longer than the first


def beside_backward(assignment, crossing):
    """{stage: when backward came to each layer, the last one first: how many gradient shards had left, and whether the
    bus was at work}"""
    found, rank = {}, dist.get_rank()
    shard = 2 * WIDE * WIDE // dist.get_world_size()
    for name in STAGES:
        looks, seen = [], {}

        def look(looks=looks, seen=seen):
            if seen:
                sent = sum(event[0] == "sent" for event in seen["spy"].events)
                looks.append((sent, seen["bus"]._busy_until > time.monotonic()))

        made = toys.build(lambda look=look: Blocks(look), rank, torch.bfloat16)
        zero = getattr(assignment, name)(made, optim.SGD, lr=0.1, bucket_bytes=2 * WIDE * WIDE, bus=shard / crossing)
        time.sleep(3 * crossing)
        seen.update(spy=Spy(zero), bus=zero.host.bus)
        zero.model(*wide(rank, 0)).backward()
        found[name] = looks
        zero.host.end()
    return found


@pytest.mark.step(2, points=5, stuck=WAITS)
def test_gradients_leave_while_backward_goes_on(assignment):
    for crossing in CROSSING:
        told = [line for rank, found in enumerate(toys.run(beside_backward, 2, assignment, crossing))
                for name, looks in found.items() for line in waits_for_the_bus(rank, name, looks, crossing)]
        if not told:
            break
    assert not told, told[0]


def waits_for_the_bus(rank, name, looks, crossing):
    """What is wrong with what backward saw of the bus, if anything."""
    left = looks[-1][0]
    if left < DEEP // 2:
        yield (f"{name}: when backward came to the last of {DEEP} layers, {left} gradient shards of rank {rank} had "
               f"left for the host. {DEEP - 1} buckets were complete by then: each leaves as soon as it is reduced")
    after = [at_work for sent, at_work in looks if sent]
    if sum(after) < len(after) / 2:
        yield (f"{name}: whenever backward went on after a gradient shard of rank {rank} had left, the bus was idle "
               f"({len(after) - sum(after)} of {len(after)} times), though a shard takes {1000 * crossing:.0f} ms to "
               "cross here: who waits until it is there hides nothing")


# ---------------------------------------------------------------------------------- step 3: parameters return in 16 bit


def steps_of(assignment):
    """{stage: what crossed for the third of three steps of AdamW, in step() and until the host was asked something
    else; bytes on this rank after it; how many parameter shards lie in a buffer of the bus}"""
    found, rank = {}, dist.get_rank()
    for name in ("Offloaded3",):
        before = checks.live_bytes()
        zero = blocks_of(getattr(assignment, name), optimizer=optim.AdamW)
        spy = Spy(zero)
        for step in range(3):
            zero.zero_grad()
            zero.model(*wide(rank, step)).backward()
            spy.take()
            zero.step()
        zero.host.ask("memory")  # what step() has not waited for comes before the answer
        borrowed = sum(bucket.parameter_shard.untyped_storage().data_ptr() in spy.buffers for bucket in zero.buckets)
        held = checks.live_bytes(until=before + most_held(name), looks=10) - before
        found[name] = spy.take(), held, borrowed
        zero.host.end()
        del zero, spy
    return found


@pytest.mark.step(3, points=5, stuck=WAITS)
def test_parameters_cross_as_shards_in_16_bit(assignment):
    for rank, found in enumerate(once(steps_of, 2, assignment)):
        events, held, borrowed = found["Offloaded3"]
        assert not borrowed, (
            f"Offloaded3: after step() {borrowed} of {DEEP} parameter shards of rank {rank} are what was received: "
            "parameter_shard lies in the bus's buffer: copy into it"
        )
        told = f"Offloaded3, a model of {in_words(2 * PSI)} in bf16 on 2 ranks: for a step() rank {rank}"
        back = [event for event in events if event[0] == "back"]
        sent = [event for event in events if event[0] == "sent"]
        assert len(back) == DEEP, f"{told} got {len(back)} shards of parameters back, and it has {DEEP} buckets"
        size = sum(getattr(torch, dtype).itemsize * numel for _, _, _, dtype, numel in back)
        assert size == PSI, (
            f"{told} got {in_words(size)} back over the bus, and {in_words(PSI)} are right: 2Ψ/N, its shards in 16 "
            "bit. Rounding belongs to the host"
        )
        assert not sent, (
            f"{told} sent {len(sent)} tensors to the host ({', '.join(sorted({event[1] for event in sent}))}), and "
            "gradients were there: nothing was edited, so nothing has to go back. Does bucket.away know() what came?"
        )
        assert held <= most_held("Offloaded3"), (
            f"after three steps of AdamW rank {rank} holds {in_words(held)}, and {in_words(most_held('Offloaded3'))} "
            "are enough for its parameters and the bus: what else of the update stays here?"
        )


def small():
    return toys.Transformer(blocks=2)


ADAM = dict(make=small, options=dict(lr=1e-2, weight_decay=0.1), steps=2)
COURSE, HALVES, SCALES, CROWDED, SLOW = (
    "twelve steps in fp32, drawn by lot", "bf16, three micro-batches, and a learning rate that falls",
    "fp16, a loss scale, and clipping", "float64, and buffers of the bus that are filled again at once", "a slow bus",
)
LEFT_OUT = "layers that are left out in turn"
RECIPES = {
    HALVES: toys.Recipe(**ADAM | {"optimizer": checks.Warm}, groups=checks.matrices_decay, dtype=torch.bfloat16,
                        accumulate=MICROS, no_sync=False, schedule=checks.AllFall),
    SCALES: toys.Recipe(**ADAM, dtype=torch.float16, scale=2.0**10, clip=0.5),
    CROWDED: toys.Recipe(**ADAM, dtype=torch.float64),
    SLOW: toys.Recipe(**ADAM, dtype=torch.bfloat16),
    LEFT_OUT: checks.RECIPES["another order in each step"],
}


TO_LOOK_AT = {
    COURSE: "Does self.gradient_scale, a number or a tensor, go along with the update, also where it is 0? Do all "
            "micro-batches count, and what was edited, and the options of now, of which lr falls with each step?",
    HALVES: "Does each update take the options of now along, options_of(self.optimizer)? Do all micro-batches count, "
            "once?",
    SCALES: "Does self.gradient_scale go along, in which are 1 / loss scale and what clipping has made?",
    CROWDED: "Is a number of 64 bits rounded to 32 somewhere?",
    SLOW: "Does every parcel get waited for, however late it comes?",
    LEFT_OUT: "Is a shard sent whose gradient is zero, too? The host still has that of the step before.",
}


class Spare(torch.autograd.Function):
    """The loss as it is; the spare parameter's gradient does not depend on it, and one element can be infinite. Where
    such a gradient was used that element is NaN, and nobody looks at it."""

    @staticmethod
    def forward(ctx, loss, spare, infinite):
        ctx.spare, ctx.infinite = torch.full_like(spare, 0.01), infinite
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        of_spare = ctx.spare * gradient
        if ctx.infinite:
            of_spare[1] = torch.inf
        return gradient, of_spare, None


class Spared(toys.Transformer):
    def __init__(self):
        super().__init__(blocks=2)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, inputs, targets, infinite=False):
        return Spare.apply(super().forward(inputs, targets), self.spare, infinite)


EDIT, LATE_EDIT, SKIP, INFINITE, DROP = "edit", "late edit", "skip", "infinite", "drop"
TOLD = {  # what is done in such a step
    "": "nothing besides",
    "scale": "gradient_scale is {}",
    "tensor": "gradient_scale is a tensor of {}",
    "clip": "clipped",
    EDIT: "all parameters were edited before forward",
    LATE_EDIT: "all parameters were edited between backward and step()",
    SKIP: "a gradient of rank {} alone was infinite, so a loss scaler skipped it",
    INFINITE: "a gradient of rank {} alone was infinite and it was clipped, so gradient_scale is a tensor of 0",
    DROP: "zero_grad() came without step()",
}


def course(world_size):
    """Twelve steps, drawn by lot: what each is, with what, how many micro-batches it has, and whether it reduces each
    of them."""
    lot = random.Random(toys.seed(0, 13 + world_size))
    kinds = [("scale", lot.choice((0, 0.0))), ("tensor", 0.0), ("scale", lot.uniform(0.1, 0.9)),
             ("tensor", lot.uniform(0.1, 0.9)), ("clip", 0.5), (EDIT, None), (LATE_EDIT, None),
             (SKIP, lot.randrange(world_size)), (INFINITE, lot.randrange(world_size)), (DROP, None)]
    lot.shuffle(kinds)
    micros = [1, 2, 3, 3] * (MANY // 4)
    lot.shuffle(micros)
    return tuple((kind, value, many, lot.random() < 0.5)
                 for (kind, value), many in zip([("", None), *kinds, ("", None)], micros, strict=True))


def in_a_course(turns, number):
    kind, value, micros, syncs = turns[number - 1]
    return (f"Step {number}: {micros} micro-batch{'es' * (micros > 1)}"
            f"{', without no_sync()' * (syncs and micros > 1)}; {TOLD[kind].format(value)}.")


def if_not_alike(zero):
    """This rank's parameters, but for the spare one, if some rank has others."""
    mine = torch.cat([param.detach().flatten() for name, param in zero.model.named_parameters() if name != "spare"])
    first = mine.clone()
    dist.broadcast(first, 0)
    differs = torch.tensor(float(not torch.equal(first, mine)))
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    return [mine] if differs else None


def edited(zero, whole):
    """Each parameter becomes another one."""
    with zero.gather_parameters() if whole else contextlib.nullcontext(), torch.no_grad():
        for param in zero.model.parameters():
            param.mul_(0.9).add_(0.01)


def along(kind, turns, whole, **options):
    """A stage goes along these steps. whole: it must be asked for whole parameters."""
    from zero_minimal.core.loss_scaler import LossScaler

    rank, losses, norms, count = dist.get_rank(), [], [], itertools.count()
    zero = kind(toys.build(Spared, rank), optim.AdamW, bucket_bytes=4096, **ADAM["options"], **options)
    for what, value, micros, syncs in turns:
        if what in (EDIT, LATE_EDIT) and not whole and (parameters := if_not_alike(zero)):
            # a guard would take what step() has not gathered for an edit of one rank
            return toys.Run(losses, norms, parameters)
        if what == EDIT:
            edited(zero, whole)
        scaler, total = LossScaler(4.0) if what == SKIP else None, 0.0
        for micro in range(micros):
            last = micro + 1 == micros
            with contextlib.nullcontext() if last or syncs else zero.no_sync():
                infinite = last and what in (SKIP, INFINITE) and rank == value
                loss = zero.model(*toys.tokens(rank, next(count)), infinite) / micros
                (scaler.scale(loss) if scaler else loss).backward()
            total += loss.item()
        if what == LATE_EDIT:
            edited(zero, whole)
        if what in ("scale", "tensor"):
            zero.gradient_scale = torch.tensor(value) if what == "tensor" else value
        norms.append(zero.clip_grad_norm_(0.5).item() if what in ("clip", INFINITE) else 0.0)
        if scaler:
            scaler.step(zero)
            scaler.update()
        elif what != DROP:
            zero.step()
        zero.zero_grad()
        losses.append(total)
        for group in zero.optimizer.param_groups:
            group["lr"] *= 0.9
    names = [name for name, _ in zero.model.named_parameters()]
    return toys.Run(losses, norms, [param for name, param in zip(names, toys.whole_parameters(zero), strict=True)
                                    if name != "spare"])


def beside_the_stage(assignment, cases, turns=(), **options):
    """{(stage, recipe): losses, norms and parameters of a stage without offload, and of the same offloaded}"""
    import importlib

    found = {}
    for number, name in cases:
        plain = getattr(importlib.import_module(f"zero_minimal.stage{number}"), f"Stage{number}")
        ours = getattr(assignment, f"Offloaded{number}")
        if name == COURSE:
            runs = [along(plain, turns, number == 3), along(ours, turns, number == 3)]
            found[number, name] = [(run.losses, run.norms, run.parameters) for run in runs]
            continue
        recipe = RECIPES[name]
        offloaded = dataclasses.replace(
            recipe, options=recipe.options | {"bus": 1e6 if name == SLOW else None} | options)
        with buffers_filled_again() if name == CROWDED else contextlib.nullcontext():
            runs = [toys.train(plain, recipe), toys.train(ours, offloaded)]
        found[number, name] = [(run.losses, run.norms, run.parameters) for run in runs]
    return found


WAITED = "each Work of a gather must be waited for before step() returns"


def assert_as_the_stage(results, *names):
    """names: of recipes; all if none is given."""
    for number, name in results[0]:
        if name not in (names or (COURSE, *RECIPES)):
            continue
        turns = course(len(results)) if name == COURSE else ()
        for rank, found in enumerate(results):
            ours = found[number, name][1][2]
            lost = sum(not bool(parameter.isfinite().all()) for parameter in ours)
            assert not lost, (
                f"{name}: rank {rank} of {len(results)}, Offloaded{number}: {lost} of {len(ours)} parameters are NaN "
                "at the end. A buffer of the bus was read after it was given back, or a gather or a reduction before "
                "it had ended" + (f": {WAITED}" if number < 3 else "")
            )
        firsts = [toys.identical(found[number, name][1][2], results[0][number, name][1][2]) for found in results]
        assert all(firsts), (
            f"{name}, Offloaded{number}: after training rank {firsts.index(False)} has other parameters than rank 0: "
            "each rank has updated shards of its own, and all must gather all of them, when they are back"
            + (f"; {WAITED}" if number < 3 else "")
        )
        for rank, found in enumerate(results):
            (losses, norms, right), (our_losses, our_norms, ours) = found[number, name]
            told = f"{name}: rank {rank} of {len(results)}, Offloaded{number} beside Stage{number}"
            if toys.identical(ours, right):
                continue
            step = next((step for step, (one, other) in enumerate(zip(our_losses, losses, strict=True), 1)
                         if one != other), len(losses) + 1)
            moved = [i for i, (one, other) in enumerate(zip(our_norms, norms, strict=True), 1) if one != other]
            words = (f". The norm that clip_grad_norm_ returned is {our_norms[moved[0] - 1]:.4g} in step {moved[0]}, "
                     f"and {norms[moved[0] - 1]:.4g} is right" if moved and moved[0] < step else "")
            words += "".join(f". {in_a_course(turns, before)}"[:-1] for before in (step - 2, step - 1)
                             if 0 < before <= len(turns))
            pytest.fail(
                f"{told}: other parameters, off by {toys.distance(ours, right):.2g}; the loss is another one from step "
                f"{step} on{words}. Offload moves where a number is kept, and changes no bit of it. {TO_LOOK_AT[name]} "
                "And is each buffer of the bus given back when it was read, and not before?",
                pytrace=False)


STAGE_3 = tuple((3, name) for name in (COURSE, HALVES, SCALES, CROWDED, LEFT_OUT))


@pytest.mark.thorough
@pytest.mark.step(3, points=6, stuck=WAITS, raised="parcels come back in the order of self.in_turn()")
def test_stage_3_trains_as_without_offload(assignment):
    assert_as_the_stage(once(beside_the_stage, 2, assignment, STAGE_3, course(2)), COURSE, HALVES, SCALES, LEFT_OUT)


def given_back(assignment):
    """How many parcels came after a step of Offloaded3, and how many were given back, when a forward has read all."""
    zero, rank, counts = blocks_of(assignment.Offloaded3), dist.get_rank(), {"receive": 0, "emptied": 0}
    zero.model(*wide(rank, 0)).backward()
    for name in counts:
        def counted(*given, name=name, call=getattr(zero.host.bus, name)):
            counts[name] += 1
            return call(*given)

        setattr(zero.host.bus, name, counted)
    zero.step()
    zero.zero_grad()
    zero.model(*wide(rank, 1))
    seen = dict(counts)
    zero.host.end()
    return seen["receive"], seen["emptied"]


@pytest.mark.step(3, points=3, stuck=WAITS)
def test_a_buffer_is_read_before_it_is_given_back(assignment):
    assert_as_the_stage(once(beside_the_stage, 2, assignment, STAGE_3, course(2)), CROWDED)
    for rank, (came, given) in enumerate(toys.run(given_back, 2, assignment)):
        assert given == came, (
            f"in a step of Offloaded3, and in the forward after it, {came} parcels came to rank {rank}. All of them "
            f"were read, and {given} were given back: the host waits for each of its buffers. Give it back before the "
            "yield")


def told_of_a_step(assignment):
    """What a scheduler of torch warned of after a step; and whether a backward of a graph from before it, after
    zero_grad(), was refused."""
    rank, refused = dist.get_rank(), False
    zero = assignment.Offloaded3(toys.build(small, rank), optim.SGD, lr=0.1)
    scheduler = optim.lr_scheduler.LambdaLR(zero.optimizer, lambda step: 1.0)
    old = zero.model(*toys.tokens(rank, 0))
    zero.model(*toys.tokens(rank, 0)).backward()
    zero.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    zero.zero_grad()
    try:
        old.backward()
    except Exception:
        refused = True
    zero.host.end()
    return [str(warning.message).split(". ")[0] for warning in caught], refused


@pytest.mark.step(3, points=2, stuck=WAITS)
def test_who_minds_the_update_is_told(assignment):
    for rank, (warned, refused) in enumerate(once(told_of_a_step, 2, assignment)):
        assert not warned, (
            f"forward, backward, step(), scheduler.step(), and torch's scheduler warned on rank {rank}: {warned[0]}. "
            "It asks zero.optimizer._opt_called, which step() must set: nobody calls the optimizer's own step() here"
        )
        assert refused, (
            f"forward, step(), zero_grad(), and then backward of that forward: rank {rank} let it pass, with "
            "parameters that are not those of the forward any more. Torch refuses it, and autograd must be told of "
            'each bucket that is back: seams.tell("update_ends", bucket)'
        )


LARGE = 640


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(LARGE, LARGE, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x.float().square().mean()


def trained_large(assignment):
    rank = dist.get_rank()
    zero = assignment.Offloaded3(toys.build(Large, rank, torch.bfloat16), optim.AdamW, lr=1e-3)
    for step in range(3):
        zero.zero_grad()
        x, _ = toys.numbers(rank, step, LARGE, 1, batch=2, dtype=torch.bfloat16)
        zero.model(x).backward()
        zero.step()
    return zero.host.ask("memory")[0]


@pytest.mark.step(3, points=4, stuck=WAITS)
def test_the_kernel_counts_what_left(assignment):
    results, accounts = toys.run_counted(trained_large, 2, assignment)
    elements = 8 * LARGE * LARGE
    away = 14 * elements // 2
    for rank, kept_there in enumerate(results):
        assert kept_there == away, (
            f"the host of rank {rank} keeps {in_words(kept_there)}, and {in_words(away)} are right: masters, momentum, "
            "variance and gradients of its shards"
        )
    for rank, account in enumerate(accounts):
        if account.held is None:
            continue
        most = 2 * elements / 2 + 16 * 2 * LARGE * LARGE + 4e6
        assert account.held <= most, (
            f"a model of {in_words(2 * elements)} on 2 ranks: the process of rank {rank} grew by "
            f"{in_words(account.held)}, as the kernel counts, and {in_words(most)} are enough where masters, momentum "
            "and variance live in the host process"
        )
        assert account.host >= 0.9 * away, (
            f"the host process of rank {rank} grew by {in_words(account.host)}, as the kernel counts, and what it "
            f"should keep are {in_words(away)}"
        )


# ---------------------------------------------------------- step 4: gather what is back, while the rest is on its way


STAGES_1_AND_2 = {2: ((1, HALVES), (2, COURSE), (2, SCALES), (2, SLOW)), 3: ((1, COURSE), (2, HALVES))}


@pytest.mark.step(4, points=7, stuck=f"{WAITED}. All ranks gather all buckets, in the same order. And {WAITS}")
@pytest.mark.parametrize("world_size", (2, 3))
def test_stages_1_and_2_train_as_without_offload(assignment, world_size):
    assert_as_the_stage(once(beside_the_stage, world_size, assignment, STAGES_1_AND_2[world_size], course(world_size)),
                        COURSE, HALVES, SCALES, SLOW)


def gathered(assignment):
    """{stage: at each parcel that came back in step(), how many gathers were under way; all gathers; how many of them
    nobody had waited for at the end}"""
    found, rank = {}, dist.get_rank()
    for name in STAGES[:2]:
        zero, watch, under_way = blocks_of(getattr(assignment, name)), checks.Watch(), []

        def heard(kind, watch=watch, under_way=under_way):
            if kind == "back":
                under_way.append(now(watch))

        Spy(zero, heard)
        zero.model(*wide(rank, 0)).backward()
        with watch:
            zero.step()
        starts = sum(event.kind == "start" and event.name == "all_gather" for event in watch.events)
        found[name] = under_way, starts, now(watch)
        zero.host.end()
    return found


def now(watch):
    kinds = [event.kind for event in watch.events if event.name == "all_gather"]
    return kinds.count("start") - kinds.count("wait")


@pytest.mark.step(4, points=5, stuck=WAITS)
def test_a_bucket_is_gathered_while_the_next_crosses(assignment):
    for rank, found in enumerate(toys.run(gathered, 2, assignment)):
        for name, (under_way, starts, left) in found.items():
            assert starts == DEEP, (
                f"{name}: in step() rank {rank} called collectives.all_gather {starts} times, and it has {DEEP} buckets"
            )
            assert left == 0, (
                f"{name}: when step() returned on rank {rank}, {left} of {DEEP} gathers were still on their way: "
                f"whoever uses the parameters next may read old ones. {WAITED.capitalize()}"
            )
            alone = sum(number == 0 for number in under_way[1:])
            assert alone <= 1, (
                f"{name}: of {DEEP} shards that came back over the bus to rank {rank}, {alone + 1} crossed while no "
                "gather was under way: start to gather a bucket as soon as it is back, and wait for it later. (Does "
                "_returned() yield each bucket before it waits for the next?)"
            )


def after_a_step(assignment):
    """Of batch norm: the running mean before and after a step, and whether a second backward was refused. Of an edit:
    how far the next step of SGD with lr 0, in eval() mode, moved each parameter. And of how many of all
    buckets step() had told who listens when the first came back."""
    from zero_minimal.core import seams

    rank, found = dist.get_rank(), []
    for name in STAGES[:2]:
        zero = getattr(assignment, name)(toys.build(Normed, rank), optim.SGD, lr=0.0, bucket_bytes=64)
        weight, means, refused = zero.model.layers[0].weight, [zero.model.layers[1].running_mean.clone()], False
        zero.model(*toys.numbers(rank, 0)).backward()
        zero.model.eval()
        told, then = set(), []
        Spy(zero, lambda kind, told=told, then=then: kind == "back" and then.append(len(told)))
        with seams.heard_by("update_begins", told.add):
            zero.step()
        buckets = len(zero.buckets)
        telling = min(then[-buckets:], default=0), buckets
        zero.model.train()
        means.append(zero.model.layers[1].running_mean.clone())
        try:
            zero.model(*toys.numbers(rank, 1)).backward()
        except Exception:
            refused = True
        zero.zero_grad()
        zero.model.eval()(*toys.numbers(rank, 2)).backward()
        with torch.no_grad():
            for param in zero.model.parameters():
                param += 1.0
        edited, whole = weight.detach().clone(), [param.detach().clone() for param in zero.model.parameters()]
        zero.step()
        moved = {name: (param.detach() - value).abs().max().item()
                 for (name, param), value in zip(zero.model.named_parameters(), whole, strict=True)}
        zero.zero_grad()
        zero.optimizer.param_groups[0]["lr"] = 1.0
        if rank == 0:  # the other one has run out of batches
            zero.model(*toys.numbers(rank, 3)).backward()
        zero.step()
        alone = (weight.detach() - edited).abs().max().item()
        found.append((means, refused, moved, alone, telling))
        zero.host.end()
    return found


def step_in_a_group(assignment):
    """Batch norm's running mean after a step of ranks 0 and 2."""
    group, rank = dist.new_group([0, 2]), dist.get_rank()
    if rank == 1:
        return None
    zero = assignment.Offloaded1(toys.build(Normed, rank), optim.SGD, lr=0.1, group=group)
    zero.model(*toys.numbers(rank, 0)).backward()
    zero.step()
    zero.host.end()
    return zero.model.layers[1].running_mean


@pytest.mark.step(4, points=2, stuck=WAITS)
def test_statistics_are_alike_and_a_late_backward_is_refused(assignment):
    results = once(after_a_step, 2, assignment)
    for rank, of_rank in enumerate(results):
        for name, ((_, after), refused, _, alone, (told, buckets)), ((_, first), *_) in zip(
                STAGES, of_rank, results[0], strict=False):
            assert torch.equal(after, first), (
                f"{name}: after step() batch norm's running mean is {after[0]:.4g}, … on rank {rank} and "
                f"{first[0]:.4g}, … on rank 0: replicas.broadcast_statistics gives all rank 0's"
            )
            assert refused, (
                f"{name}: backward, step(), backward without zero_grad(): rank {rank} let it pass. It must be an "
                f"error: "
                "set self.reducer.needs_zero_grad in step()"
            )
            assert alone > 0, (
                f"{name}: rank 0 alone ran a backward before step(), and step() moved nothing on rank {rank}. Who has "
                "no gradient sends zeros: were all buckets handed over before the hosts update?"
            )
            assert told == buckets, (
                f"{name}: when the first of {buckets} buckets came back to rank {rank}, step() had told of {told} that "
                'they change now: seams.tell("update_begins", bucket), for each, before the host is asked. If a saved '
                "state is being written, what listens there waits for it: else that would be half old, half new"
            )
    first, _, second = toys.run(step_in_a_group, 3, assignment)
    assert torch.equal(first, second), (
        "in a group of ranks 0 and 2 batch norm's running mean differs after step(): replicas.broadcast_statistics "
        "gives rank 0's to the group that it is given")


@pytest.mark.step(4, points=1, stuck=WAITS)
def test_an_edit_goes_along(assignment):
    for rank, of_rank in enumerate(once(after_a_step, 2, assignment)):
        for name, (_, _, moved, *_) in zip(STAGES, of_rank, strict=False):
            lost = [param for param, far in moved.items() if not far < 1e-6]
            assert not lost, (
                f"{name}: 1 was added to all {len(moved)} parameters by hand on all ranks, while the model was in "
                f"eval() mode, and step() of SGD with lr 0 moved {', '.join(lost)} by {max(moved.values()):.2g} on "
                f"rank {rank}: the host's master did not know of the edit (precision.keep_changes), and its old value "
                "came back. Are edits looked for in each step, and in each bucket?"
            )


# ----------------------------------------------------------------------------- step 5: a disk: read ahead, write behind

PAUSE = 0.02  # seconds that the file takes for each stretch, and the caller too
HEAD, BODY = 16, 48  # bytes of a stretch that stay as they are, and that change
SPARE = 32  # bytes by which a buffer is larger: it has room for the largest stretch, and these are smaller


class SlowFile:
    """In memory. What is read is there at the end, and what is written is taken at the end: who does not wait sees
    it."""

    def __init__(self, size, events, writing, fails=None):
        self.bytes, self.events, self.writing = torch.zeros(size, dtype=torch.uint8), events, writing
        self.fails = fails  # what does, "read" or "write", and from which call on

    def _look(self, kind):
        """Whether this call fails."""
        calls = sum(event[0] == f"{kind} begins" for event in self.events)
        return self.fails is not None and self.fails[0] == kind and calls >= self.fails[1]

    def read(self, begin, into):
        self.events.append(("read begins", begin, into.numel(), into.data_ptr()))
        there = self.bytes[begin : begin + into.numel()].clone()
        time.sleep(PAUSE)
        if self._look("read"):
            into[: into.numel() // 2].copy_(there[: into.numel() // 2])
            raise RuntimeError("the disk tier could not read from its file")
        into.copy_(there)
        self.events.append(("read ends", begin, into.numel(), into.data_ptr()))

    def write(self, begin, tensor):
        self.events.append(("write begins", begin, tensor.numel(), tensor.data_ptr()))
        time.sleep(self.writing)
        if self._look("write"):
            self.bytes[begin : begin + tensor.numel() // 2] = tensor[: tensor.numel() // 2]
            raise RuntimeError("the disk tier could not write to its file")
        self.bytes[begin : begin + tensor.numel()] = tensor
        self.events.append(("write ends", begin, tensor.numel(), tensor.data_ptr()))


STRETCHES = (2, 1, 3, 7, 6)
WRITING = (2 * PAUSE, 2 * PAUSE, 2 * PAUSE, 2 * PAUSE, PAUSE)  # seconds; in the last case all has time enough
PASSES = 2


def through_a_file(assignment):
    """For so many stretches: the file after three passes, each of which adds 1 to what may change; what the caller saw
    in each turn; all events; bytes counted; how many buffers the caller got; where its buffers lie: address, bytes."""
    from zero_minimal.offloading.files import Stretch

    found = []
    for many, writing in zip(STRETCHES, WRITING, strict=True):
        events, size = [], HEAD + BODY
        file, seen = SlowFile(many * size + SPARE, events, writing), []
        file.bytes[: many * size] += torch.arange(many, dtype=torch.uint8).repeat_interleave(size) * 10
        lanes = assignment.ReadAhead(file, size + SPARE)
        lanes.writer.submit = noted(lanes.writer.submit, events)
        stretches = [Stretch(number * size, 1, {}, size, HEAD) for number in range(many)]
        got = set()
        for _ in range(PASSES):
            for number, buffer in enumerate(lanes.through(stretches)):
                events.append(("work begins", number * size, 0, 0))
                seen.append((buffer.memory[0].item(), buffer.memory[size - 1].item()))
                buffer.memory[HEAD:size] += 1
                got.add(buffer.memory.data_ptr())
                time.sleep(1.5 * PAUSE)
                events.append(("work ends", number * size, 0, 0))
        lanes.reader.shutdown()
        lanes.writer.shutdown()  # when all that was begun is done
        places = [(buffer.memory.data_ptr(), buffer.memory.numel()) for buffer in lanes.buffers]
        found.append((file.bytes, seen, events, (lanes.read, lanes.written), len(got), places))
    return found


def through_a_file_that_fails(assignment):
    """Of a call drawn by lot of the first pass, which fails half-way, and so do all after it: what, and which; whether
    through() raised in that pass or the next, and in which turn."""
    from zero_minimal.offloading.files import Stretch

    found, lot, size = [], random.Random(toys.seed(0, 12)), HEAD + BODY
    for kind in ("write", "read"):
        many = lot.choice((4, 5))
        fails, turn, raised = lot.randint(1, many), 0, False
        lanes = assignment.ReadAhead(SlowFile(many * size, [], PAUSE / 4, (kind, fails)), size)
        stretches = [Stretch(number * size, 1, {}, size, HEAD) for number in range(many)]
        for _ in range(PASSES):
            buffers = iter(lanes.through(stretches))
            while not raised:
                try:
                    buffer = next(buffers, None)
                except Exception:
                    raised = True
                if raised or buffer is None:
                    break
                turn += 1
        found.append((kind, many, fails, raised, turn))
        lanes.reader.shutdown()
        lanes.writer.shutdown()
    return found


def noted(submit, events):
    """The same, and each call is among the events."""
    def submits(*args, **options):
        events.append(("write waits", 0, 0, 0))
        return submit(*args, **options)
    return submits


@pytest.mark.step(5, points=4, stuck="a Future's result() waits until it is done: who waits for what nobody has begun "
                  "waits for ever")
def test_changes_are_in_the_file_when_they_are_read_again(assignment):
    [found] = once(through_a_file, 1, assignment)
    for many, (file, seen, events, counted, *_) in zip(STRETCHES, found, strict=True):
        told = f"{many} stretch{'es' * (many > 1)} of a file, gone through {PASSES} times, 1 added each time"
        assert len(seen) == PASSES * many, f"{told}: through() gave the caller {len(seen)} turns, not {PASSES * many}"
        writes = sum(event[0] == "write ends" for event in events)
        assert writes, f"{told}: nothing was written to the file. What the caller changes in a buffer goes back"
        for turn, (head, body) in enumerate(seen):
            number, times = turn % many, turn // many
            assert head == 10 * number, (
                f"{told}: in pass {times + 1} the caller got {head} at the front of stretch {number}, and "
                f"{10 * number} is there: a buffer was handed out before it was read, or filled again too early, or "
                "was written at another place of the file"
            )
            assert body == 10 * number + times, (
                f"{told}: in pass {times + 1} stretch {number} held {body - 10 * number} of {times} additions: "
                + ("it was read while what was changed the last time was still on its way to the file, or was never "
                   "written" if body < 10 * number + times else "a buffer still held another turn's numbers")
            )
        size = HEAD + BODY
        for number in range(many):
            head, body = file[number * size].item(), file[number * size + HEAD].item()
            assert head == 10 * number, (
                f"{told}: byte 0 of stretch {number}, which nobody changes, is {head} in the file, and was "
                f"{10 * number}: writing begins at stretch.start + stretch.changes, and ends with the stretch"
            )
            assert body == 10 * number + PASSES, (
                f"{told}: at the end stretch {number} has {body - 10 * number} of {PASSES} additions in the file. A "
                "buffer was filled again before it was written, or the last one was not written at all"
            )
        right = (PASSES * many * size, PASSES * many * BODY)
        assert tuple(counted) == right, (
            f"{told}: .read and .written have counted {tuple(counted)} bytes, and {right} are right: what an update "
            "does not change (before stretch.changes) is not written again"
        )
    [found] = toys.run(through_a_file_that_fails, 1, assignment)
    for kind, many, fails, raised, turn in found:
        assert raised, (
            f"{many} stretches of a file, gone through {PASSES} times. In the first pass {kind} {fails} failed "
            f"half-way, and so did all after it. through() gave the caller {turn} turns, and raised nothing: the "
            "shards are half old, half new, and nobody knows. It raises what the file raises: result() of a Future "
            "does that. wait(), done() and exception() do not"
        )


@pytest.mark.step(5, points=4)
def test_reading_and_writing_go_on_meanwhile(assignment):
    [found] = once(through_a_file, 1, assignment)
    many, (_, _, events, *_) = STRETCHES[-1], found[-1]
    size = HEAD + BODY
    first = {}
    for place, (kind, begin, *_) in enumerate(events):
        first.setdefault((kind, begin // size), place)
    last = len(events)
    ahead = [first.get(("read begins", number + 1), last) < first["work ends", number] for number in range(many - 1)]
    assert sum(ahead) > len(ahead) / 2, (
        f"of {many - 1} stretches {sum(ahead)} were being read while the caller worked on the one before: begin to "
        "read the next before you give out this one"
    )
    behind = [first["work begins", number + 1] < first.get(("write ends", number), last) for number in range(many - 1)]
    assert sum(behind) > len(behind) / 2, (
        f"{len(behind) - sum(behind)} of {many - 1} stretches were written to the end before the caller got the next "
        "one: writing goes on behind, and who needs what is on its way waits for it (_read)"
    )


@pytest.mark.step(5, points=3)
def test_three_buffers_serve_any_number(assignment):
    [found] = once(through_a_file, 1, assignment)
    for many, (_, _, events, _, got, places) in zip(STRETCHES, found, strict=True):
        used = {place for kind, _, _, place in events if kind == "read begins"}
        assert max(len(used), got) <= 3, (
            f"{many} stretches of a file were read into {max(len(used), got)} pieces of memory: three buffers take "
            "turns, however many stretches there are. That is what a budget can be given for"
        )
        under_way = most = 0
        for kind, *_ in events:
            under_way += {"read begins": 1, "work ends": -1}.get(kind, 0)
            most = max(most, under_way)
        assert most <= 2, (
            f"of {many} stretches up to {most} were read, or being read, and not worked on yet: one is worked on, and "
            "one is read ahead. More has no place in the budget"
        )
        written = [(address, size) for kind, _, size, address in events if kind == "write begins"]
        elsewhere = [address for address, size in written
                     if not any(begin <= address and address + size <= begin + all_ for begin, all_ in places)]
        waiting = [sum({"write waits": 1, "write ends": -1}.get(kind, 0) for kind, *_ in events[:place])
                   for place in range(len(events) + 1)]
        assert not elsewhere, (
            f"{many} stretches of a file: {len(elsewhere)} of {len(written)} writes took memory that lies in none of "
            f"the three buffers, and up to {max(waiting)} writes were not over at a time. On a slow disk such copies "
            "pile up without end: write from the buffer itself, and let _read wait for buffer.written"
        )


def with_a_disk(assignment):
    return beside_the_stage(assignment, ((2, HALVES),), disk=tempfile.gettempdir())


@pytest.mark.step(5, points=4, stuck=WAITS, raised="on a disk a shard is in memory for its turn alone: does update() "
                  "go through the shards by self.in_turn()?")
def test_a_host_with_a_disk_trains_as_one_without(assignment):
    assert_as_the_stage(toys.run(with_a_disk, 2, assignment))
