"""Lesson 2: what goes wrong with P_os.

Each of the first functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function, norm_of_whole_gradients


def own(gradients="bucket.whole_gradients()", parameters="shard_of(bucket.parameters, *mine)",
        shard="shard_of(bucket.gradients, *mine)"):
    return {"Stage1.own": function(
        "def own(self, bucket):", "mine = self.rank, self.world_size", f"bucket.gradients = {gradients}",
        f"bucket.parameter_shard = {parameters}", f"bucket.gradient_shard = {shard}")}


def padded_size(*lines):
    return {"padded_size": function("def padded_size(elements, world_size):", *lines)}


def shard_of(*lines):
    return {"shard_of": function("def shard_of(whole, rank, world_size):", *lines)}


def over_shards(begin="", group="{**group, 'params': params}", params="bucket.master", which="== index",
                end="return optimizer_class(shards, **options)"):
    loop = function("for index, group in enumerate(groups):",
                    f"params = [{params} for bucket in buckets if bucket.group_index {which}]",
                    f"shards.append({group})")
    return {"over_shards": function("def over_shards(optimizer_class, options, groups, buckets):", begin, "shards = []",
                                    loop, end)}


REDUCE = "pending = collectives.reduce_scatter(part, bucket.gradients, op=op, group=self.group, async_op=True)"
AT_ONCE = "pending = collectives.Work([])"


def bucket_complete(zero="bucket.zero_missing()", op="avg", reduce=REDUCE, wait="self._wait()",
                    end="self.reducing = pending"):
    return {"Stage1.bucket_complete": function(
        "def bucket_complete(self, bucket, done):", zero, f"part, op = bucket.gradient_shard, '{op}'", reduce, wait,
        end)}


UPDATE = "update(optimizer, group, bucket.master, gradient)"
ROUND = """
if bucket.master.dtype != bucket.dtype:
    bucket.parameter_shard.copy_(bucket.master.data)
