"""What a terminal shows: progress, lines that fit, an end at Ctrl-C, one line for a wrong call. Run as users do."""

import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from zero_minimal.processes import interrupts
from zero_minimal.programs import report

pytestmark = pytest.mark.thorough

HOUSE = Path(__file__).parents[2]
TINY = "--layers=1 --hidden=32 --heads=2 --sequence=16 --batch=2 --device=cpu"
TWO = "torchrun --nproc-per-node=2 zero_minimal"
SLOW = 120  # seconds: a loaded machine takes long to import torch
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HOUSE), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                            "NO_COLOR": "1"}


def command(words):
    """A command as users write it, for subprocess: torchrun …, file.py …, or one of python -m zero_minimal …; or lines
    of Python."""
    if "\n" in words:
        return [sys.executable, "-c", words]
    first, *rest = words.split()
    if first == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *rest]
    return [sys.executable, *([] if first.endswith(".py") else ["-m", "zero_minimal"]), first, *rest]


def ended(words, **environment):
    return subprocess.run(command(words), capture_output=True, text=True, timeout=SLOW, cwd=HOUSE,
                          env=ENVIRONMENT | environment)


def own_lines(done):
    """What a command wrote to stderr, without torchrun's advice on threads."""
    return [line for line in done.stderr.splitlines() if line and "OMP_NUM_THREADS" not in line and "****" not in line]


def assert_fits(text):
    wide = [line for line in text.splitlines() if len(line) > report.COLUMNS]
    assert not wide, f"more than {report.COLUMNS} columns:\n" + "\n".join(wide)


# --------------------------------------------------------------------------------------------- what a command says

RUNS = {  # command: what its progress begins with, and ends with
    f"compare {TINY} --steps=3 --plot=PICTURE": ("compare: loading", "Stage3: 3 of 3 steps"),
    f"compare --configs {TINY} --steps=2 --plot=PICTURE": ("compare: loading", "C5: 2 of 2 steps"),
    "bench --model=1x32 --sequence=16 --steps=2 --warm-up=1 --repeats=1 --device=cpu --only=ddp,stage3 --plot=PICTURE":
        ("bench: loading", "4 of 4 runs"),
    "reproduce figure2 --plot=PICTURE": ("reproduce: loading", ""),
    "zero_minimal/defragmentation.py --layers=2 --hidden=64 --heads=2 --longest=128 --vocabulary=16384 --batch=2 "
    "--picture=PICTURE": ("without slabs: 0 of 2 steps", "with slabs: 2 of 2 steps"),
    f"{TWO}/stage3.py {TINY} --steps=3": ("Stage3: building", "Stage3: 3 of 3 steps, rank 0's loss"),
    f"{TWO}/offload.py {TINY} --steps=3": ("Offloaded2: building", "Offloaded2: 3 of 3 steps, rank 0's loss"),
    f"zero_minimal/naive.py {TINY} --steps=3": ("Naive: building", "Naive: 3 of 3 steps, loss"),
    f"zero_minimal/tensor_parallel.py {TINY} --steps=3": ("", "D × M = 1 × 1: 3 of 3 steps, loss"),
    f"{TWO}/zero_100b.py {TINY} --steps=3": ("C4: 0 of 3 steps", "C4: 3 of 3 steps, rank 0's loss"),
    "zero_minimal/constant_buffers.py": ("", ""),
}


@pytest.mark.parametrize("words", RUNS)
def test_output_into_a_pipe(words, tmp_path):
    """Fits 80 columns, has plain lines of progress, and names the picture. No bar, no colour: a pipe keeps them all."""
    first, last = RUNS[words]
    picture = tmp_path / "picture.png"
    done = ended(words.replace("PICTURE", str(picture)))
    assert done.returncode == 0, done.stderr
    assert_fits(done.stdout)
    assert "\r" not in done.stdout + done.stderr and "\x1b" not in done.stdout + done.stderr
    lines = own_lines(done)
    assert first in "".join(lines[:1]) and last in done.stderr
    assert (f"picture: {picture}" in lines) == ("PICTURE" in words) == picture.exists()


