"""Mutants: a lesson's reference with one small change each, made by a program. All must lose points.

    python tests/mutants.py 02_optimizer_state            each mutant of each function that a learner writes
    python tests/mutants.py 02_optimizer_state --of update_shard --every 7

A statement dropped, or put behind the next one; a block left out of its `with`; an argument dropped, or two exchanged;
a method that only copies or casts left out; a condition turned; a number, a flag, an operator, an attribute or a dtype
changed. One that keeps full marks is a hole in the lesson's checks, unless nobody could tell it from the reference:
then its name stands in UNTOLD of the lesson's mistakes.py, with the reason.
"""

import argparse
import ast
import contextlib
import copy
import json
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from pathlib import Path

import submissions

from zero_minimal.classroom.grader_client import GraderClient, Reported
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import Lesson, found
from zero_minimal.classroom.references import reference
from zero_minimal.classroom.starters import functions_of

COMPARED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
            ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
            ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NAMED = {"avg": "sum", "sum": "avg"}
# attributes and names that are taken for one another
TAKEN_FOR = {"gradient_shard": "parameter_shard", "parameter_shard": "gradient_shard", "parameters": "gradients",
             "gradients": "parameters", "master": "parameter_shard", "rank": "world_size", "world_size": "rank",
             "padded": "numel", "numel": "padded", "float32": "bfloat16", "model": "data", "first": "last",
             "buckets": "all_buckets", "shape": "dtype", "data": "grad"}
COPIES = ("float", "to", "clone", "detach", "contiguous", "double", "zero_", "requires_grad_")


def mutants(lesson: Lesson, of: Container[str] = ()) -> dict[str, dict[str, str]]:
    """name: {function: its text}, of all mutants of what the lesson's learner writes, or of these functions alone."""
    functions, made = functions_of(ast.parse(reference(lesson))), {}
    for name in lesson.tasks:
        if of and name not in of:
            continue
        known = {ast.unparse(functions[name])}
        for words, changed in changes(functions[name]):
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text in known:
                continue
            known.add(text)
            label, number = f"{name}: {words}", 2
            while label in made:
                label, number = f"{name}: {words} ({number})", number + 1
            made[label] = {name: text}
    return made


