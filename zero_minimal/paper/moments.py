"""Moments: where a step is highest, and what lies on a device there beside model states. Counted in our GPT, operator
by operator: without dropout, and with attention that is fused, which keeps no matrix of scores (others: kernels.py).

With u = b·s·h elements, t = b·s tokens, and M model-parallel ranks that share what is inside of Megatron's region, a
block keeps for backward

    (4 + 12/M) u    x, its norm │ query, key, value 3/M, attention's output 1/M │ x, its norm │ expansion 4/M, GELU 4/M

and 1 u of it, its input, if it is recomputed (P_a: u/M; P_a+cpu: none on the device). A step is highest at one of

    logits        all that is kept, and for the loss 3 (with model parallelism 4/M) tensors [t, V] in fp32
    top block     all that is kept; and of the block where backward begins its inside, gradients of that, and gradients
                  of weights that wait to be reduced
    bottom block  the same of the block where backward ends: the others are free, their gradients have come
    embedding     after that: the gradients of embedding and head, which share a weight, and their sum
    update        a bucket in fp32, beside the masters (16 bit)

and stage 3 has whole units there. The paper's own estimate of all that is kept is 12 u a block (formulas.activations).
"""

from dataclasses import dataclass

from zero_minimal.paper.expressions import exported
from zero_minimal.paper.formulas import BYTES, states_on_device
from zero_minimal.paper.shapes import block_parameters, root_parameters
from zero_minimal.workload.model import GPTConfig

BUCKET = 4 * 2**20  # bytes: the stages' default
CHECKPOINTS = ("whole", "P_a", "P_a+cpu")


@dataclass(frozen=True)
class Moment:
    """Bytes on a device at a moment of a step."""

    name: str
    states: float  # parameters, gradients (at stages 2 and 3 not before they come) and optimizer
    activations: float
    passing: float  # parameters and gradients that are whole for a moment, copies in fp32

    @property
    def total(self) -> float:
        return self.states + self.activations + self.passing


@dataclass(frozen=True)
class Work:
    """What a group of model-parallel ranks works on at once."""

    config: GPTConfig
    batch: int
    dtype: str
    model_parallel: int = 1
    checkpoints: str = "whole"  # or "P_a", "P_a+cpu": where config.recompute keeps only these
    accumulate: int = 1  # micro-batches in a step
    attention: str = "fused"  # or "unfused", "recomputed" (kernels.py)
    sequence_parallel: int = 1  # ranks that share each sequence (sequences.py)
    gradient_bytes: int | None = None  # of an element that waits for the update; None: as the dtype has it
    replicate: int = 1  # groups of data-parallel ranks that each keep all states (HSDP)

    def shards(self, ranks: int) -> int:
        """N of the formulas: of so many ranks those among which states are cut."""
        return ranks // (self.model_parallel * self.replicate)

    @property
    def tokens(self) -> int:
        """Of a rank, in a micro-batch."""
        return shared(self.batch * self.config.sequence, self.sequence_parallel)

    @property
    def unit(self) -> int:
        """Bytes of u: of a block's input [b, s, h]."""
        return self.tokens * self.config.hidden * BYTES[self.dtype][0]

    def block(self) -> float:
        """Bytes that a block keeps for backward if it is not recomputed."""
        cut, fused = self.model_parallel, self.attention == "fused"
        heads = self.config.heads if fused else 0
        statistics = self.tokens * (4 * heads / cut + 4 * BYTES[self.dtype][0])  # of attention and of two norms
        return (4 + 12 / cut) * self.unit + statistics + (self.scores() if self.attention == "unfused" else 0)

    def checkpoint(self) -> float:
        """Bytes that it keeps if it is recomputed."""
        return {"whole": self.unit, "P_a": self.unit / self.model_parallel, "P_a+cpu": 0}[self.checkpoints]

    def kept(self) -> float:
        """Bytes that all blocks keep."""
        return self.config.layers * (self.checkpoint() if self.config.recompute else self.block())

    @exported
    def logits(self) -> float:
        """Bytes of what the loss needs, in fp32 whatever the dtype is, and of the norm before the head."""
        tensors = 3 if self.model_parallel == 1 else 4 / self.model_parallel
        return tensors * 4 * self.tokens * self.config.vocabulary + 3 * self.unit

    def at_work(self) -> float:
        """Bytes for the block that backward is in, beside what is kept."""
        inside = self.block() - self.unit if self.config.recompute else 0
        gathered = 0 if self.checkpoints == "whole" else 2 * self.unit  # P_a: its input, and its output once more
        in_mlp = (1 + 4 / self.model_parallel) * self.unit
        if self.attention == "fused":
            return inside + gathered + in_mlp
        # later, in attention: the MLP's are gone; gradients of probabilities and of scores have come
        in_attention = 2 * self.scores() - (2 + 8 / self.model_parallel) * self.unit
        if self.attention == "recomputed":  # once more, and as products want them: query, key and value
            again = 0 if self.config.recompute else 3 / self.model_parallel
            in_attention += self.scores() + again * self.unit
        return inside + gathered + max(in_mlp, in_attention)

    def scores(self) -> float:
        """Bytes of one matrix of scores in a block: attention that is not fused keeps one, and has three for a
        moment."""
        ranks = self.model_parallel * self.sequence_parallel  # each has some of the heads
        return self.batch * self.config.heads * self.config.sequence**2 * BYTES[self.dtype][0] / ranks


