"""Tensor parallelism: Megatron's way to cut each layer over a group of M ranks (arXiv:1909.08053).

ZeRO works together with it (sections 1 and 8), and P_a, in the next lesson, removes the copies that
it leaves. With f and g, the two ends of the parallel region, a block's MLP is

    x ─ f ─ A's columns ─ GELU ─ B's rows ─ g ─ dropout
            [h, 4h / M]          [4h / M, h]

A rank has some columns of A, so it has some of the hidden values, whole. GELU needs no others. The
rank multiplies them by its rows of B, and the ranks' products add up to the result. Attention works
the same way, with heads in place of columns.

Memory a rank (b sequences of s tokens, width h, vocabulary V):
    model states    1/M of matrices and embedding; norms, row-parallel biases and positions whole
    activations     1/M inside the region; outside it, so also each block's input [b, s, h], whole
    logits          [b, s, V / M]: the loss is computed without ever putting them together

Communication plan, a block:
    forward      an all-reduce for attention and one for the MLP          2 · b·s·h elements
    backward     the same                                                 2 · b·s·h
A ring sends 2(M−1)/M times that. With recomputation forward runs twice: the 12·b·s·h of section 8.
The whole model adds an all-reduce of b·s·h after the embedding, one in backward before the head,
and for the loss 3 numbers a token. No computation runs meanwhile: all is on the critical path.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zero_minimal.core import collectives, seams
from zero_minimal.core.mesh import Group, divisors

# -------------------------------------------------------------- the two ends of the parallel region


@contextmanager
def parallel_random(group: Group = None) -> Iterator[None]:
    """Context in which each rank of a group draws random numbers of its own.

    For dropout inside the region of tensor parallelism. Seed all ranks of the group alike: then
    outside the region all drop the same values, and what they compute stays the same. Inside, each
    rank has other heads, so it needs other masks. Afterwards the outside state, of the CPU and of
    the current GPU, is the same on all ranks again, and further on than before. The inside depends
    on nothing but the outside state: checkpointing that restores torch's own random state before it
    recomputes gets the same masks again.
    """
    # step 5: a context. Inside, this rank draws numbers of its own, which follow from nothing but
    # the outside state and the rank in the group. Afterwards, also if an error ended it, all ranks
    # draw the same again, and not what they drew before. ParallelAttention.forward enters it where
    # something is dropped, and nowhere else.
    # - torch.random.fork_rng(devices=[]): a context after which the state is as before. [] on the
    #   CPU, else a list of GPUs
    # - torch.randint(2**31, ()): draws a number; torch.manual_seed(seed): sets the state
    # - nullcontext(): a context that does nothing
    raise NotImplementedError("step 5: parallel_random")


class CopyToModelParallelRegion(torch.autograd.Function):
    """f, where x [any shape], the same on all ranks, enters the region."""

    @staticmethod
    def forward(ctx, x, group):
        # step 1: returns x, as it is, in its own memory. Nothing was sent.
        # - ctx: what forward writes on it (ctx.name = …) backward can read
        raise NotImplementedError("step 1: forward")

    @staticmethod
    def backward(ctx, gradient):
        # step 1: returns the gradient of x, which all ranks have used, and None for group.
        # `gradient` [as x] stays as it was: autograd may give the same tensor to others, too.
        # - collectives.all_reduce(tensor, op="sum", "avg" or "max", group=…): of all ranks, in
        #   place. Any shape
        raise NotImplementedError("step 1: backward")


class ReduceFromModelParallelRegion(torch.autograd.Function):
    """g, where the ranks' partial results [any shape] leave it as one."""

    @staticmethod
    def forward(ctx, x, group):
        # step 1: returns the sum of all ranks' x, in memory of its own, also on one rank. x stays
        # as it was.
        # - collectives.all_reduce(…), as above
        # - tensor.clone(): a copy
        raise NotImplementedError("step 1: forward")

    @staticmethod
    def backward(ctx, gradient):
        # step 1: returns the gradient of this rank's x, and None for group. `gradient` is that of
        # the sum, and stays as it was.
        raise NotImplementedError("step 1: backward")


def f(x: Tensor, group: Group = None) -> Tensor:
    return CopyToModelParallelRegion.apply(x, group)


