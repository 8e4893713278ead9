"""Spans: when a rank computes, and when its collectives are under way. What a time line is drawn from.

    with Spans() as spans:
        with spans.span("forward"):
            loss = model(x, y)
        with spans.span("backward"):
            loss.backward()
    spans.computing, spans.collectives

A collective is under way from its start to the end of its wait(). In wait() the rank itself stands still, or sums what
has arrived; before that it computes, and the messages travel meanwhile. That is the overlap.
"""

import contextlib
import time
from typing import NamedTuple

from zero_minimal.core import seams, work


class Span(NamedTuple):
    """A part of what the rank does itself, in seconds since the watching began."""

    name: str
    start: float
    end: float


class Collective(NamedTuple):
    """One collective: started, waited for from `wait` on, done at `end` (seconds); `bytes` is its payload."""

    name: str
    start: float
    wait: float
    end: float
    bytes: int


class Spans:
    """Watches this rank while it is open. computing: a list of Spans; collectives: a list of Collectives."""

    def __enter__(self):
        self.computing: list[Span] = []
        self.collectives: list[Collective] = []
        self._times: dict = {}  # of those under way: {call: [start, wait]}
        self.began = time.perf_counter()  # all seconds count from here. May be set: to a moment that ranks share
        self._listening = seams.heard_by("collective", self._hear)
        self._listening.__enter__()
        return self

    def __exit__(self, *error):
        self._listening.__exit__(*error)

    def _hear(self, moment: str, call: work.Call) -> None:
        if moment == "end":
            start, wait = self._times.pop(call)
            self.collectives.append(Collective(call.name, start, wait, self._now(), call.bytes))
        else:
            self._times.setdefault(call, []).append(self._now())

    @contextlib.contextmanager
    def span(self, name: str):
        """Around a part of the step, to name it."""
        start = self._now()
        yield
        self.computing.append(Span(name, start, self._now()))

    @property
    def overlap(self) -> float:
        """The share of the time with a collective under way in which the rank did not stand in a wait()."""
        under_way = _length([(each.start, each.end) for each in self.collectives])
        waiting = _length([(each.wait, each.end) for each in self.collectives])
        return (under_way - waiting) / under_way if under_way else 0.0

    def _now(self) -> float:
        return time.perf_counter() - self.began


def _length(intervals: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
