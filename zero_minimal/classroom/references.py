"""References: a lesson's solution as one text, even if it is spread over several modules.

A learner fills in one file. So definitions that a lesson takes from other modules are placed before those of its main
reference; imports are merged; their `module.name` becomes `name`. Text is cut by line numbers, so comments stay.
"""

import ast
import functools
import importlib.util
import re
import symtable
import sys
from pathlib import Path
from typing import NamedTuple

from zero_minimal.classroom.lessons import PACKAGE, Lesson

WIDTH = 100  # width of a file shown in class


@functools.cache
def reference(lesson: Lesson) -> str:
    """The lesson's reference as one text. Raises: FileNotFoundError if this copy of the course lacks it."""
    main, taken = Module.named(lesson.reference, lesson), definitions(lesson)
    return merged(main, taken, [Module.named(name, lesson) for name in taken]) if taken else main.text


def definitions(lesson: Lesson) -> dict[str, list[str]]:
    """{module: names of the definitions that the lesson takes from it}."""
    taken: dict[str, list[str]] = {}
    for module, _, name in (entry.rpartition(".") for entry in lesson.takes_in):
        taken.setdefault(module, []).append(name)
    return taken


class Import(NamedTuple):
    """import module as alias, or from module import name as alias."""

    module: str
    name: str
    alias: str

    @property
    def binds(self) -> str:
        """The name that it binds."""
        return self.alias or self.name or self.module.split(".")[0]

    @property
    def full(self) -> str:
        """The full name of what it binds: a module, or something in one."""
        return f"{self.module}.{self.name}" if self.name else self.module if self.alias else self.binds


def imports_of(nodes) -> dict[str, Import]:
    """{name: the import that binds it}, for all imports among these nodes."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [Import(part.name, "", part.asname or "") for part in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [Import(node.module, part.name, part.asname or "") for part in node.names]
    return {entry.binds: entry for entry in found}


class Module:
    """A module's text, and its top level: imports and definitions by name."""

    def __init__(self, name: str, text: str):
        self.name, self.text, self.lines = name, text, text.splitlines()
        self.tree = ast.parse(text)
        self.imports = imports_of(self.tree.body)
        self.definitions = {name: node for node in self.tree.body for name in bound_by(node)}

    @classmethod
    def named(cls, name: str, lesson: Lesson) -> "Module":
        """Raises: FileNotFoundError if this copy of the course lacks it."""
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise FileNotFoundError(f"{lesson.name}: the reference {name} is not here, so no starter can be made "
                                    "from it")
        return cls(name, Path(spec.origin).read_text())

    def first_line(self, node: ast.stmt) -> int:
        """A statement's first line, from 0, including decorators and the comments right above."""
        first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))]) - 1
        while first and self.lines[first - 1].startswith(" " * node.col_offset + "#"):
            first -= 1
        return first

    def cut(self, node: ast.stmt) -> str:
        """The text of a statement."""
        return "\n".join(self.lines[self.first_line(node) : node.end_lineno])


