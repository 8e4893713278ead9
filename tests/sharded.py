"""Sharded stages: what the checks of lessons 02 to 04 have in common. Runs in a rank, and what is found in them later.

Functions that run in a rank take the class under test, and know of it what a user does. They travel to the ranks by
value, as those of the test files do: this file is not there.
"""

import contextlib
import sys

import checks
import cloudpickle
import differences
import pytest
import torch
import torch.distributed as dist
import toys
from checks import in_words
from torch import optim

from zero_minimal.guards import collective_fingerprint as notes
from zero_minimal.meters.memory import Ledger
from zero_minimal.processes.ranks import RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BUCKET = 2**14  # bytes; the model has 15 such buckets and a rest
LOOKS = 10  # at memory that still lives, a twentieth of a second apart


def model():
    return toys.Transformer(hidden=45)


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


def first_backward(stage_class):
    """The first backward pass: this rank's gradient shards, and what it sent. New memory comes filled with NaN."""
    torch.use_deterministic_algorithms(True)
    zero, rank = build(stage_class), dist.get_rank()
    with checks.slow_motion(zero.model), checks.Calls() as calls:
        zero.model(*toys.tokens(rank, 0)).backward()
        shards = shards_of(zero)
    return shards, calls.sent(), calls.made


def assert_shards_hold(shards, gradients, what="the mean gradient", make=model):
    """All ranks' shards together are the mean of their gradients [Ψ], whatever the layout is: the same numbers, sorted,
    but for the zeros of padding. Sorting makes no difference larger, so rounding is the only reason for one."""
    world_size, mean = len(shards), sum(gradients) / len(gradients)
    parts = [flat(rank, own) for rank, own in enumerate(shards)]
    assert any(part.any() for part in parts), (
        "the shards of all ranks hold nothing but zeros: no gradient has got into what was reduced. What autograd made "
        "is in each param.grad: is it copied to where the reduction reads it, before the reduction starts "
        "(bucket.fuse_gradients)?"
    )
    for rank, part in enumerate(parts):
        assert part.numel() < len(mean), (
            f"rank {rank}'s reduced_gradients() hold {part.numel()} elements, and the whole gradient has {len(mean)}: "
            f"1/{world_size} of it is a rank's, about {len(mean) // world_size}"
        )
        assert part.isfinite().all(), (
            f"rank {rank}'s gradient shard holds NaN: memory that nobody wrote to (torch.empty, or no gradient was "
            "copied, bucket.fuse_gradients), that was read before its reduction had ended (wait), or that was freed "
            "while the reduction was under way"
        )
        for other in range(rank):
            assert not (part.any() and torch.equal(part, parts[other])), (
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
    assert lost <= 2, (  # of so many sums one or two are 0 by chance
        f"{lost} of {len(mean)} gradients are lost: the shards hold zeros in their place, and must hold {what}. Is "
        "each bucket put together from all its parameters, also the ones that lie in two buckets, reduced when it is "
        "complete, and has each reduction been waited for? "
        + differences.in_shards(parts, mean, elements, bound)
    )
    pytest.fail(f"the shards of all ranks together are not {what}: "
                f"{differences.in_shards(parts, mean, elements, bound)}")


def flat(rank, shards):
    missing = sum(shard is None for shard in shards)
    assert shards and not missing, (
        f"after backward rank {rank} has no gradient for {missing or 'any'} of its {len(shards)} buckets: "
        "reduced_gradients() gives None, so they were not reduced, or their result was not kept. (Was a reduction "
        "overwritten, in self.reducing, before it was waited for?)"
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

    def follow(self, optimizer):
        """Look after each of its steps: gradients, scaled and in fp32, are there then, and its state is, too."""
        optim.Optimizer.register_step_post_hook(optimizer, lambda *_: self.look())  # a user may not

    def look(self):
        self.most = max(self.most, checks.live_bytes() - self.before)

    def now(self, at_most):
        """Looks again while there is more than that."""
        return checks.live_bytes(until=self.before + at_most, looks=LOOKS) - self.before


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
    torch.float64: ((1.0, 2.0**-40, "it was rounded to fp32 on the way"),),
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


def two_in_bf16(stage_class):
    """Bytes an element of the shards after two micro-batches of a model in bf16; a scale after zero_grad()."""
    zero = stage_class(Given().bfloat16(), optim.SGD, lr=1.0)
    for _ in range(2):
        zero.model(torch.ones(60, dtype=torch.bfloat16)).backward()
    width = max(shard.element_size() for shard in zero.reduced_gradients())
    zero.gradient_scale = 0.5
    zero.zero_grad()
    return width, None if zero.gradient_scale is None else float(zero.gradient_scale)


def assert_keeps_16_bits(stage_class):
    """Between micro-batches."""
    for rank, (width, scale) in enumerate(toys.run(two_in_bf16, 2, stage_class)):
        assert scale in (None, 1.0), f"gradient_scale was 0.5, and after zero_grad() it is {scale} on rank {rank}"
        assert width == 2, (
            f"the parameters are in bf16, and after two micro-batches rank {rank}'s shards of gradients have {width} "
            "bytes an element: they keep the parameters' dtype, also when one is added to another"
        )


def nearest(values, wanted):
    return values[(values - wanted).abs().argmin()].item()


def assert_added_in_32(ranks):
    """Of the shards of three ranks (sixteen_bits)."""
    for case, (dtype, kinds) in enumerate(GIVEN.items()):
        together = torch.cat([flat(rank, shards[case]) for rank, shards in enumerate(ranks)])
        name = str(dtype).removeprefix("torch.")
        assert together.isfinite().all(), (
            f"gradients of {name}: some are 60000 on each of three ranks, and the shards hold inf in place of the "
            "mean: their sum is too large for fp16. Sums run in fp32, and the result is rounded once"
        )
        for first, other, words in kinds:
            mean = ((first + 2 * other) / 3)
            rounded = torch.tensor(mean, dtype=torch.promote_types(dtype, torch.float32)).to(dtype).item()
            right = int(((together.to(dtype).double() - rounded).abs() <= 1e-15).sum())  # fp64 may be off by a digit
            assert right == 60 // len(kinds), (
                f"gradients of {name}: rank 0 has {first:.6g} and ranks 1 and 2 have {other:.6g}, so that the mean is "
                f"{rounded:.14g}, and the shards hold {nearest(together, mean):.14g}: {words}. Sums run in fp32 at "
                "least, and the result is rounded once"
            )


def with_a_group(stage_class, *make):
    """A stage in the group of ranks 0 and 2; None on rank 1, which has no part in it."""
    group = dist.new_group([0, 2])
    return None if dist.get_rank() == 1 else build(stage_class, *make, group=group)


GROUP = ("here group= is a group of ranks 0 and 2 of three, and rank 1 has no part in it: is group=self.group passed "
         "to every call?")


def backward_in_a_group(stage_class):
    zero = with_a_group(stage_class)
    if zero is None:
        return None
    zero.model(*toys.tokens(dist.get_rank(), 0)).backward()
    return shards_of(zero)


def assert_sent(results, volume, when, why):
    """Each rank sent `volume` times Ψ(N−1)/N bytes, or a little more."""
    world_size = len(results)
    example = toys.build(model, 0)
    share = sum(param.nbytes for param in example.parameters()) * (world_size - 1) / world_size
    padding = 4 * checks.most_padding(example, world_size)
    for rank, (_, sent, made) in enumerate(results):
        names = in_calls(made)
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


def in_calls(made):
    """The calls of a checks.Calls in words."""
    return ", ".join(f"{name} {sum(call.name == name for call in made)} times"
                     for name in sorted({call.name for call in made} - {"recv", "barrier"}))


def assert_no_barrier(made, rank, when):
    """It sends no bytes, so that no sum of them shows it."""
    count = sum(call.name == "barrier" for call in made)
    assert not count, (
        f"rank {rank} called barrier {count} times in {when}: all ranks stand still there until the slowest has come. "
        "Nobody needs it: who waits for a collective's result has waited for all that it depends on"
    )


def first_step(stage_class, once_more=False):
    """Parameters before and after a step of SGD with lr 1, flat, and what the whole step sent. Rank 1 sends late in
    step(), and rank 2 later: who does not wait for them reads too early. once_more: before step() a forward runs that
    no backward follows."""
    torch.use_deterministic_algorithms(True)
    zero, rank = build(stage_class), dist.get_rank()
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    with checks.Calls() as backward:
        zero.model(*toys.tokens(rank, 0)).backward()
    if once_more:
        zero.model(*toys.tokens(rank, 0))
    with checks.Calls(pause=0.01 * rank) as step:
        zero.step()
    after = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    return (before, after), backward.sent() + step.sent(), backward.made + step.made


def left_of_a_step(stage_class, groups=None):
    """How many collectives of ours nobody has waited for when forward, backward and step are over."""
    mine, rank = toys.build(model, dist.get_rank()), dist.get_rank()
    zero = stage_class(mine, optim.SGD, lr=1.0, bucket_bytes=BUCKET, param_groups=groups and groups(mine))
    with checks.Watch() as watch:
        zero.model(*toys.tokens(rank, 0)).backward()
        zero.step()
    kinds = [event.kind for event in watch.events]
    return kinds.count("start") - kinds.count("wait")


def assert_nothing_is_left(stage_class, groups=None):
    for rank, left in enumerate(checks.once(left_of_a_step, 2, stage_class, groups)):
        assert left <= 0, (
            f"when step() returned on rank {rank}, {left} collectives had begun that nobody waited for: they need not "
            "end in the order in which they began, so wait for each"
        )


UPDATED = "are all buckets updated, and gathered after the update?"


def assert_stepped(results, mean, world_size, make=model, why_still=lambda still: UPDATED):
    """Every rank's parameters (before, after) have lost the mean gradient [Ψ]: the step of SGD with lr 1. why_still:
    gives words for a mask of those that did not move."""
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
            f"{repeated(results[rank], mean)}{unlike(results, rank, differ, elements)}"
        )
    used = results[0][0].double() - results[0][1].double()
    still = (used == 0) & (mean.abs() > 1e-4)
    assert still.sum() < psi / 50, (
        f"{int(still.sum())} of {psi} parameters did not move in step(), though they have a gradient, in "
        f"{elements.listed(still)}: {why_still(still)}"
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


def repeated(result, mean):
    """Words for elements that a step of SGD with lr 1 has moved two times too far, or more."""
    clear = mean.abs() > 1e-3
    times = ((result[0] - result[1]).double()[clear] / mean[clear]).round()
    if not (times > 1).double().mean() > 0.2:
        return ""
    return (f"Many moved {times.min():.0f} to {times.max():.0f} times too far: was a shard updated more than once? "
            "(optimizer.step() updates every parameter that has a .grad.) ")


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


def step_in_a_group(stage_class):
    """The parameters before and after a step; and the running mean of a model that has one."""
    zero, normed, rank = with_a_group(stage_class), with_a_group(stage_class, Normed), dist.get_rank()
    if zero is None:
        return None
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    zero.model(*toys.tokens(rank, 0)).backward()
    zero.step()
    after = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    normed.model(*toys.numbers(rank, 0)).backward()
    normed.step()
    return (before, after), normed.model.layers[1].running_mean


def assert_steps_in_a_group(stage_class):
    """Ranks 0 and 2 of three, as if there were no other."""
    (first, mean), _, (second, others) = toys.run(step_in_a_group, 3, stage_class)
    assert_stepped([first, second], sum(gradients_of(2, ranks=(0, 2))) / 2, 2)
    assert torch.equal(mean, others), (
        f"after a step in a group of ranks 0 and 2 batch norm's running mean is {mean[0]:.4g}, … on rank 0 and "
        f"{others[0]:.4g}, … on rank 2: replicas.broadcast_statistics gives it to the group that it is given")


NO_BACKWARD = ("here step() is called where no backward ran: first on rank 1 alone, then on both ranks. Gradients "
               "count as zero there, and the rank takes part in all reductions all the same: what does step() call "
               "that ends backward also where none ran (self.reduced_gradients())?")


def step_without_backward(stage_class, least=0):
    """The parameters before and after a step for which rank 0 alone ran a backward (not with least=1), and one for
    which no rank did. The model of a third one has running statistics."""
    results = []
    for runs in (dist.get_rank() == 0, False)[least:]:
        zero = build(stage_class, toys.MLP, bucket_bytes=256)
        before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
        if runs:
            zero.model(*toys.numbers(0, 0)).backward()
        zero.step()
        results.append((before, torch.cat([param.flatten() for param in toys.whole_parameters(zero)])))
    if not least:
        normed = build(stage_class, Normed)
        if dist.get_rank() == 0:
            normed.model(*toys.numbers(0, 0)).backward()
        normed.step()
    return results


def assert_steps_without_backward(stage_class):
    """What a rank without a backward has to add is zero."""
    alone, none = zip(*toys.run(step_without_backward, 2, stage_class), strict=True)
    gradient, = gradients_of(1, make=toys.MLP, batch=toys.numbers)
    assert_stepped(alone, gradient / 2, 2, make=toys.MLP)
    assert_nothing_moved(none)


def assert_nothing_moved(results):
    for rank, (before, after) in enumerate(results):
        assert torch.equal(before, after), (
            f"no rank ran a backward before step(), and {int((before != after).sum())} of rank {rank}'s parameters "
            "moved: all gradients count as zero there, and SGD leaves parameters where they are"
        )


class Normed(torch.nn.Module):
    """A batch norm between two layers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


def after_a_step(stage_class, steps=1):
    """The running statistics at the start, and for each step before and after step(), which is called in eval() mode;
    and whether a backward without zero_grad() was refused."""
    zero, rank, refused = build(stage_class, Normed), dist.get_rank(), False

    def statistics():
        return {name.replace("_", " "): buffer.clone() for name, buffer in zero.model.layers[1].named_buffers()}

    states = [statistics()]
    for step in range(steps):
        if step:
            zero.zero_grad()
        zero.model(*toys.numbers(rank, step)).backward()
        zero.model.layers[1].num_batches_tracked += rank  # as if some ranks had run more forward passes
        states.append(statistics())
        zero.model.eval()
        zero.step()
        zero.model.train()
        states.append(statistics())
    try:
        zero.model(*toys.numbers(rank, steps)).backward()
    except Exception:
        refused = True
    return states, refused


MANY = 18  # steps: what goes wrong in each fourth one, or from the tenth on, is seen


def after_many_steps(stage_class):
    """after_a_step(), and the calls meanwhile."""
    with checks.Calls() as calls:
        return *after_a_step(stage_class, MANY), calls.made


def assert_statistics_are_of_rank_0(results):
    """After each step."""
    for rank, (states, *_) in enumerate(results):
        for place in range(1, len(states), 2):
            before, own, after = states[place - 1 : place + 2]
            for name, wanted in results[0][0][place].items():
                assert torch.equal(after[name], wanted), (
                    f"after step() number {place // 2 + 1} batch norm's {name} is {after[name].flatten()[0]:.4g}, … on "
                    f"rank {rank} and {wanted.flatten()[0]:.4g}, … of the batches on rank 0: each rank has that "
                    "of its own data, and replicas.broadcast_statistics gives all rank 0's, in each step (here it is "
                    "called after model.eval())"
                )
            assert not torch.equal(own["running mean"], before["running mean"]), (
                "batch norm's running mean is as it was before the batch"
            )


_plain: dict = {}


def in_one_process(recipe, world_size):
    """What a plain loop over all ranks' data gives, in the recipe's precision and in fp64; computed once."""
    key = repr(recipe), world_size, *toys.secrets.values()  # each grader's random numbers are its own
    if key not in _plain:
        _plain[key] = toys.plain(recipe, world_size), toys.plain(recipe, world_size, torch.float64)
    return _plain[key]


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


def assert_trained_alike(train, stage_class, world_size, recipes, alone=()):
    """alone: names of those with which a single rank trains, too."""
    for size, names, where in ((world_size, recipes, ""), (1, alone, ", on one rank alone")):
        chosen = {name + where: recipes[name] for name in names}
        results = toys.run(train, size, stage_class, {name: recipe for name, (recipe, _) in chosen.items()})
        assert_as_in_one_process(results, size, chosen)


def assert_as_in_one_process(results, world_size, recipes):
    """As one process that averages over all ranks' data. The bound: what rounding does to that process."""
    for name, (recipe, hint) in recipes.items():
        plain, exact = in_one_process(recipe, world_size)
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


def second_step(stage_class):
    """The gradient shards of the second step's backward, and those after a third one that was dropped, and had a second
    micro-batch that failed in the middle."""
    zero, rank, shards = build(stage_class, lr=0.0), dist.get_rank(), []  # parameters stay, so gradients are known
    for step in range(4):
        with checks.after_zero_grad():
            zero.model(*toys.tokens(rank, step)).backward()
        shards.append(shards_of(zero))
        if step != 2:
            zero.step()
        else:
            hook = zero.model.blocks[1].up.weight.register_hook(fail)
            with contextlib.suppress(KeyError):
                zero.model(*toys.tokens(rank, step)).backward()
            hook.remove()
        zero.zero_grad()
    return shards[1], shards[3]


def fail(gradient):
    raise KeyError


def gradients_left(model):
    """How many parameters have a .grad with memory of its own: what the house puts there to refuse its readers has
    none."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return sum(grad.untyped_storage().nbytes() >= grad.nbytes for grad in grads)


def small_updates(stage_class, edit=None):
    """Parameters that are 1, in bf16 but for the first, after 25 steps of 0.0015; all rounded to bf16. edit: what the
    user sets all of them to after 12 steps."""
    model = Given().bfloat16()
    model.weights[0].data = model.weights[0].data.float()
    zero = stage_class(model, optim.SGD, lr=1e-3)
    for step in range(25):
        with torch.no_grad():
            for param in zero.model.parameters() if step == 12 and edit is not None else ():
                param.fill_(edit)
        zero.model(torch.full((60,), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).backward()
        zero.step()
        zero.zero_grad()
    return torch.cat([param.bfloat16() for param in toys.whole_parameters(zero)]).double()


def assert_small_updates_add_up(stage_class):
    wanted = torch.tensor(1 - 25 * 0.0015).bfloat16().item()
    for rank, parameter in enumerate(toys.run(small_updates, 2, stage_class)):
        assert (parameter == wanted).all(), (
            f"25 steps of 0.0015 from 1 on lead to {wanted:.4g} in bf16, and rank {rank} has {min(parameter):.4g} to "
            f"{max(parameter):.4g}: each is too small to be seen in bf16. So the optimizer updates an fp32 master, "
            "which is rounded to the parameter after each step and keeps its own digits, whatever is gathered or freed "
            "meanwhile. (The first of three parameters is in fp32 here.)"
        )


def trained(stage_class, recipes):
    """{recipe: all parameters after training with it}"""
    return {name: toys.train(stage_class, recipe).parameters for name, recipe in recipes.items()}


LIMITS = (0.1, 1e6)  # for the norm: below it, and above


def clipped(stage_class):
    """For each limit: what clip_grad_norm_ returned, and its shape (None: it is no tensor), how far SGD with lr 1 went
    then, this rank's shards before clipping, after it and after the step, how many bytes more live in clipping and in
    the step and how many clipping sends, and what the tensor holds that was gradient_scale before, a 1."""
    torch.use_deterministic_algorithms(True)
    results, rank = [], dist.get_rank()
    for max_norm in LIMITS:
        zero = build(stage_class)
        zero.model(*toys.tokens(rank, 0)).backward()
        shards, before = shards_of(zero), toys.whole_parameters(zero)
        scale = zero.gradient_scale = torch.tensor(1.0)
        with checks.Calls() as calls, Ledger("cpu") as ledger:
            there = ledger.total
            norm = zero.clip_grad_norm_(max_norm)
        shape = list(norm.shape) if isinstance(norm, torch.Tensor) else None
        clipped_shards, memory = shards_of(zero), Most()
        memory.follow(zero.optimizer)
        zero.step()
        change = toys.distance(before, toys.whole_parameters(zero))
        results.append((float(norm), shape, change, shards, clipped_shards, shards_of(zero),
                        (ledger.peak.total - there, memory.most, calls.sent()), float(scale)))
    return results


EVERYBODY = "the norm of the whole gradient needs a word from every rank: all must take part"


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


def clipped_in_a_group(stage_class):
    zero = with_a_group(stage_class)
    if zero is None:
        return None
    zero.model(*toys.tokens(dist.get_rank(), 0)).backward()
    return float(zero.clip_grad_norm_(0.1)), shards_of(zero)


def trained_with_norms(stage_class, recipes):
    """{recipe: (norms, all parameters)}; and after_clips()"""
    runs = {name: toys.train(stage_class, recipe) for name, recipe in recipes.items()}
    return {name: (run.norms, run.parameters) for name, run in runs.items()}, after_clips(stage_class)


def after_clips(stage_class):
    """60 parameters that were 1, after SGD with lr 1 and gradients of 0.5: after a step before which a batch was
    clipped to 0.001 and dropped; and after a second one, clipped, in which the first gradient is infinite. Before and
    after a third one, whose gradient_scale is 0.5. What the norm that the first clipping returned is by then; those of
    the third one, found again, with a limit and without; and three norms where rank 0 alone ran a backward, before a
    last step."""
    zero, gradient, found = stage_class(Given(), optim.SGD, lr=1.0), torch.full((60,), 0.5), []
    zero.model(gradient).backward()
    kept = [zero.clip_grad_norm_(1e-3)]
    for max_norm in (None, 1.0):
        zero.zero_grad()
        zero.model(gradient).backward()
        if max_norm:
            kept += zero.clip_grad_norm_(max_norm),
        zero.step()
        found.append(torch.cat([param.flatten() for param in toys.whole_parameters(zero)]))
        gradient[0] = torch.inf
    zero.zero_grad()
    zero.model(torch.full((60,), 0.5)).backward()
    zero.clip_grad_norm_(torch.inf)  # to show it
    zero.gradient_scale = 0.5
    scaled = [float(zero.clip_grad_norm_(max_norm)) for max_norm in (1e6, torch.inf)]
    found.append(torch.cat([param.flatten() for param in toys.whole_parameters(zero)]))
    zero.step()
    found.append(torch.cat([param.flatten() for param in toys.whole_parameters(zero)]))
    zero.zero_grad()
    if dist.get_rank() == 0:
        zero.model(torch.full((60,), 0.5)).backward()
    norms = [float(zero.clip_grad_norm_(max_norm)) for max_norm in (1e6, 1.0, 0.5)]
    zero.step()
    found.append(torch.cat([param.flatten() for param in toys.whole_parameters(zero)]))
    return found, float(kept[0]), scaled, norms


def overflow(stage_class):
    """Which parameters are finite after a step in which one gradient of one rank is infinite; whether all shards were;
    and the parameters."""
    zero, rank = build(stage_class, toys.Transformer), dist.get_rank()
    loss = zero.model(*toys.tokens(rank, 0))
    if rank == 1:
        loss = loss + float("inf") * zero.model.blocks[0].down.bias[-1]
    loss.backward()
    finite = [bool(shard.isfinite().all()) for shard in zero.reduced_gradients()]
    before = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    zero.step()
    after = torch.cat([param.flatten() for param in toys.whole_parameters(zero)])
    return after.isfinite(), finite, int((before == after).sum())


STEPS = ((True, 64.0, True), (False, 32.0, False), (True, 32.0, True), (True, 64.0, True))


def assert_overflow_is_shared(stage_class, world_size=2):
    """An overflow anywhere makes all ranks skip the step and halve the scale; two good steps in a row double it."""
    try:
        ranks = toys.run(checks.overflow_on_one_rank, world_size, stage_class, timeout=20)
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
        if step:
            zero.zero_grad()
        for micro in range(micros):
            with zero.no_sync() if micro + 1 < micros else contextlib.nullcontext():
                zero.model(*large_numbers(rank, step * micros + micro)).backward()
        if steps:
            zero.step()
    values = zero.model.parameters() if steps else zero.reduced_gradients()
    values = [value.detach() for value in values if value is not None]
    return sum(value.double().sum().item() for value in values), sum(value.double().square().sum().item()
                                                                    for value in values)


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


def assert_kernel_agrees(stage_class, world_size, optimizer, held, volume, blame, micros=1, steps=0):
    """Whatever a rank says of itself: the kernel counts what it holds and sends, and it computes the right thing with
    it. `held`: bytes of model states that it needs at most; `volume`: what all ranks send, in units of Ψ(N−1); `blame`:
    what is likely if more is held."""
    results, accounts = toys.run_counted(trained_large, world_size, stage_class, optimizer, micros, steps)
    assert_sums(results, world_size, optimizer, micros, steps)
    assert_accounts(accounts, PSI, held, ROOM, volume * PSI * (world_size - 1), blame)


def assert_accounts(accounts, psi, held, room, least, blame):
    """What the kernel counted of a model of `psi` bytes: each rank held no more than `held` and some `room`; together
    they sent the `least` that has to be sent, and no more than twice that."""
    told = f"a model of {in_words(psi)} on {len(accounts)} ranks"
    for rank, account in enumerate(accounts):
        assert account.held is None or account.held <= held + room, (
            f"{told}: rank {rank} holds up to {in_words(account.held)}, as the kernel counts, and what it needs is "
            f"{in_words(held)} and some open buckets: {blame}"
        )
    if accounts and accounts[0].sent is not None:
        sent = sum(account.sent for account in accounts)
        assert sent >= 0.98 * least, (
            f"{told}: they send {in_words(sent)}, as the kernel counts, and what has to be sent is {in_words(least)}: "
            "something is not reduced, or not gathered"
        )
        assert sent <= 2 * least, (
            f"{told}: they send {in_words(sent)}, as the kernel counts, and what has to be sent is {in_words(least)}"
        )
