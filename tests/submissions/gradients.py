"""Lesson 3: what goes wrong with P_os+g."""

from submissions import Wrong

OPEN = ("            if bucket.gradients is None:\n"
        "                bucket.gradients = bucket.zeros()  # [padded] the bucket opens\n")
GONE = "            self.backward.filled(bucket, param)\n        param.grad = None\n"
MISSING = ("        if bucket.gradients is None:\n"
           "            bucket.gradients = bucket.zeros()  # no gradient came on this rank: it counts as zero\n")
CLOSES = "        whole, bucket.gradients = bucket.gradients, None  # the bucket closes\n"
PART = "        part = torch.empty_like(bucket.parameter_shard)  # [padded / N]\n"
REDUCE = "        pending = collectives.reduce_scatter(part, whole, op=\"avg\", group=self.group, async_op=True)\n"
UNDER_WAY = "        self._reducing = bucket, whole, part, pending\n"
WAIT = "            pending.wait()\n            collectives.free(whole)"
FREE = "            collectives.free(whole)  # not before: the other ranks were reading it\n"
KEEP = ("            if bucket.gradient_shard is None:\n                bucket.gradient_shard = part\n"
        "            else:\n                bucket.gradient_shard += part  # from an earlier micro-batch\n")
ENDS = "    def backward_ends(self):\n        self._wait()\n"
COMPLETE = "        self._wait()  # one reduce-scatter is under way while autograd fills the next bucket\n"
UPDATE = "            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)\n"
GATHER = ("            gathering.append(\n                collectives.all_gather("
          "bucket.parameters, bucket.parameter_shard, group=self.group, async_op=True)\n            )\n")
GATHERED = "        for pending in gathering:\n            pending.wait()\n"
READY = "        self.reduced_gradients()\n        gathering = []\n"
FORGET = "        self.backward.forget()\n"
RESET = "        self.gradient_scale = None\n        for bucket"
EMPTY = "            bucket.gradients = bucket.gradient_shard = None\n"
NORM = "        norm = precision.global_norm(self.reduced_gradients(), self.gradient_scale, group=self.group)\n"
SCALE = "        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)\n"
RETURN = "        return norm\n"
NO_SYNC = "        return nullcontext()\n"
RANK = "dist.get_rank(self.group)"
SQUARES = "torch.stack([gradient.float().square().sum() for gradient in self.reduced_gradients()]).sum()"

# all gradients wait, whole, and are reduced when backward has ended
LATE = [
    (COMPLETE + MISSING + CLOSES, "        self.late = [*getattr(self, 'late', []), bucket]\n\n"
                                  "    def reduce(self, bucket):\n" + COMPLETE + MISSING + CLOSES),
    (ENDS, "    def backward_ends(self):\n        for bucket in self.late:\n            self.reduce(bucket)\n"
           "        self.late = []\n        self._wait()\n"),
]

