"""python -m zero_minimal starters: regenerate lessons/*/assignment.py from the references.

A starter is the reference in one file, without the bodies that a learner writes. Signatures and docstrings stay; a body
is replaced by what must hold when the function returns, and an error that names the step, or `...`.
"""

import ast
import textwrap

from zero_minimal.classroom.lessons import Lesson, Step, found
from zero_minimal.classroom.references import WIDTH, reference
from zero_minimal.workload.settings import Parser


def starter(lesson: Lesson, source: str) -> str:
    """The text of assignment.py. Raises: ValueError if the reference lacks one of the lesson's functions."""
    lines, functions = source.splitlines(), functions_of(ast.parse(source))
    steps = {name: step for step in lesson.steps for name in step.tasks}
    missing = [name for name in steps if name not in functions]
    if missing:
        raise ValueError(f"{lesson.name}: the reference has no function {', '.join(missing)}")
    # from the last to the first, so that the line numbers of the others stay right
    for name in sorted(steps, key=lambda name: -functions[name].lineno):
        first, last, indent = _body(functions[name], lines)
        lines[first - 1 : last] = _instead(name, steps[name], indent)
    return "\n".join(lines) + "\n"


def functions_of(tree: ast.Module) -> dict:
    """"function" or "Class.method": node."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}": part for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def _body(function: ast.FunctionDef, lines: list[str]) -> tuple[int, int, int]:
    """First and last line without the docstring, and the indentation. Comments before the first statement are
    included."""
    body = function.body
    if ast.get_docstring(function):
        head = body[0].end_lineno
    else:
        parts = [*(arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)), function.returns]
        head = max([function.lineno, *(part.end_lineno for part in parts if part)])
        while head < body[0].lineno - 1 and not lines[head - 1].partition("#")[0].rstrip().endswith(":"):
            head += 1  # a signature may end on its own line
        head = min(head, body[0].lineno - 1)
    return head + 1, body[-1].end_lineno, function.col_offset + 4


def _instead(name: str, step: Step, indent: int) -> list[str]:
    margin, own = " " * indent, name.split(".")[-1]
    comment = [line for part in f"{step.label}: {step.tasks[name]}".splitlines() for line in textwrap.wrap(
        part, WIDTH, initial_indent=margin + "# ", subsequent_indent=margin + ("#   " if part[:2] == "- " else "# "))]
    hole = f"...  # until {step.label} nothing happens here"
    return [*comment, margin + (hole if name in step.quiet else f'raise NotImplementedError("{step.label}: {own}")')]


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m zero_minimal starters", description="Rewrite lessons/*/assignment.py from the "
                    "references. What a learner wrote into them is lost.")
    parser.parse_args(arguments)
    try:
        texts = {lesson.starter: starter(lesson, reference(lesson)) for lesson in found().values()}
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    for file, text in texts.items():
        file.write_text(text)
        print(file)
