"""Offload: the same bits as without it, whatever the speed of the bus; less memory; the bytes of the formula."""

import contextlib
import dataclasses
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from processes import alive, ended
from thorough import sample
from torch import nn

from zero_minimal import offload
from zero_minimal.checkpoint import saved_state
from zero_minimal.extensions.averages import Average
from zero_minimal.meters.crossings import settled_bytes
from zero_minimal.offloading.host_link import Bus, Queues
from zero_minimal.processes import ranks
from zero_minimal.processes.ranks import RankError
from zero_minimal.programs import report
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.workload.settings import Parser, Settings

in_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
OFFLOADED = (None, offload.Offloaded1, offload.Offloaded2, offload.Offloaded3)
RECIPES = {
    "fp32": toys.Recipe(clip=0.5, steps=4),
    "bf16": toys.Recipe(dtype=torch.bfloat16, accumulate=2, steps=4,
                        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)),
    "fp16": toys.Recipe(dtype=torch.float16, scale=2.0**20, clip=0.5, steps=5),  # first overflows, then not
    "fused": toys.Recipe(options=dict(lr=1e-2, fused=True), steps=3),
}


def both(stage, recipe, **options):
    """A stage and the same offloaded: their Runs on this rank."""
    recipe = dataclasses.replace(recipe)
    plain = toys.train(toys.STAGES[stage], recipe)
    recipe.options = recipe.options | options
    return plain, toys.train(OFFLOADED[stage], recipe)


def pair(stage, **options):
    """A stage and the same offloaded, of one model each, bf16."""
    made = []
    for kind, extra in ((toys.STAGES[stage], {}), (OFFLOADED[stage], options)):
        model = toys.build(toys.Transformer, dist.get_rank(), torch.bfloat16)
        made.append(kind(model, torch.optim.AdamW, lr=1e-2, bucket_bytes=4096, **extra))
    return made


def same(plain, offloaded):
    assert offloaded.losses == plain.losses
    assert offloaded.norms == plain.norms
    assert toys.identical(offloaded.parameters, plain.parameters)


def all_recipes(stage, names, bus):
    for name in names:
        same(*both(stage, RECIPES[name], bus=bus))


@pytest.mark.thorough
@pytest.mark.parametrize(("stage", "world_size"), sample(
    [(stage, world) for stage in (1, 2, 3) for world in (1, 2, 3)], [(2, 3), (3, 2)]))
def test_same_bits(stage, world_size):
    toys.run(all_recipes, world_size, stage, tuple(RECIPES), None)


def bus_of_all():
    """Bytes of a step over a slow bus, each way, and the formula; the seconds of the step, and those of the bus."""
    found = []
    for stage in (1, 2, 3):
        zero = pair(stage, bus=2e5)[1]
        bus, start = zero.host.bus, time.monotonic()
        before = bus.sent, bus.received
        toys.step_of(zero, 0)
        zero.host.settle()  # at stage 3 parameters may still be on their way
        elapsed, crossed = time.monotonic() - start, (bus.sent - before[0], bus.received - before[1])
        shards = sum(bucket.padded for bucket in zero.buckets) * 2 // zero.world_size
        found.append((crossed, shards, elapsed, sum(crossed) / 2e5))
    return found


@pytest.mark.thorough
def test_bytes_over_the_bus_and_its_speed():
    for found in toys.run(bus_of_all, 2):
        for crossed, shards, elapsed, needed in found:
            assert crossed == (shards, shards)
            assert elapsed > 0.9 * needed - 0.02


def through_a_slow_bus():
    for stage in (1, 2, 3):
        same(*both(stage, RECIPES["bf16"], bus=1e6))


@pytest.mark.thorough
def test_a_slow_bus_changes_nothing():
    toys.run(through_a_slow_bus, 2)


