"""Lesson 01's page: a run gave each figure on it; what the learner is to find is not there."""

import json
import re

import pages
import pytest
import torch
import torch.distributed as dist
import toys
from submissions import solution

from zero_minimal.classroom.lessons import found
from zero_minimal.meters.arrivals import Arrivals, Event, overlapped, waited
from zero_minimal.notebook import attempt
from zero_minimal.processes import ranks
from zero_minimal.programs import lesson01_figures
from zero_minimal.stage0 import Stage0
from zero_minimal.workload.settings import Settings

LESSON = found()["01_data_parallel"]
PAGE, TEACHER = ((LESSON.folder / name).read_text() for name in ("README.md", "teacher.md"))
PROSE = " ".join(PAGE.split())  # wherever lines are broken
MEASURED = json.loads((LESSON.folder / "measured.json").read_text())
NAMES = {"naive": "naive", "buckets, each waited for at once": "buckets of 4 MiB, waited for at once",
         "stage 0": "stage 0"}
ALPHA, BETA, WHOLE = MEASURED["alpha"], MEASURED["beta"], MEASURED["whole"]


# -------------------------------------------------------------------------------------------------------- the figures


def early(way):
    """All-reduces, and those of them that start before the last gradient comes."""
    last = max(place for place, (kind, *_) in enumerate(way) if kind == "gradient")
    starts = [place for place, (kind, *_) in enumerate(way) if kind == "start"]
    return len(starts), sum(place < last for place in starts)


def test_the_table_on_the_page_is_what_was_measured():
    assert Settings().bucket_mb == 4 and MEASURED["ranks"] == 2
    for name, words in NAMES.items():
        way = MEASURED["ways"][name]
        meanwhile, count = overlapped(lesson01_figures.events(way))
        cells = [words, *map(str, early(way)), f"{meanwhile} of {count}"]
        assert "| " + " | ".join(cells) + " |" in PAGE
    sent = {name: sum(bytes for kind, _, bytes in way if kind == "start") for name, way in MEASURED["ways"].items()}
    assert all(bytes == pytest.approx(WHOLE, rel=1e-3) for bytes in sent.values()), "all three send the same"


def test_messages_and_alpha():
    messages = {name: early(way)[0] for name, way in MEASURED["ways"].items()}
    many, few = messages["naive"], messages["stage 0"]
    assert f"with α = {ALPHA * 1e6:.0f} µs and β = {BETA * 1e9:.2f} ns a byte" in PROSE
    assert f"n½ = α/β = {ALPHA / BETA / 1e3:.0f} kB" in PROSE
    makes = [f"{count * ALPHA * 1e3:.1f} ms" for count in (many, few)]
    assert f"The α of {many} all-reduces makes {makes[0]}, that of {few} makes {makes[1]}" in PROSE
    assert f"The bytes take {WHOLE * BETA * 1e3:.1f} ms in both cases" in PROSE
    factor = max(seconds / (WHOLE / size * ALPHA + WHOLE * BETA) for size, seconds in MEASURED["cut"])
    assert f"took up to {factor:.1f} times as long as it says" in PROSE
    cost = lesson01_figures.latency_probe.fit([tuple(point) for point in MEASURED["alone"]])
    assert (cost.alpha, cost.beta) == pytest.approx((ALPHA, BETA))


def test_micro_batches():
    sent = MEASURED["sent"]
    assert sent["one batch"] == sent["no_sync"] == pytest.approx(2 * WHOLE / 2, rel=1e-3)
    assert sent["without no_sync"] == MEASURED["micros"] * sent["no_sync"]
    once, each = (f"{sent[name] / 1e6:.2f} MB" for name in ("no_sync", "without no_sync"))
    assert f"{each} if each backward sends, {once} with" in PROSE
    said = {float(figure) for figure in re.findall(r"([\d.]+) MB\b", PAGE)}
    assert said <= {round(bytes / 1e6, 2) for bytes in sent.values()} | {19.3, 1, 25}, "25 MB is DDP's"


