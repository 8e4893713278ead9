"""Kernels: ways to compute attention, which differ in what they keep for backward.

    fused         a kernel such as FlashAttention (Dao et al. 2022, arXiv:2205.14135): no matrix of scores ever exists
    unfused       scores, softmax, product with the values, as separate operations. The softmax's result is kept:
                  [b,a,s,s] in a block with a heads. Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count
                  5·a·s²·b bytes in 16 bit: 2 of these, and 3 for dropout's mask and result, which do not occur here
    recomputed    unfused, and everything between query, key, value and the output is recomputed in backward: their
                  selective recomputation (section 5)

`simulate` runs the last two instead of torch's kernel, to count what they keep.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint

ATTENTION = ("fused", "unfused", "recomputed")


def unfused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
            is_causal: bool = True) -> torch.Tensor:
    """Attention, written as its formula; query, key, value and the result: [batch, heads, sequence, size]."""
    scores = (query @ key.transpose(-2, -1)).mul_(query.shape[-1] ** -0.5)  # [batch, heads, sequence, sequence]
    if is_causal:
        later = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
        scores.add_(later)
    probabilities = scores.softmax(dim=-1)
    del scores
    return torch.nn.functional.dropout(probabilities, dropout_p) @ value if dropout_p else probabilities @ value


def kernel(attention: str):
    """A function used like torch's scaled_dot_product_attention."""
    if attention == "fused":
        return torch.nn.functional.scaled_dot_product_attention
    return unfused if attention == "unfused" else functools.partial(checkpoint, unfused, use_reentrant=False)
