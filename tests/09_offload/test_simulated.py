"""Offload on fake tensors: what a simulated rank and its host hold and send, beside real ones and the formulas."""

import re
import time
from pathlib import Path

import pytest
import torch
import toys

from zero_minimal import __main__ as program
from zero_minimal.offload import Offloaded3
from zero_minimal.offloading import host_process, simulated_host
from zero_minimal.offloading.host_link import Bus, Parcel
from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs.cases import Case
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.programs.simulate import describe
from zero_minimal.programs.simulation import simulate
from zero_minimal.programs.train import train
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[2] / "lessons/manual/offload.md"
SIZES = dict(layers=2, hidden=48, heads=3, sequence=16)  # 48 does not divide by 16 · 2 elements
SMALL = GPTConfig(**SIZES, dropout=0.0)
BUCKET = 0.05  # MiB: more buckets than the bus has buffers


def real_reports():
    """Rank 0's of two steps offloaded, stages 1 to 3."""
    settings = Settings(**SIZES, batch=2, steps=2, dtype="bf16", bucket_mb=BUCKET)
    with ranks.start() as rank:
        return [train(toys.STAGES[stage], settings, rank, away=Offload(True)) for stage in (1, 2, 3)]


def says(report):
    """The same by formula, padding included: of the rank, of its host, and over the bus."""
    stage, ranks_, dtype = report["stage"], report["ranks"], report["dtype"]
    size = formulas.BYTES[dtype][0]
    padding = report["padding"]["parameters"] / size * (ranks_ if stage == 3 else 1)
    elements = report["parameters"] + round(padding)
    return (formulas.model_states(stage, elements, ranks_, dtype, offloaded=True),
            formulas.host_bytes(elements, ranks_, dtype), formulas.bus_bytes(stage, elements, ranks_, dtype))


def counted(report):
    """What says() says."""
    return {state: report["memory"][state] for state in formulas.STATES}, report["host_memory"], report["bus"]


def test_a_simulated_rank_is_a_real_one_and_the_formula_to_the_byte():
    for stage, real in enumerate(toys.run(real_reports, 2)[0], 1):
        case = Case(SMALL, stage, 2, "bf16", batch=2, bucket_bytes=int(BUCKET * 2**20), offload="cpu")
        simulated = simulate(case).report
        assert counted(simulated) == counted(real) == says(simulated)
        assert simulated["name"] == f"stage {stage}, offloaded"
        for name in ("name", "stage", "theory", "padding", "device_memory"):
            assert simulated[name] == real[name]
        assert simulated["traffic"]["sent_bytes"] == real["traffic"]["sent_bytes"]
        assert simulated["memory"]["host"] == simulated["host_memory"]
        assert simulated["resident"] is None


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_many_ranks_and_model_parallelism(stage):
    config = GPTConfig(layers=2, hidden=48, heads=4, sequence=16, dropout=0.0, recompute=True)
    told = simulate(Case(config, stage, 14, "fp16", model_parallel=2, offload="cpu"))
    padding = round(told.report["padding"]["parameters"] / 2 * (7 if stage == 3 else 1))
    size = padding + told.report["parameters_of_rank"]
    assert told.report["host_memory"] == 14 * size / 7
    assert told.report["bus"] == {"to_host": 2 * size / 7, "to_device": 2 * size / 7}
    assert all(line.endswith(" 0") for line in describe(told).splitlines() if "Ψ/N  " in line)
    plain = simulate(Case(config, stage, 14, "fp16", model_parallel=2))
    assert told.report["traffic"]["sent_bytes"] == plain.report["traffic"]["sent_bytes"]
    # the host's own are not the rank's: these have left, and the bus's four buffers have come
    left = sum(plain.report["memory"][state] - told.report["memory"][state] for state in formulas.STATES)
    assert left == (12 if stage == 1 else 14) * size / 7
    assert told.report["memory"]["optimizer"] == 0


def test_7_5_billion_on_64_ranks():
    shape = GPTConfig(layers=36, hidden=4096, heads=32, sequence=1024, vocabulary=50257, dropout=0.0, recompute=True)
    start = time.process_time()
    told = simulate(Case(shape, 2, 64, "fp16", offload="cpu")).report
    assert time.process_time() - start < 60
    assert 7e9 < told["parameters"] < 8e9 and counted(told) == says(told)
    assert told["host_memory"] == pytest.approx(14 * told["parameters"] / 64, rel=1e-4)


