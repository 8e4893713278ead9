"""Simulate a file: what a simulation takes from a file: a stage of somebody's own.

    python -m zero_minimal simulate --stage my_system.py …      build(model, group, budget), or a class
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from torch.optim import AdamW

METHODS = ("step", "zero_grad")  # what a step calls of a stage


def read_system(path: str) -> tuple[str, Callable]:
    """(its name, build(model, group, budget)) of a file, which is run. It has a function `build`, or a single class
    with step() and zero_grad(), which is called as StageN is: Class(model, AdamW, group=…, **options).

    Raises: ValueError, in one sentence, for a file that is neither.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{path} is not a file: give 0, 1, 2 or 3, or a Python file with build(model, group, budget)")
    try:
        ast.parse(text := file.read_text())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not Python: {error}") from None
    spec = importlib.util.spec_from_loader(file.stem, loader=None, origin=str(file))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    sys.modules.setdefault(file.stem, module)  # dataclasses look there
    exec(compile(text, str(file.resolve()), "exec"), vars(module))
    return file.stem, build_of(module, path)


def build_of(module, path: str) -> Callable:
    """The function build(model, group, budget) of a module, or one that calls its class."""
    if inspect.isfunction(build := getattr(module, "build", None)):
        if len(inspect.signature(build).parameters) != 3:
            raise ValueError(f"build in {path} must take three arguments: build(model, group, budget)")
        return build
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
           and all(hasattr(kind, method) for method in METHODS)]
    if len(own) != 1:
        names = ", ".join(kind.__name__ for kind in own) or "none"
        raise ValueError(f"{path} must have a function build(model, group, budget), or one class with step() and "
                         f"zero_grad(); classes of that kind: {names}")
    return lambda model, group, budget: own[0](model, AdamW, group=group, **budget.options)
