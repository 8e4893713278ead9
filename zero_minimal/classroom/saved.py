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
COARSE = 2.0  # seconds: no file system's clock is coarser


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
        self._signature, self._at, self._read = None, 0.0, None

    def wait(self, missing=lambda: None) -> Saved:
        """Until there is something else than before. missing() is called once if the file is gone for a while."""
        known, seen, since, gone = self.taken.digest, None, time.monotonic(), False
        while True:
            now, found = time.monotonic(), self.look()
            if found != seen:
                seen, since = found, now
            elif found is None and now - since > COARSE and not gone:
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
        """What is there now; None if there is no file. It is read where its dates or its size say that it may be new,
        or its dates are too young to say so."""
        try:
            files = [self.file, *helpers(self.file)]
            states = [(file.name, file.stat()) for file in files]
            signature = [(name, state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino)
                         for name, state in states]
            young = time.time() - max(state.st_ctime for _, state in states) < COARSE
            if signature != self._signature or young:
                self._read = _read(files)
                self._signature = signature
        except OSError:  # in the middle of a rename
            self._signature = self._read = None
        return self._read


def _read(files: list[Path]) -> Saved:
    sum, own, *others = hashlib.sha256(), *(file.read_bytes() for file in files)
    for file, data in zip(files, (own, *others), strict=True):
        sum.update(f"{file.name} {len(data)} ".encode() + data)
    return Saved(decoded(own), sum.hexdigest())
