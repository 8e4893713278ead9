"""Lesson 3, P_os+g: gradients live in shards; a bucket is whole only until it is reduced."""

import functools

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample
from torch import optim

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


@pytest.mark.parametrize("world_size", (2, 3))
def test_overflow_on_one_rank_is_everybodys(stage_class, world_size):
    checks.assert_overflow_is_shared(stage_class, world_size)


def test_restarts(stage_class):
    checks.assert_restarts(stage_class, 3)


@worlds
def test_holds_shards_of_gradients_and_optimizer_state_in_fp32(stage_class, world_size):
    checks.assert_model_states(stage_class, world_size, torch.float32, 4 + (4 + 8) / world_size)


@worlds
def test_holds_shards_of_gradients_and_optimizer_state_in_bf16(stage_class, world_size):
    checks.assert_model_states(stage_class, world_size, torch.bfloat16, 2 + (2 + 12) / world_size)


LAYERS, WIDTH = 24, 40


def most_during_backward(stage_class):
    """Bytes beyond those from before backward that live when a gradient comes, at most; those of a layer, and of
    all."""
    rank, most = dist.get_rank(), 0
    model = toys.build(functools.partial(toys.MLP, *[WIDTH] * (LAYERS + 1)), rank)
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    zero = stage_class(model, optim.AdamW, bucket_bytes=layer)

    def look(gradient):
        nonlocal most
        most = max(most, checks.live_bytes())

    for param in model.parameters():
        param.register_hook(look)
    for step in range(2):
        loss = zero.model(*toys.numbers(rank, step, WIDTH, WIDTH, batch=2))
        before, most = checks.live_bytes(), 0
        loss.backward()
        most = max(most, checks.live_bytes()) - before
        zero.step()
        zero.zero_grad()
    return most, layer


def test_whole_gradients_do_not_pile_up_during_backward(stage_class):
    for most, layer in toys.run(most_during_backward, 4, stage_class):
        # A bucket is as large as a layer here. Shards; a bucket that is filled and one that is reduced, its copy from
        # the other ranks, its part; gradients that autograd hands over.
        assert most <= LAYERS / 4 * layer + 6 * layer, (
            f"{most / layer:.1f} layers' worth of gradients and scratch live during backward: whole gradients are kept"
        )


@pytest.mark.parametrize("world_size", (2, 3))
def test_sends_as_much_as_data_parallelism(stage_class, world_size):
    checks.assert_traffic(stage_class, world_size, volume=2)


def test_each_micro_batch_is_reduced(stage_class):
    checks.assert_traffic(stage_class, 2, volume=4, accumulate=3)


def test_reduces_during_backward(stage_class):
    checks.assert_reduces_during_backward(stage_class, 2, "reduce_scatter")
