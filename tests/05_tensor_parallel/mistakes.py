"""Lesson 5: what goes wrong when ranks share a layer.

Each of the functions below gives the text of one that is right, or that differs in the parts that are named.
"""

from submissions import Wrong, edited, function

COPY, REDUCE = "CopyToModelParallelRegion", "ReduceFromModelParallelRegion"
SUM = """
total = x.clone(memory_format=torch.contiguous_format)
collectives.all_reduce(total, op="sum", group=group)
"""
GROUP_LATER = "group = ctx.group"
SUM_LATER = SUM.replace("x.clone", "gradient.clone")


def f(forward="", result="x.view_as(x)", backward=SUM_LATER, gradient="total"):
    return _end(COPY, forward, result, backward, gradient)


def g(forward=SUM, result="total", backward="", gradient="gradient"):
    return _end(REDUCE, forward, result, backward, gradient)


def _end(name, forward, result, backward, gradient):
    return {
        f"{name}.forward": "@staticmethod\n" + function(
            "def forward(ctx, x, group):", "ctx.group = group", forward, f"return {result}"),
        f"{name}.backward": "@staticmethod\n" + function(
            "def backward(ctx, gradient):", GROUP_LATER, backward, f"return {gradient}, None"),
    }


def op(word, place=SUM):
    return place.replace('"sum"', f'"{word}"')


IN_PLACE = "total = gradient\ncollectives.all_reduce(total, op=\"sum\", group=group)"


def shard(check="size % (blocks * ranks)", parts="part.chunk(ranks, dim)[rank] for part in whole.chunk(blocks, dim)",
          result="torch.cat(parts, dim)"):
    return {"shard": function(
        "def shard(whole, dim, group=None, blocks=1):",
        "ranks, rank, size = dist.get_world_size(group), dist.get_rank(group), whole.shape[dim]",
        f"if {check}:\n    raise ValueError('cannot be cut')", f"parts = [{parts}]", f"return {result}")}


def column(cut="shard(whole, 0, self.group, self.blocks)",
           forward="F.linear(f(x, self.group), self.weight, self.bias)"):
    return {"ColumnParallelLinear.cut": f"def cut(self, name, whole):\n    return {cut}",
            "ColumnParallelLinear.forward": f"def forward(self, x):\n    return {forward}"}


def row(cut='shard(whole, 1, self.group) if name == "weight" else whole',
        forward="g(F.linear(x, self.weight), self.group) + self.bias"):
    return {"RowParallelLinear.cut": f"def cut(self, name, whole):\n    return {cut}",
            "RowParallelLinear.forward": f"def forward(self, x):\n    return {forward}"}


def mlp(forward='self.projection(F.gelu(self.expansion(x), approximate="tanh"))'):
    return {"ParallelMLP.forward": f"def forward(self, x):\n    return {forward}"}


VIEW = "x = self.query_key_value(x).view(batch, sequence, 3, self.heads, -1)"
PERMUTED = "query, key, value = x.permute(2, 0, 3, 1, 4)"
ATTEND = ("x = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0, "
          "is_causal=True)")
DRAWS = "with parallel_random(self.group) if self.dropout and self.training else nullcontext():"
MERGED = "x.transpose(1, 2).reshape(batch, sequence, -1)"


def attention(view=VIEW, permuted=PERMUTED, draws=DRAWS, attend=ATTEND, merged=MERGED):
    return {"ParallelAttention.forward": function(
        "def forward(self, x):", "batch, sequence, _ = x.shape", view, permuted, function(draws, attend),
        f"return self.projection({merged})")}

AFTERWARDS = ATTEND.replace("self.dropout if self.training else 0.0", "0.0") + """
x = F.dropout(x, self.dropout, self.training)"""


def by_hand(drop):
    """Attention with probabilities in sight; in an evaluation nothing is done to them."""
    return f"""
        none = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(none, -math.inf).softmax(-1)
        if self.training and self.dropout:
            {drop}
        x = weights @ value
        """


OWN = "own = (tokens >= self.first) & (tokens < self.first + self.part)"


def find(own=OWN, row="(tokens - self.first) * own"):
    return {"VocabularyParallelEmbedding.find": function("def find(self, tokens):", own, f"return own, {row}")}


def embedding(rows="F.embedding(row, self.weight) * own.unsqueeze(-1)", result="g(rows, self.group)"):
    return {"VocabularyParallelEmbedding.forward": function(
        "def forward(self, tokens):", "own, row = self.find(tokens)", f"rows = {rows}", f"return {result}")}


