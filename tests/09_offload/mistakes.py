"""Submissions for lesson 9: wrong ones, each with the check that must catch it, and right ones."""

from submissions import Wrong, edited, function

KEEP = "def keep(self, parcel, number, group_index):"
HAND_OVER = "def _hand_over(self, bucket):"
GRADIENT = "def gradient(self, parcel, number, adds):"
LEAVE = "def _leave(self, bucket, gradient_shard):"
WAIT = "def _wait(self):"
RETURNED = "def _returned(self):"
THROUGH = "def through(self, stretches):"
READ = "def _read(self, stretch, buffer):"
WRITE = "def begin_to_write(self, stretch, buffer):"


def wait(before, leaves, after=""):
    """Of stage 1."""
    return {"Offloaded1._wait": function(
        "def _wait(self):", before, function("if self.reduced:", leaves, "self.reduced = None"), after)}


OWN = "own = parcel.tensor.clone()"
MASTER = "master = precision.master_of(own) if own.element_size() < 4 else nn.Parameter(own)"
SHARD = "self.shards[number] = Shard(own.dtype, group_index, master, torch.zeros_like(own))"
EMPTIED = "self.bus.emptied(parcel)"


def keep(*parts):
    return {"HostState.keep": function(KEEP, *parts)}


SENDS = 'self.bus.send(("parameters",), shard.master.data.to(shard.dtype))'
DONE = "done.append(shard.master.data.to(shard.dtype, copy=True))"
OPTIONS = "for group, its in zip(self.optimizer.param_groups, options, strict=True):\n    group.update(its)"


def update(*, options=OPTIONS, shards="self.in_turn()", gradient="gradient = shard.gradient.to(shard.master.dtype)",
           scaled="gradient = gradient if scale is None else gradient * scale",
           one="optimizers.update(self.optimizer, group, shard.master, gradient)",
           sends=SENDS, before="", after=""):
    body = [gradient, scaled, "group = self.optimizer.param_groups[shard.group_index]", before, one, sends, after]
    return {"HostState.update": "@torch.no_grad()\n" + function(
        "def update(self, parcel, options, scale):", options, function(f"for shard in {shards}:", *body))}


def hand_over(*parts):
    return {"Offloaded._hand_over": function(
        HAND_OVER, 'self.host.send(("keep", bucket.away.number, bucket.group_index), bucket.parameter_shard)', *parts)}


def gradient(*parts):
    return {"HostState.gradient": function(GRADIENT, "shard = self.shards[number]", *parts)}


ADDED = """
if adds and shard.has_gradient:
    shard.gradient += parcel.tensor
else:
    shard.gradient.copy_(parcel.tensor)
"""
SAID = "shard.has_gradient = True"


def leave(*parts):
    return {"Offloaded._leave": function(LEAVE, *parts)}


SENT = 'self.host.send(("gradient", bucket.away.number, self.adds), gradient_shard)'


def returned(*, scale="self.gradient_scale", options="options_of(self.optimizer)",
             parcel="parcel = self.host.receive()", copied="bucket.parameter_shard.copy_(parcel.tensor)",
             emptied="self.host.emptied(parcel)", known="bucket.away.know(bucket)",
             told="seams.tell('update_ends', bucket)", over="yield bucket", first="", turns="self.in_turn()",
             opt="self.optimizer._opt_called = True"):
    body = [parcel, copied, emptied, known, told, over]
    return {"Offloaded._returned": function(
        RETURNED, f"scale = {scale}",
        "scale = scale.cpu() if isinstance(scale, Tensor) else scale", first,
        f'self.host.send(("update", {options}, scale))', opt,
        function(f"for bucket in {turns}:", *body))}


READY = "self.reducer.complete()"
EDITS = "for bucket in self.buckets:\n    seams.tell('update_begins', bucket)\n    precision.keep_changes(bucket)"
GATHER = """
def gather(bucket):
    return collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket,
                                  async_op=True)
"""
STATISTICS = "replicas.broadcast_statistics(self.model, self.group)"
SPENT = "self.reducer.needs_zero_grad = True"
GATHERED = "for pending in [gather(bucket) for bucket in self._returned()]:\n    pending.wait()"


def step(*parts):
    return {"GatheredAfter.step": "@torch.no_grad()\n" + function("def step(self):", *parts)}


def through(*, first="reading = self._begin_to_read(stretches[0])", each="buffer = reading.result()",
            ahead="if following is not None:\n    reading = self._begin_to_read(following)", out="yield buffer",
            behind="self.begin_to_write(stretch, buffer)"):
    return {"ReadAhead.through": function(
        THROUGH, first, function("for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):", each,
                                 ahead, out, behind))}


def read(*parts):
    return {"ReadAhead._read": function(
        READ, *parts, "self.file.read(stretch.start, buffer.memory[: stretch.size])", "return buffer")}


