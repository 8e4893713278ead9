"""Observer: measures a training run from outside, one quantity in each phase.

    steps 0 and 1    memory: the ledger sees every storage, which slows the run
    steps 2 to 6     traffic: the collectives, and the bytes on the rank's connections
    the rest         only time
"""

import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter, wire_bytes
from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

MEMORY_STEPS = 2  # the first step makes the optimizer state; the second, like all later ones, is reported
TRAFFIC_STEPS = 5


class Observer:
    """Watches a stage, or a peer with the same API, through the steps of a run.

        observer = Observer(zero, rank, settings)
        for _ in range(settings.steps):
            with observer.step():
                ...
        observer.report()
    """

    def __init__(self, zero, rank, settings):
        self.zero, self.rank, self.settings = zero, rank, settings
        self.ledger, self.meter = Ledger(rank.device.type), TrafficMeter()
        # a run of one or two steps measures traffic in its last one, together with memory
        self.traffic_from = min(MEMORY_STEPS, settings.steps - 1)
        self.traffic_to = min(self.traffic_from + TRAFFIC_STEPS, settings.steps)
        self.seconds: list[float] = []
        self.states: dict[str, int] = {}  # bytes by category at the end of the last step that the ledger saw
        self.wire_bytes: list[int] = []  # of each step whose traffic is watched; empty if unknown

    @contextmanager
    def step(self):
        """A context around one optimizer step, which must keep the gradients: the ledger counts them at its end."""
        number = len(self.seconds)
        with ExitStack() as instruments:
            if self.traffic_from <= number < self.traffic_to:
                instruments.enter_context(self._watch_traffic())
            if number < MEMORY_STEPS:
                instruments.enter_context(self._watch_memory())
            start = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - start)

    @contextmanager
    def _watch_memory(self):
        with self.ledger:
            if not self.seconds:
                # ZeroRedundancyOptimizer keeps its share of the state in an inner optimizer
                inner = getattr(self.zero.optimizer, "optim", self.zero.optimizer)
                self.ledger.watch(self.zero.model, self.zero, inner)
            self.ledger.reset()  # only the last step counts: all states exist from its beginning
            yield
            self.states = self.ledger.states()

    @contextmanager
    def _watch_traffic(self):
        before = wire_bytes(quiet=True)
        with self.meter:
            yield
        after = wire_bytes(quiet=True)
        if before is not None:
            self.wire_bytes.append(after - before)

    # ---------------------------------------------------------------------------------------------------------- report

    def report(self) -> dict:
        """Measurements of this rank with the paper's formulas: what --json writes, without the losses."""
        zero, rank, settings = self.zero, self.rank, self.settings
        parameters = sum(param.numel() for param in zero.model.parameters())
        padding = sum(bucket.padded - bucket.numel for bucket in getattr(zero, "buckets", []))  # elements
        is_peer = hasattr(zero, "theory_stage")  # torch's own: it names the stage whose formulas apply
        stage = zero.theory_stage if is_peer else stage_in(type(zero).__name__)
        offloaded = hasattr(zero, "host")
        rest = (rank.world_size, settings.dtype)
        step_seconds, accumulate = self.step_seconds(), settings.accumulate
        peak, highest = self.ledger.peak, self.ledger.highest()
        return {
            "name": _name(zero, stage),
            "stage": None if is_peer else stage,
            "theory_stage": stage,
            "ranks": rank.world_size,
            "backend": rank.backend,
            "device": rank.device.type,
            "dtype": settings.dtype,
            "parameters": parameters,
            "step_seconds": step_seconds,
            "tokens_per_second": settings.tokens_per_step(rank.world_size) / step_seconds,
            "memory": {
                **{state: self.states[state] for state in formulas.STATES},
                **{category: highest[category] for category in ("activations", "buffers")},
                "peak": peak.total,
                "peak_by_category": peak.bytes,
            },
            "theory": formulas.model_states(stage, parameters, *rest, offloaded),
            "padding": formulas.model_states(stage, padding, *rest, offloaded),
            "traffic": self.sent() | {
                "theory_bytes": formulas.traffic(stage, parameters, *rest, accumulate),
                "theory_volume": formulas.volume(stage, accumulate),
                "padding_bytes": formulas.traffic(stage, padding, *rest, accumulate),
                "wire_bytes": statistics.median(self.wire_bytes) if self.wire_bytes else None,
            },
            "settings": asdict(settings),
        }

    def step_seconds(self) -> float:
        """The median step. The first steps were slowed down, but a short run has no others."""
        return statistics.median(self.seconds[self.traffic_to :] or self.seconds)

    def sent(self) -> dict:
        """TrafficMeter.per_step() of the watched steps."""
        return self.meter.per_step(self.traffic_to - self.traffic_from)


def watched(stage_class, settings: Settings, world_size: int) -> dict:
    """Train with one class on `world_size` new ranks on the CPU; return rank 0's report. Two steps suffice for all but
    times. Raises what ranks.run raises."""

    def on_each_rank():
        with ranks.start() as rank:
            zero = loop.build(stage_class, settings, rank, bucket_bytes=int(settings.bucket_mb * 2**20))
            observer = Observer(zero, rank, settings)
            for _ in loop.steps(zero, loop.training_batches(settings, rank.rank), settings, observers=[observer]):
                pass
            return observer.report()

    return ranks.run(on_each_rank, world_size, device="cpu", timeout=300)[0]


def _name(zero, stage: int) -> str:
    """Its name in tables."""
    known = {f"Stage{stage}": f"stage {stage}", f"Offloaded{stage}": f"stage {stage}, offloaded"}
    return known.get(type(zero).__name__, type(zero).__name__)


def stage_in(name: str) -> int:
    """The stage number in a class's name. A name without a number is plain data parallelism, stage 0."""
    return int("".join(filter(str.isdigit, name)) or 0)
