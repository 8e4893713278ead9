"""Strangers: whole training scripts, each with much in it that people combine. At every stage, and with late gathering,
they end with the losses and weights of plain PyTorch, or are refused at once with a clear line.

    tolerances   in fp64 1e-11, of sums of some hundred numbers in another order, through six steps. Under autocast a
                 sum that is rounded to bf16, of 8 bits, may round the other way: 2⁻⁸ of what a weight moves, and more
                 of a loss
"""

import contextlib
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from house.odd_models import WIDTH, Layer
from house.scenarios.passes import Recomputing
from house.scenarios.pieces import Chain, Writer, go_on, next_word, squares, train, wrapped
from house.scenarios.stand import Scenario
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.checkpoint import checkpoint

from zero_minimal.checkpoint import saved_state

STRANGERS: dict = {}
ADAM = dict(lr=0.01, weight_decay=0.1)


def stranger(refused=None, **options):
    def enter(play):
        name = play.__name__.replace("_", " ")
        STRANGERS[name] = Scenario(name, play, refused or {}, naive=False, worlds=(2, 3), **options)
        return play

    return enter


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
    def loss(model, me, step):
        bag = []
        for layer in model.layers:
            layer.bag = bag
        return squares(model, me, step) + 0.01 * torch.cat(bag).square().sum()

    train(me, Chain(Bagged), AdamW, loss=loss, **ADAM)


@stranger()
def tied_weights_clipped_and_a_schedule(me):
    """And the line that the refusal names."""
    tied_and_scheduled(me, lambda zero: zero.clip_grad_norm_(0.1))


def tied_and_scheduled(me, clip):
    def backward(zero, step):
        loss = next_word(zero.model, me, step)
        me.backward(loss)
        me.note(loss, clip(zero))

    _, zero = wrapped(me, Writer(tied=True), AdamW, **ADAM)
    schedule = lr_scheduler.CosineAnnealingLR(zero.optimizer, 6)
    go_on(me, zero, range(6), backward=backward, after=lambda zero, step: schedule.step())


@stranger()
def accumulation_and_a_smaller_last_batch(me):
    """Micro-batches of 5, 5 and 2, each weighted by its share; more of them in some steps."""
    def backward(zero, step):
        sizes = (5, 5, 2) if step % 2 else (5, 1)
        for number, size in enumerate(sizes):
            last = number + 1 == len(sizes)
            with contextlib.nullcontext() if last else zero.no_sync():
                y = zero.model(me.x(10 * step + number, size, WIDTH))
                loss = y.square().sum() / (sum(sizes) * y.shape[1])
                loss.backward()
            me.note(loss)
        me.note(zero.clip_grad_norm_(1.0))

    train(me, None, AdamW, steps=5, backward=backward, **ADAM)


@stranger()
def an_average_edits_and_evaluations(me):
    """A moving average, weights clamped by hand, an evaluation with the average in their place."""
    model, zero = wrapped(me)
    mean = []
    for step in range(5):
        go_on(me, zero, [step])
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


@stranger()
def compiled_and_recomputed(me):
    model, zero = wrapped(me, Recomputing(lambda layer, x: checkpoint(layer, x, use_reentrant=False)))
    compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go_on(me, zero, range(4), loss=lambda model, me, step: squares(compiled, me, step))


@stranger()
def saved_and_resumed_on_fewer_ranks(me):
    """Two steps on all ranks, then each goes on alone, with rank 0's batches."""
    zero, model = train(me, None, AdamW, steps=2, **ADAM), Chain()
    alone = (alone_plainly if me.stage == "plain" else alone_from_a_folder)(me, zero, model)
    go_on(me, alone, range(2, 5), loss=lambda model, me, step: model(me.x(step, of=0)).square().mean())
    with getattr(alone, "gather_parameters", contextlib.nullcontext)():
        me.note(*model.parameters())


def alone_from_a_folder(me, zero, model):
    """A world of all ranks saves, and each rank, a world of its own, loads."""
    folders = [tempfile.mkdtemp() if me.rank == 0 else None]
    dist.broadcast_object_list(folders, 0, group=me.group)
    saved_state.save(zero, folders[0], step=2)
    group = [dist.new_group([rank]) for rank in range(me.size)][me.rank]
    alone = me.kind(model, AdamW, group=group, bucket_bytes=700, **ADAM)
    saved_state.load(alone, folders[0])
    return alone


def alone_plainly(me, zero, model):
    """The same with what torch itself keeps."""
    model.load_state_dict(zero.model.state_dict())
    alone = AdamW(model.parameters(), **ADAM)
    alone.load_state_dict(zero.optimizer.state_dict())
    alone.model = model
    return alone
