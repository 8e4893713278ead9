"""Lesson 7: what goes wrong with constant buffers.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

INIT = """
def __init__(
    self, size: float, *, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", group: Group = None,
):"""
SHARED = "int(size) // dtype.itemsize // world_size * world_size"
TWO = "[torch.zeros(self.elements, dtype=dtype, device=device) for _ in range(2)]"


def init(world_size="dist.get_world_size(group)", elements=SHARED, refuse="if self.elements < 1:\n    raise ValueError",
         buffers=TWO, group="group", under_way="self._under_way, self._turn = [None, None], 0"):
    return {"ConstantBuffers.__init__": function(
        INIT, f"self.group = {group}", f"world_size = {world_size}", f"self.elements = {elements}", refuse,
        f"self.buffers = {buffers}", under_way)}


def take(turn="self._turn = 1 - self._turn", finish="self._finish(self._turn)", result="self.buffers[self._turn]"):
    return {"ConstantBuffers.take": function("def take(self):", turn, finish, f"return {result}")}


def send(body="self._under_way[self._turn] = pending, then"):
    return {"ConstantBuffers.send": function("def send(self, pending, then):", body)}


def wait(body="self._finish(1 - self._turn)\nself._finish(self._turn)"):
    return {"ConstantBuffers.wait": function("def wait(self):", body)}


def finish(first="pending.wait()", second="then()", forget="self._under_way[turn] = None"):
    return {"ConstantBuffers._finish": function(
        "def _finish(self, turn):",
        function("if self._under_way[turn]:", "pending, then = self._under_way[turn]", first, second, forget))}


def loads(piece="flat[start : start + room]", kept="piece", full="room == 0",
          again="load, room = [], elements", end="if load:\n    yield load", while_="start < flat.numel()",
          before=""):
    loop = function(f"while {while_}:", f"piece = {piece}", f"load.append({kept})",
                    "start, room = start + piece.numel(), room - piece.numel()",
                    full and function(f"if {full}:", "yield load", again))
    return {"loads": function("def loads(flats, elements):", "load, room = [], elements",
                              function("for flat in flats:", "start = 0", before, loop), end)}


SIZES = "sizes = [piece.numel() for piece in load]"


def fill(filled="buffer[: sum(sizes)]", copy="place.copy_(piece)", result="filled", split="filled.split(sizes)"):
    return {"fill": function("def fill(buffer, load):", SIZES, f"filled = {filled}",
                             function(f"for place, piece in zip({split}, load):", copy), f"return {result}")}


def unpack(split="filled.split(sizes)", copy="piece.copy_(place)"):
    return {"unpack": function("def unpack(filled, load):", SIZES,
                               function(f"for piece, place in zip(load, {split}):", copy))}


LIKE = "like = buffers.buffers[0]"
FLATS = "fused.flat_views(tensors, like.dtype, like.device)"
TAKEN = "filled = fill(buffers.take(), load)"
SENT = "pending = collectives.all_reduce(filled, op=op, group=buffers.group, async_op=True)"
LATER = "buffers.send(pending, functools.partial(unpack, filled, load))"


def all_reduce(before="", flats=FLATS, loop="for load in loads(flats, buffers.elements):", take=TAKEN, send=SENT,
               later=LATER, end="buffers.wait()"):
    return {"all_reduce": "@torch.no_grad()\n" + function(
        "def all_reduce(tensors, buffers, op='avg'):", before, LIKE, f"flats = {flats}",
        function(loop, take, send, later), end)}


NATIVE = "pending = dist.all_reduce(filled, group=buffers.group, async_op=True)"
DIVIDED = "filled.div_(dist.get_world_size(buffers.group) if op == 'avg' else 1)"

WRONG = {
    "wait sets the turn back": Wrong(
        1, "test_two_buffers_for_ever", r"returned the buffers 1, 0, 1, 0, 1, 1: they must take turns.* after a wait",
        wait("self._finish(1 - self._turn)\nself._finish(self._turn)\nself._turn = 0")),
    # ------------------------------------------------------------------------------------------------------- step 1
    "takes the size for a number of elements": Wrong(
        1, "test_two_buffers_of_the_size", r"ConstantBuffers\(100, .*has buffers of \d{3} bytes each: `size` is in",
        init(elements="int(size) // world_size * world_size")),
    "the same memory twice": Wrong(
        1, "test_two_buffers_of_the_size", r"both of its buffers are the same memory",
        init(buffers="[torch.zeros(self.elements, dtype=dtype, device=device)] * 2")),
    "elements that the ranks cannot share": Wrong(
        1, "test_two_buffers_of_the_size", r"holds 25 elements, of which 3 ranks have no equal parts",
        init(elements="int(size) // dtype.itemsize")),
    "buffers of 16 bit": Wrong(
        1, "test_two_buffers_of_the_size", r"dtype=torch.float32\) on 3 ranks has buffers of torch.bfloat16",
        init(buffers="[torch.zeros(self.elements, dtype=torch.bfloat16, device=device) for _ in range(2)]")),
    "buffers of nothing": Wrong(
        1, "test_a_size_that_holds_nothing", r"ConstantBuffers\(8\) on 3 ranks was made, though there is no element",
        init(refuse="")),
    "a size below zero is not looked at": Wrong(
        1, "test_a_size_that_holds_nothing", r"ConstantBuffers\(-16\) on 3 ranks raised RuntimeError: ValueError is",
        init(refuse="if not self.elements:\n    raise ValueError('nothing')")),
    "the device is forgotten": Wrong(
        1, "test_the_buffers_lie_on_the_device", r'with device="meta" the buffers lie on cpu',
        init(buffers=TWO.replace(", device=device", ""))),
    "one element is refused": Wrong(
        1, "test_a_size_that_holds_nothing", r"ConstantBuffers\(4\) on 1 rank raised ValueError: one element a rank is",
        init(refuse="if self.elements < 2:\n    raise ValueError('too small')")),
    "new memory for each load": Wrong(
        1, "test_two_buffers_for_ever", r"take\(\) number 1 returned memory that is none of the two in `buffers`",
        take(result="torch.zeros_like(self.buffers[self._turn])")),
    "always the same buffer": Wrong(  # DeepSpeed #7805
        1, "test_two_buffers_for_ever", r"take\(\) returned the buffers 0, 0: they must take turns",
        take(turn="self._turn = 0")),
    "remembers what was sent": Wrong(
        1, "test_a_result_is_read_once_and_in_time", r"after wait\(\) \d of 5 pendings, or their then\(\), are",
        init(buffers=f"{TWO}\nself.sent = []") | send("self.sent.append((pending, then))\n"
                                                     "self._under_way[self._turn] = pending, then")),
    "takes a buffer that is on its way": Wrong(
        1, "test_a_buffer_is_taken_when_it_is_back",
        r"take\(\) number 3 returned a buffer that is still on its way: nobody has waited", take(finish="")),
    "waits for the one that was sent last": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken",
        r"The third take\(\) returns the first, and waited for the second",
        take(finish="self.wait()")),
    "reads a result again and again": Wrong(
        1, "test_a_result_is_read_once_and_in_time", r"the result of send\(\) number \d of 5 was read 3 times",
        finish(forget="")),
    # ------------------------------------------------------------------------------------------------------- step 2
    "drops what is too large": Wrong(
        2, "test_every_element_is_in_one_load",
        r"of a tensor of 8, for buffers of 7 elements, 8 of 8 elements are in no load, the first is element 0: a te",
        loads(before="if flat.numel() > elements:\n    continue")),
    "loses the tail": Wrong(
        2, "test_every_element_is_in_one_load",
        r"of a tensor of 1, .* 1 of 1 elements are in no load, .*: what is left at the end is a load as well",
        loads(end="")),
    "never gets on": Wrong(
        2, "test_every_element_is_in_one_load",
        r"(?s)rank 0 stood at line \d+ of assignment.py \(loads\): .*loop that never",
        loads(piece="flat[:room]", while_="True"), hangs=True),
    "a tensor that does not fit begins a load": Wrong(
        2, "test_loads_are_full", r"of tensors of 3, 9, 1 and 15 elements, .* there are loads of 3, 7, 3, 7, 7 and 1",
        loads(before="if load and flat.numel() > room:\n    yield load\n    load, room = [], elements")),
    "an empty load at the end": Wrong(
        2, "test_loads_are_full", r"of a tensor of 7, .* load 2 of 2 is empty: a collective of nothing",
        loads(end="yield load")),
    "one list for all loads": Wrong(
        2, "test_a_load_is_a_list_of_views", r"load 1 held 7 elements when it came, and \d after the next ones",
        loads(again="load.clear()\nroom = elements")),
    "copies the pieces": Wrong(
        2, "test_a_load_is_a_list_of_views", r"there are pieces that are copies: the result would be written to them",
        loads(kept="piece.clone()")),
    # ------------------------------------------------------------------------------------------------------- step 3
    "sends the whole buffer": Wrong(
        3, "test_fill_puts_pieces_side_by_side", r"fill\(\) returned all 12 elements of the buffer, and 10 are filled",
        fill(result="buffer")),
    "a third buffer": Wrong(
        3, "test_fill_puts_pieces_side_by_side", r"fill\(\) returned new memory: what is sent must be the buffer",
        {"fill": "def fill(buffer, load):\n    return torch.cat(load).to(buffer.dtype)"}),
    "gives a name a new meaning": Wrong(
        3, "test_unpack_brings_each_piece_its_part", r"unpack\(\) left the tensors as they were: it must write into",
        unpack(copy="piece = place.to(piece.dtype)")),
    "rounds before it fills": Wrong(
        3, "test_numbers_are_rounded_when_they_come_back_and_never_before",
        r"fill\(\) put .* into an fp32 buffer for .*: it was rounded on the way",
        {"fill": """
