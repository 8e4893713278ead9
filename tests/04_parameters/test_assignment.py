"""Lesson 4's assignment, P_os+g+p, in steps: what is owned, sent and computed, however it is written.

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
from clipping import CLIPPED, assert_clipping_leaves_the_gradients
from sharded import (
    GROUP,
    LOOKS,
    MANY,
    Most,
    after_many_steps,
    alike,
    assert_accounts,
    assert_added_in_32,
    assert_keeps_16_bits,
    assert_no_barrier,
    assert_nothing_is_left,
    assert_nothing_moved,
    assert_shards_hold,
    assert_small_updates_add_up,
    assert_statistics_are_of_rank_0,
    assert_stepped,
    assert_steps_in_a_group,
    assert_trained_alike,
    awkward_backward,
    backward_in_a_group,
    build,
    first_backward,
    first_step,
    flat,
    gradients_left,
    gradients_of,
    in_calls,
    model,
    shards_of,
    sixteen_bits,
    step_without_backward,
    trained,
    with_a_group,
)
from torch import nn, optim
from toys import Recipe
from turns_seen import BLOCKS, Marks, Sight, Tower, block_bytes, numbers, seeded_numbers

from zero_minimal.core import seams
from zero_minimal.core.units import Unit
from zero_minimal.guards.reads_of_freed_parameters import FreedParameter
from zero_minimal.guards.trained_by import is_released

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = block_bytes()
PSI = sum(param.nbytes for param in Tower().parameters())


@pytest.fixture
def stage_class(assignment):
    """The class under test."""
    return assignment


def padding(world_size, make=Tower):
    return 4 * checks.most_padding(make(), world_size)


def listed(places):
    *others, last = (f"blocks.{place}" for place in sorted(places))
    return f"{', '.join(others)} and {last}" if others else last


# ------------------------------------------------------------------------------- step 1: a shard is all that stays


def tower_with_frozen_blocks():
    tower = Tower(24)
    for block in tower.blocks[::3]:
        block.requires_grad_(False)
    return tower


def at_the_start(stage_class):
    """Bytes that live because of model and stage, before anything was computed; of each parameter: its name, whether
    it has kept shape, dtype and requires_grad, and what came of reading it: "refused", "gone", or a number."""
    make = tower_with_frozen_blocks
    before = checks.live_bytes()
    mine = toys.build(make, dist.get_rank())
    psi = sum(param.nbytes for param in mine.parameters())
    looks = [(param.shape, param.dtype, param.requires_grad) for param in mine.parameters()]
    zero = stage_class(mine, optim.SGD, lr=1.0)
    most = psi / dist.get_world_size() + padding(dist.get_world_size(), make)
    held = checks.live_bytes(until=before + most, looks=LOOKS) - before
    params = dict(zero.model.named_parameters())
    kept = [(param.shape, param.dtype, param.requires_grad) == look
            for param, look in zip(params.values(), looks, strict=True)]
    told = [(name, same, _read(param)) for (name, param), same in zip(params.items(), kept, strict=True)]
    return held, psi, most, told


def _read(param):
    if not isinstance(param, FreedParameter):
        reach = param.storage_offset() + sum((size - 1) * step
                                             for size, step in zip(param.shape, param.stride(), strict=True))
        if param.numel() and param.untyped_storage().nbytes() <= reach * param.element_size():
            return "gone"  # to read it would end the process
    try:
        return f"{param.detach().abs().sum().item():.4g}"
    except RuntimeError:
        return "refused"


@pytest.mark.step(1, points=8)
@pytest.mark.parametrize("world_size", (2, 4))
def test_a_rank_keeps_its_shard_alone(stage_class, world_size):
    ranks = once(at_the_start, world_size, stage_class)
    for rank, (held, psi, most, _) in enumerate(ranks):
        assert held <= most, (
            f"a model of {in_words(psi)} on {world_size} ranks: when the stage has been made, rank {rank} holds "
            f"{in_words(held)}, and its shard is {in_words(psi / world_size)}. What still refers to the whole? A shard "
            "that is a view keeps all of its storage in memory, and some blocks of this model are frozen"
        )
    held, psi = sum(held for held, *_ in ranks), ranks[0][1]
    assert held >= 0.99 * psi, (
        f"a model of {in_words(psi)}: all {world_size} ranks together hold {in_words(held)} when the stage has been "
        "made. The rest of the parameters is lost: a shard needs memory of its own before the whole is freed"
    )


@pytest.mark.step(1, points=5)
@pytest.mark.parametrize("world_size", (2, 1))
def test_to_read_a_released_parameter_is_an_error(stage_class, world_size):
    for rank, (*_, params) in enumerate(once(at_the_start, world_size, stage_class)):
        for name, _, found in params:
            assert found != "gone", (
                f"rank {rank}: {name} points to memory that has been freed. Who reads it ends the whole process (a "
                "segmentation fault): let it point to a placeholder. release does so, and makes reading an "
                "error"
            )
            assert found == "refused", (
                f"rank {rank}: the sum of |{name}| is {found} before any unit's turn, when its values are on no rank "
                "as "
                "a whole. Such a number would go on into losses without a word: to read a released parameter must be "
                "an error, which release sees to"
            )


@pytest.mark.step(1, points=2)
def test_a_released_parameter_keeps_its_shape(stage_class):
    for rank, (*_, params) in enumerate(once(at_the_start, 2, stage_class)):
        lost = [name for name, same, _ in params if not same]
        assert not lost, (
            f"rank {rank}: {lost[0]} has another shape, dtype or requires_grad once it is released. Who asks for these "
            "(a count of parameters, autograd itself) must get what they were"
        )


# ------------------------------------------------------------------------------- step 2: gather a unit for its turn

UNITS = "each unit must be whole when its turn comes, the root too, and so must the units around it (unit.parents)"


class Nested(nn.Module):
    """Blocks with a module list of their own: units inside a unit, which works around them."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(11, 11), nn.Linear(11, 11)
            self.inner = nn.ModuleList([nn.Linear(11, 11), nn.Linear(11, 11)])

        def forward(self, x):
            x = torch.tanh(self.before(x))
            for layer in self.inner:
                x = torch.tanh(layer(x))
            return self.after(x)

    class Ends(Outer):
        """Its last word is an inner unit's."""

        def forward(self, x):
            x = torch.tanh(self.after(torch.tanh(self.before(x))))
            for layer in self.inner:
                x = torch.tanh(layer(x))
            return x

    def __init__(self, block=Outer):
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.blocks = nn.ModuleList([block(), block()])
        self.last = nn.Linear(11, 3)

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return (self.last(x) - y).square().mean()


def first_forward(stage_class, make=Tower, groups=None):
    """The loss, what was sent, and by which calls. Memory is poisoned, and rank 1 sends late, rank 2 later."""
    rank = dist.get_rank()
    with checks.poisoned_memory():
        mine = toys.build(make, rank)
        zero = stage_class(mine, optim.SGD, lr=1.0, param_groups=groups and groups(mine))
        with checks.Calls(pause=0.01 * rank) as calls:
            loss = zero.model(*numbers(rank, 0))
    return loss.item(), calls.sent(), calls.made


PLACES = "do all shards come to the places they were cut from, in rank order, and had they arrived?"


def loss_of(make, rank, step=0, change=None, batch=numbers, **options):
    """What rank 0's model gives on a rank's batch. `change`: is done to it before."""
    whole = toys.build(make, 0, torch.float64)
    if change:
        with torch.no_grad():
            change(whole)
    return whole(*(part.double() for part in batch(rank, step)), **options).item()


