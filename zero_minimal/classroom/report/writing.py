"""Writing: from a graded file to its page."""

from pathlib import Path

from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.report import buckets_told, messages_told
from zero_minimal.classroom.report.page import page
from zero_minimal.classroom.report.recording import record
from zero_minimal.classroom.report.story import Story

KINDS = {"messages": messages_told, "buckets": buckets_told}  # those that lessons.DRAWN names


def write(path: Path, lesson: Lesson, file: Path, points: list[dict]) -> None:
    """Run the file once more, watched, and write what it did into an HTML file.

    Args:
        points: a dict a step, as in results.json.
    Raises: OSError if the file cannot be written.
    """
    story, note = told(lesson, file)
    title = f"{lesson.name[:2]} {lesson.title}"
    path.write_text(page(title, f"{file.name}, graded on {lesson.world}", points, story, note), encoding="utf-8",
                    errors="replace")


def told(lesson: Lesson, file: Path) -> tuple[Story | None, str]:
    """The story of a small run; None, and why there is none."""
    if not lesson.report:
        return None, "No run of this lesson is drawn."
    kind = KINDS[lesson.report]
    try:
        runs = record(lesson, file, lesson.report, kind.names(lesson), kind.WORLD_SIZE)
    except (RuntimeError, OSError) as error:
        return None, f"The small run could not be started: {error}"
    try:
        return kind.tell(lesson, runs), ""
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, StopIteration, OverflowError) as error:
        ended = next((run.ended for run in runs if run.ended), "")
        return None, f"What the ranks wrote down is no record of a run ({type(error).__name__}: {error}). {ended}"