WRONG = {
    "P_os in disguise: whole gradients until backward ends": Wrong(
        1, "test_no_whole_gradients_during_backward",
        r"during backward up to 1\d\d.\d kB of gradients live on rank 0, of 157.4 kB", LATE),
    "param.grad stays": Wrong(
        1, "test_no_whole_gradients_after_backward",
        r"rank 0 still holds \d+.\d kB of gradients after backward: .* leaves it 39.4 kB.*48 parameters still have",
        [(GONE, GONE.splitlines()[0] + "\n")]),
    "whole buckets stay": Wrong(
        1, "test_no_whole_gradients_after_backward", r"rank 0 still holds 19\d.\d kB of gradients after backward",
        [(CLOSES, "        whole = bucket.gradients\n"), (FREE, "")]),
    "the sum instead of the mean": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"the sum of the ranks' gradients, not their mean: 3 times too large",
        [(REDUCE, REDUCE.replace("avg", "sum"))], 3),
    "divided twice": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"averaged twice: they are 3 times too small",
        [(KEEP, "            part /= dist.get_world_size(self.group)\n" + KEEP)], 3),
    "an all-reduce, and a slice of it": Wrong(
        1, "test_backward_sends_a_reduce_scatter",
        r"It called all_reduce \d+ times.* An all-reduce sends twice what a reduce-scatter does",
        [(PART, ""), (REDUCE, "        import torch.distributed as torch_distributed\n"
                      "        torch_distributed.all_reduce(whole, group=self.group)\n"
                      f"        part = bucket.shard(whole, {RANK}).clone() / dist.get_world_size(self.group)\n"
                      "        pending = collectives.Pending([])\n")]),
    "the house's all-reduce, and a slice of it": Wrong(
        1, "test_backward_sends_a_reduce_scatter",
        r"sent 29\d.\d kB in backward, .* sends 146.\d kB.* An all-reduce sends twice",
        [(PART, ""), (REDUCE, "        collectives.all_reduce(whole, op=\"avg\", group=self.group)\n"
                      f"        part = bucket.shard(whole, {RANK}).clone()\n"
                      "        pending = collectives.Pending([])\n")]),
    "does not wait for the reduction": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"NaN: .*before its reduction had ended \(wait\)|started and nobody waited for",
        [(WAIT, "            collectives.free(whole)")], 2, True),
    "frees the bucket before its reduction ends": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"holds NaN: .*freed while the reduction was under way|whose memory was freed",
        [(UNDER_WAY, "        collectives.free(whole)\n" + UNDER_WAY), (FREE, "")], 3),
    "buckets begin with what lay in memory": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"holds NaN: memory that nobody wrote to",
        [(OPEN, OPEN.replace("bucket.zeros()", "torch.empty_like(bucket.parameters)"))], 2),
    "nothing is reduced": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"rank 0's shard holds its own gradient: the other ranks' parts were never",
        [(REDUCE, f"        part.copy_(bucket.shard(whole, {RANK}))\n        pending = collectives.Pending([])\n")], 2),
    "divided, and not reduced": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0's shard holds its own gradient / N",
        [(REDUCE, f"        part.copy_(bucket.shard(whole, {RANK}) / bucket.world_size)\n"
                  "        pending = collectives.Pending([])\n")], 2),
    "every rank keeps the first shard": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0 and rank 1 hold the same gradient shard",
        [(REDUCE, "        collectives.all_reduce(whole, group=self.group)\n"
                  "        part.copy_(bucket.shard(whole, 0))\n"
                  "        pending = collectives.Pending([])\n")], 2),
    "every rank keeps the whole mean": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"hold \d+ elements, and the whole gradient has \d+: P_os\+g leaves a rank 1/2",
        [(REDUCE, "        collectives.all_reduce(whole, group=self.group)\n        part = whole.clone()\n"
                  "        pending = collectives.Pending([])\n")], 2),
    "the last reduction is never waited for": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0 has no gradient for 1 of its \d+ buckets",
        [(ENDS, ENDS.replace("self._wait()", "pass"))], 2),
    "only full buckets are reduced": Wrong(
        1, "test_shards_hold_the_mean_gradient", r"rank 0 has no gradient for 1 of its \d+ buckets",
        [(COMPLETE, COMPLETE + "        if bucket.padded < self.buckets[0].padded:\n            return\n")], 2),
    "a bucket without gradient is skipped": Wrong(
        1, "test_a_missing_gradient_is_zero", r"(?s)one parameter got a gradient on rank 0 alone|has no gradient for",
        [(MISSING, "        if bucket.gradients is None:\n            return\n")]),
    "a bucket without gradient is reduced as it is": Wrong(
        1, "test_a_missing_gradient_is_zero",
        r"(?s)it raised AttributeError: 'NoneType'.*To look at: .*bucket.zeros\(\)",
        [(MISSING, "")]),
    "a parameter that lies in two buckets is put into the first": Wrong(
        1, "test_shards_hold_the_mean_gradient",
        r"gradients are lost: the shards hold zeros in their place|has no gradient",
        [("in buckets:\n            if bucket", "in buckets[:1]:\n            if bucket")], 2),
    "nobody collects the updated shards": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"rank 1's parameters differ from rank 0's in \d+ of 54876 elements .*must get the others'",
        [(GATHER, ""), (GATHERED, "")], 2),
    "collects before the update": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"parameters differ from rank 0's.* after the update",
        [(GATHERED, ""), (UPDATE + GATHER, GATHER + GATHERED + "        for bucket in self.buckets:\n" + UPDATE)], 2),
    "does not wait for the others' shards": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"differ from rank 0's|did not move|NaN|it raised",
        [(GATHERED, "")], 3),
    "everybody takes rank 0's parameters": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"\d+ of 54876 parameters did not move in step\(\)",
        [(GATHER, "            collectives.broadcast(bucket.parameters, group=self.group)\n")], 2),
    "the first bucket is forgotten": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"\d+ of 54876 parameters did not move",
        [(READY + "        for bucket in self.buckets:", READY + "        for bucket in self.buckets[1:]:")], 2),
    "goes up the gradient": Wrong(
        2, "test_every_rank_has_all_updated_parameters", r"went up the gradient",
        [(READY, READY + "        self.gradient_scale = -1.0\n")], 2),
    "updates twice": Wrong(
        2, "test_every_rank_has_all_updated_parameters",
        r"moved parameters \d times too far.* or the update made more than once|did not for",
        [(UPDATE, UPDATE + UPDATE)], 3),
    "a parameter group's weight decay is lost": Wrong(
        2, "test_a_step_is_the_optimizers", r"two parameter groups, 1 step: rank 0 has other parameters",
        [(UPDATE, "            optimizers.update(self.optimizer, self.optimizer.param_groups[0], bucket.master, "
                  "bucket.gradient_shard)\n")]),
    "a frozen parameter decays": Wrong(
        2, "test_a_step_is_the_optimizers", r"frozen, tied and unused parameters, 1 step: rank 0 has other parameters",
        [(READY, READY + "        for param in self.model.parameters():\n"
                         "            param.mul_(1.0 if param.requires_grad else 0.99)\n")]),
    "every rank keeps the whole optimizer state": Wrong(
        2, "test_holds_shards_after_a_step", r"rank 0 of 4 holds 1\d.\d bytes a parameter after a step of AdamW",
        [("            bucket.master = precision.master_of(bucket.parameter_shard)\n",
          "            bucket.master = precision.master_of(bucket.parameters)\n"),
         (UPDATE + GATHER, "            whole = bucket.zeros()\n"
                           "            collectives.all_gather(whole, bucket.gradient_shard, group=self.group)\n"
                           "            group = self.optimizer.param_groups[bucket.group_index]\n"
                           "            optimizers.update(self.optimizer, group, bucket.master, whole)\n")]),
    "gathers parameters and gradients": Wrong(
        2, "test_a_step_sends_as_much_as_data_parallelism",
        r"rank 0 sent 4\d\d.\d kB in a whole step, .* sends 292.\d kB",
        [(GATHER, GATHER + "            collectives.all_gather(bucket.zeros(), bucket.gradient_shard, "
                           "group=self.group)\n")]),
    "keeps old gradients": Wrong(
        3, "test_the_second_step_starts_afresh", r"the sum of both steps': zero_grad\(\) left the first one's",
        [(EMPTY, "            bucket.gradients = None\n")]),
    "does not start backward afresh": Wrong(
        3, "test_the_second_step_starts_afresh", r"call zero.zero_grad\(\) after zero.step\(\)",
        [(FORGET, "")]),
    "the shard is overwritten": Wrong(
        3, "test_micro_batches_add_up", r"the last micro-batch's gradient alone: each one overwrote the shard",
        [(KEEP, "            bucket.gradient_shard = part\n")]),
    "only the first micro-batch counts": Wrong(
        3, "test_micro_batches_add_up", r"the first micro-batch's gradient alone",
        [(KEEP, "            if bucket.gradient_shard is None:\n                bucket.gradient_shard = part\n")]),
    "micro-batches are averaged": Wrong(
        3, "test_micro_batches_add_up", r"not the mean gradient, summed over three micro-batches",
        [(KEEP, KEEP.replace("+= part", "= (bucket.gradient_shard + part) / 2"))]),
    "whole gradients wait for the last micro-batch": Wrong(
        3, "test_micro_batches_wait_in_shards",
        r"between two micro-batches rank 0 holds 1\d\d.\d kB of gradients, and its shard is 78.7 kB",
        [(NO_SYNC, "        return self.backward.accumulate()\n")]),
    "only shards are updated, not the 16-bit parameters": Wrong(
        3, "test_trains_as_one_process_would", r"bf16, 5 steps: rank 0 has other parameters",
        [(UPDATE, "            gradient = bucket.gradient_shard.to(bucket.master.dtype)\n"
                  "            gradient = gradient if self.gradient_scale is None else gradient * self.gradient_scale\n"
                  "            group = self.optimizer.param_groups[bucket.group_index]\n"
                  "            optimizers.update(self.optimizer, group, bucket.master, gradient)\n")]),
    "clipping lasts for ever": Wrong(
        4, "test_trains_with_clipping", r"training with clipping, 5 steps: rank 0 has other parameters",
        [(RESET, "        for bucket")]),
    "the norm of the own shards": Wrong(
        4, "test_clips_by_the_global_norm", r"it is the norm of this rank's shards alone",
        [(NORM, f"        norm = {SQUARES}.sqrt()\n")], 2),
    "norms are added": Wrong(
        4, "test_clips_by_the_global_norm", r"the ranks' norms were added, but their squares must be",
        [(NORM, f"        norm = {SQUARES}.sqrt()\n"
                "        collectives.all_reduce(norm, op='sum', group=self.group)\n")], 2),
    "returns the norm after clipping": Wrong(
        4, "test_clips_by_the_global_norm", r"it returned the norm after clipping",
        [(RETURN, "        return norm.clamp(max=max_norm)\n")], 2),
    "small gradients are made larger": Wrong(
        4, "test_clips_by_the_global_norm", r"a smaller norm than max_norm must be left alone",
        [(SCALE, "        self.gradient_scale = max_norm / (norm + 1e-6)\n")], 2),
    "the scale is not used": Wrong(
        4, "test_clips_by_the_global_norm", r"moved rank 0's parameters by 1?\d?.\d+, and it must be 0.1",
        [(UPDATE, UPDATE.replace(", self.gradient_scale", ""))], 2),
    "each element is clipped": Wrong(
        4, "test_clips_by_the_global_norm", r"clipping scales the gradient that the update uses, all of it alike",
        [(SCALE, "        for gradient in self.reduced_gradients():\n"
                 "            gradient.clamp_(-max_norm / 10, max_norm / 10)\n")], 2),
    "one rank alone skips a step that overflows": Wrong(
        4, "test_overflow_on_one_rank_is_everybodys", r"all ranks must take the step, or none",
        [(READY, "        if not all(gradient.isfinite().all() for gradient in self.reduced_gradients()):\n"
                 "            return\n" + READY)], hangs=True),
}

