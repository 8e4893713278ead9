"""Offload by formula: plan and compare beside small runs, byte for byte; and where a rank waits for its bus."""

import itertools
import json

import pytest
import toys

from zero_minimal import __main__ as program
from zero_minimal.offload import Offloaded2, Offloaded3
from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs import compare, planning, train
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.programs.offload_ladder import RUNGS, stand_on
from zero_minimal.workload import loop
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

CONFIG = GPTConfig(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50257, dropout=0.0, recompute=True)


def offloaded_reports(accumulate):
    """Of stages 1 to 3."""
    settings = Settings(layers=2, hidden=32, heads=2, steps=2, dtype="bf16", accumulate=accumulate)
    with ranks.start() as rank:
        return [train.train(stage, settings, rank, away=Offload(True)) for stage in toys.STAGES[1:]]


@pytest.mark.parametrize("accumulate", (1, pytest.param(3, marks=pytest.mark.thorough)))
def test_runs_hold_and_send_what_the_formulas_say(accumulate):
    for row in toys.run(offloaded_reports, 2, accumulate)[0]:
        says = compare.by_formula(row)
        assert compare.on_device(row) == says["device"]
        assert row["host_memory"] == says["host"]
        assert row["bus"] == {way: says[way] for way in ("to_host", "to_device")}
        assert "(0.00)" not in compare.describe_offloaded([row]).splitlines()[-3]


def test_gradients_cross_once_at_stage_1_and_each_time_at_2_and_3():
    crossed = [formulas.bus_bytes(stage, 1000, 2, "bf16", 4) for stage in (1, 2, 3)]
    assert crossed == [{"to_host": 1000, "to_device": 1000}, *[{"to_host": 4000, "to_device": 1000}] * 2]


def test_the_plan_of_1_5_billion():
    told = planning.plan(CONFIG, 1, 32e9, offload="cpu")["offload"]
    _, second, _ = told["rows"]
    elements = second["to_host"] / 2
    assert 1.5e9 < elements < 1.6e9 and second["device"] == 2 * elements and second["host"] == 14 * elements
    assert second["link_seconds"] == [4 * elements / link for link in planning.LINKS]
    assert second["link_seconds"][0] == pytest.approx(0.5, abs=0.03) and second["fits"]
    assert second["largest_model"] == 16e9
    on_disk = planning.plan(CONFIG, 1, 32e9, offload="disk")["offload"]["rows"][1]
    assert on_disk["disk"] == second["host"] and on_disk["host"] == 0


def test_the_command_plans_offload(tmp_path, capsys):
    file = tmp_path / "plan.json"
    program.main(["plan", "--params", "13B", "--ranks", "16", "--offload", "cpu", "--accumulate", "4",
                  "--json", str(file)])
    said = " ".join(capsys.readouterr().out.split())
    assert "offloaded, GB" in said and "4 micro-batches a step" in said
    adams = file.read_text()
    assert len(json.loads(adams)["offload"]["rows"]) == 3
    program.main(["plan", "--params", "13B", "--ranks", "16", "--offload", "cpu", "--optimizer-bytes", "8",
                  "--json", str(file)])
    with_adam, told = (json.loads(each)["offload"]["rows"][1] for each in (adams, file.read_text()))
    assert with_adam["host"] - told["host"] == pytest.approx(4 * with_adam["host"] / 14)


@pytest.mark.parametrize("number", (1, *(pytest.param(each, marks=pytest.mark.thorough) for each in (0, 2, 3))))
def test_a_rung_holds_what_it_says(number):
    settings = Settings(layers=2, hidden=64, heads=2, sequence=16, batch=1, steps=2, dtype="bf16", bucket_mb=0.1)
    [found] = toys.run(stand_on, 1, RUNGS[number], settings)
    psi = found["parameters"] + found["padding"]
    assert sum(found["ledger"].values()) == found["formula"]["device"] * psi
    assert found["host"] == found["formula"]["host"] * psi
    crosses = 2 * psi if found["host"] else 0
    assert found["bus"]["to_host"] == found["bus"]["to_device"] == crosses


def waits(kind, bus):
    """Seconds that this rank only waits in a step, in forward, backward and step(); and those that the bytes take."""
    settings = Settings(layers=4, hidden=64, heads=2, batch=8, dtype="bf16")
    with ranks.start() as rank:
        zero, found = loop.build(kind, settings, rank, bucket_bytes=20_000, bus=bus), []
        link = zero.host.bus
        for inputs, targets in itertools.islice(loop.training_batches(settings, rank.rank), 3):
            zero.zero_grad()
            crossed, marks = link.sent + link.received, [link.waited]
            loss = zero.model(inputs, targets)
            marks.append(link.waited)
            loss.backward()
            marks.append(link.waited)
            zero.step()
            marks.append(link.waited)
            found.append([after - before for before, after in itertools.pairwise(marks)])
        return [sum(part) / 2 for part in zip(*found[1:], strict=True)], (link.sent + link.received - crossed) / bus


@pytest.mark.parametrize("kind", (Offloaded2, Offloaded3))
def test_a_slower_bus_is_waited_for_longer_and_at_stage_3_in_forward(kind):
    """Relations, no times: a machine that others use makes these uneven."""
    (slow, transfer), (fast, _) = (ranks.run(waits, 2, kind, bus, device="cpu", timeout=100)[0] for bus in (4e5, 4e6))
    assert sum(slow) > sum(fast)
    if kind is Offloaded3:  # all but the first parameters are waited for in forward, if they are; at stage 2 none
        assert slow[0] > 0.1 * transfer
    else:
        assert abs(slow[0]) < 1e-3
