"""Lesson 0: what goes wrong with rings."""

from submissions import Wrong

SEND = "    sending = dist.isend(outgoing, _global(rank + 1, group), group=group)\n"
RECEIVE = "    dist.recv(incoming, _global(rank - 1, group), group=group)\n    sending.wait()\n"
SUM = "        chunks[(rank - step - 2) % world_size] += incoming\n    return chunks[rank]\n"
SCATTER_RANK = ("    rank, world_size = dist.get_rank(group), dist.get_world_size(group)\n"
                "    chunks = list")
GATHER_RANK = "    rank, world_size = dist.get_rank(group), dist.get_world_size(group)\n    chunks = part"
ADD = "        chunks[(rank - step - 2) % world_size] += incoming\n"
EXCHANGE = "        exchange(outgoing, incoming, group)\n"
PASS_ON = "        exchange(chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size], group)\n"
GATHERED = "    return chunks.view(-1)\n"
PAD = "    padded = tensor.new_zeros(-(-tensor.numel() // world_size) * world_size)\n"
FILL = "    padded[: tensor.numel()] = tensor\n"
REDUCED = "    return all_gather(reduce_scatter(padded, group), group)[: tensor.numel()]\n"
CHUNKS = "    for chunk in tensor.chunk(chunk_count):\n"
FROM_LEFT = "        if distance > 0:\n            dist.recv(chunk, _global(rank - 1, group), group=group)\n"
TO_RIGHT = ("        if distance < world_size - 1:\n"
            "            sends.append(dist.isend(chunk, _global(rank + 1, group), group=group))\n")

