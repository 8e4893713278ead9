"""Turns: stage 3's clock. It follows forward and backward from unit to unit, and says whose turn it
is, who comes next, and with which units backward is done."""

import bisect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zero_minimal.foundations import lent
from zero_minimal.foundations.layout import same_storage
from zero_minimal.foundations.outputs import tensors_in
from zero_minimal.foundations.released import refuse_left_behind
from zero_minimal.foundations.saved_parameters import SavedParameters
from zero_minimal.foundations.ties import LEFT_BEHIND, Tie
from zero_minimal.foundations.units import Unit

IN_BACKWARD = 2**48  # more nodes than any forward makes
NO_SECOND = ("stage 3 frees parameters after each turn, and cannot serve create_graph=True: train "
             "at stage 2, where torch.autograd.grad(loss, parameters, create_graph=True) works")
JOINT = (
    "this backward() goes through two forward passes, and a backward() came between them: at stage "
    "3 call backward() on each loss by itself, or run both forward passes before the first one"
)
OTHER_THREAD = (
    "the model is called in another thread than before, where autograd counts anew, and stage 3 "
    "goes by that count: call it in one thread"
)
UNDER_FUNC = (
    "torch.func (vmap, grad, jacrev, jvp) around a forward finds no parameters at stage 3, which "
    "frees them after each turn: copy the model, `with zero.gather_parameters(): whole = "
    "copy.deepcopy(model)`, on all ranks, and call it on the copy; or train at stage 2"
)


class Pass:
    """A forward pass. The nodes of its graph hold this object: it lives as long as they."""


