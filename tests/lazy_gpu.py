"""A GPU made of CPU memory, as lazy as CUDA allows: with it each branch for a GPU runs, with values, where none is.

    with lazy_gpu.here():                                  # in a test, or on each rank
        zero = Offloaded2(GPT(config).to("cuda"), AdamW)
        lazy_gpu.backward(loss)                            # in a thread of its own, as on a GPU
        zero.step()

Tensors that are made on "cuda", or computed from such, say that they lie on cuda:0. What is given to the current stream
is done at once. A copy with non_blocking=True on another stream is done as late as is allowed: when somebody waits for
an event behind it, or for that stream. Whoever reads what it copies to without such a wait reads what was there before
(POISON, in new memory). And what it copies from may have been changed by then, or be gone, if nobody has called
record_stream(): then POISON arrives.
"""

import concurrent.futures
import contextlib
import threading
import time
import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
POISON = 0x7F  # each byte of what must not be read: NaN-like, and large

_lock = threading.RLock()
_thread = threading.local()
_on_gpu: dict[int, weakref.ref] = {}
_pinned: dict[int, weakref.ref] = {}
seen: set[str] = set()  # what was asked of the GPU: a test looks whether its branch has run


def _mark(tensor, where=_on_gpu):
    handle = tensor.untyped_storage()
    where[handle._cdata] = weakref.ref(handle)


def is_on_gpu(tensor, where=_on_gpu):
    handle = tensor.untyped_storage()
    known = where.get(handle._cdata)
    return known is not None and known() is handle


def is_pinned(tensor):
    return is_on_gpu(tensor, _pinned)


# ---------------------------------------------------------------------------------------------- streams and events


class Stream:
    """Copies that are not done yet, in order."""

    def __init__(self, device=None):
        self.queue, self.kept = [], []

    def wait_stream(self, other):
        other.drain()  # the current stream does all at once, so only another one can be behind

    def wait_event(self, event):
        event.drain()

    def synchronize(self):
        self.drain()

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def give(self, work):
        with _lock:
            self.queue.append(work)

    def drain(self, upto=None):
        with _lock:
            while self.queue and self.queue[0] is not upto:
                self.queue.pop(0)()
            if upto is not None and self.queue:
                self.queue.pop(0)
            if not self.queue:
                self.kept.clear()


class Event:
    """A place in a stream's queue."""

    def __init__(self, enable_timing=False, blocking=False):
        self.stream, self.enable_timing = None, enable_timing

    def record(self, stream=None):
        self.stream, self.work = stream or current_stream(), self._come
        self.time = None
        if self.stream.queue:
            self.stream.give(self.work)
        else:
            self._come()

    def _come(self):
        self.time = time.perf_counter()

    def drain(self):
        if self.time is None:
            self.stream.drain(self.work)
            self._come()

    def synchronize(self):
        seen.add("event.synchronize")
        self.drain()

    def elapsed_time(self, other):
        assert self.enable_timing and other.enable_timing
        return (other.time - self.time) * 1000


_default = Stream()


def current_stream(device=None):
    return getattr(_thread, "stream", _default)


@contextlib.contextmanager
def stream(chosen):
    before = current_stream()
    _thread.stream = chosen
    try:
        yield
    finally:
        _thread.stream = before


# --------------------------------------------------------------------------------------------------------- tensors


