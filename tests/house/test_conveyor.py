"""Lesson 04's conveyor: what is seen at each unit's turn, what lesson 04's figures say, and its notebook."""

import contextlib
import json

import pytest
import torch
import toys
from cells import cells_of, run_notebook

from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.core import collectives
from zero_minimal.core.freed_parameter import release
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.meters.unit_trace import STATES, Conveyor
from zero_minimal.paper import formulas
from zero_minimal.pictures.unit_chart import LOOK_OF, draw_conveyor
from zero_minimal.processes import ranks
from zero_minimal.programs import lesson04_figures as program
from zero_minimal.stage3 import Stage3
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

MEASURED = json.loads((HOUSE / "lessons/04_parameters/measured.json").read_text())
SMALL = Settings(layers=3, hidden=32, heads=4)


def row(stage, world_size):
    """The report of the run of this stage on so many ranks."""
    return next(row for row in MEASURED["rows"] if (row["stage"], row["ranks"]) == (stage, world_size))


def kept(way):
    """What it costs, by the number of blocks that stay."""
    return {row["kept"]: row for row in MEASURED["kept"] if row["way"] == way}


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


def test_the_belts_of_the_picture_are_as_the_lesson_says():
    first, second = (MEASURED["belts"][name] for name in program.BELTS)
    assert_belt(first, prefetch=False)
    assert_belt(second)
    root, *blocks = second["whole"]
    assert max(second["bytes"]) == root + 2 * blocks[0], "the root, the unit at work, and the next one"
    assert len(blocks) == 6 and len(set(blocks)) == 1 and second["ranks"] == program.BELT_RANKS


def test_a_belt_of_today():
    found = ranks.run(program.watched_belts, 2, SMALL, device="cpu", timeout=100)[0]
    first, second = (found[name] for name in program.BELTS)
    assert_belt(first, prefetch=False)
    assert_belt(second)


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


def belt_of(stage_class):
    """Of one step."""
    zero, batch = built(stage_class)
    with Conveyor(zero) as belt:
        zero.model(*batch).backward()
        zero.step()
    return belt.record


def wrong_belts():
    return belt_of(Lingering), belt_of(Hoarding)


def test_memory_that_is_not_freed_is_seen():
    lingering, hoarding = toys.run(wrong_belts, 2)[0]
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


def test_a_stage_that_is_half_written_is_seen_as_far_as_it_goes():
    turns, after = toys.run(half_written, 2)[0]
    assert turns == [["forward", 0], ["forward", 1]]
    assert_belt(after, prefetch=False)  # ranks still agree


# ------------------------------------------------------------------------------------------------------------- figures


def test_what_was_measured_agrees_with_the_formulas():
    units = MEASURED["belts"][program.BELTS[-1]]["whole"]
    for world_size in program.WORLDS:
        for stage in (0, 3):
            found = row(stage, world_size)
            psi, padded = found["parameters"], world_size == 3
            wanted = formulas.model_states(stage, psi, world_size, "fp32")
            for state, count in wanted.items():
                padding = found["memory"][state] - count
                assert 0 < padding <= 4096 if padded and stage == 3 else padding == 0 or padded
        assert row(0, world_size)["traffic"]["sent_bytes"] == pytest.approx(
            formulas.traffic(0, psi, world_size, "fp32"), rel=1e-4)
        assert row(3, world_size)["traffic"]["sent_bytes"] == pytest.approx(
            (3 * sum(units) - units[0] - units[-1]) * (world_size - 1) / world_size, rel=1e-4), (
            "the root and the last block are gathered once")
    assert sum(units) == 4 * psi


