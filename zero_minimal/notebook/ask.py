"""Ask: a question before a measurement. The learner replaces the three dots by a number, which the result answers.

    guess = notebook.ask("MB of gradients on rank 0?", ..., unit="MB")      in a cell of its own
    guess.compare(9.64, {19.3: "all of them: that is stage 1"})             in a later cell, after the measurement

A question without an answer is an error, so that "Run All" stops there. To only read a notebook, set ZERO_READING=1.
Guesses are kept in the learner's record (programs/record.py), if the notebook has named its lesson.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from zero_minimal.notebook.errors import Told
from zero_minimal.programs import record

NEAR = 0.02  # a guess within this share of a number counts as that number
UNANSWERED = "Your guess comes first: write a number in place of the three dots, and run this cell again."

_lesson = ""  # for the record: the lesson of the questions


class NoGuess(Told):
    """A question has no answer yet, or one that is not a number."""


def begin(lesson: str) -> None:
    """Later questions belong to this lesson; "": to none."""
    global _lesson
    _lesson = lesson


def ask(question: str, *answer: float, unit: str = "") -> "Guess":
    """The learner's guess: the number that replaces the three dots in `ask("How many MB?", ..., unit="MB")`.

    Raises: NoGuess if the dots are still there, and ZERO_READING is not set; or if it is not one finite number.
    """
    given = [value for value in answer if value is not ...]
    if given:
        return Guess(question, _number(given), unit)
    if os.environ.get("ZERO_READING", "0") in ("", "0"):
        raise NoGuess(UNANSWERED)
    return Guess(question, None, unit)


def _number(given: list) -> float:
    if len(given) > 1:
        raise NoGuess("Write one number, with a point and not a comma in it, such as 12.5, and run this cell again.")
    try:
        number = float(given[0])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if isinstance(given[0], (str, bytes, bool)) or not math.isfinite(number):
        quotes = " without quotes" if isinstance(given[0], str) else ""
        raise NoGuess(f"Write a number{quotes}, such as 12.5, and not {repr(given[0])[:60]}, and run this cell again.")
    return number


@dataclass(frozen=True)
class Guess:
    """A guess made before a run; its value is None for a reader who does not guess."""

    question: str
    value: float | None
    unit: str = ""

    def compare(self, measured: float, known: Mapping[float, str] | None = None, within: float = NEAR) -> None:
        """Print the measurement, how far off the guess was, and the reasoning behind it if it is a known wrong one.

        Args:
            measured: in the guess's unit.
            known: {a common wrong answer: the reasoning that leads to it}.
            within: the share of a number by which a guess may differ from it; 0: it must be exact.
        """
        measured = float(measured)
        if self.value is None:
            print(f"measured: {self._words(measured)}")
            return
        thoughts = {wrong: thought for wrong, thought in (known or {}).items() if not _near(wrong, measured, within)}
        wrong = min(thoughts, key=lambda each: abs(each - self.value), default=None)
        caught = (wrong is not None and _near(self.value, wrong, within)
                  and abs(self.value - wrong) < abs(self.value - measured))
        right = not caught and _near(self.value, measured, within)
        far = ": right" if right else _how_far(self.value, measured) if within else ": not this time"
        print(f"measured: {self._words(measured)}. You said {self._words(self.value)}{far}.")
        if caught:
            print(f"{self._words(wrong)} would be: {thoughts[wrong]}.")
        with contextlib.suppress(Exception):  # a record that cannot be written must not stop a cell
            if _lesson:
                record.add_guess(_lesson, self.question, self.value, measured, unit=self.unit)

    def _words(self, value: float) -> str:
        return f"{_digits(value)} {self.unit}".rstrip()


def _near(one: float, other: float, within: float) -> bool:
    return abs(one - other) <= within * abs(other)


def _digits(value: float) -> str:
    """Whole numbers in full, others with four digits."""
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _how_far(guess: float, measured: float) -> str:
    if guess * measured <= 0:
        return ""
    ratio, side = (guess / measured, "high") if guess > measured else (measured / guess, "low")
    if ratio < 2:
        return f": {abs(guess / measured - 1):.0%} too {side}"
    return f": {_digits(ratio) if ratio >= 100 else f'{ratio:.2g}'} times too {side}"
