"""Unsharded: what a step of the model itself needs, without any system, for the bound of paper/bound.py.

The model runs forward and backward once, on tensors without values, and each gradient is dropped as soon as it is
computed. The ledger then has the parameters and what no system can avoid: rest(t). The operators that read a parameter,
and their moments, show how long it must live: live(t).
"""

from itertools import accumulate

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.owners import strided_tensors
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper.bound import Bound, need


class Reads(TorchDispatchMode):
    """When each parameter is read, as positions in the ledger's trace. Making a view does not count as a read."""

    def __init__(self, model: torch.nn.Module, ledger: Ledger):
        super().__init__()
        self.ledger = ledger
        self.sizes = {_place(param): param.nbytes for param in model.parameters()}
        self.times: dict[int, list[int]] = {place: [] for place in self.sizes}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        made = {_place(tensor) for tensor in strided_tensors(result)}
        for tensor in strided_tensors((args, list((kwargs or {}).values()))):
            if _place(tensor) in self.times and _place(tensor) not in made:
                self.times[_place(tensor)].append(len(self.ledger.trace))
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bound_of(model: torch.nn.Module, batch: int, sequence: int, ranks: int, optimizer: int = 6) -> Bound:
    """The bound of a step of this model on `ranks` data-parallel ranks; call it inside without_values().

    optimizer: bytes of optimizer state for each byte of parameters: 12 / 2 for Adam in mixed precision.
    """
    ledger, meter = Ledger(), TrafficMeter()
    parameters = sum(param.nbytes for param in model.parameters())
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    with ledger:
        ledger.watch(model)
        before = ledger.total - parameters
        with Reads(model, ledger) as reads, meter:
            tokens = torch.zeros(batch, sequence, dtype=torch.int64)
            model(tokens, tokens).backward()
        moments = [moment.total - parameters - before for moment in ledger.timeline]
    highest = max(need(live, rest, parameters, ranks, optimizer * parameters)
                  for live, rest in zip(_live(reads, len(moments)), moments, strict=True))
    return Bound(parameters, ranks, highest, meter.sent_bytes)


def _drop(param: torch.nn.Parameter) -> None:
    param.grad = None


def _live(reads: Reads, moments: int) -> list[int]:
    """Bytes of parameters that are between their first and their last use, at each moment of the trace."""
    change = [0] * (moments + 1)
    for place, times in reads.times.items():
        if times:
            change[min(times[0], moments)] += reads.sizes[place]
            change[min(times[-1], moments)] -= reads.sizes[place]
    return list(accumulate(change[:-1]))