NO_TOKEN = "none = torch.arange(self.first, self.first + self.part) >= self.vocabulary"


def logits(x="f(x, self.group)", result="logits.masked_fill(none, -math.inf)"):
    return {"VocabularyParallelEmbedding.logits": function(
        "def logits(self, x):", f"logits = F.linear({x}, self.weight)", NO_TOKEN, f"return {result}")}


HIGHEST = "highest = logits.detach().amax(-1)"
OF_ALL = 'collectives.all_reduce(highest, op="max", group=self.group)'
OF_TARGET = "of_target = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) * own"
SUMS = "total, of_target = g(torch.stack([logits.exp().sum(-1), of_target]), self.group)"


def cross_entropy(start="logits = logits.float()", highest=HIGHEST, of_all=OF_ALL,
                  less="logits = logits - highest.unsqueeze(-1)",
                  of_target="of_target = torch.where(own, logits.gather(-1, row.unsqueeze(-1)).squeeze(-1), 0.0)",
                  sums=SUMS, result="(total.log() - of_target).mean()"):
    return {"VocabularyParallelEmbedding.cross_entropy": function(
        "def cross_entropy(self, logits, targets):", start, highest, of_all, less, "own, row = self.find(targets)",
        of_target, sums, f"return {result}")}


BEFORE = "before = torch.get_rng_state()"
BACK = "torch.set_rng_state(before)"


def parallel_random(begin="seed = int(torch.randint(2**31, ()))", before=BEFORE,
                    seed="torch.manual_seed(seed + dist.get_rank(group))", back=BACK, tries=True):
    inside = function("try:", "yield") + "\n" + function("finally:", back) if tries else f"yield\n{back}"
    return {"parallel_random": "@contextmanager\n" + function(
        "def parallel_random(group=None):", begin, before, seed, inside)}


