"""Units: the modules of a model that stage 3 gathers and frees as wholes.

Every element of every nn.ModuleList is a unit (the blocks of a transformer; of a list in a list,
its elements), and the rest of the model is the root unit. A parameter belongs to the innermost unit
around it; one that two units share belongs to the root.
"""

import bisect
import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_minimal.foundations import collectives
from zero_minimal.foundations.backward import tensors_in
from zero_minimal.foundations.layout import Bucket, same_storage
from zero_minimal.foundations.precision import keep_changes
from zero_minimal.foundations.released import refuse_left_behind, restore
from zero_minimal.foundations.ties import LEFT_BEHIND, Tie


@dataclass(eq=False)
class Unit:
    """A module, the parameters gathered for it, and whether they are here. Its buckets are several
    if its parameters differ in optimizer group, dtype or device."""

    name: str
    module: nn.Module
    params: list[nn.Parameter] = field(default_factory=list)
    around: list["Unit"] = field(default_factory=list)  # those that enclose it: they stay with it
    buckets: list[Bucket] = field(default_factory=list)
    whole: bool = False  # its parameters can be read
    gathering: list = field(default_factory=list)  # all-gathers under way


def find_units(model: nn.Module, units: Iterable[nn.Module] | None = None) -> list[Unit]:
    """The model's units in the order of registration, the root first.

    Args: units: modules to take instead of the elements of module lists.
    Raises: TypeError if `model` is not a module, ValueError if a unit is not a part of it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a stage takes an nn.Module, and was given a {type(model).__name__}")
    names = {module: name for name, module in model.named_modules()}
    modules = list(_elements(model) if units is None else units)
    strangers = [module for module in modules if module not in names]
    if strangers:
        stranger = type(strangers[0]).__name__
        raise ValueError(f"units= holds a {stranger} that is not a part of the model")
    root = Unit("", model)
    found = {model: root}
    for module in sorted(set(modules), key=list(names).index):
        found.setdefault(module, Unit(names[module], module))
    for unit in found.values():
        unit.around = [other for other in found.values()
                       if other is not unit and unit.module in other.module.modules()]
    for param, owners in _owners(found).items():
        (owners[0] if len(owners) == 1 else root).params.append(param)
    return [unit for unit in found.values() if unit.params or unit is root]


def _elements(model: nn.Module):
    """What module lists hold. A list or dict within a list has no forward, so its elements are the
    units."""
    for container in model.modules():
        if isinstance(container, nn.ModuleList):
            yield from _callable(container)


def _callable(container: nn.Module):
    for element in container.children():
        if type(element).forward is nn.Module.forward:
            yield from _callable(element)
        else:
            yield element


def _owners(found: dict) -> dict:
    """parameter → the innermost units that hold it."""
    owners, seen, to_visit = {}, set(), [(next(iter(found)), None)]
    # no function that calls itself: it would keep the units alive until the next garbage collection
    while to_visit:
        module, unit = to_visit.pop()
        unit = found.get(module, unit)
        if (module, unit) in seen:
            continue
        seen.add((module, unit))
        for param in module.parameters(recurse=False):
            if unit not in owners.setdefault(param, []):
                owners[param].append(unit)
        to_visit += [(child, unit) for child in reversed(list(module.children()))]
    return owners


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

    How is backward followed? Through hooks on the grad_fn of each tensor that a unit returns (or a
    module with parameters of the root), and on no other node: backward enters at the outputs. The
    turn is that of the innermost unit that ran when the node was made.

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
        self._passes: dict = {"forward": [], "backward": []}
        self._opened_by: nn.Module | None = None  # the module whose call began the forward pass
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

    def begin(self, kind: str) -> None:
        """A "forward" or "backward" pass begins."""
        self._last = self._passes[kind]
        self._now = self._passes[kind] = []
        self._went_back = kind == "backward"

    def _forget(self) -> None:
        # a call of a unit made the nodes with begin <= number < end. Backward may still come to a
        # node of a forgotten call, below _since: it says nothing about which units are done
        self._since = _next_number()
        self._first_call: dict[Unit, int] = {}  # unit → begin, in the order of the calls
        self._under_way: list[tuple] = []  # (begin, unit, module): calls that have not returned
        # (begin, end, unit, its pass, weakly), inner calls before the outer one
        self._calls: list[tuple] = []
        self._pass = Pass()

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
        self._turn(unit)

    def _is_at_work(self, unit: Unit) -> bool:
        under_way = [one for _, one, _ in self._under_way]
        return bool(under_way) if unit is self.root else unit in under_way

    def _after_forward(self, unit: Unit, module: nn.Module, _, output) -> None:
        if isinstance(output, (Iterator, types.FunctionType)):
            raise RuntimeError(f"a {type(module).__name__} returns a {type(output).__name__}, "
                               "which would read parameters after its turn: return tensors, in a "
                               "list or a dict")
        for tensor in (tensors := list(tensors_in(output))):
            if any(same_storage(tensor, bucket.parameters) for bucket in unit.buckets):
                raise RuntimeError(f"unit {unit.name or 'root'!r} returns a part of its own "
                                   "parameters, which are freed after its turn: return a .clone() "
                                   "of it")
        if not self._under_way:
            return  # _before_forward had nothing to do
        tensors += _kept(module)
        began, at_work, opened_by = self._under_way[-1]
        if opened_by is not module:  # a part of the unit at work
            for tensor in tensors:
                self._watch(tensor.grad_fn, lambda number: at_work if number >= began else None)
            return
        self._under_way.pop()
        if output is None and sys.exc_info()[1] is not None:
            return  # forward has failed: what is under way may never arrive
        if torch.is_grad_enabled():
            self._calls.append((began, _next_number(), unit, weakref.ref(self._pass)))
            for tensor in tensors:
                self._watch(tensor.grad_fn, self._innermost)
        elif module is self.root.module:
            self.stage.evaluation_done()

    def _innermost(self, number: int) -> Unit | None:
        """The innermost unit that ran when the node of this number was made."""
        ended_later = bisect.bisect_right(self._calls, number, key=lambda call: call[1])
        # inner calls come first in _calls
        owners = (unit for begin, _, unit, _ in self._calls[ended_later:] if begin <= number)
        return next(owners, None)

    def _watch(self, node, owner_of: Callable[[int], Unit | None]) -> None:
        if node is None or "watched" in node.metadata:
            return
        number = node._sequence_nr()
        if owner := owner_of(number):
            node.metadata["watched"] = self._pass
            node.register_prehook(Tie(
                lambda turns, unit, *_: turns._before_backward(unit, number), self, owner,
                left=refuse_backward,
            ))

    def _before_backward(self, unit: Unit, number: int) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("stage 3 frees parameters after each turn, so it cannot serve "
                               "create_graph=True")
        if number >= self._since:
            for later, begin in reversed(self._first_call.items()):
                if begin > number:
                    for bucket in later.buckets:
                        self.stage.backward.hand_over(bucket)
        self._turn(unit)

    def _turn(self, unit: Unit) -> None:
        if unit.whole and self._now[-1:] == [unit]:
            return  # it is its turn already
        turn = len(self._now)
        as_before = self._last[turn : turn + 1] == [unit] and turn + 1 < len(self._last)
        self._now.append(unit)
        following = self._last[turn + 1] if as_before else None
        for bucket in [*unit.buckets, *(following.buckets if following else ())]:
            bucket.moment = self._moment()
        self.stage.unit_turn(unit, following)

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
    """The number that autograd will give to the next node of a graph."""
    return torch.autograd._get_sequence_nr()


@contextlib.contextmanager
def whole_parameters(buckets: list[Bucket], rank: int, group=None) -> Iterator[None]:
    """Context in which the parameters are whole, in new memory: what the caller keeps of it stays
    valid. At its end edits are carried over to this rank's shards, but not if it ends with an
    error: one rank may have had it alone. All ranks must enter it, and none may run backward
    inside."""
    give_back(buckets, group)
    yield
    with torch.no_grad():
        for bucket in buckets:
            whole = bucket.zeros()
            for param in bucket.params:
                bucket.flat.view(whole, param).copy_(param.data)
            bucket.parameter_shard.copy_(bucket.shard(whole, rank))
            if bucket.trained:
                keep_changes(bucket)


@torch.no_grad()
def give_back(buckets: list[Bucket], group=None) -> None:
    """Make the parameters whole again, in new memory, from all ranks' shards."""
    for bucket in buckets:
        whole = bucket.zeros()
        collectives.all_gather(whole, bucket.parameter_shard, group=group, of=bucket.name)
        for param in bucket.params:
            restore(param, bucket.flat.view(whole, param))


def refuse_state_dict(stage) -> None:
    """Let state_dict() and load_state_dict() of stage.model, and of each module in it, raise an
    error that says what to do, unless stage.shown: a state dict of placeholders would be a
    checkpoint of NaN."""

    def refuse(stage, module, *_):
        if not stage.shown and any(True for _ in module.parameters()):
            raise RuntimeError("at stage 3 a rank holds shards only: put model.state_dict() or "
                               "model.load_state_dict() under `with zero.gather_parameters():`, "
                               "on all ranks; or save zero.state_dict(), this rank's part")

    tie = Tie(refuse, stage, left=refuse_left_behind)
    for module in stage.model.modules():
        module.register_state_dict_pre_hook(tie)
        module.register_load_state_dict_pre_hook(tie)
