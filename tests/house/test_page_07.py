"""Lesson 07's page: a run or a formula gave each figure on it; what the learner is to find is not there; and its meter
sees what happens, on a run of today too."""

import contextlib
import functools
import json
import re

import pages
import pytest
import torch
import toys
from cells import cells_of, run_notebook
from submissions import solution

from zero_minimal.classroom.lessons import found
from zero_minimal.constant_buffers import ConstantBuffers, all_reduce, fill, loads, unpack
from zero_minimal.core import collectives
from zero_minimal.meters.double_buffer_trace import EVENTS, Trays, numbered
from zero_minimal.paper import formulas
from zero_minimal.pictures.double_buffer_chart import columns, draw_trays, on_the_way
from zero_minimal.processes import ranks
from zero_minimal.programs import lesson07_figures as program
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

LESSON = found()["07_constant_buffers"]
PAGE, TEACHER = ((LESSON.folder / name).read_text() for name in ("README.md", "teacher.md"))
PROSE = " ".join(PAGE.split())  # wherever lines are broken
MEASURED = json.loads((LESSON.folder / "measured.json").read_text())
MB = 1e6


def price(size):
    return next(row for row in MEASURED["prices"] if row["size"] == size)


def peaks(bucket):
    """At stage 2: without constant buffers, and with them."""
    rows = {row["constant"]: row["peak"] for row in MEASURED["stage 2"] if row["bucket"] == bucket}
    return rows[False], rows[True]


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_the_page_says_of_sizes():
    fused = [row["fused"] / MB for row in MEASURED["rows"]]
    assert fused == [4, 40, 400, 4000, 12000] == [4 * row["parameters"] / MB for row in MEASURED["rows"]]
    assert [row["measured"] for row in MEASURED["rows"]] == [True] * 3 + [False] * 2
    (constant,) = {row["constant"] for row in MEASURED["rows"]}
    assert constant == 2 * program.SIZE and f"Two constant ones: {constant / MB:.1f} MB, always" in PROSE
    assert "4, 40, 4000 and 12000 MB (the last two are calculated)" in PROSE
    assert f"every model of less than {constant / 4 / MB:.1f} million parameters" in PROSE
    assert f"two constant buffers of 4 MiB ({program.SIZE / MB:.1f} MB) each" in PROSE.replace("And two", "two")


