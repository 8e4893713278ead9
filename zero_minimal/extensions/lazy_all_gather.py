"""Lazy all-gather: parameters that are still being gathered when step() has returned
(late_gather.py).

    step()      update, start ─► bucket 3, 2, 1, 0
    forward     a module uses its parameters: are they here? Wait for their buckets, then compute

A read of a parameter before its bucket is here would find some ranks' new values and others' old
ones. So until then the parameter has a class of its own, Awaited, and points to a NaN. Every torch
operation on it (in a forward, copy, print, checkpoint or edit in place) waits first, and then finds
a plain, whole parameter. Shape, dtype and .grad can be read meanwhile.

    here?      its neighbours?     what the parameter is
    no         no                  Awaited, a NaN: an operation waits for it
    yes        no                  Awaited, its values: what could move the memory waits for all
    yes        yes                 a plain parameter

Neighbours share one memory. Messages are still being written there, so it must not move.

A view that the program keeps (`weight.data`, say) has no class that could wait, and TorchScript
ignores the class. If there is either, step() waits for the all-gathers at once, as at stages 1 and
2. Code that bypasses the class finds the NaN: C++ extensions, and TorchScript made of a part and
kept outside of the model. CUDA graphs find any values. Call `zero.gathering.wait()` before these.

Seam: parameter_moves.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils import _pytree

from zero_minimal.core import collectives, seams
from zero_minimal.core.layout import Bucket, same_storage
from zero_minimal.core.weak_hooks import WeakHook
from zero_minimal.guards import reads_of_freed_parameters
from zero_minimal.guards.views_from_outside import holders
from zero_minimal.processes import joining

# what tells where a parameter's memory is, and its layout there
PLACES = ("stride", "is_contiguous", "storage_offset", "untyped_storage", "data_ptr", "is_shared")
MAY_ASK = reads_of_freed_parameters.ALLOWED - {getattr(torch.Tensor, name) for name in PLACES}
# what moves that memory, or exposes it to code that can, with all that is in it
MOVE = ("untyped_storage", "storage", "_typed_storage", "data_ptr", "share_memory_", "detach",
        "detach_", "numpy", "__array__", "__dlpack__", "_use_count")  # swap_tensors reads the last
MOVABLE = {getattr(torch.Tensor, name) for name in MOVE if hasattr(torch.Tensor, name)}
MOVABLE |= {torch.Tensor.data.__get__, torch.Tensor.data.__set__}

FORKED = (
    "this process was forked from a rank while {} was on its way, and here it never arrives: call "
    "zero.gathering.wait() before the fork (a DataLoader with workers forks in iter())"
)
LOST = (
    "{} never arrived, and this rank has lost it: gathering it failed ({}). Start the ranks again "
    "from the last checkpoint"
)
TRACED = (
    "torch.jit.trace would find parameters that are on their way, and record how they come: call "
    "zero.gathering.wait() before"
)
COMPILED = "a parameter is on its way: call zero.gathering.wait() before what is compiled"

try:
    not_compiled = torch.compiler.disable(reason=COMPILED)
except TypeError:  # older versions, 2.6 among them, take no reason
    not_compiled = torch.compiler.disable


class Awaited(reads_of_freed_parameters.Absent):
    """A parameter whose new values, or those of its neighbours, are not here yet."""

    @classmethod
    @not_compiled  # compiled code stops here, waits, and goes on
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in MAY_ASK:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        late = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, Awaited)]
        for param in late:
            Awaited.arrive(param, and_neighbours=function in MOVABLE)  # it may be plain by now
        if not late:  # it is inside an object of another kind
            wait_for_all()
        with _as_plain(late):
            return function(*args, **kwargs)

    def arrive(self, and_neighbours: bool) -> None:
        """Wait until it is here."""
        if late := vars(self).get("_zero_late"):
            late.wait(None if and_neighbours else self)

    def __deepcopy__(self, memo):
        Awaited.arrive(self, and_neighbours=True)
        return self.__deepcopy__(memo)  # now nn.Parameter's

    def __reduce_ex__(self, protocol):
        Awaited.arrive(self, and_neighbours=True)
        return self.__reduce_ex__(protocol)


@seams.at("parameter_moves")
def becomes_plain(param: nn.Parameter) -> None:
    if isinstance(param, Awaited):
        param.__class__ = nn.Parameter


class LazyAllGather:
    """The all-gathers that a stage's step() has started, and that nothing has waited for yet."""

    def __init__(self, stage):
        self._model, self._group = stage.model, stage.group
        self._pending: dict = {}  # bucket: its all-gather, in the order in which they were sent
        self._params: dict[nn.Parameter, torch.Tensor] = {}  # each late one: its own memory
        # here, but still Awaited: a neighbour is late (not a list, which would compare them)
        self._here: dict[nn.Parameter, None] = {}
        self._buckets_of: dict[nn.Parameter, list[Bucket]] = stage.reducer.buckets_of
        self._seen: set = set()  # flats of which the program holds a view
        self._traced = False  # TorchScript was made of the model, and the program may keep it
        self._lost: BaseException | None = None  # the error that ended a wait
        self._process = os.getpid()
        self._lock = threading.RLock()  # an evaluation may run on a thread of its own
        self._flats = {bucket.flat: bucket.parameters for bucket in stage.buckets}
        self._holders = {flat: holders(vector) for flat, vector in self._flats.items()}
        before = _Before(WeakHook(LazyAllGather._before_model, self),
                         WeakHook(LazyAllGather._before_compiled, self))
        for module in stage.model.modules():
            if module is stage.model or isinstance(module, nn.TransformerEncoder):
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    def start(self, bucket: Bucket) -> None:
        """Start to gather the bucket; from here on its parameters are late."""
        if not self._pending:  # all-gathers under way would be counted, too
            self._seen = {flat for flat, vector in self._flats.items()
                          if holders(vector) > self._holders[flat]}
            if self._traced or _is_scripted(self._model):
                self._seen = set(self._flats)
        hidden = bucket.flat not in self._seen and all(
            type(param) in (nn.Parameter, Awaited) for param in bucket.params)
        for param in bucket.params:
            if hidden and param not in self._params:
                self._params[param] = param.data
                param.data = bucket.flat.placeholder(param)
                param.__class__, param._zero_late = Awaited, self
        self._pending[bucket] = collectives.all_gather(
            bucket.parameters, bucket.parameter_shard, group=self._group, of=bucket, async_op=True
        )
        _under_way.add(self)
        if not hidden:  # there is a view, or a parameter with a class of the user's
            self._arrive([bucket])

    def wait(self, param: nn.Parameter | None = None) -> None:
        """Wait until this parameter is here. None, or one that was swapped: until all are."""
        self._arrive(self._buckets_of.get(param, list(self._pending)))

    def _arrive(self, buckets: list[Bucket]) -> None:
        with self._lock:
            for bucket in buckets:
                if bucket in self._pending:
                    self._wait(bucket)
            still_late = {param for bucket in self._pending for param in bucket.params}
            for param in [param for param in self._params if param not in still_late]:
                self._put_back(param)
            flats = {bucket.flat for bucket in self._pending}
            for param in [param for param in self._here if self._flat(param) not in flats]:
                del self._here[param]
                param.__class__ = nn.Parameter
                vars(param).pop("_zero_late", None)
            if not self._pending:
                _under_way.discard(self)

    def _wait(self, bucket: Bucket) -> None:
        """Wait until a bucket is here. Raises: RuntimeError if it never will be."""
        words = bucket.name
        if os.getpid() != self._process:
            raise RuntimeError(FORKED.format(words))
        if self._lost is not None:
            raise RuntimeError(LOST.format(words, self._lost)) from self._lost
        try:
            self._pending[bucket].wait()
        except Exception as error:
            self._lost = error
            _under_way.discard(self)
            raise
        del self._pending[bucket]

    def _put_back(self, param: nn.Parameter) -> None:
        """It is here: let it point to its values. If the user has replaced them meanwhile
        (param.set_ does not wait), the new ones stay, and the next backward raises an error."""
        memory = self._params.pop(param)
        with torch._C.DisableTorchFunctionSubclass():
            if same_storage(param, self._flat(param).placeholder(param)):
                param.data = memory
        self._here[param] = None

    def _flat(self, param: nn.Parameter):
        return self._buckets_of[param][0].flat

    @contextlib.contextmanager
    def as_plain(self, param: nn.Parameter) -> Iterator[None]:
        """Context in which a parameter that is here has no special class."""
        with self._lock:
            param.__class__ = nn.Parameter
        try:
            yield
        finally:
            with self._lock:
                if param in self._here:
                    param.__class__ = Awaited

    def _before_compiled(self, *_) -> None:
        self.wait()

    def _before_model(self, model: nn.Module, *given) -> None:
        """Wait for all if code inspects parameters without using them: compiled code, and in
        evaluations torch's encoder, whose fast path needs plain ones. A tensor with a class of the
        user's overrides operations on parameters, too."""
        if torch.jit.is_tracing():
            if self._pending:
                raise RuntimeError(TRACED)
            self._traced = True
        if self._pending and (not torch.is_grad_enabled() or _is_compiled(model)
                              or any(map(_answers, _pytree.tree_leaves(given)))):
            self.wait()