def assert_losses(losses, wanted, what="the first forward", look=PLACES):
    for rank, (loss, right) in enumerate(zip(losses, wanted, strict=True)):
        assert loss == loss, (
            f"in {what} rank {rank}'s loss is NaN: it computed with memory that was freed, or that nobody has filled "
            "yet. Is each all-gather waited for before its unit computes?"
        )
        assert loss == pytest.approx(right, rel=1e-4), (
            f"in {what} rank {rank}'s loss is {loss:.6g}, and {right:.6g} is right: it computed with other parameters. "
            f"To look at: {look}"
        )


@pytest.mark.step(2, points=9, raised=UNITS, stuck="every rank must start the same all-gathers in the same order, and "
                                                   "wait for each")
@pytest.mark.parametrize("world_size", (2, 3))
def test_each_unit_is_whole_at_its_turn(stage_class, world_size):
    losses = [loss for loss, *_ in once(first_forward, world_size, stage_class)]
    assert_losses(losses, [loss_of(Tower, rank) for rank in range(world_size)])


def inner_layer_alone(stage_class):
    """What a layer inside a block gives that is called by itself, first of all, so that three units are gathered. A set
    of units has the opposite order on rank 1."""
    rank, seen = dist.get_rank(), {}

    def by_rank(unit):
        number = seen.setdefault(id(unit), len(seen))
        return 7 - number if rank else number

    usual, Unit.__hash__ = Unit.__hash__, by_rank
    try:
        zero = stage_class(toys.build(Nested, rank), optim.SGD, lr=1.0)
        return zero.model.blocks[0].inner[0](torch.ones(11))
    finally:
        Unit.__hash__ = usual


@pytest.mark.step(2, points=4, raised=UNITS, stuck="every rank must start the same all-gathers in the same order (a "
                                                   "set has none), and wait for each")
def test_units_inside_a_unit(stage_class):
    losses = [loss for loss, *_ in toys.run(first_forward, 2, stage_class, Nested)]
    assert_losses(losses, [loss_of(Nested, rank) for rank in range(2)], "the first forward of a model whose blocks "
                  "hold a module list of their own (they work around its elements)")
    wanted = toys.build(Nested, 0).blocks[0].inner[0](torch.ones(11))
    for rank, found in enumerate(toys.run(inner_layer_alone, 2, stage_class)):
        assert torch.equal(found, wanted), (
            f"a layer inside a block was called by itself, before any forward, and on rank {rank} it computed with "
            f"other parameters: {UNITS}"
        )


@pytest.mark.step(2, points=2, raised="a unit has several buckets if its parameters differ in optimizer group or dtype")
def test_units_of_several_buckets(stage_class):
    losses = [loss for loss, *_ in toys.run(first_forward, 2, stage_class, Tower, checks.matrices_decay)]
    assert_losses(losses, [loss_of(Tower, rank) for rank in range(2)], "the first forward with two parameter groups, "
                  "where each unit has two buckets")


def forward_in_a_group(stage_class):
    zero = with_a_group(stage_class)
    return None if zero is None else zero.model(*toys.tokens(dist.get_rank(), 0)).item()


