"""Mistakes end with a clear error, on every rank and without a hang; after an exception the next step is right."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from house.odd_models import WIDTH, Chain, Layer, vectors
from misuse import on_stage_3, on_two_ranks
from thorough import sample
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_minimal.processes import ranks
from zero_minimal.processes.ranks import RankError

SGD, STAGES = torch.optim.SGD, toys.STAGES


def wrapped(stage, make=Chain, **options):
    torch.manual_seed(dist.get_rank())
    model = make()
    return model, stage(model, SGD, **{"lr": 0.1, **options})


def loss_of(model, step=0):
    return model(vectors(dist.get_rank(), step)).square().mean()


def train_step(model, zero, step=0):
    return toys.learn(zero, loss_of(model, step))


# --------------------------------------------------------------------------------------------- wrapping the wrong thing


class Lamb(torch.optim.Optimizer):
    """Adam's direction with a step as long as the parameter: looks at norms."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * param.grad
                    direction = state["mean"].sign()
                    param.sub_(direction * group["lr"] * param.norm() / direction.norm())


class SkipsSpikes(torch.optim.Optimizer):
    """SGD that leaves out a gradient whose norm is far above its running norm: it hides at small gradients."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm, state = param.grad.norm(), self.state[param]
                    usual = state.setdefault("norm", norm)
                    param.sub_(param.grad * group["lr"] * (norm <= 1.2 * usual))
                    state["norm"] = 0.9 * usual + 0.1 * norm


class OwnList(torch.optim.Optimizer):
    """Its step() goes over a list that it made at the start."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.all = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self):
        for param in self.all:
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.defaults["lr"])


@on_two_ranks
def test_refuses_models(stage):
    _, zero = wrapped(stage)
    for empty in (nn.Tanh(), nn.ModuleList()):
        with pytest.raises(ValueError, match="no parameter to train"):
            stage(empty, SGD, lr=0.1)
    for wrong in (zero, [nn.Linear(3, 3)], Chain().parameters(), Chain):
        with pytest.raises(TypeError, match="Module"):
            stage(wrong, SGD, lr=0.1)


@on_two_ranks
def test_refuses_optimizers(stage):
    kinds = [(torch.optim.LBFGS, {}), (torch.optim.Adafactor, {}), (torch.optim.Adafactor, dict(lr=1e-5)),
             (torch.optim.SparseAdam, {}), (SkipsSpikes, dict(lr=0.1)),
             *((Lamb, dict(lr=lr)) for lr in (0.1, 1e-3, 1e-6, 0.0))]
    if hasattr(torch.optim, "Muon"):
        kinds.append((torch.optim.Muon, dict(lr=0.1)))
    for kind, options in kinds:
        with pytest.raises(ValueError, match=f"{kind.__name__} is not element-wise.*AdamW, Adam, SGD"):
            stage(nn.Linear(4, 4), kind, **options)
    with pytest.raises(ValueError, match=r"OwnList .*step\(\) must go over self\.param_groups"):
        stage(nn.Linear(4, 4), OwnList, lr=0.1)


@on_two_ranks
def test_accepts_groups(stage):
    model = Chain()
    stage(model, SGD, lr=0.1, param_groups=[dict(params=model.head.parameters())])
    for iterable in (nn.Module.parameters, nn.Module.named_parameters, lambda m: list(m.parameters())):
        model = Chain()  # what torch.optim takes as one group
        zero = stage(model, SGD, lr=0.1, param_groups=iterable(model))
        assert len(zero.optimizer.param_groups) == 1
        train_step(model, zero)


def save(stage):
    torch.set_default_dtype(torch.float64)
    _, zero = wrapped(stage)
    return copy.deepcopy(zero.state_dict())


