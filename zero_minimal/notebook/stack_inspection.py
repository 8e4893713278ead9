"""Stack inspection: where in its cell a rank's main thread is, and whether it waits for another rank there.

The cell is not asked: the stack of the thread is read from outside. Its innermost frame says what is being called. A
rank waits for another one while that is the wait() of a message or a collective, or a function of torch.distributed.
Sleep, computation and print are none of these, however little they compute.
"""

import ast
import contextlib
import itertools
import linecache
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

from zero_minimal.core import collectives, seams, work
from zero_minimal.guards import collective_fingerprint
from zero_minimal.notebook import attempt

PROJECT = Path(collectives.__file__).parent.parent
TORCH = Path(torch.__file__).parent
# where these stand tells nobody anything
PLUMBING = {module.__file__ for module in (collectives, work, seams, collective_fingerprint)}
# what stands here and does not compute, waits: for a store, a message, a collective
SPEAKING = {str(TORCH / file) for file in ("distributed/distributed_c10d.py", "distributed/utils.py",
                                           "nn/parallel/distributed.py")}
WAITING = {"wait", "wait_tensor"}  # methods of C++ that return when a message is there; Python has none of these names
CALLERS = {str(TORCH / "_ops.py")}  # they call what their caller names
CELLS = ("<%%px", "<world")  # how the file names of cells begin

# two threads that parse at once: Python 3.11 has once failed in a cell (SystemError, AST constructor recursion depth)
parsing = threading.Lock()

_threads: set[int | None] = set()  # those that were there before the cell began


def begin() -> None:
    """A cell begins: what threads it starts are its own."""
    _threads.clear()
    _threads.update(thread.ident for thread in threading.enumerate())


def here(cell: str) -> dict:
    """Where the main thread is, in a form that can be sent: what position() returns, and

    waits    for what it waits, or ""
    stack    a number for the chain of calls: while it stays the same, the thread may not have moved
    worked   seconds of computing in this process, but for the thread that asks
    """
    stacks = {thread: _spots(frame) for thread, frame in sys._current_frames().items()}
    del stacks[threading.get_ident()]
    stack = stacks.pop(threading.main_thread().ident)
    waits = _wait(stack)
    if not waits and _called(stack[0]) == "run_backward":  # autograd's own threads run the hooks on a GPU,
        waits = next(filter(None, map(_wait, stacks.values())), "")
        if not waits and not torch.cuda.is_initialized():  # and on a CPU only DistributedDataParallel's C++ waits here
            waits = "backward"
    helpers = {thread.ident for thread in threading.enumerate() if not thread.daemon} - _threads
    if not all(_wait(stacks[helper]) for helper in helpers & stacks.keys()):
        waits = ""  # a thread that the cell has started may yet send what the others wait for
    chain = hash(tuple((id(spot.code), spot.instruction) for spot in stack))
    worked = time.process_time() - time.thread_time()  # answering is no work
    for spot in stack:
        linecache.checkcache(spot.code.co_filename)
    lines = traceback.StackSummary.from_list(
        [(spot.code.co_filename, spot.line, spot.code.co_name, None) for spot in reversed(stack)])
    return position(lines, cell) | {"waits": waits, "stack": chain, "worked": worked}


@dataclass(frozen=True)
class Spot:
    """A frame of a stack, without what it holds: a frame that somebody keeps keeps its tensors, and the cell may be
    measuring its memory."""

    code: CodeType
    instruction: int
    line: int
    words: str


def _spots(frame: FrameType) -> list[Spot]:
    """The stack, its innermost frame first."""
    return [Spot(each.f_code, each.f_lasti, line, _words(each)) for each, line in traceback.walk_stack(frame)]


def position(frames: traceback.StackSummary, cell: str) -> dict:
    """Where in the cells a stack has come to, and below that in which function of the project, and in which line of the
    learner's own file ("attempt")."""
    own = [frame for frame in frames if frame.filename.startswith(CELLS)]
    if not own:
        return {"line": None, "source": "", "earlier": False, "inside": "", "attempt": ""}
    below = frames[frames.index(own[-1]) + 1 :]
    theirs = [frame for frame in below if frame.filename in attempt.files]
    below = below[below.index(theirs[-1]) + 1 :] if theirs else below
    ours = [frame for frame in below if Path(frame.filename).is_relative_to(PROJECT)
            and frame.filename not in PLUMBING and Path(frame.filename).parent != Path(__file__).parent]
    return {
        "line": own[-1].lineno, "source": own[-1].line, "earlier": own[-1].filename != cell,
        "inside": f"in {ours[-1].name}, {Path(ours[-1].filename).name}" if ours else "",
        "attempt": f"line {theirs[-1].lineno} of {Path(theirs[-1].filename).name}: {theirs[-1].line}" if theirs else "",
    }


def _wait(stack: list[Spot]) -> str:
    """For what a thread waits, if it stands in a wait for another rank."""
    inner = next((spot for spot in stack if spot.code.co_filename not in CALLERS), stack[-1])
    if inner.code.co_filename not in SPEAKING and _called(inner) not in WAITING:
        return ""
    return next((spot.words for spot in reversed(stack) if spot.words), "wait()")


def _words(frame: FrameType) -> str:
    """What a frame of torch.distributed or of our collectives is about: "recv from rank 2"."""
    code = frame.f_code
    if code.co_filename == work.__file__ and code.co_name == "wait":
        call = frame.f_locals["self"].call
        return getattr(call.note, "words", "") if call else ""
    if code.co_filename == collective_fingerprint.__file__ and code.co_name == "read":
        return frame.f_locals["self"].words
    if code.co_filename not in SPEAKING:
        return ""
    if code.co_name in ("recv", "send"):
        peer = frame.f_locals.get("src" if code.co_name == "recv" else "dst")
        way = "from" if code.co_name == "recv" else "to"
        return f"{code.co_name} {way} {'any rank' if peer is None else f'rank {peer}'}"
    return code.co_name.strip("_")


def _called(spot: Spot) -> str:
    """The name of the function that is being called there."""
    positions = itertools.islice(spot.code.co_positions(), max(0, spot.instruction) // 2, None)
    first, last, begin, end = next(positions, (None,) * 4)
    if None in (first, last, begin, end):
        return ""
    lines = [line.encode() for line in linecache.getlines(spot.code.co_filename)[first - 1 : last]]
    if not lines:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    with contextlib.suppress(SyntaxError, ValueError), parsing:
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
        function = call.func if isinstance(call, ast.Call) else None
        return getattr(function, "attr", getattr(function, "id", ""))
    return ""
