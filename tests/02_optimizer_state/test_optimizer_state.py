"""Lesson 2, P_os: each rank holds a shard of the optimizer state, and updates the parameters that belong to it."""

import checks
import pytest
import torch
import toys
from thorough import sample

worlds = pytest.mark.parametrize("world_size", sample((2, 3, 4), [3]))


@worlds
def test_starts_from_rank_0(stage_class, world_size):
    checks.assert_starts_from_rank_0(stage_class, world_size)


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


def test_small_steps_in_bf16_add_up(stage_class):
    checks.assert_small_steps_add_up(stage_class)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("world_size", sample((2, 4), [4]))
def test_restarts(stage_class, world_size, dtype):
    checks.assert_restarts(stage_class, world_size, dtype)


@worlds
def test_holds_a_shard_of_the_optimizer_state_in_fp32(stage_class, world_size):
    checks.assert_model_states(stage_class, world_size, torch.float32, 4 + 4 + 8 / world_size)


@worlds
def test_holds_a_shard_of_the_optimizer_state_in_bf16(stage_class, world_size):
    checks.assert_model_states(stage_class, world_size, torch.bfloat16, 2 + 2 + 12 / world_size)


@pytest.mark.parametrize("world_size", (2, 3))
def test_sends_as_much_as_data_parallelism(stage_class, world_size):
    checks.assert_traffic(stage_class, world_size, volume=2)


def test_accumulation_sends_once(stage_class):
    checks.assert_traffic(stage_class, 2, volume=2, accumulate=3)


def test_reduces_during_backward(stage_class):
    checks.assert_reduces_during_backward(stage_class, 2, "reduce_scatter")


def test_nothing_is_sent_under_no_sync(stage_class):
    for events, psi, padding in toys.run(checks.events_of_a_step, 2, stage_class, accumulate=3, bucket_bytes=4096):
        ends = [place for place, event in enumerate(events) if event.kind == "ended"]
        step = [event.kind for event in events].index("step")
        assert checks.sent_in(events[: ends[1]]) == 0, "micro-batches before the last were reduced"
        assert psi <= checks.sent_in(events[:step], "reduce_scatter") <= psi + padding
        assert psi <= checks.sent_in(events[step:], "all_gather") <= psi + padding
        assert checks.sent_in(events) == checks.sent_in(events, "reduce_scatter", "all_gather")
