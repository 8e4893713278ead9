"""Record: a learner's guesses, and points by step, in one file at the top of the checkout.

    record.add_guess("03_gradients", "MB of gradients on rank 0?", 24, 12.3, unit="MB")
    record.add_points("03_gradients", {2: 20}, of={1: 40, 2: 25, 3: 20, 4: 15})     # only step 2 was graded

The file is .progress.json, which git ignores. ZERO_PROGRESS=FILE names another one, and ZERO_PROGRESS= keeps nothing.
No function here raises if the file cannot be written: one line on stderr says so, once.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from zero_minimal.programs import report

HOUSE = Path(__file__).parents[2]  # the checkout
NAME = ".progress.json"
PATIENCE = 5.0  # seconds to wait while another process writes


@dataclass
class Guess:
    """A guess before a run, and the run's measurement."""

    guess: float
    measured: float
    unit: str
    at: str  # date and time, ISO 8601


@dataclass
class Mark:
    """Points of a step, or of a whole lesson: the best so far and the last, each with its date and time."""

    of: float
    best: float
    best_at: str
    last: float
    last_at: str


@dataclass
class Lesson:
    """A learner's record of one lesson."""

    guesses: dict[str, list[Guess]] = field(default_factory=dict)  # by question, the first guess first
    steps: dict[int, Mark] = field(default_factory=dict)
    whole: Mark | None = None  # of grades of all steps
    together: Mark | None = None  # the sum of all steps' last points, from any grades


def add_guess(lesson: str, question: str, guess: float, measured: float, unit: str = "") -> None:
    """Record a guess, in the unit of the measurement. A repeated guess counts once; nan and inf are ignored."""
    new = Guess(float(guess), float(measured), unit, _now())

    def add(lessons: dict[str, Lesson]) -> None:
        made = lessons.setdefault(lesson, Lesson()).guesses.setdefault(question, [])
        if not made or made[-1].guess != new.guess:
            made.append(new)

    if math.isfinite(new.guess) and math.isfinite(new.measured):
        _change(add)


def add_points(lesson: str, points: dict[int, float], of: dict[int, float]) -> None:
    """Record the points of a grade.

    Args:
        points: {step: points} of the graded steps.
        of: {step: maximum points} of all steps of the lesson.
    """

    def add(lessons: dict[str, Lesson]) -> None:
        kept = lessons.setdefault(lesson, Lesson())
        for step, earned in points.items():
            kept.steps[step] = _marked(kept.steps.get(step), earned, of[step])
        if points.keys() == of.keys():
            kept.whole = _marked(kept.whole, sum(points.values()), sum(of.values()))
        last = sum(kept.steps[step].last for step in of if step in kept.steps)
        kept.together = _marked(kept.together, last, sum(of.values()))

    _change(add)


def read() -> dict[str, Lesson]:
    """The record, by lesson; {} if there is none."""
    file = place()
    try:
        if file is not None:
            with _locked(file):
                return _load(file)
    except OSError as error:
        _say_once(f"your progress cannot be read: {file} ({error.strerror or error})")
    return {}


def place() -> Path | None:
    """The file, None if nothing is kept."""
    named = os.environ.get("ZERO_PROGRESS")
    if named is None:  # an installed package has no checkout
        named = HOUSE / NAME if (HOUSE / "lessons").is_dir() else ""
    file = Path(named).resolve() if named else None
    if file and file.exists() and not file.is_file():  # os.replace would replace even /dev/null by a file
        return None
    return file


def _marked(before: Mark | None, points: float, of: float) -> Mark:
    now = _now()
    if before is None or before.of != of or points >= before.best:
        return Mark(of, points, now, points, now)
    return dataclasses.replace(before, last=points, last_at=now)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


# ------------------------------------------------------------------------------------------------------------ the file


def _change(change: Callable[[dict[str, Lesson]], None]) -> None:
    """Read the record, change it and write it, while other processes are locked out."""
    file = place()
    if file is None:
        return
    try:
        with _locked(file):
            lessons = _load(file)
            change(lessons)
            entries = {name: dataclasses.asdict(lesson) for name, lesson in lessons.items()}
            report.write(json.dumps({"lessons": entries}, indent=1) + "\n", file)
    except OSError as error:
        _say_once(f"your progress is not kept: {file} cannot be written ({error.strerror or error})")


def _load(file: Path) -> dict[str, Lesson]:
    """Load the record. A broken file is renamed, not lost. Raises: OSError if it cannot be read."""
    try:
        return {name: _lesson(entry) for name, entry in json.loads(file.read_text())["lessons"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):  # including UnicodeDecodeError
        number = 1
        while (aside := file.with_name(f"{file.name}.broken-{number}")).exists():
            number += 1
        os.replace(file, aside)
        print(f"{file.name} could not be read. It is kept as {aside.name}, and a new one begins.", file=sys.stderr)
        return {}


def _lesson(entry: dict) -> Lesson:
    """Raises: ValueError, KeyError, TypeError or AttributeError if it is not what `_change` writes."""
    lesson = Lesson(
        {question: [Guess(**guess) for guess in made] for question, made in entry["guesses"].items()},
        {int(step): Mark(**mark) for step, mark in entry["steps"].items()},
        entry["whole"] and Mark(**entry["whole"]),
        Mark(**entry["together"]) if entry.get("together") else None,  # older files have none
    )
    marks = [*lesson.steps.values(), *filter(None, [lesson.whole, lesson.together])]
    guesses = [guess for made in lesson.guesses.values() for guess in made]
    numbers = [number for mark in marks for number in (mark.of, mark.best, mark.last)]
    if not all(map(math.isfinite, numbers + [number for guess in guesses for number in (guess.guess, guess.measured)])):
        raise ValueError
    for date in (date for mark in marks for date in (mark.best_at, mark.last_at)):
        datetime.fromisoformat(date)
    return lesson


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """A context in which no other process changes the file. It locks the folder, since the file itself is replaced.

    Raises: OSError if it stays locked.
    """
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError("another program holds it") from None
                time.sleep(0.02)
                continue
            except OSError:  # a file system without locks: continue without
                pass
            break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_UN)  # a process forked meanwhile would keep the lock
        os.close(folder)


_said: set[str] = set()


def _say_once(words: str) -> None:
    if words not in _said:
        _said.add(words)
        print(words, file=sys.stderr, flush=True)
