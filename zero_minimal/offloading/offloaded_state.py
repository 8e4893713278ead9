"""Offloaded state: the part of a bucket that is on its rank's host (offload.py), and how the rank
asks for it.

    on the rank     bucket.away, an OffloadedState: edits go to the host, state comes back
    on the host     Kept: the shards, and the answers

A rank asks its host for the norm of its gradients, and whether one has overflowed: it has sent them
there.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch
from torch import Tensor, nn

from zero_minimal.checkpoint.sharded_state import keep_edits
from zero_minimal.core import optimizers
from zero_minimal.core.layout import Bucket
from zero_minimal.guards.same_on_all_ranks import checksum
from zero_minimal.offloading.host_link import Bus, Parcel
from zero_minimal.offloading.host_process import Host

AT_ONCE = 2**20  # words of a fingerprint on a GPU at once; a shard would take 16 times its memory

# ------------------------------------------------------------------------------------- on the rank


@dataclass(eq=False)
class OffloadedState:
    """Where a bucket's master and optimizer state are: at `number` on this host."""

    host: Host
    number: int
    seen: object = None  # fingerprint of the parameters that the host has
    is_back: bool = True  # whether the host's last update of them is here

    def __post_init__(self):
        self.host.shards += 1

    def know(self, bucket: Bucket) -> None:
        """Rank and host have the same parameters."""
        self.seen, self.is_back = fingerprint(bucket.parameter_shard), True

    def keep_changes(self, bucket: Bucket) -> None:
        """Carry a user's edit of the parameters over to the host, if there was one."""
        if fingerprint(bucket.parameter_shard) != self.seen:
            self.host.send(("changed", self.number), bucket.parameter_shard)
            self.know(bucket)

    def state(self) -> dict:
        """The optimizer's state of this bucket: numbers, and for each tensor of the shard's size a
        stand-in with its shape and dtype, but no memory."""
        numbers, dtypes = self.host.ask("describe", self.number)
        return numbers | {name: stand_in(numel, dtype) for name, (numel, dtype) in dtypes.items()}

    def fetch(self, name: str | None) -> Tensor:
        """A copy of one tensor of that state, or of the fp32 master (None), [padded / N]."""
        with self.host.together():
            numel, dtype = self.host.ask("fetch", self.number, name)
            return self.host.receive_all(torch.empty(numel, dtype=dtype, device="cpu"))

    def put(self, master: Tensor, state: dict) -> None:
        """Let the host continue with this master and this state."""
        large = {name: value for name, value in state.items()
                 if isinstance(value, Tensor) and value.shape == master.shape}
        small = {name: value for name, value in state.items() if name not in large}
        dtypes = {name: value.dtype for name, value in large.items()}
        with self.host.together():
            self.host.send(("put", self.number, small, dtypes))
            for tensor in (master, *large.values()):
                self.host.send_all(tensor.contiguous())


def stand_in(numel: int, dtype: torch.dtype) -> Tensor:
    """A tensor [numel] in the memory of one element: a NaN (or 0), not to compute with."""
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), nothing, dtype=dtype, device="cpu").expand(numel)


@contextlib.contextmanager
def all_here(stage) -> Iterator[None]:
    """Context in which a stage holds its masters and optimizer state, like a stage without a host.
    Its memory grows by all of them."""
    keep_edits(stage)
    on_host, state = stage.optimizer.state, defaultdict(dict)
    placeholders = {bucket: bucket.master.data for bucket in stage.buckets}
    try:
        for bucket in stage.buckets:
            described = bucket.away.state()
            bucket.master.data = bucket.away.fetch(None)
            for name, value in described.items():
                is_tensor = isinstance(value, Tensor) and value.shape == bucket.master.shape
                state[bucket.master][name] = bucket.away.fetch(name) if is_tensor else value
        stage.optimizer.state, stage.optimizer.state_is_here = state, True
        yield
    finally:
        # load_state_dict() has put another dict there, with the whole state
        stage.optimizer.state, stage.optimizer.state_is_here = on_host, False
        for bucket in stage.buckets:
            bucket.master.data = placeholders[bucket]


