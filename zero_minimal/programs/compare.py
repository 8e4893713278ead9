"""Compare: all stages and their peers on the same work, each in fresh ranks, side by side.

    python -m zero_minimal compare --ranks 2 --plot compare.png
    python -m zero_minimal compare --offload cpu                       stages 0 to 3, and 1 to 3 offloaded
    python -m zero_minimal compare --configs --ranks 4                 the paper's C1 to C5 (configs.py)
"""

import argparse
import sys

from zero_minimal.paper import formulas
from zero_minimal.paper.quantities import plural
from zero_minimal.pictures.comparison import draw_comparison, draw_configs
from zero_minimal.pictures.offload_chart import draw_offloaded
from zero_minimal.processes import ranks
from zero_minimal.programs import offload_flags, peers, progress, report, trained
from zero_minimal.programs.offload_flags import NOTHING, Offload
from zero_minimal.programs.registry import STAGES
from zero_minimal.programs.report import megabytes
from zero_minimal.programs.train import train
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import (
    Parser,
    Settings,
    add_device,
    add_settings,
    output_file,
    picture_file,
    positive,
    read_settings,
    refuse_model,
)

PEERS = (peers.DDP, peers.FSDP2)


def run(stage_class: type, settings: Settings, world_size: int, device: str = "auto", away: Offload = NOTHING) -> dict:
    """Train with one class in `world_size` fresh ranks; return rank 0's report. Raises what ranks.run raises."""

    def on_each_rank():
        with ranks.start() as rank:
            return train(stage_class, settings, rank, away=away)

    return ranks.run(on_each_rank, world_size, device=device, timeout=3600)[0]


def run_all(settings: Settings, world_size: int, device: str = "auto") -> list[dict]:
    """The reports of all stages, then of the peers; a peer that cannot run here is left out, with the reason."""
    rows = [run(stage_class, settings, world_size, device) for stage_class in STAGES]
    for peer in PEERS:
        try:
            rows.append(run(peer, settings, world_size, device))
        except ranks.RankError as error:
            print(f"{peer.__name__} does not run here:\n{error}", file=sys.stderr)
    return rows


def run_offloaded(settings: Settings, world_size: int, away: Offload, device: str = "auto") -> list[dict]:
    """The reports of stages 0 to 3, then of 1 to 3 offloaded."""
    work = [*((stage, NOTHING) for stage in STAGES), *((stage, away) for stage in STAGES[1:])]
    bar = progress.bar(work, name="compare", total=len(work), unit="run")
    return [run(stage_class, settings, world_size, device, where) for stage_class, where in bar]


def describe(rows: list[dict]) -> str:
    """A line for each run: memory and traffic in MB (a million bytes), speed, and losses."""
    first = rows[0]
    head = (
        f"\n{first['parameters']:,} parameters Ψ in {first['dtype']} on N = {first['ranks']} ranks, {first['device']}, "
        f"{first['backend']}; MB of rank 0, formulas in brackets; losses are means of the ranks, in nats a "
        f"{trained.unit(first)}"
    )
    head = "\n".join([head, *trained.line(first)])
    held = [["", *first["theory"], "all at the peak"]]
    done = [["", "sent a step", "on the wire", "ms a step", "tokens/s", "last loss"]]
    for row in rows:
        memory, theory, traffic = row["memory"], row["theory"], row["traffic"]
        states = [f"{megabytes(memory[state])} ({megabytes(theory[state])})" for state in theory]
        held.append([row["name"], *states, megabytes(memory["peak"])])
        done.append([
            row["name"], f"{megabytes(traffic['sent_bytes'])} ({megabytes(traffic['theory_bytes'])})",
            megabytes(traffic["wire_bytes"]), f"{row['step_seconds'] * 1000:.1f}", f"{row['tokens_per_second']:,.0f}",
            f"{row['losses'][-1]:.6f}",
        ])
    return "\n".join((head, "", report.table(held), "", report.table(done), "", agreement(rows)))


def agreement(rows: list[dict]) -> str:
    """In words: how far the losses of each run are from those of the first."""
    first, *others = rows
    same = [row["name"] for row in others if row["losses"] == first["losses"]]
    lines = [f"losses that agree bit for bit: {', '.join([first['name'], *same])}"] if same else []
    for row in others:
        if row["name"] not in same:
            pairs = zip(row["losses"], first["losses"], strict=True)
            furthest = max(abs(loss - reference) / reference for loss, reference in pairs)
            lines.append(f"{row['name']}: within {furthest:.1g} of {first['name']}'s")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- with --offload


