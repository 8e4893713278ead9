"""Lesson 3's assignment, P_os+g, in steps: what is owned, sent and computed, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference.
"""

import contextlib
import functools

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words, once
from torch import optim
from toys import Recipe

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


def gradients_of(world_size, steps=(0,), make=model, batch=toys.tokens):
    """Each rank's own gradient, summed over these batches, [Ψ] in fp64. A missing one is zero."""
    pieces = []
    for rank in range(world_size):
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


@pytest.mark.step(1, points=12)
@pytest.mark.parametrize("world_size", (2, 3))
def test_shards_hold_the_mean_gradient(stage_class, world_size):
    shards = [shards for shards, *_ in once(first_backward, world_size, stage_class)]
    assert_shards_hold(shards, gradients_of(world_size))


def assert_shards_hold(shards, gradients, what="the mean gradient"):
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
    lost = int((together == 0).sum() - (wanted == 0).sum())
    assert lost <= 0, (
        f"{lost} of {len(mean)} gradients are lost: the shards hold zeros in their place. Is each bucket put together "
        "from all its parameters, also the ones that lie in two buckets, and reduced when it is complete?"
    )
    off = (together.sort().values - wanted.sort().values).abs().max()
    pytest.fail(f"the shards of all ranks together are not {what}: sorted, some differ by {off:.2g}, and the largest "
                f"gradient is {mean.abs().max():.2g}")


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


@pytest.mark.step(1, points=6, stuck="one parameter got a gradient on rank 0 alone, and one on no rank at all: each "
                  "rank must reduce all buckets in the same order all the same, with zero for what is missing",
                  raised="a parameter may get no gradient on a rank, and its .grad is None then: it counts as zero")
def test_a_missing_gradient_is_zero(stage_class):
    gradients = gradients_of(3, make=checks.Awkward, batch=checks.awkward_batch)
    assert_shards_hold(once(awkward_backward, 3, stage_class), gradients, "the mean gradient, where one parameter got "
                       "its gradient on rank 0 alone, which counts as zero on the others,")


LAYERS, WIDTH = 24, 40
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes, also of a bucket here
SPARE = 2.5 * LAYER  # a layout may pad, and a bucket may be kept to be filled again


def wide():
    return toys.MLP(*[WIDTH] * (LAYERS + 1))


def wide_numbers(rank, step):
    return toys.numbers(rank, step, WIDTH, WIDTH, batch=2)


def memory_of_a_backward(stage_class):
    """Bytes of gradients that live after backward, and at most when a gradient comes; how many param.grad are left."""
    rank, most = dist.get_rank(), 0
    zero = build(stage_class, wide, bucket_bytes=LAYER)

    def look(gradient):
        nonlocal most
        most = max(most, checks.live_bytes())

    for param in zero.model.parameters():
        param.register_hook(look)
    before = checks.live_bytes()
    loss = zero.model(*wide_numbers(rank, 0))
    loss.backward()
    del loss
    after = checks.live_bytes(until=before + LAYERS * LAYER / dist.get_world_size() + SPARE, looks=LOOKS)
    return after - before, most - before, sum(param.grad is not None for param in zero.model.parameters())


@pytest.mark.step(1, points=8)
def test_no_whole_gradients_after_backward(stage_class):
    for rank, (after, _, left) in enumerate(once(memory_of_a_backward, 4, stage_class)):
        assert after <= LAYERS * LAYER / 4 + SPARE, (
            f"rank {rank} still holds {in_words(after)} of gradients after backward: P_os+g leaves it "
            f"{in_words(LAYERS * LAYER / 4)}, its shard of {in_words(LAYERS * LAYER)}"
            + (f" ({left} parameters still have their .grad)" if left else "")
        )


@pytest.mark.step(1, points=8)
def test_no_whole_gradients_during_backward(stage_class):
    for rank, (_, most, _) in enumerate(once(memory_of_a_backward, 4, stage_class)):
        # Shards; a bucket that is filled and one that is reduced, its copy from the other ranks, its part; gradients
        # that autograd hands over, and activations of two samples.
        assert most <= LAYERS * LAYER / 4 + 6.5 * LAYER, (
            f"during backward up to {in_words(most)} of gradients live on rank {rank}, of {in_words(LAYERS * LAYER)} "
            f"in all: whole gradients pile up. With buckets of {in_words(LAYER)} P_os+g needs its shards, "
            f"{in_words(LAYERS * LAYER / 4)}, and a few open buckets: reduce each as soon as it is complete, "
            "and free it"
        )


