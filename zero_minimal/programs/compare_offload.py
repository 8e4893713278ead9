"""Compare with --offload: stages 0 to 3 and stages 1 to 3 offloaded, on the same work, each in fresh ranks."""

import argparse

from zero_minimal.paper import formulas
from zero_minimal.processes import ranks
from zero_minimal.programs import progress, report
from zero_minimal.programs.offload_flags import NOTHING, Offload
from zero_minimal.programs.registry import STAGES
from zero_minimal.programs.train import train
from zero_minimal.programs.words import paragraph
from zero_minimal.workload.settings import Parser, Settings


def check(parser: Parser, flags: argparse.Namespace) -> None:
    """Ends the program for flags that make no sense."""
    if flags.bus and not flags.offload:
        parser.error("--bus is the speed of --offload's bus: give --offload cpu, too")
    if flags.offload not in (None, "cpu") or flags.host_budget:
        parser.error("compare takes --offload cpu: what a disk keeps is the stages' own program's to show")
    if flags.offload and flags.configs:
        parser.error("--offload is for the stages: give it without --configs")


def run_all(settings: Settings, world_size: int, away: Offload, device: str = "auto", timeout: float = 3600
            ) -> list[dict]:
    """The reports of rank 0: of stages 0 to 3, then of 1 to 3 offloaded."""
    rows = []
    work = [*((stage, NOTHING) for stage in STAGES), *((stage, away) for stage in STAGES[1:])]
    with progress.bar(name="compare", total=len(work), unit="run") as bar:
        for stage_class, where in work:
            rows.append(ranks.run(_on_a_rank, world_size, stage_class, settings, where, device=device,
                                  timeout=timeout)[0])
            bar.update()
    return rows


def _on_a_rank(stage_class: type, settings: Settings, away: Offload) -> dict:
    with ranks.start() as rank:
        return train(stage_class, settings, rank, away=away)


def on_device(row: dict) -> int:
    """Bytes of model states there."""
    return sum(row["memory"][state] for state in formulas.STATES)


def by_formula(row: dict) -> dict[str, float]:
    """Bytes that the formulas say, padding included: {"device", "host", "to_host", "to_device"}."""
    stage, size, dtype = row["theory_stage"], formulas.BYTES[row["dtype"]][0], row["dtype"]
    cut = row["ranks"] if stage >= formulas.SHARDED_FROM["parameters"] else 1
    elements = row["parameters"] + round(row["padding"]["parameters"] * cut / size)
    device = sum(row["theory"].values()) + sum(row["padding"].values())
    if "bus" not in row:
        return {"device": device, "host": 0, "to_host": 0, "to_device": 0}
    crosses = formulas.bus_bytes(stage, elements, row["ranks"], dtype, row["settings"]["accumulate"])
    return {"device": device, "host": formulas.host_bytes(elements, row["ranks"], dtype)} | crosses


def describe(rows: list[dict], agreement: str) -> str:
    """A line a run, in MB (a million bytes) of rank 0, formulas in brackets."""
    first = rows[0]
    head = paragraph(
        f"{first['parameters']:,} parameters Ψ in {first['dtype']} on N = {first['ranks']} ranks, {first['device']};",
        "MB of rank 0, formulas with padding in brackets. Device: parameters, gradients, optimizer state.")
    held = [["", "device", "bytes a parameter", "on the host", "to the host", "back", "ms a step"]]
    for row in rows:
        says, bus = by_formula(row), row.get("bus", {"to_host": 0, "to_device": 0})
        measured = (on_device(row), row.get("host_memory", 0), bus["to_host"], bus["to_device"])
        device, *rest = (f"{count / 1e6:,.2f} ({says[name] / 1e6:,.2f})"
                         for count, name in zip(measured, says, strict=True))
        held.append([row["name"], device, f"{on_device(row) / row['parameters']:.2f}", *rest,
                     f"{row['step_seconds'] * 1000:.1f}"])
    return "\n".join(("", head, "", report.table(held), "", agreement))
