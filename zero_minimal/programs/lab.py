"""Lab: a workbench for examining a claim. It runs and measures experiments, and keeps a journal.

    def card(lab):
        plain = lab.train(0)                        # a new GPT of the setting's sizes, on all ranks
        lab.reset_peak()
        zero = lab.train(2)
        return "false", (plain.peak - zero.peak) / 1e6

    lab.ranks, lab.seed, lab.seeds, lab.layers, lab.hidden, lab.parameters, lab.devices, …   the setting (setting.py)

    lab.train(stage, …)        really trains, here       → Run: losses, memory, peak, traffic, seconds
    lab.simulate(stage, …)     one rank of many, without values, but with exact bytes    → Run
    lab.published(name)        what the paper printed
    with lab.watch() as seen:  what this rank sends while other code runs    → Seen
    lab.arguments(zero=…)      arguments for train(), as the trainer of a library takes them
    lab.peak, lab.reset_peak() a meter like a GPU's: it only rises until it is reset
    lab.journal                what ran, in order

The contents of a Run, here of stage 2:

    run.memory         {"parameters": 1447296, "gradients": 723648, "optimizer": 1447296}        bytes
    run.collectives    {"all_gather": {"calls": 1, "bytes": 1447296}, "reduce_scatter": …}     of a step; bytes: payload
    run.when           {"forward": {}, "backward": {"reduce_scatter": 1447296}, "update": {"all_gather": 1447296}}
    run.at_peak        {"parameters": …, "gradients": …, "optimizer": …, "scalars": …, "buffers": …, "activations": …}

A notebook shows them. In a graded card, use `raise ValueError(run.memory)`: the grader shows what was raised. All ranks
run the same card. Memory and traffic are those of the rank itself; losses are means over the ranks.
"""

import contextlib
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.meters.events import Events, by_phase
from zero_minimal.meters.observer import Observer
from zero_minimal.meters.traffic import TrafficMeter, wire_bytes
from zero_minimal.paper import published
from zero_minimal.processes.joining import Rank
from zero_minimal.programs import simulated
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.programs.registry import CONTENDERS, STAGES
from zero_minimal.programs.setting import Setting
from zero_minimal.programs.simulation import on_device
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

LR = 0.02  # at the end of the warm-up, which is longer than the runs
OF_SETTINGS = ("layers", "hidden", "heads", "sequence", "steps", "accumulate", "bucket_mb", "recompute", "lr")
ACCOUNT = Path("/proc/self/io")  # Linux: what this process has written
PRINTED = {
    "table 1": published.TABLE1, "table 2": published.TABLE2, "figure 1": published.FIGURE1,
    "figure 2": published.FIGURE2, "figure 3": published.FIGURE3, "figure 4": published.FIGURE4,
    "figure 7": published.FIGURE7, "baselines": published.BASELINES,
}


@dataclass(frozen=True, eq=False)
class Run:
    """The results of a run, for this rank and one step. In bytes, unless a comment says otherwise."""

    name: str  # "stage 2", "DDP"
    stage: int  # the stage that really ran; for a peer, the comparable one
    ranks: int
    dtype: str
    batch: int  # sequences per rank and step
    seed: int | None
    parameters: int  # elements of the model
    memory: dict[str, int]  # of model states, at the end of a step: parameters, gradients, optimizer
    peak: int  # the highest that the meter showed since it was last reset
    at_peak: dict[str, int]  # by category, at the peak of this run: also activations, buffers
    collectives: dict[str, dict]  # {name: {"calls", "bytes"}}; bytes are the payload
    sent: float  # what a ring sends for these collectives
    when: dict[str, dict] = field(default_factory=dict)  # {"forward", "backward", "update": {collective: payload}}
    wire: float | None = None  # what its connections carried, by the system's count; None if unknown
    losses: tuple[float, ...] = ()  # of each step, nats
    validation: float | None = None  # loss on the held-out text, after the last step
    seconds: tuple[float, ...] = ()  # of each step; the first makes the optimizer's state, and meters slow some down
    step_seconds: float | None = None  # the median of the steps that no meter slows down
    kept: int | None = None  # of a simulated rank: activations kept from forward to backward
    cached: int | None = None  # of a simulated rank: what CUDA's allocator would have reserved
    model: nn.Module | None = field(default=None, repr=False)  # in its current state: train(model=…) continues with it

    @property
    def states(self) -> int:
        """Bytes of all model states."""
        return sum(self.memory.values())

    @property
    def loss(self) -> float:
        """The last loss."""
        return self.losses[-1]


