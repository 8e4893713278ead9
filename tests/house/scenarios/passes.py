"""Scenarios: what models return, and what users do between forward and the end of backward."""

import copy
import dataclasses
import functools
import types
import warnings
from collections import OrderedDict, namedtuple

import torch
import torch.nn.functional as F
from house.scenarios.pieces import WIDTH, Chain, Layer, Writer, go_on, next_word, squares, train, wrapped
from house.scenarios.stand import scenario
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from zero_minimal import activation_partitioning

# ----------------------------------------------------------------------------------------------------- what is returned


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    note: str = ""


Pair = namedtuple("Pair", "left right")


class Slotted:
    __slots__ = ("value", "__weakref__")

    def __init__(self, value):
        self.value = value


class Fields(OrderedDict):
    """As the outputs of transformers: a dict with attributes."""

    def __getattr__(self, name):
        return self[name]


class SlottedChild(Slotted):
    __slots__ = ("more",)

    def __init__(self, value):
        super().__init__(value)
        self.more = [value]


RETURNS = {
    "a tuple": (lambda x: (None, (x, 3)), lambda y: y[1][0]),
    "a dict": (lambda x: {"x": x, "text": "y", "empty": {}}, lambda y: y["x"]),
    "a dataclass": (Answer, lambda y: y.value),
    "a named tuple": (lambda x: Pair(x, "right"), lambda y: y.left),
    "a plain object": (lambda x: types.SimpleNamespace(x=x), lambda y: y.x),
    "an object with slots": (Slotted, lambda y: y.value),
    "a child of an object with slots": (SlottedChild, lambda y: y.more[0]),
    "a generator": (lambda x: (part for part in (x,)), lambda y: next(y)),
    "fields": (lambda x: Fields(value=x), lambda y: y.value),
    "a set of tensors": (lambda x: {x}, lambda y: next(iter(y))),
    "a function": (lambda x: (lambda: x), lambda y: y()),
}
LATER = ("a generator", "a function")


def returning(pack, unpack):
    class Packing(Layer):
        def forward(self, x):
            return pack(super().forward(x))

    class Unpacking(Chain):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = unpack(layer(x))
            return pack(self.head(x))

    def play(me):
        train(me, Unpacking(Packing), loss=lambda model, me, step: unpack(model(me.x(step))).square().mean())

    return play


for what, both in RETURNS.items():
    late = "a Packing returns a (generator|function), which would read parameters after its turn: return tensors, in a"
    scenario(f"blocks return {what}", refused={"stage3": late} if what in LATER else None, worlds=(2, 3))(
        returning(*both))


@scenario()
def blocks_that_pass_on_what_they_got(me):
    class Passing(Layer):
        def forward(self, x, bias=None):
            bias = self.linear(x) if bias is None else bias
            return super().forward(x) * torch.tanh(bias), bias

    class Passed(Chain):
        def forward(self, x):
            bias, x = None, self.first(x)
            for layer in self.layers:
                x, bias = layer(x, bias=bias)
            return self.head(x)

    train(me, Passed(Passing))


@scenario()
def blocks_that_work_in_place(me):
    class InPlace(Layer):
        def forward(self, x):
            x += super().forward(x.clone())
            return x

    train(me, Chain(InPlace))


# ----------------------------------------------------------------------------------------------------- auxiliary losses


class Experts(nn.Module):
    """A router and three experts. What it says of balance is returned, kept, or noted outside."""

    def __init__(self, tell="return"):
        super().__init__()
        self.router, self.tell = nn.Linear(WIDTH, 3), tell
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.balance = None

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        y = sum(weights[:, number, None] * expert(x) for number, expert in enumerate(self.experts))
        self.balance = weights.mean(0).square().sum()
        return (x + y, self.balance) if self.tell == "return" else x + y


class Mixture(Chain):
    def forward(self, x):
        x, balance = self.first(x), 0.0
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, tuple):
                x, one = x
                balance = balance + one
        return self.head(x), balance


@scenario()
def auxiliary_losses_that_blocks_return(me):
    def loss(model, me, step):
        y, balance = model(me.x(step))
        return y.square().mean() + 0.1 * balance

    train(me, Mixture(Experts), loss=loss)


