"""Simulation: runs the stages' own code as one rank of many, on tensors without memory.

This file does not know how a stage works. Model, stage, optimizer and autograd run as in training; only tensors have no
values (paper/fakes.py), and the ranks use torch's "fake" backend: a group of, say, 1024, whose collectives return at
once.

The memory ledger counts each fake storage as the real one that it represents. So the bytes come from the running code,
not from a formula; a test shows that real ranks have the same, to the byte. Values, such as a loss, are null.

An offloaded rank has its host in this process, and the two take turns (offloading/simulated_host.py). The ledger
ignores the host's work; the host itself reports what it keeps, and the bus counts what crosses, as in a real run.

Not simulated: the search for infinities in fp16 gradients, which would read values; NCCL's own buffers, workspaces of
kernels, and fragmentation. Attention is torch's fused kernel, which keeps no matrix of scores.
"""

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.core.mesh import Mesh, make_mesh
from zero_minimal.guards.refused_optimizers import check_element_wise
from zero_minimal.meters.crossings import BusMeter
from zero_minimal.meters.memory import Event, Ledger, Moment
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.offload import HostState
from zero_minimal.offloading import host, host_process, simulated_host
from zero_minimal.paper import formulas
from zero_minimal.paper.fakes import new_tensors_in, without_values
from zero_minimal.paper.kernels import kernel
from zero_minimal.programs.cases import OPTIONS, Budget, Case, bucket_bytes, stage_of
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.programs.registry import CONFIGS, STAGES, System
from zero_minimal.tensor_parallel import ParallelGPT
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.model import GPT
from zero_minimal.workload.settings import DTYPES


class Living(NamedTuple):
    """Storages of one category and size that are alive at the same moment."""

    category: str
    bytes: int  # of each
    count: int


@dataclass
class Simulation:
    """The result: the report (the JSON object of the README), and the memory at each moment."""

    report: dict
    timeline: list[Moment]
    phases: list[tuple[str, float]]  # name, and the seconds of its start in the timeline
    at_peak: list[Living]  # the largest first
    trace: list[Event]  # allocations and frees on the device, for meters/allocator.py


