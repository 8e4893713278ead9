"""Watch: whenever the file is saved, grade the steps that are not right yet, and report the first failure at once.

After a save, the steps that are not right run in order, and in each the tests that failed last run first. The first
failure is reported at once. Once all are right, steps that were right in an earlier text run again, before full marks.
"""

import contextlib
import itertools
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.grader_client import GraderClient, Reported
from zero_minimal.classroom.grades import INDENT, Grades, head, numbered, tell
from zero_minimal.classroom.lessons import Lesson, Step
from zero_minimal.classroom.saved import POLL, Place, Saved
from zero_minimal.processes import interrupts
from zero_minimal.programs import progress


def watch(lesson: Lesson, file: Path, grades: Grades, hand_on: Callable[[list[Step]], None]) -> int:
    """Watch until Ctrl-C; returns its exit code.

    Args: hand_on(steps): called with the steps whose points in `grades` are new.
    Raises: RuntimeError if the tests themselves cannot run.
    """
    signal.set_wakeup_fd(-1)  # all later waits are in Python: no watchdog is needed to end them
    watching = Watch(lesson, file, grades, hand_on)
    try:
        for number in itertools.count():
            saved = watching.place.wait(missing=lambda: say(f"{file} is gone: waiting until it is back"))
            if number:
                say(time.strftime("\nsaved, %H:%M:%S"))
            watching.look_at(saved)
            wait_for("waiting for the next save (Ctrl-C ends)")
    except KeyboardInterrupt:
        progress.take_back()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # let the cleanup finish
        watching.client.close()
    return interrupts.STOPPED


class Watch:
    """The state of each step: `looked` is the digest of the text that earned its points, `told` the last report on it;
    `failed` are the tests to begin with, in this order. It has a process: close its `client`."""

    def __init__(self, lesson: Lesson, file: Path, grades: Grades, hand_on: Callable[[list[Step]], None]):
        self.grades, self.hand_on = grades, hand_on
        self.place, self.client = Place(file), GraderClient(lesson, file)
        self.looked, self.told, self.failed = {}, {}, []

    def look_at(self, saved: Saved) -> None:
        """Grade the steps that are not right; once all are right, those that were right in another text."""
        if saved.error:
            return say(saved.error)
        if wrong := [step for step in self.grades.steps if not self._is_right(step)]:
            if not self._grade(saved, wrong):
                return None
        if all(map(self._is_right, self.grades.steps)):
            again = [step for step in self.grades.steps if self.looked[step] != saved.digest]
            if again and wrong:
                say(f"checking {numbered(again)} again, because the file has changed")
            if again and not self._grade(saved, again):
                return None
        wrong = next((step for step in self.grades.steps if not self._is_right(step)), None)
        rest = f"; next is {wrong.label}, {wrong.title}" if wrong else ": full marks"
        if self.grades.left_out:
            rest = f"; {self.grades.left_out}"
        say(f"\n{self.grades.score:g} of {self.grades.most:g} points{rest}")

    def _is_right(self, step: Step) -> bool:
        return step in self.looked and self.grades.is_right(step)

    def _grade(self, saved: Saved, steps: list[Step]) -> bool:
        """Grade these steps, and report what is new. Returns False if the file was saved meanwhile, or the machine is
        too busy."""
        was_right, left, first, as_before = {*filter(self._is_right, steps)}, list(steps), None, []
        for step in steps:
            self.grades.forget(step)
            self.looked.pop(step, None)
        if not self.client.is_ready():
            wait_for("getting ready (this takes some seconds once) …")
            self.client.wait_until_ready()
        order = {test: place for place, test in enumerate(self.failed)}
        tests = [test for step in steps for test in sorted(
            (test for test, worth in self.client.tests.items() if worth["step"] == step.number),
            key=lambda test: order.get(test, len(order)))]
        reported = Reported(self.grades.lesson, self.grades, whole=False)
        try:
            with contextlib.closing(self.client.reports(saved.text, tests, reported, POLL)) as reports:
                for _ in reports:
                    while left and (reported.ended or left[0].number < reported.step):
                        step = left.pop(0)
                        self.looked[step] = saved.digest
                        if not self._tell(step, first, step in was_right):
                            as_before.append(step)
                    if left and not first and (message := self.grades.first_failure(left[0])):
                        first = left[0], message
                        say(head(left[0], "is not right any more" if left[0] in was_right else "is not right yet"))
                        tell(message)
                    if self.place.changed():
                        break
                    if left:
                        wait_for(f"looking at {left[0].label} …")
        except Busy as busy:
            say(str(busy))
        self.failed = [*reported.failed, *(test for test in self.failed if test not in reported.done)]
        if as_before:
            say(f"{numbered(as_before)} as before")
        for step in left:  # a half-graded step counts as not graded
            self.grades.forget(step)
        self.grades.earlier = {step for step in self.grades.steps if self.looked.get(step) != saved.digest}
        if now := [step for step in self.grades.steps if step not in self.grades.earlier]:
            self.hand_on(now)
        return not left

    def _tell(self, step: Step, first: tuple[Step, str] | None, was_right: bool) -> bool:
        """All tests of a step have run: report what is new. Returns False if it fails as before, which is not reported.

        first: the failure that was reported when it happened, and its step.
        """
        points, message = self.grades.of(step)
        before, self.told[step] = self.told.get(step), (points, words(message))
        if first and first[0] is step:
            say(f"{INDENT}{points:g} of {step.points:g} points")
            tell(message.removeprefix(first[1]).strip("\n"))
        elif self.told[step] == before and (message or was_right):
            return not message
        else:
            say(head(step, f"{points:3g} of {step.points:g}"))
            line = message.partition("\n")[0]
            same = first and words(line) == words(first[1].partition("\n")[0])
            tell(f"as in {first[0].label}" if same else line)
        return True


def words(message: str) -> str:
    """A message without numbers, which change in each run."""
    return re.sub(r"\d+", "", message)


def say(words: str) -> None:
    progress.take_back()
    print(words, flush=True)


def wait_for(words: str) -> None:
    """Show what is under way; the next message replaces it."""
    if sys.stderr.isatty():
        progress.announce(words)