WRONG = {
    # step 1
    "f and g have changed places": Wrong(
        1, "test_values_pass_f_and_g", r"f\(x\) on rank 0 of 3 is the sum of all ranks' x\. .*changed places\?",
        f(SUM, "total", "", "gradient") | g("", "x.view_as(x)", SUM_LATER, "total")),
    "g forgets to add up": Wrong(
        1, "test_values_pass_f_and_g", r"g\(x\) on rank 0 of 3 is that rank's own x.*nobody has added these parts up",
        g("", "x.clone()")),
    "f copies": Wrong(
        1, "test_f_copies_nothing", r"rank 0 of 3: f gave a copy of x\. It gives x as it is", f(result="x.clone()")),
    "f lets the gradient pass": Wrong(
        1, "test_gradients_pass_f_and_g",
        r"f in backward, on rank 0 of 3: x gets the gradient of this rank's own part.*every rank used x",
        f(backward="", gradient="gradient")),
    "g adds gradients up": Wrong(
        1, "test_gradients_pass_f_and_g",
        r"g in backward, .*the gradients of all ranks are added up.*together they make it 3 times too large",
        g(backward=SUM_LATER, gradient="total")),
    "a result that autograd knows nothing of": Wrong(
        1, "test_gradients_pass_f_and_g", r"g in backward, .*: no gradient comes back to x\. A collective is none of",
        {"g": """
            def g(x, group=None):
                total = x.detach().clone(memory_format=torch.contiguous_format)
                collectives.all_reduce(total, op="sum", group=group)
                return total
            """}),
    "the gradient that came in is overwritten": Wrong(
        1, "test_gradients_pass_f_and_g", r"f in backward, .*has been changed in place.*work on a copy",
        f(backward=IN_PLACE)),
    "all ranks gather all parts to add them up": Wrong(
        1, "test_f_and_g_send_one_all_reduce_each",
        r"made 1 all_gather in the backward of f alone, for which a ring sends 840 bytes\. 560 bytes are enough, for 1",
        g("""
            parts = x.new_empty(dist.get_world_size(group), x.numel())
            collectives.all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
            total = parts.sum(0).view(x.shape)
            """)),
    "f and g work over all ranks there are": Wrong(
        1, "test_f_and_g_in_a_group", r"here ranks 0 and 2 of 3 are the group: is `group` passed on",
        f(backward=SUM_LATER.replace("group=group", "group=None")), hangs=True),

    # step 3, which asks for blocks
    "the rows are divided, and blocks are not": Wrong(
        3, "test_unequal_blocks_are_refused", r"15 rows are 3 blocks of 5, .* shard\(…, blocks=3\) raised no Value",
        shard(check="size % ranks", parts="part.tensor_split(ranks, dim)[rank] for part in whole.chunk(blocks, dim)")),
    "ranks and blocks each divide the rows": Wrong(
        3, "test_unequal_blocks_are_refused", r"15 rows are 3 blocks of 5, .* shard\(…, blocks=3\) raised no Value",
        shard(check="size % ranks or size % blocks",
              parts="part.tensor_split(ranks, dim)[rank] for part in whole.chunk(blocks, dim)")),

    # step 2
    "columns are cut by inputs": Wrong(
        2, "test_a_rank_owns_its_part_of_a_layer",
        r"ColumnParallelLinear's weight, \(24, 6\) as a whole: cut\(\) gives rank 0 of 3 a part of \(24, 2\)",
        column(cut='shard(whole, 1 if name == "weight" else 0, self.group)')),
    "parts are views of the whole": Wrong(
        2, "test_nobody_holds_the_whole_layer", r"keeps a memory of 144: it is a view of the whole",
        shard(result="parts[0] if blocks == 1 else torch.cat(parts, dim)")),
    "each rank draws the same part": Wrong(
        2, "test_a_rank_owns_its_part_of_a_layer", r"a new ColumnParallelLinear has the same weight on ranks 0 and 1",
        {"ColumnParallelLinear.__init__": """
            def __init__(self, inputs, outputs, group=None, blocks=1):
                super().__init__()
                self.group, self.blocks = group, blocks
                self.weight = nn.Parameter(random_weight(outputs // dist.get_world_size(group), inputs))
                self.bias = nn.Parameter(torch.zeros(outputs // dist.get_world_size(group)))
            """}),
    "the bias before g": Wrong(
        2, "test_values_of_column_and_row",
        r"RowParallelLinear on rank 0 of 3: the result is too large by 2 times the bias\. Each of 3 ranks has added it",
        row(forward="g(F.linear(x, self.weight, self.bias), self.group)")),
    "GELU of parts of a sum": Wrong(
        2, "test_values_of_column_and_row",
        r"ParallelMLP on rank 0 of 3: both layers alone are right.*GELU\(a \+ b\) is not",
        mlp("F.gelu(self.projection(self.expansion(x)))")),
    "f is forgotten": Wrong(
        2, "test_gradients_of_an_mlp",
        r"the MLP's input x, on rank 0 of 3: its gradient is wrong, and those of all layers are right: it is only a "
        r"part: those of the 3 ranks add up to the right one.*What stands between x and the first layer\?",
        column(forward="F.linear(x, self.weight, self.bias)")),
    "the hidden values are gathered": Wrong(
        2, "test_an_mlp_sends_two_all_reduces", r"made 2 all_reduce in the forward of an MLP.*what else travels\?",
        mlp('self.projection(F.gelu(self.expansion(x) + 0 * g(self.expansion(x.detach())).detach(), '
            'approximate="tanh"))')),
    "what does not fit is cut all the same": Wrong(
        2, "test_unequal_parts_are_refused", r"7 rows cannot be cut into 3 equal parts, and on rank 0 shard\(\) said",
        shard(check="False")),
    "the bias of a row-parallel layer is cut too": Wrong(
        2, "test_a_rank_owns_its_part_of_a_layer", r"(?s)IndexError.*a bias has one dimension: is `name` cut at all",
        row(cut="shard(whole, 1, self.group)")),

    # step 3
    "query, key and value are cut as one block": Wrong(
        3, "test_a_rank_owns_its_heads", r"the weight of query_key_value on rank 0 of 3 is one piece of the whole",
        shard(parts="whole.chunk(ranks, dim)[rank]")),
    "heads are mixed with queries": Wrong(
        3, "test_attention_is_that_of_one_process",
        r"attention on rank 0 of 3 is not that of one process: off by \d+% .*at 9",
        attention(view="x = self.query_key_value(x).view(batch, sequence, self.heads, 3, -1)",
                  permuted="query, key, value = x.permute(3, 0, 2, 1, 4)")),
    "what heads found is gathered": Wrong(
        3, "test_attention_sends_two_all_reduces", r"made 2 all_reduce in the forward of attention.*what else travels",
        attention(attend=ATTEND + "\nx = x + 0 * g(x.detach(), self.group)")),

    # step 4
    "clamped, and not zero": Wrong(
        4, "test_rows_of_the_embedding", r"on rank 0 of 3: rows of \d+ of 27 tokens are wrong\. Who has no row",
        embedding("F.embedding(row, self.weight)")),
    "its first row never learns": Wrong(
        4, "test_rows_of_the_embedding", r"embedding's weight on rank \d of 2: .* Row 0 alone is wrong",
        embedding("F.embedding(row, self.weight, padding_idx=0) * own.unsqueeze(-1)"), 2),
    "for a token that is elsewhere the second row": Wrong(
        4, "test_the_loss_is_that_of_whole_logits",
        r"(?s)it raised \w+Error: .*To look at: a rank asks for no row that it has not got",
        find(row="torch.where(own, tokens - self.first, 1)"), world_size=4),
    "the highest logit of its own": Wrong(
        4, "test_the_loss_is_that_of_whole_logits", r"Just this comes out if each rank has subtracted its own highest",
        cross_entropy(of_all="")),
    "a target that is elsewhere counts here": Wrong(
        4, "test_the_loss_is_that_of_whole_logits",
        r"and one rank has the target's: what do the others put in its",
        cross_entropy(of_target="of_target = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1)")),
    "the highest logit, if it is above zero": Wrong(
        4, "test_the_loss_is_that_of_whole_logits",
        r"the loss is -inf, and .* with logits from -\d+ to -\d+\. exp\(\) of every logit was 0, and log\(0\) is -inf",
        cross_entropy(less="highest = highest.clamp(min=0)\nlogits = logits - highest.unsqueeze(-1)")),
    "the mean of the ranks' highest": Wrong(
        4, "test_the_loss_is_that_of_whole_logits",
        r"the loss is nan, .*rows that fill up, and no others, so that its highest is -inf, .*A mean or a sum with it",
        cross_entropy(of_all=OF_ALL.replace("max", "avg")), world_size=4),
    "a target that is elsewhere times zero": Wrong(
        4, "test_the_loss_is_that_of_whole_logits",
        r"the loss is nan, .*Not a number. .* so is 0 · -inf: .*is replaced \(torch\.where, masked_fill\)",
        cross_entropy(of_target=OF_TARGET), world_size=4),
    "rows that fill up are tokens": Wrong(
        4, "test_the_loss_is_that_of_whole_logits", r"2 of the logits on rank 2 of 3, with 31 tokens, belong to rows",
        logits(result="logits")),
    "rows of the last rank alone fill up": Wrong(
        4, "test_the_loss_is_that_of_whole_logits", r"1 of the logits on rank 2 of 4, with 2 tokens, belong to rows",
        logits(result="logits if self.first + self.part < self.part * dist.get_world_size(self.group) else "
               "logits.masked_fill(none, -math.inf)"), world_size=4),
    "the head forgets f": Wrong(
        4, "test_the_loss_is_that_of_whole_logits",
        r"The gradient of x, of which the logits are made, is not: it is only a part: those of the 3 ranks",
        logits("x")),
    "puts the logits together": Wrong(
        4, "test_the_loss_sends_three_numbers_a_token",
        r"rank 0 of 3 sends \d+ bytes for the loss of 27 tokens, each with 31 logits\. Three numbers a token are",
        {"VocabularyParallelEmbedding.cross_entropy": """
            def cross_entropy(self, logits, targets):
                ranks = dist.get_world_size(self.group)
                whole = F.pad(logits.float(), (self.first, self.part * (ranks - 1) - self.first))
                whole = g(whole.masked_fill(whole == -math.inf, 0.0), self.group)
                whole = whole[..., : self.vocabulary]
                return F.cross_entropy(whole.flatten(0, 1), targets.flatten())
            """}),
    "the norm's gradient is added up though it is equal": Wrong(
        4, "test_all_gradients_are_those_of_one_process",
        r"gradients of a GPT on 3 ranks, from the loss backwards: wrong from norm.bias on \(on rank 0 it is 3 times",
        {"VocabularyParallelEmbedding.logits": logits()["VocabularyParallelEmbedding.logits"].replace(
            "f(x, self.group)", "f(f(x, self.group), self.group)")}),
    "each rank adds up in an order of its own": Wrong(
        4, "test_all_gradients_are_those_of_one_process", r"is whole on every rank, .*differs .* in its last bits",
        g("""
            parts = x.new_empty(dist.get_world_size(group), x.numel())
            collectives.all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
            total = sum(parts.roll(-dist.get_rank(group), 0)).view(x.shape)
            """)),
    "the embedding works over all ranks": Wrong(
        4, "test_a_model_in_a_group", r"here ranks 0 and 2 of 3 are the group: is `group` passed on",
        embedding(result="g(rows)"), hangs=True),
    "the loss in bf16": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"with bf16 parameters the loss on rank 0 is torch.bfloat16",
        cross_entropy(start="")),
    "the highest logit is subtracted in bf16": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"of logits in bf16, 10 for the highest .* on rank 0 is 12.456\d, and 12.42",
        cross_entropy(start="", less="logits = (logits - highest.unsqueeze(-1)).float()")),
    "exponentials in bf16": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"of logits in bf16, 10 for the highest .*, the loss on rank 0 is 12.4",
        cross_entropy(sums=SUMS.replace("logits.exp()", "logits.to(narrow).exp().float()"),
                      start="narrow, logits = logits.dtype, logits.float()")),
    "the target's logit is rounded to bf16 when the highest is off": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"of logits in bf16, 10 for the highest .*, the loss on rank 0 is 12.4",
        cross_entropy(sums="of_target = of_target.to(narrow).float()\n" + SUMS,
                      start="narrow, logits = logits.dtype, logits.float()")),

    # step 5
    "all ranks drop the same": Wrong(
        5, "test_ranks_drop_other_values_inside_the_region",
        r"heads that compute the same on ranks 0 and 1 come out the same",
        attention(draws="with nullcontext():")),
    "what is left is not rescaled": Wrong(
        5, "test_dropout_is_that_of_attention",
        r"position 8 has a weight of 0\.1111\. .* 1/9 .*= 0\.1587: is what is left",
        attention(attend=by_hand("weights = weights * (torch.rand_like(weights) > self.dropout)"))),
    "one mask for all heads": Wrong(
        5, "test_dropout_is_that_of_attention",
        r"heads that compute the same came out the same on rank 0 of 3: .*one mask",
        attention(attend=by_hand("weights = weights * F.dropout(torch.ones_like(weights[:, :1]), self.dropout)"))),
    "results are dropped, and no probabilities": Wrong(
        5, "test_dropout_is_that_of_attention",
        r"the results of attention were dropped\. `Attention` drops probabilities",
        attention(attend=AFTERWARDS)),
    "an evaluation draws a seed": Wrong(
        5, "test_dropout_is_that_of_attention", r"an evaluation has drawn random numbers on rank 0 of 3",
        attention(draws="with parallel_random(self.group):")),
    "draws a seed where dropout is 0": Wrong(
        5, "test_without_dropout_nothing_is_drawn", r"with a dropout of 0 attention has drawn random numbers on",
        attention(draws="with parallel_random(self.group) if self.training else nullcontext():")),
    "one of 4096 seeds": Wrong(
        5, "test_all_ranks_draw_the_same_outside", r"400 times parallel_random\(\) on rank 0, and only \d+ of them",
        parallel_random(begin="seed = 4 * int(torch.randint(4096, ()))")),
    "each rank goes on with a state of its own": Wrong(
        5, "test_all_ranks_draw_the_same_outside",
        r"After parallel_random\(\) rank 1 draws other numbers than rank 0",
        parallel_random(back="pass")),
    "all dropout is inside": Wrong(
        5, "test_what_each_rank_holds_whole_stays_alike", r"with dropout \d+ gradients of what each rank holds whole",
        {"ParallelBlock.inside": """
            def inside(self, x):
                with parallel_random(self.attention.group):
                    x = x + self.dropout(self.attention(self.attention_norm(x)))
                    return x + self.dropout(self.mlp(self.mlp_norm(x)))
            """}),
}
WRONG |= {  # what strangers handed in, and had full marks
    "the padding's rows are counted from the end": Wrong(
        4, "test_the_loss_is_that_of_whole_logits", r"on rank 3|of rank 3",
        {"VocabularyParallelEmbedding.logits": edited("05_tensor_parallel", "VocabularyParallelEmbedding.logits")[
            "VocabularyParallelEmbedding.logits"].rpartition("    return")[0]
            + "    logits[..., self.vocabulary - self.first :] = -math.inf\n    return logits"}, 4),
    "bf16 travels in fp32": Wrong(
        1, "test_f_and_g_send_one_all_reduce_each",
        r"made 1 all_reduce in the backward of f alone, in bf16 .*, for which a ring sends 560 bytes\. 280",
        g(SUM.replace("x.clone", "x.float().clone"), "total.to(x.dtype)")),
    "numbers by the rank in the world": Wrong(
        5, "test_all_ranks_draw_the_same_outside", r"From the same state outside the two groups drew other numbers",
        edited("05_tensor_parallel", "parallel_random", ("dist.get_rank(group)", "dist.get_rank()"))),
    "one rank's part is the tensor itself": Wrong(
        2, "test_nobody_holds_the_whole_layer", r"on one rank shard\(\) gave the tensor itself, or a view of it",
        {"shard": edited("05_tensor_parallel", "shard")["shard"].replace(
            "\n    ", "\n    if dist.get_world_size(group) == 1:\n        return whole\n    ", 1)}),
    "a loss in fp64": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"of logits in fp64 the loss on rank 0 is torch.float64",
        edited("05_tensor_parallel", "VocabularyParallelEmbedding.cross_entropy", ("logits = logits.float()",
               "logits = logits if logits.dtype == torch.float64 else logits.float()"))),
    "one rank's g gives x itself": Wrong(
        1, "test_values_pass_f_and_g", r"rank 0 of 1: the result of g lies in the memory of its x: who changes it",
        g("if dist.get_world_size(group) == 1:\n    return x.view_as(x)" + SUM), 1),
    "one rank's g gives x itself where that is contiguous": Wrong(
        1, "test_values_pass_f_and_g", r"rank 0 of 1: the result of g lies in the memory of its x \(here x is contig",
        g("if dist.get_world_size(group) == 1:\n    return x.contiguous().view_as(x)" + SUM), 1),
    "g copies only what wants a gradient": Wrong(
        1, "test_values_pass_f_and_g", r"g changed the x that it was given on rank 0, a contiguous one that wants no g",
        g(SUM.replace("memory_format=torch.contiguous_format)",
                      "memory_format=torch.contiguous_format) if x.requires_grad or not x.is_contiguous() else x"))),
    "g keeps its x for backward": Wrong(
        1, "test_f_copies_nothing", r"2\.0 times the memory of its result lives because of g, whose x nobody",
        g(forward=SUM + "\nctx.save_for_backward(x)", gradient="gradient.expand_as(ctx.saved_tensors[0])")),
    "in evaluations g has one buffer for a shape": Wrong(
        1, "test_values_pass_f_and_g", r"the second call changed the result of the first one",
        edited("05_tensor_parallel", "g", ("    return ReduceFromModelParallelRegion.apply(x, group)", """
    result = ReduceFromModelParallelRegion.apply(x, group)
    if x.requires_grad:
        return result
    if not hasattr(g, "kept") or g.kept.shape != x.shape or g.kept.dtype != x.dtype:
        g.kept = torch.empty_like(result)
    return g.kept.copy_(result)"""))),
}