@dataclass
class Seen:
    """What lab.watch() saw on this rank, in bytes."""

    collectives: dict[str, dict] = field(default_factory=dict)  # {name: {"calls", "bytes"}}
    sent: int = 0  # what a ring sends for these collectives
    wire: int | None = None  # what this process wrote, by the system's count


@dataclass
class Arguments:
    """Arguments of a trainer: `zero` is a configuration such as {"stage": 2}, or None for none.

    As in the libraries that have such arguments, their construction decides what will be done.
    """

    zero: dict | None = None
    stage: int = field(init=False)

    def __post_init__(self):
        self.stage = self.zero["stage"] if self.zero else 0
        self._had_one = self.zero is not None

    @property
    def configured(self) -> str:
        """When `zero` was set: "at building", "later" or "never"."""
        return "at building" if self._had_one else "later" if self.zero is not None else "never"


class Lab:
    """The lab of one rank. Args: setting; rank: this rank, from ranks.start()."""

    def __init__(self, setting: Setting, rank: Rank):
        self.setting, self.rank, self.ranks = setting, rank, rank.world_size
        self.journal: list[dict] = []
        self.peak = 0  # bytes
        self._alone = None  # the group of only this rank, once it is needed
        gc.freeze()  # ledgers search all objects for tensors; those of libraries hold none

    def __getattr__(self, name: str):
        if name == "setting":
            raise AttributeError(name)
        return getattr(self.setting, name)

    def reset_peak(self) -> None:
        """Reset the meter to zero."""
        self.journal.append({"kind": "reset_peak"})
        self.peak = 0

    def published(self, name: str):
        """A table or figure of the paper, as a dict. Raises: ValueError for an unknown one.

            "table 1"     model: {N: GB a device at stages 1, 2, 3}                       texts, as printed
            "table 2"     M: (theory for stages 0 to 3, measured for stages 0 and 1)      texts, billions
            "figure 2"    billions: a tuple with .zero and .baseline (Shapes), .zero_tflops, .baseline_gpus, …
            "figure 3"    GPUs: TFLOP/s a GPU
            "figure 4"    billions: TFLOP/s a GPU
            "figure 7"    model: (its Shape, {configuration: GB, or None for no bar})
            "figure 1"    is a tuple: GB a device at stages 0 to 3
            "baselines"   where it stands: billions

        A Shape has .layers, .hidden, .heads, .batch, .model_parallel.
        """
        if name not in PRINTED:
            raise ValueError(f"{name!r} is not here: choose from {', '.join(PRINTED)}")
        self.journal.append({"kind": "published", "what": name})
        return PRINTED[name]

    def arguments(self, **given) -> Arguments:
        """Make arguments for train(). zero: a configuration such as {"stage": 2}."""
        self.journal.append({"kind": "arguments"})
        return Arguments(**given)

    # -------------------------------------------------------------------------------------------------------- training

    def train(self, stage: int | str = 0, *, model: nn.Module | None = None, arguments: Arguments | None = None,
              ranks: int | None = None, offload: bool = False, **options) -> Run:
        """Train a GPT on Python's own documentation, and measure.

        Args:
            stage: 0 to 3, or the name of a peer: "DDP", "ZeroRedundancy", "FSDP2".
            model: continue with this one (of a Run); None: a new one, drawn from the seed.
            arguments: used instead of `stage`.
            ranks: 1: each rank by itself, as if it were alone; None: all together.
            offload: optimizer state and update on the host; stages 1 to 3.
            options: seed, layers, hidden, heads, sequence, batch, steps: to replace the setting's; dtype ("fp32",
                "bf16"), bucket_mb, accumulate, recompute, lr.
        Raises: ValueError if this cannot be trained.
        """
        if ranks not in (None, 1, self.ranks):
            raise ValueError(f"train() runs on 1 rank or on all {self.ranks}, not on {ranks}: simulate() has others")
        of_setting = {name: getattr(self, name) for name in ("seed", "layers", "hidden", "heads", "sequence", "batch",
                                                             "steps")}
        settings = Settings(**{"lr": LR, **of_setting, **options})
        kind, rank, given = self._kind(arguments.stage if arguments else stage, offload), self.rank, {}
        if "bucket_mb" in options:
            given["bucket_bytes"] = int(settings.bucket_mb * 2**20)
        if ranks == 1 < self.ranks:
            self._alone = self._alone or dist.new_subgroups(1)[0]
            rank, given["group"] = replace(rank, rank=0, world_size=1), self._alone
        if model is None:
            zero = loop.build(kind, settings, rank, **given)
        else:
            zero = kind(model, torch.optim.AdamW, **settings.optimizer_options(), **given)
            loop.seed_dropout(settings, rank.rank)
        run = self._measured(zero, rank, settings)
        self._enter("train", run, fresh=model is None, offload=offload, sizes=settings,
                    configured=arguments.configured if arguments else None)
        return run

    def _kind(self, stage: int | str, offload: bool):
        if isinstance(stage, str):
            if stage not in CONTENDERS or offload:
                raise ValueError(f"{stage!r} is not there{' with offload' if offload else ''}: choose from 0 to 3 and "
                                 f"{', '.join(CONTENDERS)}")
            return CONTENDERS[stage]
        if stage not in range(len(STAGES)) or offload and not stage:
            raise ValueError(f"stage must be 0, 1, 2 or 3, and with offload 1, 2 or 3; not {stage!r}")
        return Offload(offload).class_of(STAGES[stage])

    def _measured(self, zero, rank: Rank, settings: Settings) -> Run:
        observer, events = Observer(zero, rank, settings), Events(modules=True)
        batches = loop.training_batches(settings, rank.rank)
        losses = [loop.mean_over_ranks([sum(parts).item()], self.rank)[0]
                  for parts in loop.steps(zero, batches, settings, observers=[observer, events])]
        held_out = loop.validation_batches(settings, rank.rank, rank.world_size)
        validation = loop.evaluate(zero, held_out, self.rank)
        found = observer.report()
        highest = max(observer.ledger.timeline, key=on_device)
        self.peak = max(self.peak, on_device(highest))
        with zero.gather_parameters() if hasattr(zero, "gather_parameters") else contextlib.nullcontext():
            model = None if hasattr(zero, "theory_stage") else copy.deepcopy(zero.model)
        return Run(
            name=found["name"], stage=found["theory_stage"], ranks=rank.world_size, dtype=settings.dtype,
            batch=settings.batch * settings.accumulate, seed=settings.seed, parameters=found["parameters"],
            memory={name: found["memory"][name] for name in ("parameters", "gradients", "optimizer")},
            peak=self.peak, at_peak={name: size for name, size in highest.bytes.items() if name != "other"},
            collectives=found["traffic"]["collectives"], sent=found["traffic"]["sent_bytes"],
            when=by_phase(events.events),
            wire=found["traffic"]["wire_bytes"],
            losses=tuple(losses), validation=validation, seconds=tuple(observer.seconds),
            step_seconds=found["step_seconds"], model=model,
        )

    # ----------------------------------------------------------------------------------- simulated and other runs

    def simulate(self, stage: int = 3, *, ranks: int | None = None, **options) -> Run:
        """Run a stage's own code as one rank of many, on tensors without values: bytes are exact, times unknown.

        Args:
            ranks: None: the setting's `devices`.
            options: parameters: of a GPT of about this size (add layers=12 if only model states matter: that is quick);
                or layers, hidden, heads, vocabulary (default: the setting's small one). sequence, batch, recompute
                (default: yes), dtype (default: "fp16"), model_parallel, config ("C1" to "C5"), offload ("cpu"), steps,
                bucket_bytes (default: 4 MiB, or larger so that there are at most 32).
                cached=True: also what CUDA's allocator would reserve.
        """
        small = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        run = Run(**simulated.on_first_rank(stage, ranks or self.devices, small, options))
        self._enter("simulate", run, **({} if "parameters" in options else small) | options)
        return run

    @contextlib.contextmanager
    def watch(self) -> Iterator[Seen]:
        """Measure the code that runs inside."""
        seen, meter, had_written = Seen(), TrafficMeter(), written()
        with meter, Events(modules=True) as events:
            yield seen
        seen.collectives, seen.sent = meter.collectives, meter.sent_bytes
        seen.wire = None if had_written is None else written() - had_written
        payload = {name: each["bytes"] for name, each in seen.collectives.items()}
        self.journal.append({"kind": "watch", "modules": " ".join(sorted(events.ran)), **payload})

    def _enter(self, kind: str, run: Run, sizes: Settings | None = None, **more) -> None:
        of_run = {name: getattr(run, name) for name in ("name", "stage", "ranks", "seed", "batch", "dtype",
                                                        "parameters")}
        of_settings = {name: getattr(sizes, name) for name in OF_SETTINGS} if sizes else {}
        self.journal.append({"kind": kind, **of_run, **of_settings, **more})


def written() -> float | None:
    """Bytes that this process has written, by the system's count. If it may not read that, what its connections carry;
    all ranks call this."""
    with contextlib.suppress(OSError):
        for line in ACCOUNT.read_text().splitlines():
            if line.startswith("wchar:"):
                return int(line.split()[1])
    return wire_bytes(quiet=True)
