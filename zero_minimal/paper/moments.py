"""Moments: when a step's memory can peak, and what a device holds then besides model states. Counted operator by
operator in our GPT, without dropout, with fused attention, which keeps no matrix of scores (others: kernels.py).

With u = b·s·h elements, t = b·s tokens, and M model-parallel ranks that share the inside of Megatron's parallel
regions, a block keeps for backward

    (4 + 12/M) u    x, its norm │ query, key, value 3/M, attention's output 1/M │ x, its norm │ expansion 4/M, GELU 4/M

and only its input, 1 u, if it is recomputed (P_a: u/M; P_a+cpu: none on the device). A step peaks at one of

    logits        all that is kept, and 3 tensors [t, V] in fp32 for the loss (4/M with model parallelism)
    top block     all that is kept; for the block where backward begins, also its inside, the inside's gradients, and
                  gradients of weights that wait to be reduced
    bottom block  the same for the block where backward ends: the others are freed, their gradients are complete
    embedding     then: the gradients of the embedding and of the head, which share a weight, and their sum
    update        a bucket in fp32, besides the masters (16-bit models)

where stage 3 also holds whole units. The paper estimates all that is kept as 12 u a block (formulas.activations).
"""

from dataclasses import dataclass

from zero_minimal.paper import formulas
from zero_minimal.paper.expressions import exported
from zero_minimal.paper.formulas import BYTES
from zero_minimal.paper.shapes import block_parameters, parameter_count, root_parameters
from zero_minimal.workload.model import GPTConfig

BUCKET = 4 * 2**20  # bytes: the stages' default
CHECKPOINTS = ("whole", "P_a", "P_a+cpu")
BEFORE_GRADIENTS = ("logits", "head", "top block")  # moments before stages 2 and 3 have gradients


@dataclass(frozen=True)
class Moment:
    """Bytes on a device at a moment of a step."""

    name: str
    states: float  # parameters, gradients (at stages 2 and 3 once they exist) and optimizer
    activations: float
    passing: float  # temporary: whole parameters and gradients, copies in fp32

    @property
    def total(self) -> float:
        return self.states + self.activations + self.passing


@dataclass(frozen=True)
class Parts:
    """Elements of a model, or of a model-parallel rank's part of it."""

    whole: float
    unit: float  # the largest that stage 3 gathers as one: a block
    root: float  # all that is outside the blocks
    head: float  # the weight matrix of the embedding, or of the head
    matrix: float  # the largest weight matrix in a unit
    bucketed: float  # the most elements that stage 2's buckets can hold
    drawn: float = 0  # temporary ones while the model is built
    tied: bool = True  # embedding and head share one weight
    update_bytes: int = 5  # per 16-bit element in the update: an fp32 copy, and a flag for edited elements


