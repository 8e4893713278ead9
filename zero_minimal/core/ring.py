"""Ring algorithms from nothing but send and receive: what a collective costs, made visible.

The ranks stand in a ring. In every step each rank sends one chunk to its right neighbour while it
receives one from its left neighbour. A tensor of N chunks needs N−1 steps to be reduced or to be
gathered, so each rank sends

    reduce_scatter   (N−1)/N of the tensor        all_gather   (N−1)/N
    all_reduce      2(N−1)/N  (one after the other)
    broadcast        the whole tensor, chunk by chunk down a pipeline (the last rank: nothing)

and, but for broadcast, no rank sends more than another. This is lesson 0. The stages use
`collectives`, whose sums run in rank order; a ring starts each chunk at another rank, so both agree
up to rounding. Tensors are flat, on the CPU. A group of None is all ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def exchange(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send to the right, receive from the left, both at once.

    Waiting for one of them first would lock the ring.
    """
    rank = dist.get_rank(group)
    sending = dist.isend(outgoing, _global(rank + 1, group), group=group)
    dist.recv(incoming, _global(rank - 1, group), group=group)
    sending.wait()


def reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum [N·s] over the ranks; return this rank's part [s]. `tensor` is left as it was."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = list(tensor.clone().view(world_size, -1))
    for step in range(world_size - 1):
        # the chunk that starts at our right neighbour is here after N−1 steps, with all parts in it
        outgoing = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(outgoing)
        exchange(outgoing, incoming, group)
        chunks[(rank - step - 2) % world_size] += incoming
    return chunks[rank]


def all_gather(part: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Collect every rank's part [s]; return [N·s] in rank order."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = part.new_empty(world_size, part.numel())
    chunks[rank] = part
    for step in range(world_size - 1):
        # pass on what arrived in the step before
        exchange(chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size], group)
    return chunks.view(-1)


def all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum [n] over the ranks, any n; return the sum [n] on every rank."""
    world_size = dist.get_world_size(group)
    padded = tensor.new_zeros(-(-tensor.numel() // world_size) * world_size)
    padded[: tensor.numel()] = tensor
    return all_gather(reduce_scatter(padded, group), group)[: tensor.numel()]


def broadcast(
    tensor: Tensor, root: int = 0, group: ProcessGroup | None = None, chunk_count: int = 4
) -> Tensor:
    """Copy rank root's tensor [n] to all ranks, in place; return it.

    While one chunk is passed on, the next arrives.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    distance = (rank - root) % world_size  # steps from the root, along the ring
    sends = []
    for chunk in tensor.chunk(chunk_count):
        if distance > 0:
            dist.recv(chunk, _global(rank - 1, group), group=group)
        if distance < world_size - 1:
            sends.append(dist.isend(chunk, _global(rank + 1, group), group=group))
    for send in sends:
        send.wait()
    return tensor


def _global(rank: int, group: ProcessGroup | None) -> int:
    """A neighbour's number in the whole world, which is what send and receive take; rank N is
    rank 0 again."""
    return dist.get_global_rank(group or dist.group.WORLD, rank % dist.get_world_size(group))