def test_what_stays_whole_is_not_sent_again():
    together, apart = (kept(way) for way in program.WAYS)
    (stage_2,) = kept("stage 2").values()
    block = MEASURED["belts"][program.BELTS[-1]]["whole"][-1]
    for rows in (together, apart):
        assert list(rows) == list(range(7))
        for count in range(1, 7):
            less = rows[count - 1]["sent"] - rows[count]["sent"]
            assert less == pytest.approx(block / program.KEPT_RANKS, rel=1e-3)
        assert rows[6]["sent"] == stage_2["sent"] and rows[6]["peak"] > stage_2["peak"]
        assert rows[1]["sent"] == row(3, program.KEPT_RANKS)["traffic"]["sent_bytes"], "as it is by default"
    assert {row["loss"] for row in MEASURED["kept"]} == {stage_2["loss"]}, "the same bit for bit"
    assert apart[2]["peak"] == apart[1]["peak"] == together[1]["peak"], "the second costs nothing"
    assert all(apart[count]["peak"] < together[count]["peak"] for count in range(2, 7))


def test_the_pictures_are_drawn_from_these_figures():
    drawn = program.pictures(MEASURED)
    assert set(drawn) == {"conveyor.png", "kept.png"}
    bars = [bar.get_height() for bar in drawn["conveyor.png"].axes[1].patches]
    assert bars == [count / 1e6 for count in MEASURED["belts"][program.BELTS[-1]]["bytes"]]
    lines = [[(x * 1e6, y * 1e6) for x, y in line.get_xydata()] for line in drawn["kept.png"].axes[0].lines]
    assert [point for line in lines for point in line] == [
        pytest.approx((row["sent"], row["peak"])) for row in MEASURED["kept"]]
    assert set(STATES) < set(LOOK_OF)


def sent_when_kept():
    """Bytes sent in a step of the small model, and the norm of its gradient, by way and number of blocks."""
    found = {}
    for way, make in program.WAYS.items():
        for count in range(SMALL.layers + 1):
            zero, batch = built(make(count))
            with TrafficMeter() as meter:
                zero.model(*batch).backward()
            found[way, count] = meter.sent_bytes, zero.clip_grad_norm_(1e9).item()
            zero.step()
            assert not any(unit.whole for unit in zero.units)
    return found


def test_blocks_that_stay_are_not_sent_again_today():
    found = toys.run(sent_when_kept, 2)[0]
    block = sum(param.nbytes for param in GPT(SMALL.model_config()).blocks[0].parameters()) / 2  # a rank sends half
    for way in program.WAYS:
        sent, norms = zip(*(found[way, count] for count in range(SMALL.layers + 1)), strict=True)
        less = {one - other for one, other in zip(sent, sent[1:], strict=False)}
        assert all(count == pytest.approx(block, rel=0.02) for count in less), less  # and padding
        assert norms == pytest.approx([norms[0]] * len(norms))


# ------------------------------------------------------------------------------------------------------------ notebook


@pytest.mark.thorough
def test_the_notebook_on_3_ranks(monkeypatch, world_size=3):
    names = run_notebook("04_parameters.ipynb", monkeypatch, world_size,
                         ("Settings()", "Settings(layers=6, hidden=32)"))
    world = names["world"]
    try:
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
    finally:
        world.stop()


def test_the_notebook_has_the_numbers_of_the_figures():
    shown = {cell["id"]: "".join(part for output in cell["outputs"] for part in output.get("text", ()))
             for cell in cells_of("04_parameters.ipynb")}
    belt = MEASURED["belts"][program.BELTS[-1]]
    for (phase, unit), count in zip(belt["turns"], belt["bytes"], strict=True):
        turn = phase if unit is None else f"{phase} {belt['units'][unit]}"
        assert f"{turn:18}{count / 1e6:.2f}" in shown["belt"]
    for stage in (0, 3):
        assert f"stage {stage}: {row(stage, 2)['traffic']['sent_bytes']:,} bytes sent" in shown["sent"]
    for way in program.WAYS:
        for count in (1, 2, 6):
            cost = kept(way)[count]
            assert f"{count}: {cost['sent'] / 1e6:.2f} MB sent, {cost['peak'] / 1e6:.1f} MB at" in shown["kept"]