def test_the_bar_and_the_summary_say_whose_loss_they_show():
    done = ended(f"{TWO}/stage2.py {TINY} --steps=2")
    assert "2 of 2 steps, rank 0's loss" in done.stderr and "loss, mean of 2 ranks, nats a byte" in done.stdout
    done = ended(f"zero_minimal/stage2.py {TINY} --steps=2")  # alone both are the same number
    shown = re.search(r"2 of 2 steps, loss ([\d.]+)", done.stderr)[1]
    assert "loss, nats a byte: " in done.stdout and f"→ {shown};" in done.stdout


# ------------------------------------------------------------------------------------------------- terminals and Ctrl-C


class Terminal:
    """A command in a terminal of 80 columns; `text` is all that it showed."""

    def __init__(self, words):
        self.text = ""
        self.process, self.screen = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may have been told to ignore it
            ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            os.chdir(HOUSE)
            os.execve(sys.executable, command(words), ENVIRONMENT)

    def read_until(self, words=None):
        """Read until these words have come, or to the end."""
        deadline = time.monotonic() + SLOW
        while words is None or words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in {self.text}"
            if not select.select([self.screen], [], [], 0.1)[0]:
                continue
            try:
                more = os.read(self.screen, 4096)
            except OSError:  # Linux: nobody is left who could write
                more = b""
            if not more:
                assert words is None, f"ended without {words!r}: {self.text}"
                return
            self.text += more.decode(errors="replace")

    def interrupt(self):
        os.write(self.screen, b"\x03")

    def wait(self):
        _, status = os.waitpid(self.process, 0)
        os.close(self.screen)
        return os.waitstatus_to_exitcode(status)


def test_a_terminal_shows_a_bar():
    terminal = Terminal(f"zero_minimal/stage2.py {TINY} --steps=3")
    terminal.read_until()
    assert terminal.wait() == 0
    assert "\rStage2:" in terminal.text and "3/3" in terminal.text and "loss " in terminal.text
    assert "\x1b" not in terminal.text


def running(mark):
    """Processes with these words on their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            pass  # it has ended
    return found


HANGS = """
import sys
import torch
import torch.distributed as dist
from zero_minimal.processes import interrupts, ranks

@interrupts.program
def main():
    with ranks.start("cpu") as rank:
        print("all wait", flush=True)
        dist.recv(torch.zeros(1), (rank.rank + 1) % rank.world_size)

main()
"""
INTERRUPTED = {  # command: words to wait for
    f"zero_minimal/stage2.py {TINY} --steps=1000000 --json=MARK": "2/1000000",
    f"{TWO}/stage2.py {TINY} --steps=1000000 --json=MARK": "2/1000000",
    "torchrun --nproc-per-node=2 MARK": "all wait",
    f"compare {TINY} --steps=1000000 --json=MARK": "2/1000000",
    f"compare {TINY} --json=MARK --seed=1": "compare: loading",
    f"compare {TINY} --json=MARK": "starting 2 ranks",
    "reproduce figure1 --json=MARK": "0/4",
    "zero_minimal/defragmentation.py --steps=1000 --picture=MARK.png": "0/1000",
    "bench --device=cpu --json=MARK": "0/",
}


on_linux = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(),
                              reason="looks for processes that are left, in /proc")


@on_linux
@pytest.mark.parametrize("words", INTERRUPTED)
def test_ctrl_c_ends_it_at_once_and_in_a_line(words, tmp_path):
    mark = tmp_path / "mark.py"
    mark.write_text(HANGS)
    terminal, sign = Terminal(words.replace("MARK", str(mark))), INTERRUPTED[words]
    terminal.read_until(sign)
    pressed = time.monotonic()
    terminal.interrupt()
    terminal.read_until()
    code, took = terminal.wait(), time.monotonic() - pressed
    assert "Traceback" not in terminal.text, terminal.text
    assert "stopped by Ctrl-C" in terminal.text and code != 0
    if "torchrun" in words:
        assert {"rank 0 stopped", "rank 1 stopped"} <= set(re.findall(r"rank \d stopped", terminal.text))
    assert took < 10, f"a second is wanted, and a loaded machine may take ten: {took:.1f}"
    deadline = time.monotonic() + 10
    while running(str(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(str(mark)), "processes are left"


@on_linux
def test_ranks_end_with_the_torchrun_that_started_them(tmp_path):
    """Somebody kills torchrun alone."""
    words = f"{TWO}/stage1.py {TINY} --steps=1000000 --json={tmp_path}"
    with subprocess.Popen(command(words.replace(str(tmp_path), str(tmp_path / "mark"))), stderr=subprocess.PIPE,
                          text=True, cwd=HOUSE, env=ENVIRONMENT) as torchrun:
        while "0 of 1000000 steps" not in torchrun.stderr.readline():
            pass
        torchrun.kill()
        said = torchrun.stderr.read()  # to the end: until the last rank has closed it
    assert {f"rank {rank} stops: {interrupts.GONE}" for rank in (0, 1)} == set(said.splitlines())
    assert not running(str(tmp_path / "mark")), "processes are left"


LOST = """
from zero_minimal.processes import failures, interrupts
interrupts._launcher = 2**30
failures.end_together(None, 0, RuntimeError("connection closed by peer"))
"""


def test_who_loses_a_rank_by_that_says_the_same():
    """The other one was the first to see that torchrun is gone, and with it the store of the ranks' words."""
    done = ended(LOST, RANK="0")
    assert (done.returncode, done.stderr) == (1, f"rank 0 stops: {interrupts.GONE}\n")