def g(x: Tensor, group: Group = None) -> Tensor:
    return ReduceFromModelParallelRegion.apply(x, group)


# --------------------------------------------------------------------------------------- the layers


def shard(whole: Tensor, dim: int, group: Group = None, blocks: int = 1) -> Tensor:
    """This rank's part of a tensor, in memory of its own: `dim` shrinks from n to n / M.

    blocks: the dimension consists of this many equal blocks, and a rank gets a part of each.
    Raises: ValueError if it cannot be cut in equal parts.
    """
    # step 2: returns this rank's part of each of the `blocks` equal blocks of dimension `dim`, one
    # after the other, in memory of their own. Rank r gets the r-th of M equal parts. dim is 0 or
    # more. (Until step 3 blocks is 1.) ValueError if a block cannot be cut into M equal parts.
    # - dist.get_rank(group), dist.get_world_size(group): this rank's number in the group, r; how
    #   many it has, M
    # - tensor.unflatten(dim, sizes), tensor.flatten(first, last): one dimension becomes several, or
    #   several one
    # - tensor.chunk(n, dim), tensor.select(dim, index): parts of a tensor, as views
    raise NotImplementedError("step 2: shard")


def random_weight(rows: int, columns: int, std: float = 0.02) -> Tensor:
    """Every rank draws the whole weight before it is cut: a seed gives the same model at any M."""
    return torch.empty(rows, columns).normal_(std=std)


class ColumnParallelLinear(nn.Module):
    """x […, inputs], the same on all ranks → this rank's part of the outputs, […, outputs / M].

    The weight is [outputs / M, inputs].
    blocks: how many equal blocks the outputs have (query, key, value); a rank has a part of each.
    """

    def __init__(self, inputs: int, outputs: int, group: Group = None, blocks: int = 1):
        super().__init__()
        self.group, self.blocks = group, blocks
        self.weight = nn.Parameter(self.cut("weight", random_weight(outputs, inputs)))
        self.bias = nn.Parameter(self.cut("bias", torch.zeros(outputs)))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        # step 2: returns this rank's part of `whole`: of the uncut weight [outputs, inputs], or of
        # the bias [outputs] (`name`).
        # - shard(whole, dim, group, blocks), self.blocks
        raise NotImplementedError("step 2: cut")

    def forward(self, x: Tensor) -> Tensor:
        # step 2: returns this rank's outputs […, outputs / M]. The gradient of x is that of all
        # ranks' outputs.
        # - F.linear(x, weight, bias): x times the transposed weight, and the bias added
        # - f(x, self.group), g(x, self.group)
        raise NotImplementedError("step 2: forward")


class RowParallelLinear(nn.Module):
    """This rank's part of the inputs, […, inputs / M] → the outputs, […, outputs], on all ranks."""

    def __init__(self, inputs: int, outputs: int, group: Group = None, std: float = 0.02):
        super().__init__()
        self.group = group
        # [outputs, inputs / M]
        self.weight = nn.Parameter(self.cut("weight", random_weight(outputs, inputs, std)))
        self.bias = nn.Parameter(torch.zeros(outputs))  # whole on every rank

    def cut(self, name: str, whole: Tensor) -> Tensor:
        # step 2: returns this rank's part of `whole`, weight [outputs, inputs] or bias [outputs]:
        # or all of it, if each rank has all.
        # - shard(whole, dim, group)
        raise NotImplementedError("step 2: cut")

    def forward(self, x: Tensor) -> Tensor:
        # step 2: returns what one linear layer with the whole weight and the bias gives, […,
        # outputs], on every rank.
        # - F.linear, f and g, as above
        raise NotImplementedError("step 2: forward")


