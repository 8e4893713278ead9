"""Lesson 10, the whole system: P_os and P_os+g with ZeRO-R on a mesh of data and model parallelism."""

import functools

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample
from torch import optim

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.core.mesh import make_mesh
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.model import GPTConfig
from zero_minimal.zero_100b import CONFIGS, ConstantMemory, System

Stage2R = functools.partial(Stage2, memory=ConstantMemory)  # through constant buffers, in a slab


@pytest.mark.thorough
def test_trains_as_one_process_would():
    checks.assert_trains_as_one_process(Stage2R, 3)


def test_starts_from_rank_0():
    checks.assert_starts_from_rank_0(Stage2R, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", (1, 2))
def test_agrees_with_stage_2_bit_for_bit(world_size):
    names = ("AdamW", "accumulation", "bf16", "frozen, tied and unused parameters", "another order in each step")
    recipes = {name: checks.RECIPES[name] for name in names}
    for results in toys.run(checks.train_all, world_size, recipes, Stage2, Stage2R):
        for name, (plain, ours) in results.items():
            assert ours.losses == plain.losses, name
            assert toys.identical(ours.parameters, plain.parameters), name


SIZES = GPTConfig(layers=3, hidden=24, heads=4, sequence=9, vocabulary=31, dropout=0.1)


def losses_of(model_parallel):
    """{config: losses}, each model-parallel group with batches of its own."""
    mesh, found = make_mesh(model_parallel), {}
    for name in CONFIGS:
        torch.manual_seed(5)
        system = System(name, SIZES, mesh, 3, torch.float32, "cpu", optim.AdamW, bucket_bytes=4096, lr=1e-2)
        torch.manual_seed(6 + mesh.data_rank)
        losses = []
        for step in range(5):
            loss = system.model(*toys.tokens(mesh.data_rank, step))
            loss.backward()
            system.step()
            system.zero_grad()
            losses.append(loss.item())
        found[name] = losses
    return mesh.data_rank, found


@pytest.mark.thorough
@pytest.mark.parametrize("world_size, model_parallel", sample([(2, 2), (4, 2), (4, 4)], [(4, 2)]))
def test_all_configs_train_alike(world_size, model_parallel):
    results = toys.run(losses_of, world_size, model_parallel)
    for data_rank, found in results:
        assert found["C1"][-1] < found["C1"][0]
        for name in CONFIGS:
            assert found[name] == found["C1"], name
        first = next(other for place, other in results if place == data_rank)
        assert found == first, "ranks of one model see different losses"


def overflows():
    """Which ranks took the step in which one rank of four has an infinite gradient, and the one after it."""
    mesh = make_mesh(2)
    torch.manual_seed(5)
    system = System("C4", SIZES, mesh, 3, torch.float16, "cpu", optim.AdamW, lr=1e-3)
    scaler, taken = LossScaler(initial_scale=64.0, groups=system.groups), []
    for step in range(2):
        scaler.scale(system.model(*toys.tokens(mesh.data_rank, step))).backward()
        if step == 0 and dist.get_rank() == 2:
            system.reduced_gradients()[0][3] = float("inf")
        taken.append(scaler.step(system))
        scaler.update()
        system.zero_grad()
    return taken, scaler.scale_value


@pytest.mark.thorough
def test_an_overflow_on_one_rank_is_everybodys():
    assert toys.run(overflows, 4) == [([False, True], 32.0)] * 4


def megatrons_traffic(name):
    """What a rank sends in forward and backward, for models of 3 and 1 blocks, once P_a has compared their inputs."""
    mesh, found = make_mesh(dist.get_world_size()), []
    for layers in (3, 1):
        sizes = GPTConfig(layers=layers, hidden=24, heads=4, sequence=8, vocabulary=31)
        system = System(name, sizes, mesh, 2, torch.float32, "cpu", optim.AdamW)
        for _ in range(2):
            with TrafficMeter() as meter:
                system.model(*toys.tokens(0, 0, batch=2, sequence=8)).backward()
            system.zero_grad()
        found.append(meter.sent_bytes)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", (2, 4))
def test_p_a_adds_a_twelfth_to_megatrons_traffic(world_size):
    plain, partitioned = (toys.run(megatrons_traffic, world_size, name)[0] for name in ("C3", "C4"))
    input_of_a_block = 2 * 8 * 24 * 4  # b·s·h, in bytes
    share = (world_size - 1) / world_size
    of_two_blocks = plain[0] - plain[1], partitioned[0] - partitioned[1]
    assert of_two_blocks[0] == 2 * 12 * input_of_a_block * share
    assert of_two_blocks[1] == 2 * 13 * input_of_a_block * share
