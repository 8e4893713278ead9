"""lessons/fine-tune.md: its commands run, as they stand but for fewer steps; its figures are those of a run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero_minimal.paper.shapes import GPTConfig
from zero_minimal.programs.planning import plan
from zero_minimal.workload.foreign import ForeignModel

HOUSE = Path(__file__).parents[2]
PAGE = (HOUSE / "lessons/fine-tune.md").read_text()
RUNS = json.loads((HOUSE / "lessons/fine-tune.json").read_text())
COMMANDS = [re.sub(r" \\\n\s+", " ", command).strip()
            for command in re.findall(r"^    ((?:torchrun|python) (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)]
CONFIGURATION, GENERATE, WROTE = re.findall(r"^```\w*\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)


def test_figures_are_those_of_the_run():
    for name in ("base", "tuned"):
        before, after = RUNS[name]["validation_losses"]
        assert re.search(rf"from\s{before:.3f}\sto\s{after:.3f}", PAGE), name
    assert WROTE == RUNS["wrote"].rstrip()
    assert RUNS["base"]["settings"]["steps"] == 400 and "--steps 400" in COMMANDS[1]
    assert RUNS["tuned"]["settings"]["steps"] == 200 and "--steps 200" in COMMANDS[4]
    assert all(report["settings"]["model"] in " ".join(COMMANDS) for report in (RUNS["base"], RUNS["tuned"]))


def test_it_is_linked():
    assert "lessons/fine-tune.md" in (HOUSE / "README.md").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(400)  # a model of 8 billion parameters, three times over on tensors without memory
def test_the_plans_of_the_table(tmp_path):
    pytest.importorskip("transformers")
    (file := tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192}))
    gpt = GPTConfig(32, 4096, 32, 4096, 128256, dropout=0.0, recompute=True)
    plans = [plan(model, 64, 80e9, "bf16") for model in (gpt, ForeignModel(str(file), 4096))]
    before, after = (f"{told['parameters'] / 1e9:.2f} B" for told in plans)
    assert f"| parameters | {before} | {after} |" in PAGE
    before, after = (f"{told['rows'][3]['together'] / 1e9:.2f} GB" for told in plans)
    assert f"| a step, blocks recomputed | {before} | {after} |" in PAGE


def published(folder):
    """What stands for a folder of the hub: written by the library itself."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train([str(HOUSE / "README.md")], tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=128)).save_pretrained(folder)


@pytest.mark.thorough
@pytest.mark.timeout(900)  # nine programs, each of which imports torch and transformers
def test_the_commands_run(tmp_path):
    """As they stand, but for fewer steps, and shorter sequences."""
    pytest.importorskip("transformers")
    assert len(COMMANDS) == 9
    for name in ("zero_minimal", "README.md"):
        (tmp_path / name).symlink_to(HOUSE / name)
    (tmp_path / "small.json").write_text(CONFIGURATION)
    (tmp_path / "generate.py").write_text(GENERATE)
    published(tmp_path / "gpt2")
    environment = os.environ | {"PYTHONPATH": str(HOUSE), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                                "HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = []
    for command in COMMANDS:
        short = re.sub(r"--sequence \d+", "--sequence 16", re.sub(r"--steps \d+", "--steps 2", command))
        done = subprocess.run(short, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=400)
        assert done.returncode == 0, f"{short}\n{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    wrote = next(text for command, text in zip(COMMANDS, said, strict=True) if command == "python generate.py")
    assert wrote.startswith("Stage 3 ") and len(wrote.rstrip("\n")) > 20
    assert "reads tokens of gpt2/tokenizer.json, predicts the next one" in said[-1].replace("\n", " ")
    assert (tmp_path / "tuned" / "model.safetensors").exists()
