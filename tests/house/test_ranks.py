"""Ranks start, answer and end together, whatever happens on one of them: from a Python process and under torchrun."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import ended
from thorough import sample

from zero_minimal.core import collectives
from zero_minimal.processes import ranks
from zero_minimal.processes.ranks import RankError

ROOT = Path(__file__).resolve().parents[2]
SOON = 30  # seconds: far more than any of this takes, far less than the limits that would end a hang


@pytest.fixture(autouse=True)
def soon():
    """Nothing here waits for a time limit: neither the 300 s of a collective nor the 60 s of a run."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 2 * SOON


# -------------------------------------------------------------------------------------------- results, fresh ranks


def introduce(*args, **kwargs):
    with ranks.start() as rank:  # the group is up already
        total = torch.tensor([rank.rank + 1.0])
        collectives.all_reduce(total, op="sum")
    assert dist.is_initialized()
    return rank, args, kwargs, total.item(), torch.get_num_threads(), torch.initial_seed(), os.getpid()


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_results(world_size):
    torch.manual_seed(12345)
    results = ranks.run(introduce, world_size, 1, "two", device="cpu", key=[3])
    assert [rank.rank for rank, *_ in results] == list(range(world_size))
    for rank, args, kwargs, total, threads, seed, process_id in results:
        assert (rank.world_size, rank.local_rank, rank.backend) == (world_size, rank.rank, "gloo")
        assert rank.device == torch.device("cpu")
        assert (args, kwargs, total) == ((1, "two"), {"key": [3]}, sum(range(1, world_size + 1)))
        assert threads == max(1, (os.cpu_count() or 1) // world_size)
        assert seed != 12345 and process_id != os.getpid()
    assert ended([result[-1] for result in results], SOON)


def test_anything_that_can_be_called():
    offset = torch.tensor([10.0])

    class Adder:
        def __call__(self, number):
            return dist.get_rank() + offset + number

    assert ranks.run(lambda: dist.get_rank() * 2, 2) == [0, 2]
    assert [result.item() for result in ranks.run(Adder(), 2, 5)] == [15.0, 16.0]
    assert ranks.run(dist.get_world_size, 2) == [2, 2]
    assert ranks.run(lambda make: type(make()).__name__, 1, Adder) == ["Adder"]  # classes of a cell travel too


def test_environment_and_path(monkeypatch, tmp_path):
    monkeypatch.setenv("ZERO_MINIMAL_TEST", "here")
    (tmp_path / "only_in_the_test.py").write_text("value = 42")
    monkeypatch.syspath_prepend(str(tmp_path))

    def look():
        import only_in_the_test

        return os.environ["ZERO_MINIMAL_TEST"], only_in_the_test.value, Path.cwd()

    assert ranks.run(look, 2) == [("here", 42, Path.cwd())] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_ranks_finish_their_turn():
    """Also gloo's threads. Without it three ranks on two cores take three times as long."""

    def policies():
        return [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]

    assert os.sched_getscheduler(0) != os.SCHED_BATCH, "the process that asks for ranks stays as it is"
    for seen in ranks.run(policies, 3, device="cpu"):
        assert seen[0] == os.SCHED_BATCH
        assert seen.count(os.SCHED_BATCH) >= len(seen) - 1, "only the thread that waits for the parent is older"


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor(index**2 + 100 * dist.get_rank() if dist.is_initialized() else index**2)


def load():
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    return torch.cat(list(loader)).tolist()


def test_data_loaders_with_workers():
    """Ranks may have children of their own."""
    assert [[number % 100 for number in numbers] for numbers in ranks.run(load, 2)] == [[0, 1, 4, 9, 16, 25]] * 2


def test_two_runs_at_once():
    """No port is fixed, and runs do not mix."""
    results = {}

    def run_it(name):
        results[name] = ranks.run(lambda: (name, dist.get_world_size()), 2)

    threads = [threading.Thread(target=run_it, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert results == {name: [(name, 2)] * 2 for name in "ab"}


def test_sizes_that_make_no_sense():
    for size in (0, -1):
        with pytest.raises(ValueError, match="at least one rank"):
            ranks.run(print, size)


# --------------------------------------------------------------------------------------------- a rank that fails


def with_failure(fail, others, notes):
    """Rank 1 fails; the others are in a collective, compute, or are done already."""
    Path(notes, str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        fail()
    if others == "collective":
        collectives.all_reduce(torch.ones(5))
    elif others == "compute":
        time.sleep(1000)
    return "done"


def fail_with_words():
    raise KeyError("the words")


def fail_in_tensors():
    torch.ones(3) @ torch.ones(4)


class Unsendable(Exception):
    def __init__(self, needed, lock):
        super().__init__(f"unsendable {needed}")
        self.lock = lock


def fail_with_a_lock():
    raise Unsendable(1, threading.Lock())


def interrupt():
    """Heed a SIGINT, and get one: ranks of a pytest that a script started in the background would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


FAILURES = {
    "raises": (fail_with_words, "KeyError: 'the words'", KeyError),
    "raises in torch": (fail_in_tensors, "fail_in_tensors", RuntimeError),
    "raises what cannot be sent": (fail_with_a_lock, "unsendable 1", None),
    "exits": (lambda: sys.exit(3), "SystemExit: 3", SystemExit),
    "exits at once": (lambda: os._exit(5), "exit code 5", None),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", None),
    "crashes": (lambda: ctypes.string_at(0), "SIGSEGV", None),
    "interrupts": (interrupt, "KeyboardInterrupt", KeyboardInterrupt),
}


@pytest.mark.parametrize(
    ("kind", "others"),
    sample([
        *((kind, "collective") for kind in FAILURES),
        *((kind, others) for kind in ("raises", "is killed") for others in ("compute", "done")),
    ], [("raises", "collective"), ("exits at once", "collective"), ("is killed", "compute"), ("raises", "done")]),
)
def test_failure(kind, others, tmp_path):
    fail, words, cause = FAILURES[kind]
    with pytest.raises(RankError, match="rank 1 of 3 failed") as caught:
        ranks.run(with_failure, 3, fail, others, tmp_path, timeout=45)
    assert caught.value.rank == 1
    assert words in str(caught.value)
    assert (type(caught.value.__cause__) if caught.value.__cause__ else None) == cause
    assert ended([int(note.name) for note in tmp_path.iterdir()], SOON)


def test_first_failure_is_named():
    """Rank 2 fails, and rank 0 with it, a little later."""

    def fail():
        if dist.get_rank() == 1:
            collectives.all_reduce(torch.ones(5))  # loses its peers
        time.sleep(0.5 if dist.get_rank() == 0 else 0.0)
        raise ValueError(f"by rank {dist.get_rank()}")

    with pytest.raises(RankError, match="(?s)rank 2 of 3 failed.*by rank 2.*after it, rank .*0.*failed too") as caught:
        ranks.run(fail, 3)
    assert caught.value.rank == 2


def test_arguments_that_cannot_be_sent():
    with pytest.raises(TypeError, match="^print or its arguments .*lock.*into a file of its own, and import that"):
        ranks.run(print, 2, threading.Lock())


def test_results_that_cannot_be_sent():
    with pytest.raises(RankError, match="rank 0 of 2 failed|rank 1 of 2 failed") as caught:
        ranks.run(threading.Lock, 2)
    assert "pickle" in str(caught.value)


def test_hang(tmp_path):
    """The time limit ends all ranks and tells where each one stands."""

    def stand_still():
        Path(tmp_path, str(os.getpid())).touch()
        if dist.get_rank() == 2:
            return
        if dist.get_rank() == 1:
            time.sleep(1000)
        dist.barrier()

    with pytest.raises(TimeoutError, match="rank 0, 1 of 3 had not finished") as caught:
        ranks.run(stand_still, 3, timeout=3)
    assert re.search(r"(?s)rank 0 stands here.*barrier.*rank 1 stands here.*stand_still", str(caught.value))
    assert ended([int(note.name) for note in tmp_path.iterdir()], SOON)


def test_after_a_failure_all_is_well():
    for _ in range(2):
        with pytest.raises(RankError):
            ranks.run(fail_with_words, 2)
    assert ranks.run(dist.get_rank, 2) == [0, 1]


# ------------------------------------------------------------------------------------------- programs of their own


def program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(body))
    return path


def start(tmp_path, *command):
    """Start a program with nothing of this process's own ranks in its environment."""
    strange = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in strange}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment, cwd=tmp_path, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


def finish(process):
    """Its exit code, stdout and stderr. Nothing of it is left running."""
    try:
        output, errors = process.communicate(timeout=2 * SOON)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


def torchrun(tmp_path, body, count=2):
    script = program(tmp_path, body)
    return finish(start(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, script))


@pytest.mark.thorough
def test_a_script_without_a_main_guard(tmp_path):
    """The ranks do not run the script again, and end with it."""
    script = program(
        tmp_path,
        """
        import torch.distributed as dist
        from zero_minimal.processes import ranks

        print("once")
        factor = 3

        def compute():
            return factor * dist.get_rank()

        print(ranks.run(compute, 2))
        """,
    )
    assert finish(start(tmp_path, script)) == (0, "once\n[0, 3]\n", "")


@pytest.mark.thorough
def test_ranks_end_with_the_process_that_asked_for_them(tmp_path):
    script = program(
        tmp_path,
        f"""
        import os, time
        from pathlib import Path
        from zero_minimal.processes import ranks

        def wait():
            Path({str(tmp_path)!r}, f"{{os.getpid()}}.note").touch()
            time.sleep(1000)

        ranks.run(wait, 2, timeout=900)
        """,
    )
    process, limit = start(tmp_path, script), time.monotonic() + SOON
    try:
        while len(notes := list(tmp_path.glob("*.note"))) < 2:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
    assert ended([int(note.stem) for note in notes], SOON)
    finish(process)


@pytest.mark.thorough
def test_start_alone(tmp_path):
    script = program(
        tmp_path,
        """
        import torch, torch.distributed as dist
        from zero_minimal.core import collectives
        from zero_minimal.processes import ranks

        with ranks.start(device="cpu") as rank:
            ones = torch.ones(3)
            collectives.all_reduce(ones, op="sum")
            print(rank.rank, rank.world_size, rank.device, rank.backend, ones.tolist())
        print(dist.is_initialized())
        with ranks.start(device="cpu") as rank:
            raise ValueError("alone")
        """,
    )
    code, output, errors = finish(start(tmp_path, script))
    assert (code, output) == (1, "0 1 cpu gloo [1.0, 1.0, 1.0]\nFalse\n")
    assert "rank 0 failed: ValueError: alone" in errors


FAILING = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    from zero_minimal.core import collectives
    from zero_minimal.processes import ranks

    with ranks.start(device="cpu") as rank:
        collectives.all_reduce(ones := torch.ones(3))
        Path({notes!r}, f"{{os.getpid()}}.note").touch()
        if rank.rank == 1:
            {failure}
        {others}
    print("never")
    """


@pytest.mark.parametrize(
    ("failure", "others", "words"),
    [
        pytest.param("raise ValueError('the reason')", "collectives.all_reduce(ones)",
                     "rank 1 failed: ValueError: the reason", marks=pytest.mark.thorough),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "collectives.all_reduce(ones)", "SIGKILL",
                     marks=pytest.mark.thorough),
        pytest.param("sys.exit(7)", "time.sleep(1000)", r"exitcode\s*: 7", marks=pytest.mark.thorough),
    ],
    ids=("raises", "is killed", "exits"),
)
def test_failure_under_torchrun(failure, others, words, tmp_path):
    code, output, errors = torchrun(tmp_path, FAILING.format(notes=str(tmp_path), failure=failure, others=others))
    assert code != 0 and "never" not in output
    assert re.search(words, errors), errors
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)|rank 1 failed", errors), errors
    assert len(notes := list(tmp_path.glob("*.note"))) == 2
    assert ended([int(note.stem) for note in notes], SOON)


@pytest.mark.thorough
def test_under_torchrun(tmp_path):
    code, output, errors = torchrun(
        tmp_path,
        """
        import torch
        from zero_minimal.core import collectives
        from zero_minimal.processes import ranks
        from zero_minimal.stage3 import Stage3

        with ranks.start(device="cpu") as rank:
            model = torch.nn.Linear(3, 2)
            zero = Stage3(model, torch.optim.SGD, lr=0.1)
            model(torch.randn(4, 3)).sum().backward()
            zero.step()
            with zero.gather_parameters():
                mine = model.weight.detach().sum().reshape(1)
            largest, mean = mine.clone(), mine.clone()
            collectives.all_reduce(largest, op="max")
            collectives.all_reduce(mean)
            assert torch.allclose(largest, mean, rtol=1e-6)
            words = f"rank {rank.rank} of {rank.world_size} on {rank.device} speaks {rank.backend}"
            print(words + "\\n", end="", flush=True)
        """,
    )
    assert code == 0, errors
    assert sorted(output.split("\n")) == ["", *(f"rank {rank} of 2 on cpu speaks gloo" for rank in (0, 1))]
    assert "Warning" not in errors