def edits_and_states(folder, stage, **options):
    plain, away = pair(stage, **options)
    assert [toys.step_of(plain, step) for step in range(2)] == [toys.step_of(away, step) for step in range(2)]
    for zero in (plain, away):  # an edit of a few elements; the others keep their full precision
        with zero.gather_parameters(), torch.no_grad():
            zero.model.head.weight[1:3] += 0.5
    assert toys.step_of(plain, 2) == toys.step_of(away, 2)
    if stage < 3:
        for zero in (plain, away):
            zero.model.head.weight.data[3] -= 0.25  # where no version counter sees it
    assert toys.step_of(plain, 3) == toys.step_of(away, 3)
    # this rank's part
    state, whole = away.state_dict(), plain.state_dict()
    assert toys.identical(state["shards"], whole["shards"])
    for key, held in whole["optimizer"]["state"].items():
        assert all(torch.equal(value, state["optimizer"]["state"][key][name]) for name, value in held.items())
    expected = [toys.step_of(away, step) for step in (4, 5)]
    again = pair(stage, **options)[1]
    again.load_state_dict(state)
    assert [toys.step_of(again, step) for step in (4, 5)] == expected
    # a checkpoint, from the offloaded stage to the plain one and back
    saved_state.save(again, folder)
    expected = [toys.step_of(again, step) for step in (6, 7)]
    plain, away = pair(stage, **options)
    for zero in (plain, away):
        saved_state.load(zero, folder)
        assert [toys.step_of(zero, step) for step in (6, 7)] == expected


@pytest.mark.thorough
@pytest.mark.parametrize("stage", sample((1, 2, 3), (2,)))
def test_edits_states_and_checkpoints(stage, tmp_path):
    toys.run(edits_and_states, 2, str(tmp_path), stage)


class Slow(torch.autograd.Function):
    """Takes its time in backward, and no core."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.03)
        return gradient


class SlowBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(10))

    def forward(self, x):
        for block in self.blocks:
            x = Slow.apply(block(x))
        return x.square().mean()


def backward_beside_the_bus():
    """Seconds: of backward until all gradients are on the host, without a bus that takes time and with one; and of
    what crosses it."""
    found = []
    for bus in (None, 64 * 64 * 4 / 0.02):
        zero = offload.Offloaded2(SlowBlocks(), torch.optim.SGD, lr=0.1, bucket_bytes=64 * 64 * 4, bus=bus)
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            zero.model(torch.ones(1, 64)).backward()
            assert zero.host.ask("finite")  # its answer comes after them
            seconds.append(time.monotonic() - start)
            zero.zero_grad()
        found.append(min(seconds))
    return *found, 10 * 0.02


@pytest.mark.thorough
def test_gradients_cross_while_backward_goes_on():
    """Of 10 shards the last alone has nothing beside it: 90% is hidden, and much of that is asked for."""
    [(alone, beside, crossing)] = toys.run(backward_beside_the_bus, 1)
    assert beside - alone < 0.4 * crossing, (alone, beside, crossing)


def refuse_all(zero):
    refused = {
        "clip with zero.clip_grad_norm_()": zero.reduced_gradients,
        "take zero.state_dict()": zero.optimizer.state_dict,
        "zero.load_state_dict()": lambda: zero.optimizer.load_state_dict({}),
        "before or after zero.step()": lambda: zero.optimizer.register_step_pre_hook(print),
        "call zero.step()": zero.optimizer.step,
        "give bytes a second": lambda: offload.Offloaded2(toys.MLP(), torch.optim.SGD, lr=1, bus=0),
        "under zero.gather_parameters()": lambda: Average(zero),
    }
    for words, call in refused.items():
        with pytest.raises((RuntimeError, ValueError), match=re.escape(words)):
            call()


def refusals():
    zero = pair(2)[1]
    toys.step_of(zero, 0)
    refuse_all(zero)
    toys.step_of(zero, 1)
    pid = zero.host.process.pid
    assert alive(pid)
    del zero
    gc.collect()
    return ended([pid])


@in_proc
def test_what_cannot_be_is_refused_and_the_host_goes_with_the_stage():
    assert toys.run(refusals, 1) == [True]


def asked_to_end():
    """The usual handlers of a preemption, and the signal goes to every process of the rank."""
    zero = pair(2)[1]
    came = []
    kinds = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
    before = {kind: signal.signal(kind, lambda *_: came.append(True)) for kind in kinds}
    try:
        for number, kind in enumerate(kinds):
            toys.step_of(zero, number)
            for process in (os.getpid(), zero.host.process.pid):
                os.kill(process, kind)
            time.sleep(0.2)
        return len(came), len(zero.state_dict()["shards"]) == len(zero.buckets)
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)


@pytest.mark.thorough
@in_proc
def test_a_host_leaves_to_its_rank_what_asks_it_to_end():
    assert toys.run(asked_to_end, 1) == [(4, True)]


class Fails(torch.optim.SGD):
    """In its second step."""

    def step(self, closure=None):
        super().step()
        if self.param_groups[0]["lr"] == 0.25 and dist.is_initialized() is False:
            raise ArithmeticError("the optimizer's own error")


def a_failing_host():
    zero = offload.Offloaded2(toys.build(toys.MLP, 0), Fails, lr=0.5)
    for step in range(2):
        zero.model(*toys.numbers(0, step)).backward()
        zero.step()
        zero.zero_grad()
        zero.optimizer.param_groups[0]["lr"] = 0.25


def test_an_error_on_the_host_is_told():
    with pytest.raises(RankError, match="the host of rank 0 failed:(.|\n)*the optimizer's own error"):
        toys.run(a_failing_host, 1)


def test_two_threads_have_a_bus_too():
    """As on a GPU, but for the streams."""
    (ours, theirs), memory = Queues.pair(), torch.zeros(2, 2, 64, dtype=torch.uint8)
    here, there = Bus(ours, memory, 0, None), Bus(theirs, memory, 1, None)

    def doubled():
        for _ in range(5):
            parcel = there.receive()
            there.send(parcel.words, 2 * parcel.tensor)
            there.emptied(parcel)

    thread = threading.Thread(target=doubled)
    thread.start()
    for number in range(5):
        here.send((number,), torch.arange(7.0) + number)
        parcel = here.receive()
        assert parcel.words == (number,) and torch.equal(parcel.tensor, 2 * (torch.arange(7.0) + number))
        here.emptied(parcel)
    thread.join()
    assert (here.sent, here.received) == (140, 140)


# ------------------------------------------------------------------------------------------- memory, and the programs


class Wide(nn.Module):
    """20 million parameters, which compute little."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(20))

    def forward(self, x):
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x.float().square().mean()


