"""The disk behind a host: the same bits, within the budget; a full disk is a message; nothing stays after a kill."""

import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from processes import ended
from thorough import sample
from torch import nn

from zero_minimal import offload
from zero_minimal.offloading import disk_set_up, files
from zero_minimal.offloading.read_ahead import ReadAhead
from zero_minimal.processes.ranks import RankError
from zero_minimal.programs import report
from zero_minimal.programs.offload_flags import Offload

sys.path.insert(0, str(Path(__file__).parent))  # ranks import it too
import offloaded as memory  # noqa: E402

pytestmark = pytest.mark.thorough

BUDGET = 80_000_000
KINDS = {  # of state: as SGD's, that comes with the first step; as Adagrad's, that is there before; with groups
    "sgd": toys.Recipe(optimizer=torch.optim.SGD, options=dict(lr=0.1, momentum=0.9), accumulate=2, no_sync=True),
    "adagrad": toys.Recipe(optimizer=torch.optim.Adagrad, options=dict(lr=0.1, initial_accumulator_value=0.3)),
    "amsgrad": toys.Recipe(options=dict(lr=1e-2, amsgrad=True), bucket_bytes=None, steps=3),  # in a single bucket
}


def all_recipes(stage, names, folder):
    recipes = memory.RECIPES | KINDS
    for name in names:
        memory.same(*memory.both(stage, recipes[name], disk=folder, host_budget=BUDGET))
    return os.listdir(folder)


@pytest.mark.parametrize(("stage", "world_size"), sample(
    [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 1), (3, 3)], [(2, 2), (3, 1)]))
def test_same_bits(stage, world_size, tmp_path):
    names = (*memory.RECIPES, *KINDS)
    assert toys.run(all_recipes, world_size, stage, names, str(tmp_path)) == [[]] * world_size


@pytest.mark.parametrize("stage", sample((1, 2, 3), (3,)))
def test_edits_states_and_checkpoints(stage, tmp_path):
    toys.run(memory.edits_and_states, 2, str(tmp_path), stage, disk=str(tmp_path), host_budget=BUDGET)


class OnFire:
    """A file to which nothing can be written."""

    def read(self, begin, into):
        into.zero_()

    def write(self, begin, tensor):
        raise RuntimeError("the disk is on fire")


def test_a_write_that_failed_is_told_when_the_shard_is_needed():
    stretches = files.laid_out([(64, {"gradient": torch.uint8, "master": torch.uint8})])
    ahead = ReadAhead(OnFire(), 128)
    list(ahead.through(stretches))
    with pytest.raises(RuntimeError, match="on fire"):
        list(ahead.through(stretches))


# ----------------------------------------------------------------------------------------------------------- the budget


class Wide(nn.Module):
    """A million parameters in each block, which compute little."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x.float().square().mean()


def of_host(pid):
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def within(folder, blocks, budget, steps):
    """Train, and look at the host from outside all the while: bytes of state, the most that it had, what it says."""
    zero = offload.Offloaded2(Wide(blocks), torch.optim.AdamW, lr=1e-3, bucket_bytes=2**20, disk=folder,
                              host_budget=budget)
    said, highest, over = zero.host.ask("moved"), [0], threading.Event()

    def look():
        while not over.wait(0.002):
            highest.append(of_host(zero.host.process.pid) - said["program"])

    looking = threading.Thread(target=look)
    looking.start()
    used = []
    for _ in range(steps):
        zero.model(torch.randn(2, 1000, dtype=torch.bfloat16)).backward()
        zero.clip_grad_norm_(1.0)
        zero.step()
        zero.zero_grad()
        used.append(zero.host.ask("moved")["used"])
    over.set()
    looking.join()
    return 12 * 10**6 * blocks, max(highest), used, zero.host.ask("moved")


@memory.in_proc
@pytest.mark.parametrize(("blocks", "steps"), [(5, 3), pytest.param(50, 3, marks=pytest.mark.thorough)])
def test_host_keeps_to_its_budget(blocks, steps, tmp_path):
    """50 blocks: the state is ten times the budget."""
    budget = 60_000_000
    state, highest, used, said = toys.run(within, 1, str(tmp_path), blocks, budget, steps, timeout=120)[0]
    assert 0 < highest <= budget and max(used) <= budget
    assert used[-1] - used[0] < 2e6  # what is there after a step was there before
    assert said["kept"] >= state + 2 * 10**6 * blocks
    assert blocks < 50 or state >= 10 * budget


def refused(folder):
    """What is said on this rank of a budget of one byte, and the loss of a step with the one that this names."""
    with pytest.raises(ValueError) as error:
        memory.pair(2, disk=folder, host_budget=1)
    smallest = re.search(r"([\d.,]+) MB is the smallest", str(error.value))[1].replace(",", "")
    zero = memory.pair(2, disk=folder, host_budget=round(float(smallest) * 1e6))[1]
    return str(error.value), toys.step_of(zero, 0)


@memory.in_proc
def test_a_budget_that_cannot_be_met_is_refused_with_the_smallest(tmp_path):
    for words, loss in toys.run(refused, 2, str(tmp_path)):
        assert "--bucket-mb" in words and isinstance(loss, float)


# ------------------------------------------------------------------------------------------------------ what is refused


def limited(folder, size):
    """A stage of which rank 1's host may make no file of more bytes; what is said on this rank."""
    original = disk_set_up.set_up

    def with_limit(stage, *given):
        if dist.get_rank() == 1:
            resource.prlimit(stage.host.process.pid, resource.RLIMIT_FSIZE, (size, size))
        original(stage, *given)

    disk_set_up.set_up = with_limit
    with pytest.raises(OSError) as error:
        memory.pair(3, disk=folder)
    model = toys.build(toys.Transformer, dist.get_rank(), torch.bfloat16)
    with pytest.raises(OSError):
        offload.Offloaded2(model, torch.optim.AdamW, lr=1e-2, disk=folder)
    disk_set_up.set_up = original
    zero = offload.Offloaded2(model, torch.optim.AdamW, lr=1e-2, disk=folder)  # the model is as it was
    toys.step_of(zero, 0)
    return str(error.value)


