"""Lesson 3's assignment, P_os+g, in steps: what is owned, sent and computed, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import functools
from collections import namedtuple

import checks
import differences
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from torch import optim
from toys import Recipe

from zero_minimal.foundations import notes
from zero_minimal.foundations.ranks import RankError

BUCKET = 2**14  # bytes; the model has 15 such buckets and a rest
LOOKS = 10  # at memory that still lives, a twentieth of a second apart


@pytest.fixture
def stage_class(assignment):
    """The class under test."""
    return assignment


def model():
    return toys.Transformer(hidden=45)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """What is computed here to compare with is small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients_of(world_size, steps=(0,), make=model, batch=toys.tokens, ranks=None):
    """Each rank's own gradient, summed over these batches, [Ψ] in fp64. A missing one is zero. `ranks`: others than
    0 … N - 1."""
    pieces = []
    for rank in ranks or range(world_size):
        whole = toys.build(make, 0, torch.float64)
        for step in steps:
            whole(*(doubled(part) for part in batch(rank, step))).backward()
        pieces.append(torch.cat([
            (torch.zeros_like(param) if param.grad is None else param.grad).flatten()
            for param in whole.parameters() if param.requires_grad
        ]))
    return pieces


def doubled(part):
    return part.double() if isinstance(part, torch.Tensor) and part.is_floating_point() else part


def build(stage_class, make=model, optimizer=optim.SGD, **options):
    options = {"lr": 1.0, "bucket_bytes": BUCKET} | options
    return stage_class(toys.build(make, dist.get_rank()), optimizer, **options)


def shards_of(zero):
    """What reduced_gradients() gives, as plain tensors."""
    return [None if shard is None else shard.detach().clone() for shard in zero.reduced_gradients()]


# ------------------------------------------------------------------------------- step 1: gradients become shards


def first_backward(stage_class):
    """The first backward pass: this rank's gradient shards, and what it sent. New memory comes filled with NaN."""
    torch.use_deterministic_algorithms(True)
    zero, rank = build(stage_class), dist.get_rank()
    with checks.slow_motion(zero.model), checks.Calls() as calls:
        zero.model(*toys.tokens(rank, 0)).backward()
        shards = shards_of(zero)
    return shards, calls.sent(), calls.made


@pytest.mark.step(1, points=10)
@pytest.mark.parametrize("world_size", (2, 3))
def test_shards_hold_the_mean_gradient(stage_class, world_size):
    shards = [shards for shards, *_ in once(first_backward, world_size, stage_class)]
    assert_shards_hold(shards, gradients_of(world_size))


def assert_shards_hold(shards, gradients, what="the mean gradient", make=model):
    """All ranks' shards together are the mean of their gradients [Ψ], whatever the layout is: the same numbers, sorted,
    but for the zeros of padding. Sorting makes no difference larger, so rounding is the only reason for one."""
    world_size, mean = len(shards), sum(gradients) / len(gradients)
    parts = [flat(rank, own) for rank, own in enumerate(shards)]
    for rank, part in enumerate(parts):
        assert part.numel() < len(mean), (
            f"rank {rank}'s reduced_gradients() hold {part.numel()} elements, and the whole gradient has {len(mean)}: "
            f"P_os+g leaves a rank 1/{world_size} of it, about {len(mean) // world_size}"
        )
        assert part.isfinite().all(), (
            f"rank {rank}'s gradient shard holds NaN: memory that nobody wrote to (torch.empty), that was read before "
            "its reduction had ended (wait), or that was freed while the reduction was under way"
        )
        for other in range(rank):
            assert not torch.equal(part, parts[other]), (
                f"rank {other} and rank {rank} hold the same gradient shard: each must own another part of it"
            )
    together = torch.cat(parts)
    assert len(together) >= len(mean), (
        f"the shards of all {world_size} ranks together hold {len(together)} gradients, and the model has "
        f"{len(mean)}: the others are on no rank"
    )
    wanted = torch.cat([mean, mean.new_zeros(len(together) - len(mean))])
    bound = 1e-5 * mean.abs().max()
    if alike(together, wanted, bound):
        return
    assert not alike(together, world_size * wanted, world_size * bound), (
        f"the shards hold the sum of the ranks' gradients, not their mean: {world_size} times too large"
    )
    assert not alike(world_size * together, wanted, bound), (
        f"the gradients were averaged twice: they are {world_size} times too small"
    )
    for rank, part in enumerate(parts):
        for factor in (1, world_size):
            assert not from_pool(factor * part, gradients[rank], bound), (
                f"rank {rank}'s shard holds its own gradient{' / N' * (factor > 1)}: the other ranks' parts were "
                "never added"
            )
    kind = differences.narrow(together, world_size)
    assert not kind, (
        f"the shards hold numbers of 16 bits ({kind}), and these gradients have 32: they were rounded on the way. "
        "Gradients are sent and added in the parameters' own dtype, or a wider one"
    )
    elements = differences.Elements(toys.build(make, 0), trained=True)
    lost = int((together == 0).sum() - (wanted == 0).sum())
    assert lost <= 0, (
        f"{lost} of {len(mean)} gradients are lost: the shards hold zeros in their place. Is each bucket put together "
        "from all its parameters, also the ones that lie in two buckets, and reduced when it is complete? "
        + differences.in_shards(parts, mean, elements, bound)
    )
    pytest.fail(f"the shards of all ranks together are not {what}: "
                f"{differences.in_shards(parts, mean, elements, bound)}")


def flat(rank, shards):
    missing = sum(shard is None for shard in shards)
    assert shards and not missing, (
        f"after backward rank {rank} has no gradient for {missing or 'any'} of its {len(shards)} buckets: "
        "reduced_gradients() gives None, so they were not reduced, or their result was not kept"
    )
    return torch.cat([shard.flatten().double() for shard in shards])


