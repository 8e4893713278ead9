"""Theory: what the paper says one rank holds (§3.1, §5) and sends (§7), for Adam.

With Ψ parameters on N ranks, bytes a parameter:

    dtype        parameters   gradients   optimizer
    fp32             4            4           8        momentum and variance
    bf16, fp16       2            2          12        both, and an fp32 master copy
    over N at     stage 3      stage 2 on  stage 1 on

A ring sends (N−1)/N of Ψ for a reduce-scatter or an all-gather, twice that for an all-reduce.

Other than states (§3.2, §6.1, §8), elements for L blocks of width h, b sequences of s tokens, M model-parallel ranks:

    activations        12·b·s·h·L         without checkpoints: the paper's estimate (this project's GPT: 16)
    checkpoints        b·s·h·L            one a block; P_a: divided by M; P_a+cpu: none on the device
    Megatron sends     12·b·s·h·L(M−1)/M  with checkpoints; P_a 1/12 more

And what a step of our GPT computes, in floating-point operations (a multiplication and an addition are two). A product
of matrices [m, k] and [k, n] takes 2·m·k·n, and so does each of its two gradients. With t = b·s tokens:

    matrices     forward 2·t·(12·h²·L + V·h), for the blocks and the head; backward twice that
    attention    2·t·s·h·L for each product of activations with activations: scores, and their product with the values,
                 in forward; four gradients of these in backward, and the scores again if a fused kernel did not keep
                 them
    recompute    forward of the blocks again (torch's own checkpoint omits the last matrix, which is not needed)

Per token, attention grows with s, the rest does not: at s = 6h its forward equals that of the matrices. Causal
attention needs only half of each product, and fused kernels skip the other half.
"""

import math

from zero_minimal.paper.expressions import exported

STATES = ("parameters", "gradients", "optimizer")
BYTES = {"fp32": (4, 4, 8), "bf16": (2, 2, 12), "fp16": (2, 2, 12)}  # per parameter, in the order of STATES
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the first stage that divides this state by N


def model_states(
    stage: int, elements: int, world_size: int, dtype: str, offloaded: bool = False,
    optimizer_bytes: float | None = None, gradient_bytes: int | None = None,
) -> dict[str, int | float]:
    """Bytes of model states on one rank's device: {"parameters", "gradients", "optimizer"}.

    offloaded: the device has no optimizer state, and gradients only at stages 0 and 1.
    optimizer_bytes: per parameter, the paper's K, for an optimizer other than Adam (None: Adam's).
    gradient_bytes: per parameter, 4 for gradients that are accumulated and reduced in fp32 with 16-bit parameters
        (None: as the parameters). With 4, all states are 18 bytes, and 6 + 12/N at stage 1, as in "Distributed
        Optimizer", Megatron Core's user guide (docs.nvidia.com/megatron-core).
    """
    sizes = dict(zip(STATES, BYTES[dtype], strict=True))
    if optimizer_bytes is not None:
        sizes["optimizer"] = optimizer_bytes
    if gradient_bytes is not None:
        sizes["gradients"] = gradient_bytes
    states = {
        state: _whole(size * elements / (world_size if stage >= SHARDED_FROM[state] else 1))
        for state, size in sizes.items()
    }
    if offloaded:
        states["optimizer"] = 0
        states["gradients"] = 0 if stage >= SHARDED_FROM["gradients"] else states["gradients"]
    return states


def host_bytes(elements: int, world_size: int, dtype: str, optimizer_bytes: float | None = None) -> int | float:
    """Bytes that an offloaded rank's host keeps: fp32 masters, Adam's state, gradients in the model's dtype.
    optimizer_bytes: K, instead of Adam's."""
    sizes = BYTES[dtype]
    kept = sizes[2] if optimizer_bytes is None else optimizer_bytes  # includes the masters of a 16-bit model
    return _whole((kept + sizes[1] + (sizes[0] if dtype == "fp32" else 0)) * elements / world_size)


def bus_bytes(stage: int, elements: int, world_size: int, dtype: str, accumulate: int = 1) -> dict[str, int | float]:
    """Bytes between an offloaded rank and its host in a step of `accumulate` micro-batches: {"to_host", "to_device"}.
    Gradients cross once at stage 1, where the rank accumulates them; otherwise after each micro-batch."""
    shard = BYTES[dtype][0] * elements / world_size
    times = accumulate if stage >= SHARDED_FROM["gradients"] else 1
    return {"to_host": _whole(times * shard), "to_device": _whole(shard)}


def bytes_a_parameter(stage: int, world_size: int, dtype: str, **options) -> float:
    """Bytes of model states on one rank for each parameter of the model: 16, 4 + 12/N, 2 + 14/N, 16/N. options: of
    model_states."""
    return sum(model_states(stage, 1, world_size, dtype, **options).values())


def largest_model(
    stage: int, device_bytes: float, world_size: int, dtype: str, model_parallel: int = 1, **options
) -> int:
    """Parameters of the largest model whose states fit on a device (Table 2). world_size: data-parallel ranks. options:
    of model_states."""
    return math.floor(model_parallel * device_bytes / bytes_a_parameter(stage, world_size, dtype, **options))


