"""Lesson 8: what goes wrong with blocks, slabs and an arena.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

FOUND = """
index = bisect.bisect_left(self._free, (size,))
if index == len(self._free):
    return None
*_, block = self._free.pop(index)
"""
SPLIT = """
if block.size - size > self.slack:
    rest = Block(block.address + size, block.size - size, before=block, after=block.after)
    if rest.after:
        rest.after.before = rest
    block.size, block.after = size, rest
    self._insert(rest)
"""


def take(find=FOUND, split=SPLIT, end="return block"):
    return {"Pool.take": function("def take(self, size):", find, "block.used = True", split, end)}


def first_of(order):
    """Takes the first of the fitting entries (size, address, block), put in this order."""
    return f"""
        fitting = sorted((entry for entry in self._free if entry[0] >= size), key=lambda entry: {order})
        if not fitting:
            return None
        self._free.remove(fitting[0])
        *_, block = fitting[0]
        """


REFUSED = 'if not block.used:\n    raise ValueError("it is free already")'
BEFORE = """
before, after = block.before, block.after
if before and not before.used:
    self._take_out(before.size, before.address)
    block.address, block.size = before.address, before.size + block.size
    block.before = before.before
    if block.before:
        block.before.after = block
"""
AFTER = """
if after and not after.used:
    self._take_out(after.size, after.address)
    block.size += after.size
    block.after = after.after
    if block.after:
        block.after.before = block
"""


def give(refuse=REFUSED, before=BEFORE, after=AFTER, insert="self._insert(block)"):
    return {"Pool.give": function("def give(self, block):", refuse, "block.used = False", before, after, insert)}


BY_ADDRESS = """
self._insert(block)
joined = []
for address, size in self.holes:
    if joined and sum(joined[-1]) == address:
        joined[-1] = joined[-1][0], joined[-1][1] + size
    else:
        joined.append((address, size))
self._free = sorted((size, address, Block(address, size)) for address, size in joined)
"""

COPIED = "self.memory[self.used : end].view(tensor.shape).copy_(tensor)"
KEPT = "kept = self._kept[self.used : end].view(tensor.shape)"


def keep(end="end = self._end_of(tensor)", measured="kept = tensor.clone()", copy=COPIED, kept=KEPT,
         used="self.used = end", result="return kept"):
    return {"Slab.keep": "@torch.no_grad()\n" + function(
        "def keep(self, tensor):", end, function("if self.memory is None:", measured),
        function("else:", copy, kept), used, result)}


def reset(change="self._kept[:0].zero_()", measured="self._allocate(self.used)", front="self.used = 0"):
    return {"Slab.reset": function(
        "def reset(self):", function("if self.memory is not None:", change or "pass"),
        function("elif self.used:", measured), front)}


MOVE = """
if slab.used < max(kept.values(), default=0):
    kept.clear()
if not slab.holds(param.grad):
    param.grad = slab.keep(param.grad)
    kept[id(param)] = slab.used
elif id(param) not in kept:
    raise RuntimeError("set gradients to None first, then reset() the slab")
"""
BY_PLACE = """
if not slab.holds(param.grad):
    param.grad = slab.keep(param.grad)
elif param.grad.storage_offset() + param.grad.numel() > slab.used:
    raise RuntimeError("set gradients to None first, then reset() the slab")