class VocabularyParallelEmbedding(nn.Module):
    """One weight for embedding and head, cut by tokens: rank 0 has the first V / M, rounded up."""

    def __init__(self, vocabulary: int, hidden: int, group: Group = None):
        super().__init__()
        self.vocabulary, self.group = vocabulary, group
        self.part = -(-vocabulary // dist.get_world_size(group))  # the weight is [part, hidden]
        self.first = dist.get_rank(group) * self.part
        self.weight = nn.Parameter(self.cut("weight", random_weight(vocabulary, hidden)))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        if len(whole) != self.vocabulary:
            raise ValueError(f"this model has a vocabulary of {self.vocabulary} tokens, not "
                             f"{len(whole)}")
        padding = self.part * dist.get_world_size(self.group) - self.vocabulary
        return shard(F.pad(whole, (0, 0, 0, padding)), 0, self.group)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, sequence] → [batch, sequence, hidden]
        # step 4: returns the rows of the whole weight, one for each token, on every rank.
        # - self.find(tokens)
        # - F.embedding(rows, weight): these rows of a weight
        # - f(x, self.group), g(x, self.group): one of the two
        raise NotImplementedError("step 4: forward")

    def logits(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden] → [batch, sequence, part]
        # step 4: returns x times the transposed rows of this rank, one logit for each. It is -inf
        # for rows of the padding, whose number among all ranks' rows is self.vocabulary or above.
        # - f(x, self.group), g(x, self.group): one of the two; F.linear(x, weight)
        # - tensor.masked_fill(mask, value), torch.arange(first, end)
        raise NotImplementedError("step 4: logits")

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Whether this rank has each token, and its row of the weight (0 for those of others)."""
        # step 4: returns for each token whether its row is here: those of self.first up to
        # self.first + self.part, without the last. And its row, which is token minus self.first, or
        # 0 where it is not here.
        # - torch.where(mask, this, that)
        raise NotImplementedError("step 4: find")

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, a 0-dim fp32 tensor, the same on all ranks.

        Args: logits of this rank, [batch, sequence, part]; targets [batch, sequence].
        Sent: three numbers a token.
        """
        # step 4: returns the mean over all tokens of: log of the sum of exp(logit) over the whole
        # vocabulary, minus the target's logit. Logits become fp32 first, and the loss is fp32, also
        # where logits are fp64.
        # - collectives.all_reduce(tensor, op="max", group=…): in place. It has no gradient, so give
        #   it a detached tensor
        # - g(x, self.group): a sum over the ranks that has a gradient. torch.stack([a, b]): two
        #   tensors in one
        # - self.find(targets); tensor.gather(-1, index): one number of each last dimension
        # - tensor.amax(-1); torch.where(mask, this, that)
        raise NotImplementedError("step 4: cross_entropy")


# ------------------------------------------------------------------------- the GPT built from them


class Config(Protocol):
    """The sizes of a GPT."""

    layers: int
    hidden: int
    heads: int
    sequence: int  # the longest
    vocabulary: int
    dropout: float


def residual_std(config: Config) -> float:
    """GPT-2's: each block adds to the stream twice; smaller terms keep the sum as large as one."""
    return 0.02 / math.sqrt(2 * config.layers)


class ParallelAttention(nn.Module):
    """Causal self-attention; each rank has heads / M of the heads, whole."""

    def __init__(self, config: Config, group: Group = None):
        super().__init__()
        ranks = dist.get_world_size(group)
        if config.heads % ranks:
            accepted = ", ".join(map(str, divisors(config.heads)))
            raise ValueError(f"{ranks} model-parallel ranks cannot share {config.heads} attention "
                             f"heads equally; accepted with these heads: {accepted}")
        self.heads, self.dropout, self.group = config.heads // ranks, config.dropout, group
        width, std = config.hidden, residual_std(config)
        self.query_key_value = ColumnParallelLinear(width, 3 * width, group, blocks=3)
        self.projection = RowParallelLinear(width, width, group, std)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden] → the same
        # step 3: returns what Attention of zero_minimal/workload/model.py computes. This rank has
        # computed its own heads alone. (Until step 5 self.dropout is 0. In step 5 it drops inside
        # parallel_random(self.group), and where nothing is dropped it draws nothing.)
        # - self.query_key_value(x), self.projection(x): your layers, one by columns, one by rows
        # - self.heads: how many of the heads are on this rank
        # - F.scaled_dot_product_attention(query, key, value, dropout_p=…, is_causal=True): each
        #   [batch, heads, sequence, head]
        # - self.dropout, self.training: the rate; False in an evaluation, where nothing is dropped
        raise NotImplementedError("step 3: forward")


