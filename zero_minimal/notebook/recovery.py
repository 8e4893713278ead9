"""Recovery: what a cell that failed leaves on a rank, and what of it can still be used.

Tensors and models keep their values. Two kinds of objects do not go on as if nothing had happened:

    stages     one that was in the middle of its work may be a step further on one rank than on another: training would
               go on with parameters that differ, and say nothing. So it is closed: whatever is asked of it, or of its
               model, is an error that says what to run again.
    groups     those of dist.new_group, and what holds one (DDP, a mesh, a stage of such a group): they end with the
               process group.

A stage was in the middle of its work if the failure came from there on any rank, or if a collective was under way, or
if one rank has been through more of them than another.
"""

import gc
from types import FrameType, TracebackType

import torch.distributed as dist
from torch import nn

from zero_minimal.notebook.stack_inspection import PLUMBING, PROJECT

WORDS = ("this stage cannot go on after a cell that failed, since its ranks may have come to different steps, or its "
         "group has ended: run again the cells that make the model and its stage")

RING = f"{PROJECT}/core/ring.py"  # not imported: a teacher may withhold it

ROOMS = "core", "guards", "processes", "extensions", "checkpoint", "offloading"  # of the package
_exchanged = [0, 0]  # collectives begun and ended, since the ranks have met


def hear(moment: str, call) -> None:
    """Count this rank's collectives: a listener of the moment "collective"."""
    if moment != "wait":
        _exchanged[moment == "end"] += 1


def exchanged() -> tuple[int, int]:
    """Collectives begun and ended, since the ranks have met."""
    return tuple(_exchanged)


def in_a_stage(trace: TracebackType | None) -> bool:
    """Whether an error comes from a stage at its work, and not from one that is being made."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return any(map(_works, frames)) and not any(map(_makes, frames))


def _works(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    ours = file.startswith((*(f"{PROJECT}/{room}/" for room in ROOMS), f"{PROJECT}/stage"))
    return ours and file not in PLUMBING | {RING} or is_stage(frame.f_locals.get("self"))


def _makes(frame: FrameType) -> bool:
    maker = frame.f_locals.get("self")
    return frame.f_code.co_name == "__init__" and hasattr(type(maker), "step") and hasattr(type(maker), "zero_grad")


def is_stage(value) -> bool:
    """Whether this is a stage of ours or of an assignment: it trains a model that it holds."""
    kind = type(value)
    return hasattr(kind, "step") and hasattr(kind, "zero_grad") and isinstance(_parts(value).get("model"), nn.Module)


def _parts(value) -> dict:
    return getattr(value, "__dict__", {})


class Closed:
    """What a stage is after that."""

    def __repr__(self):
        return f"<{WORDS}>"

    def __getattribute__(self, name):
        if name.startswith("__"):  # Python's own: it may be printed and deleted
            return object.__getattribute__(self, name)
        raise RuntimeError(WORDS)


def close(namespace: dict, half_done: bool) -> tuple[list[str], list[str]]:
    """Close the stages of this rank, and their models: all if their work may be half done, else those with a group of
    their own. Returns names in the cells' namespace: of what holds a group that ends, and of the other closed stages.
    """

    def refuse(*_):
        raise RuntimeError(WORDS)

    own = {name: value for name, value in namespace.items() if not name.startswith("_")}
    of_groups = [name for name, value in own.items() if _holds(value, dist.ProcessGroup)]
    for stage in [value for value in gc.get_objects() if is_stage(value)]:
        if half_done or _holds(stage, dist.ProcessGroup):
            stage.model.register_forward_pre_hook(refuse, prepend=True)
            stage.__class__ = Closed
    return of_groups, [name for name, value in own.items() if name not in of_groups and _holds(value, Closed)]


def _holds(value, kind: type) -> bool:
    """Whether a value is of this kind, or is a container or an object that holds one."""
    if isinstance(value, kind):
        return True
    if isinstance(value, type) or type(value).__name__ == "module":
        return False
    inside = value if isinstance(value, (list, tuple)) else [*_parts(value).values()]
    if isinstance(value, dict):
        inside = value.values()
    return any(isinstance(item, kind) for item in inside)


def forget() -> None:
    """The ranks meet anew."""
    _exchanged[:] = [0, 0]