def shared(number: int, ranks: int) -> int | float:
    """A rank's part of it."""
    return number if ranks == 1 else number / ranks


def highest(stage: int, work: Work, data_parallel: int, optimizer_bytes: float | None = None,
            offloaded: bool = False) -> Moment:
    """The peak of a step, on so many data-parallel ranks. offloaded: their hosts keep and update the
    optimizer's state."""
    return _highest_of(_moments(stage, work, data_parallel, optimizer_bytes, offloaded))


@exported
def _highest_of(moments: list[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total)


@exported
def construction(stage: int, work: Work) -> float:
    """Bytes for a moment before the first step: stages 0 to 2 copy the model into flat memory. Stage 3 builds it unit
    by unit, and is higher in every step. (Model-parallel ranks draw each weight whole, and pad it, before they cut it.)
    """
    whole, parallel = work.config.vocabulary * work.config.hidden, work.model_parallel
    drawn = (2 + 1 / parallel) * whole if parallel > 1 else 0
    return 0 if stage == 3 else max(2 * rank_parameters(work), drawn) * BYTES[work.dtype][0]


def rank_parameters(work: Work) -> int:
    """Elements of the model on one of the model-parallel ranks."""
    return (work.config.layers * block_parameters(work.config, work.model_parallel)
            + root_parameters(work.config, work.model_parallel))


def _moments(stage: int, work: Work, ranks: int, optimizer_bytes: float | None, offloaded: bool) -> list[Moment]:
    states = states_on_device(stage, rank_parameters(work), ranks, work.dtype, offloaded, optimizer_bytes,
                              work.gradient_bytes)
    all_states = sum(states.values())
    # at stages 2 and 3 none have come yet, but for those of micro-batches before
    without_gradients = all_states - (states["gradients"] if stage >= 2 and work.accumulate == 1 else 0)
    passing = (_units if stage == 3 else _buckets)(stage, work, ranks)
    return [
        Moment("logits", without_gradients, work.kept() + work.logits(), passing["logits"]),
        Moment("top block", without_gradients, work.kept() + work.at_work(), passing["block"]),
        Moment("bottom block", all_states, work.kept() / work.config.layers + work.at_work(), passing["block"]),
        Moment("embedding", all_states, 2 * work.unit, passing["embedding"]),
        Moment("update", all_states, 0, 0 if offloaded else passing["update"]),
    ]


@exported
def _buckets(stage: int, work: Work, ranks: int) -> dict[str, float]:
    """Stages 0 to 2: gradients come parameter by parameter, the head's waits for the embedding's, and stage 2 copies
    them into buckets."""
    size, parallel, config = BYTES[work.dtype][0], work.model_parallel, work.config
    head = config.vocabulary * config.hidden * size / parallel
    largest = 4 * config.hidden**2 * size / parallel  # a matrix of the MLP
    blocks = config.layers * block_parameters(config, parallel) * size
    buckets = min(2 * BUCKET, blocks) if stage == 2 else 0
    return {
        "logits": 0,
        "block": head + largest * (2 if stage == 2 else 1) + buckets,
        "embedding": 3 * head + buckets,
        "update": _in_fp32(min(BUCKET / size, rank_parameters(work)), work.dtype) / (ranks if stage else 1),
    }


@exported
def _units(stage: int, work: Work, ranks: int) -> dict[str, float]:
    """Stage 3: the root is whole, and of blocks the one at work, the one that comes next or is being reduced."""
    size, parallel = BYTES[work.dtype][0], work.model_parallel
    block, root = (count(work.config, parallel) * size for count in (block_parameters, root_parameters))
    head = work.config.vocabulary * work.config.hidden * size / parallel
    return {
        "logits": root + block,
        "block": root + head + 4 * block,
        "embedding": root + 3 * head + 3 * block,
        "update": _in_fp32(max(block, root) / size, work.dtype) / ranks,
    }


def _in_fp32(elements: float, dtype: str) -> float:
    """Bytes for the update of so many 16-bit elements: a copy in fp32, and which of them were edited."""
    return 0 if dtype == "fp32" else 5 * elements
