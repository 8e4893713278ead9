"""A learner's file as the tests see it: loaded inside the ranks, and never in the grader's own process."""

import sys
import types
from pathlib import Path

from zero_minimal.classroom.lessons import Lesson

NAME = "assignment"  # of the module


class Submission:
    """Stands in for what the tests look at: call it as the lesson's class, or use it as the lesson's module.

    It travels to the ranks as text. There the first use runs the file.
    """

    def __init__(self, path: Path, lesson: Lesson):
        self.path, self.lesson, self.source = str(path), lesson, path.read_text()

    def __call__(self, *args, **kwargs):
        return getattr(self, self.lesson.class_name)(*args, **kwargs)

    def __getattr__(self, name):
        if name.startswith("_"):  # pickle asks for such
            raise AttributeError(name)
        if not hasattr(self._module(), name):
            raise AttributeError(f"the file has no {name}: keep the names of the assignment")
        return getattr(self._module(), name)

    def _module(self):
        if NAME not in sys.modules:
            module = sys.modules[NAME] = types.ModuleType(NAME)
            module.__file__ = self.path
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        return sys.modules[NAME]
