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
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zero_minimal.core import collectives, seams
from zero_minimal.core.mesh import Group, divisors
from zero_minimal.core.random_state import parallel_random

# -------------------------------------------------------------- the two ends of the parallel region


class CopyToModelParallelRegion(torch.autograd.Function):
    """f, where x [any shape], the same on all ranks, enters the region."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return g(gradient, ctx.group), None  # each rank used x: the gradients of all add up


class ReduceFromModelParallelRegion(torch.autograd.Function):
    """g, where the ranks' partial results [any shape] leave it as one."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total, op="sum", group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return f(gradient, ctx.group), None  # each part has the sum's gradient


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
    ranks, size = dist.get_world_size(group), whole.shape[dim]
    if size % (blocks * ranks):
        raise ValueError(f"{ranks} model-parallel ranks cannot share a size of {size} equally: it "
                         f"must be a multiple of {blocks * ranks}")
    parts = whole.unflatten(dim, (blocks, ranks, -1)).select(dim + 1, dist.get_rank(group))
    return parts.flatten(dim, dim + 1).clone(memory_format=torch.contiguous_format)


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
        return shard(whole, 0, self.group, self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(f(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's part of the inputs, […, inputs / M] → the outputs, […, outputs], on all ranks."""

    def __init__(self, inputs: int, outputs: int, group: Group = None, std: float = 0.02):
        super().__init__()
        self.group = group
        # [outputs, inputs / M]
        self.weight = nn.Parameter(self.cut("weight", random_weight(outputs, inputs, std)))
        self.bias = nn.Parameter(torch.zeros(outputs))  # whole on every rank

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return shard(whole, 1, self.group) if name == "weight" else whole

    def forward(self, x: Tensor) -> Tensor:
        # the bias comes after g: else it would be added M times
        return g(F.linear(x, self.weight), self.group) + self.bias


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
        own, row = self.find(tokens)
        # one rank has the row, the others add zeros
        return g(F.embedding(row, self.weight) * own.unsqueeze(-1), self.group)

    def logits(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden] → [batch, sequence, part]
        logits = F.linear(f(x, self.group), self.weight)
        first, end = self.first, self.first + self.part
        padding = torch.arange(first, end, device=x.device) >= self.vocabulary
        return logits.masked_fill(padding, -math.inf)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Whether this rank has each token, and its row of the weight (0 for those of others)."""
        own = (tokens >= self.first) & (tokens < self.first + self.part)
        return own, torch.where(own, tokens - self.first, 0)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, a 0-dim fp32 tensor, the same on all ranks.

        Args: logits of this rank, [batch, sequence, part]; targets [batch, sequence].
        Sent: three numbers a token.
        """
        logits = logits.float()
        highest = logits.detach().amax(-1)  # [batch, sequence]; exp() of the rest cannot overflow
        collectives.all_reduce(highest, op="max", group=self.group)
        logits = logits - highest.unsqueeze(-1)
        own, row = self.find(targets)
        of_target = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1).where(own, 0.0)
        total, of_target = g(torch.stack([logits.exp().sum(-1), of_target]), self.group)
        return (total.log() - of_target).mean()


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
        batch, sequence, _ = x.shape
        x = self.query_key_value(x).view(batch, sequence, 3, self.heads, -1)
        query, key, value = x.permute(2, 0, 3, 1, 4)  # each [batch, heads / M, sequence, head]
        dropout = self.dropout if self.training else 0.0
        with parallel_random(self.group) if dropout else nullcontext():
            x = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.projection(x.transpose(1, 2).reshape(batch, sequence, -1))


class ParallelMLP(nn.Module):
    """Two linear layers with a GELU between them, where each rank has 4 · hidden / M values."""

    def __init__(self, config: Config, group: Group = None):
        super().__init__()
        width, std = config.hidden, residual_std(config)
        self.expansion = ColumnParallelLinear(width, 4 * width, group)
        self.projection = RowParallelLinear(4 * width, width, group, std)

    def forward(self, x: Tensor) -> Tensor:  # [batch, sequence, hidden] → the same
        return self.projection(F.gelu(self.expansion(x), approximate="tanh"))


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
