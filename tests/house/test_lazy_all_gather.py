"""What users do between step() and the first use of a parameter: the bits of stages 1 and 2, or refused with the line
to write. Rank 1 takes its time for its update, so what it sends has not arrived when the others look."""

import contextlib
import copy
import io
import os
import pickle
import re
import select
import sys
import threading
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn, optim
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))  # ranks import them too

import odd_models
from test_late_gather import PAIRS, batch, slow, small

from zero_minimal.core import collectives
from zero_minimal.extensions import lazy_all_gather
from zero_minimal.extensions.averages import Average
from zero_minimal.extensions.lazy_all_gather import Awaited
from zero_minimal.late_gather import Late1, Late2
from zero_minimal.processes import ranks

pytestmark = pytest.mark.thorough

X = torch.ones(2, odd_models.WIDTH)


def params(zero):
    return list(zero.model.parameters())


def first_linear(zero):
    return next(module for module in zero.model.modules() if isinstance(module, nn.Linear))


def changed(change):
    """change(a list of the parameters), and then what is there."""

    def look(zero, kept):
        with torch.no_grad():
            change(params(zero))
        return params(zero)

    return look


def averaged(average):
    """average(tensors of zeros, the parameters)."""

    def look(zero, kept):
        means = [torch.zeros(param.shape) for param in params(zero)]
        with torch.no_grad():
            average(means, params(zero))
        return means

    return look


def each(function):
    return lambda zero, kept: [function(param) for param in params(zero)]


