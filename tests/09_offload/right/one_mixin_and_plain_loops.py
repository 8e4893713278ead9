"""Offload, in other words: one class before each stage, an optimizer that steps where a gradient is, threads of its
own."""

import functools
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import torch
from torch import nn

from zero_minimal.core import collectives, optimizers, precision, replicas, seams
from zero_minimal.offloading import disk_set_up
from zero_minimal.offloading.disk import OnDisk
from zero_minimal.offloading.files import Buffer
from zero_minimal.offloading.host_process import Host
from zero_minimal.offloading.offloaded_state import Kept, OffloadedState, Shard, refuse_alone
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3


class ReadAhead:
    def __init__(self, file, size):
        self.file, self.read, self.written = file, 0, 0
        self.buffers = [Buffer(size) for _ in range(3)]
        self.reader, self.writer, self.turn = ThreadPoolExecutor(1), ThreadPoolExecutor(1), 0

    def free_buffer(self):
        buffer = self.buffers[self.turn % 3]
        self.turn += 1
        buffer.written.result()
        return buffer

    def _fetch(self, stretch):
        for earlier in (stretch.written, self.buffers[self.turn % 3].written):
            earlier.result()
        buffer = self.free_buffer()
        self.file.read(stretch.start, buffer.memory.narrow(0, 0, stretch.size))
        return buffer

    def through(self, stretches):
        waiting, last = deque(stretches), None
        coming = self.reader.submit(self._fetch, waiting[0])
        while waiting:
            stretch, buffer = waiting.popleft(), coming.result()
            self.read += stretch.size
            if waiting:
                coming = self.reader.submit(self._fetch, waiting[0])
            yield buffer
            last = self.begin_to_write(stretch, buffer)
        return last

    def begin_to_write(self, stretch, buffer):
        size = stretch.size - stretch.changes

        def write():
            self.file.write(stretch.start + stretch.changes, buffer.memory.narrow(0, stretch.changes, size))

        self.written += size
        stretch.written = buffer.written = self.writer.submit(write)
        return stretch.written

    def read_now(self, stretch, name):
        stretch.written.result()
        view = stretch.view(self.free_buffer().memory, name)
        self.read += view.nbytes
        self.file.read(stretch.start + stretch.parts[name][0], view)
        return view

    def write_now(self, stretch, name, tensor):
        self.written += tensor.nbytes
        self.file.write(stretch.start + stretch.parts[name][0], tensor)


class HostState(Kept):
    def keep(self, parcel, number, group_index):
        kind = parcel.tensor.dtype
        master = torch.empty(len(parcel.tensor), dtype=torch.promote_types(kind, torch.float32)).copy_(parcel.tensor)
        self.bus.emptied(parcel)
        self.shards[number] = Shard(kind, group_index, nn.Parameter(master), torch.zeros(len(master), dtype=kind))

    def make_optimizer(self, parcel, pickled):
        kind, options, groups = cloudpickle.loads(pickled)
        self.shards = {number: self.shards[number] for number in sorted(self.shards)}
        self.optimizer = optimizers.over_shards(kind, options, groups, list(self.shards.values()))

    def gradient(self, parcel, number, adds):
        shard = self.shards[number]
        shard.gradient = parcel.tensor + (shard.gradient if adds and shard.has_gradient else 0)
        shard.has_gradient = True
        self.bus.emptied(parcel)

    def forget(self, parcel):
        for number in self.shards:
            self.shards[number].has_gradient = False

    def update(self, parcel, options, scale):
        for index, its in enumerate(options):
            for name in its:
                self.optimizer.param_groups[index][name] = its[name]
        for shard in self.in_turn():
            shard.master.grad = shard.gradient.clone().to(shard.master.dtype).mul_(1.0 if scale is None else scale)
            self.optimizer.step()  # of all others it sees no gradient
            shard.master.grad = None
            self.bus.send(("parameters",), shard.master.detach().to(shard.dtype))


class DiskState(OnDisk, HostState):
    lanes = ReadAhead


