"""Scenarios: optimizers, schedules, gradients that users look at and change, precision, uneven data."""

import contextlib
import warnings
from functools import partial

import torch
from house.scenarios.pieces import MOMENTUM, Chain, Writer, go_on, next_word, squares, train, wrapped
from house.scenarios.stand import scenario
from torch import nn, optim
from torch.optim import SGD, AdamW, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

# ----------------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS = {
    "SGD": (SGD, dict(lr=0.1)),
    "SGD, Nesterov": (SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "SGD, dampened, upward": (SGD, dict(lr=0.01, momentum=0.9, dampening=0.5, maximize=True)),
    "Adam with L2": (optim.Adam, dict(lr=0.01, weight_decay=0.1)),
    "Adam, amsgrad": (optim.Adam, dict(lr=0.01, amsgrad=True)),
    "AdamW": (AdamW, dict(lr=0.01)),
    "AdamW, fused": (AdamW, dict(lr=0.01, fused=True)),
    "AdamW, foreach": (AdamW, dict(lr=0.01, foreach=True)),
    "Adagrad": (optim.Adagrad, dict(lr=0.1, lr_decay=0.1)),
    "Adadelta": (optim.Adadelta, dict(lr=1.0)),
    "Adamax": (optim.Adamax, dict(lr=0.01)),
    "RMSprop": (optim.RMSprop, dict(lr=0.01, momentum=0.5, centered=True)),
    "Rprop": (optim.Rprop, dict(lr=0.01)),
    "NAdam": (optim.NAdam, dict(lr=0.01)),
    "RAdam": (optim.RAdam, dict(lr=0.01)),
    "ASGD": (optim.ASGD, dict(lr=0.1)),
}
for kind, (optimizer, options) in OPTIMIZERS.items():
    scenario(f"optimizer {kind}", worlds=(2, 3))(
        lambda me, optimizer=optimizer, options=options: train(me, Chain(), optimizer, steps=6, **options)
    )


class Late(SGD):
    """SGD that scales its update by the norm of what it updates, after ten steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    steps = self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                    if steps > 10:
                        param.grad.div_(param.grad.norm() + 1)
        return super().step(closure)


@scenario("optimizer of the user's own, not element-wise later", naive=False, refused="Late is not element-wise")
def _late(me):
    train(me, Chain(), Late, lr=0.1)


class Counts(SGD):
    """SGD that goes slower from its hundredth step on, which it counts itself."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 100:
            for group in self.param_groups:
                group["lr"] /= 10
        return super().step(closure)