@scenario()
def auxiliary_losses_that_blocks_keep(me):
    def loss(model, me, step):
        y, _ = model(me.x(step))
        return y.square().mean() + 0.1 * sum(layer.balance for layer in model.layers)

    train(me, Mixture(lambda: Experts("keep")), loss=loss)


@scenario()
def auxiliary_losses_alone(me):
    """A step whose loss is what the blocks keep, and nothing of the output."""
    def loss(model, me, step):
        model(me.x(step))
        return sum(layer.balance for layer in model.layers)

    train(me, Mixture(lambda: Experts("keep")), loss=loss)


@scenario()
def auxiliary_losses_that_a_hook_makes(me):
    """From the output of each block, after its turn."""
    model, seen = Chain(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.sin().mean()))

    def loss(model, me, step):
        seen.clear()
        return model(me.x(step)).square().mean() + sum(seen)

    train(me, model, loss=loss)


@scenario()
def auxiliary_losses_from_hidden_states(me):
    class Showing(Chain):
        def forward(self, x):
            x, hidden = self.first(x), []
            for layer in self.layers:
                x = layer(x)
                hidden.append(x)
            return self.head(x), hidden

    def loss(model, me, step):
        y, hidden = model(me.x(step))
        return y.square().mean() + sum((a - b).abs().mean() for a, b in zip(hidden, hidden[1:], strict=False))

    train(me, Showing(), loss=loss)


@scenario()
def experts_chosen_by_each_rank(me):
    """Hard routing, of experts in one unit: some get nothing on some ranks."""
    class Hard(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(4)})

        def forward(self, x):
            weights = self.router(x).softmax(-1)
            best, y = weights.argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts.values()):
                rows = (best == number).nonzero()[:, 0]
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
            return x + y

    train(me, Chain(Hard))


@scenario(refused={"stage3": "not in the same collective"}, worlds=(2, 3, 4))
def experts_in_a_list_chosen_by_each_rank(me):
    """At stage 3 each expert is a unit, which all ranks must use."""
    class Hard(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x, which):
            return self.experts[which](x)

    train(me, Hard(), loss=lambda model, me, step: model(me.x(step), (me.rank + step) % 4).square().mean())


# ------------------------------------------------------------------------------------------------- forwards, backwards


@scenario()
def two_forwards_one_backward(me):
    def loss(model, me, step):
        return model(me.x(step)).square().mean() + model(me.x(100 + step, 3, WIDTH)).sum()

    train(me, Chain(), loss=loss)


@scenario()
def pairs_through_one_model(me):
    """A contrastive loss."""
    def loss(model, me, step):
        a, b = model(me.x(step)), model(me.x(100 + step))
        return F.triplet_margin_loss(a, b, model(me.x(200 + step)))

    train(me, Chain(), loss=loss)


@scenario()
def a_backward_for_each_loss(me):
    def one(zero, step):
        y = zero.model(me.x(step))
        first, second = y.square().mean(), y.sin().mean()
        first.backward(retain_graph=True)
        second.backward()

    train(me, backward=one)


def two_graphs(order):
    def play(me):
        def one(zero, step):
            losses = [zero.model(me.x(100 * number + step)).square().mean() for number in range(2)]
            for number in order:
                losses[number].backward()

        train(me, backward=one)

    return play


scenario("two graphs then two backwards")(two_graphs((0, 1)))
scenario("two graphs backwards in the other order")(two_graphs((1, 0)))


@scenario()
def a_backward_with_a_vector(me):
    def one(zero, step):
        y = zero.model(me.x(step))
        y.backward(me.x(100 + step, *y.shape))

    train(me, backward=one)


@scenario()
def autograd_backward_of_several(me):
    def one(zero, step):
        y = zero.model(me.x(step))
        torch.autograd.backward([y.square().mean(), y.sin().mean()])

    train(me, backward=one)


@scenario()
def a_graph_that_nobody_goes_back_through(me):
    def loss(model, me, step):
        model(me.x(100 + step))
        return model(me.x(step)).square().mean()

    train(me, Chain(), loss=loss)


@scenario()
def layers_called_by_themselves(me):
    def loss(model, me, step):
        x = me.x(step)
        value = model.layers[step % 3](x).square().mean()
        return value + model.layers[0](model.layers[2](x)).square().mean() if step % 2 else value

    train(me, Chain(), loss=loss, steps=6)


