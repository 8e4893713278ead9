"""An encoder shaped like BERT (Devlin et al. 2019) that predicts the class of a sentence.

Learned positions, post-norm blocks in which each word attends to all words, GELU, dropout; a linear
layer reads the mean over the words. It is small and starts from random weights: nothing to
download, no library needed. It knows nothing of ZeRO.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from zero_minimal.workload.model import MLP, Attention, initialise
from zero_minimal.workload.reviews import PADDING


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of an encoder; heads share `hidden` equally."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int = 32  # longest input, in words
    classes: int = 2
    dropout: float = 0.1


class Block(nn.Module):
    """Attention of each word to all words, but not to padding, then an MLP; each is added to its
    input, and the sum is normalised."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, is_word: torch.Tensor) -> torch.Tensor:
        """x: [batch, sequence, hidden], and so is the result; is_word: bool [batch, sequence]."""
        x = self.attention_norm(x + self.dropout(self.attention(x, is_word)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


class Encoder(nn.Module):
    """`model(tokens)` returns the logits, [batch, classes]; `model(tokens, labels)` returns the
    loss: the mean cross-entropy in nats per sentence.

    tokens: int64 [batch, sequence], PADDING after the last word; labels: int64 [batch].
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.word_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position_embedding = nn.Embedding(config.sequence, config.hidden)
        self.norm = nn.LayerNorm(config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.head = nn.Linear(config.hidden, config.classes)
        self.apply(initialise)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        is_word = tokens != PADDING  # [batch, sequence]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embedding(tokens) + self.position_embedding(positions)
        x = self.dropout(self.norm(x))  # [batch, sequence, hidden]
        for block in self.blocks:
            x = block(x, is_word)
        count = is_word.sum(1, keepdim=True)
        mean = (x * is_word[..., None]).sum(1) / count  # [batch, hidden]
        logits = self.head(self.dropout(mean))  # [batch, classes]
        return logits if labels is None else F.cross_entropy(logits.float(), labels)