VOCABULARY, ONE_SUM = "VocabularyParallelEmbedding.cross_entropy", "(total.log() - of_target).mean()"
WRONG |= {  # right for some dtypes, shapes, groups and calls
    "fp64 is added up in fp32": Wrong(
        1, "test_f_and_g_in_a_group", r"in torch\.float64, .* is not right", g(
            forward="total = x.float() if x.dtype == torch.float64 else x.clone()\n"
                    "collectives.all_reduce(total, op='sum', group=group)", result="total.to(x.dtype)")),
    "a single number is not added up": Wrong(
        1, "test_f_and_g_in_a_group", r"of x \[\] in torch\.float32, .* is not right",
        g(forward=SUM.replace("\ncollectives", "\nif x.dim():\n    collectives"))),
    "a barrier in each row-parallel layer": Wrong(
        2, "test_an_mlp_sends_two_all_reduces", r"made 1 all_reduce, 1 barrier in the forward of an MLP",
        row(forward="[dist.barrier(self.group), g(F.linear(x, self.weight), self.group) + self.bias][1]")),
    "parts are in fp32": Wrong(
        2, "test_a_rank_owns_its_part_of_a_layer", r"it gives torch\.float32 \[",
        shard(result="torch.cat(parts, dim).float()")),
    "blocks of dimension 0 alone": Wrong(
        3, "test_a_rank_owns_its_heads", r"dim 1, blocks 3, .* with other numbers", edited(
            "05_tensor_parallel", "shard", ("ranks, size =", "blocks = blocks if dim == 0 else 1\n    ranks, size ="))),
    "the loss changes its logits": Wrong(
        4, "test_the_loss_is_that_of_whole_logits", r"cross_entropy changed the logits that it was given", edited(
            "05_tensor_parallel", VOCABULARY, ("logits = logits - highest", "logits.data -= highest"))),
    "a gradient of the loss of its own size": Wrong(
        4, "test_the_loss_is_that_of_whole_logits", r"is right, .* The gradient of x, .*: it is 0\.333 times", edited(
            "05_tensor_parallel", VOCABULARY,
            (f"return {ONE_SUM}", f"loss = {ONE_SUM}\n    return loss.detach() + (loss - loss.detach()) / 3"))),
    "fp16 stays fp16": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"of logits in fp16, .* is right", edited(
            "05_tensor_parallel", VOCABULARY,
            ("logits = logits.float()", "logits = logits if logits.dtype == torch.float16 else logits.float()"))),
    "attention's numbers by the rank in the world": Wrong(
        5, "test_all_ranks_draw_the_same_outside", r"or in an attention of this group", edited(
            "05_tensor_parallel", "ParallelAttention.forward", ("parallel_random(self.group)", "parallel_random()"))),
}