def follows(zero, kept):
    average = AveragedModel(zero.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(zero.model)
    return average.parameters()


def stepped(optimizer, **options):
    """A second optimizer, over the parameters themselves."""

    def look(zero, kept):
        other = optimizer(params(zero), **options)
        for param in params(zero):
            param.grad = torch.ones(param.shape)
        other.step()
        other.zero_grad()
        return params(zero)

    return look


def one_rank_alone(zero, kept):
    seen = [param.norm() for param in params(zero)] if dist.get_rank() == 0 else []
    dist.barrier()
    return seen


def another_order(zero, kept):
    order = params(zero)[:: 1 if dist.get_rank() else -1]
    seen = [param.norm() for param in order]
    collectives.all_reduce(total := torch.ones(3), op="sum")
    return [*seen, total]


def a_message_first(zero, kept):
    dist.all_reduce(total := torch.ones(3))
    return [total, *params(zero)]


def used_then_moved(zero, kept):
    """The first one is here, its neighbours are not."""
    seen = params(zero)[0].norm()
    params(zero)[0].share_memory_()
    return [seen, *params(zero)]


def sent_to_a_process(zero, kept):
    seen = params(zero)[0].norm()
    return [seen, *pickle.loads(bytes(ForkingPickler.dumps(zero.model))).parameters()]


def all_that_lies_there(zero, kept):
    return [torch.tensor([]).set_(params(zero)[0].untyped_storage())]


class Quiet(torch.Tensor):
    """Answers for all that it meets, and asks nobody else."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def in_a_mode(zero, kept):
    with Mode():
        return [zero.model(X), *(param.detach().clone() for param in params(zero))]


def pruned(zero, kept):
    prune.l1_unstructured(first_linear(zero), "weight", 0.5)
    return [first_linear(zero).weight, *params(zero)]


def initialised(zero, kept):
    torch.manual_seed(3)
    nn.init.xavier_uniform_(first_linear(zero).weight)
    return params(zero)


def loaded_elsewhere(zero, kept):
    other = odd_models.Chain()
    other.load_state_dict(zero.model.state_dict())
    return other.parameters()


def hooked(zero, kept):
    handle = first_linear(zero).register_forward_pre_hook(lambda module, x: (x[0] * module.weight.sum(),))
    seen = zero.model(X)
    handle.remove()
    return [seen]


def saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False).parameters()


def on_a_thread(zero, kept):
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(param.detach().clone() for param in params(zero)))
    thread.start()
    thread.join()
    return seen


def an_average(zero, kept):
    with (average := Average(zero)).in_place():
        pass
    return [*params(zero), *average.shards]


def gathered(zero, kept):
    with zero.gather_parameters():
        return [param.detach().clone() for param in params(zero)]


def replaced(zero, kept):
    zero.model.load_state_dict({name: torch.full_like(param, 0.5) for name, param in zero.model.named_parameters()})
    return params(zero)


def with_doubled_weights(zero, kept):
    doubled = {name: param * 2 for name, param in zero.model.named_parameters()}
    return [torch.func.functional_call(zero.model, doubled, X)]


def compiled_part(zero):
    layer = first_linear(zero)
    return torch.compile(lambda x: layer(x).sin(), backend="aot_eager")


def scripted_inside(zero):
    zero.model.extra = torch.jit.script(nn.Linear(3, 3))


def traced(zero):
    return torch.jit.trace(zero.model, X)


RIGHT = {  # (zero, what was prepared) → tensors
    "forward": lambda zero, kept: [zero.model(X)],
    "evaluation": lambda zero, kept: [torch.no_grad()(zero.model.eval())(X)],
    "inference": lambda zero, kept: [torch.inference_mode()(zero.model)(X).clone()],
    "a part": lambda zero, kept: [list(zero.model.modules())[-1](X)],
    "functional": lambda zero, kept: [nn.functional.linear(torch.ones(2, param.shape[1]), param)
                                      for param in params(zero) if param.ndim == 2],
    "data": each(lambda param: param.data),
    "detach": each(torch.Tensor.detach),
    "numpy": each(lambda param: torch.from_numpy(param.detach().numpy())),
    "printed": lambda zero, kept: [torch.tensor([ord(letter) for letter in repr(params(zero))])],
    "one number": each(lambda param: torch.tensor(param.sum().item())),
    "a vector of all": lambda zero, kept: [nn.utils.parameters_to_vector(zero.model.parameters())],
    "foreach": lambda zero, kept: torch._foreach_norm(params(zero)),
    "a list in a dict": lambda zero, kept: [torch.stack([param.view(-1)[0] for param in params(zero)])],
    "where it lies": lambda zero, kept: [param for param in params(zero) if param.data_ptr()],
    "deepcopy": lambda zero, kept: copy.deepcopy(zero.model).parameters(),
    "a copied parameter": each(copy.deepcopy),
    "pickle": lambda zero, kept: pickle.loads(pickle.dumps(zero.model)).parameters(),
    "zero.state_dict": lambda zero, kept: [*zero.state_dict()["shards"], *params(zero)],
    "gather_parameters": gathered,
    "an average": an_average,
    "load_state_dict": replaced,
    "another thread": on_a_thread,
    "functional_call": with_doubled_weights,
    "torch.compile": lambda zero, kept: [torch.compile(zero.model, backend="eager")(X)],
    "torch.save of a state_dict": lambda zero, kept: through_a_file(zero.model.state_dict()).values(),
    "torch.save of a model": lambda zero, kept: saved(zero.model),
    "data.add_": changed(lambda own: [param.data.add_(1) for param in own]),
    "+=": changed(lambda own: [param.__iadd__(1) for param in own]),
    "one element": changed(lambda own: own[0].__setitem__((0, 0), 5.0)),
    "_foreach_mul_": changed(lambda own: torch._foreach_mul_(own, 0.5)),
    "to where it is": lambda zero, kept: zero.model.to("cpu").parameters(),
    "requires_grad_": lambda zero, kept: zero.model.requires_grad_(False).requires_grad_(True).parameters(),
    "lerp_": averaged(lambda means, own: [a.lerp_(b, 0.1) for a, b in zip(means, own, strict=True)]),
    "_foreach_lerp_": averaged(lambda means, own: torch._foreach_lerp_(means, own, 0.1)),
    "_foreach_copy_": averaged(lambda means, own: torch._foreach_copy_(means, own)),
    "AveragedModel": follows,
    "SGD": stepped(optim.SGD, lr=0.1),
    "AdamW, fused": stepped(optim.AdamW, lr=0.1, fused=True),
    "AdamW, foreach": stepped(optim.AdamW, lr=0.1, foreach=True),
    "one rank alone": one_rank_alone,
    "another order on each rank": another_order,
    "a message of one's own first": a_message_first,
    "used, then moved": used_then_moved,
    "moved": changed(lambda own: own[-1].share_memory_()),
    "share_memory": lambda zero, kept: zero.model.share_memory().parameters(),
    "sent to a process": sent_to_a_process,
    "all that lies there": all_that_lies_there,
    "copy.copy": lambda zero, kept: [copy.copy(zero.model)(X)],
    "aten": each(lambda param: aten().mul.Tensor(param, 2.0)),
    "dlpack": each(lambda param: torch.from_dlpack(param.detach()).clone()),
    "is it NaN?": each(lambda param: param.isnan().any()),
    "tolist": each(lambda param: torch.tensor(param.tolist())),
    "jacobian": each(lambda param: torch.autograd.functional.jacobian(lambda x: x.square().sum(), param)),
    "vmap": lambda zero, kept: [torch.vmap(torch.sin)(param) for param in params(zero) if param.ndim],
    "torch.func.grad": each(torch.func.grad(lambda param: param.sin().sum())),
    "stack_module_state": lambda zero, kept: torch.func.stack_module_state([zero.model] * 2)[0].values(),
    "an input of a class": lambda zero, kept: [zero.model(X.as_subclass(Quiet)).as_subclass(torch.Tensor)],
    "and by keyword": lambda zero, kept: [zero.model(x=X.as_subclass(Quiet)).as_subclass(torch.Tensor)],
    "a mode": in_a_mode,
    "checkpointing": lambda zero, kept: [checkpoint(zero.model, X, use_reentrant=False)],
    "pruned": pruned,
    "initialised": initialised,
    "loaded elsewhere": loaded_elsewhere,
    "a hook that reads": hooked,
    "symbolic_trace": lambda zero, kept: [torch.fx.symbolic_trace(zero.model)(X)],
    "a part, compiled": (compiled_part, lambda zero, kept: [kept(X)]),
    "TorchScript inside": (scripted_inside, lambda zero, kept: [zero.model.extra(torch.ones(2, 3)), *params(zero)]),
    "TorchScript of the model": (traced, lambda zero, kept: [kept(X)]),
    "wait(), then past the class": lambda zero, kept: [
        torch.func.vmap(torch.sin)(param) for param in waited(zero) if param.ndim],
}


def aten():
    ops = "ops"  # spelled out, the functions that travel to the ranks would try to take it along
    return getattr(torch, ops).aten


def waited(zero):
    if isinstance(zero, (Late1, Late2)):
        zero.gathering.wait()
    return params(zero)


def through_a_file(state):
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


def seen_by(stage, names):
    """What each of them sees right after the second step(), and where the third leads."""
    warnings.simplefilter("ignore")
    seen = {}
    for name in names:
        prepare, look = RIGHT[name] if isinstance(RIGHT[name], tuple) else (lambda zero: None, RIGHT[name])
        torch.manual_seed(0)
        model = odd_models.Chain()
        if prepare is scripted_inside:
            prepare(toys_of(model))
        zero = stage(model, optim.AdamW, lr=0.1, bucket_bytes=256)
        kept = "TorchScript" if prepare is scripted_inside else prepare(zero)
        for step in range(3):
            loss = zero.model(batch(step)).square().mean()
            loss.backward()
            with slow() if step == 1 else contextlib.nullcontext():
                zero.step()
            zero.zero_grad()
            if isinstance(zero, (Late1, Late2)) and kept is None:
                assert any(isinstance(param, Awaited) for param in params(zero)), f"{name}: nothing is late"
            if step == 1:
                seen[name] = [tensor.detach().clone() for tensor in look(zero, kept)]
        seen[name] += [loss.detach(), *(param.detach().clone() for param in params(zero))]
        del zero
    return seen


def toys_of(model):
    """Something with this model: a stage that is not there yet."""
    return type("Before", (), {"model": model})


CASES = [(number, world_size) for number in range(2) for world_size in (1, 2, 3)]


@pytest.mark.parametrize("number, world_size", CASES)
def test_right(number, world_size):
    (plain, late), names = PAIRS[number], list(RIGHT)
    theirs, ours = (toys.run(seen_by, world_size, stage, names, timeout=120) for stage in (plain, late))
    for one, other in zip(theirs, ours, strict=True):
        for name in names:
            assert len(one[name]) == len(other[name]) and toys.identical(one[name], other[name]), name
            assert all(tensor.isfinite().all() for tensor in other[name]), name


# ------------------------------------------------------------------------------------------------------------- refused


def on_its_way(stage, zero=None):
    zero = zero or small(stage)
    zero.model(batch(0)).square().mean().backward()
    with slow():
        zero.step()
    zero.zero_grad()
    return zero


def told(function, *args):
    """The error of a call, in one line."""
    try:
        function(*args)
    except Exception as error:
        return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")


def in_a_fork(zero):
    """What a child process is told that looks at a parameter; None if it waits in vain."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, str(told(lambda: params(zero)[0].sum().item())).encode())
        os._exit(0)
    os.close(writing)
    heard = os.read(reading, 2000).decode() if select.select([reading], [], [], 20)[0] else None
    if heard is None:
        os.kill(child, 9)
    os.waitpid(child, 0)
    return heard


def moved(how):
    """A parameter is moved or replaced: the next backward says so, as at stages 1 and 2."""

    def look(zero):
        how(zero)
        return told(lambda: [zero.model(batch(1)).square().mean().backward(), zero.step()])

    return look


def set_elsewhere(zero):
    with torch.no_grad():
        for param in params(zero):
            param.set_(torch.ones(param.shape))
    assert all((param == 1).all() for param in params(zero)), "what the user has put there is gone"


def data_assigned(zero):
    for param in params(zero):
        param.data = torch.ones(param.shape)


def by_vector(zero):
    count = sum(param.numel() for param in params(zero))
    nn.utils.vector_to_parameters(torch.linspace(0, 1, count), params(zero))


def swapped(zero):
    with contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(params(zero)[0], nn.Parameter(torch.ones(params(zero)[0].shape)))


def loaded(model):
    model.load_state_dict(odd_models.Chain().state_dict(), assign=True)


def compiled_whole(zero):
    layer = first_linear(zero)
    compiled = torch.compile(lambda x: layer(x).sin(), backend="eager", fullgraph=True)
    return told(compiled, X)


MOVED = "moved or replaced after wrapping"
REFUSED = {  # what it does, and what it is told
    "a fork": (in_a_fork, r"forked from a rank while .* call zero\.gathering\.wait\(\) before the fork"),
    "torch.jit.trace": (lambda zero: told(torch.jit.trace, zero.model, X), r"call zero\.gathering\.wait\(\) before"),
    "torch.compile, in one graph": (compiled_whole, r"disable|zero\.gathering\.wait\(\)"),
    "set_": (moved(set_elsewhere), MOVED),
    "data": (moved(data_assigned), MOVED),
    "vector_to_parameters": (moved(by_vector), MOVED),
    "swap_tensors": (moved(swapped), MOVED),
    "half": (moved(lambda zero: zero.model.half().float()), MOVED),
    "double and back": (moved(lambda zero: zero.model.double().float()), MOVED),
    "to_empty": (moved(lambda zero: zero.model.to_empty(device="cpu")), MOVED),
    "assign=True": (moved(lambda zero: loaded(zero.model)), MOVED),
    "clip_grad_norm_": (lambda zero: clipped(zero), r"zero\.clip_grad_norm_"),
}


def clipped(zero):
    zero.model(batch(1)).square().mean().backward()
    return told(nn.utils.clip_grad_norm_, zero.model.parameters(), 1.0)


def refusals(stage, names):
    warnings.simplefilter("ignore")
    return {name: REFUSED[name][0](on_its_way(stage)) for name in names}


@pytest.mark.parametrize("number, world_size", CASES)
def test_refused_with_the_line_to_write(number, world_size):
    for words in toys.run(refusals, world_size, PAIRS[number][1], list(REFUSED), timeout=90):
        for name, (_, pattern) in REFUSED.items():
            assert words[name] and re.search(pattern, words[name]), (name, words[name])


# --------------------------------------------------------------------------------------------------------------- lost


def apart():
    """Rank 1 skips a step, and rank 0 looks for parameters that nobody sends."""
    zero = small(Late1)
    on_its_way(Late1, zero)
    zero.gathering.wait()
    zero.model(batch(1)).square().mean().backward()
    if dist.get_rank():
        zero.reduced_gradients()
        return told(collectives.all_reduce, torch.ones(3))
    zero.step()
    zero.zero_grad()
    first = told(lambda: params(zero)[0].sum())
    again = told(lambda: params(zero)[0].sum())
    other = told(lambda: zero.model(batch(2)))
    assert not lazy_all_gather._under_way  # the end does not wait for them either
    return first, again, other


def test_what_failed_to_arrive_is_lost():
    (first, again, other), theirs = toys.run(apart, 2, timeout=60)
    assert "not in the same collective" in first and "not in the same collective" in theirs
    assert "never arrived" in again and "never arrived" in other and "not in the same collective" in again


def ended():
    zero = on_its_way(Late2)
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    params(zero)[0].sum()
    zero.model(batch(1)).square().mean().backward()
    zero.step()


def test_a_neighbour_that_crashes_is_named():
    with pytest.raises(ranks.RankError, match="rank 1 of 3 failed") as caught:
        toys.run(ended, 3, timeout=60)
    assert "rank 1 has had enough" in str(caught.value)
