"""Several nodes: two network namespaces with a cable between them, torchrun across it, and what becomes of a run when
the cable or a node is lost. Skipped, with the reason, where the machine makes no namespaces."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zero_minimal.core import collectives
from zero_minimal.processes import failures, joining, ranks
from zero_minimal.programs import bench, train, two_nodes
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
WHY_NOT = two_nodes.why_not()
on_two_nodes = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
SMALL = "--device cpu --layers 1 --hidden 32 --heads 2 --sequence 16 --batch 2 --dropout 0.1".split()


# ------------------------------------------------------------------------------------------------------- what is said


def test_speeds():
    assert [two_nodes.bits(speed) for speed in ("200mbit", "2.5gbit", "1000kbit ")] == [2e8, 2.5e9, 1e6]
    for wrong in ("200", "fast", "mbit", "1..2gbit", "1kbit", "0mbit", "-5mbit", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is no speed of a link: write a number and its unit"):
            two_nodes.bits(wrong)


@pytest.mark.parametrize(("flags", "words"), [
    (["--link", "200"], "'200' is no speed of a link"),
    (["--link", "200mbit", "--ranks", "3"], "--ranks 3 is odd"),
    (["--link", "200mbit", "--sweep", "size"], "--link and --sweep exclude each other"),
    (["--link", "200mbit", "--device", "cuda"], "--link is for ranks on the CPU"),
])
def test_flags_that_do_not_go_together(flags, words, capsys):
    with pytest.raises(SystemExit):
        bench.main(flags)
    assert words in capsys.readouterr().err


def refuse(*_):
    raise PermissionError(1, "Operation not permitted", "unshare")


@pytest.mark.parametrize(("what", "how", "words"), [
    (two_nodes.shutil, ("which", lambda _: None), "the command ip and tc is not here: install the package iproute2"),
    (two_nodes.sys, ("platform", "darwin"), "which Linux alone has"),
    (two_nodes, ("_call", refuse), "network namespaces, and those need root"),
])
def test_why_a_machine_has_no_link(what, how, words, monkeypatch, capsys):
    if what is two_nodes:
        monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(what, *how)
    with pytest.raises(SystemExit):
        bench.main(["--link", "200mbit"])
    assert "--link does not work here: " in (said := capsys.readouterr().err) and words in said


# -------------------------------------------------------------------------------------------------------- the two nodes


def place():
    """Where a rank is, and a sum over all of them."""
    collectives.all_reduce(ones := torch.ones(2**18), op="sum")
    cards = {line.split(":")[0].strip() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]}
    with ranks.start() as rank:
        here = os.readlink("/proc/thread-self/ns/net")
        return ones.mean().item(), cards, here, rank.local_rank, rank.local_world_size


@on_two_nodes
def test_ranks_on_two_nodes_see_the_cable_and_nothing_else():
    with two_nodes.Pair("100mbit") as pair:
        began = time.monotonic()
        results = ranks.run(place, 2, device="cpu", before_join=pair.enter)
        assert time.monotonic() - began > 2**20 * 8 / 100e6, "a MiB each way at 100 Mbit/s"
    assert [(mean, local, here) for mean, _, _, local, here in results] == [(2.0, 0, 1)] * 2
    assert all(cards == {"lo", "eth0"} for _, cards, *_ in results)
    assert len({network for _, _, network, *_ in results} | {os.readlink("/proc/self/ns/net")}) == 3


HOLDS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a script starts in the background ignores it
from zero_minimal.programs import two_nodes
with two_nodes.Pair("100mbit") as pair:
    print(*[__import__("os").fstat(node).st_ino for node in pair.nodes], flush=True)
    {then}
"""


def networks():
    """Numbers of all namespaces that this machine still has, as far as a process or an open file holds them."""
    found = set()
    for link in [*Path("/proc").glob("[0-9]*/task/*/ns/net"), *Path("/proc").glob("[0-9]*/fd/*")]:
        try:
            found |= set(re.findall(r"^net:\[(\d+)\]$", os.readlink(link)))
        except OSError:  # it has ended
            pass
    return found


