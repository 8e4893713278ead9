"""Saved: what a learner's editor has saved, once it is whole. Editors write beside and rename, write twice, or leave
half a file for a moment; so what counts is what the files hold, and that they have held it for a while."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom.course_copy import helpers
from zero_minimal.classroom.submission import decoded, syntax_error

POLL = 0.1  # seconds between two looks
SETTLED = 0.1  # seconds for which a file must have stayed as it is
DOUBTFUL = 0.6  # the same, of one that is empty or no Python: it may be half a file
GONE = 2.0  # seconds after which a file that is not there is missing


@dataclass(frozen=True)
class Saved:
    """The file, and in `digest` the Python files beside it too."""

    text: str
    digest: str

    @property
    def error(self) -> str:
        """Why it cannot be graded, in words; "" if it can."""
        return syntax_error(self.text)


class Place:
    """Where something is saved: a file, and the Python files beside it. `taken` is what was waited for last."""

    def __init__(self, file: Path):
        self.file, self.taken = file, Saved("", "")

    def wait(self, missing=lambda: None) -> Saved:
        """Until there is something else than before. missing() is called once if the file is gone for a while."""
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
        """Whether something else is there than what was taken; if so, whatever comes is new."""
        if (found := self.look()) is not None and found.digest == self.taken.digest:
            return False
        self.taken = Saved("", "")
        return True

    def look(self) -> Saved | None:
        """What is there now; None if there is no file. (Dates are not asked: they can be too coarse to tell.)"""
        try:
            texts = {file.name: file.read_bytes() for file in (self.file, *helpers(self.file))}
        except OSError:  # in the middle of a rename
            return None
        digest = hashlib.sha256(repr(texts).encode()).hexdigest()
        return Saved(decoded(texts[self.file.name]), digest)
