"""Model: what a drawn model is (drawn.py)."""

import weakref
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 4, 5
GLOBAL = weakref.WeakKeyDictionary()  # block: its auxiliary loss


class Block(nn.Module):
    """x + something of it. It may say an auxiliary loss on one of several ways."""

    def __init__(self, drawn: dict):
        super().__init__()
        kind = drawn.get("kind", "linear")
        self.drawn, self.dtype = drawn, getattr(torch, drawn.get("dtype", "float64"))
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.router = nn.Parameter(torch.randn(3, WIDTH))  # of no module of its own
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.LayerNorm(WIDTH)
        if kind == "experts":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = nn.ModuleList(
            Block({"dtype": drawn.get("dtype", "float64")}) for _ in range(drawn.get("inner", 0)))
        if buffer := drawn.get("buffer"):
            whole = torch.randint(9, (2,)) if buffer == "counter" else torch.rand(WIDTH)
            self.register_buffer("seen", whole, persistent=buffer != "hidden")
        self.stats, self.queue, self.say = {}, deque(maxlen=2), None
        self.to(self.dtype)
        frozen = {"all": self, "weight": self.linear.weight, "gain": self.gain, "router": self.router}
        if what := drawn.get("frozen"):
            frozen[what].requires_grad_(False)

    def forward(self, x):
        before, x = x.dtype, x.to(self.dtype)
        if self.drawn.get("checkpoint") == "inside":
            y = checkpoint(self.compute, x, use_reentrant=False)
        else:
            y = self.compute(x)
        for block in self.inner:
            y = block(y)
        x = (x + y * self.gain).to(before)
        if "aux" not in self.drawn:
            return x
        return self.told(x, F.linear(y, self.router).softmax(-1).square().mean().to(before))

    def compute(self, x):
        y = self.norm(x)
        if hasattr(self, "experts"):
            weights = F.linear(y, self.router).softmax(-1)
            y = sum(weights[:, number, None] * expert(y) for number, expert in enumerate(self.experts))
        if self.drawn.get("kind") == "attention":
            y = (self.linear(y) @ y.t()).softmax(-1) @ y
        y = torch.tanh(self.linear(y))
        return y if "buffer" not in self.drawn else self.counted(y)

    def counted(self, y):
        kind = self.drawn["buffer"]
        with torch.no_grad():
            if kind == "counter":
                self.seen += 1
            elif kind == "running" and self.training:
                self.seen.lerp_(y.mean(0), 0.1)
        return y + 0.1 * self.seen.sum().sin() if kind == "counter" else y * self.seen.clone()

    def told(self, x, aux):
        match self.drawn["aux"]:
            case "attribute":
                self.said = aux
            case "dict":
                self.stats["aux"] = aux
            case "closure":
                self.say = lambda: aux
            case "global":
                GLOBAL[self] = aux
            case "deque":
                self.queue.append(aux)
            case "returned":
                return x, aux
        return x

    def heard(self):
        """What the last call said; None if there was none."""
        match self.drawn.get("aux"):
            case "attribute":
                return getattr(self, "said", None)
            case "dict":
                return self.stats.get("aux")
            case "closure":
                return self.say and self.say()
            case "global":
                return GLOBAL.get(self)
            case "deque":
                return self.queue[-1] if self.queue else None


