"""Grades lesson 11: for each drawn card whether something was run that can decide it, the number, and the verdict.

What is right comes from the lesson's reference, run here on the same setting: the learner's name draws it, and it is
not that of the page's run. So a number that was copied from a text is found.
"""

import functools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import toys

from zero_minimal.classroom import drawn, lessons
from zero_minimal.classroom.references import reference

sys.path.insert(0, str(Path(__file__).parent))

import evidence

LESSON = lessons.found()[Path(__file__).parent.name]
CARDS = [step.number for step in LESSON.steps]
VERDICTS = ("true", "true if", "false", "not shown")
QUICK = (2, 18, 24)  # of the reference these run in the plain pytest, of three groups
PAYLOAD = (12, 13, 16, 18)  # on 2 ranks a ring sends what these ask for as payload: so they run on 3
PAIR = (1, 5, 6, 7, 8, 15, 17, *range(20, 29))  # many runs, or ranks that have nothing to do: 2 are enough
SECONDS = 90.0  # for a card's ranks, on a busy machine
STUCK = ("all ranks run a card, alike: does each call the same methods of lab in the same order, whatever its rank is, "
         "and whatever it has measured? Or is it slow: has it more runs, or larger ones, than the card asks for (such "
         "as a simulation without layers=12)? Or is the machine busy?")
RAISED = "lab's docstring (zero_minimal/programs/lab.py) says what its methods take and return"


def each_card(points):
    return pytest.mark.parametrize("card", [
        pytest.param(card, marks=[pytest.mark.step(card, points=points, stuck=STUCK, left=STUCK, raised=RAISED),
                                  *([] if card in QUICK else [pytest.mark.thorough])])
        for card in CARDS])


# ------------------------------------------------------------------------------------------------------ what is run


def on_a_rank(functions, card, setting):
    """What a card's function returns on this rank, and what its lab has run: as data."""
    from zero_minimal.processes import ranks
    from zero_minimal.programs.lab import Lab

    with ranks.start() as rank:
        lab = Lab(setting, rank)
        answer = getattr(functions, f"card_{card:02d}")(lab)
        verdict, number = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, repr(answer)[:80])
        number = number.item() if hasattr(number, "item") and getattr(number, "ndim", 1) == 0 else number
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            number = repr(number)[:80]
        return verdict if isinstance(verdict, str) else repr(verdict)[:80], number, plain(lab.journal)


def plain(journal):
    """Entries of numbers and texts: what a rank may send."""
    return [{key: value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)[:200]
             for key, value in entry.items()} for entry in journal]


class Reference:
    """The lesson's reference, in the place of a learner's file."""

    def __init__(self, text):
        self.text = text

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        space = {"__name__": "reference"}
        exec(compile(self.text, "reference", "exec"), space)
        return space[name]


def world_of(name, card):
    """2 or 3 ranks, and a setting that is not the page's."""
    from zero_minimal.programs import setting

    dice = drawn.seed(name, f"ranks of card {card}") % 2
    return 3 if card in PAYLOAD else 2 if card in PAIR else 2 + dice, setting.draw(f"{name}/{card}")


_learned: dict = {}
_beside = ThreadPoolExecutor(1)  # a simulation has one rank at work: the reference's runs beside the learner's


def learned(assignment, card):
    """[(verdict, number, journal)] of the ranks, in the world that the file's name draws. Run once for the three checks
    of a card; an error is raised again."""
    key = assignment.source, card
    if key not in _learned:
        name = drawn.name_of(assignment.source)
        world_size, setting = world_of(name, card)
        begin_right(name, card)
        try:
            _learned[key] = toys.run(on_a_rank, world_size, assignment, card, setting, timeout=SECONDS)
        except Exception as error:
            _learned[key] = error
    if isinstance(_learned[key], Exception):
        raise _learned[key]
    return _learned[key]


@functools.cache
def begin_right(name, card):
    """The reference's run in the same world, under way."""
    world_size, setting = world_of(name, card)
    return _beside.submit(toys.run_strictly, on_a_rank, world_size, Reference(reference(LESSON)), card, setting,
                          timeout=SECONDS)


def right(name, card):
    """(verdict, number, journal) of the reference on rank 0."""
    return begin_right(name, card).result()[0]


def case_of(assignment, card):
    """What evidence.py is told of a learner's run of a card."""
    name = drawn.name_of(assignment.source)
    world_size, setting = world_of(name, card)
    found = learned(assignment, card)
    return evidence.Case(card, setting, world_size, found, right(name, card))


# -------------------------------------------------------------------------------------------------------- the checks


@each_card(points=4)
def test_the_run(assignment, card):
    case = case_of(assignment, card)
    assert not (fault := evidence.of_the_run(case)), fault


@each_card(points=3)
def test_the_number(assignment, card):
    case = case_of(assignment, card)
    assert isinstance(case.number, (int, float)) and not math.isnan(case.number), (
        f"card {card} must return two things, a verdict and a number, as in `return \"false\", 1.5`; the second is "
        f"{case.number}")
    assert not (fault := evidence.of_the_run(case, any_run=True)), fault
    assert not (fault := evidence.of_the_number(case)), fault


@each_card(points=3)
def test_the_verdict(assignment, card):
    case = case_of(assignment, card)
    assert case.verdict in VERDICTS, (
        f"card {card}: the verdict is {case.verdict!r}, and one of these four is asked for: {', '.join(VERDICTS)}")
    assert not (fault := evidence.of_the_verdict(case)), fault
