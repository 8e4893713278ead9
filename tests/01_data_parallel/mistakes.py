"""Lesson 1: what goes wrong with gradients that leave early.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function


def start_alike(tensors="[*self.model.parameters(), *self.model.buffers()]", group="group=self.group"):
    return {"Naive.start_alike": function("def start_alike(self):", function(
        f"for tensor in {tensors}:", f"collectives.broadcast(tensor.data, {group})"))}


def average(missing="param.grad = torch.zeros_like(param)", op="avg", group="group=self.group", end="",
            params="self.params"):
    return {"Naive.average": function("def average(self):", function(
        f"for param in {params}:", function("if param.grad is None:", missing),
        f"collectives.all_reduce(param.grad, op='{op}', {group})", end))}


REDUCE = "self.reducing = collectives.all_reduce(bucket.gradients, op='avg', group=self.group, async_op=True)"


def bucket_complete(begin="self._wait()", missing="bucket.zero_missing()", reduce=REDUCE):
    return {"Stage0.bucket_complete": function(
        "def bucket_complete(self, bucket, done):", begin, missing, reduce)}


def wait(body="if self.reducing:\n    self.reducing.wait()\n    self.reducing = None"):
    return {"Stage0._wait": function("def _wait(self):", body)}


def rest(old="self.stage.gradient_arrived(param, bucket.flat)", give="self.hand_over(bucket)",
         buckets="[*self.waits_for]"):
    return {"Reducer._hand_over_rest": function("def _hand_over_rest(self):", function(
        f"for bucket in {buckets}:", function("for param in self.waits_for[bucket]:", function(
            "if param.grad is not None:", old)), give))}


def listen(register="param.register_post_accumulate_grad_hook(WeakHook(Reducer._gradient, self))", begin=""):
    return {"Reducer._listen": function("def _listen(self):", begin, function(
        "for param in self.buckets_of:", register))}


COUNT = """
for bucket in self.buckets_of[param]:
    self.waits_for[bucket] -= {param}
    if not self.waits_for[bucket]:
        self._completed.append(bucket)
"""


def gradient(begin="self._arrived(param)", count=COUNT, end="self._hand_over_complete()"):
    return {"Reducer._gradient": function(
        "def _gradient(self, param):", begin, "if self.accumulating:\n    return", count, end)}


HEAD = """
while self.waits_for:
    bucket = [*self.waits_for][0]
    if self.waits_for[bucket]:
        break
    self.hand_over(bucket)
"""


def hand_over_complete(body=HEAD):
    return {"Reducer._hand_over_complete": function("def _hand_over_complete(self):", body)}


def accumulate(inside="self.accumulating = True", after="self.accumulating = False"):
    return {"Reducer.accumulate": "@contextmanager\n" + function(
        "def accumulate(self):", inside, "try:\n    yield", function("finally:", after))}


def zero_grad(begin="self._wait()", forget="self.reducer.forget()", scale="self.gradient_scale = None",
              drop="param.grad = None"):
    return {"Stage0.zero_grad": function("def zero_grad(self):", begin, forget, scale,
                                         function("for param in self.model.parameters():", drop))}


# what counts a parameter once for each module that holds it
VISITS = listen(begin="""
    modules = self.stage.model.modules()
    found = [id(param) for module in modules for param in module._parameters.values()]
    self.visits = {param: found.count(id(param)) for param in self.buckets_of}
    """) | gradient(count="""
    self.visits[param] -= 1
    if self.visits[param] == 0:
        for bucket in self.buckets_of[param]:
            self.waits_for[bucket].discard(param)
    """)
ONE_BY_ONE = """
for param in bucket.params:
    place = bucket._place(bucket.gradients, param)
    collectives.all_reduce(place, op="avg", group=self.group)
