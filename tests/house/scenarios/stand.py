"""A stand: where a scenario is played, by a stage on its ranks or by plain PyTorch in one process.

    @scenario()
    def clipping(me):                                        # me: one of the ranks
        model = Chain()                                      # other values on every rank: rank 0's count
        zero = me.wrap(model, SGD, lr=0.1)                   # a stage, or Plain
        for step in range(4):
            loss = model(me.x(step)).square().mean()         # other data on every rank and in every step
            loss.backward()
            zero.clip_grad_norm_(0.1)
            zero.step()
            zero.zero_grad()
            me.note(loss)                                    # to be compared, as all parameters and buffers are

What a scenario may come to, under a stage:

    A  agrees with plain PyTorch          W  other numbers          H  ranks wait for each other
    R  refused, on every rank             N  NaN                    X  any other error
"""

import contextlib
import datetime
import gc
import importlib
import math
import re
import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from house.scenarios.plain import Plain, PlainScaler, play_in_turn

from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.extensions import join, lazy_all_gather
from zero_minimal.guards import collective_fingerprint as notes

LATE = {"late1": "stage1", "late2": "stage2"}  # late_gather.py's: what comes of it is as at that stage
STAGES = ("naive", "stage0", "stage1", "stage2", "stage3", *LATE)
WORLDS = (1, 2, 3, 4)
PATIENCE = datetime.timedelta(seconds=15)  # for ranks that wait for each other

TABLE: dict = {}


@dataclass
class Scenario:
    """What a user does, and what is to come of it."""

    name: str
    play: object  # (me) -> None
    # stage → a pattern of the message; None: all stages
    refused: dict = field(default_factory=dict)
    or_refused: str = ""  # either right, or refused with a message of this pattern
    naive: bool = True  # naive.py, which has no groups and no states, is asked too
    worlds: tuple = WORLDS
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-11
    learns: bool = True
    mend: str = ""  # what is wrong today: it is expected to fail until that is mended

    @property
    def stages(self) -> tuple:
        return STAGES if self.naive else STAGES[1:]


def scenario(name: str = "", refused=None, **options):
    """Put a function into the table. refused: a pattern, for all stages, or {stage: pattern}. options: of Scenario."""

    def enter(play):
        title = name or play.__name__.strip("_").replace("_", " ")
        patterns = dict.fromkeys(STAGES, refused) if isinstance(refused, str) else refused or {}
        patterns |= {late: patterns[like] for late, like in LATE.items() if like in patterns}
        if title in TABLE:
            raise ValueError(f"there are two scenarios {title!r}")
        TABLE[title] = Scenario(title, play, patterns, **options)
        return play

    return enter


@dataclass
class Outcome:
    """What one rank saw: numbers it noted, parameters and buffers at the end, or its error."""

    notes: list
    start: list
    parameters: list
    buffers: list
    error: str = ""  # its kind and message
    where: str = ""  # its traceback