@dataclass(frozen=True)
class Work:
    """What a group of model-parallel ranks trains, and how, for our GPT. (For other models: measured.py.)"""

    config: GPTConfig
    batch: int = 1
    dtype: str = "fp16"
    model_parallel: int = 1
    checkpoints: str = "whole"  # or "P_a", "P_a+cpu"; used only with config.recompute
    accumulate: int = 1  # micro-batches in a step
    attention: str = "fused"  # or "unfused", "recomputed" (kernels.py)
    sequence_parallel: int = 1  # data-parallel ranks that share each sequence, as in DeepSpeed-Ulysses
    gradient_bytes: int | None = None  # 4: fp32 gradients for 16-bit parameters; None: the dtype's size
    replicate: int = 1  # groups of data-parallel ranks that each keep all states (HSDP)
    optimizer_bytes: float | None = None  # the paper's K; None: Adam's

    def shards(self, ranks: int) -> int:
        """N of the formulas: how many of these ranks share one copy of the states."""
        return ranks // (self.model_parallel * self.replicate)

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a micro-batch."""
        return shared(self.batch * self.config.sequence, self.sequence_parallel)

    @property
    def unit(self) -> int:
        """Bytes of u, a block's input [b, s, h]."""
        return self.tokens * self.config.hidden * BYTES[self.dtype][0]

    def block(self) -> float:
        """Bytes that a block keeps for backward if it is not recomputed."""
        cut, fused = self.model_parallel, self.attention == "fused"
        heads = self.config.heads if fused else 0
        statistics = self.tokens * (4 * heads / cut + 4 * BYTES[self.dtype][0])  # of attention and of two norms
        return (4 + 12 / cut) * self.unit + statistics + (self.scores() if self.attention == "unfused" else 0)

    def checkpoint(self) -> float:
        """Bytes that a block keeps if it is recomputed."""
        return {"whole": self.unit, "P_a": self.unit / self.model_parallel, "P_a+cpu": 0}[self.checkpoints]

    def kept(self) -> float:
        """Bytes that all blocks keep."""
        return self.config.layers * (self.checkpoint() if self.config.recompute else self.block())

    @exported
    def logits(self) -> float:
        """Bytes for the loss, in fp32 whatever the dtype is, and for the norm before the head."""
        tensors = 3 if self.model_parallel == 1 else 4 / self.model_parallel
        return tensors * 4 * self.tokens * self.config.vocabulary + 3 * self.unit

    def at_work(self) -> float:
        """Bytes for the block that backward is in, besides what is kept."""
        inside = self.block() - self.unit if self.config.recompute else 0
        gathered = 0 if self.checkpoints == "whole" else 2 * self.unit  # P_a: the block's whole input and output
        in_mlp = (1 + 4 / self.model_parallel) * self.unit
        if self.attention == "fused":
            return inside + gathered + in_mlp
        # later, in attention: the MLP's tensors are freed; gradients of probabilities and of scores exist
        in_attention = 2 * self.scores() - (2 + 8 / self.model_parallel) * self.unit
        if self.attention == "recomputed":  # scores again, and contiguous copies of query, key, value
            again = 0 if self.config.recompute else 3 / self.model_parallel
            in_attention += self.scores() + again * self.unit
        return inside + gathered + max(in_mlp, in_attention)

    def scores(self) -> float:
        """Bytes of one matrix of scores in a block: unfused attention keeps one, and briefly has three."""
        ranks = self.model_parallel * self.sequence_parallel  # each has some of the heads
        return self.batch * self.config.heads * self.config.sequence**2 * BYTES[self.dtype][0] / ranks

    def activations(self) -> dict[str, float]:
        """Bytes that a rank keeps for backward, for each way of keeping them, and bytes of temporary tensors."""
        config = self.config
        run = (config.layers, config.hidden, shared(self.batch, self.sequence_parallel), config.sequence, self.dtype)
        return {
            "all": config.layers * self.block(),
            "papers_estimate": formulas.activations(*run),
            "checkpoints": formulas.checkpoints(*run),
            "P_a": formulas.checkpoints(*run, cut=self.model_parallel),
            "P_a+cpu": 0,
            "block_at_work": self.at_work(),
            "logits": self.logits(),
            "scores": self.scores(),
        }

    def at_moments(self) -> dict[str, float]:
        """Bytes of activations at each moment, in the order of a step."""
        return {
            "logits": self.kept() + self.logits(),
            "top block": self.kept() + self.at_work(),
            "bottom block": self.kept() / self.config.layers + self.at_work(),
            "embedding": 2 * self.unit,
            "update": 0,
        }

    @exported
    def parts(self) -> Parts:
        """A rank's part of the model. Model-parallel ranks draw each weight whole and pad it before they cut it."""
        config, parallel = self.config, self.model_parallel
        block, root = block_parameters(config, parallel), root_parameters(config, parallel)
        words = config.vocabulary * config.hidden
        return Parts(
            whole=config.layers * block + root, unit=block, root=root, head=words / parallel,
            matrix=4 * config.hidden**2 / parallel, bucketed=config.layers * block,  # the largest is the MLP's
            drawn=(2 + 1 / parallel) * words if parallel > 1 else 0)

    def operations(self) -> tuple[float, float]:
        """Operations of a rank in a step: with weights, and in attention, whose fused kernel skips masked positions."""
        config, batch, fused = self.config, self.batch * self.accumulate, self.attention == "fused"
        share = self.model_parallel * self.sequence_parallel
        matrices = formulas.matrix_operations(config.layers, config.hidden, config.vocabulary, batch * config.sequence,
                                              config.recompute) / share
        again = config.recompute or self.attention == "recomputed"
        whole = formulas.attention_operations(config.layers, config.hidden, batch, config.sequence, again,
                                              fused) / share
        return matrices, whole / 2 if fused else whole

    def sent_meanwhile(self) -> tuple[float, float, float]:
        """Bytes that a rank sends in a step while its computation waits: for model parallelism, the same with P_a, and
        for shared sequences."""
        config, batch, together = self.config, self.batch * self.accumulate, self.sequence_parallel
        run = (config.layers, config.hidden, shared(batch, together), config.sequence, self.dtype, self.model_parallel)
        across = 0 if together == 1 else formulas.sequence_parallel_traffic(
            config.layers, config.hidden, batch, config.sequence, self.dtype, together,
            config.recompute) / self.model_parallel
        sent, with_p_a = (formulas.model_parallel_traffic(*run, partition=partition, recompute=config.recompute)
                          for partition in (False, True))
        return sent, with_p_a, across

    def described(self) -> dict:
        """The model's sizes, for a report."""
        config = self.config
        return {"parameters": parameter_count(config), "parameters_of_rank": self.parts().whole,
                "layers": config.layers, "hidden": config.hidden, "heads": config.heads,
                "vocabulary": config.vocabulary}