STRETCH_IS_WRITTEN, BUFFER_IS_WRITTEN = "stretch.written.result()", "buffer.written.result()"

ONE, TWO, THREE = ("test_the_host_keeps_its_own_copy", "test_the_host_updates_its_masters",
                   "test_each_shard_returns_in_its_dtype")
AT_ONCE = "test_each_shard_returns_as_soon_as_it_is_updated"
NOTHING_HERE, ADDS_UP = "test_a_rank_keeps_no_optimizer_state", "test_micro_batches_add_up_on_the_host"
MEAN, CROSS = "test_the_host_has_the_mean_gradient", "test_gradients_cross_as_shards_in_16_bit"
BESIDE, STAYS = "test_gradients_leave_while_backward_goes_on", "test_no_gradient_shard_stays"
BACK, TRAINS_3 = "test_parameters_cross_as_shards_in_16_bit", "test_stage_3_trains_as_without_offload"
TOLD = "test_who_minds_the_update_is_told"
BUFFER, KERNEL = "test_a_buffer_is_read_before_it_is_given_back", "test_the_kernel_counts_what_left"
TRAINS, GATHERS = "test_stages_1_and_2_train_as_without_offload", "test_a_bucket_is_gathered_while_the_next_crosses"
LATE, EDIT = "test_statistics_are_alike_and_a_late_backward_is_refused", "test_an_edit_goes_along"
CHANGES, MEANWHILE = "test_changes_are_in_the_file_when_they_are_read_again", "test_reading_and_writing_go_on_meanwhile"
FEW, DISK = "test_three_buffers_serve_any_number", "test_a_host_with_a_disk_trains_as_one_without"

