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

from zero_minimal.foundations import collectives
from zero_minimal.meters.traffic import OURS


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
        self._inside = False  # a collective is made of others: the outermost counts
        self._began = time.perf_counter()
        self._originals = {name: getattr(collectives, name) for name in OURS}
        for name, function in self._originals.items():
            setattr(collectives, name, self._timed(name, function))
        return self

    def __exit__(self, *error):
        for name, function in self._originals.items():
            setattr(collectives, name, function)

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
        return time.perf_counter() - self._began

    def _timed(self, name: str, function):
        def collective(*args, **kwargs):
            if self._inside:
                return function(*args, **kwargs)
            start, payload = self._now(), max(tensor.nbytes for tensor in args if hasattr(tensor, "nbytes"))
            self._inside = True
            try:
                pending = function(*args, **kwargs)
            finally:
                self._inside = False
            if pending is None:  # it was waited for at once
                self.collectives.append(Collective(name, start, start, self._now(), payload))
                return None
            return _Pending(self, pending, name, start, payload)

        return collective


class _Pending:
    def __init__(self, spans: Spans, pending, name: str, start: float, payload: int):
        self._spans, self._pending, self._facts = spans, pending, (name, start, payload)

    def wait(self):
        spans, (name, start, payload) = self._spans, self._facts
        wait, before, spans._inside = spans._now(), spans._inside, True
        try:
            self._pending.wait()
        finally:
            spans._inside = before
        spans.collectives.append(Collective(name, start, wait, spans._now(), payload))


def _length(intervals: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