@on_two_nodes
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_nothing_stays_behind(sent):
    before = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout
    holder = subprocess.Popen([sys.executable, "-c", HOLDS.format(then="time.sleep(100)")], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    with holder:
        nodes = set(holder.stdout.readline().split())
        assert len(nodes) == 2 and nodes <= networks()
        holder.send_signal(sent)
        try:
            holder.wait(timeout=20)
        finally:
            holder.kill()
    assert not nodes & networks()
    assert subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout == before


def test_gloo_takes_the_card_that_leads_to_the_first_node(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for nowhere in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", nowhere)
        joining._speak_over_the_network()
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    if WHY_NOT is None:
        monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
        with two_nodes.Pair("1gbit") as pair:
            for node in (0, 1):
                pair.visit(node, joining._speak_over_the_network)
                assert os.environ.pop("GLOO_SOCKET_IFNAME") == "eth0"


def test_a_store_that_never_answers_holds_nobody_up():
    began = time.monotonic()
    assert failures._within(0.2, lambda: time.sleep(5)) is None and time.monotonic() - began < 2
    assert failures._within(5.0, lambda: 3) == 3 and failures._within(5.0, lambda: 1 / 0) is None


# ------------------------------------------------------------------------------------------------------------ torchrun


class Run:
    """Stage 2 on both nodes of a pair, as its user starts it."""

    def __init__(self, pair, folder, *flags, restarts=0):
        self.files = [folder / f"node {node}" for node in (0, 1)]
        opened = [file.open("w") for file in self.files]
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        self.launchers = [subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
             "--nproc-per-node", "1", "--master-addr", "10.0.0.1", "--max-restarts", str(restarts),
             "--monitor-interval", "0.1", str(ROOT / "zero_minimal/stage2.py"), *SMALL, *flags],
            env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, preexec_fn=pair.on(node),
            stdout=subprocess.DEVNULL, stderr=file,
        ) for node, file in enumerate(opened)]
        for file in opened:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node, launcher in enumerate(self.launchers):
            if launcher.poll() is None:
                self.kill(node)

    def ranks(self, node):
        """The processes that torchrun has started on a node."""
        process = self.launchers[node].pid
        return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]

    def kill(self, node):
        """A node loses its power."""
        for process in [*self.ranks(node), self.launchers[node].pid]:
            os.kill(process, signal.SIGKILL)

    def codes(self):
        return [launcher.wait(timeout=60) for launcher in self.launchers]

    def said(self, node):
        return self.files[node].read_text()


def until_saved(run, folder, steps):
    while not (found := sorted(folder.glob("step-*"))) or int(found[-1].name[5:]) < steps:
        assert run.launchers[0].poll() is None, run.said(0)
        time.sleep(0.02)


def undisturbed():
    with ranks.start() as rank:
        return train.train(Stage2, Settings(layers=1, hidden=32, heads=2, sequence=16, batch=2, dropout=0.1, steps=160),
                           rank)


LOST = re.compile(r"rank \d stops: no rank has said why: one is gone, never came, or")


@on_two_nodes
def test_two_nodes_through_a_dead_cable_and_a_lost_rank(tmp_path):
    """A run loses its link, a second one a rank; each goes on, and the losses are those of a run that nobody
    disturbed, on one node."""
    saved, steps = tmp_path / "saved", ["--steps", "160"]
    saving = ["--save", str(saved), "--every", "10", "--resume", "auto"]
    one = ranks.run(undisturbed, 2, device="cpu")[0]["losses"]
    with two_nodes.Pair("1gbit") as pair:
        with Run(pair, tmp_path, *steps, *saving, "--timeout", "4") as run:
            until_saved(run, saved, 20)
            pair.cable("down")
            began = time.monotonic()
            assert run.codes() == [1, 1]
            assert time.monotonic() - began < 4 + failures.GRACE + 9, "what torchrun needs to end is in it"
            assert LOST.search(run.said(0)) and LOST.search(run.said(1)), run.said(0) + run.said(1)
        pair.cable("up")
        with Run(pair, tmp_path, *steps, *saving, "--json", str(tmp_path / "two"), restarts=1) as run:
            until_saved(run, saved, 70)
            os.kill(run.ranks(1)[0], signal.SIGKILL)
            assert run.codes() == [0, 0], run.said(0)
            assert LOST.search(run.said(0)) and "resumed after" in run.said(0)
    two = json.loads((tmp_path / "two").read_text())
    assert two["resumed_after"] >= 70 and two["losses"] == one[two["resumed_after"] :]


@on_two_nodes
def test_a_node_that_is_killed(tmp_path):
    """The first one, where the ranks have met: their store dies with it."""
    with two_nodes.Pair("1gbit") as pair, Run(pair, tmp_path, "--steps", "100000", "--save", str(tmp_path / "a"),
                                              "--every", "5") as run:
        until_saved(run, tmp_path / "a", 10)
        run.kill(0)
        assert run.launchers[1].wait(timeout=20) == 1
        assert LOST.search(run.said(1)), run.said(1)


@on_two_nodes
def test_bench_behind_two_links(tmp_path, capsys):
    flags = ["--model", "1x32", "--sequence", "16", "--batch", "2", "--steps", "1", "--warm-up", "1", "--repeats", "1"]
    more = ["--only", "stage2", "--link", "20mbit,100mbit", "--json", str(tmp_path / "f.json"), "--plot",
            str(tmp_path / "f.png")]
    assert bench.main([*flags, *more]) is None
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert [(row["name"], row["link_bits_per_second"]) for row in rows] == [
        ("DDP", 2e7), ("stage 2", 2e7), ("DDP", 1e8), ("stage 2", 1e8)]
    for row in rows:  # what a rank sends has gone through the cable, no faster than it is
        assert row["wire_bytes_per_step"] >= row["sent_bytes_per_step"]
        assert row["step_seconds"] > 0.9 * (8 * row["sent_bytes_per_step"] - 2e6) / row["link_bits_per_second"]
    printed = capsys.readouterr().out
    assert re.search(r"time of a step × DDP +20 Mbit/s +100 Mbit/s", printed) and "the wire alone" in printed
