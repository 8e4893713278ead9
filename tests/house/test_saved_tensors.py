"""What leaves a unit on ways that nobody can follow: stage 3 computes its gradients as stage 0 does."""

import collections
import contextlib
import functools
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import toys
from misuse import refused
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from zero_minimal.kept_units import Kept3
from zero_minimal.stage0 import Stage0
from zero_minimal.stage3 import Stage3

pytestmark = pytest.mark.thorough

SIZE, DEPTH = 6, 4
KEPT_OUTSIDE: list = []


class Holder:
    """An object that only others know."""

    aux = None

    @staticmethod
    def keep(block, aux):
        block.holder["aux"] = block.held = Holder()
        block.held.aux = aux


WAYS = {  # how an auxiliary loss leaves a block, which returns it or hides it; how it is taken up again
    "a dict": (lambda block, aux: block.stats.update(aux=aux), lambda block, given: block.stats.pop("aux")),
    "a closure": (lambda block, aux: block.put(aux), lambda block, given: block.take()),
    "a global variable": (lambda block, aux: KEPT_OUTSIDE.append(aux), lambda block, given: KEPT_OUTSIDE.pop(0)),
    "an object": (Holder.keep, lambda block, given: block.held.aux),
    "a deque": (lambda block, aux: collections.deque([aux]), lambda block, given: given[0]),
    "a partial": (lambda block, aux: functools.partial(torch.add, aux), lambda block, given: given(0.0)),
    "a proxy": (lambda block, aux: types.MappingProxyType({"aux": aux}), lambda block, given: given["aux"]),
}


class Block(nn.Module):
    """Its auxiliary loss reads a frozen and a trained parameter of its own, and leaves by `way`."""

    def __init__(self, way):
        super().__init__()
        self.leave, self.holder, self.stats = WAYS[way][0], weakref.WeakValueDictionary(), {}
        self.linear = nn.Linear(SIZE, SIZE)
        # no modules: what these return would be followed
        self.fixed = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.gate = nn.Parameter(torch.randn(3, SIZE))
        box = []
        self.put, self.take = box.append, box.pop  # a closure over neither self nor the model

    def forward(self, x):
        y = x + self.linear(x).tanh()
        aux = F.linear(F.linear(y, self.fixed).softmax(-1), self.gate).square().mean()
        given = self.leave(self, aux)
        return y if given is None else (y, given)


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.blocks, self.aux_of = nn.ModuleList(Block(way) for _ in range(DEPTH)), WAYS[way][1]
        self.head = nn.Linear(SIZE, SIZE)
        self.saves_on_cpu = self.recomputes = False

    def forward(self, x):
        self.auxes = []
        return self.head(checkpoint(self.through, x, use_reentrant=False) if self.recomputes else self.through(x))

    def through(self, x):
        for block in self.blocks:
            with save_on_cpu() if self.saves_on_cpu else contextlib.nullcontext():
                x, *given = out if isinstance(out := block(x), tuple) else (out, None)
            self.auxes.append(functools.partial(self.aux_of, block, given[0]))
        return x


def trained(stage_class, way, loop, rank=None):
    """Losses and parameters after some steps, each rank on data of its own."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(7)
    model = Model(way)
    zero = stage_class(model, torch.optim.SGD, lr=0.1)
    losses = []
    model.saves_on_cpu = loop == "saved on the CPU, inside"  # on a CPU that copies nothing
    model.recomputes = "all blocks recomputed" in loop
    around = save_on_cpu if "saved on the CPU" in loop and not model.saves_on_cpu else contextlib.nullcontext
    for step in range(4):
        for micro in range(2 if loop == "micro-batches" else 1):
            batch = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            with around():
                main = model(torch.randn(3, SIZE, generator=batch)).square().mean()
            aux = sum(take() for take in model.auxes)
            if loop == "the auxiliary loss first":
                aux.backward(retain_graph=True)
                main.backward()
            elif loop == "sometimes":  # so another pass is expected than comes
                (main + aux if step % 2 else main).backward()
            else:
                (main + aux).backward()
            losses.append((main + aux).item())
        zero.step()
        zero.zero_grad()
    return losses, toys.whole_parameters(zero)


CASES = [(way, loop, size) for way in WAYS for loop in ("together", "sometimes", "micro-batches")
         for size in (1, 2, 3)] + [
             ("a dict", "the auxiliary loss first", 2), ("a dict", "saved on the CPU", 2),
             ("a deque", "saved on the CPU, inside", 2), ("a deque", "all blocks recomputed, saved on the CPU", 3),
             ("a dict", "all blocks recomputed", 2)]


@pytest.mark.parametrize("way, loop, world_size", CASES)
def test_gradients_are_those_of_stage_0(way, loop, world_size):
    expected = toys.run(trained, world_size, Stage0, way, loop)
    for stage_class in (Stage3, Kept3):
        assert_equal(toys.run(trained, world_size, stage_class, way, loop), expected)


def assert_equal(found, expected):
    for (losses, parameters), (right_losses, right) in zip(found, expected, strict=True):
        assert losses == pytest.approx(right_losses, rel=1e-5)
        torch.testing.assert_close(parameters, right, rtol=1e-5, atol=1e-6)


class InPlace(nn.Module):
    """Its forward changes in place what autograd has saved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        y = self.linear(x).exp()
        y.mul_(2.0)
        return y


def spoiled(stage_class):
    zero = stage_class(InPlace(), torch.optim.SGD, lr=0.1)
    zero.model(torch.ones(2, SIZE)).sum().backward()


@pytest.mark.parametrize("stage_class", [Stage0, Stage3])
def test_an_activation_changed_in_place_is_refused_as_in_plain_torch(stage_class):
    assert "has been modified by an inplace operation" in refused(spoiled, stage_class)


def looked_into():
    zero = Stage3(Model("a dict"), torch.optim.SGD, lr=0.1)
    out = zero.model(torch.ones(2, SIZE))
    return [getattr(node, "_saved_mat2", None) for node in (zero.model.blocks[0].stats["aux"].grad_fn.next_functions
                                                            [0][0].next_functions[0][0], out.grad_fn)]


def test_who_looks_into_the_graph_is_told():
    assert "is read outside of backward()" in refused(looked_into)
