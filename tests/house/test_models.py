"""Odd models train right: at every stage and world as one process would train them on the batches of all ranks."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import toys
from house import odd_models
from house.odd_models import ALL, CASES, HUGGING_FACE, WIDTH, Case, Chain, Layer, vectors
from misuse import on_two_ranks
from thorough import companions, sample
from torch import nn

from zero_minimal.core import collectives
from zero_minimal.guards.grad_placeholder import has_gradient
from zero_minimal.processes.ranks import RankError

# One step sums some hundred products of numbers of size 1; fp64 rounds each by 1e-16, and the weights of four steps
# stay of size 1.
ROUNDING = 1e-12


def build(case, seed):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    return case.make()


def on_a_rank(name, stages=toys.STAGES):
    """Train a case at each stage. Returns {stage: (losses, parameters, buffers)}."""
    case, rank, outcome = ALL[name], dist.get_rank(), {}
    for stage in stages:
        model = build(case, seed=rank)  # rank 0's values count
        torch.manual_seed(100 + rank)
        zero = stage(model, torch.optim.SGD, bucket_bytes=case.bucket_bytes, **case.options)
        losses = []
        for step in range(case.steps):
            losses.append(case.backward(model, rank, step))
            zero.step()
            zero.zero_grad()
        outcome[stage.__name__] = losses, toys.whole_parameters(zero), [b.clone() for b in model.buffers()]
    return outcome


def plainly(name, world_size):
    """The same in one process: a replica of the model a rank, gradients averaged; a missing one counts as zero."""
    case, threads = ALL[name], torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # as the ranks: sums in the same order
        model = build(case, seed=0)
        replicas = [model, *(copy.deepcopy(model) for _ in range(world_size - 1))]
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(trained, **case.options)
        losses = [[] for _ in replicas]
        for step in range(case.steps):
            for rank, replica in enumerate(replicas):
                odd_models.PLAYED[:] = [rank]
                replica.zero_grad()
                losses[rank].append(case.backward(replica, rank, step))
            average(replicas)
            optimizer.step()
            follow(replicas)
        return losses, [p.detach() for p in model.parameters()], [list(replica.buffers()) for replica in replicas]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
        odd_models.PLAYED.clear()


@torch.no_grad()
def average(replicas):
    for params in zip(*(replica.parameters() for replica in replicas), strict=True):
        if params[0].requires_grad:
            given = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in params]
            params[0].grad = sum(given) / len(given)


@torch.no_grad()
def follow(replicas):
    """Rank 0's parameters and running statistics for all."""
    for replica in replicas[1:]:
        for ours, first in zip(replica.parameters(), replicas[0].parameters(), strict=True):
            ours.copy_(first)
        kept = replica.state_dict()
        for (name, ours), first in zip(replica.named_buffers(), replicas[0].buffers(), strict=True):
            if name in kept and ours.is_floating_point():
                ours.copy_(first)


def far(ours, theirs):
    """The largest difference, in fp64; NaN counts as infinite."""
    pairs = zip(ours, theirs, strict=True)
    return max((float((a.to(torch.cdouble) - b.to(torch.cdouble)).abs().nan_to_num(torch.inf).max())
                for a, b in pairs if a.numel()), default=0.0)


def all_of(names):
    return {name: on_a_rank(name) for name in names}


@functools.cache
def together(names, world_size):
    """Several cases in one run, as ranks take their time to start. Empty if one fails: then each is run by itself."""
    try:
        return toys.run(all_of, world_size, names, timeout=50)
    except (RankError, TimeoutError):
        return []


# one case with three ranks, the next with two, and so on: the fuzzer mixes kinds and worlds
CASES_AND_WORLDS = [(name, 3 - place % 2) for place, name in enumerate(CASES)]
IN_TURN = CASES_AND_WORLDS[::8]


def outcomes(name, world_size):
    names = [case for case, size in companions((name, world_size), CASES_AND_WORLDS, IN_TURN) if size == world_size]
    place = names.index(name) // 8 * 8
    return together(tuple(names[place : place + 8]), world_size) or toys.run(all_of, world_size, [name], timeout=50)


