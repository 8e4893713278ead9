"""Ranks that are not in the same collective: an error on all at once says who was where."""

import contextlib
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import by_stage, by_stage_and_world, by_world
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.core import collectives
from zero_minimal.extensions.join import together
from zero_minimal.guards.collective_fingerprint import LENGTH, Mismatch
from zero_minimal.processes import ranks

pytestmark = pytest.mark.thorough


class Blocks(nn.Module):
    """Blocks of one size: only their names can tell them apart."""

    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(count)])

    def forward(self, x, order=None):
        for number in order or range(len(self.layers)):
            x = self.layers[number](x).relu()
        return x.square().mean()


def wrapped(stage):
    rank = dist.get_rank()
    torch.manual_seed(0)
    zero = toys.STAGES[stage](Blocks(), optim.AdamW, lr=1e-2, bucket_bytes=4 * 16 * 17)
    torch.manual_seed(1 + rank)
    return zero, rank


def train(zero, steps=1, micro_batches=1, no_sync=True, order=None):
    for _ in range(steps):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with contextlib.nullcontext() if is_last or not no_sync else zero.no_sync():
                zero.model(torch.randn(4, 16), order).backward()
        zero.step()
        zero.zero_grad()


def uneven_batches(stage):
    zero, rank = wrapped(stage)
    train(zero, steps=2 if rank else 4)


def uneven_micro_batches(stage):
    zero, rank = wrapped(stage)
    train(zero, steps=3, micro_batches=1 + (rank == 0), no_sync=False)


def no_sync_on_one_rank(stage):
    zero, rank = wrapped(stage)
    train(zero, steps=3, micro_batches=2, no_sync=rank == 0)


def evaluation_on_one_rank(stage):
    zero, rank = wrapped(stage)
    train(zero)
    if rank == 1:
        with torch.no_grad():
            zero.model(torch.randn(4, 16))
    train(zero, steps=2)


def another_order(stage):
    zero, rank = wrapped(stage)
    train(zero, steps=3, order=[0, 1, 2] if rank == 0 else [1, 0, 2])


def error_of(function, world_size, *args):
    """What a reader of the failed run is told; and it came quickly."""
    start = time.monotonic()
    with pytest.raises(ranks.RankError) as caught:
        toys.run(function, world_size, *args, timeout=60)
    assert time.monotonic() - start < 20, "it waited for a time limit"
    return str(caught.value)


@by_stage_and_world
def test_an_uneven_number_of_batches(world_size, stage):
    words = error_of(uneven_batches, world_size, stage)
    assert "has finished, and rank 0 waits for it in" in words and f"(join.{together.__name__} stops" in words


# at stages 0 and 1 several backward passes in one step are one pass, reduced several times
@by_stage_and_world
def test_uneven_micro_batches(world_size, stage):
    words = error_of(uneven_micro_batches, world_size, stage)
    assert "the ranks are not in the same collective" in words or "has finished" in words
    assert ("backward 2 of step 1" if stage < 3 else "forward of step 1") in words


@by_world
@pytest.mark.parametrize("stage", (0, 1))  # the others reduce under no_sync too
def test_no_sync_on_one_rank(world_size, stage):
    assert "backward 2 of step 1" in error_of(no_sync_on_one_rank, world_size, stage)


@by_world
def test_evaluation_on_one_rank(world_size):
    words = error_of(evaluation_on_one_rank, world_size, 3)
    assert "evaluation, step 2" in words and "forward of step 2" in words


@by_world
def test_units_in_another_order(world_size):
    words = error_of(another_order, world_size, 3)
    assert "layers.0" in words and "layers.1" in words


@by_stage
def test_what_is_right_is_left_alone(stage):
    def right():
        zero, rank = wrapped(stage)
        train(zero, steps=2, micro_batches=2)
        if stage < 3 and rank:
            with torch.no_grad():
                zero.model(torch.randn(4, 16))
        with zero.gather_parameters():
            if rank == 0:
                zero.model(torch.randn(4, 16))
        train(zero, steps=2)

    toys.run(right, 3)


