"""Strangers: whole training scripts, each with much in it that people combine. At every stage, and with late gathering,
they end with the losses and weights of plain PyTorch, or are refused at once with a clear line.

    tolerances   in fp64 1e-11, of sums of some hundred numbers in another order, through six steps. Under autocast a
                 sum that is rounded to bf16, of 8 bits, may round the other way: 2⁻⁸ of what a weight moves, and more
                 of a loss
"""

import contextlib
import tempfile

import torch
import torch.nn.functional as F
from house.odd_models import WIDTH, Layer
from house.scenarios.pieces import Chain, Writer, next_word, squares
from house.scenarios.stand import Scenario
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.checkpoint import checkpoint

STRANGERS: dict = {}
ADAM = dict(lr=0.01, weight_decay=0.1)


def stranger(refused=None, **options):
    def enter(play):
        name = play.__name__.replace("_", " ")
        STRANGERS[name] = Scenario(name, play, refused or {}, naive=False, worlds=(2, 3), **options)
        return play

    return enter


@stranger(or_refused=r"Clip with zero\.clip_grad_norm_")
def torchs_clipping(me):
    """Tied weights, torch's own clip_grad_norm_, a schedule."""
    tied_and_scheduled(me, lambda zero: nn.utils.clip_grad_norm_(zero.model.parameters(), 0.1))


@stranger(or_refused=r"the shards in zero\.optimizer have a gradient only while .* Clip with zero\.clip_grad_norm_")
def torchs_clipping_of_what_the_optimizer_holds(me):
    tied_and_scheduled(me, lambda zero: nn.utils.clip_grad_norm_(
        [param for group in zero.optimizer.param_groups for param in group["params"]], 0.1))


class Bagged(Layer):
    """It puts its weight, flat, into a list of the model's, for a penalty on all weights."""

    def forward(self, x):
        self.bag += [param.flatten() for param in self.parameters()]
        return super().forward(x)


@stranger(or_refused="is released|a view of a parameter is read after the parameter was released")
def a_penalty_on_weights_that_layers_have_left_in_a_list(me):
    model = Chain(Bagged)
    zero = me.wrap(model, AdamW, **ADAM)
    for step in range(4):
        bag = []
        for layer in model.layers:
            layer.bag = bag
        loss = squares(model, me, step) + 0.01 * torch.cat(bag).square().sum()
        me.backward(loss)
        me.note(loss)
        zero.step()
        zero.zero_grad()


@stranger()
def tied_weights_clipped_and_a_schedule(me):
    """And the line that the refusal names."""
    tied_and_scheduled(me, lambda zero: zero.clip_grad_norm_(0.1))


def tied_and_scheduled(me, clip):
    model = Writer(tied=True)
    zero = me.wrap(model, AdamW, **ADAM)
    schedule = lr_scheduler.CosineAnnealingLR(zero.optimizer, 6)
    for step in range(6):
        loss = next_word(model, me, step)
        me.backward(loss)
        me.note(loss, clip(zero))
        zero.step()
        schedule.step()
        zero.zero_grad()


@stranger()
def accumulation_and_a_smaller_last_batch(me):
    """Micro-batches of 5, 5 and 2, each weighted by its share; more of them in some steps."""
    model = Chain()
    zero = me.wrap(model, AdamW, **ADAM)
    for step in range(5):
        sizes = (5, 5, 2) if step % 2 else (5, 1)
        for number, size in enumerate(sizes):
            last = number + 1 == len(sizes)
            with contextlib.nullcontext() if last else zero.no_sync():
                y = model(me.x(10 * step + number, size, WIDTH))
                loss = y.square().sum() / (sum(sizes) * y.shape[1])
                loss.backward()
            me.note(loss)
        me.note(zero.clip_grad_norm_(1.0))
        zero.step()
        zero.zero_grad()


def frozen_model():
    model = Chain()
    model.first.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def tuned(me, model, steps, thaw=None):
    zero = me.wrap(model, AdamW, **ADAM)
    for step in steps:
        if step == thaw:
            model.requires_grad_(True)
        loss = squares(model, me, step)
        loss.backward()
        zero.step()
        zero.zero_grad()
        me.note(loss)
    return zero


@stranger(or_refused="set requires_grad before, and build model and stage anew")
def frozen_layers_thawed_midway(me):
    tuned(me, frozen_model(), range(6), thaw=3)


@stranger()
def frozen_layers_and_a_new_stage_when_thawed(me):
    """What the refusal says to do."""
    zero = tuned(me, frozen_model(), range(3))
    with zero.gather_parameters():
        weights = {name: value.clone() for name, value in zero.model.state_dict().items()}
    model = Chain()
    model.load_state_dict(weights)
    tuned(me, model, range(3, 6))


@stranger()
def an_average_edits_and_evaluations(me):
    """A moving average, weights clamped by hand, an evaluation with the average in their place."""
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1, momentum=0.9)
    mean = []
    for step in range(5):
        loss = squares(model, me, step)
        loss.backward()
        zero.step()
        zero.zero_grad()
        me.note(loss)
        with zero.gather_parameters(), torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.3, 0.3)
            own = [param.clone() for param in model.parameters()]
            mean = [a.lerp(b, 0.2) for a, b in zip(mean, own, strict=True)] if mean else own
            for param, other in zip(model.parameters(), mean, strict=True):
                param.copy_(other)
            me.note(model(me.x(50, of=0)).mean())
            for param, other in zip(model.parameters(), own, strict=True):
                param.copy_(other)
        model.eval()
        with torch.no_grad():
            me.note(model(me.x(60)).mean())
        model.train()
    me.note(*mean)


