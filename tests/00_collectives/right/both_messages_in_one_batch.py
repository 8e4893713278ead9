"""Both messages of an exchange in one batch; flat tensors and slices."""
import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv
from torch.nn import functional as F


def neighbours(group):
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    place, count = dist.get_rank(group), len(ranks)
    return place, count, ranks[(place - 1) % count], ranks[(place + 1) % count]


def exchange(outgoing, incoming, group=None):
    _, _, left, right = neighbours(group)
    pair = [P2POp(dist.irecv, incoming, left, group), P2POp(dist.isend, outgoing, right, group)]
    for work in batch_isend_irecv(pair):
        work.wait()


def reduce_scatter(tensor, group=None):
    place, count, _, _ = neighbours(group)
    size = len(tensor) // count
    def part(index):
        return tensor[index % count * size :][:size]
    travelling = part(place - 1).clone()
    for step in range(2, count + 1):
        arrived = torch.zeros_like(travelling)
        exchange(travelling, arrived, group)
        travelling = arrived + part(place - step)
    return travelling if count > 1 else tensor.clone()


def all_gather(part, group=None):
    place, count, _, _ = neighbours(group)
    parts = {place: part.clone()}
    for step in range(1, count):
        parts[(place - step) % count] = torch.zeros_like(part)
        exchange(parts[(place - step + 1) % count], parts[(place - step) % count], group)
    return torch.cat([parts[index] for index in range(count)])


def all_reduce(tensor, group=None):
    count = dist.get_world_size(group)
    total = reduce_scatter(F.pad(tensor, (0, -len(tensor) % count)), group)
    return all_gather(total, group)[: len(tensor)].clone()


def broadcast(tensor, root=0, group=None, chunk_count=4):
    place, count, left, right = neighbours(group)
    first, last = place == root, (place + 1) % count == root
    size = -(-len(tensor) // chunk_count)
    coming = [] if first else [dist.irecv(piece, left, group) for piece in tensor.split(size)]
    going = []
    for index, piece in enumerate(tensor.split(size)):
        if not first:
            coming[index].wait()
        if not last:
            going.append(dist.isend(piece, right, group))
    for work in going:
        work.wait()
    return tensor