def alike(one, other, bound):
    return bool(((one.sort().values - other.sort().values).abs() <= bound).all())


def from_pool(values, pool, bound):
    """Whether each value is one of the pool's."""
    pool, values = pool.sort().values, values[values != 0]
    after = torch.searchsorted(pool, values).clamp(max=len(pool) - 1)
    before = (after - 1).clamp(min=0)
    return bool((torch.minimum((pool[after] - values).abs(), (pool[before] - values).abs()) <= bound).all())


def awkward_backward(stage_class):
    zero, rank = build(stage_class, checks.Awkward, bucket_bytes=100), dist.get_rank()
    zero.model(*checks.awkward_batch(rank, 0)).backward()
    return shards_of(zero)


@pytest.mark.step(1, points=4, stuck="one parameter got a gradient on rank 0 alone, and one on no rank at all: each "
                  "rank must reduce all buckets in the same order all the same, with zero for what is missing",
                  raised="a parameter may get no gradient on a rank, and its .grad is None then: it counts as zero")
def test_a_missing_gradient_is_zero(stage_class):
    gradients = gradients_of(3, make=checks.Awkward, batch=checks.awkward_batch)
    assert_shards_hold(once(awkward_backward, 3, stage_class), gradients, "the mean gradient, where one parameter got "
                       "its gradient on rank 0 alone, which counts as zero on the others", make=checks.Awkward)


LAYERS, WIDTH = 24, 40
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes, also of a bucket here
SPARE = 2.5 * LAYER  # a layout may pad, and a bucket may be kept to be filled again


def wide():
    return toys.MLP(*[WIDTH] * (LAYERS + 1))


def wide_numbers(rank, step):
    return toys.numbers(rank, step, WIDTH, WIDTH, batch=2)


class Most:
    """Bytes that live on this rank beyond those of the beginning: now, and at most when a gradient came."""

    def __init__(self):
        self.before, self.most = checks.live_bytes(), 0

    def listen(self, model):
        for param in model.parameters():
            if param.ndim > 1:  # a look takes milliseconds
                param.register_hook(lambda gradient: self.look())

    def look(self):
        self.most = max(self.most, checks.live_bytes() - self.before)

    def now(self, at_most):
        """Looks again while there is more than that."""
        return checks.live_bytes(until=self.before + at_most, looks=LOOKS) - self.before


def memory_of_a_backward(stage_class):
    """Bytes of model and stage before the first gradient; beyond the parameters, after backward, and at most when a
    gradient comes; how many param.grad are left."""
    rank, memory = dist.get_rank(), Most()
    zero = build(stage_class, wide, bucket_bytes=LAYER)
    begins = memory.now(LAYERS * LAYER + SPARE)
    memory.listen(zero.model)
    loss = zero.model(*wide_numbers(rank, 0))
    loss.backward()
    del loss
    after = memory.now(LAYERS * LAYER * (1 + 1 / dist.get_world_size()) + SPARE)
    left = sum(param.grad is not None for param in zero.model.parameters())
    return begins, after - LAYERS * LAYER, memory.most - LAYERS * LAYER, left


@pytest.mark.step(1, points=6)
def test_no_whole_gradients_after_backward(stage_class):
    for rank, (begins, after, _, left) in enumerate(once(memory_of_a_backward, 4, stage_class)):
        assert begins <= LAYERS * LAYER + SPARE, (
            f"rank {rank} holds {in_words(begins)} when the stage is made, before any gradient, and the parameters are "
            f"{in_words(LAYERS * LAYER)} of that: whole gradients have no memory of their own in P_os+g, not at the "
            "start either"
        )
        assert after <= LAYERS * LAYER / 4 + SPARE, (
            f"rank {rank} still holds {in_words(after)} of gradients after backward: P_os+g leaves it "
            f"{in_words(LAYERS * LAYER / 4)}, its shard of {in_words(LAYERS * LAYER)}"
            + (f" ({left} parameters still have their .grad)" if left else "")
        )


@pytest.mark.step(1, points=8)
def test_no_whole_gradients_during_backward(stage_class):
    for rank, (_, _, most, _) in enumerate(once(memory_of_a_backward, 4, stage_class)):
        assert most <= DURING, piled_up("during backward", most, rank)


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


class Given(torch.nn.Module):
    """model(x) is a loss whose gradient is x [60], whatever the parameters are."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.ones(20) for _ in range(3)])

    def forward(self, x):
        return (torch.cat(list(self.weights)) * x).sum()


# numbers of rank 0 and of the others, and what a mean of them shows that is made in 16 bits
GIVEN = {
    torch.float16: ((2048.0, 0.75, "added in 16 bits small numbers vanish beside large ones"),
                    (2.0**-24, 2.0**-24, "in fp16 the smallest number divided by N is zero: divide after the sum"),
                    (60000.0, 60000.0, "it has lost digits")),
    torch.bfloat16: ((256.0, 0.75, "added in 16 bits small numbers vanish beside large ones"),),
}


def given(dtype, rank):
    kinds = GIVEN[dtype]
    return torch.tensor([kind[min(rank, 1)] for kind in kinds], dtype=dtype).repeat(60 // len(kinds))


def sixteen_bits(stage_class):
    """This rank's shards of the gradient of `Given`, for each dtype."""
    shards, rank = [], dist.get_rank()
    for dtype in GIVEN:
        zero = stage_class(toys.build(Given, rank, dtype), optim.SGD, lr=1.0)
        zero.model(given(dtype, rank)).backward()
        shards.append(shards_of(zero))
    return shards


