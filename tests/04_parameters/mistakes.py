"""Lesson 4: what goes wrong with P_os+g+p.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

SHARD = "bucket.shard(bucket.parameters, self.rank).clone()"
RELEASED = "for param in bucket.params:\n    release(param, bucket.flat.placeholder(param))"
FREED = "collectives.free(bucket.parameters)"


def own(shard=SHARD, free="self._free(bucket)"):
    return {"Stage3.own": function("def own(self, bucket):", f"bucket.parameter_shard = {shard}", free)}


def _free(release=RELEASED, free=FREED):
    return {"Stage3._free": function("def _free(self, bucket):", release, free or "pass")}


ROOM = "bucket.parameters.untyped_storage().resize_(bucket.padded * bucket.dtype.itemsize)"
GATHER = """
unit.gathering.append(collectives.all_gather(
    bucket.parameters, bucket.parameter_shard, group=self.group, async_op=True))
"""
AT_ONCE = "unit.gathering.append(collectives.Work([]))"


def _gather(begin="if unit.whole or unit.gathering:\n    return", buckets="unit.buckets", room=ROOM, gather=GATHER):
    loop = function(f"for bucket in {buckets}:", room, gather)
    return {"Stage3._gather": function("def _gather(self, unit):", begin, loop)}


WAITED = "for pending in unit.gathering:\n    pending.wait()"
RESTORED = """
for param in bucket.params:
    restore(param, bucket.flat.view(bucket.parameters, param))
"""


def _arrive(wait=WAITED, buckets="unit.buckets", restore=RESTORED):
    loop = function(f"for bucket in {buckets}:", restore)
    body = function("if unit.gathering:", wait, loop, "unit.gathering, unit.whole = [], True")
    return {"Stage3._arrive": function("def _arrive(self, unit):", body)}


KEPT = "if unit.whole:\n    bucket.parameter_shard.copy_(bucket.shard(bucket.parameters, self.rank))"


def _release(begin="self._arrive(unit)", keep=KEPT, free="self._free(bucket)", end="unit.whole = False"):
    return {"Stage3._release": function(
        "def _release(self, unit):", begin, function("for bucket in unit.buckets:", keep, free), end)}


FREE_OTHERS = """
for other in self.units:
    stays = other in [*needed, following] or unit in other.parents
    if (other.whole or other.gathering) and not stays:
        self._release(other)
"""
NEEDED = "for one in needed:\n    self._gather(one)\nfor one in needed:\n    self._arrive(one)"
PREFETCH = "if following:\n    self._gather(following)"


def unit_turn(begin="", needed="[unit, *unit.parents]", free=FREE_OTHERS, gather=NEEDED, prefetch=PREFETCH):
    return {"Stage3.unit_turn": function(
        "def unit_turn(self, unit, following):", begin, f"needed = {needed}", free, gather, prefetch)}


REDUCING = "self.reducing = Reduction(bucket, whole, shard, pending)"
REDUCED = "pending = collectives.Work([])"


def freed_last():
    return {"Stage3.unit_turn": function(
        "def unit_turn(self, unit, following):", "needed = [unit, *unit.parents]", NEEDED, PREFETCH, FREE_OTHERS)}


def bucket_complete(begin="self._wait()", whole="self.memory.whole(bucket)", fuse="bucket.fuse_gradients(whole)",
                    drop="for param in done:\n    param.grad = None", shard="self.memory.shard(bucket)", op="avg",
                    reduce="pending = collectives.reduce_scatter(shard, whole, op=op, group=self.group, async_op=True)",
                    end=REDUCING, name="bucket_complete"):
    return {f"Stage3.{name}": function(
        f"def {name}(self, bucket, done):", begin, f"whole = {whole}", fuse, drop, f"shard, op = {shard}, '{op}'",
        reduce, end)}


GIVEN_BACK = "self.memory.give_back(self.reducing.whole)"
KEEP = """
if bucket.gradient_shard is None:
    bucket.gradient_shard = shard
else:
    bucket.gradient_shard += shard
"""


def wait(wait="self.reducing.pending.wait()", free=GIVEN_BACK, keep=KEEP):
    body = function("if self.reducing:", "bucket, shard = self.reducing.bucket, self.reducing.shard", wait, free, keep,
                    "self.reducing = None")
    return {"Stage3._wait": function("def _wait(self):", body)}


UPDATE = "optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)"
STATISTICS = "replicas.broadcast_statistics(self.model, self.group)"


def step(begin="self._release_all()", buckets="self.buckets", update=UPDATE, statistics=STATISTICS,
         spent="self.reducer.needs_zero_grad = True"):
    return {"Stage3.step": "@torch.no_grad()\n" + function(
        "def step(self):", begin, "self.reduced_gradients()", function(f"for bucket in {buckets}:", update),
        statistics, spent)}


def evaluation_done(body="self._release_all()"):
    return {"Stage3.evaluation_done": function("def evaluation_done(self):", body)}


def gather_parameters(begin="self._release_all()", whole="whole_parameters(self.all_buckets, self.rank, self.group)",
                      alike="replicas.check_alike(self.model, self.group)", end="self._release_all()"):
    return {"Stage3.gather_parameters": "@contextmanager\n" + function(
        "def gather_parameters(self):", begin, "self.inside_gather_parameters = True",
        function("try:", function(f"with {whole}:", "yield", alike)),
        function("finally:", "self.inside_gather_parameters = False", end))}


def made_at_the_start(line):
    """__init__ with some lines more."""
    return {"Stage3.__init__": function(
        "def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):",
        """
        self.units = find_units(model)
        set_up(self, model, optimizer_class, options, group=group, bucket_bytes=bucket_bytes,
               param_groups=param_groups, units=self.units)
        self.memory, self.reducing, self.inside_gather_parameters = GradientMemory(self.buckets, group), None, False
        self.reducer = Reducer(self, by_turns=True)
        self.execution_order = ExecutionOrder(self)
        """, line)}


# all gradients wait, whole, and are reduced when backward has ended
LATE = bucket_complete(name="reduce") | {
    "Stage3.late": "late = ()",
    "Stage3.bucket_complete": """
        def bucket_complete(self, bucket, done):
            self.late = (*self.late, (bucket, done))
        """,
    "Stage3.backward_ends": """
        def backward_ends(self):
            for bucket, done in self.late:
                self.reduce(bucket, done)
            self.late = ()
            self._wait()
        """,
}
# who drops references frees nothing that autograd has saved
DROPPED = _free(free="bucket.parameters = None") | _gather(room="bucket.parameters = bucket.zeros()")
HOARD = {"Stage3.copies": "copies = ()"} | _release(
    keep=KEPT + "\nif unit.whole:\n    self.copies = (*self.copies, bucket.parameters.clone())")

NUMBER = "torch.distributed.all_reduce(torch.zeros(1), group=self.group)"
BARRIER = "torch.distributed.barrier(self.group)"
# what is on its way stays so
WHOLE_ALONE = "for unit in self.units:\n    if unit.whole:\n        self._release(unit)"
GIVES_BACK = {"gather_anew": """
    def gather_anew(buckets, group):
        from zero_minimal.core import units
        units.gather_anew(buckets, group)
    """}

TAKEN_OVER = """
with torch.no_grad():
    whole = bucket.zeros()
    for param in bucket.params:
        bucket.flat.view(whole, param).copy_(param.data)
    bucket.parameter_shard.copy_(bucket.shard(whole, self.rank))
