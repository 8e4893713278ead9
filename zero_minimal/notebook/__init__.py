"""Ranks behind a notebook: `from zero_minimal import notebook`, then `world = notebook.start(4)`.

Notebooks use world.py, ask.py and attempt.py.
"""

import importlib

from zero_minimal.notebook import attempt as attempt
from zero_minimal.notebook.ask import ask as ask


def __getattr__(name: str):  # imports on demand: ranks import this package, too, and do not need these modules
    return getattr(importlib.import_module("zero_minimal.notebook.world"), name)
