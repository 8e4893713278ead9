"""Events: what comes on this rank, in order: gradients, and collectives that start, are waited for and end.

    with Events(model) as seen:
        with seen.span("backward"):
            loss.backward()
    seen.events            [Event("gradient", 0, …), Event("start", 0, …), Event("gradient", 1, …), …]
    overlapped(seen.events), collectives(seen.events), by_phase(seen.events)          what they tell

Collectives are those of the course's own stages. Their order is the same on any machine, as long as ranks wait for each
other; the seconds are not. Who looks at something at each of them inherits from Events: Lanes, Written, Conveyor.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zero_minimal.core import seams, work

PHASES = ("forward", "backward", "update")


class Event(NamedTuple):
    """A "gradient" that comes, or a collective's "start", "wait" or "end"."""

    kind: str
    number: int  # of the gradient, or of the collective, from 0 in the order in which they come or start
    bytes: int  # of the gradient; of the collective's payload
    seconds: float  # since the watching began
    name: str = ""  # of the collective
    phase: str = ""  # one of PHASES, where modules are watched


class Span(NamedTuple):
    """A part of what the rank does itself, in seconds since the watching began."""

    name: str
    start: float
    end: float


class Collective(NamedTuple):
    """One collective: started, waited for from `wait` on, done at `end` (seconds); `bytes` is its payload.

    It is under way from its start to the end of its wait(). In wait() the rank itself stands still, or sums what has
    arrived; before that it computes, and the messages travel meanwhile. That is the overlap.
    """

    name: str
    start: float
    wait: float
    end: float
    bytes: int


class Events:
    """Watches this rank while it is open: gradients of a model, if one is given; modules, if it is told to.

    events: a list of Events. computing: the Spans that span() named. ran: classes of modules whose forward ran.
    """

    def __init__(self, model: nn.Module | None = None, modules: bool = False):
        self.params = [param for param in model.parameters() if param.requires_grad] if model else []
        self.modules, self.ran = modules, set()
        self.events: list[Event] = []
        self.computing: list[Span] = []
        self._under_way: dict[work.Call, int] = {}
        self._calls, self._gradients = itertools.count(), itertools.count()
        self._forwards = 0  # how many modules' forward is running, one in another

    def __enter__(self):
        with contextlib.ExitStack() as undo:
            undo.enter_context(seams.heard_by("collective", self.hear))
            for param in self.params:
                undo.callback(param.register_hook(self._gradient).remove)
            if self.modules:
                undo.enter_context(register_module_forward_pre_hook(self._enters))
                undo.enter_context(register_module_forward_hook(self._returns, always_call=True))
            self._undo = undo.pop_all()
        self.began = time.perf_counter()  # all seconds count from here. May be set: to a moment that ranks share
        return self

    def __exit__(self, *error):
        self._undo.close()

    @contextlib.contextmanager
    def step(self):
        """As an observer of the training loop: around a step, which is then all that it has seen."""
        self.events.clear()
        with self:
            yield

    @contextlib.contextmanager
    def span(self, name: str):
        """Around a part of the step, to name it."""
        start = time.perf_counter() - self.began
        yield
        self.computing.append(Span(name, start, time.perf_counter() - self.began))

    @property
    def collectives(self) -> list[Collective]:
        """Those that have ended."""
        return collectives(self.events)

    def hear(self, moment: str, call: work.Call) -> None:
        """A collective at its "start", "wait" or "end"."""
        if call not in self._under_way:
            self._under_way[call] = next(self._calls)
        number = self._under_way.pop(call) if moment == "end" else self._under_way[call]
        self._note(moment, number, call.bytes, call.name)

    def _gradient(self, gradient: torch.Tensor) -> None:
        self._note("gradient", next(self._gradients), gradient.nbytes)

    def _enters(self, module: nn.Module, *_) -> None:
        self.ran.add(type(module).__name__)
        self._forwards += 1

    def _returns(self, *_) -> None:
        self._forwards -= 1

    def _note(self, kind: str, number: int, bytes: int, name: str = "") -> None:
        phase = "forward" if self._forwards else "update"
        if torch._C._current_graph_task_id() != -1:  # the autograd engine is at work, in this thread
            phase = "backward"
        self.events.append(Event(kind, number, bytes, time.perf_counter() - self.began, name, phase))


# ------------------------------------------------------------------------------------------------------- what they tell


def overlapped(events: Iterable[Event]) -> tuple[int, int]:
    """How many gradients came while a collective was under way (started, and not yet waited for), and how many came."""
    under_way, meanwhile, count = set(), 0, 0
    for event in events:
        if event.kind == "start":
            under_way.add(event.number)
        elif event.kind == "wait":
            under_way.discard(event.number)
        elif event.kind == "gradient":
            count += 1
            meanwhile += bool(under_way)
    return meanwhile, count


def collectives(events: Iterable[Event]) -> list[Collective]:
    """Those that have ended, in that order."""
    ended, times = [], {}
    for event in events:
        if event.kind in ("start", "wait"):
            times.setdefault(event.number, []).append(event.seconds)
        elif event.kind == "end":
            ended.append(Collective(event.name, *times[event.number], event.seconds, event.bytes))
    return ended


def waited(events: Iterable[Event]) -> float:
    """Seconds in which the rank stood in wait()."""
    return sum(each.end - each.wait for each in collectives(events))


def overlap(ended: list[Collective]) -> float:
    """The share of the time with a collective under way in which the rank did not stand in a wait()."""
    under_way, waiting = (sum(end - start for start, end in merged(spans)) for spans in (
        [(each.start, each.end) for each in ended], [(each.wait, each.end) for each in ended]))
    return (under_way - waiting) / under_way if under_way else 0.0


def by_phase(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """In which of PHASES collectives begin, and what they carry: {phase: {name: bytes}}."""
    carried = {phase: {} for phase in PHASES}
    for event in events:
        if event.kind == "start":
            carried[event.phase][event.name] = carried[event.phase].get(event.name, 0) + event.bytes
    return carried


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, in order, that do not touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
