"""Scenarios: optimizers, schedules, gradients that users look at and change, precision, uneven data."""

import warnings

import torch
from house.scenarios.pieces import MOMENTUM, Chain, Writer, next_word, squares, train
from house.scenarios.stand import scenario
from torch import nn, optim
from torch.optim import SGD, AdamW, lr_scheduler

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

NOT_ELEMENT_WISE = {
    "LBFGS": (optim.LBFGS, dict(lr=0.1)),
    "Adafactor": (optim.Adafactor, dict(lr=0.1)),
    "Muon": (getattr(optim, "Muon", optim.Adafactor), dict(lr=0.1)),
    "SparseAdam": (optim.SparseAdam, dict(lr=0.1)),
}
for kind, (optimizer, options) in NOT_ELEMENT_WISE.items():
    scenario(f"optimizer {kind}", naive=False, worlds=(2,), refused="not element-wise.*use AdamW, Adam, SGD")(
        lambda me, optimizer=optimizer, options=options: train(me, Chain(), optimizer, **options)
    )


class Late(SGD):
    """SGD that scales its update by the norm of what it updates, from the fourth step on."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    steps = self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
                    if steps > 3:
                        param.grad.div_(param.grad.norm() + 1)
        return super().step(closure)


@scenario("optimizer of the user's own, not element-wise later", naive=False, refused="element-wise")
def _late(me):
    train(me, Chain(), Late, steps=6, lr=0.1)


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
    train(me, model, AdamW, groups=matrices_and_others(model), lr=0.01)


@scenario(naive=False)
def groups_by_layer_with_names(me):
    model = Chain()
    groups = [dict(params=list(layer.named_parameters()), lr=0.1 * 0.5**number)
              for number, layer in enumerate(model.layers)]
    train(me, model, SGD, groups=groups, lr=0.1, momentum=0.9)


@scenario(naive=False)
def a_group_of_frozen_parameters(me):
    model = Chain()
    model.first.requires_grad_(False)
    groups = [dict(params=list(model.first.parameters()), lr=1.0), dict(params=list(model.head.parameters()))]
    train(me, model, groups=groups, lr=0.1)


@scenario(naive=False)
def tied_weights_across_groups(me):
    model = Writer(tied=True)
    layers = list(model.layers.parameters())
    groups = [dict(params=[model.embedding.weight], lr=0.01), dict(params=layers)]
    train(me, model, AdamW, groups=groups, loss=next_word, lr=0.02)


@scenario(naive=False, refused="name all groups in param_groups= when you wrap")
def a_group_added_later(me):
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1)
    zero.optimizer.add_param_group(dict(params=[nn.Parameter(torch.ones(3))]))


def freeze_or_unfreeze(me, before, after):
    model = Chain()
    model.layers[0].requires_grad_(before)
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(4):
        if step == 2:
            model.layers[0].requires_grad_(after)
        model(me.x(step)).square().mean().backward()
        zero.step()
        zero.zero_grad()


WRAP_ANEW = r"'layers.0.gain' was (un)?frozen after wrapping.*set requires_grad before, and build model and stage anew"
scenario("unfreezing", or_refused=WRAP_ANEW)(lambda me: freeze_or_unfreeze(me, False, True))
scenario("freezing", or_refused=WRAP_ANEW, naive=False)(
    lambda me: freeze_or_unfreeze(me, True, False))


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


def scheduled(make, **options):
    def play(me):
        model = Chain()
        zero = me.wrap(model, SGD, **(options or MOMENTUM))
        schedule = make(zero.optimizer)
        for step in range(6):
            loss = squares(model, me, step)
            loss.backward()
            zero.step()
            zero.zero_grad()
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(abs(step - 2))
            else:
                schedule.step()
            me.note(loss, zero.optimizer.param_groups[0]["lr"])

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
    def play(me):
        model = Chain()
        zero = me.wrap(model, SGD, **MOMENTUM)
        for step in range(3):
            for micro in range(3):
                if local and micro < 2:
                    with zero.no_sync():
                        squares(model, me, 3 * step + micro).backward()
                else:
                    squares(model, me, 3 * step + micro).backward()
            if clip:
                me.note(zero.clip_grad_norm_(clip))
            zero.step()
            zero.zero_grad()

    return play


scenario("accumulation")(accumulating(False))
scenario("accumulation, no_sync")(accumulating(True))
scenario("accumulation, no_sync, clipped")(accumulating(True, 0.01))
scenario("accumulation, clipped")(accumulating(False, 0.01))


@scenario()
def the_last_batch_under_no_sync_too(me):
    """step() reduces what nobody has."""
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(3):
        with zero.no_sync():
            squares(model, me, step).backward()
        zero.step()
        zero.zero_grad()


@scenario(or_refused=r"not in the same collective.*with no_sync\(\) around the same ones", worlds=(2, 3, 4))
def no_sync_on_one_rank_alone(me):
    """Where no_sync() is nothing to do, as in the naive way and at stage 3, it is right."""
    import contextlib

    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(3):
        for micro in range(2):
            with zero.no_sync() if me.rank == 0 and micro == 0 else contextlib.nullcontext():
                squares(model, me, 2 * step + micro).backward()
        zero.step()
        zero.zero_grad()


@scenario("batches that do not come out even, stopped together")
def uneven_together(me):
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that some are unread
        for step in me.together(range(3 + me.rank)):
            loss = squares(model, me, step)
            loss.backward()
            zero.step()
            zero.zero_grad()
            me.note(loss)


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


def with_gradients(me, change, steps=3, before=None):
    """Train, and do something with the gradients between backward and step."""
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(steps):
        if before:
            before(zero)
        me.backward(squares(model, me, step))
        change(zero, step)
        zero.step()
        zero.zero_grad()


OURS = r"zero\.clip_grad_norm_|zero\.zero_grad|reduced_gradients|zero\.step"  # the line to write instead


# naive.py's .grad is this rank's own until step() or clip_grad_norm_() averages it, as it says: it is not asked here


@scenario("torch's clip_grad_norm_", or_refused=OURS, naive=False)
def torchs_clip(me):
    with_gradients(me, lambda zero, step: me.note(nn.utils.clip_grad_norm_(zero.model.parameters(), 0.1)))


@scenario("torch's clip_grad_value_", or_refused=OURS, naive=False)
def torchs_clip_value(me):
    with_gradients(me, lambda zero, step: nn.utils.clip_grad_value_(zero.model.parameters(), 0.01))


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
        if me.stage in ("stage1", "stage2", "stage3", "late1", "late2"):
            torch.distributed.all_reduce(square, group=me.group)
        me.note(square**0.5)

    with_gradients(me, look)


@scenario(".grad scaled by hand", or_refused=OURS, naive=False)
def grad_scaled(me):
    def halve(zero, step):
        for param in zero.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    with_gradients(me, halve)


@scenario(".grad assigned by hand", or_refused=OURS, naive=False)
def grad_assigned(me):
    def ones(zero, step):
        for param in zero.model.parameters():
            param.grad = torch.ones(param.shape)

    with_gradients(me, ones)


@scenario(".grad of some parameters dropped", or_refused=OURS, naive=False)
def grad_dropped(me):
    """Freezing by hand, as many do: the gradient is zero then, and momentum moves on."""
    def drop(zero, step):
        zero.model.layers[0].linear.weight.grad = None

    with_gradients(me, drop)


@scenario("noise added to .grad", or_refused=OURS, naive=False)
def grad_noise(me):
    def noise(zero, step):
        for number, param in enumerate(zero.model.parameters()):
            if param.grad is not None:
                param.grad += 0.01 * me.x(100 * step + number, *param.shape, of=0)

    with_gradients(me, noise)


def drop_a_batch(how):
    def play(me):
        model = Chain()
        zero = me.wrap(model, SGD, **MOMENTUM)
        for step in range(4):
            squares(model, me, step).backward()
            if step == 1:  # this one is not wanted
                how(zero)
                squares(model, me, 100 + step).backward()
            zero.step()
            zero.zero_grad()

    return play


DROP = {
    "zero.zero_grad()": lambda zero: zero.zero_grad(),
    "model.zero_grad()": lambda zero: zero.model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda zero: zero.model.zero_grad(set_to_none=False),
    "zero.optimizer.zero_grad()": lambda zero: zero.optimizer.zero_grad(),
    "zero.optimizer.zero_grad(set_to_none=False)": lambda zero: zero.optimizer.zero_grad(set_to_none=False),
}
for words, how in DROP.items():
    scenario(f"a batch dropped with {words}", or_refused=OURS)(drop_a_batch(how))


def zero_between_steps(how):
    def play(me):
        model = Chain()
        zero = me.wrap(model, SGD, **MOMENTUM)
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
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(3):
        loss = squares(model, me, step)
        zero.zero_grad()
        loss.backward()
        zero.step()


@scenario(or_refused=r"call zero\.zero_grad\(\)")
def zero_grad_forgotten(me):
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(3):
        squares(model, me, step).backward()
        zero.step()


@scenario(or_refused=r"call zero\.step\(\)", naive=False, learns=False)
def step_of_the_optimizer_itself(me):
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(3):
        me.backward(squares(model, me, step))
        zero.optimizer.step()
        zero.zero_grad()


@scenario(or_refused=r"zero\.step\(\)|call it once|zero_grad")
def two_steps_after_one_backward(me):
    def each(zero, step):
        zero.step()

    train(me, Chain(), each=each)


@scenario()
def a_step_without_a_backward(me):
    """Gradients count as zero: momentum and decay move on, as README and docstrings say."""
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(4):
        if step != 2:
            squares(model, me, step).backward()
        zero.step()
        zero.zero_grad()


@scenario()
def a_step_that_is_not_finite_is_skipped(me):
    """On one rank a loss is NaN; all see it in the norm."""
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(4):
        loss = squares(model, me, step)
        if step == 1 and me.rank == me.size - 1:
            loss = loss * float("nan")
        loss.backward()
        norm = zero.clip_grad_norm_(1.0)
        if norm.isfinite():
            zero.step()
        zero.zero_grad()


@scenario(refused={"stage3": "is released.*units="})
def a_term_for_the_weights_in_the_loss(me):
    """L2 by hand, over all parameters."""
    def loss(model, me, step):
        return squares(model, me, step) + 0.01 * sum(param.square().sum() for param in model.parameters())

    train(me, Chain(), loss=loss)


@scenario("a term for the weights in the loss, and the model one unit")
def a_term_one_unit(me):
    def loss(model, me, step):
        return squares(model, me, step) + 0.01 * sum(param.square().sum() for param in model.parameters())

    train(me, Chain(), loss=loss, units=[])


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


@scenario("torch's own GradScaler", naive=False, dtype=torch.float32, tolerance=1e-5, or_refused="LossScaler")
def torchs_scaler(me):
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(3):
        me.backward(scaler.scale(squares(model, me, step)))
        scaler.step(zero.optimizer)
        scaler.update()
        zero.zero_grad()


# ------------------------------------------------------------------------------------------------------- several models


@scenario()
def two_models_in_turn(me):
    """A generator against a discriminator that is frozen in turn."""
    maker, judge = Chain(), nn.Sequential(nn.Linear(3, 7), Chain(count=2))
    zero_maker, zero_judge = me.wrap(maker, SGD, **MOMENTUM), me.wrap(judge, SGD, **MOMENTUM)
    for step in range(3):
        (judge(maker(me.x(step)).detach()).square().mean() - judge(me.x(step, 5, 3)).mean()).backward()
        zero_judge.step()
        zero_judge.zero_grad()
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


@scenario(refused="modified by an inplace operation|a backward|zero_grad|step")
def a_graph_kept_across_a_step(me):
    """Plain PyTorch refuses it where the update changed, in place, what backward needs."""
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    loss = squares(model, me, 0)
    loss.backward(retain_graph=True)
    zero.step()
    zero.zero_grad()
    loss.backward()
    zero.step()


@scenario(refused="modified by an inplace operation|a backward|zero_grad|step")
def a_forward_before_the_step_and_its_backward_after(me):
    """Pipelining by hand: the next batch's forward runs before this batch's update."""
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
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


@scenario(refused={"stage0": "not in the same collective", "stage1": "not in the same collective",
                   "stage2": "not in the same collective", "stage3": "not in the same collective"},
          worlds=(2, 3, 4), naive=False)
def one_rank_takes_a_batch_more(me):
    model = Chain()
    zero = me.wrap(model, SGD, **MOMENTUM)
    for step in range(3):
        for micro in range(2 if me.rank == 0 else 1):
            squares(model, me, 2 * step + micro).backward()
        zero.step()
        zero.zero_grad()


# -------------------------------------------------------------- parameters that change hands after wrapping, and hooks


def go_on(zero, model, me, steps):
    """The usual loop, with a stage that is there already."""
    for step in steps:
        squares(model, me, step).backward()
        zero.step()
        zero.zero_grad()


def scaled_by_a_hook(me, before: bool):
    model = Chain()

    def hook(param):
        param.grad.mul_(0.1)

    def register():
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)

    if before:
        register()
    zero = me.wrap(model, SGD, lr=0.1)
    if not before:
        register()
    go_on(zero, model, me, range(3))


scenario("a hook after accumulation from before wrapping", naive=False)(lambda me: scaled_by_a_hook(me, True))
scenario("a hook after accumulation from after wrapping", naive=False)(lambda me: scaled_by_a_hook(me, False))


def go_on_with_a_hook(me, hook):
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    go_on(zero, model, me, range(2))


CHANGES = {"reads": lambda grad: grad, "changes": lambda grad: grad.mul_(0.5),
           "changes .data of": lambda grad: (grad.data.mul_(0.5), grad)[1], "replaces": lambda grad: grad / 2}


def two_passes_with_a_hook(me, change):
    model = Chain()

    def hook(param):
        param.grad = change(param.grad)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    zero = me.wrap(model, SGD, lr=0.1)
    for step in range(2):
        for half in range(2):
            squares(model, me, 2 * step + half).backward()
        zero.step()
        zero.zero_grad()


ONCE = r"finds the gradient of that pass alone.*backward\(\) once.*param\.register_hook"
for what, change in CHANGES.items():
    scenario(f"a hook after accumulation that {what} .grad, in two passes", naive=False, worlds=(2, 3),
             refused=None if what == "reads" else dict.fromkeys(("stage2", "stage3"), ONCE))(
        lambda me, change=change: two_passes_with_a_hook(me, change))
scenario("a hook after accumulation that returns something", naive=False, learns=False,
         refused=r"hook .* of parameter .* returned something, and must return None")(
    lambda me: go_on_with_a_hook(me, lambda param: param.grad.mul_(0.5)))
scenario("a hook after accumulation that takes .grad away", naive=False, learns=False,
         refused=r"has set \.grad of parameter .* to None.*zero\.step\(\) updates after backward")(
    lambda me: two_passes_with_a_hook(me, lambda grad: None))


def changed_after_wrapping(me, change):
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1)
    change(model.layers)
    go_on(zero, model, me, range(2))


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
    model = Chain()
    zero = train(me, model)
    with zero.gather_parameters(), torch.no_grad():
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(0.5 * vector, model.parameters())
    go_on(zero, model, me, range(3, 6))


@scenario(naive=False, refused="parameter '0.* belongs to a (Stage|Late). already, with another model, a Chain")
def a_body_with_two_heads_in_two_models(me):
    body = Chain()
    me.wrap(body, SGD, lr=0.1)
    me.wrap(nn.Sequential(body, nn.Linear(7, 1)), SGD, lr=0.1)
