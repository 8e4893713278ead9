"""What the house is on other systems than Linux, played here; whose it is, and how it is cited."""

import builtins
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure

import zero_minimal
from zero_minimal.classroom import accounts, sandbox
from zero_minimal.meters import timing, traffic
from zero_minimal.pictures.benchmark import draw_speeds
from zero_minimal.pictures.traffic_chart import traffic_panel
from zero_minimal.processes import interrupts, joining, ranks

HOUSE = Path(__file__).parents[2]
PROJECT = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
PAGES = (HOUSE / "README.md").read_text() + (HOUSE / "lessons/manual/systems.md").read_text()


@pytest.fixture
def no_linux(monkeypatch):
    """As on macOS: no /proc, no scheduler to talk to, and a loopback of another name."""

    def hidden(function):
        def look(path, *args, **kwargs):
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            return function(path, *args, **kwargs)

        return look

    for owner, name in ((builtins, "open"), (os, "listdir"), (os, "stat")):
        monkeypatch.setattr(owner, name, hidden(getattr(owner, name)))
    for name in ("FORGET_PEAK", "MACHINE"):
        monkeypatch.setattr(timing, name, Path("/no/such/proc"))
    for name in ("sched_setaffinity", "sched_getaffinity", "sched_setscheduler", "SCHED_BATCH"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0"), (2, "en0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is put back: a rank chooses it itself
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_what_only_linux_tells_is_not_known_elsewhere(no_linux):
    process, cpu = os.getpid(), torch.device("cpu")
    assert accounts.sent_by(process) is None and accounts.held_by(process) is None
    assert accounts.descendants(process) == [] and accounts.end_all_below(process) == 0
    assert traffic.wire_bytes() is None and timing.machine_seconds() is None
    assert timing.start_of_memory(cpu) is None
    assert not sandbox.holds()
    for nothing in (sandbox.end_with_parent, sandbox.no_other_processes, lambda: sandbox.only_files(["/"], [])):
        assert nothing() is None


def test_a_rank_starts_where_there_is_no_linux(no_linux, monkeypatch):
    monkeypatch.setattr(interrupts, "LINUX", False)
    timing.stay_on_one_core(ranks.Rank(0, 1, 0, torch.device("cpu"), "gloo"))
    joining._do_not_preempt()
    joining._speak_over_the_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo0"
    interrupts.end_torchrun()  # it is not found, and left alone


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can become nobody")
def test_root_becomes_nobody_by_calls_that_macos_has(tmp_path):
    program = ("import os, sys; from zero_minimal.classroom import sandbox; del os.setresuid, os.setresgid; "
               "sandbox.give_up_root([], sys.argv[1]); print(os.getuid(), os.geteuid(), os.getgid())")
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, cwd=HOUSE)
    assert done.stdout.split() == [str(sandbox.NOBODY)] * 3, done.stderr


def test_windows_is_told_of_wsl():
    program = "import sys; sys.platform = 'win32'; import zero_minimal"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=HOUSE)
    assert done.returncode and "ImportError: Windows has no fork()" in done.stderr and "WSL" in done.stderr
    assert "inside WSL" in PAGES


def test_a_picture_shows_no_bytes_that_nobody_counted():
    report = [{"seconds": [2.0, 2.0, 9.0], "wire_bytes": None}] * 3
    _, wire = draw_speeds([{"DDP": report}, {"DDP": report}]).axes
    assert [text.get_text() for text in wire.texts] == ["not known here"]
    for counted, words in ((None, "on the wire: not known here"), (1e6, "on the wire")):
        axis = Figure().subplots()
        traffic_panel(axis, [{"traffic": {"sent_bytes": 1e6, "theory_bytes": 1e6, "wire_bytes": counted}}], [0])
        assert words in [text.get_text() for text in axis.get_legend().get_texts()]


def test_versions_and_licence_agree():
    pinned = re.search(r"^torch==(\S+)$", (HOUSE / "requirements.txt").read_text(), re.MULTILINE)[1]
    python = PROJECT["requires-python"].removeprefix(">=")
    assert f"Python {python} or newer" in PAGES and f"torch {pinned}" in PAGES
    citation = yaml.safe_load((HOUSE / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == zero_minimal.__version__
    assert citation["license"] == PROJECT["license"] == "MIT"
    owners = PROJECT["authors"][0]["name"]
    assert citation["authors"] == [{"name": owners}]
    assert f"Copyright (c) 2026 {owners}" in (HOUSE / "LICENSE").read_text()
    assert citation["references"][0]["url"].endswith("/1910.02054")
