"""Execution order: stage 3's clock. It follows forward and backward from unit to unit, and says
whose turn it is, who comes next, and with which units backward is done."""

import sys
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero_minimal.core.seams import tell
from zero_minimal.core.units import Unit
from zero_minimal.core.weak_hooks import WeakHook

IN_BACKWARD = 2**48  # added to the numbers of nodes that backward makes: more than forward makes


class Pass:
    """A forward pass. The nodes of its graph hold this object, so it lives as long as they do."""


class ExecutionOrder:
    """Follows forward and backward from unit to unit, and calls

        stage.unit_turn(unit, following)  the unit's forward or backward begins; `following` is the
                                          unit expected after it, or None
        stage.evaluation_done()           a forward pass under no_grad has ended
        stage.reducer.hand_over(bucket)   backward is done with the unit of this bucket

    Which unit is expected next? If this unit also had turn t in the last pass of this kind, then
    the unit that had turn t + 1 there.

    How is backward followed? Through hooks on the grad_fn of each tensor that a unit returns:
    backward comes to one of these nodes before it comes to the unit's parameters. The turn is that
    of the innermost unit that ran when the node was made. (Other ways out of a unit, an auxiliary
    loss say: zero_minimal/extensions.)

    When is backward done with a unit? Autograd numbers the nodes of its graph as forward makes
    them. Backward goes through them from the highest number down, and adds a parameter's gradient
    as soon as it is made. So when backward comes to a node, it is done with every unit whose first
    call began after that node was made: these are handed over. (Gradients could not tell: one may
    be missing on one rank, and all ranks must hand over at the same moment.) The root, and the unit
    that is called first, began before all these nodes: Reducer.finish() hands them over at the end.

    Make it after stage.reducer, whose hook at the model's output must run before the root's: it
    begins the pass, and then the root's turn in it begins.
    """

    def __init__(self, stage):
        self.stage, self.root = weakref.proxy(stage), stage.units[0]
        self._passes: dict = {"forward": [], "backward": []}
        self._opened_by: nn.Module | None = None  # the module whose call began the forward pass
        self.begin("forward")
        self._forget()
        for unit in stage.units:
            self.follow(unit, unit.module)
        tell("units_followed", self)

    def follow(self, unit: Unit, module: nn.Module) -> None:
        """A call of the module, the unit's or a part of it, begins the unit's turn."""
        # before the user's own hooks, which may read parameters
        before = WeakHook(ExecutionOrder._before_forward, self, unit, left=left_behind)
        module.register_forward_pre_hook(before, prepend=True)
        after = WeakHook(ExecutionOrder._after_forward, self, unit)
        module.register_forward_hook(after, always_call=True)

    def begin(self, kind: str) -> None:
        """A "forward" or "backward" pass begins."""
        self._last_turns = self._passes[kind]
        self._turns = self._passes[kind] = []
        self._went_back = kind == "backward"
        if self._went_back:  # drop what a checkpoint recomputed in the last pass
            self._first_call = {unit: number for unit, number in self._first_call.items()
                                if number < IN_BACKWARD}

    def _forget(self) -> None:
        # backward may still come to older nodes. The calls that made them are forgotten, so that
        # they do not show which units are done
        self.since = next_number()
        self._first_call: dict[Unit, int] = {}  # unit → begin, in the order of the calls
        self.under_way: list[tuple] = []  # (begin, unit, module): calls that have not returned
        # (begin, end, unit, its pass, weakly): a call that made the nodes begin <= number < end;
        # inner calls stand before the outer one
        self._calls: list[tuple] = []
        self._pass = Pass()

    def _forget_the_dead(self) -> None:
        """At the start of a forward pass: forget calls whose graph is gone, such as those of
        an evaluation without no_grad()."""
        self._pass = Pass()  # first, or this object would hold the last one
        self._calls = [call for call in self._calls if call[3]() is not None]
        self._first_call = {}
        for begin, _, unit, _ in sorted(self._calls, key=lambda call: call[0]):
            self._first_call.setdefault(unit, begin)

    def _before_forward(self, unit: Unit, module: nn.Module, _) -> None:
        if self.stage.inside_gather_parameters:  # all is whole; one rank alone may be running
            return
        at_work = [one for _, one, _ in self.under_way]
        if module is not unit.module and (at_work if unit is self.root else unit in at_work):
            return  # extensions follow parts of units, too: nothing begins while the unit runs
        tell("unit_called", self, unit)
        if not self.stage.reducer.running:
            if self._went_back:  # a forward after a backward
                # here, and not when backward ends: after forward A, forward B and backward A,
                # backward B still needs the calls of B
                self._forget()
                self._went_back = False
            if module in (self.root.module, self._opened_by):
                self.begin("forward")
            if not self._turns:
                self._opened_by = module
            if not self.under_way:
                self._forget_the_dead()
        if torch.is_grad_enabled():
            self._first_call.setdefault(unit, next_number())
        self.under_way.append((next_number(), unit, module))
        tell("unit_begins", self, unit)
        self.turn(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, _, output) -> None:
        if not self.under_way or self.under_way[-1][2] is not module:
            tell("part_returned", self, module, output)  # of the unit at work
            return
        began, _, _ = self.under_way.pop()
        tell("unit_ends", self, unit)
        if output is None and sys.exc_info()[1] is not None:
            return  # forward has failed: what is under way may never arrive
        if torch.is_grad_enabled():
            self.note_call(unit, began)
            for tensor in filter(torch.is_tensor, tree_leaves(output)):
                self.watch(tensor.grad_fn, self.innermost)
        tell("unit_returned", self, unit, module, output)
        if module is self.root.module and not (self.under_way or torch.is_grad_enabled()):
            self.stage.evaluation_done()

    def note_call(self, unit: Unit, began: int) -> None:
        """A call of the unit made the nodes from this number on."""
        self._first_call.setdefault(unit, began)
        self._calls.append((began, next_number(), unit, weakref.ref(self._pass)))

    def innermost(self, number: int) -> Unit | None:
        """The innermost unit that ran when the node of this number was made."""
        owners = (unit for begin, end, unit, _ in self._calls if begin <= number < end)
        return next(owners, None)  # inner calls come first in _calls

    def watch(self, node, owner_of: Callable[[int], Unit | None]) -> None:
        """When backward comes to the node it is the turn of owner_of(its number), if any."""
        if node is None or "watched" in node.metadata:
            return
        number = ordered(node._sequence_nr())
        if owner := owner_of(number):
            node.metadata["watched"] = self._pass
            node.register_prehook(WeakHook(
                lambda order, unit, *_: order._before_backward(unit, number), self, owner,
                left=left_behind,
            ))

    def _before_backward(self, unit: Unit, number: int) -> None:
        tell("backward_at_unit", self, unit, number)
        if number >= self.since and self.stage.reducer.running:
            for later, begin in reversed(self._first_call.items()):
                if begin > number:
                    for bucket in later.buckets:
                        self.stage.reducer.hand_over(bucket)
        self.turn(unit)

    def turn(self, unit: Unit) -> None:
        """It is the unit's turn, unless it is already."""
        if not unit.whole or self._turns[-1:] != [unit]:
            number = len(self._turns)
            self._turns.append(unit)
            as_before = self._last_turns[number : number + 1] == [unit]
            following = next(iter(self._last_turns[number + 1 :]), None) if as_before else None
            tell("unit_turn", self.stage, unit, following)
            self.stage.unit_turn(unit, following)
            tell("unit_turned", self, unit)
        tell("unit_is_whole", self, unit)


def left_behind(*what) -> None:
    """Forward or backward runs, but the stage is gone."""
    tell("left_behind", *what)


def next_number() -> int:
    """The number of the next node of a graph."""
    return ordered(torch.autograd._get_sequence_nr())


def ordered(number: int) -> int:
    """Autograd's number of a node that is being made, changed so that nodes that are recomputed in
    backward come after those of forward. Autograd counts in each thread by itself, and
    backward on a GPU runs in a thread of its own: there its numbers begin at 0."""
    return number + IN_BACKWARD if in_backward() else number


def in_backward() -> bool:
    """Whether autograd is at work in a backward pass."""
    return torch._C._current_graph_task_id() != -1