@pytest.mark.parametrize("name, world_size", sample(CASES_AND_WORLDS, IN_TURN))
def test_trains_as_one_process_would(name, world_size):
    compare(name, outcomes(name, world_size))


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", sample((1, 4), [4]))
@pytest.mark.parametrize("name", ("no world divides it", "world larger than a bucket", "tied across units"))
def test_other_worlds(name, world_size):
    compare(name, toys.run(all_of, world_size, [name]))


@pytest.mark.thorough
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name):
    """Models of a library that knows nothing of ours, unchanged."""
    pytest.importorskip("transformers")
    compare(name, toys.run(all_of, 2, [name]))


def compare(name, outcomes):
    case, (losses, parameters, buffers) = ALL[name], plainly(name, len(outcomes))
    assert far(parameters, [param.detach() for param in build_on_two_ranks(case)]) > 1e-3  # it learned something
    for rank, outcome in enumerate(outcomes):
        for stage, (its_losses, its_parameters, its_buffers) in outcome[name].items():
            where = f"{stage}, rank {rank}"
            assert its_losses == pytest.approx(losses[rank], abs=ROUNDING, rel=ROUNDING), where
            assert far(its_parameters, parameters) < ROUNDING, where
            assert far(its_buffers, buffers[rank]) < ROUNDING, where
            if case.passes == 1:
                first = outcome[name]["Stage0"][1]
                assert toys.identical(its_parameters, first), f"{where}: not bit for bit as stage 0"


def build_on_two_ranks(case):
    try:
        return list(build(case, seed=0).parameters())
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------------------------------------- what users do around it


def wrap(stage, make=Chain, **options):
    torch.manual_seed(dist.get_rank())
    model = make()
    return model, stage(model, torch.optim.SGD, **{"lr": 0.1, "momentum": 0.9, "bucket_bytes": 600, **options})


@on_two_ranks
def test_no_random_numbers(stage):
    """Dropout must be the same at every stage, so no stage consumes random numbers."""
    torch.manual_seed(5)
    model = Chain()
    before = torch.get_rng_state()
    zero = stage(model, torch.optim.AdamW, lr=0.1)
    for step in range(2):
        odd_models.fit(model, dist.get_rank(), step)
        zero.clip_grad_norm_(1.0)
        zero.step()
        zero.zero_grad()
        toys.whole_parameters(zero)
        zero.load_state_dict(zero.state_dict())
    assert torch.equal(torch.get_rng_state(), before)


