"""Lesson 03's page: a run or a formula gave each figure on it; what the learner is to find is not there."""

import json
import re

import pages
import pytest
import torch
from submissions import solution

from zero_minimal.classroom.lessons import found
from zero_minimal.meters.buckets import KINDS
from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs import lesson03_figures
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

LESSON = found()["03_gradients"]
PAGE, TEACHER = ((LESSON.folder / name).read_text() for name in ("README.md", "teacher.md"))
PROSE = " ".join(PAGE.split())  # wherever lines are broken
MEASURED = json.loads((LESSON.folder / "measured.json").read_text())
MB = 1e6


def row(stage, ranks=2, bucket_mb=4.0, accumulate=1):
    """The report of the run with these settings, and otherwise the default ones."""
    wanted = Settings(steps=lesson03_figures.STEPS, bucket_mb=bucket_mb, accumulate=accumulate)
    return next(row for row in MEASURED["rows"]
                if (row["stage"], row["ranks"], Settings(**row["settings"])) == (stage, ranks, wanted))


def peak(*run, **changed):
    return row(*run, **changed)["memory"]["peak"] / MB


def sent(*run, **changed):
    return row(*run, **changed)["traffic"]["sent_bytes"] / MB


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_was_measured_agrees_with_the_formulas():
    for row in MEASURED["rows"]:
        psi, settings = row["parameters"], row["settings"]
        assert row["memory"]["gradients"] == formulas.model_states(row["stage"], psi, row["ranks"], "fp32")["gradients"]
        assert row["traffic"]["sent_bytes"] == formulas.traffic(row["stage"], psi, row["ranks"], "fp32",
                                                               settings["accumulate"])


def test_the_table_on_the_page_is_what_was_measured():
    for ranks_, stage in ((2, 1), (2, 2), (4, 1), (4, 2)):
        cells = [f"{ranks_}", f"{stage}", f"{row(stage, ranks_)['memory']['gradients'] / MB:.2f} MB",
                 f"{peak(stage, ranks_):.1f} MB", f"{sent(stage, ranks_):.2f} MB"]
        assert "| " + " | ".join(cells) in PROSE
    for stage in (1, 2):
        assert f"stage {stage} sends {sent(stage, accumulate=4):.1f} MB" in PROSE
    assert f"Its highest moment is {peak(2, accumulate=4):.1f} MB then" in PROSE


def test_what_the_page_says_of_the_highest_moment():
    falls = [round(peak(1, ranks_), 1) - round(peak(2, ranks_), 1) for ranks_ in (2, 4)]
    saved = [(row(1, ranks_)["memory"]["gradients"] - row(2, ranks_)["memory"]["gradients"]) / MB for ranks_ in (2, 4)]
    for fall, save in zip(falls, saved, strict=True):
        assert fall > save
        assert f"{fall:.1f} MB, and {save:.1f} MB are saved" in PROSE
    there = [row(stage)["memory"]["peak_by_category"]["gradients"] / MB for stage in (1, 2)]
    assert f"{there[0]:.1f} MB of gradients at stage 1, and {there[1]:.1f} MB at stage 2" in PROSE
    assert f"the highest moment of the whole step is {peak(1):.1f} MB" in PROSE
    for bucket_mb in (1.0, 16.0):
        assert re.search(rf"with buckets of {bucket_mb:g} MiB[^.]*{peak(2, bucket_mb=bucket_mb):.1f} MB", PROSE)
    whole, record = MEASURED["buckets"]["stage 2"]["padded"][0], MEASURED["buckets"]["stage 2"]
    first = next(moment for moment, sent in enumerate(record["sent"][0]) if sent)
    coming = sum(lane[first] for lane in record["coming"])  # of the parameter that the next bucket needs, too
    assert round(there[1] * MB) == whole + whole / 2 + coming, "the page says: when the first bucket is complete"
    for name, step in MEASURED["steps"].items():  # and where it is
        totals = [moment.total for moment in lesson03_figures.lengthened(step)]
        first, last = step["backward"]
        assert max(totals) == row(int(name[-1]))["memory"]["peak"]
        place = (totals.index(max(totals)) - first) / (last - first)
        assert 0 <= place < 0.35, "the page says: early in backward"


def test_messages_and_sizes():
    with torch.device("meta"):
        model = GPT(Settings().model_config())
    params = list(model.parameters())
    psi = sum(param.numel() for param in params)
    assert row(2)["parameters"] == psi and f"{psi / 1e6:.1f} million parameters" in PROSE
    buckets = len(MEASURED["buckets"]["stage 2"]["padded"])
    calls = row(2)["traffic"]["collectives"]
    assert calls["reduce_scatter"]["calls"] == calls["all_gather"]["calls"] == buckets
    # that naive.py makes a call a parameter is counted in test_readme.py
    assert f"pay it {len(params)} times a step" in PROSE and f"in buckets of 4 MiB they pay it {buckets} times" in PROSE
    assert Settings().bucket_mb == 4
    assert f"the gradients take {4 * psi / MB:.1f} MB" in PROSE


