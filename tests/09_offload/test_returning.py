"""Offloaded3: parameters go on coming from the host when step() has returned, and nobody sees older ones."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from processes import alive, ended

from zero_minimal import offload
from zero_minimal.checkpoint import saved_state
from zero_minimal.offloading.host_process import HostError
from zero_minimal.stage3 import Stage3

pytestmark = pytest.mark.thorough

in_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
SLOW = 1e5  # bytes a second: parameters are a while on their way


class Skips(toys.Transformer):
    """It can leave its blocks out."""

    def __init__(self):
        super().__init__(blocks=5)
        self.used = 5

    def forward(self, inputs, targets=None):
        blocks, self.blocks = self.blocks, self.blocks[: self.used]
        try:
            return super().forward(inputs, targets)
        finally:
            self.blocks = blocks


def made(kind, **options):
    return kind(toys.build(Skips, dist.get_rank(), torch.bfloat16), torch.optim.AdamW, lr=1e-2, **options)


def on_their_way(zero):
    return [bucket for bucket in zero.in_turn() if not bucket.away.is_back]


def edit(zero, folder):
    with zero.gather_parameters(), torch.no_grad():
        zero.model.head.weight[1] += 0.5


def evaluate(zero, folder):
    with torch.inference_mode():
        return [zero.model(toys.tokens(dist.get_rank(), 9)[0]).clone()]


def clip(zero, folder):
    zero.model(*toys.tokens(dist.get_rank(), 5)).backward()
    norm = zero.clip_grad_norm_(0.1)
    zero.step()
    zero.zero_grad()
    return [norm]


def skip_blocks(zero, folder):
    """Gradients of units that forward did not use leave before anybody has asked for their parameters."""
    zero.model.used = 0
    toys.step_of(zero, 5)
    zero.model.used = 5


def state(zero, folder):
    return zero.state_dict()["shards"]


def load(zero, folder):
    zero.load_state_dict(zero.state_dict())


def save(zero, folder):
    saved_state.save(zero, f"{folder}/{type(zero).__name__}")


USES = {use.__name__: use for use in (edit, evaluate, clip, skip_blocks, state, load, save)}


def used_at_once(folder, names):
    """What comes first after a step(), at a stage 3 and at the same offloaded."""
    plain, away = made(Stage3), made(offload.Offloaded3, bus=10 * SLOW)
    for number, name in enumerate(names):
        for zero in (plain, away):
            toys.step_of(zero, number)
        assert len(on_their_way(away)) > 2, "step() waits for the first alone"
        right, ours = (USES[name](zero, folder) for zero in (plain, away))
        assert right is None or toys.identical(right, ours), name
    assert toys.step_of(plain, 99) == toys.step_of(away, 99)
    assert toys.identical(*map(toys.whole_parameters, (plain, away)))


def test_who_comes_first_after_a_step_sees_what_it_has_made(tmp_path):
    toys.run(used_at_once, 2, str(tmp_path), tuple(USES))


def gone_in_between():
    """A stage goes while parameters are on their way to it: seconds until its host process has ended, too."""
    zero = made(offload.Offloaded3, bus=SLOW)
    toys.step_of(zero, 0)
    pid, start = zero.host.process.pid, time.monotonic()
    assert len(on_their_way(zero)) > 2 and alive(pid)
    del zero
    gc.collect()
    ended([pid], seconds=10)
    return time.monotonic() - start


@in_proc
def test_a_host_ends_with_a_stage_that_has_parameters_on_their_way():
    assert max(toys.run(gone_in_between, 1)) < 5


def killed_in_between():
    """What the two forwards after it raise."""
    zero, said = made(offload.Offloaded3, bus=SLOW), []
    toys.step_of(zero, 0)
    assert len(on_their_way(zero)) > 2
    os.kill(zero.host.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            zero.model(*toys.tokens(0, 1))
        said.append((error.type is HostError, str(error.value)))
    return said


@in_proc
def test_after_a_kill_no_forward_goes_on_with_old_parameters():
    [(first, second)] = toys.run(killed_in_between, 1)
    assert first[0] and "the host process of rank 0 is gone (killed by SIGKILL)" in first[1]
    assert second == first and "newest checkpoint" in second[1]