def changes(function: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(what was changed, the function with this change alone)."""
    for place, node in enumerate(ast.walk(function)):
        for words, change in [*of_statements(node), *of_expression(node)]:
            changed = copy.deepcopy(function)
            change(next(other for number, other in enumerate(ast.walk(changed)) if number == place))
            yield words, changed


def of_statements(node: ast.AST):
    """(words, what makes the change in a copy of this node), of what stands in its blocks."""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        for number, statement in enumerate(statements if isinstance(statements, list) else ()):
            if isinstance(statement, (ast.Pass, ast.Nonlocal)) or _is_docstring(statement):
                continue
            words = _words(statement)
            yield f"without `{words}`", lambda copied, b=block, n=number: _drop(getattr(copied, b), n)
            if number + 1 < len(statements):
                yield f"`{words}` a statement later", lambda copied, b=block, n=number: _later(getattr(copied, b), n)
            if isinstance(statement, ast.With):
                yield f"not inside `{words}`", lambda copied, b=block, n=number: _unwrap(getattr(copied, b), n)
    for number, decorator in enumerate(getattr(node, "decorator_list", ())):
        yield f"without @{ast.unparse(decorator)}", lambda copied, n=number: copied.decorator_list.pop(n)


def of_expression(node: ast.AST):
    """The same for an expression, or for a statement's own part."""
    words = _words(node) if isinstance(node, (ast.expr, ast.stmt)) else ""
    if isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            yield f"`{words}` without {ast.unparse(keyword)}", lambda copied, n=number: copied.keywords.pop(n)
        for number in range(len(node.args) - 1):
            yield f"`{words}`, arguments {number + 1} and {number + 2} exchanged", lambda copied, n=number: _later(
                copied.args, n)
        if isinstance(node.func, ast.Attribute) and node.func.attr in COPIES:
            yield f"`{words}` without .{node.func.attr}()", lambda copied: _become(copied, copied.func.value)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield f"`{_words(node.test)}` turned", lambda copied: setattr(copied, "test", ast.UnaryOp(
            ast.Not(), copied.test))
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield f"`{words}` compared otherwise", lambda copied: copied.ops.__setitem__(
            0, COMPARED[type(copied.ops[0])]())
    elif isinstance(node, ast.BoolOp):
        yield f"`{words}`: and for or", lambda copied: setattr(
            copied, "op", ast.Or() if isinstance(copied.op, ast.And) else ast.And())
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield f"`{words}` computed otherwise", lambda copied: setattr(copied, "op", COMPUTED[type(copied.op)]())
    elif isinstance(node, ast.AugAssign):
        yield f"`{words}` sets", lambda copied: _become(copied, ast.Assign([copied.target], copied.value, lineno=1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} turned", lambda copied: setattr(copied, "value", not copied.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield f"{node.value} + 1", lambda copied: setattr(copied, "value", copied.value + 1)
    elif isinstance(node, ast.Constant) and node.value in NAMED:
        yield f"{NAMED[node.value]!r} for {node.value!r}", lambda copied: setattr(copied, "value", NAMED[copied.value])
    elif isinstance(node, ast.Attribute) and node.attr in TAKEN_FOR:
        yield f"`{words}`: {TAKEN_FOR[node.attr]}", lambda copied: setattr(copied, "attr", TAKEN_FOR[copied.attr])
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in TAKEN_FOR:
        yield f"`{words}`: {TAKEN_FOR[node.id]}", lambda copied: setattr(copied, "id", TAKEN_FOR[copied.id])
    elif isinstance(node, ast.Dict):
        for number in range(len(node.values)):
            yield f"`{words}` without entry {number + 1}", lambda copied, n=number: (
                copied.keys.pop(n), copied.values.pop(n))
    elif isinstance(node, ast.comprehension):
        for number, test in enumerate(node.ifs):
            yield f"without `if {_words(test)}`", lambda copied, n=number: copied.ifs.pop(n)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _words(node: ast.AST) -> str:
    """Its first line."""
    return ast.unparse(node).splitlines()[0][:100]


def _drop(statements: list, number: int) -> None:
    statements[number] = ast.Pass()


def _later(entries: list, number: int) -> None:
    entries[number : number + 2] = entries[number + 1], entries[number]


def _unwrap(statements: list, number: int) -> None:
    statements[number : number + 1] = statements[number].body


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = type(other)
    vars(node).clear()
    vars(node).update(vars(other))


# ----------------------------------------------------------------------------------------------------------- grading


class Jury:
    """Grades one text after the other, each until the first check that fails. It has processes: close it."""

    def __init__(self, lesson: Lesson):
        self.lesson, self.folder = lesson, tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "assignment.py"
        self.file.write_text(reference(lesson))
        self.standby = GraderClient(lesson, self.file)
        self.standby.wait_until_ready()

    def says(self, source: str, first: int = 1) -> str:
        """What the first check that fails tells the learner, "" if none does. The checks of step `first` begin."""
        reported = Reported(self.lesson, Grades(self.lesson), whole=False)
        by_step = sorted(self.standby.tests, key=lambda test: (
            self.standby.tests[test]["step"] < first, self.standby.tests[test]["step"]))
        self.file.write_text(source)
        with contextlib.closing(self.standby.reports(source, by_step, reported, 1.0)) as following:
            for _ in following:
                if reported.failed:
                    break
        if not reported.failed:
            return "" if reported.ended else "it did not come to an end"
        check = reported.failed[0]
        step = next(step for step in self.lesson.steps if step.number == reported.tests[check]["step"])
        return f"{reported.tests[check]['check']}: {reported.grades.first_failure(step)}"

    def close(self) -> None:
        self.standby.close()
        self.folder.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lesson", choices=[name for name, lesson in found().items() if not lesson.draw])
    parser.add_argument("--of", default="", help="mutants whose name begins so")
    parser.add_argument("--every", type=int, default=1, help="of these every so many-th")
    parser.add_argument("--from", dest="first", type=int, default=0, help="leave out so many")
    parser.add_argument("--list", action="store_true", help="only name them")
    options = parser.parse_args()
    lesson = found()[options.lesson]
    untold = getattr(submissions.mistakes(lesson), "UNTOLD", {})
    chosen = [entry for entry in mutants(lesson).items() if entry[0].startswith(options.of)]
    chosen = chosen[options.first :: options.every]
    jury, kept = None if options.list else Jury(lesson), 0
    for number, (name, code) in enumerate(chosen, 1):
        if options.list:
            print(name)
            continue
        began = time.monotonic()
        step = lesson.tasks[name.partition(":")[0]][0]
        said = jury.says(submissions.spliced(lesson, code), step)
        kept += not said and name not in untold
        mark = "lost" if said else "untold" if name in untold else "KEPT"
        print(json.dumps({"number": number, "of": len(chosen), "mark": mark, "name": name, "said": said[:300],
                          "seconds": round(time.monotonic() - began, 1)}), flush=True)
    if jury:
        jury.close()
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main())