@pytest.mark.step(2, points=2, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_forward_in_a_group(stage_class):
    first, _, second = toys.run(forward_in_a_group, 3, stage_class)
    plain = [toys.build(model, 0)(*toys.tokens(rank, 0)).item() for rank in (0, 2)]
    assert_losses([first, second], plain, "a forward of ranks 0 and 2, the two that are in the stage's group,")


@pytest.mark.step(2, points=3)
def test_a_forward_sends_an_all_gather(stage_class):
    share = PSI * 2 / 3
    for rank, (_, sent, made) in enumerate(once(first_forward, 3, stage_class)):
        assert sent <= 1.02 * share + padding(3), (
            f"rank {rank} of 3 sent {in_words(sent)} in a forward pass, and an all-gather of all units sends "
            f"{in_words(share)}, Ψ(N−1)/N: what else travels? An all-reduce, or a broadcast from each rank, sends "
            "twice "
            "that, and a unit that is gathered twice does, too"
        )
        assert sent >= 0.98 * share, (
            f"rank {rank} of 3 sent {in_words(sent)} in a forward pass, and an all-gather of all units cannot do with "
            f"less than {in_words(share)}, Ψ(N−1)/N: others got their parameters from elsewhere, or not at all"
        )
        assert_no_barrier(made, rank, "a forward pass")
        sums = [call for call in made if call.name in ("all_reduce", "reduce_scatter", "reduce")]
        assert not sums, (
            f"rank {rank} called {in_calls(sums)} in a forward pass, where nothing has to be added up, however little: "
            "each call waits for the slowest rank. Units are gathered, and that is all"
        )


# ------------------------------------------------------------------- step 3: free what is not needed, prefetch the next


def memory_in_16_bits(stage_class):
    """Bytes that each block's parameters have in a forward in bf16, while it works."""
    zero = stage_class(toys.build(Tower, dist.get_rank(), torch.bfloat16), optim.SGD, lr=1.0)
    found = []
    for block in zero.model.blocks:
        block.register_forward_hook(lambda block, *_: found.append(memory_of(block)))
    zero.model(*(part.bfloat16() for part in numbers(dist.get_rank(), 0)))
    return found


def memory_of(module):
    storages = [param.untyped_storage() for param in module.parameters()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def forwards_seen(stage_class):
    """What Sight saw in two forward passes, at turns and when something was sent; bytes of each block's parameters
    after them; the losses."""
    zero, rank = build(stage_class, Tower), dist.get_rank()
    sight, losses = Sight(zero.model), []
    with checks.Calls(look=sight.sends):
        for step in range(2):
            sight.kind = f"forward pass {step + 1}"
            losses.append(zero.model(*numbers(rank, step)))  # with its graph, and what autograd has saved for it
    return sight.seen, sight.at_sends, sight.alive(), [loss.item() for loss in losses]


def assert_in_turn(seen, rank, ahead):
    """Only the block at work can be read, and the one that is `ahead` of it: +1 or -1."""
    for kind, place, readable, _ in seen:
        also = set(readable) - {place, place + ahead}
        assert place in readable, f"in {kind} rank {rank} works on blocks.{place}, and its parameters are released"
        assert not also, (
            f"in {kind}, while blocks.{place} works, rank {rank} has {listed(also)} whole, too. Besides the root only "
            "the unit at work and the next one may be here: unit_turn frees what is not needed any more, and gathers "
            "nothing that comes later" + (". " + DONE) * (ahead < 0 and place - ahead in also)
        )


DONE = ("Backward is done with it: was it not freed, or was it prefetched in the order of forward? `following` is what "
        "comes next in this pass. Or does unit_turn nothing in backward? A unit is gathered there, too, at its turn")
FROM_FORWARD = "Backward has not come there yet: it was left in forward, or gathered too early. "
SAVED = (
    "Autograd has saved views of these parameters for backward. Who drops a reference, or sets param.data, frees "
    "nothing as long as there is another reference: the storage itself must go"
)


def assert_memory_follows(seen, rank, ahead, why=SAVED):
    """And of the others no memory is left, whoever refers to it."""
    for kind, place, _, alive in seen:
        others = {other: size for other, size in enumerate(alive)
                  if other not in {place, place + ahead} and size > 0.1 * BLOCK}
        not_yet = ahead < 0 and all(other < place for other in others)
        assert not others, (
            f"in {kind}, while blocks.{place} works, rank {rank} still has memory of {listed(others)}, "
            f"{in_words(sum(others.values()))}, though nobody can read it. {FROM_FORWARD + SAVED if not_yet else why}"
        )


@pytest.mark.step(3, points=8)
def test_a_unit_is_whole_only_while_it_works(stage_class):
    for rank, (seen, *_) in enumerate(once(forwards_seen, 2, stage_class)):
        assert_in_turn(seen, rank, +1)


def assert_two_at_most(at_sends, rank):
    """Also between two looks, while units are gathered."""
    for kind, place, here in at_sends:
        assert len(here) <= 2, (
            f"in {kind}, between the turn of blocks.{place} and the next one, rank {rank} begins a gather while "
            f"{listed(here)} have memory: {len(here)} blocks at once, and two are enough, the one at work and the one "
            "that comes next. unit_turn frees what is not needed any more first, and gathers then"
        )


@pytest.mark.step(3, points=4)
def test_its_memory_goes_though_autograd_saved_it(stage_class):
    for rank, (seen, at_sends, after, _) in enumerate(once(forwards_seen, 2, stage_class)):
        assert_memory_follows(seen, rank, +1)
        assert_two_at_most(at_sends, rank)
    for rank, sizes in enumerate(once(memory_in_16_bits, 2, stage_class)):
        assert max(sizes) <= 0.6 * BLOCK, (
            f"in bf16, while a block works, its parameters have {in_words(max(sizes))} on rank {rank}, and in fp32 "
            f"they have {in_words(BLOCK)}: 2 bytes an element are enough here, those of the bucket's dtype"
        )
        assert sum(after) <= 1.1 * BLOCK, (
            f"between forward and backward rank {rank} has memory of {sum(after) / BLOCK:.1f} blocks' parameters; only "
            "the last block may wait for backward"
        )


@pytest.mark.step(3, points=2, raised="a unit that was freed must be gathered again for its next turn: does anything "
                                      "still "
                  "take it for whole, unit.whole for example?")
def test_a_second_forward_computes_the_same_model(stage_class):
    for step in range(2):
        losses = [found[step] for *_, found in once(forwards_seen, 2, stage_class)]
        assert_losses(losses, [loss_of(Tower, rank, step) for rank in range(2)], f"forward pass {step + 1}")


class Twice(nn.Module):
    """Its block, which has a unit inside, is called twice: the outer one's turn comes while the inner one is whole."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(40, 40)
            self.inner = nn.ModuleList([nn.Linear(40, 40)])

        def forward(self, x):
            return self.inner[0](torch.tanh(self.before(x)))

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 40)
        self.blocks = nn.ModuleList([self.Outer()])
        self.last = nn.Linear(40, 3)

    def forward(self, x, y):
        x = self.blocks[0](self.blocks[0](self.first(x)))
        return (self.last(x) - y).square().mean()


def after_its_sibling(stage_class):
    """The units that have memory after the turns of two units, one after the other, inside a block."""
    zero = stage_class(toys.build(Nested, dist.get_rank()), optim.SGD, lr=1.0)
    if not all(hasattr(unit, "name") for unit in getattr(zero, "units", [None])):
        return []  # units of one's own kind
    for unit in [unit for unit in zero.units if unit.name.startswith("blocks.0.inner.")]:
        zero.unit_turn(unit, None)
    return [unit.name for unit in zero.units if unit.whole or unit.gathering]


@pytest.mark.step(3, points=1, raised=UNITS)
def test_units_inside_the_one_at_work_stay(stage_class):
    for rank, stay in enumerate(toys.run(after_its_sibling, 2, stage_class)):
        too_many = ", ".join(name for name in stay if name not in ("", "blocks.0", "blocks.0.inner.1"))
        assert not too_many, (f"at the turn of blocks.0.inner.1 rank {rank} still has memory for {too_many}: of a "
                              "block's inner units only the one at work has any")
    psi = sum(param.nbytes for param in Twice().parameters())
    for rank, (_, sent, _) in enumerate(toys.run(first_forward, 2, stage_class, Twice)):
        assert sent <= psi / 2 + padding(2, Twice), (
            f"rank {rank} of 2 sent {in_words(sent)} in a first forward that calls a block twice, and an all-gather of "
            f"each unit sends {in_words(psi / 2)}. The block has a unit inside it, blocks.0.inner.0: was that freed "
            "when the block's turn came again, to be gathered once more? Units inside the one at work stay if they "
            "are whole (unit in other.parents), and those around it (unit.parents). It is the same with the root when "
            "the first backward begins: to free the last block then costs a gather too many"
        )


PAUSE, TRIES = 0.04, 3  # seconds that rank 1 waits before it sends anything


def forwards_marked(stage_class, part, training=True, grad=True):
    """Of the second forward: Marks.begun, on a rank 1 that sends late. Each block has half of it in another group."""
    mine, rank = toys.build(Tower, dist.get_rank()), dist.get_rank()
    halves = [[param for name, param in mine.named_parameters() if (".down." in name) == down] for down in (0, 1)]
    zero = stage_class(mine, optim.SGD, lr=1.0, param_groups=[{"params": params} for params in halves])
    zero.model.train(training)
    marks = Marks(zero.model, pause=PAUSE * rank)
    with torch.set_grad_enabled(grad):
        zero.model(*numbers(rank, 0))
        with marks:
            zero.model(*numbers(rank, 1))
    return marks.begun(BLOCK / 2, part)


def assert_prefetched(begun, rank, when):
    late = [place for place, moment, sent in begun if sent > moment]
    assert not late, (
        f"in {when} rank {rank} begins to send what comes after blocks.{late[0]} only when blocks.{late[0]} has begun "
        "to "
        f"compute, or later ({len(late)} of {len(begun)} times so): the next unit must be on its way before this one "
        "computes, so that it travels meanwhile. unit_turn gets it as `following`"
    )


def assert_not_waited_for(function, stage_class, when):
    """Rank 0 computes a block before rank 1, who is late, has sent anything of the next one: so it does not wait. Once
    a rank may be late because the machine is busy; who waits is late every time."""
    for _ in range(TRIES):
        ours, theirs = toys.run(function, 2, stage_class)
        early = sum(moment < sent for (_, moment, _), (_, _, sent) in zip(ours, theirs, strict=True))
        if early > len(ours) / 2:
            return
    pytest.fail(
        f"in {when} rank 1 sends {1000 * PAUSE:.0f} ms late, and in {len(ours) - early} of {len(ours)} turns rank 0 "
        "did not begin to compute before it had what rank 1 sent for the next unit: the prefetch is waited for at "
        "once, so nothing overlaps. Start it in one turn, and wait for it in the next"
    )


@pytest.mark.step(3, points=4)
def test_the_next_unit_is_on_its_way(stage_class):
    for training, grad, mode in ((True, True, ""), (False, True, " in eval() mode"), (False, False, " under no_grad")):
        for rank, begun in enumerate(once(forwards_marked, 2, stage_class, 0.6, training, grad)):
            assert_prefetched(begun, rank, f"the second forward pass{mode}")


@pytest.mark.step(3, points=3)
def test_nobody_waits_for_the_next_unit(stage_class):
    assert_not_waited_for(functools.partial(forwards_marked, part=0.4), stage_class, "the second forward pass")


ORDERS = (None, 2, None, 4, 4)  # which block is left out in each pass


def left_out(stage_class):
    """What Sight saw, at turns and when something was sent, the losses, and how many gathers nobody has waited for,
    where the unit that was expected is left out in some passes."""
    zero, rank = build(stage_class, Tower), dist.get_rank()
    sight, losses, begun = Sight(zero.model), [], set()

    def heard(moment, call):
        begun.add(call) if moment == "start" else begun.discard(call) if moment == "end" else None

    with checks.poisoned_memory(), checks.Calls(pause=0.005 * rank, look=sight.sends), (
            seams.heard_by("collective", heard)):
        for step, skip in enumerate(ORDERS):
            sight.kind = f"forward pass {step + 1}, where " + ("no block is" if skip is None else f"blocks.{skip} is")
            sight.kind += " left out"
            losses.append(zero.model(*numbers(rank, step), skip=skip).item())
    return sight.seen, sight.at_sends, losses, len(begun)


@pytest.mark.step(3, points=2, raised="a unit may be on its way in vain, since its turn does not come: it is freed all "
                  "the same, but not before it has arrived", stuck="a unit is on its way, and its turn does not come: "
                  "who frees it before it has arrived leaves a gather that nobody waits for")
def test_a_unit_that_was_expected_in_vain(stage_class):
    ranks = toys.run(left_out, 2, stage_class)
    for rank, (seen, at_sends, _, _) in enumerate(ranks):
        looks = [look for look in seen if look[1] not in (1, 3)]  # their next one is left out in some passes
        assert_memory_follows(looks, rank, +1, "The unit was on its way, and its turn did not come: unit_turn frees "
                              "what is on its way too, once it has arrived")
        assert_two_at_most(at_sends, rank)
    for step, skip in enumerate(ORDERS):
        wanted = [loss_of(Tower, rank, step, skip=skip) for rank in range(2)]
        assert_losses([losses[step] for _, _, losses, _ in ranks], wanted,
                      f"forward pass {step + 1} of some that leave out a block in turn")
    left = max(left for *_, left in ranks)
    assert not left, (  # what comes into freed memory may do no harm, by luck
        f"after {len(ORDERS)} forward passes {left} gathers have begun, and nobody has waited for them: who "
        "frees a unit that is on its way before it has arrived leaves a gather that nobody waits for"
    )


def partly_frozen():
    """A tower in which each block has a frozen parameter, and one bias of few digits: any sum of it is exact."""
    tower = Tower()
    for block in tower.blocks:
        block.down.bias.requires_grad = False
    with torch.no_grad():
        tower.blocks[0].up.bias.copy_((256 * tower.blocks[0].up.bias).round() / 256)
    return tower


@torch.no_grad()
def turn(tower):
    """That bias the other way round: no sum of it changes."""
    tower.blocks[0].up.bias.copy_(tower.blocks[0].up.bias.flip(0))


@torch.no_grad()
def edit(block, trained_alone=False):
    block.up.weight.mul_(1.5)
    if not trained_alone:
        block.down.bias.add_(0.25)


def assert_edited(losses, place, step, what, look):
    """Of a partly frozen tower whose block number `place` was edited, and a bias of the first one turned."""

    def wanted(turned=True, **options):
        def change(whole):
            edit(whole.blocks[place], **options)
            if turned:
                turn(whole)

        return [loss_of(partly_frozen, rank, step, change=change) for rank in range(2)]

    assert losses != pytest.approx(wanted(turned=False), rel=1e-5), (
        f"in {what} a block of which much was changed has its new values, and another one its old ones. There the "
        "numbers of one bias were put in the opposite order, so that no sum of them is another: how do you find out "
        "what was changed?"
    )
    assert losses != pytest.approx(wanted(trained_alone=True), rel=1e-5), (
        f"in {what} the trained parameter has its new values, and the frozen one its old ones: what changes it in "
        "place (a counter, an average) is lost. A frozen parameter has a shard as well, and edits are kept in it, too"
    )
    assert_losses(losses, wanted(), what, look)


def edited(stage_class):
    """Losses of two passes; in the first one two blocks' parameters are changed in place, at their turns: of the second
    block one that is trained and one that is frozen."""
    zero, rank = build(stage_class, partly_frozen), dist.get_rank()
    losses = []
    hooks = [zero.model.blocks[1].up.register_forward_pre_hook(lambda *_: edit(zero.model.blocks[1])),
             zero.model.blocks[0].up.register_forward_pre_hook(lambda *_: turn(zero.model))]
    for step in range(2):
        losses.append(zero.model(*numbers(rank, step)).item())
        for hook in hooks:
            hook.remove()
    return losses


# in each pass, one after the other: when something is changed, and of which unit
CHANGED = (("forward", "blocks.1"), ("forward", "blocks.2"), ("forward", "first"), ("an evaluation", "blocks.3"),
           ("backward", "blocks.4"), ("a training step with lr=0", "last"), ("an evaluation", ""))
UNITS_CHANGED = {"blocks.2": ", all of which is frozen,", "first": ", of the root,", "last": ", of the root,"}


def frozen_in_part():
    """A tower in which each block has a frozen parameter, and one block has no other."""
    tower = partly_frozen()
    tower.blocks[2].requires_grad_(False)
    return tower


@torch.no_grad()
def change(module):
    for param in module.parameters():
        param.data.add_(0.05)  # .data: no version counter of the parameter's counts it


def changed(stage_class, passes):
    """The losses of the first passes of CHANGED."""
    zero, rank, losses = build(stage_class, frozen_in_part), dist.get_rank(), []
    for step, (when, name) in enumerate(CHANGED[:passes]):
        module, hook = zero.model.get_submodule(name), None
        if when == "backward":
            hook = module.up.bias.register_hook(lambda _, module=module: change(module.down))
        elif name:
            hook = module.register_forward_pre_hook(lambda module, _: change(module))
        with torch.set_grad_enabled(when != "an evaluation"):
            loss = zero.model(*numbers(rank, step))
        losses.append(loss.item())
        if when in ("backward", "a training step with lr=0"):
            loss.backward()
            if when != "backward":
                for group in zero.optimizer.param_groups:
                    group["lr"] = 0.0
                zero.step()
            zero.zero_grad()
        if hook:
            hook.remove()
    return losses


def changed_losses(step, lost=None):
    """What is right in a pass, or is found where the change of pass `lost` is lost."""
    def before(whole):
        for number, (when, name) in enumerate(CHANGED[: step + 1]):
            if name and number != lost and (when != "backward" or number < step):
                change(whole.get_submodule(name + ".down" * (when == "backward")))

    return [loss_of(frozen_in_part, rank, step, change=before) for rank in range(2)]


def assert_changes_stay(stage_class, passes):
    ranks = toys.run(changed, 2, stage_class, passes)
    for step in range(passes):
        losses = [losses[step] for losses in ranks]
        for lost, (when, name) in enumerate(CHANGED[:step]):
            assert losses != pytest.approx(changed_losses(step, lost), rel=1e-5), (
                f"in pass {lost + 1} parameters of {name}{UNITS_CHANGED.get(name, '')} were changed in place, at its "
                f"turn in {when}, and in pass {step + 1} they have their old values: what was changed goes back into "
                "the shards whenever a unit is freed"
            )
        assert_losses(losses, changed_losses(step), f"pass {step + 1}, where parameters are changed in place at their "
                      "unit's turn,", "what was changed goes back into the shards when a unit is freed")


@pytest.mark.step(3, points=1)
def test_what_is_changed_in_place_stays(stage_class):
    ranks = toys.run(edited, 2, stage_class)
    for step in range(2):
        assert_edited([losses[step] for losses in ranks], 1, step, f"forward pass {step + 1}, where parameters of "
                      "blocks.1 were changed in place at its turn in pass 1, and one of blocks.0,", "what was changed "
                      "goes back into the shards when the unit is freed")
    assert_changes_stay(stage_class, 3)  # all of them forward


# ------------------------------------------------------- step 4: backward, where gradients become shards, unit by unit


def ends_with_its_units():
    return Nested(Nested.Ends)


def backward_of_units_inside(stage_class):
    zero, rank = build(stage_class, ends_with_its_units), dist.get_rank()
    with checks.poisoned_memory():
        zero.model(*numbers(rank, 0)).backward()
        return shards_of(zero)


@pytest.mark.step(4, points=5, raised="backward reads a unit's parameters again, so unit_turn gathers in backward, "
                                      "too, and the units around it (unit.parents); and "
                  "gradients stay in memory until their reduction has ended",
                  stuck="was a reduction under way when the next one began? self.reducing holds one: if it was "
                  "overwritten, nobody has waited for the first")
@pytest.mark.parametrize("world_size", (2, 3))
def test_shards_hold_the_mean_gradient(stage_class, world_size):
    shards = [shards for shards, *_ in once(first_backward, world_size, stage_class)]
    assert_shards_hold(shards, gradients_of(world_size))
    if world_size == 2:
        assert_shards_hold(toys.run(backward_of_units_inside, 2, stage_class),
                           gradients_of(2, make=ends_with_its_units, batch=numbers), "the mean gradient of a model "
                           "whose blocks end with units inside them: backward comes to these first, and then to the "
                           "block around them, which has no turn of its own", ends_with_its_units)


def without_a_block(rank, step):
    return *numbers(rank, step), 2


def shards_without_a_block(stage_class):
    zero, rank = build(stage_class, Tower), dist.get_rank()
    zero.model(*without_a_block(rank, 0)).backward()
    return shards_of(zero)


@pytest.mark.step(4, points=2, stuck="one parameter got a gradient on rank 0 alone, and one on no rank at all: each "
                  "rank must reduce all buckets in the same order all the same, with zero for what is missing",
                  raised="a parameter may get no gradient on a rank, and its .grad is None then: it counts as zero")
def test_a_missing_gradient_is_zero(stage_class):
    gradients = gradients_of(3, make=Tower, batch=without_a_block)
    assert_shards_hold(toys.run(shards_without_a_block, 3, stage_class), gradients, "the mean gradient, where a block "
                       "was left out, so that its gradient is zero", make=Tower)
    gradients = gradients_of(3, make=checks.Awkward, batch=checks.awkward_batch)
    assert_shards_hold(toys.run(awkward_backward, 3, stage_class), gradients, "the mean gradient, where one parameter "
                       "got its gradient on rank 0 alone, which counts as zero on the others", make=checks.Awkward)


def backwards_seen(stage_class):
    """What Sight saw in two backward passes."""
    zero, rank = build(stage_class, Tower), dist.get_rank()
    sight = Sight(zero.model)
    for step in range(2):
        loss = zero.model(*numbers(rank, step))
        begins = len(sight.seen)
        loss.backward()
        zero.zero_grad()
    return [(f"{kind} pass", *seen) for kind, *seen in sight.seen[begins:] if kind == "backward"]


@pytest.mark.step(4, points=4, raised="backward needs the parameters of a unit again: it must be gathered in each pass")
def test_backward_frees_units_too(stage_class):
    for rank, seen in enumerate(once(backwards_seen, 2, stage_class)):
        assert [place for _, place, *_ in seen] == list(reversed(range(BLOCKS)))
        assert_in_turn(seen, rank, -1)
        assert_memory_follows(seen, rank, -1, DONE)


def frozen():
    """A tower whose blocks have no gradients: what backward sends meanwhile is for gathering them."""
    tower = Tower()
    for param in tower.blocks.parameters():
        param.requires_grad = False
    return tower


def backwards_marked(stage_class):
    zero, rank = build(stage_class, frozen), dist.get_rank()
    marks = Marks(zero.model, backward=True, pause=PAUSE * rank)
    for step in range(2):
        loss = zero.model(*numbers(rank, step))
        if step == 0:
            loss.backward()
            zero.zero_grad()
    with marks:
        loss.backward()
    return marks.begun(BLOCK / 2)


@pytest.mark.step(4, points=2)
def test_backward_prefetches(stage_class):
    for rank, begun in enumerate(toys.run(backwards_marked, 2, stage_class)):
        assert_prefetched(begun, rank, "the second backward pass")
    assert_not_waited_for(backwards_marked, stage_class, "the second backward pass")


DEEP = 16
deep = functools.partial(Tower, DEEP)


def memory_of_backwards(stage_class):
    """Of each of three backward passes, without a step in between, and where the second one is a second micro-batch:
    bytes at most when a gradient came, when a reduction of ours was waited for, and afterwards, when all is released;
    how many param.grad are left."""
    rank, memory, waiting, found = dist.get_rank(), Most(), Most(), []

    def heard(moment, call):
        if (moment, call.name) == ("wait", "reduce_scatter"):
            waiting.look()

    zero = build(stage_class, deep, lr=0.0)
    for block in zero.model.blocks[::4]:  # a look takes milliseconds
        block.up.weight.register_hook(lambda gradient: memory.look())
    for step in range(3):
        memory.most = waiting.most = 0
        with seams.heard_by("collective", heard):
            zero.model(*numbers(rank, step)).backward()
        left = gradients_left(zero.model)
        found.append((memory.most, waiting.most, memory.now(limits(dist.get_world_size())[1]), left))
        if step:
            zero.zero_grad()
    return found


def limits(world_size):
    """For the bytes of model and stage in backward, and after it."""
    shards = 2 * (sum(param.nbytes for param in deep().parameters()) / world_size + padding(world_size, deep))
    # after it the first block and the root are whole still. Meanwhile two blocks are, and so are gradients: of the unit
    # that autograd fills, of the one that is reduced, its copy from the other ranks, its part, a few activations
    return shards + (2 + 5) * BLOCK, shards + 2 * BLOCK


@pytest.mark.thorough
@pytest.mark.step(4, points=3)
def test_whole_gradients_do_not_pile_up(stage_class):
    psi = sum(param.nbytes for param in deep().parameters())
    during, afterwards = limits(4)
    for rank, found in enumerate(toys.run(memory_of_backwards, 4, stage_class)):
        for number, (most, waiting, after, left) in enumerate(found, 1):
            which = f"backward pass {number} of a model of {in_words(psi)} on 4 ranks"
            assert after <= afterwards, (
                f"after {which} rank {rank} holds {in_words(after)}. Its shards of parameters and gradients are "
                f"{in_words(psi / 2)}, and a block and the root may still be whole"
                + (f": {left} parameters have their .grad" if left else ": what else of the gradients is there?")
            )
            assert most <= during, (
                f"during {which} rank {rank} holds up to {in_words(most)}. Its shards of parameters and gradients are "
                f"{in_words(psi / 2)}, and a few blocks of {in_words(BLOCK)} may be whole, and their gradients: each "
                "unit's are reduced and freed as soon as backward is done with it"
            )
            # in the first one few gradients are shards yet when the most units are whole
            assert number > 1 or waiting <= during - 5.9 * BLOCK, (
                f"during {which} rank {rank} holds {in_words(waiting)} while it waits for a reduction, "
                f"{in_words(waiting - during + 5.9 * BLOCK)} too much. Does a unit's gradient get memory before the "
                f"one before it has given its own back? A block has {in_words(BLOCK)}"
            )


@pytest.mark.step(4, points=2)
def test_forward_and_backward_send_half_as_much_again(stage_class):
    results = once(first_backward, 3, stage_class)
    psi = sum(param.nbytes for param in model().parameters())
    spare = 3 * padding(3, model) + 1024
    for rank, (_, sent, made) in enumerate(results):
        told = f"rank {rank} of 3 sent {in_words(sent)} in forward and backward"
        names = ", ".join(sorted({call.name for call in made} - {"recv", "barrier"}))
        assert sent <= 1.02 * 3 * psi * 2 / 3 + spare, (
            f"{told}, and 3Ψ(N−1)/N are {in_words(3 * psi * 2 / 3)}: two all-gathers, for forward and for backward, "
            "and "
            f"a reduce-scatter. An all-reduce sends twice what a reduce-scatter does. It called {names}"
        )
        assert sent >= 0.98 * 2 * psi * 2 / 3, (
            f"{told}: an all-gather of all units and a reduce-scatter cannot do with less than "
            f"{in_words(2 * psi * 2 / 3)}. It called {names or 'nothing'}"
        )
        assert_no_barrier(made, rank, "forward and backward")


@pytest.mark.step(4, points=1)
def test_root_and_last_block_stay_for_backward(stage_class):
    example = model()
    psi, blocks, last = (sum(param.nbytes for param in part.parameters())
                         for part in (example, example.blocks, example.blocks[-1]))
    enough = (3 * psi - (psi - blocks + last)) * 2 / 3
    for rank, (_, sent, _) in enumerate(once(first_backward, 3, stage_class)):
        assert sent <= 1.02 * enough + 3 * padding(3, model) + 1024, (
            f"rank {rank} of 3 sent {in_words(sent)} in forward and backward, and {in_words(enough)} would do: the "
            "root and the last block are needed again at once when backward begins, so they can stay, and need no "
            "second all-gather: with n units 2n − 2 are enough. Backward begins with the turn of the root, and all "
            "blocks lie inside it"
        )


@pytest.mark.step(4, points=2)
def test_gradients_of_16_bits_are_added_in_32(stage_class):
    assert_added_in_32(toys.run(sixteen_bits, 3, stage_class))


@pytest.mark.step(4, points=1, stuck=GROUP, left=GROUP, raised=GROUP)
def test_backward_in_a_group(stage_class):
    first, _, second = toys.run(backward_in_a_group, 3, stage_class)
    assert_shards_hold([first, second], gradients_of(2, ranks=(0, 2)), "the mean gradient of ranks 0 and 2, the two "
                       "that are in the stage's group")


again = functools.partial(Tower, dropout=0.2, recompute=True)


def recomputed(stage_class):
    """The shards of a backward that computes each block again, with dropout; what was sent; bytes of each block's
    parameters when it has ended."""
    zero, rank = build(stage_class, again), dist.get_rank()
    sight = Sight(zero.model)
    with checks.poisoned_memory(), checks.Calls() as calls:
        zero.model(*seeded_numbers(rank, 0)).backward()
    return shards_of(zero), calls.sent(), sight.alive()


@pytest.mark.step(4, points=2, raised="with recomputation a unit's forward runs within backward: it is its turn")
def test_recomputation_and_dropout(stage_class):
    results = toys.run(recomputed, 2, stage_class)
    assert_shards_hold([shards for shards, *_ in results], gradients_of(2, make=again, batch=seeded_numbers),
                       "the mean gradient of blocks with dropout that are computed again in backward "
                       "(torch.utils.checkpoint)", make=again)
    for rank, (_, sent, after) in enumerate(results):
        assert sent <= 1.02 * 3 * PSI / 2 + 3 * padding(2), (
            f"with recomputation (torch.utils.checkpoint) rank {rank} of 2 sent {in_words(sent)}, and 3Ψ(N−1)/N are "
            f"{in_words(3 * PSI / 2)}: a unit that is whole already is gathered once more for its recomputation"
        )
        assert sum(after) <= 2.2 * BLOCK, (
            f"with recomputation rank {rank} has memory of {sum(after) / BLOCK:.1f} blocks' parameters when backward "
            "has ended: what was gathered for it is not freed"
        )


def micro_batches(stage_class):
    """The shards after two micro-batches."""
    zero, rank = build(stage_class, Tower), dist.get_rank()
    for micro in range(2):
        zero.model(*numbers(rank, micro)).backward()
    return shards_of(zero)


@pytest.mark.step(4, points=1)
def test_micro_batches_add_up(stage_class):
    shards = toys.run(micro_batches, 2, stage_class)
    together = torch.cat([flat(rank, own) for rank, own in enumerate(shards)])
    one = sum(gradients_of(2, steps=[1], make=Tower, batch=numbers)) / 2
    padded = torch.cat([one, one.new_zeros(max(0, len(together) - len(one)))])
    assert not alike(together, padded[: len(together)], 1e-5 * one.abs().max()), (
        "after two micro-batches the shards hold the last one's gradient alone: it overwrote the first one's, and must "
        "be added"
    )
    gradients = gradients_of(2, steps=[0, 1], make=Tower, batch=numbers)
    assert_shards_hold(shards, gradients, "the mean gradient, summed over two micro-batches", make=Tower)
    assert_keeps_16_bits(stage_class)


# ------------------------------------------------------------------- step 5: step, evaluation, the whole for a moment


def why_still(still):
    """Of a mask of parameters that did not move. The root and the first block are whole when step() begins."""
    sizes = {name: param.numel() for name, param in model().named_parameters()}
    touched = {name.startswith("blocks.") and name[: len("blocks.0")]
               for name, piece in zip(sizes, still.split(list(sizes.values())), strict=True) if piece.any()}
    if touched != {False, "blocks.0"}:  # False: the root's
        return "are all buckets updated?"
    return ("these units were still whole in step(). Did they give their old values back to the shards when they were "
            "released, after the update? Release before you update")


@pytest.mark.step(5, points=3)
@pytest.mark.parametrize("world_size", (2, 3))
def test_every_shard_is_updated(stage_class, world_size):
    for found in (once(first_step, world_size, stage_class), toys.run(first_step, world_size, stage_class, True)):
        results = [result for result, *_ in found]  # the second time units are whole when step() begins
        assert_stepped(results, sum(gradients_of(world_size)) / world_size, world_size, why_still=why_still)
    assert_nothing_is_left(stage_class, checks.matrices_decay)  # units of two buckets


@pytest.mark.step(5, points=1, stuck=GROUP, left=GROUP, raised=GROUP)
def test_a_step_in_a_group(stage_class):
    assert_steps_in_a_group(stage_class)


WIDTHS = {torch.float32: "4 + 4 + 8", torch.bfloat16: "2 + 2 + 12"}  # bytes a parameter, over N


def held(stage_class):
    """Of a step of AdamW in each dtype: bytes that live after it, the most that is right, what step() sent, and by
    which calls."""
    found, rank = [], dist.get_rank()
    for dtype in WIDTHS:
        memory = Most()
        zero = stage_class(toys.build(model, rank, dtype), optim.AdamW, lr=1e-3)
        zero.model(*toys.tokens(rank, 0)).backward()
        with checks.Calls() as calls:
            zero.step()
        most = 16 / dist.get_world_size() * (_elements() + padding(dist.get_world_size(), model) / 4) + 1024
        found.append((memory.now(most), most, calls.sent(), calls.made))
        del zero
    return found


def _elements():
    return sum(param.numel() for param in model().parameters())


@pytest.mark.thorough
@pytest.mark.step(5, points=2)
def test_holds_shards_alone_after_a_step(stage_class):
    for rank, found in (*enumerate(once(held, 4, stage_class)), (None, *once(held, 1, stage_class))):
        who, bytes = ("a rank that is alone", 16) if rank is None else (f"rank {rank} of 4", 4)
        for (dtype, formula), (size, most, *_) in zip(WIDTHS.items(), found, strict=True):
            assert size <= most, (
                f"{who} holds {size / _elements():.1f} bytes a parameter after a step of AdamW in "
                f"{str(dtype).removeprefix('torch.')}, and P_os+g+p ({formula})/N = {bytes}: it holds nothing but "
                "shards then"
            )


@pytest.mark.step(5, points=1)
def test_a_step_sends_nothing(stage_class):
    for rank, found in enumerate(once(held, 4, stage_class)):
        for _, _, sent, made in found:
            assert sent <= 1024, (
                f"rank {rank} of 4 sent {in_words(sent)} in step(), and nothing has to be sent: each rank updates its "
                "shard, and units are gathered when their turn comes"
            )
            assert_no_barrier(made, rank, "step()")
            assert not made, (
                f"rank {rank} of 4 called {in_calls(made)} in step(), and this model has no running statistics: "
                "nothing has to be sent, however little. Each call waits for the slowest rank"
            )


@pytest.mark.step(5, points=1)
def test_statistics_and_a_backward_too_many(stage_class):
    found = toys.run(after_many_steps, 2, stage_class)
    assert_statistics_are_of_rank_0(found)
    for rank, (_, refused, made) in enumerate(found):
        assert_no_barrier(made, rank, f"{MANY} steps")
        assert refused, (
            f"backward, step(), backward without zero_grad(): rank {rank} added the second gradient to the first one's "
            "shards without a word. It must be an error: set self.reducer.needs_zero_grad in step()"
        )


EVALUATIONS = ((8, None), (9, None), (10, BLOCKS - 1))  # batch, and the block that is left out: it comes in vain


def two_numbers(rank, step):
    """Of two micro-batches: the second one leaves out the first block, which backward then expects in vain."""
    return *numbers(rank, step), 0 if step else None


def evaluated(stage_class):
    """After a step: the losses of some evaluations, what is whole and how many bytes live more after each, and its
    calls; whether a step of training runs then. And the calls of the first forward, and of all this."""
    zero, rank, found, first = build(stage_class, Tower, lr=0.1), dist.get_rank(), [], []
    with checks.Calls() as calls:
        for micro in range(2):
            loss = zero.model(*two_numbers(rank, micro))
            first = first or gathers(calls.made)
            loss.backward()
        zero.step()
        zero.zero_grad()
        before = checks.live_bytes()
        for step, skip in EVALUATIONS:
            begins = len(calls.made)
            with torch.no_grad():
                loss = zero.model(*numbers(rank, step), skip=skip).item()
            whole = whole_in(zero)
            more = checks.live_bytes(until=before + 0.2 * BLOCK, looks=LOOKS) - before
            found.append((loss, whole, more, gathers(calls.made[begins:])))
        zero.model(*numbers(rank, 1)).backward()
        zero.step()
    return found, first, calls.made


def gathers(made):
    """Calls that send something, or should not be there."""
    return [call for call in made if call.name not in ("recv", "barrier")]


def stepped(whole):
    """A step of SGD with lr 0.1 from the mean gradient of two ranks' two micro-batches, in place."""
    with torch.enable_grad():
        mean = sum(gradients_of(2, steps=(0, 1), make=Tower, batch=two_numbers)) / 2
    for param, gradient in zip(whole.parameters(), mean.split([p.numel() for p in whole.parameters()]), strict=True):
        param -= 0.1 * gradient.view(param.shape)


@pytest.mark.step(5, points=1, raised="here step() is called where no rank ran a backward, and gradients count as "
                  "zero: what does step() call that ends backward also where none ran (self.reduced_gradients())?")
def test_a_step_without_a_backward(stage_class):
    assert_nothing_moved([result for result, in toys.run(step_without_backward, 2, stage_class, 1)])


@pytest.mark.step(5, points=2, raised=UNITS)
def test_an_evaluation_leaves_nothing_whole(stage_class):
    ranks, first, made = zip(*toys.run(evaluated, 2, stage_class), strict=True)
    for number, (step, skip) in enumerate(EVALUATIONS):
        assert_losses([found[number][0] for found in ranks],
                      [loss_of(Tower, rank, step, change=stepped, skip=skip) for rank in range(2)],
                      f"evaluation {number + 1} after a step", "does it gather the updated shards? (A unit that "
                      "backward expected in vain is still on its way when step() begins, with old values: release "
                      "that, too)")
        for rank, found in enumerate(ranks):
            _, whole, more, sent = found[number]
            still = (f", and {len(whole)} parameters are whole, {whole[0]} first" if whole else
                     f", and no parameter is whole: blocks.{skip} was expected, and is still on its way. Release what "
                     "is on its way, too, once it has arrived" if skip is not None else "")
            assert not whole and more <= 0.2 * BLOCK, (
                f"after evaluation {number + 1} (a forward under no_grad) rank {rank} still has "
                f"{in_words(max(more, 0))} more than before{still}: no backward comes that would free it"
            )
            # the first evaluation begins to gather in the order of the second micro-batch, in vain
            assert not number or len(sent) <= len(first[rank]), (
                f"in evaluation {number + 1} (a forward under no_grad) rank {rank} called {in_calls(sent)}, and in the "
                f"first forward of training {in_calls(first[rank])}: units are gathered, as there, and nothing else "
                "has to be sent, however little. Each call waits for the slowest rank"
            )
    for rank, calls in enumerate(made):
        assert_no_barrier(calls, rank, "two steps and three evaluations")
    assert_changes_stay(stage_class, len(CHANGED))


FROZEN = [f"blocks.{place}.down.bias" for place in range(BLOCKS)]


def shown(stage_class):
    """What gather_parameters() shows, and what becomes of edits and of frozen parameters: see the check. When it begins
    the last block is on its way, in vain. Bytes of what is kept of it afterwards; whether step() is refused inside, and
    what it sends there."""
    zero, rank = build(stage_class, partly_frozen), dist.get_rank()
    found = {"outside": []}

    def loss():
        with torch.no_grad():
            return zero.model(*numbers(rank, 0)).item()

    for skip in (None, BLOCKS - 1):
        zero.model(*numbers(rank, 0), skip=skip)
    with contextlib.suppress(RuntimeError):
        found["outside"] = [value.clone() for value in zero.model.state_dict().values()]
    with checks.Calls() as calls, zero.gather_parameters():
        kept = zero.model.state_dict()
        found["state"] = [value.clone() for value in kept.values()]
        edit(zero.model.blocks[-1])
        turn(zero.model)
    found["whole"], found["made"] = whole_in(zero), calls.made
    found["kept"] = min(value.untyped_storage().nbytes() for value in kept.values())
    found["edited"] = loss()
    try:
        with zero.gather_parameters(), torch.no_grad():
            zero.model.first.weight.mul_(3)
            raise KeyError
    except KeyError:
        found["error"] = "came out"
    found["whole after an error"] = whole_in(zero)
    if found["whole after an error"]:
        return found
    found["undone"] = loss()
    try:
        with zero.gather_parameters(), torch.no_grad():
            zero.model.first.weight[0, 0] += 1 + rank
        found["unlike"] = "accepted"
    except RuntimeError:
        found["unlike"] = "refused"
    found["afterwards"] = loss()
    found["step inside"] = "accepted"
    with contextlib.suppress(Exception), zero.gather_parameters():
        with checks.Calls() as calls:
            try:
                zero.step()
            except Exception:
                found["step inside"] = "refused"
        found["sent inside"] = calls.sent()
    zero.zero_grad()
    if not found["whole"]:
        zero.model(*numbers(rank, 0)).backward()
        zero.step()
        found["stepped"] = whole_in(zero)
    return found


def whole_in(zero):
    return [name for name, param in zero.model.named_parameters() if not is_released(param)]


def assert_none_whole(whole, rank, after):
    why = (": they are frozen, and so they are in none of self.buckets, but in their units', and in self.all_buckets"
           if whole == FROZEN else
           ". whole_parameters sets no unit.whole, and frees nothing: at the end free what each bucket has, whatever "
           "unit.whole says (does _release do nothing unless that is set?)"
           if after == "gather_parameters()" else "")
    number = f"{len(whole)} parameters are" if len(whole) > 1 else "a parameter is"
    assert not whole, f"after {after} {number} still whole on rank {rank}, {whole[0]}{' first' * (len(whole) > 1)}{why}"


@pytest.mark.step(5, points=2, stuck="all ranks must enter gather_parameters(), and leave it, in the same way",
                  raised="inside gather_parameters() every parameter is whole, and outside it is released")
def test_all_is_whole_inside_gather_parameters(stage_class):
    ranks = toys.run(shown, 2, stage_class)
    wanted = [value.detach() for value in toys.build(partly_frozen, 0).parameters()]
    for rank, found in enumerate(ranks):
        for where, state in (("inside", found["state"]), ("outside", found["outside"])):
            assert (not state and where == "outside") or all(map(torch.equal, state, wanted)), (
                f"rank {rank}: model.state_dict() {where} of gather_parameters() holds other values than the model's: "
                "of "
                "placeholders? As a checkpoint it would be lost"
            )
        assert_none_whole(found["whole"], rank, "gather_parameters()")
        assert found["kept"], (
            f"a state_dict() of inside gather_parameters() has no memory on rank {rank} when that has ended: who saves "
            "it then reads what is freed. Parameters are whole there in new memory"
        )
        assert_none_whole(found["whole after an error"], rank, "an error has ended gather_parameters()")
        assert_no_barrier(found["made"], rank, "gather_parameters()")
        assert "error" in found, (
            f"rank {rank}: an error inside gather_parameters() did not come out of it: nobody would hear of it"
        )
        assert found["unlike"] == "refused", (
            f"inside gather_parameters() the ranks made different edits, and rank {rank} went on without a word: it "
            "must "
            "be a RuntimeError (replicas.check_alike), or each shard holds something else"
        )
        assert found["afterwards"] == found["undone"], (
            f"different edits inside gather_parameters() were refused on rank {rank}, but some are in the shards: its "
            f"loss was {found['undone']:.4f} before, and is {found['afterwards']:.4f}. Compare before the shards take "
            "them over"
        )
        assert_none_whole(found["stepped"], rank, "step()")
        assert found["step inside"] == "refused", (
            f"step() inside gather_parameters() raised nothing on rank {rank}, and its update is lost when the context "
            "carries what it shows over to the shards: it must be an error"
        )
        assert not found["sent inside"], (
            f"step() inside gather_parameters() was refused on rank {rank} after {in_words(found['sent inside'])} had "
            "been sent: a rank that comes there alone would wait for the others. Refuse before you send"
        )
    assert_edited([found["edited"] for found in ranks], BLOCKS - 1, 0, "the forward after an edit inside "
                  "gather_parameters(), made alike on all ranks,", "edits are kept: the shards take them over. A unit "
                  "that was on its way when the context began must not come later, with old values")
    assert_edited([found["undone"] for found in ranks], BLOCKS - 1, 0, "the forward after gather_parameters() ended "
                  "with an error", "an error undoes what was edited inside: one rank may have had it alone")


TRAINING = {
    "SGD with momentum": (Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9), steps=3),
                          "does each step begin without old gradients?"),
    "two parameter groups": (Recipe(options=checks.ADAM, groups=checks.matrices_decay, steps=2),
                             "does each shard keep its group's learning rate and weight decay?"),
    "frozen, tied and unused parameters": (
        Recipe(make=checks.Awkward, batch=checks.awkward_batch, options=dict(checks.ADAM, weight_decay=0.5)),
        "a frozen parameter must not move, a tied one is updated once, one without a gradient counts as one whose "
        "gradient is zero, so that it decays"),
    "two micro-batches a step": (Recipe(options=checks.ADAM, accumulate=2, steps=2),
                                 "do micro-batches add up, and is nothing left for the next step?"),
    "a scheduler of the learning rate": (
        Recipe(options=checks.ADAM, schedule=checks.warm_up, steps=3), "is the learning rate of this step used?"),
    "bf16": (Recipe(options=checks.ADAM, dtype=torch.bfloat16),
             "are the fp32 masters updated, and rounded to the shards?"),
    "layers that are left out in turn": (checks.RECIPES["another order in each step"],
                                         "a layer without gradient counts as one whose gradient is zero"),
    "clipping, and a loss scale": CLIPPED["fp16, a loss scale, and clipping"],
}