class Me:
    """One of the ranks. Plain and staged ones have a `wrap`, a `scaler` and a `together` of their own."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.notes, self.wrapped, self.start = [], [], []

    def note(self, *values) -> None:
        """Numbers and tensors that must agree."""
        for value in values:
            own = value.detach().clone() if isinstance(value, torch.Tensor) else None
            self.notes.append(torch.tensor(float(value), dtype=torch.float64) if own is None else own)

    def x(self, step: int, *shape, of: int | None = None) -> torch.Tensor:
        """Random numbers [5, 7], or of another shape; those of another rank, if `of` says so."""
        shape = shape or (5, 7)
        generator = self._generator(step, of)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.get_default_dtype())

    def words(self, step: int, below: int = 11, *shape) -> torch.Tensor:
        """Random whole numbers [3, 4], or of another shape."""
        return torch.randint(below, shape or (3, 4), generator=self._generator(step, None))

    def _generator(self, step, of):
        return torch.Generator().manual_seed(7919 * (1 + (self.rank if of is None else of)) + step)

    def outcome(self, error: BaseException | None = None) -> Outcome:
        parameters, buffers = [], []
        for zero in () if error else self.wrapped:
            whole = getattr(zero, "gather_parameters", contextlib.nullcontext)
            with whole():
                parameters += [param.detach().clone() for param in zero.model.parameters()]
            buffers += [buffer.clone() for buffer in zero.model.buffers()]
        if not error:
            return Outcome(self.notes, self.start, parameters, buffers)
        where = "".join(traceback.format_tb(error.__traceback__))
        return Outcome(self.notes, self.start, [], [], f"{type(error).__name__}: {error}", where)


class Staged(Me):
    """A rank that trains with a stage."""

    def __init__(self, stage: str, group):
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.stage, self.group = stage, group
        module = "late_gather" if stage in LATE else stage
        self.kind = getattr(importlib.import_module(f"zero_minimal.{module}"), stage.capitalize())

    def wrap(self, model, optimizer, *, units=None, **options):
        if units is not None and self.stage == "stage3":
            options["units"] = units
        zero = self.kind(model, optimizer, **{"group": self.group, "bucket_bytes": 1200, **options})
        self.wrapped.append(zero)
        return zero

    def backward(self, loss) -> None:
        """loss.backward(), after which the scenario looks at gradients."""
        loss.backward()

    def scaler(self, scale, **options):
        return LossScaler(scale, groups=[self.group], **options)

    def together(self, batches):
        return join.together(batches, self.group)


class Alone(Me):
    """A rank that plain PyTorch plays."""

    stage = "plain"

    def __init__(self, turn):
        super().__init__(turn.rank, turn.size)
        self.turn = turn

    def wrap(self, model, optimizer, *, units=None, **options):
        zero = Plain(self.turn, model, optimizer, **options)
        self.start += [param.detach().clone() for param in model.parameters()]
        self.wrapped.append(zero)
        return zero

    def backward(self, loss) -> None:
        loss.backward()
        for zero in self.wrapped:
            zero.average()

    scaler = staticmethod(PlainScaler)

    def together(self, batches):
        batches = iter(batches)
        while None not in self.turn.meet(batch := next(batches, None)):
            yield batch


# ------------------------------------------------------------------------------------------------ in a rank: a scenario


def play_staged(scenarios) -> dict:
    """{(name, stage): this rank's outcome}, each in a process group of its own, so that none disturbs the next."""
    outcomes = {}
    for what in scenarios:
        for stage in what.stages:
            dist.barrier()
            group = dist.new_group(timeout=PATIENCE)
            with _default(what.dtype):
                outcomes[what.name, stage] = outcome = _play(what, Staged(stage, group))
            if outcome.error:
                _leave(group)
    return outcomes


def play_plainly(scenarios, size) -> dict:
    """{name: the outcomes of all ranks}, all played by this process."""
    outcomes = {}
    for what in scenarios:
        with _default(what.dtype):
            outcomes[what.name] = play_in_turn(lambda turn, what=what: _play(what, Alone(turn)), size)
    return outcomes


@contextlib.contextmanager
def _default(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


def _leave(group) -> None:
    """As a rank does that ends with an error: whoever waits for it there sees that it is gone."""
    notes._groups.pop(group, None)  # no goodbye
    lazy_all_gather._under_way.clear()
    dist.destroy_process_group(group)


def _play(what: Scenario, me: Me) -> Outcome:
    torch.manual_seed(1 + me.rank)
    try:
        what.play(me)
        return me.outcome()
    except Exception as error:
        return me.outcome(error)
    finally:
        me.wrapped.clear()
        gc.collect()


# ------------------------------------------------------------------------------------------------- in a test: judgement


def check(what: Scenario, staged: list[dict], plain: list[Outcome]) -> None:
    """Assert that each stage did what it should. staged: of each rank, what play_staged returned."""
    for stage in what.stages:
        check_stage(what, stage, staged, plain)


def check_stage(what: Scenario, stage: str, staged: list[dict], plain: list[Outcome]) -> None:
    """The same, of one stage."""
    letter, why = judge(what, stage, [of_rank[what.name, stage] for of_rank in staged], plain)
    wanted = ("R",) if stage in what.refused else ("A", "R") if what.or_refused else ("A",)
    assert letter in wanted, f"{stage}: {letter} and not {' or '.join(wanted)}: {why}"


def judge(what: Scenario, stage: str, ours: list[Outcome], plain: list[Outcome]) -> tuple[str, str]:
    """The letter of what came of it, and why. ours, plain: an outcome a rank."""
    if any(outcome.error for outcome in ours):
        return _judge_errors(what.refused.get(stage) or what.or_refused, ours)
    for outcome in plain:
        if outcome.error:
            return "W", f"goes on, and plain PyTorch does not: {outcome.error}\n{outcome.where}"
    if what.learns and not what.refused.get(stage):
        assert _furthest(plain[0].parameters, plain[0].start)[0] > 1e-3, "plain PyTorch learned nothing"
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        for part in ("notes", "parameters", "buffers"):
            letter, why = _compare(getattr(mine, part), getattr(theirs, part), what.tolerance)
            if letter != "A":
                return letter, f"rank {rank}, {part}: {why}"
    return "A", ""


def _judge_errors(pattern: str, outcomes: list[Outcome]) -> tuple[str, str]:
    """Refused, if a rank says what the pattern wants and the others say so too, or that they lost it."""
    errors = [outcome.error for outcome in outcomes]
    said = [bool(pattern and re.search(pattern, re.sub(r"\s+", " ", error))) for error in errors]
    lost = ["onnection closed" in error for error in errors]
    if any(said) and all(map(max, said, lost)):
        return "R", ""
    hung = any("imed out" in error for error in errors)
    return "H" if hung else "X", "\n".join(f"rank {rank}: {o.error}\n{o.where}" for rank, o in enumerate(outcomes))


def _compare(ours: list, theirs: list, tolerance: float) -> tuple[str, str]:
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return "W", f"shapes {[tuple(t.shape) for t in ours]} and {[tuple(t.shape) for t in theirs]}"
    far, number = _furthest(ours, theirs)
    if math.isnan(far):
        return "N", f"number {number} is NaN: {ours[number]}"
    if far <= tolerance:
        return "A", ""
    return "W", f"number {number} differs by {far:.3g}: {_short(ours[number])} and {_short(theirs[number])}"


def _short(tensor: torch.Tensor) -> list:
    return [round(number, 6) for number in tensor.flatten().tolist()[:3]]


def _furthest(ours: list, theirs: list) -> tuple[float, int]:
    """The largest difference (of numbers larger than 1: relative), and of which tensor. NaN where both have it
    counts as equal."""
    most, where = 0.0, 0
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        mine, other = mine.to(torch.cdouble), other.to(torch.cdouble)
        if mine.shape != other.shape:
            continue
        same = (mine == other) | (mine.isnan() & other.isnan())
        apart = torch.where(same, 0.0, (mine - other).abs() / other.abs().clamp(min=1)).flatten()
        if apart.isnan().any():
            return math.nan, number
        if apart.numel() and apart.max() > most:
            most, where = apart.max().item(), number
    return most, where