"""


def only_if(number):
    """gather_parameters that keeps edits of a bucket only where this number of a parameter has become another."""
    numbers = f"{{param: {number} for param in self.model.parameters()}}"
    edited = function("if any(before[param] != after[param] for param in bucket.params):", TAKEN_OVER)
    return GIVES_BACK | {"Stage3.gather_parameters": "@contextmanager\n" + function(
        "def gather_parameters(self):", "self._release_all()", "self.inside_gather_parameters = True",
        function("try:", "gather_anew(self.all_buckets, self.group)", f"before = {numbers}", "yield",
                 "replicas.check_alike(self.model, self.group)", f"after = {numbers}",
                 function("for bucket in self.all_buckets:", edited)),
        function("finally:", "self.inside_gather_parameters = False", "self._release_all()"))}


SUMS = "[param.detach().sum().item() for param in unit.params]"

WRONG = {
    "parameters are never released": Wrong(
        1, "test_a_rank_keeps_its_shard_alone",
        r"rank 0 holds \d+.\d kB, and its shard is \d+.\d kB. What still refers",
        own(free=""), 2),
    "frozen parameters stay whole at the start": Wrong(
        1, "test_a_rank_keeps_its_shard_alone", r"What still refers to the whole\?.*some blocks .* are frozen",
        own(free="if bucket.trained:\n    self._free(bucket)"), 2),
    "the shard is a view, and keeps the whole": Wrong(
        1, "test_a_rank_keeps_its_shard_alone", r"A shard that is a view keeps all of its storage",
        own(shard="bucket.shard(bucket.parameters, self.rank)") | _free(free="bucket.parameters = None"), 2),
    "a view of the whole is dropped, and its storage lives": Wrong(
        1, "test_a_rank_keeps_its_shard_alone", r"What still refers to the whole\?", _free(free=""), 2),
    "the shard goes with the whole": Wrong(
        1, "test_a_rank_keeps_its_shard_alone",
        r"all 2 ranks together hold \d+ bytes .*a shard needs memory of its own before the whole is freed",
        own(shard="bucket.shard(bucket.parameters, self.rank)"), 2),
    "parameters point to memory that is gone": Wrong(
        1, "test_to_read_a_released_parameter_is_an_error",
        r"first.weight points to memory that has been freed.*a segmentation fault", _free(release="")),
    "a released parameter is NaN, without a word": Wrong(
        1, "test_to_read_a_released_parameter_is_an_error",
        r"the sum of \|first.weight\| is nan before any unit's turn",
        _free(release="for param in bucket.params:\n    param.data = bucket.flat.placeholder(param)")),
    "a released parameter is empty": Wrong(
        1, "test_to_read_a_released_parameter_is_an_error", r"the sum of \|first.weight\| is 0 before any unit's turn",
        _free(release="for param in bucket.params:\n    param.data = torch.empty(0, dtype=bucket.dtype)")),
    "a released parameter has no shape": Wrong(
        1, "test_a_released_parameter_keeps_its_shape", r"first.weight has another shape",
        _free(release="for param in bucket.params:\n    release(param, torch.empty(0, dtype=bucket.dtype))")),

    "nobody waits for the parameters": Wrong(
        # or the rank that is through first goes, while its shards are still on their way to the other one
        2, "test_each_unit_is_whole_at_its_turn",
        r"rank \d's loss is (NaN|[\d.]+).*(waited for|had they arrived)|and wait for each|memory that is gone",
        _arrive(wait=""), 2, True),
    "the root is never gathered": Wrong(
        2, "test_each_unit_is_whole_at_its_turn",
        r"(?s)parameter 'last.bias' is released.*To look at: each unit must be whole when its turn comes, the root",
        unit_turn(begin="if unit is self.units[0]:\n    return"), 2),
    "shards come to their neighbour's place": Wrong(
        2, "test_each_unit_is_whole_at_its_turn", r"rank 0's loss is .* in rank order",
        _arrive(wait=WAITED + "\nfor bucket in unit.buckets:\n    "
                "bucket.parameters.copy_(bucket.parameters.roll(len(bucket.parameter_shard)))"), 3),
    "each rank fills the unit with its own shard": Wrong(
        2, "test_each_unit_is_whole_at_its_turn", r"loss is .* it computed with other parameters",
        _gather(gather=f"""
            for rank in range(self.world_size):
                bucket.shard(bucket.parameters, rank).copy_(bucket.parameter_shard)
            {AT_ONCE}
            """), 2),
    "parameters still point to the placeholder": Wrong(
        2, "test_each_unit_is_whole_at_its_turn",
        r"(?s)parameter 'last.bias' is released.*To look at: each unit must",
        _arrive(restore="pass"), 2),
    "units around are forgotten": Wrong(
        2, "test_units_inside_a_unit", r"(?s)is released.*so must the units around it \(unit.parents\)",
        unit_turn(needed="[unit]", free=FREE_OTHERS.replace("or unit in other.parents", ""))),
    "a unit has one bucket": Wrong(
        2, "test_units_of_several_buckets", r"(?s)is released.*To look at: a unit has several buckets",
        _gather(buckets="unit.buckets[:1]") | _arrive(buckets="unit.buckets[:1]")),
    "ranks gather a unit's buckets in another order": Wrong(
        2, "test_units_of_several_buckets",
        r"Mismatch: the ranks are not in the same collective: rank 0 is in all_gather of the root unit in forward",
        _gather(buckets="unit.buckets[:: 1 - 2 * self.rank]", gather=GATHER.replace("group=", "of=bucket, group="))),
    "gathers from all ranks there are": Wrong(
        2, "test_a_forward_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        _gather(gather=GATHER.replace("group=self.group, ", "")), hangs=True),
    "an all-reduce of shards among zeros": Wrong(
        2, "test_a_forward_sends_an_all_gather", r"rank 0 of 3 sent 108.\d kB in a forward .* sends 53.7 kB",
        _gather(gather=f"""
            bucket.parameters.zero_()
            bucket.shard(bucket.parameters, self.rank).copy_(bucket.parameter_shard)
            collectives.all_reduce(bucket.parameters, op="sum", group=self.group)
            {AT_ONCE}
            """)),

    "units stay whole once they are": Wrong(
        3, "test_a_unit_is_whole_only_while_it_works",
        r"in forward pass 1, while blocks.1 works, rank 0 has blocks.0 whole, too", unit_turn(free="")),
    "the whole model is gathered at once": Wrong(
        3, "test_a_unit_is_whole_only_while_it_works",
        r"in forward pass 1, while blocks.0 works, rank 0 has blocks.2, .* and blocks.5 whole, too",
        unit_turn(needed="self.units")),
    "units are freed a turn late": Wrong(
        3, "test_a_unit_is_whole_only_while_it_works",
        r"in forward pass 1, while blocks.1 works, rank 0 has blocks.0 whole, too",
        unit_turn(free=FREE_OTHERS.replace("not stays:", "not stays and other is not self.before:")
                  + "self.before = unit") | {"Stage3.before": "before = None"}),
    "param.data is swapped, while autograd holds the old storage": Wrong(
        3, "test_its_memory_goes_though_autograd_saved_it",
        r"while blocks.1 works, rank 0 still has memory of blocks.0, 13.\d kB, though nobody can read it", DROPPED),
    "units are freed at the end of the turn, after the next one was begun": Wrong(
        3, "test_its_memory_goes_though_autograd_saved_it",
        r"in forward pass 2, between .* rank 0 begins a gather while blocks.0, blocks.1 and blocks.5 have memory: 3",
        freed_last()),
    "a unit that was whole is not gathered again": Wrong(
        3, "test_a_second_forward_computes_the_same_model",
        r"(?s)a tensor whose memory was freed: .*To look at: a unit that was freed must be gathered again",
        _release(end="")),
    "units inside the one at work are freed": Wrong(
        3, "test_units_inside_the_one_at_work_stay",
        r"first forward that calls a block twice, .* when the first backward begins: .* a gather too many",
        unit_turn(free=FREE_OTHERS.replace(" or unit in other.parents", ""))),
    "nothing is prefetched": Wrong(
        3, "test_the_next_unit_is_on_its_way",
        r"in the second forward pass rank 0 begins to send what comes after blocks.0 only when .* \(5 of 5 times so\)",
        unit_turn(prefetch="")),
    "the prefetch is waited for at once": Wrong(
        3, "test_nobody_waits_for_the_next_unit", r"rank 1 sends 40 ms late, and in 5 of 5 turns rank 0 did not begin",
        unit_turn(prefetch="if following:\n    self._gather(following)\n    self._arrive(following)")),
    "each gather is waited for where it starts": Wrong(
        3, "test_nobody_waits_for_the_next_unit", r"and in 5 of 5 turns rank 0 did not begin to compute before it had",
        _gather(gather=GATHER.replace("async_op=True", "async_op=False").replace("append(", "append(Done(")
                .replace("))\n", ")))\n")) | {"Done": """
                class Done:
                    def __init__(self, nothing):
                        pass

                    def wait(self):
                        pass
                """}),
    "a unit on its way in vain stays": Wrong(
        3, "test_a_unit_that_was_expected_in_vain",
        r"where blocks.2 is left out, while blocks.4 works, rank 0 still has memory of blocks.2",
        unit_turn(free=FREE_OTHERS.replace("(other.whole or other.gathering)", "other.whole"))),
    "gathers first, and frees then": Wrong(
        3, "test_a_unit_that_was_expected_in_vain",
        r"where blocks.\d is left out, between .* rank 0 begins a gather while .* have memory: 3 blocks at once",
        unit_turn(free="for one in needed:\n    self._gather(one)\n" + FREE_OTHERS)),
    "a unit is freed while it is on its way": Wrong(
        3, "test_a_unit_that_was_expected_in_vain",
        r"memory was freed|SIGSEGV|NaN|it computed with other|leaves a gather that nobody waits for",
        _release(begin="unit.gathering = []"), hangs=True),
    "changes in place are lost": Wrong(
        3, "test_what_is_changed_in_place_stays", r"forward pass 2, where parameters of blocks.1 were changed in place",
        _release(keep="")),
    "changes in place that leave the sum are lost": Wrong(
        3, "test_what_is_changed_in_place_stays",
        r"in forward pass 2, where .* of one bias were put in the opposite order, so that no sum of them is",
        _arrive(restore=RESTORED + f"\nif bucket is unit.buckets[-1]:\n    unit.sums = {SUMS}") | _release(
            begin=f"self._arrive(unit)\nedited = unit.whole and unit.sums != {SUMS}",
            keep=KEPT.replace("unit.whole", "edited"))),
    "changes in place of frozen parameters are lost": Wrong(
        3, "test_what_is_changed_in_place_stays",
        r"in forward pass 2, .* the trained parameter has its new values, and the frozen one its old ones",
        _release(keep=KEPT.replace("unit.whole", "unit.whole and bucket.trained"))),
    "changes in backward are lost": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"of blocks.4 were changed in place, at its turn in backward, and in",
        _release(keep=KEPT.replace("unit.whole", "unit.whole and not self.reducer.running"))),
    "changes of the root are lost": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"of first, of the root, were changed in place, at its turn in forw",
        _release(keep=KEPT.replace("unit.whole", "unit.whole and unit is not self.units[0]"))),
    "changes in an evaluation are lost": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"in pass 5, where parameters are changed in place .* goes back into the",
        _release(keep=KEPT.replace("unit.whole", "unit.whole and torch.is_grad_enabled()"))),
    "changes of a unit that is frozen are lost": Wrong(
        3, "test_what_is_changed_in_place_stays", r"of blocks.2, all of which is frozen, were changed in place",
        _release(keep=KEPT.replace("unit.whole", "unit.whole and any(each.trained for each in unit.buckets)"))),
    "a barrier before each unit": Wrong(
        2, "test_a_forward_sends_an_all_gather", r"rank 0 called barrier 7 times in a forward pass: all ranks stand",
        unit_turn(begin=BARRIER), 3),
    "a number of each rank before each unit": Wrong(
        2, "test_a_forward_sends_an_all_gather", r"rank 0 called all_reduce 7 times in a forward pass, where nothing",
        unit_turn(begin=NUMBER), 3),
    "a copy of each unit is kept, to the kernel": Wrong(
        3, "test_the_kernel_counts_forwards", r"rank \d holds up to \d+.\d MB, as the kernel counts", HOARD),

    "the sum instead of the mean": Wrong(
        4, "test_shards_hold_the_mean_gradient", r"the sum of the ranks' gradients, not their mean: 3 times too large",
        bucket_complete(op="sum"), 3),
    "does not wait for the reduction": Wrong(
        4, "test_shards_hold_the_mean_gradient",
        r"NaN: .*before its reduction had ended \(wait\)|(started and|dropped that) nobody waited for",
        wait(wait=""), 2, True),
    "a reduction is begun while another one is under way": Wrong(
        4, "test_shards_hold_the_mean_gradient",
        r"has no gradient for \d+ of its \d+ buckets: .* their result was not kept",
        bucket_complete(begin=""), 2, True),
    "gradients are freed before their reduction ends": Wrong(
        4, "test_shards_hold_the_mean_gradient",
        r"holds NaN: .*freed while the reduction was under way|whose memory was freed|memory freed that was being sent",
        bucket_complete(end="collectives.free(whole)\n" + REDUCING) | wait(free=""), 3),
    "the last reduction is never waited for": Wrong(
        4, "test_shards_hold_the_mean_gradient", r"rank 0 has no gradient for 1 of its \d+ buckets",
        {"Stage3.backward_ends": "def backward_ends(self):\n    pass"}, 2),
    "nothing is reduced": Wrong(
        4, "test_shards_hold_the_mean_gradient",
        r"rank 0's shard holds its own gradient: the other ranks' parts were never",
        bucket_complete(reduce=f"shard.copy_(bucket.shard(whole, self.rank))\n{REDUCED}"), 2),
    "a unit without gradient is skipped": Wrong(
        4, "test_a_missing_gradient_is_zero", r"(?s)one parameter got a gradient on rank 0 alone|has no gradient for",
        bucket_complete(begin="self._wait()\nif all(param.grad is None for param in bucket.params):\n    return")),
    "takes it that every parameter has a gradient": Wrong(
        4, "test_a_missing_gradient_is_zero", r"(?s)it raised AttributeError: 'NoneType'.*To look at: .*counts as zero",
        bucket_complete(begin="self._wait()\nlargest = max(param.grad.abs().max() for param in bucket.params)")),
    "backward does not gather": Wrong(
        4, "test_backward_frees_units_too",
        r"while blocks.4 works, rank 0 has blocks.5 whole, too.* Or does unit_turn nothing in backward\?",
        unit_turn(begin="if self.reducer.running:\n    return"), 2),
    "backward frees nothing": Wrong(
        4, "test_backward_frees_units_too",
        r"in backward pass, while blocks.4 works, rank 0 has blocks.5 whole, too",
        unit_turn(free="if not self.reducer.running:" + FREE_OTHERS.replace("\n", "\n    "))),
    "references are dropped, and backward finds what forward left": Wrong(
        3, "test_backward_frees_units_too",
        r"while blocks.5 works, rank 0 still has memory of blocks.0, .*: it was left in forward.* Autograd has saved",
        DROPPED),
    "only forward prefetches": Wrong(
        4, "test_backward_prefetches", r"in the second backward pass rank 0 begins to send .* after blocks.5 only when",
        unit_turn(prefetch=PREFETCH.replace("following:", "following and not self.reducer.running:"))),
    "backward prefetches in the order of forward": Wrong(
        4, "test_backward_frees_units_too",
        r"while blocks.4 works, rank 0 has blocks.5 whole, too.* was it prefetched in the order of forward\?",
        unit_turn(begin="""
            if following:
                following = [*self.units, None][self.units.index(unit) + 1]
            """)),
    "a bucket gets memory before it waits for the one before": Wrong(
        4, "test_whole_gradients_do_not_pile_up", r"while it waits for a reduction, \d+.\d kB too much",
        bucket_complete(begin="", whole="self.memory.whole(bucket)\nself._wait()")),
    "whole gradients until backward ends": Wrong(
        4, "test_whole_gradients_do_not_pile_up", r"during backward pass 1 .* rank 0 holds up to \d\d\d.\d kB", LATE),
    "param.grad stays": Wrong(
        4, "test_whole_gradients_do_not_pile_up", r"after backward pass 1 .*: \d+ parameters have their .grad",
        bucket_complete(drop="")),
    "an all-reduce, and a slice of it": Wrong(
        4, "test_forward_and_backward_send_half_as_much_again",
        r"rank 0 of 3 sent \d+.\d kB in forward and backward, and 3Ψ\(N−1\)/N are \d+.\d kB: two all-gathers",
        bucket_complete(reduce=f"""
            torch.distributed.all_reduce(whole, group=self.group)
            shard = bucket.shard(whole, self.rank).clone() / self.world_size
            {REDUCED}
            """)),
    "a barrier before each reduction": Wrong(
        4, "test_forward_and_backward_send_half_as_much_again",
        r"rank 0 called barrier \d+ times in forward and backward", bucket_complete(begin=f"self._wait()\n{BARRIER}")),
    "all is freed between forward and backward": Wrong(
        4, "test_root_and_last_block_stay_for_backward", r"with n units 2n − 2 are enough",
        {"Stage3.backward_begins": """
            def backward_begins(self):
                self._release_all()
                self.execution_order.begin("backward")
            """}),
    "gradients of 16 bits are added in 16 bits": Wrong(
        4, "test_gradients_of_16_bits_are_added_in_32",
        r"gradients of float16: some are 60000 .* hold inf in place of the mean: their sum is too large",
        bucket_complete(reduce=f"""
            torch.distributed.reduce_scatter_tensor(shard, whole, group=self.group)
            shard /= self.world_size
            {REDUCED}
            """)),
    "reduces over all ranks there are": Wrong(
        4, "test_backward_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three", bucket_complete(
            reduce="pending = collectives.reduce_scatter(shard, whole, op=op, async_op=True)"), hangs=True),
    "a unit is freed after each forward, also after that of its recomputation": Wrong(
        4, "test_recomputation_and_dropout",
        r"with recomputation .* rank 0 of 2 sent 160.\d kB, .* gathered once more for its",
        made_at_the_start("""
            for unit in self.units[1:]:
                unit.module.register_forward_hook(lambda *_, unit=unit: self._release(unit), always_call=True)
            """)),
    "the shard is overwritten": Wrong(
        4, "test_micro_batches_add_up", r"the last one's gradient alone: it overwrote the first one's",
        wait(keep="bucket.gradient_shard = shard")),

    "the first unit is forgotten": Wrong(
        5, "test_every_shard_is_updated", r"\d+ of 54876 parameters did not move", step(buckets="self.buckets[1:]"), 2),
    "units are released after the update": Wrong(
        5, "test_every_shard_is_updated",
        r"\d+ of 54876 parameters did not move .*: these units were still whole in step\(\).* before you update", {
            "Stage3.step": "@torch.no_grad()\n" + function(
                "def step(self):", "self.reduced_gradients()", function("for bucket in self.buckets:", UPDATE),
                "self._release_all()", STATISTICS, "self.reducer.needs_zero_grad = True")}, 2),
    "updates twice": Wrong(
        5, "test_every_shard_is_updated", r"moved parameters 2 times too far: was the update made more than once\?",
        step(update=UPDATE + "\n" + UPDATE), 3),
    "weights decay by hand, where they are not any more": Wrong(
        5, "test_every_shard_is_updated",
        r"rank \d is gone in the middle of the test: it was killed by SIGSEGV at line \d+ of assignment.py "
        r"\(step\): bucket.parameters.mul_\(0.99\)\n    To look at: does it use memory that is gone\?",
        step(update="bucket.parameters.mul_(0.99)\n" + UPDATE), 2),
    "backward is not ended where none ran": Wrong(
        5, "test_a_step_without_a_backward",
        r"(?s)^rank \d: it raised AttributeError: .*where no rank ran a backward.*reduced_gradients\(\)",
        {"Stage3.step": step()["Stage3.step"].replace("self.reduced_gradients()", "pass")}),
    "shows what all ranks there are hold": Wrong(
        5, "test_a_step_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        gather_parameters(whole="whole_parameters(self.all_buckets, self.rank)"), hangs=True),
    "units stay whole after a step": Wrong(
        5, "test_holds_shards_alone_after_a_step", r"rank 0 of 4 holds \d.\d bytes a parameter after a step of AdamW",
        step(begin="")),
    "step gathers the parameters, as stage 2 does": Wrong(
        5, "test_a_step_sends_nothing", r"rank 0 of 4 sent 1\d\d.\d kB in step\(\), and nothing has to be sent",
        step(update=UPDATE + "\nwhole = bucket.zeros()\n"
             "collectives.all_gather(whole, bucket.parameter_shard, group=self.group)")),
    "a barrier at the end of a step": Wrong(
        5, "test_a_step_sends_nothing", r"rank 0 called barrier 1 times in step\(\): all ranks stand still",
        step(spent=f"self.reducer.needs_zero_grad = True\n{BARRIER}")),
    "a number of each rank at the end of a step": Wrong(
        5, "test_a_step_sends_nothing", r"rank 0 of 4 called all_reduce 1 times in step\(\), and this model has no",
        step(spent=f"self.reducer.needs_zero_grad = True\n{NUMBER}")),
    "running statistics stay each rank's own": Wrong(
        5, "test_statistics_and_a_backward_too_many", r"running mean is .* on rank 1 and .* on rank 0: each rank has",
        step(statistics="")),
    "running statistics are sent in the first step only": Wrong(
        5, "test_statistics_and_a_backward_too_many", r"step\(\) number 2 batch norm's running mean is .* on rank 1",
        step(statistics=f"if not self.reducer.steps:\n    {STATISTICS}")),
    "gradients are used twice without a word": Wrong(
        5, "test_statistics_and_a_backward_too_many", r"must be an error: set self.reducer.needs_zero_grad in step\(\)",
        step(spent="")),
    "an evaluation leaves units whole": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"after evaluation 1 .* rank 0 still has \d+.\d kB more than before, and \d+ parameters are whole",
        evaluation_done("pass")),
    "a number of each rank at the end of an evaluation": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"in evaluation 2 .* rank 0 called all_reduce 1 times, send 7 times, and in the first forward of",
        evaluation_done(f"self._release_all()\n{NUMBER}")),
    "rank 0 ends each evaluation with a word to all": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole", r"in evaluation 2 .* rank 0 called broadcast 1 times, send",
        evaluation_done(f"self._release_all()\n{NUMBER.replace('all_reduce(', 'broadcast(').replace('1)', '1), 0')}")),
    "a barrier at the end of an evaluation": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"rank 0 called barrier 3 times in two steps and three evaluations",
        evaluation_done(f"self._release_all()\n{BARRIER}")),
    "a barrier when gather_parameters ends": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"rank 0 called barrier 1 times in gather_parameters\(\)",
        gather_parameters(end=f"self._release_all()\n{BARRIER}")),
    "an evaluation leaves what is on its way": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"after evaluation 3 .* has \d+.\d kB more than before, and no parameter is whole: blocks.5 was expected",
        evaluation_done(WHOLE_ALONE)),
    "step releases what is whole, and what is on its way comes later": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole",
        r"in evaluation 1 after a step .* still on its way when step\(\) begins, with old values",
        step(begin=WHOLE_ALONE)),
    "gather_parameters releases what is whole, and what is on its way comes later": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"the forward after an edit .* A unit that was on its way when the context began must not come later",
        gather_parameters(begin=WHOLE_ALONE)),
    "edits of frozen parameters are lost": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"in the forward after an edit .* the trained parameter has its new values, and the frozen one its old ones",
        gather_parameters(alike="""
            replicas.check_alike(self.model, self.group)
            for bucket in self.all_buckets:
                if not bucket.trained:
                    gather_anew([bucket], self.group)
            """) | GIVES_BACK),
    "gather_parameters shows placeholders": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"(?s)is released.*To look at: inside gather_parameters\(\) every parameter is whole",
        gather_parameters(whole="nullcontext()", alike="")),
    "gather_parameters leaves all whole": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"after gather_parameters\(\) \d+ parameters are still whole",
        gather_parameters(end="")),
    "gather_parameters ends with what asks for unit.whole, which is not set there": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"after gather_parameters\(\) \d+ parameters are still whole .* whole_parameters sets no unit.whole, and",
        _release(begin="if not unit.whole and not unit.gathering:\n    return\nself._arrive(unit)")),
    "gather_parameters leaves frozen parameters whole": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"after gather_parameters\(\) 6 parameters are still whole on rank 0, blocks.0.down.bias first: they are froz",
        gather_parameters(end="for bucket in self.buckets:\n    self._free(bucket)")),
    "step leaves frozen parameters whole": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"after step\(\) a parameter is still whole on rank 0, blocks.0.down.bias",
        step(begin="for bucket in self.buckets:\n    self._free(bucket)")),
    "edits that leave the sum are lost": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"in the forward after an edit .* of one bias were put in the opposite order, so that no sum of them is",
        only_if("param.sum().item()")),
    "edits that leave the norm are lost": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"in the forward after an edit .* of one bias were put in the opposite order, so that no sum of them is",
        only_if("param.norm(dtype=torch.float64).item()")),
    "edits that differ are accepted": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"the ranks made different edits, and rank 0 went on without",
        gather_parameters(alike="")),
    "edits are lost": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"the forward after an edit inside gather_parameters\(\)",
        gather_parameters(alike="""
            replicas.check_alike(self.model, self.group)
            gather_anew(self.all_buckets, self.group)
            """) | GIVES_BACK),
    "an error inside gather_parameters is swallowed": Wrong(
        5, "test_all_is_whole_inside_gather_parameters",
        r"an error inside gather_parameters\(\) did not come out of it",
        {"Stage3.gather_parameters": gather_parameters()["Stage3.gather_parameters"].replace(
            "finally:", "except KeyError:\n        pass\n    finally:")}),
    "the optimizer forgets": Wrong(
        5, "test_trains_as_one_process_would",
        r"(?s)SGD with momentum, 3 steps: rank 0 has .* must be .*an optimizer whose state .* is empty in each step",
        step(begin="self._release_all()\nself.optimizer.state.clear()")),
    "the scale is not used": Wrong(
        5, "test_trains_as_one_process_would", r"clipping, and a loss scale, 3 steps: rank 0 has other parameters",
        step(update="optimizers.update_shard(self.optimizer, bucket)")),
    "whole gradients are kept, to the kernel": Wrong(
        5, "test_the_kernel_counts_steps", r"rank \d holds up to \d+.\d MB, as the kernel counts",
        bucket_complete(end=REDUCING + "\nbucket.gradients = whole.clone()")),
}

BROADCASTS = """
for rank in range(self.world_size):
    place, name = bucket.shard(bucket.parameters, rank), rank
    if rank == self.rank:
        place.copy_(bucket.parameter_shard)
    if self.group is not None:
        name = torch.distributed.get_global_rank(self.group, rank)
    unit.gathering.append(torch.distributed.broadcast(place, name, group=self.group, async_op=True))
