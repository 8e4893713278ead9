"""Ranks behind a notebook: `from zero_minimal import notebook`, then `world = notebook.start(4)`.

What a notebook uses is in world.py, ask.py and attempt.py.
"""

import importlib

from zero_minimal.notebook import attempt as attempt
from zero_minimal.notebook.ask import ask as ask


def __getattr__(name: str):  # only when somebody asks: the ranks live in this room too, and need none of it
    return getattr(importlib.import_module("zero_minimal.notebook.world"), name)