def resident(kind):
    """Bytes that this rank's process has more than before there was a model, after two steps, gradients and all."""
    before = settled_bytes()
    zero = kind(Wide().bfloat16(), torch.optim.AdamW, lr=1e-3, fused=True)
    for _ in range(2):
        zero.zero_grad()
        zero.model(torch.randn(2, 1000, dtype=torch.bfloat16)).backward()
        zero.step()
    # what is free and still the C library's is held by nobody: 20 to 150 MB of it, another amount in each run
    return settled_bytes() - before


@pytest.mark.thorough
@in_proc
@pytest.mark.parametrize(("stage", "world_size"), sample([(s, w) for s in (1, 2, 3) for w in (1, 2)], [(2, 1)]))
def test_resident_memory_falls(stage, world_size):
    plain, away = (toys.run(resident, world_size, kind)[0] for kind in (toys.STAGES[stage], OFFLOADED[stage]))
    leaves = 12 if stage == 1 else 14  # bytes a parameter; stage 1 keeps its whole gradients
    assert plain - away > 0.9 * leaves * 20e6 / world_size


def report_of(stage, accumulate, **options):
    from zero_minimal.programs import train

    settings = Settings(layers=2, hidden=32, heads=2, steps=3, dtype="bf16", accumulate=accumulate, lr=1e-2)
    with ranks.start() as rank:
        return train.train(toys.STAGES[stage], settings, rank, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", sample((1, 2, 3), (3,)))
def test_the_programs_report_what_left(stage):
    plain = toys.run(report_of, 2, stage, 2)[0]
    away = toys.run(report_of, 2, stage, 2, away=Offload(True, 1e9))[0]
    assert away["losses"] == plain["losses"] and away["validation_losses"] == plain["validation_losses"]
    shard = 2 * (away["parameters"] + 16 * 64) / 2  # with padding at most so much
    states, gone = plain["memory"], ("optimizer",) if stage == 1 else ("optimizer", "gradients")
    kept = sum(states[name] for name in ("parameters", "gradients", "optimizer") if name not in gone)
    assert away["device_memory"] == kept and away["memory"]["optimizer"] == 0
    assert away["host_memory"] == states["optimizer"] + away["bus"]["to_device"]
    times = 1 if stage == 1 else 2  # micro-batches that cross by themselves
    assert away["bus"]["to_host"] == times * away["bus"]["to_device"]
    assert away["parameters"] <= away["bus"]["to_device"] <= shard
    assert "2Ψ/N" in report.describe(away)
    assert "bus" not in plain


def flags_of(stage, *words):
    from zero_minimal.programs import offload_flags as flags

    parser = Parser(prog="stage")
    flags.add_flags(parser)
    return flags.read_flags(parser, parser.parse_args(list(words)), toys.STAGES[stage])


def test_flags(capsys):
    assert flags_of(2, "--offload", "cpu", "--bus", "12GB/s") == Offload(True, 12e9)
    assert flags_of(0) == Offload()
    wrong = {"--offload cpu, too": (2, "--bus", "1GB/s"), "--offload cpu is, and": (2, "--offload", "disk"),
             "stage 0 has no shards": (0, "--offload", "cpu"), "a size above 0": (1, "--offload", "cpu", "--bus", "0")}
    for words, given in wrong.items():
        with pytest.raises(SystemExit):
            flags_of(*given)
        assert words in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- kills


def until_killed(stage, folder, whose, seconds, **options):
    """Train until this rank, or its host process, is killed; the first step is let pass."""
    zero, rank = pair(stage, bus=3e6, **options)[1], dist.get_rank()
    pids = os.getpid(), zero.host.process.pid
    Path(folder, str(rank)).write_text(" ".join(map(str, pids)))
    for pid in pids:  # the memory of the bus has no name that could stay
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "memfd:bus (deleted)" in maps and "/dev/shm" not in maps
    toys.step_of(zero, 0)
    if rank == 0:
        victim = os.getpid() if whose == "rank" else zero.host.process.pid
        threading.Timer(seconds, os.kill, (victim, signal.SIGKILL)).start()
    for step in range(10_000):
        toys.step_of(zero, step)


KILLS = [(whose, number) for whose in ("rank", "host") for number in range(10)]


@pytest.mark.thorough
@in_proc
@pytest.mark.parametrize(("whose", "number"), sample(KILLS, [("rank", 0), ("host", 0)]))
def test_a_kill_ends_both_and_leaves_nothing(whose, number, tmp_path):
    fate = random.Random(number)
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        toys.run(until_killed, 2, fate.randrange(1, 4), str(tmp_path), whose, fate.random())
    assert time.monotonic() - start < 20
    if whose == "host":
        assert "the host process of rank 0 is gone (killed by SIGKILL)" in str(error.value)
        assert "newest checkpoint" in str(error.value)
    else:
        assert "killed by SIGKILL" in str(error.value)
    pids = [int(word) for file in tmp_path.iterdir() for word in file.read_text().split()]
    assert len(pids) == 4 and ended(pids)


@in_proc
@pytest.mark.thorough
@pytest.mark.parametrize("whose", ("rank", "host"))
def test_a_kill_under_torchrun(whose, tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "zero_minimal/stage2.py",
               "--device", "cpu", "--layers", "1", "--hidden", "32", "--heads", "2", "--steps", "1000000",
               "--dtype", "bf16", "--offload", "cpu", "--bus", "1GB/s"]
    with open(tmp_path / "said", "w") as said:
        program = subprocess.Popen(command, cwd=root, stderr=said, stdout=said, start_new_session=True,
                                   env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
        try:
            deadline = time.monotonic() + 90
            while len(found := hosts_of(program.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(2)
            rank, host = found[0]
            os.kill(rank if whose == "rank" else host, signal.SIGKILL)
            assert program.wait(60) != 0
        finally:
            program.kill()
    words = "its host process ends, too" if whose == "rank" else "is gone (killed by SIGKILL)"
    assert words in (tmp_path / "said").read_text()
    assert ended([pid for pair in found for pid in pair])


def hosts_of(pid):
    """Under a torchrun: (a rank, its host process) of those that share the memory of a bus."""
    pairs = []
    for rank in children(pid):
        for child in children(rank):
            with contextlib.suppress(OSError):
                if "memfd:bus" in Path(f"/proc/{child}/maps").read_text():
                    pairs.append((rank, child))
    return pairs


def children(pid):
    """Of all threads of a process."""
    with contextlib.suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(word) for thread in threads for word in (thread / "children").read_text().split()]
    return []