def serve(bus, kind):
    state, parcel = kind(bus), bus.receive()
    while parcel.words != ("end",):
        getattr(state, parcel.words[0])(parcel, *parcel.words[1:])
        parcel = bus.receive()


class Mixin:
    host = None
    crosses_whole = False  # gradients add up where they are whole

    def __init__(self, model, optimizer_class, *, bus=None, disk=None, host_budget=None, **options):
        own = {name: options[name] for name in options
               if name not in ("group", "bucket_bytes", "param_groups", "memory", "units")}
        self.speed, self.left = bus, None
        self.disk = disk_set_up.asked(disk, host_budget, model, optimizer_class, own, options)
        super().__init__(model, optimizer_class, **options)
        self.host.send(("make_optimizer", cloudpickle.dumps((optimizer_class, own, self._options()))))
        refuse_alone(self.optimizer)

    def _options(self):
        return [{name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups]

    def own(self, bucket):
        super().own(bucket)
        if not bucket.trained:
            return
        if not self.host:
            largest = max(each.padded // self.world_size * each.dtype.itemsize for each in self.buckets)
            kind = DiskState if self.disk else HostState
            self.host = Host(functools.partial(serve, kind=kind), largest, torch.device("cpu"), self.speed)
            if self.disk:
                disk_set_up.set_up(self, self.disk, self.buckets)
        number, shard = self.buckets.index(bucket), bucket.parameter_shard
        bucket.away = OffloadedState(self.host, number)
        self.host.send(("keep", number, bucket.group_index), shard)
        wide = torch.promote_types(bucket.dtype, torch.float32)
        bucket.master = nn.Parameter(torch.zeros(1, dtype=wide).expand(len(shard)))
        bucket.away.know(bucket)

    def _wait(self):
        reducing, self.reducing = self.reducing, None
        if not reducing:
            return
        pending = reducing if self.crosses_whole else reducing.pending
        pending.wait()
        if self.crosses_whole:
            bucket, shard = self.left, self.left.gradient_shard
        else:
            bucket, shard = reducing.bucket, reducing.shard
            self.memory.give_back(reducing.whole)
        self.host.send(("gradient", bucket.away.number, not self.crosses_whole), shard)

    def clip_grad_norm_(self, max_norm):
        self.reducer.complete()
        norms, dtype = self.host.ask("norms")
        total = torch.tensor(norms, dtype=dtype).square().sum()
        collectives.all_reduce(total, op="sum", group=self.group)
        norm = total.sqrt() * (1.0 if self.gradient_scale is None else self.gradient_scale)
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    def gradients_are_finite(self):
        self.reducer.complete()
        return torch.tensor(self.host.ask("finite"))

    def zero_grad(self):
        super().zero_grad()
        self.host.send(("forget",))

    @torch.no_grad()
    def step(self):
        whole = hasattr(self, "_release_all")  # stage 3 gathers as units are used
        if whole:
            self._release_all()
        self.reducer.complete()
        for bucket in self.buckets:
            seams.tell("update_begins", bucket)
            precision.keep_changes(bucket)
        scale = self.gradient_scale
        self.host.send(("update", self._options(), scale))
        under_way = deque()
        for bucket in self.buckets:
            parcel = self.host.receive()
            bucket.parameter_shard[:] = parcel.tensor
            self.host.emptied(parcel)
            bucket.away.know(bucket)
            seams.tell("update_ends", bucket)
            if not whole:
                under_way.append(collectives.all_gather(
                    bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket, async_op=True))
            if len(under_way) > 2:
                under_way.popleft().wait()
        while under_way:
            under_way.popleft().wait()
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = self.optimizer._opt_called = True


class Offloaded1(Mixin, Stage1):
    crosses_whole = True

    def bucket_complete(self, bucket, done):
        super().bucket_complete(bucket, done)
        self.left = bucket


class Offloaded2(Mixin, Stage2):
    pass


class Offloaded3(Mixin, Stage3):
    pass
