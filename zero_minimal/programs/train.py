"""Train: the program that the last line of a stage file starts.

    torchrun --nproc-per-node 2 zero_minimal/stage2.py --steps 100
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from zero_minimal.meters.crossings import BusMeter
from zero_minimal.meters.observer import Observer, stage_in
from zero_minimal.processes import interrupts, ranks
from zero_minimal.programs import deepspeed, offload_flags, progress, report, trained
from zero_minimal.programs.resume import NO_CHECKPOINTS, Checkpoints, Flags, add_flags, end, read_flags
from zero_minimal.workload import loop
from zero_minimal.workload.settings import (
    Parser,
    Settings,
    add_device,
    add_settings,
    add_timeout,
    output_file,
    read_settings,
)


def train(
    stage_class, settings: Settings, rank: ranks.Rank, flags: Flags = NO_CHECKPOINTS,
    away: offload_flags.Offload = offload_flags.NOTHING,
) -> dict | None:
    """Train the GPT, or settings.model, on this rank's batches; return this rank's report (the JSON object of the
    README).

    Args:
        stage_class: Stage0 … Stage3, or a peer with the same API.
        flags: which checkpoints to write, and to continue from; peers have none.
        away: what the ranks' hosts keep.
    The losses, in nats per token, are means over the ranks; for a resumed run, only of the steps since then
    ("resumed_after" says how many came before). Returns None if the resumed run had done all. Raises ValueError if the
    text cannot be read or is too short.
    """
    stage_class = away.class_of(stage_class)
    if rank.rank == 0:
        progress.announce(f"{stage_class.__name__}: building the model, evaluating it for the first time …")
    batches = loop.training_batches(settings, rank.rank)
    validation = loop.validation_batches(settings, rank.rank, rank.world_size)
    bucket_bytes = int(settings.bucket_mb * 2**20)
    by_units = stage_in(stage_class.__name__) == 3 and not hasattr(stage_class, "theory_stage")  # not a peer
    with away.refusals():
        zero = loop.build(stage_class, settings, rank, from_meta=by_units, bucket_bytes=bucket_bytes, **away.options())
    scaler = settings.loss_scaler()
    checkpoints = Checkpoints(flags, zero, batches, scaler, settings, rank)
    first = checkpoints.resume()
    if first >= settings.steps:
        return None
    left = replace(settings, steps=settings.steps - first)
    observer = Observer(zero, rank, left)
    bus = BusMeter(zero) if away.cpu else None
    observers = [observer, bus] if bus else [observer]

    validation_losses = [loop.evaluate(zero, validation, rank)]
    steps = loop.steps(zero, batches, settings, scaler=scaler, observers=observers, first=first)
    losses = losses_of(steps, left.steps, stage_class.__name__, rank, first, checkpoints.after)
    finished = checkpoints.finish()
    validation_losses.append(loop.evaluate(zero, validation, rank))

    measured = observer.report()
    return measured | (bus.report(measured["memory"]) if bus else {}) | {
        "losses": loop.mean_over_ranks(losses, rank),
        "validation_losses": validation_losses,
    } | finished | trained.described(settings) | (
        {"resumed_after": first, "settings": asdict(settings)} if first else {})


def losses_of(steps: Iterable, total: int, name: str, rank: ranks.Rank, first: int = 0,
              after: Callable[[int], None] = lambda step: None) -> list[float]:
    """Train the `total` steps of loop.steps(…), call after(step) after each, return this rank's losses. Rank 0 has a
    bar, with its own loss: a mean needs a collective, which the meters would count.
    """
    losses, whose = [], "loss" if rank.world_size == 1 else "rank 0's loss"
    bar = progress.bar(steps, name=name, total=total, shown=rank.rank == 0)
    for step, parts in enumerate(bar, first):
        losses.append(sum(part.item() for part in parts))
        bar.note(f"{whose} {losses[-1]:.3f}")
        after(step)
    return losses


@interrupts.program
def main(stage_class) -> None:
    """The program of a stage file: read the flags, train, print the report, and write it as JSON if requested."""
    parser = Parser(
        description=f"Train a GPT, or --model, with {stage_class.__name__}, by itself or under torchrun "
                    "--nproc-per-node N.",
    )
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl if each rank has a GPU, else gloo")
    add_common_flags(parser)
    offload_flags.add_flags(parser)
    arguments = parser.parse_args()
    of_file = deepspeed.read_flag(parser, arguments, stage_class)
    settings, flags = of_file(read_settings(parser, arguments)), read_flags(parser, arguments)
    away = offload_flags.read_flags(parser, arguments, stage_class)

    with ranks.start(arguments.device, arguments.backend, arguments.timeout) as rank:
        result = train(stage_class, settings, rank, flags, away)
    finish(result, settings, rank, report.describe, arguments.json)


def add_common_flags(parser: Parser, **defaults) -> None:
    """Give the parser the flags of every program that trains and reports. defaults: other ones of the settings."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report to this file")
    add_device(parser)
    add_timeout(parser)
    add_settings(parser, **defaults)
    add_flags(parser)
    deepspeed.add_flag(parser)


def finish(result: dict | None, settings: Settings, rank: ranks.Rank, describe: Callable[[dict], str],
           file: Path | None) -> None:
    """The end of such a program, on all ranks: rank 0 prints its report, and writes it as JSON if there is a file."""
    if rank.rank == 0 and result is None:
        print(f"all {settings.steps} steps were done before" + (", so there is no report" if file else ""))
    elif rank.rank == 0:
        report.say(describe(result))
        if file:
            report.write_json(result, file)
    end(result)
