"""Lesson 0: what goes wrong with rings.

Each of the five functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, function

RANKS = "rank, world_size = dist.get_rank(group), dist.get_world_size(group)"
RIGHT_ONE, LEFT_ONE = "_global(rank + 1, group)", "_global(rank - 1, group)"


def exchange(send=f"sending = dist.isend(outgoing, {RIGHT_ONE}, group=group)",
             receive=f"dist.recv(incoming, {LEFT_ONE}, group=group)", wait="sending.wait()"):
    return {"exchange": function("def exchange(outgoing, incoming, group=None):", RANKS, send, receive, wait)}


def reduce_scatter(ranks=RANKS, start="tensor.clone().view(world_size, -1)", steps="world_size - 1",
                   outgoing="chunks[(rank - step - 1) % world_size]", travel="exchange(outgoing, incoming, group)",
                   add="chunks[(rank - step - 2) % world_size] += incoming", result="chunks[rank]"):
    body = function(f"for step in range({steps}):", f"outgoing = {outgoing}",
                    "incoming = torch.empty_like(outgoing)", travel, add)
    return {"reduce_scatter": function("def reduce_scatter(tensor, group=None):", ranks, f"chunks = list({start})",
                                       body, f"return {result}")}


def all_gather(ranks=RANKS, start="part.new_empty(world_size, part.numel())", own="chunks[rank] = part",
               outgoing="chunks[(rank - step) % world_size]", arriving="chunks[(rank - step - 1) % world_size]",
               travel="exchange(outgoing, arriving, group)", after="", result="chunks.view(-1)"):
    body = function("for step in range(world_size - 1):", f"outgoing = {outgoing}", f"arriving = {arriving}", travel)
    return {"all_gather": function("def all_gather(part, group=None):", ranks, f"chunks = {start}", own, body, after,
                                   f"return {result}")}


def all_reduce(size="-(-tensor.numel() // world_size) * world_size",
               result="all_gather(reduce_scatter(padded, group), group)[: tensor.numel()]"):
    return {"all_reduce": function(
        "def all_reduce(tensor, group=None):", RANKS, f"padded = tensor.new_zeros({size})",
        "padded[: tensor.numel()] = tensor[: len(padded)]", f"return {result}")}


def broadcast(distance="(rank - root) % world_size", chunks="tensor.chunk(chunk_count)",
              receive=f"dist.recv(chunk, {LEFT_ONE}, group=group)", sends_on="distance < world_size - 1",
              send=f"sends.append(dist.isend(chunk, {RIGHT_ONE}, group=group))", again="", end="return tensor"):
    sending = function(f"if {sends_on}:", send)
    loop = function(f"for chunk in {chunks}:", function("if distance > 0:", receive), "" if again else sending)
    return {"broadcast": function(
        "def broadcast(tensor, root=0, group=None, chunk_count=4):", RANKS, f"distance, sends = {distance}, []", loop,
        again and function(again, sending), "for send in sends:\n    send.wait()", end)}


WRONG = {
    "sends to the left": Wrong(
        1, "test_neighbours_exchange", r"rank \d received rank \d's tensor: send to the right",
        exchange(send=f"sending = dist.isend(outgoing, {LEFT_ONE}, group=group)",
                 receive=f"dist.recv(incoming, {RIGHT_ONE}, group=group)"), 3),
    "waits for its send before it receives": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)ranks 0, 1 and 2 waited in send, at line \d+ of assignment.py \(exchange\): dist.send.*isend",
        exchange(send=f"dist.send(outgoing, {RIGHT_ONE}, group=group)", wait=""), 3, True),
    "receives before it sends": Wrong(
        1, "test_neighbours_exchange", r"ranks 0, 1 and 2 waited in recv, at line \d+ of assignment.py \(exchange\)",
        exchange(send="", wait=f"dist.isend(outgoing, {RIGHT_ONE}, group=group).wait()"), 3, True),
    "does not wait for its send": Wrong(
        1, "test_neighbours_exchange", r"the send was still under way", exchange(wait="dist.my_sends = [sending]"), 3),
    "drops its send": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)rank 0 waited in recv.*ranks 1 and 2 had returned.*look at: a send that nobody waits for may be",
        exchange(wait=""), 3, True),
    "does not wait for what it receives": Wrong(
        1, "test_neighbours_exchange", r"`incoming` is not filled on rank \d",
        exchange(receive=f"dist.irecv(incoming, {LEFT_ONE}, group=group)"), 3),
    "exchanges by a gather of everything": Wrong(
        1, "test_neighbours_exchange", r"it calls torch's own all_gather",
        exchange(send="everything = [torch.empty_like(outgoing) for _ in range(world_size)]",
                 receive="dist.all_gather(everything, outgoing, group=group)",
                 wait="incoming.copy_(everything[rank - 1])"), 3),
    "exchanges twice": Wrong(
        1, "test_an_exchange_is_one_message", r"sent 2097152 bytes in exchange, in 2 messages; one tensor is 1048576 b",
        exchange(wait=f"""
            sending.wait()
            again = dist.isend(outgoing, {RIGHT_ONE}, group=group)
            dist.recv(incoming, {LEFT_ONE}, group=group)
            again.wait()
            """)),
    "takes ranks of a group for ranks of the world": Wrong(
        1, "test_exchange_in_a_group", r"send and receive take global ranks, and _global\(\) gives them",
        exchange(send="sending = dist.isend(outgoing, (rank + 1) % world_size, group=group)",
                 receive="dist.recv(incoming, (rank - 1) % world_size, group=group)")),
    "loops for ever in its file": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)ranks 0, 1 and 2 stood at line \d+ of assignment.py \(exchange\): while True: pass\n    A rank .*loop",
        exchange(send="while True: pass"), 3, True),
    "takes its rank in the world for that in the group": Wrong(
        2, "test_reduce_scatter_in_a_group",
        r"it raised IndexError(?s:.*)To look at: .*is `group` passed on to every call",
        reduce_scatter(ranks="rank, world_size = dist.get_rank(), dist.get_world_size(group)")),
    "ends on the right neighbour's chunk": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"rank 0 of 3 returned part 1, summed over all ranks",
        reduce_scatter(outgoing="chunks[(rank - step) % world_size]",
                       add="chunks[(rank - step - 1) % world_size] += incoming",
                       result="chunks[(rank + 1) % world_size]"), 3),
    "gives the mean": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"divided by 3 \(the mean, not the sum\)",
        reduce_scatter(result="chunks[rank] / world_size"), 3),
    "writes over instead of adding": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"part 0, of rank \d alone",
        reduce_scatter(add="chunks[(rank - step - 2) % world_size] = incoming"), 3),
    "stops a step too early": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"part \d, of rank \d alone",
        reduce_scatter(steps="world_size - 2"), 3),
    "sums into the caller's tensor": Wrong(
        2, "test_reduce_scatter_leaves_its_input", r"changed its input",
        reduce_scatter(start="tensor.view(world_size, -1)")),
    "sends whole tensors around": Wrong(
        2, "test_reduce_scatter_sends_one_chunk_a_step",
        r"sent 840 bytes in reduce_scatter, in 2 messages; .* is 280 bytes: 2 messages of 140",
        reduce_scatter(travel="""
            whole, other = torch.cat(chunks), tensor.clone()
            exchange(whole, other, group)
            incoming = other.view(world_size, -1)[(rank - step - 2) % world_size].clone()
            """), 3),
    "reduces by torch's own collective": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"it calls torch's own all_reduce",
        {"reduce_scatter": """
            def reduce_scatter(tensor, group=None):
                tensor = tensor.clone()
                dist.all_reduce(tensor, group=group)
                return tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
            """}, 3),
    "sends each part straight to its owner": Wrong(
        2, "test_reduce_scatter_sends_one_chunk_a_step", r"rank 0 of 3 sent to rank 2 in reduce_scatter",
        reduce_scatter(outgoing="chunks[(rank + step + 1) % world_size]", travel="""
            sending = dist.isend(outgoing, _global(rank + step + 1, group), group=group)
            dist.recv(incoming, _global(rank - step - 1, group), group=group)
            sending.wait()
            """, add="chunks[rank] = chunks[rank] + incoming"), 3),
    "computes in fp32 whatever comes": Wrong(
        2, "test_reduce_scatter_of_other_kinds", r"reduce_scatter of a torch.float64 tensor gave .*torch.float32",
        reduce_scatter(start="tensor.float().clone().view(world_size, -1)"), 3),
    "gathers in the order of arrival": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"gave the parts of ranks 0, 2, 1, and they must be 0, 1, 2",
        all_gather(result="torch.cat([chunks[(rank - step) % world_size] for step in range(world_size)])"), 3),
    "forgets its own part": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"parts of ranks \?",
        all_gather(own="", outgoing="chunks[(rank - step) % world_size] if step else part"), 3),
    "passes on its own part only": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"gave the parts of ranks 0, 2, 2",
        all_gather(outgoing="part"), 3),
    "returns a matrix": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"returned \[3, 35\] on rank 0", all_gather(result="chunks"), 3),
    "sends its part to everyone": Wrong(
        3, "test_all_gather_sends_one_part_a_step", r"sends to its right neighbour alone, here rank 1",
        all_gather(travel="""
            sending = dist.isend(part, _global(rank + step + 1, group), group=group)
            dist.recv(arriving, _global(rank - step - 1, group), group=group)
            sending.wait()
            """), 3),
    "gathers numbers of fp32 only": Wrong(
        3, "test_all_gather_of_other_kinds", r"it raised RuntimeError|torch.float32",
        all_gather(start="torch.empty(world_size, part.numel())"), 4),
    "gathers with its rank in the world": Wrong(
        3, "test_all_gather_in_a_group", r"it raised IndexError(?s:.*)To look at: .*is `group` passed on to every call",
        all_gather(ranks="rank, world_size = dist.get_rank(), dist.get_world_size(group)")),
    "gathers into its input": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"changed its input on rank 0: write into a new tensor",
        all_gather(after="part.zero_()"), 3),
    "does not pad": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"(?s)it raised .*To look at: N need not divide",
        all_reduce(result="all_gather(reduce_scatter(tensor, group), group)"), 3),
    "drops the tail": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"returned \[0\]|returned \[63\]: 3 does not divide 64",
        all_reduce(size="tensor.numel() // world_size * world_size"), 3),
    "returns the padding too": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"returned \[3\]: 3 does not divide 1, so pad it",
        all_reduce(result="all_gather(reduce_scatter(padded, group), group)"), 3),
    "gathers everything and sums": Wrong(
        4, "test_all_reduce_sends_twice_a_reduce_scatter", r"sent 3360 bytes in all_reduce, in 2 messages; 2\(N-1\)/N",
        all_reduce(result="all_gather(padded, group).view(world_size, -1).sum(0)[: tensor.numel()]"), 3),
    "all-reduces in the whole world": Wrong(
        4, "test_all_reduce_in_a_group", r"is `group` passed on to every call|had not come to an end",
        all_reduce(result="all_gather(reduce_scatter(padded))[: tensor.numel()]"), hangs=True),
    "broadcasts from the root to each": Wrong(
        5, "test_broadcast_sends_the_tensor_once", r"rank 1 of 3 sent to rank 0 in broadcast",
        broadcast(receive="dist.recv(chunk, _global(root, group), group=group)", sends_on="distance == 0", send="""
            for other in range(world_size):
                if other != root:
                    sends.append(dist.isend(chunk, _global(other, group), group=group))
            """)),
    "broadcasts in one piece": Wrong(
        5, "test_broadcast_is_a_pipeline", r"the root sent 1 messages", broadcast(chunks="[tensor]")),
    "receives all before it sends": Wrong(
        5, "test_broadcast_is_a_pipeline", r"passed nothing on before the root had sent its last chunk",
        broadcast(again="for chunk in tensor.chunk(chunk_count):")),
    "the last rank sends too": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"(?s)at line \d+ of assignment.py \(broadcast\).*must not send",
        broadcast(sends_on="world_size > 1"), 3, True),
    "returns nothing": Wrong(
        5, "test_broadcast_returns_its_tensor", r"did not return the tensor .* end with return tensor",
        broadcast(end="")),
    "receives into copies": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"its chunks are views of it",
        broadcast(chunks="tensor.clone().chunk(chunk_count)"), 2),
    "broadcasts from rank 0 whoever is the root": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"over 2 ranks, root is 1: on rank \d .* holds 0 of the root's 1 element ", broadcast(distance="rank"), 2),
    "takes the root for a rank of the world": Wrong(
        5, "test_broadcast_in_a_group", r"root is a rank of the group|had not come to an end",
        broadcast(distance="(dist.get_rank() - root) % world_size")),
}

RIGHT = {
    "the parts of these mistakes": exchange() | reduce_scatter() | all_gather() | all_reduce() | broadcast(),
}
