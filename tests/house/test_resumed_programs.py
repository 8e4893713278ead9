"""--save, --every, --keep and --resume, in the stage scripts and in zero_100b; and torchrun that starts ranks anew."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import toys
from house.saved_models import disk_has

from zero_minimal.checkpoint import saved_state
from zero_minimal.processes import ranks
from zero_minimal.programs import configs, resume, train
from zero_minimal.programs.resume import Flags
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.workload.settings import Parser, Settings

pytestmark = pytest.mark.thorough

SMALL = dict(layers=2, hidden=32, heads=4, sequence=16, batch=2, steps=6)
PROGRAMS = Path(__file__).parents[2] / "zero_minimal"


def run(stage, settings, flags):
    """The report of a stage's program, or of zero_100b's config."""
    with ranks.start() as rank:
        if isinstance(stage, str):
            return configs.train(stage, settings, 2, rank, flags)
        return train.train(toys.STAGES[stage], settings, rank, flags)


# of stage, number of ranks and dtype every two in every combination; and whole systems
CASES = [*((stage, world, ("bf16", "fp32", "fp16")[(stage + world) % 3]) for stage in range(4) for world in (1, 2, 3)),
         *((config, 4, "fp32") for config in configs.CONFIGS), ("C4", 2, "fp16")]


@pytest.mark.parametrize("stage, world, dtype", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(stage, world, dtype, tmp_path):
    settings = Settings(**SMALL, dtype=dtype, accumulate=2, clip=1.0, dropout=0.1)
    whole = toys.run(run, world, stage, settings, Flags(save=tmp_path, every=2, keep=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    again = toys.run(run, world, stage, settings, Flags(resume=str(tmp_path / "step-00000004")))
    for one, other in zip(whole, again, strict=True):
        assert other["losses"] == one["losses"][4:] and other["resumed_after"] == 4 and "resumed_after" not in one
    done = toys.run(run, world, stage, settings, Flags(save=tmp_path, resume="auto"))
    assert done == [None] * world, "all steps were done"


def said_at_the_end(*arguments):
    """What the program prints that ends."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit):
        run(1, *arguments)
    return errors.getvalue().splitlines()[-1]


def not_resumed(folder):
    said = [said_at_the_end(Settings(**SMALL | {"hidden": 64}), Flags(resume=str(folder))),
            said_at_the_end(Settings(**SMALL), Flags(resume=str(folder / "nothing")))]
    with ranks.start():
        by_hand = toys.STAGES[1](GPT(GPTConfig(2, 32, 4, 16)), torch.optim.AdamW)
        saved_state.save(by_hand, folder / "by hand", {"step": 1})
    said += [said_at_the_end(Settings(**SMALL), Flags(resume=str(folder / "by hand"))),
             said_at_the_end(Settings(**SMALL | {"heads": 2}), Flags(resume=str(folder)))]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        run(1, Settings(**SMALL | {"seed": 3, "recompute": True}), Flags(save=folder / "new", resume="auto"))
        run(1, Settings(**SMALL | {"seed": 3, "steps": 7, "lr": 1e-3}), Flags(resume=str(folder / "new")))
    return [*said, errors.getvalue()]


def test_says_what_cannot_be_resumed(tmp_path):
    toys.run(run, 1, 1, Settings(**SMALL | {"steps": 1}), Flags(save=tmp_path, every=1))
    [said] = toys.run(not_resumed, 1, tmp_path)
    assert said[0].startswith(f"error: --resume {tmp_path}: this checkpoint is not of this model: other shapes: "
                              "token_embedding.weight ([256, 32], and [256, 64] here), ")
    assert said[1].endswith(f"there is no checkpoint in {tmp_path / 'nothing'}")
    assert said[2].endswith("this checkpoint was not written by --save")
    assert said[3].endswith("this checkpoint is of a model with 4 heads: give --heads 4")
    assert f"there is no checkpoint in {tmp_path / 'new'} yet: this run begins anew\n" in said[4]
    assert "other settings than before: steps was 6 and is 7; lr was 0.002 and is 0.001\n" in said[4]
    assert f"resumed after 6 steps, from {tmp_path / 'new'}\n" in said[4], "the last step is saved"


