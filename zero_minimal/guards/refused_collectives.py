"""A collective is refused before it sends anything: without ranks, on a rank that is not in its
group, with an unknown op or sizes that do not fit, and in a process that was forked from a rank.
That one shares the rank's connections, and its messages would mix with the rank's.

Seam: collective. Mistake: at stage 3 a DataLoader's worker, or a process that the user forked,
calls the model.
"""

import os
import weakref

import torch.distributed as dist

from zero_minimal.core import seams
from zero_minimal.core.work import Call

NO_RANKS = ("there are no ranks yet: put the program under `with ranks.start():` and start it with "
            "torchrun, or call it through ranks.run(function, world_size)")
OPS = {"reduce_scatter": ("sum", "avg"), "all_reduce": ("sum", "avg", "max")}

_process_of = weakref.WeakKeyDictionary()  # group: the process that joined it


@seams.at("collective")
def refuse_strangers(moment: str, call: Call) -> None:
    """Raises: RuntimeError if there are no ranks; ValueError on one that is not in the group."""
    if call.group is None:
        raise RuntimeError(NO_RANKS)
    if call.group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{call.name}: this rank, {dist.get_rank()} of the world, is not in "
                         "group=: call it on the ranks of the group alone")


@seams.at("collective")
def check_arguments(moment: str, call: Call) -> None:
    """Raises: ValueError."""
    if moment != "start":
        return
    op, known = call.options.get("op", "avg"), OPS.get(call.name, ())
    if known and op not in known:
        raise ValueError(f"unknown op {op!r}: use {' or '.join(known)}")
    if call.name in ("reduce_scatter", "all_gather"):
        output = call.options.get("output", call.tensors[0])
        input = call.options.get("input", call.tensors[-1])
        sides = [("input", input.numel()), ("output", output.numel())]
        (_, whole), (name, part) = sides if call.name == "reduce_scatter" else reversed(sides)
        if whole != call.group.size() * part:
            raise ValueError(f"{call.name}: {whole} elements are not {call.group.size()} times the "
                             f"{name}'s {part}")


@seams.at("collective")
def refuse_forked(moment: str, call: Call) -> None:
    """Raises: RuntimeError in a process that was forked from a rank."""
    if _process_of.setdefault(call.group, os.getpid()) != os.getpid():
        raise RuntimeError(
            "this process was forked from a rank, which alone may start collectives and wait for "
            "them (at stage 3 each forward does): let the rank itself call the model, or fork "
            "before the ranks join and let the child work on a copy of the weights"
        )
