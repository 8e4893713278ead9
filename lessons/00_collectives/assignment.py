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
    # step 1: `outgoing` is with the right neighbour, `incoming` holds what the left one sent, and
    # both may be used again.
    # - dist.send(tensor, rank, group), dist.recv(tensor, rank, group): each waits. dist.isend and
    #   dist.irecv only begin, and return a work
    # - work.wait(): returns when it is done. Keep the work until then
    # - _global(rank, group): a neighbour's number among all ranks, which send and receive want.
    #   Rank N is rank 0 again
    # - dist.get_rank(group), dist.get_world_size(group): numbers in the group, from 0 up
    raise NotImplementedError("step 1: exchange")


def reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum [N·s] over the ranks; return this rank's part [s]. `tensor` is left as it was."""
    # step 2: N-1 exchanges, each of one chunk [s]. Return this rank's chunk, summed over all ranks,
    # in new memory.
    # - tensor.view(N, -1): the chunks, in the memory of `tensor`; torch.empty_like(chunk): new
    #   memory [s]
    # - exchange(outgoing, incoming, group)
    raise NotImplementedError("step 2: reduce_scatter")


def all_gather(part: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Collect every rank's part [s]; return [N·s] in rank order."""
    # step 3: N-1 exchanges, each of one part [s]. In each one a rank passes on what arrived in the
    # one before.
    # - part.new_empty(N, s): room for all parts, of the same dtype. Its rows are views
    raise NotImplementedError("step 3: all_gather")


def all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum [n] over the ranks, any n; return the sum [n] on every rank."""
    # step 4: made of the two above, also when N does not divide n.
    # - tensor.new_zeros(size): of the same dtype
    raise NotImplementedError("step 4: all_reduce")


def broadcast(
    tensor: Tensor, root: int = 0, group: ProcessGroup | None = None, chunk_count: int = 4
) -> Tensor:
    """Copy rank root's tensor [n] to all ranks, in place; return it.

    While one chunk is passed on, the next arrives.
    """
    # step 5: chunks go down the ring from the root. A rank passes one on while the next one
    # arrives. Return `tensor`.
    # - tensor.chunk(chunk_count): views of it, at most so many, none of them empty
    raise NotImplementedError("step 5: broadcast")


def _global(rank: int, group: ProcessGroup | None) -> int:
    """A neighbour's number in the whole world, which is what send and receive take; rank N is
    rank 0 again."""
    return dist.get_global_rank(group or dist.group.WORLD, rank % dist.get_world_size(group))
