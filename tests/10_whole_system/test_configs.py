"""The programs of lesson 10: the five configs, what they report, their largest models, and what they refuse."""

import json
from dataclasses import replace

import pytest
import torch
import toys
from matplotlib.image import imread
from torch import optim

from zero_minimal import __main__ as program
from zero_minimal.checkpoint import saved_state
from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.core.mesh import make_mesh
from zero_minimal.processes import ranks
from zero_minimal.programs import configs
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Settings
from zero_minimal.zero_100b import CONFIGS, System


def reports(name):
    settings = Settings(layers=3, hidden=24, heads=4, sequence=16, batch=2, steps=4, bucket_mb=0.02)
    with ranks.start() as rank:
        return configs.train(name, settings, 2, rank)


def trains_in_16_bit(dtype):
    sizes = dict(layers=2, hidden=24, heads=4, sequence=16, batch=2, steps=6, lr=0.1)  # 0.001 to 0.006 in the warm-up
    settings = Settings(**sizes, dtype=dtype, accumulate=2, clip=1.0)
    with ranks.start() as rank:
        return [configs.train(name, settings, 2, rank)["losses"] for name in ("C1", "C5")]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
def test_trains_in_16_bit_clipped_and_accumulating(dtype):
    for one, other in toys.run(trains_in_16_bit, 2, dtype):
        assert len(one) == 6 and one[-1] < one[0] - 0.05
        assert other == pytest.approx(one, rel=2e-3)


def saves_a_skipped_step(folder):
    sizes = GPTConfig(layers=1, hidden=8, heads=2, sequence=16)
    system = System("C3", sizes, make_mesh(1), 2, torch.float16, "cpu", optim.SGD, lr=0.1)
    scaler = LossScaler(initial_scale=2.0**40, groups=system.groups)
    scaler.scale(system.model(*toys.tokens(0, 0))).backward()
    assert not scaler.step(system)
    saved_state.save(system, folder)
    return saved_state.load(system, folder)


def test_a_skipped_step_can_be_saved(tmp_path):
    toys.run(saves_a_skipped_step, 1, tmp_path)


@pytest.mark.thorough
def test_reports_hold_the_model_states_of_the_formula():
    found = {name: toys.run(reports, 4, name) for name in ("C1", "C4", "C5")}
    for name, reported in found.items():
        for report in reported:
            parameters, memory = 4 * report["parameters_of_rank"], report["memory"]
            padding = 0.05 * parameters
            assert parameters <= memory["parameters"] <= parameters + padding
            share = 1 if name == "C1" else 2
            assert parameters / share <= memory["gradients"] <= parameters / share + padding, name
            assert parameters <= memory["optimizer"] <= parameters + padding  # 8 bytes of 2 ranks
        peaks = [found[name][0]["memory"]["peak_by_category"]["activations"] for name in ("C1", "C4")]
    assert peaks[1] < peaks[0]


@pytest.mark.thorough
def test_compare_configs(tmp_path):
    sizes = ["--layers=2", "--hidden=24", "--heads=4", "--sequence=16", "--batch=2", "--steps=3"]
    files = [f"--json={tmp_path / 'rows.json'}", f"--plot={tmp_path / 'plot.png'}"]
    program.main(["compare", "--configs", "--ranks=2", "--device=cpu", *sizes, *files])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(CONFIGS)
    assert all(row["losses"] == rows[0]["losses"] for row in rows)
    assert imread(tmp_path / "plot.png").shape[0] > 500


def test_the_largest_model_is_the_largest(monkeypatch):
    def run(name, settings, *rest):  # memory that is not quite linear in the blocks, as in a real run
        return {"memory": {"peak": 1000 + 300 * settings.layers + 130 * (settings.layers % 3)}}

    monkeypatch.setattr(configs, "run", run)
    for budget in range(1430, 9000, 37):
        layers = configs.largest_model("C3", Settings(), 2, 2, budget, "cpu")
        peaks = [run("", replace(Settings(), layers=count))["memory"]["peak"] for count in (layers, layers + 1)]
        assert peaks[0] <= budget < peaks[1]
    with pytest.raises(ValueError, match="one block takes"):
        configs.largest_model("C3", Settings(), 2, 2, 1429, "cpu")


@pytest.mark.parametrize("flags, words", [
    (["--ranks=3"], "accepted: 1, 3"),
    (["--ranks=2", "--heads=3", "--hidden=24"], "cannot be shared"),
    (["--ranks=2", "--recompute"], "always recompute"),
])
def test_what_cannot_be_trained_is_refused(flags, words, capsys):
    with pytest.raises(SystemExit):
        program.main(["compare", "--configs", "--device=cpu", *flags])
    assert words in capsys.readouterr().err
