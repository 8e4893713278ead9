"""Guard: watches a submission inside a rank, to explain to learners in simple words what went wrong.

It detects that a submission

- imports what solves its lesson: forbidden modules, or single definitions of others;
- replaces what measures it: the tests, this package, torch.distributed, torch.Tensor;
- leaves a thread behind;
- prints or allocates memory without end.

It runs in the submission's own process, so an attacker can switch it off, but gains nothing: the answers are not there
(course_copy.py), the kernel denies other files and processes (sandbox.py), and points are decided outside
(supervisor.py).
"""

import _thread
import contextlib
import errno
import gc
import os
import re
import resource
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from typing import NoReturn

import torch
import torch.distributed as dist

from zero_minimal.classroom.lessons import UNWRITTEN, Lesson
from zero_minimal.classroom.references import borrowed
from zero_minimal.guards import watchdog
from zero_minimal.offloading import host_process

PRINTED = 2**20  # the most bytes that a rank may print or write into one file
FILES = 2**26  # the most bytes that a host may write into one file
MEMORY = 4 * 10**9  # the most bytes of memory that a rank may allocate
LONG = 400  # the most characters of an error that are shown
PATIENCE = 4  # seconds for a host process to end, as it may wait for a processor on a busy machine
HANGS = (f"the host process had not ended {PATIENCE} s after it was told to: does it wait for a buffer that nobody "
         "empties, or is it in a loop that never ends?")

_HOLE = re.compile(r"((?:step|card) \d+): (\w+)")  # what the starter raises


class Fault(RuntimeError):
    """A failure in a rank, in words for the learner."""


class Foul(Exception):
    """The submission did something forbidden. Raised at once, and recorded, so catching it does not help."""


def guarded(function, submission, host=False):
    """The function as a rank runs it for the grader: inside a guard, and with failures in words for learners. host: it
    runs in a host process, which may keep its data in files, and ends with its threads."""

    def in_a_rank(*args, **kwargs):
        warnings.simplefilter("ignore")
        gc.freeze()
        torch.set_num_threads(1)
        watchdog.started.acquire(blocking=False)  # it would be a thread of the submission
        _limit(FILES if host else PRINTED)
        if host_process.lend:
            host_process.lend.submission = submission
        guard = Guard(submission.lesson)
        try:
            guard.look_at(submission.source)
            result = function(*args, **kwargs)
            host_process.end_all()
            guard.look_again(threads=not host)
        except BaseException as error:
            raise Fault(guard.fouls[0] if guard.fouls else in_words(error, submission.path)) from None
        finally:
            guard.over = True
        if guard.fouls:
            raise Fault(guard.fouls[0])
        return result

    return in_a_rank


def _limit(file_bytes: int) -> None:
    """Send prints to a temporary file of limited size. Python ignores SIGXFSZ, so a write fails instead."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit may hold already
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    printed = tempfile.TemporaryFile()
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)


class Guard:
    """Watches this process from now on; `fouls` describe what the submission did."""

    def __init__(self, lesson: Lesson):
        self.lesson = lesson
        self.fouls: list[str] = []
        self.over = False  # our code runs from then on
        self._threads = _thread._count()
        self._before = _fingerprint()
        sys.addaudithook(self._hook)

    def look_at(self, source: str) -> None:
        """A submission must not use other modules' versions of the definitions that it writes itself."""
        if used := borrowed(self.lesson, source):
            self._foul(f"it uses {used[0]}, where the work of lesson {self.lesson.name} is done already")

    def _hook(self, event: str, args: tuple) -> None:
        """The audit hook. Python offers no way to remove one."""
        if event == "import" and args[0] in self.lesson.forbidden and not self.over:
            self._foul(f"it imports {args[0]}, where the work of lesson {self.lesson.name} is done already")

    def _foul(self, words: str) -> NoReturn:
        self.fouls.append(words)
        raise Foul(words)

    def look_again(self, threads: bool) -> None:
        """After the function: check that everything is unchanged."""
        changed = _changes(self._before)
        if changed:
            self.fouls.append(f"it replaced {changed[0]}: what measures a submission must stay as it is")
        begun = time.monotonic()
        while threads and _thread._count() > self._threads:
            has_host = any(thread.name == host_process.WATCH for thread in threading.enumerate())
            if time.monotonic() > begun + (PATIENCE if has_host else 1):
                if has_host:
                    raise RuntimeError(HANGS)
                self.fouls.append(f"{_thread._count() - self._threads} of its threads still run when the test is over: "
                                  "join them")
                break
            time.sleep(0.05)