@pytest.mark.step(1, points=4)
def test_gradients_of_16_bits_are_added_in_32(stage_class):
    ranks = toys.run(sixteen_bits, 3, stage_class)
    for case, (dtype, kinds) in enumerate(GIVEN.items()):
        together = torch.cat([flat(rank, shards[case]) for rank, shards in enumerate(ranks)])
        name = str(dtype).removeprefix("torch.")
        assert together.isfinite().all(), (
            f"gradients of {name}: some are 60000 on each of three ranks, and the shards hold inf in place of the "
            "mean: their sum is too large for fp16. Sums run in fp32, and the result is rounded once"
        )
        for first, other, words in kinds:
            mean = ((first + 2 * other) / 3)
            rounded = torch.tensor(mean, dtype=torch.float32).to(dtype).item()
            right = int((together.to(dtype).double() == rounded).sum())
            assert right == 60 // len(kinds), (
                f"gradients of {name}: rank 0 has {first:.6g} and ranks 1 and 2 have {other:.6g}, so that the mean is "
                f"{rounded:.6g}, and the shards hold {nearest(together, mean):.6g}: {words}. Sums run in fp32, and the "
                "result is rounded once"
            )


def nearest(values, wanted):
    return values[(values - wanted).abs().argmin()].item()


def with_a_group(stage_class):
    """This rank's group of ranks 0 and 2, and a stage in it; None on rank 1, which has no part in it."""
    group = dist.new_group([0, 2])
    return None if dist.get_rank() == 1 else build(stage_class, group=group)


GROUP = ("here group= is a group of ranks 0 and 2 of three, and rank 1 has no part in it: is group=self.group passed "
         "to every call?")


def backward_in_a_group(stage_class):
    zero = with_a_group(stage_class)
    if zero is None:
        return None
    zero.model(*toys.tokens(dist.get_rank(), 0)).backward()
    return shards_of(zero)


@pytest.mark.step(1, points=3, stuck=GROUP, left=GROUP, raised=GROUP)
def test_backward_in_a_group(stage_class):
    first, _, second = toys.run(backward_in_a_group, 3, stage_class)
    assert_shards_hold([first, second], gradients_of(2, ranks=(0, 2)), "the mean gradient of ranks 0 and 2, the two "
                       "that are in the stage's group")


def assert_sent(results, volume, when, why):
    """Each rank sent `volume` times Ψ(N−1)/N bytes, or a little more."""
    world_size = len(results)
    example = toys.build(model, 0)
    share = sum(param.nbytes for param in example.parameters()) * (world_size - 1) / world_size
    padding = 4 * checks.most_padding(example, world_size)
    for rank, (_, sent, made) in enumerate(results):
        names = ", ".join(f"{name} {sum(call.name == name for call in made)} times"
                          for name in sorted({call.name for call in made} - {"recv", "barrier"}))
        hint = (" An all-reduce sends twice what a reduce-scatter does, by whatever name it is called."
                if sent - (volume - 1) * share > 1.8 * share else "")
        assert sent <= 1.02 * volume * share + volume * padding + 1024, (
            f"rank {rank} sent {in_words(sent)} in {when}, and {why} sends {in_words(volume * share)}, "
            f"{volume if volume > 1 else ''}Ψ(N−1)/N. It called {names}.{hint}"
        )
        assert sent >= 0.98 * volume * share, (
            f"rank {rank} sent {in_words(sent)} in {when}, and {why} cannot do with less than "
            f"{in_words(volume * share)}. It called {names or 'nothing'}"
        )


# ------------------------------------------------------------------------------- step 2: update, and gather parameters


def first_step(stage_class):
    """Parameters before and after a step of SGD with lr 1, flat, and what the whole step sent. Rank 1 sends late in
    step(), and rank 2 later: who does not wait for them reads too early."""
    torch.use_deterministic_algorithms(True)
    zero, rank = build(stage_class), dist.get_rank()
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    with checks.Calls() as backward:
        zero.model(*toys.tokens(rank, 0)).backward()
    with checks.Calls(pause=0.01 * rank) as step:
        zero.step()
    after = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    return (before, after), backward.sent() + step.sent(), backward.made + step.made


@pytest.mark.step(2, points=6, stuck="every rank must start all all-gathers, in the same order")
@pytest.mark.parametrize("world_size", (2, 3))
def test_every_rank_has_all_updated_parameters(stage_class, world_size):
    results = [result for result, *_ in once(first_step, world_size, stage_class)]
    assert_stepped(results, sum(gradients_of(world_size)) / world_size, world_size)