# ------------------------------------------------------------------------------------------------------------- right

SMALL_AND_BLOCKING = [
    ("world_size, bucket_bytes)\n", "world_size, bucket_bytes // 3 + 100)\n"),
    (REDUCE, "        collectives.reduce_scatter(part, whole, op=\"avg\", group=self.group)\n"
             "        pending = collectives.Pending([])\n"),
    (GATHER, "            collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group)\n"),
]

ONE_SHARD_A_PARAMETER = '''
"""No buckets: each parameter is cut into N shards, and travels alone, by torch's own collectives, which block."""
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from zero_minimal.foundations import layout, optimizers, precision
from zero_minimal.foundations.backward import Backward

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Sharded:
    def __init__(self, param, group_index, group):
        rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.params, self.group_index, self.group = [param], group_index, group
        self.device, self.dtype, self.size = param.device, param.dtype, param.numel()
        padded = -(-self.size // self.count) * self.count
        self.parameters = torch.zeros(padded, dtype=param.dtype)
        self.parameters[: self.size] = param.data.flatten()
        dist.broadcast(self.parameters, 0, group=group)
        param.data = self.parameters[: self.size].view(param.shape)
        self.parameter_shard = self.parameters.chunk(self.count)[rank]
        self.master = precision.master_of(self.parameter_shard)
        self.gradient_shard = None

    def reduce(self):
        param = self.params[0]
        whole = torch.zeros(self.parameters.shape, dtype=torch.float32)
        if param.grad is not None:
            whole[: self.size] = param.grad.flatten()
            param.grad = None
        mine = torch.zeros(self.parameter_shard.shape, dtype=torch.float32)
        reduce_scatter(mine, whole, group=self.group)
        mine = (mine / self.count).to(self.dtype)
        self.gradient_shard = mine if self.gradient_shard is None else self.gradient_shard + mine


class Stage2:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=None, param_groups=None, **options):
        groups = layout.parameter_groups(model, param_groups)
        self.model, self.group, self.gradient_scale = model, group, None
        index = {param: place for place, entry in enumerate(groups) for param in entry["params"]}
        self.buckets = [Sharded(param, index[param], group) for param in reversed(layout.trained(model, groups))]
        for param in model.parameters():
            param._zero_stage = "Stage2"
            if param not in index:
                dist.broadcast(param.data, 0, group=group)
        for buffer in model.buffers():
            dist.broadcast(buffer, 0, group=group)
        self.optimizer = optimizers.on_shards(optimizer_class, options, groups, self.buckets)
        self.backward = Backward(self)

    def backward_begins(self):
        pass

    def backward_ends(self):
        pass

    def gradient_arrived(self, param, buckets):
        self.backward.filled(buckets[0], param)

    def bucket_complete(self, bucket):
        bucket.reduce()

    def no_sync(self):
        return nullcontext()

    def reduced_gradients(self):
        if not self.backward.reduced:
            self.backward.finish()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        square = sum(shard.float().norm() ** 2 for shard in self.reduced_gradients())
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt() * (self.gradient_scale or 1.0)
        if norm > max_norm:
            self.gradient_scale = (self.gradient_scale or 1.0) * max_norm / norm
        return norm

    @torch.no_grad()
    def step(self):
        self.reduced_gradients()
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
        for bucket in self.buckets:
            all_gather(bucket.parameters, bucket.parameter_shard.clone(), group=self.group)
        self.backward.spent = True

    def zero_grad(self):
        self.backward.forget()
        self.gradient_scale = None
        for bucket in self.buckets:
            bucket.gradient_shard = bucket.params[0].grad = None

    @contextmanager
    def gather_parameters(self):
        yield
'''

