"""Configs: the paper's C1 to C5 (Table 3) on the same work: memory, speed, and the largest model that fits a budget.

    python -m zero_minimal compare --configs --ranks 4 --model-parallel 2 --plot configs.png
"""

import functools
import os
import sys
from dataclasses import replace

import torch

from zero_minimal.core.mesh import divisors, make_mesh
from zero_minimal.meters.observer import MEMORY_STEPS, Observer
from zero_minimal.paper import formulas
from zero_minimal.processes import interrupts, ranks
from zero_minimal.programs import deepspeed, report
from zero_minimal.programs.resume import NO_CHECKPOINTS, Checkpoints, Flags, read_flags
from zero_minimal.programs.train import add_common_flags, finish, losses_of
from zero_minimal.workload import loop
from zero_minimal.workload.settings import DTYPES, Parser, Settings, positive, read_settings, refuse_model
from zero_minimal.zero_100b import CONFIGS, System


def train(
    name: str, settings: Settings, model_parallel: int, rank: ranks.Rank, flags: Flags = NO_CHECKPOINTS,
    system_class: type = System,
) -> dict | None:
    """Train with one config of this class, the lesson's or a learner's own; return this rank's report: losses, averaged
    over the ranks, memory, traffic, speed. None if the resumed run had done all steps.

    Raises: ValueError on every rank for a world that is not D × M, or heads that M does not divide.
    """
    mesh = make_mesh(model_parallel)
    batches = loop.training_batches(settings, mesh.data_rank)
    torch.manual_seed(settings.seed)  # the same model in each model-parallel group
    system = system_class(
        name, settings.model_config(), mesh, settings.batch, DTYPES[settings.dtype], rank.device,
        settings.optimizer_class(), bucket_bytes=int(settings.bucket_mb * 2**20), **settings.optimizer_options(),
    )
    loop.seed_dropout(settings, mesh.data_rank)  # from now on each group has its own
    scaler = settings.loss_scaler(system.groups)
    checkpoints = Checkpoints(flags, system, batches, scaler, settings, rank)
    first = checkpoints.resume()
    if first >= settings.steps:
        return None
    left = replace(settings, steps=settings.steps - first)
    watch = Observer(system, rank, left)
    steps = loop.steps(system, batches, settings, scaler=scaler, observers=[watch], first=first)
    losses = losses_of(steps, left.steps, name, rank, first, checkpoints.after)
    finished = checkpoints.finish()
    step_seconds = watch.step_seconds()
    return {
        "name": name, "config": name, "ranks": rank.world_size, "model_parallel": model_parallel,
        "backend": rank.backend, "device": rank.device.type, "dtype": settings.dtype,
        "parameters_of_rank": sum(param.numel() for param in system.model.parameters()),
        "losses": loop.mean_over_ranks(losses, rank),
        "step_seconds": step_seconds,
        "tokens_per_second": settings.tokens_per_step(rank.world_size // model_parallel) / step_seconds,
        "memory": {state: watch.states[state] for state in formulas.STATES}
        | {"peak": watch.ledger.peak.total, "peak_by_category": watch.ledger.peak.bytes},
        "traffic": watch.sent(),
    } | finished | ({"resumed_after": first} if first else {})


def run(name: str, settings: Settings, world_size: int, model_parallel: int, device: str = "auto") -> dict:
    """Run one config in fresh ranks; return rank 0's report."""

    def on_each_rank():
        with ranks.start() as rank:
            return train(name, settings, model_parallel, rank)

    return ranks.run(on_each_rank, world_size, device=device, timeout=3600)[0]


def largest_model(name, settings: Settings, world_size: int, model_parallel: int, budget: float, device: str) -> int:
    """The most blocks of this shape whose training stays within `budget` bytes on rank 0, found by running them.

    Raises: ValueError if a model of one block does not fit.
    """

    @functools.cache  # each call is a run
    def peak(layers: int) -> int:
        short = replace(settings, layers=layers, steps=MEMORY_STEPS)
        return run(name, short, world_size, model_parallel, device)["memory"]["peak"]

    low, high = peak(1), peak(3)
    if low > budget:
        raise ValueError(f"{name}: one block takes {low / 1e6:.1f} MB, and the budget is {budget / 1e6:.1f} MB")
    layers = max(1, 1 + int((budget - low) / ((high - low) / 2)))  # start from a linear estimate, then decide by runs
    while peak(layers) > budget:
        layers -= 1
    while peak(layers + 1) <= budget:
        layers += 1
    return layers


def describe(rows: list[dict]) -> str:
    """A table of the configs."""
    first = rows[0]
    world_size, model_parallel = first["ranks"], first["model_parallel"]
    head = (f"\n{', '.join(row['name'] for row in rows)} on {world_size} ranks, D × M = "
            f"{world_size // model_parallel} × {model_parallel}, {first['dtype']}, {first['device']}; MB of rank 0, "
            "sent in a step; losses are means of the ranks, in nats a byte")
    lines = [["", "parameters", "gradients", "optimizer", "peak", "sent", "tokens/s", "last loss",
              *(["blocks that fit"] if "budget_bytes" in first else [])]]
    for row in rows:
        memory = row["memory"]
        sizes = [memory[state] for state in (*formulas.STATES, "peak")]
        lines.append([
            row["name"], *(f"{size / 1e6:,.2f}" for size in sizes), f"{row['traffic']['sent_bytes'] / 1e6:,.2f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['losses'][-1]:.6f}",
            *([str(row["largest_layers"])] if "budget_bytes" in first else []),
        ])
    parts = [head, report.table(lines)]
    if len(rows) > 1:
        same = all(row["losses"] == first["losses"] for row in rows)
        parts.append("losses agree bit for bit" if same else "losses differ")
    return "\n\n".join(parts)


def run_all(settings: Settings, world_size: int, model_parallel: int, device: str, budget: float | None) -> list[dict]:
    """The reports of C1 to C5; with a budget in bytes, also how many blocks fit."""
    rows = [run(name, settings, world_size, model_parallel, device) for name in CONFIGS]
    if budget:
        for row in rows:
            row["budget_bytes"] = budget
            try:
                row["largest_layers"] = largest_model(
                    row["name"], settings, world_size, model_parallel, budget, device
                )
            except ValueError as error:
                print(error, file=sys.stderr)
                row["largest_layers"] = 0
    return rows


def check(parser: Parser, settings: Settings, world_size: int, model_parallel: int) -> None:
    """End the program with a message, on every rank alike, if this cannot be trained."""
    if world_size % model_parallel:
        parser.error(f"{world_size} ranks are not D × {model_parallel}: --model-parallel must divide them; accepted: "
                     f"{', '.join(map(str, divisors(world_size)))}. torchrun --nproc-per-node N starts N ranks")
    if settings.heads % model_parallel:
        parser.error(f"--heads {settings.heads} cannot be shared by {model_parallel} model-parallel ranks equally")
    if settings.recompute:
        parser.error("leave --recompute out: the configs always recompute")


@interrupts.program
def main(system_class: type) -> None:
    """The program of zero_100b.py: read the flags, train with one config, print its row, write JSON if asked to.
    system_class: the lesson's System, or a learner's own."""
    parser = Parser(description="Train a GPT as the paper's ZeRO-100B does, under torchrun --nproc-per-node N.")
    parser.add_argument("--config", default="C4", choices=tuple(CONFIGS), help="a row of Table 3 (default: C4)")
    parser.add_argument("--model-parallel", type=positive, default=2, metavar="M",
                        help="ranks that share one model (default: 2)")
    add_common_flags(parser, steps=60)
    flags = parser.parse_args()
    refuse_model(parser, flags)
    of_file = deepspeed.read_flag(parser, flags, None)
    settings, checkpoints = of_file(read_settings(parser, flags)), read_flags(parser, flags)
    check(parser, settings, int(os.environ.get("WORLD_SIZE", 1)), flags.model_parallel)
    with ranks.start(flags.device, timeout=flags.timeout) as rank:
        result = train(flags.config, settings, flags.model_parallel, rank, checkpoints, system_class)
    finish(result, settings, rank, lambda result: describe([result]), flags.json)