class ParallelMLP(nn.Module):
    """Two linear layers with a GELU between them, where each rank has 4 · hidden / M values."""

    def __init__(self, config: Config, group: Group = None):
        super().__init__()
        width, std = config.hidden, residual_std(config)
        self.expansion = ColumnParallelLinear(width, 4 * width, group)
        self.projection = RowParallelLinear(4 * width, width, group, std)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden] → the same
        # step 2: returns what MLP of zero_minimal/workload/model.py computes.
        # - self.expansion(x), self.projection(x): your two layers
        # - F.gelu(x, approximate="tanh"): GPT-2's GELU
        raise NotImplementedError("step 2: forward")


class ParallelBlock(nn.Module):
    """Attention, then the MLP, each added to x; norms and dropout are outside the region."""

    def __init__(self, config: Config, group: Group = None):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = ParallelAttention(config, group)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = ParallelMLP(config, group)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden] → the same
        return self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        """What checkpointing wraps."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ParallelGPT(nn.Module):
    """The GPT of workload/model.py, cut over the ranks of `group`; parameters have the same names.

    `model(tokens, targets)` is the mean cross-entropy, a 0-dim fp32 tensor; `model(tokens)` is the
    whole logits, [batch, sequence, vocabulary]. tokens and targets are int64 [batch, sequence], the
    same on all ranks of the group. Set `run_block` to a function (block, x) to run the blocks in
    your own way, say with checkpoint(block.inside, x).

    Raises: ValueError if M does not divide the heads; for an input too long; for unknown tokens.
    """

    run_block: Callable[[ParallelBlock, Tensor], Tensor] | None = None

    def __init__(self, config: Config, group: Group = None):
        super().__init__()
        self.config, self.group = config, group
        self.token_embedding = VocabularyParallelEmbedding(config.vocabulary, config.hidden, group)
        self.position_embedding = nn.Embedding(config.sequence, config.hidden)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([ParallelBlock(config, group) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        self.check(tokens, targets)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:  # x [batch, sequence, hidden]
            x = self.run_block(block, x) if self.run_block else block(x)
        logits = self.token_embedding.logits(self.norm(x))  # [batch, sequence, vocabulary / M]
        if targets is not None:
            return self.token_embedding.cross_entropy(logits, targets)
        first, ranks = self.token_embedding.first, dist.get_world_size(self.group)
        after = logits.shape[-1] * (ranks - 1) - first
        whole = F.pad(logits, (first, after))  # zeros where other ranks have theirs
        return g(whole, self.group)[..., : self.config.vocabulary]

    def check(self, tokens: Tensor, targets: Tensor | None) -> None:
        """Raises: ValueError for what the model cannot read."""
        length, longest, vocabulary = tokens.shape[1], self.config.sequence, self.config.vocabulary
        if length > longest:
            raise ValueError(f"this model reads at most {longest} tokens at once, not {length}")
        for numbers in (tokens,) if targets is None else (tokens, targets):
            seams.tell("tokens_given", numbers, vocabulary)

    def replicated(self) -> list[nn.Parameter]:
        """What every rank of the group holds whole: norms, row-parallel biases, positions."""
        cut = {param for module in self.modules()
               for name, param in module.named_parameters(recurse=False)
               if isinstance(module, (ColumnParallelLinear, VocabularyParallelEmbedding))
               or isinstance(module, RowParallelLinear) and name == "weight"}
        return [param for param in self.parameters() if param not in cut]

    def shard_of(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of a single-process GPT's state, or of other tensors with its names.

        Raises: ValueError if a tensor is missing or has another size.
        """
        parts = {}
        for name, param in self.named_parameters():
            if whole.get(name) is None:
                raise ValueError(f"the whole model has no {name!r}: build it from the same config")
            path, _, last = name.rpartition(".")
            module = self.get_submodule(path)
            parts[name] = module.cut(last, whole[name]) if hasattr(module, "cut") else whole[name]
            if parts[name].shape != param.shape:
                raise ValueError(f"this rank's part of {name!r} has the shape "
                                 f"{tuple(parts[name].shape)}, and must have {tuple(param.shape)}: "
                                 "build the whole model from the same config")
        return parts

    def load_whole(self, whole: dict[str, Tensor]) -> None:
        """Load a single-process GPT's weights: its state_dict(), the same on every rank."""
        self.load_state_dict(self.shard_of(whole))


if __name__ == "__main__":
    from zero_minimal.programs.lesson05_program import main

    main(ParallelGPT)
