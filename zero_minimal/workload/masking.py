"""Masking: the task of an encoder such as BERT. A mask token replaces some tokens of each sequence,
and the model predicts them.

This is the plain form: 15% of the tokens are chosen, and all are masked. (The BERT paper masks four
of five; the rest become another token or stay as they are.)
"""

import random
from collections.abc import Iterator

import torch

from zero_minimal.workload.data import Batches

SHARE = 0.15  # of the tokens
NO_GAP = -100  # a target that does not count: ignore_index of torch's cross_entropy


class Masked:
    """Batches with gaps: (inputs, targets), both int64 [batch, sequence]. Which tokens are masked
    depends on seed, rank and the number of the batch alone."""

    def __init__(self, batches: Batches, gap: int, seed: int, rank: int):
        self.batches, self.gap, self.name = batches, gap, f"seed {seed}, rank {rank}"

    @property
    def drawn(self) -> int:
        """Batches drawn so far."""
        return self.batches.drawn

    def skip(self, count: int) -> None:
        """Continue as if `count` more batches had been drawn."""
        self.batches.skip(count)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = next(self.batches)
        return with_gaps(tokens, self.gap, f"{self.name}, batch {self.drawn}")


def with_gaps(tokens: torch.Tensor, gap: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens with gaps, targets), int64 [batch, sequence]; each sequence has equally many gaps, so
    that means of batches are means of gaps. name: seeds the random numbers."""
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    count = max(1, round(SHARE * tokens.shape[1]))
    chosen = torch.rand(tokens.shape, generator=generator).topk(count, dim=1).indices
    hidden = torch.zeros(tokens.shape, dtype=torch.bool).scatter_(1, chosen, True)
    return tokens.masked_fill(hidden, gap), tokens.masked_fill(~hidden, NO_GAP)
