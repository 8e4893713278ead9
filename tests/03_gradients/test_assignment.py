"""Lesson 3's assignment, P_os+g, in steps: what is owned, sent and computed, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import functools
from collections import namedtuple

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from clipping import (
    WITHOUT,
    assert_clipping_leaves_the_gradients,
    assert_clips_by_the_global_norm,
    assert_clips_in_a_group,
    assert_scales_a_bucket_at_a_time,
    assert_trains_with_clipping,
)
from sharded import (
    BUCKET,
    EVERYBODY,
    FRESH,
    GROUP,
    LAYER,
    LAYERS,
    LOOKS,
    MANY,
    NO_BACKWARD,
    PSI,
    SPARE,
    Most,
    after_a_step,
    after_many_steps,
    alike,
    assert_added_in_32,
    assert_keeps_16_bits,
    assert_kernel_agrees,
    assert_no_barrier,
    assert_nothing_is_left,
    assert_overflow_is_shared,
    assert_sent,
    assert_shards_hold,
    assert_small_updates_add_up,
    assert_statistics_are_of_rank_0,
    assert_stepped,
    assert_steps_in_a_group,
    assert_steps_without_backward,
    assert_trained_alike,
    awkward_backward,
    backward_in_a_group,
    build,
    first_backward,
    first_step,
    flat,
    gradients_left,
    gradients_of,
    model,
    one_step,
    overflow,
    second_step,
    shards_of,
    sixteen_bits,
    small_steps,
    trained,
    wide,
    wide_numbers,
)
from torch import nn, optim
from toys import Recipe

from zero_minimal.core import seams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stage_class(assignment):
    """The class under test."""
    return assignment


# ------------------------------------------------------------------------------- step 1: gradients become shards


@pytest.mark.step(1, points=10)
@pytest.mark.parametrize("world_size", (2, 3))
def test_shards_hold_the_mean_gradient(stage_class, world_size):
    shards = [shards for shards, *_ in once(first_backward, world_size, stage_class)]
    assert_shards_hold(shards, gradients_of(world_size))


@pytest.mark.step(1, points=4, stuck="one parameter got a gradient on rank 0 alone, and one on no rank at all: each "
                  "rank must reduce all buckets in the same order all the same, with zero for what is missing",
                  raised="a parameter may get no gradient on a rank, and its .grad is None then: it counts as zero")
def test_a_missing_gradient_is_zero(stage_class):
    gradients = gradients_of(3, make=checks.Awkward, batch=checks.awkward_batch)
    assert_shards_hold(once(awkward_backward, 3, stage_class), gradients, "the mean gradient, where one parameter got "
                       "its gradient on rank 0 alone, which counts as zero on the others", make=checks.Awkward)


def bytes_of(shards):
    return sum(shard.nbytes for shard in shards if shard is not None)


def memory_of_a_backward(stage_class):
    """Bytes of model and stage before the first gradient; beyond these, after backward, those of the shards then, and
    the most when a gradient comes, and when it waits for a collective of ours near the end (where nearly all shards
    are there, so that it does not matter when they get their memory); how many param.grad are left."""
    rank, memory, waiting, near_the_end = dist.get_rank(), Most(), Most(), []
    zero = build(stage_class, wide, bucket_bytes=LAYER)
    begins = memory.now(LAYERS * LAYER + SPARE)
    memory.listen(zero.model)
    [weight for weight in zero.model.parameters() if weight.ndim > 1][0].register_hook(
        lambda _: near_the_end.append(True))
    with seams.heard_by("collective", lambda moment, call: (
            waiting.look() if moment == "wait" and near_the_end else None)):
        loss = zero.model(*wide_numbers(rank, 0))
        loss.backward()
    del loss
    shards = bytes_of(zero.reduced_gradients())
    after = memory.now(begins + shards + LAYER / 10)
    left = gradients_left(zero.model)
    return begins, after - begins, shards, memory.most - begins, waiting.most - begins, left


@pytest.mark.step(1, points=6)
def test_no_whole_gradients_after_backward(stage_class):
    for rank, (begins, after, shards, *_, left) in enumerate(once(memory_of_a_backward, 4, stage_class)):
        assert begins <= LAYERS * LAYER + SPARE, (
            f"rank {rank} holds {in_words(begins)} when the stage is made, before any gradient, and the parameters are "
            f"{in_words(LAYERS * LAYER)} of that: whole gradients have no memory of their own in P_os+g, not at the "
            "start either"
        )
        assert after <= min(shards + LAYER / 10, LAYERS * LAYER / 4 + SPARE), (
            f"rank {rank} still holds {in_words(after)} of gradients after backward: P_os+g leaves it "
            f"{in_words(LAYERS * LAYER / 4)}, its shard of {in_words(LAYERS * LAYER)}"
            + (f" ({left} parameters still have their .grad)" if left else
               f". A bucket has {in_words(LAYER)}: what still refers to a whole one?" if after < shards + 2 * LAYER else
               "")
        )


@pytest.mark.step(1, points=8)
def test_no_whole_gradients_during_backward(stage_class):
    for rank, (_, _, _, most, waiting, _) in enumerate(once(memory_of_a_backward, 4, stage_class)):
        assert most <= DURING, piled_up("during backward", most, rank)
        # shards; the bucket that is waited for, its copy from the other ranks, its part; gradients of the next bucket,
        # and of the parameter that lies in both
        assert waiting <= (LAYERS / 4 + 4.4) * LAYER, (
            f"{piled_up('while it waits for a reduction,', waiting, rank)}. Does a bucket get memory before the one "
            "before it has given its own back?"
        )


# Shards; a bucket that is filled and one that is reduced, its copy from the other ranks, its part; gradients that
# autograd hands over, and activations of two samples.
DURING = LAYERS * LAYER / 4 + 6.5 * LAYER


def piled_up(when, most, rank):
    return (
        f"{when} up to {in_words(most)} of gradients live on rank {rank}, of {in_words(LAYERS * LAYER)} "
        f"in all: whole gradients pile up. With buckets of {in_words(LAYER)} P_os+g needs its shards, "
        f"{in_words(LAYERS * LAYER / 4)}, and a few open buckets: reduce each as soon as it is complete, "
        "and free it"
    )


@pytest.mark.step(1, points=5)
def test_backward_sends_a_reduce_scatter(stage_class):
    assert_sent(once(first_backward, 3, stage_class), 1, "backward", "a reduce-scatter of the gradients")
    for rank, (*_, made) in enumerate(once(first_backward, 3, stage_class)):
        assert_no_barrier(made, rank, "backward")


@pytest.mark.step(1, points=4)
def test_gradients_of_16_bits_are_added_in_32(stage_class):
    assert_added_in_32(toys.run(sixteen_bits, 3, stage_class))


@pytest.mark.step(1, points=3, stuck=GROUP, left=GROUP, raised=GROUP)
def test_backward_in_a_group(stage_class):
    first, _, second = toys.run(backward_in_a_group, 3, stage_class)
    assert_shards_hold([first, second], gradients_of(2, ranks=(0, 2)), "the mean gradient of ranks 0 and 2, the two "
                       "that are in the stage's group")


# ------------------------------------------------------------------------------- step 2: update, and gather parameters


@pytest.mark.step(2, points=5, stuck="every rank must start all all-gathers, in the same order")
@pytest.mark.parametrize("world_size", (2, 3))
def test_every_rank_has_all_updated_parameters(stage_class, world_size):
    results = [result for result, *_ in once(first_step, world_size, stage_class)]
    assert_stepped(results, sum(gradients_of(world_size)) / world_size, world_size)
    assert_nothing_is_left(stage_class)


@pytest.mark.thorough
@pytest.mark.step(2, points=2, stuck=FRESH, left=FRESH, raised=FRESH)
def test_ranks_with_other_hash_seeds_agree(stage_class):
    results = toys.run(small_steps, 2, stage_class, fresh=True)
    assert_stepped(results, sum(gradients_of(2, make=toys.MLP, batch=toys.numbers)) / 2, 2, make=toys.MLP)


@pytest.mark.step(2, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_step_in_a_group(stage_class):
    assert_steps_in_a_group(stage_class)


@pytest.mark.step(2, points=1, stuck=NO_BACKWARD, left=NO_BACKWARD, raised=NO_BACKWARD)
def test_a_rank_without_a_backward_takes_the_step(stage_class):
    assert_steps_without_backward(stage_class)


@pytest.mark.step(2, points=2)
def test_running_statistics_are_alike(stage_class):
    assert_statistics_are_of_rank_0(once(after_a_step, 2, stage_class))


def shards_after_step(stage_class):
    """For each of reduced_gradients() before step(), whether it is the same after it."""
    zero = build(stage_class, toys.MLP)
    zero.model(*toys.numbers(dist.get_rank(), 0)).backward()
    before = [shard.clone() for shard in zero.reduced_gradients()]
    zero.step()
    after = zero.reduced_gradients()
    return [shard is not None and torch.equal(shard, kept) for shard, kept in zip(after, before, strict=True)]


@pytest.mark.step(2, points=1)
def test_a_backward_after_step_is_refused(stage_class):
    for rank, same in enumerate(toys.run(shards_after_step, 2, stage_class)):
        assert all(same), (
            f"step() dropped or changed {same.count(False)} of {len(same)} gradient shards on rank {rank}: whoever "
            "prints their norm after it still needs them. zero_grad() drops them")
    for rank, (_, refused) in enumerate(once(after_a_step, 2, stage_class)):
        assert refused, (
            f"backward, step(), backward without zero_grad(): rank {rank} added the second gradient to the first one's "
            "shards without a word. It must be an error: set self.reducer.needs_zero_grad in step()"
        )


def three_groups(model):
    """Each has other options than the first."""
    params = list(model.parameters())
    return [{"params": params[::3]}, {"params": params[1::3], "lr": 3e-2, "betas": (0.5, 0.9), "weight_decay": 0.3},
            {"params": params[2::3], "lr": 2e-3, "eps": 1e-2, "betas": (0.8, 0.7)}]


RECIPES = {
    "AdamW with weight decay": (Recipe(options=dict(checks.ADAM, weight_decay=0.1)), "is weight decay there?"),
    "three parameter groups": (
        Recipe(options=checks.ADAM, groups=three_groups), "does each shard keep all options of its group?",
    ),
    "frozen, tied and unused parameters": (
        Recipe(make=checks.Awkward, batch=checks.awkward_batch, options=dict(checks.ADAM, weight_decay=0.5),
               bucket_bytes=100),
        "a frozen parameter must not move, a tied one is updated once, one without a gradient counts as one whose "
        "gradient is zero, so that it decays",
    ),
}


ONE_STEP = {name: (Recipe(**{**vars(recipe), "steps": 1}), hint) for name, (recipe, hint) in RECIPES.items()}


@pytest.mark.step(2, points=4)
def test_a_step_is_the_optimizers(stage_class):
    assert_trained_alike(one_step, stage_class, 2, ONE_STEP)


WIDTHS = {torch.float32: (4, 4 + 8), torch.bfloat16: (2, 2 + 12)}  # bytes a parameter: whole, in shards
Held = namedtuple("Held", "after most sent gathered")  # bytes: after a step, at most in step(), sent in all, in step()


def held(stage_class):
    """Held, of a step of AdamW in each dtype."""
    found, rank = [], dist.get_rank()
    for dtype in WIDTHS:
        memory = Most()
        zero = stage_class(toys.build(model, rank, dtype), optim.AdamW, lr=1e-3, bucket_bytes=BUCKET)
        memory.follow(zero.optimizer)
        with checks.Calls() as backward:
            zero.model(*toys.tokens(rank, 0)).backward()
        with checks.Calls(look=memory.look) as step:
            zero.step()
        after = memory.now(most_held(dtype, dist.get_world_size()))
        found.append((after, memory.most, backward.sent() + step.sent(), step.sent()))
        del zero
    return found


def most_held(dtype, world_size):
    example = model()
    padded = sum(param.numel() for param in example.parameters()) + checks.most_padding(example, world_size)
    whole, sharded = WIDTHS[dtype]
    return (whole + sharded / world_size) * padded + 1.5 * BUCKET + 1024


@pytest.mark.step(2, points=4)
def test_holds_shards_after_a_step(stage_class):
    elements = sum(param.numel() for param in toys.build(model, 0).parameters())
    formulas = {torch.float32: "in fp32, and P_os+g 4 + (4 + 8)/N = 7: parameters whole; gradients, momentum and "
                               "variance of its shard alone",
                torch.bfloat16: "in bf16, and P_os+g 2 + (2 + 12)/N = 5.5: parameters whole; gradients, and in fp32 "
                                "master, momentum and variance, of its shard alone"}
    for rank, found in enumerate(once(held, 4, stage_class)):
        for (dtype, formula), sizes in zip(formulas.items(), found, strict=True):
            size = Held(*sizes)
            assert size.after <= most_held(dtype, 4), (
                f"rank {rank} of 4 holds {size.after / elements:.1f} bytes a parameter after a step of AdamW {formula}"
            )
            assert size.most <= most_held(dtype, 4), (
                f"inside of step() rank {rank} of 4 holds up to {size.most / elements:.1f} bytes a parameter with "
                f"AdamW {formula}. What is needed besides is a bucket at a time"
            )


@pytest.mark.step(2, points=4)
def test_a_step_sends_as_much_as_data_parallelism(stage_class):
    assert_sent(once(first_step, 3, stage_class), 2, "a whole step",
                "a reduce-scatter of gradients and an all-gather of parameters, as much as data parallelism,")
    for rank, (*_, made) in enumerate(once(first_step, 3, stage_class)):
        assert_no_barrier(made, rank, "a whole step")
    example = toys.build(model, 0, torch.bfloat16)
    share = sum(param.nbytes for param in example.parameters()) * 3 / 4
    spare = 2 * checks.most_padding(example, 4) + 1024
    for rank, found in enumerate(once(held, 4, stage_class)):
        size = Held(*found[-1])
        assert size.gathered <= 1.02 * share + spare, (
            f"with parameters in bf16 rank {rank} of 4 sent {in_words(size.gathered)} in step(), and an all-gather of "
            f"them sends {in_words(share)}, 2Ψ(N−1)/N: gather the 16-bit parameters, not their fp32 masters"
        )
        assert size.sent <= 3 * (1.02 * share + spare), (
            f"with parameters in bf16 rank {rank} of 4 sent {in_words(size.sent)} in a whole step: gradients may "
            f"travel in fp32, and parameters in bf16, which makes {in_words(3 * share)}"
        )


# ------------------------------------------------------------------------------- step 3: zero_grad, and accumulation


def dropped(stage_class):
    """second_step(), and how many collectives of ours nobody has waited for when it ends."""
    with checks.Watch() as watch:
        found = second_step(stage_class)
    kinds = [event.kind for event in watch.events]
    return *found, kinds.count("start") - kinds.count("wait")


@pytest.mark.step(3, points=4, stuck="this is the second step: what was counted or kept in the first one must start "
                  "afresh")
def test_the_second_step_starts_afresh(stage_class):
    shards, after, left = zip(*once(dropped, 2, stage_class), strict=True)
    first, second = gradients_of(2, steps=[0]), gradients_of(2, steps=[1])
    both = sum(first) / 2 + sum(second) / 2
    parts = torch.cat([flat(rank, own) for rank, own in enumerate(shards)])
    if len(parts) >= len(both):
        together = torch.cat([both, both.new_zeros(len(parts) - len(both))])
        assert not alike(parts, together, 1e-5 * both.abs().max()), (
            "the second step's gradient is the sum of both steps': zero_grad() left the first one's in the shards"
        )
    assert_shards_hold(shards, second, "the mean gradient of the second step")
    assert_shards_hold(after, gradients_of(2, steps=[3]), "the mean gradient of the last backward, where the one "
                       "before was dropped (zero_grad() without step()), and had failed in its second micro-batch: a "
                       "reduction was under way when zero_grad() was called")
    assert max(left) <= 0, (
        f"a backward failed while a reduction was under way, then came zero_grad(): nobody has waited for {max(left)} "
        "collectives. Its vector is still being sent, and is never given back"
    )


def accumulated(stage_class):
    """Shards after three micro-batches, and the bytes of gradients that live between the first two."""
    zero, rank = build(stage_class, wide, bucket_bytes=LAYER), dist.get_rank()
    before, between = checks.live_bytes(), 0
    for micro in range(3):
        local = zero.no_sync() if micro < 2 else contextlib.nullcontext()
        with local:
            zero.model(*wide_numbers(rank, micro)).backward()
        if micro == 0:
            between = checks.live_bytes(until=before + LAYERS * LAYER / 2 + SPARE, looks=LOOKS) - before
    return shards_of(zero), between


@pytest.mark.step(3, points=3)
def test_micro_batches_add_up(stage_class):
    gradients = functools.partial(gradients_of, 2, make=wide, batch=wide_numbers)
    shards = [shards for shards, _ in once(accumulated, 2, stage_class)]
    together = torch.cat([flat(rank, own) for rank, own in enumerate(shards)])
    for micros, words in (
        ([2], "the last micro-batch's gradient alone: each one overwrote the shard, and must be added to it"),
        ([0], "the first micro-batch's gradient alone: the others were not reduced, or not added"),
    ):
        one = sum(gradients(steps=micros)) / 2
        padded = torch.cat([one, one.new_zeros(max(0, len(together) - len(one)))])
        assert len(padded) != len(together) or not alike(together, padded, 1e-5 * one.abs().max()), (
            f"after three micro-batches the shards hold {words}"
        )
    assert_shards_hold(shards, gradients(steps=[0, 1, 2]), "the mean gradient, summed over three micro-batches",
                       make=wide)


@pytest.mark.step(3, points=3)
def test_micro_batches_wait_in_shards(stage_class):
    for rank, (_, between) in enumerate(once(accumulated, 2, stage_class)):
        assert between <= LAYERS * LAYER / 2 + SPARE, (
            f"between two micro-batches rank {rank} holds {in_words(between)} of gradients, and its shard is "
            f"{in_words(LAYERS * LAYER / 2)}: in P_os+g each micro-batch is reduced, whole gradients have no place to "
            "wait"
        )
    assert_keeps_16_bits(stage_class)


def memory_of_training(stage_class):
    """Bytes beyond those of the beginning, in each backward, step and zero_grad: (when, at most meanwhile, afterwards,
    and what would be enough)."""
    rank, memory, found = dist.get_rank(), Most(), []
    zero = build(stage_class, wide, bucket_bytes=LAYER, lr=0.0)
    begins = memory.now(LAYERS * LAYER + SPARE)
    memory.listen(zero.model)

    def note(when):
        enough = min(shards + LAYER / 10, LAYERS * LAYER / dist.get_world_size() + SPARE)
        found.append((when, memory.most - begins, memory.now(begins + enough) - begins, enough))
        memory.most = 0

    for step, micros in enumerate((1, 3, 1)):
        for micro in range(micros):
            with zero.no_sync() if micro + 1 < micros else contextlib.nullcontext():
                zero.model(*wide_numbers(rank, step + micro)).backward()
            shards = bytes_of(zero.reduced_gradients())
            note(f"backward of step {step + 1}" + f", micro-batch {micro + 1}" * (micros > 1))
        zero.step()
        note(f"step() number {step + 1}")
        zero.zero_grad()
        note(f"zero_grad of step {step + 1}")
    return found


@pytest.mark.thorough
@pytest.mark.step(3, points=3)
def test_memory_stays_as_in_the_first_backward(stage_class):
    for rank, found in enumerate(toys.run(memory_of_training, 4, stage_class)):
        for when, most, after, enough in found:
            assert after <= enough, (
                f"after {when} rank {rank} holds {in_words(after)} besides the parameters, and P_os+g leaves it "
                f"{in_words(LAYERS * LAYER / 4)}, its shard of {in_words(LAYERS * LAYER)} of gradients: what stays "
                "from one backward to the next, and grows with each?"
            )
            assert most <= DURING, piled_up(f"in {when}", most, rank)


@pytest.mark.step(3, points=1)
def test_running_statistics_stay_alike(stage_class):
    found = once(after_many_steps, 2, stage_class)
    assert_statistics_are_of_rank_0(found)
    for rank, (*_, made) in enumerate(found):
        assert_no_barrier(made, rank, f"{MANY} steps")


@pytest.mark.step(3, points=2)
def test_small_steps_in_bf16_add_up(stage_class):
    assert_small_updates_add_up(stage_class)


class InTwoBuckets(nn.Module):
    """w lies in two buckets of 256 bytes; in one of them lies u, too, which the first step leaves out."""

    def __init__(self):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(16))

    def forward(self, x, step):
        return (self.w * x).sum() + (self.u.sum() if step else 0)


def hundred_numbers(rank, step):
    return torch.arange(100.0) + rank, step


TRAINING = {
    "SGD with momentum": (Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9), steps=3),
                          "does each step begin without old gradients?"),
    "frozen, tied and unused parameters": RECIPES["frozen, tied and unused parameters"],
    "three micro-batches a step": (Recipe(options=checks.ADAM, accumulate=3, steps=2),
                                   "do micro-batches add up, and is nothing left for the next step?"),
    "two micro-batches a step, without no_sync": (
        Recipe(optimizer=optim.SGD, options=dict(lr=0.3), accumulate=2, no_sync=False, steps=2),
        "does every backward add to the shards, also outside no_sync()?"),
    "a scheduler of the learning rate": (
        Recipe(options=checks.ADAM, schedule=checks.warm_up), "is the learning rate of this step used?"),
    "bf16": (Recipe(options=checks.ADAM, dtype=torch.bfloat16),
             "are the fp32 masters updated, and rounded to the parameters?"),
    "layers that are left out in turn": (checks.RECIPES["another order in each step"],
                                         "a layer without gradient counts as one whose gradient is zero"),
    "a parameter in two buckets, which change places after the first step": (
        Recipe(make=InTwoBuckets, batch=hundred_numbers, optimizer=optim.SGD, options=dict(lr=0.1), bucket_bytes=256,
               steps=2),
        "which of its buckets is handed over last? Until then its .grad is needed: `done` says so, and not where the "
        "parameter ends"),
}


@pytest.mark.step(3, points=4, stuck="several steps, with layers that get a gradient in some steps only")
def test_trains_as_one_process_would(stage_class):
    assert_trained_alike(trained, stage_class, 3, TRAINING, alone=(
        "two micro-batches a step, without no_sync", "layers that are left out in turn"))


# ------------------------------------------------------------------------------- step 4: clipping and the loss scale


@pytest.mark.step(4, points=5, stuck=EVERYBODY)
@pytest.mark.parametrize("world_size", (2, 3))
def test_clips_by_the_global_norm(stage_class, world_size):
    assert_clips_by_the_global_norm(stage_class, world_size)


@pytest.mark.step(4, points=1)
def test_clipping_returns_a_tensor_and_leaves_the_gradients(stage_class):
    assert_clipping_leaves_the_gradients(stage_class)
    assert_scales_a_bucket_at_a_time(stage_class)


@pytest.mark.step(4, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_clips_in_a_group(stage_class):
    assert_clips_in_a_group(stage_class)


@pytest.mark.step(4, points=4, stuck=WITHOUT, left=WITHOUT, raised=WITHOUT)
def test_trains_with_clipping(stage_class):
    assert_trains_with_clipping(stage_class)


@pytest.mark.step(4, points=3, stuck="one gradient is infinite, and one rank alone sees it in its shard: all ranks "
                  "must take the step, or none")
def test_overflow_on_one_rank_is_everybodys(stage_class):
    (one, shards_of_one, still), (two, shards_of_two, _) = toys.run(overflow, 2, stage_class)
    assert not all(shards_of_one + shards_of_two), (
        "one gradient of one rank is infinite, so its mean is, and all numbers in all ranks' reduced_gradients() are "
        "finite: it is hidden. A loss scaler looks there to skip the step on all ranks, and would take it"
    )
    assert torch.equal(one, two), (
        f"one gradient is infinite: afterwards rank 0 has {int((~one).sum())} parameters that are not finite, and rank "
        f"1 {int((~two).sum())}. One rank alone sees it in its shard, and all ranks must take the step, or none"
    )
    assert still <= len(one) // 20, (
        f"one gradient is infinite, and step() left {still} of {len(one)} parameters where they were: it takes the "
        "step for all, whatever their gradients are. A loss scaler alone skips one, and then it does not call step()"
    )
    assert_overflow_is_shared(stage_class)


# --------------------------------------------------------------- all steps: what the kernel counts, at a plain size

BLAME = "whole gradients, or copies of something, live in its memory"


@pytest.mark.thorough
@pytest.mark.step(1, points=0)
def test_the_kernel_counts_a_backward(stage_class):
    # sent are rank 0's parameters, and a reduce-scatter
    assert_kernel_agrees(stage_class, 4, optim.SGD, PSI + PSI / 4, 2, BLAME)


@pytest.mark.thorough
@pytest.mark.step(2, points=0)
def test_the_kernel_counts_a_step(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.AdamW, PSI + 3 * PSI / 4, 3, BLAME, steps=1)


@pytest.mark.thorough
@pytest.mark.step(3, points=0)
def test_the_kernel_counts_micro_batches(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.SGD, PSI + PSI / 4, 4, BLAME, micros=3)
