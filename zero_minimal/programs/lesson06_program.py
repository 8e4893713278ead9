"""The program of lesson 6: a step with and without P_a: bytes kept for backward, bytes sent, and the same result.

    torchrun --nproc-per-node 2 zero_minimal/activation_partitioning.py

All ranks share one model, cut as in lesson 05. Dropout is off: with it, the CPU's attention kernel would keep matrices
of scores, unlike the GPU's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero_minimal.core import collectives
from zero_minimal.meters.memory import Ledger, Moment
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.offloading import host
from zero_minimal.processes import interrupts, ranks
from zero_minimal.programs import progress
from zero_minimal.programs.report import say, table
from zero_minimal.tensor_parallel import ParallelGPT
from zero_minimal.workload.model import GPTConfig

BATCH = 8  # sequences
CONFIG = GPTConfig(sequence=256, hidden=240, heads=12, dropout=0.0)
INPUT = 4 * BATCH * CONFIG.sequence * CONFIG.hidden  # bytes of a block's input, b·s·h numbers of 4
# the arguments of checkpoint_blocks; None: it is not called
MODES: dict[str, dict | None] = {
    "no checkpoints": None, "checkpoints": {}, "P_a": dict(partition=True), "P_a+cpu": dict(partition=True,
                                                                                            to_host=True)}


class Step(NamedTuple):
    """A training step as measured on one rank, in bytes."""

    kept: int  # activations on the device between forward and backward
    on_host: int  # copies in host memory
    highest: int  # activations at their peak
    sent: int
    loss: float
    norm: float  # of the whole gradient
    timeline: list[Moment]
    backward: int  # the index in the timeline where backward begins


@interrupts.program
def main(checkpoint_blocks: Callable) -> None:
    """Measure each mode; rank 0 prints the table. checkpoint_blocks: the lesson's, or a learner's own."""
    with ranks.start() as rank:
        bar = progress.bar(MODES, name="a step of each", total=len(MODES), unit="mode", shown=rank.rank == 0)
        steps = {mode: step_of(mode, checkpoint_blocks, rank.device) for mode in bar}
        if rank.rank == 0:
            print(f"the model is cut over {rank.world_size} rank{'s' * (rank.world_size > 1)}; a block's input has "
                  f"{BATCH} × {CONFIG.sequence} × {CONFIG.hidden} numbers, {INPUT / 1e6:.2f} MB\n")
            head = ["kept for backward", "MB on the device", "in host memory", "highest", "MB sent", "loss",
                    "norm of the gradient"]
            print(table([head, *([mode, *in_words(step)] for mode, step in steps.items())]))
            if rank.device.type == "cpu":
                say("\nWithout a GPU both are the same memory: it is counted as what it stands for.")


def in_words(step: Step) -> list[str]:
    """The cells of a row of the table."""
    return [f"{step.kept / 1e6:.1f}", f"{step.on_host / 1e6:.1f}", f"{step.highest / 1e6:.1f}",
            f"{step.sent / 1e6:.1f}", f"{step.loss:.6f}", f"{step.norm:.6f}"]


def build(mode: str, checkpoint_blocks: Callable, device: torch.device, dropout: float = 0.0) -> ParallelGPT:
    """The model, shared by all ranks, with its blocks checkpointed according to the mode."""
    torch.manual_seed(0)
    model = ParallelGPT(GPTConfig(**{**vars(CONFIG), "dropout": dropout})).to(device)
    if (options := MODES[mode]) is not None:
        group = dist.group.WORLD if "partition" in options and dist.get_world_size() > 1 else None
        checkpoint_blocks(model, group=group, to_host="to_host" in options)
    return model


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the same on all ranks, which share one model."""
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.sequence + 1), device=device,
                           generator=torch.Generator(device).manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def step_of(mode: str, checkpoint_blocks: Callable, device: torch.device, dropout: float = 0.0) -> Step:
    """The second step of a model in this mode, since P_a also compares checksums in the first."""
    model, (tokens, targets) = build(mode, checkpoint_blocks, device, dropout), batch(device)
    model(tokens, targets).backward()
    model.zero_grad()
    on_host = []

    def count(copy):
        on_host.append(copy.nbytes)
        ledger.claim(copy, "other")  # not an activation on the device

    with Ledger(device.type) as ledger, TrafficMeter() as meter, host.announced(count):
        ledger.watch(model)
        loss = model(tokens, targets)
        kept, begins = ledger.states()["activations"], len(ledger.timeline)
        loss.backward()
        timeline = ledger.timeline
    highest = max(moment.bytes["activations"] for moment in timeline)
    return Step(kept, sum(on_host), highest, meter.sent_bytes, loss.item(), gradient_norm(model), timeline, begins)


def gradient_norm(model: ParallelGPT) -> float:
    """The norm of the whole model's gradient: each rank's own part, and replicated parts once."""
    common = set(model.replicated())
    own = sum(param.grad.square().sum() for param in model.parameters() if param not in common)
    collectives.all_reduce(own, op="sum")
    return (own + sum(param.grad.square().sum() for param in common)).sqrt().item()