@stranger(refused={"stage3": r"with zero\.gather_parameters\(\):"})
def an_average_and_edits_without_a_context(me):
    """As one writes it for one process."""
    model = Chain()
    zero = me.wrap(model, SGD, lr=0.1, momentum=0.9)
    mean = [torch.zeros(param.shape) for param in model.parameters()]
    for step in range(5):
        squares(model, me, step).backward()
        zero.step()
        with torch.no_grad():
            torch._foreach_lerp_(mean, list(model.parameters()), 0.2)
            model.head.weight.data.clamp_(-0.3, 0.3)
        zero.zero_grad()
        with torch.inference_mode():
            me.note(model(me.x(60)).mean())
    me.note(*mean)


@stranger(dtype=torch.float32, tolerance=2e-2)
def autocast_and_a_loss_scale(me):
    model = Chain()
    zero = me.wrap(model, AdamW, **ADAM)
    scaler = me.scaler(256.0, growth_interval=2)
    for step in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(me.x(step))
        loss = y.float().square().mean() * (float("inf") if step == 2 and not me.rank else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(zero)
        zero.clip_grad_norm_(1.0)
        me.note(scaler.step(zero))
        scaler.update()
        zero.zero_grad()


class Odd(nn.Module):
    """Running statistics, dropout, sizes that nothing divides, a branch that most steps leave out."""

    def __init__(self):
        super().__init__()
        self.norm, self.branch, self.spare = nn.BatchNorm1d(13), nn.Linear(13, 1), nn.Linear(1, 5)
        self.into, self.layers, self.scale = nn.Linear(WIDTH, 13), nn.ModuleList([Layer(), Layer()]), nn.Parameter(
            torch.tensor(0.7))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, branch=False):
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2, self.training)
        x = self.norm(self.into(x)) * self.scale
        self.seen += 1
        return x + self.branch(x) if branch else x


@stranger()
def statistics_dropout_and_a_branch(me):
    model = Odd()
    zero = me.wrap(model, SGD, lr=0.05)
    for step in range(5):
        torch.manual_seed(100 * step + me.rank)
        loss = (model(me.x(step), branch=step in (1, 3)) - 1).square().mean()
        loss.backward()
        me.note(loss, zero.clip_grad_norm_(1.0))
        zero.step()
        zero.zero_grad()
        model.eval()
        with torch.no_grad():
            me.note(model(me.x(50 + step)).mean())
        model.train()


class Recomputed(Chain):
    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@stranger()
def compiled_and_recomputed(me):
    import warnings

    model = Recomputed(count=2)
    zero = me.wrap(model, SGD, lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="eager")
        for step in range(4):
            loss = compiled(me.x(step)).square().mean()
            loss.backward()
            zero.step()
            zero.zero_grad()
            me.note(loss)


@stranger()
def saved_and_resumed_on_fewer_ranks(me):
    """Two steps on all ranks, then each goes on alone, with rank 0's batches."""
    model = Chain()
    zero = me.wrap(model, AdamW, **ADAM)
    for step in range(2):
        squares(model, me, step).backward()
        zero.step()
        zero.zero_grad()
    alone = alone_plainly if me.stage == "plain" else alone_from_a_folder
    alone(me, zero, Chain, AdamW, ADAM, lambda other, step: other(me.x(step, of=0)).square().mean(), range(2, 5))


def alone_from_a_folder(me, zero, build, optimizer, options, loss, steps):
    """A world of all ranks saves, and each rank, a world of its own, loads and goes on."""
    import torch.distributed as dist

    from zero_minimal.checkpoint import saved_state

    folders = [tempfile.mkdtemp() if me.rank == 0 else None]
    dist.broadcast_object_list(folders, 0, group=me.group)
    saved_state.save(zero, folders[0], step=2)
    alone = [dist.new_group([rank]) for rank in range(me.size)][me.rank]
    model = build()
    other = me.kind(model, optimizer, group=alone, bucket_bytes=700, **options)
    saved_state.load(other, folders[0])
    _goes_on(me, other, loss, steps)
    dist.destroy_process_group(alone)


def alone_plainly(me, zero, build, optimizer, options, loss, steps):
    """The same with what torch itself keeps."""
    model = build()
    model.load_state_dict(zero.model.state_dict())
    other = optimizer(model.parameters(), **options)
    other.load_state_dict(zero.optimizer.state_dict())
    other.model = model
    _goes_on(me, other, loss, steps)


def _goes_on(me, zero, loss, steps):
    for step in steps:
        value = loss(zero.model, step)
        value.backward()
        zero.step()
        zero.zero_grad()
        me.note(value)
    whole = getattr(zero, "gather_parameters", contextlib.nullcontext)
    with whole():
        me.note(*zero.model.parameters())
