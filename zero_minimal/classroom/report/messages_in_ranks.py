"""Messages, in a rank: call one of rings.py's functions, and write down each message and what the rank holds then.

Messages are seen at torch's dispatcher (checks.Calls), however they are asked for; waits at the class of all works.
What a rank holds is looked for in the variables of the submission's own functions that are under way.
"""

import contextlib
import sys

import checks
import torch
import torch.distributed as dist

from zero_minimal.classroom.report.recorder import Recorder, values_of
from zero_minimal.classroom.report.rings import RINGS

MOST_TENSORS = 12  # of a look


class Doors(checks.Calls):
    """Writes down what this rank asks torch.distributed for, and when a wait has ended."""

    def __init__(self, recorder: Recorder, path: str):
        super().__init__()
        self.recorder, self.path = recorder, path
        self.coming: list = []  # (number, tensor, what it held) of receives that nobody has seen arrive
        self.count, self.given = 0, ()

    def hear(self, function, args):
        before = len(self.made)
        super().hear(function, args)
        for call in self.made[before:]:
            if call.name not in ("send", "recv"):
                self.recorder.note("collective", name=call.name, bytes=call.bytes)
                continue
            tensor, self.count = args[0][0], self.count + 1
            entries = dict(number=self.count, peer=call.peer, bytes=call.bytes, dtype=str(tensor.dtype)[6:],
                           values=values_of(tensor), holds=self.held())
            self.recorder.note("send" if call.name == "send" else "receive", **entries)
            if call.name == "recv":
                self.coming.append((self.count, tensor, entries["values"]))

    def waited(self) -> None:
        """A wait has ended: one message more is known to be here. Others may have arrived, but nobody has asked."""
        self.recorder.note("waited")
        self.arrived()

    def arrived(self) -> bool:
        """Write down the first receive, of those not written down yet, whose tensor has changed."""
        for entry in self.coming:
            count, tensor, before = entry
            if (values := values_of(tensor)) != before:
                self.coming.remove(entry)
                self.recorder.note("received", number=count, values=values, holds=self.held())
                return True
        return False

    def held(self, *more) -> list[dict]:
        """Tensors in the variables of the submission's functions that are under way, and `more`, whole."""
        found, frame = list(more), sys._getframe()
        while frame:
            if frame.f_code.co_filename == self.path:
                found += list(frame.f_locals.values())
            frame = frame.f_back
        tensors: dict = {}
        for tensor in _tensors_in(found):
            whole = tensor if tensor._base is None else tensor._base
            tensors.setdefault(whole.untyped_storage()._cdata, whole)
        return [{"values": values_of(tensor), "given": any(tensor is each for each in self.given)}
                for tensor in list(tensors.values())[:MOST_TENSORS]]


def _tensors_in(values, depth: int = 2):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, (list, tuple, dict)):
            yield from _tensors_in(value.values() if isinstance(value, dict) else value, depth - 1)


@contextlib.contextmanager
def waits_heard(listener):
    """Context in which listener() is called when a wait() of a work has returned."""
    kind = dist.Work
    before = {name: vars(kind)[name] for name in ("wait", "is_completed")}
    calls = {name: getattr(kind, name) for name in before}

    def wait(work, *args, **options):
        result = calls["wait"](work, *args, **options)
        listener()
        return result

    def is_completed(work):
        result = calls["is_completed"](work)
        if result:
            listener()
        return result

    kind.wait, kind.is_completed = wait, is_completed
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(kind, name, original)


def watch(name: str, submission) -> None:
    """One call of the function, and for a function that returns a new tensor a second one, unseen, to know whether
    the first result stays."""
    recorder, ring, rank = Recorder(), RINGS[name], dist.get_rank()
    torch._C._set_deterministic_algorithms(True)  # new memory comes filled with NaN
    given = ring.arguments(rank)
    doors = Doors(recorder, submission.path)
    doors.given = tuple(value for value in given if isinstance(value, torch.Tensor))
    recorder.note("begins", holds=doors.held(*doors.given))
    function = getattr(submission, name)
    with waits_heard(doors.waited), doors:
        returned = function(*given)
    while doors.arrived():
        pass
    result = ring.result(given, returned)
    if not isinstance(result, torch.Tensor):
        recorder.note("returned", kind=type(result).__name__)
        return
    fresh = ring.arguments(rank)
    recorder.note(
        "returned", values=values_of(result), shape=list(result.shape), dtype=str(result.dtype)[6:],
        holds=doors.held(result, *doors.given), kept=all(torch.equal(given[each], fresh[each]) for each in ring.inputs),
        own=not any(_same_memory(result, given[each]) for each in ring.inputs), same=returned is given[0])
    if ring.inputs and returned is result:
        before = result.clone()
        function(*(value * 2 if isinstance(value, torch.Tensor) else value for value in fresh))
        recorder.note("again", stays=torch.equal(before, result))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
