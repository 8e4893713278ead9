"""Checks that several lessons make: what is sent and when, how many bytes live, and the wire. Each is independent of a
stage's own bookkeeping and, but for the watch on `collectives`, of the instruments of the house."""

import contextlib
import gc
import os
import socket
import stat
import struct
from collections import namedtuple

import toys
import torch
import torch.distributed as dist

from zero_minimal.foundations import collectives

# ------------------------------------------------------------------------------------------------------------- memory


def live_bytes():
    """Bytes of all storages that a Python object on this rank still holds: no ledger, no book-keeping, just a look."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def most_padding(model, world_size):
    """Elements of padding that a layout may need at most: each parameter may start on a boundary of 16 elements, and lie
    in a bucket of its own that is padded to a multiple of 16 N."""
    return len(list(model.parameters())) * (16 + 16 * world_size)


def held_after_step(stage_class, make, batch, dtype=torch.float32, **options):
    """Bytes that live after a step because of model and stage, elements of parameters and of padding at most."""
    rank = dist.get_rank()
    torch.autograd.backward(toys.build(make, rank, dtype)(*batch(rank, 0)))  # what torch makes once, it makes now
    before = live_bytes()
    model = toys.build(make, rank, dtype)
    zero = stage_class(model, torch.optim.AdamW, **options)
    for step in range(2):
        zero.zero_grad()
        zero.model(*batch(rank, step)).backward()
        zero.step()
    return live_bytes() - before, sum(param.numel() for param in model.parameters()), most_padding(
        model, dist.get_world_size()
    )


# ---------------------------------------------------------------------------------------------------------- what is sent

Event = namedtuple("Event", "kind name bytes", defaults=("", 0))  # kind: "start", "wait", or what the test notes


class Watch:
    """Lists the collectives of ours that this rank starts and waits for, in order, and what the test notes in between.

    Each event of a collective carries its name and the bytes of the whole vector (the larger of input and output).
    """

    def __init__(self):
        self.events, self._inside = [], False

    def note(self, kind, name=""):
        self.events.append(Event(kind, name))

    def started(self, *names):
        """Bytes of the collectives of these names, in the order of their starts; of all without names."""
        return [event.bytes for event in self.events if event.kind == "start" and (not names or event.name in names)]

    def __enter__(self):
        names = ("reduce_scatter", "all_gather", "all_reduce", "reduce", "broadcast")
        self._originals = {name: getattr(collectives, name) for name in names}
        for name, function in self._originals.items():
            setattr(collectives, name, self._watched(name, function))
        return self

    def __exit__(self, *error):
        for name, function in self._originals.items():
            setattr(collectives, name, function)

    def _watched(self, name, function):
        def collective(*args, **kwargs):
            if self._inside:  # an all-reduce that is made of others
                return function(*args, **kwargs)
            size = max(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            self.events.append(Event("start", name, size))
            with self._within():
                pending = function(*args, **kwargs)
            if pending is None:
                self.events.append(Event("wait", name, size))
                return None
            return _Pending(self, pending, Event("wait", name, size))

        return collective

    @contextlib.contextmanager
    def _within(self):
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


class _Pending:
    def __init__(self, watch, pending, event):
        self.watch, self.pending, self.event = watch, pending, event

    def wait(self):
        self.watch.events.append(self.event)
        with self.watch._within():
            return self.pending.wait()


def watch_steps(stage_class, make, batch, steps=3, accumulate=1, clip=0.0, **options):
    """Train, and return what the watch saw in the last step: when gradients came ("gradient"), each micro-batch ended
    ("backward ended"), the update began ("step"), and the collectives between them."""
    rank = dist.get_rank()
    model = toys.build(make, rank)
    zero = stage_class(model, torch.optim.AdamW, **options)
    watch = Watch()
    for name, param in model.named_parameters():
        param.register_hook(lambda gradient, name=name: watch.note("gradient", name))
    for step in range(steps):
        watch.events.clear()
        with watch:
            for micro in range(accumulate):
                with zero.no_sync() if micro + 1 < accumulate else contextlib.nullcontext():
                    zero.model(*batch(rank, step * accumulate + micro)).backward()
                watch.note("backward ended")
            watch.note("step")
            if clip:
                zero.clip_grad_norm_(clip)
            zero.step()
        zero.zero_grad()
    return watch


def overlapping(events, *names):
    """How many reductions there were, how many of them began before the last gradient came, and in how many cases another
    gradient came between the beginning and the wait."""
    kinds = [(event.kind, event.name in names) for event in events]
    starts = [place for place, kind in enumerate(kinds) if kind == ("start", True)]
    last_gradient = max(place for place, event in enumerate(events) if event.kind == "gradient")
    early = sum(place < last_gradient for place in starts)
    overlapped = 0
    for place in starts:
        wait = next((later for later in range(place, len(kinds)) if kinds[later] == ("wait", True)), len(kinds))
        overlapped += any(event.kind == "gradient" for event in events[place:wait])
    return len(starts), early, overlapped


def wire_bytes():
    """Bytes that this rank's sockets have delivered so far, as the kernel counts them, or None where it does not tell.

    Unlike the loopback's counter this one belongs to the rank alone: other programs cannot disturb it.
    """
    if not os.path.isdir("/proc/self/fd") or not hasattr(socket, "TCP_INFO"):
        return None
    dist.barrier()
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked of linux/tcp.h
        except (OSError, struct.error):
            pass  # not a TCP connection, or closed meanwhile
    dist.barrier()
    return total