# ------------------------------------------------------------------------------------------- is everything as it was?


def _watched():
    """(name, object) of all modules and classes that a grade depends on."""
    for name in ("torch", "torch.distributed", "torch.distributed.distributed_c10d", "gc", "time", "builtins", "os",
                 "toys", "checks", *(name for name in sys.modules if name.split(".")[0] == "zero_minimal")):
        if name in sys.modules:
            module = sys.modules[name]
            yield name, module
            for label, value in vars(module).items():
                if isinstance(value, type) and value.__module__ == name and name not in ("torch", "builtins", "os"):
                    yield f"{name}.{label}", value
    yield "torch.Tensor", torch.Tensor
    yield "torch.nn.Parameter", torch.nn.Parameter
    yield "torch.nn.Module", torch.nn.Module
    yield "torch.distributed.Work", dist.Work


def _fingerprint() -> dict:
    """name: (owner, label, value, code, defaults) of every function, method and class in them."""
    found = {}
    for name, owner in _watched():
        for label, value in list(vars(owner).items()):
            if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
                found[f"{name}.{label}"] = owner, label, value, *_insides(value)
    return found


def _insides(value) -> tuple:
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__
    return None, None, None


def _changes(before: dict) -> list[str]:
    return [
        name for name, (owner, label, value, *insides) in before.items()
        if vars(owner).get(label) is not value or any(a is not b for a, b in zip(_insides(value), insides, strict=True))
    ]


# -------------------------------------------------------------------------------------------------------------- words


def unwritten(function: str, step: str, line: int) -> str:
    return f"{function}{UNWRITTEN}{step}, line {line})"


def in_words(error: BaseException, path: str) -> str:
    """An exception as a message: what the submission raised and where, or the text of a failed assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path]
    text = str(error).strip()
    if isinstance(error, NotImplementedError) and own:
        if hole := _HOLE.fullmatch(text):
            return unwritten(hole[2], hole[1], own[-1].lineno)
        return (f"a branch is not finished: line {own[-1].lineno} in {own[-1].name} raises NotImplementedError"
                + f" ({text[:LONG]})" * bool(text))
    if isinstance(error, AssertionError) and not own:
        return text.split("\nassert ")[0]
    if isinstance(error, host_process.HostError):
        return text.splitlines()[-1] if UNWRITTEN in text else text
    if text == HANGS:
        return text
    where = ""
    if own:
        lines = "; ".join(f"line {frame.lineno} in {frame.name}: {frame.line}" for frame in own[-2:])
        where = f"\n    {lines}"
    if isinstance(error, SystemExit):
        return f"it ended the program: sys.exit({error.code!r}){where}"
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"it printed more than {PRINTED // 2**20} MB: take the prints out of loops{where}"
    if isinstance(error, PermissionError):
        return (f"it did what is denied to a submission ({type(error).__name__}: {text[:LONG]}): it may not start "
                f"other processes or signal them, nor read or write outside of its own folder{where}")
    if isinstance(error, MemoryError) and not text or "can't allocate memory" in text:
        return f"it asked for more than {MEMORY // 10**9} GB of memory{where}"
    if "storage of size 0" in text or "its data is not allocated yet" in text:
        return ("it used a tensor whose memory was freed: was it freed before a collective on it had ended, or is it "
                f"taken for whole though it was freed?{where}")
    return f"it raised {type(error).__name__}: {text[:LONG]}{'…' * (len(text) > LONG)}{where}"
