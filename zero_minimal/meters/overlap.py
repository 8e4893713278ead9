"""Overlap: what a bus of a given speed costs an offloaded stage, and how much of the transfer computation hides.

One run has the stage as it is and one offloaded stage for each speed of the bus, all with the same model, and lets them
work in short turns. Beside each turn is one of the same stage whose bus takes no time, and what counts is the
difference of these two: what slows the machine for a while slows both. All that is said are medians over the rounds.
"""

import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from zero_minimal.core import collectives
from zero_minimal.meters.timing import draw_batches, stay_on_one_core, together
from zero_minimal.processes import ranks
from zero_minimal.workload import loop
from zero_minimal.workload.settings import Settings

PARTS = ("forward", "backward", "step")
WARM_UP, TIMED = 1, 2  # steps of a turn
NO_OFFLOAD, UNLIMITED = "no offload", "unlimited"
CALIBRATION = 4  # steps
ENOUGH = 75  # seconds after which no further round begins: a busy machine has fewer of them


@dataclass(frozen=True)
class Course:
    """What is timed: a stage, the same offloaded, and speeds of the bus as multiples of one that suits the machine:
    operations that the rank does in a second, over `operations_a_byte`. operations: of a rank in a step."""

    stage: type
    offloaded: type
    settings: Settings
    operations: float
    operations_a_byte: float
    multiples: tuple[float, ...]
    rounds: int


def time_speeds(course: Course) -> dict:
    """On this rank, with the others: {"calibrated": bytes a second that suit the machine, "bytes": of a step, each way,
    "turns": {name or multiple: [what turn() gives, of each round]}, of UNLIMITED {multiple: those beside it}}."""
    with ranks.start() as rank:
        stay_on_one_core(rank)
        batches = list(draw_batches(course.settings, rank, WARM_UP + TIMED))
        bucket_bytes = int(course.settings.bucket_mb * 2**20)

        def build(kind, **options):
            return loop.build(kind, course.settings, rank, bucket_bytes=bucket_bytes, **options)

        plain = build(course.stage)
        suits = course.operations / alone_seconds(plain, batches, rank) / course.operations_a_byte
        stages = {NO_OFFLOAD: plain, UNLIMITED: build(course.offloaded)}
        stages |= {multiple: build(course.offloaded, bus=multiple * suits) for multiple in course.multiples}
        for zero in stages.values():
            turn(zero, batches, rank)  # what is done once, in the first steps, is not timed
        turns: dict = {NO_OFFLOAD: [], **{multiple: [] for multiple in course.multiples},
                       UNLIMITED: {multiple: [] for multiple in course.multiples}}
        start = time.monotonic()
        for number in range(course.rounds):
            if number and longest(time.monotonic() - start, rank) > ENOUGH:
                break
            turns[NO_OFFLOAD].append(turn(plain, batches, rank))
            for multiple in course.multiples:
                two = [(stages[multiple], turns[multiple]), (stages[UNLIMITED], turns[UNLIMITED][multiple])]
                for zero, found in two if number % 2 else reversed(two):
                    found.append(turn(zero, batches, rank))
        return {"calibrated": suits, "bytes": crossed(stages[UNLIMITED], batches, rank), "turns": turns}


def alone_seconds(zero, batches: list, rank: ranks.Rank) -> float:
    """A step's, the same number on all ranks."""
    taken = [timed_step(zero, *batches[0], rank)["whole"] for _ in range(CALIBRATION)]
    mean = torch.tensor(statistics.median(taken[1:]), dtype=torch.float64, device=rank.device)
    collectives.all_reduce(mean, op="avg")
    return mean.item()