WRONG = {
    # step 1
    "a master lies in the buffer of the bus": Wrong(
        1, ONE, r"has NaN now: its master lies in the bus's buffer",
        keep("own = parcel.tensor", MASTER, SHARD, EMPTIED)),
    "masters of 16 bits": Wrong(
        1, ONE, r"float16, and its master is of float16: a master has 32",
        keep(OWN, "master = nn.Parameter(own)", SHARD, EMPTIED)),
    "every master has 32 bits": Wrong(
        1, ONE, r"a shard of float64, and its master is of float32: .* the shard's own dtype",
        keep(OWN, "master = precision.master_of(own)", SHARD, EMPTIED)),
    "no buffer is ever given back": Wrong(
        1, ONE,
        r"rank 0 waited at the bus, in send: (.|\n)*host of rank 0 waited at the bus, in receive: (.|\n)*given back",
        keep(OWN, MASTER, SHARD), hangs=True),
    "the scale stays on the rank": Wrong(1, TWO, r"gradients were not multiplied with `scale`", update(scaled="")),
    "the learning rate of the first step": Wrong(
        1, TWO, r"of group 0 and 1 lr, weight_decay, betas, warmth are still the first",
        update(options="")),
    "of the options of now lr alone": Wrong(
        1, TWO, r"of group 0 and 1 weight_decay, betas, warmth are still the first ones: a scheduler has changed them",
        update(options=OPTIONS.replace("group.update(its)", "group['lr'] = its['lr']"))),
    "of the options of now those that it thought of": Wrong(
        1, TWO, r"of group 0 and 1 warmth are still the first ones.* all options that came, whatever their names",
        update(options=OPTIONS.replace("group.update(its)", "group.update({name: its[name] for name in KNOWN})")
               .replace("for group", "KNOWN = 'lr', 'betas', 'weight_decay'\nfor group"))),
    "the options of now of the first group alone": Wrong(
        1, TWO, r"of group 1 lr, weight_decay, betas, warmth are still the first ones",
        update(options="self.optimizer.param_groups[0].update(options[0])")),
    "scaled in 16 bits": Wrong(
        1, TWO, r"shards of bfloat16 .* the host's masters are off by \S+ at most: each .* in fp32",
        update(gradient="gradient = shard.gradient if scale is None else shard.gradient * scale",
               scaled="gradient = gradient.to(shard.master.dtype)")),
    "parameters come back in fp32": Wrong(
        1, THREE, r"parameters of bfloat16 came back as float32: 4 bytes", update(
            sends='self.bus.send(("parameters",), shard.master.data)')),
    "what comes back is a step old": Wrong(
        1, THREE, r"parcel 0 of an update is what shard 0's master was before it: a step old",
        update(before=SENDS, sends="")),
    "the master stays on the rank": Wrong(
        1, NOTHING_HERE, r"110.6 kB of it are bucket.master: that lives on the host",
        hand_over("bucket.master = precision.master_of(bucket.parameter_shard)")),
    "the host raises": Wrong(
        1, TWO, r"^rank 0: the host of rank 0 failed:\nit raised ZeroDivisionError: .*\n.*line \d+ in update",
        update(after="1 / 0")),
    "the host never ends": Wrong(
        1, TWO, r"the host of rank 0 stood at line \d+ of .* \(update\)", update(after="while True:\n    pass"),
        hangs=True),
    "the host leaves": Wrong(
        1, TWO, r"the host process of rank 0 is gone\nit ended with exit code 3", update(after="os._exit(3)"),
        top="import os\n"),
    # step 2
    "the next micro-batch replaces the one before": Wrong(
        2, ADDS_UP, r"adds=True, and 3 gradients .*is that of the last one alone",
        gradient("shard.gradient.copy_(parcel.tensor)", SAID, EMPTIED)),
    "gradients add up for ever": Wrong(
        2, ADDS_UP, r"is that of all since the beginning: after forget\(\)",
        gradient(ADDED.replace(" and shard.has_gradient", ""), SAID, EMPTIED)),
    "the sum is that of the last two": Wrong(
        2, ADDS_UP, r"adds=True, and 3 gradients .*is that of the last two: each is added to the sum of all before it",
        gradient("came = parcel.tensor.clone()", "shard.gradient = came", "if adds and shard.has_gradient:\n"
                 "    shard.gradient = self.last[number] + came",
                 "self.last = {**getattr(self, 'last', {}), number: came}", SAID, EMPTIED)),
    "what was forgotten is multiplied by 0": Wrong(
        2, ADDS_UP, r"Before forget\(\) there was one .* What is forgotten is replaced, not multiplied by 0",
        gradient("had = adds and shard.has_gradient", "shard.gradient = parcel.tensor + had * shard.gradient",
                 SAID, EMPTIED)),
    "what was forgotten is subtracted": Wrong(
        2, ADDS_UP, r"Before forget\(\) there was one .* What is forgotten is replaced, not multiplied by 0",
        gradient("if not (adds and shard.has_gradient):\n    shard.gradient -= shard.gradient",
                 "shard.gradient += parcel.tensor", SAID, EMPTIED)),
    "what has overflowed becomes a large number": Wrong(
        2, ADDS_UP, r"the host answered with True before, and True then.*no step is skipped",
        gradient(ADDED.replace("parcel.tensor", "parcel.tensor.nan_to_num()"), SAID, EMPTIED)),
    "16 bits are added up in fp32, and kept so": Wrong(
        2, ADDS_UP, r"gradients of bfloat16 came for 60 elements, .* 360 are right, .* In which dtype does a sum stay",
        gradient(ADDED.replace("+= parcel.tensor", "= shard.gradient.float() + parcel.tensor"), SAID, EMPTIED)),
    "a sum in fp32 beside the gradient": Wrong(
        2, ADDS_UP, r"gradients of bfloat16 came for 60 elements, .* 360 are right, .* In which dtype does a sum stay",
        gradient("had = adds and shard.has_gradient", "before = shard.gradient if had else 0",
                 "shard.gradient = parcel.tensor.float() + before",
                 SAID, EMPTIED)),
    "gradients leave in fp32": Wrong(
        2, CROSS, r"18432 bytes do not fit into a buffer of the bus(.|\n)*in its own 16 bits",
        leave(SENT.replace("gradient_shard)", "gradient_shard.float())")), world_size=2),
    "whole gradients leave": Wrong(
        2, CROSS, r"18432 bytes do not fit(.|\n)*this rank's shard of a bucket",
        wait("super()._wait()", "self._leave(self.reduced, self.reduced.gradients)")),
    "the last bucket stays": Wrong(
        2, MEAN, r"Offloaded1: of \d+ gradient shards the host of rank 0 has nothing for bucket \d+: each leaves",
        wait("super()._wait()", "if self.reduced is not self.buckets[-1]:\n"
             "    self._leave(self.reduced, self.reduced.gradient_shard)"), world_size=2),
    "a shard leaves before its reduction has ended": Wrong(
        2, MEAN, r"Offloaded1|rank \d's shard holds its own gradient|NaN",
        wait("", "self._leave(self.reduced, self.reduced.gradient_shard)", "super()._wait()"), world_size=2),
    "all gradients leave at the end": Wrong(
        2, BESIDE, r"came to the last of 6 layers, 0 gradient shards of rank 0 had",
        wait("super()._wait()", "self.late = [*getattr(self, 'late', []), self.reduced]")
        | {"Offloaded1.backward_ends": function(
            "def backward_ends(self):", "super().backward_ends()", function(
                "for bucket in getattr(self, 'late', []):", "self._leave(bucket, bucket.gradient_shard)"),
            "self.late = []")}),
    "each shard is waited for": Wrong(
        2, BESIDE, r"the bus was idle \(\d of \d times\), though a shard takes 400 ms",
        leave(SENT, 'self.host.ask("finite")')),
    "what leaves is looked up too late": Wrong(
        2, MEAN, r"Offloaded2: .*no gradient shard was sent to the host. What super\(\)\._wait\(\) sets back",
        {"LeavesAtOnce._wait": function(WAIT, "super()._wait()", function(
            "if self.reducing:", "bucket = self.reducing.bucket", "self._leave(bucket, bucket.gradient_shard)",
            "bucket.gradient_shard = None"))}, world_size=2),
    "each gradient shard is kept": Wrong(
        2, STAYS, r"Offloaded2: after backward rank 0 holds .* did not hold before",
        {"LeavesAtOnce._wait": function(WAIT, function(
            "if self.reducing:", "bucket = self.reducing.bucket", "super()._wait()",
            "self._leave(bucket, bucket.gradient_shard)"))}),
    "a shard that has left stays here too": Wrong(
        2, STAYS, r"Offloaded2: after backward rank 0 holds .* did not hold before",
        {"LeavesAtOnce._wait": function(WAIT, function(
            "if self.reducing:", "bucket = self.reducing.bucket", "bucket.gradient_shard = None", "super()._wait()",
            "self._leave(bucket, bucket.gradient_shard)"))}),
    # step 3
    "the host does not know that the rank has what came": Wrong(
        3, BACK, r"sent 6 tensors to the host \(changed\)", returned(known="")),
    "parameters pile up": Wrong(
        3, BACK, r"after three steps of AdamW rank 0 holds .* what else of the update stays here",
        returned(known="bucket.away.know(bucket)\nself.old = [*getattr(self, 'old', []), parcel.tensor.repeat(3)]")),
    "what came is read after its buffer was given back": Wrong(
        3, BUFFER, r"parameters are NaN at the end. A buffer of the bus",
        returned(copied="", emptied="self.host.emptied(parcel)\nbucket.parameter_shard.copy_(parcel.tensor)")),
    "what came is taken as it lies there": Wrong(
        3, BACK, r"parameter_shard lies in the bus's buffer: copy into it",
        returned(copied="bucket.parameter_shard = parcel.tensor")),
    "what came is never given back": Wrong(
        3, BACK, r"ranks 0 and 1 waited in receive, at line \d+ of .*_returned(.|\n)*the host of ranks 0 and 1 waited "
        r"in send, at line \d+ of .*update(.|\n)*must be given back", returned(emptied=""), hangs=True),
    "a shard is taken for that of another bucket": Wrong(
        3, TRAINS_3, r"must match the size of tensor(.|\n)*self\.in_turn\(\)", returned(turns="self.buckets")),
    "clipped by this rank's norm": Wrong(
        3, TRAINS_3,
        r"The norm that clip_grad_norm_ returned is \S+ in step 1, and \S+ is right|the gradients differently",
        {"Offloaded.clip_grad_norm_": function(
            "def clip_grad_norm_(self, max_norm):", READY, 'norms, dtype = self.host.ask("norms")',
            "norm = torch.tensor(norms, dtype=dtype).square().sum().sqrt()",
            "norm = norm if self.gradient_scale is None else norm * self.gradient_scale",
            "self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)", "return norm")}),
    "the scale is forgotten": Wrong(
        3, TRAINS_3, r"twelve steps(.|\n)*Does self.gradient_scale", returned(scale="None")),
    "a scale of 0 stays on the rank": Wrong(
        3, TRAINS_3, r"twelve steps(.|\n)*Step \d+: .*(scale|infinite)(.|\n)*also where it is 0",
        returned(scale="self.gradient_scale or None")),
    "a number of 0 stays on the rank": Wrong(
        3, TRAINS_3, r"twelve steps(.|\n)*Step \d+: .*gradient_scale is 0(.|\n)*also where it is 0",
        returned(scale="1 if self.gradient_scale is None else self.gradient_scale",
                 first="scale = scale if isinstance(scale, Tensor) else scale or 1")),
    "the options go along for six steps": Wrong(
        3, TRAINS_3, r"twelve steps.*Offloaded3 beside Stage3: other parameters(.|\n)*the options of now",
        returned(first="self.count = getattr(self, 'count', 0) + 1\nif self.count <= 6:\n"
                       "    self.options = options_of(self.optimizer)", options="self.options")),
    "the learning rate alone goes along": Wrong(
        3, TRAINS_3, r"a learning rate that falls(.|\n)*the options of now",
        returned(options="[{'lr': group['lr']} for group in self.optimizer.param_groups]")),
    "of the options those go along that it thought of": Wrong(
        3, TRAINS_3, r"a learning rate that falls(.|\n)*the options of now",
        returned(options="[{'lr': group['lr'], 'betas': group['betas'], 'weight_decay': group['weight_decay']}\n"
                         "for group in self.optimizer.param_groups]")),
    "the first group's options go along for all": Wrong(
        3, TRAINS_3, r"a learning rate that falls(.|\n)*the options of now",
        returned(options="[options_of(self.optimizer)[0] for _ in self.optimizer.param_groups]")),
    "the options are those of the start": Wrong(
        3, TRAINS_3, r"twelve steps(.|\n)*the options of now",
        returned(first="self.first = getattr(self, 'first', None) or options_of(self.optimizer)",
                 options="self.first")),
    "a rank keeps momentum and variance, too": Wrong(
        3, KERNEL, r"the process of rank 0 grew by \S+ MB, as the kernel counts",
        returned(known="bucket.away.know(bucket)",
                 told="bucket.copies = [torch.ones(parcel.tensor.numel()) for _ in range(4)]")),
    # step 4
    "nobody gathers": Wrong(
        4, TRAINS, r"after training rank 1 has other parameters than rank 0: each rank",
        step(READY, EDITS, "for _ in self._returned():\n    pass", STATISTICS, SPENT)),
    "gathered when all are back": Wrong(
        4, GATHERS, r"crossed while no gather was under way",
        step(READY, EDITS, GATHER, GATHERED.replace("self._returned()", "list(self._returned())"), STATISTICS, SPENT)),
    "each gather is waited for": Wrong(
        4, GATHERS, r"crossed while no gather was under way",
        step(READY, EDITS, GATHER, "for bucket in self._returned():\n    gather(bucket).wait()", STATISTICS, SPENT)),
    "the gathers are never waited for": Wrong(
        4, GATHERS, r"6 of 6 gathers were still on their way",
        step(READY, EDITS, GATHER, "self.pending = [gather(bucket) for bucket in self._returned()]", STATISTICS,
             SPENT)),
    "what the gathers brought is not waited for": Wrong(
        4, TRAINS, r"each Work of a gather must be waited for before step\(\) returns",
        step(READY, EDITS, GATHER, "self.pending = [gather(bucket) for bucket in self._returned()]", STATISTICS,
             SPENT), hangs=True),
    "each rank has statistics of its own": Wrong(
        4, LATE, r"running mean is .* on rank 1 and .* on rank 0", step(READY, EDITS, GATHER, GATHERED, SPENT)),
    "an edit is overwritten": Wrong(
        4, EDIT, r"moved .*weight.* by 1 on rank 0", step(READY, GATHER, GATHERED, STATISTICS, SPENT)),
    "an edit goes along in training alone": Wrong(
        4, EDIT, r"in eval\(\) mode, and step\(\) of SGD with lr 0 moved .* by 1 on rank 0",
        step(READY, EDITS.replace("    precision", "    if self.model.training:\n        precision"), GATHER, GATHERED,
             STATISTICS, SPENT)),
    "edits of one bucket go along": Wrong(
        4, EDIT, r"moved layers\.0\.\S+ .*by 1 on rank 0: .*in each bucket",
        step(READY, EDITS.replace("precision", "if bucket is self.buckets[0]:\n        precision"), GATHER, GATHERED,
             STATISTICS, SPENT)),
    "where one bucket was edited the others are not looked at": Wrong(
        4, EDIT, r"moved layers\.0\.\S+ .*by 1 on rank 0: .*in each bucket",
        step(READY, """
            for bucket in self.buckets:
                seams.tell('update_begins', bucket)
            for bucket in self.buckets:
                seen = bucket.away.seen
                precision.keep_changes(bucket)
                if bucket.away.seen != seen:
                    break
            """, GATHER, GATHERED, STATISTICS, SPENT)),
    # step 5
    "what fails in writing is not heard of": Wrong(
        5, CHANGES, r"write \d failed half-way.* raised nothing: .*result\(\) of a Future does that",
        read("wait([stretch.written, buffer.written])"), top="from concurrent.futures import wait\n"),
    "a write that fails is logged": Wrong(
        5, CHANGES, r"write \d failed half-way.* raised nothing: .*result\(\) of a Future does that",
        {"ReadAhead._write": function(
            "def _write(self, begin, memory):", "try:\n    self.file.write(begin, memory)",
            "except RuntimeError as error:\n    print(error)")}
        | edited("09_offload", "ReadAhead.begin_to_write", ("self.file.write, ", "self._write, "))),
    "a read that fails is logged": Wrong(
        5, CHANGES, r"read \d failed half-way.* raised nothing: .*result\(\) of a Future does that",
        {"ReadAhead._read": function(
            READ, STRETCH_IS_WRITTEN, BUFFER_IS_WRITTEN,
            "try:\n    self.file.read(stretch.start, buffer.memory[: stretch.size])\n"
            "except RuntimeError as error:\n    print(error)", "return buffer")}),
    "nothing is written": Wrong(5, CHANGES, r"nothing was written to the file", through(behind="")),
    "read while it is still on its way to the file": Wrong(
        5, CHANGES, r"in pass 2 stretch \d held 0 of 1 additions: it was read while", read(BUFFER_IS_WRITTEN)),
    "a buffer is filled before it was written": Wrong(
        5, CHANGES, r"7 stretches.*(held|got|has) ", read(STRETCH_IS_WRITTEN)),
    "all of a stretch is written": Wrong(
        5, CHANGES, r"\.read and \.written have counted \(256, 256\) bytes, and \(256, 192\)",
        {"ReadAhead.begin_to_write": function(
            WRITE, "self.written += stretch.size", "buffer.written = stretch.written = self.writer.submit(",
            "    self.file.write, stretch.start, buffer.memory[: stretch.size])")}),
    "changes are written where the stretch begins": Wrong(
        5, CHANGES, r"at the front of stretch \d, .* or was written at another place of the file",
        {"ReadAhead.begin_to_write": function(
            WRITE, "changed = buffer.memory[stretch.changes : stretch.size]", "self.written += changed.nbytes",
            "buffer.written = stretch.written = self.writer.submit(self.file.write, stretch.start, changed)")}),
    "copies wait to be written": Wrong(
        5, FEW, r"\d+ of \d+ writes took memory that lies in none of the three buffers, and up to \d+ writes were not",
        {"ReadAhead.begin_to_write": function(
            WRITE, "changed = buffer.memory[stretch.changes : stretch.size].clone()",
            "self.written += changed.nbytes", "buffer.written = stretch.written = self.writer.submit(",
            "    self.file.write, stretch.start + stretch.changes, changed)")} | read(STRETCH_IS_WRITTEN)),
    "read when it is asked for": Wrong(
        5, MEANWHILE, r"of 5 stretches 0 were being read while",
        through(first="", each="buffer = self._begin_to_read(stretch).result()", ahead="")),
    "each write is waited for": Wrong(
        5, MEANWHILE, r"5 of 5 stretches were written to the end before",
        through(behind="self.begin_to_write(stretch, buffer)\nbuffer.written.result()")),
    "all is read at once": Wrong(
        5, FEW, r"up to \d were read, or being read, and not worked on yet",
        through(first="readings = [self._begin_to_read(stretch) for stretch in stretches]",
                each="buffer = readings.pop(0).result()", ahead="")),
    "a new buffer for each stretch": Wrong(
        5, FEW, r"7 stretches of a file were read into \d+ pieces of memory|were read into \d+ pieces",
        {"ReadAhead._begin_to_read": function(
            "def _begin_to_read(self, stretch):", "self.read += stretch.size",
            "self.buffers.append(Buffer(stretch.size))",
            "return self.reader.submit(self._read, stretch, self.buffers[-1])")}),
    "shards are updated where they are not": Wrong(
        5, DISK, r"the host of rank \d failed(.|\n)*in update(.|\n)*self.in_turn\(\)",
        update(shards="self.shards.values()")),
}
WRONG |= {  # what strangers handed in, and had full marks
    "all are updated, then all are sent": Wrong(
        1, AT_ONCE, r"in update 1 of AdamW the shards were sent when 3, 3 and 3 of 3 masters had been updated",
        edited("09_offload", "HostState.update", ("for shard in", "done = []\n    for shard in"), (SENDS, DONE + """
    for parameters in done:
        self.bus.send(("parameters",), parameters)"""))),
    "a shard is sent when the next is updated": Wrong(
        1, AT_ONCE, r"in update 1 of AdamW the shards were sent when 2, 3 and 3 of 3 masters had been updated",
        edited("09_offload", "HostState.update", ("for shard in", "done = []\n    for shard in"), (SENDS, DONE + """
        if len(done) > 1:
            self.bus.send(("parameters",), done[-2])
    self.bus.send(("parameters",), done[-1])"""))),
    "who listens is not told that buckets change": Wrong(
        4, LATE, r"came back to rank 0, step\(\) had told of 0 that they change now",
        edited("09_offload", "GatheredAfter.step", ('    seams.tell("update_begins", bucket)\n    ', "    "))),
    "who listens is told when buckets have changed": Wrong(
        4, LATE, r"came back to rank 0, step\(\) had told of 0 that they change now",
        step(READY, "for bucket in self.buckets:\n    precision.keep_changes(bucket)", GATHER, GATHERED,
             "for bucket in self.buckets:\n    seams.tell('update_begins', bucket)", STATISTICS, SPENT)),
    "a scale of 0 is none": Wrong(
        1, TWO, r"after update \d+ of AdamW .*scale .*\b0.* a scale of 0 was taken for none",
        edited("09_offload", "HostState.update", ("if scale is not None:", "if scale:"))),
    "a tensor of 0 is no scale": Wrong(
        1, TWO, r"after update \d+ of AdamW .*scale a tensor of 0.* a scale of 0 was taken for none",
        edited("09_offload", "HostState.update",
               ("if scale is not None:", "if isinstance(scale, (int, float)) or scale:"))),
    "the host skips a shard that has overflowed": Wrong(
        1, TWO, r"one gradient infinite or NaN.*: a shard was not updated where one of its gradients is infinite",
        update(one="if gradient.isfinite().all():\n"
                   "    optimizers.update(self.optimizer, group, shard.master, gradient)")),
    "an update whose scale is 0 moves nothing": Wrong(
        1, TWO, r"after update \d+ of AdamW .*scale .*\b0.* 3 of 3 masters are as they were before",
        update(one="if scale is None or scale != 0:\n"
                   "    optimizers.update(self.optimizer, group, shard.master, gradient)")),
    "after a warm-up of ten updates options stay as they are": Wrong(
        1, TWO, r"after update 11 of AdamW .*: the options are still those of update 10: a scheduler has changed them",
        update(options="self.came = getattr(self, 'came', 0) + 1\nif self.came <= 10:\n"
                       + "".join(f"    {line}\n" for line in OPTIONS.splitlines()))),
    "the gradient itself is scaled": Wrong(
        1, TWO, r"after update \d+ of AdamW on shards of float32 .* stays as it came.* a tensor of its own",
        edited("09_offload", "HostState.update", ("gradient = gradient * scale", "gradient.mul_(scale)"))),
    "a buffer is written to its end": Wrong(
        5, CHANGES, r"(?s)was written at another place of the file|which nobody changes, is \d+ in the file",
        edited("09_offload", "ReadAhead.begin_to_write", (" : stretch.size]", " :]"))),
    "after an update the next gradient is the first again": Wrong(
        2, "test_micro_batches_add_up_on_the_host", r"with an update between them: .*that of the last one alone",
        edited("09_offload", "HostState.update",
               ("self.bus.send(", "shard.has_gradient = False\n        self.bus.send("))),
    "all 16 bits return by way of bf16": Wrong(
        1, "test_each_shard_returns_in_its_dtype", r"not what shard \d's master is after it, rounded to float16",
        edited("09_offload", "HostState.update", ("shard.master.data.to(shard.dtype)",
               "(shard.master.data.bfloat16() if shard.dtype.itemsize < 4 else shard.master.data).to(shard.dtype)"))),
    "a buffer is given back when the next bucket is asked for": Wrong(
        3, BUFFER, r"6 parcels came to rank 0. All of them were read, and 5 were given back",
        returned(emptied="", over="yield bucket\nself.host.emptied(parcel)")),
    "stage 1 adds on the host what it has added up": Wrong(
        4, "test_stages_1_and_2_train_as_without_offload", r"Offloaded1 beside Stage1: other .*all micro-batches",
        edited("09_offload", "Offloaded._leave", ("self.adds", "True")), 2),
    "statistics without the group": Wrong(
        4, "test_statistics_are_alike_and_a_late_backward_is_refused", r"(?s).*",
        edited("09_offload", "GatheredAfter.step", ("(self.model, self.group)", "(self.model)")), hangs=True),
    "a stand-in in fp32, whatever the master is": Wrong(
        1, "test_a_rank_keeps_no_optimizer_state", r"of a model in fp64 what stands for a master on rank 0 is float32",
        edited("09_offload", "Offloaded._hand_over", ("torch.float32 if bucket.dtype.itemsize < 4 else bucket.dtype",
               "torch.float32"))),
    "autograd is not told": Wrong(
        3, TOLD, r"backward of that forward: rank 0 let it pass", returned(told="")),
    "autograd is told of what stands for the master": Wrong(
        3, TOLD, r"backward of that forward: rank 0 let it pass",
        returned(told="torch.autograd.graph.increment_version(bucket.master)")),
    "a scheduler is not told": Wrong(
        3, TOLD, r"torch's scheduler warned on rank 0: Detected call of `lr_scheduler.step\(\)` before",
        returned(opt="")),
    "a scheduler is told of the wrong thing": Wrong(
        3, TOLD, r"torch's scheduler warned on rank 0: Detected call of `lr_scheduler.step\(\)` before",
        returned(opt="self._opt_called = True")),
    "an fp32 gradient stays for each shard": Wrong(
        1, "test_each_shard_returns_in_its_dtype", r"tensors of \d+ bytes live on the host, and \d+ are right",
        update(gradient="""
            kept = self.__dict__.setdefault("wide", {})
            gradient = kept[id(shard)] = shard.gradient.to(shard.master.dtype)
            """)),
    "a gradient of zeros is not sent": Wrong(
        3, "test_stage_3_trains_as_without_offload", r"left out in turn: .* Is a shard sent whose gradient is zero",
        edited("09_offload", "Offloaded._leave",
               ("    self.host.send(", "    gradient_shard.any() and self.host.send("))),
    "two stretches are read before the first is given": Wrong(
        5, "test_changes_are_in_the_file_when_they_are_read_again", r"IndexError",
        through(first="reading = self._begin_to_read(stretches[0])\nnext_one = self._begin_to_read(stretches[1])",
                ahead="reading = next_one\nif stretches[stretches.index(stretch) + 2 :]:\n    next_one = "
                      "self._begin_to_read(stretches[stretches.index(stretch) + 2])")),
}

