"""Lesson 0: what goes wrong with rings.

Each of the five functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

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
        r"(?s)ranks 0, 1 and 2 waited in send, at line \d+ of assignment.py \(exchange\): dist.send.*"
        r"To look at: these ranks wait in send: who receives\?$",
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
        1, "test_exchange_in_a_group", r"only ranks 1 and 2 form the group.* here 1 and 2: use _global\(\)",
        exchange(send="sending = dist.isend(outgoing, (rank + 1) % world_size, group=group)",
                 receive="dist.recv(incoming, (rank - 1) % world_size, group=group)")),
    "loops for ever in its file": Wrong(
        1, "test_neighbours_exchange",
        r"(?s)ranks 0, 1 and 2 stood at line \d+ of assignment.py \(exchange\): while True: pass\n    A rank .*loop",
        exchange(send="while True: pass"), 3, True),
    "changes what it has sent": Wrong(
        1, "test_neighbours_exchange", r"exchange changed `outgoing` on rank 0",
        exchange(wait="sending.wait()\noutgoing.zero_()"), 3),
    "meets the others at a barrier": Wrong(
        1, "test_neighbours_exchange", r"it calls torch's own barrier",
        exchange(wait="sending.wait()\ndist.barrier()"), 3),
    "sends in two messages": Wrong(
        1, "test_an_exchange_is_one_message", r"rank 0 of 3 sent 2 messages in exchange, and 1 is right, of 1048576 b",
        exchange(send=f"sendings = [dist.isend(part, {RIGHT_ONE}, group=group) for part in outgoing.chunk(2)]",
                 receive=f"for part in incoming.chunk(2):\n    dist.recv(part, {LEFT_ONE}, group=group)",
                 wait="for sending in sendings:\n    sending.wait()")),
    "takes it that the ranks of a group are neighbours": Wrong(
        1, "test_exchange_in_a_group", r"only ranks 0 and 2 form the group.* here 0 and 2: use _global\(\)",
        exchange(send="first = dist.get_rank() - rank\n"
                      "sending = dist.isend(outgoing, first + (rank + 1) % world_size, group=group)",
                 receive="dist.recv(incoming, first + (rank - 1) % world_size, group=group)"), hangs=True),
    "takes its rank in the world for that in the group": Wrong(
        2, "test_reduce_scatter_in_a_group",
        r"it raised IndexError(?s:.*)To look at: .*is `group` passed on to every call",
        reduce_scatter(ranks="rank, world_size = dist.get_rank(), dist.get_world_size(group)")),
    "ends on the right neighbour's chunk": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"(?s)rank 0 of 3 returned chunk 1 with the sum of ranks 0, 1 and 2; it must return chunk 0 with the sum of "
        r"ranks 0, 1 and 2\.\n    In step 1 it sent chunk 0 with the numbers of rank 0 alone\.\n    In step 2 it sent "
        r"chunk 2 with the sum of ranks 0 and 2\.\n    To look at: your table of .Whose turn",
        reduce_scatter(outgoing="chunks[(rank - step) % world_size]",
                       add="chunks[(rank - step - 1) % world_size] += incoming",
                       result="chunks[(rank + 1) % world_size]"), 3),
    "gives the mean": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"divided by 3 \(the mean, not the sum\)",
        reduce_scatter(result="chunks[rank] / world_size"), 3),
    "writes over instead of adding": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"returned chunk 0 with the numbers of rank 1 alone(?s:.*)In step 2 it sent chunk 1 with the numbers of rank 2",
        reduce_scatter(add="chunks[(rank - step - 2) % world_size] = incoming"), 3),
    "stops a step too early": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"returned chunk 0 with the numbers of rank 0 alone(?s:.*)\n    After that it sent nothing: 3 ranks take 2 s",
        reduce_scatter(steps="world_size - 2"), 3),
    "begins with its own chunk": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"returned chunk 0 with the numbers of rank 0 alone; it must return chunk 0 with the sum of ranks 0, 1 and 2\."
        r"\n    In step 1 it sent chunk 0 with the numbers of rank 0 alone",
        reduce_scatter(outgoing="chunks[(rank - step) % world_size]",
                       add="chunks[(rank - step - 1) % world_size] += incoming"), 3),
    "adds to the chunk that it has sent": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"In step 2 it sent chunk 1 with the numbers of rank 0 alone(?s:.*)To look at: your table",
        reduce_scatter(add="chunks[(rank - step - 1) % world_size] += incoming"), 3),
    "adds to the chunk before": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"which are different chunks",
        reduce_scatter(add="chunks[(rank - step - 3) % world_size] += incoming"), 3),
    "counts the steps the other way": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"rank 0 of 3 returned (?s:.*)In step 1 it sent chunk 1 with the numbers of rank 0 alone\.\n    In step 2 it",
        reduce_scatter(outgoing="chunks[(rank + step + 1) % world_size]",
                       add="chunks[(rank + step + 2) % world_size] += incoming"), 3),
    "returns the chunk that it had first": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum",
        r"returned chunk 2 with the numbers of rank 0 alone; .*\n    To look at: what it sent is right. Which chunk",
        reduce_scatter(result="chunks[rank - 1]"), 3),
    "returns numbers of fp64": Wrong(
        2, "test_reduce_scatter_gives_this_ranks_part_of_the_sum", r"gave numbers of torch.float64 on rank 0",
        reduce_scatter(result="chunks[rank].double()"), 3),
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
        2, "test_reduce_scatter_of_other_kinds", r"of torch.float64 numbers on .* gave numbers of torch.float32",
        reduce_scatter(start="tensor.float().clone().view(world_size, -1)"), 3),
    "computes in fp32, and gives the dtype back": Wrong(
        2, "test_reduce_scatter_of_other_kinds",
        r"reduce_scatter of torch.float64 numbers on rank 0 of 3 gave .* digits are lost, so it was computed in a narr",
        reduce_scatter(start="tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)"
                             ".view(world_size, -1)",
                       result="chunks[rank].to(tensor.dtype)"), 3),
    "adds whole numbers as floats": Wrong(
        2, "test_reduce_scatter_of_other_kinds", r"reduce_scatter of torch.int64 numbers on rank 0 of 3 gave .* digits",
        reduce_scatter(start="tensor.clone().double().view(world_size, -1)",
                       result="chunks[rank].to(tensor.dtype)"), 3),
    "returns its input when it is alone": Wrong(
        2, "test_reduce_scatter_of_other_kinds", r"reduce_scatter gave its input's own memory back on rank 0 of 1: a",
        reduce_scatter(start="(tensor.clone() if world_size > 1 else tensor).view(world_size, -1)"), 1),
    "returns the same memory each time": Wrong(
        2, "test_reduce_scatter_leaves_its_input", r"what reduce_scatter had returned on rank 0 changed when the",
        reduce_scatter(result="dist.__dict__.setdefault('kept', chunks[rank].clone()).copy_(chunks[rank])")),
    "sends each chunk in two messages": Wrong(
        2, "test_reduce_scatter_sends_one_chunk_a_step", r"rank 0 of 3 sent 4 messages in reduce_scatter, and 2 are",
        reduce_scatter(travel="""
            for half, place in zip(outgoing.tensor_split(2), incoming.tensor_split(2)):
                exchange(half, place, group)
            """), 3),
    "gathers in the order of arrival": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"gave the parts of ranks 0, 2, 1, and they must be 0, 1, 2",
        all_gather(result="torch.cat([chunks[(rank - step) % world_size] for step in range(world_size)])"), 3),
    "forgets its own part": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"parts of ranks \?",
        all_gather(own="", outgoing="chunks[(rank - step) % world_size] if step else part"), 3),
    "passes on its own part only": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", 
        r"gave the parts of ranks 0, 2, 2(?s:.*)In step 2 it sent the part of rank 0\.$",
        all_gather(outgoing="part"), 3),
    "passes on what has not come yet": Wrong(
        3, "test_all_gather_gives_all_parts_in_order",
        r"\(\? is nobody's\)(?s:.*)\n    In step 1 rank 0 sent a place of its result that nothing had been received",
        all_gather(outgoing="chunks[(rank - step - 1) % world_size]",
                   arriving="chunks[(rank - step - 2) % world_size]"), 3),
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
    "gathers by torch's own collective": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"it calls torch's own all_gather", {"all_gather": """
            def all_gather(part, group=None):
                chunks = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
                dist.all_gather(chunks, part, group=group)
                return torch.cat(chunks)
            """}, 3),
    "gives its input back when it is alone": Wrong(
        3, "test_all_gather_of_other_kinds", r"all_gather gave its input's own memory back on rank 0 of 1",
        all_gather(result="chunks.view(-1) if world_size > 1 else part"), 1),
    "gathers whole numbers as floats": Wrong(
        3, "test_all_gather_of_other_kinds", r"all_gather of torch.int64 numbers on rank 0 of 4 gave .* digits are los",
        all_gather(start="torch.empty(world_size, part.numel(), dtype=torch.float64)",
                   result="chunks.view(-1).to(part.dtype)"), 4),
    "gathers into the same memory each time": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"what all_gather had returned on rank 0 changed when the func",
        all_gather(result="dist.__dict__.setdefault('kept', chunks.view(-1).clone()).copy_(chunks.view(-1))"), 3),
    "passes parts on in two messages": Wrong(
        3, "test_all_gather_sends_one_part_a_step", r"rank 0 of 3 sent 4 messages in all_gather, and 2 are right",
        all_gather(travel="""
            for half, place in zip(outgoing.tensor_split(2), arriving.tensor_split(2)):
                exchange(half, place, group)
            """), 3),
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
        4, "test_all_reduce_sends_twice_a_reduce_scatter", r"sent 3360 bytes in all_reduce of 420 elements, in 2 mes",
        all_reduce(result="all_gather(padded, group).view(world_size, -1).sum(0)[: tensor.numel()]"), 3),
    "gathers everything where N does not divide": Wrong(
        4, "test_all_reduce_sends_twice_a_reduce_scatter", r"rank 0 of 3 sent 808 bytes in all_reduce of 101 elements",
        all_reduce(result="all_gather(reduce_scatter(padded, group), group) if len(padded) == tensor.numel() or "
                          "tensor.numel() < 101 else all_gather(tensor, group).view(world_size, -1).sum(0)")),
    "pads where nothing is needed": Wrong(
        4, "test_all_reduce_pads_no_more_than_it_must",
        r"all_reduce of 420 elements over 3 ranks: by what rank 0 sent, the tensor was padded to 423. 3 divides 420,",
        all_reduce(size="tensor.numel() + world_size - tensor.numel() % world_size"), 3),
    "pads by N more than it must": Wrong(
        4, "test_all_reduce_pads_no_more_than_it_must",
        r"padded to 105. 102 is the next number that 3 divides",
        all_reduce(size="tensor.numel() + world_size + -tensor.numel() % world_size if tensor.numel() % world_size "
                        "else tensor.numel()"), 3),
    "pads to many times its size": Wrong(
        4, "test_all_reduce_sends_twice_a_reduce_scatter", r"sent 4480 bytes in all_reduce of 420 elements, in 4 mes",
        all_reduce(size="2 * tensor.numel() + -2 * tensor.numel() % world_size"), 3),
    "sums into its input": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"all_reduce of 1 element changed its input on rank 0 of 3",
        all_reduce(result="tensor.copy_(all_gather(reduce_scatter(padded, group), group)[: tensor.numel()]).clone()"),
        3),
    "sums into the same memory each time": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"what all_reduce had returned on rank 0 of 3 changed when the",
        {"all_reduce": """
            def all_reduce(tensor, group=None, kept={}):
                world_size = dist.get_world_size(group)
                padded = tensor.new_zeros(-(-tensor.numel() // world_size) * world_size)
                padded[: tensor.numel()] = tensor
                total = all_gather(reduce_scatter(padded, group), group)[: tensor.numel()]
                return kept.setdefault((tensor.numel(), tensor.dtype), total.clone()).copy_(total)
            """}, 3),
    "all-reduces by torch's own collective": Wrong(
        4, "test_all_reduce_gives_the_sum_of_any_size", r"it calls torch's own all_reduce", {"all_reduce": """
            def all_reduce(tensor, group=None):
                total = tensor.clone()
                dist.all_reduce(total, group=group)
                return total
            """}, 3),
    "has nothing to sum when it is alone": Wrong(
        4, "test_all_reduce_of_other_kinds", r"all_reduce gave its input's own memory back on rank 0 of 1",
        all_reduce(result="all_gather(reduce_scatter(padded, group), group)[: tensor.numel()] if world_size > 1 else "
                          "tensor"), 1),
    "all-reduces in fp32": Wrong(
        4, "test_all_reduce_of_other_kinds", r"all_reduce of torch.float64 numbers on rank 0 of 3 gave .* digits are",
        all_reduce(
            result="all_gather(reduce_scatter(padded.float(), group), group)[: tensor.numel()].to(tensor.dtype)"), 3),
    "all-reduces in the whole world": Wrong(
        4, "test_all_reduce_in_a_group", r"is `group` passed on to every call|had not come to an end",
        all_reduce(result="all_gather(reduce_scatter(padded))[: tensor.numel()]"), hangs=True),
    "broadcasts from the root to each": Wrong(
        5, "test_broadcast_sends_the_tensor_once", r"rank 0 of 3 sent to rank 2 in broadcast",
        broadcast(receive="dist.recv(chunk, _global(root, group), group=group)", sends_on="distance == 0", send="""
            for other in range(world_size):
                if other != root:
                    sends.append(dist.isend(chunk, _global(other, group), group=group))
            """)),
    "broadcasts in one piece": Wrong(
        5, "test_broadcast_is_a_pipeline", r"the root sent 1 message:", broadcast(chunks="[tensor]")),
    "two buffers for results take turns": Wrong(
        3, "test_all_gather_gives_all_parts_in_order", r"what all_gather had returned on rank 0 changed when the func",
        {"results": "results = {}"} | all_gather(start="""results.setdefault((part.dtype, part.numel(), world_size), [
            part.new_empty(world_size, part.numel()) for _ in range(2)])""",
            own="chunks.reverse()\nchunks = chunks[0]\nchunks[rank] = part"), 2),
    "three buffers for sums take turns": Wrong(
        2, "test_reduce_scatter_leaves_its_input", r"what reduce_scatter had returned on rank 0 changed when the func",
        {"results": "results = {}"} | reduce_scatter(result="""results.setdefault((tensor.dtype, len(tensor)), [
            torch.empty_like(chunks[0]) for _ in range(3)])[0].copy_(chunks[rank])""", travel="""
            exchange(outgoing, incoming, group)
            pool = results.get((tensor.dtype, len(tensor)), [None])
            if step == 0:
                pool.append(pool.pop(0))
            """)),
    "passes a chunk on when the next one has come": Wrong(
        5, "test_broadcast_is_a_pipeline", r"had passed 1 chunk on when the root sent its last one, the third of three",
        {"broadcast": function(
            "def broadcast(tensor, root=0, group=None, chunk_count=4):", RANKS,
            "distance, sends, last = (rank - root) % world_size, [], None", function(
                "for chunk in [*tensor.chunk(chunk_count), None]:",
                f"if distance > 0 and chunk is not None:\n    dist.recv(chunk, {LEFT_ONE}, group=group)",
                function("if distance < world_size - 1 and last is not None:",
                         f"sends.append(dist.isend(last, {RIGHT_ONE}, group=group))"), "last = chunk"),
            "for send in sends:\n    send.wait()", "return tensor")}),
    "receives all before it sends": Wrong(
        5, "test_broadcast_is_a_pipeline", r"had passed 0 chunks on when the root sent its last one",
        broadcast(again="for chunk in tensor.chunk(chunk_count):")),
    "drops its sends": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"(?s)rank.* waited in recv.*To look at: a send that nobody waits for may be dropped",
        broadcast(send=f"dist.isend(chunk, {RIGHT_ONE}, group=group)"), 3, True),
    "sends to the last rank of the world, whoever is the root": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"(?s)rank 0 waited in recv.*\n    To look at: the root was rank 1 of 2\. Which rank should send to the one "
        r"that waits\? Who is the last rank of the ring when the root is not rank 0\?$",
        broadcast(send=f"dist.send(chunk, {RIGHT_ONE}, group=group)", sends_on="rank != world_size - 1"), 2, True),
    "begins to send to the last rank of the world": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"To look at: the root was rank 1 of 2\.",
        broadcast(sends_on="rank != world_size - 1"), 2, True),
    "cuts off the rest": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"holds 9 of the root's 10 elements \(chunk_count=3\)\. The last 1 of 10 elements did not arrive: 3 does not",
        broadcast(chunks="[tensor[i * size : (i + 1) * size] for size in [len(tensor) // chunk_count] "
                         "for i in range(chunk_count)]"), 2),
    "broadcasts by torch's own collective": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"it calls torch's own broadcast", {"broadcast": """
            def broadcast(tensor, root=0, group=None, chunk_count=4):
                dist.broadcast(tensor, _global(root, group), group=group)
                return tensor
            """}, 3),
    "cuts into more chunks than it was told": Wrong(
        5, "test_broadcast_sends_the_tensor_once",
        r"rank 0 of 3 sent 4 messages in broadcast of 10 elements from rank 0 with chunk_count=3: at most 3",
        broadcast(chunks="tensor.split(max(1, tensor.numel() // chunk_count))")),
    "sends each chunk twice": Wrong(
        5, "test_broadcast_sends_the_tensor_once", r"rank 0 of 3 sent 512 bytes in broadcast of 64 elements from rank",
        broadcast(receive=f"for _ in range(2):\n    dist.recv(chunk, {LEFT_ONE}, group=group)",
                  send=f"sends += [dist.isend(chunk, {RIGHT_ONE}, group=group) for _ in range(2)]")),
    "receives numbers of fp32 only": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"it raised|holds \d+ of the root's 10 elements",
        broadcast(receive=f"""
            room = torch.empty(chunk.shape)
            dist.recv(room, {LEFT_ONE}, group=group)
            chunk.copy_(room)
            """, send=f"sends.append(dist.isend(chunk.float(), {RIGHT_ONE}, group=group))"), 3),
    "the last rank sends too": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"(?s)at line \d+ of assignment.py \(broadcast\).*rank 0 of 3\. The last rank of the ring must not send",
        broadcast(sends_on="world_size > 1"), 3, True),
    "returns nothing": Wrong(
        5, "test_broadcast_returns_its_tensor", r"did not return the tensor .* end with return tensor",
        broadcast(end="")),
    "receives into copies": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"its chunks are views of it",
        broadcast(chunks="tensor.clone().chunk(chunk_count)"), 2),
    "broadcasts from rank 0 whoever is the root": Wrong(
        5, "test_broadcast_copies_the_roots_tensor",
        r"over 2 ranks, root is 1: on rank \d .* holds 0 of the root's 64 elements ", broadcast(distance="rank"), 2),
    "broadcasts from rank 1 where no root is named": Wrong(
        5, "test_broadcast_copies_the_roots_tensor", r"over 2 ranks, root is 0, as none is named: on rank 0 .* holds 0",
        {"broadcast": broadcast()["broadcast"].replace("root=0", "root=1")}, 2),
    "takes the root for a rank of the world": Wrong(
        5, "test_broadcast_in_a_group", r"root is a rank of the group|had not come to an end",
        broadcast(distance="(dist.get_rank() - root) % world_size"), hangs=True),
}
WRONG |= {  # what strangers handed in, and had full marks
    "messages without an element": Wrong(
        5, "test_broadcast_sends_the_tensor_once", r"sent 4 messages in broadcast of 1 element .*: at most 1, as",
        edited("00_collectives", "broadcast", ("tensor.chunk(", "tensor.tensor_split("))),
    "passes the first chunk on at once, and the others when all have come": Wrong(
        5, "test_broadcast_is_a_pipeline", r"had passed 1 chunk on when the root sent its last one, the third of thr",
        edited("00_collectives", "broadcast", ("    sends = []", "    sends, later = [], []"), (
            "        if distance < world_size - 1:",
            "        if distance and sends:\n            later.append(chunk)\n        elif distance < world_size - 1:",
        ), ("    for send in sends:", """
    for chunk in later:
        sends.append(dist.isend(chunk, _global(rank + 1, group), group=group))
    for send in sends:"""))),
    "the last send of a broadcast is waited for at the next one": Wrong(
        5, "test_broadcast_of_a_large_tensor", r"rank \d received what its left neighbour wrote into the tensor after",
        {"under_way": "under_way = []"} | edited("00_collectives", "broadcast", ("    for send in sends:", """
    while under_way:
        under_way.pop().wait()
    under_way.extend(sends[-1:])
    for send in sends[:-1]:"""))),
    "the last send of a gather is waited for at the next one": Wrong(
        3, "test_all_gather_of_large_parts",
        r"rank \d received what its left neighbour wrote into its own result after",
        {"under_way": "under_way = []"} | all_gather(travel=f"""
            while under_way:
                under_way.pop().wait()
            under_way.append(dist.isend(outgoing, {RIGHT_ONE}, group=group))
            dist.recv(arriving, {LEFT_ONE}, group=group)
            """)),
    "large results lie in one buffer": Wrong(
        3, "test_all_gather_of_large_parts", r"what all_gather had returned on rank 0, of 262144 elements a part, cha",
        {"results": "results = {}"} | all_gather(
            start="part.new_empty(world_size, part.numel())",
            own="if part.numel() > 10**5:\n    chunks = results.setdefault(len(chunks), chunks)\nchunks[rank] = part")),
}

RIGHT = {
    "the parts of these mistakes": exchange() | reduce_scatter() | all_gather() | all_reduce() | broadcast(),
}

UNTOLD = {
    "broadcast: 4 + 1": "where nobody asks for a number of chunks, any is right",
    "broadcast: `distance = (rank - root) % world_size` a statement later":
        "the two statements need nothing of each other",
}
