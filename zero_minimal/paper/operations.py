"""Operations: what a step of our GPT computes, in floating-point operations (a multiplication and an addition are two).

A product of matrices [m, k] and [k, n] takes 2·m·k·n, and so does each of its two gradients. With t = b·s tokens:

    matrices     forward 2·t·(12·h²·L + V·h), for the blocks and the head; backward twice that
    attention    2·t·s·h·L for each product of activations with activations: scores, and their product with the values,
                 in forward; four gradients of these in backward, and the scores again if a fused kernel did not keep
                 them
    recompute    forward of the blocks again (torch's own checkpoint omits the last matrix, which is not needed)

Per token, attention grows with s, the rest does not: at s = 6h its forward equals that of the matrices. Causal
attention needs only half of each product, and fused kernels skip the other half.
"""


def matrices(layers: int, hidden: int, vocabulary: int, tokens: int, recompute: bool) -> int:
    """Operations with weights in a step, on all model-parallel ranks together."""
    blocks, head = 12 * layers * hidden**2, vocabulary * hidden
    return 2 * tokens * (blocks * (4 if recompute else 3) + head * 3)


def attention(layers: int, hidden: int, batch: int, sequence: int, recompute: bool, fused: bool = True) -> int:
    """Operations between activations in a step, on all model-parallel ranks together: of whole products, as
    torch.utils.flop_counter counts them. A causal kernel that skips masked positions does half."""
    products = 2 + (5 if fused else 4) + (2 if recompute else 0)
    return products * 2 * batch * sequence**2 * hidden * layers