@pytest.mark.thorough
@pytest.mark.step(5, points=2, stuck="several steps, with layers that get a gradient in some steps only", raised=UNITS)
def test_trains_as_one_process_would(stage_class):
    assert_trained_alike(trained, stage_class, 3, TRAINING, alone=("two micro-batches a step",))
    assert_clipping_leaves_the_gradients(stage_class)
    assert_small_updates_add_up(stage_class)


# --------------------------------------------------------------- all steps: what the kernel counts, at a plain size

TALL, BROAD = 16, 512
tall = functools.partial(Tower, TALL, BROAD)
SIZE, EACH = TALL * block_bytes(BROAD), block_bytes(BROAD)  # bytes: 34 MB, 2.1 MB
BLAME = "whole units, or copies of something, live in its memory"


def losses_of_a_large_model(stage_class, steps):
    """Of two forward passes, or of an evaluation after so many steps."""
    zero, rank = build(stage_class, tall, optim.AdamW, lr=1e-3), dist.get_rank()
    if not steps:
        return [loss.item() for loss in [zero.model(*numbers(rank, step)) for step in range(2)]]
    for step in range(steps):
        zero.model(*numbers(rank, step)).backward()
        zero.step()
        zero.zero_grad()
    with torch.no_grad():
        return [zero.model(*numbers(rank, steps)).item()]


