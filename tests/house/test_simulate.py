"""Simulation: the stages' code as one rank of many on fake tensors."""

import dataclasses
import io
import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
import toys
from matplotlib.image import imread
from thorough import sample
from torch import nn

from zero_minimal import __main__ as program
from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs.cases import Case, phases
from zero_minimal.programs.registry import STAGES
from zero_minimal.programs.simulate import describe, watched
from zero_minimal.programs.simulation import simulate
from zero_minimal.programs.train import train
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import Settings

SMALL = GPTConfig(layers=3, hidden=48, heads=3, sequence=16, dropout=0.0)  # 48 does not divide by 16 · 4 elements


# ---------------------------------------------------------------------------------------- beside ranks that are real


def reports_of_all_stages(dtype):
    """Rank 0's report of two real steps with each stage."""
    sizes = {name: getattr(SMALL, name) for name in ("layers", "hidden", "heads", "sequence")}
    settings = Settings(**sizes, batch=2, steps=2, dtype=dtype, bucket_mb=0.05)
    with ranks.start() as rank:
        return [train(stage, settings, rank) for stage in STAGES]


@pytest.mark.thorough
@pytest.mark.parametrize(("world_size", "dtype"), sample([(1, "fp32"), (2, "fp16"), (4, "bf16")], [(4, "bf16")]))
def test_simulated_model_states_are_those_of_real_ranks_to_the_byte(world_size, dtype):
    for stage, real in enumerate(toys.run(reports_of_all_stages, world_size, dtype)[0]):
        case = Case(SMALL, stage, world_size, dtype, batch=2, bucket_bytes=int(0.05 * 2**20))
        simulated = simulate(case).report
        for state in formulas.STATES:
            if (dtype, stage, state) == ("fp16", 3, "parameters"):
                continue  # a step that overflows is skipped, and leaves units whole: that depends on the text
            assert simulated["memory"][state] == real["memory"][state], f"stage {stage}: {state}"
        assert simulated["theory"] == real["theory"] and simulated["padding"] == real["padding"]
        if dtype != "fp16":  # there the scaler skips a real step that overflows
            assert simulated["traffic"]["sent_bytes"] == real["traffic"]["sent_bytes"]
            peak = real["memory"]["peak"] - real["memory"]["peak_by_category"]["other"]  # the text
            # gloo's reduce-scatter needs scratch: parts that arrive, and all of them and their sum in fp32
            shard = 4 * (12 * 48**2 + 13 * 48) / world_size
            assert 0 <= peak - simulated["memory"]["peak"] <= 1.01 * shard * 2 * world_size


@pytest.mark.thorough
def test_every_rank_of_an_odd_number_holds_the_same():
    own = simulate(Case(SMALL, 3, 7, "bf16", rank=5)).report
    first = simulate(Case(SMALL, 3, 7, "bf16")).report
    assert own["memory"] == first["memory"] and own["rank"] == 5


# ------------------------------------------------------------------------------------------------ what is told of it


@pytest.fixture(scope="module")
def run():
    """Stage 3 of a model of 100 million parameters, on 1024 ranks."""
    config = GPTConfig(layers=4, hidden=1408, heads=11, sequence=32, vocabulary=2000, dropout=0.0, recompute=True)
    return simulate(Case(config, 3, 1024, "fp16"))


@pytest.mark.thorough
def test_states_are_formula_and_padding(run):
    told = run.report
    for state in formulas.STATES:
        assert told["memory"][state] == told["theory"][state] + told["padding"][state] > 0
    assert sum(told["padding"].values()) < 0.01 * sum(told["theory"].values())


@pytest.mark.thorough
def test_what_cannot_exist_is_null(run):
    told = json.loads(json.dumps(run.report))
    for name in ("losses", "step_seconds", "tokens_per_second"):
        assert told[name] is None
    assert told["traffic"]["wire_bytes"] is None
    assert (told["ranks"], told["stage"], told["dtype"], told["backend"]) == (1024, 3, "fp16", "fake")


@pytest.mark.thorough
def test_a_rank_never_holds_the_whole_model(run):
    """Not in construction either: the root, a unit twice (as it was drawn, and in its bucket), masters, shards."""
    whole, unit, root = 2 * run.report["parameters"], 2 * (12 * 1408**2 + 13 * 1408), 2 * 2034 * 1408
    masters = run.report["memory"]["optimizer"] / 3
    assert unit < run.report["memory"]["construction_peak"] < 2 * unit + root + 2 * masters < 0.6 * whole
    for moment in run.timeline:
        assert moment.bytes["parameters"] < 2.1 * unit + root


@pytest.mark.thorough
def test_the_peak_is_the_highest_moment_and_what_lives_there_adds_up_to_it(run):
    memory = run.report["memory"]
    assert memory["peak"] == max(moment.total - moment.bytes["other"] for moment in run.timeline)
    assert memory["peak"] == sum(memory["peak_by_category"].values())
    assert memory["peak"] == sum(living.bytes * living.count for living in run.at_peak)
    assert memory["peak_when"] == "backward 2" and "backward" in memory["peak_what"]
    assert run.at_peak == sorted(run.at_peak, key=lambda living: -living.bytes * living.count)


