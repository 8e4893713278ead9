"""What tests of lessons' pages share: a lesson's texts, what its notebook measured, and the notebook on other ranks."""

import contextlib
import json
from collections import namedtuple

import pytest
from cells import run_notebook

from zero_minimal.classroom.lessons import found

# prose and told: page and teacher, wherever lines are broken
Texts = namedtuple("Texts", "lesson page teacher prose told measured")


def texts_of(name):
    lesson = found()[name]
    page, teacher = ((lesson.folder / file).read_text() for file in ("README.md", "teacher.md"))
    measured = lesson.folder / "measured.json"
    return Texts(lesson, page, teacher, " ".join(page.split()), " ".join(teacher.split()),
                 json.loads(measured.read_text()) if measured.exists() else None)


@contextlib.contextmanager
def notebook_on(ranks, name, *replacing):
    """The names that a notebook leaves on so many ranks, and its world. replacing: as run_notebook takes it."""
    with pytest.MonkeyPatch.context() as patch:
        names = run_notebook(name, patch, ranks, *replacing)
        try:
            yield names, names["world"]
        finally:
            names["world"].stop()
