"""Watch: grade again whenever the file is saved, only what is not right yet, and say what is wrong at once.

After a save the steps that are not right run in their order, each from the check that failed last; the first failure of
the first of them is told when it happens, not when its step is through. Once all are right, those that were right in an
earlier text of the file run again: only then are full marks said.
"""

import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.grader_client import GraderClient
from zero_minimal.classroom.grades import INDENT, Grades, head, numbered, tell
from zero_minimal.classroom.judging import SECONDS, Reported, reports
from zero_minimal.classroom.lessons import Lesson, Step
from zero_minimal.classroom.saved import POLL, Place, Saved
from zero_minimal.processes import interrupts
from zero_minimal.programs import progress

IDLE = "waiting for the next save (Ctrl-C ends)"


def watch(lesson: Lesson, file: Path, grades: Grades, hand_on: Callable[[list[Step]], None]) -> int:
    """Until Ctrl-C; returns its exit code.

    Args: hand_on(steps): called with the steps whose points in `grades` are new.
    Raises: RuntimeError if the tests themselves cannot run.
    """
    watching = Watch(lesson, file, grades, hand_on)
    with _ended_quietly():
        try:
            watching.go_on()
        finally:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # so much time must be
            watching.standby.close()
            signal.signal(signal.SIGINT, before)
    return interrupts.STOPPED


@contextlib.contextmanager
def _ended_quietly() -> Iterator[None]:
    """Context that Ctrl-C ends without a word. All in it waits in Python: nobody else need see to it that it ends."""
    heard_by = signal.set_wakeup_fd(-1)
    try:
        yield
    except KeyboardInterrupt:
        progress.take_back()
    finally:
        signal.set_wakeup_fd(heard_by, warn_on_full_buffer=False)


class Watch:
    """What is known of each step: `looked` is the digest of the text that its points are of. It has a process: close
    its `standby`."""

    def __init__(self, lesson: Lesson, file: Path, grades: Grades, hand_on: Callable[[list[Step]], None]):
        self.lesson, self.file, self.grades, self.hand_on = lesson, file, grades, hand_on
        self.place, self.standby = Place(file), GraderClient(lesson, file)
        self.looked: dict[int, str] = {}
        self.failed_last: dict[int, str] = {}  # step: the test to begin with
        self.told: dict[int, tuple] = {}  # step: what was said of it last

    def go_on(self) -> None:
        """For ever."""
        first = True
        while True:
            saved = self.place.wait(missing=lambda: _say(f"{self.file} is gone: waiting until it is back"))
            if not first:
                _say(time.strftime("\nsaved, %H:%M:%S"))
            self.look_at(saved)
            _wait_for(IDLE)
            first = False

    def look_at(self, saved: Saved) -> None:
        """Grade what is not right; when all is, what has not been looked at in this text."""
        if saved.error:
            _say(saved.error)
            return
        if wrong := [step for step in self.grades.steps if not self._is_right(step)]:
            if not self._through(saved, wrong):
                return
        if all(map(self._is_right, self.grades.steps)):
            again = [step for step in self.grades.steps if self.looked[step.number] != saved.digest]
            if again and wrong:
                _say(f"checking {numbered([step.number for step in again])} again, because the file has changed")
            if again and not self._through(saved, again):
                return
        self._sum_up()

    def _is_right(self, step: Step) -> bool:
        return step.number in self.looked and self.grades.is_right(step)

    def _through(self, saved: Saved, steps: list[Step]) -> bool:
        """Grade these steps. Returns False if something new was saved meanwhile."""
        was_right = {step for step in steps if self._is_right(step)}
        for step in steps:
            self.grades.forget(step)
            self.looked.pop(step.number, None)
        reported, screen = Reported(self.lesson, self.grades, whole=False), Screen(self.grades, self.told, was_right)
        standby = self._ready()
        reported.tests = {test: standby.tests[test] for test in self._in_order(standby, steps)}
        left = list(steps)

        def begin(done: list[str], seconds: float):
            return standby.begin(saved.text, [test for test in reported.tests if test not in done], seconds, POLL)

        with _told_if_busy(), contextlib.closing(reports(begin, reported, SECONDS)) as following:
            for _ in following:
                screen.failing(left[0])
                while left and left[0].number < reported.step:
                    self._is_through(left.pop(0), saved, reported, screen)
                if self.place.changed():
                    break
        if reported.ended:
            for step in left:
                self._is_through(step, saved, reported, screen)
            left = []
        screen.end()
        for step in left:  # half of a look is none
            self.grades.forget(step)
        self.grades.earlier = {step for step in self.grades.steps if self.looked.get(step.number) != saved.digest}
        if now := [step for step in self.grades.steps if step not in self.grades.earlier]:
            self.hand_on(now)
        return not left

    def _is_through(self, step: Step, saved: Saved, reported: Reported, screen: "Screen") -> None:
        self.looked[step.number] = saved.digest
        failed = [test for test in reported.failed if reported.tests[test]["step"] == step.number]
        self.failed_last[step.number] = failed[0] if failed else ""
        screen.through(step)

    def _ready(self) -> GraderClient:
        if not self.standby.lives():
            self.standby.close()
            self.standby = GraderClient(self.lesson, self.file)
        if not self.standby.tests:
            _wait_for("getting ready (this takes some seconds once) …")
            self.standby.wait_until_ready()
        return self.standby

    def _in_order(self, standby: GraderClient, steps: list[Step]) -> list[str]:
        """Tests by step, and in each first the one that failed last."""
        return [test for step in steps for test in sorted(
            (test for test, worth in standby.tests.items() if worth["step"] == step.number),
            key=lambda test: test != self.failed_last.get(step.number))]

    def _sum_up(self) -> None:
        wrong = next((step for step in self.grades.steps if not self._is_right(step)), None)
        rest = f"; next is step {wrong.number}, {wrong.title}" if wrong else ": full marks"
        if self.grades.left_out:
            rest = f"; {self.grades.left_out}"
        _say(f"\n{self.grades.score:g} of {self.grades.most:g} points{rest}")


