"""Odd models train right: at every stage and world as one process would train them on the batches of all ranks."""

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys

sys.path.insert(0, str(Path(__file__).parent))  # ranks import it too

import odd_models
from odd_models import CASES

from zero_minimal.foundations.ranks import RankError

# One step sums some hundred products of numbers of size 1; fp64 rounds each by 1e-16, and the weights of four steps stay of size 1.
ROUNDING = 1e-12


def build(case, seed):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    return case.make()


def on_a_rank(name, stages=toys.STAGES):
    """Train a case at each stage. Returns {stage: (losses, parameters, buffers)}."""
    case, rank, outcome = CASES[name], dist.get_rank(), {}
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
    case = CASES[name]
    try:
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
        return toys.run(all_of, world_size, names, timeout=120)
    except (RankError, TimeoutError):
        return []


def outcomes(name, world_size):
    place = list(CASES).index(name) // 8 * 8
    return together(tuple(CASES)[place : place + 8], world_size) or toys.run(all_of, world_size, [name])


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("name", CASES)
def test_trains_as_one_process_would(name, world_size):
    compare(name, outcomes(name, world_size))


@pytest.mark.parametrize("world_size", (1, 4))
@pytest.mark.parametrize("name", ("no world divides it", "world larger than a bucket", "tied across units"))
def test_other_worlds(name, world_size):
    compare(name, toys.run(all_of, world_size, [name]))


def compare(name, outcomes):
    case, (losses, parameters, buffers) = CASES[name], plainly(name, len(outcomes))
    assert far(parameters, [param.detach() for param in build_in_fp64(case)]) > 1e-3  # it learned something
    for rank, outcome in enumerate(outcomes):
        for stage, (its_losses, its_parameters, its_buffers) in outcome[name].items():
            where = f"{stage}, rank {rank}"
            assert its_losses == pytest.approx(losses[rank], abs=ROUNDING, rel=ROUNDING), where
            assert far(its_parameters, parameters) < ROUNDING, where
            assert far(its_buffers, buffers[rank]) < ROUNDING, where
            if case.passes == 1:
                assert toys.identical(its_parameters, outcome[name]["Stage0"][1]), f"{where}: not bit for bit as stage 0"


def build_in_fp64(case):
    try:
        return list(build(case, seed=0).parameters())
    finally:
        torch.set_default_dtype(torch.float32)
