"""Lesson 1's assignment, data parallelism, in steps: what is computed, sent and when, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import collections
import contextlib
import functools
import gc
import time

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from torch import nn, optim
from toys import Recipe

from zero_minimal.core import seams

pytestmark = pytest.mark.usefixtures("one_thread")

worlds = pytest.mark.parametrize("world_size", (2, 3))


@pytest.fixture
def stage_class(assignment):
    """The class under test; stage_class.Naive is the naive way of the same file."""
    return assignment


# ---------------------------------------------------------------------------------------------------------- the models

LAYERS, WIDTH = 12, 40
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes, also of a bucket where this model is used


def wide():
    return toys.MLP(*[WIDTH] * (LAYERS + 1))


def wide_numbers(rank, step):
    return toys.numbers(rank, step, WIDTH, WIDTH, batch=2)


class Normed(nn.Module):
    """A batch norm, whose buffers differ from rank to rank before a stage has it; a frozen parameter; and a buffer that
    is in no state_dict()."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        nn.init.normal_(self.norm.running_mean)
        self.norm.num_batches_tracked.random_(1000)  # an integer
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.last.register_buffer("shift", torch.randn(3), persistent=False)

    def forward(self, x, y):
        return (self.last(self.norm(self.first(x))) + self.frozen + self.last.shift - y).square().mean()


class Crossroads(nn.Module):
    """Branches of one size, through which each rank goes in another order; rank 1 leaves two out."""

    def __init__(self, branches=6):
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.branches = nn.ModuleList(nn.Linear(11, 11) for _ in range(branches))
        self.last = nn.Linear(11, 3)

    def forward(self, x, y, turn):
        order = [*range(len(self.branches))]
        order = order[2 * turn :] + order[: 2 * turn]
        x = self.first(x)
        for place in order:
            x = x if turn == 1 and place < 2 else torch.tanh(self.branches[place](x))
        return (self.last(x) - y).square().mean()


ROAD = 4 * (11 * 11 + 11)


def crossroads_batch(rank, step):
    return *toys.numbers(rank, step), rank


