"""Cases: what can be simulated, and the phases of its run (simulation.py)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields

from zero_minimal.paper.kernels import ATTENTION
from zero_minimal.paper.shapes import check_divides, check_heads, parameter_count
from zero_minimal.programs.registry import CONFIGS
from zero_minimal.stage2 import Stage2
from zero_minimal.workload.foreign import ForeignModel
from zero_minimal.workload.model import GPTConfig
from zero_minimal.workload.settings import DTYPES, OPTIMIZER

BUCKETS = 256  # at most; 4 MiB buckets of a trillion parameters would be half a million
CONSTANT = 64 * 2**20  # bytes of a buffer of zero_100b.py for every model (C_B): with less, large models take minutes
OPTIONS = {"lr": 1e-3, **OPTIMIZER}


@dataclass(frozen=True)
class Case:
    """What to simulate. Raises ValueError, saying what is accepted, if it cannot be simulated."""

    model: GPTConfig | ForeignModel
    stage: int = 3
    ranks: int = 64
    dtype: str = "fp16"
    batch: int = 1  # sequences that a rank (or a model-parallel group) works on at once
    model_parallel: int = 1  # M ranks share a model; the stage works across ranks / M replicas
    rank: int = 0  # which rank to simulate
    steps: int = 2  # the first makes the optimizer state; the second is like all later ones
    bucket_bytes: int | None = None  # None: 4 MiB, or larger so that there are at most 256; 64 MiB in a config
    accumulate: int = 1  # micro-batches in a step
    attention: str = "fused"  # or one of the others in kernels.ATTENTION
    offload: str = ""  # "cpu": offload to the rank's host, stages 1 to 3
    config: str = ""  # "C1" … "C5": that system of zero_100b.py, instead of `stage`
    build: Callable | None = None  # build(model, group, budget) -> an object used like a stage, instead of `stage`
    budget: object = None  # its argument; None: Budget()
    buckets: int = BUCKETS  # at most, if bucket_bytes is None
    name: str = ""  # the name of what it builds

    def __post_init__(self):
        for name in ("ranks", "batch", "model_parallel", "steps", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number from 1 up, not {getattr(self, name)}")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be from 0 to {self.ranks - 1}, not {self.rank}")
        check_divides(self.model_parallel, self.ranks,
                      f"{self.ranks} ranks are not groups of {self.model_parallel} that share a model")
        if isinstance(self.model, GPTConfig):
            check_heads(self.model, self.model_parallel)
        elif self.model_parallel > 1 or self.config:
            raise ValueError("a model of transformers is not cut over ranks here: give it without --mp and --config")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, not {self.attention!r}")
        own_gpt = isinstance(self.model, GPTConfig) and self.model_parallel == 1
        if self.attention != "fused" and (self.config or self.build or not own_gpt):
            raise ValueError("--attention changes the GPT of the stages: give it without --mp, --config, --model and "
                             "--stage FILE.py")
        if self.offload:
            self._check_offload()
        if self.config and self.config not in CONFIGS:
            raise ValueError(f"config must be one of {', '.join(CONFIGS)}, not {self.config!r}")
        if not self.config and self.stage not in range(4):
            raise ValueError(f"stage must be 0, 1, 2 or 3, not {self.stage}")

    def _check_offload(self) -> None:
        if self.offload != "cpu":
            raise ValueError(f"--offload {self.offload} is not simulated: a disk would hold what the host holds with "
                             "--offload cpu")
        if self.config:
            raise ValueError("--offload is for stages, and --config chooses a system that has none: give --stage 2 "
                             "--offload cpu without --config")
        if self.build:
            raise ValueError("--offload chooses the course's own class: let build() in the file return Offloaded3("
                             "model, AdamW, group=group, **budget.options), and leave --offload out")
        if self.stage == 0:
            raise ValueError("--offload is for stages 1 to 3, since stage 0 has no shards that could leave: give "
                             "--stage 1 --offload cpu")

    @property
    def called(self) -> str:
        """A short name for what is simulated."""
        return self.config or self.name or f"stage {self.stage}{', offloaded' if self.offload else ''}"

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return parameter_count(self.model) if isinstance(self.model, GPTConfig) else self.model.sizes["parameters"]

    @property
    def settings(self) -> dict:
        """The settings, for a report."""
        plain = {entry.name: getattr(self, entry.name) for entry in fields(self)
                 if entry.name not in ("build", "budget", "buckets", "name")}
        return plain | {"model": asdict(self.model)}


@dataclass(frozen=True)
class Budget:
    """What a learner's own system must keep to: the third argument of build(model, group, budget)."""

    memory: int | None = None  # the most bytes on the device at any moment, also during construction
    sent: int | None = None  # the most bytes sent in a step by data parallelism
    batch: int = 1  # sequences that a rank works on at once
    sequence: int = 1024  # tokens in each
    options: dict = field(default_factory=lambda: dict(OPTIONS))  # of AdamW


def phases(case: Case) -> list[str]:
    """The names of the case's phases, in order."""
    more = [f"micro-batch {micro} of step" for micro in range(2, case.accumulate + 1)]
    parts = ("forward", "backward", *more, "update")
    return [*(["model"] if case.config else ["model", "stage"]),
            *(f"{part} {step}" for step in range(1, case.steps + 1) for part in parts)]


def stage_of(case: Case) -> int:
    """The stage whose formulas apply."""
    if not case.config:
        return case.stage
    return 2 if issubclass(CONFIGS[case.config].stage, Stage2) else 1


def bucket_bytes(case: Case) -> int:
    """Size of the stage's buckets; a config's are also its constant buffers, so they do not grow with the model."""
    if case.bucket_bytes:
        return case.bucket_bytes
    if case.config:
        return CONSTANT
    whole = case.parameters * DTYPES[case.dtype].itemsize // case.model_parallel
    return max(4 * 2**20, -(-whole // case.buckets))
