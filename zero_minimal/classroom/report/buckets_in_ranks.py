"""Buckets, in a rank: train the small model for two steps with a submission's class, and write down each gradient,
each collective, what a rank holds in shards, and its memory by category at each of these moments.

    step 1    a batch, update, zero_grad
    step 2    two micro-batches, clipping, update, zero_grad
"""

import contextlib

import checks
import torch
import torch.distributed as dist
import toys
from torch import optim
from torch.multiprocessing.reductions import StorageWeakRef

from zero_minimal.classroom.report import small_model
from zero_minimal.classroom.report.recorder import Recorder, finite, values_of
from zero_minimal.core import collectives
from zero_minimal.core.freed_parameter import is_released
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.owners import OF_A_BUCKET

PAUSE = 0.003  # seconds by which each rank is slower than the one before: who does not wait reads too early


class Watch(checks.Calls):
    """Writes down the collectives of this rank: ours with their waits, torch's own when they are called."""

    def __init__(self, recorder: Recorder, ledger: Ledger):
        super().__init__(pause=PAUSE * dist.get_rank())
        self.recorder, self.ledger = recorder, ledger
        self.params: list = []
        self.storages: dict[int, dict] = {}  # layer: those that its parameter had when it could be read, weakly
        self.buckets: list = []  # of a submission's own kind, which the ledger does not know
        self.under_way: dict = {}  # of our collectives: (number, what it read when it began)
        self.count = 0

    def note(self, what: str, **entries) -> None:
        """An event, with the memory of this moment, the layers that have a .grad, those that can be read, and those
        whose memory is there though nobody can read it: on its way, or left behind."""
        for bucket in self.buckets:
            self.ledger.claim(getattr(bucket, "gradient_shard", None), "gradients")
            self.ledger.claim(getattr(bucket, "parameters", None), "parameters")
        self.recorder.note(what, memory=self.ledger.states(), grads=self._grads(), here=self.here(),
                           idle=self._idle(), **entries)

    def _grads(self) -> list[int]:
        return [layer for layer, param in enumerate(self.params, 1) if param.grad is not None
                and param.grad.untyped_storage().nbytes() >= param.nbytes]

    def here(self) -> list[int]:
        """Layers whose parameters can be read: at stage 3 not all of them."""
        return [layer for layer, param in enumerate(self.params, 1) if not is_released(param)]

    def _idle(self) -> list[int]:
        """Whoever refers to their memory: autograd, say, which has saved it for backward."""
        here = self.here()
        for layer in here:
            reference = StorageWeakRef(self.params[layer - 1].untyped_storage())
            self.storages.setdefault(layer, {}).setdefault(reference.cdata, reference)
        return [layer for layer, references in self.storages.items() if layer not in here
                and any(map(_bytes_of, references.values()))]

    def parameters(self, zero) -> list | None:
        """What each layer holds on this rank; whole, which at stage 3 they are made for it, unseen. None until that is
        written."""
        self.recorder.silent, self.pause, before = True, 0.0, self.pause
        layers = None
        with contextlib.suppress(NotImplementedError):
            layers = [values_of(param) for param in toys.whole_parameters(zero)]
        self.recorder.silent, self.pause = False, before
        return layers

    def hear(self, function, args):
        before = len(self.made)
        super().hear(function, args)
        for call in self.made[before:]:
            if not collectives.inside_collective() and call.name not in ("recv", "barrier"):
                self.note("collective", name=call.name, bytes=call.bytes)

    def hear_ours(self, moment: str, call: collectives.Call) -> None:
        whole = max(call.tensors, key=lambda tensor: tensor.numel())
        if moment == "start":
            self.count += 1
            self.under_way[call] = self.count, values_of(whole)
        number, began = self.under_way[call]
        entries = {}
        if moment == "wait" and call.name == "reduce_scatter":  # which reads it until the wait is over
            now = values_of(whole)
            entries = {"freed": now is None, "changed": now != began}
        if moment == "end":
            del self.under_way[call]  # with it the tensors: to look at memory must not keep it
        self.note(moment, name=call.name, bytes=call.bytes, number=number, **entries)


def _bytes_of(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def watch(name: str, submission) -> None:
    """The training, from a new model on."""
    rank, recorder, ledger = dist.get_rank(), Recorder(), Ledger()
    torch._C._set_deterministic_algorithms(True)  # new memory comes filled with NaN
    with ledger, Watch(recorder, ledger) as watched, collectives.heard_by(watched.hear_ours):
        watched.note("empty")
        zero = submission(small_model.build(rank), optim.Adam, bucket_bytes=small_model.BUCKET, lr=small_model.LR,
                          eps=small_model.EPS)
        if all(hasattr(bucket, name) for bucket in getattr(zero, "buckets", ()) for name in OF_A_BUCKET):
            ledger.watch(zero)
        else:
            watched.buckets = list(zero.buckets)
        ledger.watch(zero.model, zero.optimizer)
        watched.params = list(zero.model.parameters())
        for layer, param in enumerate(watched.params, 1):
            param.register_hook(lambda gradient, layer=layer: watched.note("gradient", layer=layer))
        left = watched.here()
        watched.note("made", left=left, parameters=watched.parameters(zero))
        if len(left) < len(watched.params):  # whose units take turns
            for block in zero.model.blocks:  # younger than the stage's own hooks: these have brought the unit by then
                block.register_forward_pre_hook(lambda block, *_: watched.note("turn", layers=list(block.numbers)))
        _train(zero, rank, watched)


def _train(zero, rank: int, watched: Watch) -> None:
    zero.model(*small_model.batch(rank, small_model.STEPS[0][0])).backward()
    watched.note("backward", shards=_shards(zero))
    zero.step()
    watched.note("stepped", left=watched.here(), parameters=watched.parameters(zero))
    zero.zero_grad()
    watched.note("forgot")
    first, second = small_model.STEPS[1]
    with zero.no_sync():
        zero.model(*small_model.batch(rank, first)).backward()
        watched.note("micro")
    zero.model(*small_model.batch(rank, second)).backward()
    watched.note("backward", shards=(before := _shards(zero)))
    norm = zero.clip_grad_norm_(small_model.MAX_NORM)
    watched.note("clipped", norm=finite(float(norm)), tensor=isinstance(norm, torch.Tensor) and norm.dim() == 0,
                 shards=before, shards_changed=_shards(zero) != before)
    zero.step()
    watched.note("stepped", left=watched.here(), parameters=watched.parameters(zero))
    zero.zero_grad()
    watched.note("forgot")


def _shards(zero) -> list:
    """What this rank has of the reduced gradients."""
    return [None if shard is None else values_of(shard) for shard in zero.reduced_gradients()]
