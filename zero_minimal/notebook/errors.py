"""Errors whose messages are written for the reader, and a stand-in for modules that a teacher withholds."""


class Told(RuntimeError):
    """Its message says what is wrong and what to do. A notebook shows only the message, without a traceback."""

    def _render_traceback_(self):
        return str(self).splitlines()


class NotHere(Told):
    """A module is not in this copy of the course."""


class Withheld:
    """Replaces a module that solves a lesson and that a teacher withholds: each use raises NotHere."""

    def __init__(self, module: str):
        self.module = module

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python's own: it can be printed
            raise AttributeError(name)
        raise NotHere(f"{self.module}.{name} is not in this copy of the course, since it solves the lesson: read on, "
                      "this cell cannot be run.")
