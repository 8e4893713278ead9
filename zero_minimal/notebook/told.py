"""Told: errors that are sentences for the reader."""


class Told(RuntimeError):
    """Its message says what is wrong, and what to do. A notebook shows that alone, without a traceback."""

    def _render_traceback_(self):
        return str(self).splitlines()
