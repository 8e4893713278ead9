"""Lesson 1, data parallel: every rank holds everything, gradients are averaged during backward."""

import checks
import pytest
import torch
import toys
from thorough import sample

worlds = pytest.mark.parametrize("world_size", sample((2, 3, 4), [3]))


@worlds
def test_starts_from_rank_0(stage_class, world_size):
    checks.assert_starts_from_rank_0(stage_class, world_size)


@pytest.mark.parametrize("bucket_bytes", (64, 4096, 2**30))
def test_gradient_is_the_mean_whatever_the_buckets(stage_class, bucket_bytes):
    checks.assert_gradient_is_the_mean(stage_class, 3, bucket_bytes)


@worlds
def test_gradient_is_the_mean(stage_class, world_size):
    checks.assert_gradient_is_the_mean(stage_class, world_size)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", sample((1, 2, 3), [3]))
def test_trains_as_one_process_would(stage_class, world_size):
    checks.assert_trains_as_one_process(stage_class, world_size)


@worlds
def test_clips_by_the_global_norm(stage_class, world_size):
    checks.assert_clips_by_the_global_norm(stage_class, world_size)


def test_restarts(stage_class):
    checks.assert_restarts(stage_class, 2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_holds_everything_once(stage_class, dtype):
    checks.assert_model_states(stage_class, 2, dtype, 16)


@pytest.mark.parametrize("world_size", (2, 3))
def test_sends_an_all_reduce_of_the_gradients(stage_class, world_size):
    checks.assert_traffic(stage_class, world_size, volume=2)


def test_accumulation_sends_once(stage_class):
    checks.assert_traffic(stage_class, 2, volume=2, accumulate=3)


def test_reduces_during_backward(stage_class):
    checks.assert_reduces_during_backward(stage_class, 2, "all_reduce")


def test_nothing_is_sent_under_no_sync(stage_class):
    for events, psi, padding in toys.run(checks.events_of_a_step, 2, stage_class, accumulate=3, bucket_bytes=4096):
        ends = [place for place, event in enumerate(events) if event.kind == "ended"]
        assert checks.sent_in(events[: ends[1]]) == 0, "micro-batches before the last were reduced"
        assert psi <= checks.sent_in(events) <= psi + padding
