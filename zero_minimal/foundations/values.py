"""Values: whether tensors hold any.

In a simulation tensors have a size and nothing else (zero_minimal/paper/fakes.py). The few places
that read a value then take it for right, and collectives exchange nothing.
"""

import contextlib
from collections.abc import Iterator

_present = True


def present() -> bool:
    """Whether there is something to read."""
    return _present


@contextlib.contextmanager
def absent() -> Iterator[None]:
    """Context in which tensors have no values."""
    global _present
    before, _present = _present, False
    try:
        yield
    finally:
        _present = before
