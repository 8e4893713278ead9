"""Unit trace: which units of a stage 3 are whole, being gathered or a shard at each turn of a step, and their bytes.

    with Conveyor(zero) as belt:
        zero.model(x, y).backward()
        zero.step()
    belt.record["bytes"]    # of whole parameters, at each turn and at the end

The clock counts turns of units, not time: so every machine records the same. A turn is recorded when its unit has
arrived and the next one is being gathered. Storages are counted, as the ledger sees them: one that the code forgot to
free counts until it is gone.
"""

import torch
import torch.distributed as dist

from zero_minimal.core import seams, work
from zero_minimal.core.layout import same_storage
from zero_minimal.core.units import Unit
from zero_minimal.guards.trained_by import is_released
from zero_minimal.meters.events import Events
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.owners import OF_A_BUCKET

STATES = (
    "shard",  # only this rank's part
    "coming",  # an all-gather fills its memory
    "whole",  # its parameters can be read
    "idle",  # it has memory that cannot be read
)


class Conveyor(Events):
    """Watches a stage 3 on this rank while it is open.

    record: {"units": names, the root first, "whole": [unit] bytes of it, "ranks": how many share it, "turns": [moment]
    of ["forward" | "backward" | "evaluation" | "end", number of the unit at work or None], "states": [unit][moment] of
    STATES, "reducing": [moment] number of the unit whose gradients are being reduced or None, "bytes": [moment] of
    parameters, without this rank's shards}. The last moment is the end of the recording, unless an error ends it.
    """

    def __init__(self, zero):
        super().__init__()
        self.zero, self.units, self.ledger = zero, list(zero.units), Ledger()
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self._known = all(hasattr(bucket, name) for bucket in self.buckets for name in OF_A_BUCKET)
        sizes = [sum(bucket.padded * bucket.dtype.itemsize for bucket in unit.buckets) for unit in self.units]
        self.record: dict = {
            "units": [unit.name or "root" for unit in self.units], "whole": sizes,
            "ranks": dist.get_world_size(zero.group), "turns": [], "states": [[] for _ in self.units], "reducing": [],
            "bytes": []}
        self._gathers: list[work.Call] = []  # under way

    def __enter__(self):
        super().__enter__()
        self._undo.enter_context(self.ledger)
        self.ledger.watch(self.zero.model, self.zero, self.zero.optimizer)
        self._undo.enter_context(seams.heard_by("unit_turned", self._turned))
        return self

    def __exit__(self, *error):
        with self._undo:
            if not error[0]:
                self._look("end", None)
            else:  # an unfinished stage's pending collectives would mix with later messages
                for pending in [pending for unit in self.units for pending in unit.gathering]:
                    pending.wait()

    def hear(self, moment: str, call: work.Call) -> None:
        if call.name == "all_gather" and moment == "start":
            self._gathers.append(call)
        elif moment == "end" and call in self._gathers:
            self._gathers.remove(call)

    def _turned(self, order, unit: Unit) -> None:
        if order is not self.zero.execution_order:  # of another stage
            return
        forward = "forward" if torch.is_grad_enabled() else "evaluation"
        self._look("backward" if self.zero.reducer.running else forward, self.units.index(unit))

    def _look(self, phase: str, at_work: int | None) -> None:
        # the ledger counts shards of an unknown bucket class as optimizer state
        shards = [bucket.parameter_shard for bucket in self.buckets] if self._known else []
        reducing = getattr(getattr(self.zero, "reducing", None), "bucket", None)
        self.record["turns"].append([phase, at_work])
        self.record["bytes"].append(self.ledger.states()["parameters"] - sum(
            shard.nbytes for shard in shards if shard is not None))
        self.record["reducing"].append(next(
            (number for number, unit in enumerate(self.units) if reducing in unit.buckets), None))
        for unit, states in zip(self.units, self.record["states"], strict=True):
            states.append(self._state(unit))

    def _state(self, unit: Unit) -> str:
        if not any(map(is_released, unit.params)):
            return "whole"
        wholes = [bucket.parameters for bucket in unit.buckets if bucket.parameters is not None]
        if any(same_storage(whole, tensor) for call in self._gathers for tensor in call.tensors for whole in wholes):
            return "coming"
        if not any(whole.untyped_storage().nbytes() for whole in wholes):
            return "shard"
        return "idle" if self._known else "coming"  # through collectives that are not ours
