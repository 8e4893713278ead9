"""Turns, seen from outside: which blocks of a model are in memory when one of them works, and what was sent by then.

It runs in a rank, and knows of the class under test what a user does. It travels to the ranks by value, as the test
files do: this file is not there.
"""

import functools
import sys
import time

import cloudpickle
import torch
import torch.distributed as dist
import toys
from checks import Calls, sent_for
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from zero_minimal.guards.trained_by import is_released

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH, BLOCKS = 40, 6


class Rung(nn.Module):
    """A block of the tower."""

    def __init__(self, width, dropout):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Tower(nn.Module):
    """Blocks of equal size in an nn.ModuleList, between two small layers. model(x, y) is a loss. `skip` leaves a block
    out. With recompute=True backward computes each block again."""

    def __init__(self, blocks=BLOCKS, width=WIDTH, dropout=0.0, recompute=False):
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Rung(width, dropout) for _ in range(blocks))
        self.last = nn.Linear(width, 3)
        self.recompute = recompute

    def forward(self, x, y, skip=None):
        x = self.first(x)
        for place, block in enumerate(self.blocks):
            if place != skip:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return (self.last(x) - y).square().mean()


def block_bytes(width=WIDTH):
    return 4 * 2 * (width * width + width)


class Sight:
    """What is seen at each block's turn: which blocks can be read, and how many bytes of each block's parameters live,
    whoever refers to them.

    A block's storages are noted, weakly, while it works. One that is freed counts no more, and one that is resized
    counts as what it is then.
    """

    def __init__(self, model):
        self.blocks, self.noted, self.seen = list(model.blocks), [{} for _ in model.blocks], []
        self.at_sends = []  # (kind, block that had the last look or None, blocks with memory), when something is sent
        self.kind = "forward"
        for place, block in enumerate(self.blocks):
            # of parts of the block: whatever is done when the block itself is called has been done by then
            block.up.register_forward_pre_hook(lambda *_, place=place: self.look(place))
            block.down.register_forward_pre_hook(lambda *_, place=place: self.look(place))
            block.up.bias.register_hook(lambda _, place=place: self.look(place, "backward"))

    def look(self, place, kind=""):
        for param in self.blocks[place].parameters():
            reference = StorageWeakRef(param.untyped_storage())
            self.noted[place].setdefault(reference.cdata, reference)
        self.seen.append((kind or self.kind, place, self.readable(), self.alive()))

    def sends(self):
        """To be called when this rank begins to send something: what is whole then has not been freed for it. Memory
        that was made for it now counts once it has been seen at a turn."""
        place = self.seen[-1][1] if self.seen else None
        here = {place for place, size in enumerate(self.alive()) if size > 0.1 * block_bytes()}
        self.at_sends.append((self.kind, place, sorted(here | set(self.readable()))))

    def readable(self):
        """Blocks that have a parameter that is whole."""
        return [place for place, block in enumerate(self.blocks)
                if not all(is_released(param) for param in block.parameters())]

    def alive(self):
        """Bytes of each block's parameters."""
        return [sum(map(_bytes, storages.values())) for storages in self.noted]


def _bytes(reference):
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


class Marks(Calls):
    """Calls, and besides when each block began to compute: `marks` are (place, time), `sent_at(time)` the bytes that
    this rank has sent until then."""

    def __init__(self, model, backward=False, **options):
        super().__init__(**options)
        self.marks, self.open = [], False
        for place, block in enumerate(model.blocks):
            if backward:
                block.up.register_forward_hook(functools.partial(self._follow, place))
            else:
                block.up.register_forward_pre_hook(lambda *_, place=place: self.mark(place))

    def _follow(self, place, module, args, output):
        output.register_hook(lambda _: self.mark(place))

    def mark(self, place):
        if self.open:
            self.marks.append((place, time.monotonic()))

    def __enter__(self):
        self.open = True
        return super().__enter__()

    def __exit__(self, *error):
        self.open = False
        return super().__exit__(*error)

    def sent_at(self, moment):
        return sum(sent_for(call, dist.get_world_size()) for call in self.made if call.at <= moment)

    def begun(self, size, part=0.5):
        """In the order in which blocks computed, of each but the last: its place, when it began to compute, and when
        this rank began to send what the next one needs, of which it sends `size` bytes: the call that makes it this
        part of them, since they may travel in pieces."""
        at_the_end, found = self.sent_at(self.marks[-1][1]), []
        for number, (place, moment) in enumerate(self.marks[:-1]):
            later = len(self.marks) - 2 - number  # blocks after the next one
            enough = at_the_end - (later + 1 - part) * size
            found.append((place, moment, min(call.at for call in self.made if self.sent_at(call.at) >= enough)))
        return found


def numbers(rank, step):
    return toys.numbers(rank, step)


def seeded_numbers(rank, step):
    """The same, with a seed of the rank's own for dropout."""
    torch.manual_seed(300 + rank)
    return toys.numbers(rank, step)
