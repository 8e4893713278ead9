"""Rank side: a stage whose masters, optimizer state and update are on its host. offload.py has the
rest: what crosses the bus, and when.

A stage's backward, step and parameters stay as they are. This class starts the host, hands the
optimizer over to it, and asks it for what else needs gradients or state: clipping, a loss scaler,
saved state.
"""

import functools
import weakref

import cloudpickle
import torch
from torch import Tensor, nn

from zero_minimal.core import collectives, precision
from zero_minimal.offloading import disk_set_up
from zero_minimal.offloading.async_fetch import AsyncFetch
from zero_minimal.offloading.host_link import Bus, speed
from zero_minimal.offloading.host_process import Host
from zero_minimal.offloading.offloaded_state import (
    OffloadedState,
    StateOnHost,
    all_here,
    put_all,
    refuse_alone,
    refuse_state,
)

# the other options are the optimizer's
STAGE_OPTIONS = ("group", "bucket_bytes", "param_groups", "memory", "units")


def serve(bus: Bus, kind: type) -> None:
    """What a host does: it obeys one parcel after the other."""
    state = kind(bus)
    while (parcel := bus.receive()).words[0] != "end":
        order, *words = parcel.words
        getattr(state, order)(parcel, *words)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The options of each of its groups. Raises: RuntimeError if the optimizer, or its state, was
    replaced: the host goes on with its own."""
    if not isinstance(optimizer.state, StateOnHost):
        refuse_state()
    return [{name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups]


class RankSide:
    """A stage with offload, used like the stage.

    Args:
        bus: bytes a second in each direction; None: no limit.
        disk: a folder, for a host that keeps all in a file there (offloading/disk.py).
        host_budget: bytes of memory that its process may then have (offloading/memory_budget.py).
        The others are the stage's.
    zero.optimizer holds the options (lr, …), which are sent with each update, so a scheduler can
    attach to it; its state is on the host. Its step hooks and reduced_gradients() are refused.
    Raises: what the stage raises. On all ranks, OSError if the disk has no room, and ValueError for
        a budget that is too small. RuntimeError, at the next use of the bus, if the host is gone.
    """

    kinds: tuple[type, type]  # of what a host keeps: in memory, and on a disk
    host: Host | None = None

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, bus: float | None = None,
        disk: str | None = None, host_budget: int | None = None, **options,
    ):
        self.bandwidth = speed(bus)
        own = {name: value for name, value in options.items() if name not in STAGE_OPTIONS}
        self.disk = disk_set_up.asked(disk, host_budget, model, optimizer_class, own, options)
        super().__init__(model, optimizer_class, **options)
        refuse_alone(self.optimizer)
        chosen = cloudpickle.dumps((optimizer_class, own, options_of(self.optimizer)))
        self.host.send(("make_optimizer", chosen))

    def _start_host(self, device: torch.device) -> None:
        """Start the host. It ends with the stage."""
        largest = max(bucket.padded // self.world_size * bucket.dtype.itemsize
                      for bucket in self.buckets)
        in_memory, on_disk = self.kinds
        serving = functools.partial(serve, kind=on_disk if self.disk else in_memory)
        self.host = Host(serving, largest, device, self.bandwidth)
        weakref.finalize(self, self.host.end)
        self.returning = AsyncFetch(self.host)
        if self.disk:
            disk_set_up.set_up(self, self.disk, self.in_turn())

    def own(self, bucket):
        """Keep what the stage keeps of a bucket, except its master."""
        super().own(bucket)
        if bucket.trained:
            if self.host is None:
                self._start_host(bucket.parameter_shard.device)
            bucket.away = OffloadedState(self.host, self.in_turn().index(bucket))
            self._hand_over(bucket)
            bucket.away.know(bucket)

    def in_turn(self) -> list:
        """The trained buckets in the order in which the host updates them."""
        return self.buckets

    # what needs the gradients asks the host

    def reduced_gradients(self) -> list[Tensor]:
        raise RuntimeError("the gradients have left for the host: clip with "
                           "zero.clip_grad_norm_(), and change one on its way, in "
                           "param.register_hook()")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As in the stage. The host computes the norms of this rank's shards."""
        self.reducer.complete()
        norms, dtype = self.host.ask("norms")
        norms = [norms[bucket.away.number] for bucket in self.buckets]  # a sum's order counts
        squares = torch.tensor(norms, dtype=dtype, device=self.buckets[0].device).square().sum()
        collectives.all_reduce(squares, op="sum", group=self.group)
        norm = squares.sqrt()
        norm = norm if self.gradient_scale is None else norm * self.gradient_scale
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    def gradients_are_finite(self) -> Tensor:
        """Whether none of this rank's is infinite or NaN, []: LossScaler asks this."""
        self.reducer.complete()
        return torch.tensor(self.host.ask("finite"), device=self.buckets[0].device)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        super().zero_grad()
        self.host.send(("forget",))

    def state_dict(self) -> dict:
        """This rank's training state, for a restart with the same number of ranks. It is fetched
        from the host, and takes memory of the rank while it is kept."""
        with all_here(self):
            return super().state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned on this rank. ValueError if it does not fit."""
        with all_here(self):
            super().load_state_dict(state)
            put_all(self)