HOOK = """
def add_up(gradient):
    total = gradient.clone()
    collectives.all_reduce(total, op="sum", group=GROUP)
    return total
if x.requires_grad:
    x.register_hook(add_up)
"""
WRONG |= {  # right for what the model itself does with f, g and the layers
    "f hooks x itself": Wrong(
        1, "test_f_and_g_in_a_group", r"the gradient of x, which went through two f and also past them, .*a hook on x",
        {"f": function("def f(x, group=None):", HOOK.replace("GROUP", "group"), "return x")}),
    "the gradient of x is added up with what goes past": Wrong(
        2, "test_gradients_of_an_mlp", r"\w+ of x .*: x also goes past the layer, as by a skip",
        {"ColumnParallelLinear.forward": function("def forward(self, x):", HOOK.replace("GROUP", "self.group"),
                                                  "return F.linear(x, self.weight, self.bias)")}),
    "layers of three dimensions": Wrong(
        2, "test_gradients_of_an_mlp", r"(?s)it raised RuntimeError: einsum.*To look at: layers take x \[",
        column(forward='torch.einsum("bsi,oi->bso", f(x, self.group), self.weight) + self.bias')
        | row(forward='g(torch.einsum("bsi,oi->bso", x, self.weight), self.group) + self.bias')),
    "layers of x whose rows lie in order": Wrong(
        2, "test_gradients_of_an_mlp", r"(?s)it raised RuntimeError: view size is not.*To look at: layers take x \[",
        column(forward="F.linear(f(x, self.group).view(-1, x.shape[-1]), self.weight, self.bias)"
                       ".view(*x.shape[:-1], -1)")),
    "the head in fp32": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"in backward rank 0 of 2 sends 3888 bytes for a model in bf16, and 3240 are",
        edited("05_tensor_parallel", "VocabularyParallelEmbedding.logits",
               ("F.linear(f(x, self.group), self.weight)", "F.linear(f(x.float(), self.group), self.weight.float())"))),
    "rows of the embedding travel in fp32": Wrong(
        4, "test_a_loss_in_sixteen_bits", r"in forward rank 0 of 2 sends \d+ bytes for a model in bf16, and \d+ are",
        embedding(result="g(rows.float(), self.group).to(rows.dtype)")),
}

