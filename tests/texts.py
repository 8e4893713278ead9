"""Texts: what the runs trained on whose losses are told. It is the documentation inside Python: another Python has
another one, and other losses."""

from zero_minimal.workload.data import read_tokens

RECORDED = 466_195  # bytes in Python 3.11.7


def as_recorded() -> bool:
    """Whether this Python has the text of those runs."""
    return len(read_tokens()) == RECORDED