@scenario()
def encode_and_head_called_by_themselves(me):
    def loss(model, me, step):
        words = me.words(step)
        return F.cross_entropy(model.head(model.encode(words[:, :-1])).flatten(0, 1), words[:, 1:].flatten())

    train(me, Writer(), loss=loss)


@scenario(refused={"stage3": r"parameter 'embedding.weight' is released.*gather_parameters"})
def an_embedding_read_by_indexing(me):
    """model.embedding.weight[words], outside of any forward."""
    def loss(model, me, step):
        return model.head(model.embedding.weight[me.words(step)]).square().mean()

    train(me, Writer(), loss=loss)


@scenario()
def generating_between_steps(me):
    model = Writer(tied=True)

    def loss(model, me, step):
        model.eval()
        me.note(model.generate(me.words(50 + step)))
        model.train()
        return next_word(model, me, step)

    train(me, model, loss=loss)


@scenario()
def evaluations_between_all(me):
    def one(zero, step):
        model, check = zero.model, me.x(1000 + step)
        with torch.no_grad():
            me.note(model(check))
        loss = model(me.x(step)).square().mean()
        with torch.inference_mode():
            me.note(model(check).clone())
        model.eval()
        with torch.no_grad():
            me.note(model(check))
        model.train()
        loss.backward()
        with torch.no_grad():
            me.note(model(check))

    train(me, backward=one)


@scenario()
def evaluating_without_no_grad(me):
    def one(zero, step):
        for number in range(3):
            me.note(zero.model(me.x(1000 + 10 * step + number)).mean())
        zero.model(me.x(step)).square().mean().backward()

    train(me, backward=one)


@scenario(refused={"stage3": r"keep a result of another forward.*evaluate under torch\.no_grad"}, worlds=(2, 3, 4))
def rank_0_keeps_an_evaluation_with_its_graph(me):
    """Whether a graph is alive decides when stage 3 hands its gradients over."""
    kept = []

    def one(zero, step):
        check = zero.model(me.x(1000 + step)).mean()
        if me.rank == 0:
            kept.append(check)
        del check
        zero.model(me.x(step)).square().mean().backward()

    train(me, backward=one)


@scenario(refused={"stage3": "not in the same collective|has finished"}, worlds=(2, 3, 4))
def evaluating_on_rank_0_alone(me):
    def one(zero, step):
        if me.rank == 0:
            with torch.no_grad():
                zero.model(me.x(1000 + step))
        zero.model(me.x(step)).square().mean().backward()

    train(me, backward=one)


@scenario(or_refused="zero_grad|not in the same collective", worlds=(2, 3, 4))
def one_rank_has_nothing_to_learn_from(me):
    """A rank without a loss: it runs forward, and no backward."""
    def one(zero, step):
        loss = zero.model(me.x(step)).square().mean()
        if me.rank != step % me.size:
            loss.backward()

    train(me, backward=one)


# -------------------------------------------------------------------------------------------- gradients of gradients, …


@scenario()
def gradients_of_the_inputs(me):
    """An adversarial example, which is trained on: x moves along its gradient."""
    def one(zero, step):
        x = me.x(step).requires_grad_()
        grad, = torch.autograd.grad(zero.model(x).square().mean(), x)
        me.note(grad)
        zero.model((x + 0.1 * grad.sign()).detach()).square().mean().backward()

    train(me, backward=one)