def resumed_elsewhere(folder):
    """On another number of ranks, from a folder whose newest checkpoint is damaged, with warnings off."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(1, Settings(**SMALL), Flags(resume=str(folder)))
    return errors.getvalue()


def test_says_what_is_lost_and_what_a_step_learns_from(tmp_path):
    toys.run(run, 1, 1, Settings(**SMALL | {"steps": 4}), Flags(save=tmp_path, every=2))
    newest = max(path for path in tmp_path.iterdir() if path.is_dir())
    (file := newest / "rank-0.bin").write_bytes(file.read_bytes()[:-8])
    said, _ = toys.run(resumed_elsewhere, 2, tmp_path)
    batch = Settings(**SMALL).batch * Settings(**SMALL).accumulate
    assert re.search(rf"resumed after 2 steps, from {tmp_path}; not from a newer checkpoint, and the steps since are "
                     rf"lost: {file} is truncated.*\n", said), said
    assert (f"another number of ranks than before: 1, and now 2. A step now learns from {2 * batch} sequences, and not "
            f"{batch}: set --batch") in said


def filled(arguments, folder, full):
    """How the program ends, and the last line it says, if the last rank's disk is full after these steps."""
    after = resume.Checkpoints.after

    def filling(checkpoints, step):
        checkpoints.finish()
        if checkpoints.rank.rank == checkpoints.rank.world_size - 1:
            disk_has(1000 if step + 1 in full else None)
        after(checkpoints, step)

    sys.argv = ["train", *arguments, "--save", str(folder), "--every", "2"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as errors:
        patch.setattr(resume.Checkpoints, "after", filling)
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                code = train.main(toys.STAGES[1]) or 0
            except SystemExit as ended:
                code = ended.code
    return code, errors.getvalue().splitlines()[-1:]


@pytest.mark.parametrize("full, kept", (({2, 4}, ["step-00000006"]), ({6}, ["step-00000002", "step-00000004"])))
def test_a_run_whose_last_state_is_lost_does_not_end_well(full, kept, tmp_path):
    arguments = [f"--{name}={value}" for name, value in SMALL.items()]
    for code, last in toys.run(filled, 2, arguments, tmp_path, full):
        lost = f"error: the checkpoint of step 6 was not written to {tmp_path}: rank 1: [Errno 27] File too large"
        assert code == (2 if 6 in full else 0) and last[:1] == last
        assert last == [] or last[0].startswith(lost) == (6 in full)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def read(*words):
    parser = Parser(prog="stage2.py")
    resume.add_flags(parser)
    return resume.read_flags(parser, parser.parse_args(list(words)))


def test_flags(tmp_path, capsys):
    assert read() == Flags()
    assert read("--save", str(tmp_path), "--every", "7") == Flags(save=tmp_path, every=7)
    assert read("--resume", "there").resume == "there"
    (tmp_path / "file").touch()
    (tmp_path / "used" / "step-00000004").mkdir(parents=True)
    (tmp_path / "used" / "step-00000004" / "contents.json").touch()
    used = str(tmp_path / "used")
    assert read("--save", used, "--resume", "auto").resume == "auto"
    for words, reason in ((("--every", "3"), "--every says how --save saves"), (("--keep", "3"), "give --save DIR"),
                          (("--resume", "auto"), "--resume auto looks in the folder of --save"),
                          (("--save", str(tmp_path / "file")), "is no folder"), (("--every", "0"), "from 1 up"),
                          (("--save", ""), "it names nothing"), (("--resume", ""), "it names nothing"),
                          (("--save", used), "has checkpoints already: give --resume auto"),
                          (("--save", used + "/step-00000004"), "is itself a checkpoint"),
                          (("--save", "x" * 300), "cannot be looked into (File name too long)")):
        with pytest.raises(SystemExit):
            read(*words)
        assert reason in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- under torchrun


def ranks_of(launcher):
    """The processes that torchrun has started."""
    task = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return [int(number) for number in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_torchrun_goes_on_by_itself(tmp_path):
    """A rank is killed twice; in the end the losses are those of a run that nobody disturbed."""
    flags = [f"--{name}={value}" for name, value in (SMALL | {"steps": 400, "dropout": 0.1}).items()]
    script = str(PROGRAMS / "stage2.py")
    environment = os.environ | {"PYTHONPATH": str(PROGRAMS.parent), "OMP_NUM_THREADS": "1"}

    def start(*more):
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
             "3", "--monitor-interval", "0.1", script, "--device", "cpu", *flags, *more], env=environment,
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    whole = start("--json", str(tmp_path / "whole.json"))
    assert whole.communicate()[1] is not None and whole.returncode == 0
    killed = start("--json", str(tmp_path / "again.json"), "--save", str(tmp_path / "a"), "--every", "20",
                   "--resume", "auto")
    for wanted in (1, 4):
        while not (found := sorted((tmp_path / "a").glob("step-*"))) or int(found[-1].name[5:]) < 20 * wanted:
            assert killed.poll() is None
            time.sleep(0.01)
        os.kill(ranks_of(killed)[-1], signal.SIGKILL)
        time.sleep(1)
    errors = killed.communicate()[1]
    assert killed.returncode == 0, errors
    after = [int(steps) for steps in re.findall(r"resumed after (\d+) steps", errors)]
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("whole.json", "again.json"))
    assert len(after) == 2 and other["resumed_after"] == after[-1] and other["losses"] == one["losses"][after[-1] :]
