"""The ladder: stages 0 to 3 train the same model alike, and differ in memory and traffic exactly as the paper says."""

import contextlib
import copy
import functools
import gc
import itertools

import checks
import pytest
import sharded
import torch
import torch.distributed as dist
import toys
from misuse import in_ranks
from thorough import companions, sample, sharing
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from toys import STAGES, WORLDS, Recipe

from zero_minimal import guards
from zero_minimal.core import seams
from zero_minimal.core.layout import Bucket
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.workload.settings import Settings

by_stage = pytest.mark.parametrize("stage", range(4))


def small_gpt():
    """The GPT of zero_minimal.workload, with dropout and tied weights."""
    return GPT(GPTConfig(layers=2, hidden=21, heads=3, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.1))


# ------------------------------------------------------------------------------------------- fp32, AdamW: bit for bit


class DDP:
    """torch's DistributedDataParallel with our API."""

    def __init__(self, model, optimizer_class, *, bucket_bytes, **options):
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_bytes / 2**20)
        self.optimizer = optimizer_class(model.parameters(), **options)
        self.step, self.zero_grad = self.optimizer.step, self.optimizer.zero_grad

    def gather_parameters(self):
        return contextlib.nullcontext()


BIT_FOR_BIT = {
    "transformer": Recipe(steps=20, options=dict(lr=3e-3)),
    "transformer, one bucket": Recipe(steps=20, options=dict(lr=3e-3), bucket_bytes=2**30),
    "gpt": Recipe(make=small_gpt, steps=20, options=dict(lr=3e-3)),
}


@functools.cache
def twenty_steps(world_size, name):
    results = toys.run(checks.train_all, world_size, {name: BIT_FOR_BIT[name]}, *STAGES, DDP)
    return [rank[name] for rank in results]


by_world_and_recipe = pytest.mark.parametrize("world_size, name", sample(
    itertools.product(WORLDS, BIT_FOR_BIT),
    [(3, "gpt")],
))


@by_world_and_recipe
def test_losses_agree_bit_for_bit(world_size, name):
    runs = twenty_steps(world_size, name)
    for rank, (first, *others, _) in enumerate(runs):
        assert len(first.losses) == 20
        for stage, other in enumerate(others, start=1):
            assert other.losses == first.losses, f"stage {stage}, rank {rank}"
            assert toys.identical(other.parameters, first.parameters), f"stage {stage}, rank {rank}"
        assert toys.identical(first.parameters, runs[0][0].parameters), f"ranks 0 and {rank} hold different parameters"
    assert len({tuple(rank[0].losses) for rank in runs}) == world_size, "the ranks had the same data: no test at all"


@by_world_and_recipe
def test_losses_agree_with_ddp(world_size, name):
    for rank in twenty_steps(world_size, name):
        ours, ddp = rank[0].losses, rank[-1].losses
        assert ours == pytest.approx(ddp, rel=1e-5)
        assert ours[-1] < ours[0], "nothing was learned: the comparison says little"


# ------------------------------------------------------------------------- everything else: bit for bit where it can be

# Here the stages differ in the order in which the squares of the norm, or the micro-batches of the ranks, are summed.
# All other recipes ask for the same arithmetic, element by element. That each stage trains as one process would, within
# rounding, is tested below.
IN_ANOTHER_ORDER = {name for name, recipe in checks.RECIPES.items() if recipe.clip or recipe.accumulate > 1}


# with the others of checks.RECIPES it takes long; "all the rest" clips and accumulates
AGREE = ("frozen, tied and unused parameters", "bf16 and all the rest")


@functools.cache
def with_recipes(world_size, names):
    return toys.run(checks.train_all, world_size, {name: checks.RECIPES[name] for name in names}, *STAGES)


@pytest.mark.parametrize("name", sample(checks.RECIPES, AGREE))
def test_stages_agree(name):
    names = companions(name, checks.RECIPES, AGREE)
    names = sharing(name, names, 5)  # all of them would take longer than a run may
    plain, exact = checks.plainly(3, names)[name]
    rounding = toys.distance(plain.parameters, exact.parameters)  # the bound of checks.assert_trains_as_one_process
    for results in with_recipes(3, names):
        first, *others = results[name]
        for stage, other in enumerate(others, start=1):
            if name in IN_ANOTHER_ORDER:
                assert toys.distance(other.parameters, first.parameters) <= rounding, f"stage {stage}"
            else:
                assert other.losses == first.losses, f"stage {stage}"
                assert toys.identical(other.parameters, first.parameters), f"stage {stage}"


