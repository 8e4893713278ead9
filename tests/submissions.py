"""Submissions to grade: wrong ones, each with the check that must catch it and the words it must hear, and right ones.

A lesson's are in tests/NN_name/mistakes.py, as WRONG and RIGHT; whole files that are right lie in tests/NN_name/right.
Most are the reference with one function written anew, so that each shows one mistake and nothing else.
"""

import ast
import atexit
import contextlib
import functools
import importlib.util
import io
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom import grade as grader
from zero_minimal.classroom.lessons import HOUSE, Lesson, found
from zero_minimal.classroom.references import bound_by, reference
from zero_minimal.classroom.starters import functions_of
from zero_minimal.classroom.supervisor import Supervisor


@dataclass(frozen=True)
class Wrong:
    """A mistake, and what must come of it."""

    step: int  # the first one that loses points
    check: str  # the test that must catch it
    message: str  # a pattern of what the learner reads
    code: dict  # what is put into the reference, see `spliced`
    world_size: int | None = None  # of the check, where it takes one
    hangs: bool = False  # it waits for ever: the test waits less
    top: str = ""  # lines before all others of the file


def spliced(lesson: Lesson, code: dict[str, str | None], top: str = "") -> str:
    """The lesson's reference with some definitions written anew, or new.

    code: {"function", "Class.method", "CONSTANT" or "Class.attribute": its text, decorators too; None takes it away}.
    Raises: ValueError if there is no such class, nothing to take away, or if a text defines something else.
    """
    source = reference(lesson)
    for name, text in code.items():
        source = _put(source, name, text)
    return top + source


def _put(source: str, name: str, text: str | None) -> str:
    *owner, own = name.split(".")
    lines, body = source.splitlines(), ast.parse(source).body
    place = next((_first(node) for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))), len(lines))
    if owner:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner[0]), None)
        if body is None:
            raise ValueError(f"{name}: the reference has no class {owner[0]}")
        place = body[-1].end_lineno
    old = next((node for node in body if own in bound_by(node)), None)
    if old is None and text is None:
        raise ValueError(f"{name}: the reference has none to take away")
    first, last = (_first(old), old.end_lineno) if old else (place, place)
    lines[first:last] = _as_a_part(name, text, " " * body[-1].col_offset)
    return "\n".join(lines) + "\n"


def _first(node: ast.stmt) -> int:
    """The number of its first line, from 0. What stands above it stays."""
    return min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))]) - 1


def _as_a_part(name: str, text: str | None, margin: str) -> list[str]:
    if text is None:
        return []
    text = textwrap.dedent(text).strip("\n")
    defined = [found for node in ast.parse(text).body for found in bound_by(node) or [ast.unparse(node)]]
    if defined != [name.split(".")[-1]]:
        raise ValueError(f"the text for {name} defines {', '.join(defined) or 'nothing'}")
    return textwrap.indent(text, margin).splitlines()


def function(head: str, *parts: str) -> str:
    """The text of a function from its first line and the parts of its body, of one or more lines each."""
    return "\n".join([head, *(textwrap.indent(textwrap.dedent(part).strip("\n"), "    ") for part in parts if part)])


@functools.cache
def module_in(file: Path):
    """The module in a file whose name may be that of other files, too."""
    spec = importlib.util.spec_from_file_location(f"{file.stem}_{file.parent.name}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mistakes(lesson: Lesson):
    """The module tests/NN_name/mistakes.py."""
    return module_in(lesson.tests.with_name("mistakes.py"))


def right(lesson: Lesson) -> dict[str, str]:
    """name: text, of all right submissions."""
    files = sorted(lesson.tests.with_name("right").glob("*.py"))
    texts = {name: spliced(lesson, code) for name, code in mistakes(lesson).RIGHT.items()}
    return texts | {file.stem.replace("_", " "): file.read_text() for file in files}


def solution(lesson: Lesson, name: str) -> list[str]:
    """The lines of a function of the reference that a learner writes: no docstring, no comments."""
    source = reference(lesson)
    body = [part for part in functions_of(ast.parse(source))[name].body
            if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    lines = [line.strip() for line in source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]]
    return [line for line in lines if line and not line.startswith("#")]


def edited(folder: str, name: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """{name: the reference's text of this function, with the second of each pair in the place of the first}, for
    Wrong.code. Raises: ValueError if the reference has no such text."""
    source = reference(found()[folder])
    node = functions_of(ast.parse(source))[name]
    text = textwrap.dedent("\n".join(source.splitlines()[_first(node) : node.end_lineno]))
    for old, new in pairs:
        if old not in text:
            raise ValueError(f"{name} of {folder} has no {old!r}")
        text = text.replace(old, new)
    return {name: text}


def norm_of_whole_gradients(folder: str, stage: str) -> dict[str, str]:
    """A clip_grad_norm_ for which all gradients travel: a mistake at each stage that keeps shards of them."""
    return edited(folder, f"{stage}.clip_grad_norm_", (
        "= self.reduced_gradients()", "= [all_of(self, shard) for shard in self.reduced_gradients()]"), (
        "group=self.group)", "sharded=False)")) | {"all_of": """
            def all_of(stage, shard):
                whole = shard.new_empty(shard.numel() * stage.world_size)
                collectives.all_gather(whole, shard, group=stage.group)
                return whole
            """}


@functools.cache
def supervisor(lesson: Lesson) -> Supervisor:
    """One for all submissions of a lesson, whatever test file they are in: its fork server takes seconds to start."""
    made = Supervisor(lesson, lesson.starter)
    atexit.register(made.close)
    return made


def grade(*arguments) -> tuple[int, str]:
    """What `python -m zero_minimal grade ARGUMENTS` does in the house's folder: its exit code, and what it says. In
    this process, since another takes longer to start than most of what is asked of it; the judge and its ranks have
    their own all the same."""
    said = io.StringIO()
    with contextlib.chdir(HOUSE), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = grader.main(list(map(str, arguments)))
        except SystemExit as ended:
            code = ended.code
    return code, said.getvalue()