def test_a_full_disk_is_told_on_all_ranks_at_the_start(tmp_path):
    """A limit of the size of files stands for a full disk."""
    for words in toys.run(limited, 2, str(tmp_path), 4096):
        assert "too full: rank 1 keeps" in words and "make room" in words


@memory.in_proc
@pytest.mark.skipif(not shutil.which("unshare"), reason="mounts a small disk of its own")
def test_a_disk_that_is_really_full(tmp_path):
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a disk of his own")
    root = Path(__file__).parents[2]
    train = (f"mount -t tmpfs -o size=64k none {tmp_path} && {sys.executable} zero_minimal/offload.py --device cpu "
             f"--layers 2 --hidden 64 --heads 2 --steps 2 --dtype bf16 --offload disk:{tmp_path}")
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", train], cwd=root, capture_output=True, text=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"})
    assert done.returncode != 0 and "make room" in done.stderr and "SIGBUS" not in done.stderr


def a_late_error(folder):
    file = files.File(folder, 2**20)
    limit = 2**16
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    file.write(0, torch.zeros(limit, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="could not write to its file in .*newest checkpoint"):
        file.write(limit, torch.zeros(64, dtype=torch.uint8))


def refusals(folder):
    for place in (f"{folder}/nowhere", __file__):
        with pytest.raises(OSError, match="Give a folder that is there"):
            memory.pair(1, disk=place)
    for words, options in {"give disk=FOLDER, too": dict(host_budget=10**9),
                           "give bytes, 200e6 say": dict(disk=folder, host_budget=0)}.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            memory.pair(1, **options)
    a_late_error(folder)


def test_what_cannot_be_is_refused(tmp_path):
    toys.run(refusals, 1, str(tmp_path))


def test_flags(capsys, tmp_path):
    disk = f"disk:{tmp_path}"
    asked = memory.flags_of(3, "--offload", disk, "--host-budget", "200MB")
    assert asked == Offload(True, None, str(tmp_path), 200_000_000)
    wrong = {"give --offload disk:FOLDER, too": ("--offload", "cpu", "--host-budget", "1GB"),
             "is no folder": ("--offload", f"{disk}/nowhere"), "disk:FOLDER": ("--offload", "disk:"),
             "a size above 0": ("--offload", disk, "--host-budget", "much")}
    for words, given in wrong.items():
        with pytest.raises(SystemExit):
            memory.flags_of(2, *given)
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("stage", sample((1, 2), (2,)))
def test_the_programs_report_what_the_disk_moves(stage, tmp_path):
    there = Offload(True, None, str(tmp_path), BUDGET)
    plain = toys.run(memory.report_of, 2, stage, 2)[0]
    away = toys.run(memory.report_of, 2, stage, 2, away=there)[0]
    assert away["losses"] == plain["losses"]
    disk, shard = away["disk"], away["bus"]["to_device"]
    crossed = away["bus"]["to_host"] / shard
    borders = 64 * 4 * len(away) + 4096
    for measured, times in ((disk["kept"], 7), (disk["read"], 7 + crossed - 1), (disk["written"], 6 + crossed)):
        assert times * shard <= measured <= times * shard + borders
    assert disk["budget"] == BUDGET and 0 < disk["used"] <= BUDGET
    assert "from the disk, a step" in report.describe(away)


# --------------------------------------------------------------------------------------------------------------- kills


@memory.in_proc
@pytest.mark.parametrize(("whose", "number"), sample(
    [kill for kill in memory.KILLS if kill[1] % 3 == 1], [("rank", 1), ("host", 1)]))
def test_a_kill_leaves_no_file(whose, number, tmp_path):
    pids, folder = tmp_path / "pids", tmp_path / "disk"
    pids.mkdir()
    folder.mkdir()
    start = time.monotonic()
    with pytest.raises(RankError, match="killed by SIGKILL"):
        toys.run(memory.until_killed, 2, 1 + number % 3, str(pids), whose, number / 10, disk=str(folder))
    assert time.monotonic() - start < 20
    found = [int(word) for file in pids.iterdir() for word in file.read_text().split()]
    assert len(found) == 4 and ended(found)
    assert list(folder.iterdir()) == []


def held(folder):
    """Files under a folder, with a name or without, that processes hold open."""
    zero = memory.pair(2, disk=folder)[1]
    toys.step_of(zero, 0)
    opened = [os.readlink(link) for link in Path(f"/proc/{zero.host.process.pid}/fd").iterdir()]
    maps = Path(f"/proc/{zero.host.process.pid}/maps").read_text()
    return [name for name in opened if name.startswith(folder)], os.listdir(folder), folder in maps


@memory.in_proc
def test_the_file_has_no_name_and_is_not_mapped(tmp_path):
    [(opened, listed, mapped)] = toys.run(held, 1, str(tmp_path))
    assert len(opened) == 1 and opened[0].endswith("(deleted)") and listed == [] and not mapped
