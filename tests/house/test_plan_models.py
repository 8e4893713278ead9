"""`plan --model` takes what `plan` for our GPT takes: micro-batches, kinds of attention, gradients in fp32, offload, a
table, a DeepSpeed file. Each beside running code, with the stand-in of test_foreign_models.py."""

import dataclasses
import functools
import json

import pytest
from house.test_foreign_models import LARGE, library, written  # noqa: F401  fixtures

from zero_minimal.__main__ import main
from zero_minimal.paper.quantities import size_text
from zero_minimal.programs import deepspeed_keys, measured
from zero_minimal.programs.cases import Case
from zero_minimal.programs.deepspeed import Wanted
from zero_minimal.programs.measured import measure
from zero_minimal.programs.planning import plan
from zero_minimal.programs.simulation import simulate
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.settings import Settings

pytestmark = pytest.mark.thorough

LEAST, MOST = 0.92, 1.02  # the code's peak over the plan's
SCORES = 2 * 8 * 256**2 * 2  # bytes of a matrix of scores: batch, heads, tokens, bf16


@dataclasses.dataclass(frozen=True)
class With(ForeignModel):
    """A model that has this attention wherever it is built: for running code."""

    attention: str = "sdpa"

    def on_meta(self, dtype=None, **how):
        return super().on_meta(dtype, attention=self.attention)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """A test plans the same model several times."""
    monkeypatch.setattr(measured, "measure", functools.cache(measure))


def planned(model, dtype="bf16", batch=2, ranks=4, **options):
    return plan(model, ranks, 32e9, dtype, batch, **options)


@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_beside_running_code(stage, written):  # noqa: F811
    model = ForeignModel(written(**LARGE, tie_word_embeddings=stage == 3), 256, recompute=False)
    row = planned(model, batch=4, accumulate=3)["rows"][stage]
    run = simulate(Case(model, stage, 4, "bf16", 4, accumulate=3)).report
    assert LEAST < run["memory"]["peak"] / row["together"] < MOST
    assert row["sent_bytes"] == run["traffic"]["theory_bytes"]
    once, thrice = (planned(model, batch=4, accumulate=count)["compute_seconds"] for count in (1, 3))
    assert thrice == pytest.approx(3 * once)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_offload_beside_running_code(stage, written):  # noqa: F811
    model = ForeignModel(written(**LARGE), 64)
    row = planned(model, offload="cpu", accumulate=2)["offload"]["rows"][stage - 1]
    run = simulate(Case(model, stage, 4, "bf16", 2, accumulate=2, offload="cpu")).report
    assert row["host"] == pytest.approx(run["host_memory"], rel=2e-3)  # the code pads
    for way in ("to_host", "to_device"):
        assert row[way] == pytest.approx(run["bus"][way], rel=2e-3)
    on_disk = planned(model, offload="disk", accumulate=2)["offload"]["rows"][stage - 1]
    assert (on_disk["disk"], on_disk["host"]) == (row["host"], 0) and on_disk["together"] == row["together"]


@pytest.mark.parametrize("recompute", (False, True))
def test_attention_that_is_not_fused_beside_running_code(recompute, written):  # noqa: F811
    file, told = written(**LARGE), {}
    for kind, name in (("fused", "sdpa"), ("unfused", "eager"), ("recomputed", "recomputed")):
        told[kind] = planned(ForeignModel(file, 256, recompute), attention=kind)
        assert told[kind]["attention_measured"] == kind
        peak = simulate(Case(With(file, 256, recompute, name), 1, 4, "bf16", 2)).report["memory"]["peak"]
        assert LEAST < peak / told[kind]["rows"][1]["together"] < MOST, kind
    kept = {kind: each["activations"]["all"] for kind, each in told.items()}
    assert kept["unfused"] - kept["recomputed"] == LARGE["num_hidden_layers"] * SCORES
    assert kept["recomputed"] == pytest.approx(kept["fused"], rel=0.02)
    products = {kind: each["attention_operations"] for kind, each in told.items()}
    times = [1 + 5 / 2 + recompute, 1 + 2 + recompute, 1 + 2 + 1]  # of forward's; a fused one skips half
    assert [2 * products["fused"], products["unfused"], products["recomputed"]] == pytest.approx(
        [products["unfused"] / times[1] * each for each in times])
    assert len({each["matrix_operations"] for each in told.values()}) == 1


def test_a_model_without_fused_attention_is_said_to_have_none(written, capsys):  # noqa: F811
    plain = measure(ForeignModel(written(**LARGE), 64), 2, "bf16", "unfused")
    file = written("standin-unfused", **LARGE)
    assert measure(ForeignModel(file, 64), 2, "bf16", "fused") == plain and plain.attention == "unfused"
    main(["plan", "--model", file, "--sequence", "64", "--ranks", "4", "--dtype", "bf16"])
    said = " ".join(capsys.readouterr().out.split())
    assert "has no fused attention for this model. Attention measured: unfused" in said


def test_the_command_says_and_writes_what_was_asked_for(written, tmp_path, capsys):  # noqa: F811
    model, ds, told = written(**LARGE), tmp_path / "ds.json", tmp_path / "plan.json"
    flags = ["plan", "--model", model, "--sequence", "64", "--batch", "2", "--ranks", "4", "--accumulate", "3",
             "--attention", "recomputed", "--recompute", "--json", str(told), "--write-deepspeed-config", str(ds)]
    main([*flags, "--dtype", "fp16", "--offload", "cpu", "--stage", "3"])
    said = capsys.readouterr().out
    figures = json.loads(told.read_text())
    assert max(len(line) for line in said.splitlines() if not line.startswith("    ") and "/" not in line) <= 80
    words = " ".join(said.split())
    for part in ("A step is 3 micro-batches", "own unfused code, computed again in backward", "offloaded, ",
                 f"--model {model} --sequence 64 --recompute", "(but its attention is fused):",
                 "for block in model.layers:", "model(**next(batches)).loss / 3", "gradient_checkpointing_enable()"):
        assert part in words, part
    asked = Wanted(deepspeed_keys.read(str(ds)), {}, {"batch": 8, "accumulate": 1, "dtype": "fp32"}, 4)
    assert asked.stage == 3 and asked.flags["offload"] == "cpu" and asked.fp16["initial_scale_power"] == 16
    assert (asked.flags["batch"], asked.flags["accumulate"], asked.flags["dtype"]) == (2, 3, "fp16")
    content = json.loads(ds.read_text())["zero_optimization"]
    assert content["stage3_max_live_parameters"] == figures["root"] + 2 * figures["largest_unit"]

    main([*flags, "--dtype", "bf16", "--gradients", "fp32", "--markdown"])
    said = capsys.readouterr().out
    row = json.loads(told.read_text())["rows"][2]
    assert f"| {size_text(row['gradients'])} |" in said and "attention recomputed, as measured" in said
    assert "DeepSpeed reads it. The stage scripts refuse it: gradients here" in " ".join(said.split())
    with pytest.raises(ValueError, match="communication_data_type"):
        Wanted(deepspeed_keys.read(str(ds)), {}, vars(Settings()) | {"offload": None}, 4)
