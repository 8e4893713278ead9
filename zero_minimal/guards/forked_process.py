"""A process that was forked from a rank may start no collective. It shares the rank's connections,
and its messages would mix with the rank's.

Seam: collective. Mistake: at stage 3 a DataLoader's worker, or a process that the user forked,
calls the model.
"""

import os
import weakref

import torch.distributed as dist

from zero_minimal.core import seams
from zero_minimal.core.work import Call

_process_of = weakref.WeakKeyDictionary()  # group: the process that joined it


@seams.at("collective")
def refuse_forked(moment: str, call: Call) -> None:
    """Raises: RuntimeError in a process that was forked from a rank."""
    refuse_in_a_fork(call.group)


def refuse_in_a_fork(group: dist.ProcessGroup) -> None:
    if _process_of.setdefault(group, os.getpid()) != os.getpid():
        raise RuntimeError(
            "this process was forked from a rank, which alone may start collectives and wait for "
            "them (at stage 3 each forward does): let the rank itself call the model, or fork "
            "before the ranks join and let the child work on a copy of the weights"
        )
