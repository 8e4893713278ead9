"""On the way: parameters that are still being gathered when step() has returned (late_gather.py).

    step()      update, send ──► bucket 3, 2, 1, 0
    forward     a module uses its parameters: are they here? Wait for their buckets, then compute

Whoever reads a parameter before its bucket is here would get some ranks' new values and others' old
ones. So until then the parameter is of a class of its own, Awaited, and points to a NaN. Every
operation of torch on it waits first, and then finds a plain parameter, whole: a forward, copy,
print, checkpoint, an edit in place. Shape, dtype and .grad can be asked meanwhile.

A view of a parameter that somebody has kept (`weight.data`, say) has no class that could wait. If
there is one, the gathering is waited for at once, as at stages 1 and 2.
"""

import threading

import torch
from torch import nn
from torch.utils import _pytree

from zero_minimal.foundations import joining, released
from zero_minimal.foundations.layout import Bucket
from zero_minimal.foundations.ties import Tie

# what would tell where a parameter's memory is, and how it lies there
PLACES = ("stride", "is_contiguous", "storage_offset", "untyped_storage", "data_ptr", "is_shared")
MAY_ASK = released.ALLOWED - {getattr(torch.Tensor, name) for name in PLACES}


class Awaited(released.Watched, nn.Parameter):
    """A parameter whose new values are not here yet."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in MAY_ASK:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        late = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Awaited)]
        for param in late:
            _wait_for(param)
        if not late:  # it lies where one cannot look
            wait_for_all()
        return function(*args, **kwargs)

    def __deepcopy__(self, memo):
        _wait_for(self)
        return self.__deepcopy__(memo)  # now of nn.Parameter

    def __reduce_ex__(self, protocol):
        _wait_for(self)
        return self.__reduce_ex__(protocol)


class OnTheWay:
    """What a stage's step() has sent, and nobody has needed yet."""

    def __init__(self, stage):
        self._pending: dict = {}  # bucket: its all-gather, in the order in which they were sent
        self._params: dict[nn.Parameter, torch.Tensor] = {}  # each that is late: its own memory
        self._buckets_of: dict[nn.Parameter, list[Bucket]] = {}
        for bucket in stage.buckets:
            for param in bucket.params:
                self._buckets_of.setdefault(param, []).append(bucket)
        self._seen: set = set()  # flats of which somebody has a view
        self._lock = threading.RLock()  # an evaluation may run on a thread of its own
        self._flats = {bucket.flat: bucket.parameters for bucket in stage.buckets}
        self._holders = {flat: _holders(whole) for flat, whole in self._flats.items()}
        before = _Before(Tie(OnTheWay._before_model, self), Tie(OnTheWay._before_compiled, self))
        stage.model.register_forward_pre_hook(before, prepend=True)

    def send(self, bucket: Bucket, start) -> None:
        """start() begins to gather the bucket; from here on its parameters are late."""
        if not self._pending:  # what is being sent would be counted, too
            self._seen = {flat for flat, whole in self._flats.items()
                          if _holders(whole) > self._holders[flat]}
        hidden = bucket.flat not in self._seen and all(
            type(param) in (nn.Parameter, Awaited) for param in bucket.params)
        for param in bucket.params:
            if hidden and param not in self._params:
                self._params[param] = param.data
                param.data = bucket.flat.placeholder(param)
                param.__class__, param._zero_late = Awaited, self
        self._pending[bucket] = start()
        _under_way.add(self)
        if not hidden:  # somebody has a view, or a parameter a class of the user's
            self._arrive([bucket])

    def wait(self) -> None:
        """Until all of it is here."""
        self._arrive(list(self._pending))

    def wait_for(self, param: nn.Parameter) -> None:
        """Until this parameter is here."""
        self._arrive(self._buckets_of[param])

    def _arrive(self, buckets: list[Bucket]) -> None:
        with self._lock:
            for bucket in buckets:
                if bucket in self._pending:
                    self._pending[bucket].wait()
                    del self._pending[bucket]
            still_late = {param for bucket in self._pending for param in bucket.params}
            for param in [param for param in self._params if param not in still_late]:
                released.restore(param, self._params.pop(param))
                del param._zero_late
            if not self._pending:
                _under_way.discard(self)

    def _before_compiled(self, *_) -> None:
        self.wait()

    def _before_model(self, model: nn.Module, _) -> None:
        """What looks at parameters without using them needs all: compiled code, and in evaluations
        torch's encoder, which takes its fast path with plain ones alone."""
        if self._pending and (not torch.is_grad_enabled() or _is_compiled(model)):
            self.wait()


class _Before:
    """A hook before the model's forward, plain or compiled."""

    def __init__(self, plain: Tie, compiled: Tie):
        self.plain, self.compiled = plain, compiled

    def __call__(self, model, given):
        if torch.compiler.is_compiling():
            self.compiled(model, given)
        else:
            self.plain(model, given)


_under_way: set[OnTheWay] = set()  # so a model that is dropped does not end a gathering half-way


def wait_for_all() -> None:
    """Until all that this rank gathers is here."""
    for each in list(_under_way):
        each.wait()


joining.before_the_end(wait_for_all)  # the other ranks still need what this one sends


def _wait_for(param: Awaited) -> None:
    late = vars(param).get("_zero_late")
    if late is not None:
        late.wait_for(param)


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch compiles it, or a part of it."""
    return any(isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl
               for module in model.modules())


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors lie in its memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