# ------------------------------------------------------------------------------------------ each stage, beside no stage

worlds = pytest.mark.parametrize("world_size", sample((2, 3, 4), [3]))


@pytest.mark.thorough
@by_stage
@worlds
@pytest.mark.parametrize("check", (
    checks.assert_starts_from_rank_0, checks.assert_gradient_is_the_mean, checks.assert_clips_by_the_global_norm))
def test_alone(stage, world_size, check):
    check(STAGES[stage], world_size)


@pytest.mark.thorough
@by_stage
@pytest.mark.parametrize("world_size", sample((1, 2, 3), [3]))
def test_trains_as_one_process_would(stage, world_size):
    checks.assert_trains_as_one_process(STAGES[stage], world_size)


@pytest.mark.parametrize("stage", sample(range(4), [2]))
def test_small_steps_in_bf16_add_up(stage):
    """25 steps of 0.0015 make 0.0375, though each is too small to be seen in bf16: fp32 masters remember them."""
    for parameters in toys.run(sharded.small_updates, 2, STAGES[stage]):
        assert torch.equal(parameters.bfloat16(), torch.full((60,), 1 - 25 * 0.0015).bfloat16())


@pytest.mark.parametrize("stage", sample(range(4), [0, 3]))
def test_overflow_on_one_rank_is_everybodys(stage):
    sharded.assert_overflow_is_shared(STAGES[stage], 3)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", sample(range(4), [3]))
@worlds
@pytest.mark.parametrize("dtype", sample((torch.float32, torch.bfloat16), [torch.bfloat16]), ids=str)
def test_restarts(stage, world_size, dtype):
    checks.assert_restarts(STAGES[stage], world_size, dtype)


@pytest.mark.parametrize("stage", sample(range(4), [0, 3]))
def test_reduces_during_backward(stage):
    checks.assert_reduces_during_backward(STAGES[stage], 2, "reduce_scatter" if stage else "all_reduce")


@pytest.mark.parametrize("stage", (0, 1))
def test_nothing_is_sent_under_no_sync(stage):
    for events, psi, padding in toys.run(checks.events_of_a_step, 2, STAGES[stage], accumulate=3, bucket_bytes=4096):
        ends = [place for place, event in enumerate(events) if event.kind == "ended"]
        step = [event.kind for event in events].index("step")
        assert checks.sent_in(events[: ends[1]]) == 0, "micro-batches before the last were reduced"
        reduced, gathered = ("reduce_scatter", "all_gather") if stage else ("all_reduce", "nothing")
        assert psi <= checks.sent_in(events[:step], reduced) <= psi + padding
        assert stage == 0 or psi <= checks.sent_in(events[step:], gathered) <= psi + padding
        assert checks.sent_in(events) == checks.sent_in(events, reduced, gathered)


# -------------------------------------------------------------------------------------------------- memory, to the byte

# bytes a parameter (section 3.1 of the paper): parameters, gradients, optimizer; and the first stage that shards each
BYTES = {torch.float32: (4, 4, 8), torch.bfloat16: (2, 2, 12)}
SHARDED_FROM = (3, 2, 1)


def formula(stage, elements, world_size, dtype):
    """Bytes of parameters, gradients and optimizer state on one rank."""
    return [
        size * elements / (world_size if stage >= sharded else 1)
        for size, sharded in zip(BYTES[dtype], SHARDED_FROM, strict=True)
    ]


PLACEHOLDERS = 4 + 2  # stage 3's, of fp32 and bf16, stay for the next model


def model_states():
    """{(stage, dtype): the ledger's states, elements, padding, buckets, bytes that a look at all objects finds}"""
    found, rank, nothing = {}, dist.get_rank(), checks.live_bytes()
    for dtype in BYTES:
        for stage, stage_class in enumerate(STAGES):
            before = checks.live_bytes(until=nothing + PLACEHOLDERS)  # the model before this one is gone
            ledger = Ledger()
            with ledger:
                model = toys.build(toys.Transformer, rank, dtype)
                zero = stage_class(model, optim.AdamW, bucket_bytes=4096)
                ledger.watch(model, zero)
                for step in range(2):
                    zero.zero_grad()
                    model(*toys.tokens(rank, step)).backward()
                    zero.step()
                states = ledger.states()
            elements = sum(param.numel() for param in model.parameters())
            padding = sum(bucket.padded - bucket.numel for bucket in zero.buckets)
            found[stage, dtype] = states, elements, padding, len(zero.buckets), checks.live_bytes() - before
            del model, zero, ledger
    return found


states_on = functools.cache(functools.partial(toys.run, model_states))