def refuse_states(states):
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for stage in STAGES:
        model, zero = wrapped(stage)
        before = toys.whole_parameters(zero)
        with pytest.raises(ValueError, match="saved with"):
            zero.load_state_dict(dict(model.named_buffers()))
        for (name, world), saved in states.items():
            if name == stage.__name__ and world == world_size:
                zero.load_state_dict(saved[rank])
                with pytest.raises(ValueError, match="rank"):
                    zero.load_state_dict(saved[rank - 1])
            else:
                with pytest.raises(ValueError, match="saved with"):
                    zero.load_state_dict(saved[min(rank, world - 1)])
        assert toys.identical(toys.whole_parameters(zero), before)
        train_step(model, zero)


@pytest.mark.thorough
def test_refuses_states_of_others():
    states = {(stage.__name__, world): toys.run(save, world, stage) for stage in STAGES for world in (1, 2)}
    toys.run(refuse_states, 2, states)


# ------------------------------------------------------------------------------------------------- using it wrongly


@on_two_ranks
def test_refuses_wrong_uses(stage):
    model, zero = wrapped(stage)
    with pytest.raises(RuntimeError, match=r"zero\.step\(\)"):
        loss_of(model).backward()
        zero.optimizer.step()
    zero.zero_grad()
    train_step(model, zero)

    loss_of(model).backward()
    zero.step()
    with pytest.raises(RuntimeError, match=r"zero\.zero_grad\(\)"):
        loss_of(model).backward()
    zero.zero_grad()
    train_step(model, zero)


@on_two_ranks
def test_refuses_a_call_of_the_stage(stage):
    with pytest.raises(TypeError, match=r"zero\.model\(x\)"):
        wrapped(stage)[1](torch.zeros(1))


def change_gradients(by_rank):
    model, zero = wrapped(STAGES[0], lambda: Chain().double())
    for _ in range(3):
        loss_of(model).backward()
        for param in model.parameters():
            param.grad /= 2 + by_rank * dist.get_rank()
        zero.step()
        zero.zero_grad()


def test_stage_0_compares_gradients_that_were_changed():
    toys.run(change_gradients, 2, False)
    with pytest.raises(RuntimeError, match=r"gradients were changed before the last step\(\) on some ranks only"):
        toys.run(change_gradients, 2, True)


class Again(Chain):
    """The same layer three times, each recomputed by a backward pass of its own."""

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return self.head(x)


@on_two_ranks
def test_refuses_second_gradients(stage):
    model, zero = wrapped(stage, lambda: Again(count=1))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(vectors(dist.get_rank(), 0).requires_grad_()).square().mean().backward()

    model, zero = wrapped(stage)
    again = checkpoint(model, vectors(dist.get_rank(), 0).requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        (again.square().mean() + loss_of(model, 1)).backward()
    zero.zero_grad()
    train_step(model, zero)


@on_two_ranks
def test_refuses_scripting(stage):
    model, _ = wrapped(stage)
    with warnings.catch_warnings(), pytest.raises(AttributeError, match="script that"):
        warnings.simplefilter("ignore")  # torch's own, that it is deprecated
        torch.jit.script(model)


# ------------------------------------------------------------------------------------------- after an exception


class Fragile(Chain):
    """Fails when told to: in the forward of a unit in the middle, or when backward comes there."""

    class Link(Layer):
        fails = None

        def forward(self, x):
            x = super().forward(x)
            if self.fails == "forward":
                raise ZeroDivisionError("in forward")
            if self.fails == "backward":
                x.register_hook(self.fail)
            return x * 1.5

        def fail(self, gradient):
            raise ZeroDivisionError("in backward")

    def __init__(self):
        super().__init__(self.Link, count=4)


@pytest.mark.thorough
@on_two_ranks
def test_recovers(stage):
    outcomes = []
    for kinds in ((None, None), ("forward", "forward"), ("backward", "backward"), ("forward", "backward")):
        model, zero = wrapped(stage, Fragile, momentum=0.9, bucket_bytes=600)
        train_step(model, zero, 0)
        for step, kind in enumerate(kinds, 1):
            if kind:
                model.layers[2].fails = kind
                with pytest.raises(ZeroDivisionError):
                    loss_of(model, 50).backward()
                model.layers[2].fails = None
                zero.zero_grad()
            loss = train_step(model, zero, step)
            with torch.no_grad():
                loss_of(model)
        outcomes.append([torch.tensor(loss), *toys.whole_parameters(zero)])
    for outcome in outcomes[1:]:
        assert toys.identical(outcome, outcomes[0])


def fail_on_one_rank(stage):
    torch.set_default_dtype(torch.float64)
    model, zero = wrapped(stage, Fragile)
    train_step(model, zero)
    if dist.get_rank() == 1:
        model.layers[1].fails = "backward"
    train_step(model, zero, 1)


@pytest.mark.parametrize("stage", sample(STAGES, STAGES[3:]))
def test_an_exception_on_one_rank(stage):
    with pytest.raises(RankError, match="in backward") as caught:
        toys.run(fail_on_one_rank, 3, stage, timeout=60)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, ZeroDivisionError)


