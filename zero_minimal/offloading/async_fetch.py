"""Async fetch: parameters that go on coming from the host when step() has returned.

Stage 3 needs a unit's parameters when the unit works again (offload.py). So step() waits for the
first bucket alone, and each of the others is taken when its unit is gathered:

    step()      update ──► bucket 5 is back
    forward     root: 5    block 0: 4    block 1: 3    …     while the host updates those after them

Who uses the bus for something else, lets all of them arrive first (Host.settle). Otherwise each
side could wait for the other to give a buffer back.
"""

import weakref
from collections.abc import Iterable, Iterator

import torch

from zero_minimal.core.layout import Bucket
from zero_minimal.offloading.host_process import Host, HostError


class AsyncFetch:
    """What is on its way from a host to its stage."""

    def __init__(self, host: Host):
        self.host = host
        self.buckets: Iterator[Bucket] = iter(())  # each is back when it is given out
        self.taking = False
        host.takes_all = weakref.WeakMethod(self.take_all)

    def begin(self, returned: Iterable[Bucket], buckets: list[Bucket]) -> None:
        """Of these buckets, which `returned` yields when they are back, wait for the first."""
        for bucket in buckets:
            bucket.away.is_back = False
        self.buckets = iter(returned)
        self.take()

    def take_until_back(self, buckets: list[Bucket]) -> None:
        """Let them come until these are here."""
        while not all(bucket.away is None or bucket.away.is_back for bucket in buckets):
            if not self.take():
                break

    def take_all(self) -> None:
        """Let all of them come."""
        while self.take():
            pass

    def take(self) -> bool:
        """Let the next come. Returns whether there was one. HostError if they are lost."""
        if self.taking:  # what comes back uses the bus itself
            return False
        self.taking = True
        try:
            # they may come in an evaluation
            with self.host.together(), torch.inference_mode(False), torch.no_grad():
                return next(self.buckets, None) is not None
        except HostError as error:
            self.host.part(str(error))  # the others will not come
            raise
        finally:
            self.taking = False
