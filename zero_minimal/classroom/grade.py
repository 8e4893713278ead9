"""python -m zero_minimal grade FILE: points for an assignment by step, and for each step that fails what to mend.

The lesson's tests run in a process of their own, the judge (plugin.py); what it finds comes through a pipe. It names
its tests and their points before a line of the submission runs, and each is taken once. The submission itself runs in
ranks far below (nursery.py). Should the judge go down all the same, the test under way has failed, and another goes on.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from zero_minimal.classroom import fence
from zero_minimal.classroom.accounts import end_all_below
from zero_minimal.classroom.lessons import HOUSE, LOOK_AT, UNWRITTEN, Lesson, Step, found
from zero_minimal.classroom.report.writing import write
from zero_minimal.classroom.submission import text_of

SECONDS = 120  # for a lesson
EXTRA = 10.0  # seconds that the tests have after that, to say so themselves
SILENCE = 60.0  # seconds after which a judge that reports nothing is taken for stopped
INDENT = " " * 8


def main(arguments: list[str]) -> int:
    """Exit code: 0 for full marks, 1 for fewer, 3 if the grader itself could not work."""
    try:
        lessons = found()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    parser = argparse.ArgumentParser(
        prog="python -m zero_minimal grade", allow_abbrev=False, description="Points for an assignment, step by step. "
        "The exit code is 0 for full marks, 1 for fewer, 2 for a wrong call, 3 if the grader itself fails.")
    parser.add_argument("file", type=Path, help="what you wrote: lessons/NN_name/assignment.py")
    parser.add_argument("--lesson", choices=lessons, help="default: the name of the file's folder")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="also write results.json for Gradescope")
    parser.add_argument("--html", type=_writable, metavar="FILE",
                        help="also write a page: what your ranks did on one small run, step by step")
    options = parser.parse_args(arguments)
    lesson = _lesson(parser, options, lessons)
    print(f"{options.file}: lesson {lesson.name}, {lesson.world} (about 20 s)\n", flush=True)
    began, grades = time.monotonic(), Grades(lesson)
    if not fence.holds():
        print("This system cannot fence a submission in (Linux 5.13 can): grade nobody's file but your own.\n")
    try:
        if options.json:  # should the grader itself be brought down, this is what counts
            options.json.write_text(json.dumps(gradescope(grades, 0.0)))
        _grade(lesson, options.file.resolve(), grades)
        seconds = time.monotonic() - began
        print(f"\n{grades.score:g} of {grades.most:g} points, {seconds:.0f} s")
        if options.json:
            options.json.write_text(json.dumps(gradescope(grades, seconds), indent=1))
        if options.html:  # last: it runs the submission once more
            write(options.html, lesson, options.file.resolve(), gradescope(grades, seconds)["tests"])
            print(f"{options.html}: what your ranks did on one small run")
    except (RuntimeError, OSError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 3
    return 0 if grades.score == grades.most else 1


def _grade(lesson: Lesson, file: Path, grades: "Grades") -> None:
    error = _syntax_error(file)
    if not error:
        grade(lesson, file, grades, show=grades.show)
        return
    grades.fail_all(error)
    for step in lesson.steps:
        grades.show(step)


def _writable(path: str) -> Path:
    try:
        Path(path).touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path!r} cannot be written ({error.strerror}): name a file in a folder that "
                                         "exists") from None
    return Path(path)


def _lesson(parser, options, lessons: dict[str, Lesson]) -> Lesson:
    file = options.file
    if not file.is_file():
        parser.error(f"{file} is not a file: name the assignment.py that you filled in")
    name = options.lesson or file.resolve().parent.name
    if name not in lessons:
        parser.error(f"which lesson is {file}? Its folder is none of {', '.join(lessons)}: say --lesson NAME")
    if not lessons[name].tests.exists():
        parser.error(f"the tests of lesson {name} are not here ({lessons[name].tests}): grade from a checkout")
    return lessons[name]


def _syntax_error(file: Path) -> str:
    try:
        compile(text_of(file), str(file), "exec")
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = getattr(error, "lineno", None)
        return f"the file is not Python{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}"
    return ""


class Grades:
    """Points by step. A check may be several tests (worlds of 2 and of 3 ranks): it earns its points if all pass.

    A step that has a function to be written still has 0 points, whatever passes without it, and one whose core has
    failed only what lesson.toml leaves it.
    """

    def __init__(self, lesson: Lesson):
        self.lesson, self.results = lesson, []
        self._said = ""  # the message shown last

    def add(self, step: int, check: str, points: float, passed: bool, message: str = "") -> None:
        self.results.append((step, check, points, passed, message))

    def fail_all(self, message: str) -> None:
        """No test could run, or none of them any more."""
        for step in self.lesson.steps:
            self.add(step.number, "", 0, False, message)

    def of(self, step: Step) -> tuple[float, str]:
        """Points of a step, and one message: that of the first test that failed."""
        results = [result for result in self.results if result[0] == step.number]
        unwritten = next((message for *_, passed, message in results if not passed and UNWRITTEN in message), "")
        if unwritten:
            return 0, unwritten
        lost = {check for _, check, _, passed, _ in results if not passed}
        earned = {check: points for _, check, points, _, _ in results if check not in lost}
        message = next((message for *_, passed, message in results if not passed), "")
        most = min([most for check, most in step.core.items() if check in lost], default=step.points)
        if sum(earned.values()) > most:
            message += f"\nWhat this step is about is not reached: so it earns {most:g} points at most."
        failed = {earlier: text for earlier, _, _, passed, text in self.results if not passed and earlier < step.number}
        if message and failed and message not in failed.values():
            if "had not come to an end" in message:
                message = message.split(LOOK_AT)[0]  # it would look for the cause in this step
            message += f"\nThis may come from step {min(failed)}: mend that first."
        return min(most, sum(earned.values())), message

    @property
    def score(self) -> float:
        return sum(self.of(step)[0] for step in self.lesson.steps)

    @property
    def most(self) -> float:
        return sum(step.points for step in self.lesson.steps)

    def show(self, step: Step) -> None:
        points, message = self.of(step)
        print(f"step {step.number}  {points:3g} of {step.points:g}   {step.title}", flush=True)
        for line in message.splitlines() if message != self._said else ():  # what concerns all steps is said once
            print(textwrap.fill(line, 116, initial_indent=INDENT, subsequent_indent=INDENT), flush=True)
        self._said = message


def grade(lesson: Lesson, file: Path, grades: Grades, seconds: float = SECONDS, only: str = "", show=print) -> None:
    """Run the lesson's tests against the file and fill `grades`. `show(step)` is called when a step is done.

    Args: only: as pytest's -k takes it, to run some of the tests.
    Raises: RuntimeError if the tests themselves cannot run.
    """
    until, reported, shown = time.monotonic() + seconds, Reported(lesson, grades, whole=not only), 0
    while not reported.ended:
        with Judge(lesson, file, until, only, reported.done) as judge:
            for line in judge.lines():
                reported.take(line)
                for step in lesson.steps[shown : reported.step - 1]:
                    show(step)
                    shown = step.number
        if reported.ended:
            break
        if reported.under_way is None:
            raise RuntimeError(f"the tests of lesson {lesson.name} could not run:\n{judge.printed}")
        reported.fail("the grader's own process was brought down while this test ran: a submission may not signal "
                      "other processes, or take memory without end")
        if time.monotonic() > until:
            grades.fail_all("not looked at: the time for this lesson was used up before")
            break
    for step in lesson.steps[shown:]:
        show(step)


class Reported:
    """What judges have reported so far, checked: each test is known before it begins, and taken once."""

    def __init__(self, lesson: Lesson, grades: Grades, whole: bool):
        self.lesson, self.grades, self.whole = lesson, grades, whole
        self.tests: dict[str, dict] = {}  # name: what it is worth
        self.done: list[str] = []
        self.under_way, self.step, self.ended = None, 1, False

    def take(self, line: bytes) -> None:
        """Raises: RuntimeError for a line that no judge writes."""
        try:
            report = json.loads(line)
            if "tests" in report:
                self._announced({entry.pop("test"): entry for entry in report["tests"]})
            elif "begins" in report:
                self.under_way = self._known(report["begins"])
                self.step = self.tests[self.under_way]["step"]
            elif "end" in report:
                self.ended = True
            else:
                self._add(self._known(report["test"]), report["passed"] is True, str(report["message"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RuntimeError(f"what came through the grader's pipe is no report ({type(error).__name__}: {error}): "
                               f"{line[:100]!r}") from None

    def fail(self, message: str) -> None:
        """The test under way has failed."""
        self._add(self.under_way, False, message)

    def _announced(self, tests: dict[str, dict]) -> None:
        if not self.tests:
            worth = {step.number: 0.0 for step in self.lesson.steps}
            for check in {(test["step"], test["check"], test["points"]) for test in tests.values()}:
                worth[check[0]] += check[2]
            if self.whole and worth != {step.number: step.points for step in self.lesson.steps}:
                raise ValueError(f"the tests of the steps are worth {worth}")
            self.tests = tests

    def _known(self, test: str) -> str:
        if test not in self.tests or test in self.done:
            raise ValueError("a test that is not known, or a second time")
        return test

    def _add(self, test: str, passed: bool, message: str) -> None:
        worth = self.tests[test]
        self.grades.add(worth["step"], worth["check"], worth["points"], passed, message)
        self.done.append(test)
        self.under_way = None


class Judge:
    """Runs pytest with a pipe for its reports, in a session and with a folder of its own that end with it."""

    def __init__(self, lesson: Lesson, file: Path, until: float, only: str, done: list[str]):
        self.until = until + EXTRA
        self.command = [
            sys.executable, "-m", "pytest", str(lesson.tests), "-q", "--rootdir", str(HOUSE), "-p", "no:cacheprovider",
            "-p", "zero_minimal.classroom.plugin", "--submission", str(file), "--lesson", lesson.name,
            "--seconds", str(max(1.0, until - time.monotonic())), *(["-k", only] if only else []),
            *(f"--deselect={test}" for test in done), "--report",
        ]

    def __enter__(self):
        self.output, self.folder = tempfile.TemporaryFile(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.reports, theirs = os.pipe()
        self.process = subprocess.Popen(
            [*self.command, str(theirs)], cwd=HOUSE, pass_fds=[theirs],
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": self.folder.name},
        )
        os.close(theirs)
        return self

    def lines(self):
        """What it reports, line by line, until it ends, stands still, or its time is over."""
        rest = b""
        while select.select([self.reports], [], [], min(SILENCE, max(0.0, self.until - time.monotonic())))[0]:
            received = os.read(self.reports, 2**16)
            if not received:
                return
            *lines, rest = (rest + received).split(b"\n")
            yield from lines

    def __exit__(self, *error):
        os.close(self.reports)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if any(error) else 2)
        end_all_below(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()
        self.output.seek(0)
        self.printed = self.output.read().decode(errors="replace")[-3000:]  # the end of what it wrote
        self.output.close()


def gradescope(grades: Grades, seconds: float) -> dict:
    """results.json as Gradescope's autograder reads it: one test a step."""
    tests = []
    for step in grades.lesson.steps:
        points, message = grades.of(step)
        tests.append({
            "number": str(step.number), "name": step.title, "score": points, "max_score": step.points,
            "status": "passed" if points == step.points else "failed", "output": message, "visibility": "visible",
        })
    return {"score": grades.score, "execution_time": round(seconds, 1), "visibility": "visible", "tests": tests}