# ----------------------------------------------------------------------------- stage 3: memory that is not there


@on_stage_3
def test_stage_3_reading_outside(stage):
    """To read a released parameter is an error; what was taken while they were whole stays valid."""
    model, zero = wrapped(stage)
    train_step(model, zero)
    weight = model.layers[0].linear.weight
    for read in (
        weight.t, weight.detach, weight.clone, weight.sum, weight.tolist, model.head.bias.mean, lambda: weight[1:],
        lambda: weight.data, lambda: weight @ weight, lambda: weight.mul_(2), lambda: torch.nn.init.zeros_(weight),
        lambda: setattr(weight, "data", torch.zeros(2)),
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match="is released.*gather_parameters"):
            read()
    assert weight.shape.numel() and weight.requires_grad
    assert "Freed parameter 'layers.0.linear.weight'" in repr(weight)
    with zero.gather_parameters():
        state, kept = model.state_dict(), model.layers[0].linear.weight.t()
        image, copied = {name: tensor.clone() for name, tensor in state.items()}, copy.deepcopy(state)
        assert not model(vectors(0, 0)).isnan().any()
    train_step(model, zero)
    for name, tensor in state.items():
        assert torch.equal(tensor, image[name]) and torch.equal(tensor, copied[name])
    assert torch.equal(kept, image["layers.0.linear.weight"].t())


class Leaking(Chain):
    """Units that return a part of their own parameters."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x):
            return x, self.weight[: len(x)]

    def __init__(self):
        super().__init__(self.Table)

    def forward(self, x):
        tables = []
        for layer in self.layers:
            x, table = layer(x)
            tables.append(table)
        return self.head(x * sum(tables))


@on_stage_3
def test_stage_3_refuses(stage):
    model, zero = wrapped(stage)
    before = toys.whole_parameters(zero)
    state = zero.state_dict()
    loss = loss_of(model)
    with zero.gather_parameters():
        for call in (zero.step, lambda: zero.load_state_dict(state), loss.backward):
            with pytest.raises(RuntimeError, match="gather_parameters"):
                call()
    assert toys.identical(toys.whole_parameters(zero), before)
    zero.zero_grad()
    train_step(model, zero)

    model, zero = wrapped(stage, Leaking)
    with pytest.raises(RuntimeError, match="clone"):
        loss_of(model)


# ------------------------------------------------------------------------------------------------------ devices


def test_devices(monkeypatch):
    def message(gpus, *question):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(ValueError) as caught:
            ranks.choose(*question)
        return str(caught.value)

    assert "unknown device" in message(0, "tpu", None, 1)
    assert "unknown backend" in message(0, "cpu", "mpi", 1)
    assert "no GPU" in message(0, "cuda", None, 1)
    assert "needs a GPU for each of the 3 ranks, and this machine has 2" in message(2, "cuda", "nccl", 3)
    assert "needs a GPU" in message(8, "cpu", "nccl", 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="no GPU"):
        ranks.run(print, 2, device="cuda")