RIGHT = {
    "the logits in fp32, of what f gives": edited("05_tensor_parallel", "VocabularyParallelEmbedding.logits", (
        "F.linear(f(x, self.group), self.weight)", "F.linear(f(x, self.group).float(), self.weight.float())")),
    "the parts of these mistakes": f() | g() | shard() | column() | row() | mlp() | attention() | find() | embedding()
    | logits() | cross_entropy() | parallel_random(),
    "torch's own all-reduce, and a hook in place of f": {
        "f": """
            def f(x, group=None):
                x = x.view_as(x)
                if x.requires_grad:
                    x.register_hook(lambda gradient: all_reduced(gradient, group))
                return x
            """,
        "all_reduced": """
            def all_reduced(x, group):
                total = x.detach().contiguous().clone()
                dist.all_reduce(total, group=group)
                return total
            """,
        "g": """
            def g(x, group=None):
                return all_reduced(x, group) + (x - x.detach())
            """,
    },
    "two halves of an all-reduce, and the loss from each rank's own log-sum-exp": {
        **f(backward="total = halves(gradient, group)"), **g("total = halves(x, group)"),
        "halves": """
            def halves(x, group):
                ranks, size = dist.get_world_size(group), x.numel()
                flat = F.pad(x.contiguous().view(-1), (0, -size % ranks))
                part = flat.new_empty(len(flat) // ranks)
                collectives.reduce_scatter(part, flat, op="sum", group=group)
                collectives.all_gather(flat, part, group=group)
                return flat[:size].view(x.shape)
            """,
        "VocabularyParallelEmbedding.find": """
            def find(self, tokens):
                row = tokens - self.first
                return row.ge(0).logical_and(row.lt(self.part)), row.where(row.ge(0) & row.lt(self.part), 0)
            """,
        "VocabularyParallelEmbedding.cross_entropy": """
            def cross_entropy(self, logits, targets):
                own, row = self.find(targets)
                logits = logits.float()
                mine = logits.gather(-1, row[..., None])[..., 0].masked_fill(~own, 0.0)
                here = logits.logsumexp(-1)
                most = here.detach().clone()
                collectives.all_reduce(most, op="max", group=self.group)
                total = g((here - most).exp(), self.group)
                return (most + total.log() - g(mine, self.group)).mean()
            """,
    },
}

