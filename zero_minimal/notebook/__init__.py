"""Ranks behind a notebook: `from zero_minimal import notebook`, then `world = notebook.start(4)` (see world.py)."""


def __getattr__(name):  # only when somebody asks: the guardian lives in this room too, and starts without torch
    from zero_minimal.notebook import world

    return getattr(world, name)
