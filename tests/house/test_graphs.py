"""Graphs that do not go from a model's input to its output and back once: at stage 3 as at stage 0, or refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from misuse import by_stage, by_world, refused
from thorough import sample
from torch import nn, optim


def numbers(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def wrap(stage, make):
    torch.manual_seed(0)
    return toys.STAGES[stage](make(), optim.SGD, lr=0.1, momentum=0.9)


def second_order(stage, how):
    """A loss with a penalty on its own gradient; two micro-batches a step, of which rank 1 has others."""
    zero = wrap(stage, Half)
    params = dict(zero.model.named_parameters())
    for step in range(4):
        loss = zero.model(numbers(step, dist.get_rank())).square().mean()
        if how == "backward":
            loss.backward(create_graph=True)
        elif how == "func":
            def loss_of(weights, x=numbers(9 + step, 0)):
                return torch.func.functional_call(zero.model, weights, (x,)).square().mean()

            gradients = torch.func.grad(loss_of)(params).values()
        elif how == "grad":
            gradients = torch.autograd.grad(loss, [*params.values()], create_graph=True)
        else:  # in plain torch, with a model that no stage knows
            twin = Half()
            twin.load_state_dict(zero.model.state_dict())
            gradients = torch.autograd.grad(twin(numbers(9 + step, 0)).square().mean(), [*twin.parameters()])
        penalty = sum(gradient.square().sum() for gradient in gradients)
        (loss + (penalty if how == "grad" else penalty.detach())).backward()
        if step % 2:
            zero.step()
            zero.zero_grad()
    return [*toys.whole_parameters(zero), penalty.detach()]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", sample((0, 1, 2), [2]))
def test_a_penalty_on_gradients(stage):
    """With torch.autograd.grad(create_graph=True), and with torch.func.grad, whose gradients are a rank's own."""
    (alone,), (expected,) = (toys.run(second_order, 1, 0, how) for how in ("grad", "twin"))
    assert not toys.identical(alone, expected)
    for how, others in ("grad", alone), ("func", expected):
        (ours,) = toys.run(second_order, 1, stage, how)
        for one, other in zip(ours, others, strict=True):
            torch.testing.assert_close(one, other)
        first, *rest = toys.run(second_order, 2, stage, how)
        assert all(toys.identical(first[:-1], each[:-1]) for each in rest)


@by_stage
def test_backward_with_a_graph(stage):
    words = refused(second_order, stage, "backward")
    assert "torch.autograd.grad(loss, " in words and "create_graph=True)" in words


class InNumpy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(self.weight.detach().numpy().mean())


def numpy_in_forward(stage):
    zero = wrap(stage, lambda: nn.Sequential(nn.ModuleList([InNumpy(8, 8)])[0], nn.Linear(8, 8)))
    zero.model(numbers(0, 0)).sum().backward()
    zero.step()


def test_an_array_of_numpy_in_forward():
    assert "write weight.detach().clone().numpy()" in refused(numpy_in_forward, 3)
    toys.run(numpy_in_forward, 2, 2)


# -------------------------------------------------------------------------------------------------------------- compile


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def compiled(stage, backend):
    """Batches of several sizes, a second backward pass in the third step, an evaluation in the second."""
    zero, losses = wrap(stage, Layers), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler looks at .grad of all that it meets, and torch warns of that
        model = torch.compile(zero.model, backend=backend, dynamic=False) if backend else zero.model
        for step in range(4):
            if step == 1:
                with torch.no_grad():
                    losses.append(model(numbers(9, 0)[:3]).sum().item())
            for rows in (2, 4)[: 1 + (step == 2)]:
                loss = model(numbers(step, dist.get_rank())[:rows]).square().mean()
                loss.backward()
                losses.append(loss.item())
            zero.step()
            (zero if step % 2 else zero.model).zero_grad()
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("stage, backend", sample([(1, "eager"), (2, "aot_eager"), (3, "aot_eager")], [(1, "eager")]))
def test_compiled_anew_while_gradients_wait(stage, backend):
    """Bit for bit as it is without the compiler. Stage 0 adds two micro-batches in another order than stages 1 to 3."""
    found, plain, stage_0 = (toys.run(compiled, 2, *how) for how in ((stage, backend), (stage, None), (0, None)))
    assert found == plain and [pytest.approx(losses) for losses in stage_0] == found


def compiled_in_one_graph(stage):
    with pytest.raises(Exception, match=r"hooks of ZeRO: compile without fullgraph=True"):
        torch.compile(wrap(stage, Layers).model, backend="eager", fullgraph=True)(numbers(0, 0))
    return True


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
def test_a_stage_is_compiled_in_several_graphs(stage):
    assert toys.run(compiled_in_one_graph, 1, stage) == [True]


# ----------------------------------------------------------------------------------------------- two models, and others


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, uses_b=True):
        return x + (self.b(self.a(x)) if uses_b else self.a(x))


def two_models(stage, missing, in_turn):
    """A loss of two models, each with a stage of its own. missing: rank 1 leaves a layer of the second
    one out. in_turn: a batch goes through one, then the other; else both compute on it, and meet in the loss."""
    torch.manual_seed(0)
    first, second = (toys.STAGES[stage](Half(), optim.SGD, lr=0.1, bucket_bytes=256) for _ in range(2))
    rank = dist.get_rank()
    for step in range(3):
        uses_b = not (missing and step == 1 and rank == 1)
        x = numbers(step, rank)
        y = first.model(second.model(x, uses_b)) if in_turn else first.model(x) * second.model(x, uses_b)
        y.square().mean().backward()
        for zero in (first, second):
            zero.step()
            zero.zero_grad()
    return toys.whole_parameters(first) + toys.whole_parameters(second)


@pytest.mark.thorough
@by_world
@pytest.mark.parametrize("missing, in_turn", sample(((False, False), (False, True), (True, True)), [(True, True)]))
def test_two_models_in_one_backward(world_size, missing, in_turn):
    expected = toys.run(two_models, world_size, 0, missing, in_turn)
    for stage in (1, 2, 3):
        for ours, others in zip(toys.run(two_models, world_size, stage, missing, in_turn), expected, strict=True):
            assert toys.identical(ours, others)


@pytest.mark.parametrize("stage", (0, 1, 2))
@by_world
def test_two_models_and_a_gradient_missing_on_one_rank(stage, world_size):
    words = refused(two_models, stage, True, False, world_size=world_size)
    assert "not in the same collective" in words and "of model 2" in words
    assert "make one stage around both, nn.ModuleList([one, other])" in words