def trained_plainly(steps, world_size):
    """The same model in one process."""
    whole = toys.build(tall, 0)
    update = optim.AdamW(whole.parameters(), lr=1e-3)
    for step in range(steps):
        update.zero_grad()
        for rank in range(world_size):
            (whole(*numbers(rank, step)) / world_size).backward()
        update.step()
    return whole


def assert_kernel_agrees(stage_class, steps, held, room, least):
    """On four ranks."""
    results, accounts = toys.run_counted(losses_of_a_large_model, 4, stage_class, steps)
    whole = trained_plainly(steps, 4)
    for number in range(1 if steps else 2):
        wanted = [whole(*numbers(rank, steps + number)).item() for rank in range(4)]
        assert_losses([losses[number] for losses in results], wanted, f"a forward of a model of {in_words(SIZE)}")
    assert_accounts(accounts, SIZE, held, room, least, BLAME)


@pytest.mark.thorough
@pytest.mark.step(3, points=0)
def test_the_kernel_counts_forwards(stage_class):
    assert_kernel_agrees(stage_class, 0, SIZE / 4, 3 * EACH + 6e6, 2 * SIZE * 3)  # held: a shard; sent: two all-gathers


@pytest.mark.thorough
@pytest.mark.step(5, points=0)
def test_the_kernel_counts_steps(stage_class):
    # held: 16/N bytes a parameter; sent: two all-gathers and a reduce-scatter a step, and an evaluation
    assert_kernel_agrees(stage_class, 2, SIZE, 7 * EACH + 6e6, (2 * 3 + 1) * SIZE * 3 * 0.95)
