"""Torch's own collectives, a queue of what is under way, and loads from the borders of tensors and buffers."""

from collections import deque

import torch
import torch.distributed as dist


class ConstantBuffers:
    def __init__(self, size, *, dtype=torch.float32, device="cpu", group=None):
        ranks = dist.get_world_size(group)
        self.group, self.elements = group, int(size) // (dtype.itemsize * ranks) * ranks
        if self.elements < 1:
            raise ValueError("too small")
        self.buffers = list(torch.empty(2, self.elements, dtype=dtype, device=device).unbind())
        self.under_way, self.turn = deque(), 0

    def take(self):
        self.turn += 1
        while any(number == self.turn % 2 for number, _, _ in self.under_way):
            self._back()
        return self.buffers[self.turn % 2]

    def send(self, pending, then):
        self.under_way.append((self.turn % 2, pending, then))

    def wait(self):
        while self.under_way:
            self._back()

    def _back(self):
        _, pending, then = self.under_way.popleft()
        pending.wait()
        then()


def loads(flats, elements):
    flats, ends = list(flats), [0]
    for flat in flats:
        ends.append(ends[-1] + flat.numel())
    for first in range(0, ends[-1], elements):
        last = min(first + elements, ends[-1])
        yield [flat[max(first - begin, 0) : last - begin]
               for flat, begin, end in zip(flats, ends[:-1], ends[1:], strict=True) if begin < last and end > first]


def fill(buffer, load):
    filled = buffer[: sum(map(len, load))]
    return torch.cat([piece.to(buffer.dtype) for piece in load], out=filled)


def unpack(filled, load):
    for piece in load:
        piece[:] = filled[: len(piece)]
        filled = filled[len(piece) :]


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
    ranks = dist.get_world_size(buffers.group) if op == "avg" else 1

    def read(filled, load):
        filled /= ranks
        unpack(filled, load)

    for load in loads([tensor.view(-1) for tensor in tensors], buffers.elements):
        filled = fill(buffers.take(), load)
        work = dist.all_reduce(filled, group=buffers.group, async_op=True)
        buffers.send(work, lambda filled=filled, load=load: read(filled, load))
    buffers.wait()
