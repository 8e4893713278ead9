"""External parameters (DeepSpeed's name): at stage 3 a program uses a parameter that is whole while
its unit's forward does not run: in the model's forward after a block's turn, in the block's forward
hook, or in the training loop. From then until it is freed it is "lent".

execution_order.py follows a unit's own operations: backward meets the unit's output first, and
gathers the unit. A penalty on a weight (its L1 norm, say) is outside the unit, and saves the
parameter itself, which may be freed in backward. So each operation on a lent parameter, or on a
view of it, counts as a small call of the unit, with a turn in backward. To read a kept view after
the parameter is released is an error: its memory is gone.

Seam: parameter_moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zero_minimal.core import seams
from zero_minimal.core.layout import same_storage
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards import reads_of_freed_parameters
from zero_minimal.guards.outputs import tensors_in

TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)


class _Followed:
    """What the two classes below share."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in reads_of_freed_parameters.ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        used = [value for value in _arguments(args, kwargs) if isinstance(value, _Followed)]
        with _plain(used):
            for value in used:
                if value.numel() and not value.untyped_storage().nbytes():
                    raise RuntimeError(
                        "a view of a parameter is read after the parameter was released: its "
                        "memory is gone. Keep a .clone() of it"
                    )
            if function in TO_NUMPY:  # an array cannot raise an error when its memory is gone
                return function(args[0].clone(), *args[1:], **kwargs)
            before = torch.autograd._get_sequence_nr()
            result = function(*args, **kwargs)
            if isinstance(result, (torch.Tensor, tuple, list)):
                _follow(used, list(tensors_in(result)), before)
            return result

    def __repr__(self, *, tensor_contents=None) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.detach().clone())


class Lent(_Followed, nn.Parameter):
    """A parameter that is whole while its unit's forward does not run."""

    def __deepcopy__(self, memo):  # a plain one
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(self)] = copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copied


class View(_Followed, torch.Tensor):
    """A view of a lent parameter: it shares the parameter's memory."""


def lend(params: list[nn.Parameter], used: WeakHook) -> None:
    """From now on used(node, number) is called for each operation on them that autograd records."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__, param._zero_used = Lent, used


def follow_view(tensor: torch.Tensor, used: WeakHook) -> None:
    """The same for a view of a parameter, which an operation inside the unit has made."""
    if type(tensor) is torch.Tensor:
        tensor.__class__, tensor._zero_used = View, used


@seams.at("parameter_moves")
def becomes_plain(param: nn.Parameter) -> None:
    take_back([param])


def take_back(params: list[nn.Parameter]) -> None:
    """Their unit begins to work: its operations need not be followed one by one."""
    for param in params:
        if type(param) is Lent:
            param.__class__ = nn.Parameter
            vars(param).pop("_zero_used", None)


@contextmanager
def _plain(values: list[torch.Tensor]) -> Iterator[None]:
    """Context in which the values have torch's own classes."""
    kinds = [type(value) for value in values]
    for value, kind in zip(values, kinds, strict=True):
        value.__class__ = nn.Parameter if kind is Lent else torch.Tensor
    try:
        yield
    finally:
        for value, kind in zip(values, kinds, strict=True):
            value.__class__ = kind


def _arguments(args: tuple, kwargs: dict):
    for value in [*args, *kwargs.values()]:
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def _follow(used: list, results: list[torch.Tensor], before: int) -> None:
    """Report the nodes that an operation has made since number `before`; follow its views, too."""
    # a dict, since a set would have another order on each rank
    ties = dict.fromkeys(filter(None, (getattr(value, "_zero_used", None) for value in used)))
    for tensor in results:
        if any(same_storage(tensor, each) for each in used):
            follow_view(tensor, next(iter(ties), None))
        node = tensor.grad_fn if torch.is_grad_enabled() else None
        if node is not None and node._sequence_nr() >= before:
            for tie in ties:
                tie(node, before)