def on_device(row: dict) -> int:
    """Bytes of model states on the device."""
    return sum(row["memory"][state] for state in formulas.STATES)


def by_formula(row: dict) -> dict[str, float]:
    """Bytes by the formulas, including padding: {"device", "host", "to_host", "to_device"}."""
    device = sum(row["theory"].values()) + sum(row["padding"].values())
    parts = report.of_host(row, row["parameters"], row["ranks"]) if "bus" in row else [(0,) * 5] * 3
    host, there, back = (formula + padding for _, _, formula, _, padding in parts)
    return {"device": device, "host": host, "to_host": there, "to_device": back}


def describe_offloaded(rows: list[dict]) -> str:
    """A line for each run, in MB (a million bytes) of rank 0, with formulas in brackets."""
    first = rows[0]
    head = paragraph(
        f"{first['parameters']:,} parameters Ψ in {first['dtype']} on N = {first['ranks']} ranks, {first['device']};",
        "MB of rank 0, formulas with padding in brackets. Device: parameters, gradients, optimizer state.")
    held = [["", "device", "bytes a parameter", "on the host", "to the host", "back", "ms a step"]]
    for row in rows:
        says, bus = by_formula(row), row.get("bus", {"to_host": 0, "to_device": 0})
        measured = (on_device(row), row.get("host_memory", 0), bus["to_host"], bus["to_device"])
        device, *rest = (f"{megabytes(count)} ({megabytes(says[name])})"
                         for count, name in zip(measured, says, strict=True))
        held.append([row["name"], device, f"{on_device(row) / row['parameters']:.2f}", *rest,
                     f"{row['step_seconds'] * 1000:.1f}"])
    return "\n".join(("", head, "", report.table(held), "", agreement(rows)))


# -------------------------------------------------------------------------------------------------------------- command


def main(arguments: list[str]) -> None:
    """The command: read the flags, run, print the table, write JSON and picture."""
    parser = Parser(
        prog="python -m zero_minimal compare",
        description="Run stages 0 to 3, torch's DDP and FSDP2 on the same work, each in fresh ranks, and compare them.",
    )
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="processes to train with (default: 2)")
    parser.add_argument("--configs", action="store_true", help="compare the paper's C1 to C5 (zero_100b.py) instead")
    parser.add_argument("--model-parallel", type=positive, default=2, metavar="M",
                        help="with --configs: ranks that share one model (default: 2)")
    offload_flags.add_flags(parser)
    parser.add_argument("--budget-mb", type=positive, metavar="MB",
                        help="with --configs: also find the most blocks that fit into this much memory per rank")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the reports of all runs to this file")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw them")
    add_device(parser)
    add_settings(parser, steps=60)
    flags = parser.parse_args(arguments)
    if flags.configs:
        refuse_model(parser, flags)
    settings = read_settings(parser, flags)
    try:
        ranks.choose(flags.device, None, flags.ranks)
    except ValueError as error:
        parser.error(str(error))
    check(parser, flags)
    progress.announce(f"starting {plural(flags.ranks, 'rank')} …")
    if flags.configs:
        from zero_minimal.programs import configs  # imports all of ZeRO-R

        configs.check(parser, settings, flags.ranks, flags.model_parallel)
        budget = flags.budget_mb * 10**6 if flags.budget_mb else None
        rows = configs.run_all(settings, flags.ranks, flags.model_parallel, flags.device, budget)
        words, draw = configs.describe(rows), draw_configs
    elif flags.offload:
        rows = run_offloaded(settings, flags.ranks, offload_flags.read_flags(parser, flags, STAGES[1]), flags.device)
        words, draw = describe_offloaded(rows), lambda rows: draw_offloaded(rows, list(map(by_formula, rows)))
    else:
        rows = run_all(settings, flags.ranks, flags.device)
        words, draw = describe(rows), lambda rows: draw_comparison(rows, agreement(rows))
    report.say(words)
    report.keep(flags, {"rows": rows}, lambda: draw(rows))


def check(parser: Parser, flags: argparse.Namespace) -> None:
    """End the program if flags contradict each other."""
    if flags.bus and not flags.offload:
        parser.error("--bus is the speed of --offload's bus: give --offload cpu, too")
    if flags.offload not in (None, "cpu") or flags.host_budget:
        parser.error("compare takes --offload cpu: what a disk keeps is the stages' own program's to show")
    if flags.offload and flags.configs:
        parser.error("--offload is for the stages: give it without --configs")
    if flags.budget_mb and not flags.configs:
        parser.error("--budget-mb goes with --configs")
