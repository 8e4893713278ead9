"""Lesson 10, part A: what goes wrong where the parts come together on a mesh.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

KIND = r"a backward in bf16: (it raised|gradients lie in memory of torch.float32)"


def memory(size="max(bucket.padded for bucket in buckets) * dtype.itemsize", kind="dtype, device = kind_of(buckets)",
           shards="[bucket.parameter_shard.numel() for bucket in buckets]",
           slab="self.slab = torch.zeros(sum(shards), dtype=dtype, device=device)",
           homes="self.home_of = dict(zip(buckets, self.slab.split(shards)))",
           buffers="ConstantBuffers({size}, dtype=dtype, device=device, group=group)"):
    return {"ConstantMemory.__init__": function(
        "def __init__(self, buckets, group=None):", kind,
        f"self.constant_buffers = {buffers.format(size=size)}",
        f"shards = {shards}", slab, homes)}


def whole(body="return self.constant_buffers.take()[: bucket.padded].zero_()"):
    return {"ConstantMemory.whole": function("def whole(self, bucket):", body)}


def shard(body="home = self.home_of[bucket]\n"
               "return home if bucket.gradient_shard is None else torch.empty_like(home)"):
    return {"ConstantMemory.shard": function("def shard(self, bucket):", body)}


def keep_checkpoints(elements="batch * sizes.sequence * sizes.hidden // (mesh.model_group.size() if cut else 1)",
                     group="mesh.model_group if cut else None", on_slab="not config.to_host",
                     slab="Slab(elements * sizes.layers, dtype=like.dtype, device=like.device)",
                     hook="self.model.register_forward_pre_hook(self.begin_forward)",
                     place="self.slab.keep if self.slab else None", to_host="config.to_host"):
    return {"System.keep_checkpoints": function(
        "def keep_checkpoints(self, config, batch):",
        "sizes, mesh, cut, like = self.model.config, self.mesh, config.partition, next(self.model.parameters())",
        f"elements = {elements}", function(f"if {on_slab}:", f"self.slab = {slab}", hook or "pass"),
        f"checkpoint_blocks(self.model, group={group}, to_host={to_host}, place={place})")}


def over_replicas(group="self.mesh.data_group", groups='[{"params": cut}, {"params": whole}]',
                  options="**config.options, **options", begin="", end="return stage"):
    return {"System.over_replicas": function(
        "def over_replicas(self, config, optimizer_class, **options):",
        "whole = self.model.replicated()",
        "cut = [param for param in self.model.parameters() if param not in set(whole)]", begin,
        f"stage = config.stage(self.model, optimizer_class, group={group}, param_groups={groups}, {options})", end)}


def clip(counted="if bucket.group_index == 0 or self.mesh.model_rank == 0", begin="self.zero.reduced_gradients()",
         norm="norm = precision.global_norm(counted, self.gradient_scale, group=self.mesh.data_group)",
         together="squares = norm.square()\n"
                  "collectives.all_reduce(squares, op='sum', group=self.mesh.model_group)\nnorm = squares.sqrt()",
         scale="self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)", end="return norm"):
    return {"System.clip_grad_norm_": "@torch.no_grad()\n" + function(
        "def clip_grad_norm_(self, max_norm):", begin,
        f"counted = [bucket.gradient_shard for bucket in self.zero.buckets {counted}]", norm, together, scale, end)}


# averages are made by the stage; these give another number of ranks to divide by
SPANS = "stage.reduced_gradients, stage.plain = lambda: scaled(stage, self.mesh, {}), stage.reduced_gradients"
SCALED = """
def scaled(stage, mesh, factor):
    for shard in stage.plain():
        if not getattr(stage, "done", False):
            shard.mul_(factor)
    stage.done = True
    return [bucket.gradient_shard for bucket in stage.buckets]