@on_two_ranks
def test_copies_and_hooks(stage):
    """A copy of the model made before is independent; hooks of the user's own see whole parameters."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Chain()
    teacher, start = copy.deepcopy(model), [param.detach().clone() for param in model.parameters()]
    seen = []

    def look(layer, *_):
        seen.append(not layer.linear.weight.isnan().any())

    zero = stage(model, torch.optim.SGD, lr=0.1)
    for layer in model.layers:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    for step in range(2):
        x = vectors(rank, step)
        with torch.no_grad():
            target = teacher(x)
        toys.learn(zero, (model(x) - target + 1).square().mean())
    assert toys.identical(teacher.parameters(), start) and len(seen) == 2 * 3 * 3 and all(seen)
    assert far(toys.whole_parameters(zero), start) > 1e-3


@on_two_ranks
def test_gradients_can_be_read(stage):
    """After backward p.grad is the average (stage 0), or nothing that could be taken for it."""
    rank = dist.get_rank()
    model, zero = wrap(stage)
    odd_models.fit(model, rank, 0)
    if stage is toys.STAGES[0]:
        plain = build(Case(Chain), seed=0)
        for other in range(2):
            odd_models.fit(plain, other, 0)
        ours = [param.grad for param in model.parameters()]
        assert far(ours, [param.grad / 2 for param in plain.parameters()]) < ROUNDING
    else:
        assert not any(map(has_gradient, model.parameters()))


@on_two_ranks
def test_zero_grad_where_users_call_it(stage):
    """After step, before forward, or between forward and backward: the same, and no more whole gradients at once."""
    outcomes, most = [], []
    for place in ("after", "before", "between"):
        model, zero = wrap(stage, lambda: Chain(count=6))
        open_at_once, reduce_scatter = [], collectives.reduce_scatter

        def watch(*tensors, **options):
            open_at_once.append(sum(bucket.gradients is not None for bucket in zero.buckets))  # noqa: B023
            return reduce_scatter(*tensors, **options)  # noqa: B023

        collectives.reduce_scatter = watch
        for step in range(3):
            if place == "before":
                zero.zero_grad()
            loss = model(vectors(dist.get_rank(), step)).square().mean()
            if place == "between":
                zero.zero_grad()
            loss.backward()
            zero.step()
            if place == "after":
                zero.zero_grad()
        collectives.reduce_scatter = reduce_scatter
        most.append(max(open_at_once, default=0))
        outcomes.append(toys.whole_parameters(zero))
    assert toys.identical(outcomes[0], outcomes[1]) and toys.identical(outcomes[0], outcomes[2])
    assert most[0] == most[1] == most[2]


@on_two_ranks
def test_two_models(stage):
    """A generator against a discriminator that is frozen in turn: two stages whose backward passes meet."""
    rank, results = dist.get_rank(), []
    for kind in (stage, toys.STAGES[0]):
        maker, zero_maker = wrap(kind)
        judge, zero_judge = wrap(kind, lambda: nn.Sequential(nn.Linear(3, WIDTH), Chain(count=2)))
        for step in range(3):
            judge.requires_grad_(True)
            made, real = judge(maker(vectors(rank, step)).detach()), judge(vectors(rank, step, 5, 3))
            toys.learn(zero_judge, made.square().mean() - real.mean())
            judge.requires_grad_(False)
            toys.learn(zero_maker, judge(maker(vectors(rank, 100 + step))).square().mean())
            zero_judge.zero_grad()
        judge.requires_grad_(True)
        results.append(toys.whole_parameters(zero_maker) + toys.whole_parameters(zero_judge))
    assert toys.identical(*results)


class Mixed(Layer):
    """Parameters of three dtypes in one unit."""

    def __init__(self):
        super().__init__()
        self.linear.float()
        self.gain = nn.Parameter(self.gain.detach().bfloat16())

    def forward(self, x):
        return self.norm((torch.tanh(self.linear(x.float())) * self.gain).double())


@on_two_ranks
def test_mixed_dtypes(stage):
    results = []
    for kind in (stage, toys.STAGES[0]):
        model, zero = wrap(kind, lambda: Chain(Mixed))
        start = toys.whole_parameters(zero)
        for step in range(3):
            odd_models.fit(model, dist.get_rank(), step)
            zero.clip_grad_norm_(100.0)  # of bf16, fp32 and fp64 together; too large to change anything
            zero.step()
            zero.zero_grad()
        results.append(toys.whole_parameters(zero))
    assert toys.identical(*results) and far(start, results[0]) > 1e-3
    assert {param.dtype for param in model.parameters()} == {torch.float64, torch.float32, torch.bfloat16}


@on_two_ranks
def test_restart_with_frozen_parameters(stage):
    """What is not trained is state too: the next program may start from other values."""
    rank, results = dist.get_rank(), []

    def start(seed):
        torch.manual_seed(seed + rank)
        model = odd_models.Frozen()
        return model, stage(model, torch.optim.SGD, lr=0.1, momentum=0.9)

    model, zero = start(0)
    odd_models.fit(model, rank, 0)
    zero.step()
    zero.zero_grad()
    other, restarted = start(50)
    restarted.load_state_dict(copy.deepcopy(zero.state_dict()))
    for model, zero in ((model, zero), (other, restarted)):  # noqa: B020
        odd_models.fit(model, rank, 1)
        zero.step()
        results.append(toys.whole_parameters(zero))
    assert toys.identical(*results)
