"""The budget: part B of lesson 10. A learner's own system, scored on simulated ranks, where bytes are exact.

    python -m zero_minimal grade lessons/10_whole_system/system.py       its points, and why
    python -m zero_minimal board FOLDER                                  a class's table
    python -m zero_minimal simulate --stage system.py --layers 36 --hidden 4096 --dtype bf16 --budget-memory 10GB

The file defines build(model, group, budget), which returns an object that is used like a stage: loss.backward(),
.step(), .zero_grad(). The model is on the meta device, as for stage 3, and is trained by AdamW(**budget.options) in
bf16. `group` is the group of ranks that share it (None: all). `budget` (cases.py) has .memory, .sent (one of them is
None), .batch, .sequence, .options. A system may use all parts of this course that train.

Three tracks, 20 points each:

    1  memory     7.5B on 64 ranks, .memory = 10 GB      the fewest bytes sent in a step
    2  traffic    7.5B on 64 ranks, .sent = 2Ψ           the lowest peak
    3  mesh       40B on 16 × 4 ranks, .memory = 20 GB   the fewest bytes sent, over data parallelism's groups of 16

Of these 20 points:

    bronze   6    it is legal, and stays within the limit
    silver  12    and it is better than stages 2 and 3, if these stay within the limit
    gold    20    and it is within 2% of the bound of paper/bound.py, which no system can beat

    0             it is not legal (system_rules.py defines that): then the track is not scored

The peak is taken from the first line of build() to the end of step 2. Bytes sent are counted in step 2. No clock and no
value is read: so a score is the same on every machine and in every run. Times are not scored.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from zero_minimal.core.mesh import make_mesh
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.owners import address_of, strided_tensors
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper.bound import Bound, need
from zero_minimal.paper.fakes import new_tensors_in, without_values
from zero_minimal.paper.quantities import size_text, size_unit
from zero_minimal.programs.cases import Budget, Case
from zero_minimal.programs.simulation import build_model, simulate
from zero_minimal.workload.model import GPTConfig

POINTS = {"": 0, "bronze": 6, "silver": 12, "gold": 20}
GOLD = 1.02  # times the bound
ADAM = 6  # bytes of its state in mixed precision for each byte of parameters: 12 / 2
KNOWN = Path(__file__).with_name("budget.json")  # bounds and figures of stages 2 and 3, from `measure()`


@dataclass(frozen=True)
class Track:
    """One of the three. `memory` or `sent` is the limit, and the other one is scored."""

    number: int
    name: str
    title: str
    model: GPTConfig
    ranks: int
    model_parallel: int = 1
    memory: int | None = None
    sent: int | None = None

    @property
    def group(self) -> int:
        """The number of ranks that share a model's states: N, or D on a mesh."""
        return self.ranks // self.model_parallel

    @property
    def budget(self) -> Budget:
        """The budget that build() gets."""
        return Budget(self.memory, self.sent, 1, self.model.sequence)

    def case(self, **choices) -> Case:
        """The Case that simulates this track. choices: stage=2, or build=…"""
        return Case(self.model, ranks=self.ranks, dtype="bf16", model_parallel=self.model_parallel,
                    budget=self.budget, **choices)


SMALL = GPTConfig(layers=36, hidden=4096, heads=32, sequence=1024, vocabulary=50257, dropout=0.0, recompute=True)
LARGE = GPTConfig(layers=32, hidden=10240, heads=80, sequence=1024, vocabulary=50257, dropout=0.0, recompute=True)
TRACKS = (
    Track(1, "memory", "7.5B in 10 GB: the fewest bytes", SMALL, 64, memory=10 * 10**9),
    Track(2, "traffic", "7.5B with 2Ψ: the lowest peak", SMALL, 64, sent=2 * 2 * 7_459_729_408),
    Track(3, "mesh", "40B on 16 × 4 ranks in 20 GB: the fewest bytes", LARGE, 64, 4, memory=20 * 10**9),
)


@dataclass(frozen=True)
class Figures:
    """What a system needs in a track, in bytes; `sent`: only by data parallelism."""

    peak: int
    construction: int
    sent: int
    host: int = 0


@dataclass(frozen=True)
class Score:
    """The result of a track. `counts` and `bound`: the scored bytes and their bound; `words`: the reason."""

    track: int
    medal: str
    counts: int | None
    bound: float | None
    words: str

    @property
    def points(self) -> int:
        return POINTS[self.medal]

    @property
    def off(self) -> float | None:
        """How far the result is above the bound: 0.02 is 2%."""
        return None if self.counts is None or not self.bound else self.counts / self.bound - 1


def simulated(track: Track, build: Callable, watch: Callable | None = None) -> Figures:
    """Simulate rank 0 of a track's model under a system. `watch`: a context around it (system_rules.py)."""
    report = simulate(track.case(build=build, name="system"), around=watch).report
    memory, sent = report["memory"], report["traffic"]["sent_bytes"] - round(bound(track).others)
    return Figures(memory["peak_of_all"], memory["construction_peak"], sent, memory["host"])


@functools.cache
def bound(track: Track) -> Bound:
    """The track's bound: read from the file for the three tracks, otherwise computed."""
    if track in TRACKS and KNOWN.exists():
        return Bound(**known()[track.name]["bound"])
    return computed_bound(track)


def limit_and_least(track: Track) -> tuple[int, float]:
    """Bytes of the track's limit, and the bound of the scored bytes."""
    if track.memory is not None:
        return track.memory, bound(track).sent(track.memory) - bound(track).others
    return track.sent, bound(track).memory(track.sent + bound(track).others)