@pytest.mark.step(1, points=6)
def test_backward_sends_a_reduce_scatter(stage_class):
    assert_sent(once(first_backward, 3, stage_class), 1, "backward", "a reduce-scatter of the gradients")


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


# ------------------------------------------------------------------------------- step 2: update, and gather parameters


def first_step(stage_class):
    """Parameters before and after a step of SGD with lr 1, flat, and what the whole step sent."""
    torch.use_deterministic_algorithms(True)
    zero, rank = build(stage_class), dist.get_rank()
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    with checks.Calls() as calls:
        zero.model(*toys.tokens(rank, 0)).backward()
        zero.step()
    after = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    return (before, after), calls.sent(), calls.made


@pytest.mark.step(2, points=10, stuck="every rank must start all all-gathers, in the same order")
@pytest.mark.parametrize("world_size", (2, 3))
def test_every_rank_has_all_updated_parameters(stage_class, world_size):
    gradients = gradients_of(world_size)
    mean = sum(gradients) / world_size
    results = [result for result, *_ in once(first_step, world_size, stage_class)]
    psi = len(mean)
    moved = [int((before != after).sum()) for before, after in results]
    assert max(moved) > 0, "step() changed no parameter on any rank"
    for rank, (_, after) in enumerate(results):
        assert after.isfinite().all(), (
            f"after step() rank {rank} has parameters that are NaN: memory was read before its all-gather had ended "
            "(wait), or nobody wrote to it"
        )
    for rank, (_, after) in enumerate(results):
        differ = int((after != results[0][1]).sum())
        assert not differ, (
            f"after step() rank {rank}'s parameters differ from rank 0's in {differ} of {psi} elements (rank 0 changed "
            f"{moved[0]}, rank {rank} {moved[rank]}): each rank updates the shard it owns, and must get the others' "
            "new parameters: after the update, and it must wait until they are there"
        )
    used = results[0][0].double() - results[0][1].double()
    still = int(((used == 0) & (mean.abs() > 1e-4)).sum())
    assert still < psi / 50, (
        f"{still} of {psi} parameters did not move in step(), though they have a gradient: are all buckets updated, "
        "and gathered after the update?"
    )
    ratio = (used @ mean / (mean @ mean)).item()
    assert ratio != pytest.approx(world_size, rel=0.02), (
        f"step() moved parameters {world_size} times too far: were gradients summed over the ranks, not averaged, or "
        "the update made more than once?"
    )
    assert ratio != pytest.approx(1 / world_size, rel=0.02), (
        f"step() moved parameters {world_size} times too little: were gradients averaged twice?"
    )
    assert ratio != pytest.approx(-1, rel=0.02), "step() went up the gradient, not down"
    # parameters of size 1 lose a gradient: each rounds to fp32, as do some hundred additions before
    off = (used - mean).abs()
    wrong = int((off > 100 * 2**-24 * (1 + mean.abs().max())).sum())
    assert not wrong, (
        f"step() of SGD with lr 1 must subtract the mean gradient, and did not for {wrong} of {psi} parameters (off "
        f"by up to {off.max():.2g}): is each shard updated with its own part of the gradient, once?"
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


@pytest.mark.step(2, points=7)
def test_a_step_is_the_optimizers(stage_class):
    assert_trained_alike(one_step, stage_class, 2, ONE_STEP)


def assert_trained_alike(train, stage_class, world_size, recipes):
    """As one process that averages over all ranks' data. The bound: what rounding does to that process."""
    results = toys.run(train, world_size, stage_class, {name: recipe for name, (recipe, _) in recipes.items()})
    for name, (recipe, hint) in recipes.items():
        plain, exact = in_one_process(name, recipe.steps, world_size)
        rounding = 4 * toys.distance(plain.parameters, exact.parameters)  # 4: a sum may run in any order
        moved = toys.distance(exact.parameters, list(toys.build(recipe.make, 0).parameters()))
        assert rounding < 0.1 * moved, "a bound as large as this would let mistakes through"
        for rank, parameters in enumerate(results):
            off = toys.distance(parameters[name], plain.parameters)
            assert off <= rounding, (
                f"{name}, {recipe.steps} step{'s' * (recipe.steps > 1)}: rank {rank} has other parameters than one "
                f"process that trains on all data, off by {off:.2g}, where training moved them by {moved:.2g}. To look "
                f"at: {hint}"
            )


def held_after_a_step(stage_class):
    """Bytes that live after a step because of model and stage, elements of the model, and the most that is right."""
    rank, world_size, before = dist.get_rank(), dist.get_world_size(), checks.live_bytes()
    zero = build(stage_class, optimizer=optim.AdamW, lr=1e-3)
    zero.model(*toys.tokens(rank, 0)).backward()
    zero.step()
    elements = sum(param.numel() for param in zero.model.parameters())
    padded = elements + checks.most_padding(zero.model, world_size)
    limit = (4 + 12 / world_size) * padded + 2 * BUCKET + 1024
    return checks.live_bytes(until=before + limit, looks=LOOKS) - before, elements, limit


@pytest.mark.step(2, points=4)
def test_holds_shards_after_a_step(stage_class):
    for rank, (size, elements, limit) in enumerate(toys.run(held_after_a_step, 4, stage_class)):
        assert size <= limit, (
            f"rank {rank} of 4 holds {size / elements:.1f} bytes a parameter after a step of AdamW in fp32, and P_os+g "
            "4 + (4 + 8)/N = 7: parameters whole; gradients, momentum and variance of its shard alone"
        )


@pytest.mark.step(2, points=4)
def test_a_step_sends_as_much_as_data_parallelism(stage_class):
    assert_sent(once(first_step, 3, stage_class), 2, "a whole step",
                "a reduce-scatter of gradients and an all-gather of parameters, as much as data parallelism,")


# ------------------------------------------------------------------------------- step 3: zero_grad, and accumulation


def second_step(stage_class):
    """The gradient shards of the second step's backward."""
    zero, rank = build(stage_class, lr=0.0), dist.get_rank()  # parameters stay, so gradients are known
    for step in range(2):
        zero.model(*toys.tokens(rank, step)).backward()
        shards = shards_of(zero)
        zero.step()
        zero.zero_grad()
    return shards


@pytest.mark.step(3, points=6, stuck="this is the second step: what was counted or kept in the first one must start "
                  "afresh")
def test_the_second_step_starts_afresh(stage_class):
    shards = once(second_step, 2, stage_class)
    first, second = gradients_of(2, steps=[0]), gradients_of(2, steps=[1])
    both = sum(first) / 2 + sum(second) / 2
    parts = torch.cat([flat(rank, own) for rank, own in enumerate(shards)])
    if len(parts) >= len(both):
        together = torch.cat([both, both.new_zeros(len(parts) - len(both))])
        assert not alike(parts, together, 1e-5 * both.abs().max()), (
            "the second step's gradient is the sum of both steps': zero_grad() left the first one's in the shards"
        )
    assert_shards_hold(shards, second, "the mean gradient of the second step")


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


@pytest.mark.step(3, points=5)
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
    assert_shards_hold(shards, gradients(steps=[0, 1, 2]), "the mean gradient, summed over three micro-batches")


@pytest.mark.step(3, points=3)
def test_micro_batches_wait_in_shards(stage_class):
    for rank, (_, between) in enumerate(once(accumulated, 2, stage_class)):
        assert between <= LAYERS * LAYER / 2 + SPARE, (
            f"between two micro-batches rank {rank} holds {in_words(between)} of gradients, and its shard is "
            f"{in_words(LAYERS * LAYER / 2)}: in P_os+g each micro-batch is reduced, whole gradients have no place to "
            "wait"
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
    "bf16": (Recipe(options=checks.ADAM, dtype=torch.bfloat16),
             "are the fp32 masters updated, and rounded to the parameters?"),
    "layers that are left out in turn": (checks.RECIPES["another order in each step"],
                                         "a layer without gradient counts as one whose gradient is zero"),
}


def trained(stage_class, recipes):
    """{recipe: all parameters after training with it}"""
    return {name: toys.train(stage_class, recipe).parameters for name, recipe in recipes.items()}


@pytest.mark.step(3, points=6, stuck="several steps, with layers that get a gradient in some steps only")
def test_trains_as_one_process_would(stage_class):
    assert_trained_alike(trained, stage_class, 3, TRAINING)


# ------------------------------------------------------------------------------- step 4: clipping and the loss scale


def clipped(stage_class, max_norm):
    """What clip_grad_norm_ returned, how far SGD with lr 1 went then, and this rank's shards."""
    torch.use_deterministic_algorithms(True)
    zero, rank = build(stage_class), dist.get_rank()
    zero.model(*toys.tokens(rank, 0)).backward()
    norm, shards, before = zero.clip_grad_norm_(max_norm), shards_of(zero), toys.whole_parameters(zero)
    zero.step()
    return float(norm), toys.distance(before, toys.whole_parameters(zero)), shards


@pytest.mark.step(4, points=9, stuck="the norm of the whole gradient needs a word from every rank: all must take part")
@pytest.mark.parametrize("world_size", (2, 3))
def test_clips_by_the_global_norm(stage_class, world_size):
    gradients = gradients_of(world_size)
    true = (sum(gradients) / world_size).norm().item()
    for max_norm in (0.1, 1e6):
        results = toys.run(clipped, world_size, stage_class, max_norm)
        local = [flat(rank, shards).norm().item() for rank, (_, _, shards) in enumerate(results)]
        for rank, (norm, change, _) in enumerate(results):
            size = min(max_norm, true)
            other = norm != pytest.approx(true, rel=1e-4)
            told = f"clip_grad_norm_ returned {norm:.4g} on rank {rank}, and the whole gradient's norm is {true:.4g}"
            assert not (other and norm == pytest.approx(local[rank], rel=1e-4)), (
                f"{told}: it is the norm of this rank's shards alone, the other ranks' are missing"
            )
            assert not (other and norm == pytest.approx(sum(local), rel=1e-4)), (
                f"{told}: the ranks' norms were added, but their squares must be"
            )
            assert not (other and norm == pytest.approx(size, rel=1e-4)), (
                f"{told}: it returned the norm after clipping, and the one before is wanted"
            )
            assert not other, f"{told}: the squares of all ranks' shards add up to its square"
            assert change == pytest.approx(size, rel=1e-3), (
                f"after clip_grad_norm_({max_norm:g}) step() of SGD with lr 1 moved rank {rank}'s parameters by "
                f"{change:.4g}, and it must be {size:.4g}: "
                + ("a smaller norm than max_norm must be left alone" if max_norm > true else
                   "clipping scales the gradient that the update uses, all of it alike")
            )


CLIPPED = {
    "training with clipping": (Recipe(options=checks.ADAM, clip=0.1, accumulate=2),
                               "does one step's clipping end with zero_grad()?"),
}


@pytest.mark.step(4, points=3)
def test_trains_with_clipping(stage_class):
    assert_trained_alike(trained, stage_class, 2, CLIPPED)


def overflow(stage_class):
    """Which parameters are finite after a step in which one gradient of one rank is infinite."""
    zero, rank = build(stage_class, toys.Transformer), dist.get_rank()
    loss = zero.model(*toys.tokens(rank, 0))
    if rank == 1:
        loss = loss + float("inf") * zero.model.blocks[0].down.bias[-1]
    loss.backward()
    zero.step()
    return torch.cat([param.flatten() for param in toys.whole_parameters(zero)]).isfinite()


@pytest.mark.step(4, points=3, stuck="one gradient is infinite, and one rank alone sees it in its shard: all ranks "
                  "must take the step, or none")
def test_overflow_on_one_rank_is_everybodys(stage_class):
    one, two = toys.run(overflow, 2, stage_class)
    assert torch.equal(one, two), (
        f"one gradient is infinite: afterwards rank 0 has {int((~one).sum())} parameters that are not finite, and rank "
        f"1 {int((~two).sum())}. One rank alone sees it in its shard, and all ranks must take the step, or none"
    )
    checks.assert_overflow_is_shared(stage_class, 2)


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


@pytest.mark.step(1, points=0, cap=18)
def test_the_kernel_counts_a_backward(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.SGD, PSI + PSI / 4, 2)  # rank 0's parameters, and a reduce-scatter


@pytest.mark.step(2, points=0, cap=17)
def test_the_kernel_counts_a_step(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.AdamW, PSI + 3 * PSI / 4, 3, steps=1)


@pytest.mark.step(3, points=0, cap=17)
def test_the_kernel_counts_micro_batches(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.SGD, PSI + PSI / 4, 4, micros=3)
