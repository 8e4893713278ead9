"""Memory: a ledger of every tensor storage on this rank, by category, kept from outside the stages.

    ledger = Ledger()
    with ledger:
        model = GPT(config)
        zero = Stage2(model, torch.optim.AdamW)
        ledger.watch(model, zero)
        ...                            # a training step or two
        ledger.states()                # {category: bytes} now
    ledger.peak                        # the peak: .total, .bytes by category, .what caused it

Every operator passes torch's dispatcher, where the ledger looks at each input and output. A storage is born when it is
first seen, and dies with the last tensor that uses it, as a weak reference tells. In between it may be resized (stage 3
frees parameters that way). So real storage is measured, whatever the code assumes: a view costs nothing, and a
forgotten reference costs all of its storage. A fake tensor counts as the tensor that it represents.

The owner of a storage determines its category:

    parameters    the model's, and whole buckets and shards of them
    gradients     .grad of parameters, tensors that autograd passes on to become .grad, buckets and shards of them
    optimizer     fp32 masters, and the optimizer's state
    scalars       0-dim step counters, and the one element that replaces released parameters: a few bytes, counted
                  separately so that the three above equal the formula to the byte
    buffers       the model's buffers, and temporary buffers in the paper's sense (§3.2): scratch of collectives, of
                  the optimizer's update, of clipping; the flat copies that DDP and FSDP2 send
    activations   all else born in forward and backward, or outside of them with gradients enabled (loss, batch)
    other         what existed before watch(): a data set, the parameters before they were flattened

Not seen: memory that a kernel allocates and frees within one operator; memory outside tensors (cuBLAS workspaces,
NCCL's own); tensors made in Python threads that the program starts; sparse tensors; the host memory of a simulated
rank. Seen, and real: gloo's threads hold a collective's tensors for some microseconds after its wait().
"""

import contextlib
import gc
import time
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.core import seams
from zero_minimal.core.work import Call
from zero_minimal.meters.owners import Owners, parameters_of, strided_tensors
from zero_minimal.meters.traffic import in_collective
from zero_minimal.offloading import simulated_host

CATEGORIES = ("parameters", "gradients", "optimizer", "scalars", "buffers", "activations", "other")
UNOWNED = ("buffers", "activations", "other")  # guessed from the phase at birth, until an owner is found


@dataclass(eq=False)
class Storage:
    """Memory that one or more tensors share. `bytes` is the size now."""

    device: torch.device
    category: str
    bytes: int
    reference: weakref.ref = field(repr=False)


class Event(NamedTuple):
    """An allocation (bytes > 0) or a free (bytes < 0), `seconds` after the trace began; `what` caused it."""

    seconds: float
    storage: Storage
    bytes: int
    what: str


class Moment(NamedTuple):
    """What is alive after an event: bytes by category, and in total."""

    seconds: float
    what: str
    bytes: dict[str, int]
    total: int