def simulate(case: Case, tell: Callable[[str], None] = lambda phase: None, around=None) -> Simulation:
    """Run the case; tell(name) is called as each of its phases() begins.

    around: a function(model, zero) that returns a context for the steps, for further measurements.
    Raises: RuntimeError in a process that already has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("a simulation makes ranks of its own: call it where no process group is up")
    check_element_wise(AdamW, OPTIONS)  # while tensors still have values
    dist.init_process_group("fake", rank=case.rank, world_size=case.ranks, store=FakeStore())
    try:
        run = _Run(case, tell, around)
        return Simulation(run.report(), run.timeline, run.phases, run.living_at(run.peak()), run.on_device())
    finally:
        dist.destroy_process_group()
        gc.collect()


class _Run:
    """One rank's steps under the ledger."""

    def __init__(self, case: Case, tell: Callable[[str], None], around=None):
        self.case, self.tell, self.phases = case, tell, []
        self.ledger, self.meter = Ledger(), TrafficMeter()
        mesh = make_mesh(case.model_parallel)
        # device and host share one memory here: the category "other" is used only for host memory
        elsewhere = host.announced(lambda kept: self.ledger.claim(kept, "other"))
        beside_it = simulated_host.instead_of_processes(HostState)
        with torch.enable_grad(), without_values(), self.ledger, elsewhere, beside_it as hosts:
            somebody = torch.nn.Module()
            self.ledger.watch(somebody)  # so that tensors without an owner count as temporary buffers
            self._construct(mesh)
            self.ledger.watch(self.model, self.zero)
            self.bus = None
            if isinstance(getattr(self.zero, "host", None), host_process.Host):
                self.bus, bus = BusMeter(self.zero), self.zero.host.bus
                self.ledger.claim([bus.outgoing, bus.incoming], "buffers")
            with around(self.model, self.zero) if around else contextlib.nullcontext():
                for step in range(1, case.steps + 1):
                    with contextlib.ExitStack() as metered:
                        if step == case.steps:  # whose traffic is reported
                            metered.enter_context(self.meter)
                            metered.enter_context(self.bus.step() if self.bus else contextlib.nullcontext())
                        self._step(step)
                        self.states = self.ledger.states()
            self.timeline = self.ledger.timeline
            # last, since this waits for all pending transfers
            self.away = self.bus.report(self.states) | {"resident": None} if self.bus else {}
            self.kept_by_hosts = sum(each.kept_bytes() for each in hosts)  # also of hosts that zero does not show

    def _phase(self, name: str) -> None:
        self.tell(name)
        self.phases.append((name, self.ledger.trace[-1].seconds if self.ledger.trace else 0.0))

    def _construct(self, mesh: Mesh) -> None:
        case, dtype = self.case, DTYPES[self.case.dtype]
        options = OPTIONS | {"bucket_bytes": bucket_bytes(case)}
        self._phase("model")
        with new_tensors_in(dtype), torch.no_grad():
            if case.config:
                device = torch.device("cpu")
                self.zero = System(case.config, case.model, mesh, case.batch, dtype, device, AdamW, **options)
                self.model = self.zero.model
                return
            # stage 3 builds it unit by unit, and so must a learner's own system
            with torch.device("meta" if case.stage == 3 or case.build else "cpu"):
                self.model = build_model(case, mesh)
            self._phase("stage")
            group = mesh.data_group if case.model_parallel > 1 else None
            if case.build:
                self.zero = case.build(self.model, group, case.budget or Budget(sequence=case.model.sequence))
                return
            stage = Offload(bool(case.offload)).class_of(STAGES[case.stage])
            self.zero = stage(self.model, AdamW, group=group, **options)

    def _step(self, number: int) -> None:
        """A training step, which keeps the gradients."""
        case, scaler = self.case, LossScaler()
        self._phase(f"forward {number}")
        self.zero.zero_grad()
        tokens = torch.zeros(case.batch, case.model.sequence, dtype=torch.int64)
        for micro in range(1, case.accumulate + 1):
            if micro > 1:
                self._phase(f"micro-batch {micro} of step {number}")
            with self.zero.no_sync() if micro < case.accumulate else contextlib.nullcontext():
                loss = self.model(tokens, tokens)
                if micro == 1:
                    self._phase(f"backward {number}")
                (scaler.scale(loss) if case.dtype == "fp16" else loss).backward()
        self._phase(f"update {number}")
        if case.dtype == "fp16":
            scaler.unscale_(self.zero)
        self.zero.step()

    # ------------------------------------------------------------------------------------------------------- reports

    def report(self) -> dict:
        case = self.case
        elements = sum(param.numel() for param in self.model.parameters())
        padding = sum(bucket.padded - bucket.numel for bucket in getattr(self.zero, "buckets", []))
        stage, ranks = stage_of(case), case.ranks // case.model_parallel
        rest = (ranks, case.dtype, self.bus is not None)
        return {
            "name": case.called,
            "stage": stage,
            "theory_stage": stage,
            "config": case.config or None,
            "ranks": case.ranks,
            "rank": case.rank,
            "model_parallel": case.model_parallel,
            "backend": "fake",
            "device": "fake",
            "dtype": case.dtype,
            "parameters": case.parameters,
            "parameters_of_rank": elements,
            "bucket_bytes": bucket_bytes(case),
            "losses": None,
            "step_seconds": None,
            "tokens_per_second": None,
            "memory": self._memory(),
            "theory": formulas.model_states(stage, elements, *rest),
            "padding": formulas.model_states(stage, padding, *rest),
            "traffic": self._traffic(stage, elements, padding, ranks),
            "settings": case.settings,
        } | self.away

    def _memory(self) -> dict:
        last, peak = self.since(f"forward {self.case.steps}"), self.peak()
        construction = [moment for moment in self.timeline if moment.seconds <= dict(self.phases)["forward 1"]]
        return {state: self.states[state] for state in formulas.STATES} | {
            "activations": max(moment.bytes["activations"] for moment in last),
            "buffers": max(moment.bytes["buffers"] for moment in last),
            "host": self.host_bytes() + self.kept_by_hosts,
            "peak": on_device(peak),
            "peak_by_category": {name: size for name, size in peak.bytes.items() if name != "other"},
            "peak_when": [name for name, start in self.phases if start < peak.seconds or start == 0.0][-1],
            "peak_what": peak.what,
            "peak_of_all": on_device(max(self.timeline, key=on_device)),
            "construction_peak": on_device(max(construction, key=on_device)),
        }

    def _traffic(self, stage: int, elements: int, padding: int, ranks: int) -> dict:
        case = self.case
        return self.meter.per_step(1) | {
            "theory_bytes": formulas.traffic(stage, elements, ranks, case.dtype, case.accumulate),
            "theory_volume": formulas.volume(stage, case.accumulate),
            "padding_bytes": formulas.traffic(stage, padding, ranks, case.dtype, case.accumulate),
            "model_parallel_theory_bytes": 0 if case.model_parallel == 1 else formulas.model_parallel_traffic(
                case.model.layers, case.model.hidden, case.batch * case.accumulate, case.model.sequence, case.dtype,
                case.model_parallel, bool(case.config) and CONFIGS[case.config].partition,
                bool(case.config) or case.model.recompute,
            ),
            "wire_bytes": None,
        }

    def since(self, phase: str) -> list[Moment]:
        """The moments from the start of a phase on, and the last one before, its initial state."""
        start = dict(self.phases)[phase]
        first = next((index for index, moment in enumerate(self.timeline) if moment.seconds > start), 1)
        return self.timeline[max(0, first - 1):]

    def peak(self) -> Moment:
        """The peak of the last step, the first of them if there are several."""
        return max(self.since(f"forward {self.case.steps}"), key=on_device)

    def host_bytes(self) -> int:
        """The peak of host memory: "other" that did not exist before."""
        strangers = {event.storage for event in self.ledger.trace if event.what.startswith("alive already")}
        return max(accumulate((event.bytes for event in self.ledger.trace if event.storage.category == "other"
                               and event.storage not in strangers), initial=0))

    def on_device(self) -> list[Event]:
        """The part of the ledger's trace that is on the device."""
        return [event for event in self.ledger.trace
                if event.storage.device.type != "meta" and event.storage.category != "other"]

    def living_at(self, peak: Moment) -> list[Living]:
        """What is alive at this moment, grouped by category and size, the most bytes first."""
        index = next(index for index, moment in enumerate(self.timeline) if moment is peak)
        counted = [event for event in self.ledger.trace if event.storage.device.type != "meta"]
        alive: Counter = Counter()
        for event in counted[: index + 1]:
            alive[event.storage] += event.bytes
        alike = Counter((storage.category, size) for storage, size in alive.items() if size)
        groups = [Living(category, size, number) for (category, size), number in alike.items() if category != "other"]
        return sorted(groups, key=lambda group: -group.bytes * group.count)


def on_device(moment: Moment) -> int:
    """Bytes alive, without "other": what existed before the simulation, and host memory."""
    return moment.total - moment.bytes["other"]


def build_model(case: Case, mesh: Mesh) -> torch.nn.Module:
    """The model, or this rank's part of it."""
    if isinstance(case.model, ForeignModel):
        return case.model.build()
    if case.model_parallel == 1:
        model = GPT(case.model)
        for block in model.blocks if case.attention != "fused" else ():
            block.attention.attend = kernel(case.attention)
        return model
    model = ParallelGPT(case.model, mesh.model_group)
    if case.model.recompute:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.inside, use_reentrant=False)
    model.initialise = lambda module: None  # stage 3 would make it draw values, which do not exist
    return model