class CountsInItsGroup(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class WarmsUp(SGD):
    """Which is another one on halves of a parameter from its first step on, and for that reason alone."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.steps
        return super().step(closure)


for kind in (Counts, CountsInItsGroup, WarmsUp):
    scenario(f"optimizer of the user's own, {kind.__name__}", naive=False, worlds=(2,),
             refused="keeps of its steps in '(steps|lr)'.*let it keep that in self.state")(
        lambda me, kind=kind: train(me, Chain(), kind, lr=0.1))


class DecaysMatrices(SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.ndim > 1:
                param.data.mul_(1 - 1e-5)
        return super().step(closure)


class Skips(optim.Adam):
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        return super().step(closure) if all(param.grad.isfinite().all() for param in params) else None


class GoesByNumber(SGD):
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] / (1 + number))


class CountsForAll(SGD):
    """Which acts on it later than any trial would see."""

    def step(self, closure=None):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return super().step(closure)


class OwnRates(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] * getattr(param, "lr_mult", 1))


class Asserts(SGD):
    def step(self, closure=None):
        assert all(param.ndim > 1 for param in self.param_groups[0]["params"])


for kind, words in ((DecaysMatrices, "a trial with gradients of zero"), (Skips, "skips no step.*infinite"),
                    (GoesByNumber, "number of its group"), (CountsForAll, r"keeps of its steps in self.state\['all'\]"),
                    (Asserts, "raised AssertionError")):
    scenario(f"optimizer of the user's own, {kind.__name__}", naive=False, worlds=(2,), refused=words)(
        lambda me, kind=kind: train(me, Chain(), kind, lr=0.1))


@scenario("optimizer that reads an attribute of a parameter", naive=False, refused="OwnRates reads 'lr_mult' of")
def _own_rates(me):
    model = Chain()
    next(model.parameters()).lr_mult = 0.1
    train(me, model, OwnRates, lr=0.1)


@scenario("optimizer that could read an attribute that no parameter has", naive=False)
def _no_own_rates(me):
    train(me, nn.Linear(7, 7), OwnRates, lr=0.1)


STATE = "zero.optimizer keeps state of shards"
for words, ask in {"read": lambda state, param: state[param], "forgotten": lambda state, param: state.pop(param, None),
                   "asked for": lambda state, param: param in state,
                   "set": lambda state, param: state.setdefault(param, {}),
                   "replaced": lambda state, param: state.__setitem__(param, {})}.items():

    @scenario(f"an optimizer's state of a parameter, {words}", naive=False, refused=STATE)
    def _state(me, ask=ask):
        model = Chain()
        zero = me.wrap(model, optim.Adam, lr=0.1)
        ask(zero.optimizer.state, next(model.parameters()))

    @scenario(f"an optimizer's state of a parameter, {words} after loading", naive=False, refused=STATE)
    def _loaded_state(me, ask=ask):
        model = Chain()
        zero = me.wrap(model, optim.Adam, lr=0.1)
        zero.load_state_dict(zero.state_dict())
        ask(zero.optimizer.state, next(model.parameters()))


@scenario("a step hook of all optimizers", naive=False, refused="global step hooks would run once for each bucket")
def _global_hook(me):
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        train(me, Chain(), SGD, lr=0.1)
    finally:
        handle.remove()


@scenario("optimizer with a learning rate in a tensor")
def _tensor_rate(me):
    train(me, Chain(), AdamW, lr=torch.tensor(0.01), foreach=False)


# --------------------------------------------------------------------------------------------------------------- groups


def matrices_and_others(model):
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim < 2]
    return [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0, lr=0.003)]


@scenario(naive=False)
def a_learning_rate_and_decay_a_group(me):
    model = Chain()
    train(me, model, AdamW, param_groups=matrices_and_others(model), lr=0.01)


@scenario(naive=False)
def groups_by_layer_with_names(me):
    model = Chain()
    groups = [dict(params=list(layer.named_parameters()), lr=0.1 * 0.5**number)
              for number, layer in enumerate(model.layers)]
    train(me, model, SGD, param_groups=groups, lr=0.1, momentum=0.9)


@scenario(naive=False)
def a_group_of_frozen_parameters(me):
    model = Chain()
    model.first.requires_grad_(False)
    groups = [dict(params=list(model.first.parameters()), lr=1.0), dict(params=list(model.head.parameters()))]
    train(me, model, param_groups=groups, lr=0.1)


@scenario(naive=False)
def tied_weights_across_groups(me):
    model = Writer(tied=True)
    layers = list(model.layers.parameters())
    groups = [dict(params=[model.embedding.weight], lr=0.01), dict(params=layers)]
    train(me, model, AdamW, param_groups=groups, loss=next_word, lr=0.02)


@scenario(naive=False, refused="a group cannot be added to zero.optimizer.*param_groups= when")
def a_group_added_later(me):
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1)
    zero.optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(3))]))


@scenario(naive=False, refused="zero.optimizer had 2 groups when the model was wrapped, and has 1")
def a_group_is_removed(me):
    model = Chain()
    first, *others = model.layers
    zero = me.wrap(model, SGD, lr=0.1, param_groups=[
        dict(params=[param for layer in others for param in layer.parameters()]), dict(params=[*first.parameters()])])
    zero.optimizer.param_groups.pop()
    go_on(me, zero, range(2))


class SeesItsFirstBatch(Chain):
    def forward(self, x):
        if not hasattr(self, "seen"):
            self.seen = True
            with torch.no_grad():
                next(self.parameters()).div_(x.std())
        return super().forward(x)


APART = dict(worlds=(2, 3, 4))
scenario("a layer that sets itself by its own first batch",
         refused="forward has changed parameters by what|parameters were edited", **APART)(
    lambda me: train(me, SeesItsFirstBatch()))


@scenario("a learning rate on one rank alone", refused="the learning rates differ", **APART)
def _rate_alone(me):
    def slow_down(zero, step):
        if me.rank == 0:
            zero.optimizer.param_groups[0]["lr"] *= 0.5

    train(me, after=slow_down)


@scenario("a learning rate of one rank's own, in one step", naive=False, refused="the learning rates differ", **APART)
def _rate_in_a_step(me):
    def slow_down(zero, step):
        if me.rank == 0 and step == 1:
            zero.optimizer.param_groups[0]["lr"] = 0.0

    def as_before(zero, step):
        zero.optimizer.param_groups[0]["lr"] = 0.1

    train(me, each=slow_down, after=as_before)


@scenario("a rate that changes, and a step without a backward on one rank", **APART,
          or_refused="not in the same collective")
def _rate_without_backward(me):
    def backward(zero, step):
        if step != 2 or me.rank:
            squares(zero.model, me, step).backward()

    def slow_down(zero, step):
        zero.optimizer.param_groups[0]["lr"] *= 0.5

    train(me, backward=backward, after=slow_down)


@scenario("a rate that changes after step(), when one rank reads the gradients once more")
def _read_after_step(me):
    model, zero = wrapped(me)
    for step in range(3):
        squares(model, me, step).backward()
        zero.step()
        zero.optimizer.param_groups[0]["lr"] *= 0.5
        if me.rank == 0 and me.stage != "plain":
            zero.reduced_gradients()
        zero.zero_grad()


@scenario("gradients by hand, without zero_grad()", refused=r"zero\.zero_grad\(\)|reduced_gradients")
def _by_hand_again(me):
    model, zero = wrapped(me)
    for step in range(3):
        for number, param in enumerate(model.parameters()):
            param.grad = me.x(10 * step + number, *param.shape)
        zero.step()


class Head(Chain):
    def parameters(self, recurse=True):
        return iter([*super().parameters(recurse)][-2:])


scenario("a model that lists its head's parameters alone", refused="lists 2 parameters, and named_parameters")(
    lambda me: train(me, Head()))


EDITED = "parameters were edited, or loaded, on some ranks only or not alike"


@scenario("parameters that torch's own optimizer trains beside the stage", naive=False, refused=EDITED, **APART)
def _trained_beside(me):
    model = Chain()
    first, *others = model.layers
    zero = me.wrap(model, SGD, lr=0.1, param_groups=[param for layer in others for param in layer.parameters()])
    beside = SGD(first.parameters(), lr=0.1)
    for step in range(3):
        squares(model, me, step).backward()
        beside.step()
        zero.step()
        beside.zero_grad()
        zero.zero_grad()


@scenario("clipped on one rank alone", refused=r"clip_grad_norm_\(\).*on all", **APART)
def _clipped_alone(me):
    def clip(zero, step):
        if me.rank == 0:
            zero.clip_grad_norm_(0.01)

    train(me, Chain(), each=clip)


@scenario("an edit after backward on one rank alone", refused=EDITED, **APART)
def _edited_alone(me):
    def edit(zero, step):
        if me.rank == 0:
            with torch.no_grad():
                [*zero.model.parameters()][-1].mul_(0.9)

    train(me, each=edit)


def freeze_or_unfreeze(me, before, after):
    model = Chain()
    model.layers[0].requires_grad_(before)
    zero = train(me, model, steps=2)
    model.layers[0].requires_grad_(after)
    go_on(me, zero, range(2, 4))


WRAP_ANEW = r"'layers.0.gain' was (un)?frozen after wrapping.*set requires_grad before, and build model and stage anew"
AT_STAGES = dict.fromkeys(("stage0", "stage1", "stage2", "stage3"), WRAP_ANEW)
scenario("unfreezing", refused=AT_STAGES)(lambda me: freeze_or_unfreeze(me, False, True))
scenario("freezing", refused=AT_STAGES, naive=False)(lambda me: freeze_or_unfreeze(me, True, False))


@scenario("unfreezing, and a new stage", naive=False, or_refused="belongs to a (Stage|Late). already")
def unfreezing_and_a_new_stage(me):
    """As the refusal says: model and stage are built anew, with the weights so far."""
    model = Chain()
    model.layers.requires_grad_(False)
    zero = train(me, model)
    with zero.gather_parameters():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    other = Chain()
    other.load_state_dict(weights)
    train(me, other)


# ------------------------------------------------------------------------------------------------------------ schedules


def scheduled(make):
    def play(me):
        _, zero = wrapped(me)
        schedule = make(zero.optimizer)

        def after(zero, step):
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(abs(step - 2))
            else:
                schedule.step()
            me.note(zero.optimizer.param_groups[0]["lr"])

        go_on(me, zero, range(6), after=after)

    return play


SCHEDULES = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.2, total_steps=7),  # changes momentum too
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.2, step_size_up=2),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.5)], [2]),
}
for kind, make in SCHEDULES.items():
    scenario(f"schedule {kind}", worlds=(2, 3))(scheduled(make))


@scenario()
def learning_rate_changed_by_hand(me):
    def each(zero, step):
        for group in zero.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.1 / (1 + step), 0.1 * step

    train(me, Chain(), each=each)


# -------------------------------------------------------------------------------------------------------- accumulation


def accumulating(local, clip=0.0):
    def backward(me, zero, step):
        for micro in range(3):
            with zero.no_sync() if local and micro < 2 else contextlib.nullcontext():
                squares(zero.model, me, 3 * step + micro).backward()
        if clip:
            me.note(zero.clip_grad_norm_(clip))

    return lambda me: train(me, steps=3, backward=partial(backward, me))


scenario("accumulation")(accumulating(False))
scenario("accumulation, no_sync")(accumulating(True))
scenario("accumulation, no_sync, clipped")(accumulating(True, 0.01))
scenario("accumulation, clipped")(accumulating(False, 0.01))


@scenario()
def the_last_batch_under_no_sync_too(me):
    """step() reduces what nobody has."""
    def backward(zero, step):
        with zero.no_sync():
            squares(zero.model, me, step).backward()

    train(me, steps=3, backward=backward)


@scenario(or_refused=r"not in the same collective.*with no_sync\(\) around the same ones", worlds=(2, 3, 4))
def no_sync_on_one_rank_alone(me):
    """Where no_sync() is nothing to do, as in the naive way and at stage 3, it is right."""
    def backward(zero, step):
        for micro in range(2):
            with zero.no_sync() if me.rank == 0 and micro == 0 else contextlib.nullcontext():
                squares(zero.model, me, 2 * step + micro).backward()

    train(me, steps=3, backward=backward)


@scenario("batches that do not come out even, stopped together")
def uneven_together(me):
    _, zero = wrapped(me)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that some are unread
        go_on(me, zero, me.together(range(3 + me.rank)))


# ---------------------------------------------------------------------------------------- gradients in the user's hands


@scenario()
def clipped(me):
    train(me, Chain(), each=lambda zero, step: me.note(zero.clip_grad_norm_(0.1)))


@scenario()
def clipped_twice(me):
    def each(zero, step):
        me.note(zero.clip_grad_norm_(0.1))
        me.note(zero.clip_grad_norm_(0.05))

    train(me, Chain(), each=each)


@scenario()
def a_norm_and_no_clipping(me):
    train(me, Chain(), each=lambda zero, step: me.note(zero.clip_grad_norm_(float("inf"))))


@scenario("clipped, with tied and frozen weights")
def clipped_tied_frozen(me):
    model = Writer(tied=True, count=3)
    model.layers[1].requires_grad_(False)
    train(me, model, loss=next_word, each=lambda zero, step: me.note(zero.clip_grad_norm_(0.1)))


def with_gradients(me, change):
    """Train, and do something with the gradients between backward and step."""
    train(me, steps=3, backward=lambda zero, step: me.backward(squares(zero.model, me, step)), each=change)


OURS = r"zero\.clip_grad_norm_|zero\.zero_grad|reduced_gradients|zero\.step"  # the line to write instead


@scenario("torch's clip_grad_norm_", or_refused=OURS)
def torchs_clip(me):
    with_gradients(me, lambda zero, step: me.note(nn.utils.clip_grad_norm_(zero.model.parameters(), 0.1)))


@scenario("the norm of .grad, for a log", or_refused=OURS, naive=False)
def grad_norm_by_hand(me):
    def look(zero, step):
        grads = [param.grad for param in zero.model.parameters() if param.grad is not None]
        me.note(len(grads), sum(grad.square().sum() for grad in grads) ** 0.5)

    with_gradients(me, look)


@scenario("the norm of reduced_gradients()", naive=False)
def reduced_norm(me):
    """What our messages say to read instead. A rank of stages 1 to 3 has its shards alone."""
    def look(zero, step):
        square = sum(grad.square().sum() for grad in zero.reduced_gradients())
        me.note(over_shards(me, square) ** 0.5)

    with_gradients(me, look)


def over_shards(me, number):
    if me.stage in ("stage1", "stage2", "stage3", "late1", "late2"):
        torch.distributed.all_reduce(number, group=me.group)
    return number


def keeping(gradients):
    """The gradients of the last step are kept, without a clone()."""
    def play(me):
        kept = []

        def compare(zero, step):
            now = gradients(zero)
            if kept:
                me.note(over_shards(me, sum((a * b).sum() for a, b in zip(kept, now, strict=True))))
            kept[:] = now

        with_gradients(me, compare)

    return play


scenario(".grad kept from the last step", or_refused=OURS, naive=False)(
    keeping(lambda zero: [param.grad for param in zero.model.parameters()]))
scenario("views of .grad kept from the last step", or_refused=OURS, naive=False)(
    keeping(lambda zero: [param.grad.detach().flatten() for param in zero.model.parameters()]))
scenario("reduced_gradients() kept from the last step", naive=False)(keeping(lambda zero: zero.reduced_gradients()))


@scenario(".grad assigned by hand", or_refused=OURS)
def grad_assigned(me):
    def ones(zero, step):
        for param in zero.model.parameters():
            param.grad = torch.ones(param.shape)

    with_gradients(me, ones)


@scenario(".grad of some parameters dropped", or_refused=OURS)
def grad_dropped(me):
    """Freezing by hand, as many do: the gradient is zero then, and momentum moves on."""
    def drop(zero, step):
        zero.model.layers[0].linear.weight.grad = None

    with_gradients(me, drop)


@scenario("sparse gradients", or_refused=r"sparse=False|\.sparse")
def sparse_gradients(me):
    model = nn.Sequential(nn.Embedding(11, 7, sparse=True), Chain())
    zero = me.wrap(model, SGD, lr=0.1)
    for step in range(3):
        me.backward(model(me.words(step)).square().mean())
        zero.step()
        zero.zero_grad()


@scenario("noise added to .grad", or_refused=OURS)
def grad_noise(me):
    def noise(zero, step):
        for number, param in enumerate(zero.model.parameters()):
            if param.grad is not None:
                param.grad += 0.01 * me.x(100 * step + number, *param.shape, of=0)

    with_gradients(me, noise)


def drop_a_batch(how):
    def backward(me, zero, step):
        with zero.no_sync():
            squares(zero.model, me, 200 + step).backward()
        squares(zero.model, me, step).backward()
        if step == 1:  # these two are not wanted
            how(zero)
            squares(zero.model, me, 100 + step).backward()

    return lambda me: train(me, backward=partial(backward, me))


DROP = {
    "zero.zero_grad()": lambda zero: zero.zero_grad(),
    "model.zero_grad()": lambda zero: zero.model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda zero: zero.model.zero_grad(set_to_none=False),
    "zero.optimizer.zero_grad()": lambda zero: zero.optimizer.zero_grad(),
    "zero.optimizer.zero_grad(set_to_none=False)": lambda zero: zero.optimizer.zero_grad(set_to_none=False),
    "param.grad = None": lambda zero: [setattr(param, "grad", None) for param in zero.model.parameters()],
}
for words, how in DROP.items():
    scenario(f"a batch dropped with {words}", or_refused=OURS)(drop_a_batch(how))


def zero_between_steps(how):
    def play(me):
        model, zero = wrapped(me)
        for step in range(4):
            how(zero)
            loss = squares(model, me, step)
            loss.backward()
            zero.step()
            me.note(loss)

    return play


for words, how in DROP.items():
    scenario(f"{words} before each forward", or_refused=OURS)(zero_between_steps(how))


@scenario()
def zero_grad_between_forward_and_backward(me):
    model, zero = wrapped(me)
    for step in range(3):
        loss = squares(model, me, step)
        zero.zero_grad()
        loss.backward()
        zero.step()


@scenario(or_refused=r"call zero\.zero_grad\(\)")
def zero_grad_forgotten(me):
    model, zero = wrapped(me)
    for step in range(3):
        squares(model, me, step).backward()
        zero.step()


@scenario(or_refused=r"call zero\.step\(\)", learns=False)
def step_of_the_optimizer_itself(me):
    model, zero = wrapped(me)
    for step in range(3):
        me.backward(squares(model, me, step))
        zero.optimizer.step()
        zero.zero_grad()


@scenario(or_refused=r"zero\.step\(\)|call it once|zero_grad")
def two_steps_after_one_backward(me):
    train(me, each=lambda zero, step: zero.step())


@scenario()
def a_step_without_a_backward(me):
    """Gradients count as zero: momentum and decay move on, as README and docstrings say."""
    def backward(zero, step):
        if step != 2:
            squares(zero.model, me, step).backward()

    train(me, backward=backward)


@scenario()
def a_step_that_is_not_finite_is_skipped(me):
    """On one rank a loss is NaN; all see it in the norm."""
    model, zero = wrapped(me)
    for step in range(4):
        loss = squares(model, me, step)
        if step == 1 and me.rank == me.size - 1:
            loss = loss * float("nan")
        loss.backward()
        norm = zero.clip_grad_norm_(1.0)
        if norm.isfinite():
            zero.step()
        zero.zero_grad()


def with_a_term(model, me, step):
    """L2 by hand, over all parameters."""
    return squares(model, me, step) + 0.01 * sum(param.square().sum() for param in model.parameters())


scenario("a term for the weights in the loss", refused={"stage3": "is released.*units="})(
    lambda me: train(me, loss=with_a_term))
scenario("a term for the weights in the loss, and the model one unit")(
    lambda me: train(me, loss=with_a_term, units=[]))


# ------------------------------------------------------------------------------------------------------------ precision


def in_16_bit(dtype, scale=0.0, clip=0.0, spoil=None):
    def play(me):
        model = Writer().to(dtype)
        zero = me.wrap(model, AdamW, lr=0.01)
        scaler = me.scaler(scale, growth_interval=2) if scale else None
        for step in range(5):
            loss = next_word(lambda words: model(words).float(), me, step)
            if spoil and spoil(me, step):
                loss = loss * float("inf")
            (scaler.scale(loss) if scaler else loss).backward()
            if clip and scaler:
                scaler.unscale_(zero)
            if clip:
                me.note(zero.clip_grad_norm_(clip))
            if scaler:
                me.note(scaler.step(zero))
                scaler.update()
            else:
                zero.step()
            zero.zero_grad()
            me.note(loss)

    return play


LOW = dict(dtype=torch.float32, naive=False)
scenario("bf16", **LOW, tolerance=2e-2)(in_16_bit(torch.bfloat16))
scenario("bf16, clipped", **LOW, tolerance=2e-2)(in_16_bit(torch.bfloat16, clip=0.1))
scenario("fp16 with a loss scale", **LOW, tolerance=4e-3)(in_16_bit(torch.float16, 256.0))
scenario("fp16 with a loss scale, clipped", **LOW, tolerance=4e-3)(in_16_bit(torch.float16, 256.0, 0.1))
scenario("fp16, a rank overflows", **LOW, tolerance=4e-3)(
    in_16_bit(torch.float16, 256.0, spoil=lambda me, step: step == 1 and me.rank == me.size - 1))
scenario("fp16, overflow and clipping", **LOW, tolerance=4e-3)(
    in_16_bit(torch.float16, 2.0**19, 0.1))
scenario("fp32", dtype=torch.float32, tolerance=1e-5)(lambda me: train(me, Chain(), AdamW, lr=0.01))
scenario("16 bit without masters", dtype=torch.bfloat16, refused={"naive": "use Stage0"}, tolerance=4e-2)(
    lambda me: train(me, Chain(), AdamW, lr=0.01))


@scenario("torch's own GradScaler", dtype=torch.float32, tolerance=1e-5, or_refused="LossScaler")
def torchs_scaler(me):
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        me.backward(scaler.scale(squares(model, me, step)))
        scaler.step(zero.optimizer)
        scaler.update()
        zero.zero_grad()


@scenario("torch's own GradScaler, given the stage", naive=False, refused="take loss_scaler.LossScaler")
def torchs_scaler_of_the_stage(me):
    model, zero = wrapped(me)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(squares(model, me, 0)).backward()
    scaler.step(zero)


# ------------------------------------------------------------------------------------------------------- several models


@scenario()
def two_models_in_turn(me):
    """A generator against a discriminator that is frozen in turn, and drops its gradients late."""
    maker, judge = Chain(), nn.Sequential(nn.Linear(3, 7), Chain(count=2))
    zero_maker, zero_judge = me.wrap(maker, SGD, **MOMENTUM), me.wrap(judge, SGD, **MOMENTUM)
    for step in range(3):
        (judge(maker(me.x(step)).detach()).square().mean() - judge(me.x(step, 5, 3)).mean()).backward()
        zero_judge.step()
        judge.requires_grad_(False)
        judge(maker(me.x(100 + step))).square().mean().backward()
        zero_maker.step()
        zero_maker.zero_grad()
        zero_judge.zero_grad()
        judge.requires_grad_(True)


@scenario(or_refused="requires_grad|zero_grad|another (stage|model)")
def two_models_and_nobody_is_frozen(me):
    """The judge's gradients of the maker's backward are thrown away."""
    maker, judge = Chain(), nn.Sequential(nn.Linear(3, 7), Chain(count=2))
    zero_maker, zero_judge = me.wrap(maker, SGD, **MOMENTUM), me.wrap(judge, SGD, **MOMENTUM)
    for step in range(3):
        zero_judge.zero_grad()
        (judge(maker(me.x(step)).detach()).square().mean() - judge(me.x(step, 5, 3)).mean()).backward()
        zero_judge.step()
        zero_maker.zero_grad()
        judge.zero_grad()
        zero_judge.zero_grad()
        judge(maker(me.x(100 + step))).square().mean().backward()
        zero_maker.step()


@scenario()
def two_models_with_one_loss(me):
    """An encoder and a decoder, each with an optimizer of its own."""
    one, two = Chain(head=7), Chain()
    zeros = [me.wrap(one, SGD, **MOMENTUM), me.wrap(two, AdamW, lr=0.01)]
    for step in range(3):
        two(one(me.x(step))).square().mean().backward()
        for zero in zeros:
            zero.step()
            zero.zero_grad()


# on more ranks those that agree learn of the error by the end of the process that had it, and on the stand none ends
# (tests/house/test_graphs.py plays it on 3, with processes that end)
@scenario(or_refused="not in the same collective|finish|another (stage|model)", worlds=(2,))
def two_models_with_one_loss_of_which_a_rank_uses_one(me):
    one, two = Chain(head=7), Chain()
    zeros = [me.wrap(one, SGD, **MOMENTUM), me.wrap(two, SGD, **MOMENTUM)]
    for step in range(3):
        y = one(me.x(step))
        z = two(me.x(100 + step))
        (z.square().mean() + (y.square().mean() if me.rank else 0.0)).backward()
        for zero in zeros:
            zero.step()
            zero.zero_grad()


@scenario(naive=False, refused="belongs to a (Stage|Late). already: wrap it once")
def wrapped_twice(me):
    model = Chain()
    me.wrap(model, SGD, lr=0.1)
    me.wrap(model, SGD, lr=0.1)


@scenario(naive=False, refused="belongs to a (Stage|Late). already")
def a_part_of_a_model_wrapped_too(me):
    model = Chain()
    me.wrap(model.layers[0], SGD, lr=0.1)
    me.wrap(model, SGD, lr=0.1)


# ---------------------------------------------------------------------------------------------- graphs that live longer


@scenario(refused="has been modified by an inplace operation")
def a_graph_kept_across_a_step(me):
    """Plain PyTorch refuses it where the update changed, in place, what backward needs."""
    model, zero = wrapped(me)
    loss = squares(model, me, 0)
    loss.backward(retain_graph=True)
    zero.step()
    zero.zero_grad()
    loss.backward()
    zero.step()


@scenario(refused="has been modified by an inplace operation")
def a_forward_before_the_step_and_its_backward_after(me):
    """Pipelining by hand: the next batch's forward runs before this batch's update."""
    model, zero = wrapped(me)
    loss = squares(model, me, 0)
    for step in range(1, 3):
        following = squares(model, me, step)
        loss.backward()
        zero.step()
        zero.zero_grad()
        loss = following
    loss.backward()
    zero.step()


# ------------------------------------------------------------------------------------------------- two ranks apart


@scenario(refused="not in the same collective", worlds=(2, 3, 4), naive=False)
def one_rank_takes_a_batch_more(me):
    def backward(zero, step):
        for micro in range(2 if me.rank == 0 else 1):
            squares(zero.model, me, 2 * step + micro).backward()

    train(me, steps=3, backward=backward)


# -------------------------------------------------------------- parameters that change hands after wrapping, and hooks


def hooked(model, hook):
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    return model


def go_on_with_a_hook(me, hook):
    model, zero = wrapped(me)
    hooked(model, hook)
    go_on(me, zero, range(3))


def scale_gradient(param):
    param.grad.mul_(0.1)


scenario("a hook after accumulation from before wrapping", naive=False)(
    lambda me: train(me, hooked(Chain(), scale_gradient)))
scenario("a hook after accumulation from after wrapping", naive=False)(
    lambda me: go_on_with_a_hook(me, scale_gradient))


CHANGES = {"reads": lambda grad: grad, "changes": lambda grad: grad.mul_(0.5),
           "changes .data of": lambda grad: (grad.data.mul_(0.5), grad)[1], "replaces": lambda grad: grad / 2,
           "clamps": lambda grad: grad.clamp_(-9, 9)}


def two_passes_with_a_hook(me, change):
    def hook(param):
        param.grad = change(param.grad)

    def backward(zero, step):
        for half in range(2):
            squares(zero.model, me, 2 * step + half).backward()

    train(me, hooked(Chain(), hook), steps=2, backward=backward)


ONCE = r"does not find the sum of both passes.*backward\(\) once.*param\.register_hook"
for what, change in CHANGES.items():
    scenario(f"a hook after accumulation that {what} .grad, in two passes", naive=False, worlds=(2, 3),
             refused=None if what == "reads" else dict.fromkeys(("stage1", "stage2", "stage3"), ONCE))(
        lambda me, change=change: two_passes_with_a_hook(me, change))
scenario("a hook after accumulation that returns something", naive=False, learns=False,
         refused=r"hook .* of parameter .* returned something, and must return None")(
    lambda me: go_on_with_a_hook(me, lambda param: param.grad.mul_(0.5)))
scenario("a hook after accumulation that takes .grad away", naive=False, learns=False,
         refused=r"has set \.grad of parameter .* to None.*zero\.step\(\) updates after backward")(
    lambda me: two_passes_with_a_hook(me, lambda grad: None))


def changed_after_wrapping(me, change):
    model, zero = wrapped(me)
    change(model.layers)
    go_on(me, zero, range(2))


GONE = "is in the model no more: its module was removed after wrapping, or another parameter stands in its place"
scenario("tied after wrapping", naive=False, refused=GONE + "|If a module uses a parameter of another one")(
    lambda me: changed_after_wrapping(
        me, lambda layers: setattr(layers[2].linear, "weight", layers[1].linear.weight)))
scenario("a block removed after wrapping", naive=False, refused=GONE)(
    lambda me: changed_after_wrapping(me, lambda layers: layers.pop(1)))
scenario("a block added after wrapping", naive=False,
         refused="was added, moved or replaced after wrapping|of another|a block")(
    lambda me: changed_after_wrapping(me, lambda layers: layers.append(type(layers[0])())))


@scenario(naive=False)
def a_vector_of_all_parameters_put_back(me):
    zero = train(me)
    with zero.gather_parameters(), torch.no_grad():
        vector = nn.utils.parameters_to_vector(zero.model.parameters())
        nn.utils.vector_to_parameters(0.5 * vector, zero.model.parameters())
    go_on(me, zero, range(3, 6))


@scenario(naive=False, refused="parameter '0.* belongs to a (Stage|Late). already, with another model, a Chain")
def a_body_with_two_heads_in_two_models(me):
    body = Chain()
    me.wrap(body, SGD, lr=0.1)
    me.wrap(nn.Sequential(body, nn.Linear(7, 1)), SGD, lr=0.1)
