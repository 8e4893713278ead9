"""Progress: what a program says on stderr while it works, so that nobody has to wonder whether it does.

In a terminal there is a bar. In a pipe or a file, where a bar would be one endless line, there are plain lines: one at
the start, one at the end, and one every ten seconds in between. Neither has colours or other codes.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator

from tqdm import tqdm

from zero_minimal.processes.interrupts import take_back

EVERY = 10.0  # seconds from line to line

tqdm.set_lock(threading.RLock())  # its own lock, between processes, would outlive a rank and be reported as leaked


def announce(words: str) -> None:
    """Say what is about to take a while. In a terminal what is said next, by any rank, takes its place."""
    if sys.stderr.isatty():
        take_back()
        print(words[:shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
    else:
        print(words, file=sys.stderr, flush=True)


@contextlib.contextmanager
def meanwhile(words: str) -> Iterator[None]:
    """Context in which this is done, with the line of a terminal clear again at its end."""
    announce(words)
    try:
        yield
    finally:
        take_back()


def bar(steps: Iterable | None = None, *, name: str, total: int, unit: str = "step",
        shown: bool = True) -> "Bar | Lines":
    """Something to iterate over, or to update(), that shows how far the work is. shown: on one rank, say."""
    if shown:
        take_back()
    if shown and not sys.stderr.isatty():
        return Lines(steps, name, total, unit)
    return Bar(steps, desc=name, total=total, unit=unit, disable=not shown, dynamic_ncols=True)


class Bar(tqdm):
    """tqdm's, with one word for a note beside it."""

    def note(self, words: str) -> None:
        """What stands behind the bar from its next step on."""
        self.set_postfix_str(words, refresh=False)


class Lines:
    """The same for a pipe."""

    def __init__(self, steps: Iterable | None, name: str, total: int, unit: str):
        self.steps, self.name, self.total, self.unit = steps, name, total, unit
        self.done, self.words = 0, ""
        self._said, self._at = -1, 0.0
        self._say()

    def __iter__(self) -> Iterator:
        for step in self.steps:
            yield step
            self.update()
        self.close()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        """So much more is done."""
        self.done += count
        if time.monotonic() - self._at > EVERY:
            self._say()

    def note(self, words: str) -> None:
        """What the lines from now on end with."""
        self.words = words

    def set_description(self, name: str) -> None:
        """What the lines from now on begin with."""
        self.name = name

    def write(self, text: str, file=None) -> None:
        """Print something else meanwhile."""
        print(text, file=file or sys.stdout, flush=True)

    def close(self) -> None:
        """Say how far it came, if no line has yet."""
        if self._said != self.done:
            self._say()

    def _say(self) -> None:
        end = f", {self.words}" if self.words else ""
        print(f"{self.name}: {self.done} of {self.total} {self.unit}s{end}", file=sys.stderr, flush=True)
        self._said, self._at = self.done, time.monotonic()
