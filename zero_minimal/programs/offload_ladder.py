"""Offload ladder: trains a GPT on one rank that keeps 16, 14, 4 and 2 bytes per parameter, and measures its memory.

    16   data parallelism: 16-bit parameters and gradients, fp32 masters, momentum and variance
    14   gradients wait on the host, and return for the update
     4   masters, momentum, variance and the update are on the host (stage 1, offloaded)
     2   gradients too (stage 2, offloaded)

Memory is counted twice: by the ledger, tensor by tensor; and by the system, for the processes of the rank and its host.
"""

import gc
from dataclasses import dataclass, replace

import torch

from zero_minimal.core import collectives, optimizers, replicas
from zero_minimal.meters.crossings import BusMeter, settled_bytes
from zero_minimal.meters.observer import Observer
from zero_minimal.offload import LeavesAtOnce, Offloaded1, Offloaded2
from zero_minimal.offloading.host_link import Bus
from zero_minimal.offloading.host_process import Host
from zero_minimal.offloading.offloaded_state import resident_bytes
from zero_minimal.paper.formulas import STATES
from zero_minimal.processes import ranks
from zero_minimal.stage0 import Stage0
from zero_minimal.stage2 import Stage2
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings


def keep_gradients(bus: Bus) -> None:
    """The work of GradientsAway's host."""
    kept: dict[int, torch.Tensor] = {}
    while (parcel := bus.receive()).words[0] != "end":
        order, *words = parcel.words
        if order == "keep":
            kept[words[0]] = parcel.tensor.clone()
            bus.emptied(parcel)
        elif order == "give":
            bus.send((), kept[words[0]])
        else:  # "memory"
            bus.send(((sum(gradient.nbytes for gradient in kept.values()), resident_bytes()),))


class GradientsAway(LeavesAtOnce, Stage2):
    """Stage 2 whose gradient shards wait on the host for the update, which stays on the device. One micro-batch."""

    disk = None  # the host has no disk

    def __init__(self, model, optimizer_class, **options):
        super().__init__(model, optimizer_class, **options)
        largest = max(bucket.parameter_shard.nbytes for bucket in self.buckets)
        self.host = Host(keep_gradients, largest, self.buckets[0].device, None)

    def _leave(self, bucket, gradient_shard):
        self.host.send(("keep", self.buckets.index(bucket)), gradient_shard)

    @torch.no_grad()
    def step(self) -> None:
        self.reducer.complete()
        for number, bucket in enumerate(self.buckets):
            self.host.send(("give", number))
            parcel = self.host.receive()
            bucket.gradient_shard = parcel.tensor
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
            bucket.gradient_shard = None
            self.host.emptied(parcel)
            collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket)
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = True


@dataclass(frozen=True)
class Rung:
    """A way to train, and its bytes per parameter by the formula: on the device, and on the host."""

    name: str
    kind: type
    device: int
    host: int


RUNGS = (
    Rung("all on the device", Stage0, 16, 0),
    Rung("gradients away", GradientsAway, 14, 2),
    Rung("update away", Offloaded1, 4, 14),
    Rung("both away", Offloaded2, 2, 14),
)


def stand_on(rung: Rung, settings: Settings) -> dict:
    """Train some steps on this rank; return the report of one rung, in bytes.

    {"name", "formula": {"device", "host"} per parameter, "parameters": Ψ, "padding": elements, "ledger": {state: on the
     device}, "host": of tensors there, "resident": {"device", "host"}: what a model adds to the two processes, "bus":
     {"to_host", "to_device"} per step, "kept": {what: bytes} there, only for "both away", "loss": the last}
    """
    with ranks.start() as rank:
        load_libraries(settings, rank)
        empty, host_alone = settled_bytes(), Host(keep_gradients, 64, rank.device, None)  # which keeps nothing
        _, empty_host = host_alone.ask("memory")
        host_alone.end()
        zero = loop.build(rung.kind, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
        observer = Observer(zero, rank, settings)
        bus = BusMeter(zero) if rung.host else None
        batches = loop.training_batches(settings, rank.rank)
        losses = list(loop.steps(zero, batches, settings, observers=[observer, *filter(None, [bus])]))
        now = settled_bytes()
        kept, host_now = zero.host.ask("memory") if rung.host else (0, empty_host)
        unknown = None in (empty, now, empty_host, host_now)
        return {
            "name": rung.name, "formula": {"device": rung.device, "host": rung.host},
            "parameters": sum(param.numel() for param in zero.model.parameters()),
            "padding": sum(bucket.padded - bucket.numel for bucket in zero.buckets),
            "ledger": {state: observer.states[state] for state in STATES}, "host": kept,
            "resident": None if unknown else {"device": now - empty, "host": host_now - empty_host},
            "bus": bus.crossed() if bus else {"to_host": 0, "to_device": 0},
            "kept": what_is_kept(zero, kept) if rung.kind is Offloaded2 else {},
            "loss": losses[-1][0].item(),
        }


def load_libraries(settings: Settings, rank: ranks.Rank) -> None:
    """Train a small model for a step under the observer: what torch loads at its first use is not part of a model."""
    small = replace(settings, layers=1, hidden=2 * settings.heads, steps=1)
    zero = loop.build(Stage0, small, rank)
    for _ in loop.steps(zero, loop.training_batches(small, rank.rank), small, observers=[Observer(zero, rank, small)]):
        pass
    del zero
    gc.collect()


def what_is_kept(zero, kept: int) -> dict[str, int]:
    """Bytes on the host by kind: masters, each tensor of the optimizer's state, and gradients, which are the rest."""
    found = {"masters": sum(bucket.master.nbytes for bucket in zero.buckets)}
    for bucket in zero.buckets:
        for name, value in bucket.away.state().items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found[name] = found.get(name, 0) + value.nbytes
    return found | {"gradients": kept - sum(found.values())}
