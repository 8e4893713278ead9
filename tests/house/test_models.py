"""Odd models train right: at every stage, and with late gathering, as one process would on the batches of all ranks."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import toys
from house import odd_models
from house.odd_models import CASES, Chain, vectors
from house.scenarios import stand
from misuse import on_two_ranks
from thorough import companions, sample, sharing

from zero_minimal.core import collectives


def played(case):
    """As a scenario."""

    def play(me):
        model = case.make()
        if me.stage == "plain":  # it copies into each buffer, and into an expanded one nobody can
            model._buffers.update({name: buffer.contiguous() for name, buffer in model._buffers.items()})
        zero = me.wrap(model, torch.optim.SGD, bucket_bytes=case.bucket_bytes, **case.options)
        for step in range(4):
            odd_models.PLAYED[:] = [me.rank]
            me.note(case.backward(model, me.rank, step))
            zero.step()
            zero.zero_grad()

    return play


NOT_NAIVE = ("sparse", "frozen")  # naive.py has dense gradients alone, and parameters of 32 bits and more
SCENARIOS = {name: stand.Scenario(name, played(case), naive=name not in NOT_NAIVE) for name, case in CASES.items()}
# one case with three ranks, the next with two, and so on: the fuzzer mixes kinds and worlds
CASES_AND_WORLDS = [(name, 3 - place % 2) for place, name in enumerate(CASES)]
CASES_AND_WORLDS += [("world larger than a bucket", 1), ("tied across units", 4)]
IN_TURN = CASES_AND_WORLDS[:1]


@functools.cache
def outcomes(names, world_size):
    """What the ranks of each stage saw, and what plain PyTorch did; of several cases, as ranks take time to start."""
    scenarios = [SCENARIOS[name] for name in names]
    staged = toys.run(stand.play_staged, world_size, scenarios, timeout=90)
    return staged, toys.run(stand.play_plainly, 1, scenarios, world_size, timeout=60)[0]


@pytest.mark.parametrize("name, world_size", sample(CASES_AND_WORLDS, IN_TURN))
def test_trains_as_one_process_would(name, world_size):
    names = [case for case, size in companions((name, world_size), CASES_AND_WORLDS, IN_TURN) if size == world_size]
    staged, plain = outcomes(sharing(name, names, 8), world_size)
    stand.check(SCENARIOS[name], staged, plain[name])


# ------------------------------------------------------------------------------------------- what users do around it


def wrap(stage, make=Chain, **options):
    torch.manual_seed(dist.get_rank())
    model = make()
    return model, stage(model, torch.optim.SGD, **{"lr": 0.1, "momentum": 0.9, "bucket_bytes": 600, **options})


@pytest.mark.thorough
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


@pytest.mark.thorough
@on_two_ranks
def test_zero_grad_where_users_call_it(stage):
    """After step, before forward, or between forward and backward: the same, and no more whole gradients at once."""
    outcomes, most = [], []
    for place in ("after", "before", "between"):
        model, zero = wrap(stage, lambda: Chain(count=6))
        open_at_once, reduce_scatter = [], collectives.reduce_scatter

        @functools.wraps(reduce_scatter)
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


@pytest.mark.thorough
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
