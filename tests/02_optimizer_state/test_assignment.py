"""Lesson 2's assignment, P_os, in steps: what is owned, sent and computed, however it is written.

The grader runs these tests against a learner's file, and shows the text of an assertion as the message. So each one
names what went wrong and shows the evidence. In between, they run on the reference: what house/test_ladder.py
looks at in another way is thorough here. (A learner's file gets all of them.)
"""


import contextlib

import checks
import differences
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
    assert_trains_with_clipping,
)
from sharded import (
    BUCKET,
    EVERYBODY,
    GROUP,
    LOOKS,
    NO_BACKWARD,
    PSI,
    Given,
    Most,
    after_a_step,
    alike,
    assert_added_in_32,
    assert_kernel_agrees,
    assert_nothing_is_left,
    assert_sent,
    assert_shards_hold,
    assert_small_updates_add_up,
    assert_statistics_are_of_rank_0,
    assert_stepped,
    assert_steps_in_a_group,
    assert_steps_without_backward,
    assert_trained_alike,
    backward_in_a_group,
    build,
    first_backward,
    first_step,
    flat,
    gradients_of,
    model,
    one_step,
    shards_of,
    sixteen_bits,
    small_updates,
    trained,
)
from torch import nn, optim
from toys import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def stage_class(assignment):
    """The class under test."""
    return assignment


# ----------------------------------------------------------------------- step 1: which part is mine, and its optimizer


class Lopsided(nn.Module):
    """model(x, y) is a loss. One parameter has nine tenths of all elements, as an embedding often has."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(37, 211), nn.Linear(211, 3)

    def forward(self, x, y):
        return (self.small(torch.tanh(self.large(x))) - y).square().mean()


OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False, "fused": False, "maximize": True}


def with_options(model):
    """The groups of matrices_decay, with more options, also of other optimizers, and one that is the user's own.
    Between them a group like the second, in which all is frozen, and at the end one in which there is nothing."""
    matrices, vectors = checks.matrices_decay(model)
    matrices |= {"maximize": False, "betas": (0.8, 0.9), "nesterov": True, "momentum": 0.8, "dampening": 0.1}
    vectors |= {"amsgrad": True, "eps": 1e-6, "name": "1d", "capturable": None, "differentiable": None}
    return [matrices, vectors | {"params": [param for param in model.parameters() if not param.requires_grad]}, vectors,
            vectors | {"params": []}]


CASES = (  # model, optimizer, its options, groups
    (checks.Awkward, checks.Warm, OPTIONS | {"warmth": 0.5}, with_options),
    (model, optim.AdamW, OPTIONS | {"capturable": None}, None),
    (Lopsided, optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, None),
)


def given_to_the_optimizer(stage_class):
    """When the stage is made: for each of CASES and each optimizer group, what is in the group besides parameters, and
    this rank's elements of them, flat. And bytes that live because of `model`. New memory comes filled with NaN."""
    torch.use_deterministic_algorithms(True)
    rank, found = dist.get_rank(), []
    before = checks.live_bytes()
    zero = build(stage_class, model)
    size = checks.live_bytes(until=before + most_at_the_start(), looks=LOOKS) - before
    for make, optimizer, options, groups in CASES:
        mine = toys.build(make, rank)
        zero = stage_class(mine, optimizer, bucket_bytes=4096, param_groups=groups and groups(mine), **options)
        found.append([
            ({name: value for name, value in group.items() if name != "params"},
             torch.cat([torch.zeros(0), *(param.detach().flatten().clone() for param in group["params"])]))
            for group in zero.optimizer.param_groups
        ])
    return found, size


@pytest.mark.step(1, points=14, raised="padded_size gives a multiple of N. And has each of your groups the masters of "
                  "its own buckets alone, those whose bucket.group_index is its number?")
