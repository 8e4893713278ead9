"""python -m zero_minimal grade FILE: points for an assignment by step, and what to fix in each failed step. With a
folder instead of FILE, such as lessons or a class's folder: all assignments below it, one after the other.

The tests run in a separate process (grader_client.py). With --watch that process waits, and a grade begins whenever the
file is saved (watch.py).
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom import attempt_page, drawn, open_part, sandbox
from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.grader_client import grade
from zero_minimal.classroom.grades import Grades, gradescope
from zero_minimal.classroom.lessons import Lesson, Step, found
from zero_minimal.classroom.submission import syntax_error, text_of
from zero_minimal.classroom.watch import watch
from zero_minimal.programs import progress, record
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import output_file

KEPT = "Points of lessons/NN_name/assignment.py are kept for `progress`; those of any other file are not."


def main(arguments: list[str]) -> int:
    """Exit code: 0 for full marks, 1 for fewer, 3 if the grader itself could not work; 130 from Ctrl-C."""
    try:
        lessons = found()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    calls = _calls(arguments, lessons)
    all_grades = [(open_part.TrackGrades if call.is_open else Grades)(call.lesson, (call.step,) if call.step else ())
                  for call in calls]
    options, began = calls[0].options, time.monotonic()
    if not sandbox.holds():
        print("This system cannot fence a submission in (Linux 5.13 can): grade nobody's file but your own.\n")
    try:
        if options.json:  # this counts if the grader itself crashes
            options.json.write_text(json.dumps(_results(calls, all_grades, 0.0)))
        codes = [_graded(call, grades) for call, grades in zip(calls, all_grades, strict=True)]
    except (RuntimeError, OSError) as failure:
        if options.json and isinstance(failure, Busy):
            options.json.unlink()  # this is not a grade of 0 points
        progress.take_back()
        print(f"error: {failure}", file=sys.stderr)
        return 3
    if len(calls) > 1:
        _sum_up(calls, all_grades, time.monotonic() - began)
    return max(codes)


@dataclass
class Call:
    """One call of the grader."""

    options: argparse.Namespace
    file: Path
    lesson: Lesson
    step: Step | None  # the only step to grade

    @property
    def who(self) -> str:
        """Its name in the table of a folder: the folder that contains it."""
        within = self.file.relative_to(self.options.file)
        return str(within.parent if len(within.parts) > 1 else within)

    @property
    def is_open(self) -> bool:
        """Whether it is the open part of lesson 10."""
        return self.lesson.folder.name == open_part.part().name and not self.lesson.reference


def _graded(call: Call, grades: Grades) -> int:
    """Grade one file, and print what it has earned. Returns the exit code."""
    print(f"{call.file}: lesson {call.lesson.name}, {call.lesson.world}\n", flush=True)
    return _watch(call, grades) if call.options.watch else _once(call, grades)


def _once(call: Call, grades: Grades) -> int:
    began, file = time.monotonic(), call.file.resolve()
    if call.is_open:
        open_part.grade(file, grades, grades.show)
    elif error := syntax_error(text := text_of(file)) or not call.step and drawn.nameless(call.lesson, text):
        grades.fail_all(error)
        for step in grades.steps:
            grades.show(step)
    else:
        grade(call.lesson, file, grades, show=grades.show)
    seconds = time.monotonic() - began
    rest = f"; {grades.left_out}" if grades.left_out else ""
    print(f"\n{grades.score:g} of {grades.most:g} points, {seconds:.0f} s{rest}", flush=True)
    if said := not call.step and drawn.in_writing(call.lesson, text_of(file)):
        print(paragraph(said), flush=True)
    _hand_on(call, grades, grades.steps, seconds)
    return 0 if grades.score == grades.most else 1


def _watch(call: Call, grades: Grades) -> int:
    began = time.monotonic()
    print("Save it, and what is not right yet is graded again. Ctrl-C ends this.\n", flush=True)
    return watch(call.lesson, call.file.resolve(), grades,
                 lambda steps: _hand_on(call, grades, steps, time.monotonic() - began))


def _hand_on(call: Call, grades: Grades, steps: tuple[Step, ...] | list[Step], seconds: float) -> None:
    """Store results once a file has been graded. steps: those whose points belong to the current text."""
    if call.options.json and call.file == call.options.file:
        call.options.json.write_text(json.dumps(gradescope(grades, seconds), indent=1))
    if call.file.resolve() == call.lesson.starter.resolve():
        of = {step.number: step.points for step in call.lesson.steps}
        points = {step.number: grades.of(step)[0] for step in steps if step.number in of}
        record.add_points(call.lesson.name, points, of)
    if call.options.html:  # last, as it runs the file once more
        attempt_page.write(call.options.html, call.lesson, call.file.resolve(), gradescope(grades, seconds)["tests"])
        print(f"{call.options.html}: what your file did on one small run", flush=True)


def _sum_up(calls: list[Call], all_grades: list[Grades], seconds: float) -> None:
    """Print the results of a whole folder."""
    options, width = calls[0].options, max(26, *(len(call.who) for call in calls))
    print()
    for call, grades in zip(calls, all_grades, strict=True):
        print(f"{call.who:<{width}} {grades.score:3g} of {grades.most:g}")
    score, most = sum(grades.score for grades in all_grades), sum(grades.most for grades in all_grades)
    print(f"{'':<{width}} {'' if _is_class(calls) else f'{score:3g} of {most:g} points, '}{seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(_results(calls, all_grades, seconds), indent=1))


def _is_class(calls: list[Call]) -> bool:
    """Whether a lesson occurs more than once."""
    return len({call.lesson.name for call in calls}) < len(calls)


def _results(calls: list[Call], all_grades: list[Grades], seconds: float) -> dict:
    """results.json: for one lesson, or for all, with steps numbered as in 03.2; for a class, one for each file, by its
    folder."""
    if len(all_grades) == 1:
        return gradescope(all_grades[0], seconds)
    if _is_class(calls):
        return {call.who: gradescope(grades, 0.0) for call, grades in zip(calls, all_grades, strict=True)}
    tests = [test | {"number": f"{grades.lesson.name[:2]}.{test['number']}"}
             for grades in all_grades for test in gradescope(grades, 0.0)["tests"]]
    return {"score": sum(grades.score for grades in all_grades), "execution_time": round(seconds, 1),
            "visibility": "visible", "tests": tests}


# ------------------------------------------------------------------------------------------------------------ the call


def _calls(arguments: list[str], lessons: dict[str, Lesson]) -> list[Call]:
    """A Call for each file to grade. Raises: SystemExit, code 2, for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_minimal grade", allow_abbrev=False, epilog=KEPT,
        description="Points for an assignment, step by step. The exit code is 0 for full marks, 1 for fewer, 2 for a "
        "wrong call, 3 if the grader itself fails, or the machine is too busy to judge.")
    parser.add_argument("file", type=Path, help="what you wrote: lessons/NN_name/assignment.py; or a folder, to "
                        "grade all assignments below it: lessons, or a folder with a folder for each learner")
    parser.add_argument("--lesson", choices=lessons, help="default: the name of the file's folder")
    parser.add_argument("--step", metavar="NUMBER", help="grade only this step; full marks are then those of this step")
    parser.add_argument("--watch", action="store_true", help="whenever the file is saved, grade again what is not "
                        "right yet; the first failure is shown at once. Ctrl-C ends it (exit code 130)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write results.json for Gradescope")
    parser.add_argument("--html", type=output_file, metavar="FILE", help="also write a page: the points, and the "
                        "pictures of this attempt that the last section of the lesson's notebook draws")
    options = parser.parse_args(arguments)
    if options.file.is_dir():
        return _calls_of_folder(parser, options, lessons)
    whole = _open_part(parser, options) or _lesson(parser, options, lessons)
    step, lesson = _step(parser, options, whole), drawn.as_drawn(whole, source := text_of(options.file))
    if options.watch and not step and (said := drawn.nameless(whole, source)):
        parser.error(said)
    return [Call(options, options.file, lesson, step)]