@pytest.mark.thorough
def test_it_fits_a_terminal(run):
    wide = dataclasses.replace(SMALL, heads=4, hidden=512, layers=2, vocabulary=50257)
    for simulation in (run, simulate(Case(wide, ranks=1000, model_parallel=4, config="C5", batch=3))):
        assert max(map(len, describe(simulation).splitlines())) <= 80


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["", "C4"])
def test_each_phase_is_told_as_it_begins(config):
    told = []
    case = Case(dataclasses.replace(SMALL, heads=4), 2, 8, model_parallel=2, config=config)
    done = simulate(case, told.append)
    assert told == phases(case) == [name for name, _ in done.phases]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_progress_is_seen_before_anything_is_built(stream, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream())
    seen = []
    monkeypatch.setattr("zero_minimal.programs.simulate.simulate",
                        lambda case, tell: seen.append(sys.stderr.getvalue()) or tell("model"))
    watched(Case(SMALL))
    assert ("0/8" if stream is Terminal else "simulate: 0 of 8 phases") in seen[0]


@pytest.mark.thorough
def test_the_phases_come_in_order(run):
    names = [name for name, _ in run.phases]
    parts = ("forward", "backward", "update")
    assert names == ["model", "stage", *(f"{part} {step}" for step in (1, 2) for part in parts)]
    starts = [start for _, start in run.phases]
    assert starts == sorted(starts)


@pytest.mark.thorough
def test_the_words_hold_the_figures(run):
    text = describe(run)
    assert "N = 1,024" in text and "12Ψ/N" in text and "backward 2" in text
    assert f"{run.report['theory']['optimizer'] / 1e6:,.3f}" in text and "MB of this rank" in text


@pytest.mark.thorough
def test_one_is_not_many_and_formulas_say_what_their_letters_are():
    text = describe(simulate(Case(dataclasses.replace(SMALL, layers=1, heads=1), 2, 1, "bf16")))
    assert "N = 1 rank;" in text and "1 block of" in text and "1 head," in text and "KB of this rank" in text
    case = Case(dataclasses.replace(SMALL, heads=4), 3, 8, "bf16", model_parallel=2)
    text = " ".join(describe(simulate(case)).split())
    assert "rank 0 of 8 = 4 × 2 that share a model" in text and "N in the formulas is 4, Ψ this rank's share" in text


@pytest.mark.thorough
def test_gradients_are_simulated_where_they_are_switched_off():
    case = Case(SMALL, 2, 4, "bf16")
    with torch.no_grad():
        without = simulate(case).report
    assert without["memory"] == simulate(case).report["memory"]


@pytest.mark.thorough
def test_model_parallelism_and_stage_3_together():
    config = dataclasses.replace(SMALL, heads=4, recompute=True)
    told = simulate(Case(config, 3, 8, "bf16", model_parallel=2)).report
    assert 0.5 < told["parameters_of_rank"] / told["parameters"] < 0.6
    for state in formulas.STATES:
        assert told["memory"][state] == told["theory"][state] + told["padding"][state]


@pytest.mark.thorough
def test_a_config_keeps_its_checkpoints_on_the_host_only_in_c5():
    config = dataclasses.replace(SMALL, heads=4, sequence=64)
    told = {name: simulate(Case(config, ranks=8, batch=16, model_parallel=4, config=name)).report["memory"]
            for name in ("C2", "C3", "C4", "C5")}
    checkpoints = 3 * 16 * 64 * 48 * 2  # a block's input each, fp16
    assert told["C5"]["host"] == checkpoints / 4
    assert all(memory["host"] == 0 for name, memory in told.items() if name != "C5")
    saved = told["C3"]["peak"] - told["C4"]["peak"]
    assert 0.5 * checkpoints < saved <= 0.75 * checkpoints
    assert told["C4"]["peak"] > told["C5"]["peak"]


# torch's own checkpoint stops to recompute where it has all that backward needs: before the last all-reduce
@pytest.mark.thorough
@pytest.mark.parametrize(("config", "share"), [("C4", 1), ("", 10 / 12)])
def test_traffic_is_data_parallelism_and_megatrons(config, share):
    model = GPTConfig(layers=8, hidden=64, heads=4, sequence=64, vocabulary=64, dropout=0.0, recompute=True)
    told = simulate(Case(model, 2, 8, "bf16", batch=8, model_parallel=4, config=config)).report["traffic"]
    formula = told["theory_bytes"] + told["padding_bytes"] + share * told["model_parallel_theory_bytes"]
    assert formula < told["sent_bytes"] < 1.08 * formula  # embedding, head and loss come on top


def simulated_in_a_rank():
    with pytest.raises(RuntimeError) as caught:
        simulate(Case(SMALL))
    return str(caught.value)


