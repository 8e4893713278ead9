"""Lesson 04's page: a run or a formula gave each figure on it; what the learner is to find is not there. That these
figures are those of a run of today is in test_conveyor.py."""

import json
import re

import pages
import pytest
from submissions import solution

from zero_minimal.classroom.lessons import found
from zero_minimal.paper import formulas
from zero_minimal.programs import lesson04_figures as program
from zero_minimal.workload.settings import Settings

LESSON = found()["04_parameters"]
PAGE, TEACHER = ((LESSON.folder / name).read_text() for name in ("README.md", "teacher.md"))
PROSE = " ".join(PAGE.split())  # wherever lines are broken
MEASURED = json.loads((LESSON.folder / "measured.json").read_text())
FIRST, BELT = (MEASURED["belts"][name] for name in program.BELTS)
MB = 1e6


def row(stage, world_size):
    return next(row for row in MEASURED["rows"] if (row["stage"], row["ranks"]) == (stage, world_size))


def kept(way, count):
    return next(row for row in MEASURED["kept"] if (row["way"], row["kept"]) == (way, count))


ONE_UNIT, ONE_BY_ONE = program.WAYS
STAGE_2 = kept("stage 2", Settings().layers)


# -------------------------------------------------------------------------------------------------------- the figures


def test_the_table_on_the_page_is_what_was_measured():
    for world_size in program.WORLDS:
        memory, traffic = row(3, world_size)["memory"], row(3, world_size)["traffic"]
        cells = [f"{world_size}", "3", f"{memory['parameters'] / MB:.2f} MB", f"{memory['peak'] / MB:.1f} MB",
                 f"{traffic['sent_bytes'] / MB:.2f} MB"]
        assert "| " + " | ".join(cells) + " |" in PROSE
    assert f"It sends {row(3, 2)['traffic']['sent_bytes'] / MB:.2f} MB. When backward begins" in PROSE
    assert f"The formula says {formulas.traffic(3, row(3, 2)['parameters'], 2, 'fp32') / MB:.2f}." in PROSE


def test_what_the_page_says_of_units():
    root, *blocks = BELT["whole"]
    assert len(set(blocks)) == 1 and f"{len(blocks)} blocks of {blocks[0] / MB:.2f} MB each" in PROSE
    assert f"a root of {root / MB:.2f} MB" in PROSE and f"There are {1 + len(blocks)} units" in PROSE
    assert max(BELT["bytes"]) == root + 2 * blocks[0] and max(FIRST["bytes"]) == root + blocks[0]
    assert f"the next one: {max(BELT['bytes']) / MB:.2f} MB. In the first step it is less" in PROSE
    gathers = row(3, 2)["traffic"]["collectives"]["all_gather"]["calls"]
    assert gathers == 2 * (1 + len(blocks)) - 2
    assert f"There are {gathers}: two for each unit, but for these two" in PROSE


def test_what_the_page_says_of_the_highest_moment():
    memory = row(3, 2)["memory"]
    assert f"At stage 2 on 2 ranks its highest moment is {STAGE_2['peak'] / MB:.1f} MB" in PROSE
    fall = (STAGE_2["peak"] - memory["peak"]) / MB
    whole = memory["peak_by_category"]["parameters"]
    assert whole == pytest.approx(memory["parameters"] + max(BELT["bytes"]), abs=64)
    less = row(0, 2)["memory"]["parameters"] - whole
    assert f"By {fall:.1f} MB. At the highest moment" in PROSE
    assert f"{whole / MB:.2f} MB of parameters, only {less / MB:.2f} MB less than at stage 2" in PROSE
    saved = row(0, 2)["memory"]["parameters"] - memory["parameters"]  # whole at stage 2, as at stage 0
    assert f"The parameters alone fall by {saved / MB:.2f} MB" in PROSE


def test_what_the_page_says_of_blocks_that_stay():
    one, two, all_of_them = kept(ONE_BY_ONE, 1), kept(ONE_BY_ONE, 2), kept(ONE_BY_ONE, 6)
    assert one["peak"] == two["peak"] < kept(ONE_BY_ONE, 3)["peak"], "the page says: two blocks cost nothing"
    told = f"{two['sent'] / MB:.2f} MB are sent, and the highest moment is {two['peak'] / MB:.1f} MB as before"
    assert told in PROSE
    assert all_of_them["sent"] == STAGE_2["sent"] and f"it is {all_of_them['peak'] / MB:.1f} MB" in PROSE
    assert f"As one unit they need {kept(ONE_UNIT, 6)['peak'] / MB:.1f} MB then" in PROSE
    assert len({f"{row['loss']:.5f}" for row in MEASURED["kept"]}) == 1, "what is kept changes no loss"


