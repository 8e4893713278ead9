"""Attempt: loads the learner's own assignment.py as a module, in the notebook or on a rank, so that it can be drawn.

    mine = attempt.load("03_gradients")
    with attempt.as_far_as_written():       an unwritten function ends only this block mine.Stage2(...)
    with attempt.if_there():                so does a module that a teacher withholds ring.reduce_scatter(...)
    print(attempt.next_step(mine))          which functions are not written yet

ZERO_ATTEMPT=FILE names another file. Ranks inherit the notebook's environment when they are started.
"""

import ast
import contextlib
import importlib
import importlib.util
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle

from zero_minimal.notebook.errors import NotHere, Told

HOUSE = Path(__file__).parents[2]  # the checkout
NAME = "assignment"  # of the module
STEP = re.compile(r"(?:step|card) (\d+): ")  # how the starter's errors begin
QUIET = re.compile(r"^ *\.\.\.  # until (step \d+) ")  # what replaces them in quiet functions
AGAIN = "Mend it, save the file, and run this cell again."

files: set[str] = set()  # loaded files, whose lines messages name (stack_inspection.py)


class Unreadable(Told):
    """The learner's file is missing, or cannot be run."""


def load(lesson: str) -> ModuleType:
    """Run the learner's file again, and the Python files in its folder that it imports.

    Raises: Unreadable, with file and line, if that fails.
    """
    file = file_of(lesson)
    try:
        source = importlib.util.decode_source(file.read_bytes())
    except OSError as error:
        raise Unreadable(f"{shown(file)} cannot be read ({error.strerror}): is the name of the lesson right?") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise Unreadable(f"{shown(file)} is not text in UTF-8 ({error}). {AGAIN}") from None
    _forget_those_beside(file)
    module = sys.modules[NAME] = ModuleType(NAME)  # dataclasses and pickle look for it there
    module.__file__ = str(file)
    linecache.cache[str(file)] = len(source), None, source.splitlines(True), str(file)  # its current text, for messages
    files.add(str(file))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it misses changes within a second
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise Unreadable(f"{_where(error, file)}. {AGAIN}") from None
    finally:
        sys.dont_write_bytecode = before
    cloudpickle.register_pickle_by_value(module)  # for objects sent to a rank's host: its process lacks this module
    return module


def file_of(lesson: str) -> Path:
    """The file that the learner fills in."""
    named = os.environ.get("ZERO_ATTEMPT")
    return (Path(named).expanduser() if named else HOUSE / "lessons" / lesson / "assignment.py").resolve()


def shown(file: Path) -> str:
    """A file's name in a message: relative to the checkout, if it is inside."""
    return str(file.relative_to(HOUSE)) if file.is_relative_to(HOUSE) else str(file)


@contextlib.contextmanager
def as_far_as_written() -> Iterator[None]:
    """A context that the starter's "not written yet" error ends silently, here or on a rank's host."""
    try:
        yield
    except RuntimeError as error:  # NotImplementedError is a subclass
        on_host = "NotImplementedError: step " in str(error)
        if not on_host and not (isinstance(error, NotImplementedError) and STEP.match(str(error))):  # another error
            raise


@contextlib.contextmanager
def if_there() -> Iterator[None]:
    """A context that ends silently at the use of a module that a teacher withholds."""
    with contextlib.suppress(NotHere):
        yield


def next_step(module: ModuleType) -> str:
    """One line: which functions of a loaded file are not written yet, and what to do."""
    missing = _unwritten("".join(linecache.getlines(module.__file__)))
    if not missing:
        return "All of it is written. Whether it is right, the grader says."
    names, (step, _, name) = [word.partition(": ")[2] for word in missing], missing[0].partition(": ")
    return (f"Not written yet: {', '.join(names)}. Next comes {step}, {name}: write it in "
            f"{shown(Path(module.__file__))}, save it, and run the cells of this section again.")


def _unwritten(source: str) -> list[str]:
    """The texts of the starter's errors left in a file, in the order of the steps: "step 1: exchange"."""
    tree, lines = ast.parse(source), source.splitlines()
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    words = [ast.literal_eval(error.args[0]) for error in raised
             if isinstance(error, ast.Call) and ast.unparse(error.func) == "NotImplementedError"
             and error.args and isinstance(error.args[0], ast.Constant)]
    steps = [word for word in words if isinstance(word, str) and STEP.match(word)]
    for node in ast.walk(tree):  # quiet functions: `...` with the step in a comment
        if isinstance(node, ast.FunctionDef) and (quiet := QUIET.search(lines[node.body[-1].lineno - 1])):
            steps.append(f"{quiet[1]}: {node.name}")
    return sorted(steps, key=lambda word: int(STEP.match(word)[1]))


def _forget_those_beside(file: Path) -> None:
    """Make the file's imports from its own folder run again, too."""
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if "." not in name and origin and os.path.dirname(origin) == folder:
            del sys.modules[name]
    importlib.invalidate_caches()


def _where(error: BaseException, file: Path) -> str:
    """File, line, and the error there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(Path(error.filename))}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f"{shown(file)}, line {lines[-1] if lines else 1}: {type(error).__name__}: {error}".rstrip(": ")
