"""What the causes of a bug hunt are made of: their type, and words for figures."""

from collections.abc import Callable
from typing import NamedTuple

from zero_minimal.classroom.hunt_facts import BROKEN, HEALTHY, Facts, near


class Cause(NamedTuple):
    """words: what is wrong, for the list. sign: whether the record shows it. against: what would be seen, and what is
    seen in its place."""

    words: str
    sign: Callable[[Facts], bool]
    against: Callable[[Facts], str]


def number(value: float) -> str:
    """Four digits, or all of a count."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def each(values: list[float]) -> str:
    return ", ".join(number(value) for value in values)


def two(facts: Facts, category: str, highest: bool = False) -> tuple[int, int]:
    """Bytes of the broken and of the healthy run."""
    look = facts.highest if highest else facts.at_the_end
    return look(BROKEN, category), look(HEALTHY, category)


def both(facts: Facts, category: str, highest: bool = False) -> str:
    broken, healthy = two(facts, category, highest)
    return f"{number(broken)} bytes, in the healthy run {number(healthy)}"


def late(facts: Facts) -> bool:
    broken, healthy = two(facts, "gradients", highest=True)
    return (facts.stage >= 2 and broken > 1.3 * healthy and near(*two(facts, "gradients"))
            and facts.reductions(BROKEN) == facts.reductions(HEALTHY))
