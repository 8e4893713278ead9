"""Work: a collective under way (torch.distributed has its own), and who hears of it.

    start ──── messages travel ──── wait() ──── end

`collective` is the decorator of the functions in collectives.py, which start what is pending here.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zero_minimal.core import seams


@dataclass(eq=False)
class Call:
    """One collective of this rank. Listeners at the moment "collective" (seams.py) get

        "start"  before anything is sent
        "wait"   when the rank begins to wait for the result
        "end"    when the result is there

    and this object. A collective that is made of others counts as one."""

    name: str  # of the function
    tensors: tuple  # that it was given
    group: dist.ProcessGroup
    of: object  # names what is sent
    options: dict  # the function's other arguments: op, root
    travels: bool = True  # a listener may say that nothing is sent: in a simulation
    tag: int = 0  # of its messages; a listener may choose another
    note: object = None  # what a listener sends along

    @property
    def bytes(self) -> int:
        """Its payload, the whole vector: the largest of its tensors."""
        return max(tensor.nbytes for tensor in self.tensors)


class Work:
    """A collective under way. Leave its tensors alone until `wait()` has returned.

    On gloo messages travel meanwhile; sums, and the all-gather half of an all_reduce, run inside
    wait(). On NCCL all of it runs meanwhile; wait() only lets the GPU's current stream wait for it.

    Args:
        works: what torch.distributed has started.
        then: what to do when they are finished.
        half_done: whether `then` sends messages.
    """

    def __init__(self, works, then: Callable[[], object] | None = None, half_done: bool = False):
        self.works, self.then = works, then
        self.number, self.call = next(_numbers), None  # None: a part of another collective
        if half_done:
            _half_done.add(self)

    def wait(self) -> None:
        if self.call is None:
            return self._finish()
        wait_for_half_done(self.call.group, self.number)
        seams.tell("collective", "wait", self.call)
        seams.tell("messages", "read", self.call)
        self._finish()
        seams.tell("collective", "end", self.call)
        self.call = None

    def _finish(self) -> None:
        _half_done.discard(self)
        for work in self.works:
            work.wait()
        if self.then is not None:
            self.then()
        self.works, self.then = [], None  # nothing is left to do


def wait_for_half_done(group: dist.ProcessGroup, before: float = float("inf")) -> None:
    """Finish earlier all_reduces, which on gloo send their second half in wait(): another rank may
    need that half before it can start collective number `before`, for which this rank waits."""
    for one in sorted(_half_done, key=lambda one: one.number):
        if one.number < before and one.call is not None and one.call.group == group:
            one.wait()


_numbers = itertools.count()
_half_done: weakref.WeakSet[Work] = weakref.WeakSet()  # all_reduces that nobody has waited for


def collective(launch):
    """Decorator for a function(*tensors, call, …) that starts a collective and returns its Work.
    Whoever calls it gives group=, of= and async_op= in the place of call=. It tells the listeners,
    and unless async_op is set it waits for the result and returns None."""

    @functools.wraps(launch)
    def collective(*tensors, async_op: bool = False, of: object = "", group=None, **options):
        given = (*tensors, *options.values())
        given = tuple(value for value in given if isinstance(value, torch.Tensor))
        call = Call(launch.__name__, given, group or dist.group.WORLD, of, options)
        seams.tell("collective", "start", call)
        pending = launch(*tensors, call=call, **options) if call.travels else Work([])
        pending.call = call
        seams.tell("collective_started", call)
        return pending if async_op else pending.wait()

    collective.part = launch  # for a collective that is made of others
    return collective


def other_ranks(group: dist.ProcessGroup) -> list[int]:
    """The other ranks of a group by their number there: the next one first."""
    world_size, rank = group.size(), group.rank()
    return [(rank + distance) % world_size for distance in range(1, world_size)]
