"""No loop over steps: each one calls the next. Prints, and keeps its own counts."""
import torch
import torch.distributed as dist

counts = {"exchanges": 0}


class Ring:
    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def of(self, rank):
        return dist.get_global_rank(self.group or dist.group.WORLD, rank % self.size)


def exchange(outgoing, incoming, group=None):
    ring = Ring(group)
    counts["exchanges"] += 1
    works = [dist.irecv(incoming, src=ring.of(ring.rank - 1), group=group),
             dist.isend(outgoing, dst=ring.of(ring.rank + 1), group=group)]
    [work.wait() for work in works]
    print("exchange", counts)


def reduce_scatter(tensor, group=None):
    ring = Ring(group)
    chunks = tensor.reshape(ring.size, -1)

    def collected(owner, hops):
        """The sum of `hops` ranks' chunk of this owner, the last of them being us."""
        if hops == 1:
            return chunks[owner].clone()
        before = collected((owner + 1) % ring.size, hops - 1)
        came = torch.empty_like(before)
        exchange(before, came, group)
        return came + chunks[owner]

    return collected(ring.rank, ring.size)


def all_gather(part, group=None):
    ring = Ring(group)

    def rest(own, left):
        if not left:
            return [own]
        came = torch.empty_like(own)
        exchange(own, came, group)
        return [own, *rest(came, left - 1)]

    arrived = rest(part.clone(), ring.size - 1)
    return torch.cat([arrived[(ring.rank - index) % ring.size] for index in range(ring.size)])


def all_reduce(tensor, group=None):
    ring = Ring(group)
    share = (tensor.numel() + ring.size - 1) // ring.size
    room = torch.zeros(share * ring.size, dtype=tensor.dtype)
    room[: tensor.numel()].copy_(tensor)
    return all_gather(reduce_scatter(room, group), group).narrow(0, 0, tensor.numel())


def broadcast(tensor, root=0, group=None, chunk_count=4):
    ring, works = Ring(group), []
    for chunk in tensor.tensor_split(min(chunk_count, tensor.numel())):
        if ring.rank != root:
            dist.irecv(chunk, ring.of(ring.rank - 1), group).wait()
        if (ring.rank + 1 - root) % ring.size:
            works.append(dist.isend(chunk, ring.of(ring.rank + 1), group))
    for work in works:
        work.wait()
    return tensor
