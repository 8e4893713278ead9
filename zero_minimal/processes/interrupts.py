"""Ctrl-C and refusals: a program ends at once, on every rank, and its last line says why.

SIGINT becomes a KeyboardInterrupt in the main thread, as always in Python. But a rank that waits in
a collective does not notice it: so a second thread ends the process if it has not ended by itself.

When a rank ends with an exit code, torchrun prints a traceback of its own and a table of exit
codes, forty lines. After a crash that is useful. After Ctrl-C or a mistyped flag it hides the line
that says what to do, and only exit code 0 keeps torchrun quiet. So the rank that torchrun would
report first ends torchrun before that, by SIGKILL: it reports any other signal. Its exit code is
137 then. (Otherwise it is 0, if all ranks end with 0, or 1, always with the traceback: after
SIGTERM, SIGINT, SIGHUP and SIGQUIT, too.)

If something else kills torchrun, nothing is left to end the ranks: they check for that themselves.
"""

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

STOPPED, REFUSED = 130, 2  # exit codes, as shells and argparse have them
LINUX = Path("/proc/self").exists()
PATIENCE = 0.6  # seconds in which the main thread may end by itself
GONE = "the torchrun that started it is gone"

_stopping = threading.Lock()  # held by the thread that prints the last line
_in_program = False  # whether this process runs one of our programs, not a user's
_launcher = 0  # the process of the torchrun that started this rank


def program(main: Callable) -> Callable:
    """Decorator for the function that starts a program: Ctrl-C ends it within a second."""

    @functools.wraps(main)
    def guarded(*args, **kwargs):
        with _heeded():
            return main(*args, **kwargs)

    return guarded


@contextlib.contextmanager
def held_off(signals: Iterable[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Context for starting processes that Ctrl-C does not reach: their parent ends them. (They may
    call `let_in()` when they are ready for it.)"""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_in() -> None:
    """Let Ctrl-C reach this process again, which was started under held_off()."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def _heeded() -> Iterator[None]:
    global _in_program
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # other code handles it, or it is to be ignored
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    _in_program = True
    try:
        yield
    except KeyboardInterrupt as error:
        stop(traceback.extract_tb(error.__traceback__))
    finally:
        _in_program = False
        signal.set_wakeup_fd(before)
        os.close(writer)


def _watch(reader: int) -> None:
    """End this process if a SIGINT has come and the main thread does not react."""
    while signals := os.read(reader, 64):
        if signal.SIGINT in signals:
            time.sleep(PATIENCE)
            frame = sys._current_frames().get(threading.main_thread().ident)
            stop(traceback.extract_stack(frame))
    os.close(reader)


def stop(stack: traceback.StackSummary) -> NoReturn:
    """Print that this process was told to stop, and where it was; then end it."""
    _stopping.acquire()
    rank = os.environ.get("RANK")
    words = "stopped by Ctrl-C" if rank is None else f"rank {rank} stopped by Ctrl-C{_place(stack)}"
    start = "\n" if sys.stderr.isatty() and rank in (None, "0") else ""  # after a progress bar
    print(f"{start}{words}", file=sys.stderr, flush=True)
    if _in_program and os.environ.get("LOCAL_RANK") == "0":
        end_torchrun()
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # a pool's workers would wait for ever
        child.kill()
    os._exit(STOPPED)


def _place(stack: traceback.StackSummary) -> str:
    """The last place of a stack that is in the project or in the user's own files."""
    theirs = (os.path.dirname(os.__file__), "site-packages", "<")
    own = [frame for frame in stack if not any(name in frame.filename for name in theirs)]
    if not own:
        return ""
    return f", in {own[-1].name} ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def refuse(message: str) -> NoReturn:
    """End all ranks before they join or after they part. Local rank 0 prints why, as the last line.

    Raises: SystemExit, code 2.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _stopping.acquire(blocking=False)  # when torchrun ends, print nothing else
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:  # rank 0 prints, and ends torchrun
        until = time.monotonic() + 3
        while (_torchrun() or not LINUX) and time.monotonic() < until:
            time.sleep(0.05)
        if LINUX and not _torchrun():
            sys.exit(REFUSED)
    sys.stdout.flush()
    take_back()
    print(message, file=sys.stderr, flush=True)
    if launcher := _torchrun():
        os.kill(int(launcher.name), signal.SIGKILL)
    sys.exit(REFUSED)


def take_back() -> None:
    """Clear the line of a terminal: a progress message may be there."""
    if sys.stderr.isatty():
        blank = " " * (shutil.get_terminal_size().columns - 1)
        print(f"\r{blank}\r", end="", file=sys.stderr, flush=True)


def end_with_torchrun() -> None:
    """End this rank, from now on, a second or two after the torchrun that started it."""
    global _launcher
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _launcher = os.getppid()
        threading.Thread(target=_watch_torchrun, daemon=True).start()


def _watch_torchrun() -> None:
    while True:
        end_if_torchrun_is_gone()
        time.sleep(1)


def end_if_torchrun_is_gone() -> None:
    """Print so, and exit with code 1. A rank that has lost another calls this first: that one may
    have ended here, and the store in which ranks leave their words was torchrun's."""
    if _launcher and os.getppid() != _launcher:
        _stopping.acquire()  # the rank that ended torchrun has printed why
        sys.stdout.flush()
        print(f"rank {os.environ['RANK']} stops: {GONE}", file=sys.stderr, flush=True)
        os._exit(1)


def end_torchrun() -> None:
    """End the torchrun that started this rank, once its other ranks have ended.

    If they do not end, leave torchrun alone: it has to end them.
    """
    until = time.monotonic() + 2 * PATIENCE
    with contextlib.suppress(OSError):
        while (launcher := _torchrun()) and time.monotonic() < until:
            if not _others_run(launcher):
                os.kill(int(launcher.name), signal.SIGKILL)
            time.sleep(0.02)


def _torchrun() -> Path | None:
    """The torchrun that started this rank, in /proc, if it still runs and prints where we do."""
    parent = Path(f"/proc/{os.getppid()}")
    try:
        command = (parent / "cmdline").read_bytes().split(b"\0")[:3]  # python -m module
        shares_stderr = os.path.samestat(os.stat(parent / "fd/2"), os.fstat(2))
    except OSError:  # it has ended, or this is not Linux
        return None
    names = {os.path.basename(word) for word in command}
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and shares_stderr
    return parent if is_torchrun and names & {b"torchrun", b"torch.distributed.run"} else None


def _others_run(launcher: Path) -> bool:
    """Whether another rank that this process started has not ended yet."""
    for number in (launcher / "task" / launcher.name / "children").read_text().split():
        with contextlib.suppress(OSError):  # it is gone
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
            if int(number) != os.getpid() and state not in "ZX":
                return True
    return False
