"""Saved: waits until a learner's editor has saved a complete file. Editors write another file and rename it, write
twice, or briefly leave half a file; so only contents count, once they have been stable for a while."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom.course_copy import helpers
from zero_minimal.classroom.submission import decoded, syntax_error

POLL = 0.1  # seconds between two reads
SETTLED = 0.1  # seconds for which a file must have been unchanged
DOUBTFUL = 0.6  # the same for a file that is empty or not Python: it may be incomplete
GONE = 2.0  # seconds after which an absent file counts as missing


@dataclass(frozen=True)
class Saved:
    """A file's text; `digest` also covers the Python files in its folder."""

    text: str
    digest: str

    @property
    def error(self) -> str:
        """Why the file cannot be graded, in words; "" if it can."""
        return syntax_error(self.text)


class Place:
    """A watched file and the Python files in its folder. `taken`: what the last wait() returned."""

    def __init__(self, file: Path):
        self.file, self.taken = file, Saved("", "")

    def wait(self, missing=lambda: None) -> Saved:
        """Wait for a change. missing() is called once if the file is absent for a while."""
        known, seen, since, gone = self.taken.digest, None, time.monotonic(), False
        while True:
            now, found = time.monotonic(), self.look()
            if found != seen:
                seen, since = found, now
            elif found is None and now - since > GONE and not gone:
                gone = True
                missing()
            elif found and found.digest != known and now - since >= (
                    DOUBTFUL if found.error or not found.text.strip() else SETTLED):
                self.taken = found
                return found
            time.sleep(POLL)

    def changed(self) -> bool:
        """Whether the file differs from `taken`; if so, the next wait() returns any content."""
        if (found := self.look()) is not None and found.digest == self.taken.digest:
            return False
        self.taken = Saved("", "")
        return True

    def look(self) -> Saved | None:
        """The current content; None if there is no file. (File times are not used: they can be too coarse.)"""
        try:
            texts = {file.name: file.read_bytes() for file in (self.file, *helpers(self.file))}
        except OSError:  # during a rename
            return None
        digest = hashlib.sha256(repr(texts).encode()).hexdigest()
        return Saved(decoded(texts[self.file.name]), digest)