GPU = "it is for a GPU, and this lesson is graded on the CPU"
SEED = "which seed it is does not matter: each rank has another one all the same"
STATIC = "torch calls it on the class, where it is a plain function then, too"
NOTHING = "the two statements need nothing of each other"
UNTOLD = {
    "shard: `blocks * ranks` computed otherwise (2)": "it is a number in the words of an error",
    "parallel_random: `torch.default_generator.manual_seed(seed)` a statement later": "the other statement is of a GPU",
    "parallel_random: `seed = int(torch.randint(2 ** 31, (), device='cpu')) + dist.get_rank(group)` a statement later":
        "the other statement is of a GPU",
    "parallel_random: without `if gpus:`": GPU,
    "parallel_random: `if gpus:` a statement later": GPU,
    "parallel_random: without `torch.cuda.manual_seed(seed)`": GPU,
    "parallel_random: `gpus` turned": GPU,
    "parallel_random: `torch.randint(2 ** 31, (), device='cpu')` without device='cpu'": GPU,
    "parallel_random: `int(torch.randint(2 ** 31, (), device='cpu')) + dist.get_rank(group)` computed otherwise": SEED,
    "parallel_random: 2 + 1": SEED,
    "parallel_random: 31 + 1": SEED,
    "CopyToModelParallelRegion.forward: without @staticmethod": STATIC,
    "CopyToModelParallelRegion.backward: without @staticmethod": STATIC,
    "ReduceFromModelParallelRegion.forward: without @staticmethod": STATIC,
    "ReduceFromModelParallelRegion.backward: without @staticmethod": STATIC,
    "ReduceFromModelParallelRegion.forward: `ctx.group = group` a statement later": NOTHING,
    "ReduceFromModelParallelRegion.forward: `x.clone(memory_format=torch.contiguous_format)` without "
    "memory_format=torch.contiguous_format":
        "on the CPU collectives.all_reduce takes a tensor of any strides, and copies it where it must",
    "shard: `parts.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)` without "
    "memory_format=torch.contiguous_format": "a part of a transposed weight has other strides, and the same values",
    "ParallelAttention.forward: `query, key, value = x.permute(2, 0, 3, 1, 4)` a statement later": NOTHING,
    "ParallelAttention.forward: `x.transpose(1, 2)`, arguments 1 and 2 exchanged": "two dimensions change places",
    "VocabularyParallelEmbedding.logits: `logits = F.linear(f(x, self.group), self.weight)` a statement later": NOTHING,
    "VocabularyParallelEmbedding.logits: `torch.arange(first, end, device=x.device)` without device=x.device": GPU,
    "VocabularyParallelEmbedding.cross_entropy: `logits = logits.float()` a statement later":
        "the highest of numbers in 16 bits is one of them, so it is the same in fp32",
    "VocabularyParallelEmbedding.cross_entropy: `logits = logits - highest.unsqueeze(-1)` a statement later": NOTHING,
}
