"""Story: what a page tells of a run, in parts and steps. The page knows no lesson, and no kind of run.

What a run is made of says what there is to tell (messages.py, buckets.py); page.py writes it down.
"""

import re
from dataclasses import dataclass, field

from zero_minimal.classroom.messages import listed

RANK = re.compile(r"\b[Rr]ank (\d+)")
LOOKS = ("", "some", "all", "way", "gone")  # of a cell: nothing there, a part, all of it, on its way, freed


def alike(sentences: list[str]) -> list[str]:
    """Sentences that several ranks share, once."""
    ranks: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for words in sentences:
        found = RANK.findall(words)
        key = RANK.sub("rank #", words) if len(found) == 1 else words
        ranks.setdefault(key, []).extend(found[:1])
        first.setdefault(key, words)
    return [words + (f" The same on {listed(ranks[key][1:])}." if len(ranks[key]) > 1 else "")
            for key, words in first.items()]


@dataclass(frozen=True)
class Cell:
    """A place in a grid. `look` colours it, and says nothing that the words do not say."""

    words: str
    look: str = ""


@dataclass(frozen=True)
class Grid:
    """A small table: who holds what."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]  # (the line's name, its cells)


@dataclass(frozen=True)
class Line:
    """What somebody did in a step, beside what the rules expect. `departs`: it is not that."""

    who: str
    did: str
    expected: str
    departs: bool = False


@dataclass
class Step:
    """One picture of the page."""

    title: str
    lines: list[Line] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)  # [rank] bytes by category
    limit: float | None = None  # the most bytes of model states that the rules allow then
    departures: list[str] = field(default_factory=list)  # sentences: where it departs from what is expected


@dataclass
class Part:
    """Steps that belong together: a function, a phase of training."""

    title: str
    about: str
    steps: list[Step]


@dataclass
class Story:
    """A whole run. `legend`: what the words in it mean."""

    about: str
    legend: str
    parts: list[Part]

    @property
    def steps(self) -> list[Step]:
        return [step for part in self.parts for step in part.steps]

    @property
    def first_departure(self) -> int | None:
        """The number of the step, from 0, where the page opens; None if there is none."""
        return next((number for number, step in enumerate(self.steps) if step.departures), None)