@exported
def fewest_ranks(stage: int, elements: int, device_bytes: float, dtype: str, **options) -> int | None:
    """The smallest data-parallel group on which a model's states fit on a device; None if no number is enough. options:
    of model_states."""
    whole = bytes_a_parameter(stage, 10**18, dtype, **options) * elements  # the part that is never sharded
    shared = bytes_a_parameter(stage, 1, dtype, **options) * elements - whole
    if whole + shared <= device_bytes:
        return 1
    return None if whole >= device_bytes or stage == 0 else math.ceil(shared / (device_bytes - whole) - 1e-9)


def traffic(stage: int, elements: int, world_size: int, dtype: str, accumulate: int = 1,
            gradient_bytes: int | None = None) -> int | float:
    """Bytes that one rank sends in an optimizer step of `accumulate` micro-batches. gradient_bytes: per element of a
    gradient when it is reduced (None: as the parameters)."""
    size = BYTES[dtype][0]
    each = volume(stage, accumulate) * size
    if gradient_bytes is not None:  # both halves of stage 0's all-reduce; otherwise the reduce-scatters
        reduces = 2 if stage == 0 else 1 if stage == 1 else accumulate
        each += reduces * (gradient_bytes - size)
    return _whole(each * elements * (world_size - 1) / world_size)


def traffic_between(elements: int, shards: int, replicas: int, dtype: str,
                    gradient_bytes: int | None = None) -> int | float:
    """The same between groups of `shards` ranks that each keep all states, as in HSDP ("hybrid sharding" in Zhao et al.
    2023, arXiv:2304.11277, section 3.2.2): once a step, a rank all-reduces its gradient shard with that of the other
    groups. At stages 0 to 2 without accumulation, this plus the traffic inside a group is that of R = 1."""
    return 0 if replicas == 1 else traffic(0, elements / shards, replicas, dtype, gradient_bytes=gradient_bytes)


def volume(stage: int, accumulate: int = 1) -> int:
    """The factor before Ψ(N−1)/N: reduce-scatters and all-gathers of the whole model in one optimizer step."""
    if stage <= 1:
        return 2  # gradients are kept whole, and reduced once however many micro-batches there are
    if stage == 2:
        return accumulate + 1  # gradients are kept in shards: reduced after each micro-batch; parameters gathered once
    return 3 * accumulate  # parameters gathered before forward and before backward, gradients reduced


# ------------------------------------------------------------------------------------------- activations (§3.2, §6.1)


def activations(layers: int, hidden: int, batch: int, sequence: int, dtype: str) -> int:
    """Bytes of all activations of a GPT without checkpoints: about 12·b·s·h elements a block."""
    return 12 * layers * batch * sequence * hidden * BYTES[dtype][0]


def checkpoints(layers: int, hidden: int, batch: int, sequence: int, dtype: str, cut: int = 1) -> float:
    """Bytes of the blocks' inputs, b·s·h elements each. cut: model-parallel ranks that share each (P_a)."""
    return _whole(layers * batch * sequence * hidden * BYTES[dtype][0] / cut)


# ------------------------------------------------------------------------------------------ model-parallel traffic (§8)


def model_parallel_traffic(layers: int, hidden: int, batch: int, sequence: int, dtype: str, ranks: int,
                           partition: bool = False, recompute: bool = True) -> float:
    """Bytes a rank sends in a step for Megatron's all-reduces: per block 2 in forward, 2 in backward, 2 to recompute,
    each of b·s·h elements, which a ring sends twice. partition: adds P_a's all-gather of b·s·h."""
    elements = ((12 if recompute else 8) + (1 if partition else 0)) * layers * batch * sequence * hidden
    return _whole(elements * BYTES[dtype][0] * (ranks - 1) / ranks)


def sequence_parallel_traffic(layers: int, hidden: int, batch: int, sequence: int, dtype: str, ranks: int,
                              recompute: bool = True) -> float:
    """Bytes a rank sends in a micro-batch where `ranks` ranks share each sequence as DeepSpeed-Ulysses does it (Jacobs
    et al. 2023, arXiv:2309.14509, section 3.2): each block sends query, key, value and attention's output by
    all-to-all, b·s·h/ranks elements each, in forward, in backward, and once more to recompute."""
    elements = (12 if recompute else 8) * layers * batch * sequence * hidden / ranks
    return _whole(elements * BYTES[dtype][0] * (ranks - 1) / ranks)


# ----------------------------------------------------------------------------------------------------------- operations


def matrix_operations(layers: int, hidden: int, vocabulary: int, tokens: int, recompute: bool) -> int:
    """Operations with weights in a step, on all model-parallel ranks together."""
    blocks, head = 12 * layers * hidden**2, vocabulary * hidden
    return 2 * tokens * (blocks * (4 if recompute else 3) + head * 3)


def attention_operations(
    layers: int, hidden: int, batch: int, sequence: int, recompute: bool, fused: bool = True
) -> int:
    """Operations between activations in a step, on all model-parallel ranks together: of whole products, as
    torch.utils.flop_counter counts them. A causal kernel that skips masked positions does half."""
    products = 2 + (5 if fused else 4) + (2 if recompute else 0)
    return products * 2 * batch * sequence**2 * hidden * layers


# ------------------------------------------------------------------------------------------------------------- in words


def formula(stage: int, state: str, dtype: str) -> str:
    """The formula in words for a table: "8Ψ/N"."""
    size = dict(zip(STATES, BYTES[dtype], strict=True))[state]
    return f"{size}Ψ/N" if stage >= SHARDED_FROM[state] else f"{size}Ψ"


def _whole(value: float) -> int | float:
    return round(value) if value == round(value) else value
