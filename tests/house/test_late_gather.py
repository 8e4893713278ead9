"""Late gathering: the bits of stages 1 and 2. (Whoever looks at a parameter before it is here finds the new one, whole:
test_lazy_all_gather.py.)

Rank 1 takes its time for each update: so what is to come from it has not arrived when rank 0 looks.
"""

import contextlib
import functools
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from torch import optim

sys.path.insert(0, str(Path(__file__).parent))  # ranks import them too

import odd_models
from odd_models import Chain

from zero_minimal.checkpoint import saved_state
from zero_minimal.core import optimizers, seams
from zero_minimal.extensions import lazy_all_gather
from zero_minimal.extensions.lazy_all_gather import Awaited
from zero_minimal.kept_units import Kept3
from zero_minimal.late_gather import Late1, Late2
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

pytestmark = pytest.mark.thorough

PAIRS = ((Stage1, Late1), (Stage2, Late2))


# ------------------------------------------------------------------------------------------------------- the same bits

RECIPES = {
    "plain": {},
    "accumulated and clipped": dict(accumulate=3, clip=0.5),
    "without no_sync": dict(accumulate=2, no_sync=False),
    "bf16": dict(dtype=torch.bfloat16),
    "fp16": dict(dtype=torch.float16, scale=64.0, clip=0.5),
    "one bucket": dict(bucket_bytes=None),
}


KEPT = [functools.partial(Kept3, keep_units=count) for count in (0, 2, 99)]


def trained(stages):
    make = functools.partial(toys.Transformer, 5)
    return {name: [toys.train(stage, toys.Recipe(make=make, steps=3, **recipe)) for stage in stages]
            for name, recipe in RECIPES.items()}


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stages", (*PAIRS, (Stage3, Kept3, *KEPT)), ids=("late 1", "late 2", "kept units"))
def test_losses_and_parameters_are_the_same_bits(stages, world_size):
    for outcome in toys.run(trained, world_size, stages):
        for name, (one, *others) in outcome.items():
            for other in others:
                assert one.losses == other.losses and one.norms == other.norms, name
                assert toys.identical(one.parameters, other.parameters), name


# ------------------------------------------------------------------------------------------ who looks before it is here


@contextlib.contextmanager
def slow():
    """Rank 1 takes its time before its first update."""
    update, waits = optimizers.update_shard, [0.1]

    def late(*args):
        if dist.get_rank() == 1 and waits:
            time.sleep(waits.pop())
        return update(*args)

    optimizers.update_shard = late
    try:
        yield
    finally:
        optimizers.update_shard = update


def small(stage, seed=0):
    torch.manual_seed(seed)
    return stage(Chain(), optim.AdamW, lr=0.1, bucket_bytes=256)


def batch(step):
    return odd_models.vectors(dist.get_rank(), step, 5, odd_models.WIDTH).float()


def care(folder):
    """All else, on one start of ranks."""
    zero, told = small(Late1), {}

    def train(step):
        zero.model(batch(step)).square().mean().backward()
        zero.step()
        zero.zero_grad()
        return sum(isinstance(param, Awaited) for param in zero.model.parameters())

    with slow():
        told["late"] = train(0)
    with slow():
        kept = next(zero.model.parameters()).data
        told["with a view"] = train(1), kept.isfinite().all().item()
        whole = kept.clone()
        del kept
        told["view was new"] = torch.equal(whole, next(zero.model.parameters()).detach())
    with slow():
        train(2)
        first = next(zero.model.parameters())
        told["asked"] = first.shape, first.dtype, first.grad, first.requires_grad, isinstance(first, Awaited)
        told["a number"] = torch.Tensor(first).isnan().all().item()  # C++ looks past the class: never an old value
        try:  # an error between step and forward
            raise ValueError
        except ValueError:
            train(3)
        train(4)
        if zero.rank == 0:  # one rank alone goes on
            told["alone"] = zero.model(batch(9)).isfinite().all().item()
        saved_state.save(zero, folder, step=5)
        train(5)
        saved_state.load(zero, folder)  # while parameters are on their way
        now = [param.detach().clone() for param in zero.model.parameters()]
    other = small(Stage2, seed=7)
    saved_state.load(other, folder)
    told["loaded"] = toys.identical(now, [param.detach() for param in other.model.parameters()])
    train(6)
    return told  # with parameters on their way: the end waits for them


def test_views_errors_one_rank_alone_and_checkpoints(tmp_path):
    for told in toys.run(care, 2, tmp_path):
        assert told["late"] == len(list(Chain().parameters())) and told["with a view"] == (0, True)
        assert told["view was new"] and told["a number"] and told["loaded"] and told.get("alone", True)
        assert told["asked"][1:] == (torch.float32, None, True, True)


def order(stage):
    """Which buckets leave, and which modules wait for what."""
    zero, heard = small(stage), []
    zero.model(batch(0)).sum().backward()
    with seams.heard_by("collective", lambda moment, call: heard.append((moment, call.tensors[0].data_ptr()))):
        zero.step()
        heard.append("step has returned")
        zero.zero_grad()
        zero.model(batch(1))
    places = {bucket.parameters.data_ptr(): number for number, bucket in enumerate(zero.buckets)}
    return [each if isinstance(each, str) else (each[0], places[each[1]]) for each in heard], len(zero.buckets)


def test_what_forward_needs_first_leaves_first_and_is_waited_for_alone():
    (heard, count), _ = toys.run(order, 2, Late2)
    cut = heard.index("step has returned")
    assert count > 2 and heard[:cut] == [("start", number) for number in reversed(range(count))]
    assert [each for each in heard[cut:] if each[0] == "end"] == [("end", number) for number in reversed(range(count))]


def test_a_parameter_that_nobody_can_find_is_waited_for():
    class Hidden:
        pass

    waited = []
    lazy_all_gather._under_way.add(fake := type("Fake", (), {"wait": lambda self: waited.append(1)})())
    try:
        Awaited.__torch_function__(lambda hidden: None, (), (Hidden(),))
    finally:
        lazy_all_gather._under_way.discard(fake)
    assert waited == [1]
