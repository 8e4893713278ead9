"""M_D, in other words: blocks in a list by address, a slab that knows all it has handed out, an arena of pairs."""

import torch


class Block:
    def __init__(self, range_of, address, size):
        self.range_of, self.address, self.size, self.used = range_of, address, size, False


class Pool:
    def __init__(self, slack=0):
        self.slack, self.blocks, self.ranges = slack, [], 0

    @property
    def holes(self):
        return sorted((block.address, block.size) for block in self.blocks if not block.used)

    def add(self, address, size):
        self.ranges += 1
        self.blocks.append(Block(self.ranges, address, size))

    def remove(self, address, size):
        (gone,) = (block for block in self.blocks if not block.used and (block.address, block.size) == (address, size))
        self.blocks.remove(gone)

    def take(self, size):
        fitting = sorted((block for block in self.blocks if not block.used and block.size >= size),
                         key=lambda block: (block.size, block.address))
        if not fitting:
            return None
        block = fitting[0]
        if block.size > size + self.slack:
            self.blocks.append(Block(block.range_of, block.address + size, block.size - size))
            block.size = size
        block.used = True
        return block

    def give(self, block):
        if block not in self.blocks or not block.used:
            raise ValueError("this block is free")
        block.used = False
        for other in list(self.blocks):
            if other is block or other.used or other.range_of != block.range_of:
                continue
            if other.address + other.size == block.address:
                block.address, block.size = other.address, other.size + block.size
                self.blocks.remove(other)
            elif block.address + block.size == other.address:
                block.size += other.size
                self.blocks.remove(other)


class Slab:
    def __init__(self, elements=None, dtype=torch.float32, device=None):
        self.dtype, self.device, self.used, self.handed_out = dtype, device or "cpu", 0, []
        self.memory = None if elements is None else torch.empty(elements, dtype=dtype, device=self.device)

    def keep(self, tensor):
        if tensor.dtype != self.dtype:
            raise ValueError("another dtype")
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.memory is not None:
            if self.used + tensor.numel() > self.memory.numel():
                raise MemoryError("full")
            place = torch.empty(0, dtype=self.dtype, device=self.device)
            place.set_(self.memory.untyped_storage(), self.used, tensor.shape, copy.stride())  # a counter
            copy = place.copy_(copy)
        self.used += tensor.numel()
        self.handed_out.append(copy)
        return copy

    def holds(self, tensor):
        return self.memory is not None and tensor.untyped_storage().data_ptr() == self.memory.data_ptr()

    def reset(self):
        for copy in self.handed_out:
            copy.add_(0)
        if self.memory is None and self.used:
            self.memory = torch.empty(self.used, dtype=self.dtype, device=self.device)
        self.used, self.handed_out = 0, []


def gradients_in_slab(model):
    wanted = [param for param in model.parameters() if param.requires_grad]
    if len({(param.dtype, param.device) for param in wanted}) != 1:
        raise ValueError("parameters of one dtype on one device are wanted")
    slab = Slab(sum(map(torch.numel, wanted)), wanted[0].dtype, wanted[0].device)

    def moved(param):
        if any(param.grad is one for one in slab.handed_out):
            return
        if slab.holds(param.grad):
            raise RuntimeError("it was reset while this gradient was in use")
        param.grad = slab.keep(param.grad)

    for param in wanted:
        param.register_post_accumulate_grad_hook(moved)
    return slab


class Arena:
    def __init__(self, elements, dtype=torch.float32, device=None):
        self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.pool, self.lent = Pool(), []
        self.pool.add(0, elements)

    @property
    def free_bytes(self):
        return self.memory.element_size() * sum(size for _, size in self.pool.holes)

    @property
    def largest_free(self):
        return self.memory.element_size() * max([size for _, size in self.pool.holes] or [0])

    def allocate(self, shape):
        shape = torch.Size(shape)
        block = self.pool.take(shape.numel())
        if block is None:
            raise MemoryError("no block is so large")
        tensor = torch.empty(0, dtype=self.memory.dtype).set_(self.memory.untyped_storage(), block.address, shape)
        self.lent.append([tensor, block])
        return tensor

    def free(self, tensor):
        (block,) = (block for other, block in self.lent if other is tensor)
        self.lent = [pair for pair in self.lent if pair[0] is not tensor]
        self.pool.give(block)
        tensor.set_()

    @torch.no_grad()
    def compact(self):
        self.pool, front = Pool(), 0
        self.pool.add(0, self.memory.numel())
        self.lent.sort(key=lambda pair: pair[1].address)
        for pair in self.lent:
            tensor, block = pair
            step = block.address - front
            at = 0
            while step and at < block.size:  # what does not overlap needs no copy
                count = min(block.size - at, 2**18 if step < 2**14 else step)
                moving = self.memory[block.address + at : block.address + at + count]
                self.memory[front + at : front + at + count] = moving.clone() if count > step else moving
                at += count
            pair[1] = self.pool.take(block.size)
            tensor.set_(self.memory.untyped_storage(), front, tensor.shape, tensor.stride())
            front += block.size
