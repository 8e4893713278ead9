"""Nothing but blocking send and recv: even ranks send first, odd ones receive first."""
import torch
import torch.distributed as dist


def _world(rank, group):
    count = dist.get_world_size(group)
    return dist.get_global_rank(group, rank % count) if group is not None else rank % count


def exchange(outgoing, incoming, group=None):
    rank = dist.get_rank(group)

    def send():
        dist.send(outgoing.contiguous(), _world(rank + 1, group), group)

    if rank % 2 == 0:
        send()
    dist.recv(incoming, _world(rank - 1, group), group)
    if rank % 2:
        send()


def reduce_scatter(tensor, group=None):
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    matrix = tensor.clone().reshape(count, -1)
    inbox = torch.empty_like(matrix[0])
    for shift in range(1, count):
        exchange(matrix[(rank - shift) % count], inbox, group)
        matrix[(rank - shift - 1) % count].add_(inbox)
    return matrix[rank].clone()


def all_gather(part, group=None):
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    result = torch.zeros(count * part.numel(), dtype=part.dtype)
    pieces = result.chunk(count)
    pieces[rank].copy_(part)
    for shift in range(1, count):
        exchange(pieces[(rank - shift + 1) % count], pieces[(rank - shift) % count], group)
    return result


def all_reduce(tensor, group=None):
    count, size = dist.get_world_size(group), tensor.numel()
    longer = torch.cat([tensor, tensor.new_zeros((count - size % count) % count)])
    return all_gather(reduce_scatter(longer, group), group)[:size]


def broadcast(tensor, root=0, group=None, chunk_count=4):
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    for chunk in torch.chunk(tensor, chunk_count):
        if rank != root:
            dist.recv(chunk, _world(rank - 1, group), group)
        if (rank + 1) % count != root:
            dist.send(chunk, _world(rank + 1, group), group)
    return tensor
