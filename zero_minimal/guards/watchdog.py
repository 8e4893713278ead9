"""Watchdog (c10d has one for NCCL): a rank that waits long for others says where it waits, long
before the time limit of its process group. Two such lines show where the ranks have parted.

Seams: wrapped, naive_wrapped.
Mistakes: rank 0 alone calls gather_parameters(), and the others wait in a dist.barrier(); one rank
skips backward, and its next collective is the user's own.
"""

import os
import sys
import threading
import time
import traceback
import weakref
from types import FrameType

import torch
import torch.distributed as dist
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.distributed import distributed_c10d as c10d

import zero_minimal
from zero_minimal.core import seams
from zero_minimal.core.work import Work

PATIENCE = 30  # seconds in one collective, before the rank says so
LOOKS = 6  # in that time
NOT_THE_USERS = (
    "<frozen", *(os.path.dirname(module.__file__) for module in (os, torch, zero_minimal)))

started = threading.Lock()  # taken once in a process; also by who needs no watchdog


@seams.at("wrapped", "naive_wrapped")
def start(stage) -> None:
    if started.acquire(blocking=False):
        threading.Thread(target=watch, args=(threading.get_ident(),), daemon=True).start()


def watch(thread: int) -> None:
    """Look at a thread's stack again and again. Print where it waits if that stays the same."""
    awaited, looks = weakref.ref(started), 0
    while True:
        time.sleep(PATIENCE / LOOKS)
        work, place = waits_for(thread)
        looks = looks + 1 if work is awaited() else 0
        awaited = weakref.ref(work)
        del work
        if looks == LOOKS and place:
            # its end in the same write, or lines of two ranks would mix
            print(f"rank {dist.get_rank()} has waited {PATIENCE} s for other ranks, in {place}. "
                  "All ranks must make the same calls: another rank's line says where it waits\n",
                  end="", file=sys.stderr, flush=True)


def waits_for(thread: int) -> tuple[object, str]:
    """The work that a thread waits for, ours or torch's, and in words where that is; "" if it waits
    for none."""
    stack = list(traceback.walk_stack(sys._current_frames().get(thread)))  # the innermost first
    work, name = work_of([frame for frame, _ in stack])
    if not name:
        return started, ""
    line = users_line(traceback.StackSummary.extract(reversed(stack), lookup_lines=False))
    return work, f"{name}, at {line}" if line else name


def work_of(frames: list[FrameType]) -> tuple[object, str]:
    """The work that a stack waits for, and the collective's name; None, "" if there is none."""
    codes = [frame.f_code for frame in frames]
    if codes and codes[0].co_filename == c10d.__file__ and "work" in frames[0].f_locals:
        name = f"torch.distributed.{codes[0].co_name}()"
        if run_backward.__code__ in codes:
            name += (" inside backward (there other ranks may wait for a bucket of which this rank "
                     "uses no parameter: wrap the model with bucket_bytes=None)")
        return frames[0].f_locals["work"], name
    for frame in frames:
        if frame.f_code is Work.wait.__code__ and (call := frame.f_locals["self"].call):
            return frame.f_locals["self"], getattr(call.note, "words", call.name)
    return None, ""


def users_line(stack: traceback.StackSummary) -> str:
    """The innermost line of the user's own code, "line 14 of train.py"; "" if there is none."""
    own = [frame for frame in stack if not frame.filename.startswith(NOT_THE_USERS)]
    return f"line {own[-1].lineno} of {os.path.basename(own[-1].filename)}" if own else ""