class Caught(nn.Module):
    """Deep, and awkward at its end, where backward begins: a weight that is used twice, and a frozen bias.

    frozen: the first weight is, too.
    """

    def __init__(self, frozen=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[-2].weight
        self.layers[-2].bias.requires_grad_(False)
        self.layers[0].weight.requires_grad_(not frozen)

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean()


class Belated(nn.Module):
    """Its last layer, the first that gets a gradient, has a bias that is used at the very start, too: so the gradient
    of that comes last, and its bucket is complete last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, y):
        x = x + self.layers[-1].bias
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean()


# ------------------------------------------------------------------------------------- what one process would compute


def own_gradients(ranks, make, batch, steps=(0,)):
    """For each of the ranks {name: its gradient of these batches, summed, in fp64}. A missing one is zero."""
    found = []
    for rank in ranks:
        whole = toys.build(make, ranks[0], torch.float64)
        for step in steps:
            whole(*(part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part
                    for part in batch(rank, step))).backward()
        found.append({name: torch.zeros_like(param) if param.grad is None else param.grad
                      for name, param in whole.named_parameters() if param.requires_grad})
    return found


def assert_mean(ranks, found, make, batch, steps=(0,), what="the mean of the ranks' gradients", hint=""):
    """What each of the ranks found, [rank] {name: gradient}, is the mean."""
    own = own_gradients(ranks, make, batch, steps)
    count = len(own)
    mean = {name: sum(gradients[name] for gradients in own) / count for name in own[0]}
    bound = 1e-5 * max(gradient.abs().max() for gradient in mean.values())

    def alike(one, other, times=1.0):
        return all(bool(((one[name].double() - times * other[name]).abs() <= bound * max(1.0, times)).all())
                   for name in mean)

    for rank, gradients in zip(ranks, found, strict=True):
        missing = [name for name in mean if gradients.get(name) is None]
        assert not missing, (
            f"on rank {rank} .grad of {in_a_list(missing)} is None after backward and reduced_gradients(), and {what} "
            f"must be there: a parameter without a gradient counts as one whose gradient is zero{hint}"
        )
        odd = [name for name in mean if not gradients[name].isfinite().all()]
        assert not odd, (
            f"on rank {rank} the gradient of {in_a_list(odd)} holds NaN: memory that nobody wrote to, or that was read "
            f"before its all-reduce had arrived (wait){hint}"
        )
        if alike(gradients, mean):
            continue
        assert not alike(gradients, mean, count), (
            f"rank {rank} holds the sum of the ranks' gradients, not their mean: {count} times too large"
        )
        assert not alike(gradients, mean, 1 / count), (
            f"on rank {rank} the gradients were averaged twice: they are {count} times too small"
        )
        assert not alike(gradients, own[ranks.index(rank)]), (
            f"rank {rank} holds its own gradients: the other ranks' were never added, or the result was not put back "
            f"into .grad{hint}"
        )
        wrong = [name for name in mean if ((gradients[name].double() - mean[name]).abs() > bound).any()]
        pytest.fail(f"rank {rank} has not {what}: {len(wrong)} of {len(mean)} parameters are wrong. "
                    f"{example(wrong[0], gradients, mean, own, ranks, bound)}{hint}")


def in_a_list(names):
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def example(name, gradients, mean, own, ranks, bound):
    """One element that is wrong, and what it looks like."""
    is_wrong = (gradients[name].double() - mean[name]).abs() > bound
    place = tuple(int(index) for index in is_wrong.nonzero()[0])
    here, wanted = gradients[name][place].item(), mean[name][place].item()
    words = f"For example {name}{list(place)} is {here:.4g} and must be {wanted:.4g}"
    if not gradients[name].any():
        return words + f": all of {name} is zero, as if it had left before its gradient came, or not at all"
    for rank, theirs in zip(ranks, own, strict=True):
        if abs(here - theirs[name][place]) <= bound:
            return words + f": that is the gradient of rank {rank} alone"
        if abs(here * len(own) - theirs[name][place]) <= bound:
            return words + f": only rank {rank}'s gradient is in it"
    return words


def gradients(zero):
    """{name: .grad}, reduced, of what is trained."""
    zero.reduced_gradients()
    return {name: None if param.grad is None else param.grad.detach().clone()
            for name, param in zero.model.named_parameters() if param.requires_grad}


def build(stage_class, make, optimizer=optim.SGD, **options):
    options = {"lr": 1.0, "bucket_bytes": LAYER} | options
    return stage_class(toys.build(make, dist.get_rank()), optimizer, **options)


# ------------------------------------------------------------------------------------------------ step 1: the naive way


def naive_start(stage_class):
    """The names of what differs from rank 0's model, for each kind of model; and a batch's gradients."""
    rank, states = dist.get_rank(), []
    for make in (Normed, checks.Awkward):
        states.append(tensors_of(stage_class.Naive(toys.build(make, rank), optim.SGD, lr=1.0).model))
    return states


@pytest.mark.step(1, points=4)
@worlds
def test_all_start_from_rank_0(stage_class, world_size):
    assert_starts(toys.run(naive_start, world_size, stage_class), range(world_size))


def tensors_of(model):
    """{name: tensor} of all that the model has; state_dict() leaves out buffers that are not persistent."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def assert_starts(found, ranks):
    first = ranks[0]
    models = [toys.build(make, first) for make in (Normed, checks.Awkward)]
    wanted = [tensors_of(model) for model in models]
    all_buffers = {name for model in models for name, _ in model.named_buffers()}
    for rank, states in zip(ranks, found, strict=True):
        for state, right in zip(states, wanted, strict=True):
            off = [name for name in right if not torch.equal(state[name], right[name])]
            kind = "parameters and buffers, also those that are not trained"
            if off == ["last.shift"]:
                kind = "also this buffer, which has persistent=False and so is in no state_dict(): see model.buffers()"
            elif off == ["norm.num_batches_tracked"]:
                kind = "also this buffer of whole numbers: everything in model.buffers(), whatever its dtype"
            elif all_buffers.issuperset(off):
                kind = "the buffers too"
            assert not off, (
                f"when Naive is made, rank {rank} has another {in_a_list(off)} than rank {first}: each rank began with "
                f"values of its own, and all must take rank {first}'s, {kind}"
            )


def slanted():
    """Its first weight is a transposed one: the elements of its gradient do not lie in order either."""
    model = Crossroads()
    model.first.weight = nn.Parameter(torch.randn(7, 11).t())
    return model


def naive_backward(stage_class):
    """{name: gradient} of an awkward model. Of another one bytes sent before backward had ended, and in all. {name:
    gradient} of slanted()."""
    rank, transposed = dist.get_rank(), build(stage_class.Naive, slanted)
    transposed.model(*crossroads_batch(rank, 0)).backward()
    zero, large = build(stage_class.Naive, checks.Awkward), build(stage_class.Naive, functools.partial(Caught, True))
    zero.model(*checks.awkward_batch(rank, 0)).backward()
    found = gradients(zero)
    with checks.Calls() as calls:
        large.model(*wide_numbers(rank, 0)).backward()
        early = calls.sent()
        large.reduced_gradients()
    return found, early, calls.sent(), gradients(transposed)


ALL_TAKE_PART = ("one parameter got a gradient on rank 0 alone, and one on no rank at all: every rank must take part "
                 "in every collective all the same, with zeros for what is missing")
NONE_THERE = "a parameter may get no gradient on a rank, and its .grad is None then: it counts as zero"


@pytest.mark.step(1, points=5, stuck=ALL_TAKE_PART, left=ALL_TAKE_PART, raised=NONE_THERE)
@pytest.mark.parametrize("world_size", (2, 3, 1))
def test_afterwards_each_gradient_is_the_mean(stage_class, world_size):
    results = once(naive_backward, world_size, stage_class)
    assert_mean(list(range(world_size)), [found for found, *_ in results], checks.Awkward, checks.awkward_batch)
    assert_mean(list(range(world_size)), [found for *_, found in results], slanted, crossroads_batch,
                hint=". Here a weight is a transposed one, and the elements of its gradient do not lie in order: "
                     "reshape() and contiguous() copy such a tensor, and the copy is averaged. And rank 1 lacks the "
                     "gradients of two branches of one shape: each needs zeros of its own")


@pytest.mark.step(1, points=3, stuck=ALL_TAKE_PART, left=ALL_TAKE_PART, raised=NONE_THERE)
def test_each_gradient_is_sent_once(stage_class):
    model = Caught(frozen=True)
    psi = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    for rank, (_, early, sent, _) in enumerate(once(naive_backward, 3, stage_class)):
        assert early == 0, (
            f"Naive sent {in_words(early)} on rank {rank} before backward had ended: the naive way averages afterwards"
        )
        share = 2 * psi * 2 / 3
        assert 0.98 * share <= sent <= 1.05 * share, (
            f"Naive sent {in_words(sent)} on rank {rank} of 3 to average gradients of {in_words(psi)}, and all-reduces "
            f"of them send 2Ψ(N−1)/N, {in_words(share)}: is each one averaged, once? One weight belongs to two layers "
            "here, and one is frozen: self.params has the first once, and not the second"
        )


def naive_in_a_group(stage_class):
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        return None
    normed, awkward = (build(stage_class.Naive, make, group=group) for make in (Normed, checks.Awkward))
    states = [{name: tensor.clone() for name, tensor in tensors_of(zero.model).items()} for zero in (normed, awkward)]
    awkward.model(*checks.awkward_batch(rank, 0)).backward()
    return states, gradients(awkward)


GROUP = ("here group= is a group of ranks 1 and 2 of three, and rank 0 has no part in it: is group=self.group passed "
         "to every call?")


@pytest.mark.step(1, points=3, stuck=GROUP, left=GROUP, raised=GROUP)
def test_the_naive_way_in_a_group(stage_class):
    _, *found = toys.run(naive_in_a_group, 3, stage_class)
    assert_starts([states for states, _ in found], (1, 2))
    assert_mean([1, 2], [gradients for _, gradients in found], checks.Awkward, checks.awkward_batch, hint=f". {GROUP}")


# ---------------------------------------------------------------------- steps 2 to 4: one backward, watched closely


def watched(stage_class, make, batch, bucket_bytes, steps=(0,), late=0.0):
    """For each of these batches a backward, whose gradients are added to those before: {name: gradient}; what was sent,
    as [bytes, when] a message; when gradients came, as seconds. A rank other than 0 sends each message `late` seconds
    late. New memory comes filled with NaN."""
    torch.use_deterministic_algorithms(True)
    zero, passes = build(stage_class, make, bucket_bytes=bucket_bytes), []
    came = moments(zero.model)
    for step in steps:
        came.clear()
        with checks.Calls(pause=late * dist.get_rank()) as calls:
            zero.model(*batch(dist.get_rank(), step)).backward()
            found = gradients(zero)
        passes.append((found, messages(calls), [*came]))
    return passes


def moments(model):
    """A list that gets the moment at which a gradient comes, in seconds, of each one."""
    came = []
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda gradient: came.append(time.monotonic()))
    return came


