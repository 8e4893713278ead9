"""What tests of lessons' pages share: a lesson's texts, and what its notebook measured."""

import json
from collections import namedtuple

from zero_minimal.classroom.lessons import found

# prose and told: page and teacher, wherever lines are broken
Texts = namedtuple("Texts", "lesson page teacher prose told measured")


def texts_of(name):
    lesson = found()[name]
    page, teacher = ((lesson.folder / file).read_text() for file in ("README.md", "teacher.md"))
    measured = lesson.folder / "measured.json"
    return Texts(lesson, page, teacher, " ".join(page.split()), " ".join(teacher.split()),
                 json.loads(measured.read_text()) if measured.exists() else None)
