"""Lesson 09's page: a run or a formula gave each figure on it; what the learner is to find is not there."""

import re

import pytest
import toys
from cells import notebook_on
from house.lesson_pages import texts_of

from zero_minimal.meters.turns_of_buffers import watched_turns
from zero_minimal.offloading.read_ahead import BUFFERS, ReadAhead
from zero_minimal.paper import formulas
from zero_minimal.paper.quantities import size_text
from zero_minimal.paper.shapes import parameter_count
from zero_minimal.pictures.offload_chart import draw_elsewhere, draw_slowed
from zero_minimal.pictures.time_line import draw_crossings, draw_turns
from zero_minimal.programs import train
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.settings import Settings

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("09_offload")
LADDER = MEASURED["ladder"]
PSI = parameter_count(Settings().model_config())
MB = 1e6


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_the_page_says_of_the_default_run():
    assert f"has {PSI:,} parameters" in PROSE
    whole, there = 2 * PSI / MB, {ranks: 14 * PSI / ranks / MB for ranks in (1, 2)}
    assert sum(formulas.model_states(2, PSI, 2, "bf16").values()) / MB == pytest.approx(whole + there[2])
    assert f"{whole:.2f} MB stay on the device, on any number of ranks: 2Ψ." in PROSE
    assert f"a rank alone has {there[1]:.2f} MB, that of one of two {there[2]:.2f}." in PROSE
    assert f"have {whole + there[1]:.2f} and {whole + there[2]:.2f} MB on the device" in PROSE
    one_way = 2 * PSI / 2 / MB
    assert f"{one_way:.2f} MB there, and {one_way:.2f} back: 2Ψ/N each" in PROSE
    assert f"cross four times, {4 * one_way:.2f} MB, and" in PROSE
    assert f"in a step, {there[2]:.2f} MB of one of two ranks, and writes as much" in PROSE


def report_of():
    from zero_minimal.processes import ranks

    with ranks.start() as rank:
        settings = Settings(steps=1, dtype="bf16", accumulate=4, batch=1)
        return train.train(Stage2, settings, rank, away=Offload(cpu=True))


@pytest.mark.thorough
def test_the_default_run_of_today():
    report = toys.run(report_of, 2)[0]
    assert report["parameters"] == PSI
    assert (report["device_memory"], report["host_memory"]) == (2 * PSI, 7 * PSI)
    assert report["bus"] == {"to_host": 4 * PSI, "to_device": PSI}


def test_what_the_page_says_of_a_gpu():
    assert f"{4 * 1.5e9 / 12e9:g} s: {4 * 1.5:g} GB over 12 GB/s" in PROSE
    tokens = 2 / 12e9 * 40e12 / 4
    assert f"equal for t = {tokens:,.0f} tokens" in PROSE


def test_what_the_page_says_of_the_ladder():
    fallen = LADDER[0]["resident"]["device"] - LADDER[-1]["resident"]["device"]
    assert f"by {fallen / (16 - 2) / LADDER[0]['parameters']:.0%} of the bytes that left" in PROSE
    more = max((rung["resident"][place] - held) / rung["parameters"] for rung in LADDER
               for place, held in (("device", sum(rung["ledger"].values())), ("host", rung["host"])))
    assert 0 < more < 0.4 and "at most 0.4 bytes a parameter to a process beyond its tensors" in PROSE
    assert len({rung["loss"] for rung in LADDER}) == 1, "offload changes nothing that is computed"


def words_of(picture):
    return PROSE.split(f"]({picture})")[0].rsplit("![", 1)[1]


def test_what_the_alt_texts_say():
    lowest = LADDER[-1]
    for size in (lowest["ledger"]["parameters"], lowest["host"], *lowest["kept"].values(), *lowest["bus"].values()):
        assert size_text(size) in words_of("boxes.png")
    tensors = ", ".join(f"{sum(rung['ledger'].values()) / rung['parameters']:.2g}" for rung in LADDER)
    assert f"tensors on the device: {tensors}, with" in words_of("ladder.png")
    assert f"](boxes.png) ({lowest['parameters'] / 1e6:.1f} million parameters, bf16, N = 1)" in PROSE


def test_what_the_page_says_of_the_bus():
    """Relations alone: the page has no number of them, and the next machine has others."""
    few, *_, many = MEASURED["slowed"].values()
    assert list(MEASURED["slowed"]) == ["64", "256", "1024"] and [bus for bus, _ in few] == [12, 25, 64, 900]
    assert few[0][1] > many[0][1] > 1 and few[0][1] > 2 and few[0][1] > few[-1][1]
    second, third = MEASURED["waited"].values()
    assert second[0] < 1e-3 < third[0], "at stage 2 a rank waits in the update, at stage 3 in forward, too"