class Ledger(TorchDispatchMode):
    """Counts storages while it is open. It may be opened again: then it also finds what changed in between.

    trace: the Events in order, since the first opening or the last reset(). A resize is a free, then an allocation.
    device: count only storages on this device ("cuda", "cuda:1"); None counts all but meta tensors. May be changed.

    Open it inside FakeTensorMode, not outside it.
    """

    def __init__(self, device: str | torch.device | None = None):
        super().__init__()
        self.device = device
        self.trace: list[Event] = []
        self._alive: dict[int, Storage] = {}  # keyed by the address of the storage's C++ object
        self._owners = Owners()
        self._hooks: list = []  # handles of our hooks on parameters' gradients
        self._started = time.perf_counter()
        self._open = False
        self._forwards = 0  # how many nested modules' forwards are running

    # -------------------------------------------------------------------------------------------------------- reports

    def states(self) -> dict[str, int]:
        """Bytes alive by category: now or, if the ledger is closed, when it was closed."""
        self._claim_all()
        total = dict.fromkeys(CATEGORIES, 0)
        for storage in self._counted():
            total[storage.category] += storage.bytes
        return total

    @property
    def total(self) -> int:
        """Bytes alive."""
        return self.rounded(1)

    def rounded(self, unit: int = 512) -> int:
        """Bytes alive, each storage rounded up to a multiple of `unit`, which is 512 in CUDA's allocator."""
        return sum(-(-storage.bytes // unit) * unit for storage in self._counted())

    @property
    def timeline(self) -> list[Moment]:
        """The running sum of the trace: bytes alive after each event."""
        self._claim_all()
        now, moments = dict.fromkeys(CATEGORIES, 0), []
        for event in list(self.trace):
            if self._counts(event.storage):
                now[event.storage.category] += event.bytes
                moments.append(Moment(event.seconds, event.what, dict(now), sum(now.values())))
        return moments

    @property
    def peak(self) -> Moment:
        """The moment of the timeline with the most bytes, the first of them if there are several."""
        nothing = Moment(0.0, "nothing", dict.fromkeys(CATEGORIES, 0), 0)
        return max(self.timeline, key=lambda moment: moment.total, default=nothing)

    def highest(self) -> dict[str, int]:
        """The most bytes that each category reached, each at its own moment."""
        timeline = self.timeline
        return {name: max((moment.bytes[name] for moment in timeline), default=0) for name in CATEGORIES}

    def reset(self) -> None:
        """Restart trace, timeline and peak from the storages alive now."""
        self._started = time.perf_counter()
        self.trace = [Event(0.0, s, s.bytes, "alive already") for s in list(self._alive.values()) if s.bytes]

    def _counted(self) -> list[Storage]:
        return [storage for storage in list(self._alive.values()) if self._counts(storage)]

    def _counts(self, storage: Storage) -> bool:
        if self.device is None:
            return storage.device.type != "meta"
        wanted = torch.device(self.device)
        return storage.device.type == wanted.type and wanted.index in (None, storage.device.index)

    # ------------------------------------------------------------------------------------------- births, sizes, deaths

    def __enter__(self):
        if self._open:
            raise RuntimeError("this ledger is open already: close it first, or use a second one")
        if not self.trace:
            self._started = time.perf_counter()
        with contextlib.ExitStack() as undo:
            self._open, self._forwards = True, 0
            undo.callback(self._close)
            undo.enter_context(seams.heard_by("collective", self._hear_collective))
            undo.enter_context(resizes_reported(self._resized))
            undo.callback(register_module_forward_pre_hook(lambda *call: self._count_forwards(+1)).remove)
            undo.callback(register_module_forward_hook(lambda *call: self._count_forwards(-1), always_call=True).remove)
            undo.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
            self._take_stock()
            self._claim_all()
            super().__enter__()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        with self._undo:
            super().__exit__(*error)
            self._claim_all()

    def _close(self):
        self._open = False
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: torch calls again with the local tensors
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if simulated_host.at_work():
            return result
        for tensor in strided_tensors((args, kwargs, result)):
            storage = self._look_at(tensor, str(operator))
            if isinstance(tensor, nn.Parameter):
                self._meet(tensor, storage)
        is_peers = operator.namespace in ("c10d", "fsdp") and not in_collective()
        if is_peers and not self._owners.buckets():
            self._claim([args, kwargs], "buffers", replacing=UNOWNED)  # flat copies that a peer sends
        return result

    def _take_stock(self) -> None:
        """Find what died and what was born while the ledger was closed."""
        gc.collect()
        for address, storage in list(self._alive.items()):
            if storage.reference() is None:
                self._die(address)
        with torch._C.DisableTorchFunctionSubclass():  # otherwise lazy parameters raise
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.Tensor):  # isinstance() would trigger lazy objects
                    for tensor in strided_tensors(thing):
                        self._look_at(tensor, "alive already", "other")

    def _look_at(self, tensor: torch.Tensor, what: str, category: str | None = None) -> Storage:
        """Record the tensor's storage if it is new, and its size if that has changed."""
        handle = tensor.untyped_storage()
        storage = self._find(handle)
        if storage is None:
            address = handle._cdata
            reference = weakref.ref(handle, lambda _: self._open and self._die(address))
            storage = Storage(tensor.device, category or self._category_at_birth(), 0, reference)
            self._alive[address] = storage
        self._set_size(storage, handle.nbytes(), what)
        return storage

    def _find(self, handle: torch.UntypedStorage) -> Storage | None:
        storage = self._alive.get(handle._cdata)
        return storage if storage is not None and storage.reference() is handle else None

    def _resized(self, handle: torch.UntypedStorage) -> None:
        storage = self._find(handle)
        if storage is not None:
            self._set_size(storage, handle.nbytes(), "resize")

    def _die(self, address: int) -> None:
        storage = self._alive.pop(address, None)
        if storage is not None:  # otherwise a thread of gloo was first
            self._set_size(storage, 0, "free")

    def _set_size(self, storage: Storage, size: int, what: str) -> None:
        if size == storage.bytes:
            return
        seconds, what = time.perf_counter() - self._started, f"{what}, {self._phase()}"
        if storage.bytes:
            self.trace.append(Event(seconds, storage, -storage.bytes, what))
        if size:
            self.trace.append(Event(seconds, storage, size, what))
        storage.bytes = size

    def _phase(self) -> str:
        if in_collective():
            return "collective"
        if torch._C._current_graph_task_id() != -1:  # the autograd engine is at work, in this thread
            return "backward"
        return "forward" if self._forwards else "outside"

    def _category_at_birth(self) -> str:
        phase = self._phase()
        if phase == "outside" and not self._owners:
            return "other"
        if phase == "collective" or phase == "outside" and not torch.is_grad_enabled():
            return "buffers"
        return "activations"

    def _count_forwards(self, step: int) -> None:
        self._forwards += step

    # ------------------------------------------------------------------------------------------------- who owns what

    def watch(self, *owners) -> None:
        """Name the owners that determine categories, before or after the ledger is opened. They are held weakly.

        Args:
            owners: modules (also DDP's and FSDP2's), torch optimizers, objects with .model, .optimizer or .buckets
        """
        self._owners.add(*owners)
        self._claim_all()

    def claim(self, tensors, category: str) -> None:
        """Set the category of these tensors' storages (a tensor, or any nesting of lists, tuples and dicts of them)."""
        self._claim(tensors, category, replacing=CATEGORIES)

    def _claim(self, tensors, category: str, replacing: tuple[str, ...]) -> None:
        if category not in CATEGORIES:
            raise ValueError(f"unknown category {category!r}: choose from {', '.join(CATEGORIES)}")
        for tensor in strided_tensors(tensors):
            storage = self._look_at(tensor, "claim") if self._open else self._find(tensor.untyped_storage())
            if storage is not None and storage.category in replacing:
                storage.category = category

    def _claim_all(self) -> None:
        for category, tensors in self._owners.holdings():
            self.claim(tensors, category)

    # Some storages have an owner only briefly, or no known owner. Three places identify them:

    def _hear_collective(self, moment: str, call: Call) -> None:
        """Claims a whole bucket of stage 2 or 3 before it is reduced, and the part of it that this rank keeps."""
        if moment == "start" and call.name in ("reduce_scatter", "reduce"):
            self._claim(call.tensors, "gradients", replacing=UNOWNED)

    def _before_optimizer(self, optimizer, args, kwargs) -> None:
        """Claims gradients in the dtype of the masters, made for this step."""
        if not simulated_host.at_work():
            self.claim([param.grad for param in parameters_of(optimizer)], "gradients")

    def _meet(self, param: nn.Parameter, storage: Storage) -> None:
        """Claims a parameter that an operator receives: FSDP2 gathers some that are not the model's own."""
        if storage.category in UNOWNED:
            storage.category = "parameters"
        if param.requires_grad and torch.is_grad_enabled():
            # no weak reference to a parameter: Module.to() refuses to swap those that have one
            if self._gradient_arrives not in (param._backward_hooks or {}).values():
                self._hooks.append(param.register_hook(self._gradient_arrives))

    def _gradient_arrives(self, gradient: torch.Tensor) -> None:
        """Claims a gradient as autograd gives it to its parameter, which may drop it at once."""
        self.claim(gradient, "gradients")


@contextlib.contextmanager
def resizes_reported(listener):
    """While open, calls `listener(storage)` at every UntypedStorage.resize_, which torch's dispatcher does not see."""
    original = torch.UntypedStorage.resize_

    def resize_(storage, size):
        original(storage, size)
        listener(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original