"""
SLICES = """
for param, offset in bucket.flat.offsets.items():
    restore(param, bucket.parameters[offset : offset + param.numel()].view(param.shape))
"""
WRONG |= {  # what strangers handed in, and had full marks
    "a block's other units stay": Wrong(
        3, "test_units_inside_the_one_at_work_stay", r"still has memory for blocks.0.inner.0",
        unit_turn(free=FREE_OTHERS.replace("unit in other.parents", "set(needed[:-1]) & {other, *other.parents}"))),
    "no prefetch in an evaluation": Wrong(
        3, "test_the_next_unit_is_on_its_way", r"in the second forward pass under no_grad rank 0 begins to send",
        unit_turn(prefetch=PREFETCH.replace("if following", "if following and torch.is_grad_enabled()"))),
    "statistics in training mode alone": Wrong(
        5, "test_statistics_and_a_backward_too_many", r"in each step \(here it is called after model.eval\(\)\)",
        edited("04_parameters", "Stage3.step", ("replicas.", "if self.model.training:\n        replicas."))),
    "nothing is freed where there is one rank": Wrong(
        5, "test_holds_shards_alone_after_a_step", r"a rank that is alone holds \S+ bytes a parameter",
        edited("04_parameters", "Stage3._free", ("collectives.free(bucket.parameters)",
               "if self.world_size > 1:\n        collectives.free(bucket.parameters)"))),
    "asks version counters whether anything was changed": Wrong(
        3, "test_what_is_changed_in_place_stays", r"were changed in place, at its turn in forward, and in pass 2 they",
        edited("04_parameters", "Stage3._arrive", ("unit.whole = [], True", "unit.whole = [], True\n"
               "        unit.seen = [p._version for b in unit.buckets for p in b.params]"))
        | edited("04_parameters", "Stage3._release", ("if unit.whole:", "if unit.whole and unit.seen != ["
                 "p._version for b in unit.buckets for p in b.params]:"))),
    "waits for a unit's last bucket alone": Wrong(
        5, "test_every_shard_is_updated", r"\d+ collectives had begun that nobody waited",
        edited("04_parameters", "Stage3._arrive", ("for pending in unit.gathering:\n            pending.wait()",
               "unit.gathering[-1].wait()")), 2),
    "gathers into 4 bytes an element whatever the dtype is": Wrong(
        3, "test_its_memory_goes_though_autograd_saved_it", r"in bf16, while a block works, its parameters have .* and",
        edited("04_parameters", "Stage3._gather", ("* bucket.dtype.itemsize", "* max(4, bucket.dtype.itemsize)"))),
    "one rank alone keeps all whole": Wrong(
        1, "test_to_read_a_released_parameter_is_an_error", r"before any unit's turn, when its values are on no rank",
        edited("04_parameters", "Stage3._free", (
            "    for param", "    if bucket.world_size == 1:\n        return\n    for param")), 1),
    "the user's gradient_scale is changed in place": Wrong(
        5, "test_trains_as_one_process_would", r"that tensor holds .* on rank 0: make a new one",
        edited("04_parameters", "Stage3.clip_grad_norm_", (
            "self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)",
            "if self.gradient_scale is None:\n        self.gradient_scale = torch.ones(())\n"
            "    self.gradient_scale *= precision.clip(None, norm, max_norm)"))),
    "gradients are scaled in place": Wrong(
        5, "test_trains_as_one_process_would", r"step\(\) changed the gradients in rank 0's shards",
        edited("04_parameters", "Stage3.step", (
            "        optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)",
            "        if self.gradient_scale is not None:\n            bucket.gradient_shard *= self.gradient_scale\n"
            "        optimizers.update_shard(self.optimizer, bucket)"))),
    "a set says in which order units are gathered": Wrong(
        2, "test_units_inside_a_unit", r"in the same order \(a set has none\)",
        edited("04_parameters", "Stage3._gather_needed", ("[unit, *unit.parents]", "{unit, *unit.parents}"))),
    "edits are compared when they are in the shards": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"were refused on rank 0, but some are in the shards: its",
        edited("04_parameters", "Stage3.gather_parameters",
               ("            replicas.check_alike", "        replicas.check_alike"))),
    "prefetches in training alone": Wrong(
        3, "test_the_next_unit_is_on_its_way", r"in the second forward pass in eval\(\) mode rank \d begins to send",
        unit_turn(prefetch=PREFETCH.replace("following:", "following and self.model.training:"))),
    "gathers the root and the unit at work, and none between them": Wrong(
        4, "test_shards_hold_the_mean_gradient", r"blocks end with units inside|the units around it \(unit\.parents\)",
        unit_turn(needed="[self.units[0], unit]"), 2),
    "units are released when backward ends, and not in step()": Wrong(
        5, "test_every_shard_is_updated", r"these units were still whole in step\(\)|are all buckets updated",
        edited("04_parameters", "Stage3.step", ("    self._release_all()", "    pass"))
        | edited("04_parameters", "Stage3.backward_ends", ("self._wait()", "self._wait()\n    self._release_all()"))),
    "step() frees without carrying edits over": Wrong(
        5, "test_an_evaluation_leaves_nothing_whole", r"of the root, were changed in place, at its turn in a training",
        edited("04_parameters", "Stage3.step", ("    self._release_all()", """
    if self.inside_gather_parameters:
        self._release_all()
    for unit in self.units:
        self._arrive(unit)
        for bucket in unit.buckets:
            self._free(bucket)
        unit.whole = False"""))),
    "an error leaves all whole": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"after an error has ended gather_parameters\(\) \d+ p",
        {"Stage3.gather_parameters": "@contextmanager\n" + function(
            "def gather_parameters(self):", "self._release_all()", "self.inside_gather_parameters = True", function(
                "try:", function("with whole_parameters(self.all_buckets, self.rank, self.group):", "yield",
                                 "replicas.check_alike(self.model, self.group)"),
                "self.inside_gather_parameters = False", "self._release_all()"),
            function("finally:", "self.inside_gather_parameters = False"))}),
    "a unit's buckets are gathered one after the other": Wrong(
        3, "test_nobody_waits_for_the_next_unit", r"turns rank 0 did not begin to compute before it had",
        _gather(room=f"for pending in unit.gathering:\n    pending.wait()\n{ROOM}")),
    "micro-batches of 16 bits are added in fp32": Wrong(
        4, "test_micro_batches_add_up", r"after two micro-batches rank 0's shards of gradients have 4 bytes an",
        wait(keep=KEEP.replace("+= shard", "= bucket.gradient_shard.float() + shard"))),
    "each fourth step ends with a barrier": Wrong(
        5, "test_statistics_and_a_backward_too_many", r"rank 0 called barrier \d times in 18 steps",
        step(spent=f"if self.reducer.steps % 4 == 3:\n    {BARRIER}\nself.reducer.needs_zero_grad = True")),
    "statistics of the first steps alone": Wrong(
        5, "test_statistics_and_a_backward_too_many", r"after step\(\) number \d+ batch norm's running mean is",
        step(statistics=f"if self.reducer.steps < 4:\n    {STATISTICS}")),
    "gradients of fp64 are reduced in fp32": Wrong(
        4, "test_gradients_of_16_bits_are_added_in_32", r"gradients of float64: .* rounded to fp32 on the way",
        bucket_complete(reduce="""
            narrow = shard.float()
            collectives.reduce_scatter(narrow, whole.float(), op=op, group=self.group)
            shard.copy_(narrow)
            pending = collectives.Work([])
            """)),
    "step() inside gather_parameters() sends before it refuses": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"was refused on rank 0 after \d+.\d kB had been sent",
        {"Stage3.step": "@torch.no_grad()\n" + function(
            "def step(self):", "self.reduced_gradients()", "self._release_all()",
            function("for bucket in self.buckets:", UPDATE), STATISTICS, "self.reducer.needs_zero_grad = True")}),
    "step() goes on inside gather_parameters()": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"step\(\) inside gather_parameters\(\) raised nothing",
        {"Stage3._release_all": function("def _release_all(self):", "if self.inside_gather_parameters:\n    return",
                                         "for unit in self.units:\n    self._release(unit)")}),
    "what gather_parameters() shows is freed with it": Wrong(
        5, "test_all_is_whole_inside_gather_parameters", r"a state_dict\(\) of inside gather_parameters\(\) has no mem",
        {"Stage3.gather_parameters": "@contextmanager\n" + function(
            "def gather_parameters(self):", "self._release_all()", "self.inside_gather_parameters = True", function(
                "try:", "with whole_parameters(self.all_buckets, self.rank, self.group):\n    yield\n"
                "    replicas.check_alike(self.model, self.group)\n    shown = list(self.model.parameters())\n"
                "    shown = [param.data for param in shown]"), function(
                "finally:", "self.inside_gather_parameters = False", "self._release_all()"),
            "for data in shown:\n    collectives.free(data)")}),
    "what is freed is read back into the master": Wrong(
        5, "test_trains_as_one_process_would", r"25 steps of 0.0015 from 1 on .* whatever is gathered or freed",
        _release(keep=KEPT + "\n    if bucket.trained:\n        bucket.master.data.copy_(bucket.parameter_shard)")),
}

RIGHT = {
    "whole before the parameters point there": edited("04_parameters", "Stage3._arrive", (
        "unit.gathering, unit.whole = [], True", "unit.gathering = []"), (
        "        for bucket in unit.buckets", "        unit.whole = True\n        for bucket in unit.buckets")),
    "the parts of these mistakes": own() | _free() | _gather() | _arrive() | _release() | unit_turn() | wait()
                                   | bucket_complete() | step() | evaluation_done() | gather_parameters(),
    "each rank broadcasts its shard, and gradients are reduced at once": _gather(gather=BROADCASTS) | _arrive(
        restore=SLICES
    ) | bucket_complete(reduce="collectives.reduce_scatter(shard, whole, op=op, group=self.group)", end="""
        self.memory.give_back(whole)
        bucket.gradient_shard = shard if bucket.gradient_shard is None else bucket.gradient_shard + shard
        """, begin="") | {"Stage3._wait": "def _wait(self):\n    pass"},
}

AT_WHICH = "collectives.reduce_scatter(shard, whole, op='avg', group=self.group, of=bucket, async_op=True)"
NOTHING = "the two statements need nothing of each other"
UNTOLD = {  # mutants (tests/mutants.py) that keep full marks, since nobody could tell them from the reference
    "Stage3._free: `for param in bucket.params:` a statement later": "nobody reads a parameter in between",
    "Stage3._gather: `collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, "
    "of=bucket, async` without of=bucket": "a name for messages",
    "Stage3._arrive: `for pending in unit.gathering:` a statement later":
        "parameters may point to their memory before it is filled: nobody reads them in between",
    "Stage3._arrive: `for bucket in unit.buckets:` a statement later": NOTHING,
    f"Stage3.bucket_complete: `{AT_WHICH}` without op='avg'": "reduce_scatter averages if nothing else is said",
    f"Stage3.bucket_complete: `{AT_WHICH}` without of=bucket": "a name for messages",
    "Stage3._wait: `bucket, shard = (self.reducing.bucket, self.reducing.shard)` a statement later":
        "self.reducing is the same before and after the wait",
    "Stage3._wait: without `self.memory.give_back(self.reducing.whole)`":
        "nothing else refers to it: it goes with self.reducing = None. Constant buffers need to be told, and no check "
        "of this lesson passes memory=",
    "Stage3._wait: `self.memory.give_back(self.reducing.whole)` a statement later":
        "what comes before it then needs no memory",
    "Stage3._wait: `if bucket.gradient_shard is None:` a statement later":
        "bucket and shard are names of what was in self.reducing",
    "Stage3.step: `for bucket in self.buckets:` a statement later": NOTHING,
    "Stage3.step: `replicas.broadcast_statistics(self.model, self.group)` a statement later": NOTHING,
    "Stage3.step: `self._release_all()` a statement later": "reduced_gradients() reads no parameter",
    "Stage3.bucket_complete: `for param in done:` a statement later":
        "what is there for longer meanwhile is the bucket's own shard, and nothing is sent or computed",
    "Stage3.step: without @torch.no_grad()":
        "nothing in it makes a graph: torch's optimizers turn gradients off themselves, and the rest reads .data",
}
