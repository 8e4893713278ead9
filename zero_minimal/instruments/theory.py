"""Theory: what the paper says one rank holds (§3.1, §5) and sends (§7), for Adam.

With Ψ parameters on N ranks, bytes a parameter:

    dtype        parameters   gradients   optimizer
    fp32             4            4           8        momentum and variance
    bf16, fp16       2            2          12        both, and an fp32 master copy
    over N at     stage 3      stage 2 on  stage 1 on

A ring sends (N−1)/N of Ψ for a reduce-scatter or an all-gather, twice that for an all-reduce.
"""

STATES = ("parameters", "gradients", "optimizer")
BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "fp16": (2, 2, 12)}  # a parameter, in the order of STATES
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the first stage that divides this state by N


def model_states(stage: int, elements: int, world_size: int, dtype: str) -> dict[str, int | float]:
    """Bytes of model states on one rank: {"parameters", "gradients", "optimizer"}."""
    return {
        state: _whole(size * elements / (world_size if stage >= SHARDED_FROM[state] else 1))
        for state, size in zip(STATES, BYTES[dtype], strict=True)
    }


def traffic(stage: int, elements: int, world_size: int, dtype: str, accumulate: int = 1) -> int | float:
    """Bytes that one rank sends in an optimizer step of `accumulate` micro-batches."""
    return _whole(volume(stage, accumulate) * elements * BYTES[dtype][0] * (world_size - 1) / world_size)


def volume(stage: int, accumulate: int = 1) -> int:
    """The factor before Ψ(N−1)/N: reduce-scatters and all-gathers of the whole model in one optimizer step."""
    if stage <= 1:
        return 2  # gradients are kept whole, and reduced once however many micro-batches there are
    if stage == 2:
        return accumulate + 1  # gradients are kept in shards: reduced after each micro-batch; parameters gathered once
    return 3 * accumulate  # parameters gathered before forward and before backward, gradients reduced


def formula(stage: int, state: str, dtype: str) -> str:
    """The formula in words for a table: "8Ψ/N"."""
    size = dict(zip(STATES, BYTES[dtype], strict=True))[state]
    return f"{size}Ψ/N" if stage >= SHARDED_FROM[state] else f"{size}Ψ"


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value
