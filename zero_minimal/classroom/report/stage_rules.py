"""Stage rules: what a rank of each stage may hold and must send in the small run, by the paper's formulas.

They are formulas, and no record of the reference's run: so they hold for a solution written in another way, with other
buckets or another layout, and a course that comes without its reference has them too.
"""

from dataclasses import dataclass

from zero_minimal.classroom.report.small_model import BUCKET, ELEMENTS, RANKS
from zero_minimal.paper import formulas

SPARE = 1.5 * BUCKET  # padding, and what a collective lets go of a moment late
OPEN = 5 * BUCKET  # gradients that are still whole: those that come, those being reduced, a layer in two buckets
SHARE = 4 * ELEMENTS * (RANKS - 1) / RANKS  # bytes that a ring sends for a reduce-scatter or all-gather of the model

# units of SHARE that a rank of stages 0 to 3 sends in a phase, by the event that ends it
SENDS = {"backward": (2, 1, 1, 3), "micro": (0, 0, 1, 3), "stepped": (0, 1, 1, 0), "forgot": (0, 0, 0, 0)}
WORDS = {
    "made": ("all ranks start from rank 0's parameters",) * 4,
    "backward": (
        "each bucket is all-reduced as soon as its gradients are there",
        "each bucket is reduce-scattered as soon as its gradients are there",
        "each bucket is reduce-scattered as soon as its gradients are there; a shard stays, the rest is freed",
        "each unit is gathered when its turn comes and released after it; its gradients are reduce-scattered"),
    "micro": (
        "nothing is sent: gradients add up where they are", "nothing is sent: gradients add up where they are",
        "as in every backward: reduced bucket by bucket, so that no whole gradients wait",
        "as in every backward: gathered, reduced and released unit by unit"),
    "stepped": (
        "every rank updates everything; nothing is sent",
        "a rank updates its own shard; all parameters are gathered", "a rank updates its own shard; all parameters are "
        "gathered", "a rank updates its own shard; nothing is sent"),
    "forgot": ("no gradient is left",) * 4,
    "clipped": ("the norm of the whole gradient, the same on every rank",) + (
        "the norm of the whole gradient, the same on every rank; the gradients stay as they are",) * 3,
}


@dataclass(frozen=True)
class Rules:
    """Those of a stage, 0 to 3."""

    stage: int

    @property
    def states(self) -> dict[str, float]:
        """Bytes of parameters, gradients and optimizer on a rank when a step is over."""
        return formulas.model_states(self.stage, ELEMENTS, RANKS, "fp32")

    @property
    def part(self) -> str:
        """What a rank has of the reduced gradients, in a word."""
        return "shard" if self.stage else "gradient"

    def gradients(self, ends: str, in_it: bool) -> float:
        """The most bytes of gradients, in a phase or at its end. At stage 0 they may be there twice: in .grad, and side
        by side."""
        if not self.stage:
            return 2 * self.states["gradients"] + OPEN
        return self.states["gradients"] + (OPEN if in_it and ends in ("backward", "micro") else SPARE)

    @property
    def optimizer(self) -> float:
        """The most bytes of optimizer state."""
        return self.states["optimizer"] + 2 * SPARE

    @property
    def at_first(self) -> float:
        """The most bytes when the stage is made. Stages 0 and 1 keep a place for gradients."""
        whole = 4 * ELEMENTS if self.stage < 2 else 0
        return 4 * ELEMENTS + whole + 4 * BUCKET

    def limit(self, ends: str, in_it: bool) -> float:
        """The most bytes of all model states. At stage 3 two units are whole at a time, beside the shards."""
        parameters = 4 * ELEMENTS if self.stage < 3 else self.states["parameters"] + 4 * BUCKET
        return parameters + SPARE + self.gradients(ends, in_it) + self.optimizer

    def sent(self, ends: str) -> tuple[float, float, float] | None:
        """Bytes that a rank sends in a phase: at least, as the formula has it, at most."""
        if ends not in SENDS:
            return None
        share = SENDS[ends][self.stage] * SHARE
        return (0.65 if self.stage == 3 else 0.9) * share, share, 1.1 * share + SPARE
