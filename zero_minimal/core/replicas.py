"""Replicas: keeps equal on all ranks what no bucket holds, and asks for checks."""

from torch import nn

from zero_minimal.core import collectives, seams


def broadcast_statistics(model: nn.Module, group=None) -> None:
    """Broadcast rank 0's running statistics (batch-norm's): each rank's come from its own data.

    Every persistent buffer is taken for one, whatever its dtype. What is made with persistent=False
    is not sent: it can be computed anew, alike on every rank. A stage does this at the end of
    step(); torch's DDP, with all buffers, before forward.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                collectives.broadcast(buffer, group=group, of=f"buffer {name!r}")


def check_alike(model: nn.Module, group=None) -> None:
    """The user may have edited parameters. Raises: RuntimeError on all ranks if theirs differ."""
    seams.tell("parameters_edited", model, group)
