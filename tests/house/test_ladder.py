"""The ladder: stages 0 to 3 train the same model alike, and differ in memory and traffic exactly as the paper says."""

import contextlib
import copy
import functools
import gc
import math

import checks
import pytest
import toys
import torch
import torch.distributed as dist
from toys import STAGES, WORLDS, Recipe
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from zero_minimal.instruments.memory import Ledger
from zero_minimal.instruments.traffic import TrafficMeter, loopback_bytes
from zero_minimal.workload.model import GPT, GPTConfig

by_stage = pytest.mark.parametrize("stage", range(4))
by_world = pytest.mark.parametrize("world_size", WORLDS)


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


def train_all(recipes, classes):
    """{recipe: [a Run for each class]}, on one rank."""
    return {name: [toys.train(stage_class, recipe) for stage_class in classes] for name, recipe in recipes.items()}


@functools.cache
def twenty_steps(world_size):
    return toys.run(train_all, world_size, BIT_FOR_BIT, (*STAGES, DDP))


@pytest.mark.parametrize("name", BIT_FOR_BIT)
@by_world
def test_losses_agree_bit_for_bit(world_size, name):
    runs = [rank[name] for rank in twenty_steps(world_size)]
    for rank, (first, *others, _) in enumerate(runs):
        assert len(first.losses) == 20
        for stage, other in enumerate(others, start=1):
            assert other.losses == first.losses, f"stage {stage}, rank {rank}"
            assert toys.identical(other.parameters, first.parameters), f"stage {stage}, rank {rank}"
        assert toys.identical(first.parameters, runs[0][0].parameters), f"ranks 0 and {rank} hold different parameters"
    assert len({tuple(rank[0].losses) for rank in runs}) == world_size, "the ranks had the same data: nothing was tested"


@pytest.mark.parametrize("name", BIT_FOR_BIT)
@by_world
def test_losses_agree_with_ddp(world_size, name):
    for rank in twenty_steps(world_size):
        ours, ddp = rank[name][0].losses, rank[name][-1].losses
        assert ours == pytest.approx(ddp, rel=1e-5)
        assert ours[-1] < ours[0], "nothing was learned: the comparison says little"


# ------------------------------------------------------------------------------ all else: within rounding, as one process