def put_all(stage) -> None:
    """Inside all_here(): what is here now goes to the host."""
    for bucket in stage.buckets:
        bucket.away.put(bucket.master.data, stage.optimizer.state.get(bucket.master, {}))
        bucket.away.know(bucket)


def refuse_alone(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer refuse state_dict(), which would be empty: its state is on the host."""
    optimizer.state, optimizer.state_is_here = StateOnHost(), False

    def look(optimizer, *_):
        if not optimizer.state_is_here:
            refuse_state()

    optimizer.register_state_dict_pre_hook(look)
    optimizer.register_load_state_dict_pre_hook(look)


def refuse_state(*_, **__):
    raise RuntimeError("the state of zero.optimizer is on the host: take zero.state_dict() and "
                       "zero.load_state_dict(), or saved_state.save(zero, folder) and load(), in "
                       "its place")


class StateOnHost(defaultdict):
    """optimizer.state of a rank whose host has the state: empty. To read or change an entry is an
    error, since the host would not use it."""

    __missing__ = __setitem__ = __delitem__ = refuse_state
    clear = pop = popitem = setdefault = update = refuse_state
    get = keys = values = items = __iter__ = __contains__ = refuse_state


def fingerprint(shard: Tensor) -> object:
    """A number that changes with any bit. On a GPU a tensor []: the CPU waits for it only when it
    is compared, in the next step."""
    if not shard.is_cuda:
        return checksum(shard)
    words = shard.detach().contiguous().view(-1).view(torch.int16)
    total = words.new_zeros((), dtype=torch.int64)
    for piece, first in zip(words.split(AT_ONCE), range(0, len(words), AT_ONCE), strict=True):
        places = torch.arange(first + 1, first + 1 + len(piece), device=shard.device)
        total += (piece * places).sum()  # each word counts by its place
    return total


# ------------------------------------------------------------------------------------- on the host


@dataclass(eq=False)
class Shard:
    """What the host keeps of a bucket, besides the optimizer's state."""

    dtype: torch.dtype  # of the parameters and gradients
    group_index: int
    master: nn.Parameter  # [padded / N], fp32 for 16-bit parameters
    gradient: Tensor  # [padded / N]
    has_gradient: bool = False  # since zero_grad()
    place: object = None  # in a file, of a shard that is on a disk (disk.py)


class Kept:
    """What a host keeps, and how it answers. A parcel's first word names the method; that is called
    with the parcel and its other words."""

    def __init__(self, bus: Bus):
        self.bus = bus
        self.shards: dict[int, Shard] = {}  # by the number of its bucket
        self.optimizer: torch.optim.Optimizer | None = None

    # where the state is: all of it in memory here (disk.py keeps it in a file)

    def in_turn(self) -> Iterator[Shard]:
        """The shards. Each is in memory until the next is asked for; changes to it are kept."""
        yield from self.shards.values()

    @contextlib.contextmanager
    def at_hand(self, number: int) -> Iterator[Shard]:
        """Context in which one of them is in memory; changes to it are kept."""
        yield self.shards[number]

    def gradients(self) -> Iterator[Tensor]:
        """Each shard's gradient, in memory until the next is asked for."""
        for shard in self.shards.values():
            yield shard.gradient

    def stored(self, number: int, name: str | None) -> Tensor:
        """One tensor of the optimizer's state, or the master (None), to be read at once."""
        return self.shards[number].master if name is None else self._large(number)[name]

    def room(self, number: int, name: str, dtype: torch.dtype) -> Tensor:
        """Memory for such a tensor."""
        return torch.empty(self.shards[number].master.shape, dtype=dtype)

    # what the rank asks for

    def make_optimizer(self, parcel: Parcel, pickled: bytes) -> None:
        """The user's optimizer, over these masters."""
        optimizer_class, options, groups = cloudpickle.loads(pickled)
        self.shards = dict(sorted(self.shards.items()))  # in the order of zero.in_turn()
        self.optimizer = optimizers.over_shards(
            optimizer_class, options, groups, list(self.shards.values())
        )

    def forget(self, parcel: Parcel) -> None:
        """zero_grad(): the next gradients are the first again."""
        for shard in self.shards.values():
            shard.has_gradient = False

    @torch.no_grad()
    def changed(self, parcel: Parcel, number: int) -> None:
        """A user has edited parameters. Elements that were not edited keep their full precision."""
        with self.at_hand(number) as kept:
            master, shard = kept.master.data, parcel.tensor
            torch.where(shard == master.to(shard.dtype), master, shard, out=master)
        self.bus.emptied(parcel)

    @torch.no_grad()
    def norms(self, parcel: Parcel) -> None:
        """Send the norm of each shard's gradient, in fp32 at least, as in precision.global_norm."""
        dtypes = {shard.dtype for shard in self.shards.values()}
        wide = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
        real = (torch.view_as_real(each) if each.is_complex() else each
                for each in self.gradients())
        norms = [torch.linalg.vector_norm(each.flatten(), dtype=wide).item() for each in real]
        self.bus.send(((norms, wide),))

    def finite(self, parcel: Parcel) -> None:
        finite = [bool(torch.isfinite(gradient).all()) for gradient in self.gradients()]
        self.bus.send((all(finite),))

    def describe(self, parcel: Parcel, number: int) -> None:
        """Send the optimizer's state: numbers as they are, but of a tensor its numel and dtype."""
        large = self._large(number)
        state = self.optimizer.state.get(self.shards[number].master, {})
        numbers = {name: value for name, value in state.items() if name not in large}
        self.bus.send(((numbers, {name: (value.numel(), value.dtype)
                                  for name, value in large.items()}),))

    def fetch(self, parcel: Parcel, number: int, name: str | None) -> None:
        tensor = self.stored(number, name)
        self.bus.send(((tensor.numel(), tensor.dtype),))
        self.bus.send_all(tensor)

    @torch.no_grad()
    def put(self, parcel: Parcel, number: int, numbers: dict, dtypes: dict) -> None:
        with self.at_hand(number) as shard:
            self.bus.receive_all(shard.master.data)
            state = dict(numbers)
            for name, dtype in dtypes.items():
                state[name] = self.room(number, name, dtype)
                self.bus.receive_all(state[name])
            self.optimizer.state[shard.master] = state

    def memory(self, parcel: Parcel) -> None:
        """Send the bytes of what is kept here, and the resident bytes of the process."""
        self.bus.send(((self.kept_bytes(), resident_bytes()),))

    def kept_bytes(self) -> int:
        """Bytes of masters, gradients, and the optimizer's tensors."""
        kept = [each for shard in self.shards.values() for each in (shard.master, shard.gradient)]
        states = (self.optimizer.state.get(shard.master, {}) for shard in self.shards.values())
        kept += [value for state in states for value in state.values()
                 if isinstance(value, Tensor) and value.ndim]
        return sum(tensor.nbytes for tensor in kept)

    def _large(self, number: int) -> dict[str, Tensor]:
        master = self.shards[number].master
        state = self.optimizer.state.get(master, {})
        return {name: value for name, value in state.items()
                if isinstance(value, Tensor) and value.shape == master.shape}


def resident_bytes() -> int | None:
    """Resident memory of this process that no file backs: its own, and shared pages that it has
    touched. None where there is no /proc."""
    known = in_status("RssAnon", "RssShmem")
    return sum(known.values()) if known else None


def in_status(*names: str) -> dict[str, int]:
    """What the system says of this process, in bytes. Empty where there is no /proc."""
    status = Path(f"/proc/{os.getpid()}/status")
    if not status.exists():
        return {}
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 for name in names}
