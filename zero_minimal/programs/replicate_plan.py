"""What `replicate` runs: sessions, each of some passes over the data, one after the other in the same ranks.

    table       the report's script, by model size: four passes with one model object; and each pass with a new model
    factorial   a first pass, a second with the same object, and the second again with a new model
    rates       the report's script at a learning rate that is four times as large
    position    one pass with the data split by position
    times       short passes in turn: a machine drifts, so a time is divided by that of its neighbour
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

STANDARD, ZERO, OFFLOADED = "standard", "ZeRO", "ZeRO, offloaded"
NEW, SAME = "new", "same"
PARTS = ("table", "factorial", "rates", "position", "times")


@dataclass(frozen=True)
class Size:
    """Of an encoder."""

    layers: int
    hidden: int
    heads: int = 4

    def __str__(self) -> str:
        return f"{self.layers} × {self.hidden}"


@dataclass(frozen=True)
class Pass:
    """Training over the data once. batch: sentences in a step of all ranks; model: NEW, or the SAME object as before."""

    kind: str
    batch: int = 8
    model: str = NEW


@dataclass(frozen=True)
class Session:
    """Passes, the first of which begins with a new model."""

    part: str
    name: str  # no other session has it
    size: Size
    passes: tuple[Pass, ...]
    ranks: int = 1
    seed: int = 0
    rate: float = 5e-4
    split: str = "shuffled"
    steps: int | None = None  # of a pass; None: all batches of the data


@dataclass(frozen=True)
class Plan:
    """How much is run. The first size is that of everything but the table."""

    name: str
    sizes: tuple[Size, ...]
    seeds: int
    steps: int | None
    rounds: int  # of times
    timed_steps: int

    def settings(self) -> dict:
        """As JSON: what a file was made with."""
        return asdict(self)


FULL = Plan("full", (Size(1, 64), Size(2, 64), Size(2, 128), Size(4, 128)), 5, None, 9, 120)
QUICK = Plan("quick", (Size(1, 32), Size(1, 64)), 2, 300, 3, 60)
FASTER_RATE = 4 * Session.rate
# the report's three passes, and last the one that it left out
SCRIPT = (Pass(STANDARD), Pass(ZERO, model=SAME), Pass(ZERO, 16, SAME), Pass(STANDARD, 16, SAME))
AFRESH = tuple(Pass(each.kind, each.batch) for each in SCRIPT)
# which first, which second: all four with ZeRO on and off, and offload on either side
PAIRS = (*itertools.product((STANDARD, ZERO), repeat=2), (STANDARD, OFFLOADED), (OFFLOADED, STANDARD))
WORLDS = (1, 2)
TIMED = (Pass(STANDARD), Pass(ZERO), Pass(OFFLOADED), Pass(STANDARD, 16))


def sessions(plan: Plan) -> Iterator[Session]:
    """All of a plan, what tells most first."""
    first, *others = plan.sizes
    for seed in range(plan.seeds):
        yield from table(plan, first, seed)
    for size in others:
        yield from table(plan, size, 0)
    for seed, world_size, pair in itertools.product(range(plan.seeds), WORLDS, PAIRS):
        passes = Pass(pair[0]), Pass(pair[1], model=SAME), Pass(pair[1])
        name = f"factorial, N = {world_size}, {' then '.join(pair)}, seed {seed}"
        yield Session("factorial", name, first, passes, world_size, seed, steps=plan.steps)
    yield Session("position", "position", first, SCRIPT[:1], split="position", steps=plan.steps)
    for seed in range(plan.seeds):
        yield Session("rates", f"rates, {FASTER_RATE:g}, seed {seed}", first, SCRIPT[:3], seed=seed, rate=FASTER_RATE,
                      steps=plan.steps)
    for world_size in WORLDS:
        yield Session("times", f"times, N = {world_size}", first, TIMED * plan.rounds, world_size,
                      steps=plan.timed_steps)


def table(plan: Plan, size: Size, seed: int) -> Iterator[Session]:
    """The report's script with its mistake, and without."""
    for words, passes in (("one object", SCRIPT), ("new models", AFRESH)):
        yield Session("table", f"table, {size}, {words}, seed {seed}", size, passes, seed=seed, steps=plan.steps)


def batches(plan: Plan, session: Session, each: Pass, reviews: int) -> int:
    """Steps of a pass over so many reviews. Half as many with twice the batch, if plan or session say how many."""
    every = reviews // each.batch
    return every if session.steps is None else min(every, session.steps * 8 // each.batch)
