"""No collective of the house's: one class for f and g, heads one by one, parts by their indices."""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def total_of(x, group):
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def f(x, group=None):
    return _Ends.apply(x, group, False)


def g(x, group=None):
    return _Ends.apply(x, group, True)


class _Ends(torch.autograd.Function):
    """Adds up on the way there, or on the way back."""

    @staticmethod
    def forward(ctx, x, group, there):
        ctx.group, ctx.there = group, there
        return total_of(x, group) if there else x

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.there else total_of(gradient, ctx.group), None, None


def shard(whole, dim, group=None, blocks=1):
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    size, rest = divmod(whole.shape[dim], blocks * ranks)
    if rest:
        raise ValueError(f"{whole.shape[dim]} is no multiple of {blocks} * {ranks}")
    mine = [torch.arange(size) + (block * ranks + rank) * size for block in range(blocks)]
    return whole.index_select(dim, torch.cat(mine))


class ColumnParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, group=None, blocks=1):
        super().__init__()
        self.group, self.blocks = group, blocks
        whole = nn.Linear(inputs, outputs)
        self.weight, self.bias = (nn.Parameter(self.cut("", part.detach())) for part in (whole.weight, whole.bias))

    def cut(self, name, whole):
        return shard(whole, 0, self.group, self.blocks)

    def forward(self, x):
        return f(x, self.group) @ self.weight.T + self.bias


class RowParallelLinear(nn.Module):
    def __init__(self, inputs, outputs, group=None, std=0.02):
        super().__init__()
        self.group, whole = group, nn.Linear(inputs, outputs)
        self.weight, self.bias = nn.Parameter(self.cut("weight", whole.weight.detach())), whole.bias

    def cut(self, name, whole):
        return whole if whole.dim() == 1 else shard(whole, 1, self.group)

    def forward(self, x):
        return g(x @ self.weight.T, self.group) + self.bias


class VocabularyParallelEmbedding(nn.Module):
    def __init__(self, vocabulary, hidden, group=None):
        super().__init__()
        self.vocabulary, self.group = vocabulary, group
        self.part = math.ceil(vocabulary / dist.get_world_size(group))
        self.first = self.part * dist.get_rank(group)
        self.weight = nn.Parameter(self.cut("weight", 0.02 * torch.randn(vocabulary, hidden)))

    def cut(self, name, whole):
        rows = whole[self.first : self.first + self.part]
        return torch.cat([rows, rows.new_zeros(self.part - len(rows), *rows.shape[1:])])

    def find(self, tokens):
        own = torch.div(tokens, self.part, rounding_mode="floor") == dist.get_rank(self.group)
        return own, torch.where(own, tokens % self.part, 0)

    def forward(self, tokens):
        own, row = self.find(tokens)
        rows = torch.zeros(*tokens.shape, self.weight.shape[1], dtype=self.weight.dtype)
        return g(rows.masked_scatter(own[..., None], self.weight[row[own]]), self.group)

    def logits(self, x):
        logits = f(x, self.group) @ self.weight.T
        real = max(0, min(self.part, self.vocabulary - self.first))
        return torch.cat([logits[..., :real], torch.full_like(logits[..., real:], -math.inf)], -1)

    def cross_entropy(self, logits, targets):
        logits = logits.float()
        own, row = self.find(targets)
        most = logits.detach().max(-1).values
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        exponentials = g((logits - most[..., None]).exp().sum(-1), self.group)
        of_target = g(logits.gather(-1, row[..., None])[..., 0].where(own, 0.0), self.group)
        return (exponentials.log() + most - of_target).mean()


@contextmanager
def parallel_random(group=None):
    seeds = torch.randint(2**31, (dist.get_world_size(group),))
    before = torch.get_rng_state()
    torch.manual_seed(int(seeds[dist.get_rank(group)]))
    try:
        yield
    finally:
        torch.set_rng_state(before)


class ParallelAttention(nn.Module):
    def __init__(self, config, group=None):
        super().__init__()
        self.heads, self.dropout, self.group = config.heads // dist.get_world_size(group), config.dropout, group
        self.query_key_value = ColumnParallelLinear(config.hidden, 3 * config.hidden, group, blocks=3)
        self.projection = RowParallelLinear(config.hidden, config.hidden, group)

    def forward(self, x):
        triples = zip(*(part.chunk(self.heads, -1) for part in self.query_key_value(x).chunk(3, -1)), strict=True)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        heads = []
        for query, key, value in triples:
            scores = (query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])).masked_fill(~mask, -math.inf)
            weights = scores.softmax(-1)
            if self.training and self.dropout:
                with parallel_random(self.group):
                    weights = F.dropout(weights, self.dropout)
            heads.append(weights @ value)
        return self.projection(torch.cat(heads, -1))


class ParallelMLP(nn.Module):
    def __init__(self, config, group=None):
        super().__init__()
        self.expansion = ColumnParallelLinear(config.hidden, 4 * config.hidden, group)
        self.projection = RowParallelLinear(4 * config.hidden, config.hidden, group)

    def forward(self, x):
        return self.projection(F.gelu(self.expansion(x), approximate="tanh"))


class ParallelBlock(nn.Module):
    def __init__(self, config, group=None):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(config.hidden), ParallelAttention(config, group)
        self.mlp_norm, self.mlp = nn.LayerNorm(config.hidden), ParallelMLP(config, group)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class ParallelGPT(nn.Module):
    def __init__(self, config, group=None):
        super().__init__()
        self.token_embedding = VocabularyParallelEmbedding(config.vocabulary, config.hidden, group)
        self.position_embedding = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(ParallelBlock(config, group) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, tokens, targets):
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.token_embedding.cross_entropy(self.token_embedding.logits(self.norm(x)), targets)

    def load_whole(self, whole):
        with torch.no_grad():
            for name, param in self.named_parameters():
                path, _, last = name.rpartition(".")
                module = self.get_submodule(path)
                param.copy_(module.cut(last, whole[name]) if hasattr(module, "cut") else whole[name])
