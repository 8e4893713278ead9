"""Writing: from a graded file to its page."""

import contextlib
from pathlib import Path

from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.report import buckets_told, messages_told
from zero_minimal.classroom.report.page import page
from zero_minimal.classroom.report.recording import record
from zero_minimal.classroom.report.story import Story
from zero_minimal.classroom.submission import Submission, syntax_error, text_of
from zero_minimal.classroom.supervisor import Supervisor

KINDS = {"messages": messages_told, "buckets": buckets_told}  # those that lessons.DRAWN names


def write(path: Path, lesson: Lesson, file: Path, points: list[dict]) -> None:
    """Run the file once more, watched, and write what it did into an HTML file.

    Args:
        points: a dict a step, as in results.json.
    Raises: OSError if the file cannot be written.
    """
    story, note = told(lesson, file)
    title = f"{lesson.name[:2]} {lesson.title}"
    written = page(title, f"{file.parent.name}/{file.name}, graded on {lesson.world}", points, story, note)
    path.write_text(written, encoding="utf-8", errors="replace")


def told(lesson: Lesson, file: Path) -> tuple[Story | None, str]:
    """The story of a small run; None, and why there is none."""
    if not lesson.report:
        return None, "No run of this lesson is drawn."
    if syntax_error(text_of(file)):
        return None, "The file is not Python, so nothing could be run: the first message below says where."
    try:
        with contextlib.closing(Supervisor(lesson, file)) as supervisor:
            return told_by(supervisor, Submission(file, lesson))
    except (RuntimeError, OSError) as error:
        return None, f"The small run could not be started: {error}"


def told_by(supervisor: Supervisor, submission: Submission) -> tuple[Story | None, str]:
    """The same, on ranks of a supervisor that is there already. Raises: RuntimeError if no ranks can be started."""
    lesson = submission.lesson
    kind = KINDS[lesson.report]
    runs = record(supervisor, submission, lesson.report, kind.names(lesson), kind.WORLD_SIZE)
    try:
        return kind.tell(lesson, runs), ""
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, StopIteration, OverflowError) as error:
        ended = next((run.ended for run in runs if run.ended), "")
        return None, f"What the ranks wrote down is no record of a run ({type(error).__name__}: {error}). {ended}"
