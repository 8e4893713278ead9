"""Traffic: which collectives this rank took part in, their payloads, and what a ring would send for them.

    with TrafficMeter() as meter:
        for _ in range(steps):
            ...
    meter.per_step(steps)

A collective is seen in one of two places, and counted once:

    ours       the functions of zero_minimal.core.collectives, which notify listeners. The messages of which they are
               built on gloo do not count
    others'    the c10d operators of torch, at its dispatcher. All of torch.distributed passes it: DDP's all-reduce,
               which C++ starts, FSDP2's, DTensor's, and the plain send of a ring

The payload P is the whole vector: the input of a reduce-scatter, the output of an all-gather, the tensor of others. On
N ranks a ring sends (N−1)/N·P for each, for an all-reduce twice that (section 7 of the paper). A broadcast or reduce
sends P over N−1 of the ring's N links, so each rank is charged the mean, (N−1)/N·P. Small messages such as a barrier
are not counted. Only the caller's thread and autograd's are seen.
"""

import contextlib
import os
import socket
import struct
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_minimal.core import seams
from zero_minimal.core.work import Call

FILES = "/proc/self/fd"  # Linux: this process's open files, which include its connections
SENT = struct.Struct("200x2Q")  # tcpi_bytes_sent and tcpi_bytes_retrans in tcp_info of linux/tcp.h

# torch's operators, c10d's first, then those of the functional collectives
OPERATORS = {
    operator: name
    for name, operators in {
        "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced",
        "all_gather": "allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ _allgather_base_ "
                      "all_gather_into_tensor all_gather_into_tensor_coalesced",
        "reduce_scatter": "reduce_scatter_ reduce_scatter_tensor_coalesced_ _reduce_scatter_base_ "
                          "reduce_scatter_tensor reduce_scatter_tensor_coalesced",
        "all_to_all": "alltoall_ alltoall_base_ all_to_all_single",
        "broadcast": "broadcast_ broadcast",
        "reduce": "reduce_",
        "gather": "gather_",
        "scatter": "scatter_",
        "send": "send",
    }.items()
    for operator in operators.split()
}


class _Thread(threading.local):
    call: Call | None = None  # the collective that this thread starts, or waits for


_thread = _Thread()


@seams.at("collective")
def note_call(moment: str, call: Call) -> None:
    """One starts, or is waited for. To start it may mean to wait for others first; an error may have ended another."""
    if moment == "end":
        note_end(call)
    elif moment == "start" or not in_collective():
        _thread.call = call


@seams.at("collective_started")
def note_end(call: Call) -> None:
    if _thread.call is call:
        _thread.call = None


def in_collective() -> bool:
    """Whether this thread starts one of our collectives, or waits for it."""
    return _thread.call is not None


class TrafficMeter(TorchDispatchMode):
    """Counts the collectives of this rank while it is open. It may be opened again, and continues counting.

    collectives: {name: {"calls": count, "bytes": payload}}
    log: (name, payload, ranks of its group) of each, in order
    """

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self.collectives: dict[str, dict] = {}
        self.log: list[tuple[str, int, int]] = []
        self._sent = 0.0

    @property
    def sent_bytes(self) -> int:
        """What a ring sends for these collectives on this rank."""
        return round(self._sent)

    def per_step(self, steps: int) -> dict:
        """{"collectives": {name: {"calls", "bytes"}}, "sent_bytes"}, each number divided by `steps`."""
        collectives_per_step = {
            name: {key: _share(value, steps) for key, value in counts.items()}
            for name, counts in self.collectives.items()
        }
        return {"collectives": collectives_per_step, "sent_bytes": _share(self.sent_bytes, steps)}

    def __enter__(self):
        with contextlib.ExitStack() as undo:
            undo.enter_context(seams.heard_by("collective", self._count_ours))
            super().__enter__()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: torch calls again with the local tensors
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if operator.namespace in ("c10d", "_c10d_functional") and not in_collective():
            name = OPERATORS.get(operator.overloadpacket.__name__)
            if name:
                payload = max(map(_bytes, [*args, *kwargs.values(), result]))  # the whole vector is the largest
                self._count(name, payload, _group_size(args))
        return result

    def _count_ours(self, moment: str, call: Call) -> None:
        if moment == "start":
            self._count(call.name, call.bytes, call.group.size())

    def _count(self, name: str, payload: int, world_size: int) -> None:
        counts = self.collectives.setdefault(name, {"calls": 0, "bytes": 0})
        counts["calls"] += 1
        counts["bytes"] += payload
        self.log.append((name, payload, world_size))
        if name == "send":
            self._sent += payload
        else:
            self._sent += (2 if name == "all_reduce" else 1) * payload * (world_size - 1) / world_size


def wire_bytes(*, quiet: bool = False) -> int | None:
    """Bytes that this rank's own TCP connections have sent so far, as the kernel counts them, or None if it does not
    report them (macOS, Linux before 4.19).

    The difference of two readings is what a rank really sent. It does not include what other programs send,
    retransmissions, or packet headers.

    Args:
        quiet: every rank calls this; the reading is taken between two barriers, while no rank sends anything.
    """
    if quiet:
        dist.barrier()
    known, total = hasattr(socket, "TCP_INFO") and os.path.isdir(FILES), 0
    for number in os.listdir(FILES) if known else ():
        try:
            if not os.readlink(f"{FILES}/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # not a TCP socket, or closed meanwhile
        if known := len(info) >= SENT.size:
            sent, again = SENT.unpack_from(info)
            total += sent - again
    if quiet:
        dist.barrier()
    return total if known else None


# ----------------------------------------------------------------------------------------------------------- arithmetic


def _bytes(argument) -> int:
    """Bytes of a tensor, or of all tensors in (nested) lists of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in filter(torch.is_tensor, tree_leaves(argument)))


def _group_size(args) -> int:
    """Ranks in the group that an operator was given: a boxed process group, or a group's name if it is functional."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument).size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()


def _share(value: int, steps: int) -> int | float:
    return value // steps if value % steps == 0 else value / steps
