"""Fragmentation: train with and without slabs (M_D), and replay both runs with a model of CUDA's allocator.

    python zero_minimal/defragmentation.py --picture map.png
"""

import bisect
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from zero_minimal.activation_partitioning import checkpoint_blocks
from zero_minimal.defragmentation import Slab, gradients_in_slab
from zero_minimal.meters.allocator import MIB, CachingAllocator, Finding, find_capacity, replay
from zero_minimal.meters.memory import Event, Ledger
from zero_minimal.processes import interrupts
from zero_minimal.programs import progress, report
from zero_minimal.workload import data, loop
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.workload.settings import Parser, Settings, picture_file, positive


@dataclass
class Recording:
    """A recorded training: its losses, and the trace, in which micro-batches begin at the events `begins`."""

    trace: list[Event]
    begins: list[int]
    losses: list[float]


def record(config: GPTConfig, lengths: list[int], batch: int, accumulate: int, slabs: bool, seed: int = 0,
           name: str = "training", shown: bool = True) -> Recording:
    """Train a GPT with AdamW on a micro-batch for each of `lengths` (tokens in a sequence), and record its allocations.

    Every block is checkpointed: with `slabs`, checkpoints and gradients are in slabs, without, the allocator places
    them. All else is the same, and so are the losses, to the bit. A step has `accumulate` micro-batches: gradients stay
    while the sizes of activations change, which fragments memory most. AdamW's state is made before the first
    micro-batch, as in ZeRO. `shown`: show progress.
    """
    begins: list[int] = []
    settings = Settings(steps=len(lengths) // accumulate, accumulate=accumulate, lr=1e-3)
    with Ledger("cpu") as ledger:
        before = {event.storage for event in ledger.trace}  # other models, which are not on the device
        torch.manual_seed(seed)
        zero = Plain(GPT(config), settings, config.layers * batch * max(lengths) * config.hidden if slabs else 0)
        ledger.watch(zero.model, zero.optimizer)
        if slabs:
            ledger.claim(zero.slab.memory, "activations")
            ledger.claim(zero.gradient_slab.memory, "gradients")
        batches = crops_of(lengths, batch, seed, lambda: begins.append(len(ledger.trace)))
        steps = progress.bar(loop.steps(zero, batches, settings), name=name, total=settings.steps, shown=shown)
        losses = [loss.item() * accumulate for parts in steps for loss in parts]
        trace = list(ledger.trace)
    ours = [index for index, event in enumerate(trace) if event.storage not in before]
    return Recording([trace[index] for index in ours], [bisect.bisect_left(ours, begin) for begin in begins], losses)


class Plain:
    """Training in one process, used like a stage: AdamW, whose state exists from the start, and checkpointed blocks.
    With `slab_elements`, the checkpoints are in a slab of that size, and the gradients in another."""

    def __init__(self, model: GPT, settings: Settings, slab_elements: int):
        self.model, self.slab = model, None
        self.optimizer = torch.optim.AdamW(model.parameters(), **settings.optimizer_options())
        for param in model.parameters():  # make the optimizer state, by a step with a learning rate of 0
            param.grad = torch.zeros_like(param)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # the loop sets it
        self.optimizer.step()
        self.optimizer.zero_grad()
        if slab_elements:
            self.slab, self.gradient_slab = Slab(slab_elements), gradients_in_slab(model)
            model.register_forward_pre_hook(lambda *_: self.slab.reset())  # each micro-batch has its own checkpoints
        checkpoint_blocks(model, place=self.slab.keep if self.slab else None)

    def no_sync(self):
        return nullcontext()

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.slab:
            self.gradient_slab.reset()


def crops_of(lengths: list[int], batch: int, seed: int, announce: Callable[[], None]) -> Iterator[tuple]:
    """(inputs, targets), int64 [batch, length], for each length; calls `announce()` before making each."""
    text, draw = data.read_tokens(), random.Random(seed)
    for length in lengths:
        announce()
        yield data.crops(text, [draw.randrange(len(text) - length) for _ in range(batch)], length)


def varied_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """`count` lengths, drawn uniformly from longest / 8 to longest."""
    draw = random.Random(f"lengths {seed}")
    return [draw.randint(max(1, longest // 8), longest) for _ in range(count)]


# ------------------------------------------------------------------------------------------------------------ program


@interrupts.program
def main(arguments: list[str] | None = None) -> None:
    """The program of lesson 8: train with and without slabs, replay both, print the results."""
    parser = Parser(description="Train a GPT with and without slabs (M_D), and replay its allocations as on a GPU.")
    parser.add_argument("--layers", type=positive, default=8, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=positive, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads (default: %(default)s)")
    parser.add_argument("--vocabulary", type=positive, default=4096, help="at least 256 (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=4, help="sequences in a micro-batch (default: %(default)s)")
    parser.add_argument("--longest", type=positive, default=256, help="tokens of the longest (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=2, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--accumulate", type=positive, default=4,
                        help="micro-batches in a step, each of another length (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths, the model and the batches")
    parser.add_argument("--picture", type=picture_file, metavar="FILE", help="draw both memory maps into this file")
    options = parser.parse_args(arguments)
    try:
        config = GPTConfig(options.layers, options.hidden, options.heads, options.longest, options.vocabulary)
    except ValueError as error:
        parser.error(str(error))
    if options.vocabulary < 256:
        parser.error(f"the tokens are bytes: --vocabulary must be 256 or more, not {options.vocabulary}")
    if options.longest >= len(data.read_tokens()):
        parser.error(f"the text has {len(data.read_tokens()):,} tokens: --longest must be less, not {options.longest}")
    lengths = varied_lengths(options.steps * options.accumulate, options.longest, options.seed)
    report.say(f"tokens in the sequences of the micro-batches: {', '.join(map(str, lengths))}")
    recordings = {
        name: record(config, lengths, options.batch, options.accumulate, slabs, options.seed, name)
        for name, slabs in (("without slabs", False), ("with slabs", True))
    }
    progress.announce("replaying both, to find the least capacity that is enough …")
    finding = find_capacity(*(recording.trace for recording in recordings.values()))
    progress.take_back()
    report.say(describe(recordings, finding))
    if options.picture:
        from zero_minimal.pictures import style  # check-gpu records, maybe without matplotlib
        from zero_minimal.pictures.memory_map import draw_map

        style.save(draw_map(recordings, finding), options.picture)


def describe(recordings: dict[str, Recording], finding: Finding) -> str:
    """A table of both trainings, and the message of the failure, if any."""
    generous = [replay(recording.trace, CachingAllocator(2**62)) for recording in recordings.values()]
    rows = [
        ["MiB", *recordings],
        ["in use at the peak", *(mib(allocator.peak_allocated) for allocator in generous)],
        ["held by the allocator, if it may", *(mib(allocator.peak_reserved) for allocator in generous)],
        ["least capacity that is enough", mib(finding.smallest_without), mib(finding.smallest_with)],
    ]
    if failure := finding.failure:
        rows += [
            [f"a capacity of {mib(failure.capacity)} is", "too little", "enough"],
            ["  free then, in all", mib(failure.free), ""],
            ["  free then, share", f"{failure.free_share:.1%}", ""],
            ["  largest free block", mib(failure.largest_free), ""],
            ["  asked for", mib(failure.requested), ""],
        ]
        found = f"Without slabs: {failure}"
    else:
        found = ("At these sizes M_D saves nothing: there is no capacity at which training fails\n"
                 "without slabs and goes through with them. Slabs take room for the longest\n"
                 "micro-batch and for all gradients, all the time; here that costs as much as\n"
                 "the holes, or more. The default sizes show what slabs are for.")
    losses = [recording.losses for recording in recordings.values()]
    same = "the same to the bit" if losses[0] == losses[1] else "NOT the same"
    return f"\n{report.table(rows)}\n\n{found}\nThe losses of both are {same}."


def mib(bytes: int) -> str:
    """Bytes in MiB, with one decimal."""
    return f"{bytes / MIB:,.1f}"
