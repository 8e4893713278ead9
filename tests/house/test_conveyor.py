"""Lesson 04's conveyor: what is seen at each unit's turn, what lesson 04's figures say, and its notebook.

That blocks that stay are not sent again is in test_kept_units.py."""

import contextlib
import itertools
import json

import pytest
import torch
import toys
from cells import notebook_on

from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.core import collectives
from zero_minimal.core.units import release
from zero_minimal.meters.unit_trace import STATES, Conveyor
from zero_minimal.paper import formulas
from zero_minimal.pictures.unit_chart import LOOK_OF, draw_conveyor, draw_kept
from zero_minimal.stage3 import Stage3
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

MEASURED = json.loads((HOUSE / "lessons/04_parameters/measured.json").read_text())
SMALL = Settings(layers=3, hidden=32, heads=4)


# ------------------------------------------------------------------------------------------------------------- the belt


def at(record, moment):
    """{unit: state}, without those that are shards."""
    states = {number: line[moment] for number, line in enumerate(record["states"])}
    return {number: state for number, state in states.items() if state != "shard"}


def assert_belt(record, prefetch=True):
    """What the lesson says of a step: turn by turn, for a model of blocks in a row."""
    last = len(record["units"]) - 1
    blocks = range(1, last + 1)
    forward, backward = [0, *blocks], [0, *reversed(blocks), 0]
    wanted = [["forward", unit] for unit in forward] + [["backward", unit] for unit in backward] + [["end", None]]
    assert record["turns"] == wanted
    for moment, (phase, unit) in enumerate(wanted[:-1]):
        here = {0: "whole", unit: "whole"}
        if prefetch and wanted[moment + 1][0] == phase and wanted[moment + 1][1]:
            here.setdefault(wanted[moment + 1][1], "coming")
        if [phase, unit] == ["backward", 0]:  # those that lie inside the root stay
            here[last if moment == len(forward) else 1] = "whole"
        assert at(record, moment) == here, (moment, phase, unit)
        assert record["bytes"][moment] == sum(record["whole"][number] for number in here)
    assert at(record, -1) == {} and record["bytes"][-1] == 0
    assert record["reducing"] == [None] * (len(forward) + 2) + [*reversed(blocks)] + [None]


def test_the_belt_of_the_picture_is_as_the_lesson_says():
    assert_belt(MEASURED["belt"])
    root, *blocks = MEASURED["belt"]["whole"]
    assert MEASURED["whole"] == root + 2 * blocks[0], "the root, the unit at work, and the next one"
    assert MEASURED["first"] == root + blocks[0] and len(blocks) == 6 and len(set(blocks)) == 1


class Lingering(Stage3):
    """Frees no storage: it lets parameters point elsewhere."""

    def _free(self, bucket):
        for param in bucket.params:
            release(param, bucket.flat.placeholder(param))


class Hoarding(Stage3):
    """Takes new memory for a bucket whenever it frees it; the old one lives on with autograd's views of it."""

    def _free(self, bucket):
        for param in bucket.params:
            release(param, bucket.flat.placeholder(param))
        bucket.parameters = torch.empty_like(bucket.parameters)
        collectives.free(bucket.parameters)


def built(stage_class):
    """A small model under it, and a batch of this rank."""
    rank = torch.distributed.get_rank()
    zero = stage_class(toys.build(lambda: GPT(SMALL.model_config()), 0), torch.optim.SGD, lr=0.1)
    return zero, toys.tokens(rank, 0, sequence=8, vocabulary=256)


def belts_of(stage_class, steps=1):
    """Of some steps."""
    zero, batch = built(stage_class)
    for _ in range(steps):
        with Conveyor(zero) as belt:
            zero.model(*batch).backward()
            zero.step()
        zero.zero_grad()
        yield belt.record


def belt_of(stage_class):
    """Of one step."""
    return next(belts_of(stage_class))


@pytest.mark.thorough
def test_a_belt_of_today():
    first, second = toys.run(lambda: list(belts_of(Stage3, steps=2)), 2)[0]
    assert_belt(first, prefetch=False)
    assert_belt(second)


@pytest.mark.thorough
def test_memory_that_is_not_freed_is_seen():
    lingering, hoarding = toys.run(lambda: (belt_of(Lingering), belt_of(Hoarding)), 2)[0]
    root, *blocks = lingering["whole"]
    assert {state for line in lingering["states"] for state in line} == {"whole", "idle"}
    assert set(lingering["bytes"]) == {root + sum(blocks)}, "it was never freed"
    assert "idle" not in {state for line in hoarding["states"] for state in line}
    forward = [moment for moment, (phase, _) in enumerate(hoarding["turns"]) if phase == "forward"]
    assert hoarding["bytes"][forward[-1]] == root + sum(blocks), "after forward all of the model is there"
    picture = draw_conveyor({"one": lingering, "other": hoarding})
    assert LOOK_OF["idle"][1] in [text.get_text() for text in picture.legends[0].get_texts()]


