"""Lesson 07's page: a run or a formula gave each figure on it; what the learner is to find is not there; and its meter
sees what happens, on a run of today too."""

import contextlib
import functools

import pytest
import torch
import toys
from cells import notebook_on
from house.lesson_pages import texts_of

from zero_minimal.constant_buffers import ConstantBuffers, all_reduce, fill, loads, unpack
from zero_minimal.core import collectives
from zero_minimal.meters import observer
from zero_minimal.meters.double_buffer_trace import EVENTS, Trays, numbered
from zero_minimal.paper import formulas
from zero_minimal.pictures.double_buffer_chart import columns, draw_trays, on_the_way
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("07_constant_buffers")


with torch.device("meta"):
    PSI = sum(param.numel() for param in GPT(Settings().model_config()).parameters())
SIZES, ROOM = (400, 250, 2300, 100, 600, 30, 500), 1000  # elements: of the gradients in the picture, and of a buffer


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_the_page_says_of_sizes():
    assert [row["fused"] / 1e6 for row in MEASURED["rows"]] == [4, 40]
    assert {row["constant"] for row in MEASURED["rows"]} == {MEASURED["constant"]} == {2 * MEASURED["size"]}
    assert "4, 40, 4000 and 12000 MB (the last two are calculated)" in PROSE
    assert f"grows from 4.0 to {4 * 30:.1f} MB, and the two constant buffers (of 1 MiB here) stay at " in PROSE
    assert f"stay at {2 * 2**20 / 1e6:.1f} MB" in PROSE


def test_what_the_page_says_of_prices():
    assert f"{PSI / 1e6:.2f} million parameters" in PROSE
    prices = MEASURED["prices"]
    for name, row in prices.items():
        assert row["collectives"] == (-(-4 * PSI // row["size"]) if row["size"] else 1), name
    many, few, one = (prices[name]["seconds"] for name in ("16 KiB", "4096 KiB", "one for all"))
    alpha = 1000 * (many - one) / (prices["16 KiB"]["collectives"] - 1)
    rest = 1000 * one - alpha
    assert f"each pays α = {alpha:.2f} ms, and all bytes together {rest:.1f} ms" in PROSE
    assert f"One for all took {1000 * one:.1f} ms, so α = ({1000 * many:.0f} − {1000 * one:.1f})/1176 ms" in PROSE
    told = [1.45 * prices[name]["collectives"] + 37.4 for name in ("4096 KiB", "16 KiB")]
    assert "5α + 37.4 = {:.0f} ms and 1177α + 37.4 = {:.0f} ms: {:.0f} times".format(*told, told[1] / told[0]) in PROSE


def test_what_the_page_says_of_stage_2():
    for mib, (without, constant) in zip((1, 4, 32), MEASURED["peaks"].values(), strict=True):
        assert constant - without > 0.98 * min(mib * 2**20, 4 * PSI), "it says: at least one bucket more"
    assert MEASURED["activations"] < 1e4, "the page says: the activations are gone"
    assert "A bucket limit of 33.55 MB means one bucket with all 19.28 MB; then each constant buffer has 19.28" in PROSE
    without, constant = MEASURED["peaks"]["32 MiB"]
    assert f"{PSI * 4 / 1e6:.2f} MB, and C_B costs {round(constant / 1e6, 2) - round(without / 1e6, 2):.2f} MB" in PROSE


def test_what_the_page_says_of_sums():
    assert "sent in 4 bytes and not in 2" in PROSE
    assert toys.run(lambda: ConstantBuffers(4000).take().element_size(), 1) == [4]
    assert MEASURED["ones"] == {"float32": 4096, "float16": 2048, "bfloat16": 256}
    assert "The mean of 4096 ones is then 0.5 in fp16, and 1/16 in bf16" in PROSE
    for dtype in (torch.float16, torch.bfloat16):  # place k begins at rank k - 1, and goes to the left
        numbers = [torch.tensor(number, dtype=dtype) for number in (4096.0, 1.0, 1.0, -4096.0)]
        sums = [functools.reduce(torch.add, [numbers[(place - 1 - step) % 4] for step in range(4)]).item()
                for place in range(4)]
        assert sums == MEASURED["sums"][str(dtype)][::4]


def test_what_is_calculated():
    assert f"to {-(-4 * 10**12 // 2**22):,}" in PROSE and f"of 100 MB it is {4 * 10**12 // 10**8:,}" in PROSE
    assert torch.finfo(torch.float16).max == 65504 and "65,504" in PROSE
    assert torch.tensor(40000.0).half() + torch.tensor(40000.0).half() == torch.inf
    exact, half = formulas.traffic(0, 1.5e9, 64, "fp32") / 1e9, formulas.traffic(0, 1.5e9, 64, "fp16") / 1e9
    assert f"= {exact:.1f} GB in both cases, and {half:.1f} GB with" in TOLD
    assert "126 · 50 µs = 6.3 ms" in TEACHER and 126 * 50 == 6300 and round(60 * 6.3e-3, 2) == 0.38
    assert 4 * 1.5e9 / 100e6 == 60 and "(b) 60, and 1" in TEACHER


# ------------------------------------------------------------------------------------------------------- the pictures


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
    assert_turns(record, SIZES)
    assert len(record["loads"]) == 5 and record["ranks"] == 4 and "rank 0 of four, as it was recorded" in PROSE
    assert sum(any(number == 3 for number, _ in load) for load in record["loads"]) == 3, "g3 is in three of them"
    assert f"The vector here has {sum(SIZES):,} elements, and a buffer {ROOM:,}" in PROSE
    assert f"makes {1000 * sum(SIZES) // ROOM:,} loads, and each is used {sum(SIZES) // 2:,} times" in PROSE


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
    for reduce, sizes in ((all_reduce, SIZES), (at_once, SIZES), (all_reduce, ()),
                          (half_written, SIZES)):
        trays = Trays(ConstantBuffers(4 * ROOM))
        with contextlib.suppress(Unfinished), trays:
            reduce(numbered(sizes), trays)
        found.append(trays.record)
    return found


@functools.cache
def of_today():
    return toys.run(watched, 4)


@pytest.mark.thorough
def test_the_record_is_that_of_a_run_of_today():
    for record, *_ in of_today():
        assert record == MEASURED["trays"]


def test_who_waits_at_once_is_seen():
    _, record, *_ = of_today()[0]
    with pytest.raises(AssertionError):
        assert_turns(record, SIZES)
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
def test_the_highest_moment_is_that_of_a_run_of_today():
    today = observer.watched(Stage2, Settings(steps=2, bucket_mb=4.0), 2)["memory"]["peak"]
    assert today == pytest.approx(MEASURED["peaks"]["4 MiB"][0], abs=50_000)  # gloo's threads hold a little


# ------------------------------------------------------------------------------------------------------- the notebook


@pytest.mark.thorough
def test_the_notebook_on_3_ranks(world_size=3):
    """And on four it is run as it stands."""
    smaller = ("rounds=3", "rounds=1"), ("rounds=8", "rounds=1"), ("(1, 4, 32)", "(32,)")
    with notebook_on(world_size, "07_constant_buffers.ipynb", *smaller) as (names, world):
        for record in world["trays.record"]:
            assert_turns(record, world["sizes"][0])
        for found in world["found"]:
            assert set(found["torch.float32"]) == {world_size - 2.0}
        without, constant = (report["memory"]["peak"] for report in names["reports"][32])
        assert constant > without + 19e6
