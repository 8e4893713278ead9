"""python -m zero_minimal grade FILE: points for an assignment by step, and for each step that fails what to mend.

The tests run in a process of their own (judging.py). With --watch that process waits, and a grade begins whenever the
file is saved (watch.py).
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom import fence
from zero_minimal.classroom.grades import Grades, gradescope
from zero_minimal.classroom.judging import grade
from zero_minimal.classroom.lessons import Lesson, Step, found
from zero_minimal.classroom.report.writing import write
from zero_minimal.classroom.submission import syntax_error, text_of
from zero_minimal.classroom.watch import watch
from zero_minimal.programs import record

KEPT = "Points of lessons/NN_name/assignment.py are kept for `progress`; those of any other file are not."


def main(arguments: list[str]) -> int:
    """Exit code: 0 for full marks, 1 for fewer, 3 if the grader itself could not work; 130 from Ctrl-C."""
    try:
        lessons = found()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    call = _call(arguments, lessons)
    grades = Grades(call.lesson, (call.step,) if call.step else ())
    seconds = " (up to a minute)" if not call.step and not call.options.watch else ""
    print(f"{call.file}: lesson {call.lesson.name}, {call.lesson.world}{seconds}\n", flush=True)
    if not fence.holds():
        print("This system cannot fence a submission in (Linux 5.13 can): grade nobody's file but your own.\n")
    try:
        if call.options.json:  # should the grader itself be brought down, this is what counts
            call.options.json.write_text(json.dumps(gradescope(grades, 0.0)))
        return _watch(call, grades) if call.options.watch else _once(call, grades)
    except (RuntimeError, OSError) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 3


@dataclass
class Call:
    """What the grader was called with."""

    options: argparse.Namespace
    file: Path
    lesson: Lesson
    step: Step | None  # the only one to look at


def _once(call: Call, grades: Grades) -> int:
    began, file = time.monotonic(), call.file.resolve()
    if error := syntax_error(text_of(file)):
        grades.fail_all(error)
        for step in grades.steps:
            grades.show(step)
    else:
        grade(call.lesson, file, grades, show=grades.show)
    seconds = time.monotonic() - began
    rest = f"; {grades.left_out}" if grades.left_out else ""
    print(f"\n{grades.score:g} of {grades.most:g} points, {seconds:.0f} s{rest}")
    _hand_on(call, grades, grades.steps, seconds)
    return 0 if grades.score == grades.most else 1


def _watch(call: Call, grades: Grades) -> int:
    began = time.monotonic()
    print("Save it, and what is not right yet is graded again. Ctrl-C ends this.\n", flush=True)
    return watch(call.lesson, call.file.resolve(), grades,
                 lambda steps: _hand_on(call, grades, steps, time.monotonic() - began))


def _hand_on(call: Call, grades: Grades, steps: tuple[Step, ...] | list[Step], seconds: float) -> None:
    """Where results go once a file has been graded. steps: those whose points are of the file as it is now."""
    if call.options.json:
        call.options.json.write_text(json.dumps(gradescope(grades, seconds), indent=1))
    if call.file.resolve() == call.lesson.starter.resolve():
        record.add_points(call.lesson.name, {step.number: grades.of(step)[0] for step in steps},
                          {step.number: step.points for step in call.lesson.steps})
    if call.options.html:  # last: it runs the file once more
        write(call.options.html, call.lesson, call.file.resolve(), gradescope(grades, seconds)["tests"])
        print(f"{call.options.html}: what your ranks did on one small run", flush=True)


# ------------------------------------------------------------------------------------------------------------ the call


def _call(arguments: list[str], lessons: dict[str, Lesson]) -> Call:
    """Raises: SystemExit, code 2, for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_minimal grade", allow_abbrev=False, epilog=KEPT,
        description="Points for an assignment, step by step. The exit code is 0 for full marks, 1 for fewer, 2 for a "
        "wrong call, 3 if the grader itself fails.")
    parser.add_argument("file", type=Path, help="what you wrote: lessons/NN_name/assignment.py")
    parser.add_argument("--lesson", choices=lessons, help="default: the name of the file's folder")
    parser.add_argument("--step", metavar="NUMBER", help="look at this step alone; full marks are then its own")
    parser.add_argument("--watch", action="store_true", help="whenever the file is saved, grade again what is not "
                        "right yet; what is wrong first is told at once. Ctrl-C ends it (exit code 130)")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="also write results.json for Gradescope")
    parser.add_argument("--html", type=_writable, metavar="FILE",
                        help="also write a page: what your ranks did on one small run, step by step")
    options = parser.parse_args(arguments)
    lesson = _lesson(parser, options, lessons)
    return Call(options, options.file, lesson, _step(parser, options, lesson))


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


def _step(parser, options, lesson: Lesson) -> Step | None:
    if options.step is None:
        return None
    for step in lesson.steps:
        if options.step == str(step.number):
            return step
    parser.error(f"there is no step {options.step}: lesson {lesson.name} has steps 1 to {len(lesson.steps)}")