class Half(Stage3):
    """Ends in the third turn of training, when a prefetch is under way."""

    turn = 0

    def unit_turn(self, unit, following):
        self.turn += torch.is_grad_enabled()
        if self.turn == 3:
            raise NotImplementedError
        super().unit_turn(unit, following)


def half_written():
    """The turns that are seen of it, and the belt of another stage after it."""
    zero, batch = built(Half)
    with torch.no_grad():
        zero.model(*batch)  # from now on it is known who comes next
    with contextlib.suppress(NotImplementedError), Conveyor(zero) as belt:
        zero.model(*batch)
    return belt.record["turns"], belt_of(Stage3)


@pytest.mark.thorough
def test_a_stage_that_is_half_written_is_seen_as_far_as_it_goes():
    turns, after = toys.run(half_written, 2)[0]
    assert turns == [["forward", 0], ["forward", 1]]
    assert_belt(after, prefetch=False)  # ranks still agree


# ------------------------------------------------------------------------------------------------------------- figures


def test_what_was_measured_agrees_with_the_formulas():
    units, psi = MEASURED["belt"]["whole"], MEASURED["psi"]
    for row in MEASURED["rows"]:
        padding = row["parameters"] - formulas.model_states(3, psi, row["ranks"], "fp32")["parameters"]
        assert 0 < padding <= 4096 if row["ranks"] == 3 else padding == 0
        assert row["sent"] == pytest.approx(
            (3 * sum(units) - units[0] - units[-1]) * (row["ranks"] - 1) / row["ranks"], rel=1e-4), (
            "the root and the last block are gathered once")
        assert row["gathers"] == 2 * len(units) - 2
        assert row["at peak"] == pytest.approx(row["parameters"] + MEASURED["whole"], abs=4096)
    assert sum(units) == 4 * psi
    two, saved = MEASURED["rows"][1], 4 * psi - MEASURED["rows"][1]["parameters"]
    page = " ".join((HOUSE / "lessons/04_parameters/README.md").read_text().split())
    assert f"The parameters fall by {saved / 1e6:.2f} MB" in page
    assert f"The formula 3Ψ(N−1)/N says {formulas.traffic(3, psi, two['ranks'], 'fp32') / 1e6:.2f} for 2 ranks." in page


def test_what_stays_whole_is_not_sent_again():
    together, apart = MEASURED["kept"].values()
    stage_2, block = MEASURED["stage_2"], MEASURED["belt"]["whole"][-1]
    for rows in (together, apart):
        assert [row["kept"] for row in rows] == list(range(7))
        for more, fewer in itertools.pairwise(rows):
            assert more["sent"] - fewer["sent"] == pytest.approx(block / MEASURED["belt"]["ranks"], rel=1e-3)
        assert rows[6]["sent"] == stage_2["sent"] and rows[6]["peak"] > stage_2["peak"]
        assert rows[1]["sent"] == MEASURED["rows"][1]["sent"], "as it is by default"
    assert apart[2]["peak"] == apart[1]["peak"] == together[1]["peak"], "the second costs nothing"
    assert all(apart[count]["peak"] < together[count]["peak"] for count in range(2, 7))


def test_the_pictures_are_drawn_from_these_figures():
    belt, kept = MEASURED["belt"], MEASURED["kept"]
    bars = [bar.get_height() for bar in draw_conveyor({"one": belt}).axes[1].patches]
    assert bars == [count / 1e6 for count in belt["bytes"]]
    lines = [[(x * 1e6, y * 1e6) for x, y in line.get_xydata()]
             for line in draw_kept(kept, {"other": MEASURED["stage_2"]}).axes[0].lines]
    assert [point for line in lines for point in line] == [
        pytest.approx((row["sent"], row["peak"])) for row in (*sum(kept.values(), []), MEASURED["stage_2"])]
    assert set(STATES) < set(LOOK_OF)


# ------------------------------------------------------------------------------------------------------------ notebook


@pytest.mark.thorough
def test_the_notebook_on_3_ranks(world_size=3):
    smaller = ("Settings()", "Settings(layers=6, hidden=32)")
    with notebook_on(world_size, "04_parameters.ipynb", smaller) as (names, world):
        for record in world["belt"]:
            assert_belt(record)
        for record in world["belts['without']"]:
            assert_belt(record, prefetch=False)
        root, *blocks = names["belt"]["whole"]
        share = (world_size - 1) / world_size
        for sent in world["sent['stage 3']"]:
            assert sent == round((2 * root + 3 * sum(blocks) - blocks[-1]) * share)
        assert world["list(gathers.values())"] == [[1, 2, 2, 2, 2, 2, 1]] * world_size
        for rows in names["kept"].values():
            assert rows[-1]["sent"] == pytest.approx(2 * (root + sum(blocks)) * share, rel=0.01)  # paddings differ