"""


def update_shard(gradient="bucket.gradient_shard.to(bucket.master.dtype)",
                 scale="if gradient_scale is not None:\n    gradient = gradient * gradient_scale",
                 group="optimizer.param_groups[bucket.group_index]", update=UPDATE, end=ROUND):
    return {"update_shard": "@changes_parameters\n" + function(
        "def update_shard(optimizer, bucket, gradient_scale=None):", f"gradient = {gradient}", scale,
        f"group = {group}", update, end)}


GATHER = """
whole, own = bucket.parameters, bucket.parameter_shard
gathering.append(collectives.all_gather(whole, own, group=self.group, async_op=True))
"""


def step(ends="self.reduced_gradients()", begin="",
         update="update_shard(self.optimizer, bucket, self.gradient_scale)", gather=GATHER,
         end="for pending in gathering:\n    pending.wait()", statistics="replicas.broadcast_statistics(self.model, "
         "self.group)", spent="self.reducer.needs_zero_grad = True"):
    loop = function("for bucket in self.buckets:", update, gather)
    return {"Stage1.step": "@torch.no_grad()\n" + function(
        "def step(self):", ends, begin, "gathering = []", loop, end, statistics, spent)}


def master_of(*lines):
    return {"master_of": function("def master_of(shard):", *lines)}


SQUARES = "squares = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()"
SUM = "if sharded:\n    collectives.all_reduce(squares, op='sum', group=group)"


def global_norm(squares=SQUARES, sum_=SUM, norm="norm = squares.sqrt()",
                end="return norm if gradient_scale is None else norm * gradient_scale"):
    return {"global_norm": function(
        "def global_norm(gradients, gradient_scale=None, *, sharded=True, group=None):", squares, sum_, norm, end)}


def clip_grad_norm_(norm="global_norm(gradients, self.gradient_scale, group=self.group)",
                    scale="self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)", result="norm"):
    return {"Stage1.clip_grad_norm_": "@torch.no_grad()\n" + function(
        "def clip_grad_norm_(self, max_norm):", "gradients = self.reduced_gradients()", f"norm = {norm}", scale,
        f"return {result}")}


# ------------------------------------------------------------------------------------------------------ larger mistakes

# data parallelism with an optimizer for everything: the numbers are right
UNSHARDED = own(parameters="bucket.parameters", shard="bucket.gradients") | bucket_complete(reduce="""
    pending = collectives.all_reduce(part, op=op, group=self.group, async_op=True)
    """) | step(gather="")
# the optimizer has the shards to show, and what works are momentum and variance of everything
IN_DISGUISE = bucket_complete(reduce="""
    pending = collectives.all_reduce(bucket.gradients, op=op, group=self.group, async_op=True)
    """) | step(begin="""
    if not hasattr(self, "whole"):
        self.whole = [torch.nn.Parameter(bucket.parameters) for bucket in self.buckets]
        self.real = type(self.optimizer)(self.whole, lr=1e-3)
    for param, bucket in zip(self.whole, self.buckets):
        param.grad = bucket.gradients.clone()
    self.real.step()
    for param in self.whole:
        param.grad = None
    """, update="pass", gather="")
# state for the whole bucket, made lazily, of which the shard is used
SLICED = step(begin="""
    for bucket in self.buckets:
        if not self.optimizer.state[bucket.master]:
            start = lambda: shard_of(torch.zeros(bucket.padded), self.rank, self.world_size)
            self.optimizer.state[bucket.master] = {
                "step": torch.zeros(()), "exp_avg": start(), "exp_avg_sq": start()}
    """)
# whole parameters have owners: the one that comes next goes to the rank with the least so far
OWNERS = over_shards(begin="""
    import torch.distributed as dist
    rank, load, owner = dist.get_rank(), [0] * dist.get_world_size(), {}
    for param in sorted((param for group in groups for param in group["params"]), key=lambda param: -param.numel()):
        owner[param] = load.index(min(load))
        load[owner[param]] += param.numel()
    """, params="torch.nn.Parameter(param.data)", which="== index for param in group['params'] if owner[param] == rank "
    "and bucket is next(one for one in buckets if any(param is other for other in one.params))")
SHIFTED = """
whole, own = torch.empty_like(bucket.parameters), bucket.parameter_shard.clone()
collectives.all_gather(whole, own, group=self.group)
bucket.parameters.copy_(whole.roll(16))
"""
# a buffer of its own, into which values are copied: what is not copied holds what lay in memory
GARBAGE = {"Stage1.own": """
    def own(self, bucket):
        bucket.gradients = bucket.whole_gradients()
        mine = shard_of(bucket.parameters, self.rank, self.world_size)
        bucket.parameter_shard = torch.empty_like(mine)
        bucket.parameter_shard[mine != 0] = mine[mine != 0]
        bucket.gradient_shard = shard_of(bucket.gradients, self.rank, self.world_size)
    """}
ALL_REDUCE = """
collectives.all_reduce(bucket.gradients, op=op, group=self.group)
pending = collectives.Work([])
"""

WRONG = {
    "an optimizer for everything on each rank": Wrong(
        1, "test_each_rank_optimizes_its_part",
        r"rank 0 was given all \d+ elements of the model: .*so no loss will tell", UNSHARDED, 2),
    "one parameter group for all": Wrong(
        1, "test_groups_stay_groups", r"the user's optimizer has 4 parameter groups, and zero.optimizer has 1 on",
        over_shards(end="return optimizer_class([bucket.master for bucket in buckets], **options)")),
    "groups lose what the user set": Wrong(
        1, "test_groups_stay_groups", r"on rank 0 group 0 of zero.optimizer has weight_decay=0.1, and the user gave "
        r"weight_decay=0.5", over_shards(group="{'params': params}")),
    "groups keep the options that it thought of": Wrong(
        1, "test_groups_stay_groups", r"on rank 0 group \d of zero.optimizer has \w+=.*, and the user gave \w+=",
        over_shards(group="{name: group[name] for name in KNOWN if name in group} | {'params': params}",
                    begin="KNOWN = 'lr', 'betas', 'eps', 'weight_decay', 'momentum'")),
    "the user's options without maximize": Wrong(
        1, "test_groups_stay_groups", r"group 1 of zero.optimizer has maximize=False, and the user gave maximize=True",
        over_shards(begin="options = {name: options[name] for name in options if name != 'maximize'}")),
    "a group in which all is frozen is left out": Wrong(
        1, "test_groups_stay_groups", r"has 4 parameter groups, and zero.optimizer has 2 on rank 0: .* all frozen",
        over_shards(end="return optimizer_class([group for group in shards if group['params']], **options)")),
    "groups of the same options become one": Wrong(
        1, "test_groups_stay_groups", r"has 4 parameter groups, and zero.optimizer has 2 on rank 0: .* like another",
        over_shards(end="""
            merged = {}
            for group in shards:
                own = repr([(name, value) for name, value in group.items() if name != "params"])
                merged.setdefault(own, {**group, "params": []})["params"] += group["params"]
            return optimizer_class([*merged.values()], **options)
            """)),
    "groups in which all is frozen come last": Wrong(
        1, "test_groups_stay_groups", r"group 1 of zero.optimizer holds \d+ elements on all ranks .* frozen parameters",
        over_shards(end="return optimizer_class(sorted(shards, key=lambda group: not group['params']), **options)")),
    "groups without nesterov": Wrong(
        1, "test_groups_stay_groups", r"group 0 of zero.optimizer has nesterov=nothing, and the user gave .*=True",
        over_shards(group="{**{name: group[name] for name in group if name != 'nesterov'}, 'params': params}")),
    "groups without capturable": Wrong(
        1, "test_groups_stay_groups", r"group 1 of zero.optimizer has capturable=False, and .* gave capturable=None",
        over_shards(group="{**{name: group[name] for name in group if name != 'capturable'}, 'params': params}")),
    "the user's options without nesterov": Wrong(
        1, "test_groups_stay_groups", r"group 0 of zero.optimizer has nesterov=False, and the user gave nesterov=True",
        over_shards(begin="options = {name: options[name] for name in options if name != 'nesterov'}")),
    "the user's options without capturable": Wrong(
        1, "test_groups_stay_groups", r"group 0 of zero.optimizer has capturable=False, and .* gave capturable=None",
        over_shards(begin="options = {name: options[name] for name in options if name != 'capturable'}")),
    "the options of torch's AdamW alone": Wrong(
        1, "test_groups_stay_groups", r"zero.optimizer has warmth=1.0, and the user gave warmth=0.5",
        over_shards(begin="KNOWN = torch.optim.AdamW([torch.zeros(1)]).defaults",
                    end="return optimizer_class(shards, **{name: options[name] for name in options if name in KNOWN})"
                    )),
    "of the user's options only the ones that it thought of": Wrong(
        1, "test_groups_stay_groups", r"zero.optimizer has foreach=None, and the user gave foreach=False",
        over_shards(end="return optimizer_class(shards, **{name: options[name] for name in options if name in KNOWN})",
                    begin="KNOWN = 'lr', 'betas', 'eps', 'weight_decay', 'momentum'")),
    "padding to 4096 elements a rank": Wrong(
        1, "test_each_rank_optimizes_its_part", r"padded_size\(32, 2\) is 8192: the smallest",
        padded_size("return -(-elements // (4096 * world_size)) * 4096 * world_size"), 2),
    "the groups' shards are mixed up": Wrong(
        1, "test_groups_stay_groups", r"of all (3 )?ranks together (must )?hold .* group 0 \(matrices, which decay",
        over_shards(which="== len(groups) - 1 - index")),
    "cut by parameters, not by elements": Wrong(
        1, "test_each_rank_optimizes_its_part", r"rank 0 has \d+ of the \d+ elements of the model.*cut by elements",
        OWNERS, 2),
    "every rank has the first part": Wrong(
        1, "test_each_rank_optimizes_its_part", r"the optimizers of rank 0 and rank 1 hold the same elements",
        shard_of("return whole.view(world_size, -1)[0]"), 2),
    "floor division drops the tail": Wrong(
        1, "test_each_rank_optimizes_its_part", r"padded_size\(\d+, 3\) is \d+: it must be a multiple of 3, and not",
        padded_size("return elements // (16 * world_size) * 16 * world_size")),
    "parts of floor(size / N), the rest is nobody's": Wrong(
        1, "test_each_rank_optimizes_its_part", r"each element of the model once: \d+ of \d+ elements are on no",
        shard_of("part = (whole.numel() - 1) // world_size", "return whole[rank * part :][:part]"), 3),
    "the padding holds what lay in memory": Wrong(
        1, "test_each_rank_optimizes_its_part", r"holds NaN: memory that nobody wrote to \(torch.empty", GARBAGE, 2),
    "shards are copies": Wrong(
        1, "test_nothing_is_copied_at_the_start", r"rank 0 holds \d+\.\d bytes a parameter when the stage is made",
        shard_of("return whole.view(world_size, -1)[rank].clone()")),
    "the last reduction is never waited for": Wrong(
        2, "test_shards_hold_the_mean_gradient", r"nobody waited for|NaN|are on no rank",
        {"Stage1.backward_ends": "def backward_ends(self):\n    pass"}, 2, True),
    "the sum instead of the mean": Wrong(
        2, "test_shards_hold_the_mean_gradient", r"the sum of the ranks' gradients, not their mean: 3 times too large",
        bucket_complete(op="sum"), 3),
    "nothing is reduced": Wrong(
        2, "test_shards_hold_the_mean_gradient",
        r"rank 0's shard holds its own gradient: the other ranks' parts were", bucket_complete(reduce=AT_ONCE), 2),
    "reduced into the first shard": Wrong(
        2, "test_shards_hold_the_mean_gradient", r"rank \d's shard holds its own|the same gradient shard|on no rank",
        bucket_complete(reduce=REDUCE.replace("(part,", "(bucket.gradients[: len(part)],")), 2),
    "a missing gradient is what memory held": Wrong(
        2, "test_a_missing_gradient_is_zero", r"not the mean gradient of the second step, .* whatever their memory",
        bucket_complete(zero="")),
    "a bucket without gradient is skipped": Wrong(
        2, "test_a_missing_gradient_is_zero", r"(?s)one parameter got a gradient on rank 0 alone|not the mean gradient",
        bucket_complete(zero="if all(param.grad is None for param in bucket.params):\n    return"), hangs=True),
    "an all-reduce, and the shard of it": Wrong(
        2, "test_backward_sends_a_reduce_scatter", r"An all-reduce sends twice what a reduce-scatter does",
        bucket_complete(reduce=ALL_REDUCE)),
    "reduces over all ranks there are": Wrong(
        2, "test_backward_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        bucket_complete(reduce=REDUCE.replace("group=self.group, ", "")), hangs=True),
    "a second backward forgets the first": Wrong(
        2, "test_micro_batches_add_up", r"without no_sync\(\), .*They hold the last micro-batch's gradient alone",
        {"Stage1.backward_begins": "def backward_begins(self):\n    pass"}),
    "a second backward averages the mean again": Wrong(
        2, "test_micro_batches_add_up", r"not the mean gradient, summed over two micro-batches without no_sync\(\)",
        {"Stage1.backward_begins": """
            def backward_begins(self):
                if self.reducer.reduced:
                    for bucket in self.buckets:
                        bucket.show_gradients()
            """}),
    "every micro-batch is sent": Wrong(
        2, "test_micro_batches_add_up", r"rank 0 sent \d+.\d kB under no_sync\(\): .* stage 1 reduces once",
        {"Stage1.no_sync": "def no_sync(self):\n    return contextmanager(lambda: iter([None]))()"}),
    "no all-gather after the update": Wrong(
        3, "test_every_rank_has_all_updated_parameters", r"parameters differ from rank 0's", step(gather=""), 2),
    "gathers before the update": Wrong(
        3, "test_every_rank_has_all_updated_parameters", r"parameters differ from rank 0's.*after the update",
        step(update=GATHER, gather="pending = gathering[-1].wait()\nupdate_shard(self.optimizer, bucket, "
             "self.gradient_scale)", end=""), 2),
    "the gather shifts what it brings, alike on all ranks": Wrong(
        3, "test_every_rank_has_all_updated_parameters",
        r"rank 0 has new parameters in wrong places: .* holds what belongs to", step(gather=SHIFTED), 3),
    "the optimizer updates memory that nobody reads": Wrong(
        3, "test_every_rank_has_all_updated_parameters", r"step\(\) changed no parameter on any rank",
        update_shard(update="copy = nn.Parameter(bucket.master.detach().clone())\n"
                     "update(optimizer, group, copy, gradient)"), 2),
    "all shards step once for each bucket": Wrong(
        3, "test_every_rank_has_all_updated_parameters",
        r"Many moved \d to \d+ times too far: was a shard updated more than once",
        update_shard(update="""
            bucket.master.grad = gradient
            optimizer.step()
            """), 2),
    "the new master stays beside the parameters": Wrong(
        3, "test_every_rank_has_all_updated_parameters", r"leads to 0.5, and rank 0 has 1 to 1: .* rounded into",
        update_shard(end=""), 2),
    "does not wait for the last gather": Wrong(
        3, "test_every_rank_has_all_updated_parameters", r"differ from rank 0's|NaN|nobody waited for",
        step(end=""), 2, True),
    "waits for the last gather alone": Wrong(
        3, "test_every_rank_has_all_updated_parameters", r"\d+ collectives had begun that nobody waited",
        step(end="gathering[-1].wait()"), 2),
    "all momentum and variance, beside the shard's": Wrong(
        3, "test_optimizer_state_is_a_shard", r"after the first step of AdamW rank 0 of 4 holds 1\d\.\d bytes a .*10",
        IN_DISGUISE),
    "state for whole buckets, of which a slice is used": Wrong(
        3, "test_optimizer_state_is_a_shard",
        r"after the first step rank 0 of 4 holds \d+\.\d kB of Adam's momentum and variance", SLICED),
    "an all-reduce, then an all-gather": Wrong(
        3, "test_a_step_sends_as_much_as_data_parallelism",
        r"sent \d+.\d kB in a whole step, 3.\dΨ\(N−1\)/N, .*an all-gather of parameters make 3",
        bucket_complete(reduce=ALL_REDUCE)),
    "parameters are sent to all, as if reduced": Wrong(
        3, "test_a_step_sends_as_much_as_data_parallelism", r"in a whole step, 3.\dΨ\(N−1\)/N",
        step(gather="""
            mine = bucket.parameter_shard.clone()
            bucket.parameters.zero_()
            bucket.parameter_shard.copy_(mine)
            collectives.all_reduce(bucket.parameters, op="sum", group=self.group)
            """)),
    "all shards use the first group": Wrong(
        3, "test_a_step_is_the_optimizers", r"(?s)two parameter groups, 1 step: rank 0 has other parameters",
        update_shard(group="{**optimizer.param_groups[0]}")),
    "the optimizer forgets": Wrong(
        3, "test_trains_as_one_process_would",
        r"(?s)SGD with momentum, 3 steps: rank 0 has .* must be .*an optimizer whose state .* is empty in each step",
        step(begin="self.optimizer.state.clear()")),
    "the optimizer that steps is not the one that schedulers see": Wrong(
        3, "test_trains_as_one_process_would", r"(?s)a scheduler of the learning rate, 5 steps: .*learning rate of the",
        over_shards(end="""
            hidden.append(optimizer_class([{**entry} for entry in shards], **options))
            return optimizer_class(shards, **options)
            """) | update_shard(group="hidden[-1].param_groups[bucket.group_index]",
                                update="update(hidden[-1], group, bucket.master, gradient)"), top="hidden = []\n"),
    "gathers from all ranks there are": Wrong(
        3, "test_a_step_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        step(gather=GATHER.replace("group=self.group, ", "")), hangs=True),
    "backward is not ended where none ran": Wrong(
        3, "test_a_rank_without_a_backward_takes_the_step",
        r"(?s)To look at: here step\(\) is called where no backward ran.* \(self.reduced_gradients\(\)\)",
        step(ends=""), hangs=True),
    "running statistics stay each rank's own": Wrong(
        3, "test_running_statistics_are_alike", r"running mean is .* on rank 1 and .* on rank 0: each rank has that of",
        step(statistics="")),
    "running statistics are sent in the first step only": Wrong(
        3, "test_running_statistics_are_alike", r"step\(\) number 2 batch norm's running mean is .* on rank 1",
        step(statistics="if not self.reducer.steps:\n    replicas.broadcast_statistics(self.model, self.group)")),
    "running means are sent, and variances are not": Wrong(
        3, "test_running_statistics_are_alike", r"step\(\) number 1 batch norm's running var is .* on rank 1",
        step(statistics="""
            for name, buffer in self.model.named_buffers():
                if "mean" in name:
                    collectives.broadcast(buffer, group=self.group)
            """)),
    "statistics that are whole numbers are not sent": Wrong(
        3, "test_running_statistics_are_alike", r"batch norm's num batches tracked is 2, … on rank 1 and 1, … of the",
        step(statistics="""
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    collectives.broadcast(buffer, group=self.group)
            """)),
    "the ranks' mean of running statistics": Wrong(
        3, "test_running_statistics_are_alike", r"step\(\) number 1 batch norm's running mean is .* on rank 0 and",
        step(statistics="""
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    collectives.all_reduce(buffer, op="avg", group=self.group)
            """)),
    "gradients are used twice without a word": Wrong(
        3, "test_a_backward_after_step_is_refused", r"must be an error: set self.reducer.needs_zero_grad in step\(\)",
        step(spent="")),
    "no master: the optimizer updates bf16": Wrong(
        4, "test_small_steps_in_bf16_add_up", r"25 steps of 0.0015 .* rank 0 has [\d.]+ to 1: each is too small",
        master_of("return nn.Parameter(shard)")),
    "the master is given a gradient in bf16": Wrong(
        4, "test_small_steps_in_bf16_add_up",
        r"(?s)it raised RuntimeError: .*dtype.*what it is updated with must be in",
        update_shard(gradient="bucket.gradient_shard")),
    "the master is made anew from the rounded parameter": Wrong(
        4, "test_small_steps_in_bf16_add_up", r"25 steps of 0.0015 .* rank 0 has [\d.]+ to 1: each is too small",
        update_shard(end=ROUND + "bucket.master.data.copy_(bucket.parameter_shard)")),
    "the master is never rounded into the parameters": Wrong(
        4, "test_trains_in_16_bits", r"bf16, 5 steps: rank 0 has other parameters", update_shard(end="")),
    "the optimizer shows the parameters, and masters are updated beside it": Wrong(
        4, "test_masters_are_shards", r"in zero.optimizer's groups lie tensors of torch.bfloat16 on rank 0",
        over_shards(params="bucket.parameter_shard")),
    "masters for everything": Wrong(
        4, "test_masters_are_shards", r"after the first step of AdamW rank 0 of 4 holds \d+\.\d bytes a par.* in bf16",
        step(begin="self.masters = [bucket.parameters.float() for bucket in self.buckets]")),
    "masters are gathered": Wrong(
        4, "test_parameters_travel_in_16_bits",
        r"rank 0 of 3 sent \d+.\d kB in step\(\), .* not their fp32 masters", step(gather="""
            whole = bucket.parameters.float()
            own = bucket.master.data
            collectives.all_gather(whole, own, group=self.group)
            bucket.parameters.copy_(whole)
            """)),
    "the first parameter's dtype says whether masters are rounded": Wrong(
        4, "test_small_steps_in_bf16_add_up", r"lead to 0.9609 in bf16, and rank 0 has 0.96\d+ to 1: each",
        edited("02_optimizer_state", "update_shard", ("bucket.parameter_shard.copy_(bucket.master.data)", "pass"))
        | edited("02_optimizer_state", "Stage1.step", ("        gathering.append(", """
        if next(self.model.parameters()).dtype != torch.float32:
            bucket.parameter_shard.copy_(bucket.master.data)
        gathering.append(""".lstrip("\n")))),
    "all gradients become fp32 at once": Wrong(
        4, "test_masters_are_shards", r"in step\(\) rank 0 of 4 holds up to .* A bucket's shard has 8.2 kB in fp32",
        edited("02_optimizer_state", "Stage1.step", (
            "    gathering = []\n", "    gathering = []\n"
            "    self.wide = [bucket.gradient_shard.float() for bucket in self.buckets]\n"),
            ("    replicas", "    self.wide = None\n    replicas"))),
    "the loss scale is undone in fp16": Wrong(
        4, "test_the_scale_is_applied_in_fp32", r"must subtract 2\^-6 from 1: rank 0 has 1. The product is 2\^-26",
        update_shard(gradient="bucket.gradient_shard * (1.0 if gradient_scale is None else gradient_scale)",
                     scale="gradient = gradient.to(bucket.master.dtype)")),
    "the sum in 16 bits, divided afterwards": Wrong(
        4, "test_gradients_of_16_bits_are_added_in_32",
        r"gradients of float16: some are 60000 .* hold inf in place of the mean: their sum is too large",
        bucket_complete(op="sum", end="self.reducing = pending, part")
        | {"Stage1._wait": function("def _wait(self):", function(
            "if self.reducing:", "pending, part = self.reducing", "pending.wait()", "part.div_(self.world_size)",
            "self.reducing = None"))}),
    "divided first, and added afterwards": Wrong(
        4, "test_gradients_of_16_bits_are_added_in_32", r"divided by N is zero: divide after the sum",
        bucket_complete(zero="bucket.zero_missing()\nbucket.gradients.div_(self.world_size)", op="sum")),
    "what was reduced is lost in a micro-batch under no_sync()": Wrong(
        2, "test_micro_batches_add_up", r"the second one under no_sync\(\): what was reduced before",
        edited("02_optimizer_state", "Stage1.backward_begins", (
            "if self.reducer.reduced", "if self.reducer.reduced and not self.reducer.accumulating"))),
    "the norm in the gradients' own 16 bits": Wrong(
        5, "test_clips_by_the_global_norm", r"and rank 0 returned inf. A dtype of 16 bits has no room for it",
        global_norm(squares="squares = torch.stack([each.norm() for each in gradients]).float().square().sum()"), 2),
    "the scale goes into 16 bits before the norm": Wrong(
        5, "test_clips_by_the_global_norm", r"a gradient_scale of 1e-12 .* rank 0 returned 0\. torch.float16 loses",
        global_norm(squares="if gradient_scale:\n    gradients = [each * gradient_scale for each in gradients]\n"
                    f"{SQUARES}", end="return norm"), 2),
    "the norm of its own shards": Wrong(
        5, "test_clips_by_the_global_norm", r"it is the norm of this rank's shards alone", global_norm(sum_=""), 2),
    "norms are added": Wrong(
        5, "test_clips_by_the_global_norm", r"the ranks' norms were added, but their squares must be",
        global_norm(sum_="squares = squares.sqrt()\n" + SUM, norm="norm = squares"), 2),
    "returns the norm after clipping": Wrong(
        5, "test_clips_by_the_global_norm", r"it returned the norm after clipping",
        clip_grad_norm_(result="norm.clamp(max=max_norm)"), 2),
    "small gradients are made larger": Wrong(
        5, "test_clips_by_the_global_norm", r"a smaller norm than max_norm must be left alone",
        clip_grad_norm_(scale="self.gradient_scale = max_norm / (norm + 1e-6)"), 2),
    "the norm is a number": Wrong(
        5, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"returned no tensor on rank 0: .* 0-dim tensor",
        clip_grad_norm_(result="norm.item()")),
    "clips the shards themselves": Wrong(
        5, "test_clipping_returns_a_tensor_and_leaves_the_gradients",
        r"changed the gradients in rank 0's shards: it changes self.gradient_scale alone",
        clip_grad_norm_(scale="for gradient in gradients:\n    gradient *= (max_norm / norm).clamp(max=1.0)")),
    "the scale goes into the shard": Wrong(
        5, "test_clipping_returns_a_tensor_and_leaves_the_gradients",
        r"step\(\) changed the gradients in rank 0's shards, after clip_grad_norm_\(0.1\)",
        update_shard(scale="if gradient_scale is not None:\n    gradient.mul_(gradient_scale)")),
    "the norm of all ranks there are": Wrong(
        5, "test_clips_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        global_norm(sum_=SUM.replace(", group=group", "")), hangs=True),
    "squares of fp16 in fp16": Wrong(
        5, "test_trains_with_clipping", r"returned inf on rank 0 .* squares are too large for fp16, .* in fp32",
        global_norm(squares=SQUARES.replace(".float()", ""))),
    "the norm of the scaled loss's gradient": Wrong(
        5, "test_trains_with_clipping",
        r"a loss scale, and clipping: clip_grad_norm_ returned [\d.e+]+ on rank 0 .* self.gradient_scale is 1/1024",
        clip_grad_norm_(norm="global_norm(gradients, group=self.group)")),
    "the user's gradient_scale is changed in place": Wrong(
        5, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"that tensor holds .* on rank 0: make a new one",
        clip_grad_norm_(scale="if self.gradient_scale is None:\n    self.gradient_scale = torch.ones(())\n"
                              "self.gradient_scale *= precision.clip(None, norm, max_norm)")),
    "an infinite norm clips nothing": Wrong(
        5, "test_trains_with_clipping", r"the 59 finite gradients move nothing, and 59 of their parameters moved on",
        clip_grad_norm_(scale="if norm.isfinite():\n    self.gradient_scale = precision.clip("
                              "self.gradient_scale, norm, max_norm)")),
    "clipping forgets the loss scale": Wrong(
        5, "test_trains_with_clipping", r"fp16, a loss scale, and clipping, 3 steps: rank 0 has other parameters",
        clip_grad_norm_(scale="self.gradient_scale = precision.clip(None, norm, max_norm)")),
}
WRONG |= {  # the same, where the kernel counts
    "nothing is sent, to the kernel": Wrong(
        2, "test_the_kernel_counts_a_backward", r"squares of all gradient shards add up to", bucket_complete(
            reduce=AT_ONCE)),
    "all reductions are under way until backward ends, to the kernel": Wrong(
        2, "test_the_kernel_counts_a_backward", r"as the kernel counts, .* many reductions are under way at a time",
        bucket_complete(wait="", end="self.all = [*getattr(self, 'all', []), pending]") | {"Stage1.backward_ends": """
            def backward_ends(self):
                while self.all:
                    self.all.pop(0).wait()
                for param in self.model.parameters():
                    param.grad = None
            """}),
    "the whole optimizer state, to the kernel": Wrong(
        3, "test_the_kernel_counts_a_step", r"rank \d holds up to \d+.\d MB, as the kernel counts", IN_DISGUISE),
}
WRONG |= {  # what strangers handed in, and had full marks
    "a multiple is rounded up, too": Wrong(
        1, "test_each_rank_optimizes_its_part", r"padded_size\(32, 2\) is 64: the smallest .* is 32",
        padded_size("return (elements // (16 * world_size) + 1) * 16 * world_size"), 2),
    "padded to a multiple of 16 and of N": Wrong(
        1, "test_each_rank_optimizes_its_part", r"padded_size\(33, 2\) is 48: the smallest .* is 64",
        padded_size("import math", "return -(-elements // math.lcm(16, world_size)) * math.lcm(16, world_size)"), 2),
    "room for scaled gradients stays": Wrong(
        3, "test_optimizer_state_is_a_shard", r"after the first step .* \(gradient_scale is 0.5 here\)",
        update_shard(scale="if gradient_scale is not None:\n    gradient = gradient * gradient_scale\n"
                           "    bucket.scaled = gradient")),
    "a scale of 0 is none": Wrong(
        5, "test_clips_by_the_global_norm", r"with a gradient_scale of 0 the norm is 0, and rank 0 returned",
        global_norm(end="return norm * (gradient_scale or 1.0)")),
    "zeros are written when the bucket has left": Wrong(
        2, "test_a_missing_gradient_is_zero", r"whatever their memory held before",
        edited("02_optimizer_state", "Stage1.bucket_complete", (
            "    bucket.zero_missing()\n", ""), ("    self.reducing", "    bucket.zero_missing()\n    self.reducing"))),
    "one tensor for all norms": Wrong(
        5, "test_trains_with_clipping", r"and the tensor that it returned holds .* after later calls",
        edited("02_optimizer_state", "Stage1.clip_grad_norm_", ("return norm",
               "self.norm = getattr(self, 'norm', norm)\n    return self.norm.copy_(norm)"))),
    "a scale that is dropped where the norm is small": Wrong(
        5, "test_trains_with_clipping", r"self.gradient_scale was 0.5, as a loss scaler leaves it",
        edited("02_optimizer_state", "Stage1.clip_grad_norm_",
               ("return norm", "if norm <= max_norm:\n        self.gradient_scale = None\n    return norm"))),
    "statistics in training mode alone": Wrong(
        3, "test_running_statistics_are_alike", r"in each step \(here it is called after model.eval\(\)\)",
        edited("02_optimizer_state", "Stage1.step", ("replicas.", "if self.model.training:\n        replicas."))),
    "statistics without the group": Wrong(
        3, "test_a_step_in_a_group", r"(?s).*here group= is a group of ranks 0 and 2 of three",
        edited("02_optimizer_state", "Stage1.step", ("(self.model, self.group)", "(self.model)")), hangs=True),
    "statistics before the gradients are complete": Wrong(
        3, "test_a_rank_without_a_backward_takes_the_step", r"(?s).*here step\(\) is called where no backward ran",
        edited("02_optimizer_state", "Stage1.step", ("self.reduced_gradients()",
               "replicas.broadcast_statistics(self.model, self.group)\n    self.reduced_gradients()")), hangs=True),
    "a norm over all ranks where nothing is sharded": Wrong(
        5, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"global_norm\(…, sharded=False\) of four",
        edited("02_optimizer_state", "global_norm", ("if sharded:", "if True:")), 2),
    "one rank alone has nothing to do with a bucket": Wrong(
        3, "test_trains_as_one_process_would", r"layers that are left out in turn, on one rank alone, \d steps: rank 0",
        edited("02_optimizer_state", "Stage1.bucket_complete", (
            "    bucket.zero_missing()", "    if self.world_size == 1:\n        return\n    bucket.zero_missing()"))),
    "a last group in which there is nothing goes": Wrong(
        1, "test_groups_stay_groups", r"the user's optimizer has 4 parameter groups, and zero.optimizer has 3",
        edited("02_optimizer_state", "over_shards", (
            "    return", "    while not shards[-1]['params']:\n        shards.pop()\n    return"))),
    "every gradient becomes fp32": Wrong(
        3, "test_trains_as_one_process_would", r"it raised RuntimeError|fp64, 2 steps: rank 0 has other parameters",
        edited("02_optimizer_state", "update_shard", (".to(bucket.master.dtype)", ".float()"))),
    "clips without the end of backward": Wrong(
        5, "test_trains_with_clipping", r"(?s).*rank 0 alone has run a backward when clip_grad_norm_ is called",
        edited("02_optimizer_state", "Stage1.clip_grad_norm_", (
            "self.reduced_gradients()", "[bucket.gradient_shard for bucket in self.buckets]")), hangs=True),
    "the norm is taken of whole gradients": Wrong(
        5, "test_clipping_returns_a_tensor_and_leaves_the_gradients", r"clip_grad_norm_\(0.1\) sent .* one number",
        norm_of_whole_gradients("02_optimizer_state", "Stage1")),
    "edits of parameters in 16 bits are lost": Wrong(
        4, "test_small_steps_in_bf16_add_up", r"all parameters were set to 2, .* the master goes on from before",
        {"update_shard": update_shard()["update_shard"].removeprefix("@changes_parameters\n")}),
}

RIGHT = {
    "the parts of these mistakes": own() | padded_size(
        "return elements + -elements % (16 * world_size)"
    ) | shard_of("return whole.chunk(world_size)[rank]") | over_shards() | bucket_complete() | update_shard()
    | step() | master_of("return nn.Parameter(shard.detach().clone().float())") | global_norm() | clip_grad_norm_(),
    "blocking": bucket_complete(reduce=REDUCE.replace(", async_op=True", "").replace("pending = ", ""), end="") | step(
        gather="collectives.all_gather(bucket.parameters, bucket.parameter_shard.clone(), group=self.group)", end=""),
}

UNTOLD = {  # mutants (tests/mutants.py) that keep full marks, since nobody could tell them from the reference
    "Stage1.own: `bucket.gradients = bucket.whole_gradients()` a statement later":
        "the two statements need nothing of each other",
    "Stage1.own: `bucket.parameter_shard = shard_of(bucket.parameters, *mine)` a statement later":
        "the two statements need nothing of each other",
    "Stage1.bucket_complete: `pending = collectives.reduce_scatter(bucket.gradient_shard, "
    "bucket.gradients, op='avg', group=self.g` a statement later":
        "only whether communication and computation overlap, which is not graded, changes",
    "Stage1.bucket_complete: `self._wait()` a statement later":
        "only whether communication and computation overlap, which is not graded, changes",
    "Stage1.bucket_complete: `collectives.reduce_scatter(bucket.gradient_shard, bucket.gradients, "
    "op='avg', group=self.group, of=b` without op='avg'":
        "that is the default",
    "Stage1.bucket_complete: `collectives.reduce_scatter(bucket.gradient_shard, bucket.gradients, "
    "op='avg', group=self.group, of=b` without of=bucket":
        "a name for messages",
    "Stage1.bucket_complete: `collectives.reduce_scatter(bucket.gradient_shard, bucket.gradients, "
    "op='avg', group=self.group, of=b` without async_op=True":
        "only whether communication and computation overlap, which is not graded, changes",
    "Stage1.bucket_complete: True turned":
        "only whether communication and computation overlap, which is not graded, changes",
    "Stage1.step: `collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, "
    "of=bucket, async` without of=bucket":
        "a name for messages",
    "Stage1._wait: without `self.reducing = None`": "to wait again for what has arrived does nothing",
    "Stage1.step: `self.reduced_gradients()` a statement later": "the two statements need nothing of each other",
    "Stage1.step: `for pending in gathering:` a statement later":
        "statistics are no parameters: who sends them first has both when step() ends",
    "Stage1.step: `replicas.broadcast_statistics(self.model, self.group)` a statement later":
        "the two statements need nothing of each other",
    "Stage1.step: `self.buckets`: all_buckets": "only stage 3 has buckets of frozen parameters, so the lists are alike",
    "Stage1.step: without @torch.no_grad()":
        "the optimizer's step() has its own, and nothing else here needs a gradient",
    "Stage1.clip_grad_norm_: without @torch.no_grad()":
        "gradients need no gradient themselves: autograd has nothing to record",
}