def plain_mismatch(kind):
    """Collectives by themselves."""
    rank, tensor = dist.get_rank(), torch.ones(4)
    if kind == "size":
        collectives.all_reduce(torch.ones(8 if rank else 4))
    elif kind == "dtype":
        collectives.all_reduce(torch.ones(4 if rank else 8, dtype=torch.float32 if rank else torch.bfloat16))
    elif kind == "kind":
        collectives.broadcast(tensor) if rank else collectives.all_reduce(tensor)
    elif kind == "asynchronous":
        pending = [collectives.all_reduce(torch.ones(size), async_op=True) for size in ((4, 8) if rank else (8, 4))]
        for each in pending:
            each.wait()


@by_world
@pytest.mark.parametrize("kind", ("size", "dtype", "kind", "asynchronous"))
def test_collectives_by_themselves(kind, world_size):
    assert "the ranks are not in the same collective" in error_of(plain_mismatch, world_size, kind)


def one_comes_late():
    """Ranks 0 and 1 disagree and go on with other things, as in a notebook; the last one comes when all is over."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_late = rank == world_size - 1
    if is_late:
        time.sleep(0.5)
    try:
        collectives.all_gather(torch.empty(4 * world_size), torch.ones(4), of=f"layers.{min(rank, 1)}")
    except Mismatch as error:
        words = str(error)
    if not is_late:
        time.sleep(2)  # the end of a process would be news too
    return words


@pytest.mark.parametrize("world_size", (3, 4))
def test_who_comes_late_hears_it_too(world_size):
    for words in toys.run(one_comes_late, world_size, timeout=60, fresh=True):
        assert "layers.0" in words and "layers.1" in words


def another_one_is_waited_for():
    """The ranks disagree in the first of two collectives. Rank 0 waits for it, and leaves; the others wait for the
    second one, for which rank 0 never comes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, part = torch.empty(4 * world_size), torch.ones(4)
    pending = [collectives.all_gather(whole, part, of=f"layers.{min(rank, 1)}", async_op=True)]
    if rank:
        pending.append(collectives.all_gather(torch.empty(4 * world_size), part, of="layers.2", async_op=True))
    try:
        pending[-1].wait()
    except Mismatch as error:
        words = str(error)
    time.sleep(1)
    return words


@by_world
def test_an_earlier_one_is_looked_at_first(world_size):
    for words in toys.run(another_one_is_waited_for, world_size, timeout=60, fresh=True):
        assert "layers.0" in words and "layers.1" in words


class Order(TorchDispatchMode):
    """Collects what a rank starts, and the bytes of it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            (tensor,) = args[0]
            self.seen.append((function.__name__.split(".")[0].strip("_"), tensor.nbytes))
        return function(*args, **kwargs or {})


def order_of_messages():
    rank, whole = dist.get_rank(), torch.arange(12.0)
    part, order = torch.empty(6), Order()
    with order:
        pending = collectives.reduce_scatter(part, whole, op="sum", async_op=True)
    pending.wait()
    assert torch.equal(part, 2 * whole.view(2, -1)[rank])
    return order.seen


def test_receives_are_posted_first_and_notes_go_last():
    """A message whose receive is not posted yet waits on its way; and no note stands in the way of data."""
    for seen in toys.run(order_of_messages, 2):
        assert seen == [("recv", LENGTH), ("recv", 24), ("send", 24), ("send", LENGTH)]


def train_on_uneven_data():
    zero, rank = wrapped(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = 0
        for x in together([torch.randn(4, 16)] * (3 + 2 * rank)):
            zero.model(x).backward()
            zero.step()
            zero.zero_grad()
            count += 1
    return count, [str(warning.message) for warning in caught]


def test_uneven_data_can_be_trained_on_together():
    assert toys.run(train_on_uneven_data, 3) == [
        (3, []), *((3, [f"rank {rank} stops after 3 batches with others unread, since another rank has none left"])
                   for rank in (1, 2)),
    ]