class Screen:
    """What is said while steps run: the first failure at once, and all of it; of other steps a line, if it is new.

    told: {step: what was said of it last}, which is brought up to date. was_right: steps of which only what is wrong
    is worth a word.
    """

    def __init__(self, grades: Grades, told: dict[int, tuple], was_right: set[Step]):
        self.grades, self.told, self.was_right = grades, told, was_right
        self.at_once: tuple[Step, str] | None = None  # the failure that was told before its step was through
        self.as_before: list[int] = []
        self.under_way: Step | None = None  # what the last line of a terminal says

    def failing(self, step: Step) -> None:
        """This step is under way: if it is the first with a failure, say so."""
        message = self.grades.first_failure(step)
        if message and not self.at_once and not self.as_before:
            self.at_once = step, message
            self._say(head(step, "is not right any more" if step in self.was_right else "is not right yet"))
            tell(message)
        if step is not self.under_way:
            self.under_way = step
            _wait_for(f"looking at step {step.number} …")

    def through(self, step: Step) -> None:
        """All tests of a step have run."""
        points, message = self.grades.of(step)
        before, now = self.told.get(step.number), (points, _words(message))
        self.told[step.number] = now
        if self.at_once and self.at_once[0] is step:
            self._say(f"{INDENT}{points:g} of {step.points:g} points")
            tell(message.removeprefix(self.at_once[1]).strip("\n"))
        elif now == before and (message or step in self.was_right):
            if message:
                self.as_before.append(step.number)
        else:
            self._say(head(step, f"{points:3g} of {step.points:g}"))
            first = message.partition("\n")[0]
            same = self.at_once and _words(first) == _words(self.at_once[1]).partition("\n")[0]
            tell(f"as in step {self.at_once[0].number}" if message and same else first)

    def end(self) -> None:
        if self.as_before:
            self._say(f"{numbered(self.as_before)} as before")

    def _say(self, words: str) -> None:
        self.under_way = None
        _say(words)


@contextlib.contextmanager
def _told_if_busy() -> Iterator[None]:
    """Context that ends, and says so, where the machine is too busy to judge."""
    try:
        yield
    except Busy as busy:
        _say(str(busy))


def _words(message: str) -> str:
    """Without numbers: they are others in each run."""
    return re.sub(r"\d+", "", message)


def _say(words: str) -> None:
    progress.take_back()
    print(words, flush=True)


def _wait_for(words: str) -> None:
    """What is under way, where the next words can take its place."""
    if sys.stderr.isatty():
        progress.announce(words)
