"""Progress: what a program prints on stderr while it works, so that users see that it does.

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

tqdm.set_lock(threading.RLock())  # tqdm's lock between processes would outlive a rank and be reported as leaked


def announce(words: str) -> None:
    """Announce work that takes a while. In a terminal, the next message of any rank replaces this one."""
    if sys.stderr.isatty():
        take_back()
        print(words[:shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
    else:
        print(words, file=sys.stderr, flush=True)


@contextlib.contextmanager
def meanwhile(words: str) -> Iterator[None]:
    """A context that announces its work, and clears the terminal's line at its end."""
    announce(words)
    try:
        yield
    finally:
        take_back()


def bar(steps: Iterable | None = None, *, name: str, total: int, unit: str = "step",
        shown: bool = True) -> "Bar | Lines":
    """An object to iterate over, or to update(), that shows progress. shown: for example on one rank only."""
    if shown:
        take_back()
    if shown and not sys.stderr.isatty():
        return Lines(steps, name, total, unit)
    return Bar(steps, desc=name, total=total, unit=unit, disable=not shown, dynamic_ncols=True)


class Bar(tqdm):
    """tqdm's bar, with a method for a note after it."""

    def note(self, words: str) -> None:
        """Set the text after the bar, from its next step on."""
        self.set_postfix_str(words, refresh=False)


class Lines(contextlib.AbstractContextManager):
    """The same as plain lines, for a pipe."""

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

    def __exit__(self, *_) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        """`count` more steps are done."""
        self.done += count
        if time.monotonic() - self._at > EVERY:
            self._say()

    def note(self, words: str) -> None:
        """Set the end of later lines."""
        self.words = words

    def set_description(self, name: str) -> None:
        """Set the beginning of later lines."""
        self.name = name

    def write(self, text: str, file=None) -> None:
        """Print other text meanwhile."""
        print(text, file=file or sys.stdout, flush=True)

    def close(self) -> None:
        """Print the final progress, unless a line already has."""
        if self._said != self.done:
            self._say()

    def _say(self) -> None:
        end = f", {self.words}" if self.words else ""
        print(f"{self.name}: {self.done} of {self.total} {self.unit}s{end}", file=sys.stderr, flush=True)
        self._said, self._at = self.done, time.monotonic()
