"""Ranks are killed at random instants, most of them while a checkpoint is written. Those after them go on."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import toys
from house.saved_models import Model, disk_has, groups_of, wrapped

from zero_minimal.checkpoint import saved_state, state_folder
from zero_minimal.processes.ranks import RankError

pytestmark = pytest.mark.thorough

LAST = 120  # steps of the run that nobody disturbs
KILLS = 10  # of a case; there are ten


def build(stage):
    zero = wrapped(stage, make=Model, groups=groups_of)
    torch.manual_seed(50 + dist.get_rank())
    return zero


def undisturbed(stage):
    zero = build(stage)
    return [toys.step_of(zero, step) for step in range(LAST)]


def until_killed(stage, folder, expected, chance):
    """Go on from what is there; save all the time; be killed. Returns only if that came too late."""
    fate, rank = random.Random(chance), dist.get_rank()
    who = fate.choice((None, *range(dist.get_world_size())))  # None: all
    in_save, wait, at_save = fate.random() < 0.7, fate.random(), fate.randrange(1, 6)
    is_full, room = fate.random() < 0.2, fate.randrange(200_000)

    def kill(seconds):
        if who in (None, rank):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    zero, step, saved, took = build(stage), 0, 0, 0.05
    if saved_state.any_in(zero, folder):
        step = saved_state.load(zero, folder)["step"]
    if not in_save:
        kill(wait)
    if is_full:  # nearly: some saves fail, and training goes on
        disk_has(room)
    saving = None
    while step < len(expected[rank]):
        assert toys.step_of(zero, step) == expected[rank][step], step
        step += 1
        with contextlib.suppress(saved_state.NotSaved):
            if saving:
                start = time.monotonic()
                saving.wait()
                took = time.monotonic() - start
        saved += 1
        if in_save and saved == at_save:
            kill(wait * 2 * took)
        saving = saved_state.async_save(zero, folder, {"step": step}, step=step, keep=2)
    with contextlib.suppress(saved_state.NotSaved):
        saving.wait()


def whole(folder):
    """The steps of the finished checkpoints, each read and found whole; the newest first."""
    steps = []
    for path in state_folder.finished(folder):
        contents = state_folder.read_contents(path)
        for name in contents.files:
            state_folder.check_file(contents, name)
        steps.append(contents.step)
    return steps


@pytest.mark.parametrize("stage, world", [(number % 4, (2, 3)[number % 2]) for number in range(10)])
def test_kills(stage, world, tmp_path):
    expected = toys.run(undisturbed, world, stage)
    newest, torn, seed = 0, 0, f"{stage} {world} {tmp_path.name}"
    for number in range(KILLS):
        if newest > len(expected[0]) - 40:  # begin anew
            newest = 0
            for path in state_folder.finished(tmp_path):
                state_folder.shutil.rmtree(path)
        try:
            toys.run(until_killed, world, stage, tmp_path, expected, f"{seed} {number}")
        except RankError as error:
            if "it was killed by SIGKILL" not in str(error):
                raise
        torn += any(path.name.startswith(state_folder.WRITING) for path in tmp_path.iterdir())
        steps = whole(tmp_path)
        assert not steps or steps[0] >= newest, f"{seed} {number}: a finished one is lost"
        assert steps or not newest
        newest = steps[0] if steps else 0
    print(f"stage {stage}, {world} ranks: {torn} of {KILLS} kills left a half-written one; the newest is of {newest}")
