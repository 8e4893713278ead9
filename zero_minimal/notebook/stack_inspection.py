"""Stack inspection: where in its cell a rank's main thread is, and whether it waits there for another rank.

The thread's stack is read from outside, without help of the cell. The innermost frame shows which function is called. A
rank waits for another one if that is the wait() of a message or a collective, or a function of torch.distributed.
Sleep, computation and print are not such waits, however little they compute.
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
# a position in these files does not help a reader
PLUMBING = {module.__file__ for module in (collectives, work, seams, collective_fingerprint)}
# a thread in these files that does not compute waits for a store, a message or a collective
SPEAKING = {str(TORCH / file) for file in ("distributed/distributed_c10d.py", "distributed/utils.py",
                                           "nn/parallel/distributed.py")}
WAITING = {"wait", "wait_tensor"}  # methods of C++ that wait for a message; no Python method has these names
CALLERS = {str(TORCH / "_ops.py")}  # they call functions named by their callers
CELLS = ("<%%px", "<world")  # prefixes of cells' file names
NOWHERE = {"line": None, "source": "", "earlier": False, "inside": "", "attempt": ""}  # a position outside of all cells

# Python 3.11 once failed when two threads parsed at once (SystemError, AST constructor recursion depth)
parsing = threading.Lock()

_threads: set[int | None] = set()  # threads that existed before the cell began


def begin() -> None:
    """Note, when a cell begins, which threads are not its own."""
    _threads.clear()
    _threads.update(thread.ident for thread in threading.enumerate())


def here(cell: str) -> dict:
    """Where the main thread is, in a form that can be sent: the entries of position(), and

    waits    what it waits for, or ""
    stack    a number for the chain of calls: while it stays the same, the thread may not have moved
    worked   seconds of computing in this process, without the calling thread
    """
    stacks = {thread: _spots(frame) for thread, frame in sys._current_frames().items()}
    del stacks[threading.get_ident()]
    stack = stacks.pop(threading.main_thread().ident)
    waits = _wait(stack)
    if not waits and _called(stack[0]) == "run_backward":  # on a GPU, hooks run in autograd's own threads,
        waits = next(filter(None, map(_wait, stacks.values())), "")
        if not waits and not torch.cuda.is_initialized():  # on a CPU, only DistributedDataParallel's C++ waits here
            waits = "backward"
    helpers = {thread.ident for thread in threading.enumerate() if not thread.daemon} - _threads
    if not all(_wait(stacks[helper]) for helper in helpers & stacks.keys()):
        waits = ""  # a thread of the cell may yet send what the others wait for
    chain = hash(tuple((id(spot.code), spot.instruction) for spot in stack))
    worked = time.process_time() - time.thread_time()  # answering does not count
    for spot in stack:
        linecache.checkcache(spot.code.co_filename)
    lines = traceback.StackSummary.from_list(
        [(spot.code.co_filename, spot.line, spot.code.co_name, None) for spot in reversed(stack)])
    return position(lines, cell) | {"waits": waits, "stack": chain, "worked": worked}


@dataclass(frozen=True)
class Spot:
    """A frame of a stack without its variables: a kept frame would keep tensors alive while the cell may be measuring
    memory."""

    code: CodeType
    instruction: int
    line: int
    words: str


def _spots(frame: FrameType) -> list[Spot]:
    """The stack, its innermost frame first."""
    return [Spot(each.f_code, each.f_lasti, line, _words(each)) for each, line in traceback.walk_stack(frame)]


def position(frames: traceback.StackSummary, cell: str) -> dict:
    """A stack's line in the cells, and, inside that call, its function in the project and its line in the learner's own
    file ("attempt")."""
    own = [frame for frame in frames if frame.filename.startswith(CELLS)]
    if not own:
        return NOWHERE
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
    """What a thread waits for, if it waits for another rank; otherwise ""."""
    inner = next((spot for spot in stack if spot.code.co_filename not in CALLERS), stack[-1])
    if inner.code.co_filename not in SPEAKING and _called(inner) not in WAITING:
        return ""
    return next((spot.words for spot in reversed(stack) if spot.words), "wait()")


def _words(frame: FrameType) -> str:
    """What a frame of torch.distributed or of our collectives does: "recv from rank 2"."""
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
    """The name of the function that this frame is calling."""
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
