"""What the tests of lesson 9 share: stages beside the same offloaded, with a host or with a disk behind it."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal import offload
from zero_minimal.checkpoint import saved_state
from zero_minimal.processes import ranks
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


def report_of(stage, accumulate, **options):
    from zero_minimal.programs import train

    settings = Settings(layers=2, hidden=32, heads=2, steps=3, dtype="bf16", accumulate=accumulate, lr=1e-2)
    with ranks.start() as rank:
        return train.train(toys.STAGES[stage], settings, rank, **options)


def flags_of(stage, *words):
    from zero_minimal.programs import offload_flags as flags

    parser = Parser(prog="stage")
    flags.add_flags(parser)
    return flags.read_flags(parser, parser.parse_args(list(words)), toys.STAGES[stage])


KILLS = [(whose, number) for whose in ("rank", "host") for number in range(10)]


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