RIGHT = {
    "gradients are widened first, and each bucket's gather is waited for one bucket later": update(
        gradient="gradient = shard.gradient.float() if shard.master.dtype == torch.float32 else shard.gradient",
        scaled="gradient = gradient.mul(1.0 if scale is None else scale)")
    | step(READY, EDITS, GATHER, "before = None", function(
        "for bucket in self._returned():", "pending = gather(bucket)", "if before:\n    before.wait()",
        "before = pending"), "before.wait()", STATISTICS, SPENT),
    "the optimizer steps where a gradient is, and lanes look back before they read": update(
        one="shard.master.grad = gradient.clone()\nself.optimizer.step()\nshard.master.grad = None")
    | gradient("parts = [parcel.tensor, shard.gradient] if adds and shard.has_gradient else [parcel.tensor]",
               "shard.gradient = sum(parts[1:], parts[0].clone())", SAID, EMPTIED)
    | read(STRETCH_IS_WRITTEN, BUFFER_IS_WRITTEN)
    | through(first="readings = [self._begin_to_read(stretches[0])]", each="buffer = readings.pop().result()",
              ahead="if following:\n    readings.append(self._begin_to_read(following))"),
}

ORDER = "the two statements need nothing of each other"
PAIRS = "both are of one length in every call that comes here"
GPU = "it is for a scale on a GPU, and this lesson is graded on the CPU"
FP32 = "float() gives a tensor of 32 bits back as it is, and no dtype has more than 4 and fewer than 8 bytes"
NO_GRAPH = "nothing in it computes with a tensor that asks for a gradient"
UNTOLD = {  # mutants (tests/mutants.py) that keep full marks, since nobody could tell them from the reference
    "GatheredAfter.step: `self.reducer.complete()` a statement later":
        "edits go to the masters in any case, before or after the gradients are complete",
    "HostState.keep: `self.shards[number] = Shard(own.dtype, group_index, master, torch.zeros_like(own))` a "
    "statement later": ORDER,
    "HostState.keep: `own.element_size() < 4` compared otherwise": FP32,
    "HostState.keep: 4 + 1": FP32,
    "HostState.update: without @torch.no_grad()": NO_GRAPH,
    "HostState.update: `if scale is not None:` a statement later": ORDER,
    "HostState.update: `zip(self.optimizer.param_groups, options, strict=True)` without strict=True": PAIRS,
    "HostState.update: True turned": PAIRS,
    "Offloaded._hand_over: `self.host.send(('keep', number, bucket.group_index), bucket.parameter_shard)` a "
    "statement later": ORDER,
    "Offloaded._hand_over: `bucket.dtype.itemsize < 4` compared otherwise":
        "float32 comes of both ways for a shard of 32 bits, and no dtype has more than 4 and fewer than 8 bytes",
    "Offloaded._hand_over: 4 + 1":
        "float32 comes of both ways for a shard of 32 bits, and no dtype has more than 4 and fewer than 8 bytes",
    "HostState.gradient: `shard.has_gradient = True` a statement later": ORDER,
    "Offloaded._returned: without `scale = scale.cpu() if isinstance(scale, Tensor) else scale`": GPU,
    "Offloaded._returned: `scale = scale.cpu() if isinstance(scale, Tensor) else scale` a statement later": GPU,
    "Offloaded._returned: `self.host.send(('update', options_of(self.optimizer), scale))` a statement later": ORDER,
    "Offloaded._returned: `self.host.emptied(parcel)` a statement later": ORDER,
    "Offloaded._returned: `bucket.away.know(bucket)` a statement later": ORDER,
    "Offloaded._returned: `seams.tell('update_ends', bucket)` a statement later":
        "the next bucket is asked for, and so this one told, before a forward computes with this one",
    "GatheredAfter.step: `for pending in gathering:` a statement later": ORDER,
    "GatheredAfter.step: `replicas.broadcast_statistics(self.model, self.group)` a statement later": ORDER,
    "GatheredAfter.step: without @torch.no_grad()": NO_GRAPH,
    "GatheredAfter.step: `seams.tell('update_begins', bucket)` a statement later": ORDER,
    "GatheredAfter.step: `self.buckets`: all_buckets":
        "stages 1 and 2 have no other buckets: only stage 3 makes some of frozen parameters",
    "GatheredAfter.step: `collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group, "
    "of=bucket, async` without of=bucket": "it says what is sent to who reads messages, and does not change it",
    "ReadAhead.through: `zip(stretches, [*stretches[1:], None], strict=True)` without strict=True": PAIRS,
    "ReadAhead.through: True turned": PAIRS,
    "ReadAhead._read: `buffer.written.result()` a statement later": "both have been waited for before the file is read",
    "ReadAhead.begin_to_write: `self.written += changed.nbytes` a statement later": ORDER,
}
