"""A learner's file as the tests see it: loaded inside the ranks, never in the grader's own process."""

import importlib.util
import linecache
import sys
import types
import warnings
from pathlib import Path

import cloudpickle

from zero_minimal.classroom.lessons import Lesson

NAME = "assignment"  # the module's name


def text_of(path: Path) -> str:
    """A Python file's text."""
    return decoded(path.read_bytes())


def decoded(data: bytes) -> str:
    """The text of a Python file. Editors may begin it with a byte-order mark, or use latin-1 without declaring it."""
    try:
        return importlib.util.decode_source(data)
    except (SyntaxError, UnicodeDecodeError):  # no declared encoding, and not UTF-8
        return data.decode("latin-1").replace("\r\n", "\n")


def syntax_error(text: str) -> str:
    """Why the text is not Python, in words; "" if it is."""
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings matter only when it runs
            compile(text, NAME, "exec")
    except (RecursionError, MemoryError):
        return "the file is not Python: it nests too deep"
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = getattr(error, "lineno", None)
        return f"the file is not Python{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}"
    return ""


class Submission:
    """Replaces what the tests examine: call it like the lesson's class, or use it like the lesson's module.

    It is sent to the ranks as text, where the first use runs the file.

    source: its text, if it has been read already.
    """

    def __init__(self, path: Path, lesson: Lesson, source: str | None = None):
        self.path, self.lesson, self.source = str(path), lesson, text_of(path) if source is None else source

    def __call__(self, *args, **kwargs):
        return getattr(self, self.lesson.class_name)(*args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("_"):  # pickle looks for such names
            raise AttributeError(name)
        if not hasattr(self.load(), name):
            raise AttributeError(f"the file has no {name}: keep the names of the assignment")
        return getattr(self.load(), name)

    def load(self) -> types.ModuleType:
        """Run the file, unless that has been done."""
        if NAME not in sys.modules:
            module = sys.modules[NAME] = types.ModuleType(NAME)
            module.__file__ = self.path
            cloudpickle.register_pickle_by_value(module)  # for objects sent to a host process, which lacks this module
            # so that errors show lines, since a rank cannot read the file itself
            linecache.cache[self.path] = len(self.source), None, self.source.splitlines(True), self.path
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        return sys.modules[NAME]
