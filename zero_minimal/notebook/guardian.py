"""Guardian: the process between a notebook and its ranks. It starts them, and outlives the notebook just long enough
to end them.

    notebook's kernel ── a pipe ──► guardian ── fork ──► ipyparallel's controller, and one engine a rank

The kernel may end in any way: closed, restarted, killed. Its end of the pipe is closed then, by the system if by nobody
else; the guardian reads the end of the file and kills its process group, in which all the others are. torch is imported
once, here, and the ranks are forked: so they start quickly, and share the memory of what is imported.
"""

import gc
import os
import select
import shutil
import signal
import sys
from pathlib import Path


def main(folder: str, world_size: int, device: str) -> None:
    """Start everything; wait until the kernel lets go of the pipe, our standard input; end everything."""
    parent = os.getppid()
    _fork(_controller, folder)
    from zero_minimal.notebook import rank as notebook_rank  # imports torch

    gc.freeze()  # what is imported is no garbage: the ranks share it, and the ledger need not look at it
    ranks = {_fork(notebook_rank.main, folder, rank, world_size, device): rank for rank in range(world_size)}
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
        _note_deaths(ranks, Path(folder))
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # ourselves included


def _fork(function, *args) -> int:
    process = os.fork()
    if process == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            function(*args)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # the notebook shows it
        finally:
            sys.stderr.flush()
            os._exit(1)
    return process


def _controller(folder: str) -> None:
    from ipyparallel.controller.app import IPController

    IPController.launch_instance([
        f"--profile-dir={folder}", "--ip=127.0.0.1", "--nodb", "--log-level=WARN",
        "--IPController.use_threads=True", "--HeartMonitor.period=500", "--HeartMonitor.max_heartmonitor_misses=240",
    ])


def _note_deaths(ranks: dict[int, int], folder: Path) -> None:
    """Leave a file for each rank that has ended: the kernel looks for them."""
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        if process in ranks:
            words = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended, exit code {code}"
            (folder / f"{ranks[process]}.ended").write_text(words)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