def test_the_command_shows_the_host(tmp_path, capsys):
    flags = ["simulate", "--layers", "1", "--hidden", "32", "--sequence", "16", "--ranks", "8", "--dtype", "bf16"]
    picture = tmp_path / "away.png"
    program.main([*flags, "--stage", "1", "--offload", "cpu", "--plot", str(picture)])
    said = capsys.readouterr().out
    for words in ("stage 1, offloaded", "14Ψ/N", "over the bus, a step, to it", "and back", "on the host"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80
    assert picture.stat().st_size > 10_000
    for wrong, words in (("--stage 0", "--stage 1 --offload cpu"), ("--config C2", "--stage 2 --offload cpu without"),
                         (f"--stage {own_system(tmp_path)}", "let build() in the file return Offloaded3(model")):
        with pytest.raises(SystemExit):
            program.main([*flags, "--offload", "cpu", *wrong.split()])
        assert words in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        program.main([*flags, "--offload", "disk:/x"])
    assert "with --offload cpu" in " ".join(capsys.readouterr().err.split())


def test_the_manuals_command_prints_its_figures(capsys):
    text = PAGE.read_text()
    program.main(re.search(r"^    python -m zero_minimal (simulate .*--offload cpu)$", text, re.MULTILINE)[1].split())
    said = capsys.readouterr().out
    device, host, bus = re.search(r"the rank holds ([\d.]+) MB of model states, its host ([\d.]+) GB, and "
                                  r"([\d.]+) GB cross the bus each way", " ".join(text.split())).groups()
    figures = [float(re.search(rf"^  {words} +([\d.]+)", said, re.MULTILINE)[1]) for words in (
        "together", "masters, gradients, state", "over the bus, a step, to it", "and back")]
    assert figures == [pytest.approx(float(device), abs=0.05), float(host), float(bus), float(bus)]


def own_system(folder):
    file = folder / "mine.py"
    file.write_text("from torch.optim import AdamW\nfrom zero_minimal.offload import Offloaded3\n\n\n"
                    "def build(model, group, budget):\n"
                    "    return Offloaded3(model, AdamW, group=group, **budget.options)\n")
    return file


class Hidden:
    """A system that does not show its host."""

    def __init__(self, model, group, budget):
        self.inner, self.model = Offloaded3(model, torch.optim.AdamW, group=group, **budget.options), model
        self.buckets, self.zero_grad, self.step = self.inner.buckets, self.inner.zero_grad, self.inner.step


def test_what_a_host_keeps_is_told_though_nobody_shows_the_host():
    told = simulate(Case(SMALL, 3, 8, "bf16", build=Hidden, name="hidden")).report
    assert told["memory"]["host"] == pytest.approx(14 * told["parameters"] / 8, rel=0.01) and "bus" not in told


def test_a_system_of_ones_own_may_have_a_host(tmp_path, capsys):
    program.main(["simulate", "--layers", "1", "--hidden", "32", "--sequence", "16", "--ranks", "8", "--stage",
                  str(own_system(tmp_path))])
    assert "masters, gradients, state" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ a host in the same process


class Doubler:
    """A host that sends back the double of what it was given, all of it when it is asked for."""

    def __init__(self, bus: Bus):
        self.bus, self.given = bus, []

    def take(self, parcel: Parcel):
        assert simulated_host.at_work()
        self.given.append(parcel.tensor.clone())
        self.bus.emptied(parcel)

    def give(self, parcel: Parcel):
        for tensor in self.given:
            self.bus.send(("doubled",), 2 * tensor)
        self.bus.send(("all",))


def test_rank_and_host_take_turns_over_a_bus_of_two_buffers():
    bus = simulated_host.bus_to_host(Doubler, 64)
    sent = [torch.full((16,), float(number)) for number in range(7)]
    for tensor in sent:
        bus.send(("take",), tensor)
    bus.send(("give",))
    for tensor in sent:
        parcel = bus.receive()
        assert torch.equal(parcel.tensor, 2 * tensor)
        bus.emptied(parcel)
    assert bus.receive().words == ("all",)
    assert (bus.sent, bus.received) == (7 * 64, 7 * 64)
    with pytest.raises(RuntimeError, match="has nothing to do"):
        bus.receive()
    assert not simulated_host.at_work()


def test_no_trace_is_left():
    simulate(Case(SMALL, 2, 2, "bf16", steps=1, offload="cpu"))
    assert host_process.here is None and not simulated_host.at_work()