def test_what_the_page_says_of_prices():
    large, small = price(program.SIZE), price(2**14)
    assert f"it is {large['collectives']} collectives, with 16 KiB {small['collectives']}" in PROSE
    assert large["collectives"] == -(-4 * program.PRICED // program.SIZE)
    times = small["seconds"] / large["seconds"]
    took = [round(1e3 * one["seconds"]) for one in (small, large)]
    assert f"took {took[0]} ms, the 5 took {took[1]} ms: {times:.0f} times as long" in PROSE
    assert f"{program.PRICED / MB:.2f} million parameters" in PROSE
    assert f"19 of 1 MB take {1e3 * price(2**20)['seconds']:.1f} ms" in PROSE and price(2**20)["collectives"] == 19
    assert f"1,177 collectives of 16 KiB take {1e3 * small['seconds']:.0f} ms" in PROSE
    level = [price(size)["seconds"] for size in (2**20, 2**22, 2**24, None)]
    assert max(level) < 2 * min(level), "the page says: from there on it is level"


def test_what_the_page_says_of_stage_2():
    for bucket in program.BUCKETS:
        without, constant = peaks(bucket)
        count = next(row["buckets"] for row in MEASURED["stage 2"] if row["bucket"] == bucket)
        assert f"| {bucket / MB:.2f} MB | {count} | {without / MB:.2f} MB | {constant / MB:.2f} MB |" in PROSE
        gradients = 4 * program.PRICED
        assert constant - without > 0.98 * min(bucket, gradients), "the page says: at least one bucket more"
    without, constant = (next(row for row in MEASURED["stage 2"] if row["bucket"] == max(program.BUCKETS)
                              and row["constant"] == way) for way in (False, True))
    assert without["activations"] < 0.01 * MB, "the page says: the activations are gone"
    told = f"all activations are there, {constant['activations'] / MB:.2f} MB, and both buffers"
    assert f"{told}, {constant['buffers'] / MB:.2f} MB" in PROSE
    assert f"Its highest moment is {peaks(2**22)[0] / MB:.1f} MB on 2 ranks" in PROSE
    assert f"holds all gradients, {4 * program.PRICED / MB:.2f} MB" in PROSE and max(program.BUCKETS) > gradients
    without, constant = peaks(2**22)
    one, both = peaks(max(program.BUCKETS))
    told = f"{constant / MB:.2f} MB for {without / MB:.2f}, and {both / MB:.2f} for {one / MB:.2f}."
    assert f"{told} (A bucket that may have {max(program.BUCKETS) / MB:.2f} MB holds" in PROSE


def test_what_the_page_says_of_sums():
    places = (0, 4, 8, 12)
    for name, words in (("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")):
        found = MEASURED["sums"][name]
        told = ", ".join(f"{found['torch'][place]:g}" for place in places)
        assert f"| {words} | {told} |" in PROSE
        assert set(found["buffers"]) == {2.0}, "through fp32 buffers it is right"
    assert MEASURED["sums"]["float16"]["bytes"] == [2, 4] and "sent in 4 bytes and not in 2" in PROSE
    last = {name: values[-1] for name, values in MEASURED["ones"].items()}
    assert last == {"float32": 4096, "float16": 2048, "bfloat16": 256}
    assert "The mean of 4096 ones is then 0.5 in fp16, and 1/16 in bf16" in PROSE
    assert last["float16"] / 4096 == 0.5 and last["bfloat16"] / 4096 == 1 / 16


def test_what_is_calculated():
    assert f"to {-(-4 * 10**12 // program.SIZE):,}" in PROSE
    assert torch.finfo(torch.float16).max == 65504 and "65,504" in PROSE
    assert torch.tensor(40000.0).half() + torch.tensor(40000.0).half() == torch.inf
    exact, half = formulas.traffic(0, 1.5e9, 64, "fp32") / 1e9, formulas.traffic(0, 1.5e9, 64, "fp16") / 1e9
    assert f"= {exact:.1f} GB in both cases, and {half:.1f} GB with" in " ".join(TEACHER.split())
    assert "126 · 50 µs = 6.3 ms" in TEACHER and 126 * 50 == 6300 and round(60 * 6.3e-3, 2) == 0.38
    assert 4 * 1.5e9 / 100e6 == 60 and "(b) 60, and 1" in TEACHER


def test_every_figure_in_bytes_is_a_known_one():
    """No other ones have crept in: MB and GB on both pages."""
    known = {f"{row[kind] / MB:.2f} MB" for row in MEASURED["stage 2"]
             for kind in ("bucket", "peak", "activations", "buffers")}
    known |= {"4.2 MB", "8.4 MB", "12000 MB", "12,000 MB", "12 GB", "19.28 MB", "71.1 MB"}  # held above
    known |= {"1 MB", "20 MB", "200 MB", "100 MB", "6 GB", "2 GB", "11.8 GB", "5.9 GB"}  # of questions
    said = {figure for text in (PAGE, TEACHER) for figure in re.findall(r"\d[\d.,]* [MG]B\b", text)}
    assert len(said) > 15 and not said - known


def test_how_much_there_is_to_write():
    assert len(LESSON.tasks) == 9 and "with nine short holes" in PROSE
    lines = sum(len(solution(LESSON, name)) for name in LESSON.tasks)
    assert abs(lines - 45) <= 5 and "about 40 short lines" in PROSE and "these 40 lines" in TEACHER


@pytest.mark.parametrize("name", LESSON.tasks)
def test_no_line_of_the_solution_is_on_the_page(name):
    """Nor in the starter: what sets or keeps something."""
    starter = LESSON.starter.read_text().split("# step 1", 1)[1].split("def fused_all_reduce")[0]
    lines = [line.partition("  #")[0] for line in solution(LESSON, name)]
    telling = [line for line in lines if "= " in line and line[-1] not in "([" and len(line) > 12]
    assert not [line for line in telling if line in PAGE or line in starter]


# ------------------------------------------------------------------------------------------------------- the pictures


def test_the_pictures_show_what_the_page_says():
    assert set(program.pictures(MEASURED)) == {"trays.png", "sizes.png", "ones.png"}
    told, measured = pages.without_folded(PAGE), dict(pages.folded(PAGE))["What was measured"]
    assert "](trays.png)" in told and "](ones.png)" in told
    assert "](sizes.png)" not in told and "](sizes.png)" in measured


def assert_turns(record, sizes):
    """What the lesson says of it: loads are full, buffers take turns, one travels while the other is filled."""
    whole = [number for number, size in enumerate(sizes, 1) for _ in range(size)]
    loads = [[number for number, count in load for _ in range(count)] for load in record["loads"]]
    assert loads == [whole[start : start + record["elements"]] for start in range(0, len(whole), record["elements"])]
    done, spans = columns(record), on_the_way(record)
    filled = [(place, load) for kind, place, load in done if kind == "fill"]
    assert [load for _, load in filled] == list(range(len(loads)))
    assert all(one[0] != other[0] for one, other in zip(filled, filled[1:], strict=False))
    for begin in range(1, len(done) - 1):  # in each column but the first and the last the other buffer travels
        place = done[begin][1]
        assert any(first <= begin < last and other != place for (other, _), (first, last) in spans.items())
    kinds = [kind for kind, *_ in record["events"]]
    assert set(kinds) <= set(EVENTS) and all(kinds.count(kind) == len(loads) for kind in EVENTS)


def test_the_trays_are_those_that_are_told():
    record = MEASURED["trays"]
    assert_turns(record, program.SIZES)
    assert len(record["loads"]) == 5 and record["ranks"] == 2 and "rank 0 of two, as it was recorded" in PROSE
    assert sum(any(number == 3 for number, _ in load) for load in record["loads"]) == 3, "g3 is in three of them"


def at_once(tensors, buffers):
    """Waits for each: no turns."""
    for load in loads([tensor.view(-1) for tensor in tensors], buffers.elements):
        filled = fill(buffers.take(), load)
        collectives.all_reduce(filled)
        buffers.send(collectives.Work([]), functools.partial(unpack, filled, load))
        buffers.wait()


class Unfinished(Exception):
    pass


def half_written(tensors, buffers):
    """Begins a collective, and goes no further."""
    for load in loads([tensor.view(-1) for tensor in tensors], buffers.elements):
        buffers.send(collectives.all_reduce(fill(buffers.take(), load), async_op=True), print)
        raise Unfinished


def watched():
    """The records of the lesson's, of one that waits at once, of no tensors, and of one that is half written."""
    found = []
    for reduce, sizes in ((all_reduce, program.SIZES), (at_once, program.SIZES), (all_reduce, ()),
                          (half_written, program.SIZES)):
        trays = Trays(ConstantBuffers(4 * program.ROOM))
        with contextlib.suppress(Unfinished), trays:
            reduce(numbered(sizes), trays)
        found.append(trays.record)
    return found


@functools.cache
def of_today():
    return toys.run(watched, 2)


@pytest.mark.thorough
def test_the_record_is_that_of_a_run_of_today():
    for record, *_ in of_today():
        assert record == MEASURED["trays"]


def test_who_waits_at_once_is_seen():
    _, record, *_ = of_today()[0]
    with pytest.raises(AssertionError):
        assert_turns(record, program.SIZES)
    assert record["loads"] == MEASURED["trays"]["loads"]


def test_what_is_half_written_is_drawn_as_far_as_it_goes():
    *_, nothing, half = of_today()[0]
    assert nothing["events"] == nothing["loads"] == []
    assert [kind for kind, *_ in half["events"]] == ["fill", "send"] and len(half["loads"]) == 1
    too_early = half | {"events": [*half["events"], ["fill", 0, 1], ["fill", 1, 2]]}
    assert on_the_way(too_early) == {(1, 0): (1, 3)}, "a load that nobody waits for stays on its way"
    draw_trays({"the lesson's": MEASURED["trays"], "no tensors": nothing, "half written": half, "too early": too_early})


# ------------------------------------------------------------------------------------------------------- runs of today


@pytest.mark.thorough
def test_bytes_of_buffers_are_those_of_a_run_of_today():
    assert ranks.run(program.bytes_of_buffers, 2, 10**6, device="cpu")[0] == MEASURED["rows"][0]


@pytest.mark.thorough
@pytest.mark.parametrize("bucket", (2**22, 2**25))
def test_peaks_are_those_of_a_run_of_today(bucket):
    for memory, peak in zip((program.GradientMemory, program.Turns), peaks(bucket), strict=True):
        row = ranks.run(program.stage_2, 2, bucket, memory, Settings(steps=2), device="cpu", timeout=300)[0]
        assert row["peak"] == pytest.approx(peak, abs=SMALL)


SMALL = 50_000  # bytes: gloo's threads hold a little for some microseconds


@pytest.mark.thorough
def test_torchs_own_sums_are_those_of_a_run_of_today():
    found = ranks.run(program.in_four, 4, torch.float16, device="cpu")
    assert found[0] == MEASURED["sums"]["float16"]
    assert program.ones(torch.bfloat16) == MEASURED["ones"]["bfloat16"]


def test_the_default_run_is_the_one_that_is_priced():
    with torch.device("meta"):
        assert sum(param.numel() for param in GPT(Settings().model_config()).parameters()) == program.PRICED


@pytest.mark.thorough
def test_only_draws(tmp_path, capsys):
    (tmp_path / "measured.json").write_text((LESSON.folder / "measured.json").read_text())
    program.main([str(tmp_path), "--draw"])
    assert {file.name for file in tmp_path.iterdir()} == {"measured.json", "trays.png", "sizes.png", "ones.png"}
    assert "two constant" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        program.main([str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- the notebook


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", (3,))  # and on four it is run as it stands
def test_the_notebook_on_other_ranks(monkeypatch, world_size):
    names = run_notebook("07_constant_buffers.ipynb", monkeypatch, world_size, ("rounds=3", "rounds=1"))
    world = names["world"]
    try:
        for record in world["trays.record"]:
            assert_turns(record, world["sizes"][0])
        for found in world["found"]:
            assert set(found["torch.float32"]) == {world_size - 2.0}
        for without, constant in world["peaks[2**25]"]:
            assert constant > without + 19
    finally:
        world.stop()


def test_the_notebook_has_the_numbers_of_the_figures():
    shown = {cell["id"]: "".join(part for output in cell["outputs"] for part in output.get("text", ()))
             for cell in cells_of("07_constant_buffers.ipynb")}
    for name in ("float16", "bfloat16"):
        assert f"torch.{name:9} torch's own: {MEASURED['sums'][name]['torch'][::4]}" in shown["sums"]
    for number, load in enumerate(MEASURED["trays"]["loads"], 1):
        told = ", ".join(f"{count} of g{tensor}" for tensor, count in load)
        assert f"load {number}: {told}" in shown["trays"]
    assert [f"{name}: {values[-1]:.0f}" for name, values in MEASURED["ones"].items()] == shown["ones"].split("\n")[:3]
