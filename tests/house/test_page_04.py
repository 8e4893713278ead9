"""Lesson 04's page: what it tells of the conveyor was recorded; what the learner is to find is not there. Its other
figures are looked at in test_measured.py."""

import re

from house.lesson_pages import texts_of

from zero_minimal.paper import formulas

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("04_parameters")
BELT = MEASURED["belt"]


def exam_figures():
    """GB of the first exam question: 70 billion parameters in 80 blocks on 64 ranks, in bf16."""
    psi, share = 70e9, 63 / 64
    states = sum(formulas.model_states(3, psi, 64, "bf16").values())
    sent, stage_2 = formulas.traffic(3, psi, 64, "bf16"), formulas.traffic(2, psi, 64, "bf16")
    last = 2 * psi / 80 * share
    return {f"{value / 1e9:.1f} GB" for value in (states, 2 * 2 * psi / 80, sent, last, sent - last, stage_2)}


def test_the_exam_is_right():
    assert exam_figures() <= set(re.findall(r"\d[\d.,]* GB\b", TEACHER))


# ------------------------------------------------------------------------------------------------------- the pictures


def test_the_conveyor_is_the_one_that_is_told():
    last = len(BELT["units"]) - 1
    assert BELT["ranks"] == 2 and BELT["units"][0] == "root" and "rank 0 of two in one step" in PROSE
    assert set(BELT["states"][0][:-1]) == {"whole"}, "the root is whole all the time"
    for unit in range(1, last):  # a turn on its way, and one whole, in each pass
        states = BELT["states"][unit]
        assert states.count("coming") == 2
        assert states.count("whole") == (3 if unit == 1 else 2), "the first block until step()"
    assert [states[-1] for states in BELT["states"]] == ["shard"] * (last + 1) and BELT["bytes"][-1] == 0
    assert BELT["states"][last].count("coming") == 1, "the last block stays"
