"""Lesson 01's page: a run gave each figure on it; what the learner is to find is not there."""

import pytest
import torch
import torch.distributed as dist
import toys
from house.lesson_pages import texts_of

from zero_minimal.core.layout import pack
from zero_minimal.meters.events import Event, Events, overlapped, waited
from zero_minimal.notebook import attempt
from zero_minimal.paper import formulas
from zero_minimal.stage0 import Stage0
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import Settings

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("01_data_parallel")


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_was_measured_agrees_with_the_formulas():
    assert Settings().bucket_mb == 4
    psi, n = MEASURED["whole"] / 4, 2
    assert all(sent == pytest.approx(4 * psi, rel=1e-3) for sent in MEASURED["sent_by_way"]), "all three send the same"
    sent = MEASURED["sent"]
    assert sent["one batch"] == sent["no_sync"] == pytest.approx(formulas.traffic(0, psi, n, "fp32"), rel=1e-3)
    assert sent["without no_sync"] == 8 * sent["no_sync"]
    assert [MEASURED["ways"][name][0] for name in ("naive", "stage 0")] == [76, 5], "it multiplies them with α"


def test_what_the_first_bucket_holds():
    """All gradients after those of the first bucket come while a message is under way."""
    with torch.device("meta"):
        params = list(GPT(Settings().model_config()).parameters())
    first = pack(params, [{"params": params}], 2, Settings().bucket_mb * 2**20)[0]
    *_, meanwhile, count = MEASURED["ways"]["stage 0"]
    assert f"The first bucket holds {len(first.params)} gradients; all {meanwhile} after it come" in PROSE
    assert len(first.params) + meanwhile == count


def test_the_exam_is_right():
    psi, alpha, beta = 1e9, 0.2e-3, 0.5e-9
    assert 4 * psi * beta == pytest.approx(2) and 400 * alpha == pytest.approx(0.08)
    assert 4 * psi / 25e6 == 160 and 160 * alpha == pytest.approx(0.032)
    assert 2 * psi * 7 / 8 == 1.75e9 and 4 * 1.75 == 7
    for words in ("2 s in both", "80 ms more", "160 buckets, 32 ms", "1.75 billion", "7 GB", "28 GB"):
        assert words in TOLD


def test_what_does_nothing_yet_is_named_as_not_written():
    words = attempt._unwritten(LESSON.starter.read_text())
    assert sorted(words) == sorted(f"step {step}: {name.split('.')[-1]}" for name, (step, _) in LESSON.tasks.items())


# ---------------------------------------------------------------------------------------------------------- the meter


def watched_toy():
    zero = Stage0(toys.build(toys.MLP, dist.get_rank()), torch.optim.SGD, lr=0.1, bucket_bytes=400)
    with Events(zero.model) as seen:
        zero.model(*toys.numbers(dist.get_rank(), 0)).backward()
    return seen.events, sum(param.nbytes for param in zero.model.parameters()), len(zero.model._forward_hooks)


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
