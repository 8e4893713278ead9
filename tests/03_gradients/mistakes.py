"""Lesson 3: what goes wrong with P_os+g.

Each of the five functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function, norm_of_whole_gradients

FREED = "self.memory.give_back(self.reducing.whole)"
REDUCING = "self.reducing = Reduction(bucket, whole, shard, pending)"
AT_ONCE = "pending = collectives.Work([])"


def bucket_complete(begin="self._wait()", whole="self.memory.whole(bucket)", fuse="bucket.fuse_gradients(whole)",
                    drop="for param in done:\n    param.grad = None", shard="self.memory.shard(bucket)", op="avg",
                    reduce="pending = collectives.reduce_scatter(shard, whole, op=op, group=self.group, async_op=True)",
                    end=REDUCING, name="bucket_complete"):
    return {f"Stage2.{name}": function(
        f"def {name}(self, bucket, done):", begin, f"whole = {whole}", fuse, drop, f"shard, op = {shard}, '{op}'",
        reduce, end)}


KEEP = """
if bucket.gradient_shard is None:
    bucket.gradient_shard = shard
else:
    bucket.gradient_shard += shard
"""


def wait(wait="self.reducing.pending.wait()", free=FREED, keep=KEEP):
    body = function("if self.reducing:", "bucket, shard = self.reducing.bucket, self.reducing.shard", wait, free, keep,
                    "self.reducing = None")
    return {"Stage2._wait": function("def _wait(self):", body)}


UPDATE = "optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)"
GATHER = """
whole, own = bucket.parameters, bucket.parameter_shard
gathering.append(collectives.all_gather(whole, own, group=self.group, async_op=True))
"""


WIDE = "bucket.gradient_shard.to(bucket.master.dtype)"
GATHERED = "for pending in gathering:\n    pending.wait()"


def step(begin="", ends="self.reduced_gradients()", buckets="self.buckets", update=UPDATE, gather=GATHER,
         end=GATHERED):
    loop = function(f"for bucket in {buckets}:", update, gather)
    return {"Stage2.step": "@torch.no_grad()\n" + function(
        "def step(self):", begin, ends, "gathering = []", loop, end,
        "replicas.broadcast_statistics(self.model, self.group)", "self.reducer.needs_zero_grad = True")}


def zero_grad(forget="self.reducer.forget()", scale="self.gradient_scale = None",
              shard="bucket.gradient_shard = None"):
    return {"Stage2.zero_grad": function(
        "def zero_grad(self):", "self._wait()", forget, scale, function("for bucket in self.buckets:", shard),
        "for param in self.model.parameters():\n    param.grad = None")}


def clip_grad_norm_(norm="precision.global_norm(gradients, self.gradient_scale, group=self.group)",
                    scale="self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)", result="norm"):
    return {"Stage2.clip_grad_norm_": "@torch.no_grad()\n" + function(
        "def clip_grad_norm_(self, max_norm):", "gradients = self.reduced_gradients()", f"norm = {norm}", scale,
        f"return {result}")}


# all gradients wait, whole, and are reduced when backward has ended
LATE = bucket_complete(name="reduce") | {
    "Stage2.late": "late = ()",
    "Stage2.bucket_complete": """
        def bucket_complete(self, bucket, done):
            self.late = (*self.late, (bucket, done))
        """,
    "Stage2.backward_ends": """
        def backward_ends(self):
            for bucket, done in self.late:
                self.reduce(bucket, done)
            self.late = ()
            self._wait()
        """,
}
WHOLE_STATE = bucket_complete(shard="torch.empty_like(bucket.shard(whole, self.rank))") | {
    "Stage2.own": """
        def own(self, bucket):
            bucket.parameter_shard = bucket.parameters
        """,
} | step(update="""
    whole = bucket.zeros()
    collectives.all_gather(whole, bucket.gradient_shard, group=self.group)
    group = self.optimizer.param_groups[bucket.group_index]
    optimizers.update(self.optimizer, group, bucket.master, whole.to(bucket.master.dtype))
    bucket.parameters.copy_(bucket.master.data)
    """, gather="")
# buckets of the first pass are reduced as they should, and all later ones when backward has ended
LATER = LATE | bucket_complete(begin="self._wait()\nself.begun = True", name="reduce") | {
    "Stage2.begun": "begun = False",
    "Stage2.bucket_complete": """
        def bucket_complete(self, bucket, done):
            if self.reducer.passes or self.reducer.steps:
                self.late = (*self.late, (bucket, done))
            else:
                self.reduce(bucket, done)
        """,
}
MORE = "self.under_way = (*self.under_way, Reduction(bucket, whole, shard, pending))"
ALL_AT_ONCE = bucket_complete(begin="", end=MORE) | {
    "Stage2.under_way": "under_way = ()",
    "Stage2.backward_ends": """
        def backward_ends(self):
            for self.reducing in self.under_way:
                self._wait()
            self.under_way = ()
        """,
}
SHARED = bucket_complete(
    begin="", whole="self.shared(bucket).zero_()", drop="for param in done:\n    param.grad = None\nself._wait()"
) | wait(free="") | {
    "Stage2.shared": """
        def shared(self, bucket):
            if not hasattr(self, "room"):
                self.room = torch.zeros(max(each.padded for each in self.buckets), dtype=bucket.dtype)
            return self.room[: bucket.padded]
        """,
}


def made_at_the_start(line):
    """__init__ with one line more."""
    return {"Stage2.__init__": function(
        "def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):",
        """
        set_up(
            self, model, optimizer_class, options, group=group, bucket_bytes=bucket_bytes, param_groups=param_groups
        )
        self.reducer, self.reducing = Reducer(self), None
        self.memory = GradientMemory(self.buckets, group)
        """, line)}


def gather_in(dtype):
    return f"""
    whole = bucket.parameters.to({dtype})
    own = bucket.shard(whole, self.rank)
    own.copy_(bucket.master.data)
    collectives.all_gather(whole, own, group=self.group)
    bucket.parameters.copy_(whole)
    """


SHIFTED = """
whole, own = torch.empty_like(bucket.parameters), bucket.parameter_shard
collectives.all_gather(whole, own, group=self.group)
bucket.parameters.copy_(whole.roll(len(own)))
"""
COUNTED = """torch.stack([
    gradient.float().square().sum() * (2 if any(param in self.twice() for param in bucket.params) else 1)
    for gradient, bucket in zip(gradients, self.buckets)
]).sum()
collectives.all_reduce(norm, op='sum', group=self.group)
norm = norm.sqrt() * (1 if self.gradient_scale is None else self.gradient_scale)"""
SQUARES = "torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()"

WRONG = {
    "gradients are not copied": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"hold nothing but zeros: no gradient has got into what was reduced.*\(bucket.fuse_gradients\)\?",
        bucket_complete(fuse=""), 2),
    "P_os in disguise: whole gradients until backward ends": Wrong(
        1, "test_no_whole_gradients_during_backward",
        r"during backward up to 1\d\d.\d kB of gradients live on rank 0, of 157.4 kB", LATE),
    "param.grad stays": Wrong(
        1, "test_no_whole_gradients_after_backward",
        r"rank 0 still holds \d+.\d kB of gradients after backward: .* leaves it 39.4 kB.*48 parameters still have",
        bucket_complete(drop="")),
    "whole buckets stay": Wrong(
        1, "test_no_whole_gradients_after_backward", r"rank 0 still holds 19\d.\d kB of gradients after backward",
        bucket_complete(end="bucket.gradients = whole\n" + REDUCING) | wait(free="")),
    "the last bucket stays": Wrong(
        1, "test_no_whole_gradients_after_backward",
        r"rank 0 still holds 4\d.\d kB of gradients .* its shard of 157.4 kB. A bucket has 6.6 kB: what still refers",
        bucket_complete(end="self.last = whole\n" + REDUCING) | wait(free="")),
    "a bucket gets memory before it waits for the one before": Wrong(
        1, "test_no_whole_gradients_during_backward",
        r"while it waits for a reduction, up to 6\d.\d kB of gradients live on rank 0.* has given its own back",
        bucket_complete(begin="", whole="self.memory.whole(bucket)\nself._wait()")),
    "the sum instead of the mean": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"the sum of the ranks' gradients, not their mean: 3 times too large",
        bucket_complete(op="sum"), 3),
    "divided twice": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"averaged twice: they are 3 times too small",
        wait(keep="shard /= self.world_size" + KEEP), 3),
    "an all-reduce, and a slice of it": Wrong(
        1, "test_backward_sends_a_reduce_scatter",
        r"It called all_reduce \d+ times.* An all-reduce sends twice what a reduce-scatter does",
        bucket_complete(reduce=f"""
            torch.distributed.all_reduce(whole, group=self.group)
            shard = bucket.shard(whole, self.rank).clone() / self.world_size
            {AT_ONCE}
            """)),
    "the house's all-reduce, and a slice of it": Wrong(
        1, "test_backward_sends_a_reduce_scatter",
        r"sent 29\d.\d kB in backward, .* sends 146.\d kB.* An all-reduce sends twice",
        bucket_complete(reduce=f"""
            collectives.all_reduce(whole, group=self.group)
            shard = bucket.shard(whole, self.rank).clone()
            {AT_ONCE}
            """)),
    "does not wait for the reduction": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"NaN: .*before its reduction had ended \(wait\)|(started and|dropped that) nobody waited for",
        wait(wait=""), 2, True),
    "frees the bucket before its reduction ends": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"holds NaN: .*freed while the reduction was under way|whose memory was freed",
        bucket_complete(end="collectives.free(whole)\n" + REDUCING) | wait(free=""), 3),
    "buckets begin with what lay in memory": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"holds NaN: memory that nobody wrote to",
        bucket_complete(whole="torch.empty_like(bucket.parameters)"), 2),
    "nothing is reduced": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"rank 0's shard holds its own gradient: the other ranks' parts were never",
        bucket_complete(reduce=f"shard.copy_(bucket.shard(whole, self.rank))\n{AT_ONCE}"), 2),
    "divided, and not reduced": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0's shard holds its own gradient / N",
        bucket_complete(reduce=f"shard.copy_(bucket.shard(whole, self.rank) / self.world_size)\n{AT_ONCE}"), 2),
    "every rank keeps the first shard": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0 and rank 1 hold the same gradient shard",
        bucket_complete(reduce=f"""
            collectives.all_reduce(whole, group=self.group)
            shard.copy_(bucket.shard(whole, 0))
            {AT_ONCE}
            """), 2),
    "every rank keeps the whole mean": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"hold \d+ elements, and the whole gradient has \d+: 1/2 of it is a rank\'s",
        bucket_complete(reduce=f"""
            collectives.all_reduce(whole, group=self.group)
            shard = whole.clone()
            {AT_ONCE}
            """), 2),
    "the last reduction is never waited for": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0 has no gradient for 1 of its \d+ buckets",
        {"Stage2.backward_ends": "def backward_ends(self):\n    pass"}, 2),
    "only full buckets are reduced": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0 has no gradient for 1 of its \d+ buckets",
        bucket_complete(begin="self._wait()\nif bucket.padded < self.buckets[0].padded:\n    return"), 2),
    "a bucket without gradient is skipped": Wrong(
        1, "test_a_missing_gradient_is_zero", r"(?s)one parameter got a gradient on rank 0 alone|has no gradient for",
        bucket_complete(begin="self._wait()\nif all(param.grad is None for param in bucket.params):\n    return")),
    "takes it that every parameter has a gradient": Wrong(
        1, "test_a_missing_gradient_is_zero", r"(?s)it raised AttributeError: 'NoneType'.*To look at: .*counts as zero",
        bucket_complete(begin="self._wait()\nlargest = max(param.grad.abs().max() for param in bucket.params)")),
    "a gradient that two buckets need goes with the first": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"gradients are lost: the shards hold zeros in their place|has no gradient",
        bucket_complete(drop="for param in bucket.params:\n    param.grad = None"), 2),
    "whole gradients until backward ends, from the second micro-batch on": Wrong(
        3, "test_memory_stays_as_in_the_first_backward",
        r"in backward of step 2, micro-batch 1 up to 1\d\d.\d kB of gradients live on rank 0, of 157.4 kB", LATER),
    "keeps each shard that there was": Wrong(
        3, "test_memory_stays_as_in_the_first_backward",
        r"after backward of step 2, micro-batch 1 rank 0 holds \d+.\d kB besides the parameters.*what stays from one",
        zero_grad(shard="""
            bucket.history = [*getattr(bucket, "history", ()), bucket.gradient_shard]
            bucket.gradient_shard = None
            """)),
    "a bucket of the second backward stays": Wrong(
        3, "test_memory_stays_as_in_the_first_backward",
        r"after backward of step 2, micro-batch 1 rank 0 holds 4\d.\d kB besides the parameters.* of gradients",
        bucket_complete(end="if self.reducer.steps == 1:\n    self.last = whole\n" + REDUCING) | wait(free="")),
    "the gradients of the last update stay": Wrong(
        3, "test_memory_stays_as_in_the_first_backward",
        r"after step\(\) number 1 rank 0 holds 4\d.\d kB besides the parameters",
        step(update=UPDATE + "\nself.last = bucket.gradient_shard.float() * 1.0")),
    "has room for all gradients from the start": Wrong(
        1, "test_no_whole_gradients_after_backward",
        r"rank 0 holds 31\d.\d kB when the stage is made, .* parameters are 157.4 kB of that",
        made_at_the_start("self.whole = [bucket.zeros() for bucket in self.buckets]")),
    "all reductions are under way at once": Wrong(
        1, "test_no_whole_gradients_during_backward", r"during backward up to \d\d\d.\d kB of gradients live on rank 0",
        ALL_AT_ONCE),
    "fills the vector that is being sent": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"elements are on no rank, in .* must be .* belongs to no element is .* on rank|gradients are lost", SHARED, 3),
    "takes it that something is under way": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"it raised AttributeError: 'NoneType' object has no attribute",
        {"Stage2._wait": function("def _wait(self):", "bucket, shard = self.reducing.bucket, self.reducing.shard",
                                  "self.reducing.pending.wait()", FREED, KEEP, "self.reducing = None")}, 2),
    "micro-batches of 16 bits are added in fp32": Wrong(
        3, "test_micro_batches_wait_in_shards", r"after two micro-batches rank 0's shards of gradients have 4 bytes an",
        edited("03_gradients", "Stage2._wait", (
            "bucket.gradient_shard += shard", "bucket.gradient_shard = bucket.gradient_shard.float() + shard"))),
    "gradients are sent in fp16": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"the shards hold numbers of 16 bits \(float16\), .* have 32",
        bucket_complete(reduce=f"""
            narrow = self.memory.shard(bucket).half()
            collectives.reduce_scatter(narrow, whole.half(), group=self.group)
            shard.copy_(narrow)
            {AT_ONCE}
            """), 2),
    "gradients of 16 bits are added in 16 bits": Wrong(
        1, "test_gradients_of_16_bits_are_added_in_32",
        r"gradients of float16: some are 60000 .* hold inf in place of the mean: their sum is too large",
        bucket_complete(reduce=f"""
            torch.distributed.reduce_scatter_tensor(shard, whole, group=self.group)
            shard /= self.world_size
            {AT_ONCE}
            """)),
    "gradients of 16 bits are divided first": Wrong(
        1, "test_gradients_of_16_bits_are_added_in_32", r"divided by N is zero: divide after the sum",
        bucket_complete(op="sum", fuse="bucket.fuse_gradients(whole)\nwhole /= self.world_size")),
    "gradients of fp16 are added in bf16": Wrong(
        1, "test_gradients_of_16_bits_are_added_in_32", r"small numbers vanish beside large ones",
        bucket_complete(reduce=f"""
            torch.distributed.all_reduce(wide := whole.bfloat16(), group=self.group)
            shard.copy_(bucket.shard(wide, self.rank).float() / self.world_size)
            {AT_ONCE}
            """)),
    "reduces over all ranks there are": Wrong(
        1, "test_backward_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three", bucket_complete(
            reduce="pending = collectives.reduce_scatter(shard, whole, op=op, async_op=True)"), hangs=True),
    "nobody collects the updated shards": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"rank 1's parameters differ from rank 0's in \d+ of 54876 elements .*must get the others'",
        step(gather=""), 2),
    "collects before the update": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"parameters differ from rank 0's.* after the update",
        step(update="", end=f"{GATHERED}\nfor bucket in self.buckets:\n    {UPDATE}"), 2),
    "does not wait for the others' shards": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"differ from rank 0's|did not move|NaN|it raised",
        step(end=""), 3),
    "waits for the last gather alone": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"\d+ collectives had begun that nobody waited",
        step(end="gathering[-1].wait()"), 3),
    "everybody takes rank 0's parameters": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"\d+ of 54876 parameters did not move in step\(\)",
        step(gather="collectives.broadcast(bucket.parameters, group=self.group)"), 2),
    "the first bucket is forgotten": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"\d+ of 54876 parameters did not move",
        step(buckets="self.buckets[1:]"), 2),
    "goes up the gradient": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"went up the gradient",
        step(begin="self.gradient_scale = -1.0"), 2),
    "updates twice": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"moved parameters 2 times too far: was the update made more than once\?",
        step(update=UPDATE + "\n" + UPDATE), 3),
    "a parameter group's weight decay is lost": Wrong(
        2, "test_a_step_is_the_optimizers", r"three parameter groups, 1 step: rank 0 has other parameters",
        step(update="""
            group = self.optimizer.param_groups[0]
            optimizers.update(self.optimizer, group, bucket.master, bucket.gradient_shard)
            """)),
    "a frozen parameter decays": Wrong(
        2, "test_a_step_is_the_optimizers", r"frozen, tied and unused parameters, 1 step: rank 0 has other parameters",
        step(begin="""
            for param in self.model.parameters():
                param.mul_(1.0 if param.requires_grad else 0.99)
            """)),
    "every rank keeps the whole optimizer state": Wrong(
        2, "test_holds_shards_after_a_step", r"rank 0 of 4 holds 1\d.\d bytes a parameter after a step of AdamW",
        WHOLE_STATE),
    "gathers parameters and gradients": Wrong(
        2, "test_a_step_sends_as_much_as_data_parallelism",
        r"rank 0 sent 4\d\d.\d kB in a whole step, .* sends 292.\d kB",
        step(gather=GATHER + "collectives.all_gather(bucket.zeros(), bucket.gradient_shard, group=self.group)")),
    "waits for all shards but the last": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"parameters differ from rank 0's .* on rank 1 and .* on rank 0, and was .* before|it raised",
        step(end="for pending in gathering[:-1]:\n    pending.wait()"), 2),
    "shards come to their neighbour's place": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"rank 0 has new parameters in wrong places: \S+\[.*\] holds what belongs to \S+\[", step(gather=SHIFTED), 3),
    "parameters are gathered in fp16": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"of rank 0's parameters are rounded to 16 bits \(float16\), and these parameters have 32",
        step(gather=gather_in("torch.float16")), 2),
    "fp32 masters are gathered": Wrong(
        2, "test_a_step_sends_as_much_as_data_parallelism",
        r"with parameters in bf16 rank 0 of 4 sent 16\d.\d kB in step\(\), .* not their fp32 masters",
        step(gather=gather_in("torch.float32"))),
    "a whole copy in fp32 is held": Wrong(
        2, "test_holds_shards_after_a_step", r"rank 0 of 4 holds 9.\d bytes a parameter after a step of AdamW in bf16",
        step(gather=GATHER + "if bucket.dtype.itemsize < 4:\n    bucket.gradients = bucket.parameters.float()")),
    "a whole copy in fp32 is held for the time of a step": Wrong(
        2, "test_holds_shards_after_a_step", r"inside of step\(\) rank 0 of 4 holds up to \d+.\d bytes a parameter",
        step(begin="copies = [bucket.parameters.float() for bucket in self.buckets]")),
    "all shards become fp32 at once, for the time of a step": Wrong(
        2, "test_holds_shards_after_a_step",
        r"inside of step\(\) rank 0 of 4 holds up to 6.\d bytes a parameter with AdamW in bf16",
        step(ends="self.reduced_gradients()\nwide = {bucket: " + WIDE + " for bucket in self.buckets}")),
    "each rank goes by the order of hashes": Wrong(
        2, "test_ranks_with_other_hash_seeds_agree",
        r"(?s)each rank is a Python of its own, as with torchrun|wrong places|parameters differ",
        step(buckets="sorted(self.buckets, key=lambda bucket: hash(bucket.name))")),
    "gathers from all ranks there are": Wrong(
        2, "test_a_step_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        step(gather=GATHER.replace("group=self.group, ", "")), hangs=True),
    "running statistics stay each rank's own": Wrong(
        2, "test_running_statistics_are_alike", r"running mean is .* on rank 1 and .* on rank 0: each rank has that of",
        {"Stage2.step": step()["Stage2.step"].replace("replicas.broadcast_statistics(self.model, self.group)", "")}),
    "backward is not ended where none ran": Wrong(
        2, "test_a_rank_without_a_backward_takes_the_step",
        r"(?s)^rank \d: it raised AttributeError: .*where no backward ran: first on rank 1.*reduced_gradients\(\)",
        step(ends="")),
    "a rank without a backward leaves": Wrong(
        2, "test_a_rank_without_a_backward_takes_the_step",
        r"(?s)rank 0 .*To look at: here step\(\) is called where no backward ran.* takes part in all reductions",
        step(ends="if not self.reducer.reduced:\n    return"), hangs=True),
    "gradients are used twice without a word": Wrong(
        2, "test_a_backward_after_step_is_refused", r"must be an error: set self.reducer.needs_zero_grad in step\(\)",
        {"Stage2.step": step()["Stage2.step"].replace("self.reducer.needs_zero_grad = True", "")}),
    "the optimizer forgets": Wrong(
        3, "test_trains_as_one_process_would",
        r"(?s)SGD with momentum, 3 steps: rank 0 has .* must be .*an optimizer whose state .* is empty in each step",
        step(begin="self.optimizer.state.clear()")),
    "the first learning rate is the last": Wrong(
        3, "test_trains_as_one_process_would",
        r"(?s)a scheduler of the learning rate, 5 steps: .*the learning rate of the first step: a scheduler changes",
        step(begin="""
            if not hasattr(self, "rates"):
                self.rates = [group["lr"] for group in self.optimizer.param_groups]
            for group, rate in zip(self.optimizer.param_groups, self.rates):
                group["lr"] = rate
            """)),
    "masters are rounded with the parameters": Wrong(
        3, "test_small_steps_in_bf16_add_up", r"25 steps of 0.0015 .* rank 0 has [\d.]+ to 1: each is too small",
        step(update=UPDATE + "\nbucket.master.data.copy_(bucket.parameter_shard)")),
    "gradients without a step are kept": Wrong(
        3, "test_the_second_step_starts_afresh", r"where the one before was dropped \(zero_grad\(\) without step\(\)\)",
        zero_grad(shard="bucket.gradient_shard = None if spent else bucket.gradient_shard",
                  forget="spent = self.reducer.needs_zero_grad\nself.reducer.forget()")),
    "what is under way when zero_grad is called comes later": Wrong(
        3, "test_the_second_step_starts_afresh", r"not the mean gradient .* and had failed in its second micro-batch",
        {"Stage2.zero_grad": zero_grad()["Stage2.zero_grad"].replace("self._wait()", "pass")}),
    "keeps old gradients": Wrong(
        3, "test_the_second_step_starts_afresh", r"the sum of both steps': zero_grad\(\) left the first one's",
        zero_grad(shard="pass")),
    "does not start backward afresh": Wrong(
        3, "test_the_second_step_starts_afresh",
        r"^rank \d: zero_grad\(\) was called before this backward, and it was refused .* \(self.reducer.forget\(\)\)",
        zero_grad(forget="")),
    "the shard is overwritten": Wrong(
        3, "test_micro_batches_add_up", r"the last micro-batch's gradient alone: each one overwrote the shard",
        wait(keep="bucket.gradient_shard = shard")),
    "only the first micro-batch counts": Wrong(
        3, "test_micro_batches_add_up", r"the first micro-batch's gradient alone",
        wait(keep="if bucket.gradient_shard is None:\n    bucket.gradient_shard = shard")),
    "micro-batches are averaged": Wrong(
        3, "test_micro_batches_add_up", r"not the mean gradient, summed over three micro-batches",
        wait(keep=KEEP.replace("+= shard", "= (bucket.gradient_shard + shard) / 2"))),
    "whole gradients wait for the last micro-batch": Wrong(
        3, "test_micro_batches_wait_in_shards",
        r"between two micro-batches rank 0 holds 1\d\d.\d kB of gradients, and its shard is 78.7 kB",
        {"Stage2.no_sync": "def no_sync(self):\n    return self.reducer.accumulate()"}),
    "only shards are updated, not the 16-bit parameters": Wrong(
        3, "test_trains_as_one_process_would", r"bf16, 5 steps: rank 0 has other parameters",
        step(update="""
            gradient = bucket.gradient_shard.to(bucket.master.dtype)
            group = self.optimizer.param_groups[bucket.group_index]
            optimizers.update(self.optimizer, group, bucket.master, gradient)
            """)),
    "clipping lasts for ever": Wrong(
        4, "test_trains_with_clipping", r"what step\(\) multiplies them with, gradient_scale, does not hold",
        zero_grad(scale="")),
    "the scale of a batch that is dropped stays": Wrong(
        4, "test_trains_with_clipping", r"and moved rank 0's by 0.0001291. What is still there of the batch before\?",
        zero_grad(forget="if self.reducer.needs_zero_grad:\n    self.gradient_scale = None\n"
                  "self.reducer.forget()", scale="")),
    "clipping ends with step() alone": Wrong(
        4, "test_trains_with_clipping", r"and moved rank 0's by 0.0001291. What is still there of the batch before\?",
        zero_grad(scale="") | step(end=GATHERED + "\nself.gradient_scale = None")),
    "an infinite norm clips nothing": Wrong(
        4, "test_trains_with_clipping", r"the 59 finite gradients move nothing, and 59 of their parameters moved on",
        clip_grad_norm_(scale="if norm.isfinite():\n    self.gradient_scale = precision.clip("
                              "self.gradient_scale, norm, max_norm)")),
    "the norm of its own shards": Wrong(
        4, "test_clips_by_the_global_norm", r"it is the norm of this rank's shards alone",
        clip_grad_norm_(norm=f"{SQUARES}.sqrt()"), 2),
    "norms are added": Wrong(
        4, "test_clips_by_the_global_norm", r"the ranks' norms were added, but their squares must be",
        clip_grad_norm_(norm=f"{SQUARES}.sqrt()\ncollectives.all_reduce(norm, op='sum', group=self.group)"), 2),
    "the norm of all ranks there are": Wrong(
        4, "test_clips_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        clip_grad_norm_(norm="precision.global_norm(gradients, self.gradient_scale)"), hangs=True),
    "the norm is a number": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"returned no tensor on rank 0: .* 0-dim tensor",
        clip_grad_norm_(result="norm.item()")),
    "clips the shards themselves": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients",
        r"changed the gradients in rank 0's shards: it changes self.gradient_scale alone",
        clip_grad_norm_(scale="for gradient in gradients:\n    gradient *= (max_norm / norm).clamp(max=1.0)")),
    "all shards side by side for the norm": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients",
        r"in clip_grad_norm_\(0.1\) rank 0 holds up to 1\d\d.\d kB more than before it, .* are 1\d\d.\d kB",
        clip_grad_norm_(norm="precision.global_norm([torch.cat([gradient.flatten() for gradient in gradients])], "
                             "self.gradient_scale, group=self.group)")),
    "all gradients are scaled first, and then used": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients",
        r"in step\(\), after clip_grad_norm_\(0.1\), rank 0 holds up to 1\d\d.\d kB more .* gradients are 1\d\d.\d kB",
        step(ends=f"""
            self.reduced_gradients()
            if self.gradient_scale is not None:
                scaled = {{bucket: {WIDE} * self.gradient_scale for bucket in self.buckets}}
            """)),
    "scaled gradients stay until the step ends": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients",
        r"in step\(\), after clip_grad_norm_\(0.1\), rank 0 holds up to 1\d\d.\d kB more",
        step(begin="used = []", update=f"""
            if self.gradient_scale is not None:
                used.append({WIDE} * self.gradient_scale)
            {UPDATE}
            """)),
    "the norm of the scaled loss's gradient": Wrong(
        4, "test_trains_with_clipping",
        r"a loss scale, and clipping: clip_grad_norm_ returned [\d.e+]+ on rank 0 .* self.gradient_scale is 1/1024",
        clip_grad_norm_(norm="precision.global_norm(gradients, group=self.group)")),
    "clipping forgets the loss scale": Wrong(
        4, "test_trains_with_clipping", r"fp16, a loss scale, and clipping, 3 steps: rank 0 has other parameters",
        clip_grad_norm_(scale="self.gradient_scale = precision.clip(None, norm, max_norm)")),
    "a tied weight counts twice": Wrong(
        4, "test_trains_with_clipping",
        r"clipping with frozen, tied and unused parameters: clip_grad_norm_ returned .* [Ee]ach element counts once",
        clip_grad_norm_(norm=COUNTED) | {"Stage2.twice": """
            def twice(self):
                found = [param for module in self.model.modules() for param in module._parameters.values()]
                return {param for param in found if sum(param is other for other in found) > 1}
            """}),
    "an overflow is hidden": Wrong(
        4, "test_overflow_on_one_rank_is_everybodys", r"all ranks' reduced_gradients\(\) are finite: it is hid",
        wait(keep="shard.nan_to_num_()" + KEEP)),
    "a branch is not finished": Wrong(
        4, "test_clips_by_the_global_norm",
        r"^rank \d: a branch is not finished: line \d+ in step raises NotImplementedError",
        step(begin="if self.gradient_scale is not None:\n    raise NotImplementedError"), 2),
    "returns the norm after clipping": Wrong(
        4, "test_clips_by_the_global_norm", r"it returned the norm after clipping",
        clip_grad_norm_(result="norm.clamp(max=max_norm)"), 2),
    "small gradients are made larger": Wrong(
        4, "test_clips_by_the_global_norm", r"a smaller norm than max_norm must be left alone",
        clip_grad_norm_(scale="self.gradient_scale = max_norm / (norm + 1e-6)"), 2),
    "the scale is not used": Wrong(
        4, "test_clips_by_the_global_norm", r"moved rank 0's parameters by 1?\d?.\d+, and it must be 0.1",
        step(update="optimizers.update_shard(self.optimizer, bucket)"), 2),
    "each element is clipped": Wrong(
        4, "test_clips_by_the_global_norm", r"clipping scales the gradient that the update uses, all of it alike",
        clip_grad_norm_(scale="for gradient in gradients:\n    gradient.clamp_(-max_norm / 10, max_norm / 10)"), 2),
    "one rank alone skips a step that overflows": Wrong(
        4, "test_overflow_on_one_rank_is_everybodys", r"all ranks must take the step, or none",
        step(begin="""
            if not all(gradient.isfinite().all() for gradient in self.reduced_gradients()):
                return
            """), hangs=True),
}
WRONG |= {  # the same, where the kernel counts
    "P_os in disguise, to the kernel": Wrong(
        1, "test_the_kernel_counts_a_backward", r"rank \d holds up to \d+.\d MB, as the kernel counts", LATE),
    "the whole optimizer state, to the kernel": Wrong(
        2, "test_the_kernel_counts_a_step", r"rank \d holds up to \d+.\d MB, as the kernel counts", WHOLE_STATE),
    "whole gradients between micro-batches, to the kernel": Wrong(
        3, "test_the_kernel_counts_micro_batches", r"rank \d holds up to \d+.\d MB, as the kernel counts",
        {"Stage2.no_sync": "def no_sync(self):\n    return self.reducer.accumulate()"}),
}
WRONG |= {  # what strangers handed in, and had full marks
    "shards go with the step": Wrong(
        2, "test_a_backward_after_step_is_refused", r"step\(\) dropped or changed \d of \d gradient shards on rank 0",
        step(update=f"{UPDATE}\nbucket.gradient_shard = None")),
    "one tensor for all norms": Wrong(
        4, "test_trains_with_clipping", r"and the tensor that it returned holds .* after later calls",
        edited("03_gradients", "Stage2.clip_grad_norm_", ("return norm",
               "self.norm = getattr(self, 'norm', norm)\n    return self.norm.copy_(norm)"))),
    "the bucket where a parameter ends drops its gradient": Wrong(
        3, "test_trains_as_one_process_would", r"(?s)in two buckets, which change places .*`done` says so",
        edited("03_gradients", "Stage2.bucket_complete", (
            "        param.grad = None",
            "        if bucket.flat.offsets[param] + param.numel() <= bucket.start + bucket.padded:\n"
            "            param.grad = None"), ("in done:", "in bucket.params:"))),
    "the user's gradient_scale is changed in place": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"that tensor holds .* on rank 0: make a new one",
        clip_grad_norm_(scale="if self.gradient_scale is None:\n    self.gradient_scale = torch.ones(())\n"
                              "self.gradient_scale *= precision.clip(None, norm, max_norm)")),
    "a scale that is dropped where the norm is small": Wrong(
        4, "test_trains_with_clipping", r"self.gradient_scale was 0.5, as a loss scaler leaves it",
        edited("03_gradients", "Stage2.clip_grad_norm_",
               ("return norm", "if norm <= max_norm:\n        self.gradient_scale = None\n    return norm"))),
    "statistics in training mode alone": Wrong(
        2, "test_running_statistics_are_alike", r"in each step \(here it is called after model.eval\(\)\)",
        edited("03_gradients", "Stage2.step", ("replicas.", "if self.model.training:\n        replicas."))),
    "statistics without the group": Wrong(
        2, "test_a_step_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        edited("03_gradients", "Stage2.step", ("(self.model, self.group)", "(self.model)")), hangs=True),
    "statistics before the gradients are complete": Wrong(
        2, "test_a_rank_without_a_backward_takes_the_step", r"(?s).*here step\(\) is called where no backward ran",
        edited("03_gradients", "Stage2.step", ("self.reduced_gradients()",
               "replicas.broadcast_statistics(self.model, self.group)\n    self.reduced_gradients()")), hangs=True),
    "on one rank alone the second micro-batch takes the place of the first": Wrong(
        3, "test_trains_as_one_process_would", r"two micro-batches a step, without no_sync, on one rank alone, 2 steps",
        edited("03_gradients", "Stage2._wait", (
            "gradient_shard is None:", "gradient_shard is None or self.world_size == 1:"))),
    "leaves out a bucket that has an infinite gradient": Wrong(
        4, "test_overflow_on_one_rank_is_everybodys", r"step\(\) left \d+ of \d+ parameters where they were",
        edited("03_gradients", "Stage2.step", (
            "        optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)",
            "        if bucket.gradient_shard.isfinite().all():\n"
            "            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)"))),
    "clips without the end of backward": Wrong(
        4, "test_trains_with_clipping", r"(?s).*rank 0 alone has run a backward when clip_grad_norm_ is called",
        edited("03_gradients", "Stage2.clip_grad_norm_", (
            "self.reduced_gradients()", "[bucket.gradient_shard for bucket in self.buckets]")), hangs=True),
    "the norm is kept until zero_grad": Wrong(
        4, "test_trains_with_clipping", r"The next clip_grad_norm_ returned 3\.873 on rank 0, and half of it is right",
        clip_grad_norm_(norm="self.__dict__.setdefault('_norm', precision.global_norm(gradients, self.gradient_scale, "
                        "group=self.group)).clone()") | zero_grad(scale="self.gradient_scale = None\n"
                                                                  "self.__dict__.pop('_norm', None)")),
    "each fourth step ends with a barrier": Wrong(
        3, "test_running_statistics_stay_alike", r"rank 0 called barrier \d times in 18 steps",
        edited("03_gradients", "Stage2.step", ("replicas.", "if self.reducer.steps % 4 == 3:\n"
               "        torch.distributed.barrier(self.group)\n    replicas."))),
    "statistics of the first steps alone": Wrong(
        3, "test_running_statistics_stay_alike", r"after step\(\) number \d+ batch norm's running mean is",
        edited("03_gradients", "Stage2.step", ("replicas.", "if self.reducer.steps < 4:\n        replicas."))),
    "what is under way when zero_grad is called is dropped": Wrong(
        3, "test_the_second_step_starts_afresh", r"nobody has waited for 1 collectives",
        edited("03_gradients", "Stage2.zero_grad", ("self._wait()", "self.reducing = None"))),
    "gradients of fp64 are reduced in fp32": Wrong(
        1, "test_gradients_of_16_bits_are_added_in_32", r"gradients of float64: .* rounded to fp32 on the way",
        bucket_complete(reduce=f"""
            narrow = shard.float()
            collectives.reduce_scatter(narrow, whole.float(), op=op, group=self.group)
            shard.copy_(narrow)
            {AT_ONCE}
            """)),
    "clips once a step": Wrong(
        4, "test_trains_with_clipping", r"clip_grad_norm_ was called with 1.0 and then, before step\(\), with 0.5",
        clip_grad_norm_(scale="if not getattr(self, 'clipped', False):\n    self.gradient_scale = precision.clip("
                              "self.gradient_scale, norm, max_norm)\nself.clipped = max_norm == 1.0")),
    "an infinite max_norm ends the scale": Wrong(
        4, "test_trains_with_clipping", r"self.gradient_scale was 0.5, as a loss scaler leaves it",
        edited("03_gradients", "Stage2.clip_grad_norm_", ("return norm", "if max_norm == float('inf'):\n"
               "        self.gradient_scale = None\n    return norm"))),
    "a norm without a limit is the rank's own": Wrong(
        4, "test_trains_with_clipping", r"clip_grad_norm_\(1e6\) returned .* both are the whole gradient's norm",
        clip_grad_norm_(norm="precision.global_norm(gradients, self.gradient_scale, group=self.group, "
                        "sharded=max_norm != float('inf'))")),
    "the norm is taken of whole gradients": Wrong(
        4, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"clip_grad_norm_\(0.1\) sent .* one number",
        norm_of_whole_gradients("03_gradients", "Stage2")),
}

RIGHT = {
    "the parts of these mistakes": bucket_complete() | wait() | step() | zero_grad() | clip_grad_norm_(),
    "smaller buckets, blocking": bucket_complete(
        reduce=f"collectives.reduce_scatter(shard, whole, op=op, group=self.group)\n{AT_ONCE}"
    ) | step(gather="collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group)") | {
        "Stage2.__init__": """
            def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):
                size = bucket_bytes // 3 + 100
                set_up(
                    self, model, optimizer_class, options, group=group, bucket_bytes=size, param_groups=param_groups
                )
                self.reducer, self.reducing = Reducer(self), None
                self.memory = GradientMemory(self.buckets, group)
            """},
}

AT_WHICH = "collectives.reduce_scatter(shard, whole, op='avg', group=self.group, of=bucket, async_op=True)"
UNTOLD = {  # mutants (tests/mutants.py) that keep full marks, since nobody could tell them from the reference
    "Stage2.bucket_complete: `for param in done:` a statement later":
        "what is there for longer meanwhile is the bucket's own shard, and nothing is sent or computed",
    f"Stage2.bucket_complete: `{AT_WHICH}` without op='avg'":
        "reduce_scatter averages if nothing else is said",
    f"Stage2.bucket_complete: `{AT_WHICH}` without of=bucket":
        "a name for messages",
    "Stage2._wait: `bucket, shard = (self.reducing.bucket, self.reducing.shard)` a statement later":
        "self.reducing is the same before and after the wait",
    "Stage2._wait: without `self.memory.give_back(self.reducing.whole)`":
        "nothing else refers to it: it goes with self.reducing = None. Constant buffers need to be told, and no check "
        "of this lesson passes memory=",
    "Stage2._wait: `self.memory.give_back(self.reducing.whole)` a statement later":
        "what comes before it then needs no memory",
    "Stage2._wait: `if bucket.gradient_shard is None:` a statement later":
        "bucket and shard are names of what was in self.reducing",
    "Stage2.step: `collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, "
    "of=bucket, async` without of=bucket":
        "a name for messages",
    "Stage2.step: `self.reduced_gradients()` a statement later":
        "what comes before it then is an empty list",
    "Stage2.step: `replicas.broadcast_statistics(self.model, self.group)` a statement later":
        "the two statements need nothing of each other",
    "Stage2.step: without @torch.no_grad()":
        "nothing in it makes a graph: torch's optimizers turn gradients off themselves, and the rest wants none",
    "Stage2.step: `self.buckets`: all_buckets":
        "stage 3 alone has more in all_buckets: those of frozen parameters",
    "Stage2.zero_grad: `self._wait()` a statement later":
        "forget() looks at nothing that is under way",
    "Stage2.zero_grad: `self.reducer.forget()` a statement later":
        "the two statements need nothing of each other",
    "Stage2.zero_grad: `self.gradient_scale = None` a statement later":
        "the two statements need nothing of each other",
    "Stage2.zero_grad: `for bucket in self.buckets:` a statement later":
        "the two loops need nothing of each other",
    "Stage2.clip_grad_norm_: without @torch.no_grad()":
        "gradient shards want no gradient, so nothing in it makes a graph",
    "Stage2.step: `for pending in gathering:` a statement later":
        "statistics are no parameters: who sends them first has both when step() ends",
    "Stage2.zero_grad: `self.buckets`: all_buckets":
        "stage 3 alone has more in all_buckets: those of frozen parameters",
}
