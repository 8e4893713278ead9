"""A language model shaped like GPT-2: what every stage trains.

Learned positions, pre-norm blocks of causal attention and a GELU MLP, biases, dropout, one weight
for embedding and head, GPT-2's initialisation ("Language Models are Unsupervised Multitask
Learners", Radford et al. 2019). It knows nothing of ZeRO.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. Raises: ValueError, saying what is accepted, if they do not fit together."""

    layers: int = 6
    hidden: int = 256  # width of the residual stream
    heads: int = 8  # attention heads: they share `hidden` equally
    sequence: int = 128  # longest input, in tokens
    vocabulary: int = 256  # one token for each byte
    dropout: float = 0.1
    recompute: bool = False  # keep only each block's input, and recompute its inside in backward

    def __post_init__(self):
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number from 1 up, not {size!r}")
        if self.hidden % self.heads:
            fitting = [heads for heads in range(1, self.hidden + 1) if self.hidden % heads == 0]
            raise ValueError(
                f"heads must divide hidden: {self.heads} heads do not share a hidden size of "
                f"{self.hidden} equally; accepted with it: {', '.join(map(str, fitting))}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout}")


class Attention(nn.Module):
    """Self-attention: each position attends to itself and to earlier ones, or as a mask says."""

    attend = staticmethod(F.scaled_dot_product_attention)  # the kernel, which can be replaced

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden)
        self.projection = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """x: [batch, sequence, hidden], and so is the result. seen: bool [batch, sequence], the
        positions to which all attend; None: each attends to itself and to earlier ones."""
        batch, sequence, hidden = x.shape
        x = self.query_key_value(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = x.permute(2, 0, 3, 1, 4)  # [batch, heads, sequence, hidden / heads]
        dropout = self.dropout if self.training else 0.0
        mask = {"is_causal": True} if seen is None else {"attn_mask": seen[:, None, None, :]}
        x = self.attend(query, key, value, dropout_p=dropout, **mask)
        return self.projection(x.transpose(1, 2).reshape(batch, sequence, hidden))


class MLP(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.expansion = nn.Linear(config.hidden, 4 * config.hidden)
        self.projection = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, hidden] -> the same
        return self.projection(F.gelu(self.expansion(x), approximate="tanh"))


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream. At stage 3 a block is a unit."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)
        self.recompute = config.recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, sequence, hidden] -> the same
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.inside, x, use_reentrant=False)
        return self.inside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        """What the block does, and does again in backward if `recompute` is set."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """`model(tokens)` returns the logits, `model(tokens, targets)` the loss: the mean cross-entropy
    in nats per token.

    tokens and targets: int64 [batch, sequence]; logits: [batch, sequence, vocabulary], in the dtype
    of the parameters. The loss is a 0-dim fp32 tensor whatever that dtype is.
    Raises: ValueError for an input longer than `config.sequence`.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position_embedding = nn.Embedding(config.sequence, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(initialise)
        for block in self.blocks:
            self.narrow(block)
        self.head.weight = self.token_embedding.weight  # tied: one parameter with two uses

    def narrow(self, block: Block) -> None:
        """Each block adds to the residual stream twice: smaller weights keep it from growing."""
        for linear in (block.attention.projection, block.mlp.projection):
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def initialise(self, module: nn.Module) -> None:
        """Draw one module's values. For a model on the meta device, stage 3 calls this for each of
        its modules, inner modules first."""
        initialise(module)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        if isinstance(module, Block):
            self.narrow(module)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        length = tokens.shape[1]
        if length > self.config.sequence:
            raise ValueError(f"this model reads at most {self.config.sequence} tokens at once, not "
                             f"{length}")
        positions = torch.arange(length, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = self.dropout(x)  # [batch, sequence, hidden]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [batch, sequence, vocabulary]
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def initialise(module: nn.Module) -> None:
    """GPT-2's initialisation: weights from a normal distribution of width 0.02, biases 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
