"""Recovery: what a failed cell leaves on a rank, and what can still be used.

Tensors and models keep their values. Two kinds of objects can no longer be used:

    stages     a stage that was in the middle of its work may be a step further on one rank than on another: training
               would silently continue with different parameters. So it is closed: any use of it, or of its model, is an
               error that says what to run again.
    groups     groups of dist.new_group, and objects that hold one (DDP, a mesh, a stage with such a group): they end
               with the process group.

A stage was in the middle of its work if the failure came from a stage on any rank, if a collective was under way, or if
one rank has ended more collectives than another.
"""

import gc
import traceback
from types import FrameType, TracebackType

import torch.distributed as dist
from torch import nn

from zero_minimal.notebook.stack_inspection import PLUMBING, PROJECT

WORDS = ("this stage cannot go on after a cell that failed, since its ranks may have come to different steps, or its "
         "group has ended: run again the cells that make the model and its stage")

RING = f"{PROJECT}/core/ring.py"  # not imported, as a teacher may withhold it

ROOMS = "core", "guards", "processes", "extensions", "checkpoint", "offloading"  # subpackages
_exchanged = [0, 0]  # collectives begun and ended since the ranks met


def hear(moment: str, call) -> None:
    """Count this rank's collectives, as a listener of "collective"."""
    if moment != "wait":
        _exchanged[moment == "end"] += 1


def exchanged() -> tuple[int, int]:
    """The numbers of collectives begun and ended since the ranks met."""
    return tuple(_exchanged)


def in_a_stage(trace: TracebackType | None) -> bool:
    """Whether an error comes from a stage at work, and not from its constructor."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return any(map(_works, frames)) and not any(map(_makes, frames))


def _works(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    ours = file.startswith((*(f"{PROJECT}/{room}/" for room in ROOMS), f"{PROJECT}/stage"))
    return ours and file not in PLUMBING | {RING} or is_stage(frame.f_locals.get("self"))


def _makes(frame: FrameType) -> bool:
    maker = frame.f_locals.get("self")
    return frame.f_code.co_name == "__init__" and hasattr(type(maker), "step") and hasattr(type(maker), "zero_grad")


def is_stage(value) -> bool:
    """Whether this is a stage, ours or an assignment's: an object that trains a model that it holds."""
    kind = type(value)
    return hasattr(kind, "step") and hasattr(kind, "zero_grad") and isinstance(_parts(value).get("model"), nn.Module)


def _parts(value) -> dict:
    return getattr(value, "__dict__", {})


class Closed:
    """The class of a closed stage."""

    def __repr__(self):
        return f"<{WORDS}>"

    def __getattribute__(self, name):
        if name.startswith("__"):  # Python's own: it can be printed and deleted
            return object.__getattribute__(self, name)
        raise RuntimeError(WORDS)


def close(namespace: dict, half_done: bool) -> tuple[list[str], list[str]]:
    """Close this rank's stages and their models: all if their work may be half done, otherwise those with their own
    group. Returns names in the cells' namespace: of objects that hold an ended group, and of other closed stages.
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
    """Whether a value has this class, or is a container or an object that holds one."""
    if isinstance(value, kind):
        return True
    if isinstance(value, type) or type(value).__name__ == "module":
        return False
    inside = value if isinstance(value, (list, tuple)) else [*_parts(value).values()]
    if isinstance(value, dict):
        inside = value.values()
    return any(isinstance(item, kind) for item in inside)


def forget() -> None:
    """Reset the counts when the ranks meet again."""
    _exchanged[:] = [0, 0]
