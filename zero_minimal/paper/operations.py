"""Operations: what a step of our GPT computes, in floating-point operations (a multiplication and an addition are two).

A product of matrices [m, k] and [k, n] takes 2·m·k·n. Its two gradients take as much again each. With t = b·s tokens:

    matrices     forward 2·t·(12·h²·L + V·h): those of the blocks, and the head; backward twice that
    attention    each product of activations with activations 2·t·s·h·L: scores and their use with the values in
                 forward, four gradients of these in backward, and scores once more where a fused kernel did not keep
                 them
    recompute    forward of the blocks again (torch's own checkpoint leaves out the last matrix, which nobody needs)

Attention grows with s, the rest does not: with s = 6h its forward is as long as that of the matrices. Causal attention
needs half of each product only, and fused kernels skip the other half.
"""


def matrices(layers: int, hidden: int, vocabulary: int, tokens: int, recompute: bool) -> int:
    """Operations of a step on weights, all model-parallel ranks together."""
    blocks, head = 12 * layers * hidden**2, vocabulary * hidden
    return 2 * tokens * (blocks * (4 if recompute else 3) + head * 3)


def attention(layers: int, hidden: int, batch: int, sequence: int, recompute: bool, fused: bool = True) -> int:
    """Operations of a step between activations, all model-parallel ranks together: of whole products, as
    torch.utils.flop_counter counts them. A causal kernel that skips what is masked does half."""
    products = 2 + (5 if fused else 4) + (2 if recompute else 0)
    return products * 2 * batch * sequence**2 * hidden * layers