@by_stage
@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("world_size", sample(WORLDS, [3]))
def test_model_states_equal_the_formula_to_the_byte(world_size, dtype, stage):
    for rank in states_on(world_size):
        states, elements, padding, buckets, seen = rank[stage, dtype]
        theory = formula(stage, elements, world_size, dtype)
        padded = [size + extra for size, extra in zip(theory, formula(stage, padding, world_size, dtype), strict=True)]
        assert [states[name] for name in ("parameters", "gradients", "optimizer")] == padded
        counters = 4 * buckets  # Adam's step counters, one a bucket
        # what gradients that were handed over show, and released parameters: one element a flat
        placeholders = dtype.itemsize * (0, 1, 1, buckets)[stage]
        assert states["scalars"] == counters + placeholders
        assert states["activations"] == states["buffers"] == 0
        # and by another way: all storages that any Python object holds, whatever anybody believes about them
        assert seen == sum(padded) + counters + placeholders
        assert padding <= checks.most_padding(toys.Transformer(), world_size)


# ----------------------------------------------------------------------- the algorithm by itself, and all that attaches

PACKAGES = {"all that attaches": "nothing", "no guards": "zero_minimal.guards", "by itself": "zero_minimal."}


def by_itself(stage):
    """{who listens: losses and norms of three steps, parameters, messages of buckets, model states now and at most}"""
    found = {}
    for name, package in PACKAGES.items():
        calls, losses, ledger = [], [], Ledger()
        with guards.off(package), ledger, seams.heard_by("collective", lambda *heard, calls=calls: calls.append(heard)):
            model = toys.build(toys.Transformer, dist.get_rank(), torch.bfloat16)
            zero = STAGES[stage](model, optim.AdamW, bucket_bytes=4096, lr=0.01)
            ledger.watch(model, zero)
            for step in range(3):
                with zero.no_sync():
                    model(*toys.tokens(dist.get_rank(), 2 * step)).backward()
                loss = model(*toys.tokens(dist.get_rank(), 2 * step + 1))
                loss.backward()
                losses += [loss.item(), zero.clip_grad_norm_(0.5).item()]
                zero.step()
                states = ledger.states()
                zero.zero_grad()
            with zero.gather_parameters():
                parameters = [param.detach().clone() for param in model.parameters()]
        # what guards send themselves names no bucket
        trains = [(moment, call.name, call.bytes) for moment, call in calls if isinstance(call.of, Bucket)]
        highest = ledger.highest()  # (gloo's threads let go of buffers a moment late)
        memory = {what: (states[what], highest[what]) for what in ("parameters", "gradients", "optimizer")}
        found[name] = losses, parameters, trains, memory
        del model, zero, ledger
    return found


@pytest.mark.thorough
@by_stage
@pytest.mark.parametrize("world_size", sample(WORLDS, [2]))
def test_guards_change_no_bit_and_no_byte(world_size, stage):
    for found in toys.run(by_itself, world_size, stage):
        everything, *others = found.values()
        for name, alone in zip([*found][1:], others, strict=True):
            assert alone[0] == everything[0] and toys.identical(alone[1], everything[1]), f"{name}: other bits"
            assert alone[2] == everything[2], f"{name}: other messages"
        assert others[0][3] == everything[3], "without guards: other memory"


# ----------------------------------------------------------------------------------------------- peak memory, in order

SHAPES = {
    "default": lambda: GPT(Settings().model_config()),
    "larger gpt": lambda: GPT(GPTConfig(layers=7, hidden=256, heads=8, sequence=32)),
    "large vocabulary": lambda: GPT(GPTConfig(layers=2, hidden=128, heads=4, sequence=32, vocabulary=40_000)),
    "mlp": lambda: toys.MLP(300, 1900, 1300, 1100, 900, 3),
    "deep and narrow": lambda: toys.MLP(300, *[330] * 48, 3),
    "one layer": lambda: toys.MLP(300, 18_001, 3),
}


def peaks(shape, steps=2):
    """The peak of the second step at each stage, and the parameters."""
    rank, found = dist.get_rank(), []
    for stage_class in STAGES:
        ledger = Ledger()
        with ledger:
            model = toys.build(SHAPES[shape], rank)
            zero = stage_class(model, optim.AdamW)  # buckets of the default size
            ledger.watch(model, zero)
            for step in range(steps):
                if step == steps - 1:
                    ledger.reset()
                is_gpt = isinstance(model, GPT)
                batch = toys.tokens(rank, step, batch=4, sequence=32) if is_gpt else toys.numbers(rank, step, 300)
                model(*batch).backward()
                zero.step()
                zero.zero_grad()
        found.append(ledger.peak)
        elements = sum(param.numel() for param in model.parameters())
        del model, zero, ledger
        gc.collect()  # a stage and its model refer to each other
    return elements, found


