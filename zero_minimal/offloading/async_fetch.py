"""Async fetch: parameters that still arrive from the host after step() has returned.

Stage 3 needs a unit's parameters when the unit works again (offload.py). So step() waits only for
the first bucket, and each other one is received when its unit is gathered:

    step()      update ──► bucket 5 is back
    forward     root: 5    block 0: 4    block 1: 3    …     while the host updates those after them

Any other use of the bus waits for all of them first (Host.settle). Otherwise each side could wait
for the other to give a buffer back.
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
        self.buckets: Iterator[Bucket] = iter(())  # a bucket is back when this yields it
        self.taking = False
        host.takes_all = weakref.WeakMethod(self.take_all)

    def begin(self, returned: Iterable[Bucket], buckets: list[Bucket]) -> None:
        """`returned` yields each of these buckets when it is back: wait for the first one."""
        for bucket in buckets:
            bucket.away.is_back = False
        self.buckets = iter(returned)
        self.take()

    def take_until_back(self, buckets: list[Bucket]) -> None:
        """Receive buckets until these are here."""
        while not all(bucket.away is None or bucket.away.is_back for bucket in buckets):
            if not self.take():
                break

    def take_all(self) -> None:
        """Receive all that are left."""
        while self.take():
            pass

    def take(self) -> bool:
        """Receive the next bucket. Returns whether there was one. HostError if they are lost."""
        if self.taking:  # to receive one uses the bus, which calls this again
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
