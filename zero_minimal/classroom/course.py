"""python -m zero_minimal progress: all lessons, what you have earned and guessed in each, and what to do next.

A lesson is found by its folder lessons/NN_name, and named by the table in lessons/README.md.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from zero_minimal.classroom.drawn import as_drawn
from zero_minimal.classroom.lessons import HOUSE, Lesson, found
from zero_minimal.classroom.submission import text_of
from zero_minimal.programs import record
from zero_minimal.programs.words import COLUMNS, paragraph

NEAR = 0.1  # a guess is near if it is off by at most this share of the measurement
ROW = re.compile(r"^\| *\[?(\d\d) ([^\]|]+?)\]?(?:\([^)]*\))? *\|", re.MULTILINE)
NONE = "–"


@dataclass
class Entry:
    """One lesson of the course, written or not, and the learner's progress in it."""

    number: str  # two digits
    title: str
    folder: Path | None
    lesson: Lesson | None  # None if it has no assignment
    done: record.Lesson

    @property
    def marks(self) -> dict[int, record.Mark]:
        """Marks by step, for steps that have points."""
        numbers = [step.number for step in self.lesson.steps] if self.lesson else []
        return {number: self.done.steps[number] for number in numbers if number in self.done.steps}

    @property
    def last(self) -> tuple[float, str]:
        """The sum of the steps' latest points, and when the newest were earned."""
        return (sum(mark.last for mark in self.marks.values()),
                max((mark.last_at for mark in self.marks.values()), default=""))

    @property
    def best(self) -> tuple[float, str]:
        """The most points earned at one time, and when. Never below `last`, which grading one step, or a watch, can
        also raise."""
        sums = [(mark.best, mark.best_at) for mark in (self.done.whole, self.done.together) if mark]
        return max([*sums, self.last], key=lambda each: each[0])

    @property
    def touched(self) -> str:
        """When the learner last worked on it; "" if never."""
        guesses = [made[-1].at for made in self.done.guesses.values()]
        return max([*guesses, *(mark.last_at for mark in self.marks.values())], default="")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zero_minimal progress", allow_abbrev=False,
        description="Your points and guesses in all lessons, and what to do next. They are kept in .progress.json at "
        "the top of the checkout; delete it to begin anew.")
    parser.add_argument("lesson", nargs="?", help="show one lesson in full, with all guesses: 03 or 03_gradients")
    options = parser.parse_args(arguments)
    try:
        entries = course(HOUSE / "lessons")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if not options.lesson:
        print("\n".join([*overview(entries), "", next_step(entries)]))
        return 0
    for entry in entries:
        if options.lesson in (entry.number, entry.folder.name if entry.folder else None):
            print("\n".join(in_full(entry)))
            return 0
    parser.error(f"there is no lesson {options.lesson}: the course has {', '.join(entry.number for entry in entries)}")


def course(folder: Path) -> list[Entry]:
    """All lessons, in order. Raises: ValueError if a lesson.toml is broken."""
    page, kept = folder / "README.md", record.read()
    lessons = {name: as_drawn(lesson, text_of(lesson.starter)) if lesson.starter.exists() else lesson
               for name, lesson in found(folder).items()}  # with the steps that the learner's file draws, if any
    titles = dict(ROW.findall(page.read_text())) if page.exists() else {}
    folders = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*")) if path.is_dir()}
    titles |= {number: path.name[3:].replace("_", " ") for number, path in folders.items()}
    return [Entry(number, titles[number], path := folders.get(number), path and lessons.get(path.name),
                  kept.get(path.name if path else "", record.Lesson())) for number in sorted(titles)]


# ----------------------------------------------------------------------------------------------------- on the screen


def overview(entries: list[Entry]) -> list[str]:
    """A line for each lesson."""
    lines = [_line("lesson", "points by step", "last", "best", "guesses"), "-" * COLUMNS]
    for entry in entries:
        name = f"{entry.number} {entry.title}"
        if not entry.lesson:
            lines.append(_line(name, _without_points(entry)))
            continue
        marks = entry.marks
        last, best = (_points(*entry.last), _points(*entry.best)) if marks else (NONE, NONE)
        first = [made[0] for made in entry.done.guesses.values()]
        guesses = f"{sum(map(is_near, first))} of {len(first)}" if first else NONE
        lines.append(_line(name, " ".join(_mark(marks.get(step.number)) for step in entry.lesson.steps), last, best,
                           guesses))
    return [*lines, "", paragraph("A number with * is not yet all that the step can earn. Guesses: how many of your "
                                  f"first ones were within {NEAR:.0%} of what was measured.")]


def next_step(entries: list[Entry]) -> str:
    """One line: what to do now. The lesson last worked on continues; otherwise the first one that is not done."""
    open_ones = [entry for entry in entries if entry.lesson and not _is_done(entry)]
    if not open_ones:
        return "Next: nothing, you have full marks in all lessons that are written."
    entry = max(open_ones, key=lambda entry: entry.touched)  # max() takes the first of equals
    if not entry.touched:
        return f"Next: read lessons/{entry.folder.name}/README.md"
    for step in entry.lesson.steps:
        mark = entry.marks.get(step.number)
        if mark is None or mark.last < mark.of:
            return f"Next: {step.label} of lesson {entry.number}, {step.title}"
    return f"Next: grade the whole of lesson {entry.number} once more"


def in_full(entry: Entry) -> list[str]:
    """One lesson with each step and each guess."""
    lines = [f"{entry.number} {entry.title}", *([] if entry.lesson else [_without_points(entry)])]
    for step in entry.lesson.steps if entry.lesson else ():
        mark = entry.marks.get(step.number)
        points = f"last {_points(mark.last, mark.last_at)}, best {_points(mark.best, mark.best_at)}" if mark else (
            "not graded yet")
        lines.append(f"{step.label}, {step.points:g} points: {points}")
    for question, (first, *others) in entry.done.guesses.items():
        again = f" ({len(others)} more)" if others else ""
        lines += ["", paragraph(question, hang=4), f"    guessed {first.guess:g} {first.unit}".rstrip() + again
                  + f", measured {first.measured:g} {first.unit}".rstrip() + f": {_how_near(first)}"]
    return lines


def _line(name: str, steps: str, last: str = "", best: str = "", guesses: str = "") -> str:
    return f"{name:<27}{steps:<19}{last:<12}{best:<12}{guesses}".rstrip()


def _without_points(entry: Entry) -> str:
    return "no assignment" if entry.folder else "not written yet"


def _points(points: float, at: str) -> str:
    return f"{points:g}, {datetime.fromisoformat(at):%-d %b}"


def _mark(mark: record.Mark | None) -> str:
    return NONE if mark is None else f"{mark.last:g}{'*' if mark.last < mark.of else ''}"


def _is_done(entry: Entry) -> bool:
    """All its points were earned in one grade, and no later grade lost any."""
    whole = entry.done.whole
    return bool(whole) and whole.best == whole.of and all(mark.last == mark.of for mark in entry.marks.values())


def is_near(guess: record.Guess) -> bool:
    return abs(guess.guess - guess.measured) <= NEAR * abs(guess.measured)


def _how_near(guess: record.Guess) -> str:
    if is_near(guess):
        return "near"
    if guess.guess * guess.measured <= 0:
        return "far off"
    factor = guess.guess / guess.measured
    return f"{factor:.2g} times too much" if factor > 1 else f"{1 / factor:.2g} times too little"
