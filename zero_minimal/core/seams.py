"""Seams: where guards, checkpoints and rare cases attach to the algorithm, from outside.

The algorithm is what a stage file imports, directly or not. It announces these moments, and does
not know who listens:

    wrapping    units_given, model_given, groups_given, optimizer_given, buckets_planned,
                unit_to_flatten, wrap_failed, wrapped, naive_wrapped
    backward    followed, backward_begins, gradient_arrives, bucket_complete, pass_ends,
                gradients_reduced, gradients_asked, gradients_dropped
    update      update_begins, update_ends, parameters_edited; naive_averages
    stage 3     units_followed, unit_called, unit_begins, unit_turn, unit_turned, unit_is_whole,
                part_returned, unit_ends, unit_returned, backward_at_unit, left_behind,
                parameter_released, parameter_moves
    messages    collective, collective_started, messages

zero_minimal/__init__.py names the listeners; the first tell() imports them.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator

attached: list[str] = []  # modules that listen, and are not imported yet
listeners: dict[str, list[Callable]] = {}


def at(*moments: str) -> Callable:
    """Decorator: call the function at these moments, with tell()'s arguments."""

    def listens(function: Callable) -> Callable:
        for moment in moments:
            listeners.setdefault(moment, []).append(function)
        return function

    return listens


def attach() -> None:
    """Import the modules in `attached`. tell() does so too."""
    while attached:
        importlib.import_module(attached.pop(0))


def tell(moment: str, *what) -> None:
    """Call the listeners, in the order in which they attached."""
    attach()
    for listener in list(listeners.get(moment, ())):
        listener(*what)


@contextlib.contextmanager
def heard_by(moment: str, listener: Callable) -> Iterator[None]:
    """Context in which `listener` is called at this moment."""
    at(moment)(listener)
    try:
        yield
    finally:
        listeners[moment].remove(listener)