@scenario()
def gradients_of_the_inputs_by_backward(me):
    """x.grad after backward(), then zero_grad(), then the step itself."""
    def one(zero, step):
        x = me.x(step).requires_grad_()
        zero.model(x).square().mean().backward()
        me.note(x.grad)
        zero.zero_grad()
        zero.model((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()

    train(me, backward=one)


class Guessing(Chain):
    """It first guesses by itself, without a graph, as in diffusion with self-conditioning."""

    def forward(self, x, guess=None):
        if guess is None:
            with torch.no_grad():
                guess = self(x, torch.zeros_like(x))
        return super().forward(x + guess.mean())


@scenario()
def a_forward_that_calls_the_model_itself(me):
    train(me, Guessing())


@scenario(refused={"stage3": "create_graph=True"})
def a_gradient_penalty(me):
    def one(zero, step):
        x = me.x(step).requires_grad_()
        y = zero.model(x)
        grad, = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.square().mean() + (grad.norm(2, dim=1) - 1).square().mean()).backward()

    train(me, backward=one)


@scenario(or_refused="create_graph=True")
def a_gradient_penalty_in_one_unit(me):
    def loss(model, me, step):
        x = me.x(step).requires_grad_()
        y = model(x)
        grad, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + (grad.norm(2, dim=1) - 1).square().mean()

    train(me, Chain(), loss=loss, units=[])


@scenario(or_refused=r"parameter '\S+' is released")
def autograd_grad_of_the_parameters(me):
    """As meta-learning code does: the result is used, not .grad."""
    def loss(model, me, step):
        grads = torch.autograd.grad(model(me.x(step)).square().mean(), list(model.parameters()))
        me.note(*grads)
        return model(me.x(step)).square().mean()

    train(me, Chain(), loss=loss)


@scenario(refused={"stage3": "parameter 'spread' is released.*use it in the forward of the module that holds it"})
def a_parameter_used_before_any_forward(me):
    model = Chain()
    model.spread = nn.Parameter(torch.tensor(0.5))
    train(me, model, loss=lambda model, me, step: model.spread.exp() * squares(model, me, step))


@scenario(or_refused="is released")
def functional_call_with_the_parameters(me):
    def loss(model, me, step):
        return torch.func.functional_call(model, dict(model.named_parameters()), (me.x(step),)).square().mean()

    train(me, Chain(), loss=loss)


@scenario(or_refused="is released")
def functional_call_with_other_parameters(me):
    others = {name: torch.ones_like(param) for name, param in Chain().named_parameters()}

    def loss(model, me, step):
        with torch.no_grad():
            me.note(torch.func.functional_call(model, others, (me.x(step),)))
        return model(me.x(step)).square().mean()

    train(me, Chain(), loss=loss)


class Ensemble(nn.Module):
    """Three layers in one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)

    def forward(self, x):
        return torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weight).mean(0)


@scenario()
def stacked_layers_under_vmap(me):
    train(me, Chain(Ensemble))


def forces(grad):
    """A block adds the gradient of an energy, which has no parameters."""
    class Forced(Layer):
        def forward(self, x):
            return super().forward(x) + grad(lambda place: place.cos().sum(), x.detach())

    return lambda me: train(me, Chain(Forced))


def by_autograd(energy, x):
    with torch.enable_grad():
        return torch.autograd.grad(energy(x.requires_grad_()), x)[0]


scenario("forces by torch.func.grad", refused={"stage3": r"does not go with stage 3.*torch\.autograd\.grad"})(
    forces(lambda energy, x: torch.func.grad(energy)(x)))
scenario("forces by torch.autograd.grad")(forces(by_autograd))


@scenario(or_refused="parameter 'head.weight' is released.*torch.func")
def torch_func_of_a_parameter(me):
    def loss(model, me, step):
        me.note(torch.func.grad(lambda weight: (me.x(step, WIDTH) * weight).sin().sum())(model.head.weight))
        me.note(torch.vmap(torch.sin)(model.head.weight))
        return squares(model, me, step)

    train(me, Chain(), loss=loss)


# -------------------------------------------------------------------------------------------------------- recomputation


class Recomputing(Chain):
    def __init__(self, again, layer=Layer):
        super().__init__(layer)
        self.again = again

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.again(layer, x)
        return self.head(x)


def recomputing(again):
    return lambda me: train(me, Recomputing(again))


scenario("checkpointing")(recomputing(lambda layer, x: checkpoint(layer, x, use_reentrant=False)))
scenario("checkpointing, reentrant")(recomputing(lambda layer, x: checkpoint(layer, x, use_reentrant=True)))
scenario("checkpointing with ours")(recomputing(lambda layer, x: activation_partitioning.checkpoint(layer, x)))


@scenario("checkpointing, reentrant, a backward for each loss")
def reentrant_twice(me):
    class Recomputing(Chain):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return self.head(x), self.head(x.sin())  # so backward comes to the root a second time before the layers

    def one(zero, step):
        for number in (0, 1):
            y, other = zero.model(me.x(10 * number + step))
            (y.square().mean() + other.sin().mean()).backward(retain_graph=True)
            (y - other).square().mean().backward()

    train(me, Recomputing(), backward=one)


def selective(run, *given):
    saves = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(run, *given, use_reentrant=False, context_fn=saves)


scenario("checkpointing, selective", refused={"stage3": r"put the checkpoint inside the unit.*context_fn="})(
    recomputing(selective))


@scenario()
def checkpointing_inside_blocks_selective(me):
    class Inside(Layer):
        def forward(self, x):
            return selective(super().forward, x)

    train(me, Chain(Inside))


@scenario()
def checkpointing_inside_blocks(me):
    class Inside(Layer):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    train(me, Chain(Inside))


@scenario()
def checkpointing_with_dropout(me):
    class Dropping(Layer):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3)

    train(me, Recomputing(lambda layer, x: checkpoint(layer, x, use_reentrant=False), Dropping))


@scenario()
def activations_saved_on_the_host(me):
    def loss(model, me, step):
        with torch.autograd.graph.save_on_cpu():
            return model(me.x(step)).square().mean()

    train(me, Chain(), loss=loss)


@scenario()
def a_function_with_its_own_backward(me):
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return (x * weight).clamp(-1, 1)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Straight(Layer):
        def forward(self, x):
            return Clamp.apply(self.linear(x), self.gain)

    model = Chain(Straight)
    for layer in model.layers:
        del layer.norm
    train(me, model)


@scenario()
def a_function_that_keeps_a_view_and_a_sum_in_place(me):
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight.t()
            return x @ ctx.weight

        @staticmethod
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            return grad @ ctx.weight.t(), grad.t() @ x

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

        def forward(self, x):
            return Times.apply(x, self.weight).t()

    def loss(model, me, step):
        x = model.first(me.x(step, WIDTH, WIDTH))
        for layer in model.layers:
            y = layer(x)
            y += x
            x = y
        return model.head(x).square().mean()

    train(me, Chain(Turned), loss=loss)


@scenario()
def looking_for_anomalies(me):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            train(me)


# ---------------------------------------------------------------------------------------------------------------- hooks


@scenario()
def hooks_on_modules(me):
    model = Chain()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: me.note(module.linear.weight.sum()))
        layer.register_forward_hook(lambda module, inputs, output: output * module.gain.mean())
        layer.linear.register_full_backward_hook(lambda module, grads, outer: (grads[0] * 0.5,))
    train(me, model)


@scenario()
def hooks_on_modules_after_wrapping(me):
    model, zero = wrapped(me)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * module.gain.mean(),))
        layer.register_forward_hook(lambda module, inputs, output: output * module.gain.mean())
        layer.register_full_backward_hook(lambda module, grads, outer: me.note(module.linear.weight.sum()))
    go_on(me, zero, range(3))


@scenario(or_refused="is released")
def backward_pre_hooks_that_read_weights(me):
    model, zero = wrapped(me)
    for layer in model.layers:
        layer.register_full_backward_pre_hook(lambda module, outer: me.note(module.linear.weight.sum()))
    go_on(me, zero, range(3))


@scenario()
def hooks_on_parameters(me):
    """param.register_hook changes each rank's gradient, before they are averaged."""
    model = Chain()
    for layer in model.layers:
        layer.linear.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    train(me, model)


@scenario()
def hooks_on_parameters_after_wrapping(me):
    model, zero = wrapped(me)
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
    go_on(me, zero, range(3))


@scenario()
def hooks_on_activations(me):
    def loss(model, me, step):
        x = model.first(me.x(step))
        x.register_hook(lambda grad: grad * 0.5)
        x.retain_grad()
        return model.layers[0](x).square().mean()

    train(me, Chain(), loss=loss)


# ---------------------------------------------------------------------------------------------------------- copies, …


@scenario()
def a_teacher_copied_before(me):
    torch.manual_seed(3)
    model = Chain()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model, me, step):
        return F.mse_loss(model(me.x(step)), teacher(me.x(step)).detach() + 1)

    train(me, model, loss=loss)