"""
HOOKS = "for param in params:\n    param.register_post_accumulate_grad_hook(move)"


def gradients(params="[param for param in model.parameters() if param.requires_grad]",
              size="sum(param.numel() for param in params)", move=MOVE, hooks=HOOKS):
    return {"gradients_in_slab": function(
        "def gradients_in_slab(model):", f"params = {params}", f"slab = Slab({size}, *_kind_of(params))",
        "kept = {}", function("def move(param):", move), hooks, "return slab")}


IN_ORDER = "sorted(self.lent.values(), key=lambda entry: entry[1].address)"
LEND = "self._lend(tensor, new, tensor.shape, tensor.stride())"


def compact(begin="self.pool = self._empty_pool()", order=IN_ORDER, place="new = self.pool.take(old.size)",
            move="self._move(old.address, new.address, old.size)", lend=LEND, end=""):
    return {"Arena.compact": "@torch.no_grad()\n" + function(
        "def compact(self):", begin, function(f"for tensor, old in {order}:", place, move, lend), end)}


def move(pieces="range(0, size, piece)", clone="moving = moving.clone()", when="source - target < count",
         begin="if source == target:\n    return"):
    return {"Arena._move": function(
        "def _move(self, source, target, size, piece=2**18):", begin,
        function(f"for done in {pieces}:", "count = min(piece, size - done)",
                 "moving = self.memory[source + done :][:count]", function(f"if {when}:", clone),
                 "self.memory[target + done :][:count] = moving"))}


WRONG = {
    # ------------------------------------------------------------------------------------------------------- step 1
    "takes the first block that fits, by address": Wrong(
        1, "test_the_smallest_block_that_is_large_enough",
        r"take\(60\) took the block of 100 at 0; the smallest that is large enough has 60, at 600 .* best fit",
        take(find=first_of("entry[1]"))),
    "within the slack all fit alike": Wrong(
        1, "test_the_smallest_block_that_is_large_enough",
        r"take\(8\) took the block of 12 at 0; the smallest that is large enough has 9, at 200 .* with a slack of 5",
        take(find=first_of("(max(0, entry[0] - size - self.slack), entry[1])"))),
    "the largest within the slack": Wrong(
        1, "test_the_smallest_block_that_is_large_enough",
        r"take\(8\) took the block of 12 at 0; the smallest that is large enough has 9, at 200 .* with a slack of 5",
        take(find=first_of("entry[0] if entry[0] - size > self.slack else -entry[0]"))),
    "never splits": Wrong(
        1, "test_what_is_too_much_is_split_off",
        r"of a free block of 100 at 1000, take\(30\) gave 100 at 1000: the block must be as large as what was asked",
        take(split="")),
    "splits off blocks of nothing": Wrong(
        1, "test_what_is_too_much_is_split_off", r"after take\(50\) there is a free block of size 0",
        take(split=SPLIT.replace("> self.slack", ">= self.slack"))),
    "raises where nothing fits": Wrong(
        1, "test_a_request_that_is_too_large_gets_none", r"it raised MemoryError: no free block is so large",
        take(find=FOUND.replace("return None", "raise MemoryError('no free block is so large')"))),
    # ------------------------------------------------------------------------------------------------------- step 2
    "merges with the block behind it alone": Wrong(
        2, "test_free_neighbours_are_one_block",
        r"the first, then the second were freed in this order \(the block before it was free\); free are then 25 at 0, "
        r"25 at 25, and 50 at 0 is right", give(before="before, after = block.before, block.after")),
    "merges whatever addresses touch": Wrong(
        2, "test_free_neighbours_are_one_block",
        r"two ranges of 40 were added, whose addresses touch; when both are free again, free are: 80 at 0",
        give(before="", after="", insert=BY_ADDRESS)),
    "takes a block back twice": Wrong(
        2, "test_a_block_is_freed_once",
        r"A block which is free, number 1 of four, was given back a second time, and give\(\) took it; then free are",
        give(refuse="")),
    "looks for a second free among free blocks alone": Wrong(
        2, "test_a_block_is_freed_once",
        r"which is free and merged with its neighbour, number 1 of four, was given back a second time, and give\(\) t",
        give(refuse='if any(entry[-1] is block for entry in self._free):\n    raise ValueError("free already")')),
    "notes no border after a merge": Wrong(
        2, "test_used_and_free_are_all_there_is",
        r"(?s)it raised IndexError.*To look at: do the blocks around one that was merged, or split off",
        give(after=AFTER.replace("""    if block.after:
        block.after.before = block
