"""Vocabulary: a token that is in no rank's part of the vocabulary is refused: it would count
as a row of zeros.

Seam: tokens_given.
"""

import torch

from zero_minimal.core import seams


@seams.at("tokens_given")
def refuse_strangers(tokens: torch.Tensor, vocabulary: int) -> None:
    """Raises: ValueError for a number below 0, or not below `vocabulary`."""
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(f"tokens must be from 0 to {vocabulary - 1}: found {int(tokens.min())} to "
                         f"{int(tokens.max())}")
