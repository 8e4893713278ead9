"""Mutants of the references (tests/mutants.py): what nobody could tell is one, and some of the others lose points."""

import mutants
import pytest
import submissions

from zero_minimal.classroom.lessons import found

LESSONS = [pytest.param(lesson, id=name) for name, lesson in found().items() if not lesson.draw]
FEW = 3  # of a lesson's mutants are graded here; all of them by `python tests/mutants.py LESSON`, which takes long


def untold(lesson):
    return getattr(submissions.mistakes(lesson), "UNTOLD", {})


@pytest.mark.thorough
@pytest.mark.parametrize("lesson", LESSONS)
def test_what_nobody_could_tell_is_a_mutant(lesson):
    made = mutants.mutants(lesson, of={name.partition(":")[0] for name in untold(lesson)})
    gone = untold(lesson).keys() - made.keys()
    assert not gone, f"UNTOLD names what is no mutant of the reference (any more): {sorted(gone)}"
    assert all(len(reason.split()) > 3 for reason in untold(lesson).values()), "each has its reason"


@pytest.mark.thorough
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_mutant_loses_points(lesson):
    made = {name: code for name, code in mutants.mutants(lesson).items() if name not in untold(lesson)}
    assert len(made) >= 50
    chosen = [*made.items()][len(made) // 2 :: len(made) // (2 * FEW)][:FEW]
    jury = mutants.Jury(lesson)
    try:
        assert not jury.says(submissions.spliced(lesson, {}), len(lesson.steps)), "the reference itself loses points"
        for name, code in chosen:
            said = jury.says(submissions.spliced(lesson, code), lesson.tasks[name.partition(":")[0]][0])
            assert said, f"it keeps full marks: {name}"
    finally:
        jury.close()
