"""What takes long is left to `pytest --thorough`; the plain run has a part of it that would show most mistakes.

    @pytest.mark.thorough                                              a test that is left out as a whole
    @pytest.mark.parametrize("name", sample(RECIPES, ["clipping"]))    clipping always, the others thorough
    world_size                                                         of several 3 always, the others thorough

Nothing is dropped: `pytest --thorough-only` runs just what the plain run leaves out (conftest.py holds both options).
"""

import functools

import pytest


def each(cases, name=str):
    """Decorator of a test of one case: a single test takes them all, and names those that fail. A test of its own costs
    more than such a case does."""
    def of_one(test):
        def of_all():
            failed = []
            for case in cases:
                try:
                    test(case)
                except Exception as error:
                    failed.append(f"{name(case)}: {type(error).__name__}: {error}")
            assert not failed, "\n".join(failed)

        functools.update_wrapper(of_all, test)
        del of_all.__wrapped__  # whose argument pytest would ask a fixture for
        return of_all

    return of_one


def sample(cases, always):
    """The cases for a parametrize: those in `always` run in the plain run too, all others are marked thorough.

    Args:
        cases: what is looped over; of a dict its names. A tuple is the arguments of one case.
        always: some of them, chosen by hand: one of each kind, and those that have caught mistakes.
    Raises: ValueError if `always` is empty, or names a case that is not there.
    """
    cases, always = list(cases), list(always)
    unknown = [case for case in always if case not in cases]
    if unknown or not always:
        raise ValueError(f"not among the cases, or no case at all: {unknown}; choose from {cases}")
    marks = [() if case in always else pytest.mark.thorough for case in cases]
    arguments = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=mark) for case, mark in zip(arguments, marks, strict=True)]


def companions(case, cases, always):
    """The cases that run whenever this one does: for cases that share one run, since ranks take time to start."""
    return tuple(other for other in cases if (other in always) == (case in always))


def sharing(case, cases, count):
    """Of cases in this order, `count` of which share a run, those that run with this one."""
    start = cases.index(case) // count * count
    return tuple(cases[start : start + count])