def counted_and_limited(track: Track, figures: Figures) -> tuple[int, int]:
    """The bytes that the track scores, and those that it limits."""
    peak = max(figures.peak, figures.construction)
    return (figures.sent, peak) if track.memory is not None else (peak, figures.sent)


def better_reference(track: Track) -> tuple[str, int]:
    """The better one of stages 2 and 3, if within the track's limit: its name and its scored bytes."""
    rows = {name: counted_and_limited(track, Figures(**known()[track.name][name])) for name in ("stage 2", "stage 3")}
    kept = [(counts, name) for name, (counts, limited) in rows.items() if limited <= limit_and_least(track)[0]]
    counts, name = min(kept)
    return name, counts


def score(track: Track, figures: Figures) -> Score:
    """The medal for these figures of a legal system."""
    limit, least = limit_and_least(track)
    counts, limited = counted_and_limited(track, figures)
    what, has = ("sends", "its peak is") if track.memory is not None else ("holds", "it sends")
    found = (f"it {what} {size_text(counts, 4)}, {counts / least - 1:.1%} above the bound of {size_text(least, 4)}; "
             f"{has} {limited / size_unit(limit)[1]:.4g} of {size_text(limit, 4)}")
    name, reference = better_reference(track) if track in TRACKS else ("no stage", counts)
    medal = ""
    if figures.host:
        counts = None
        words = f"it keeps {size_text(figures.host)} in host memory: part B is played on the device alone"
    elif limited > limit:
        if track.memory is not None and figures.construction == limited:
            has = "its peak while it is built is"
        words = (f"{has} {size_text(limited, 4)}, and the limit is {size_text(limit, 4)}: "
                 f"{'it does not fit' if track.memory is not None else 'it sends too much'}")
    elif counts < least * (1 - 1e-9):
        words = (f"it {what} {size_text(counts, 4)}, and no system that trains this model can do with less than "
                 f"{size_text(least, 4)} (paper/bound.py): something is missing, or hidden")
    elif counts <= GOLD * least:
        medal, words = "gold", found
    elif counts < reference:
        medal, words = "silver", f"{found}. Gold is within 2%"
    else:
        medal, words = "bronze", f"{found}. {name.capitalize()} {what} {size_text(reference, 4)}: silver is below that"
    return Score(track.number, medal, counts, least, words)


# ---------------------------------------------------------------------------------------------- what must be measured


def computed_bound(track: Track) -> Bound:
    """The bound from the model's own needs, measured in a step without any system, on tensors without values.

    Each gradient is dropped as soon as it is computed. The ledger then has the parameters and what no system can avoid:
    rest(t). The operators that read a parameter, and their moments, show how long it must live: live(t).
    """
    dist.init_process_group("fake", rank=0, world_size=track.ranks, store=FakeStore())
    try:
        mesh, ledger, meter = make_mesh(track.model_parallel), Ledger(), TrafficMeter()
        with torch.enable_grad(), without_values(), new_tensors_in(torch.bfloat16):
            model = build_model(track.case(), mesh)
            parameters = sum(param.nbytes for param in model.parameters())
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(_drop)
            with ledger:
                ledger.watch(model)
                before = ledger.total - parameters
                with Reads(model, ledger) as reads, meter:
                    tokens = torch.zeros(1, track.model.sequence, dtype=torch.int64)
                    model(tokens, tokens).backward()
                moments = [moment.total - parameters - before for moment in ledger.timeline]
        highest = max(need(live, rest, parameters, track.group, ADAM * parameters)
                      for live, rest in zip(reads.live(len(moments)), moments, strict=True))
        return Bound(parameters, track.group, highest, meter.sent_bytes)
    finally:
        dist.destroy_process_group()


def _drop(param: torch.nn.Parameter) -> None:
    param.grad = None


class Reads(TorchDispatchMode):
    """When each parameter is read, as positions in the ledger's trace. Making a view does not count as a read."""

    def __init__(self, model: torch.nn.Module, ledger: Ledger):
        super().__init__()
        self.ledger = ledger
        self.sizes = {address_of(param): param.nbytes for param in model.parameters()}
        self.times: dict[int, list[int]] = {place: [] for place in self.sizes}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        made = {address_of(tensor) for tensor in strided_tensors(result)}
        for tensor in strided_tensors((args, list((kwargs or {}).values()))):
            if address_of(tensor) in self.times and address_of(tensor) not in made:
                self.times[address_of(tensor)].append(len(self.ledger.trace))
        return result

    def live(self, moments: int) -> list[int]:
        """Bytes of parameters that are between their first and their last use, at each moment of the trace."""
        change = [0] * (moments + 1)
        for place, times in self.times.items():
            if times:
                change[min(times[0], moments)] += self.sizes[place]
                change[min(times[-1], moments)] -= self.sizes[place]
        return list(accumulate(change[:-1]))


@functools.cache
def known() -> dict:
    """The contents of budget.json: for each track the bound, and the figures of stages 2 and 3."""
    return json.loads(KNOWN.read_text())


def measure() -> dict:
    """New contents of budget.json, which `python -m zero_minimal.programs.budget` writes. For stages only steps count:
    stage 2 cannot begin on the meta device."""
    found = {}
    for track in TRACKS:
        whole = computed_bound(track)
        rows = {"bound": asdict(whole)}
        for stage in (2, 3):
            report = simulate(track.case(stage=stage)).report
            rows[f"stage {stage}"] = asdict(Figures(report["memory"]["peak"], 0, round(
                report["traffic"]["sent_bytes"] - whole.others)))
        found[track.name] = rows
    return found


if __name__ == "__main__":
    KNOWN.write_text(json.dumps(measure(), indent=1) + "\n")
