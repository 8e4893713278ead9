"""Phases: in which part of a step the collectives of this rank begin, and what they carry.

    phases = Phases()
    with phases.step():
        ...
    phases.last         # {"forward": {"all_gather": bytes, …}, "backward": {…}, "update": {…}}

Collectives of the course's own stages are heard, others' are not.
"""

import contextlib

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zero_minimal.core import seams, work

PHASES = ("forward", "backward", "update")


class Phases:
    """An observer of the training loop. Payloads in bytes."""

    def __init__(self):
        self.forwards = 0  # how many modules' forward is running, one in another
        self.last: dict[str, dict[str, int]] = {phase: {} for phase in PHASES}

    @contextlib.contextmanager
    def step(self):
        """Around one optimizer step, which is then the last."""
        self.last, self.forwards = {phase: {} for phase in PHASES}, 0
        before = register_module_forward_pre_hook(lambda *call: self._count(+1))
        after = register_module_forward_hook(lambda *call: self._count(-1), always_call=True)
        with before, after, seams.heard_by("collective", self._hear):
            yield

    def _count(self, step: int) -> None:
        self.forwards += step

    def _hear(self, moment: str, call: work.Call) -> None:
        if moment == "start":
            carried = self.last[self._phase()]
            carried[call.name] = carried.get(call.name, 0) + call.bytes

    def _phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:  # the autograd engine is at work, in this thread
            return "backward"
        return "forward" if self.forwards else "update"