class Turns:
    """Follows forward and backward from unit to unit, and calls

        stage.unit_turn(unit, following)  the unit's forward or backward begins; `following` is the
                                          unit expected after it, or None
        stage.evaluation_done()           a forward pass under no_grad has ended
        stage.backward.hand_over(bucket)  backward is done with the unit of this bucket

    Which unit is expected next? If turn number t of the pass before (forward or backward, as now)
    was this unit's, as it is now, then the unit of turn t + 1.

    How is backward followed? Through hooks on the grad_fn of each tensor that a unit returns, or a
    module with parameters inside it, or that such a module keeps in an attribute. On its way to a
    parameter backward meets one of these nodes first, also if it comes from an auxiliary loss. The
    turn is that of the innermost unit that ran when the node was made. What is computed from a
    parameter while its unit does not run is watched by itself (lent.py). On a way that nobody can
    follow backward meets a saved parameter first, which asks for its unit (saved_parameters.py).

    When is backward done with a unit? Autograd numbers the nodes of its graph as forward makes
    them, and backward goes through them from the highest number down. So when it comes to a node,
    it is done with every unit whose first call began after that node was made. The gradients
    themselves could not tell: a parameter may have none on one of the ranks, and all ranks must
    hand over at the same moment.

    Make it after stage.backward, whose hook at the model's output must run before the root's: it
    begins the pass, and then the root's turn in it begins.
    """

    def __init__(self, stage):
        self.stage, self.root = weakref.proxy(stage), stage.units[0]
        self._listeners: list[Callable[[Unit], object]] = []
        self._passes: dict = {"forward": [], "backward": []}
        self._thread: int | None = None  # in which the model is called
        self._opened_by: nn.Module | None = None  # the module whose call began the forward pass
        self._saved = SavedParameters(stage.units, Tie(Turns._saved_is_read, self))
        self.begin("forward")
        self._forget()
        for unit in stage.units:
            self._follow(unit, unit.module)
        for unit in stage.units:
            for module in _inner_owners(unit):
                self._follow(unit, module)

    def _follow(self, unit: Unit, module: nn.Module) -> None:
        """Before the user's own hooks, which may read parameters."""
        before = Tie(Turns._before_forward, self, unit, left=refuse_left_behind)
        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(Tie(Turns._after_forward, self, unit), always_call=True)

    @contextmanager
    def heard_by(self, listener: Callable[[Unit], object]) -> Iterator[None]:
        """Context in which listener(unit) is called at each turn, after stage.unit_turn()."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def begin(self, kind: str) -> None:
        """A "forward" or "backward" pass begins."""
        self._last = self._passes[kind]
        self._now = self._passes[kind] = []
        self._went_back = kind == "backward"
        if self._went_back:  # what a checkpoint ran again belongs to the pass before
            self._first_call = {unit: number for unit, number in self._first_call.items()
                                if number < IN_BACKWARD}

    def _forget(self) -> None:
        # a call of a unit made the nodes with begin <= number < end. Backward may still come to a
        # node of a forgotten call, below _since: it says nothing about which units are done
        self._since = _next_number()
        self._first_call: dict[Unit, int] = {}  # unit → begin, in the order of the calls
        self._under_way: list[tuple] = []  # (begin, unit, module): calls that have not returned
        # (begin, end, unit, its pass, weakly), inner calls before the outer one
        self._calls: list[tuple] = []
        self._pass = Pass()
        self._saved.end()  # of a forward that was cut off

    def _forget_the_dead(self) -> None:
        """At the start of a forward pass: forget calls to which no backward can come any more. An
        evaluation without no_grad() leaves nothing else behind."""
        self._pass = Pass()  # first, or this object would hold the last one
        self._calls = [call for call in self._calls if call[3]() is not None]
        self._first_call = {}
        for begin, _, unit, _ in sorted(self._calls, key=lambda call: call[0]):
            self._first_call.setdefault(unit, begin)

    def _before_forward(self, unit: Unit, module: nn.Module, _) -> None:
        if self.stage.shown:  # all is whole; one rank alone may be running
            return
        if module is not unit.module and self._is_at_work(unit):
            return
        self._refuse_elsewhere()
        if not self.stage.backward.running:
            if self._went_back:  # a forward after a backward
                # not at the end of backward: in forward A, forward B, backward A, backward B the
                # calls of B are needed after the first backward
                self._forget()
                self._went_back = False
            if module in (self.root.module, self._opened_by):
                self.begin("forward")
            if not self._now:
                self._opened_by = module
            if not self._under_way:
                self._forget_the_dead()
        if torch.is_grad_enabled():
            self._first_call.setdefault(unit, _next_number())
        self._under_way.append((_next_number(), unit, module))
        if not _in_backward():  # one pair of hooks serves all units of the call
            self._saved.begin(len(self._under_way))
        self._turn(unit)

    def _refuse_elsewhere(self) -> None:
        """Where the order of autograd's nodes, by which units are followed, does not hold."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(UNDER_FUNC)
        if torch.is_grad_enabled() and not _in_backward():
            self._thread = self._thread or threading.get_ident()
            if self._thread != threading.get_ident():
                raise RuntimeError(OTHER_THREAD)

    def _is_at_work(self, unit: Unit) -> bool:
        under_way = [one for _, one, _ in self._under_way]
        return bool(under_way) if unit is self.root else unit in under_way

    def _after_forward(self, unit: Unit, module: nn.Module, _, output) -> None:
        if not self._under_way:
            return self._refuse_late(module, output)  # _before_forward had nothing to do
        began, at_work, opened_by = self._under_way[-1]
        if opened_by is module:  # first of all: what is refused below leaves nothing under way
            if not _in_backward():
                self._saved.end(len(self._under_way))
            self._under_way.pop()
        self._refuse_late(module, output)
        returned, kept = list(tensors_in(output)), _kept(module)
        if opened_by is not module:  # a part of the unit at work
            for tensor in returned + kept:
                self._watch(tensor.grad_fn, lambda number: at_work if number >= began else None)
            return
        self._lend(unit)
        if output is None and sys.exc_info()[1] is not None:
            return  # forward has failed: what is under way may never arrive
        self._refuse_parameters(unit, returned)
        if torch.is_grad_enabled():
            self._calls.append((began, _next_number(), unit, weakref.ref(self._pass)))
            for tensor in returned + kept:
                self._watch(tensor.grad_fn, self._innermost)
        elif module is self.root.module:
            self.stage.evaluation_done()

    @staticmethod
    def _refuse_late(module: nn.Module, output) -> None:
        if isinstance(output, (Iterator, types.FunctionType)):
            raise RuntimeError(f"a {type(module).__name__} returns a {type(output).__name__}, "
                               "which would read parameters after its turn: return tensors, in a "
                               "list or a dict")

    @staticmethod
    def _refuse_parameters(unit: Unit, returned: list[torch.Tensor]) -> None:
        for tensor in returned:
            if any(same_storage(tensor, bucket.parameters) for bucket in unit.buckets):
                raise RuntimeError(f"unit {unit.name or 'root'!r} returns a part of its own "
                                   "parameters, which are freed after its turn: return a .clone() "
                                   "of it")

    def _innermost(self, number: int) -> Unit | None:
        """The innermost unit that ran when the node of this number was made."""
        ended_later = bisect.bisect_right(self._calls, number, key=lambda call: call[1])
        # inner calls come first in _calls
        owners = (unit for begin, _, unit, _ in self._calls[ended_later:] if begin <= number)
        return next(owners, None)

    def _watch(self, node, owner_of: Callable[[int], Unit | None]) -> None:
        if node is None or "watched" in node.metadata:
            return
        number = _ordered(node._sequence_nr())
        if owner := owner_of(number):
            node.metadata["watched"] = self._pass
            node.register_prehook(Tie(
                lambda turns, unit, *_: turns._before_backward(unit, number), self, owner,
                left=refuse_backward,
            ))

    def _before_backward(self, unit: Unit, number: int) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        if number < self._since and self.stage.backward.has_handed_over:
            raise RuntimeError(JOINT)
        if number >= self._since and self.stage.backward.running:
            for later, begin in reversed(self._first_call.items()):
                if begin > number:
                    for bucket in later.buckets:
                        self.stage.backward.hand_over(bucket)
        self._turn(unit)

    def _saved_is_read(self, unit: Unit) -> None:
        """Backward, or whoever looks into the graph, reads a parameter of the unit."""
        if not _in_backward():
            raise RuntimeError(f"a saved parameter of unit {unit.name or 'root'!r} is read outside "
                               "of backward(): at stage 3 it is there in its unit's turn alone")
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND)
        if not unit.whole:
            self.stage.backward.begin()  # of a loss that is not computed from the model's output
            # no turn: what is whole stays whole, since the same node may read of two units
            self.stage._gather(unit)
            self.stage._arrive(unit)

    def _lend(self, unit: Unit) -> None:
        """Lend the parameters that can be read and whose unit is not at work (lent.py)."""
        at_work = {one for _, called, _ in self._under_way for one in (called, *called.around)}
        for one in (unit, *unit.around):
            if one in at_work:
                lent.take_back(one.params)
            elif one.whole:
                lent.lend(one.params, Tie(Turns._used, self, one))

    def _used(self, unit: Unit, node, began: int) -> None:
        """Autograd has recorded an operation on a lent parameter: a small call of its unit."""
        if "watched" in node.metadata:
            return
        number, began = _ordered(node._sequence_nr()), _ordered(began)
        self._first_call.setdefault(unit, began)
        self._calls.append((began, _next_number(), unit, weakref.ref(self._pass)))
        node.metadata["watched"] = self._pass
        node.register_prehook(Tie(
            lambda turns, unit, *_: turns._before_lent(unit, number), self, unit,
            left=refuse_backward,
        ))

    def _before_lent(self, unit: Unit, number: int) -> None:
        self.stage.backward.begin()  # in a penalty, backward comes here before the model's output
        self._before_backward(unit, number)

    def _turn(self, unit: Unit) -> None:
        self._take_turn(unit)
        self._lend(unit)

    def _take_turn(self, unit: Unit) -> None:
        if unit.whole and self._now[-1:] == [unit]:
            return  # it is its turn already
        turn = len(self._now)
        as_before = self._last[turn : turn + 1] == [unit] and turn + 1 < len(self._last)
        self._now.append(unit)
        following = self._last[turn + 1] if as_before else None
        for bucket in [*unit.buckets, *(following.buckets if following else ())]:
            bucket.moment = self._moment()
        self.stage.unit_turn(unit, following)
        for listener in self._listeners:
            listener(unit)

    def _moment(self) -> str:
        step = self.stage.backward.steps + 1
        if self.stage.backward.running:
            return f"backward {self.stage.backward.passes + 1} of step {step}"
        return f"forward of step {step}" if torch.is_grad_enabled() else f"evaluation, step {step}"


def _kept(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module has put into attributes, or into lists there."""
    values = list(vars(module).values())
    values += [part for value in values if isinstance(value, (list, tuple)) for part in value]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _inner_owners(unit: Unit) -> list[nn.Module]:
    """Modules inside a unit's that have parameters of it. They may be called by themselves: an
    encoder, the head, an embedding. And what they compute may leave the unit on another way than in
    what it returns: an auxiliary loss, an attention map."""
    params = set(unit.params)
    return [module for module in unit.module.modules() if module is not unit.module
            and not params.isdisjoint(module.parameters(recurse=False))]


def refuse_backward(*_) -> None:
    """Of a graph whose saved parameters are gone."""
    raise RuntimeError(f"backward() comes too late: {LEFT_BEHIND}")


def _next_number() -> int:
    """The number of the next node of a graph."""
    return _ordered(torch.autograd._get_sequence_nr())


def _ordered(number: int) -> int:
    """Autograd's number of a node that is being made, such that nodes of a computation that runs
    again in backward come after those of forward. Autograd counts in each thread by itself, and
    backward on a GPU runs in a thread of its own: there its numbers begin at 0."""
    return number + IN_BACKWARD if _in_backward() else number


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