def fill(buffer, load):
    together = torch.cat([piece.to(load[0].dtype) for piece in load])
    return buffer[: len(together)].copy_(together)
"""}),
    # ------------------------------------------------------------------------------------------------------- step 4
    "binds the load late": Wrong(
        4, "test_tensors_become_mean_or_sum", r"tensor \d+ of 11, .*holds",
        all_reduce(later="buffers.send(pending, lambda: unpack(filled, load))")),
    "ends while the last one is on its way": Wrong(
        4, "test_tensors_become_mean_or_sum", r"tensor \d+ of 11, .*own numbers in \d+% of its elements: a load was",
        all_reduce(end="")),
    "divides by the ranks once more": Wrong(
        4, "test_tensors_become_mean_or_sum", r"reduced with op='avg', is 0.333 times what is right: op='avg' is",
        all_reduce(take=f"{TAKEN}\n{DIVIDED}")),
    "the largest first, on each rank": Wrong(
        4, "test_tensors_become_mean_or_sum", r"holds wrong numbers in .*do all ranks send the same elements together",
        all_reduce(flats=f"sorted({FLATS}, key=lambda flat: -flat.sum())")),
    "sends no more than one at a time": Wrong(
        4, "test_one_is_filled_while_the_other_travels",
        r"rank 1 was 0.5 s late, and meanwhile rank 0 sent 1 buffer and then waited: it could fill and send the other",
        all_reduce(send="pending = collectives.Work([])\n" + SENT.removeprefix("pending = ").replace(
            ", async_op=True", ""))),
    "trusts that it is back after a while": Wrong(
        4, "test_a_slow_rank_changes_nothing", r"where rank 1 comes 0.5 s late: tensor .*before what was sent in it",
        all_reduce(before="turn = 0", take="filled, turn = fill(buffers.buffers[turn], load), 1 - turn", send=NATIVE,
                   later=f"time.sleep(0.05)\n{DIVIDED}\nunpack(filled, load)", end=""), top="import time\n"),
    "sends the rest of the last buffer, too": Wrong(
        4, "test_each_element_is_sent_once",
        r"rank 0 sent 6,291,456 bytes in 6 collectives, of [\d,]+ bytes of tensors: each element goes once",
        all_reduce(take="whole = buffers.take()\nfilled = fill(whole, load)", send=SENT.replace("filled", "whole"))),
    "loads of one dtype each": Wrong(
        4, "test_each_element_is_sent_once", r"rank 0 made 7 collectives for [\d,]+ bytes, and 6 are enough .* in bf16",
        all_reduce(loop="dtypes = dict.fromkeys(flat.dtype for flat in flats)\n"
                        "for load in (load for dtype in dtypes for load in loads(\n"
                        "        [flat for flat in flats if flat.dtype == dtype], buffers.elements)):")),
    "a new load where the dtype changes": Wrong(
        4, "test_each_element_is_sent_once", r"rank 0 made 7 collectives for [\d,]+ bytes, and 6 are enough .* in bf16",
        all_reduce(loop="runs = itertools.groupby(flats, lambda flat: flat.dtype)\n"
                        "for load in (load for _, run in runs for load in loads(run, buffers.elements)):"),
        top="import itertools\n"),
    "all_reduce sets the turn back": Wrong(
        4, "test_the_turns_go_on", r"sent the buffers 1, 0, 1, 1, 0, 1, 1, .*, and then take\(\) returned 1:",
        all_reduce(end="buffers.wait()\nbuffers._turn = 0")),
    "divides in fp32 before it sends": Wrong(
        4, "test_sums_are_those_of_fp32", r"divides before the sum\. 4096/3 is not exact in fp32 either: divide after",
        all_reduce(take=f"{TAKEN}\n{DIVIDED}", send=SENT.replace("op=op", "op='sum'"))),
    "divides in 16 bit before it sends": Wrong(
        4, "test_sums_are_those_of_fp32", r"the mean of 5.96046e-08, .* in torch.float16 is 0 on rank 0, and 5.96",
        all_reduce(before="if op == 'avg':\n    for tensor in (tensors := list(tensors)):\n"
                          "        tensor /= dist.get_world_size(buffers.group)",
                   send=SENT.replace("op=op", "op='sum'"))),
    "divides in 16 bit when it is back": Wrong(
        4, "test_sums_are_those_of_fp32", r"the mean of 40000, 40000 and 40000 in torch.float16 is inf on rank 0",
        all_reduce(before="tensors = list(tensors)", send=SENT.replace("op=op", "op='sum'"), end="""
            buffers.wait()
            if op == 'avg':
                for tensor in tensors:
                    tensor /= dist.get_world_size(buffers.group)
            """)),
    "sends 16 bit": Wrong(
        4, "test_sums_are_those_of_fp32", r"the mean of 4096, 1 and -4096 in torch.float16 is 0 on rank 0, and 0.33",
        {"all_reduce": """
