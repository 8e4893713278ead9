"""README and manual say what is there: figures are those of the run whose JSON lies beside the picture, or are measured
here; samples run as they stand."""

import ast
import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import checks
import pytest
import torch
import toys
from thorough import sample
from torch import nn

from zero_minimal.naive import Naive
from zero_minimal.processes import ranks
from zero_minimal.stage0 import Stage0
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

HOUSE = Path(__file__).parents[2]
README, OWN_MODEL, CHECKPOINTS, STAGES = ((HOUSE / page).read_text() for page in (
    "README.md", "lessons/manual/own-model.md", "lessons/manual/checkpoints.md", "lessons/manual/stages.md"))
RUN = json.loads((HOUSE / "lessons/pictures/compare.json").read_text())


def line(row: dict) -> str:
    """A row of the table of the stages, from a report: MB are a million bytes."""
    memory, traffic = row["memory"], row["traffic"]
    cells = [row["name"]]
    cells += [f"{memory[state] / 1e6:.1f} ({row['theory'][state] / 1e6:.1f})" for state in row["theory"]]
    cells += [f"{memory['peak'] / 1e6:.0f}"]
    cells += [f"{traffic['sent_bytes'] / 1e6:.1f} ({traffic['theory_bytes'] / 1e6:.1f})"]
    cells += [f"{traffic['wire_bytes'] / 1e6:.1f}"]
    return "| " + " | ".join([*cells, f"{row['losses'][-1]:.5f}"]) + " |"


def test_the_table_holds_the_figures_of_the_run():
    for row in RUN["rows"]:
        assert line(row) in STAGES
    peaks = [row["memory"]["peak_by_category"] for row in RUN["rows"]]
    assert f"holds {peaks[2]['gradients'] / 1e6:.1f} MB\nof gradients" in STAGES
    assert f"Stage 3 has {peaks[3]['parameters'] / 1e6:.1f} MB" in STAGES
    assert f"FSDP2 has {peaks[5]['parameters'] / 1e6:.1f} MB" in STAGES
    assert f"FSDP2's {peaks[5]['buffers'] / 1e6:.1f} MB" in STAGES
    activations = {f"{peak['activations'] / 1e6:.1f}" for peak in peaks}
    assert activations == {"26.8", "22.6"} and all(size in STAGES for size in activations)


def test_there_are_two_commands_and_ci_finds_them():
    commands = re.findall(r"^    (pip install -r requirements.txt && .*)$", README, re.MULTILINE)
    assert [command.split(" && ")[1] for command in commands] == [
        "torchrun --nproc-per-node 2 zero_minimal/stage2.py", "pytest",
    ]


# --------------------------------------------------------------------------------------- the sample, and what it prints

SAMPLE = re.search(r"^```python\n(.*?)^```", OWN_MODEL, re.MULTILINE | re.DOTALL)[1]
LINE = re.compile(r"step +(\d+): loss ([\d.]+), gradient norm ([\d.]+)")


def printed(text):
    """[step, loss, norm] of each line."""
    return [[float(number) for number in line] for line in LINE.findall(text)]


def close(rows):
    """To the digits that are printed; the last one may be rounded either way."""
    return [pytest.approx(row, abs=2e-4) for row in rows]


@functools.cache
def plainly(world_size):
    """What the sample prints, computed by plain PyTorch in one process: the mean gradient of all ranks' batches.

    Only the model comes from the README.
    """
    space = {"torch": torch, "nn": nn}
    model_class = next(node for node in ast.parse(SAMPLE).body if isinstance(node, ast.ClassDef))
    exec(compile(ast.Module([model_class], []), "README.md", "exec"), space)
    models, batches = [], []
    for rank in range(world_size):
        torch.manual_seed(rank)
        models.append(space[model_class.name]())
        batches.append([torch.randn(16, 8) for _ in range(101)])
    model = models[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = []
    for step in range(101):
        losses = [nn.functional.mse_loss(model(own[step]), own[step].sort(dim=1).values) for own in batches]
        optimizer.zero_grad()
        (sum(losses) / world_size).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            rows.append([step, losses[0].item(), norm.item()])
    return rows


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", sample((1, 2), [1]))
def test_the_sample_runs_as_it_stands(world_size, tmp_path):
    """Under torchrun, and alone."""
    file = tmp_path / "train.py"
    file.write_text(SAMPLE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run(
        [sys.executable, *(torchrun if world_size > 1 else []), str(file)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(HOUSE), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=True, timeout=100,
    )
    rows = printed(done.stdout)
    assert len(rows) == 6 and len(rows) == len(done.stdout.splitlines())
    assert rows == close(plainly(world_size))
    if world_size == 2:
        assert rows == close(printed(OWN_MODEL)), "the page shows something else"


def outputs_of(programs):
    outputs = []
    for program in programs:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
        outputs.append(output.getvalue())
    return outputs


@pytest.mark.thorough
@pytest.mark.parametrize("world_size", sample((1, 2, 3), [3]))
def test_the_sample_prints_the_same_with_every_stage(world_size):
    """Replace the class, and nothing else."""
    assert SAMPLE.count("Stage2") == 2 and SAMPLE.count("stage2") == 1
    programs = [SAMPLE.replace("Stage2", f"Stage{number}").replace("stage2", f"stage{number}") for number in range(4)]
    outputs, *others = toys.run(outputs_of, world_size, programs)
    assert not any(map(any, others)), "rank 0 speaks for all"
    assert printed(outputs[0]) == close(plainly(world_size))
    assert outputs == outputs[:1] * 4


def saved_and_loaded(sample, folder):
    os.chdir(folder)
    space = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(SAMPLE, "README.md", "exec"), space)
    before = [param.clone() for param in space["model"].parameters()]
    exec(compile(sample, "README.md", "exec"), space)
    return space["extra"], toys.identical(before, space["model"].parameters())


def test_the_sample_of_a_checkpoint_runs(tmp_path):
    sample = next(block for block in re.findall(r"^```python\n(.*?)^```", CHECKPOINTS, re.MULTILINE | re.DOTALL)
                  if "saved_state" in block)
    assert toys.run(saved_and_loaded, 2, sample, tmp_path) == [({"step": 100}, True)] * 2


def all_reduces_of_a_step(stage_class):
    """Of the second: in the first one the ranks also agree on an order. With the model of that table."""
    settings = Settings(steps=2)
    with ranks.start() as rank:
        zero = loop.build(stage_class, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
        steps = loop.steps(zero, loop.training_batches(settings, rank.rank), settings)
        next(steps)
        with checks.Watch() as watch:
            next(steps)
    starts = [event for event in watch.events if event.kind == "start"]
    assert {event.name for event in starts} == {"all_reduce"}
    return len(starts), sum(event.bytes for event in starts)


@pytest.mark.thorough
def test_the_first_rung_makes_as_many_all_reduces_as_the_readme_says():
    (naive, bytes), (stage0, same) = (toys.run(all_reduces_of_a_step, 2, one)[0] for one in (Naive, Stage0))
    assert bytes == same == 4 * RUN["rows"][0]["parameters"]
    assert f"it makes {naive} all-reduces a step" in STAGES and f"Stage 0 makes {stage0}, a bucket each" in STAGES