"""


def divided(factor):
    return over_replicas(begin="replicas, ranks = self.mesh.data_group.size(), self.mesh.model_group.size()",
                         end=SPANS.format(factor) + "\nreturn stage") | {"scaled": SCALED}


WRONG = {
    "buffers as large as all gradients": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is",
        r"ConstantMemory takes \S+ kB, and \S+ kB are right: two buffers.*How large must a buffer be",
        memory(size="sum(bucket.padded for bucket in buckets) * dtype.itemsize")),
    "the first bucket decides": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"it raised RuntimeError",
        memory(size="buckets[0].padded * dtype.itemsize")),
    "the slab holds whole gradients": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"takes \S+ kB, and \S+ kB are right.*how many shards of a",
        memory(shards="[bucket.padded for bucket in buckets]",
               homes="places = self.slab.split(shards)\n"
                     "self.home_of = {bucket: place[: len(bucket.parameter_shard)]\n"
                     "                for bucket, place in zip(buckets, places)}")),
    "the slab is made in the first backward": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"before the first backward.*allocated once, up front",
        memory(slab="self.slab, self.kind = None, (dtype, device)", homes="self.sizes = dict(zip(buckets, shards))")
        | shard("""
            if self.slab is None:
                sizes = self.sizes.values()
                self.slab = torch.zeros(sum(sizes), dtype=self.kind[0], device=self.kind[1])
                self.home_of = dict(zip(self.sizes, self.slab.split(list(sizes))))
            home = self.home_of[bucket]
            return home if bucket.gradient_shard is None else torch.empty_like(home)
            """)),
    "memory for later micro-batches is kept": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"after two steps of two .* needed until it has been added",
        shard("""
            if bucket.gradient_shard is None:
                return self.home_of[bucket]
            if not hasattr(self, "later"):
                self.later = torch.empty_like(max(self.home_of.values(), key=len))
            return self.later[: len(self.home_of[bucket])]
            """)),
    "the slab has room for one bucket": Wrong(
        1, "test_shards_stay_in_the_slab", r"gradient shards of rank 0 overlap: each bucket has a place of its own",
        memory(slab="self.slab = torch.zeros(max(shards), dtype=dtype, device=device)",
               homes="self.home_of = {bucket: self.slab[:size] for bucket, size in zip(buckets, shards)}")),
    "contiguous, made of separate allocations": Wrong(
        1, "test_shards_stay_in_the_slab", r"the \d+ gradient shards of rank 0 lie in \d+ allocations",
        memory(slab="self.slab = None",
               homes="self.home_of = {bucket: torch.zeros_like(bucket.parameter_shard) for bucket in buckets}")),
    "a new bucket each time": Wrong(
        1, "test_whole_gradients_take_turns_in_two_buffers", r"whole\(\) of rank 0 gave memory of \d+ allocations",
        whole("return bucket.zeros()")),
    "a later micro-batch arrives in the other buffer": Wrong(
        1, "test_whole_gradients_take_turns_in_two_buffers", r"one bucket after the other the same buffer, \d+ times",
        shard("home = self.home_of[bucket]\nreturn home if bucket.gradient_shard is None else "
              "self.constant_buffers.take()[: len(home)]")),
    "one buffer, again and again": Wrong(
        1, "test_whole_gradients_take_turns_in_two_buffers",
        r"gave one bucket after the other the same buffer, \d+ times",
        whole("return self.constant_buffers.buffers[0][: bucket.padded].zero_()")),
    "all of the buffer is sent": Wrong(
        1, "test_whole_gradients_take_turns_in_two_buffers", r"(a buffer may be larger than a bucket|it raised)",
        whole("return self.constant_buffers.take().zero_()")),
    "what was sent before is sent again": Wrong(
        1, "test_the_mean_gradient_comes_out",
        r"in \[\d+, \d+\] elements on ranks 0 and 1: a buffer still holds what was sent",
        whole("return self.constant_buffers.take()[: bucket.padded]")),
    "the second micro-batch arrives on the first one's sum": Wrong(
        1, "test_micro_batches_add_up", r"twice the last one's gradient: its average arrived where the sum lay",
        shard("return self.home_of[bucket]")),
    "the first dtype is everybody's": Wrong(
        1, "test_buffers_are_of_the_buckets_kind", r"were taken without a word",
        memory(kind="dtype, device = buckets[0].dtype, buckets[0].device")),
    "dtypes of one size are alike": Wrong(
        1, "test_buffers_are_of_the_buckets_kind", r"'float16'.*'bfloat16'.* were taken without a word",
        memory(kind="dtype, device = buckets[0].dtype, buckets[0].device\n"
                    "if len({bucket.dtype.itemsize for bucket in buckets}) > 1:\n    raise ValueError('two dtypes')")),
    "buffers of fp32, whatever the buckets are": Wrong(
        1, "test_buffers_are_of_the_buckets_kind", KIND,
        memory(buffers="ConstantBuffers({size} // dtype.itemsize * 4, device=device, group=group)")),
    "elements of four bytes, whatever the buckets are": Wrong(
        1, "test_buffers_are_of_the_buckets_kind",
        r"a backward in bf16: the largest bucket has \d+ elements of 2 bytes, and a buffer \d+ bytes",
        memory(size="max(bucket.padded for bucket in buckets) * 4")),
    "a slab of fp32": Wrong(
        1, "test_buffers_are_of_the_buckets_kind", KIND,
        memory(slab="self.slab = torch.zeros(sum(shards), device=device)")),
    "buffers for all ranks": Wrong(
        1, "test_buffers_are_of_the_buckets_kind", r"a backward on the groups .* it raised",
        memory(buffers="ConstantBuffers({size}, dtype=dtype, device=device)")),

    "the slab holds whole inputs, and parts are kept": Wrong(
        2, "test_the_slab_is_as_large_as_the_checkpoints",
        r"C2 made for 6 sequences takes 8\.\d kB more .*2\.\d kB are",
        keep_checkpoints(elements="batch * sizes.sequence * sizes.hidden")),
    "a slab for one block": Wrong(
        2, "test_the_slab_is_as_large_as_the_checkpoints",
        r"(?s)the slab is full.*To look at: b·s·h numbers are a block's input, there are as many",
        keep_checkpoints(slab="Slab(elements, dtype=like.dtype, device=like.device)")),
    "P_a+cpu has a slab, too": Wrong(
        2, "test_the_slab_is_as_large_as_the_checkpoints",
        r"C5 made for 6 .*0 bytes are right. P_a\+cpu: checkpoints lie",
        keep_checkpoints(on_slab="True", place="None if config.to_host else self.slab.keep")),
    "the slab is full of nothing": Wrong(
        2, "test_a_block_keeps_its_input_alone",
        r"C1: .*checkpoints belong into the slab", keep_checkpoints(place="None")),
    "blocks are not checkpointed": Wrong(
        2, "test_a_block_keeps_its_input_alone", r"C1: .*all that it computes is there until backward",
        {"System.keep_checkpoints": function(
            "def keep_checkpoints(self, config, batch):", "self.slab = None")}),
    "the host gets whole inputs": Wrong(
        2, "test_a_block_keeps_its_input_alone", r"C5: \S+ kB a block went to host memory .*for this rank's parts",
        keep_checkpoints(group="mesh.model_group if cut and not config.to_host else None")),
    "P_a over the data-parallel ranks": Wrong(
        2, "test_p_a_cuts_over_the_ranks_of_a_model",
        r"(?s)(P_a cuts an input of which each rank of its group has a copy|To look at: which ranks hold the same)",
        keep_checkpoints(elements="batch * sizes.sequence * sizes.hidden // (mesh.data_group.size() if cut else 1)",
                         group="mesh.data_group if cut else None")),
    "the slab is never emptied": Wrong(
        2, "test_each_pass_uses_the_slab_anew", r"(?s)the slab is full.*is the slab emptied before each forward pass",
        keep_checkpoints(hook="")),
    "the slab is emptied when it is full": Wrong(
        2, "test_each_pass_uses_the_slab_anew", r"(?s)the slab is full.*have fewer sequences and no backward",
        keep_checkpoints(hook="", place="None if config.to_host else lambda x: self.slab.keep(x) if self.slab.used < "
                                        "elements * sizes.layers else self.slab.reset() or self.slab.keep(x)")),
    "what is kept is rounded": Wrong(
        2, "test_each_pass_uses_the_slab_anew", r"C1: two passes gave gradients on rank 0 that are off by",
        keep_checkpoints(place="(lambda x: self.slab.keep(x.half().to(x.dtype))) if self.slab else None")),
    "the slab is a bit larger": Wrong(
        2, "test_the_slab_is_as_large_as_the_checkpoints", r"C1 made for 6 sequences has a slab of .*made at once",
        keep_checkpoints(slab="Slab(elements * sizes.layers + 5000, dtype=like.dtype, device=like.device)")),
    "two ranks share each model": Wrong(
        2, "test_the_slab_is_as_large_as_the_checkpoints", r"C2 made for 6 .* D × M = 1 × 3 .*The slab is too large",
        keep_checkpoints(elements="batch * sizes.sequence * sizes.hidden // (2 if cut else 1)")),
    "the slab is emptied by passes without a graph, too": Wrong(
        2, "test_each_pass_uses_the_slab_anew", r"(?s)it raised RuntimeError.*before no other\? Here a pass without",
        keep_checkpoints(hook="self.model.register_forward_pre_hook(lambda *_: self.slab.reset())")),
    "the slab is always of fp32": Wrong(
        2, "test_checkpoints_have_the_dtype_of_the_model",
        r"C1 with a model in bfloat16, .* holds torch.float32 .* was given torch.bfloat16.*what must the slab's be",
        keep_checkpoints(slab="Slab(elements * sizes.layers, dtype=torch.float32, device=like.device)")),

    "the mean of all ranks": Wrong(
        3, "test_a_step_is_the_mean_of_the_replicas",
        r"or the ranks of group= hold other models: rank",
        over_replicas(group="None")),
    "the ranks of a model average": Wrong(
        3, "test_a_step_is_the_mean_of_the_replicas",
        r"or the ranks of group= hold other models: rank",
        over_replicas(group="self.mesh.model_group")),
    "N for D": Wrong(
        3, "test_a_step_is_the_mean_of_the_replicas",
        r"1/2 of that: a sum over 2 ranks was divided by 4. The divisor is D",
        divided("1 / ranks")),
    "the sum of the replicas": Wrong(
        3, "test_a_step_is_the_mean_of_the_replicas", r"it subtracted 2 times as much: their sum. The divisor is D",
        divided("replicas")),
    "one rank of a model alone trains what all hold": Wrong(
        3, "test_a_step_is_the_mean_of_the_replicas",
        r"\d+ parameters did not move, such as \S+, which is whole on all",
        over_replicas(groups='[{"params": cut}] + [{"params": whole}] * (self.mesh.model_rank == 0)')),
    "no C_B, no M_D": Wrong(
        3, "test_each_config_has_its_parts",
        r"C3: rank 0's gradient shards lie in \d+ allocations, so C_B and M_D are not",
        over_replicas(options="**options")),

    "what all hold counts M times": Wrong(
        4, "test_each_element_counts_once", r"counts the parameters that all ranks of a model hold whole M = 2 times",
        clip(counted="")),
    "what all hold does not count": Wrong(
        4, "test_each_element_counts_once", r"leaves out the parameters that all ranks of a model hold whole",
        clip(counted="if bucket.group_index == 0")),
    "the norm of a part of the model": Wrong(
        4, "test_each_element_counts_once", r"(is the norm of this rank's part of the model|hold the norm)",
        clip(counted="", together="")),
    "norms add up": Wrong(
        4, "test_each_element_counts_once",  # where both are about equal, their sum is √2 of the norm
        r"norms do not add up, their squares do|squares were counted for each of D = 2 replicas",
        clip(together="collectives.all_reduce(norm, op='sum', group=self.mesh.model_group)")),
    "all ranks, after the replicas": Wrong(
        4, "test_each_element_counts_once", r"squares were counted for each of D = 2 replicas",
        clip(together="squares = norm.square()\ncollectives.all_reduce(squares, op='sum')\nnorm = squares.sqrt()")),
    "the first rank of a model counts alone, and the others do not come": Wrong(
        4, "test_each_element_counts_once", r"(?s)(had not come to an end|waited|it raised|counts).*",
        clip(together="squares = norm.square()\nif self.mesh.model_rank == 0:\n"
                      "    collectives.all_reduce(squares, op='sum', group=self.mesh.model_group)\n"
                      "norm = squares.sqrt()"), hangs=True),
    "returned, and not used": Wrong(
        4, "test_step_is_clipped_to_it", r"after clip_grad_norm_\(0.1\) .* step\(\) used 1 times the gradient",
        clip(scale="")),
    "clipped by the norm of its own part": Wrong(
        4, "test_step_is_clipped_to_it", r"after clip_grad_norm_\(0.1\) .*the whole model's norm decides",
        clip(norm="norm = precision.global_norm(counted, self.gradient_scale, group=self.mesh.data_group)\n"
                  "self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)", scale="")),
    "gradients are scaled in place": Wrong(
        4, "test_gradients_stay_as_they_were", r"clip_grad_norm_ changed rank 0's gradients",
        clip(scale="for bucket in self.zero.buckets:\n"
                   "    bucket.gradient_shard.mul_(min(1.0, max_norm / norm.item()))")),
    "the norm of scaled gradients": Wrong(
        4, "test_a_loss_scale_is_taken_off", r"the loss was multiplied by 1024",
        clip(norm="norm = precision.global_norm(counted, group=self.mesh.data_group)")),
    "clipping forgets the loss scale": Wrong(
        4, "test_a_loss_scale_is_taken_off", r"with a loss scale of 1024, .*clipping multiplies the scale",
        clip(scale="self.gradient_scale = precision.clip(None, norm, max_norm)")),
    "shards are read before they are complete": Wrong(
        4, "test_gradients_are_complete_before_they_are_read",
        r"(?s)To look at: a bucket may have no shard yet .* rank that ran no backward", clip(begin=""), hangs=True),
    "the gradients travel": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"took part in collectives of \S+ [kM]B: a few numbers are enough",
        clip(norm="own = torch.cat(counted)\nparts = own.new_empty(self.mesh.data_group.size() * len(own))\n"
                  "collectives.all_gather(parts, own, group=self.mesh.data_group)\nnorm = parts.norm()\n"
                  "norm = norm if self.gradient_scale is None else norm * self.gradient_scale")),
}
WRONG |= {  # what strangers handed in, and had full marks
    "one tensor for all norms": Wrong(
        4, "test_gradients_are_complete_before_they_are_read", r"and the tensor that it returned holds",
        edited("10_whole_system", "System.clip_grad_norm_", ("return norm", "self.norm = getattr(self, 'norm', norm)\n"
               "    return self.norm.copy_(norm)"))),
    "a parameter is looked for in a list": Wrong(
        3, "test_a_step_is_the_mean_of_the_replicas", r"(?s)it raised RuntimeError: The size of tensor .*over_replica",
        edited("10_whole_system", "System.over_replicas", ("set(replicated)", "replicated"))),
    "the norm in the gradients' own 16 bits": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"float16, .* the norm is \S+, and rank \d found inf",
        clip(norm="norm = precision.global_norm(counted, self.gradient_scale, group=self.mesh.data_group)\n"
                  "squares = sum(each.square().sum() for each in counted)\n"
                  "collectives.all_reduce(squares, op='sum', group=self.mesh.data_group)\n"
                  "norm = squares.sqrt() * (self.gradient_scale or 1)")),
    "scaled first, the norm in 16 bits": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"float16, .* the norm is \S+, and rank \d found \d",
        clip(norm="scale = self.gradient_scale or 1\nsquares = sum((each * scale).square().sum() for each in counted)\n"
                  "collectives.all_reduce(squares, op='sum', group=self.mesh.data_group)\nnorm = squares.sqrt()")),
    "infinity over infinity": Wrong(
        4, "test_step_is_clipped_to_it", r"after clip_grad_norm_\(inf\) .* used nan times the gradient, and 1 is right",
        clip(scale="factor = max_norm / norm.clamp(min=max_norm)\nscale = self.gradient_scale\n"
                   "self.gradient_scale = factor if scale is None else scale * factor")),
    "nothing over nothing": Wrong(
        4, "test_gradients_are_complete_before_they_are_read",
        r"where no rank ran a backward: .* rank 0 has the norm 0 and the scale (nan|0), and 0 and 1 are right",
        clip(scale="scale, one = self.gradient_scale, norm.new_ones(())\n"
                   "factor = one if norm <= max_norm and norm else max_norm / norm * norm.sign()\n"
                   "self.gradient_scale = factor if scale is None else scale * factor")),
    "the caller's scale is multiplied": Wrong(
        4, "test_a_loss_scale_is_taken_off", r"was put into self.gradient_scale. After .* rank 0's tensor holds ",
        clip(scale="factor = precision.clip(None, norm, max_norm)\nif self.gradient_scale is None:\n"
                   "    self.gradient_scale = factor\nelse:\n    self.gradient_scale *= factor")),
    "norms and biases do not decay": Wrong(
        3, "test_each_config_has_its_parts", r"made with .* weight_decay is 0.0 in group 1 of rank",
        over_replicas(groups='[{"params": cut}, {"params": whole, "weight_decay": 0.0}]')),
    "the slab is emptied in training alone": Wrong(
        2, "test_each_pass_uses_the_slab_anew", r"(?s)the slab is full.*the second is in eval\(\) mode",
        keep_checkpoints(hook="self.model.register_forward_pre_hook("
                              "lambda model, _: self.begin_forward() if model.training else None)")),
    "Stage2 in C1, too": Wrong(
        3, "test_each_config_has_its_parts", r"C1: system.zero of rank 0 is no config.stage",
        edited("10_whole_system", "System.over_replicas", ("config.stage(", "Stage2("))),
    "buckets of a size of its own": Wrong(
        3, "test_each_config_has_its_parts", r"made with bucket_bytes=2048, and rank 0's largest bucket has",
        over_replicas(options="**config.options, **options | {'bucket_bytes': 4096}")),
    "a max_norm of 0 is none": Wrong(
        4, "test_gradients_are_complete_before_they_are_read", r"after clip_grad_norm_\(0\) the scale is 1",
        clip(scale="if max_norm:\n    self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)")),
    "no norm is infinite": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"one element of rank 1's gradient was inf, .* rank 0 found the norm 0",
        clip(end="return norm.nan_to_num(nan=0.0, posinf=0.0)")),
    "the first loss scale stays": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"float16, .* from 359 to 1024: the norm is",
        clip(begin="self.zero.reduced_gradients()\nself.first = getattr(self, 'first', self.gradient_scale)\n"
                   "self.gradient_scale = self.first")),
    "a second call in a step starts anew": Wrong(
        4, "test_step_is_clipped_to_it", r"the second one returned \S+, and 0.2 is right",
        clip(begin="self.zero.reduced_gradients()\nif getattr(self, 'mine', 0) is self.gradient_scale:\n"
                   "    self.gradient_scale = self.before\nself.before = self.gradient_scale",
             end="self.mine = self.gradient_scale\nreturn norm")),
    "a scale that is dropped where the norm is small": Wrong(
        4, "test_a_loss_scale_is_taken_off", r"with a loss scale of 1024, clipped to 1e\+06",
        edited("10_whole_system", "System.clip_grad_norm_",
               ("return norm", "if norm <= max_norm:\n        self.gradient_scale = None\n    return norm"))),
    "memory beside is as large as the slab": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is",
        r"a call of shard\(\) took 1.1 MB beside buffers and slab, and 131.1 kB are enough, for one shard",
        shard("home = self.home_of[bucket]\nreturn home if bucket.gradient_shard is None else "
              "torch.empty_like(self.slab)[: len(home)]")),
    "as many zeros as the slab has": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"a call of whole\(\) took 1.1 MB beside buffers and slab",
        whole("zeros = torch.zeros(max(bucket.padded, len(self.slab)), dtype=bucket.dtype)\n"
              "return self.constant_buffers.take()[: bucket.padded].copy_(zeros[: bucket.padded])")),
    "a slab of numpy's beside it": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"ConstantMemory took 1.1 MB of Python's own memory, in arr",
        memory(homes="self.home_of = dict(zip(buckets, self.slab.split(shards)))\n"
                     "self.spare = __import__('numpy').zeros(sum(shards), 'f4')")),
    "what is sent stays as bytes": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"ConstantMemory took \S+ [kM]B of Python's own memory, in",
        {"ConstantMemory.give_back": function(
            "def give_back(self, whole):", "self.sent = bytearray(whole.view(torch.uint8).numpy())")}),
    "twenty buckets, and then one buffer": Wrong(
        1, "test_two_buffers_and_a_slab_are_all_there_is", r"in 4 rounds: in round \d whole\(\) gave the same buff",
        whole("self.calls = getattr(self, 'calls', 0) + 1\n"
              "buffer = self.constant_buffers.take() if self.calls < 20 else self.constant_buffers.buffers[0]\n"
              "return buffer[: bucket.padded].zero_()")),
    "the slab is emptied twenty times": Wrong(
        2, "test_each_pass_uses_the_slab_anew", r"(?s)the slab is full.*is the slab emptied before each forward pass",
        keep_checkpoints(hook="passes = iter(range(20))\nself.model.register_forward_pre_hook("
                              "lambda *_: next(passes, None) is not None and self.begin_forward() or None)")),
    "a number for each bucket is sent": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"norm of \d+ buckets .* for the same norm of \d+ .* one number for a",
        clip(norm="squares = torch.stack([each.float().square().sum() for each in counted])\n"
                  "collectives.all_reduce(squares, op='sum', group=self.mesh.data_group)\n"
                  "norm = squares.sum().sqrt() * (1 if self.gradient_scale is None else self.gradient_scale)")),
    "an all-reduce for each bucket": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"norm of \d+ buckets .* for the same norm of \d+ .* one number for a",
        clip(norm="squares = [each.float().square().sum() for each in counted]\nfor square in squares:\n"
                  "    collectives.all_reduce(square, op='sum', group=self.mesh.data_group)\n"
                  "norm = sum(squares).sqrt() * (1 if self.gradient_scale is None else self.gradient_scale)")),
    "the twenty-first norm is another one": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"was called 26 times for the same gradients, .* returned 2 norms",
        clip(end="self.calls = getattr(self, 'calls', 0) + 1\nreturn norm * (2 if self.calls > 20 else 1)")),
    "the scale has the dtype of the model": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"After clip_grad_norm_ to \S+ it is \S+ on rank 0, and \S+ is right",
        clip(scale="scale = precision.clip(self.gradient_scale, norm, max_norm)\n"
                   "self.gradient_scale = scale.to(next(self.model.parameters()).dtype)")),
    "the factor has the dtype of the model": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"After clip_grad_norm_ to \d\S+ it is \S+ on rank 0, and \S+ is right",
        clip(scale="factor, scale = precision.clip(None, norm, max_norm), self.gradient_scale\n"
                   "factor = factor.to(next(self.model.parameters()).dtype).float()\n"
                   "self.gradient_scale = factor if scale is None else scale * factor")),
    "the norm is returned in 16 bits": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"float16, .* in which dtype are they computed",
        clip(end="return norm.to(next(self.model.parameters()).dtype)")),
    "all gradients are put together first": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"In a larger model .* copy of the gradients, .* one number of each",
        clip(norm="norm = precision.global_norm([torch.cat(counted).float()], self.gradient_scale,\n"
                  "                             group=self.mesh.data_group)")),
    "all gradients in fp32 first": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"In a larger model .* copy of the gradients, .* one number of each",
        clip(norm="wide = [each.float() for each in counted]\n"
                  "norm = precision.global_norm(wide, self.gradient_scale, group=self.mesh.data_group)")),
    "all squares, and then their sum": Wrong(
        4, "test_the_norm_costs_a_few_numbers", r"In a larger model .* copy of the gradients, .* one number of each",
        clip(norm="squares = torch.cat([each.float().square() for each in counted]).sum()\n"
                  "collectives.all_reduce(squares, op='sum', group=self.mesh.data_group)\n"
                  "norm = squares.sqrt() * (1 if self.gradient_scale is None else self.gradient_scale)")),
    "ranks that have overflowed leave before the row": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"(?s)To look at: .* whose own part has overflowed, while",
        clip(together="if not norm.isfinite():\n    return norm\nsquares = norm.square()\n"
                      "collectives.all_reduce(squares, op='sum', group=self.mesh.model_group)\n"
                      "norm = squares.sqrt()"), hangs=True),
    "a rank that has overflowed does not come": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"(?s)To look at: .* whose own part has overflowed, while",
        clip(begin="self.zero.reduced_gradients()\nfor bucket in self.zero.buckets:\n"
                   "    if not bucket.gradient_shard.isfinite().all():\n        return torch.tensor(float('inf'))"),
        hangs=True),
    "a part that has overflowed does not count": Wrong(
        4, "test_the_norm_is_computed_in_fp32", r"one element of rank 1's gradient was inf, .* found the norm \d",
        clip(together="squares = norm.square().nan_to_num(0.0, 0.0)\n"
                      "collectives.all_reduce(squares, op='sum', group=self.mesh.model_group)\n"
                      "norm = squares.sqrt()")),
    "gradients of what all hold are averaged over the row": Wrong(
        3, "test_each_config_has_its_parts", r"C2, rank 0 of D × M = 1 × 2: forward, backward and step\(\) send \S+",
        over_replicas(end="""
            def same(gradient):
                gradient = gradient.clone()
                collectives.all_reduce(gradient, op="avg", group=self.mesh.model_group)
                return gradient
            for param in whole:
                param.register_hook(same)
            return stage
            """)),
    "what all hold comes from the first rank after each step": Wrong(
        3, "test_each_config_has_its_parts", r"C2, rank 0 of D × M = 1 × 2: forward, backward and step\(\) send \S+",
        {"System.step": """
            def step(self):
                self.zero.step()
                for param in self.model.replicated():
                    dist.broadcast(param.data, dist.get_global_rank(self.mesh.model_group, 0),
                                   group=self.mesh.model_group)
            """}),
}

RIGHT = {
    "other words": memory() | whole() | shard() | keep_checkpoints() | over_replicas() | clip(),
    "squares over one group of all ranks, a share of each copy": clip(
        counted="", norm="""
            squares = sum(bucket.gradient_shard.float().square().sum()
                          / (1 if bucket.group_index == 0 else self.mesh.model_group.size())
                          for bucket in self.zero.buckets)
            """,
        together="dist.all_reduce(squares)\nnorm = squares.sqrt()\n"
                 "norm = norm if self.gradient_scale is None else norm * self.gradient_scale")
    | over_replicas(groups='[{"params": cut, "cut": True}, {"params": whole, "cut": False}]')
    | {"System.begin_forward": "def begin_forward(self, module, inputs):\n"
                               "    if torch.is_grad_enabled():\n        self.slab.reset()"},
    "a buffer of its own kind, and homes by number": {
        "ConstantMemory.__init__": function(
            "def __init__(self, buckets, group=None):",
            "dtype, device = kind_of(buckets)",
            "size = dtype.itemsize * max(bucket.padded for bucket in buckets)",
            "self.constant_buffers = ConstantBuffers(size, dtype=dtype, device=device, group=group)",
            "ranks, start, self.starts = dist.get_world_size(group), 0, {}",
            function("for bucket in buckets:", "self.starts[id(bucket)] = start", "start += bucket.padded // ranks"),
            "self.slab, self.ranks = torch.zeros(start, dtype=dtype, device=device), ranks"),
        "ConstantMemory.shard": function(
            "def shard(self, bucket):", "start, size = self.starts[id(bucket)], bucket.padded // self.ranks",
            "if bucket.gradient_shard is not None:\n    return self.slab.new_empty(size)",
            "return self.slab[start : start + size]")},
}
SHORT = {"what all hold counts M times", "N for D"}

ORDER = "the two do not need each other, and both are there when the method returns"
ON_A_CPU = "the ranks of the grader have no GPU: there every device is the CPU"
UNTOLD = {
    "ConstantMemory.__init__: `self.constant_buffers = ConstantBuffers(largest, dtype=dtype, device=device, "
    "group=group)` a statement later": ORDER,
    "ConstantMemory.__init__: `ConstantBuffers(largest, dtype=dtype, device=device, group=group)` "
    "without device=device": ON_A_CPU,
    "ConstantMemory.__init__: `torch.zeros(sum(shards), dtype=dtype, device=device)` without device=device": ON_A_CPU,
    "ConstantMemory.__init__: `zip(buckets, self.slab.split(shards), strict=True)` without strict=True":
        "there are as many shards as buckets",
    "ConstantMemory.__init__: True turned": "there are as many shards as buckets",
    "System.keep_checkpoints: `self.slab = Slab(elements * sizes.layers, dtype=like.dtype, device=like.device)` "
    "a statement later": ORDER,
    "System.keep_checkpoints: `Slab(elements * sizes.layers, dtype=like.dtype, device=like.device)` "
    "without device=like.device": ON_A_CPU,
    "System.clip_grad_norm_: without @torch.no_grad()": "gradient shards do not want gradients themselves",
    "System.clip_grad_norm_: `self.zero.buckets`: all_buckets": "only stage 3 makes buckets of frozen parameters",
}
