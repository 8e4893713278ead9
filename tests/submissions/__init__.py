"""Submissions to grade: wrong ones, each with the check that must catch it and the words it must hear, and right ones.

Most are the reference with a few lines changed, so that each shows one mistake and nothing else.
"""

from dataclasses import dataclass

from zero_minimal.classroom.lessons import Lesson
from zero_minimal.classroom.starters import reference_file


@dataclass(frozen=True)
class Wrong:
    """A mistake: `changes` are pairs of lines of the reference and what stands in their place."""

    step: int  # the first one that loses points
    check: str  # the test that must catch it
    message: str  # a pattern of what the learner reads
    changes: list
    world_size: int | None = None  # of the check, where it takes one
    hangs: bool = False  # it waits for ever: the test waits less


def changed(lesson: Lesson, changes) -> str:
    """The reference with these changes. Raises: ValueError if one of them does not fit it any more."""
    source = reference_file(lesson).read_text()
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{source.count(old)} times in {lesson.reference}, not once:\n{old}")
        source = source.replace(old, new)
    return source
