"""Drawn: lessons with more steps than one learner is graded on. The name in the file decides which.

    NAME = "Ada Lovelace"

at the top of assignment.py draws the same `draw` steps of lesson.toml on every machine: at least one of each group. It
also draws the numbers that a step is run with (`seed`). Answers in words, lesson.toml's `written`, are only checked for
presence; a teacher reads them.
"""

import ast
import dataclasses
import hashlib
import unicodedata

from zero_minimal.classroom.lessons import Lesson, Step

NAMELESS = ("NAME at the top of the file is empty: write your own name between the quotes. It draws the {draw} "
            "that you are graded on, and the numbers that they are run with")
ENOUGH = 40  # the fewest words of an answer that counts as written


def as_drawn(lesson: Lesson, source: str) -> Lesson:
    """The lesson with the steps that the name in this text draws; unchanged if the lesson draws none.

    Without a name it has one step, number 0, which cannot be passed.
    """
    if not lesson.draw:
        return lesson
    if not (name := name_of(source)):
        title = f"your {lesson.draw} of {len(lesson.steps)}: NAME draws them"
        return dataclasses.replace(lesson, steps=(Step(0, title, lesson.points, {}, {}),))
    return dataclasses.replace(lesson, steps=tuple(sorted(draw(lesson, name), key=lambda step: step.number)))


def nameless(lesson: Lesson, source: str) -> str:
    """The message for a file without the name that it needs; "" if nothing is missing."""
    if not lesson.draw or name_of(source):
        return ""
    return NAMELESS.format(draw=lesson.draw)


def name_of(source: str) -> str:
    """The name in a submission, in lower case with single spaces. "" if there is none, or the text is not Python."""
    text = texts_of(source).get("NAME", "")
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def texts_of(source: str) -> dict[str, str]:
    """{NAME: text} of the assignments at the top level of a file, which is read and not run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    return {node.targets[0].id: node.value.value for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)}


def draw(lesson: Lesson, name: str) -> list[Step]:
    """One step of each group first, then others, in an order that only the name determines."""
    order = sorted(lesson.steps, key=lambda step: seed(name, str(step.number)))
    firsts = [next(step for step in order if step.group == group) for group in lesson.groups]
    return (firsts + [step for step in order if step not in firsts])[: lesson.draw]


def seed(name: str, what: str) -> int:
    """A 48-bit number that a name determines: the same on every machine, and with every Python."""
    return int.from_bytes(hashlib.sha256(f"{name}/{what}".encode()).digest()[:6], "big")


def in_writing(lesson: Lesson, source: str) -> str:
    """The message on answers in words, which no grader can judge; "" if the lesson has none."""
    if not lesson.written:
        return ""
    texts = texts_of(source)
    words = {name: texts.get(name, "").casefold().split() for name in lesson.written}
    long = [name for name in lesson.written if len(words[name]) >= ENOUGH]
    same = [name for name in long if [words[other] for other in long].count(words[name]) > 1]
    there = [name for name in long if name not in same]
    missing = [name for name in lesson.written if name not in long]
    still = f" Still to write, {ENOUGH} words or more: {', '.join(missing)}." if missing else ""
    if same:
        still += f" One text stands in {' and '.join(same)}, and does not count: each asks something else."
    return (f"{len(there)} of {len(lesson.written)} written answers are there. This program does not read them: your "
            f"teacher does, and gives up to {100 - lesson.points:g} points more.{still}")
