"""A process that was forked from a rank starts no collective. It has the connections of that rank,
and what it writes there would come in between.

Seam: collective. Mistake: a DataLoader's worker, or a fork of the user's, that calls the model at
stage 3.
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
