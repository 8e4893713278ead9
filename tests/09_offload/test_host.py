"""The host process of a rank: what is refused, errors, signals and kills; and what the programs say of it."""

import contextlib
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

from zero_minimal import offload
from zero_minimal.extensions.averages import Average
from zero_minimal.offloading.host_link import Bus, Queues
from zero_minimal.processes.ranks import RankError
from zero_minimal.programs import report
from zero_minimal.programs.offload_flags import Offload

sys.path.insert(0, str(Path(__file__).parent))  # ranks import it too
from offloaded import KILLS, flags_of, in_proc, pair, report_of, until_killed  # noqa: E402


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


# --------------------------------------------------------------------------------------------------------- the programs


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


def test_flags(capsys):
    assert flags_of(2, "--offload", "cpu", "--bus", "12GB/s") == Offload(True, 12e9)
    assert flags_of(0) == Offload()
    wrong = {"--offload cpu, too": (2, "--bus", "1GB/s"), "--offload cpu is, and": (2, "--offload", "disk"),
             "stage 0 has no shards": (0, "--offload", "cpu"), "a size above 0": (1, "--offload", "cpu", "--bus", "0")}
    for words, given in wrong.items():
        with pytest.raises(SystemExit):
            flags_of(*given)
        assert words in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------- kills


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