def test_a_rank_that_is_real_cannot_be_another_one():
    assert "no process group is up" in toys.run(simulated_in_a_rank, 1)[0]


def test_no_trace_is_left():
    assert not dist.is_initialized()
    assert torch.get_default_dtype() == torch.float32
    assert torch.ones(2).sum().item() == 2
    linear = nn.Linear(2, 2)
    assert linear.weight.abs().sum().item() > 0


WRONG = {
    "ranks": (dict(ranks=0), "from 1 up"),
    "rank": (dict(ranks=4, rank=4), "from 0 to 3"),
    "groups": (dict(ranks=6, model_parallel=4), "accepted: 1, 2, 3, 6"),
    "heads": (dict(ranks=8, model_parallel=2), "accepted: 1, 3"),
    "dtype": (dict(dtype="fp8"), "fp32, bf16, fp16"),
    "stage": (dict(stage=4), "0, 1, 2 or 3"),
    "config": (dict(config="C6"), "C1, C2, C3, C4, C5"),
    "attention": (dict(attention="flash"), "attention must be one of fused"),
    "attention, cut": (dict(ranks=3, model_parallel=3, attention="unfused"), "--attention changes the GPT"),
    "attention, C4": (dict(ranks=3, model_parallel=3, config="C4", attention="unfused"), "--attention changes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_simulated_is_answered_with_what_can(name):
    wrong, accepted = WRONG[name]
    with pytest.raises(ValueError, match=accepted):
        Case(SMALL, **wrong)


@pytest.mark.thorough
def test_the_command(tmp_path, capsys):
    program.main(["simulate", "--params=3M", "--sequence=32", "--ranks=1024", "--stage=2", "--dtype=bf16",
                  f"--json={tmp_path / 'run.json'}", f"--plot={tmp_path / 'run.png'}"])
    told = json.loads((tmp_path / "run.json").read_text())
    positions_less = (1024 - 32) * told["settings"]["model"]["hidden"]
    assert told["stage"] == 2 and told["parameters"] + positions_less == pytest.approx(3e6, rel=1e-3)
    text = capsys.readouterr().out
    assert "N = 1,024" in text and "Attention is fused" in " ".join(text.split())
    pixels = imread(tmp_path / "run.png")
    assert pixels.shape[0] > 700 and pixels[..., :3].std() > 0.1


# ----------------------------------------------------------------------------------- stages and models of one's own


OWN = """
from torch.optim import AdamW
from zero_minimal.stage3 import Stage3


def build(model, group, budget):
    return Stage3(model, AdamW, group=group, **budget.options)
"""
A_CLASS = "from zero_minimal.stage3 import Stage3\n\n\nclass Mine(Stage3):\n    pass\n"
SIZES = ["--layers", "2", "--hidden", "64", "--vocabulary", "100", "--sequence", "16", "--ranks", "8"]


@pytest.mark.thorough
@pytest.mark.parametrize("text", [OWN, A_CLASS], ids=["function", "class"])
def test_a_stage_from_a_file_is_simulated_as_that_of_the_course(tmp_path, capsys, text):
    (file := tmp_path / "mine.py").write_text(text)
    for stage, name in (("3", "stage3.json"), (str(file), "own.json")):
        program.main(["simulate", *SIZES, "--stage", stage, "--json", str(tmp_path / name)])
    course, own = (json.loads((tmp_path / name).read_text()) for name in ("stage3.json", "own.json"))
    assert own["name"] == "mine" and "mine, rank 0 of N = 8 ranks" in capsys.readouterr().out
    assert own["memory"] == course["memory"] and own["traffic"] == course["traffic"]


@pytest.mark.parametrize("text, says", [
    ("def build(model):\n    pass\n", "build in .* must take three arguments"),
    ("x = 1\n", "must have a function build"),
    ("def build(", "is not Python"),
])
def test_a_file_that_is_no_stage(tmp_path, capsys, text, says):
    (file := tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit):
        program.main(["simulate", *SIZES, "--stage", str(file)])
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


def test_a_model_of_transformers_needs_that_library(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        program.main(["simulate", "--model", str(tmp_path / "config.json")])
    assert "which is not installed here: pip install 'transformers>=5'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.thorough
def test_a_model_of_transformers(tmp_path, capsys):
    pytest.importorskip("transformers")
    (file := tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64}))
    flags = ["simulate", "--model", str(file), "--sequence", "32", "--ranks", "8", "--dtype", "bf16"]
    program.main([*flags, "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parameters"] == 2 * 100 * 64 + 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64)
    for state in formulas.STATES:
        assert report["memory"][state] == report["theory"][state] + report["padding"][state]
    for more, says in ((["--hidden", "64"], "are those of its file"), (["--mp", "2"], "is not cut over ranks here"),
                       (["--sequence", "65"], "reads at most 64 tokens")):
        with pytest.raises(SystemExit):
            program.main([*flags, *more])
        assert says in " ".join(capsys.readouterr().err.split())