@pytest.mark.thorough
@pytest.mark.parametrize("shape", sample(SHAPES, ["mlp"]))
def test_peak_memory_falls_from_stage_to_stage(shape):
    for elements, moments in toys.run(peaks, 2, shape):
        assert elements > 5_000_000 or shape == "default"
        totals = [moment.total for moment in moments]
        shown = "\n".join(f"stage {stage}: {m.total:,} in {m.what}: {m.bytes}" for stage, m in enumerate(moments))
        assert all(moment.bytes["other"] == 0 for moment in moments), shown
        assert totals[1] > totals[2], shown
        if shape in ("default", "larger gpt"):
            assert totals[0] > totals[1] > totals[2] > totals[3], shown


# ------------------------------------------------------------------------------------- what is whole, and for how long

OPEN = 1792  # bytes of a bucket: small beside the model


def gradients_of_stage2():
    """Most bytes of gradients at any moment of the third step; those of the shards, the largest bucket, all of them."""
    rank, ledger = dist.get_rank(), Ledger()
    with ledger:
        model = toys.build(functools.partial(toys.Transformer, 5), rank)
        zero = STAGES[2](model, optim.AdamW, bucket_bytes=OPEN)
        ledger.watch(model, zero)
        for step in range(3):
            ledger.reset()
            model(*toys.tokens(rank, step)).backward()
            zero.step()
            zero.zero_grad()
    psi = sum(bucket.padded * 4 for bucket in zero.buckets)
    return ledger.highest()["gradients"], psi, max(param.nbytes for param in model.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", sample((2, 4), [4]))
def test_stage_2_holds_whole_gradients_of_open_buckets_only(world_size):
    for highest, psi, largest in toys.run(gradients_of_stage2, world_size):
        # One bucket is being reduced, one is filled, and one has begun with the gradient of a norm, which comes before
        # its neighbours'; a gradient that autograd hands over may fill several on its way.
        open_buckets = 3 * OPEN + 2 * largest
        assert highest <= psi / world_size + open_buckets
        assert open_buckets < psi / 3, "the model is too small for this to say anything"


def whole_units_of_stage3():
    """[(pass, unit at work, the units whose parameters lie whole in memory), ...] over three steps, as storages tell;
    the names of all units; and the bytes that lie whole after each step and the evaluation that follows it."""
    rank = dist.get_rank()
    model = toys.build(functools.partial(toys.Transformer, 5), rank)
    zero = STAGES[3](model, optim.AdamW)
    seen = []

    def look(kind, unit):
        whole = {
            other.name
            for other in zero.units
            if any(bucket.parameters.untyped_storage().nbytes() for bucket in other.buckets)
        }
        seen.append((kind, unit.name, whole))

    for unit in zero.units:
        for module in unit.module.modules():
            own = set(unit.params) & set(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(lambda *_, unit=unit: look("forward", unit))
            for param in own:
                param.register_hook(lambda gradient, unit=unit: look("backward", unit))
    between = []
    for step in range(3):
        model(*toys.tokens(rank, step)).backward()
        zero.step()
        zero.zero_grad()
        with torch.no_grad():
            model(*toys.tokens(rank, step))
        between.append(sum(bucket.parameters.untyped_storage().nbytes() for bucket in zero.all_buckets))
    return seen, [unit.name for unit in zero.units], between


def test_stage_3_holds_root_unit_at_work_and_the_prefetched_one_only():
    for seen, names, between in toys.run(whole_units_of_stage3, 2):
        assert len(names) == 6 and between == [0, 0, 0]
        assert {kind for kind, _, _ in seen} == {"forward", "backward"}
        for kind, unit, whole in seen:
            assert {"", unit} <= whole, f"{unit!r} works in {kind} without being whole"
            assert len(whole - {"", unit}) <= 1, f"while {unit!r} works in {kind}, all of {whole} are whole"
        # the one prefetched is the one that comes next
        for kind, step in (("forward", 1), ("backward", -1)):
            blocks = [(unit, whole) for own, unit, whole in seen if own == kind and unit]
            for unit, whole in blocks[len(blocks) // 2 :]:
                following = f"blocks.{int(unit[-1]) + step}"
                assert whole - {"", unit} <= {following}, f"in {kind}, beside {unit}, stands {whole}"
                assert following not in names or following in whole, f"in {kind}, {unit} did not prefetch {following}"


# ---------------------------------------------------------------------------------------------------------- traffic


def traffic(dtype=torch.float32, accumulate=1, make=toys.Transformer):
    """For each stage: bytes that the meter says a rank sends in the third step, [bytes of each bucket]."""
    rank, found = dist.get_rank(), []
    for stage_class in STAGES:
        model = toys.build(make, rank, dtype)
        zero = stage_class(model, optim.AdamW, bucket_bytes=4096)
        for step in range(3):
            with TrafficMeter() as meter:
                for micro in range(accumulate):
                    with zero.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                        model(*toys.tokens(rank, step * accumulate + micro)).backward()
                zero.step()
            zero.zero_grad()
        found.append((meter.sent_bytes, {bucket.name: bucket.padded * dtype.itemsize for bucket in zero.buckets},
                      sum(bucket.padded for bucket in zero.buckets) * dtype.itemsize))
    return found


@pytest.mark.parametrize("world_size, dtype, accumulate", sample(
    itertools.product(WORLDS, (torch.float32, torch.bfloat16), (1, 3)),
    [(3, torch.bfloat16, 3)]), ids=str)
def test_sent_bytes_equal_the_formula(world_size, dtype, accumulate):
    """Psi here is in bytes and padded; (N-1)/N of it is what a ring sends for one reduce-scatter or all-gather."""
    for rank in toys.run(traffic, world_size, dtype, accumulate):
        share = (world_size - 1) / world_size
        for stage, (sent, units, psi) in enumerate(rank):
            if stage < 2:
                assert sent == 2 * psi * share  # gradients wait whole: reduced once, however many micro-batches
            elif stage == 2:
                assert sent == (accumulate + 1) * psi * share
            else:
                # What stays, and need not come again: the root until the step, the last block from forward to backward,
                # the first one from backward to the forward of the next micro-batch.
                root, first, last = units["the root unit"], units["blocks.0"], units["blocks.2"]
                stays = (2 * accumulate - 1) * root + accumulate * last + (accumulate - 1) * first
                assert sent == (3 * accumulate * psi - stays) * share


@by_stage
@pytest.mark.parametrize("world_size, accumulate", sample(itertools.product((2, 3), (1, 3)), [(3, 3)]))
def test_the_wire_carries_what_the_formula_says(world_size, stage, accumulate):
    """Without a module list, stage 3 has a root unit alone, which is gathered once, as at stage 2."""
    checks.assert_traffic(STAGES[stage], world_size, 2 if stage < 2 else accumulate + 1, accumulate)


# ------------------------------------------------------------------------------------------------------ other promises


@in_ranks(2)
def test_a_model_and_its_stage_can_be_freed():
    """Hooks that hold a parameter are a cycle that Python's garbage collector cannot see through."""
    before = checks.live_bytes()
    for stage_class in STAGES:
        toys.train(stage_class, Recipe(steps=1))
    assert checks.live_bytes(until=before + PLACEHOLDERS) - before <= PLACEHOLDERS


def edited(dtype):
    """For each stage: parameters inside gather_parameters() before and after an edit and a step of no consequence."""
    rank, found = dist.get_rank(), []
    for stage_class in STAGES:
        model = toys.build(toys.Transformer, rank, dtype)
        zero = stage_class(model, optim.SGD, lr=0.0, bucket_bytes=4096)
        with zero.gather_parameters(), torch.no_grad():
            shown = [param.clone() for param in model.parameters()]
            state = copy.deepcopy(model.state_dict())
            model.head.weight.fill_(0.125)
        model(*toys.tokens(rank, 0)).backward()
        zero.step()
        zero.zero_grad()
        kept = toys.whole_parameters(zero)
        with zero.gather_parameters():
            model.load_state_dict(state)
        found.append((shown, kept, toys.whole_parameters(zero)))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", sample((torch.float32, torch.bfloat16), [torch.bfloat16]), ids=str)
def test_gather_parameters_shows_rank_0s_values_and_keeps_edits(dtype):
    initial = [param.detach() for param in toys.build(toys.Transformer, 0, dtype).parameters()]
    after = [*initial[:-1], torch.full_like(initial[-1], 0.125)]  # the head comes last
    for rank in toys.run(edited, 3, dtype):
        for stage, (shown, kept, loaded) in enumerate(rank):
            assert toys.identical(shown, initial), f"stage {stage} shows other values than rank 0 began with"
            assert toys.identical(kept, after), f"stage {stage} lost an edit"
            assert toys.identical(loaded, initial), f"stage {stage} lost a loaded state dict"
