"""Masking: the task of an encoder such as BERT. A mask token replaces some tokens of each sequence,
and the model predicts them.

This is the plain form: 15% of the tokens are chosen, and all are masked. (The BERT paper masks four
of five; the rest become another token or stay as they are.)
"""

import random

import torch

SHARE = 0.15  # of the tokens
NO_GAP = -100  # a target that does not count: ignore_index of torch's cross_entropy


def with_gaps(tokens: torch.Tensor, gap: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens with gaps, targets), int64 [batch, sequence]; each sequence has equally many gaps, so
    that means of batches are means of gaps. name: seeds the random numbers."""
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    count = max(1, round(SHARE * tokens.shape[1]))
    chosen = torch.rand(tokens.shape, generator=generator).topk(count, dim=1).indices
    hidden = torch.zeros(tokens.shape, dtype=torch.bool).scatter_(1, chosen, True)
    return tokens.masked_fill(hidden, gap), tokens.masked_fill(~hidden, NO_GAP)