def shared(number: int, ranks: int) -> int | float:
    """A rank's equal part of a number."""
    return number if ranks == 1 else number / ranks


def highest(stage: int, work: Work, shards: int, offloaded: bool = False) -> Moment:
    """The peak of a step. shards: ranks that share the states. offloaded: their hosts keep and update the optimizer's
    state."""
    states = formulas.model_states(stage, work.parts().whole, shards, work.dtype, offloaded, work.optimizer_bytes,
                                   work.gradient_bytes)
    all_states = sum(states.values())
    # backward makes the gradients, except those of earlier micro-batches
    before = all_states - (states["gradients"] if stage >= 2 and work.accumulate == 1 else 0)
    passing = _passing(stage, work, shards) | ({"update": 0} if offloaded else {})
    return _highest_of([Moment(name, before if name in BEFORE_GRADIENTS else all_states, activations, passing[name])
                        for name, activations in work.at_moments().items()])


@exported
def _highest_of(moments: list[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total)


@exported
def construction(stage: int, work: Work) -> float:
    """Temporary bytes before the first step: stages 0 to 2 copy the model into flat memory. Stage 3 builds the model
    unit by unit, and every step of it uses more."""
    parts = work.parts()
    return 0 if stage == 3 else max(2 * parts.whole, parts.drawn) * BYTES[work.dtype][0]


@exported
def _passing(stage: int, work: Work, shards: int) -> dict[str, float]:
    """Bytes of temporary whole parameters and gradients at each moment.

    Stages 0 to 2: gradients arrive one parameter at a time; a tied head's gradient waits for the embedding's; stage 2
    copies them into buckets. Stage 3: the root unit, the block at work, and the block that is prefetched or being
    reduced.
    """
    size, parts = BYTES[work.dtype][0], work.parts()
    head, root, unit, matrix = (part * size for part in (parts.head, parts.root, parts.unit, parts.matrix))
    update = 0 if work.dtype == "fp32" else parts.update_bytes
    if stage == 3:
        block = root + head + 4 * unit
        return {"logits": root + unit, "head": root + unit + head, "top block": block, "bottom block": block,
                "embedding": root + 3 * head + 3 * unit, "update": update * max(parts.unit, parts.root) / shards}
    waiting = head if parts.tied else 0
    buckets = min(2 * BUCKET, parts.bucketed * size) if stage == 2 else 0
    block = waiting + matrix * (2 if stage == 2 else 1) + buckets
    return {"logits": 0, "head": head, "top block": block, "bottom block": block,
            "embedding": head + 2 * waiting + buckets,
            "update": update * min(BUCKET / size, parts.whole) / (shards if stage else 1)}
