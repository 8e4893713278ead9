"""Loop: how a drawn program trains, by a stage on its ranks or by plain PyTorch (stand.py in house/scenarios)."""

import contextlib
import copy
import importlib
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fuzzing.model import WIDTH, WORDS, Model
from house.scenarios.stand import Alone, Staged
from torch import optim
from torch.autograd.graph import save_on_cpu
from torch.optim import lr_scheduler

from zero_minimal.checkpoint import saved_state

WHERE = {"late1": "late_gather", "late2": "late_gather", "kept3": "kept_units"}
OPTIMIZERS = {
    "SGD": (optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1)), "plain SGD": (optim.SGD, dict(lr=0.1)),
    # a gradient that is zero but for rounding must not decide about a step
    "AdamW": (optim.AdamW, dict(lr=0.01, eps=1e-3)), "Adagrad": (optim.Adagrad, dict(lr=0.1, eps=1e-3)),
}


def kind_of(stage: str):
    return getattr(importlib.import_module(f"zero_minimal.{WHERE.get(stage, stage)}"), stage.capitalize())


class Rank(Staged):
    """A rank of a group that trains with a stage, and maybe with another one after it."""

    def __init__(self, stage: str, group, folder: str):
        super().__init__("stage0", group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.stage, self.kind, self.folder = stage, kind_of(stage), folder

    def another(self, how: str, zero, build, stage: str):
        """A model and a stage that go on where `zero` is."""
        if how != "shards":  # which belong to one stage
            self.kind = kind_of(stage)
        if how == "saved":
            saved_state.save(zero, self.folder, extra={"how": how})
            model, after = build()
            assert saved_state.load(after, self.folder) == {"how": how}
        elif how == "shards":
            state = zero.state_dict()
            model, after = build()
            after.load_state_dict(state)
        return model, after


class OneProcess(Alone):
    """A rank that plain PyTorch plays."""

    def another(self, how: str, zero, build, stage: str):
        state = zero.state_dict()
        model, after = build()
        after.load_state_dict(state)
        if how == "shards":  # they come with all buffers, also with those that are in no state dict of a model
            for buffer, before in zip(model.buffers(), zero.model.buffers(), strict=True):
                buffer.copy_(before)
        return model, after


class Loop:
    """One rank's run of a program."""

    def __init__(self, program: dict, me):
        self.drawn, self.described, self.me = program["loop"], program["model"], me
        self.number = 0  # of batches so far

    def build(self, model=None):
        """The model, if there is none yet, and its stage."""
        model = model or Model(self.described)
        optimizer, options = OPTIMIZERS[self.drawn.get("optimizer", "SGD")]
        if self.drawn.get("groups") == "decay":
            params = list(model.parameters())
            options = options | dict(param_groups=[dict(params=[p for p in params if p.ndim > 1], weight_decay=0.1),
                                                   dict(params=[p for p in params if p.ndim < 2], lr=0.03)])
        elif self.drawn.get("groups") == "by block":
            blocks = dict.fromkeys(param for block in model.blocks() for param in block.parameters())
            options = options | dict(param_groups=[dict(params=list(blocks), lr=0.05), dict(
                params=[param for param in model.parameters() if param not in blocks])])
        if "bucket_bytes" in self.drawn:
            options = options | dict(bucket_bytes=self.drawn["bucket_bytes"])
        return model, self.me.wrap(model, optimizer, **options)

    def run(self):
        self.model, self.zero = self.build()
        self.attach()
        for step in range(self.drawn["steps"]):
            self.evaluate("first")
            if self.drawn.get("forget") == "late" and step:
                self.zero.zero_grad()
            self.backward(step)
            if self.drawn.get("drop") == step:
                self.zero.zero_grad()
                continue
            for largest in self.drawn.get("clip", ()):
                self.me.note(self.zero.clip_grad_norm_(largest))
            self.evaluate("before step")
            self.zero.step()
            if self.schedule:
                self.schedule.step()
            self.forget()
            self.evaluate("after")
            if step == self.drawn.get("edit", (-1, ""))[0]:
                self.edit(self.drawn["edit"][1])
            if step + 1 == self.drawn.get("after", ("", 0))[1]:
                self.another(*self.drawn["after"])

    def attach(self):
        """What comes with a new stage: a schedule, a hook."""
        kind = self.drawn.get("schedule")
        self.schedule = kind and (lr_scheduler.StepLR(self.zero.optimizer, 1, 0.7) if kind == "step"
                                  else lr_scheduler.CosineAnnealingLR(self.zero.optimizer, 4))
        if "hook" in self.drawn and self.model.head.weight.requires_grad:
            self.model.head.weight.register_hook(lambda gradient: 2 * gradient)

    def batch(self):
        """Inputs and targets, or None; random numbers begin anew, so that nothing depends on how many were drawn."""
        self.number += 1
        torch.manual_seed(1000 * self.number + self.me.rank)
        if "words" in self.described:
            words = self.me.words(self.number, WORDS, 7)
            return words[:-1], words[1:]
        return self.me.x(self.number, 5, WIDTH), None

    def loss(self):
        """The main loss of a new forward, and its auxiliary ones, or None."""
        inputs, targets = self.batch()
        seen = self.drawn.get("losses") == "saliency" and targets is None
        with save_on_cpu() if "on_host" in self.drawn else contextlib.nullcontext():
            y = self.model(inputs.requires_grad_(seen))
        if seen:
            self.me.note(*torch.autograd.grad(y.sum(), inputs, retain_graph=True))
        main = y.tanh().square().mean() if targets is None else F.cross_entropy(y, targets)
        main, heard = main + 0.1 * self.model.penalty, self.model.heard()
        self.evaluate("between")
        return main, heard

    def backward(self, step):
        count, under_no_sync = self.drawn.get("micro", (1, "none"))
        for micro in range(count):
            last = micro + 1 == count
            alone = not last and (under_no_sync == "all" or under_no_sync == "first" and micro == 0)
            with self.zero.no_sync() if alone else contextlib.nullcontext():
                self.backward_of_one(step)
            if not last:
                self.evaluate("inside")

    def backward_of_one(self, step):
        kind = self.drawn.get("losses")
        main, aux = self.loss()
        aux = aux if step >= self.drawn.get("since", 0) else None
        if aux is not None and not aux.requires_grad:
            aux = None
        if self.drawn.get("penalty") == "in the loop":
            main = main + sum(p.double().square().sum() for p in self.model.head.parameters())
        self.me.note(main)
        if aux is not None:
            self.me.note(aux)
        if kind in ("aux alone", "aux own") and aux is not None:
            if kind == "aux own":
                main.backward(retain_graph=True)
            aux.backward()
            return
        total = main if aux is None else main + aux
        if kind == "thrown away":
            self.loss()
        if kind == "a block's":
            y = self.model.blocks()[0](torch.tanh(self.me.x(self.number, 3, WIDTH)))
            total = total + (y[0] if isinstance(y, tuple) else y).square().mean()
        if kind == "retained":
            total.backward(retain_graph=True)
            (0.5 * total).backward()
        elif kind in ("joint", "later"):
            second, _ = self.loss()
            self.me.note(second)
            if kind == "joint":
                (total + second).backward()
            else:
                total.backward()
                second.backward()
        else:
            total.backward()
            if kind == "own":
                self.loss()[0].backward()

    def evaluate(self, now):
        """If the program does so at this moment."""
        when, how = self.drawn.get("evaluate", ("never", ""))
        if when == now:
            self.model.eval()
            with {"no grad": torch.no_grad, "inference mode": torch.inference_mode}.get(how, contextlib.nullcontext)():
                inputs, _ = self.batch()
                self.me.note(self.model(inputs).mean())
            self.model.train()

    def forget(self):
        own = dict(model=self.model, optimizer=self.zero.optimizer).get(self.drawn.get("forget"), self.zero)
        if self.drawn.get("forget") != "late":
            (self.zero if isinstance(self.me, OneProcess) else own).zero_grad()

    def edit(self, how):
        with self.zero.gather_parameters(), torch.no_grad():
            for param in dict.fromkeys(self.model.parameters()):
                self.me.note(param.sum())
                if how == "clamp":
                    param.clamp_(-0.3, 0.3)
            kept = any("aux" in block for block in self.described["blocks"])  # what leads into a graph cannot be copied
            copied = copy.deepcopy(self.model) if how == "copy" and not kept else None
        if copied is not None:
            copied(self.batch()[0]).mean().backward()
            self.me.note(*(p.grad for p in copied.parameters() if p.grad is not None))

    def another(self, how, _, stage):
        rates = [group["lr"] for group in self.zero.optimizer.param_groups]
        if how in ("saved", "shards"):
            self.me.wrapped.clear()
            self.model, self.zero = self.me.another(how, self.zero, self.build, stage)
        else:
            if how == "weights":
                with self.zero.gather_parameters():
                    weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self.model = Model(self.described)
                self.model.load_state_dict(weights)
            self.me.wrapped.clear()
            self.schedule = self.zero = None
            if hasattr(self.me, "folder"):
                self.me.kind = kind_of(stage)
            self.model, self.zero = self.build(self.model)
        for group, rate in zip(self.zero.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.attach()


def play(program: dict, me):
    """Run it; what this rank saw, or its error (an Outcome)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1 + me.rank)
        try:
            Loop(program, me).run()
            return me.outcome()
        except Exception as error:
            return me.outcome(error)
        finally:
            me.wrapped.clear()