def test_the_exam_and_the_discussion():
    psi = 10e9
    assert f"(a) 16Ψ = {16 * psi / 1e9:.0f} GB, and 2Ψ = {2 * psi / 1e9:.0f} GB." in TOLD
    assert f"(b) 14Ψ = {14 * psi / 1e9:.0f} GB." in TOLD
    assert f"(c) {2 * psi / 1e9:.0f} GB each way, {2 * psi / 12e9:.2f} s each." in TOLD
    a_token = 4 * psi / 40e12
    assert f"= {a_token * 1e3:g} ms a token, so {2 * psi / 12e9 / a_token:,.0f} tokens" in TOLD
    seven = 7e9
    assert f"{2 * seven / 1e9:.0f} GB of parameters in 16 bit stay, {14 * seven / 1e9:.0f} GB go to" in TOLD
    assert f"{4 * seven / 1e9:.0f} GB a step over the bus, {4 * seven / 12e9:.1f} s at 12 GB/s" in TOLD
    assert 24 - 2 * seven / 1e9 == 10 and "if 10 GB are enough" in TOLD


def test_every_figure_in_bytes_is_a_known_one():
    """No other ones have crept in: MB, GB and seconds."""
    known = {f"{size / MB:.2f} MB" for size in (2 * PSI, 14 * PSI, 7 * PSI, 16 * PSI, 9 * PSI, PSI, 4 * PSI)}
    known |= {size_text(size) for size in (LADDER[-1]["ledger"]["parameters"], LADDER[-1]["host"],
                                           *LADDER[-1]["kept"].values(), *LADDER[-1]["bus"].values())}
    exam = {"160 GB", "20 GB", "140 GB", "24 GB", "14 GB", "98 GB", "10 GB", "28 GB", "6 GB"}
    said = {figure for text in (PAGE, TEACHER) for figure in re.findall(r"\d[\d.,]* [MG]B\b(?!/s)", text)}
    assert not said - known - exam


def test_the_page_tells_the_truth_about_a_gpu_and_about_delay():
    assert "gradients leave while backward computes, if buckets are large" in PROSE
    assert "**It is not exact**: it is another algorithm." in PROSE and "A delayed update is called exact" in PROSE
    assert "With N = 1 ZeRO saves nothing" in PROSE


# ------------------------------------------------------------------------------------------------------- the pictures


def test_three_buffers_take_turns():
    """What the notebook's picture of the disk shows: no buffer is filled before it has been written."""
    turns = watched_turns(ReadAhead, 7, work=0.004)
    assert {turn.buffer for turn in turns} == set(range(BUFFERS))
    at = {(turn.what, turn.shard): turn for turn in turns}
    for shard in range(7):
        read, work, write = (at[what, shard] for what in ("read", "work", "write"))
        assert read.end <= work.start <= work.end <= write.start and read.buffer == work.buffer == write.buffer
        if shard >= BUFFERS:
            assert at["write", shard - BUFFERS].end <= read.start
    assert len(draw_turns({"work": turns}).axes) == 1


def test_the_notebooks_other_drawings():
    spans = [("forward", 0.0, 0.1), ("backward", 0.1, 0.3), ("update", 0.3, 0.4)]
    assert len(draw_crossings({"a": (spans, [], []), "b": (spans, [("all_gather", 0.3, 0.35, 0.4, 8)], [])}).axes) == 2
    rung = {"parameters": 2.0, "gradients": 0.0, "optimizer": 0.0, "bus": 0.2, "host": 14.0}
    words = [text.get_text() for text in draw_elsewhere({"a": rung}).axes[0].texts]
    assert words == ["2", "14"]
    lines = draw_slowed({64: [(12, 3.0), (900, 1.0)]}).axes[0].lines
    assert [list(line.get_ydata()) for line in lines][0] == [3.0, 1.0]


@pytest.mark.thorough
@pytest.mark.timeout(240)  # 56 s where nothing else runs: each rank starts host processes, again and again
def test_the_notebook_on_3_ranks(ranks=3):
    smaller = (("(12, 25, 64, 900), (1, 4, 16)", "(900,), (1,)"), ("RUNGS[:2]", "()"), ("RUNGS[2:]", "RUNGS[3:]"),
               ("speed = 2 * 12e9", "speed = 2 * 900e9"), ("layers=6, dtype=torch.bf", "layers=1, dtype=torch.bf"))
    with notebook_on(ranks, "09_offload.ipynb", *smaller) as (_, world):
        psi = world["psi"][0]
        for found_there in world["bus_bytes"]:
            assert found_there["Offloaded1", 4][0] == found_there["Offloaded2", 1][0]
            assert found_there["Offloaded2", 4][0] == 4 * found_there["Offloaded2", 1][0]
            assert found_there["Offloaded2", 1] == [pytest.approx(2 * psi / ranks, rel=0.01)] * 2
        for rungs in world["rungs"]:
            states = [sum(held[state] for state in ("parameters", "gradients", "optimizer")) for held in rungs.values()]
            assert states == [pytest.approx(size, rel=0.01) for size in (16, 4, 2, 2 / ranks)]
        assert all(losses[0] == losses[1] for losses in world["losses"])
