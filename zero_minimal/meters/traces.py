"""Traces: the allocations of a real run in a small file, to be replayed without the run.

    record = packed(ledger.trace)       # a dict for JSON
    trace = unpacked(record)            # Events again, as meters/allocator.py replays them

In a record, `requests` has a number for each event: n above 0 asks for n bytes, −k gives back what the k-th of these
got, counted from 1. `categories` has a letter for each request, the first of the ledger's category.
"""

from dataclasses import dataclass

from zero_minimal.meters.memory import CATEGORIES, Event

LETTERS = {"scalars": "s", "other": "x"} | {name: name[0] for name in CATEGORIES if name not in ("scalars", "other")}


@dataclass(eq=False)
class Request:
    """In place of the ledger's Storage: what an Event of a recorded trace is about."""

    number: int
    category: str
    bytes: int


def packed(trace: list[Event]) -> dict:
    """A ledger's trace as a record. What was freed in it, but allocated before it began, is left out."""
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
