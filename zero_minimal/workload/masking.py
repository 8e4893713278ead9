"""Masking: what an encoder such as BERT learns from. Some tokens of each sequence are hidden behind
one that stands for a gap, and the model is to say what was there.

This is the plain form of it: 15% of the tokens, each of them hidden. (The paper of BERT hides four
of five, and puts another token, or the same, in the place of the rest.)
"""

import random
from collections.abc import Iterator

import torch

from zero_minimal.workload.data import Batches

SHARE = 0.15  # of the tokens
NO_GAP = -100  # a target that does not count: torch's cross_entropy has it so


class Masked:
    """Batches with gaps: (inputs, targets), both int64 [batch, sequence]. Which tokens are hidden
    depends on seed, rank and the number of the batch alone."""

    def __init__(self, batches: Batches, gap: int, seed: int, rank: int):
        self.batches, self.gap, self.name = batches, gap, f"seed {seed}, rank {rank}"

    @property
    def drawn(self) -> int:
        """Batches so far."""
        return self.batches.drawn

    def skip(self, count: int) -> None:
        """Go on as if so many batches had been drawn."""
        self.batches.skip(count)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = next(self.batches)
        return with_gaps(tokens, self.gap, f"{self.name}, batch {self.drawn}")


def with_gaps(tokens: torch.Tensor, gap: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens with gaps, what was there), int64 [batch, sequence]; equally many gaps in each
    sequence, so that means of batches are means of gaps. name: of these random numbers."""
    generator = torch.Generator().manual_seed(random.Random(name).getrandbits(63))
    count = max(1, round(SHARE * tokens.shape[1]))
    chosen = torch.rand(tokens.shape, generator=generator).topk(count, dim=1).indices
    hidden = torch.zeros(tokens.shape, dtype=torch.bool).scatter_(1, chosen, True)
    return tokens.masked_fill(hidden, gap), tokens.masked_fill(~hidden, NO_GAP)
