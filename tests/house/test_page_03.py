"""Lesson 03's page: a run or a formula gave each figure on it; what the learner is to find is not there."""

import pytest
import torch
from house.lesson_pages import texts_of

from zero_minimal.meters.buckets import KINDS, Lanes
from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs import compare
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("03_gradients")


def row(stage, ranks=2):
    """The report of the run of this stage on so many ranks."""
    return next(row for row in MEASURED["rows"] if (row["stage"], row["ranks"]) == (stage, ranks))


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_was_measured_agrees_with_the_formulas():
    psi = MEASURED["psi"]
    for row, accumulate in [*((row, 1) for row in MEASURED["rows"]), *((row, 4) for row in MEASURED["micro"])]:
        assert row["gradients"] == formulas.model_states(row["stage"], psi, row["ranks"], "fp32")["gradients"]
        assert row["sent"] == formulas.traffic(row["stage"], psi, row["ranks"], "fp32", accumulate)


def test_what_the_page_says_of_the_highest_moment():
    assert all(fall > saved for fall, saved in zip(MEASURED["falls"], MEASURED["saved"], strict=True))
    assert all(0 <= place < 0.35 for place in MEASURED["place"].values()), "the page says: early in backward"
    record = MEASURED["buckets"]["stage 2"]
    whole, first = record["padded"][0], next(moment for moment, sent in enumerate(record["sent"][0]) if sent)
    coming = sum(lane[first] for lane in record["coming"])  # of the parameter that the next bucket needs, too
    assert row(2)["at peak"] == whole + whole / 2 + coming, "the page says: when the first bucket is complete"


def test_messages_and_sizes():
    with torch.device("meta"):
        model = GPT(Settings().model_config())
    params = list(model.parameters())
    psi = sum(param.numel() for param in params)
    assert MEASURED["psi"] == psi and f"{psi / 1e6:.1f} million parameters" in PROSE
    buckets = len(MEASURED["buckets"]["stage 2"]["padded"])
    calls = row(2)["calls"]
    assert calls["reduce_scatter"]["calls"] == calls["all_gather"]["calls"] == buckets
    # that naive.py makes a call a parameter is counted in test_readme.py
    assert f"pay it {len(params)} times a step" in PROSE and f"in buckets of 4 MiB they pay it {buckets} times" in PROSE
    assert Settings().bucket_mb == 4
    assert f"the gradients take {4 * psi / 1e6:.1f} MB" in PROSE


def test_the_exam_is_right():
    exam, shards, once = 7.5e9, 2 * 7.5 / 64, 2 * 7.5 * 63 / 64
    said = " ".join((PAGE + TEACHER).split())
    for size in (*(sum(formulas.model_states(stage, exam, 64, "bf16").values()) / 1e9 for stage in (1, 2)), once,
                 2 * once, 9 * once, 2 + shards):
        assert f"{size:.1f} GB" in said
    assert f"{shards:.2f} GB" in said
    assert formulas.volume(1, 8) == 2 and formulas.volume(2, 8) == 9 and 9 < (2 + shards) / shards < 10


# ------------------------------------------------------------------------------------------------------- the pictures


def assert_lanes(one, two, world_size):
    """What the page says of its picture: the records of stages 1 and 2."""
    for record in (one, two):
        moments = range(len(record["shard"][0]))
        for number, whole in enumerate(record["padded"]):
            held = [sum(record[kind][number][moment] for kind in KINDS) for moment in moments]
            assert record["shard"][number][-1] == whole // world_size
            if record is one:
                assert set(held) == {whole}, "its full height from the beginning to the end"
                assert record["idle"][number][0] == whole and record["idle"][number][-1] == whole - whole // world_size
            else:
                assert held[0] == 0 and held[-1] == whole // world_size and not any(record["idle"][number])
        sent = [sum(lane[moment] > 0 for lane in record["sent"]) for moment in moments]
        assert set(sent) == {0, 1}, "one is on its way while the next is filled"


def test_the_picture_of_the_buckets_shows_what_the_page_says():
    assert_lanes(*MEASURED["buckets"].values(), 4)


# ------------------------------------------------------------------------------------------------------------ real runs


def told_by(record):
    """What a picture of the lanes tells, in whichever order autograd hands over the gradients of one layer."""
    highest = {kind: [max(moments) for moments in record[kind]] for kind in ("sent", "shard")}
    last = {kind: [moments[-1] for moments in record[kind]] for kind in KINDS}
    moments = {len(moments) for kind in KINDS for moments in record[kind]}
    return record["padded"], highest, last, moments


def watched(*stages, settings):
    """For each stage the record of this rank's Lanes in the second backward pass: the first settles the order."""
    found = []
    with ranks.start() as rank:
        for stage_class in stages:
            zero = loop.build(stage_class, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
            batches = loop.training_batches(settings, rank.rank)
            for _ in range(2):
                zero.zero_grad()
                loss = zero.model(*next(batches))
                with Lanes(zero) as lanes:
                    loss.backward()
                zero.step()
            found.append(lanes.record)
    return found


@pytest.mark.thorough
def test_lanes_of_a_small_run():
    settings = Settings(layers=1, hidden=32, bucket_mb=0.01)
    assert_lanes(*ranks.run(watched, 2, Stage1, Stage2, settings=settings, device="cpu", timeout=100)[0], 2)


@pytest.mark.thorough
def test_a_run_of_today_fills_the_lanes_as_recorded():
    (today,) = ranks.run(watched, 4, Stage2, settings=Settings(), device="cpu", timeout=100)[0]
    assert told_by(today) == told_by(MEASURED["buckets"]["stage 2"])


@pytest.mark.thorough
def test_a_run_of_today_holds_and_sends_as_recorded():
    today, recorded = compare.run(Stage2, Settings(steps=3), 2, "cpu"), row(2)
    assert today["traffic"]["sent_bytes"] == recorded["sent"] and today["traffic"]["collectives"] == recorded["calls"]
    assert today["memory"]["gradients"] == recorded["gradients"]
    assert today["memory"]["peak"] == pytest.approx(recorded["peak"], rel=0.01)
