"""Events: what happens on this rank, in order: gradients are computed, and collectives start, are waited for and end.

    with Events(model) as seen:
        with seen.span("backward"):
            loss.backward()
    seen.events            [Event("gradient", 0, …), Event("start", 0, …), Event("gradient", 1, …), …]
    overlapped(seen.events), collectives(seen.events), by_phase(seen.events)          what they show

Only collectives of the course's stages are recorded. Their order, but not the seconds, is the same on any machine if
ranks wait for each other. Classes that look at something at each event inherit from Events: Lanes, Written,
Conveyor, Trays.
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
    """A computed "gradient", or a collective's "start", "wait" or "end"."""

    kind: str
    number: int  # of the gradient or the collective, from 0, in the order of their first events
    bytes: int  # of the gradient; of the collective's payload
    seconds: float  # since recording began
    name: str = ""  # of the collective
    phase: str = ""  # one of PHASES, where modules are watched


class Span(NamedTuple):
    """A part of the rank's own work, in seconds since recording began."""

    name: str
    start: float
    end: float


class Collective(NamedTuple):
    """One collective: started, waited for from `wait` on, done at `end` (seconds); `bytes` is its payload.

    It is under way from its start to the end of its wait(). In wait() the rank itself stops, or sums what has arrived;
    before that the rank computes while the messages travel. That is the overlap.
    """

    name: str
    start: float
    wait: float
    end: float
    bytes: int


class Events:
    """Watches this rank while it is open: the gradients of `model`, if given; modules, if `modules` is True.

    events: a list of Events. computing: the Spans that span() named. ran: the classes of modules whose forward ran.
    """

    def __init__(self, model: nn.Module | None = None, modules: bool = False):
        self.params = [param for param in model.parameters() if param.requires_grad] if model else []
        self.modules, self.ran = modules, set()
        self.events: list[Event] = []
        self.computing: list[Span] = []
        self._under_way: dict[work.Call, int] = {}
        self._calls, self._gradients = itertools.count(), itertools.count()
        self._forwards = 0  # how many nested modules' forwards are running

    def __enter__(self):
        with contextlib.ExitStack() as undo:
            undo.enter_context(seams.heard_by("collective", self.hear))
            for param in self.params:
                undo.callback(param.register_hook(self._gradient).remove)
            if self.modules:
                undo.enter_context(register_module_forward_pre_hook(self._enters))
                undo.enter_context(register_module_forward_hook(self._returns, always_call=True))
            self._undo = undo.pop_all()
        self.began = time.perf_counter()  # seconds count from here. May be set to a moment that ranks share
        return self

    def __exit__(self, *error):
        self._undo.close()

    @contextlib.contextmanager
    def step(self):
        """As an observer of the training loop: a context around a step, whose events replace all earlier ones."""
        self.events.clear()
        with self:
            yield

    @contextlib.contextmanager
    def span(self, name: str):
        """A context around a part of the step, to name it."""
        start = time.perf_counter() - self.began
        yield
        self.computing.append(Span(name, start, time.perf_counter() - self.began))

    @property
    def collectives(self) -> list[Collective]:
        """The collectives that have ended."""
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
        if torch._C._current_graph_task_id() != -1:  # the autograd engine is running in this thread
            phase = "backward"
        self.events.append(Event(kind, number, bytes, time.perf_counter() - self.began, name, phase))


# ------------------------------------------------------------------------------------------------------- what they tell


def overlapped(events: Iterable[Event]) -> tuple[int, int]:
    """How many gradients were computed while a collective was under way (started, not yet waited for), and in all."""
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
    """The collectives that have ended, in that order."""
    ended, times = [], {}
    for event in events:
        if event.kind in ("start", "wait"):
            times.setdefault(event.number, []).append(event.seconds)
        elif event.kind == "end":
            ended.append(Collective(event.name, *times[event.number], event.seconds, event.bytes))
    return ended


def waited(events: Iterable[Event]) -> float:
    """Seconds that the rank spent in wait()."""
    return sum(each.end - each.wait for each in collectives(events))


def overlap(ended: list[Collective]) -> float:
    """The share of the time with a collective under way that the rank did not spend in wait()."""
    under_way, waiting = (sum(end - start for start, end in merged(spans)) for spans in (
        [(each.start, each.end) for each in ended], [(each.wait, each.end) for each in ended]))
    return (under_way - waiting) / under_way if under_way else 0.0


def by_phase(events: Iterable[Event]) -> dict[str, dict[str, int]]:
    """Bytes of the collectives that begin in each of PHASES: {phase: {name: bytes}}."""
    carried = {phase: {} for phase in PHASES}
    for event in events:
        if event.kind == "start":
            carried[event.phase][event.name] = carried[event.phase].get(event.name, 0) + event.bytes
    return carried


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of these spans of time: disjoint spans, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
