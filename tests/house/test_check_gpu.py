"""check-gpu: its parts run on the CPU (--dry), one that hangs or crashes is a line, and what it says follows from what
was measured. The branches for a GPU themselves: test_gpu_branches.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import processes
import pytest
import torch

from zero_minimal.meters import device_trace, gpu
from zero_minimal.offloading.pinned_link import Copy
from zero_minimal.programs import check_gpu
from zero_minimal.programs.gpu import agreement, copies, ledger_check
from zero_minimal.programs.gpu.parts import PARTS, function_of
from zero_minimal.programs.gpu.place import Place

MANUAL = Path(__file__).parents[2] / "lessons/manual"
ONE_GPU = Place(gpus=1)


@pytest.fixture(autouse=True)
def environment_stays():
    with mock.patch.dict(os.environ):
        yield


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = check_gpu.main([])
    assert said == check_gpu.NO_GPU and "\n" not in said and "--dry" in said


def test_the_limits_are_eight_minutes():
    assert sum(part.limit for part in PARTS.values()) <= check_gpu.ALL == 480
    assert all(callable(function_of(name)) for name in PARTS)


def test_an_unknown_part_is_refused():
    with pytest.raises(SystemExit):
        check_gpu.main(["--dry", "--parts", "nothing"])


# ------------------------------------------------------------------------------------------------- one that goes wrong


@pytest.mark.thorough
def test_one_that_hangs_is_ended_with_all_that_it_has_started():
    program = ("import subprocess, sys, time\n"
               "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
               "print(child.pid, flush=True)\ntime.sleep(60)")
    began = time.monotonic()
    code, said = check_gpu.process([sys.executable, "-c", program], 3.0)
    assert code is None and time.monotonic() - began < 20
    assert processes.ended([int(said)]), "what it has started still runs"


@pytest.mark.parametrize(("program", "code", "why"), (
    ("raise KeyError('no such thing')", 1, "KeyError: 'no such thing'"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, "Fatal Python error: Segmentation fault"),
    ("import os; os._exit(3)", 3, ""),
))
def test_the_last_words_of_one_that_fails(program, code, why):
    ended, said = check_gpu.process([sys.executable, "-c", program], 20)
    assert ended == code and check_gpu.last_words(said) == why


@pytest.mark.parametrize(("ended", "said", "row"), (
    (None, "after 5 s rank 0 of 1 had not finished", {"status": "failed", "why": "not done after 75 s"}),
    (1, "Traceback\nRuntimeError: NCCL\n  more", {"status": "failed", "why": "RuntimeError: NCCL"}),
    (0, "", {"status": "failed", "why": "ended with 0"}),
))
def test_a_part_that_fails_is_a_row(ended, said, row, monkeypatch):
    monkeypatch.setattr(check_gpu, "process", lambda command, limit: (ended, said))
    found = check_gpu.run_part("memory", ONE_GPU, 400.0)
    assert {name: found[name] for name in row} == row and found["output"] == said


def test_parts_for_several_gpus_and_for_later_are_left_out():
    assert check_gpu.run_part("overlap", ONE_GPU, 400.0) == {
        "status": "skipped", "why": "needs 2 GPUs, and 1 GPU is here"}
    assert check_gpu.run_part("memory", ONE_GPU, 3.0) == {"status": "skipped", "why": "8 minutes are over"}


def test_who_keeps_the_trace(monkeypatch):
    commands = []
    monkeypatch.setattr(check_gpu, "process", lambda command, limit: commands.append(command) or (1, ""))
    for gpus, name in ((1, "offload"), (2, "overlap")):
        commands.clear()
        check_gpu.run_parts(list(PARTS), Place(gpus, trace="/t.json"))
        assert [command[3] for command in commands if "--trace" in command] == [name]


# ----------------------------------------------------------------------------------------------------- what it measures


def event(cat, name, ts, dur, stream):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def test_what_ran_beside_what():
    to_host, back = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
    work = device_trace.work_of({"traceEvents": [
        event("kernel", "gemm", 0, 100, 7), event("kernel", "add", 100, 50, 7), event("kernel", "gemm", 200, 100, 7),
        event("gpu_memcpy", to_host, 50, 100, 20), event("gpu_memcpy", to_host, 150, 100, 20),
        event("gpu_memcpy", back, 310, 10, 20), event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 0, 9, 7),
        event("kernel", "ncclDevKernel_AllGather", 290, 40, 30), event("cpu_op", "aten::mm", 0, 500, 1),
        {"ph": "M", "name": "process_name"},
    ]})
    kernels = device_trace.computation(work)
    assert len(kernels) == 3 and len(device_trace.messages(work)) == 1 and len(device_trace.copies(work)) == 3
    assert device_trace.seconds(kernels) == pytest.approx(250e-6)
    assert device_trace.hidden(device_trace.copies(work, "DtoH"), kernels) == pytest.approx(150 / 200)
    assert device_trace.hidden(device_trace.copies(work, "HtoD"), kernels) == 0
    assert device_trace.hidden(device_trace.messages(work), kernels) == pytest.approx(10 / 40)
    assert device_trace.hidden([], kernels) is None


def test_a_trace_of_the_profiler_can_be_kept(tmp_path):
    with device_trace.recorded() as profiler:
        torch.ones(8).sum()
    assert device_trace.work_in(profiler, tmp_path / "trace.json") == []
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_copies_that_began_in_backward_are_counted(monkeypatch):
    monkeypatch.setattr(gpu.StandIn, "is_there", True)
    seen = [Copy(True, 8, 1.0, 2.0), Copy(True, 8, 2.5, 4.0), Copy(False, 8, 5.0, 6.0)]
    told = copies.by_events(seen, (0.0, 2.0), gpu.StandIn())
    assert told == {"copies": 2, "in_backward": 1, "backward": 2.0, "leaving": 2.5, "returning": 1.0}


@pytest.mark.parametrize(("ledger", "allocator", "ok"), ((100, 101, True), (100, 103, False), (103, 100, False),
                                                         (100, 0, None)))
def test_the_ledger_may_be_two_percent_off(ledger, allocator, ok):
    row = {"name": "stage 1", "ledger": {"now": ledger}, "allocator": {"now": allocator}}
    assert ledger_check.check(row, "now", ledger_check.NOW, "now").ok is ok


def test_other_bits_are_off_where_bits_are_wanted():
    rows = [{"name": name, "dtype": "fp32", "losses": [1.0, loss], "sum": 1}
            for name, loss in (("stage 0", 2.0), ("stage 1", 2.0), ("stage 2", 2.00001), ("stage 3", float("nan")))]
    assert agreement.alike("", rows[:2], True).ok and not agreement.alike("", rows[:3], True).ok
    assert agreement.alike("", rows[:3], False).ok and not agreement.alike("", rows, False).ok
    assert "stage 2" in agreement.alike("", rows[:3], True).measured
    assert not agreement.alike("", [rows[0], rows[0] | {"sum": 2}], True).ok, "parameters are compared, too"


# ------------------------------------------------------------------------------------------------------------- the page

ROWS = [
    {"part": "machine", "title": "what is here", "status": "ok", "why": "", "seconds": 3.0,
     "checks": [{"what": "a product", "measured": "0", "wanted": "0", "ok": True}]},
    {"part": "memory", "title": "memory", "status": "off", "why": "stage 0", "seconds": 20.0, "checks": [
        {"what": "stage 0", "measured": "3% apart", "wanted": "within 2%", "ok": False}],
     "rows": [{"name": "stage 0", "ledger": {"peak": 2e9}, "allocator": {"peak": 2.1e9}}]},
    {"part": "offload", "title": "offload", "status": "failed", "why": "not done after 60 s", "seconds": 62.0},
    {"part": "overlap", "title": "NCCL", "status": "skipped", "why": "needs 2 GPUs, and 1 GPU is here", "seconds": 0.0},
    {"part": "throughput", "title": "speed", "status": "ok", "why": "", "seconds": 60.0, "checks": [],
     "rows": [{"name": name, "step_seconds": seconds, "tokens_per_second": 10.0, "allocated": 10**9}
              for name, seconds in (("DDP", 0.02), ("stage 3", 0.01), ("FSDP2", 0.04))]},
]


def test_the_table():
    said = check_gpu.describe(ROWS)
    assert "offload (offload, 62 s): failed: not done after 60 s" in said
    assert "NCCL (overlap, 0 s): skipped: needs 2 GPUs, and 1 GPU is here" in said
    assert "  OFF stage 0: 3% apart (wanted: within 2%)" in said
    assert any(line.split() == ["stage", "3", "10.0", "10", "0.50", "0.25", "1.00"] for line in said.splitlines())
    assert said.endswith("2 ok, 1 off, 1 failed, 1 skipped")


def test_the_manuals_figures_are_those_of_the_run():
    page = (MANUAL / "on-a-gpu.md").read_text()
    parts = {part["part"]: part for part in json.loads((MANUAL / "h100.json").read_text())["parts"]}
    took = {row["name"]: row["step_seconds"] for row in parts["throughput"]["rows"]}
    hidden = {row["name"]: row["hidden"]["DtoH"] for row in parts["offload"]["rows"]}
    for words in (
        f"take {took['stage 0'] / took['DDP']:.2f} and {took['stage 1'] / took['DDP']:.2f} times what DDP takes",
        f"stage 3 takes {took['stage 3'] / took['FSDP2']:.2f} times what FSDP2",
        f"beside kernels ({parts['checkpoints']['rows'][1]['hidden']['DtoH']:.0%} of their time)",
        f"{hidden['stage 2, offloaded']:.0%} of their time at stage 2, {hidden['stage 3, offloaded']:.0%} at stage 3",
    ):
        assert words in " ".join(page.split()), words
    assert {parts[name]["status"] for name in ("nccl", "shared", "memory", "checkpoints", "fragments")} == {"ok"}


@pytest.mark.thorough
def test_the_page_of_pictures(tmp_path, monkeypatch):
    path = tmp_path / "gpu.png"
    assert check_gpu.draw(ROWS, str(path)) is None and path.stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith(("zero_minimal.pictures", "matplotlib."))]:
        monkeypatch.delitem(sys.modules, name)
    assert check_gpu.draw(ROWS, str(path)).startswith("no picture: "), "where matplotlib is absent"


# ---------------------------------------------------------------------------------------------------------- dry runs


@pytest.mark.thorough
def test_dry_memory():
    """One part, in this process: a stand-in in the place of the GPU."""
    found = ledger_check.memory(Place(dry=True))
    assert [row["name"] for row in found["rows"]] == [f"stage {number}" for number in range(4)]
    assert all(row["ledger"]["peak"] >= row["ledger"]["now"] > 0 for row in found["rows"])
    assert all(check["ok"] is None for check in found["checks"]), "nothing to compare it with"


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in PARTS if name not in ("machine", "memory", "nccl")])
def test_dry(name):
    found = function_of(name)(Place(dry=True))
    assert found["checks"] and all(check["ok"] is not False for check in found["checks"])
    assert found["rows"]


@pytest.mark.thorough
def test_the_command_without_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('matplotlib is absent')\n")
    run = subprocess.run(
        [sys.executable, "-m", "zero_minimal", "check-gpu", "--dry", "--parts", "machine,fragments", "--json",
         str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}, capture_output=True,
        text=True, timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ok" in run.stdout and "no picture: ImportError: matplotlib is absent" in run.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["dry"] and [part["status"] for part in written["parts"]] == ["ok", "ok"]