def bound_by(node: ast.stmt) -> list[str]:
    """Names that a statement defines: a function, a class, variables."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def used_names(text: str) -> set[str]:
    """Names that a text looks up globally, even inside its functions."""
    used, tables = set(), [symtable.symtable(text, "text", "exec")]
    for table in tables:
        tables += table.get_children()
        used |= {entry.get_name() for entry in table.get_symbols() if entry.is_referenced() and entry.is_global()}
    return used


def mentions(tree: ast.AST, imports: dict[str, Import], taken: dict[str, list[str]]) -> list[ast.Attribute]:
    """Places that refer to a taken definition through its module: `module.name`."""
    full = {name: entry.full for name, entry in imports.items()}
    return [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            and node.attr in taken.get(full.get(node.value.id, ""), ())]


def borrowed(lesson: Lesson, source: str) -> list[str]:
    """Definitions taken in by the lesson that a submission uses from other modules."""
    tree, taken = ast.parse(source), definitions(lesson)
    imports = imports_of(ast.walk(tree))
    used = [entry.full for entry in imports.values() if entry.name and entry.name in taken.get(entry.module, ())]
    return used + [ast.unparse(node) for node in mentions(tree, imports, taken)]


# ------------------------------------------------------------------------------------------------------------- merging


def merged(main: Module, taken: dict[str, list[str]], others: list[Module]) -> str:
    """One text of the main module and the taken definitions. `others`: the modules from which they are taken.

    Raises: ValueError if a module lacks a definition, if one needs a private name that is not taken in, or if a name
    would have two meanings.
    """
    main, others = shortened(main, taken), [shortened(other, taken) for other in others]
    imports = {name: entry for name, entry in main.imports.items() if not _is_taken(entry, taken)}
    meaning = {name: f"{main.name}.{name}" for name in main.definitions}
    meaning |= {name: entry.full for name, entry in imports.items()}
    pieces = []
    for other in others:
        for name in taken[other.name]:
            if name not in other.definitions:
                raise ValueError(f"{other.name} has no {name} to be taken in")
            pieces.append(other.cut(other.definitions[name]))
            _agree(meaning, name, f"{other.name}.{name}")
            for entry in needed(other, pieces[-1]):
                if _is_taken(entry, taken):
                    continue
                if entry.name.startswith("_"):
                    raise ValueError(f"{name} of {other.name} uses {entry.name}, which is private: take it in too")
                _agree(meaning, entry.binds, entry.full)
                imports.setdefault(entry.binds, entry)
    used = set().union(*map(used_names, [main.text, *pieces]))
    imports = {name: entry for name, entry in imports.items() if name in used or entry.full not in taken}
    return _put_together(main, list(imports.values()), pieces)


def _is_taken(entry: Import, taken: dict[str, list[str]]) -> bool:
    found = bool(entry.name) and entry.name in taken.get(entry.module, ())
    if found and entry.alias:
        raise ValueError(f"{entry.full} is imported as {entry.alias}, and is to be taken in: import it by its name")
    return found


def _agree(meaning: dict[str, str], name: str, full: str) -> None:
    if meaning.setdefault(name, full) != full:
        raise ValueError(f"in one file {name} would have two meanings: {meaning[name]} and {full}")


def needed(module: Module, text: str) -> list[Import]:
    """Imports for the names of a module that a text cut out of it uses."""
    used = sorted(used_names(text))
    own = [Import(module.name, name, "") for name in used if name in module.definitions]
    return own + [module.imports[name] for name in used if name in module.imports]


def shortened(module: Module, taken: dict[str, list[str]]) -> Module:
    """The module with `name` instead of `module.name` for all taken definitions."""
    text, starts = module.text.encode(), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in sorted(mentions(module.tree, module.imports, taken), key=lambda node: (-node.lineno, -node.col_offset)):
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef) and node in ast.walk(function) and node.attr in _locals(function):
                raise ValueError(f"{ast.unparse(node)} would be {node.attr} in one file, and {module.name} has a "
                                 f"variable of that name in {function.name}()")
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = text[:first] + node.attr.encode() + text[last:]
    return Module(module.name, text.decode())


def _locals(function: ast.FunctionDef) -> set[str]:
    parts = list(ast.walk(function))
    return {part.arg for part in parts if isinstance(part, ast.arg)} | {
        part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _put_together(main: Module, imports: list[Import], pieces: list[str]) -> str:
    """The main module's text with these imports as its own, and the pieces before its first function or class."""
    statements = main.tree.body
    own = [node for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    border = min((main.first_line(node) for node in statements if isinstance(node, (ast.FunctionDef, ast.ClassDef))),
                 default=len(main.lines))
    head = statements[0].end_lineno if ast.get_docstring(main.tree) is not None else 0
    gone = {number for node in own for number in range(main.first_line(node), node.end_lineno)}
    between = [line for number, line in enumerate(main.lines[head:border], head) if number not in gone]
    kept = {tuple(imports_of([node]).values()): main.cut(node) for node in own}
    start = "\n".join([*main.lines[:head], "", block(imports, kept), "", *between])
    parts = [re.sub(r"\n{3,}", "\n\n", start), *pieces, "\n".join(main.lines[border:])]
    return "\n\n\n".join(part.strip("\n") for part in parts if part.strip("\n")) + "\n"


def block(imports: list[Import], kept: dict[tuple, str]) -> str:
    """Import statements in the usual order: the standard library, other packages, this one. `kept`: existing texts of
    these imports."""
    statements: dict[tuple, list[Import]] = {}
    for entry in imports:
        key = _section(entry.module), bool(entry.name), entry.module.lower(), "" if entry.name else entry.alias
        statements.setdefault(key, []).append(entry)
    lines, section = [], None
    for key, entries in sorted(statements.items()):
        lines += [""] if section not in (None, key[0]) else []
        section = key[0]
        entries.sort(key=lambda entry: (not entry.name.isupper(), not entry.name[:1].isupper(), entry.name.lower()))
        same = next((text for old, text in kept.items() if set(old) == set(entries)), None)
        lines.append(same or _statement(entries))
    return "\n".join(lines)


def _section(module: str) -> int:
    root = module.split(".")[0]
    return 0 if root == "__future__" else 1 if root in sys.stdlib_module_names else 3 if root == PACKAGE.name else 2


def _statement(entries: list[Import]) -> str:
    texts = [(entry.name or entry.module) + (f" as {entry.alias}" if entry.alias else "") for entry in entries]
    if not entries[0].name:
        return f"import {', '.join(texts)}"
    line = f"from {entries[0].module} import {', '.join(texts)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {entries[0].module} import (", *(f"    {text}," for text in texts), ")"])