@scenario()
def a_frozen_teacher_inside_the_model(me):
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Chain(count=2), Chain(count=2).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(self.student(x), target + 1)

    train(me, Distilled(), loss=lambda model, me, step: model(me.x(step)))


def following_teacher(follow):
    """MoCo: in forward a frozen encoder follows the one that is trained."""
    class Following(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Chain(count=2), Chain(count=2).requires_grad_(False)

        @torch.no_grad()
        def target(self, x):
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                follow(mine, other)
            return self.teacher(x)

        def forward(self, x):
            return F.mse_loss(self.student(x), self.target(x) + 1)

    return lambda me: train(me, Following(), units=[], loss=lambda model, me, step: model(me.x(step, of=0)))


def by_data(mine, other):
    mine.data = mine.data * 0.9 + other.data * 0.1


scenario("a teacher that follows by .data = in forward", naive=False,
         refused={"stage3": r"its new values would be lost.*param\.data\.copy_"})(following_teacher(by_data))
scenario("a teacher that follows in place in forward", naive=False)(
    following_teacher(lambda mine, other: mine.data.mul_(0.9).add_(other.data, alpha=0.1)))


def compiled(me, backend, count):
    model, zero = wrapped(me, Chain(count=count))
    run = torch.compile(model, backend=backend)
    go_on_compiled(me, zero, lambda step: run(me.x(step)).square().mean())


def go_on_compiled(me, zero, loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go_on(me, zero, range(3), backward=lambda zero, step: loss(step).backward())


scenario("compiled eagerly", worlds=(2,))(lambda me: compiled(me, "eager", 3))
scenario("compiled with aot eager", dtype=torch.float32, tolerance=1e-4, worlds=(3,))(
    lambda me: compiled(me, "aot_eager", 2))


@scenario(worlds=(2,))
def a_compiled_loss_that_is_given_a_weight(me):
    model, zero = wrapped(me, nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)))
    penalized = torch.compile(lambda y, weight: y.square().mean() + weight.abs().pow(3).sum(), backend="aot_eager")
    go_on_compiled(me, zero, lambda step: penalized(model(me.x(step)), model[1].weight))


