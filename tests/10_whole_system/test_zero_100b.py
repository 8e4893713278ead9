"""Lesson 10, the whole system: P_os and P_os+g with ZeRO-R on a mesh of data and model parallelism."""

import contextlib
import functools
import json
from dataclasses import replace

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from matplotlib.image import imread
from thorough import sample
from torch import optim

from zero_minimal import __main__ as program
from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.core.mesh import make_mesh
from zero_minimal.guards.grad_placeholder import has_gradient
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.processes import ranks
from zero_minimal.processes.ranks import RankError
from zero_minimal.programs import configs
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import CONFIGS, ConstantMemory, System

Stage2R = functools.partial(Stage2, memory=ConstantMemory)

# -------------------------------------------------------------------------- stage 2 through constant buffers, in a slab


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


def places(blocks):
    """Where buffers and gradient shards lie after each of some steps, and the buffers' bytes."""
    rank = dist.get_rank()
    zero = Stage2R(toys.build(lambda: toys.Transformer(blocks), rank), optim.AdamW, bucket_bytes=4096)
    seen = []
    for step in range(4):
        zero.model(*toys.tokens(rank, step)).backward()
        shards = [bucket.gradient_shard for bucket in zero.buckets]
        seen.append((
            [buffer.data_ptr() for buffer in zero.memory.constant_buffers.buffers],
            [shard.data_ptr() for shard in shards],
            len({shard.untyped_storage().data_ptr() for shard in shards}),
        ))
        assert not any(map(has_gradient, zero.model.parameters()))
        zero.step()
        zero.zero_grad()
    return seen, sum(buffer.nbytes for buffer in zero.memory.constant_buffers.buffers)


def test_buffers_and_slab_stay_where_they_are():
    sizes = set()
    for blocks in (2, 5):
        for seen, size in toys.run(places, 2, blocks):
            assert all(one == seen[0] for one in seen)
            assert seen[0][2] == 1, "the gradient shards are not one allocation"
            sizes.add(size)
    assert sizes == {2 * 4096}, "the buffers' size depends on the model"


# -------------------------------------------------------------------------------------------------------------- configs

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


def clipped(model_parallel, name):
    """Norms before clipping and losses, of three steps on the batches of two replicas. Dropout is off."""
    mesh, sizes = make_mesh(model_parallel), replace(SIZES, dropout=0.0)
    torch.manual_seed(5)
    system = System(name, sizes, mesh, 3, torch.float32, "cpu", optim.SGD, lr=0.5)
    replicas, norms, losses = dist.get_world_size(mesh.data_group), [], []
    for step in range(3):
        for part in range(2 // replicas):  # micro-batches, where one replica reads for two
            with system.no_sync() if part < 2 // replicas - 1 else contextlib.nullcontext():
                loss = system.model(*toys.tokens(mesh.data_rank + part, step))
                (loss / (2 // replicas)).backward()
            losses.append(loss.item())
        norms.append(system.clip_grad_norm_(0.5).item())
        system.step()
        system.zero_grad()
    return norms, losses


@pytest.mark.thorough
@pytest.mark.parametrize("name", sample(("C1", "C3"), ["C3"]))
def test_clips_by_the_norm_of_the_whole_model(name):
    one_process = toys.run(clipped, 1, 1, name)[0]
    assert min(one_process[0]) > 0.6, "nothing was clipped"
    assert len(set(one_process[1])) == 6
    for world_size, model_parallel in ((2, 2), (2, 1), (4, 2), (4, 4)):
        results = toys.run(clipped, world_size, model_parallel, name)
        for norms, _ in results:
            assert norms == pytest.approx(one_process[0], rel=1e-5), (world_size, model_parallel)
        assert results[0][1] == pytest.approx(one_process[1][:: 1 if world_size == model_parallel else 2], rel=1e-5)


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


def test_a_world_that_is_no_mesh():
    with pytest.raises(RankError, match="model"):
        toys.run(make_mesh, 3, 2)


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


# ------------------------------------------------------------------------------------------------------------- programs


def reports(name):
    settings = Settings(layers=3, hidden=24, heads=4, sequence=16, batch=2, steps=4, bucket_mb=0.02)
    with ranks.start() as rank:
        return configs.train(name, settings, 2, rank)


def trains_in_16_bit(dtype):
    sizes = dict(layers=2, hidden=24, heads=4, sequence=16, batch=2, steps=6, lr=0.1)  # 0.001 to 0.006 in the warm-up
    settings = Settings(**sizes, dtype=dtype, accumulate=2, clip=1.0)
    with ranks.start() as rank:
        return [configs.train(name, settings, 2, rank)["losses"] for name in ("C1", "C5")]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_trains_in_16_bit_clipped_and_accumulating(dtype):
    for one, other in toys.run(trains_in_16_bit, 2, dtype):
        assert len(one) == 6 and one[-1] < one[0] - 0.05
        assert other == pytest.approx(one, rel=2e-3)


@pytest.mark.thorough
def test_reports_hold_the_model_states_of_the_formula():
    found = {name: toys.run(reports, 4, name) for name in ("C1", "C4", "C5")}
    for name, reported in found.items():
        for report in reported:
            parameters, memory = 4 * report["parameters_of_rank"], report["memory"]
            padding = 0.05 * parameters
            assert parameters <= memory["parameters"] <= parameters + padding
            share = 1 if name == "C1" else 2
            assert parameters / share <= memory["gradients"] <= parameters / share + padding, name
            assert parameters <= memory["optimizer"] <= parameters + padding  # 8 bytes of 2 ranks
        peaks = [found[name][0]["memory"]["peak_by_category"]["activations"] for name in ("C1", "C4")]
    assert peaks[1] < peaks[0]


@pytest.mark.thorough
def test_compare_configs(tmp_path):
    sizes = ["--layers=2", "--hidden=24", "--heads=4", "--sequence=16", "--batch=2", "--steps=3"]
    files = [f"--json={tmp_path / 'rows.json'}", f"--plot={tmp_path / 'plot.png'}"]
    program.main(["compare", "--configs", "--ranks=2", "--device=cpu", *sizes, *files])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(CONFIGS)
    assert all(row["losses"] == rows[0]["losses"] for row in rows)
    assert imread(tmp_path / "plot.png").shape[0] > 500


def test_the_largest_model_is_the_largest(monkeypatch):
    def run(name, settings, *rest):  # memory that is not quite linear in the blocks, as in a real run
        return {"memory": {"peak": 1000 + 300 * settings.layers + 130 * (settings.layers % 3)}}

    monkeypatch.setattr(configs, "run", run)
    for budget in range(1430, 9000, 37):
        layers = configs.largest_model("C3", Settings(), 2, 2, budget, "cpu")
        peaks = [run("", replace(Settings(), layers=count))["memory"]["peak"] for count in (layers, layers + 1)]
        assert peaks[0] <= budget < peaks[1]
    with pytest.raises(ValueError, match="one block takes"):
        configs.largest_model("C3", Settings(), 2, 2, 1429, "cpu")


@pytest.mark.parametrize("flags, words", [
    (["--ranks=3"], "accepted: 1, 3"),
    (["--ranks=2", "--heads=3", "--hidden=24"], "cannot be shared"),
    (["--ranks=2", "--recompute"], "always recompute"),
])
def test_what_cannot_be_trained_is_refused(flags, words, capsys):
    with pytest.raises(SystemExit):
        program.main(["compare", "--configs", "--device=cpu", *flags])
    assert words in capsys.readouterr().err
