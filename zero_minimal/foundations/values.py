"""Values: whether tensors hold any.

In a simulation tensors have a size and nothing else (zero_minimal/paper/fakes.py). Collectives then
exchange nothing, and the few places that check a value skip the check.
"""

import contextlib
from collections.abc import Iterator

_present = True


def present() -> bool:
    """Whether tensors hold values that can be read."""
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