@scenario(dtype=torch.float32, tolerance=2e-2)
def autocast_to_bf16(me):
    def loss(model, me, step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(me.x(step)).float().square().mean()

    train(me, Chain(), AdamW, loss=loss, lr=0.01)


@scenario(dtype=torch.float32, tolerance=2e-2)
def two_backwards_in_one_autocast(me):
    """Autocast keeps a weight's bf16 copy until the context ends."""
    def one(zero, step):
        with torch.autocast("cpu", torch.bfloat16):
            for number in range(2):
                zero.model(me.x(100 * number + step)).float().square().mean().backward()

    train(me, backward=one)


@scenario(dtype=torch.float32, tolerance=2e-2)
def evaluation_then_training_in_one_autocast(me):
    def one(zero, step):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                me.note(zero.model(me.x(100 + step)))
            loss = zero.model(me.x(step)).float().square().mean()
        loss.backward()

    train(me, backward=one)


@scenario(dtype=torch.float32, tolerance=2e-2, naive=False)
def steps_in_one_autocast(me):
    """The whole loop under autocast. Plain PyTorch, and naive.py, would go on with copies of the first weights."""
    def one(zero, step):
        if me.stage == "plain":
            torch.clear_autocast_cache()
        zero.model(me.x(step)).float().square().mean().backward()

    with torch.autocast("cpu", torch.bfloat16):
        train(me, backward=one)


@scenario(dtype=torch.float32, tolerance=2e-2)
def parts_without_gradients_then_with_them_in_one_autocast(me):
    def parts(model, x):
        for layer in model.layers:
            x = layer(x)
        return x

    def one(zero, step):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = parts(zero.model, me.x(100 + step))
            loss = (parts(zero.model, me.x(step)) - target).float().square().mean()
        loss.backward()

    train(me, backward=one)


class Nested(nn.Module):
    """A block with a checkpoint around what two layers of its own do, each a unit of stage 3."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Layer() for _ in range(2))
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def experts(self, x):
        return sum(layer(x).square() for layer in self.inner) * self.gain

    def forward(self, x):
        return x + checkpoint(self.experts, x, use_reentrant=False).tanh() * self.gain


@scenario()
def checkpoints_in_checkpoints_around_units_in_units(me):
    """Found by the fuzzer: a checkpoint counts what is saved, and some of it went past the outer one."""
    blocks = Chain(layer=Nested, count=2)
    train(me, blocks, loss=lambda model, me, step: checkpoint(model, me.x(step), use_reentrant=False).square().mean())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = Chain(layer=Nested, count=2)

    def forward(self, x):
        return checkpoint(self.chain, x, use_reentrant=False)


@scenario()
def checkpoints_in_a_checkpoint_inside_the_model(me):
    train(me, Checkpointed())
