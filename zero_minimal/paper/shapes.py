"""Shapes: a GPT with a given number of parameters.

The paper gives sizes (7.5B, 128B, 1T), and a run needs layers, width and heads. Depth and width follow the paper's own
models, which grow wider faster than deeper: 48 × 1600 at 1.5B, 72 × 3072 at 8B, 125 × 8192 at 100B; 128 × 25600 at 1T.
The vocabulary, about as large as GPT-2's, takes the rest, so that Ψ is met within half the width.
"""

import math
from dataclasses import replace

from zero_minimal.core.mesh import divisors
from zero_minimal.workload.model import GPTConfig

VOCABULARY = 50257  # GPT-2's
POSITIONS = 1024  # tokens, for a model requested by its size: as in the paper
SMALL = 100_000_000  # below this a vocabulary of bytes: GPT-2's would be most of the model


def parameter_count(config: GPTConfig) -> int:
    """Elements of our GPT: each block's 12h² in matrices and 13h in biases and norms; embeddings; the last norm."""
    return config.layers * block_parameters(config) + root_parameters(config)


def block_parameters(config: GPTConfig, model_parallel: int = 1) -> int:
    """Elements of a block (a unit of stage 3), or of a model-parallel rank's part of it: norms, and biases of
    row-parallel layers, are replicated."""
    return (12 * config.hidden**2 + 7 * config.hidden) // model_parallel + 6 * config.hidden


def root_parameters(config: GPTConfig, model_parallel: int = 1) -> int:
    """Elements outside the blocks (stage 3's root unit), or of a model-parallel rank's part of them: positions and the
    norm are replicated."""
    return (-(-config.vocabulary // model_parallel) + config.sequence + 2) * config.hidden


def shape_for(
    parameters: int, sequence: int, model_parallel: int = 1, layers: int | None = None, **options
) -> GPTConfig:
    """The GPTConfig of about `parameters` elements with the most usual shape.

    Args:
        sequence: tokens; positions are parameters too.
        model_parallel: must divide the heads, and so the width.
        layers: about how many, instead of the usual depth.
        options: for GPTConfig (recompute, …).
    Raises: ValueError if the model is too small for these.
    """
    vocabulary = VOCABULARY if parameters >= SMALL else 256
    usual = max(20.0, 33 * (parameters / 1.5e9) ** 0.277)  # width over depth: 33 at 1.5B, 200 at 1T
    ideal = (parameters / 12 / layers**3) ** 0.5 if layers else usual  # Ψ ≈ 12 L³ aspect²
    best = None
    for head in (128, 64, 16) if parameters >= 1e9 else (64, 16):
        step = head * model_parallel
        middle = (parameters * ideal / 12) ** (1 / 3)  # Ψ ≈ 12 h³ / aspect
        for hidden in range(step, int(2 * middle) + step, step):
            block = 12 * hidden**2 + 13 * hidden
            depth = (parameters - (vocabulary + sequence + 2) * hidden) // block
            for blocks in (depth, depth + 1):
                left = (parameters - blocks * block) / hidden - sequence - 2
                if blocks < 1 or round(left) < model_parallel or round(left) < 2:
                    continue
                off = abs(math.log(left / vocabulary)) + 0.3 * abs(math.log(hidden / blocks / ideal))
                if best is None or off < best[0]:
                    best = off, GPTConfig(
                        layers=blocks, hidden=hidden, heads=hidden // head, sequence=sequence, vocabulary=round(left),
                        dropout=0.0, **options,
                    )
        if best is not None and best[0] < 1:
            return best[1]  # otherwise try smaller heads
    if best is None:
        raise ValueError(f"no GPT of {parameters:,} parameters has positions for {sequence:,} tokens on "
                         f"{model_parallel} model-parallel ranks: ask for more parameters or fewer of these ranks, or "
                         "give --layers and --hidden")
    return best[1]


def usual_shape(parameters: int, sequence: int, model_parallel: int, recompute: bool) -> GPTConfig:
    """The GPT for --params: the same blocks and vocabulary for every sequence length, so that lengths can be compared.

    It has about `parameters` elements with positions for 1024 tokens; another sequence length changes only the number
    of positions. Model-parallel ranks change only the number of heads, if they can share the width.
    Raises: ValueError if there is none.
    """
    config = shape_for(parameters, POSITIONS)
    if config.hidden % model_parallel:
        config = shape_for(parameters, POSITIONS, model_parallel)
    heads = config.heads if config.heads % model_parallel == 0 else usual_heads(config.hidden, model_parallel)
    return replace(config, heads=heads, sequence=sequence, recompute=recompute)


def usual_heads(hidden: int, model_parallel: int) -> int:
    """Heads of a usual size that model-parallel ranks can share. Raises: ValueError if the width has none."""
    check_divides(model_parallel, hidden,
                  f"{model_parallel} model-parallel ranks cannot share a width of {hidden} equally")
    share = hidden // model_parallel  # a rank's width, in whole heads
    sizes = [size for size in divisors(share) if size <= 128]
    # kernels are fast at 64 and 128; otherwise prefer large sizes, and multiples of 8
    return hidden // max(sizes, key=lambda size: (size in (64, 128), size >= 32, size % 8 == 0, size))


def check_heads(config: GPTConfig, model_parallel: int) -> None:
    """Raises: ValueError unless model-parallel ranks can share the heads."""
    check_divides(model_parallel, config.heads, f"{model_parallel} ranks cannot share {config.heads} heads equally")


def check_divides(parts: int, whole: int, refusal: str) -> None:
    """Raises: ValueError(refusal), with the accepted numbers, if `whole` cannot be cut into `parts` equal parts."""
    if whole % parts:
        raise ValueError(f"{refusal}; accepted: {', '.join(map(str, divisors(whole)))}")