def test_the_exam_is_right():
    psi, alpha, beta = 1e9, 0.2e-3, 0.5e-9
    assert 4 * psi * beta == pytest.approx(2) and 400 * alpha == pytest.approx(0.08)
    assert 4 * psi / 25e6 == 160 and 160 * alpha == pytest.approx(0.032)
    assert 2 * psi * 7 / 8 == 1.75e9 and 4 * 1.75 == 7
    for words in ("2 s in both", "80 ms more", "160 buckets, 32 ms", "1.75 billion", "7 GB", "28 GB"):
        assert words in " ".join(TEACHER.split())


def test_how_much_there_is_to_write():
    lines = [line for name in LESSON.tasks for line in solution(LESSON, name)]
    assert abs(len(lines) - 45) <= 4 and "some 45 lines" in PROSE
    assert len(LESSON.tasks) == 10 and "ten holes" in PROSE


# ------------------------------------------------------------------------------------------------------- the pictures


def test_the_pictures_are_drawn_from_these_figures():
    assert set(lesson01_figures.pictures(MEASURED)) == {"overlap.png", "buckets.png"}
    told, measured = pages.without_folded(PAGE), dict(pages.folded(PAGE))["What was measured"]
    assert "](overlap.png)" in told and "](buckets.png)" not in told and "](buckets.png)" in measured


@pytest.mark.thorough
def test_a_run_of_today_has_the_order_that_was_recorded():
    for name in ("naive", "stage 0"):
        today = ranks.run(lesson01_figures.watched, 2, lesson01_figures.WAYS[name], Settings(), device="cpu")[0]
        assert today == MEASURED["ways"][name]


def test_what_does_nothing_yet_is_named_as_not_written():
    words = attempt._unwritten(LESSON.starter.read_text())
    assert sorted(words) == sorted(f"step {step}: {name.split('.')[-1]}" for name, (step, _) in LESSON.tasks.items())


# ---------------------------------------------------------------------------------------------------------- the meter


def watched_toy():
    zero = Stage0(toys.build(toys.MLP, dist.get_rank()), torch.optim.SGD, lr=0.1, bucket_bytes=400)
    with Arrivals(zero.model) as arrivals:
        zero.model(*toys.numbers(dist.get_rank(), 0)).backward()
    return arrivals.events, sum(param.nbytes for param in zero.model.parameters()), len(zero.model._forward_hooks)


def test_arrivals_hear_each_gradient_and_each_collective():
    for events, size, _ in toys.run(watched_toy, 2):
        came = [event for event in events if event.kind == "gradient"]
        assert [event.number for event in came] == list(range(6)) and sum(event.bytes for event in came) == size
        for number in {event.number for event in events if event.kind == "start"}:
            assert [event.kind for event in events if event.number == number and event.kind != "gradient"] == [
                "start", "wait", "end"]
        assert all(one.seconds <= two.seconds for one, two in zip(events, events[1:], strict=False))


def test_what_is_overlapped_and_how_long_was_waited():
    kinds = [("gradient", 0), ("start", 0), ("gradient", 1), ("wait", 0), ("end", 0), ("start", 1), ("wait", 1),
             ("end", 1), ("gradient", 2)]
    events = [Event(kind, number, 4, float(2 * place)) for place, (kind, number) in enumerate(kinds)]
    assert overlapped(events) == (1, 3) and waited(events) == 4.0


# --------------------------------------------------------------------------------------------- what the page keeps back


@pytest.mark.parametrize("name", LESSON.tasks)
def test_no_line_of_the_solution_is_on_the_page(name):
    """Loops and names apart: those are in the hints. Not in the starter either."""
    for text in (PAGE, LESSON.starter.read_text()):
        for line in solution(LESSON, name):
            if len(line) >= 30 and not line.endswith(":") and not line.startswith("#"):
                assert line not in text