class Mode(TorchDispatchMode):
    """Sees every operator of its thread."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if kwargs.pop("pin_memory", False):
            seen.add("pinned")
            result = operator(*args, **kwargs)
            _mark(result, _pinned)
            return result
        wants_gpu = device is not None and torch.device(device).type == "cuda"
        if wants_gpu:
            kwargs["device"] = torch.device("cpu")
        name = operator.overloadpacket.__name__
        given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if name in ("copy_", "_to_copy") and current_stream() is not _default:
            return self._later(name, operator, args, kwargs, wants_gpu)
        result = operator(*args, **kwargs)
        if wants_gpu or device is None and any(is_on_gpu(one) for one in given):
            kept = {one.untyped_storage()._cdata for one in given}
            for one in torch.utils._pytree.tree_leaves(result):
                if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in kept:
                    _mark(one)
        return result

    def _later(self, name, operator, args, kwargs, wants_gpu):
        """A copy on a stream of its own."""
        late = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
        source = args[-1] if name == "_to_copy" else args[1]
        target = args[0] if name == "copy_" else torch.empty_like(source.detach(), dtype=kwargs.get("dtype"))
        if name == "_to_copy":
            target.untyped_storage().fill_(POISON)
            if wants_gpu:
                _mark(target)
        gone, shape = weakref.ref(source.untyped_storage()), (source.dtype, source.size(), source.stride(),
                                                              source.storage_offset())
        stays = target.detach()

        def work():
            storage = gone()
            if storage is None or not storage.nbytes():
                stays.view(-1).view(torch.uint8).fill_(POISON)
                return
            dtype, size, stride, offset = shape
            stays.copy_(torch.empty(0, dtype=dtype).set_(storage, offset, size, stride))

        host_side = source if is_pinned(source) else target
        if late and is_pinned(host_side):
            seen.add("late copy from the GPU" if is_on_gpu(source) else "late copy to the GPU")
            if is_pinned(source):  # torch's allocator of pinned memory waits for the copy before it lends it again
                current_stream().kept.append(source.untyped_storage())
            current_stream().give(work)
        else:
            work()
        return target


def _to(real):
    def to(self, *args, **kwargs):
        wanted = [one for one in [*args, kwargs.get("device")] if isinstance(one, (torch.device, str))]
        if wanted and is_on_gpu(self):
            if torch.device(wanted[0]).type == "cuda":  # it is there
                args = [one for one in args if one is not wanted[0]]
                kwargs.pop("device", None)
                return real(self, *args, **kwargs) if args or set(kwargs) - {"non_blocking"} else self
            return cpu(self)
        return real(self, *args, **kwargs)

    return to


def cpu(self):
    if not is_on_gpu(self):
        return self
    seen.add("cpu()")
    with torch.utils._python_dispatch._disable_current_modes():
        return self.detach().clone()


def record_stream(self, stream):
    seen.add("record_stream")
    if stream is not _default:
        with _lock:
            stream.kept.append(self.untyped_storage())


def _tensor_from(real):
    def tensor_from(data, *, device=None, **options):  # torch.tensor goes to a device past all modes
        wants_gpu = device is not None and torch.device(device).type == "cuda"
        made = real(data, device="cpu" if wants_gpu else device, **options)
        if wants_gpu:
            _mark(made)
        return made

    return tensor_from


def cuda_state(device=None):
    return torch.zeros(16, dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------------------ here


@contextlib.contextmanager
def here(gpus=1):
    """Context in which this process has so many GPUs, all of them the same one."""
    tensor, real_device = torch.Tensor, torch._C.TensorBase.device
    in_tensor = {
        "is_cuda": property(is_on_gpu),
        "device": property(lambda self: GPU if is_on_gpu(self) else real_device.__get__(self)),
        "to": _to(tensor.to), "cpu": cpu, "record_stream": record_stream,
    }
    in_cuda = {
        "Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": stream,
        "_lazy_init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: gpus, "current_device": lambda: 0, "set_device": lambda device: seen.add("set_device"),
        "synchronize": lambda device=None: None, "get_rng_state": cuda_state,
        "set_rng_state": lambda state, device=None: seen.add("set_rng_state"),
        "manual_seed": lambda seed: seen.add("seed"), "manual_seed_all": lambda seed: None,
        "get_device_capability": lambda device=None: (8, 0), "is_current_stream_capturing": lambda: False,
    }
    with contextlib.ExitStack() as undo:
        for name, value in in_tensor.items():
            undo.enter_context(mock.patch.object(tensor, name, value))
        for name, value in in_cuda.items():
            undo.enter_context(mock.patch.object(torch.cuda, name, value))
        undo.enter_context(mock.patch("torch.cuda.nccl.version", lambda: (2, 0, 0)))
        undo.enter_context(mock.patch.object(torch, "tensor", _tensor_from(torch.tensor)))
        undo.enter_context(Mode())
        yield


_engine: list = []


def backward(loss):
    """In the thread in which a GPU's backward runs: it counts graph nodes by itself."""
    def run():
        with Mode():
            loss.backward()

    if not _engine:
        _engine.append(concurrent.futures.ThreadPoolExecutor(1))
    _engine[0].submit(run).result()
