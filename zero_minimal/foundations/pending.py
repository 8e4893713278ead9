"""Pending: a collective under way, and who hears of it.

    start ──── messages travel ──── wait() ──── end
      what the ranks say of it to each other: notes.py; what listeners are told: Call

`collective` is the decorator of the functions in collectives.py, which start what is pending here.
"""

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zero_minimal.foundations import values
from zero_minimal.foundations.notes import Notes


class Pending:
    """A collective under way. Leave its tensors alone until `wait()` has returned.

    On gloo messages travel meanwhile; sums, and the all-gather half of an all_reduce, run inside
    wait(). On NCCL all of it runs meanwhile; wait() only lets the GPU's current stream wait for it.

    Args:
        works: what torch.distributed has started.
        then: what is left to do when these are over.
        half_done: whether that sends something.
    """

    def __init__(self, works, then: Callable[[], object] | None = None, half_done: bool = False):
        self.works, self.then = works, then
        self.number, self.group = next(_numbers), None
        self.call: Call | None = None  # what listeners know of it
        self.notes: Notes | None = None  # what the other ranks know of it
        if half_done:
            _half_done.add(self)

    def wait(self) -> None:
        if self.works and self.group is not None:
            refuse_forked(self.group())
        if _half_done:
            if not inside_collective():
                self._wait_for_earlier_ones()
            _half_done.discard(self)
        if self.call is not None:
            _tell("wait", self.call)
        with _InsideOne(self.notes):
            if self.notes is not None:
                self.notes.check()
            for work in self.works:
                work.wait()
            if self.then is not None:
                self.then()
        if self.call is not None:
            _tell("end", self.call)
        self.works, self.then, self.call, self.notes = [], None, None, None  # nothing is left to do

    def __del__(self):
        # somebody has caught an error, say, and let the stage go. gloo, in the middle of a message
        # whose memory is gone, reads nothing more from that rank: what comes next would hang
        if self.works and self.then is not None:
            _dropped.append((self.works, self.then))

    def _wait_for_earlier_ones(self) -> None:
        """An all_reduce on gloo sends its second half in wait(). Another rank may wait for that
        before it starts what this one waits for."""
        earlier = [one for one in _half_done if one.number < self.number]
        for one in sorted(earlier, key=lambda one: one.number):
            if one.group == self.group:
                one.wait()


_numbers = itertools.count()
_half_done: weakref.WeakSet[Pending] = weakref.WeakSet()  # all_reduces that nobody has waited for
_dropped: list = []  # works that nobody can wait for, and what holds their memory


def collective(launch):
    """Decorator for a function that starts a collective and returns its Pending: it tells the
    listeners, and unless async_op is set it waits for the result and returns None."""

    @functools.wraps(launch)
    def collective(*tensors, async_op: bool = False, of: object = "", **options):
        call, notes, given = None, None, options.get("group")
        group = options["group"] = _ranks_of(given, launch.__name__)
        refuse_forked(group)
        if not inside_collective():
            held = tuple(value for value in (*tensors, *options.values())
                         if isinstance(value, torch.Tensor))
            payload = max(tensor.nbytes for tensor in held)
            call = Call(launch.__name__, held, payload, group.size())
            _tell("start", call)
            if call.world_size > 1 and values.present() and dist.get_backend(group) == "gloo":
                what = f"{launch.__name__} of {of}" if of else launch.__name__
                with _InsideOne(None):
                    notes = Notes(f"{what}, {payload:,} bytes of {str(held[0].dtype)[6:]}", given)
        with _InsideOne(notes):
            pending = launch(*tensors, **options) if values.present() else Pending([])
        pending.call, pending.notes = call, notes
        pending.group = weakref.ref(group)  # a Pending may outlive it
        return pending if async_op else pending.wait()

    return collective


def refuse_forked(group: dist.ProcessGroup | None) -> None:
    """Raises: RuntimeError in a process that was forked from a rank. It has the connections of that
    one, and what it writes there would come in between."""
    if group is not None and _process_of.setdefault(group, os.getpid()) != os.getpid():
        raise RuntimeError(
            "this process was forked from a rank, which alone may start collectives and wait for "
            "them (at stage 3 each forward does): let the rank itself call the model, or fork "
            "before the ranks join and let the child work on a copy of the weights"
        )


_process_of = weakref.WeakKeyDictionary()  # group: the process that joined it


def _ranks_of(group, name: str) -> dist.ProcessGroup:
    """The process group itself; None means all ranks."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name}: this rank, {dist.get_rank()} of the world, is not in group=: "
                         "call it on the ranks of the group alone")
    return group or dist.group.WORLD


# ------------------------------------------------------------------------------ who listens to them


@dataclass(frozen=True, eq=False)
class Call:
    """One collective of this rank, as listeners hear of it."""

    name: str  # of the function
    tensors: tuple  # that it was given
    bytes: int  # its payload, the whole vector: the largest of these tensors
    world_size: int


_listeners: list[Callable[[str, Call], object]] = []


class _Thread(threading.local):
    """What this thread is at work in."""

    inside, notes = False, None


_thread = _Thread()


@contextlib.contextmanager
def heard_by(listener: Callable[[str, Call], object]) -> Iterator[None]:
    """Context in which listener(moment, call) is called for this rank's collectives:

        "start"  before anything is sent
        "wait"   when the rank begins to wait for the result
        "end"    when the result is there

    `call` is the same object each time. A collective that is made of others counts as one.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def inside_collective() -> bool:
    """Whether this thread is at work in a collective, or in the wait() of one."""
    return _thread.inside


def notes_of_this_one() -> Notes | None:
    """Those of the collective at work, under which all travels that it is made of."""
    return _thread.notes


class _InsideOne:
    """Context in which this thread is at work in a collective, under its notes or those of the one
    around it."""

    def __init__(self, notes: Notes | None):
        self.notes = notes

    def __enter__(self):
        self.before = _thread.inside, _thread.notes
        _thread.inside, _thread.notes = True, self.notes or _thread.notes

    def __exit__(self, *_):
        _thread.inside, _thread.notes = self.before


def _tell(moment: str, call: Call) -> None:
    for listener in list(_listeners):
        listener(moment, call)