@pytest.mark.parametrize("world_size", (2, 3))
def test_each_rank_optimizes_its_part(stage_class, world_size):
    ranks = [found for found, _ in once(given_to_the_optimizer, world_size, stage_class)]
    for (elements, count), size in toys.run(padded_sizes, 1, stage_class)[0].items():
        most = -(-elements // (16 * count)) * 16 * count
        assert size in (None, most), (
            f"padded_size({elements}, {count}) is {size}: the smallest multiple of 16·{count} that is not below "
            f"{elements} is {most}")
    for case, make in enumerate((model, Lopsided), 1):
        parts = [torch.cat([elements for _, elements in found[case]]).double() for found in ranks]
        assert_parts(parts, toys.build(make, 0), list(toys.build(make, 0).parameters()))


def padded_sizes(stage_class):
    """What padded_size(elements, N) returns where the next multiple of 16 N is near; {} if the file has none."""
    of = getattr(stage_class, "padded_size", lambda *_: None)
    return {(elements, count): of(elements, count) for count in (2, 3, 1, 4, 6, 8)
            for elements in (16 * count, 16 * count + 1, 32 * count - 1, 1)}


def assert_parts(parts, example, params, where="the model"):
    """What the optimizers of all ranks hold, a flat tensor each, is what `params` of the example are: each element
    once, but for zeros of padding, and about as many on every rank."""
    world_size, wanted = len(parts), differences.flattened(param.detach() for param in params)
    psi, total = len(wanted), sum(map(len, parts))
    padding = checks.most_padding(example, world_size)
    for rank, part in enumerate(parts):
        assert len(part) < psi or psi < padding, (
            f"the optimizer of rank {rank} was given all {len(part)} elements of {where}: then each of the "
            f"{world_size} ranks has momentum and variance of everything. What is computed is the same, so no loss "
            f"will tell; but P_os gives a rank the optimizer state of 1/{world_size}, {psi // world_size} elements"
        )
        assert part.isfinite().all(), (
            f"the optimizer of rank {rank} holds NaN: memory that nobody wrote to (torch.empty). Padding must be zeros"
        )
        for other in range(rank):
            assert not part.any() or not torch.equal(part, parts[other]), (
                f"the optimizers of rank {other} and rank {rank} hold the same elements: each must own another part"
            )
        assert len(part) <= psi / world_size + padding or total <= psi + padding, (
            f"the optimizers of all {world_size} ranks together hold {total} elements, and {where} has {psi}: the "
            "others are padding, or are there more than once. padded_size gives the smallest multiple of 16 N that is "
            "enough"
        )
        assert len(part) <= psi / world_size + padding, (
            f"the optimizer of rank {rank} has {len(part)} of the {psi} elements of {where}, and 1/{world_size} of it "
            f"are {psi // world_size}. One parameter here is larger than all others together: cut by elements, not by "
            "parameters"
        )
    together = torch.cat(parts)
    assert len(together) >= psi, (
        f"the optimizers of all {world_size} ranks together hold {len(together)} elements, and {where} has {psi}: the "
        f"others are on no rank, and would never be updated. N does not divide {psi}: where does the tail go?"
    )
    if not alike(together, torch.cat([wanted, wanted.new_zeros(len(together) - psi)]), 0):
        elements = differences.Elements(example)
        elements.params = [(name, param.shape) for name, param in example.named_parameters()
                           if any(param is one for one in params)]
        pytest.fail(f"the optimizers of all ranks together must hold each element of {where} once: "
                    f"{differences.in_shards(parts, wanted, elements, 0)}")


@pytest.mark.step(1, points=10)
def test_groups_stay_groups(stage_class):
    ranks = [found for found, _ in once(given_to_the_optimizer, 3, stage_class)]
    for case, (make, optimizer, given, groups_of) in enumerate(CASES):
        example = toys.build(make, 0)
        groups = groups_of(example) if groups_of else [{"params": list(example.parameters())}]
        plain = optimizer([dict(group) for group in groups], **given).param_groups
        for rank, found in enumerate(ranks):
            assert len(found[case]) == len(groups), (
                f"the user's optimizer has {len(groups)} parameter groups, and zero.optimizer has {len(found[case])} "
                f"on rank {rank}: each group needs one of its own, with its own learning rate and weight decay; also "
                "one that is like another, or whose parameters are all frozen. A scheduler goes by their numbers"
            )
            for number, (options, _) in enumerate(found[case]):
                for name in [name for name in plain[number] if name != "params"]:
                    value, wanted = options.get(name, "nothing"), plain[number][name]
                    assert value == wanted, (
                        f"on rank {rank} group {number} of zero.optimizer has {name}={value}, and the user gave "
                        f"{name}={wanted}: a group keeps all that the user set for it, whatever the names are"
                    )
    example = toys.build(checks.Awkward, 0)
    for number, group in enumerate(with_options(example)):
        parts = [found[0][number][1].double() for found in ranks]
        params = [param for param in group["params"] if param.requires_grad]
        assert params or not any(map(len, parts)), (
            f"group {number} of zero.optimizer holds {sum(map(len, parts))} elements on all ranks together, and the "
            "user's group of this number has frozen parameters alone: is the order of the groups the user's?"
        )
        if params:
            names = "matrices, which decay" if group["weight_decay"] else "vectors, which do not decay"
            assert_parts(parts, example, params, f"group {number} ({names}; a frozen parameter is in no group, one "
                         "that is used twice is there once)")


def most_at_the_start():
    elements = sum(param.numel() for param in model().parameters())
    return 8 * (elements + checks.most_padding(model(), dist.get_world_size())) + 1024


@pytest.mark.step(1, points=6)
def test_nothing_is_copied_at_the_start(stage_class):
    elements = sum(param.numel() for param in toys.build(model, 0).parameters())
    limit = 8 * (elements + checks.most_padding(model(), 3)) + 1024
    for rank, (_, size) in enumerate(once(given_to_the_optimizer, 3, stage_class)):
        assert size <= limit, (
            f"rank {rank} holds {size / elements:.1f} bytes a parameter when the stage is made, before any step: in "
            "fp32 there are 4 for parameters and 4 for gradients. A shard is a view: it lies in the same memory as the "
            "parameters, or the gradients, and fp32 parameters need no master"
        )


# ------------------------------------------------------------------------------ step 2: a reduce-scatter into the shard


@pytest.mark.step(2, points=8)
@pytest.mark.parametrize("world_size", (2, 3))
def test_shards_hold_the_mean_gradient(stage_class, world_size):
    shards = [shards for shards, *_ in once(first_backward, world_size, stage_class)]
    assert_shards_hold(shards, gradients_of(world_size))


def missing_later(stage_class):
    """This rank's shards of the second step, in which a parameter gets a gradient on rank 0 alone. In the first step
    it got one on all ranks, and that was dropped."""
    zero, rank = build(stage_class, checks.Awkward, bucket_bytes=100), dist.get_rank()
    zero.model(*toys.numbers(rank, 7)).backward()
    zero.zero_grad()
    with checks.Calls(pause=0.05 * rank):  # who is late finds the others ready: what it sends has left at once
        zero.model(*checks.awkward_batch(rank, 0)).backward()
    return shards_of(zero)


@pytest.mark.thorough
@pytest.mark.step(2, points=3, stuck="one parameter got a gradient on rank 0 alone, and one on no rank at all: each "
                  "rank must reduce all buckets in the same order all the same, with zero for what is missing",
                  raised="a parameter may get no gradient on a rank, and its .grad is None then: it counts as zero")
def test_a_missing_gradient_is_zero(stage_class):
    gradients = gradients_of(3, make=checks.Awkward, batch=checks.awkward_batch)
    assert_shards_hold(toys.run(missing_later, 3, stage_class), gradients, "the mean gradient of the second step, "
                       "where one parameter got its gradient on rank 0 alone: it counts as zero on the others, "
                       "whatever their memory held before", make=checks.Awkward)


@pytest.mark.step(2, points=4)
def test_backward_sends_a_reduce_scatter(stage_class):
    assert_sent(once(first_backward, 3, stage_class), 1, "backward", "a reduce-scatter of the gradients")


@pytest.mark.thorough
@pytest.mark.step(2, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_backward_in_a_group(stage_class):
    first, _, second = toys.run(backward_in_a_group, 3, stage_class)
    assert_shards_hold([first, second], gradients_of(2, ranks=(0, 2)), "the mean gradient of ranks 0 and 2, the two "
                       "that are in the stage's group")


def micro_batches(stage_class):
    """Shards after three micro-batches, with no_sync around the first two, after two without it, and after three with
    it around the second; and what was sent under no_sync."""
    shards, rank = [], dist.get_rank()
    zero = build(stage_class)
    with checks.Calls() as calls, zero.no_sync():
        for micro in range(2):
            zero.model(*toys.tokens(rank, micro)).backward()
    zero.model(*toys.tokens(rank, 2)).backward()
    shards.append(shards_of(zero))
    zero.zero_grad()
    for local in ((), (1,)):
        for micro in range(2 + len(local)):
            with zero.no_sync() if micro in local else contextlib.nullcontext():
                zero.model(*toys.tokens(rank, micro)).backward()
        shards.append(shards_of(zero))
        zero.zero_grad()
    return shards, calls.sent()


@pytest.mark.step(2, points=3)
def test_micro_batches_add_up(stage_class):
    results = once(micro_batches, 2, stage_class)
    for rank, (_, sent) in enumerate(results):
        assert sent < 1024, (
            f"rank {rank} sent {in_words(sent)} under no_sync(): the micro-batches before the last add up where they "
            "are, and stage 1 reduces once, with the last one"
        )
    for case, (micros, what) in enumerate((
        (range(3), "the mean gradient, summed over three micro-batches, two of them under no_sync()"),
        (range(2), "the mean gradient, summed over two micro-batches without no_sync(), so that each was reduced. (The "
                   "second must add to a mean that is there, and not average it again)"),
        (range(3), "the mean gradient, summed over three micro-batches, the second one under no_sync(): what was "
                   "reduced before it must not get lost (backward_begins)"),
    )):
        found = [shards[case] for shards, _ in results]
        last = sum(gradients_of(2, steps=[micros[-1]])) / 2
        together = torch.cat([flat(rank, own) for rank, own in enumerate(found)])
        padded = torch.cat([last, last.new_zeros(max(0, len(together) - len(last)))])
        assert len(padded) != len(together) or not alike(together, padded, 1e-5 * last.abs().max()), (
            f"the shards must hold {what}. They hold the last micro-batch's gradient alone"
        )
        assert_shards_hold(found, gradients_of(2, steps=micros), what)


# ------------------------------------------------------------------------------- step 3: update, and gather parameters


def stepped_in_16_bits(stage_class):
    """Parameters in bf16 that were 1, after a step of SGD. master_of is ours: the submission's is of step 4."""
    if hasattr(stage_class, "master_of"):
        stage_class.load().master_of = lambda shard: nn.Parameter(shard.detach().float())
    zero = stage_class(Given().bfloat16(), optim.SGD, lr=0.5)
    zero.model(torch.ones(60, dtype=torch.bfloat16)).backward()
    zero.step()
    return torch.cat(toys.whole_parameters(zero)).double()


@pytest.mark.step(3, points=6, stuck="every rank must start all all-gathers, in the same order")
@pytest.mark.parametrize("world_size", (2, 3))
def test_every_rank_has_all_updated_parameters(stage_class, world_size):
    results = [result for result, *_ in once(first_step, world_size, stage_class)]
    assert_stepped(results, sum(gradients_of(world_size)) / world_size, world_size)
    assert_nothing_is_left(stage_class)
    for rank, parameter in enumerate(toys.run(stepped_in_16_bits, world_size, stage_class)):
        assert (parameter == 0.5).all(), (
            "parameters in bf16 are 1, and their masters in fp32, too. A step() of SGD with lr 0.5 and the gradient 1 "
            f"leads to 0.5, and rank {rank} has {parameter.min():.4g} to {parameter.max():.4g}: is bucket.master, once "
            "it is updated, rounded into bucket.parameter_shard, and that gathered?"
        )


def state_of_steps(stage_class, dtype):
    """Bytes of optimizer state before the first step, after it and after the third; and, after each of these steps, and
    at most in the fourth, of all that lives because of the stage. The dtypes of what the optimizer holds."""
    rank, memory, states, lives = dist.get_rank(), Most(), [], []
    zero = stage_class(toys.build(model, rank, dtype), optim.AdamW, lr=1e-3, bucket_bytes=BUCKET)
    most = most_after_a_step(dtype, dist.get_world_size())
    for step in range(4):
        states.append(bytes_in(zero.optimizer.state))
        if step in (1, 3):
            lives.append(memory.now(most))
        zero.zero_grad()
        zero.model(*toys.tokens(rank, step)).backward()
        zero.gradient_scale = 0.5 if step < 3 else None
        if step == 3:
            memory.follow(zero.optimizer)
        zero.step()
    lives.append(memory.most)
    kinds = {str(param.dtype) for group in zero.optimizer.param_groups for param in group["params"]}
    return [states[0], states[1], states[3]], lives, sorted(kinds)


def bytes_in(state):
    """Of the storages that an optimizer's state lies in: a slice of a whole counts as the whole."""
    tensors = [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


WIDTHS = {torch.float32: (4 + 4, 8), torch.bfloat16: (2 + 2, 12)}  # bytes a parameter: whole, in shards


def most_after_a_step(dtype, world_size):
    example = model()
    padded = sum(param.numel() for param in example.parameters()) + checks.most_padding(example, world_size)
    whole, sharded = WIDTHS[dtype]
    return (whole + sharded / world_size) * padded + 2048


@pytest.mark.step(3, points=5)
def test_optimizer_state_is_a_shard(stage_class):
    example = toys.build(model, 0)
    elements = sum(param.numel() for param in example.parameters())
    most = 8 * (elements + checks.most_padding(example, 4)) / 4 + 1024
    for rank, (states, lives, _) in enumerate(once(state_of_steps, 4, stage_class, torch.float32)):
        for when, state in zip(("before the first step", "after the first step", "after the third step"), states,
                               strict=True):
            assert state <= most, (
                f"{when} rank {rank} of 4 holds {in_words(state)} of Adam's momentum and variance. Those of all "
                f"{elements} parameters are {in_words(8 * elements)}, and P_os leaves a rank a quarter, "
                f"{in_words(2 * elements)}"
            )
        for when, size in zip(("first", "third"), lives[:2], strict=True):
            assert size <= most_after_a_step(torch.float32, 4), (
                f"after the {when} step of AdamW rank {rank} of 4 holds {size / elements:.1f} bytes a parameter, and "
                "in fp32 P_os needs 4 + 4 + 8/N = 10: parameters and gradients whole, momentum and variance of its "
                f"shard. zero.optimizer.state has {states[1] / elements:.1f} of them: what are the others? "
                "(gradient_scale is 0.5 here)"
            )


@pytest.mark.step(3, points=4)
def test_a_step_sends_as_much_as_data_parallelism(stage_class):
    results = once(first_step, 3, stage_class)
    share = sum(param.nbytes for param in toys.build(model, 0).parameters()) * 2 / 3
    for rank, (_, sent, _) in enumerate(results):
        assert sent < 2.8 * share, (
            f"rank {rank} sent {in_words(sent)} in a whole step, {sent / share:.1f}Ψ(N−1)/N, and data parallelism "
            f"sends 2Ψ(N−1)/N, {in_words(2 * share)}. An all-reduce of gradients and then an all-gather of parameters "
            "make 3: an all-reduce is a reduce-scatter and an all-gather already, and one of the two is enough"
        )
    assert_sent(results, 2, "a whole step",
                "a reduce-scatter of gradients and an all-gather of parameters, as much as data parallelism,")


RECIPES = {
    "AdamW with weight decay": (Recipe(options=dict(checks.ADAM, weight_decay=0.1), steps=1), "is weight decay there?"),
    "two parameter groups": (
        Recipe(options=checks.ADAM, groups=checks.matrices_decay, steps=1),
        "is each shard updated with its own group's learning rate and weight decay?",
    ),
    "frozen, tied and unused parameters": (
        Recipe(make=checks.Awkward, batch=checks.awkward_batch, options=dict(checks.ADAM, weight_decay=0.5),
               bucket_bytes=100, steps=1),
        "a frozen parameter must not move, a tied one is updated once, one without a gradient counts as one whose "
        "gradient is zero, so that it decays",
    ),
}


@pytest.mark.thorough
@pytest.mark.step(3, points=3)
def test_a_step_is_the_optimizers(stage_class):
    assert_trained_alike(one_step, stage_class, 2, RECIPES)


TRAINING = {
    "SGD with momentum": (Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9), steps=3),
                          "does each step begin without old gradients, and is momentum kept?"),
    "two parameter groups": (Recipe(options=checks.ADAM, groups=checks.matrices_decay, steps=3),
                             "does each group keep its options in every step?"),
    "three micro-batches a step": (Recipe(options=checks.ADAM, accumulate=3, steps=2),
                                   "do micro-batches add up, and is nothing left for the next step?"),
    "two micro-batches a step, without no_sync": (
        Recipe(optimizer=optim.SGD, options=dict(lr=0.3), accumulate=2, no_sync=False, steps=2),
        "does every backward add to the shards, also outside no_sync()?"),
    "a scheduler of the learning rate": (
        Recipe(options=checks.ADAM, schedule=checks.warm_up), "is the learning rate of this step used?"),
    "layers that are left out in turn": (checks.RECIPES["another order in each step"],
                                         "a layer without gradient counts as one whose gradient is zero"),
    "fp64": (Recipe(options=checks.ADAM, dtype=torch.float64, steps=2),
             "the master has the dtype of the parameters here, and its gradient has it, too"),
}


@pytest.mark.thorough
@pytest.mark.step(3, points=3, stuck="several steps, with layers that get a gradient in some steps only")
def test_trains_as_one_process_would(stage_class):
    assert_trained_alike(trained, stage_class, 3, TRAINING, alone=(
        "two micro-batches a step, without no_sync", "layers that are left out in turn"))


@pytest.mark.thorough
@pytest.mark.step(3, points=1, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_step_in_a_group(stage_class):
    assert_steps_in_a_group(stage_class)


@pytest.mark.thorough
@pytest.mark.step(3, points=1, stuck=NO_BACKWARD, left=NO_BACKWARD, raised=NO_BACKWARD)
def test_a_rank_without_a_backward_takes_the_step(stage_class):
    assert_steps_without_backward(stage_class)


@pytest.mark.thorough
@pytest.mark.step(3, points=1)
def test_running_statistics_are_alike(stage_class):
    assert_statistics_are_of_rank_0(once(after_a_step, 2, stage_class, 2))


@pytest.mark.thorough
@pytest.mark.step(3, points=1)
def test_a_backward_after_step_is_refused(stage_class):
    for rank, (_, refused) in enumerate(once(after_a_step, 2, stage_class, 2)):
        assert refused, (
            f"backward, step(), backward without zero_grad(): rank {rank} added the second gradient to the first one's "
            "shards without a word. It must be an error: set self.reducer.needs_zero_grad in step()"
        )


# ------------------------------------------------------------------------------- step 4: fp32 masters


def edited_updates(stage_class):
    """small_updates() with an edit; None from who updates in another way."""
    return small_updates(stage_class, 2.0) if hasattr(stage_class, "update_shard") else None


@pytest.mark.step(4, points=5, raised="the parameters are in bf16 here, and the master in fp32: what it is updated "
                  "with must be in fp32, too")
def test_small_steps_in_bf16_add_up(stage_class):
    assert_small_updates_add_up(stage_class)
    wanted = torch.tensor(2 - 13 * 0.0015).bfloat16().item()
    for rank, parameter in enumerate(toys.run(edited_updates, 2, stage_class)):
        assert parameter is None or (parameter == wanted).all(), (
            f"after 12 of the 25 steps all parameters were set to 2, on all ranks. It ends at {wanted:.4g}, and rank "
            f"{rank} has {min(parameter):.4g} to {max(parameter):.4g}: the master goes on from before the edit. "
            "@changes_parameters above update_shard carries edits over to it"
        )


@pytest.mark.thorough
@pytest.mark.step(4, points=3)
def test_masters_are_shards(stage_class):
    elements = sum(param.numel() for param in toys.build(model, 0).parameters())
    for rank, (_, lives, kinds) in enumerate(once(state_of_steps, 4, stage_class, torch.bfloat16)):
        assert kinds == ["torch.float32"], (
            f"the parameters are in bf16, and in zero.optimizer's groups lie tensors of {' and '.join(kinds)} on rank "
            f"{rank}: there stands what is updated, the fp32 masters (bucket.master, in over_shards)"
        )
        *after, during = lives
        for when, size in zip(("first", "third"), after, strict=True):
            assert size <= most_after_a_step(torch.bfloat16, 4), (
                f"after the {when} step of AdamW rank {rank} of 4 holds {size / elements:.1f} bytes a parameter in "
                "bf16, and P_os needs 2 + 2 + 12/N = 7: parameters and gradients whole, and of its shard, in fp32, "
                "master, momentum and variance"
            )
        assert during <= most_after_a_step(torch.bfloat16, 4) + 6 * BUCKET / 4, (
            f"in step() rank {rank} of 4 holds up to {in_words(during)}, and {in_words(after[-1])} after the third "
            f"step. A bucket's shard has {in_words(2 * BUCKET / 4)} in fp32: bring one bucket's gradient to fp32, "
            "update with it, and let it go before the next one's"
        )


def gathered_in_16_bits(stage_class):
    """Bytes sent in step(), with parameters in bf16."""
    rank = dist.get_rank()
    zero = stage_class(toys.build(model, rank, torch.bfloat16), optim.SGD, lr=1e-3, bucket_bytes=BUCKET)
    zero.model(*toys.tokens(rank, 0)).backward()
    zero.reduced_gradients()  # whoever reduces now, and not in backward
    with checks.Calls() as calls:
        zero.step()
    return calls.sent()


@pytest.mark.thorough
@pytest.mark.step(4, points=3)
def test_parameters_travel_in_16_bits(stage_class):
    example = toys.build(model, 0, torch.bfloat16)
    share = sum(param.nbytes for param in example.parameters()) * 2 / 3
    for rank, sent in enumerate(toys.run(gathered_in_16_bits, 3, stage_class)):
        assert sent <= 1.02 * share + 2 * checks.most_padding(example, 3) + 1024, (
            f"with parameters in bf16 rank {rank} of 3 sent {in_words(sent)} in step(), and an all-gather of them "
            f"sends {in_words(share)}, 2Ψ(N−1)/N bytes: gather the rounded parameters, not their fp32 masters"
        )


NARROW = {
    "bf16": (Recipe(options=checks.ADAM, dtype=torch.bfloat16),
             "are the fp32 masters updated in fp32, and rounded to the parameters?"),
    "bf16, two groups, micro-batches": (
        Recipe(options=checks.ADAM, dtype=torch.bfloat16, accumulate=2, groups=checks.matrices_decay),
        "is each group's master updated, from an fp32 copy of the gradient?"),
    "fp16 and a loss scale": (
        Recipe(optimizer=optim.SGD, options=dict(lr=3.0), dtype=torch.float16, scale=1024.0, steps=3),
        "the loss was multiplied by 1024, and self.gradient_scale is 1/1024: the update multiplies with it"),
}


@pytest.mark.thorough
@pytest.mark.step(4, points=2)
def test_trains_in_16_bits(stage_class):
    assert_trained_alike(trained, stage_class, 2, NARROW)


def tiny_gradients(stage_class):
    """Parameters that were 1, in fp16, after a step of lr 2^20 with the gradient 2^-10 and the scale 2^-16; and
    sixteen_bits()."""
    zero = stage_class(Given().half(), optim.SGD, lr=2.0**20)
    zero.model(torch.full((60,), 2.0**-10, dtype=torch.float16)).backward()
    zero.gradient_scale = 2.0**-16
    zero.step()
    return torch.cat(toys.whole_parameters(zero)).double(), sixteen_bits(stage_class)


@pytest.mark.thorough
@pytest.mark.step(4, points=1)
def test_gradients_of_16_bits_are_added_in_32(stage_class):
    assert_added_in_32([shards for _, shards in once(tiny_gradients, 3, stage_class)])


@pytest.mark.thorough
@pytest.mark.step(4, points=1)
def test_the_scale_is_applied_in_fp32(stage_class):
    for rank, (parameter, _) in enumerate(once(tiny_gradients, 3, stage_class)):
        assert (parameter == 1 - 2.0**-6).all(), (
            "fp16: the gradient is 2^-10, self.gradient_scale is 2^-16, and SGD with lr 2^20 must subtract 2^-6 "
            f"from 1: rank {rank} has {parameter[0]:.6g}. The product is 2^-26, less than the smallest number of "
            "fp16: bring the gradient to fp32 first, and multiply then"
        )


# ------------------------------------------------------------------------------- step 5: the global norm


def large_gradients(stage_class, dtype):
    """The norm of 60 gradients of 12,416 in 16 bits: fp16 reaches to 65,504, and bf16 would round it. And that of 1e-12
    times these, which is 0 in fp16; and of 0 times these."""
    zero = stage_class(Given().to(dtype), optim.SGD, lr=1e-3)
    zero.model(torch.full((60,), 12_416.0, dtype=dtype)).backward()
    norm, zero.gradient_scale = zero.clip_grad_norm_(1e9).item(), 1e-12
    scaled, zero.gradient_scale = zero.clip_grad_norm_(1.0).item(), 0.0
    return norm, scaled, zero.clip_grad_norm_(1.0).item()


def norm_without_shards(stage_class):
    """Of 4 gradients that are 1 on rank 0, and 2 on rank 1; None if the file computes norms in another way."""
    if hasattr(stage_class, "global_norm"):
        return float(stage_class.global_norm([torch.full((4,), dist.get_rank() + 1.0)], sharded=False))


@pytest.mark.thorough
@pytest.mark.step(5, points=5, stuck=EVERYBODY)
@pytest.mark.parametrize("world_size", (2, 3))
def test_clips_by_the_global_norm(stage_class, world_size):
    assert_clips_by_the_global_norm(stage_class, world_size)
    for dtype in (torch.float16, torch.bfloat16):
        for rank, (norm, scaled, none) in enumerate(once(large_gradients, 2, stage_class, dtype)):
            assert norm == pytest.approx(12_416 * 60**0.5, rel=1e-4), (
                f"60 gradients are 12,416 each, in {dtype}: their norm is {12_416 * 60**0.5:,.0f}, and rank {rank} "
                f"returned {norm:,.0f}. A dtype of 16 bits has no room for it, or rounds it: compute the norm in fp32")
            assert scaled == pytest.approx(12_416 * 60**0.5 * 1e-12, rel=1e-4), (
                f"with a gradient_scale of 1e-12 the norm is {12_416 * 60**0.5 * 1e-12:.4g}, and rank {rank} returned "
                f"{scaled:.4g}. {dtype} loses what is multiplied with it: make gradients fp32 first")
            assert none == 0, f"with a gradient_scale of 0 the norm is 0, and rank {rank} returned {none:.4g}"


@pytest.mark.thorough
@pytest.mark.step(5, points=1)
def test_clipping_returns_a_tensor_and_leaves_the_gradients(stage_class):
    assert_clipping_leaves_the_gradients(stage_class)
    for rank, norm in enumerate(toys.run(norm_without_shards, 2, stage_class)):
        assert norm in (None, pytest.approx(2.0 * (rank + 1))), (
            f"global_norm(…, sharded=False) of four gradients of {rank + 1} returned {norm:.4g} on rank {rank}: each "
            f"rank has the whole gradient then, and adds nobody else's, so it is {2 * (rank + 1)}")


@pytest.mark.thorough
@pytest.mark.step(5, points=1, stuck=GROUP, left=GROUP, raised=GROUP)
def test_clips_in_a_group(stage_class):
    assert_clips_in_a_group(stage_class)


@pytest.mark.thorough
@pytest.mark.step(5, points=3, stuck=WITHOUT, left=WITHOUT, raised=WITHOUT)
def test_trains_with_clipping(stage_class):
    assert_trains_with_clipping(stage_class)


# --------------------------------------------------------------- what the kernel counts, at a plain size

BLAME = "optimizer state for everything, or a copy of something, lives in its memory"
UNDER_WAY = "many reductions are under way at a time, each with room of its own (_wait), or a copy of something lives"


@pytest.mark.thorough
@pytest.mark.step(2, points=0)
def test_the_kernel_counts_a_backward(stage_class):
    # sent are rank 0's parameters, and a reduce-scatter
    assert_kernel_agrees(stage_class, 4, optim.SGD, 2 * PSI, 2, UNDER_WAY)


@pytest.mark.thorough
@pytest.mark.step(3, points=0)
def test_the_kernel_counts_a_step(stage_class):
    assert_kernel_agrees(stage_class, 4, optim.AdamW, 2 * PSI + 2 * PSI / 4, 3, BLAME, steps=1)