class _Before:
    """A hook before the model's forward, plain or compiled."""

    def __init__(self, plain: WeakHook, compiled: WeakHook):
        self.plain, self.compiled = plain, compiled

    def __call__(self, model, args, kwargs):
        if torch.compiler.is_compiling():
            self.compiled(model, args, kwargs)
        else:
            self.plain(model, args, kwargs)


# so that dropping a model does not end an all-gather half-way
_under_way: set[LazyAllGather] = set()


def wait_for_all() -> None:
    """Wait until all that this rank gathers is here."""
    for each in list(_under_way):
        each.wait()


joining.before_the_end(wait_for_all)  # the other ranks still need what this one sends


@contextlib.contextmanager
def _as_plain(params: list[nn.Parameter]) -> Iterator[None]:
    """Context in which they have no special class, so that torch does not call it again."""
    with contextlib.ExitStack() as stack:
        for param in params:
            late = vars(param).get("_zero_late")
            if late is not None:
                stack.enter_context(late.as_plain(param))
        yield


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch compiles it, or a part of it."""
    return any(isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl
               for module in model.modules())


def _is_scripted(model: nn.Module) -> bool:
    """Whether a part of it is TorchScript, which reads parameters in C++."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


def _answers(value) -> bool:
    """Whether a value's class may override torch's operations."""
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter)