""", ""))),
    "merges large blocks alone with those before them": Wrong(
        2, "test_recorded_trainings_are_served",
        r"the allocator held \d+ MiB at most with your pool, and \d+ MiB with best fit|had .* MiB in use|on 254 MiB",
        give(before="before = after = None\nif block.size > 2**22:\n    before, after = block.before, block.after\n"
             + BEFORE.split("\n", 2)[2])),
    # ------------------------------------------------------------------------------------------------------- step 3
    "a slab of separate allocations": Wrong(
        3, "test_what_is_kept_lies_side_by_side_in_one_allocation",
        r"the copy of a tensor \[3, 5\] does not lie in slab.memory", keep(copy="", kept="kept = tensor.clone()")),
    "keeps a view of the source": Wrong(
        3, "test_what_is_kept_lies_side_by_side_in_one_allocation",
        r"the copy of a tensor \[3, 5\] does not lie in slab.memory", keep(copy="", kept="kept = tensor.detach()")),
    "lays each tensor at the front": Wrong(
        3, "test_what_is_kept_lies_side_by_side_in_one_allocation",
        r"tensor 2 lies 0 bytes from the front of the slab; it must lie at 60, right behind",
        keep(copy="self.memory[: tensor.numel()].view(tensor.shape).copy_(tensor)",
             kept="kept = self._kept[: tensor.numel()].view(tensor.shape)")),
    "lets autograd count each copy as a change of all": Wrong(
        3, "test_a_training_step_with_its_checkpoints_in_the_slab",
        r"(?s)modified by an inplace operation.*To look at: backward reads what keep\(\) has returned",
        keep(kept="kept = self.memory[self.used : end].view(tensor.shape)")),
    "goes to the front when a block's input comes that is as large": Wrong(
        3, "test_with_p_a_the_slab_holds_a_part",
        r"keep half of each block's input, 609 elements in all; slab.used is 203 on rank 0",
        keep(end="if tensor.numel() == 203 and tensor.dim() == 1:\n    self.used = 0\nend = self._end_of(tensor)")),
    "a reset that autograd does not notice": Wrong(
        3, "test_a_backward_after_reset_fails",
        r"then another tensor was kept, and backward computed a gradient that is wrong without a word",
        reset(change="")),
    "frees the memory at reset": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing",
        r"it used a tensor whose memory was freed",
        reset(change="self._kept[:0].zero_()\nself.memory.untyped_storage().resize_(0)")),
    "does not go back to the front": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing",
        r"after reset\(\) number 1 slab.used is 10|in round 2 keep\(\) raised MemoryError",
        reset(front="")),
    "allocates for the last tensor that it measured": Wrong(
        3, "test_a_slab_without_a_size_measures_its_first_round",
        r"it raised MemoryError: the slab is full: 8 elements do not fit behind the 5 of 8", keep(
            used="self.used = end if self.memory is not None else tensor.numel()")),
    "keeps the original while it measures": Wrong(
        3, "test_a_slab_without_a_size_measures_its_first_round",
        r"overwritten with zeros. What keep\(\) had returned begins with \[0.0, 0.0\] now, and \[5.0, 8.0\] was kept",
        keep(measured="kept = tensor.detach()")),
    # ------------------------------------------------------------------------------------------------------- step 4
    "copies gradients, and leaves .grad where it was": Wrong(
        4, "test_gradients_lie_in_one_slab", r"(\d+) of \1 gradients do not lie in the slab: param.grad must be what k",
        gradients(move="if not slab.holds(param.grad):\n    slab.keep(param.grad)")),
    "moves the gradients in the end": Wrong(
        4, "test_a_gradient_is_moved_as_soon_as_it_is_complete",
        r"at \d+ of \d+ moments of backward a gradient that was complete did not lie in the slab yet",
        gradients(hooks="""
            def last(param, done=set()):
                done.add(param)
                if len(done) == len(params):
                    for each in list(done):
                        move(each)
                    done.clear()

            for param in params:
                param.register_post_accumulate_grad_hook(last)
            """)),
    "keeps a gradient again in each micro-batch": Wrong(
        4, "test_micro_batches_add_up_in_place", r"it raised MemoryError: the slab is full",
        gradients(move="param.grad = slab.keep(param.grad)")),
    "does not notice a reset that comes too early": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused", r"it was reset, and the next backward added to them w",
        gradients(move="if not slab.holds(param.grad):\n    param.grad = slab.keep(param.grad)")),
    "notices a reset that comes too early at the first gradient alone": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused",
        r"of 6 gradients in the slab the one that backward completes first was set to None, .* to the 5 others without",
        gradients(move="if slab.holds(param.grad) and slab.used == 0:\n    raise RuntimeError('reset too early')\n"
                       "if not slab.holds(param.grad):\n    param.grad = slab.keep(param.grad)")),
    "looks at where a gradient begins": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused",
        r"of 6 gradients in the slab all but the one .* were set to None, .* backward added to that one",
        gradients(move=BY_PLACE.replace(" + param.grad.numel() > slab.used", " > slab.used"))),
    "looks at where a gradient ends": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused",
        r"at 0 to 6, and the slab was reset. Another one was kept at 0 to 8, over all of it, .* nobody can tell",
        gradients(move=BY_PLACE)),
    "makes the slab in the default dtype": Wrong(
        4, "test_each_round_begins_anew",
        r"of parameters of fp64 .* raised ValueError: .* The slab has elements of torch.float32",
        {"gradients_in_slab": gradients()["gradients_in_slab"].replace(
            "*_kind_of(params))", "device=_kind_of(params)[1])")}),
    "looks at the dtype of frozen parameters": Wrong(
        4, "test_a_frozen_layer_may_be_of_another_dtype",
        r"frozen, and in bf16; .* raised ValueError: .* has torch.bfloat16 on cpu, torch.float32 on cpu. Only",
        {"gradients_in_slab": gradients()["gradients_in_slab"].replace(
            "_kind_of(params)", "_kind_of(list(model.parameters()))")}),
    # ------------------------------------------------------------------------------------------------------- step 5
    "moves what lies last first": Wrong(
        5, "test_compaction_leaves_one_free_block", r"after compact\(\) they lie at \[45, 30, 0\]",
        compact(order=f"reversed({IN_ORDER})")),
    "moves the oldest first": Wrong(
        5, "test_compaction_leaves_one_free_block", r"(?s)three 6 .* which of the two moves first\?",
        compact(order="list(self.lent.values())")),
    "forgets the pool": Wrong(
        5, "test_compaction_leaves_one_free_block", r"after compact\(\) the arena's pool has free: 10 at 0, 5 at 30, ",
        compact(begin="front = 0", place="new = Block(front, old.size, True)", end="",
                lend=LEND + "\nfront += old.size")),
    "forgets a block that does not move": Wrong(
        5, "test_compaction_leaves_one_free_block",
        r"held tensors of 10 at 0 and of 30 at 30; compact\(\) was called once, and both were freed. Then there is: ",
        compact(place="new = self.pool.take(old.size)\nif new.address == old.address:\n    continue")),
    "takes no block for what does not move": Wrong(
        5, "test_compaction_leaves_one_free_block", r"after compact\(\), .*; a full one has free 50 at 0",
        compact(place="if old.address == 0:\n    continue\nnew = self.pool.take(old.size)")),
    "forgets the blocks of what moves": Wrong(
        5, "test_compaction_leaves_one_free_block", r"after compact\(\) the arena was used further, and raised|second",
        compact(lend="tensor.set_(self.memory.untyped_storage(), new.address, tensor.shape, tensor.stride())")),
    "hands out new tensors": Wrong(
        5, "test_tensors_follow_where_they_are_moved", r"the tensor .* has other values: do its holders see the new",
        compact(lend="fresh = torch.empty(0, dtype=tensor.dtype)\n"
                     "self._lend(fresh, new, tensor.shape, tensor.stride())\ndel self.lent[id(fresh)]\n"
                     "self.lent[id(tensor)] = tensor, new")),
    "copies over itself": Wrong(
        5, "test_compaction_leaves_one_free_block", r"(?s)Please clone\(\) the tensor .*A piece that overlaps its own",
        move(clone="pass")),
    "copies pieces back to front": Wrong(
        5, "test_overlapping_moves_keep_the_values", r"moved by \d+ to the front, over itself, and \d+ of its numbers ",
        move(pieces="reversed(range(0, size, piece))")),
    "copies pieces through memory of the default dtype": Wrong(
        5, "test_overlapping_moves_keep_the_values",
        r"in an arena of torch.float64 a tensor of \d+ elements was moved by 3, and \d+ of its n.* In fp32 none",
        move(when="True", clone="moving = torch.empty(count).copy_(moving)")),
    "clones the whole arena": Wrong(
        5, "test_compaction_takes_memory_for_one_piece", r"held 32.0 MiB more at its peak",
        compact(begin="self.pool, whole = self._empty_pool(), self.memory.clone()",
                move="self.memory[new.address : new.address + old.size] = "
                     "whole[old.address : old.address + old.size]")),
    "autograd does not notice that a tensor moves": Wrong(
        5, "test_a_backward_that_needs_what_was_moved_fails",
        r"compact\(\) moved it, and backward went through(, with a wrong gradient)?",
        compact(lend="tensor.data = self.memory[new.address :].as_strided(tensor.shape, tensor.stride(), new.address)\n"
                     "self.lent[id(tensor)] = tensor, new")),
}

WRONG |= {  # what strangers handed in, and had full marks
    "what lies in the slab is not kept again": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing", r"keep\(\) of a copy that .* lies at \d+, and \d+ is",
        keep(end="if self.holds(tensor):\n    return tensor.detach()\nend = self._end_of(tensor)")),
    "one copy of each tensor": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing",
        r"keep\(\) of a (tensor that was kept before|copy that lies in the slab already), "
        r".*( lies at \d+, and \d+ is r| took it, and MemoryError is)",
        keep(end="copies = self.__dict__.setdefault('copies', {})\nif tensor in copies:\n"
                 "    return copies[tensor]\nend = self._end_of(tensor)",
             used="self.used = end\ncopies[tensor] = kept")),
    "the copies of the round that measures stay": Wrong(
        3, "test_a_slab_without_a_size_measures_its_first_round", r"holds tensor or copy. Then 16.0 kB live beside sla",
        keep(used="self.used = end\nself.copies = [*getattr(self, 'copies', []), kept]")),
    "a full slab is passed over in silence": Wrong(
        4, "test_each_round_begins_anew", r"the slab was not reset, and .* through, with \d gradients .* elsewhere",
        edited("08_defragmentation", "gradients_in_slab", (
            "        param.grad = slab.keep(param.grad)",
            "        with __import__('contextlib').suppress(MemoryError):\n"
            "                param.grad = slab.keep(param.grad)"))),
    "a gradient has the place of its first round": Wrong(
        4, "test_each_round_begins_anew", r"backward 1 of round \d, .* (another one than without|side by side|raised)",
        edited("08_defragmentation", "gradients_in_slab",
               ("def move(param):", "place_of = {}\n\n    def move(param):\n"
                "        begin = place_of.setdefault(param, slab.used)\n"
                "        if begin != slab.used and not slab.holds(param.grad):\n"
                "            place = slab._kept[begin : begin + param.numel()].view(param.shape)\n"
                "            place.data.copy_(param.grad)\n"
                "            slab.used = max(slab.used, begin + param.numel())\n"
                "            param.grad = place\n            return"))),
    "another dtype is kept while the slab measures": Wrong(
        3, "test_a_slab_without_a_size_measures_its_first_round", r"of fp64 while it measured, and keep\(\) took it",
        edited("08_defragmentation", "Slab.keep", (
            "end = self._end_of(tensor)",
            "end = self.used + tensor.numel() if self.memory is None else self._end_of(tensor)"))),
    "a tied weight has room twice": Wrong(
        4, "test_gradients_lie_in_one_slab", r"the gradient slab has room for \d+ elements; the parameters",
        edited("08_defragmentation", "gradients_in_slab", (
            "for param in model.parameters()", "for module in model.modules() for param in module._parameters.values()"
            " if param is not None"), (" if param is not None if", " if param is not None and"))),
    "found by its start": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused", r"a gradient lies at 6 to 15, and the slab was",
        gradients(move=BY_PLACE.replace(" + param.grad.numel() > slab.used", " >= slab.used"))),
    "moves in numpy, which has no bf16": Wrong(
        5, "test_overlapping_moves_keep_the_values", r"it raised TypeError: Got unsupported ScalarType BFloat16",
        {"Arena._move": function(
            "def _move(self, source, target, size):", "memory = self.memory.numpy()",
            function("for at in range(0, size, 2**18):", "end = min(size, at + 2**18)",
                     "memory[target + at : target + end] = memory[source + at : source + end]"))}),
    "what is refused takes room": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing", r"in round 1 keep\(\) raised Memory.* take no room",
        edited("08_defragmentation", "Slab._end_of", (
            "        raise MemoryError(", "        self.used = end\n        raise MemoryError("))),
    "one set of gradients for all slabs": Wrong(
        4, "test_micro_batches_add_up_in_place", r"(?s)the gradient slab was reset while .* is reset meanwhile",
        edited("08_defragmentation", "gradients_in_slab", (
            "kept, end = set(), 0", "kept, end = gradients_in_slab.__dict__.setdefault('kept', set()), 0"))),
    "the hook keeps what autograd made": Wrong(
        4, "test_gradients_are_held_once_and_models_not_at_all", r"After backward .* more live than before it",
        edited("08_defragmentation", "gradients_in_slab", ("kept, end = set(), 0", "kept, end, made = set(), 0, {}"),
               ("        param.grad = slab", "        made[id(param)] = param.grad\n            param.grad = slab"))),
    "the hook keeps parameters": Wrong(
        4, "test_gradients_are_held_once_and_models_not_at_all", r"a parameter lives on: a hook that holds",
        edited("08_defragmentation", "gradients_in_slab", ("kept.add(id(param))", "kept.add(param)"),
               ("id(param) not in kept", "param not in kept"))),
    "a slack for small blocks alone": Wrong(
        1, "test_what_is_too_much_is_split_off", r"of random requests in four ranges, with slack 64, free are .*: take",
        edited("08_defragmentation", "Pool.take", (
            "> self.slack", "> (self.slack if block.size < 60 else min(self.slack, 10))"))),
    "a slab that measured changes nothing at reset": Wrong(
        3, "test_a_backward_after_reset_fails", r"then backward went through: the next keep\(\) would have made it",
        edited("08_defragmentation", "Slab.reset", (
            "self._kept[:0].zero_()", "getattr(self, '_measured', self._kept[:0].zero_)()"),
               ("self._allocate(self.used)", "self._allocate(self.used)\n        self._measured = int"))),
    "a slab keeps what it was given": Wrong(
        3, "test_a_slab_without_a_size_measures_its_first_round", r"kept a tensor of 16.0 kB, .* 16.0 kB live beside",
        edited("08_defragmentation", "Slab.keep", (
            "    self.used = end", "    self.used = end\n    self.last = self.memory is not None and tensor"))),
    "the dtype of the first parameter": Wrong(
        4, "test_a_frozen_layer_may_be_of_another_dtype", r"of a model of fp32 and bf16 gradients_in_slab took it: it",
        edited("08_defragmentation", "gradients_in_slab", ("*_kind_of(params)", "params[0].dtype, params[0].device"))),
    "few small holes are left": Wrong(
        5, "test_tensors_follow_where_they_are_moved", r"in an arena of 2000, 150 or 12, .* is free, and \d+ at \d+ is",
        edited("08_defragmentation", "Arena.compact", (
            "    self.pool = ", "    if max((size for _, size in self.pool.holes), default=0) < 8:\n        return\n"
            "    self.pool = "))),
    "a matrix that lies in the slab is not kept again": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing",
        r"keep\(\) of a copy that lies in the slab already, of shape \[\d, \d\] gave a tensor that lies at \d+, and \d",
        keep(end="if self.holds(tensor) and tensor.dim() == 2:\n"
                 "    return tensor.detach()\nend = self._end_of(tensor)")),
    "one number does not fill a slab": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing",
        r"of shape \[\] raised MemoryError, and 1 fit\. .* What fits exactly fits",
        edited("08_defragmentation", "Slab._end_of", ("end > len(self.memory)",
                                                      "end > len(self.memory) - (tensor.dim() == 0)"))),
    "copies of four dimensions want gradients": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing", r"\[\d, \d, \d, \d\] gave a tensor that wants a grad",
        keep(used="self.used = end\nif tensor.dim() == 4 and tensor.requires_grad:\n    kept.requires_grad_()")),
    "all of the slab is copied for each tensor": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing", r"into a slab of 40.0 kB, 4\d.\d kB more were all",
        keep(copy="all = self.memory.clone()\nall[self.used : end] = tensor.reshape(-1)\nself.memory.copy_(all)")),
    "copies know an address alone": Wrong(
        3, "test_reset_goes_back_to_the_front_and_frees_nothing", r"a copy had other numbers once nobody held its slab",
        keep(kept="kind = __import__('ctypes').c_char * self.memory.nbytes\n"
                  "whole = torch.frombuffer(kind.from_address(self.memory.data_ptr()), dtype=self.dtype)\n"
                  "kept = whole[self.used : end].view(tensor.shape)")),
    "hooks hold the slab weakly": Wrong(
        4, "test_gradients_are_held_once_and_models_not_at_all", r"the gradients lie in 6 memories, and in one is",
        edited("08_defragmentation", "gradients_in_slab", (
            "kept, end = set(), 0", "kept, end, slab_of = set(), 0, __import__('weakref').ref(slab)"),
            ("nonlocal end", "nonlocal end\n        if (slab := slab_of()) is None:\n            return"))),
    "hooks go with the slab": Wrong(
        4, "test_gradients_are_held_once_and_models_not_at_all", r"the gradients lie in 6 memories, and in one is",
        edited("08_defragmentation", "gradients_in_slab", (
            "slab = Slab(", "weakref = __import__('weakref')\n    made = Slab("),
            ("kept, end = ", "slab, hooks = weakref.proxy(made), []\n    kept, end = "),
            ("param.register", "hooks += [param.register"), ("hook(move)", "hook(move)]"),
            ("    return slab", "    weakref.finalize(made, lambda: [hook.remove() for hook in hooks])\n    return "
             "made"))),
    "gradients of zero stay where they are": Wrong(
        4, "test_each_round_begins_anew", r"\d+ of \d gradients do not lie in the slab, such as \[-?0.0.*, whatever",
        gradients(move="if not param.grad.any():\n    return\n" + MOVE)),
    "a second backward of fp64 is refused": Wrong(
        4, "test_each_round_begins_anew", r"backward [23] of round 1, of parameters of fp64 .* raised Runt",
        gradients(move=MOVE.replace("not in kept:", "not in kept or param.dtype == torch.float64:"))),
    "what moves is no leaf any more, if it is no matrix": Wrong(
        5, "test_tensors_follow_where_they_are_moved", r"was a leaf that wants a gradient, and is one that wants none",
        compact(lend=LEND + "\nif tensor.dim() != 2:\n    tensor.requires_grad_(False)")),
    "strides of three dimensions are lost": Wrong(
        5, "test_tensors_follow_where_they_are_moved", r"of shape \[\d, \d, \d\] has other numbers, another shape or o",
        compact(lend="stride = torch.empty(tensor.shape).stride() if tensor.dim() == 3 else tensor.stride()\n"
                     "self._lend(tensor, new, tensor.shape, stride)")),
    "an arena has no room for one number at the end": Wrong(
        5, "test_tensors_follow_where_they_are_moved", r"allocate\(\[\]\) raised MemoryError, .* block has 1 elements",
        edited("08_defragmentation", "Arena.allocate", (
            "    block = self.pool", "    if not shape and self.largest_free == self.memory.element_size():\n"
            "        self._refuse(shape)\n    block = self.pool"))),
    "what does not overlap moves in one go": Wrong(
        5, "test_compaction_takes_memory_for_one_piece", r"with 31\d{5} free elements in front, .* held 8.0 MiB more",
        move(begin="if source - target >= size:\n    piece = size", when="True")),
    "a piece as large as the gap": Wrong(
        5, "test_compaction_takes_memory_for_one_piece", r"with \d{6,7} free elements in front, .* held \d.\d MiB more",
        move(begin="piece = max(piece, source - target)", when="True")),
    "small tensors are put aside first": Wrong(
        5, "test_compaction_takes_memory_for_one_piece", r"with 1000 free elements in front, .* held \d.\d MiB more",
        compact(begin="self.pool = self._empty_pool()\n"
                      "aside = {old.address: self.memory[old.address :][: old.size].clone()\n"
                      "         for _, old in self.lent.values() if old.size < 2**18}",
                move="if old.address in aside:\n    self.memory[new.address :][: old.size] = aside[old.address]\n"
                     "else:\n    self._move(old.address, new.address, old.size)")),
    "each tensor goes through numpy": Wrong(
        5, "test_compaction_takes_memory_for_one_piece", r"with 1000 free elements in front, .* held 8.0 MiB more",
        move(begin="piece = size if self.memory.dtype == torch.float32 else piece", when="True",
             clone="moving = torch.from_numpy(moving.numpy().copy())")),
    "a reset is seen while nothing is kept": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused", r"slab.keep\(\) of [1-5] other elements was called",
        edited("08_defragmentation", "gradients_in_slab", ("slab.used != end", "slab.used == 0"))),
    "a reset is seen where nothing but this gradient is kept": Wrong(
        4, "test_a_reset_while_gradients_are_in_use_is_refused", r"slab.keep\(\) of [1-5] other elements was called",
        edited("08_defragmentation", "gradients_in_slab", ("slab.used != end",
                                                           "slab.used in (0, param.numel()) and slab.used != end"))),
}

RIGHT = {
    "the parts of these mistakes": take() | give() | keep() | reset() | gradients() | compact() | move(),
    "a list by address, searched through": {
        "Pool.__init__": function("def __init__(self, slack=0):", "self.slack, self.ranges = slack, []"),
        "Pool.holes": "@property\n" + function(
            "def holes(self):",
            "return sorted((one.address, one.size) for blocks in self.ranges for one in blocks if not one.used)"),
        "Pool.add": function("def add(self, address, size):", "self.ranges.append([Block(address, size)])"),
        "Pool.remove": function("def remove(self, address, size):",
                                "self.ranges = [blocks for blocks in self.ranges if blocks[0].address != address]"),
        "Pool.take": """
            def take(self, size):
                best = None
                for blocks in self.ranges:
                    for place, block in enumerate(blocks):
                        if not block.used and block.size >= size and (
                                best is None or (block.size, block.address) < (best[0].size, best[0].address)):
                            best = block, blocks, place
                if best is None:
                    return None
                block, blocks, place = best
                if block.size - size > self.slack:
                    blocks.insert(place + 1, Block(block.address + size, block.size - size))
                    block.size = size
                block.used = True
                return block
            """,
        "Pool.give": """
            def give(self, block):
                if not block.used:
                    raise ValueError("twice")
                block.used = False
                blocks = next(blocks for blocks in self.ranges if block in blocks)
                place = blocks.index(block)
                if place + 1 < len(blocks) and not blocks[place + 1].used:
                    block.size += blocks.pop(place + 1).size
                if place and not blocks[place - 1].used:
                    blocks[place - 1].size += blocks.pop(place).size
            """,
        "Pool._insert": None, "Pool._take_out": None},
    "set_() keeps the strides of what has the shape already": compact(
        lend="self._lend(tensor, new, tensor.shape)"),
    "an untyped storage of its own for each copy": keep(
        copy="place = torch.empty(0, dtype=self.dtype).set_(self.memory.untyped_storage(), self.used, tensor.shape)\n"
             "place.copy_(tensor)\nself.handed = [*getattr(self, 'handed', []), place]",
        kept="kept = place") | reset(change="for place in getattr(self, 'handed', []):\n    place[..., :0].zero_() "
                                            "if place.dim() else place.fill_(place)\nself.handed = []"),
}

NOTHING = "the two statements need nothing of each other"
ONTO_ITSELF = "a tensor that stays where it is is copied onto itself, piece by piece, which takes time alone"
UNTOLD = {
    "Pool.take: `block.used = True` a statement later": NOTHING,
    "Pool.take: `if rest.after:` a statement later": NOTHING,
    "Pool.take: `block.size, block.after = (size, rest)` a statement later": NOTHING,
    "Pool.give: `block.used = False` a statement later": NOTHING,
    "Pool.give: `self._take_out(before.size, before.address)` a statement later": NOTHING,
    "Pool.give: `block.address, block.size = (before.address, before.size + block.size)` a statement later": NOTHING,
    "Pool.give: `self._take_out(after.size, after.address)` a statement later": NOTHING,
    "Pool.give: `block.size += after.size` a statement later": NOTHING,
    "Slab.keep: `self.memory[self.used:end].view(tensor.shape).copy_(tensor)` a statement later":
        "a view of the same memory may be taken first",
    "Slab.reset: 0 + 1 (2)": "what was kept is valid until reset() alone: its first number may be zeroed then",
    "gradients_in_slab: `slab = Slab(sum((param.numel() for param in params)), *_kind_of(params))` a statement later":
        "the hook looks for the slab when it runs",
    "gradients_in_slab: `kept, end = (set(), 0)` a statement later": "the hook looks for both when it runs",
    "gradients_in_slab: `param.grad = slab.keep(param.grad)` a statement later": NOTHING,
    "gradients_in_slab: 0 + 1": "before the first gradient nothing is remembered, so that there is nothing to forget",
    "Arena.compact: without @torch.no_grad()": "_lend has its own, and the arena's memory wants no gradient",
    "Arena.compact: `self._move(old.address, new.address, old.size)` a statement later":
        "the tensor may point to its new place before its numbers come there: nobody reads it in between",
    "Arena._move: without `if source == target:`": ONTO_ITSELF,
    "Arena._move: `if source == target:` a statement later": ONTO_ITSELF,
    "Arena._move: without `return`": ONTO_ITSELF,
    "Arena._move: `min(piece, size - done)`, arguments 1 and 2 exchanged": "the smaller one is the same",
    "Arena._move: `source - target < count` compared otherwise":
        "a piece that ends where it began is cloned without need, and a piece more is allowed",
    "Pool.give: `if before and (not before.used):` a statement later": "the block behind may be merged first: the free "
    "block is the same",
}
