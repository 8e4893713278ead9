"""Traces: the allocations of a real run in a small file, which can be replayed without the run.

    record = packed(ledger.trace)       # a dict for JSON
    trace = unpacked(record)            # Events again, as meters/allocator.py replays them

In a record, `requests` has a number for each event: n above 0 allocates n bytes, −k frees the k-th allocation, counted
from 1. `categories` has a letter for each allocation, the first letter of the ledger's category.
"""

from dataclasses import dataclass

from zero_minimal.meters.memory import CATEGORIES, Event

LETTERS = {"scalars": "s", "other": "x"} | {name: name[0] for name in CATEGORIES if name not in ("scalars", "other")}


@dataclass(eq=False)
class Request:
    """Replaces the ledger's Storage in an Event of a recorded trace."""

    number: int
    category: str
    bytes: int


def packed(trace: list[Event]) -> dict:
    """A ledger's trace as a record. Storages that were allocated before the trace began are left out."""
    numbers: dict = {}
    requests, categories = [], []
    for event in trace:
        if event.bytes > 0:
            categories.append(LETTERS[event.storage.category])
            numbers[event.storage] = len(categories)
            requests.append(event.bytes)
        elif event.storage in numbers:
            requests.append(-numbers.pop(event.storage))
    return {"requests": requests, "categories": "".join(categories)}


def unpacked(record: dict) -> list[Event]:
    """The Events of a record."""
    names = {letter: name for name, letter in LETTERS.items()}
    trace, asked = [], []
    for number in record["requests"]:
        if number > 0:
            asked.append(Request(len(asked) + 1, names[record["categories"][len(asked)]], number))
            trace.append(Event(0.0, asked[-1], number, "recorded"))
        else:
            trace.append(Event(0.0, asked[-number - 1], -asked[-number - 1].bytes, "recorded"))
    return trace
