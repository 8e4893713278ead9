"""Errors that are sentences for the reader. And what stands where a teacher has taken something out."""


class Told(RuntimeError):
    """Its message says what is wrong, and what to do. A notebook shows that alone, without a traceback."""

    def _render_traceback_(self):
        return str(self).splitlines()


class NotHere(Told):
    """What was asked for is not in this copy of the course."""


class Withheld:
    """Stands in for a module that solves a lesson, and that a teacher may withhold: whoever asks it is told."""

    def __init__(self, module: str):
        self.module = module

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python's own: it may be printed
            raise AttributeError(name)
        raise NotHere(f"{self.module}.{name} is not in this copy of the course, since it solves the lesson: read on, "
                      "this cell cannot be run.")