def test_every_figure_in_bytes_is_a_known_one():
    """No other ones have crept in: MB and GB on both pages."""
    psi, exam, shards = 4 * row(1)["parameters"] / MB, 7.5e9, 2 * 7.5 / 64
    once = 2 * exam * 63 / 64 / 1e9
    known = {f"{value:.1f} MB" for run in MEASURED["rows"] for value in (
        run["memory"]["peak"] / MB, run["memory"]["peak_by_category"]["gradients"] / MB,
        run["traffic"]["sent_bytes"] / MB)}
    known |= {f"{value / MB:.2f} MB" for run in MEASURED["rows"]
              for value in (run["memory"]["gradients"], run["traffic"]["sent_bytes"])}
    known |= {f"{psi:.1f} MB", f"{psi / 2:.1f} MB", f"{3 * psi / 4:.1f} MB"}
    known |= {f"{round(peak(1, ranks_), 1) - round(peak(2, ranks_), 1):.1f} MB" for ranks_ in (2, 4)}
    known |= {f"{sum(formulas.model_states(stage, exam, 64, 'bf16').values()) / 1e9:.1f} GB" for stage in (1, 2)}
    known |= {f"{once:.1f} GB", f"{2 * once:.1f} GB", f"{9 * once:.1f} GB", f"{shards:.2f} GB", f"{2 + shards:.1f} GB",
              f"{500_000_000 * 2 / 1e9:g} GB"}
    assert formulas.volume(1, 8) == 2 and formulas.volume(2, 8) == 9 and 9 < (2 + shards) / shards < 10
    said = {figure for text in (PAGE, TEACHER) for figure in re.findall(r"\d[\d.,]* [MG]B\b", text)}
    assert len(said) > 15 and not said - known


def test_how_much_there_is_to_write():
    lines = [line for name in LESSON.tasks for line in solution(LESSON, name)]
    assert abs(len(lines) - 40) <= 3 and "about 40 lines" in PROSE and "these 40 lines" in TEACHER


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
    assert_lanes(*MEASURED["buckets"].values(), lesson03_figures.LANES_RANKS)


def test_the_pictures_are_drawn_from_these_figures():
    drawn = lesson03_figures.pictures(MEASURED)
    assert set(drawn) == {"buckets.png", "gradients.png"}
    told, measured = pages.without_folded(PAGE), dict(pages.folded(PAGE))["What was measured"]
    assert "](buckets.png)" in told and "](gradients.png)" not in told and "](gradients.png)" in measured


# ------------------------------------------------------------------------------------------------------------ real runs


def told_by(record):
    """What a picture of the lanes tells, in whichever order autograd hands over the gradients of one layer."""
    highest = {kind: [max(moments) for moments in record[kind]] for kind in ("sent", "shard")}
    last = {kind: [moments[-1] for moments in record[kind]] for kind in KINDS}
    moments = {len(moments) for kind in KINDS for moments in record[kind]}
    return record["padded"], highest, last, moments


def both_stages(settings):
    return [lesson03_figures.watched_backward(stage_class, settings)
            for stage_class in lesson03_figures.STAGES.values()]


@pytest.mark.thorough
def test_lanes_of_a_small_run():
    settings = Settings(layers=1, hidden=32, bucket_mb=0.01)
    assert_lanes(*ranks.run(both_stages, 2, settings, device="cpu", timeout=100)[0], 2)


@pytest.mark.thorough
def test_a_run_of_today_fills_the_lanes_as_recorded():
    run = lesson03_figures.watched_backward, lesson03_figures.LANES_RANKS, lesson03_figures.Stage2, Settings()
    assert told_by(ranks.run(*run, device="cpu", timeout=100)[0]) == told_by(MEASURED["buckets"]["stage 2"])


def assert_as_recorded(measured, recorded):
    assert measured["traffic"] == recorded["traffic"]
    for state in formulas.STATES:
        assert measured["memory"][state] == recorded["memory"][state]
    assert measured["memory"]["peak"] == pytest.approx(recorded["memory"]["peak"], rel=0.01)


@pytest.mark.thorough
def test_a_run_of_today_holds_and_sends_as_recorded():
    settings = Settings(steps=lesson03_figures.STEPS)
    run, stage = lesson03_figures.watched_run, lesson03_figures.Stage2
    measured, _ = ranks.run(run, 2, stage, settings, device="cpu", timeout=100)[0]
    assert_as_recorded(measured, row(2))


# --------------------------------------------------------------------------------------------- what the page keeps back


@pytest.mark.parametrize("name", LESSON.tasks)
def test_no_line_of_the_solution_is_on_the_page(name):
    """Nor in the starter. What sets or keeps something, that is: loops are in the hints, and calls in their list."""
    starter = LESSON.starter.read_text().split("# step 1", 1)[1].split("# state\n")[0]
    lines = [line.partition("  #")[0] for line in solution(LESSON, name)]
    telling = [line for line in lines if "= " in line and line[-1] != "(" and line != "gathering = []"]
    assert telling
    assert not [line for line in telling if line in PAGE or line in starter]