def _calls_of_folder(parser, options, lessons: dict[str, Lesson]) -> list[Call]:
    single = [f"--{name}" for name in ("step", "watch", "html") if getattr(options, name)]
    if single:
        parser.error(f"{single[0]} is for one file, and {options.file} is a folder: name the assignment.py in it")
    folder, calls, unknown = options.file, [], []
    for file in sorted({*folder.rglob("assignment.py"), *(folder.glob("*.py") if options.lesson else [])}):
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue  # for example .ipynb_checkpoints
        own = file.resolve().parent.name
        name = own if own in lessons else options.lesson
        if name is None:
            unknown.append(file)
        elif name == (options.lesson or name) and lessons[name].tests.exists():
            calls.append(Call(options, file, drawn.as_drawn(lessons[name], text_of(file)), None))
    if unknown and not calls:
        parser.error(f"which lesson is {unknown[0]}? Its folder is none of {', '.join(lessons)}: say --lesson NAME")
    if not calls:
        parser.error(f"{folder} has no {next(iter(lessons))}/assignment.py, nor another lesson's: name a file, or the "
                     "folder that holds the lessons' folders, or a class's")
    for file in unknown:
        print(f"{file} is not graded: its folder is none of the lessons'")
    return calls


def _open_part(parser, options) -> Lesson | None:
    """Lesson 10's system.py is not an assignment: it is scored by tracks."""
    if options.file.name != open_part.FILE or options.lesson or not options.file.is_file():
        return None
    for name in ("watch", "html"):
        if getattr(options, name):
            parser.error(f"--{name} is for an assignment, and {options.file} is scored by tracks")
    return open_part.part()


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