def exam_figures():
    """GB of the first exam question: 70 billion parameters in 80 blocks on 64 ranks, in bf16."""
    psi, share = 70e9, 63 / 64
    states = sum(formulas.model_states(3, psi, 64, "bf16").values())
    sent, stage_2 = formulas.traffic(3, psi, 64, "bf16"), formulas.traffic(2, psi, 64, "bf16")
    last = 2 * psi / 80 * share
    return {f"{value / 1e9:.1f} GB" for value in (states, 2 * 2 * psi / 80, sent, last, sent - last, stage_2)}


def test_every_figure_in_bytes_is_a_known_one():
    """No other ones have crept in: MB and GB on both pages."""
    known = exam_figures() | {f"{size / MB:.2f} MB" for size in (*BELT["whole"], *BELT["bytes"], *FIRST["bytes"])}
    for run in MEASURED["rows"]:
        memory, peak = run["memory"], run["memory"]["peak_by_category"]
        known |= {f"{memory['peak'] / MB:.1f} MB", f"{run['traffic']['sent_bytes'] / MB:.2f} MB",
                  f"{memory['parameters'] / MB:.2f} MB", f"{peak['parameters'] / MB:.2f} MB"}
    for run in MEASURED["kept"]:
        known |= {f"{run['sent'] / MB:.2f} MB", f"{run['sent'] / MB:.1f} MB", f"{run['peak'] / MB:.1f} MB",
                  f"{run['peak'] / MB:.0f} MB"}
    less = row(0, 2)["memory"]["parameters"] - row(3, 2)["memory"]["peak_by_category"]["parameters"]
    known |= {f"{less / MB:.2f} MB"}
    known |= {f"{(STAGE_2['peak'] - row(3, 2)['memory']['peak']) / MB:.1f} MB"}
    said = {figure for text in (PAGE, TEACHER) for figure in re.findall(r"\d[\d.,]* [MG]B\b", text)}
    assert len(said) > 15 and not said - known
    assert exam_figures() <= said


def test_how_much_there_is_to_write():
    assert len(LESSON.tasks) == 13 and "is stage 3 with thirteen holes" in PROSE
    lines = sum(len(solution(LESSON, name)) for name in LESSON.tasks)
    assert abs(lines - 70) <= 5 and "about 70 short lines" in PROSE and "these 70 lines" in TEACHER


GIVEN = {"self.shown = True", "param.grad = None"}  # by the list of what is at hand, and by zero_grad in the starter


@pytest.mark.parametrize("name", LESSON.tasks)
def test_no_line_of_the_solution_is_on_the_page(name):
    """Nor in the starter. What sets or keeps something, that is: loops are in the hints, and calls in their list."""
    starter = LESSON.starter.read_text().split("# step 1", 1)[1].split("# state\n")[0]
    lines = [line.partition("  #")[0] for line in solution(LESSON, name)]
    telling = [line for line in lines if "= " in line and line[-1] not in "([" and line not in GIVEN]
    loops_and_calls = ("_gather", "_free", "_prefetch", "evaluation_done", "gather_parameters")
    assert telling or name.split(".")[1] in loops_and_calls
    assert not [line for line in telling if line in PAGE or line in starter]


# ------------------------------------------------------------------------------------------------------- the pictures


def test_the_pictures_show_what_the_page_says():
    drawn = program.pictures(MEASURED)
    assert set(drawn) == {"conveyor.png", "kept.png"}
    told, measured = pages.without_folded(PAGE), dict(pages.folded(PAGE))["What was measured"]
    assert "](conveyor.png)" in told and "](kept.png)" not in told and "](kept.png)" in measured


def test_the_conveyor_is_the_one_that_is_told():
    last = len(BELT["units"]) - 1
    assert BELT["ranks"] == 4 and BELT["units"][0] == "root" and "rank 0 of four in one step" in PROSE
    assert set(BELT["states"][0][:-1]) == {"whole"}, "the root is whole all the time"
    for unit in range(1, last):  # a turn on its way, and one whole, in each pass
        states = BELT["states"][unit]
        assert states.count("coming") == 2
        assert states.count("whole") == (3 if unit == 1 else 2), "the first block until step()"
    assert [states[-1] for states in BELT["states"]] == ["shard"] * (last + 1) and BELT["bytes"][-1] == 0
    assert BELT["states"][last].count("coming") == 1, "the last block stays"