def assert_stepped(results, mean, world_size, make=model):
    """Every rank's parameters (before, after) have lost the mean gradient [Ψ]: the step of SGD with lr 1."""
    psi, elements = len(mean), differences.Elements(toys.build(make, 0))
    moved = [int((before != after).sum()) for before, after in results]
    assert max(moved) > 0, "step() changed no parameter on any rank"
    for rank, (_, after) in enumerate(results):
        assert after.isfinite().all(), (
            f"after step() rank {rank} has parameters that are NaN: memory was read before its all-gather had ended "
            "(wait), or nobody wrote to it"
        )
    wanted = results[0][0].double() - mean
    # parameters of size 1 lose a gradient: each rounds to fp32, as do some hundred additions before
    bound = 100 * 2**-24 * (1 + mean.abs().max())
    wrong = [(after.double() - wanted).abs() > bound for _, after in results]
    for rank, (before, after) in enumerate(results):
        changed = (wrong[rank] & (before != after))
        example = differences.displaced(after.double(), wanted, changed, elements, bound)
        assert not example, (
            f"after step() rank {rank} has new parameters in wrong places: {example}. Is each rank's shard gathered to "
            "the place that it was cut from, in rank order?"
        )
        differ = results[0][1] != after
        kind = narrowed(changed | differ, after, results[0][1])
        assert not kind, (
            f"after step() {int((changed | differ).sum())} of rank {rank}'s parameters are rounded to 16 bits "
            f"({kind}), and these parameters have 32: update and gather them in their own dtype"
        )
    for rank, (_, after) in enumerate(results):
        differ = results[0][1] != after
        assert not differ.any(), (
            f"after step() rank {rank}'s parameters differ from rank 0's in {int(differ.sum())} of {psi} elements "
            f"(rank 0 changed {moved[0]}, rank {rank} {moved[rank]}): each rank updates the shard it owns, and must "
            "get the others' new parameters: after the update, and it must wait until they are there. "
            f"{unlike(results, rank, differ, elements)}"
        )
    used = results[0][0].double() - results[0][1].double()
    still = (used == 0) & (mean.abs() > 1e-4)
    assert still.sum() < psi / 50, (
        f"{int(still.sum())} of {psi} parameters did not move in step(), though they have a gradient, in "
        f"{elements.listed(still)}: are all buckets updated, and gathered after the update?"
    )
    ratio = (used @ mean / (mean @ mean)).item()
    for times in (2, 3, 4):
        cause = "was the update made more than once" + ", or gradients summed over the ranks" * (times == world_size)
        assert ratio != pytest.approx(times, rel=0.02), f"step() moved parameters {times} times too far: {cause}?"
    assert ratio != pytest.approx(1 / world_size, rel=0.02), (
        f"step() moved parameters {world_size} times too little: were gradients averaged twice?"
    )
    assert ratio != pytest.approx(-1, rel=0.02), "step() went up the gradient, not down"
    if wrong[0].any():
        example = differences.example_of(wrong[0], results[0][1].double(), wanted, elements, 0)
        pytest.fail("step() of SGD with lr 1 must subtract the mean gradient, and did not on rank 0: "
                    f"{example}. Is each shard updated with its own part of the gradient, once?")


def narrowed(changed, one, other):
    """"float16" or "bfloat16", if what changed has no more than 16 bits, on this rank or on the other."""
    for dtype in (torch.bfloat16, torch.float16):
        fits = (one.to(dtype).float() == one) | (other.to(dtype).float() == other)
        if changed.sum() > 50 and fits[changed].float().mean() > differences.MOST:
            return str(dtype).removeprefix("torch.")
    return ""


def unlike(results, rank, differ, elements):
    """An example of where a rank's parameters are not rank 0's."""
    index = int(differ.nonzero()[0])
    (old, here), (_, there) = results[rank], results[0]
    return (f"For example {elements[index]} is {here[index]:.6g} on rank {rank} and {there[index]:.6g} on rank 0, and "
            f"was {old[index]:.6g} before")


def small_steps(stage_class):
    """The parameters before and after a step of a small model, on ranks that are Pythons of their own."""
    zero, rank = build(stage_class, toys.MLP, bucket_bytes=256), dist.get_rank()
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    zero.model(*toys.numbers(rank, 0)).backward()
    zero.step()
    return before, torch.cat([param.flatten() for param in toys.whole_parameters(zero)])


FRESH = ("here each rank is a Python of its own, as with torchrun, with another hash seed: what comes out of a set, or "
         "is sorted by hash() or id(), has another order on each rank. Go through lists and dicts")


@pytest.mark.step(2, points=2, stuck=FRESH, left=FRESH, raised=FRESH)
def test_ranks_with_other_hash_seeds_agree(stage_class):
    results = toys.run(small_steps, 2, stage_class, fresh=True)
    assert_stepped(results, sum(gradients_of(2, make=toys.MLP, batch=toys.numbers)) / 2, 2, make=toys.MLP)


def step_in_a_group(stage_class):
    zero = with_a_group(stage_class)
    if zero is None:
        return None
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    zero.model(*toys.tokens(dist.get_rank(), 0)).backward()
    zero.step()
    return before, torch.cat([param.flatten() for param in toys.whole_parameters(zero)])


