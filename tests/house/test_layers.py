"""The house as its imports and sizes show it: nothing upward, no circle, no door forced, nothing too large."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from thorough import each

PACKAGE = Path(__file__).parents[2] / "zero_minimal"
# a room may import from those below it; the files of the lessons lie beside the rooms
BELOW = "core", "guards", "processes", "extensions", "checkpoint", "offloading"  # the lessons
ORDER = (*BELOW, "lessons", "workload", "paper", "meters", "pictures", "programs", "classroom", "notebook")
MAY_NOT = {"workload": {"lessons"}, "paper": {"lessons"}, "notebook": {"classroom"}}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))
LESSONS = [path for path in FILES if path.parent == PACKAGE]
IN_CLASS = [path for path in FILES if path.parent == PACKAGE or path.parent.name in (*BELOW, "workload")]


def name_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else "lessons"


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


def imports(path, tree=None):
    """Modules of ours that a file imports, wherever in the file it does so; what only type checkers read left out."""
    for node in ast.walk(tree or tree_of(path)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name in MODULES)


def without_last_lines(path):
    """A lesson's file without `if __name__ == "__main__":`, which starts a program."""
    tree = ast.parse(path.read_text())  # not the tree that is kept
    if isinstance(tree.body[-1], ast.If) and "__main__" in ast.unparse(tree.body[-1].test):
        tree.body.pop()
    return tree


@each(FILES, name_of)
def test_imports_nothing_from_above(path):
    room = room_of(name_of(path))
    tree = without_last_lines(path) if room == "lessons" else None
    for module in imports(path, tree):
        other = room_of(module)
        assert ORDER.index(other) <= ORDER.index(room), f"{name_of(path)} imports {module}, which is above it"
        assert other not in MAY_NOT.get(room, ()), f"{name_of(path)} imports {module}"
    if room == "lessons":
        ladder = re.fullmatch(r"naive|stage\d", path.stem)  # these are the algorithm alone
        assert {room_of(module) for module in imports(path, tree)} <= {"lessons", *(["core"] if ladder else BELOW)}


def test_no_circle():
    TopologicalSorter({module: set(imports(path, without_last_lines(path)) if room_of(module) == "lessons"
                                   else imports(path)) for module, path in MODULES.items()}).prepare()


@each(FILES, name_of)
def test_opens_no_private_door(path):
    """`module._name` of another module of ours, or `from module import _name`."""
    tree = tree_of(path)
    ours = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("zero_minimal") for alias in node.names}
    assert not [name for name in ours if re.match("_[a-z]", name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ours:
            assert not re.match("_[a-z]", node.attr), f"{name_of(path)}:{node.lineno} uses {ast.unparse(node)}"


@each(LESSONS, name_of)
def test_a_lesson_ends_with_what_starts_its_program(path):
    last = ast.parse(path.read_text()).body[-1]
    assert isinstance(last, ast.If) and "__main__" in ast.unparse(last.test)
    assert [type(line) for line in last.body] == [ast.ImportFrom, ast.Expr], "an import, and a call"


def test_no_file_and_no_room_is_too_large():
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not {name_of(path): count for path, count in lines.items() if count > 350}
    rooms: dict = {}
    for path, count in lines.items():
        rooms[room_of(name_of(path))] = rooms.get(room_of(name_of(path)), 0) + count
    assert max(rooms.values()) < sum(rooms.values()) / 3, rooms


def test_no_two_files_have_one_name():
    names = [path.name for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@each(IN_CLASS, name_of)
def test_fits_a_projector(path):
    wide = [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
    assert not wide, f"lines of more than 100 characters: {wide}"


# what a file imports, with all that those import: lines that are not blank, without `if __name__`. They may only fall.
CLOSURES = {"naive": 391, "stage0": 1028, "stage1": 1050, "stage2": 1076, "stage3": 1435}


def code_lines(path):
    """How many lines are not blank, without a lesson's last ones."""
    ends = [node.end_lineno for node in without_last_lines(path).body]
    return sum(bool(line.strip()) for line in path.read_text().splitlines()[: max(ends, default=0)])


@pytest.mark.parametrize("lesson", CLOSURES)
def test_no_more_to_read_than_before(lesson):
    to_read, known = [PACKAGE / f"{lesson}.py"], set()
    while to_read:
        path = to_read.pop()
        if path not in known:
            known.add(path)
            to_read += [MODULES[name] for name in imports(path, without_last_lines(path))]
    lines = sum(map(code_lines, known))
    assert lines <= CLOSURES[lesson], f"{lesson}.py and what it imports have {lines} lines, in {len(known)} files"