def decayed_and_not(model):
    """Two parameter groups: matrices decay strongly, vectors do not and learn faster."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.5},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 2e-2},
    ]


def warm_up(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


# Adam divides by the size of the gradient. eps keeps it from blowing up gradients that are zero but for rounding (a key's
# bias has no effect): with them, no bound on the parameters would hold.
ADAM = dict(lr=1e-2, eps=1e-4)
BF16, FP16 = torch.bfloat16, torch.float16

RECIPES = {
    "clipping": Recipe(options=ADAM, clip=0.1),
    "accumulation": Recipe(options=ADAM, accumulate=3),
    "accumulation without no_sync": Recipe(options=ADAM, accumulate=3, no_sync=False),
    "SGD with momentum": Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9, weight_decay=0.1)),
    "parameter groups": Recipe(options=ADAM, groups=decayed_and_not),
    "LR scheduler": Recipe(options=ADAM, schedule=warm_up),
    "tied weights": Recipe(make=functools.partial(toys.Transformer, tied=True), options=ADAM),
    "bf16": Recipe(options=ADAM, dtype=BF16),
    "bf16, all together": Recipe(options=ADAM, dtype=BF16, clip=0.1, accumulate=2, groups=decayed_and_not, schedule=warm_up),
    "fp16": Recipe(options=ADAM, dtype=FP16, scale=1024.0),
    "fp16, all together": Recipe(options=ADAM, dtype=FP16, scale=1024.0, clip=0.1, accumulate=2),
}
# Here the stages do the same arithmetic element by element, so they agree to the bit. The others differ in the order in
# which the norm, or the micro-batches of the ranks, are summed.
SAME_ARITHMETIC = {"SGD with momentum", "parameter groups", "LR scheduler", "tied weights", "bf16", "fp16"}


@functools.cache
def with_recipes(world_size):
    return toys.run(train_all, world_size, RECIPES, STAGES)


def plain_runs(recipes, world_size):
    """{recipe: the same without ZeRO in the same precision, and in fp64}. How far they are apart is what rounding does."""
    return {
        name: (toys.plain(recipe, world_size), toys.plain(recipe, world_size, torch.float64))
        for name, recipe in recipes.items()
    }


@functools.cache
def plainly(world_size):
    return toys.run(plain_runs, 1, RECIPES | ELEMENT_WISE, world_size)[0]


@by_stage
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world_size", (2, 3))
def test_trains_as_one_process_would(world_size, name, stage):
    """The bound: a stage does the same operations in the same precision as a plain loop, but sums in another order. So it
    may differ from the plain loop by no more than the plain loop differs, by rounding, from the same in fp64."""
    plain, exact = plainly(world_size)[name]
    start = list(toys.build(RECIPES[name].make, 0).parameters())
    rounding, moved = toys.distance(plain.parameters, exact.parameters), toys.distance(exact.parameters, start)
    assert rounding < 0.05 * moved, "a bound as large as this would let mistakes through"
    loss_rounding = (torch.tensor(plain.losses) - torch.tensor(exact.losses)).abs().max().item()
    for rank, results in enumerate(with_recipes(world_size)):
        run = results[name][stage]
        assert toys.distance(run.parameters, plain.parameters) <= rounding
        assert run.losses == pytest.approx(plain.losses[rank], abs=2 * loss_rounding)
        # a norm of ~7,000 elements: in fp32 its sum of squares rounds in the last bits; in 16 bit the gradients do
        assert run.norms == pytest.approx(plain.norms, rel=1e-5 if RECIPES[name].dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize("name", SAME_ARITHMETIC)
@pytest.mark.parametrize("world_size", (2, 3))
def test_stages_agree_bit_for_bit_where_arithmetic_is_the_same(world_size, name):
    for results in with_recipes(world_size):
        first, *others = results[name]
        for stage, other in enumerate(others, start=1):
            assert other.losses == first.losses and toys.identical(other.parameters, first.parameters), f"stage {stage}"


ELEMENT_WISE = {
    "Adam": Recipe(optimizer=optim.Adam, options=dict(ADAM, weight_decay=0.1)),
    "Adam, amsgrad": Recipe(optimizer=optim.Adam, options=dict(ADAM, amsgrad=True)),
    "AdamW, fused": Recipe(options=dict(ADAM, fused=True)),
    "AdamW, foreach": Recipe(options=dict(ADAM, foreach=True)),
    "AdamW, maximize": Recipe(options=dict(ADAM, maximize=True)),
    "RMSprop": Recipe(optimizer=optim.RMSprop, options=dict(lr=1e-3, eps=1e-3, momentum=0.9, centered=True)),
    "Adagrad": Recipe(optimizer=optim.Adagrad, options=dict(lr=1e-2, eps=1e-4, lr_decay=0.1)),
    "Adamax": Recipe(optimizer=optim.Adamax, options=dict(lr=1e-2, eps=1e-4)),
    "NAdam": Recipe(optimizer=optim.NAdam, options=ADAM),
    "RAdam": Recipe(optimizer=optim.RAdam, options=dict(ADAM, lr=3e-2), steps=8),
    "Adadelta": Recipe(optimizer=optim.Adadelta, options=dict(lr=1.0, eps=1e-4)),
    "ASGD": Recipe(optimizer=optim.ASGD, options=dict(lr=0.3)),
    "SGD, nesterov": Recipe(optimizer=optim.SGD, options=dict(lr=0.3, momentum=0.9, nesterov=True)),
}


@functools.cache
def with_element_wise(world_size):
    return toys.run(train_all, world_size, ELEMENT_WISE, STAGES)


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_element_wise_optimizers(name):
    plain, exact = plainly(3)[name]
    rounding = toys.distance(plain.parameters, exact.parameters)  # the bound of the test above
    for results in with_element_wise(3):
        first, *others = results[name]
        assert toys.distance(first.parameters, plain.parameters) <= rounding
        for stage, other in enumerate(others, start=1):
            assert other.losses == first.losses and toys.identical(other.parameters, first.parameters), f"stage {stage}"


# --------------------------------------------------------------------------------------------------- memory, to the byte

# bytes a parameter (zero-facts: §3.1): parameters, gradients, optimizer; and the first stage that shards each
BYTES = {torch.float32: (4, 4, 8), BF16: (2, 2, 12)}
SHARDED_FROM = (3, 2, 1)


def formula(stage, elements, world_size, dtype):
    """Bytes of parameters, gradients and optimizer state on one rank."""
    return [
        size * elements / (world_size if stage >= sharded else 1)
        for size, sharded in zip(BYTES[dtype], SHARDED_FROM, strict=True)
    ]


def model_states():
    """{(stage, dtype): the ledger's states, elements, padding, buckets, bytes that a look at all objects finds}"""
    found, rank = {}, dist.get_rank()
    for dtype in BYTES:
        for stage, stage_class in enumerate(STAGES):
            ledger, before = Ledger(), checks.live_bytes()
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
@by_world
def test_model_states_equal_the_formula_to_the_byte(world_size, dtype, stage):
    for rank in states_on(world_size):
        states, elements, padding, buckets, seen = rank[stage, dtype]
        theory = formula(stage, elements, world_size, dtype)
        padded = [size + extra for size, extra in zip(theory, formula(stage, padding, world_size, dtype), strict=True)]
        assert [states[name] for name in ("parameters", "gradients", "optimizer")] == padded
        counters = 4 * buckets  # Adam's step counters, one a bucket
        placeholder = dtype.itemsize if stage == 3 else 0  # the one element that all released parameters show
        assert states["scalars"] == counters + placeholder
        assert states["activations"] == states["buffers"] == 0
        # and by another way: all storages that any Python object holds, whatever anybody believes about them
        assert seen - sum(padded) - counters in (0, placeholder)  # the placeholder lives on from the first model of its dtype
        assert padding <= checks.most_padding(toys.Transformer(), world_size)


# ----------------------------------------------------------------------------------------------- peak memory, in order


def wide_mlp():
    return toys.MLP(300, 1900, 1300, 1100, 900, 3)


SHAPES = {
    # name: how to build it, its batch
    "gpt": (lambda: GPT(GPTConfig(layers=7, hidden=256, heads=8, sequence=32)), "tokens"),
    "mlp": (wide_mlp, "numbers"),
    "deep and narrow": (lambda: toys.MLP(300, *[330] * 48, 3), "numbers"),
    "large vocabulary": (lambda: GPT(GPTConfig(layers=2, hidden=128, heads=4, sequence=32, vocabulary=40_000)), "tokens"),
    "one layer": (lambda: toys.MLP(300, 18_001, 3), "numbers"),
}


def peaks(shape, steps=2):
    """The highest moment of the second step at each stage, and the parameters."""
    make, kind = SHAPES[shape]
    rank, found = dist.get_rank(), []
    for stage_class in STAGES:
        ledger = Ledger()
        with ledger:
            model = toys.build(make, rank)
            zero = stage_class(model, optim.AdamW)  # buckets of the default size
            ledger.watch(model, zero)
            for step in range(steps):
                if step == steps - 1:
                    ledger.reset()
                batch = toys.tokens(rank, step, 2, 32) if kind == "tokens" else toys.numbers(rank, step, 300)
                model(*batch).backward()
                zero.step()
                zero.zero_grad()
        found.append(ledger.peak)
        elements = sum(param.numel() for param in model.parameters())
        del model, zero, ledger
        gc.collect()  # a stage and its model refer to each other
    return elements, found


@pytest.mark.parametrize("shape", SHAPES)
def test_peak_memory_falls_from_stage_to_stage(shape):
    for elements, moments in toys.run(peaks, 2, shape):
        assert elements > 5_000_000
        totals = [moment.total for moment in moments]
        shown = "\n".join(f"stage {stage}: {moment.total:,} {moment.what} {moment.bytes}" for stage, moment in enumerate(moments))
        assert all(moment.bytes["other"] == 0 for moment in moments), shown
        assert totals[1] > totals[2], shown
        if shape == "gpt":
            assert totals[0] > totals[1] > totals[2] > totals[3], shown


# ------------------------------------------------------------------------------------- what is whole, and for how long


def gradients_of_stage2():
    """Most bytes of gradients at any moment of the third step; those of the shards, the largest bucket, all of them."""
    rank, ledger = dist.get_rank(), Ledger()
    with ledger:
        model = toys.build(functools.partial(toys.Transformer, 5), rank)
        zero = STAGES[2](model, optim.AdamW, bucket_bytes=4096)
        ledger.watch(model, zero)
        for step in range(3):
            ledger.reset()
            model(*toys.tokens(rank, step)).backward()
            zero.step()
            zero.zero_grad()
    shards = sum(bucket.gradient_shard.nbytes for bucket in zero.buckets)
    return ledger.highest()["gradients"], shards, [bucket.padded * 4 for bucket in zero.buckets]


@pytest.mark.parametrize("world_size", (2, 4))
def test_stage_2_holds_whole_gradients_of_open_buckets_only(world_size):
    for highest, shards, buckets in toys.run(gradients_of_stage2, world_size):
        # One bucket is being reduced, one is filled, and one has begun with the gradient of a norm, which comes before its
        # neighbours'; and there is the gradient that autograd hands over, at most as large as a bucket.
        assert highest <= shards + 4 * max(buckets)
        assert 4 * max(buckets) < sum(buckets) / 3, "the model is too small for this to say anything"


def whole_units_of_stage3(make=functools.partial(toys.Transformer, 5)):
    """{(pass, unit at work): the units whose parameters lie whole in memory} as seen by storages, over three steps."""
    rank = dist.get_rank()
    model = toys.build(make, rank)
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
            own = [param for param in module.parameters(recurse=False) if any(param in bucket.index_of for bucket in unit.buckets)]
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
                assert following not in names or following in whole, f"in {kind}, {following} was not prefetched by {unit}"


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


@pytest.mark.parametrize("dtype, accumulate", [(torch.float32, 1), (BF16, 1), (torch.float32, 3)], ids=str)
@by_world
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
                root, first, last = units[""], units["blocks.0"], units["blocks.2"]
                stays = (2 * accumulate - 1) * root + accumulate * last + (accumulate - 1) * first
                assert sent == (3 * accumulate * psi - stays) * share


def on_the_wire():
    """For each stage: Psi in bytes; what this rank's sockets delivered in a step, what the loopback saw of it (the best
    of five steps: whoever else speaks on this machine can only add)."""
    rank, world_size, found = dist.get_rank(), dist.get_world_size(), []
    for stage_class in STAGES:
        model = toys.build(lambda: toys.MLP(7, 500, 1300, 900, 3), rank)
        zero = stage_class(model, optim.SGD, lr=0.01)
        sockets, loopback = [], []
        for step in range(5):
            before, lo = checks.wire_bytes(), loopback_bytes(quiet=True)
            model(*toys.numbers(rank, step)).backward()
            zero.step()
            zero.zero_grad()
            lo_after, after = loopback_bytes(quiet=True), checks.wire_bytes()
            if after is not None:
                sockets.append(after - before)
            if lo is not None:
                loopback.append((lo_after - lo) / world_size)
        found.append((sum(bucket.padded for bucket in zero.buckets) * 4, min(sockets, default=None), min(loopback, default=None)))
    return found


@pytest.mark.parametrize("world_size", (2, 3))
def test_the_wire_carries_what_the_formula_says(world_size):
    for rank in toys.run(on_the_wire, world_size):
        for stage, (psi, sockets, loopback) in enumerate(rank):
            assert psi > 7_000_000
            # without module list, stage 3 has a root unit alone, gathered once: 2 Psi here
            theory = 2 * psi * (world_size - 1) / world_size
            if sockets is not None:
                assert sockets == pytest.approx(theory, rel=0.02), f"stage {stage}"
            if loopback is not None:
                assert loopback == pytest.approx(theory, rel=0.02), f"stage {stage}"


# ------------------------------------------------------------------------------------------------------ other promises


def resumed(dtype):
    """For each stage: losses and parameters of steps 3 to 5 in one go, and after a restart from the state of step 3."""
    rank, found = dist.get_rank(), []
    for stage_class in STAGES:

        def start(seed):
            model = toys.build(toys.Transformer, rank + seed, dtype)
            zero = stage_class(model, optim.AdamW, bucket_bytes=4096, param_groups=decayed_and_not(model), **ADAM)
            return zero, warm_up(zero.optimizer)

        def go_on(zero, scheduler, steps):
            losses = []
            for step in steps:
                loss = zero.model(*toys.tokens(rank, step))
                loss.backward()
                zero.step()
                scheduler.step()
                zero.zero_grad()
                losses.append(loss.item())
            return losses

        zero, scheduler = start(0)
        go_on(zero, scheduler, range(3))
        state = copy.deepcopy((zero.state_dict(), scheduler.state_dict()))
        whole = go_on(zero, scheduler, range(3, 6)), toys.whole_parameters(zero)
        again, scheduler = start(1000)
        again.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        found.append((whole, (go_on(again, scheduler, range(3, 6)), toys.whole_parameters(again))))
    return found


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_a_restart_goes_on_bit_for_bit(dtype):
    for rank in toys.run(resumed, 3, dtype):
        for stage, (whole, restarted) in enumerate(rank):
            assert restarted[0] == whole[0], f"stage {stage}"
            assert toys.identical(restarted[1], whole[1]), f"stage {stage}"


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


@pytest.mark.parametrize("dtype", (torch.float32, BF16), ids=str)
def test_gather_parameters_shows_rank_0s_values_and_keeps_edits(dtype):
    initial = [param.detach() for param in toys.build(toys.Transformer, 0, dtype).parameters()]
    after = [*initial[:-1], torch.full_like(initial[-1], 0.125)]  # the head comes last
    for rank in toys.run(edited, 3, dtype):
        for stage, (shown, kept, loaded) in enumerate(rank):
            assert toys.identical(shown, initial), f"stage {stage} shows other values than rank 0 began with"
            assert toys.identical(kept, after), f"stage {stage} lost an edit"
            assert toys.identical(loaded, initial), f"stage {stage} lost a loaded state dict"


def test_order_of_the_norm_is_no_excuse():
    """The norm that clip_grad_norm_ returns is the root of the sum of all squares, whoever holds the elements."""
    recipe = RECIPES["clipping"]
    plain, exact = plainly(3)["clipping"]
    for results in with_recipes(3):
        for stage, run in enumerate(results["clipping"]):
            # Sum of n squares in fp32: relative error below n/2 * 2^-24 in the worst order, and of the root half of that;
            # kernels add in blocks of at least 16 lanes, so n/16 stands for n. The rest are errors of the gradients.
            bound = sum(param.numel() for param in recipe.make().parameters()) / 64 * 2**-24 + 2**-20
            assert run.norms[0] == pytest.approx(exact.norms[0], rel=bound), f"stage {stage}"
            assert math.isfinite(run.norms[-1]) and run.norms[0] > recipe.clip, "nothing was clipped"