def messages(calls):
    """[bytes, when] of each message."""
    sent = [[checks.sent_for(call, dist.get_world_size()), call.at] for call in calls.made]
    return [message for message in sent if message[0] > 0]


def small_buckets(stage_class):
    return watched(stage_class, toys.Transformer, toys.tokens, 4096)[0]


def layer_by_layer(stage_class):
    return watched(stage_class, wide, wide_numbers, LAYER)[0]


@pytest.mark.step(2, points=5)
@worlds
def test_every_gradient_is_the_mean(stage_class, world_size):
    found = [found for found, *_ in once(small_buckets, world_size, stage_class)]
    assert_mean(list(range(world_size)), found, toys.Transformer, toys.tokens, hint=". And is each gradient that is "
                "there put into its bucket (gradient_arrived) before the bucket is handed over?")


@pytest.mark.step(2, points=3)
def test_many_gradients_in_one_message(stage_class):
    model = toys.build(toys.Transformer, 0)
    params, psi = len(list(model.parameters())), sum(param.nbytes for param in model.parameters())
    buckets = -(-psi // 4096)
    for rank, (_, sent, _) in enumerate(once(small_buckets, 2, stage_class)):
        assert len(sent) <= 2 * (buckets + 3), (
            f"rank {rank} sent {len(sent)} messages for {params} gradients, {in_words(psi)} in all. In buckets of 4096 "
            f"bytes they travel as {buckets} all-reduces, of at most two messages each with 2 ranks: put the gradients "
            "of a bucket side by side, and send them as one"
        )


@pytest.mark.step(2, points=3)
@worlds
def test_a_backward_sends_what_an_all_reduce_does(stage_class, world_size):
    model = toys.build(toys.Transformer, 0)
    psi = sum(param.nbytes for param in model.parameters())
    share = 2 * psi * (world_size - 1) / world_size
    padding = 8 * checks.most_padding(model, world_size)
    for rank, (_, messages, _) in enumerate(once(small_buckets, world_size, stage_class)):
        sent = sum(size for size, _ in messages)
        assert 0.98 * share <= sent <= 1.02 * share + padding, (
            f"rank {rank} of {world_size} sent {in_words(sent)} in backward, and an all-reduce of its gradients, "
            f"{in_words(psi)}, sends 2Ψ(N−1)/N = {in_words(share)}: "
            + ("something is not reduced" if sent < share else
               "is a bucket sent more than once, or whole to every rank?")
        )


def awkward(stage_class):
    return watched(stage_class, checks.Awkward, checks.awkward_batch, 100)[0]


def skipping(stage_class):
    return watched(stage_class, checks.Chain, skipping_batch, 100)[0]


def skipping_batch(rank, step):
    """Rank 0 alone uses a block whose weight lies in several buckets."""
    return *toys.numbers(rank, step), 1 if rank else None


@pytest.mark.step(2, points=3, stuck=ALL_TAKE_PART, left=ALL_TAKE_PART, raised=NONE_THERE)
@worlds
def test_a_missing_gradient_is_zero(stage_class, world_size):
    found = [found for found, *_ in once(awkward, world_size, stage_class)]
    assert_mean(list(range(world_size)), found, checks.Awkward, checks.awkward_batch,
                hint=". Here one parameter got its gradient on rank 0 alone, which counts as zero on the others, and "
                     "one on no rank")
    found = [found for found, *_ in toys.run(skipping, world_size, stage_class)]
    assert_mean(list(range(world_size)), found, checks.Chain, skipping_batch,
                hint=". Here rank 0 alone got a gradient of a weight that lies in several buckets. When one of these "
                     "goes, what others have of it must stay")


def again_without_some(stage_class):
    """Gradients of a second batch, in which two ranks lack one that all had in the first. That one's are dropped."""
    rank, zero = dist.get_rank(), build(stage_class, checks.Awkward, bucket_bytes=100)
    zero.model(*toys.numbers(rank, 0)).backward()
    zero.reduced_gradients()
    if hasattr(stage_class, "Reducer"):  # the one that was given: a later step writes zero_grad() there
        zero.zero_grad = zero.model.zero_grad
    zero.zero_grad()
    zero.model(*checks.awkward_batch(rank, 1)).backward()
    return gradients(zero)


@pytest.mark.step(2, points=2, stuck=ALL_TAKE_PART, left=ALL_TAKE_PART, raised=NONE_THERE)
def test_an_old_gradient_is_no_missing_one(stage_class):
    assert_mean([0, 1, 2], toys.run(again_without_some, 3, stage_class), checks.Awkward, checks.awkward_batch, (1,),
                hint=". Here two ranks lack a gradient that all had in the batch before, and it counts as zero: what "
                     "lies in its place since then (bucket.zero_missing)?")


def in_hand(stage_class):
    """Gradients that autograd has told nobody of: another copy of the model has them, and the user puts them here. Then
    those of the first layers alone, and autograd makes the others: a bucket has some of both."""
    (x, y), found = wide_numbers(dist.get_rank(), 0), []
    for half in (False, True):
        zero, copy = build(stage_class, wide, bucket_bytes=5 * LAYER), wide()
        copy.load_state_dict(zero.model.state_dict())
        copy(x, y).backward()
        for param, other in zip(zero.model.parameters(), copy.parameters(), strict=True):
            param.grad = other.grad
        if half:
            first, second = zero.model.layers[:LAYERS], zero.model.layers[LAYERS:]
            for param in second.parameters():
                param.grad = None
            nn.functional.mse_loss(second(first(x).detach()), y).backward()
        found.append(gradients(zero))
    return found


@pytest.mark.step(2, points=1)
def test_gradients_that_were_not_counted_leave_too(stage_class):
    results = once(in_hand, 2, stage_class)
    for half, words in enumerate(("the gradients into .grad, and no hook was called", "some of a bucket's gradients "
                                  "into .grad, and autograd made the others")):
        assert_mean([0, 1], [found[half] for found in results], wide, wide_numbers, hint=f". Here the user has put "
                    f"{words}. In _hand_over_rest the stage is told of each that is in .grad and was not counted")


def stage_in_a_group(stage_class):
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    zero = build(stage_class, wide, group=group)
    zero.model(*wide_numbers(dist.get_rank(), 0)).backward()
    return gradients(zero)


@pytest.mark.step(2, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_backward_in_a_group(stage_class):
    _, *found = toys.run(stage_in_a_group, 3, stage_class)
    assert_mean([1, 2], found, wide, wide_numbers)


def on_fresh_ranks(stage_class):
    found = []
    for way in (stage_class.Naive, stage_class):
        zero = build(way, wide)
        zero.model(*wide_numbers(dist.get_rank(), 0)).backward()
        found.append(gradients(zero))
    return found


FRESH = ("here each rank is a Python of its own, as with torchrun, with another hash seed: what comes out of a set, or "
         "is sorted by hash() or id(), has another order on each rank. Go through lists and dicts")


@pytest.mark.thorough
@pytest.mark.step(2, points=1, stuck=FRESH, left=FRESH, raised=FRESH)
def test_ranks_with_other_hash_seeds_agree(stage_class):
    for name, found in zip(("Naive", "Stage0"), zip(*toys.run(on_fresh_ranks, 2, stage_class, fresh=True), strict=True),
                           strict=True):
        assert_mean([0, 1], found, wide, wide_numbers, hint=f". This is {name}: {FRESH}")


# ------------------------------------------------------------------------------------------- step 3: during backward


def assert_leaves_early(results, hint):
    """Of what is sent an eighth has begun to leave when half of the gradients have come, a third when the last comes.
    (Where all-reduces are in two halves, and many may be under way, the second halves may leave later.)"""
    for rank, (_, messages, came) in enumerate(results):
        total = sum(size for size, _ in messages)
        half, early = (sum(size for size, at in messages if at < moment)
                       for moment in (came[len(came) // 2], max(came)))
        assert early > 0, (
            f"rank {rank} sent nothing before its last gradient had come: {len(messages)} messages, "
            f"{in_words(total)}, waited until backward was over{hint}"
        )
        assert half >= total / 8 and early >= total / 3, (
            f"of {in_words(total)} that rank {rank} sends, {in_words(half)} had begun to leave when half of its "
            f"gradients had come, and {in_words(early)} when the last one came: a bucket leaves as soon as the last of "
            f"its own gradients is there{hint}"
        )


@pytest.mark.step(3, points=8)
def test_reductions_begin_during_backward(stage_class):
    hint = f". The model has {LAYERS} layers, and a bucket holds one"
    assert_leaves_early(once(layer_by_layer, 2, stage_class), hint)


@pytest.mark.step(3, points=6, raised="is .grad there when your hook is called, and is the parameter's bucket still "
                  "there? Its bucket may go when the last of its gradients is in .grad. And what is your hook given: a "
                  "parameter, or (from register_hook) a gradient?")
@worlds
def test_gradients_that_leave_early_are_the_mean(stage_class, world_size):
    results = once(layer_by_layer, world_size, stage_class)
    assert_mean(list(range(world_size)), [found for found, *_ in results], wide, wide_numbers,
                hint=". Did its bucket leave before all its gradients were in .grad, or twice?")
    assert_leaves_early(results, "")


def crossroads(stage_class):
    return watched(stage_class, Crossroads, crossroads_batch, ROAD, (0, 1))


OTHER_ORDER = ("here each rank goes through the branches in another order, so that buckets become complete in another "
               "order on each: all ranks must hand over the same bucket next, also if another one is complete")


@pytest.mark.step(3, points=8, stuck=OTHER_ORDER, left=OTHER_ORDER, raised=OTHER_ORDER)
@worlds
def test_ranks_hand_over_in_one_order(stage_class, world_size):
    results = once(crossroads, world_size, stage_class)
    for number, seen in enumerate(zip(*results, strict=True), 1):
        assert_mean(list(range(world_size)), [found for found, *_ in seen], Crossroads, crossroads_batch, range(number),
                    hint=f", in backward {number}.\n    To look at: {OTHER_ORDER}")
    early = [size for (_, messages, came), _ in results for size, at in messages if at < max(came)]
    assert early, ("no rank sent anything before its last gradient had come, not even the bucket of the last layer, "
                   "which is complete first on all of them")


def belated(stage_class):
    """None from who has written another Reducer: a fixed order is right, too."""
    if not hasattr(stage_class, "Reducer"):
        return None
    return watched(stage_class, Belated, wide_numbers, LAYER, (0, 1))[-1]


def two_that_can_go(stage_class):
    """How many buckets go when the second in order is complete, and then the first."""
    if not hasattr(getattr(stage_class, "Reducer", None), "_gradient"):
        return None
    zero = stage_class(toys.build(wide, 0), optim.SGD, lr=0.1, bucket_bytes=LAYER)
    first, second, *_ = zero.reducer.buckets
    went = []
    zero.bucket_complete = lambda bucket, done: went.append(bucket)
    for param in [*second.params, *first.params]:
        if param.grad is None:  # a parameter may lie in both
            param.grad = torch.ones_like(param)
            zero.reducer._gradient(param)
    return len(went)


@pytest.mark.step(3, points=1, stuck=OTHER_ORDER, left=OTHER_ORDER)
def test_later_passes_go_in_the_order_of_completion(stage_class):
    [went] = toys.run(two_that_can_go, 1, stage_class)
    assert went in (None, 2), (f"the second bucket of the order was complete, and then the first, and {went} of them "
                               "were handed over: all that can go must go, and no other")
    results = once(belated, 2, stage_class)
    if None in results:
        return
    hint = (". This is the second backward. The bucket that is planned first is complete last here: so in the first "
            "pass all wait for it, and later ones go in the order in which rank 0's became complete. Is each bucket in "
            "self._completed, once, when it waits for nothing?")
    assert_mean([0, 1], [found for found, *_ in results], Belated, wide_numbers, (0, 1), hint=hint)
    assert_leaves_early(results, hint)


def caught(stage_class):
    return watched(stage_class, Caught, wide_numbers, LAYER)[0]


@pytest.mark.step(3, points=6)
def test_a_tied_weight_counts_once_and_a_frozen_one_never(stage_class):
    results = once(caught, 2, stage_class)
    hint = (". Here the last two layers share their weight, and one of their biases is frozen: autograd tells of such "
            "a weight once, and of a frozen parameter never")
    assert_mean([0, 1], [found for found, *_ in results], Caught, wide_numbers, hint=hint)
    assert_leaves_early(results, hint)


def without_its_stage(stage_class):
    """What a backward raises when nobody holds the stage of its model any more."""
    zero, batch = build(stage_class, wide), wide_numbers(dist.get_rank(), 0)
    model = zero.model
    model(*batch).backward()
    zero.reduced_gradients()
    del zero
    gc.collect()
    for param in model.parameters():
        param.grad = None
    try:
        model(*batch).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.step(3, points=1)
def test_the_model_outlives_its_stage(stage_class):
    for rank, raised in enumerate(toys.run(without_its_stage, 2, stage_class)):
        assert raised is None, (
            f"the stage was dropped (del zero), and on rank {rank} the next backward of its model raised {raised}. A "
            "hook stays on the model: does yours keep the reducer alive, which has no stage then? See WeakHook"
        )


# ----------------------------------------------------------------------------- step 4: autograd goes on meanwhile

LATE = 0.03  # seconds


def with_a_late_rank(stage_class):
    return watched(stage_class, wide, wide_numbers, LAYER, (0, 1), LATE)


WAITED_FOR = ("every all-reduce that was started must be waited for, before the next one starts or when backward ends: "
              "on gloo its second half is sent in wait()")


def overlapped(results):
    """How many of rank 0's messages had gradients of rank 0 come between their start and the moment at which rank 1
    began to send its own: a rank that waits at once cannot go on before that. And how many there are."""
    (_, ours, came), (_, theirs, _) = results
    pairs = list(zip(ours, theirs, strict=False))
    return sum(any(start < at < other for at in came) for (_, start), (_, other) in pairs), len(pairs)


def assert_overlaps(results, hint=""):
    count, of = overlapped(results)
    assert count > 0, (
        f"rank 1 sends each message {1000 * LATE:.0f} ms late, and rank 0 stood still each time until it came: of {of} "
        "messages none was under way while rank 0 got another gradient. Start the all-reduce of a bucket "
        f"(async_op=True), go back to autograd, and wait later{hint}"
    )
    assert count >= LAYERS / 3, (
        f"rank 1 sends each message {1000 * LATE:.0f} ms late. Of {of} messages {count} "
        f"{'was' if count == 1 else 'were'} under way while rank 0 got another gradient, and about {LAYERS - 1} could "
        "be: one a bucket. On gloo an all-reduce's second half is sent in wait(), behind all that was started before "
        f"it: which buckets have arrived when bucket_complete returns?{hint.removeprefix('.')}"
    )


@pytest.mark.step(4, points=10, stuck=WAITED_FOR, left=WAITED_FOR)
def test_autograd_goes_on_meanwhile(stage_class):
    assert_overlaps([first for first, _ in once(with_a_late_rank, 2, stage_class)])


@pytest.mark.step(4, points=10, stuck=WAITED_FOR, left=WAITED_FOR)
def test_all_has_arrived_when_backward_ends(stage_class):
    results = [second for _, second in once(with_a_late_rank, 2, stage_class)]
    assert_mean([0, 1], [found for found, *_ in results], wide, wide_numbers, (0, 1), "the mean gradients of two "
                "backward passes, added", ". Here rank 1 sends late: was each all-reduce waited for, the last one too, "
                "before its result was read or its bucket changed?")
    assert_overlaps(results, ". This is the second backward, without zero_grad() before it")


# ------------------------------------------------------------------------------------ step 5: accumulation, second step

MICROS = 3


class Halted(BaseException):
    """As SystemExit and GeneratorExit are, and others."""


def accumulated(stage_class):
    """Bytes sent up to the end of each of three micro-batches' backward, and with step(); {name: gradient}. Then both
    without no_sync(), which errors have left before: bytes of each backward. And bytes of a backward under no_sync(),
    after a zero_grad() in there; its gradients, asked for outside. Messages of the first three, and when gradients of
    the last came."""
    rank, found = dist.get_rank(), []
    zero, sent = build(stage_class, wide), []
    came = moments(zero.model)
    with checks.Calls() as calls:
        for micro in range(MICROS):
            came.clear()
            with zero.no_sync() if micro + 1 < MICROS else contextlib.nullcontext():
                zero.model(*wide_numbers(rank, micro)).backward()
            sent.append(calls.sent())
        found.append(gradients(zero))
        left = messages(calls), [*came]
        with zero.no_sync():
            pass
        zero.clip_grad_norm_(1e9)
        zero.step()
        sent.append(calls.sent())
    zero = build(stage_class, wide)
    for error in (ZeroDivisionError, KeyboardInterrupt, Halted):  # the last two are no Exception
        with contextlib.suppress(error), zero.no_sync():
            raise error
    for micro in range(MICROS):
        with checks.Calls() as calls:
            zero.model(*wide_numbers(rank, micro)).backward()
        sent.append(calls.sent())
    found.append(gradients(zero))
    with zero.no_sync():
        zero.zero_grad()
        with checks.Calls() as calls:
            zero.model(*wide_numbers(rank, 0)).backward()
    found.append(gradients(zero))
    return [*sent, calls.sent()], *found, left


@pytest.mark.step(5, points=4)
def test_micro_batches_are_sent_once(stage_class):
    psi = sum(param.nbytes for param in toys.build(wide, 0).parameters())
    share = 2 * psi / 2
    for rank, (sent, *_) in enumerate(once(accumulated, 2, stage_class)):
        *_, quiet, last, total = sent[: MICROS + 1]
        assert quiet == 0, (
            f"under no_sync() rank {rank} sent {in_words(quiet)} in {MICROS - 1} micro-batches: there gradients add "
            "up on each rank, and the last micro-batch sends their sum, once"
        )
        assert sent[-1] == 0, (
            f"under no_sync() there was a zero_grad(), and the backward after it sent {in_words(sent[-1])} on rank "
            f"{rank}: no_sync() ends with its context, and not before"
        )
        assert last >= share / 2, (
            f"rank {rank} sent {in_words(last)} in the backward of the last micro-batch, which is not under "
            f"no_sync(): {in_words(share)} must leave there. What has no_sync() left behind?"
        )
        assert total <= 1.05 * share + 8 * checks.most_padding(wide(), 2), (
            f"for {MICROS} micro-batches, clip_grad_norm_() and step() rank {rank} sent {in_words(total)}, and "
            f"{in_words(share)} are enough: gradients are averaged once (here an empty no_sync() comes after backward)"
        )


@pytest.mark.step(5, points=1)
def test_an_error_ends_no_sync_too(stage_class):
    psi = sum(param.nbytes for param in toys.build(wide, 0).parameters())
    for rank, (sent, *_) in enumerate(once(accumulated, 2, stage_class)):
        after = sent[MICROS + 1]
        assert after >= psi / 2, (
            "an error, Ctrl-C and another BaseException were raised under no_sync(), and caught outside. The next "
            f"backward sent {in_words(after)} on rank {rank}, and {in_words(psi)} must leave there: a context ends "
            "also when an error leaves it, whatever error it is (finally)"
        )


@pytest.mark.step(5, points=2)
def test_micro_batches_add_up(stage_class):
    results = once(accumulated, 2, stage_class)
    for place, words in ((1, "under no_sync()"), (2, "without no_sync()")):
        assert_mean([0, 1], [result[place] for result in results], wide, wide_numbers, steps=range(MICROS),
                    what=f"the ranks' mean of {MICROS} micro-batches' sum, {words}")
    assert_mean([0, 1], [result[3] for result in results], wide, wide_numbers, hint=". Here the only backward ran "
                "under no_sync(). Who asks for the gradients after it, as step() does, gets the mean")
    assert_leaves_early([(None, *result[4]) for result in results], f". It is the last of {MICROS} micro-batches: "
                        "those before it ran under no_sync(), and what it was to count must be there again")


def room_of_a_micro_batch(stage_class):
    """Bytes that live after a backward, and after one under no_sync(), of this stage and its model. None from who has
    written another Reducer."""
    if not hasattr(stage_class, "Reducer"):
        return None
    before = checks.live_bytes()
    zero, batch = build(stage_class, wide), wide_numbers(dist.get_rank(), 0)
    zero.model(*batch).backward()
    zero.reduced_gradients()
    usual = checks.live_bytes() - before
    zero.zero_grad()
    with zero.no_sync():
        zero.model(*batch).backward()
        return usual, checks.live_bytes(until=before + usual, looks=5) - before


@pytest.mark.step(5, points=1)
def test_micro_batches_take_no_room_of_their_own(stage_class):
    psi = sum(param.nbytes for param in toys.build(wide, 0).parameters())
    results = toys.run(room_of_a_micro_batch, 2, stage_class)
    if None in results:
        return
    for rank, (usual, held) in enumerate(results):
        assert usual <= 2.5 * psi, (
            f"parameters have {in_words(psi)}, their gradients as much, and after a backward rank {rank} holds "
            f"{in_words(usual)}: what else is there? Autograd's gradients lie in the buckets, and travel from there"
        )
        assert held <= usual + psi / 2, (
            f"rank {rank} holds {in_words(usual)} after a backward, and {in_words(held)} after one under no_sync(): "
            f"its gradients, {in_words(psi)}, are there twice. Is the stage told of each that comes there, too, so "
            "that it lies in its bucket (_arrived)?"
        )


class Stopped(Exception):
    pass


def stopped_backward(zero, batch):
    """One that an error ends when the last layer's gradients, the first that come, have left."""

    def stop(gradient):
        raise Stopped

    hook = zero.model.layers[-3].weight.register_hook(stop)
    with contextlib.suppress(Stopped):
        zero.model(*batch).backward()
    hook.remove()


def three_steps(stage_class):
    """Gradients and bytes sent of the second and the fourth step; the third one's batch was dropped, and a micro-batch,
    and a backward that an error ended.
    How many collectives were started that nobody has waited for. after_a_clip(). Messages of the fourth step, in which
    rank 1 sends late, and when gradients came."""
    rank, found, sent, dropped = dist.get_rank(), [], [], collections.Counter()
    zero = build(stage_class, wide, lr=0.0)  # parameters stay, so gradients are known
    came = moments(zero.model)
    for step in range(4):
        came.clear()
        with checks.Calls(pause=LATE * rank * (step == 3)) as calls, checks.after_zero_grad():
            zero.model(*wide_numbers(rank, step)).backward()
        found.append(gradients(zero))
        sent.append(calls.sent())
        if step != 2:
            zero.step()
        else:
            zero.zero_grad()
            with zero.no_sync():
                zero.model(*wide_numbers(rank, step)).backward()
            zero.zero_grad()
            with seams.heard_by("collective", lambda moment, call: dropped.update([moment])):
                stopped_backward(zero, wide_numbers(rank, step))
                zero.zero_grad()
        zero.zero_grad()
    under_way = dropped["start"] - dropped["end"]
    left = sum(param.grad is not None and bool(param.grad.any()) for param in zero.model.parameters())
    return found[1], found[3], sent, left, under_way, after_a_clip(stage_class), (messages(calls), came)


def after_a_clip(stage_class):
    """How far SGD with lr 1 goes, and how far it must. The batch before was clipped and dropped."""
    zero, rank = build(stage_class, wide), dist.get_rank()
    zero.model(*wide_numbers(rank, 0)).backward()
    zero.clip_grad_norm_(1e-3)
    zero.zero_grad()
    zero.model(*wide_numbers(rank, 1)).backward()
    gradient, before = [*gradients(zero).values()], toys.whole_parameters(zero)
    zero.step()
    return toys.distance(before, toys.whole_parameters(zero)), toys.distance(gradient, map(torch.zeros_like, gradient))


@pytest.mark.step(5, points=2, stuck="this is the second step: what was counted or kept in the first one must start "
                  "afresh")
def test_the_second_step_starts_afresh(stage_class):
    results = once(three_steps, 2, stage_class)
    for rank, (second, *_) in enumerate(results):
        both = own_gradients([0, 1], wide, wide_numbers, (0, 1))
        total = {name: sum(gradients[name] for gradients in both) / 2 for name in both[0]}
        stale = all(second[name] is not None and torch.allclose(second[name].double(), total[name], atol=1e-5)
                    for name in total)
        assert not stale, (
            f"rank {rank}'s gradient of the second step is the sum of both steps': zero_grad() left the first one's"
        )
    for rank, (*_, (moved, norm), _) in enumerate(results):
        assert moved == pytest.approx(norm, rel=1e-3), (
            f"a step of SGD with lr 1 moved rank {rank}'s parameters by {moved:.4g}, and the norm of its gradient, "
            f"which was not clipped, is {norm:.4g}. The batch before was clipped, to 0.001, and then dropped: "
            "zero_grad() without step() ends clipping, too"
        )
    for place, step, what in ((0, 1, "the second step's mean gradient"), (
            1, 3, "the last step's mean gradient. Before it a batch was dropped, a micro-batch under no_sync(), and a "
            "backward that an error ended half-way (zero_grad() without step(): nothing may be under way after it)")):
        assert_mean([0, 1], [result[place] for result in results], wide, wide_numbers, (step,), what)
    for rank, (_, _, sent, left, under_way, *_) in enumerate(results):
        assert not under_way, (
            f"an error has ended a backward half-way on rank {rank}, and then came zero_grad(). Of the collectives "
            f"that were started nobody has waited for {under_way}: such a one still writes into its bucket, where the "
            "next backward puts its gradients (wait)"
        )
        assert sent[3] <= 1.05 * sent[1], (
            f"rank {rank} sent {in_words(sent[1])} in the second step's backward and {in_words(sent[3])} in the "
            "fourth's: what is added in each step, a hook for example, and stays?"
        )
        assert not left, f"after zero_grad() {left} parameters of rank {rank} still have a gradient"


@pytest.mark.step(5, points=1)
def test_later_steps_overlap_too(stage_class):
    results = [(None, *last) for *_, last in once(three_steps, 2, stage_class)]
    hint = ". This is the fourth step: what is another after the first one, or after zero_grad()?"
    assert_leaves_early(results, hint)
    assert_overlaps(results, hint)


def what_stays(stage_class):
    """How many tensors, and entries of lists and the like, there are after each of some steps."""
    zero, found = build(stage_class, wide), []
    places = [vars(each) for each in (zero, getattr(zero, "reducer", None)) if hasattr(each, "__dict__")]
    for step in range(4):
        zero.model(*wide_numbers(dist.get_rank(), step)).backward()
        zero.step()
        zero.zero_grad()
        gc.collect()
        kept = [thing for place in places for thing in place.values() if type(thing) in KEEPERS]
        found.append((sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
                      sum(map(len, [*places, *kept]))))
    return found


KEEPERS = (list, dict, set, tuple, collections.deque, collections.defaultdict)


@pytest.mark.step(5, points=1)
def test_nothing_stays_of_a_step(stage_class):
    for rank, (_, second, _, last) in enumerate(once(what_stays, 2, stage_class)):
        # what grows by one a step has two more now; a single tensor may still be in the hands of gloo's thread
        for what, before, after in zip(("tensors", "entries of lists and dicts"), second, last, strict=True):
            assert after <= before + (what == "tensors"), (
                f"rank {rank} holds {before} {what} after the second step, and {after} after the fourth: a list or "
                "dict gets some in each step, and keeps them. What bucket_complete keeps goes before the next step"
            )


def statistics(stage_class, ranks):
    """{(name, step): the buffers of a batch norm after it}; each of these ranks has made them with its own batches."""
    found, group = {}, dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return found
    for name, way in (("Naive", stage_class.Naive), ("Stage0", stage_class)):
        zero = build(way, Normed, group=group, lr=0.0)
        if not hasattr(zero, "step") or not hasattr(zero, "zero_grad"):  # the contract asks for none of Naive
            continue
        for step in range(2):
            zero.model(*toys.numbers(dist.get_rank(), step)).backward()
            zero.model.eval()
            zero.step()
            zero.model.train()
            zero.zero_grad()
            found[name, step] = {label: buffer.clone() for label, buffer in zero.model.named_buffers()}
    return found


STATISTICS = ("step() gives the running statistics of the group's first rank to the group's ranks "
              "(replicas.broadcast_statistics); here the group is {} of three ranks")


@pytest.mark.step(5, points=1, **dict.fromkeys(("stuck", "left", "raised"), STATISTICS.format("all or two")))
def test_a_step_leaves_rank_0s_statistics(stage_class):
    for ranks in ((0, 1, 2), (1, 2)):
        model, wanted = toys.build(Normed, ranks[0]), []
        for step in range(2):
            model(*toys.numbers(ranks[0], step))
            wanted.append({label: buffer.clone() for label, buffer in model.named_buffers()})
        for rank, found in enumerate(once(statistics, 3, stage_class, ranks)):
            for (name, step), buffers in found.items():
                off = [label for label, buffer in wanted[step].items() if not torch.allclose(buffers[label], buffer)]
                assert not off, (
                    f"{name}: after step() {in_a_list(off)} of rank {rank} is not what rank {ranks[0]}'s batches have "
                    f"made of it in {step + 1} steps. Each rank's statistics are of its own batches, and "
                    f"{STATISTICS.format(f'ranks {in_a_list([*map(str, ranks)])}')}: the given file does that"
                )


TRAINING = {
    "SGD with momentum": (Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9), steps=3),
                          "does each step begin without old gradients?"),
    "frozen, tied and unused parameters": (checks.RECIPES["frozen, tied and unused parameters"],
                                           "a parameter without a gradient counts as one whose gradient is zero: what "
                                           "lies in its place since the step before? Look at bucket_complete, of step "
                                           "2 (bucket.zero_missing)"),
    "three micro-batches a step, and clipping": (
        Recipe(options=checks.ADAM, accumulate=3, clip=0.1, steps=3),
        "do micro-batches add up, and does clipping end with zero_grad()?"),
    "layers that are left out in turn": (checks.RECIPES["another order in each step"],
                                         "a layer without gradient counts as one whose gradient is zero: what lies in "
                                         "its place since the step before? Look at bucket_complete, of step 2 "
                                         "(bucket.zero_missing)"),
}


def trained(stage_class, recipes):
    """{recipe: all parameters after training with it}"""
    return {name: toys.train(stage_class, recipe).parameters for name, recipe in recipes.items()}


@functools.cache
def in_one_process(name, world_size):
    recipe, _ = TRAINING[name]
    return toys.plain(recipe, world_size), toys.plain(recipe, world_size, torch.float64)


@pytest.mark.step(5, points=2, stuck="several steps, with layers that get a gradient in some steps only")
@pytest.mark.parametrize("world_size", (3, 1))
def test_trains_as_one_process_would(stage_class, world_size):
    ranks = toys.run(trained, world_size, stage_class, {name: recipe for name, (recipe, _) in TRAINING.items()})
    for name, (recipe, hint) in TRAINING.items():
        plain, exact = in_one_process(name, world_size)
        moved = toys.distance(exact.parameters, list(toys.build(recipe.make, 0).parameters()))
        # 4: a sum may run in any order; and clipping may divide by the norm, or as torch does by a little more
        rounding = 4 * toys.distance(plain.parameters, exact.parameters) + 1e-5 * moved
        assert rounding < 0.1 * moved, "a bound as large as this would let mistakes through"
        for rank, found in enumerate(ranks):
            off = toys.distance(found[name], plain.parameters)
            assert off <= rounding, (
                f"{name}, {recipe.steps} steps: rank {rank} has other parameters than one process that trains on all "
                f"data, off by {off:.2g}, where training moved them by {moved:.2g}. "
                f"{hint[0].upper()}{hint[1:]}"
            )