@torch.no_grad()
def all_reduce(tensors, buffers, op="avg"):
    flats = fused.flat_views(tensors, buffers.buffers[0].dtype)
    if not flats or flats[0].dtype == torch.float32:
        return right(flats, buffers, op)
    for flat in flats:
        dist.all_reduce(flat, group=buffers.group)
        flat /= dist.get_world_size(buffers.group) if op == "avg" else 1
""", "right": all_reduce()["all_reduce"].replace("def all_reduce", "def right")}),
    "autograd follows": Wrong(
        4, "test_tensors_become_mean_or_sum", r"(?s)it raised RuntimeError: A view was created in no_grad mode",
        {"all_reduce": all_reduce()["all_reduce"].removeprefix("@torch.no_grad()\n")}),
    "keeps what it sent": Wrong(
        4, "test_memory_does_not_grow_with_the_model", r"needs [\d.]+ \wB for .* of tensors, and \d.\d MB for",
        all_reduce(before="kept = []", send=f"kept.append(filled.clone())\n{SENT}")),
    "looks at a tensor when its turn comes": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent", r"it was refused when the tensors before it",
        all_reduce(flats="(flat for tensor in tensors for flat in fused.flat_views([tensor], like.dtype))")),
    "a dtype of its own choice": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent",
        r"of torch.bfloat16, .* went through: rounded, or left out",
        all_reduce(flats="fused.flat_views(tensors, torch.float32)")),
    "reduces over all ranks": Wrong(
        4, "test_reduces_in_a_group", r"here only ranks 1 and 2 form the group of the buffers", init(group="None"),
        hangs=True),
}
WRONG |= {  # what strangers handed in, and had full marks
    "a pending that is falsy is none": Wrong(
        1, "test_a_buffer_is_taken_when_it_is_back", r"nobody has waited for what|whose result nobody has read",
        edited("07_constant_buffers", "ConstantBuffers._finish", ("if self._under_way[turn]:",
               "if self._under_way[turn] and self._under_way[turn][0]:"))),
    "sends are counted, and not takes": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken", r"take\(\), take\(\), send\(\), take\(\)",
        edited("07_constant_buffers", "ConstantBuffers.send",
               ("self._under_way[self._turn]", "self._sent = 1 - getattr(self, '_sent', 0)\n"
                "    self._under_way[self._sent]"))),
    "the turn changes when a buffer is sent": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken", r"returned the buffers [01, ]+: they take turns at each",
        edited("07_constant_buffers", "ConstantBuffers.take", ("    self._turn = 1 - self._turn\n", ""))
        | edited("07_constant_buffers", "ConstantBuffers.send", (
            "self._under_way[self._turn] = pending, then",
            "self._under_way[self._turn] = pending, then\n    self._turn = 1 - self._turn"))),
    "waits only if two are under way": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken", r"the last take\(\) returns the second buffer, which",
        edited("07_constant_buffers", "ConstantBuffers.take", (
            "self._finish(self._turn)", "if None not in self._under_way:\n        self._finish(self._turn)"))),
    "one rank looks at nothing": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent", r"on rank 0, which is alone, all_reduce",
        edited("07_constant_buffers", "all_reduce", (
            "flats = ", "if torch.distributed.get_world_size(buffers.group) == 1:\n        return\n    flats = "))),
    "the last load is rounded up to a multiple of the ranks": Wrong(
        4, "test_each_element_is_sent_once", r"sent 6,287,480 bytes in 6 .*, of 6,287,476 bytes .* only what is filled",
        edited("07_constant_buffers", "all_reduce", (
            "filled = fill(buffers.take(), load)",
            "buffer, ranks = buffers.take(), dist.get_world_size(buffers.group)\n"
            "        filled = fill(buffer, load)\n        sent = buffer[: filled.numel() + -filled.numel() % ranks]"),
               ("all_reduce(filled", "all_reduce(sent"))),
    "elements for all ranks, not for the group's": Wrong(
        1, "test_buffers_of_a_group", r"rank \d: it raised ValueError",
        init(world_size="dist.get_world_size()")),
    "what is under way belongs to the class": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken", r"two ConstantBuffers, each of which has sent one buffer",
        {"ConstantBuffers._under_way": "_under_way = [None, None]"} | init(under_way="self._turn = 0")),
    "whose turn it is belongs to the class": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken", r"two ConstantBuffers, each of which has sent one buffer",
        take(turn="ConstantBuffers._turn = 1 - ConstantBuffers._turn") | {"ConstantBuffers._turn": "_turn = 0"}
        | init(under_way="self._under_way = [None, None]")),
    "fills through fp32": Wrong(
        3, "test_numbers_are_rounded_when_they_come_back_and_never_before", r"fill\(\) put 0.3333333\d+ for 0.33333333",
        fill(copy="place.copy_(piece.float())")),
    "unpacks through fp32": Wrong(
        3, "test_numbers_are_rounded_when_they_come_back_and_never_before", r"unpack\(\) left 0.2\d+ for 0.2\d+, with",
        unpack(copy="piece.copy_(place.float())")),
    "tensors are looked at one by one": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent", r"of one tensor twice all_reduce\(\) on rank 0",
        all_reduce(before="tensors = list(tensors)",
                   flats="[fused.flat_views([tensor], like.dtype, like.device)[0] for tensor in tensors]")),
    "the device of a tensor is not looked at": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent",
        r"a last one of torch.float32, on another device: on rank 0 all_reduce\(\) raised .* and their device\?",
        all_reduce(flats=FLATS.replace(", like.device", ""))),
    "pieces are put together first": Wrong(
        3, "test_nothing_is_made_on_the_way", r"fill\(\) of a load of 4.0 kB made new memory of 4.0 kB, .* a third",
        fill(split="[filled]", copy="filled.copy_(torch.cat([piece.to(buffer.dtype) for piece in load]))")),
    "unpacks a copy": Wrong(
        3, "test_nothing_is_made_on_the_way", r"unpack\(\) of a load of 4.0 kB made new memory of 4.0 kB, .* a third",
        unpack(split="filled.clone().split(sizes)")),
    "fp32 travels, whatever the buffers have": Wrong(
        4, "test_each_element_is_sent_once", r"torch.float16 and 30 .* sent 120 bytes, 120 of .* and 60 from the",
        all_reduce(take=f"{TAKEN}.float()")),
    "sums go through fp32, whatever the buffers have": Wrong(
        4, "test_sums_are_those_of_fp32", r"with buffers and a tensor of float64 a mean is .* is right: it was",
        all_reduce(take=f"{TAKEN}\nfilled.copy_(filled.float())")),
    "one tensor twice is seen, and no view of it": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent", r"of a tensor, and a view that begins in its m",
        all_reduce(before="tensors = list(tensors)\n"
                          "places = [tensor.data_ptr() for tensor in tensors if tensor.numel()]\n"
                          "if len(set(places)) < len(places):\n    raise ValueError",
                   flats="[fused.flat_views([tensor], like.dtype, like.device)[0] for tensor in tensors]")),
    "memory of the buffers goes when they are back": Wrong(
        1, "test_two_buffers_for_ever", r"96 bytes when they are made, and 0 after wait\(\): they are constant",
        edited("07_constant_buffers", "ConstantBuffers.wait", (
            "    self._finish(self._turn)", "    self._finish(self._turn)\n    for buffer in self.buffers:\n"
            "        buffer.untyped_storage().resize_(0)"))
        | edited("07_constant_buffers", "ConstantBuffers.take", (
            "    return self", "    storage = self.buffers[self._turn].untyped_storage()\n"
            "    storage.resize_(storage.nbytes() or 4 * self.elements)\n    return self"))),
    "dtypes are compared by their bytes": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent",
        r"buffers of torch.bfloat16, several tensors of it, and a last one of torch.float16: .*went through: rounded",
        edited("07_constant_buffers", "all_reduce", ("    flats = fused.flat_views(tensors, like.dtype, like.device)",
                                                     """
    tensors = list(tensors)
    if all(tensor.dtype.itemsize == 2 == like.dtype.itemsize for tensor in tensors):
        flats = [tensor.view(-1) for tensor in tensors]
    else:
        flats = fused.flat_views(tensors, like.dtype, like.device)"""))),
    "a tensor that is not contiguous is copied": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent", r"of a tensor that is not contiguous",
        edited("07_constant_buffers", "all_reduce", ("fused.flat_views(tensors", (
            "fused.flat_views([tensor.contiguous() for tensor in tensors]")))),
    "turns of its own in all_reduce": Wrong(
        4, "test_the_turns_go_on", r"`then` of that load found \[.*, and \[3.0\], once in each case, is right",
        edited("07_constant_buffers", "all_reduce", ("    for load in loads(", """
    under_way = [None, None]
    for number, load in enumerate(loads(flats, buffers.elements)):
        if under_way[number % 2]:
            under_way[number % 2][0].wait()
            unpack(*under_way[number % 2][1:])
        filled = fill(buffers.buffers[number % 2], load)
        under_way[number % 2] = (
            collectives.all_reduce(filled, op=op, group=buffers.group, async_op=True), filled, load)
    for ended in filter(None, under_way):
        ended[0].wait()
        unpack(*ended[1:])
    return
    for load in loads("""))),
    "kept until wait()": Wrong(
        1, "test_a_result_is_read_once_and_in_time", r"after a send\(\) 5 pendings, or their then\(\), are kept, and",
        init(under_way="self._under_way, self._turn, self._done = [None, None], 0, []")
        | finish(forget="self._done.append(self._under_way[turn])\nself._under_way[turn] = None")
        | wait("self._finish(1 - self._turn)\nself._finish(self._turn)\nself._done.clear()")),
    "two pairs of one size share their memory": Wrong(
        1, "test_one_may_travel_while_the_other_is_taken", r"two ConstantBuffers have 2 buffers in all, and 4 are",
        init(buffers=f"_made.setdefault((self.elements, dtype, device), {TWO})"), top="_made = {}\n"),
    "numbers without end are cut": Wrong(
        3, "test_numbers_are_rounded_when_they_come_back_and_never_before", r"unpack\(\) of inf into a piece of ",
        unpack(copy="piece.copy_(place.clamp(-torch.finfo(piece.dtype).max, torch.finfo(piece.dtype).max))")),
    "both are waited for before the next two": Wrong(
        4, "test_one_is_filled_while_the_other_travels", r"rank 0 began 2 of 6 collectives while none was on its way",
        all_reduce(loop="for number, load in enumerate(loads(flats, buffers.elements)):",
                   take=f"if number and number % 2 == 0:\n    buffers.wait()\n{TAKEN}")),
    "autograd stays off": Wrong(
        4, "test_tensors_become_mean_or_sum", r"after all_reduce\(\) autograd records nothing any more",
        {"all_reduce": all_reduce(before="torch.set_grad_enabled(False)")["all_reduce"].partition("\n")[2]}),
    "tensors of one memory are refused": Wrong(
        4, "test_tensors_become_mean_or_sum", r"it raised ValueError: two in one memory",
        all_reduce(before="""
            tensors = list(tensors)
            places = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
            if len(set(places)) < len(places):
                raise ValueError('two in one memory')""")),
    "16 bit is copied to fp32 first": Wrong(
        4, "test_memory_does_not_grow_with_the_model", r"needs [\d.]+ kB for 262.1 kB of tensors, and [\d.]+ MB for",
        all_reduce(flats=f"[(flat, flat.float()) for flat in {FLATS}]",
                   loop="for load in loads([wide for _, wide in flats], buffers.elements):",
                   end="buffers.wait()\nfor flat, wide in flats:\n    flat.copy_(wide)")),
    "the last tensors are kept": Wrong(
        4, "test_memory_does_not_grow_with_the_model", r"when all_reduce\(\) has ended, and nobody holds the tens",
        all_reduce(end="buffers.wait()\nbuffers.last = flats")),
    "all ranks tell their sizes first": Wrong(
        4, "test_each_element_is_sent_once", r"made 1 all-gathers, where 0 reduce-scatters need one",
        all_reduce(end="buffers.wait()\nsizes = torch.tensor([float(len(flats))])\n"
                       "collectives.all_gather(sizes.new_empty(dist.get_world_size(buffers.group)), sizes, "
                       "group=buffers.group)")),
    "what is None is left out": Wrong(
        4, "test_what_does_not_fit_is_refused_before_anything_is_sent", r"a last one of None: .* or left out",
        all_reduce(before="tensors = [tensor for tensor in tensors if tensor is not None]")),
    "with nothing to send it returns at once": Wrong(
        4, "test_the_turns_go_on", r"tensor, of an empty one. On rank 0 `then` of that load found \[\[3.0\]\], and",
        all_reduce(loop="if not any(map(len, flats)):\n    return\nfor load in loads(flats, buffers.elements):")),
    "numbers of 16-bit buffers stay there": Wrong(
        4, "test_each_element_is_sent_once", r"with buffers of torch.float16 the mean of 0 … 29 and of 1 … 30 is",
        all_reduce(later="buffers.send(pending, list if like.dtype.itemsize == 2 else functools.partial(unpack, filled,"
                         " load))")),
}

RIGHT = {
    "loads in a list, counted by hand": {"loads": """
def loads(flats, elements):
    cut, load, room = [], [], elements
    for flat in flats:
        while flat.numel():
            piece, flat = flat[:room], flat[room:]
            load += [piece]
            room -= len(piece)
            if not room:
                cut += [load]
                load, room = [], elements
    return cut + [load] * bool(load)
""", "fill": """
def fill(buffer, load):
    end = 0
    for piece in load:
        begin, end = end, end + len(piece)
        buffer[begin:end] = piece
    return buffer[:end]
"""},
}

NOTHING = "the two statements need nothing of each other"
AS_MANY = "the sizes are those of the pieces, so there are as many of each"
UNTOLD = {
    "ConstantBuffers.__init__: `self.group = group` a statement later": NOTHING,
    "ConstantBuffers.__init__: `if self.elements < 1:` a statement later":
        "buffers of nothing are made, and refused then",
    "ConstantBuffers.__init__: `self.buffers = [torch.zeros(self.elements, dtype=dtype, device=device) for _ in "
    "range(2)]` a statement later": NOTHING,
    "ConstantBuffers.__init__: `self._under_way = [None, None]` a statement later": NOTHING,
    "ConstantBuffers.__init__: `world_size * dtype.itemsize` computed otherwise": "a number in the words of an error",
    "ConstantBuffers.wait: `self._finish(1 - self._turn)` a statement later": "both are back when wait() ends",
    "ConstantBuffers._finish: `then()` a statement later": "nothing is taken or sent while a result is read",
    "fill: `zip(filled.split(sizes), load, strict=True)` without strict=True": AS_MANY,
    "fill: True turned": AS_MANY,
    "unpack: `zip(load, filled.split(sizes), strict=True)` without strict=True": AS_MANY,
    "unpack: True turned": AS_MANY,
    "all_reduce: 0 + 1": "both buffers are of one dtype on one device",
    "loads: `start, room = (start + piece.numel(), room - piece.numel())` a statement later":
        "a load that is full gets a piece of no elements more before it goes, which takes no room",
    "loads: `load.append(piece)` a statement later": "the two statements need nothing of each other",
    "ConstantBuffers.__init__: 0 + 1": "either buffer may come first: they take turns all the same",
}
