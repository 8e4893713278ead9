"""The plan of `replicate`: sessions, each of several passes over the data, one after the other in the same ranks.

    table       the report's script, by model size: four passes with one model object; and each pass with a new model
    factorial   for each pair of kinds: a pass of the first, then a pass of the second, with the same object or a new
    model rates       the report's script at four times the learning rate
    position    one pass with the data split by position
    memory      some steps of each kind, and of plain torch, with small buckets, which such a small model needs
    times       short passes in turn: a machine's speed drifts, so a time is divided by its neighbour's
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

STANDARD, ZERO, OFFLOADED = "standard", "ZeRO", "offloaded"
PLAIN = "plain torch"  # for one rank
NEW, SAME = "new", "same"


@dataclass(frozen=True)
class Size:
    """The size of an encoder."""

    layers: int
    hidden: int
    heads: int = 4

    def __str__(self) -> str:
        return f"{self.layers} × {self.hidden}"


@dataclass(frozen=True)
class Pass:
    """One pass over the training data. batch: sentences per step of all ranks; model: NEW, or the SAME object as in the
    previous pass."""

    kind: str
    batch: int = 8
    model: str = NEW


@dataclass(frozen=True)
class Session:
    """Passes, the first with a new model."""

    part: str
    name: str  # unique
    size: Size
    passes: tuple[Pass, ...]
    ranks: int = 1
    seed: int = 0
    rate: float = 5e-4
    split: str = "shuffled"
    steps: int | None = None  # per pass; None: all batches of the data
    bucket_mb: float = 4.0


@dataclass(frozen=True)
class Plan:
    """How much is run. All parts but the table use the first size.

    steps: per pass of batch 8; None: all that the data give. rounds: of the part times.
    """

    name: str
    sizes: tuple[Size, ...]
    seeds: int
    steps: int | None
    factorial_steps: int
    rounds: int
    timed_steps: int


FULL = Plan("full", (Size(1, 64), Size(1, 32), Size(2, 32), Size(2, 64)), 5, None, 200, 7, 40)
QUICK = Plan("quick", (Size(1, 64), Size(1, 32)), 2, 300, 200, 3, 30)
FASTER_RATE = 4 * Session.rate
# the report's three passes, and the one that it left out
SCRIPT = (Pass(STANDARD), Pass(ZERO, model=SAME), Pass(ZERO, 16, SAME), Pass(STANDARD, 16, SAME))
AFRESH = tuple(Pass(each.kind, each.batch) for each in SCRIPT)
# All pairs of a first and a second pass: the four with ZeRO on and off, and offload first or second. The walk contains
# each pair twice: a pass with a new model, then one with the same object, such as the 1st and 2nd; and a pass with the
# same object, then one with a new model, such as the 2nd and 3rd
WALK = (STANDARD, STANDARD, ZERO, ZERO, STANDARD, ZERO, ZERO, STANDARD, OFFLOADED, STANDARD, STANDARD, OFFLOADED,
        STANDARD)
FACTORIAL = tuple(Pass(kind, model=SAME if number % 2 else NEW) for number, kind in enumerate(WALK))
WORLDS = (1, 2)
SMALL_BUCKETS, FEW = 0.25, 4  # MiB, steps
TIMED = (Pass(STANDARD), Pass(ZERO), Pass(OFFLOADED), Pass(STANDARD, 16))


def sessions(plan: Plan) -> Iterator[Session]:
    """All sessions of a plan, the most informative first."""
    first, seeds = plan.sizes[0], range(plan.seeds)
    for size, seed in (*((first, seed) for seed in seeds), *((size, 0) for size in plan.sizes[1:])):
        for words, passes in (("one object", SCRIPT), ("new models", AFRESH)):  # with the report's mistake, and without
            yield Session("table", f"table, {size}, {words}, seed {seed}", size, passes, seed=seed, steps=plan.steps)
    for seed, ranks in itertools.product(seeds, WORLDS):
        yield Session("factorial", f"factorial, N = {ranks}, seed {seed}", first, FACTORIAL, ranks, seed,
                      steps=plan.factorial_steps)
    yield Session("position", "position", first, SCRIPT[:1], split="position", steps=plan.steps)
    for seed in seeds:
        yield Session("rates", f"rates, {FASTER_RATE:g}, seed {seed}", first, SCRIPT[:3], seed=seed, rate=FASTER_RATE,
                      steps=plan.steps)
    for ranks in WORLDS:
        kinds = (PLAIN, STANDARD, ZERO, OFFLOADED)[ranks > 1:]
        yield Session("memory", f"memory, N = {ranks}", first, tuple(
            Pass(kind, batch) for batch in (8, 16) for kind in kinds), ranks, steps=FEW, bucket_mb=SMALL_BUCKETS)
    for ranks in WORLDS:
        yield Session("times", f"times, N = {ranks}", first, TIMED * plan.rounds, ranks, steps=plan.timed_steps)