@pytest.mark.step(2, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_step_in_a_group(stage_class):
    first, _, second = toys.run(step_in_a_group, 3, stage_class)
    assert_stepped([first, second], sum(gradients_of(2, ranks=(0, 2))) / 2, 2)


class Normed(torch.nn.Module):
    """A batch norm between two layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


def after_a_step(stage_class):
    """The running mean before and after a step, and whether a second backward was refused."""
    zero, rank = build(stage_class, Normed), dist.get_rank()
    means, refused = [zero.model.layers[1].running_mean.clone()], False
    zero.model(*toys.numbers(rank, 0)).backward()
    zero.step()
    means.append(zero.model.layers[1].running_mean.clone())
    try:
        zero.model(*toys.numbers(rank, 1)).backward()
    except Exception:
        refused = True
    return means, refused


@pytest.mark.step(2, points=2)
def test_running_statistics_are_alike(stage_class):
    means = [means for means, _ in once(after_a_step, 2, stage_class)]
    for rank, (_, after) in enumerate(means):
        assert torch.equal(after, means[0][1]), (
            f"after step() batch norm's running mean is {after[0]:.4g}, … on rank {rank} and {means[0][1][0]:.4g}, … "
            "on rank 0: each rank has that of its own data, and ownership.broadcast_statistics gives all rank 0's"
        )
        assert not torch.equal(after, means[rank][0]), "after step() batch norm's running mean is as at the start"


@pytest.mark.step(2, points=1)
def test_a_backward_after_step_is_refused(stage_class):
    for rank, (_, refused) in enumerate(once(after_a_step, 2, stage_class)):
        assert refused, (
            f"backward, step(), backward without zero_grad(): rank {rank} added the second gradient to the first one's "
            "shards without a word. It must be an error: set self.backward.spent in step()"
        )


RECIPES = {
    "AdamW with weight decay": (Recipe(options=dict(checks.ADAM, weight_decay=0.1)), "is weight decay there?"),
    "two parameter groups": (
        Recipe(options=checks.ADAM, groups=checks.matrices_decay),
        "does each shard keep its group's learning rate and weight decay?",
    ),
    "frozen, tied and unused parameters": (
        Recipe(make=checks.Awkward, batch=checks.awkward_batch, options=dict(checks.ADAM, weight_decay=0.5),
               bucket_bytes=100),
        "a frozen parameter must not move, a tied one is updated once, one without a gradient counts as one whose "
        "gradient is zero, so that it decays",
    ),
}


ONE_STEP = {name: (Recipe(**{**vars(recipe), "steps": 1}), hint) for name, (recipe, hint) in RECIPES.items()}


@functools.cache
def in_one_process(name, steps, world_size):
    """What a plain loop over all ranks' data gives, in the recipe's precision and in fp64."""
    recipe = next(recipes[name][0] for recipes in (ONE_STEP, TRAINING, CLIPPED)
                  if name in recipes and recipes[name][0].steps == steps)
    return toys.plain(recipe, world_size), toys.plain(recipe, world_size, torch.float64)


def one_step(stage_class, recipes):
    """{recipe: all parameters after one step}"""
    results, rank = {}, dist.get_rank()
    for name, recipe in recipes.items():
        mine = toys.build(recipe.make, rank)
        groups = {"param_groups": recipe.groups(mine)} if recipe.groups else {}
        zero = stage_class(mine, recipe.optimizer, bucket_bytes=recipe.bucket_bytes, **groups, **recipe.options)
        mine(*recipe.batch(rank, 0)).backward()
        zero.step()
        results[name] = toys.whole_parameters(zero)
    return results


@pytest.mark.step(2, points=4)
def test_a_step_is_the_optimizers(stage_class):
    assert_trained_alike(one_step, stage_class, 2, ONE_STEP)


def assert_trained_alike(train, stage_class, world_size, recipes):
    results = toys.run(train, world_size, stage_class, {name: recipe for name, (recipe, _) in recipes.items()})
    assert_as_in_one_process(results, world_size, recipes)


def assert_as_in_one_process(results, world_size, recipes):
    """As one process that averages over all ranks' data. The bound: what rounding does to that process."""
    for name, (recipe, hint) in recipes.items():
        plain, exact = in_one_process(name, recipe.steps, world_size)
        moved = toys.distance(exact.parameters, list(toys.build(recipe.make, 0).parameters()))
        # 4: a sum may run in any order; and clipping may divide by the norm, or as torch does by a little more
        rounding = 4 * toys.distance(plain.parameters, exact.parameters) + 1e-5 * moved
        assert rounding < 0.1 * moved, "a bound as large as this would let mistakes through"
        for rank, parameters in enumerate(results):
            off = toys.distance(parameters[name], plain.parameters)
            if off <= rounding:
                continue
            ours, theirs = (differences.flattened(tensors) for tensors in (parameters[name], plain.parameters))
            elements = differences.Elements(toys.build(recipe.make, 0))
            wrong = ~((ours - theirs).abs() <= rounding / len(ours) ** 0.5)
            hint = differences.suspected(recipe, world_size, parameters[name], rounding) or f"to look at: {hint}"
            pytest.fail(
                f"{name}, {recipe.steps} step{'s' * (recipe.steps > 1)}: rank {rank} has other parameters than one "
                f"process that trains on all data, off by {off:.2g}, where training moved them by {moved:.2g}: "
                f"{differences.example_of(wrong, ours, theirs, elements, rank)}.\n    {hint[0].upper()}{hint[1:]}"
            )


WIDTHS = {torch.float32: (4, 4 + 8), torch.bfloat16: (2, 2 + 12)}  # bytes a parameter: whole, in shards
Held = namedtuple("Held", "after most sent gathered")  # bytes: after a step, at most in step(), sent in all, in step()


def held(stage_class):
    """Held, of a step of AdamW in each dtype."""
    found, rank = [], dist.get_rank()
    for dtype in WIDTHS:
        memory = Most()
        zero = stage_class(toys.build(model, rank, dtype), optim.AdamW, lr=1e-3, bucket_bytes=BUCKET)
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
            # inside of step() a shard of gradients may be there in fp32, and multiplied with the scale
            assert size.most <= most_held(dtype, 4) + 2 * elements, (
                f"inside of step() rank {rank} of 4 holds up to {size.most / elements:.1f} bytes a parameter with "
                f"AdamW {formula}. What is needed besides is a bucket at a time"
            )


@pytest.mark.step(2, points=4)
def test_a_step_sends_as_much_as_data_parallelism(stage_class):
    assert_sent(once(first_step, 3, stage_class), 2, "a whole step",
                "a reduce-scatter of gradients and an all-gather of parameters, as much as data parallelism,")
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


def second_step(stage_class):
    """The gradient shards of the second step's backward, and those after a third one that was dropped."""
    zero, rank, shards = build(stage_class, lr=0.0), dist.get_rank(), []  # parameters stay, so gradients are known
    for step in range(4):
        zero.model(*toys.tokens(rank, step)).backward()
        shards.append(shards_of(zero))
        if step != 2:
            zero.step()
        zero.zero_grad()
    return shards[1], shards[3]


@pytest.mark.step(3, points=4, stuck="this is the second step: what was counted or kept in the first one must start "
                  "afresh")
def test_the_second_step_starts_afresh(stage_class):
    shards = [second for second, _ in once(second_step, 2, stage_class)]
    first, second = gradients_of(2, steps=[0]), gradients_of(2, steps=[1])
    both = sum(first) / 2 + sum(second) / 2
    parts = torch.cat([flat(rank, own) for rank, own in enumerate(shards)])
    if len(parts) >= len(both):
        together = torch.cat([both, both.new_zeros(len(parts) - len(both))])
        assert not alike(parts, together, 1e-5 * both.abs().max()), (
            "the second step's gradient is the sum of both steps': zero_grad() left the first one's in the shards"
        )
    assert_shards_hold(shards, second, "the mean gradient of the second step")
    dropped = [after for _, after in once(second_step, 2, stage_class)]
    assert_shards_hold(dropped, gradients_of(2, steps=[3]), "the mean gradient of the last backward, where the one "
                       "before was dropped (zero_grad() without step())")


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


@pytest.mark.step(3, points=4)
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


def memory_of_training(stage_class):
    """Bytes beyond the parameters in each backward after the first one: (when, at most meanwhile, afterwards)."""
    rank, memory, found = dist.get_rank(), Most(), []
    zero = build(stage_class, wide, bucket_bytes=LAYER, lr=0.0)
    memory.listen(zero.model)
    whole, shard = LAYERS * LAYER, LAYERS * LAYER / dist.get_world_size()
    for step, micros in enumerate((1, 3, 1)):
        for micro in range(micros):
            memory.most = 0
            with zero.no_sync() if micro + 1 < micros else contextlib.nullcontext():
                zero.model(*wide_numbers(rank, step + micro)).backward()
            when = f"backward of step {step + 1}" + f", micro-batch {micro + 1}" * (micros > 1)
            found.append((when, memory.most - whole, memory.now(whole + shard + SPARE) - whole))
        zero.step()
        zero.zero_grad()
        found.append((f"zero_grad of step {step + 1}", 0, memory.now(whole + shard + SPARE) - whole))
    return found


@pytest.mark.step(3, points=3)
def test_memory_stays_as_in_the_first_backward(stage_class):
    for rank, found in enumerate(toys.run(memory_of_training, 4, stage_class)):
        for when, most, after in found:
            assert after <= LAYERS * LAYER / 4 + SPARE, (
                f"after {when} rank {rank} holds {in_words(after)} besides the parameters, and P_os+g leaves it "
                f"{in_words(LAYERS * LAYER / 4)}, its shard of {in_words(LAYERS * LAYER)} of gradients: what stays "
                "from one backward to the next, and grows with each?"
            )
            assert most <= DURING, piled_up(f"in {when}", most, rank)


def small_updates(stage_class):
    """Parameters that are 1, in bf16, after 25 steps of 0.0015."""
    zero = stage_class(Given().bfloat16(), optim.SGD, lr=1e-3)
    for _ in range(25):
        zero.model(torch.full((60,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).backward()
        zero.step()
        zero.zero_grad()
    return torch.cat(toys.whole_parameters(zero)).double()


@pytest.mark.step(3, points=2)
def test_small_steps_in_bf16_add_up(stage_class):
    wanted = torch.tensor(1 - 25 * 0.0015).bfloat16().item()
    for rank, parameter in enumerate(toys.run(small_updates, 2, stage_class)):
        assert (parameter == wanted).all(), (
            f"25 steps of 0.0015 from 1 on lead to {wanted:.4g} in bf16, and rank {rank} has {parameter[0]:.4g}: each "
            "is too small to be seen in bf16, so the fp32 master must be updated, and rounded to the parameter"
        )


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
}


def trained(stage_class, recipes):
    """{recipe: all parameters after training with it}"""
    return {name: toys.train(stage_class, recipe).parameters for name, recipe in recipes.items()}


@pytest.mark.step(3, points=4, stuck="several steps, with layers that get a gradient in some steps only")
def test_trains_as_one_process_would(stage_class):
    assert_trained_alike(trained, stage_class, 3, TRAINING)


# ------------------------------------------------------------------------------- step 4: clipping and the loss scale


LIMITS = (0.1, 1e6)  # for the norm: below it, and above


def clipped(stage_class):
    """For each limit: what clip_grad_norm_ returned, and its shape (None: it is no tensor), how far SGD with lr 1 went
    then, and this rank's shards before and after clipping."""
    torch.use_deterministic_algorithms(True)
    results, rank = [], dist.get_rank()
    for max_norm in LIMITS:
        zero = build(stage_class)
        zero.model(*toys.tokens(rank, 0)).backward()
        shards, before = shards_of(zero), toys.whole_parameters(zero)
        norm = zero.clip_grad_norm_(max_norm)
        shape = list(norm.shape) if isinstance(norm, torch.Tensor) else None
        clipped_shards = shards_of(zero)
        zero.step()
        change = toys.distance(before, toys.whole_parameters(zero))
        results.append((float(norm), shape, change, shards, clipped_shards))
    return results


EVERYBODY = "the norm of the whole gradient needs a word from every rank: all must take part"


@pytest.mark.step(4, points=5, stuck=EVERYBODY)
@pytest.mark.parametrize("world_size", (2, 3))
def test_clips_by_the_global_norm(stage_class, world_size):
    true = (sum(gradients_of(world_size)) / world_size).norm().item()
    results = once(clipped, world_size, stage_class)
    for case, max_norm in enumerate(LIMITS):
        local = [flat(rank, of_rank[case][3]).norm().item() for rank, of_rank in enumerate(results)]
        for rank, of_rank in enumerate(results):
            norm, _, change, *_ = of_rank[case]
            assert_norm(norm, true, local, max_norm, rank)
            size = min(max_norm, true)
            assert change == pytest.approx(size, rel=1e-3), (
                f"after clip_grad_norm_({max_norm:g}) step() of SGD with lr 1 moved rank {rank}'s parameters by "
                f"{change:.4g}, and it must be {size:.4g}: "
                + ("a smaller norm than max_norm must be left alone" if max_norm > true else
                   "clipping scales the gradient that the update uses, all of it alike")
            )


def assert_norm(norm, true, local, max_norm, rank):
    if norm == pytest.approx(true, rel=1e-4):
        return
    told = f"clip_grad_norm_ returned {norm:.4g} on rank {rank}, and the whole gradient's norm is {true:.4g}"
    assert norm != pytest.approx(local[rank], rel=1e-4), (
        f"{told}: it is the norm of this rank's shards alone, the other ranks' are missing"
    )
    assert norm != pytest.approx(sum(local), rel=1e-4), (
        f"{told}: the ranks' norms were added, but their squares must be"
    )
    assert norm != pytest.approx(min(max_norm, true), rel=1e-4), (
        f"{told}: it returned the norm after clipping, and the one before is wanted"
    )
    pytest.fail(f"{told}: the squares of all ranks' shards add up to its square")


@pytest.mark.step(4, points=1)
def test_clipping_returns_a_tensor_and_leaves_the_gradients(stage_class):
    for rank, of_rank in enumerate(once(clipped, 2, stage_class)):
        for (_, shape, _, before, after), max_norm in zip(of_rank, LIMITS, strict=True):
            assert torch.equal(flat(rank, before), flat(rank, after)), (
                f"clip_grad_norm_({max_norm:g}) changed the gradients in rank {rank}'s shards: it changes "
                "self.gradient_scale alone, and step() multiplies with that"
            )
            assert shape == [], (
                f"clip_grad_norm_ returned {'no tensor' if shape is None else f'a tensor of shape {shape}'} on rank "
                f"{rank}: the norm is a 0-dim tensor, as torch's own clip_grad_norm_ returns it"
            )


def clipped_in_a_group(stage_class):
    zero = with_a_group(stage_class)
    if zero is None:
        return None
    zero.model(*toys.tokens(dist.get_rank(), 0)).backward()
    return float(zero.clip_grad_norm_(0.1)), shards_of(zero)


@pytest.mark.step(4, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_clips_in_a_group(stage_class):
    first, _, second = toys.run(clipped_in_a_group, 3, stage_class)
    true = (sum(gradients_of(2, ranks=(0, 2))) / 2).norm().item()
    local = [flat(0, first[1]).norm().item(), flat(2, second[1]).norm().item()]
    for place, (norm, _) in enumerate((first, second)):
        assert_norm(norm, true, local, 0.1, place)


CLIPPED = {
    "training with clipping": (Recipe(options=checks.ADAM, clip=0.1, accumulate=2),
                               "does one step's clipping end with zero_grad()?"),
    "clipping with frozen, tied and unused parameters": (
        Recipe(make=checks.Awkward, batch=checks.awkward_batch, optimizer=optim.SGD, options=dict(lr=0.3), clip=0.1,
               bucket_bytes=100, steps=3),
        "each element counts once, also of a parameter that the model uses twice"),
    "fp16, a loss scale, and clipping": (
        Recipe(optimizer=optim.SGD, options=dict(lr=3.0), dtype=torch.float16, scale=1024.0, clip=0.1, accumulate=2,
               steps=3),
        "the loss was multiplied by 1024, and self.gradient_scale is 1/1024 when clip_grad_norm_ is called: the norm "
        "is that of the gradient times this scale, and clipping multiplies the scale"),
}


def trained_with_norms(stage_class, recipes):
    """{recipe: (norms, all parameters)}"""
    runs = {name: toys.train(stage_class, recipe) for name, recipe in recipes.items()}
    return {name: (run.norms, run.parameters) for name, run in runs.items()}


@pytest.mark.step(4, points=4)
def test_trains_with_clipping(stage_class):
    results = toys.run(trained_with_norms, 2, stage_class, {name: recipe for name, (recipe, _) in CLIPPED.items()})
    for name, (recipe, hint) in CLIPPED.items():
        plain, _ = in_one_process(name, recipe.steps, 2)
        near = 1e-4 if recipe.dtype.itemsize == 4 else 2**-7
        for rank, found in enumerate(results):
            norms, _ = found[name]
            first = norms[0], plain.norms[0]  # later ones follow from the parameters
            assert first[0] == pytest.approx(first[1], rel=near), (
                f"{name}: clip_grad_norm_ returned {first[0]:.4g} on rank {rank} in the first step, and the gradient's "
                f"norm is {first[1]:.4g}. {hint[0].upper()}{hint[1:]}"
            )
    assert_as_in_one_process([{name: parameters for name, (_, parameters) in found.items()} for found in results], 2,
                             CLIPPED)


def overflow(stage_class):
    """Which parameters are finite after a step in which one gradient of one rank is infinite."""
    zero, rank = build(stage_class, toys.Transformer), dist.get_rank()
    loss = zero.model(*toys.tokens(rank, 0))
    if rank == 1:
        loss = loss + float("inf") * zero.model.blocks[0].down.bias[-1]
    loss.backward()
    finite = [bool(shard.isfinite().all()) for shard in zero.reduced_gradients()]
    zero.step()
    return torch.cat([param.flatten() for param in toys.whole_parameters(zero)]).isfinite(), finite


@pytest.mark.step(4, points=3, stuck="one gradient is infinite, and one rank alone sees it in its shard: all ranks "
                  "must take the step, or none")
def test_overflow_on_one_rank_is_everybodys(stage_class):
    (one, shards_of_one), (two, shards_of_two) = toys.run(overflow, 2, stage_class)
    assert not all(shards_of_one + shards_of_two), (
        "one gradient of one rank is infinite, so its mean is, and all numbers in all ranks' reduced_gradients() are "
        "finite: it is hidden. A loss scaler looks there to skip the step on all ranks, and would take it"
    )
    assert torch.equal(one, two), (
        f"one gradient is infinite: afterwards rank 0 has {int((~one).sum())} parameters that are not finite, and rank "
        f"1 {int((~two).sum())}. One rank alone sees it in its shard, and all ranks must take the step, or none"
    )
    assert_overflow_is_shared(stage_class)


STEPS = ((True, 64.0, True), (False, 32.0, False), (True, 32.0, True), (True, 64.0, True))


def assert_overflow_is_shared(stage_class):
    try:
        ranks = toys.run(checks.overflow_on_one_rank, 2, stage_class, timeout=20)
    except (TimeoutError, RankError) as error:
        if isinstance(error, RankError) and notes.Mismatch.__name__ not in str(error):
            raise
        pytest.fail("fp16, and a gradient that is infinite on one rank in the second step: the ranks wait for each "
                    "other, one of them has skipped the step alone")
    for rank, steps in enumerate(ranks):
        for number, (found, wanted) in enumerate(zip(steps, STEPS, strict=True), 1):
            told, right = (f"step {'taken' if taken else 'skipped'}, parameters {'moved' if moved else 'stayed'}, loss "
                           f"scale then {scale:g}" for taken, scale, moved in (found, wanted))
            assert tuple(found) == wanted, (
                f"fp16 with a loss scaler, where one gradient of rank 1 is infinite in step 2. In step {number} rank "
                f"{rank} had: {told}. Right is: {right}. The scaler looks at reduced_gradients(), and calls step() "
                "where all are finite"
            )


# --------------------------------------------------------------- all steps: what the kernel counts, at a plain size

DEEP, BROAD = 32, 512
PSI = 4 * DEEP * (BROAD * BROAD + BROAD)  # bytes: 34 MB
ROOM = 8 * PSI / DEEP + 6e6  # a few open buckets, and what Python and gloo need besides


def large():
    return toys.MLP(*[BROAD] * (DEEP + 1))


def large_numbers(rank, step):
    return toys.numbers(rank, step, BROAD, BROAD, batch=2)


def trained_large(stage_class, optimizer, micros, steps):
    """Of this rank's gradient shards, or, after steps, of all parameters: their sum, and the sum of their squares."""
    zero, rank = build(stage_class, large, optimizer, bucket_bytes=PSI // DEEP, lr=1e-3), dist.get_rank()
    for step in range(max(1, steps)):
        for micro in range(micros):
            with zero.no_sync() if micro + 1 < micros else contextlib.nullcontext():
                zero.model(*large_numbers(rank, step * micros + micro)).backward()
        if steps:
            zero.step()
            zero.zero_grad()
    values = zero.model.parameters() if steps else zero.reduced_gradients()
    values = [value.detach() for value in values if value is not None]
    return sum(value.double().sum().item() for value in values), sum(value.double().square().sum().item()
                                                                    for value in values)


def assert_kernel_agrees(stage_class, world_size, optimizer, held, volume, micros=1, steps=0):
    """Whatever a rank says of itself: the kernel counts what it holds and sends, and it computes the right thing with
    it. `held`: bytes of model states that it needs at most; `volume`: what all ranks send, in units of Ψ(N−1)."""
    results, accounts = toys.run_counted(trained_large, world_size, stage_class, optimizer, micros, steps)
    assert_sums(results, world_size, optimizer, micros, steps)
    for rank, account in enumerate(accounts):
        assert account.held is None or account.held <= held + ROOM, (
            f"a model of {in_words(PSI)} on {world_size} ranks: rank {rank} holds up to {in_words(account.held)}, as "
            f"the kernel counts, and P_os+g needs {in_words(held)} and some open buckets: whole gradients, or copies "
            "of something, live in its memory"
        )
    if accounts and accounts[0].sent is not None:
        sent, least = sum(account.sent for account in accounts), volume * PSI * (world_size - 1)
        assert sent >= 0.98 * least, (
            f"a model of {in_words(PSI)} on {world_size} ranks: they send {in_words(sent)}, as the kernel counts, and "
            f"what has to be sent is {in_words(least)}: something is not reduced, or not gathered"
        )
        assert sent <= 2 * least, (
            f"a model of {in_words(PSI)} on {world_size} ranks: they send {in_words(sent)}, as the kernel counts, and "
            f"what has to be sent is {in_words(least)}"
        )


def assert_sums(results, world_size, optimizer, micros, steps):
    model = toys.build(large, 0)
    update = optimizer(model.parameters(), lr=1e-3)
    for step in range(max(1, steps)):
        update.zero_grad()
        for rank in range(world_size):
            for micro in range(micros):
                (model(*large_numbers(rank, step * micros + micro)) / world_size).backward()
        if steps:
            update.step()
    values = [param.detach() if steps else param.grad for param in model.parameters()]
    wanted = sum(value.double().square().sum().item() for value in values)
    found = [squares for _, squares in results] if steps else [sum(squares for _, squares in results)]
    for rank, squares in enumerate(found):
        assert squares == pytest.approx(wanted, rel=1e-3), (
            f"a model of {in_words(PSI)} on {world_size} ranks: the squares of "
            + (f"rank {rank}'s parameters" if steps else "all gradient shards")
            + f" add up to {squares:.6g}, and {wanted:.6g} is right"
        )


@pytest.mark.step(1, points=0)
def test_the_kernel_counts_a_backward(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.SGD, PSI + PSI / 4, 2)  # rank 0's parameters, and a reduce-scatter


@pytest.mark.step(2, points=0)
def test_the_kernel_counts_a_step(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.AdamW, PSI + 3 * PSI / 4, 3, steps=1)


@pytest.mark.step(3, points=0)
def test_the_kernel_counts_micro_batches(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.SGD, PSI + PSI / 4, 4, micros=3)