ALONE = """
from zero_minimal.processes import ranks
with ranks.start(timeout=2):
    pass
"""


def test_a_rank_that_finds_no_torchrun_says_so_in_a_line_and_in_time():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = ended(ALONE, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port),
                 MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")  # as torchrun sets them
    assert done.returncode == 1
    assert re.fullmatch(rf"rank 1 stops: the ranks did not meet within 2 s, at 127.0.0.1:{port} \(.*refused\)\n",
                        done.stderr), done.stderr


# ---------------------------------------------------------------------------------------------------- the first seconds


def test_what_is_imported_first_is_torch_and_no_compiler():
    """Flags are read before that: --help of a stage takes as long as `import torch`, and half of what it did."""
    lines = [f"import zero_minimal.{file.stem}" for file in (HOUSE / "zero_minimal").glob("*.py")
             if "import main" in file.read_text() and file.stem != "late_gather"]
    lines += ["import sys, zero_minimal.programs.train, zero_minimal.programs.plan", "assert len(sys.modules) > 500",
              "print([name for name in ('torch._dynamo', 'torch.distributed.fsdp', 'sympy') if name in sys.modules])"]
    done = ended("\n".join(lines))
    assert len(lines) > 8 and done.stdout == "[]\n", done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------------- wrong calls

WRONG = {  # command: what its one line says
    f"{TWO}/stage2.py --step 3": "there is no --step: did you mean --steps?",
    f"{TWO}/stage2.py --heads 7": "heads",
    f"{TWO}/stage1.py --device cuda": "no GPU",
    "torchrun --nproc-per-node=3 zero_minimal/zero_100b.py --model-parallel=2": "accepted: 1, 3",
    "zero_minimal/stage0.py --dtypes=fp32": "did you mean --dtype?",
    f"{TWO}/stage2.py {TINY} --offload=disk:. --host-budget=1MB": "is the smallest, for shards of up to",
    f"{TWO}/stage2.py {TINY} --offload=disk:/proc": "the disk tier cannot keep a file in /proc",
    "compare --rnks=2": "there is no --rnks: did you mean --ranks?",
    "compare --bucket_mb 2": "did you mean --bucket-mb?",
    "bench --sweeps size": "did you mean --sweep?",
    "reproduce tabel1": "did you mean table1?",
    "compere": "did you mean compare?",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_answered_in_one_line(words):
    done = ended(words)
    assert done.returncode != 0 and not done.stdout
    lines = [line for line in own_lines(done) if not line.endswith(" …")]
    assert len(lines) == 1 and WRONG[words] in lines[0], done.stderr