WHOLE_OWNERS = '''
"""Each parameter has one owner: gradients are reduced to it, it updates, and broadcasts. Uses nothing of the house."""
import contextlib

import torch
import torch.distributed as dist
from torch import nn


class Stage2:
    def __init__(self, model, optimizer_class, *, group=None, bucket_bytes=0, param_groups=None, **options):
        self.model, self.group, self.gradient_scale = model, group, None
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0, group=group)
        groups = param_groups or [{"params": list(model.parameters())}]
        groups = [{**entry, "params": [p for p in entry["params"] if p.requires_grad]} for entry in groups]
        chosen = {param for entry in groups for param in entry["params"]}
        self.params = [param for param in reversed(list(model.parameters())) if param in chosen]
        self.owner, load = {}, [0] * self.world_size
        for param in sorted(self.params, key=lambda param: -param.numel()):
            self.owner[param] = load.index(min(load))
            load[self.owner[param]] += param.numel()
        self.mine = {
            param: nn.Parameter(param.data.float() if param.element_size() < 4 else param.data)
            for param in self.params if self.owner[param] == self.rank
        }
        self.optimizer = optimizer_class(
            [{**entry, "params": [self.mine[p] for p in entry["params"] if p in self.mine]} for entry in groups],
            **options,
        )
        self.gradients, self.ready, self.waiting, self.running = {}, set(), list(self.params), False
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, param):
        if not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.ready.add(param)
        while self.waiting and self.waiting[0] in self.ready:
            self.reduce(self.waiting.pop(0))

    def finish(self):
        for param in self.waiting:
            self.reduce(param)
        self.waiting, self.ready, self.running = list(self.params), set(), False

    def reduce(self, param):
        gradient = torch.zeros(param.shape) if param.grad is None else param.grad.float()
        param.grad = None
        dist.reduce(gradient, self.owner[param], group=self.group)
        if param in self.mine:
            gradient = (gradient / self.world_size).to(param.dtype)
            self.gradients[param] = self.gradients.get(param, 0) + gradient

    def no_sync(self):
        return contextlib.nullcontext()

    def reduced_gradients(self):
        return [self.gradients[param] for param in self.mine]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        total = torch.stack([gradient.float().square().sum() for gradient in self.reduced_gradients()]).sum()
        dist.all_reduce(total, group=self.group)
        before = 1.0 if self.gradient_scale is None else self.gradient_scale
        norm = total.sqrt() * before
        self.gradient_scale = before * torch.clamp(max_norm / norm, max=1.0)
        return norm

    @torch.no_grad()
    def step(self):
        for param, master in self.mine.items():
            scale = 1 if self.gradient_scale is None else self.gradient_scale
            master.grad = self.gradients[param].to(master.dtype) * scale
        self.optimizer.step()
        for param, master in self.mine.items():
            master.grad = None
            param.copy_(master)
        for param in self.params:
            dist.broadcast(param.data, self.owner[param], group=self.group)

    def zero_grad(self):
        self.gradients.clear()
        self.gradient_scale = None

    @contextlib.contextmanager
    def gather_parameters(self):
        yield
'''

RIGHT = {
    "smaller buckets, blocking": SMALL_AND_BLOCKING,
    "one shard a parameter": ONE_SHARD_A_PARAMETER,
    "whole parameters have owners": WHOLE_OWNERS,
}