"""
BLOCKING = "collectives.all_reduce(bucket.gradients, op='avg', group=self.group)"

WRONG = {
    "each rank keeps the values that it began with": Wrong(
        1, "test_all_start_from_rank_0", r"rank 1 has another frozen, first.weight and \d more than rank 0",
        start_alike(tensors="()"), 2),
    "a buffer that is in no state_dict()": Wrong(
        1, "test_all_start_from_rank_0", r"rank 1 has another last.shift than rank 0: .* has persistent=False",
        start_alike(tensors="self.model.state_dict().values()"), 2),
    "buffers stay each rank's own": Wrong(
        1, "test_all_start_from_rank_0",
        r"rank 1 has another norm.running_mean, norm.num_batches_tracked and 1 more than rank 0: .* the buffers too$",
        start_alike(tensors="self.model.parameters()"), 2),
    "what is frozen stays each rank's own": Wrong(
        1, "test_all_start_from_rank_0", r"rank 1 has another frozen than rank 0: .* also those that are not trained",
        start_alike(tensors="[*filter(lambda p: p.requires_grad, self.model.parameters()), *self.model.buffers()]"), 2),
    "buffers of whole numbers stay each rank's own": Wrong(
        1, "test_all_start_from_rank_0", r"rank 1 has another norm.num_batches_tracked than .* whatever its dtype",
        start_alike(tensors="[t for t in [*self.model.parameters(), *self.model.buffers()] if t.is_floating_point()]"),
        2),
    "a tied weight for each module, the naive way": Wrong(
        1, "test_each_gradient_is_sent_once", r"Naive sent .* on rank 0 of 3 .* One weight belongs to two layers",
        average(params="[p for module in self.model.modules() for p in module._parameters.values()"
                       " if p is not None and p.requires_grad]")),
    "what is frozen is averaged, too, the naive way": Wrong(
        1, "test_each_gradient_is_sent_once", r"Naive sent .* on rank 0 of 3 .* and one is frozen",
        average(params="self.model.parameters()")),
    "averages over all ranks there are, the naive way": Wrong(
        1, "test_the_naive_way_in_a_group", r"(?s)group= is a group of ranks 1 and 2 of three", average(group=""),
        hangs=True),
    "the sum, the naive way": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"the sum of the ranks' gradients, not .* 3 times too large",
        average(op="sum"), 3),
    "averaged twice, the naive way": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"averaged twice: they are 3 times too small",
        average(end="param.grad /= torch.distributed.get_world_size(self.group)"), 3),
    "who has no gradient takes no part": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"(?s)To look at: one parameter got a gradient on rank 0 alone",
        average(missing="continue"), 2, True),
    "a parameter always has a gradient": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"(?s)it raised \w+.*To look at: .*counts as zero",
        average(missing="pass"), 2, True),
    "the mean of the mean": Wrong(
        1, "test_each_gradient_is_sent_once", r"Naive sent .* on rank 0 of 3 .* is each one averaged, once",
        average(end="collectives.all_reduce(param.grad, op='avg', group=self.group)")),
    "broadcasts to all ranks there are": Wrong(
        1, "test_the_naive_way_in_a_group", r"(?s)group= is a group of ranks 1 and 2 of three", start_alike(group=""),
        hangs=True),
    "the sum of a bucket": Wrong(
        2, "test_every_gradient_is_the_mean", r"the sum of the ranks' gradients, not their mean: 3 times too large",
        bucket_complete(reduce=REDUCE.replace("avg", "sum")), 3),
    "divided, and then averaged": Wrong(
        2, "test_every_gradient_is_the_mean", r"averaged twice: they are 3 times too small",
        bucket_complete(missing="bucket.zero_missing()\nbucket.gradients /= self.world_size"), 3),
    "a copy is averaged, and nobody puts it back": Wrong(
        2, "test_every_gradient_is_the_mean", r"rank 0 holds its own gradients: .* the result was not put back",
        bucket_complete(reduce=REDUCE.replace("bucket.gradients", "bucket.gradients.clone()")), 2),
    "gradients never come into their buckets": Wrong(
        2, "test_every_gradient_is_the_mean", r"holds its own gradients: .* into its bucket \(gradient_arrived\)",
        rest(old="pass") | listen(register="pass"), 2),
    "a message for each parameter": Wrong(
        2, "test_many_gradients_in_one_message", r"rank 0 sent \d+ messages for 4\d gradients, .* as 8 all-reduces",
        bucket_complete(reduce=ONE_BY_ONE)),
    "each bucket twice": Wrong(
        2, "test_a_backward_sends_what_an_all_reduce_does", r"rank 0 of 3 sent .* is a bucket sent more than once",
        bucket_complete(missing="bucket.zero_missing()\n" + BLOCKING)),
    "everybody takes rank 0's gradients": Wrong(
        2, "test_every_gradient_is_the_mean", r"rank 0 holds its own gradients: the other ranks' were never added",
        bucket_complete(reduce="collectives.broadcast(bucket.gradients, group=self.group)"), 2),
    "rank 0 alone gets the mean": Wrong(
        2, "test_every_gradient_is_the_mean", r"rank 1 holds its own gradients: the other ranks' were never added",
        bucket_complete(reduce="""
            import torch.distributed as dist
            mean = bucket.gradients / self.world_size
            dist.reduce(mean, 0, group=self.group)
            if self.rank == 0:
                bucket.gradients.copy_(mean)
            """), 2),
    "everybody gets all gradients, and averages alone": Wrong(
        2, "test_a_backward_sends_what_an_all_reduce_does", r"rank 0 of 3 sent .* or whole to every rank",
        bucket_complete(reduce="""
            everybody = bucket.gradients.new_empty(self.world_size, bucket.padded)
            collectives.all_gather(everybody.view(-1), bucket.gradients, group=self.group)
            bucket.gradients.copy_(everybody.mean(0))
            """)),
    "buckets go by the order of hashes": Wrong(
        2, "test_ranks_with_other_hash_seeds_agree", r"(?s)each rank is a Python of its own, as with torchrun",
        listen(register="pass") | rest(buckets="sorted(self.waits_for, key=lambda bucket: hash(bucket.name))"),
        hangs=True),
    "incomplete buckets stay": Wrong(
        2, "test_a_missing_gradient_is_zero", r"(?s)one parameter got (its|a) gradient on rank 0 alone",
        rest(give="if not self.waits_for[bucket]:\n    self.hand_over(bucket)"), 2, True),
    "asks each .grad for its largest element": Wrong(
        2, "test_a_missing_gradient_is_zero", r"(?s)it raised AttributeError: 'NoneType'.*To look at: .*counts as zero",
        bucket_complete(begin="self._wait()\nlargest = max(param.grad.abs().max() for param in bucket.params)"), 2),
    "all ranks there are": Wrong(
        2, "test_a_backward_in_a_group", r"(?s)group= is a group of ranks 1 and 2 of three",
        bucket_complete(reduce=REDUCE.replace("group=self.group, ", "")), hangs=True),
    "an old gradient stands in for a missing one": Wrong(
        2, "test_an_old_gradient_is_no_missing_one", r"what lies in its place since then \(bucket.zero_missing\)\?",
        bucket_complete(missing="")),
    "knows of no gradient but those of hooks": Wrong(
        2, "test_gradients_that_were_not_counted_leave_too", r"the user has put the gradients into .grad, and no hook",
        rest(old="pass")),
    "nobody listens": Wrong(
        3, "test_reductions_begin_during_backward", r"rank 0 sent nothing before its last gradient had come: \d+ mess",
        listen(register="pass")),
    "waits for all parameters of the model": Wrong(
        3, "test_reductions_begin_during_backward", r"rank 0 sent nothing before its last gradient had come",
        gradient(end="if not any(self.waits_for.values()):\n    self._hand_over_complete()")),
    "leaves when almost all is there": Wrong(
        3, "test_reductions_begin_during_backward", r"0 bytes had begun to leave when half of its gradients had come",
        gradient(end="if len(self._completed) >= len(self.buckets) - 2:\n    self._hand_over_complete()")),
    "a tensor's hook, which comes before .grad": Wrong(
        3, "test_gradients_that_leave_early_are_the_mean",
        r"(?s)it raised AttributeError: 'NoneType' object.*To look at: is .grad there when your hook is called",
        listen(register="""
            hook = WeakHook(lambda backward, own, _: backward._gradient(own), self, param)
            param.register_hook(hook)
            """), 2),
    "leaves with the parameter that was registered last": Wrong(
        3, "test_gradients_that_leave_early_are_the_mean", r"came after its bucket was handed over",
        gradient(count="""
            for bucket in self.buckets_of[param]:
                if param is bucket.params[0]:
                    self.hand_over(bucket)
            """, end=""), 2),
    "counts one too few": Wrong(
        3, "test_gradients_that_leave_early_are_the_mean", r"came after its bucket was handed over",
        hand_over_complete(HEAD.replace("if self.waits_for[bucket]:", "if len(self.waits_for[bucket]) > 1:")), 3),
    "the order in which they become complete here": Wrong(
        3, "test_ranks_hand_over_in_one_order", r"(?s)each rank goes through the branches in another order",
        hand_over_complete("""
            for bucket, missing in [*self.waits_for.items()]:
                if not missing:
                    self.hand_over(bucket)
            """), 3, True),
    "nobody notes what is complete": Wrong(
        3, "test_later_passes_go_in_the_order_of_completion", r"rank 0 sent nothing before .* This is the second backw",
        gradient(count=COUNT.replace("self._completed.append(bucket)", "pass"))),
    "notes a bucket with each gradient": Wrong(
        2, "test_a_missing_gradient_is_zero",
        r"(?s)it raised Mismatch: .* is in broadcast of order of the buckets, .* Give the tensor one",
        gradient(count=COUNT.replace("if not self.waits_for[bucket]:", "if True:"))),
    "counts a tied weight for each module": Wrong(
        3, "test_a_tied_weight_counts_once_and_a_frozen_one_never",
        r"sent nothing before its last gradient.* the last two layers share their weight", VISITS),
    "waits at once": Wrong(
        4, "test_autograd_goes_on_meanwhile", r"rank 0 stood still each time .*: of 2\d messages none was under way",
        bucket_complete(reduce=BLOCKING)),
    "starts, and waits in the next line": Wrong(
        4, "test_autograd_goes_on_meanwhile", r"rank 0 stood still each time until it came",
        bucket_complete(reduce=REDUCE + "\nself._wait()")),
    "starts the next one, and then waits for the one before": Wrong(
        4, "test_autograd_goes_on_meanwhile", r"messages \d (was|were) under way .* half is sent in wait\(\), beh",
        bucket_complete(begin="before = self.reducing", reduce=REDUCE + "\nif before:\n    before.wait()")),
    "waits at once in the second pass of a step": Wrong(
        4, "test_all_has_arrived_when_backward_ends", r"rank 0 stood still each time .* This is the second backward",
        bucket_complete(reduce=REDUCE + "\nif self.reducer.passes:\n    self._wait()")),
    "nobody waits": Wrong(
        4, "test_all_has_arrived_when_backward_ends",
        r"(?s)every all-reduce that was started must be|has not the mean gradients of two .* was each all-reduce wai",
        wait("self.reducing = None"), hangs=True),
    "the last one is not waited for": Wrong(
        4, "test_all_has_arrived_when_backward_ends", r"has not the mean gradients of two .* was each all-reduce wai",
        wait("pass") | bucket_complete(begin="if self.reducing:\n    self.reducing.wait()"), hangs=True),
    "a micro-batch leaves all the same": Wrong(
        5, "test_micro_batches_are_sent_once", r"under no_sync\(\) rank 0 sent \d+.\d kB in 2 micro-batches",
        accumulate(inside="pass")),
    "no_sync never ends": Wrong(
        5, "test_micro_batches_are_sent_once", r"rank 0 sent 0 bytes in the backward of the last micro-batch",
        accumulate(after="pass")),
    "no_sync lasts when an error leaves it": Wrong(
        5, "test_an_error_ends_no_sync_too", r"The next backward sent 0 bytes on rank 0, and .* must leave there",
        {"Reducer.accumulate": "@contextmanager\n" + function(
            "def accumulate(self):", "self.accumulating = True", "yield", "self.accumulating = False")}),
    "earlier micro-batches are halved": Wrong(
        5, "test_micro_batches_add_up", r"has not the ranks' mean of 3 micro-batches' sum",
        {"Stage0.gradient_arrived": """
            def gradient_arrived(self, param, flat):
                flat.keep_gradient(param)
                if self.reducer.accumulating:
                    param.grad /= 2
            """}),
    "a list that gets the norm of each bucket": Wrong(
        5, "test_nothing_stays_of_a_step", r"rank 0 holds \d+ tensors after the second step, and \d+ after the fourth",
        bucket_complete(begin="self.norms = [*getattr(self, 'norms', []), bucket.gradients.norm()]\nself._wait()")),
    "a list of the messages of all steps": Wrong(
        5, "test_nothing_stays_of_a_step", r"rank 0 holds \d+ tensors after the second step, and \d+ after the fourth",
        bucket_complete(reduce=REDUCE + "\nself.all = [*getattr(self, 'all', []), (bucket, self.gradient_scale, "
                                        "torch.tensor(len(done)))]")),
    "each rank keeps its own running statistics": Wrong(
        5, "test_a_step_leaves_rank_0s_statistics", r"Stage0: after step\(\) norm.running_mean.* of rank 1 is not what",
        {"Stage0.step": "@torch.no_grad()\n" + function(
            "def step(self):", "self.reduced_gradients()", function("for bucket in self.buckets:", (
                "optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)")),
            "self.reducer.needs_zero_grad = True")}),
    "each rank keeps its own running statistics, the naive way": Wrong(
        5, "test_a_step_leaves_rank_0s_statistics", r"Naive: after step\(\) norm.running_mean.* of rank 1 is not what",
        {"Naive.step": function("def step(self):", "self.reduced_gradients()", "self.optimizer.step()")}),
    "step() reduces again what is reduced": Wrong(
        5, "test_micro_batches_are_sent_once", r"for 3 micro-batches, clip_grad_norm_\(\) and step\(\) rank 0 sent",
        edited("01_data_parallel", "Stage0.step", ("self.reduced_gradients()", "self.reducer.finish()"))),
    "running statistics go to all ranks, and not to the group": Wrong(
        5, "test_a_step_leaves_rank_0s_statistics", r"here the group is .*(two|1 and 2) of three ranks",
        edited("01_data_parallel", "Stage0.step", ("broadcast_statistics(self.model, self.group)",
                                                   "broadcast_statistics(self.model)"))),
    "running statistics are sent in the first step only": Wrong(
        5, "test_a_step_leaves_rank_0s_statistics", r"Stage0: .* of rank 1 is not what rank 0's batches .* in 2 steps",
        {"Stage0.step": "@torch.no_grad()\n" + function(
            "def step(self):", "self.reduced_gradients()", function("for bucket in self.buckets:", (
                "optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)")),
            "if not self.reducer.steps:\n    replicas.broadcast_statistics(self.model, self.group)",
            "self.reducer.needs_zero_grad = True")}),
    "old gradients stay": Wrong(
        5, "test_the_second_step_starts_afresh", r"the sum of both steps': zero_grad\(\) left the first one's",
        zero_grad(drop="pass")),
    "zero_grad does not tell backward": Wrong(
        5, "test_the_second_step_starts_afresh",
        r"^rank \d: zero_grad\(\) was called before this backward, and it was refused .* \(self.reducer.forget\(\)\)",
        zero_grad(forget="")),
    "listens once for each bucket of a parameter": Wrong(
        3, "test_gradients_that_leave_early_are_the_mean",
        r"a parameter has [23] hooks of the reducer, which counts each gradient as often: let it have one",
        listen(register="for bucket in self.buckets_of[param]:\n"
                        "    param.register_post_accumulate_grad_hook(WeakHook(Reducer._gradient, self))"), 2),
    "listens once more in each step": Wrong(
        5, "test_the_second_step_starts_afresh", r"a parameter has 2 hooks of the reducer, which counts",
        zero_grad(forget="self.reducer.forget()\nself.reducer._listen()")),
    "of a micro-batch that is dropped the gradients stay": Wrong(
        5, "test_the_second_step_starts_afresh", r"has not the last step's mean gradient. Before it .* under no_sync",
        zero_grad(begin="reduced = self.reducer.reduced",
                  drop="param.grad = None if reduced else param.grad")),
    "of a batch that is dropped the gradients stay": Wrong(
        5, "test_the_second_step_starts_afresh", r"has not the last step's mean gradient. Before it a batch was drop",
        zero_grad(begin="spent = self.reducer.needs_zero_grad", drop="param.grad = None if spent else param.grad")),
    "the scale of a batch that is dropped stays": Wrong(
        5, "test_the_second_step_starts_afresh",
        r"moved rank 0's parameters by \S+, and .* was clipped, to 0.001, and then dropped",
        zero_grad(begin="if self.reducer.needs_zero_grad:\n    self.gradient_scale = None", scale="")),
    "later steps wait at once": Wrong(
        5, "test_later_steps_overlap_too", r"rank 0 stood still each time .* This is the fourth step: what is another",
        bucket_complete(reduce=REDUCE + "\nif self.reducer.steps:\n    self._wait()")),
    "later steps wait until backward has ended": Wrong(
        5, "test_later_steps_overlap_too", r"rank 0 sent nothing before .* This is the fourth step: what is another",
        hand_over_complete("if self.steps:\n    return" + HEAD)),
    "after the first step nobody listens": Wrong(
        5, "test_later_steps_overlap_too", r"rank 0 sent nothing before .* This is the fourth step: what is another",
        listen(begin="self.hooks = []", register="self.hooks.append(param.register_post_accumulate_grad_hook(WeakHook("
               "Reducer._gradient, self)))") | zero_grad(begin="""
            for hook in self.reducer.hooks:
                hook.remove()
            """)),
    "clipping stays for the next step": Wrong(
        5, "test_trains_as_one_process_would", r"three micro-batches a step, and clipping, 3 steps: rank 0 has other",
        zero_grad(scale="")),
}
WRONG |= {  # what strangers handed in, and had full marks
    "one bucket at a time": Wrong(
        3, "test_later_passes_go_in_the_order_of_completion", r"then the first, and 1 of them were handed over: all",
        hand_over_complete("for bucket, missing in list(self.waits_for.items())[:1]:\n    if not missing:\n"
                           "        self.hand_over(bucket)")),
    "a missing gradient is written in all its buckets": Wrong(
        2, "test_a_missing_gradient_is_zero", r"(?s)lies in several buckets. When one of these goes",
        bucket_complete(missing="for param in bucket.params:\n    if param.grad is None:\n"
                                "        bucket.flat.view(bucket.flat.gradients, param).zero_()")),
    "a list that grows by numbers alone": Wrong(
        5, "test_nothing_stays_of_a_step", r"entries of lists and dicts after the second step, and \d+ after",
        edited("01_data_parallel", "Stage0.bucket_complete", ("self._wait()", "self._wait()\n"
               "    self.log = [*getattr(self, 'log', ()), bucket.numel]"))),
    "one order, until it was agreed on": Wrong(
        3, "test_ranks_hand_over_in_one_order", r"(?s)backward 2.*each rank goes through the branches in another order",
        edited("01_data_parallel", "Reducer._hand_over_complete", (
            "    while", "    for bucket in [bucket for bucket, left in self.waits_for.items() if self._ordered and "
            "not left]:\n        self.hand_over(bucket)\n    while")), 3),
    "one rank alone keeps its gradients as they are": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"is None after backward and reduced_gradients\(\)",
        edited("01_data_parallel", "Naive.average", ("    for param", """
    if torch.distributed.get_world_size(self.group) == 1:
        return
    for param""")), 1),
    "one rank alone has nothing to do with a bucket": Wrong(
        5, "test_trains_as_one_process_would", r"what lies in its place since the step before\? Look at bucket_compl",
        edited("01_data_parallel", "Stage0.bucket_complete", (
            "    self._wait()", "    if self.world_size == 1:\n        return\n    self._wait()")), 1),
    "the naive way in the order of a set of names": Wrong(
        2, "test_ranks_with_other_hash_seeds_agree", r"hash seed",
        edited("01_data_parallel", "Naive.average", ("    for param in self.params:", """
    named = dict(self.model.named_parameters())
    trained = {name for name, param in named.items() if param.requires_grad}
    for param in map(named.get, trained):"""))),
    "zero_grad does not wait for a backward that an error ended": Wrong(
        5, "test_the_second_step_starts_afresh",
        r"a backward that an error ended half-way|an error has ended a backward half-way",
        edited("01_data_parallel", "Stage0.zero_grad", ("    self._wait()\n", ""))),
    "a hook that keeps the reducer": Wrong(
        3, "test_the_model_outlives_its_stage", r"the next backward of its model raised ReferenceError: .*See WeakHook",
        edited("01_data_parallel", "Reducer._listen", ("WeakHook(Reducer._gradient, self)", "self._gradient"))),
    "under no_sync nobody tells the stage": Wrong(
        5, "test_micro_batches_take_no_room_of_their_own", r"its gradients, \S+ kB, are there twice.*\(_arrived\)",
        edited("01_data_parallel", "Reducer._gradient", (
            "    self._arrived(param)\n    if not", "    if not"), ("accumulating:", "accumulating:\n"
            "        self._arrived(param)"))),
    "zero_grad ends no_sync": Wrong(
        5, "test_micro_batches_are_sent_once", r"under no_sync\(\) there was a zero_grad\(\), and the backward after",
        edited("01_data_parallel", "Stage0.zero_grad", (
            "    self.reducer.forget()", "    self.reducer.forget()\n    self.reducer.accumulating = False"))),
    "zero_grad drops what is under way": Wrong(
        5, "test_the_second_step_starts_afresh", r"half-way on rank \d.* nobody has waited for 1: .*still writes into",
        edited("01_data_parallel", "Stage0.zero_grad", ("    self._wait()\n", "    self.reducing = None\n"))),
    "a copy of the gradient is averaged": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"a weight is a transposed one, .* the copy is averaged",
        edited("01_data_parallel", "Naive.average", ("param.grad, op", "param.grad.reshape(-1), op"))),
    "gradients by hand where no hook was called for the whole bucket": Wrong(
        2, "test_gradients_that_were_not_counted_leave_too", r"some of a bucket's gradients into \.grad, and autograd",
        {"Reducer._hand_over_rest": function("def _hand_over_rest(self):", function(
            "for bucket, missing in [*self.waits_for.items()]:", function(
                "for param in missing if len(missing) == len(bucket.params) else ():", function(
                    "if param.grad is not None:", "self.stage.gradient_arrived(param, bucket.flat)")),
            "self.hand_over(bucket)"))}),
    "Ctrl-C does not end no_sync": Wrong(
        5, "test_an_error_ends_no_sync_too", r"Ctrl-C and another .*whatever error it is \(finally\)",
        {"Reducer.accumulate": "@contextmanager\n" + function(
            "def accumulate(self):", "self.accumulating = True", "try:\n    yield", function(
                "except Exception:", "self.accumulating = False\nraise"), "self.accumulating = False")}),
    "a BaseException that it has not thought of does not end no_sync": Wrong(
        5, "test_an_error_ends_no_sync_too", r"another BaseException were raised .*whatever error it is \(finally\)",
        edited("01_data_parallel", "Reducer.accumulate", (
            "finally:", "except (Exception, KeyboardInterrupt):\n        self.accumulating = False\n        raise\n"
            "    else:"))),
    "what is reduced counts as unreduced after any no_sync": Wrong(
        5, "test_micro_batches_are_sent_once", r"are enough: gradients are averaged once \(here an empty no_sync",
        accumulate(after="self.accumulating = self.reduced = False")),
    "one tensor of zeros for all missing gradients of a shape": Wrong(
        1, "test_afterwards_each_gradient_is_the_mean", r"of two branches of one shape: each needs zeros of its own",
        edited("01_data_parallel", "Naive.average", ("    for param", "    zeros = {}\n    for param"), (
            "torch.zeros_like(param)", "zeros.setdefault(param.shape, torch.zeros_like(param))")), 2),
    "after no_sync() all leaves at the end": Wrong(
        5, "test_micro_batches_add_up", r"It is the last of 3 micro-batches: those before it ran under no_sync\(\)",
        gradient(begin="self._arrived(param)\nif self.accumulating:\n    self.heard = True",
                 end="if not getattr(self, 'heard', False):\n    self._hand_over_complete()")),
    "no_sync() alone averages nothing": Wrong(
        5, "test_micro_batches_add_up", r"Here the only backward ran under no_sync\(\). Who asks for the gradients",
        edited("01_data_parallel", "Reducer.accumulate", ("self.accumulating = False", "self.accumulating = False\n"
               "        self.reduced = True"))),
    "gradients are copied to be sent": Wrong(
        5, "test_micro_batches_take_no_room_of_their_own", r"after a backward rank 0 holds .*: what else is there",
        bucket_complete(reduce=REDUCE.replace("(bucket.gradients", "(bucket.copied") .replace(
            "self.reducing", "bucket.copied = bucket.gradients.clone()\nself.reducing", 1)
            + "\nself.reducing.wait()\nbucket.gradients.copy_(bucket.copied)\nself.reducing = None")),
}

RIGHT = {
    "the parts of these mistakes": (
        start_alike() | average() | bucket_complete() | wait() | rest() | listen() | gradient() | hand_over_complete()
        | accumulate() | zero_grad()),
    "all under way at once": bucket_complete(begin="", reduce="""
        work = collectives.all_reduce(bucket.gradients, op='avg', group=self.group, async_op=True)
        self.reducing = [*(self.reducing or []), work]
        """) | wait("for work in self.reducing or []:\n    work.wait()\nself.reducing = None"),
}

SAME = "collectives.all_reduce takes the mean unless it is told otherwise"
UNTOLD = {
    "Naive.average: `collectives.all_reduce(param.grad, op='avg', group=self.group)` without op='avg'": SAME,
    "Stage0.bucket_complete: `collectives.all_reduce(bucket.gradients, op='avg', group=self.group, of=bucket, "
    "async_op=True)` without op='avg'": SAME,
    "Stage0.bucket_complete: `collectives.all_reduce(bucket.gradients, op='avg', group=self.group, of=bucket, "
    "async_op=True)` without of=bucket": "it says to who watches whose message this is; what is sent stays the same",
    "Stage0.bucket_complete: `self._wait()` a statement later": "the message under way is another bucket's: it does "
    "not matter whether the missing gradients of this one are zeroed before it has arrived",
    "Reducer._gradient: `for bucket in self.buckets_of[param]:` a statement later": "each bucket leaves with the "
    "gradient after its last one: the checks leave room for all-reduces whose second half leaves later than that",
    "Stage0.zero_grad: `self.reducer.forget()` a statement later": "the statements concern different things",
    "Stage0.zero_grad: `self.gradient_scale = None` a statement later": "the statements concern different things",
    "Stage0.zero_grad: `self._wait()` a statement later": "as without it: nothing is under way there",
    "Stage0._wait: without `self.reducing = None`": "to wait once more for what has arrived takes no time",
}