def longest(seconds: float, rank: ranks.Rank) -> float:
    """Of all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64, device=rank.device)
    collectives.all_reduce(most, op="max")
    return most.item()


def turn(zero, batches: list, rank: ranks.Rank) -> dict:
    """Some steps in a row; means of those that are timed. What a step leaves for the next one to wait for is in them:
    the first, for which nobody has left anything of late, is not."""
    taken = [timed_step(zero, *batch, rank) for batch in batches][WARM_UP:]
    if hasattr(zero, "host"):
        zero.host.settle()  # its host shall not work in the turn of another
    return {part: statistics.mean(each[part] for each in taken) for part in taken[0]}


def timed_step(zero, inputs: torch.Tensor, targets: torch.Tensor, rank: ranks.Rank) -> dict:
    """Seconds: "whole", and of each of PARTS those in which the rank did nothing but wait for its bus or its host."""
    zero.zero_grad()
    marks, start = [waited(zero)], together(rank.device)
    loss = zero.model(inputs, targets)
    marks.append(waited(zero))
    loss.backward()
    marks.append(waited(zero))
    zero.step()
    marks.append(waited(zero))
    seconds = {part: marks[place + 1] - marks[place] for place, part in enumerate(PARTS)}
    return {"whole": together(rank.device) - start} | seconds


def waited(zero) -> float:
    return zero.host.bus.waited if hasattr(zero, "host") else 0.0


def crossed(zero, batches: list, rank: ranks.Rank) -> dict[str, int]:
    """Bytes of a step over the bus."""
    zero.host.settle()
    bus = zero.host.bus
    sent, came = bus.sent, bus.received
    for batch in batches:
        timed_step(zero, *batch, rank)
    zero.host.settle()
    return {"to_host": (bus.sent - sent) // len(batches), "to_device": (bus.received - came) // len(batches)}


# ------------------------------------------------------------------------------------------------ what the turns say


def what_they_say(course: Course, found: dict) -> dict:
    """Of one rank's turns, as JSON; all are medians over the rounds.

    {"suits": bytes a second at which the machine has `operations_a_byte`, by its steps without offload,
     "bytes": {"to_host", "to_device"} of a step,
     "seconds": {NO_OFFLOAD, UNLIMITED: of a step},
     "speeds": [of each bus {"bus": bytes a second,
                             "transfer": seconds if nothing went on beside it, nor the two ways beside each other,
                             "seconds": of a step,
                             "more": seconds more than in the turn with UNLIMITED beside it,
                             "hidden": the share of the transfer for which a step is not longer,
                             "waited": {part: seconds more in which the rank only waited},
                             "hidden_by_waits": the share of the transfer for which it did not}]}
    """
    turns, both, speeds = found["turns"], sum(found["bytes"].values()), []
    for multiple in course.multiples:
        bus = multiple * found["calibrated"]
        two = list(zip(turns[multiple], turns[UNLIMITED][multiple], strict=True))
        more = {part: statistics.median(each[part] - other[part] for each, other in two)
                for part in ("whole", *PARTS)}
        longer, transfer = more.pop("whole"), both / bus
        speeds.append({"bus": bus, "transfer": transfer, "seconds": step_seconds(turns[multiple]), "more": longer,
                       "hidden": 1 - longer / transfer, "waited": more,
                       "hidden_by_waits": 1 - sum(more.values()) / transfer})
    return {
        "suits": course.operations / step_seconds(turns[NO_OFFLOAD]) / course.operations_a_byte,
        "bytes": found["bytes"],
        "seconds": {NO_OFFLOAD: step_seconds(turns[NO_OFFLOAD]),
                    UNLIMITED: step_seconds([each for beside in turns[UNLIMITED].values() for each in beside])},
        "speeds": speeds,
    }


def step_seconds(turns: list[dict]) -> float:
    return statistics.median(each["whole"] for each in turns)


def hidden_at(said: dict, bus: float, by: str = "hidden") -> float:
    """The share that is hidden at this speed: on the line between those of the two speeds beside it."""
    points = sorted((each["bus"], each[by]) for each in said["speeds"])
    if bus <= points[0][0]:
        return points[0][1]
    for (slow, low), (fast, high) in itertools.pairwise(points):
        if bus <= fast:
            return low + (high - low) * (bus - slow) / (fast - slow)
    return points[-1][1]
