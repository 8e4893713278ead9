"""Grades: the results of a lesson's checks, as points and one message per step, and as results.json for Gradescope."""

import functools
import textwrap
from collections.abc import Callable

from zero_minimal.classroom.lessons import LOOK_AT, Lesson, Step, needs

INDENT = " " * 8


class Grades:
    """Points by step. A check may have several tests (worlds of 2 and of 3 ranks): it earns its points if all pass.

    A step with an unwritten function has 0 points, whatever passes without it, and a step whose core failed has at most
    the points that lesson.toml allows.

    steps: those that are graded; all by default. `earlier`: those of them that were graded for an earlier text.
    """

    def __init__(self, lesson: Lesson, steps: tuple[Step, ...] = ()):
        self.lesson, self.results, self.steps = lesson, [], steps or lesson.steps
        self.earlier: set[Step] = set()
        self._said = "", ""  # the last message shown, and its step

    def add(self, step: int, check: str, points: float, passed: bool, message: str = "") -> None:
        self.results.append((step, check, points, passed, message))

    def fail_all(self, message: str) -> None:
        """No test could run, or no further test can."""
        for step in self.steps:
            self.add(step.number, "", 0, False, message)

    def forget(self, step: Step) -> None:
        """Remove a step's results: it will be graded again."""
        self.results = [result for result in self.results if result[0] != step.number]

    def first_failure(self, step: Step) -> str:
        """The message of the first failed test so far, "" if none has failed. Tests that need a later step come last:
        that step is not written yet, and this one may be right."""
        of_step = self._needs(step)
        failed = [(message, points) for number, _, points, passed, message in self.results
                  if number == step.number and not passed]
        waiting = [message for message, points in failed if of_step(message) > step.number and points]
        return next((message for message, _ in failed if of_step(message) <= step.number), next(iter(waiting), ""))

    def of(self, step: Step) -> tuple[float, str]:
        """Points of a step, and one message: that of the first failed test."""
        results = [result for result in self.results if result[0] == step.number]
        message, of_step = self.first_failure(step), self._needs(step)
        if any(0 < of_step(message) <= step.number for *_, passed, message in results if not passed):
            return 0, next(message for *_, message in results if 0 < of_step(message) <= step.number)
        lost = {check for _, check, _, passed, message in results if not passed and of_step(message) <= step.number}
        waits = {check for _, check, _, passed, _ in results if not passed} - lost
        earned = {check: points for _, check, points, _, _ in results if check not in lost | waits}
        most = min([most for check, most in step.core.items() if check in lost], default=step.points)
        if sum(earned.values()) > most:
            main = '", "'.join(check.removeprefix("test_").replace("_", " ") for check in step.core if check in lost)
            message += f'\nUntil its main check passes ("{main}"), this step earns {most:g} points at most.'
        failed = {number: text for number, _, _, passed, text in self.results
                  if not passed and number < step.number and needs(text, number, self.lesson.steps) <= number}
        independent = self.lesson.draw  # drawn steps do not build on one another
        if message and failed and message not in failed.values() and not independent:
            if "had not come to an end" in message:
                message = message.split(LOOK_AT)[0]  # the hint assumes that the cause is in this step
            message += f"\nStep {min(failed)} has failed, too. If this step uses it, mend that one first."
        return min(most, sum(earned.values())), message

    def _needs(self, step: Step) -> Callable[[str], int]:
        return functools.partial(needs, number=step.number, steps=self.lesson.steps)

    def is_right(self, step: Step) -> bool:
        """Whether it has all its points."""
        return self.of(step)[0] == step.points

    @property
    def score(self) -> float:
        return sum(self.of(step)[0] for step in self.steps)

    @property
    def most(self) -> float:
        return sum(step.points for step in self.steps)

    @property
    def left_out(self) -> str:
        """Which steps were not graded, in words; "" if all were."""
        others = [step for step in self.lesson.steps if step not in self.steps]
        return f"{numbered(others)} {'was' if len(others) == 1 else 'were'} not looked at" if others else ""

    def show(self, step: Step) -> None:
        points, message = self.of(step)
        print(head(step, f"{points:3g} of {step.points:g}"), flush=True)
        if message and message == self._said[0]:  # a message on all steps is shown once
            tell(f"The reason is the one of {self._said[1]}.")
        else:
            self._said = message, step.label
            tell(message)


def head(step: Step, points: str) -> str:
    """The first line of a step's report."""
    return f"{step.label}  {points}   {step.title}"


def tell(message: str) -> None:
    """Print a message below the line of its step."""
    for line in message.splitlines():
        print(textwrap.fill(line, 116, initial_indent=INDENT, subsequent_indent=INDENT), flush=True)


def numbered(steps: list[Step]) -> str:
    """Steps in words: "step 2", "steps 2 and 3", "steps 2, 3 and 5", "steps 1 to 4"."""
    numbers = [step.number for step in steps]
    if len(steps) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{steps[0].called}s {numbers[0]} to {numbers[-1]}"
    *others, last = map(str, numbers)
    return f"{steps[0].called}s {', '.join(others)} and {last}" if others else steps[0].label


def gradescope(grades: Grades, seconds: float) -> dict:
    """results.json as Gradescope's autograder reads it: one test for each graded step."""
    tests = []
    for step in grades.steps:
        points, message = grades.of(step)
        tests.append({
            "number": str(step.number), "name": step.title, "score": points, "max_score": step.points,
            "status": "passed" if points == step.points else "failed", "output": message, "visibility": "visible",
        })
    earlier = sorted(grades.earlier, key=lambda step: step.number)
    notes = [grades.left_out, f"the points of {numbered(earlier)} are of an earlier text" if earlier else ""]
    said = {"output": f"Not the whole of this file: {'; '.join(filter(None, notes))}."} if any(notes) else {}
    return {"score": grades.score, "execution_time": round(seconds, 1), "visibility": "visible", **said, "tests": tests}
