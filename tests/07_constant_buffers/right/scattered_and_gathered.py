"""Each load is summed in parts, a reduce-scatter, and gathered when its buffer is back. The last one may be odd."""

import torch
import torch.distributed as dist

from zero_minimal.core import collectives


class Tray:
    def __init__(self, memory):
        self.memory, self.busy = memory, ()

    def clear(self):
        for step in self.busy:
            step()
        self.busy = ()


class ConstantBuffers:
    def __init__(self, size, *, dtype=torch.float32, device="cpu", group=None):
        self.group, self.elements = group, int(size) // dtype.itemsize
        self.elements -= self.elements % dist.get_world_size(group)
        if self.elements < 1:
            raise ValueError(f"{size} bytes are too few")
        self.here, self.other = (Tray(torch.zeros(self.elements, dtype=dtype, device=device)) for _ in "ab")
        self.buffers = [self.here.memory, self.other.memory]

    def take(self):
        self.here, self.other = self.other, self.here
        self.here.clear()
        return self.here.memory

    def send(self, pending, then):
        self.here.busy = pending.wait, then

    def wait(self):
        self.other.clear()
        self.here.clear()


def loads(flats, elements):
    load = []
    for flat in flats:
        for piece in flat.tensor_split(tuple(range(elements - _held(load), flat.numel(), elements))):
            load = [*load, piece]
            if _held(load) == elements:
                yield load
                load = []
    if _held(load):
        yield load


def _held(load):
    return sum(piece.numel() for piece in load)


def fill(buffer, load):
    start = 0
    for piece in load:
        buffer.narrow(0, start, piece.numel()).copy_(piece)
        start += piece.numel()
    return buffer.narrow(0, 0, start)


def unpack(filled, load):
    start = 0
    for piece in load:
        piece.copy_(filled.narrow(0, start, piece.numel()))
        start += piece.numel()


@torch.no_grad()
def all_reduce(tensors, buffers, op="avg"):
    dtype, tensors = buffers.buffers[0].dtype, list(tensors)
    if any(not tensor.is_floating_point() or torch.promote_types(tensor.dtype, dtype) != dtype for tensor in tensors):
        raise ValueError("the buffers would round this")
    if any(tensor.device != buffers.buffers[0].device for tensor in tensors):
        raise ValueError("the buffers lie elsewhere")
    end = 0  # of the memory before
    for tensor in sorted(filter(torch.Tensor.numel, tensors), key=torch.Tensor.data_ptr):
        if tensor.data_ptr() < end:
            raise ValueError("two of the tensors share memory")
        end = tensor.data_ptr() + tensor.nbytes
    group = buffers.group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for load in loads([tensor.view(-1) for tensor in tensors], buffers.elements):
        filled = fill(buffers.take(), load)
        if filled.numel() % ranks:
            pending, whole = collectives.all_reduce(filled, op=op, group=group, async_op=True), None
        else:
            part, whole = filled.view(ranks, -1)[rank], filled
            pending = collectives.reduce_scatter(part, filled, op=op, group=group, async_op=True)

        def then(filled=filled, load=load, whole=whole):
            if whole is not None:
                collectives.all_gather(whole, whole.view(ranks, -1)[rank], group=group)
            unpack(filled, load)

        buffers.send(pending, then)
    buffers.wait()