class Model(nn.Module):
    """A first layer, blocks that are held in one way or another, a head."""

    def __init__(self, drawn: dict):
        super().__init__()
        self.drawn, self.passes, self.returned, self.penalty = drawn, 0, [], 0.0
        self.first = nn.Embedding(WORDS, WIDTH) if "words" in drawn else nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if "norm" in drawn else nn.Identity()
        blocks = [Block(each) for each in drawn["blocks"]]
        for kind, one, other in drawn.get("ties", ()):
            if kind == "module":
                blocks[other % len(blocks)] = blocks[one % len(blocks)]
        self.held = self.hold(blocks)
        self.head = nn.Linear(WIDTH, WORDS if "words" in drawn else WIDTH)
        self.order = [number % len(blocks) for number in drawn.get("calls", range(len(blocks)))]
        self.tie(blocks)
        for name in dict(first=["first"], head=["head"], both=["first", "head"]).get(drawn.get("frozen"), ()):
            getattr(self, name).requires_grad_(False)
        if unused := drawn.get("unused"):
            (self if unused == "root" else blocks[0]).spare = nn.Linear(WIDTH, 3)

    def hold(self, blocks):
        match self.drawn.get("held", "list"):
            case "list":
                return nn.ModuleList(blocks)
            case "list in list":
                return nn.ModuleList([nn.ModuleList(blocks[:1]), nn.ModuleList(blocks[1:])])
            case "dict in list":
                return nn.ModuleList([nn.ModuleDict({str(n): block for n, block in enumerate(blocks)})])
            case "sequential":
                return nn.Sequential(*blocks)
            case "dict":
                return nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
            case "two lists":
                self.others = nn.ModuleList(blocks[1:])
                return nn.ModuleList(blocks[:1])
            case "attributes":
                for number, block in enumerate(blocks):
                    setattr(self, f"block{number}", block)

    def blocks(self):
        match self.drawn.get("held", "list"):
            case "list in list":
                return [*self.held[0], *self.held[1]]
            case "dict in list":
                return list(self.held[0].values())
            case "dict":
                return list(self.held.values())
            case "two lists":
                return [*self.held, *self.others]
            case "attributes":
                return [getattr(self, f"block{number}") for number in range(len(self.drawn["blocks"]))]
        return list(self.held)

    def tie(self, blocks):
        for kind, one, other in self.drawn.get("ties", ()):
            a, b = blocks[one % len(blocks)], blocks[other % len(blocks)]
            match kind:
                case "linear" if a.dtype == b.dtype:
                    b.linear.weight = a.linear.weight
                case "gain" if a.dtype == b.dtype:
                    b.gain = a.gain
                case "submodule" if a.dtype == b.dtype:
                    b.linear = a.linear
                case "ends":
                    self.head.weight = self.first.weight
                case "first" if "words" not in self.drawn and a.dtype == torch.float64:
                    a.linear.weight = self.first.weight
                case "within":
                    a.norm.weight = a.gain

    def forward(self, x):
        self.returned, self.penalty = [], 0.0
        self.passes += 1
        x = self.norm(self.first(x).tanh())
        if self.drawn.get("checkpoint"):
            x = checkpoint(self.through, x, use_reentrant=self.drawn["checkpoint"] == "reentrant")
        else:
            x = self.through(x)
        return self.head(x)

    def through(self, x):
        blocks = self.blocks()
        for number in self.order:
            block = blocks[number]
            if number == self.drawn.get("seldom") and self.passes % 2:
                continue
            x = self.one(block, x)
            if self.drawn.get("penalty") == "in forward":
                self.penalty = self.penalty + block.linear.weight.abs().mean().double()
            if "dropout" in self.drawn:
                x = F.dropout(x, 0.2, self.training)
        return x

    def one(self, block, x):
        kept = block.drawn.get("checkpoint")
        if kept in ("reentrant", "not reentrant"):
            y = checkpoint(block, x, use_reentrant=kept == "reentrant")
        else:
            y = block(x)
        if isinstance(y, tuple):
            y, aux = y
            self.returned.append(aux)
        match block.drawn.get("uses"):
            case "parameter":
                y = y * block.gain.to(y.dtype)
            case "part":
                y = y + block.linear(y.to(block.dtype)).to(y.dtype)
        return y

    def heard(self):
        """All auxiliary losses of the last forward, as one; None if there is none."""
        said = [block.heard() for block in dict.fromkeys(self.blocks())] + self.returned
        return sum(0.1 * one for one in said if one is not None) if any(one is not None for one in said) else None
