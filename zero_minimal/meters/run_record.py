"""Run record: what instruments measure in a whole training run, step by step, without its code.

    record = RunRecord(zero, rank)
    for losses in loop.steps(zero, batches, settings, observers=[record]):
        record.heard(losses)
    record.report()

Each instrument watches its own steps: the ledger the first MEMORY_STEPS, then the order of events and the traffic one
step each, then the clock. The stage's class must come from `watched()`, which records when it clips and with what norm.
"""

import time
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from zero_minimal.core import collectives
from zero_minimal.meters.events import Events, Span, overlapped
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter

MEMORY_STEPS = 6
ORDER_STEP = MEMORY_STEPS  # gradients and collectives, in the order of their events
TRAFFIC_STEP = ORDER_STEP + 1
TIME_STEPS = range(TRAFFIC_STEP + 1, TRAFFIC_STEP + 6)
EXCHANGE = 0.02  # seconds in which ranks agree on a moment
STEPS = TIME_STEPS[-1] + 1  # the fewest steps that a run must have
CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")


def watched(stage_class: type) -> type:
    """The same stage class, which also records when clip_grad_norm_() was called and what it returned."""

    class Watched(stage_class):
        norms: tuple = ()
        clipped_at = 0.0

        def clip_grad_norm_(self, max_norm):
            self.clipped_at = time.perf_counter()
            norm = super().clip_grad_norm_(max_norm)
            self.norms = (*self.norms, norm.item())
            return norm

    return Watched


def one_zero(device) -> float:
    """The moment from which all ranks count, in seconds of time.perf_counter(): it has just passed when this returns.
    The ranks leave an exchange one after another, so they agree on a later moment, and sleep until then.

    Processes on one machine read the same clock. Times of ranks on two machines cannot be compared.
    """
    dist.barrier()
    zero = torch.tensor(time.perf_counter() + EXCHANGE, dtype=torch.float64, device=device)
    dist.all_reduce(zero, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, zero.item() - time.perf_counter()))
    return zero.item()


class RunRecord:
    """Watches this rank during a run of STEPS steps or more."""

    def __init__(self, zero, rank):
        self.zero, self.rank = zero, rank
        self.losses: list[float] = []
        self.apart: list[float] = []  # before the first step, and after each
        self.moved: list[float] = []
        self.memory: list[dict] = []
        self.times: list[dict] = []
        self.ledger, self.meter, self.overlap = Ledger(rank.device.type), TrafficMeter(), (0, 0)
        self._steps = 0
        self._before = self._parameters()
        self._compare()

    def heard(self, losses: list[torch.Tensor]) -> None:
        """The losses of the step's micro-batches, as the loop yields them."""
        self.losses.append(sum(loss.item() for loss in losses))

    @contextmanager
    def step(self):
        """A context around one optimizer step."""
        number = self._steps
        with ExitStack() as instruments:
            if number < MEMORY_STEPS:
                instruments.enter_context(self._watch_memory(first=not number))
            elif number == ORDER_STEP:
                instruments.enter_context(self._watch_order())
            elif number == TRAFFIC_STEP:
                instruments.enter_context(self.meter)
            elif number in TIME_STEPS:
                instruments.enter_context(self._watch_time())
            yield
        self._steps += 1
        after = self._parameters()
        self.moved.append((after - self._before).norm().item())
        self._before = after
        self._compare()

    # ------------------------------------------------------------------------------------------------- the instruments

    @contextmanager
    def _watch_memory(self, first: bool):
        with self.ledger:
            if first:
                self.ledger.watch(self.zero.model, self.zero, self.zero.optimizer)
            self.ledger.reset()
            yield
            at_the_end, highest = self.ledger.states(), self.ledger.highest()
            self.memory.append({
                "at the end": {name: at_the_end[name] for name in CATEGORIES},
                "highest": {name: highest[name] for name in CATEGORIES},
            })

    @contextmanager
    def _watch_order(self):
        with Events(self.zero.model) as seen:
            yield
        self.overlap = overlapped(seen.events)

    @contextmanager
    def _watch_time(self):
        began = one_zero(self.rank.device)
        with Events() as seen:
            seen.began = began
            marks: list[tuple[str, float]] = []

            def mark(name):
                return lambda *_: marks.append((name, time.perf_counter() - began))

            hooks = [self.zero.model.register_forward_pre_hook(mark("forward"), prepend=True),
                     self.zero.model.register_forward_hook(mark("backward"))]
            yield
            marks += [("update", self.zero.clipped_at - began), ("", time.perf_counter() - began)]
            for hook in hooks:
                hook.remove()
        parts = [Span(name, start, end) for (name, start), (_, end) in zip(marks, marks[1:], strict=False)]
        self.times.append({"computing": parts, "collectives": seen.collectives, "seconds": marks[-1][1]})

    def _parameters(self) -> torch.Tensor:
        """This rank's parameters in fp32: all, or at stage 3 its shards."""
        sharded = hasattr(self.zero, "units")
        tensors = [bucket.parameter_shard for bucket in self.zero.buckets] if sharded else self.zero.model.parameters()
        return torch.cat([tensor.detach().float().flatten() for tensor in tensors])

    def _compare(self) -> None:
        """The largest difference between this rank's parameters and rank 0's. At stage 3 each rank holds shards of
        other parameters, so there is nothing to compare."""
        if hasattr(self.zero, "units"):
            return
        theirs = self._before.clone()
        collectives.broadcast(theirs)
        self.apart.append((self._before - theirs).abs().max().item())

    def report(self) -> dict:
        """The measurements of this rank, ready for JSON. "times" has an entry for each of TIME_STEPS: choose the same
        on all ranks."""
        return {
            "losses": self.losses, "norms": list(self.zero.norms), "apart": self.apart, "moved": self.moved,
            "memory": self.memory, "traffic": self.meter.per_step(1), "overlap": list(self.overlap),
            "times": self.times,
        }
