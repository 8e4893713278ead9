"""Arrivals: when gradients come in a backward pass, and when collectives start, are waited for and end; in order.

    with Arrivals(model) as arrivals:
        loss.backward()
    arrivals.events       [Event("gradient", 0, …), Event("start", 0, …), Event("gradient", 1, …), …]
    overlapped(arrivals.events)

The order is the same on any machine, as long as ranks wait for each other; the seconds are not.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from zero_minimal.core import seams, work


class Event(NamedTuple):
    """A gradient that comes, or a collective's "start", "wait" or "end"."""

    kind: str
    number: int  # of the gradient, or of the collective, from 0 in the order in which they come or start
    bytes: int
    seconds: float  # since the watching began


class Arrivals:
    """Watches this rank while it is open. events: a list of Events."""

    def __init__(self, model: nn.Module):
        self.model, self.events = model, []
        self._gradients, self._calls = 0, {}

    def __enter__(self):
        self._hooks = [param.register_hook(lambda gradient: self._came(gradient.nbytes))
                       for param in self.model.parameters() if param.requires_grad]
        self._listening = seams.heard_by("collective", self._hear)
        self._listening.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error):
        self._listening.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _came(self, bytes: int) -> None:
        self._note("gradient", self._gradients, bytes)
        self._gradients += 1

    def _hear(self, moment: str, call: work.Call) -> None:
        self._note(moment, self._calls.setdefault(call, len(self._calls)), call.bytes)

    def _note(self, kind: str, number: int, bytes: int) -> None:
        self.events.append(Event(kind, number, bytes, time.perf_counter() - self._began))


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


def waited(events: Iterable[Event]) -> float:
    """Seconds in which the rank stood in wait()."""
    began = {}
    total = 0.0
    for event in events:
        if event.kind == "wait":
            began[event.number] = event.seconds
        elif event.kind == "end":
            total += event.seconds - began.pop(event.number)
    return total