WRONG = {
    "sends to the left": Wrong(
        1, "test_neighbours_exchange", r"rank \d received rank \d's tensor: send to the right",
        [(SEND, SEND.replace("+ 1", "- 1")), (RECEIVE, RECEIVE.replace("- 1", "+ 1"))], 3),
    "waits for its send before it receives": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)ranks 0, 1 and 2 waited in send, at line \d+ of assignment.py \(exchange\): dist.send.*isend",
        [(SEND, SEND.replace("sending = dist.isend", "dist.send")), (RECEIVE, RECEIVE.splitlines()[0] + "\n")],
        3, True),
    "receives before it sends": Wrong(
        1, "test_neighbours_exchange", r"ranks 0, 1 and 2 waited in recv, at line \d+ of assignment.py \(exchange\)",
        [(SEND, ""), (RECEIVE, RECEIVE.splitlines()[0] + "\n" + SEND + "    sending.wait()\n")], 3, True),
    "does not wait for its send": Wrong(
        1, "test_neighbours_exchange", r"the send was still under way",
        [(RECEIVE, RECEIVE.splitlines()[0] + "\n    dist.my_sends = [sending]\n")], 3),
    "drops its send": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)rank 0 waited in recv.*ranks 1 and 2 had returned.*look at: a send that nobody waits for may be",
        [(RECEIVE, RECEIVE.splitlines()[0] + "\n")], 3, True),
    "does not wait for what it receives": Wrong(
        1, "test_neighbours_exchange", r"`incoming` is not filled on rank \d",
        [(RECEIVE, RECEIVE.replace("dist.recv", "dist.irecv"))], 3),
    "exchanges by a gather of everything": Wrong(
        1, "test_neighbours_exchange", r"it calls torch's own all_gather",
        [(SEND, "    everything = [torch.empty_like(outgoing) for _ in range(dist.get_world_size(group))]\n"
                "    dist.all_gather(everything, outgoing, group=group)\n"),
         (RECEIVE, "    incoming.copy_(everything[rank - 1])\n")], 3),
    "takes ranks of a group for ranks of the world": Wrong(
        1, "test_exchange_in_a_group", r"send and receive take global ranks, and _global\(\) gives them",
        [(SEND, "    size = dist.get_world_size(group)\n"
                + SEND.replace("_global(rank + 1, group)", "(rank + 1) % size")),
         (RECEIVE, RECEIVE.replace("_global(rank - 1, group)", "(rank - 1) % size"))]),
    "loops for ever in its file": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)ranks 0, 1 and 2 stood at line \d+ of assignment.py \(exchange\): while True: pass\n    A rank .*loop",
        [(SEND, "    while True: pass\n" + SEND)], 3, True),
    "takes its rank in the world for that in the group": Wrong(
        2, "test_reduce_scatter_in_a_group",
        r"it raised IndexError(?s:.*)To look at: .*is `group` passed on to every call",
        [(SCATTER_RANK, SCATTER_RANK.replace("get_rank(group)", "get_rank()"))]),
    "ends on the right neighbour's chunk": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"rank 0 of 3 returned part 1, summed over all ranks",
        [("outgoing = chunks[(rank - step - 1) % world_size]", "outgoing = chunks[(rank - step) % world_size]"),
         (SUM, "        chunks[(rank - step - 1) % world_size] += incoming\n"
               "    return chunks[(rank + 1) % world_size]\n")],
        3),
    "gives the mean": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"divided by 3 \(the mean, not the sum\)",
        [(SUM, SUM.rstrip() + " / world_size\n")], 3),
    "writes over instead of adding": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"part 0, of rank \d alone",
        [(ADD, ADD.replace("+=", "="))], 3),
    "stops a step too early": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"part \d, of rank \d alone",
        [("range(world_size - 1):\n        # the", "range(world_size - 2):\n        # the")],
        3),
    "sums into the caller's tensor": Wrong(
        2, "test_reduce_scatter_leaves_its_input", r"changed its input",
        [("tensor.clone().view", "tensor.view")]),
    "sends whole tensors around": Wrong(
        2, "test_reduce_scatter_sends_one_chunk_a_step",
        r"sent 840 bytes in reduce_scatter, in 2 messages; .* is 280 bytes: 2 messages of 140",
        [(EXCHANGE, "        whole, other = torch.cat(chunks), tensor.clone()\n        exchange(whole, other, group)\n"
                    "        incoming = other.view(world_size, -1)[(rank - step - 2) % world_size].clone()\n")], 3),
    "reduces by torch's own collective": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"it calls torch's own all_reduce",
        [(SUM, "        pass\n    tensor = tensor.clone()\n    dist.all_reduce(tensor, group=group)\n"
               "    return tensor.view(world_size, -1)[rank]\n"), (EXCHANGE, "")], 3),
    "sends each part straight to its owner": Wrong(
        2, "test_reduce_scatter_sends_one_chunk_a_step", r"rank 0 of 3 sent to rank 2 in reduce_scatter",
        [("outgoing = chunks[(rank - step - 1) % world_size]", "outgoing = chunks[(rank + step + 1) % world_size]"),
         (EXCHANGE, "        sending = dist.isend(outgoing, _global(rank + step + 1, group), group=group)\n"
                    "        dist.recv(incoming, _global(rank - step - 1, group), group=group)\n"
                    "        sending.wait()\n"),
         (SUM, "        chunks[rank] = chunks[rank] + incoming\n    return chunks[rank]\n")], 3),
    "computes in fp32 whatever comes": Wrong(
        2, "test_reduce_scatter_of_other_kinds", r"reduce_scatter of a torch.float64 tensor gave .*torch.float32",
        [("tensor.clone().view", "tensor.float().clone().view")], 3),
    "gathers in the order of arrival": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"gave the parts of ranks 0, 2, 1, and they must be 0, 1, 2",
        [(GATHERED, "    return torch.cat([chunks[(rank - step) % world_size] for step in range(world_size)])\n")], 3),
    "forgets its own part": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"parts of ranks \?",
        [("    chunks[rank] = part\n", "    own = part\n"),
         (PASS_ON, PASS_ON.replace("exchange(chunks[(rank - step) % world_size]",
                                   "exchange(chunks[(rank - step) % world_size] if step else own"))], 3),
    "passes on its own part only": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"gave the parts of ranks 0, 2, 2",
        [(PASS_ON, PASS_ON.replace("chunks[(rank - step) % world_size]", "part"))], 3),
    "returns a matrix": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"returned \[3, 35\] on rank 0",
        [(GATHERED, "    return chunks\n")], 3),
    "sends its part to everyone": Wrong(
        3, "test_all_gather_sends_one_part_a_step", r"sends to its right neighbour alone, here rank 1",
        [(PASS_ON, "        sending = dist.isend(part, _global(rank + step + 1, group), group=group)\n"
                   "        arriving = chunks[(rank - step - 1) % world_size]\n"
                   "        dist.recv(arriving, _global(rank - step - 1, group), group=group)\n"
                   "        sending.wait()\n")], 3),
    "gathers numbers of fp32 only": Wrong(
        3, "test_all_gather_of_other_kinds", r"it raised RuntimeError|torch.float32",
        [("chunks = part.new_empty(world_size, part.numel())", "chunks = torch.empty(world_size, part.numel())")], 4),
    "gathers with its rank in the world": Wrong(
        3, "test_all_gather_in_a_group", r"it raised IndexError(?s:.*)To look at: .*is `group` passed on to every call",
        [(GATHER_RANK, GATHER_RANK.replace("get_rank(group)", "get_rank()"))]),
    "gathers into its input": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"changed its input on rank 0: write into a new tensor",
        [("    return chunks.view(-1)\n", "    part.zero_()\n    return chunks.view(-1)\n")], 3),
    "does not pad": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"(?s)it raised .*To look at: N need not divide",
        [(REDUCED, "    return all_gather(reduce_scatter(tensor, group), group)\n")], 3),
    "drops the tail": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"returned \[0\]|returned \[63\]: 3 does not divide 64",
        [(PAD, "    whole = tensor.numel() // world_size * world_size\n"), (FILL, ""),
         (REDUCED, "    return all_gather(reduce_scatter(tensor[:whole], group), group)\n")], 3),
    "returns the padding too": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"returned \[3\]: 3 does not divide 1, so pad it",
        [(REDUCED, REDUCED.replace("[: tensor.numel()]", ""))], 3),
    "gathers everything and sums": Wrong(
        4, "test_all_reduce_sends_twice_a_reduce_scatter", r"sent 3360 bytes in all_reduce, in 2 messages; 2\(N-1\)/N",
        [(REDUCED, "    return all_gather(padded, group).view(world_size, -1).sum(0)[: tensor.numel()]\n")], 3),
    "all-reduces in the whole world": Wrong(
        4, "test_all_reduce_in_a_group", r"is `group` passed on to every call|had not come to an end",
        [(REDUCED, REDUCED.replace(", group)", ")"))], hangs=True),
    "broadcasts from the root to each": Wrong(
        5, "test_broadcast_sends_the_tensor_once", r"rank 1 of 3 sent to rank 0 in broadcast",
        [(FROM_LEFT, "        if distance > 0:\n            dist.recv(chunk, _global(root, group), group=group)\n"),
         (TO_RIGHT, "        for other in range(world_size) if distance == 0 else ():\n            if other != root:\n"
                    "                sends.append(dist.isend(chunk, _global(other, group), group=group))\n")]),
    "broadcasts in one piece": Wrong(
        5, "test_broadcast_is_a_pipeline", r"the root sent 1 messages",
        [(CHUNKS, "    for chunk in [tensor]:\n")]),
    "receives all before it sends": Wrong(
        5, "test_broadcast_is_a_pipeline", r"passed nothing on before the root had sent its last chunk",
        [(TO_RIGHT, "    for chunk in tensor.chunk(chunk_count):\n" + TO_RIGHT)]),
    "the last rank sends too": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"(?s)at line \d+ of assignment.py \(broadcast\).*must not send",
        [(TO_RIGHT, TO_RIGHT.replace("distance < world_size - 1", "world_size > 1"))], 3, True),
    "returns nothing": Wrong(
        5, "test_broadcast_returns_its_tensor", r"did not return the tensor .* end with return tensor",
        [("    return tensor\n", "")]),
    "receives into copies": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"its chunks are views of it",
        [(CHUNKS, "    for chunk in tensor.clone().chunk(chunk_count):\n")], 2),
    "broadcasts from rank 0 whoever is the root": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"over 2 ranks, root is 1: on rank \d .* holds 0 of the root's 1 element ",
        [("distance = (rank - root) % world_size", "distance = rank")], 2),
    "takes the root for a rank of the world": Wrong(
        5, "test_broadcast_in_a_group", r"root is a rank of the group|had not come to an end",
        [("distance = (rank - root) % world_size",
          "distance = (dist.get_rank() - root) % world_size")]),
}

# ------------------------------------------------------------------------------------------------------------- right

BATCHED = '''
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
    part = lambda index: tensor[index % count * size :][:size]
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
'''

BLOCKING = '''
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
'''

RECURSIVE = '''
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
'''

RIGHT = {
    "both messages in one batch": BATCHED,
    "blocking send and recv": BLOCKING,
    "recursive, and it prints": RECURSIVE,
}
