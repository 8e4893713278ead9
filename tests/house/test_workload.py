"""What is trained: the model, its data, the settings and the loop."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from thorough import sample

from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs.train import train
from zero_minimal.stage0 import Stage0
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3
from zero_minimal.workload import data
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.workload.settings import Parser, Settings, add_settings, read_settings

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "batch": 2}
TINY = GPTConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=256)
STAGE_FILE = Path(__file__).parents[2] / "zero_minimal" / "stage2.py"


def batch(seed=0):
    tokens = torch.randint(256, (3, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


# -------------------------------------------------------------------------------------------------------------- model


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    inputs, targets = batch()
    assert abs(GPT(TINY)(inputs, targets).item() - math.log(256)) < 0.3


def test_the_loss_is_the_cross_entropy_of_the_logits():
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    inputs, targets = batch()
    logits = model(inputs)
    assert logits.shape == (3, 16, 256)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(model(inputs, targets), expected)


def test_no_position_sees_what_follows_it():
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    inputs, _ = batch()
    changed = inputs.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    torch.testing.assert_close(model(inputs)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(inputs)[:, 9:], model(changed)[:, 9:])


def test_embedding_and_head_are_one_parameter():
    model = GPT(TINY)
    assert model.head.weight is model.token_embedding.weight
    matrices = 12 * TINY.layers * TINY.hidden**2
    vectors = 13 * TINY.layers * TINY.hidden + 2 * TINY.hidden
    embeddings = (TINY.vocabulary + TINY.sequence) * TINY.hidden
    assert sum(param.numel() for param in model.parameters()) == matrices + vectors + embeddings


def test_initialisation_is_that_of_gpt_2():
    torch.manual_seed(0)
    block = GPT(GPTConfig(layers=8, hidden=128)).blocks[3]
    assert block.mlp.expansion.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert not block.mlp.projection.bias.any()


def test_recomputation_changes_nothing_but_memory():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=2, hidden=32, heads=4, sequence=16, dropout=0.3, recompute=recompute))
        model(*batch()).backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_fp32_in_any_dtype(dtype):
    loss = GPT(TINY).to(dtype)(*batch())
    assert loss.dtype == torch.float32 and loss.isfinite()


@pytest.mark.parametrize(("wrong", "accepted"), [
    ({"heads": 5}, "heads must divide hidden.*1, 2, 4, 8, 16, 32$"),
    ({"layers": 0}, "layers must be a whole number from 1 up"),
    ({"hidden": 2.5}, "hidden must be a whole number"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
])
def test_sizes_that_do_not_fit_are_refused(wrong, accepted):
    with pytest.raises(ValueError, match=accepted):
        GPTConfig(**{"layers": 2, "hidden": 32, "heads": 4, "sequence": 16} | wrong)


def test_an_input_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="at most 16 tokens at once, not 17"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.int64))


# --------------------------------------------------------------------------------------------------------------- data


def test_batches_depend_on_seed_and_rank_alone():
    tokens = data.read_tokens()

    def first(seed, rank):
        batches = data.Batches(tokens, 2, 16, seed, rank)
        return [next(batches)[0].tolist() for _ in range(3)]

    assert first(0, 1) == first(0, 1)
    assert first(0, 1) != first(0, 0)
    assert first(0, 1) != first(1, 1) and first(0, 1) != first(1, 0)


def test_targets_are_one_byte_ahead():
    tokens = torch.arange(40, dtype=torch.uint8)
    starts = set()
    for _, (inputs, targets) in zip(range(50), data.Batches(tokens, 2, 16, 0, 0), strict=False):
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == (2, 16)
        assert torch.equal(inputs + 1, targets)
        starts.update(inputs[:, 0].tolist())
    assert starts == set(range(24))  # every crop that fits can come, to the last byte


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_is_shared_out_equally(world_size):
    tokens = torch.arange(250, dtype=torch.uint8)
    shares = [data.validation_batches(tokens, 4, 16, rank, world_size, windows=12) for rank in range(world_size)]
    starts = [inputs[:, 0].tolist() for share in shares for inputs, _ in share]
    flat = [start for group in starts for start in group]
    assert flat == sorted(set(flat)) and len(flat) == 12
    assert len({len(share) for share in shares}) == 1


def test_training_never_sees_the_held_out_text():
    tokens = data.read_tokens()
    training, held_out = data.split(tokens, 64)
    assert torch.equal(torch.cat([training, held_out]), tokens)
    assert len(held_out) == len(tokens) // 10


def test_a_text_that_cannot_serve_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*nowhere.txt.*No such file"):
        data.read_tokens(str(tmp_path / "nowhere.txt"))
    short, empty = tmp_path / "short.txt", tmp_path / "empty.txt"
    short.write_text("too short")
    empty.write_text("")
    with pytest.raises(ValueError, match="at least 170 bytes"):
        data.split(data.read_tokens(str(short)), 16)
    with pytest.raises(ValueError, match="is empty"):
        data.read_tokens(str(empty))


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("flags", "accepted"), [
    (["--heads", "7"], "heads must divide hidden"),
    (["--layers", "two"], "a whole number is wanted, not 'two'"),
    (["--steps", "0"], "steps must be 1 or more"),
    (["--clip", "-1"], "or 0 for no clipping"),
    (["--dtype", "fp8"], "fp32, bf16, fp16"),
    (["--lr", "nan"], "lr must be a number above 0"),
    (["--bucket-mb", "0"], "bucket_mb must be a number above 0"),
    (["--seed", "-1"], "seed must be a whole number from 0 up"),
    (["--text", "/nowhere"], "name a file that can be read"),
    (["--colour", "red"], "there is no --colour (--help"),
])
def test_wrong_flags_are_refused(flags, accepted, capsys):
    parser = Parser()
    add_settings(parser)
    with pytest.raises(SystemExit) as end:
        read_settings(parser, parser.parse_args(flags))
    assert end.value.code == 2
    assert accepted in capsys.readouterr().err


def test_the_learning_rate_warms_up_and_decays():
    settings = Settings(steps=1000, lr=1.0)
    rates = [settings.learning_rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01) and rates[-1] == pytest.approx(0.1, rel=0.01)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


# --------------------------------------------------------------------------------------------------------------- loop


def run(stage_class, settings):
    with ranks.start() as rank:
        return train(stage_class, settings, rank)


FIELDS = {
    "stage", "ranks", "backend", "device", "dtype", "parameters", "losses", "step_seconds", "tokens_per_second",
    "memory", "theory", "traffic", "validation_losses", "padding", "settings",
}


@pytest.mark.parametrize("stage_class", sample([Stage0, Stage1, Stage2, Stage3], [Stage3]))
def test_a_run_reports_what_it_measured(stage_class):
    report = ranks.run(run, 3, stage_class, Settings(**SMALL, steps=9), device="cpu")[2]
    stage, elements = int(stage_class.__name__[-1]), report["parameters"]
    assert report.keys() >= FIELDS and report["stage"] == stage and report["ranks"] == 3
    assert len(report["losses"]) == 9 and all(map(math.isfinite, report["losses"]))
    assert report["validation_losses"][1] < report["validation_losses"][0]
    memory, traffic = report["memory"], report["traffic"]
    for state, expected in formulas.model_states(stage, elements, 3, "fp32").items():
        assert report["theory"][state] == expected
        assert memory[state] == pytest.approx(expected + report["padding"][state], abs=1e-6)
    assert memory["peak"] == sum(memory["peak_by_category"].values()) > sum(report["theory"].values())
    expected = traffic["theory_bytes"] + traffic["padding_bytes"]
    assert traffic["sent_bytes"] == pytest.approx(expected, abs=1) if stage < 3 else traffic["sent_bytes"] <= expected
    json.dumps(report)


def test_ranks_report_the_same_losses():
    reports = ranks.run(run, 2, Stage2, Settings(**SMALL, steps=4, dropout=0.2), device="cpu")
    assert reports[0]["losses"] == reports[1]["losses"]
    assert reports[0]["validation_losses"] == reports[1]["validation_losses"]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", sample(["bf16", "fp16"], ["fp16"]))
@pytest.mark.parametrize("stage_class", sample([Stage1, Stage3], [Stage3]))
def test_sixteen_bits_train(stage_class, dtype):
    settings = Settings(**SMALL, steps=12, dtype=dtype, clip=1.0, accumulate=2, recompute=True)
    report = ranks.run(run, 2, stage_class, settings, device="cpu")[0]
    assert all(map(math.isfinite, report["losses"]))
    assert report["validation_losses"][1] < report["validation_losses"][0]
    for state, expected in formulas.model_states(report["stage"], report["parameters"], 2, dtype).items():
        assert report["memory"][state] == expected + report["padding"][state]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_run_measures_too(steps):
    report = ranks.run(run, 2, Stage1, Settings(**SMALL, steps=steps), device="cpu")[0]
    traffic = report["traffic"]
    agreement = 8 if steps == 1 else 0  # in its first backward a stage makes its ranks agree on an order
    assert 0 <= traffic["sent_bytes"] - traffic["theory_bytes"] - traffic["padding_bytes"] <= agreement
    assert report["memory"]["gradients"] == report["theory"]["gradients"] + report["padding"]["gradients"]


@pytest.mark.thorough
def test_a_stage_file_is_a_program(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to see the same lesson again and again " * 40)
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-W", "error", STAGE_FILE, *flags, "--steps=4", "--device=cpu", f"--text={text}",
               f"--json={tmp_path / 'report.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Stage2: 4 of 4 steps" in done.stderr
    assert "unexplained" in done.stdout and "validation" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["stage"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "text.txt"]
