"""Late gathering: the bits of stages 1 and 2; whoever looks at a parameter before it is here finds the new one, whole.

Rank 1 takes its time for each update: so what is to come from it has not arrived when rank 0 looks.
"""

import contextlib
import copy
import io
import pickle
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn, optim

sys.path.insert(0, str(Path(__file__).parent))  # ranks import them too

import odd_models
from odd_models import Chain

from zero_minimal.checkpoint import saved_state
from zero_minimal.core import optimizers, seams
from zero_minimal.extensions import lazy_all_gather
from zero_minimal.extensions.averages import Average
from zero_minimal.extensions.lazy_all_gather import Awaited
from zero_minimal.late_gather import Late1, Late2
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2

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


def trained(stages):
    return {name: [toys.train(stage, toys.Recipe(steps=3, **recipe)) for stage in stages]
            for name, recipe in RECIPES.items()}


@pytest.mark.parametrize("number, world_size", [(0, 2), (0, 3), (1, 2), (1, 3)])
def test_losses_and_parameters_are_the_same_bits(number, world_size):
    for outcome in toys.run(trained, world_size, PAIRS[number]):
        for name, (one, other) in outcome.items():
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


def saved(model, save=torch.save):
    file = io.BytesIO()
    save(model, file)
    file.seek(0)
    return [*torch.load(file, weights_only=False).parameters()]


def on_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def compiled(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.compile(model, backend="eager")(torch.ones(2, odd_models.WIDTH))]


def averaged(zero):
    with (average := Average(zero)).in_place():
        pass
    return [*zero.model.parameters(), *average.shards]


def gathered(zero):
    with zero.gather_parameters():
        return [param.detach().clone() for param in zero.model.parameters()]


def state(zero):
    return [*zero.state_dict()["shards"], *zero.model.parameters()]


@torch.no_grad()
def edited(zero):
    for number, param in enumerate(zero.model.parameters()):
        param.mul_(2.0) if number % 2 else param.data.add_(1.0)
    return zero.model.parameters()


@torch.no_grad()
def replaced(zero):
    zero.model.load_state_dict({name: torch.full_like(param, 0.5) for name, param in zero.model.named_parameters()})
    return zero.model.parameters()


LOOKS = {  # of a stage; what a rank sees of its model, as tensors
    "forward": lambda zero: [zero.model(torch.ones(2, odd_models.WIDTH))],
    "evaluation": lambda zero: [torch.no_grad()(zero.model.eval())(torch.ones(2, odd_models.WIDTH))],
    "inference": lambda zero: [torch.inference_mode()(zero.model)(torch.ones(2, odd_models.WIDTH)).clone()],
    "a part": lambda zero: [list(zero.model.modules())[-1](torch.ones(2, odd_models.WIDTH))],
    "functional": lambda zero: [nn.functional.linear(torch.ones(2, param.shape[1]), param)
                                for param in zero.model.parameters() if param.ndim == 2],
    "data": lambda zero: [param.data for param in zero.model.parameters()],
    "detach": lambda zero: [param.detach() for param in zero.model.parameters()],
    "numpy": lambda zero: [torch.from_numpy(param.detach().numpy()) for param in zero.model.parameters()],
    "printed": lambda zero: [torch.tensor([ord(letter) for letter in repr(list(zero.model.parameters()))])],
    "one number": lambda zero: [torch.tensor(param.sum().item()) for param in zero.model.parameters()],
    "a vector of all": lambda zero: [nn.utils.parameters_to_vector(zero.model.parameters())],
    "foreach": lambda zero: torch._foreach_norm(list(zero.model.parameters())),
    "a list in a dict": lambda zero: [torch.stack([param.view(-1)[0] for param in zero.model.parameters()])],
    "where it lies": lambda zero: [param for param in zero.model.parameters() if param.data_ptr()],
    "deepcopy": lambda zero: copy.deepcopy(zero.model).parameters(),
    "a copied parameter": lambda zero: [copy.deepcopy(param) for param in zero.model.parameters()],
    "pickle": lambda zero: pickle.loads(pickle.dumps(zero.model)).parameters(),
    "torch.save": lambda zero: saved(zero.model),
    "model.state_dict": lambda zero: zero.model.state_dict().values(),
    "zero.state_dict": state,
    "gather_parameters": gathered,
    "an average": averaged,
    "edited in place": edited,
    "load_state_dict": replaced,
    "another thread": lambda zero: on_a_thread(lambda: [param.detach().clone() for param in zero.model.parameters()]),
    "functional_call": lambda zero: [torch.func.functional_call(
        zero.model, {name: param * 2 for name, param in zero.model.named_parameters()},
        torch.ones(2, odd_models.WIDTH))],
    "torch.compile": lambda zero: compiled(zero.model),
    "no stage any more": lambda zero: [param.detach().clone() for param in left_behind(zero)],
}


def left_behind(zero):
    model = zero.model
    del zero
    return model.parameters()


def looked_at(stage, names):
    """What each look sees right after step(), and the loss of the next two steps."""
    seen = {}
    for name in names:
        torch.manual_seed(0)
        zero = stage(Chain(), optim.AdamW, lr=0.1, bucket_bytes=256)
        for step in range(3):
            loss = zero.model(batch(step)).square().mean()
            loss.backward()
            with slow() if step == 1 else contextlib.nullcontext():
                zero.step()
            if isinstance(zero, (Late1, Late2)):
                assert any(isinstance(param, Awaited) for param in zero.model.parameters()), "nothing is late"
            if step == 1:
                seen[name] = [part.detach().clone() for part in LOOKS[name](zero)]
            zero.zero_grad()
        seen[name].append(loss.detach())
        seen[name] += [param.detach().clone() for param in zero.model.parameters()]
        del zero
    return seen


@pytest.mark.parametrize("number, part", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_who_looks_finds_the_new_values_whole(number, part):
    (plain, late), names = PAIRS[number], list(LOOKS)[part::2]
    for one, other in zip(toys.run(looked_at, 2, plain, names), toys.run(looked_at, 2, late, names), strict=True):
        for name in names:
            assert toys.identical(one[name], other[name]), name


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
