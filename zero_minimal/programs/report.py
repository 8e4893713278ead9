"""Report: what a run measured, as tables for a reader and as JSON for a program."""

import json
import os
from pathlib import Path

from zero_minimal.paper import formulas
from zero_minimal.paper.quantities import number


def write_json(content: dict, path: str | Path) -> None:
    """Write JSON in one go: whoever reads the file sees all of it or what was there before."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def describe(report: dict) -> str:
    """One run, for the end of its output: memory and traffic beside the formulas, losses, speed."""
    ranks, dtype = report["ranks"], report["dtype"]
    head = (
        f"\n{report['name']}: {report['parameters']:,} parameters Ψ in {dtype} "
        f"on N = {ranks} {'rank' if ranks == 1 else 'ranks'}, {report['device']}, {report['backend']}"
    )
    first, last = report["losses"][0], report["losses"][-1]
    before, after = report["validation_losses"][0], report["validation_losses"][-1]
    milliseconds, speed = report["step_seconds"] * 1000, report["tokens_per_second"]
    tail = (
        f"loss, nats a byte: training {first:.3f} → {last:.3f}, validation {before:.3f} → {after:.3f}\n"
        f"speed: {milliseconds:,.1f} ms a step (median), {speed:,.0f} tokens a second"
    )
    return "\n\n".join((head, table(memory_rows(report)), table(traffic_rows(report)), tail))


def memory_rows(report: dict) -> list[list[str]]:
    """Rows of the memory table: measured = formula + padding + unexplained, in bytes on rank 0."""
    memory, theory = report["memory"], report["theory"]
    rows = [["memory of rank 0, bytes", "measured", "formula", "", "padding", "unexplained"]]
    for state in formulas.STATES:
        words = formulas.formula(report["theory_stage"], state, report["dtype"])
        rows.append([f"  {state}", *explained(memory[state], theory[state], words, report["padding"][state])])
    rows.append(["  activations, at most", number(memory["activations"]), "", "", "", ""])
    rows.append(["  temporary buffers, at most", number(memory["buffers"]), "", "", "", ""])
    rows.append(["  all at the same moment, at most", number(memory["peak"]), "", "", "", ""])
    return rows


def traffic_rows(report: dict) -> list[list[str]]:
    """Rows of the traffic table: what a ring sends for the collectives of a step, and what the loopback saw."""
    traffic = report["traffic"]
    words = f"{traffic['theory_volume']}Ψ(N−1)/N"
    sent = explained(traffic["sent_bytes"], traffic["theory_bytes"], words, traffic["padding_bytes"])
    wire = "not known here" if traffic["wire_bytes"] is None else number(round(traffic["wire_bytes"]))
    rows = [
        ["traffic of a rank, bytes a step", "measured", "formula", "", "padding", "unexplained"],
        ["  sent, as a ring sends", *sent],
        ["  crossed the loopback", wire, "", "", "", ""],
    ]
    for name, counts in sorted(traffic["collectives"].items()):
        rows.append([f"  {name}, {number(counts['calls'])} a step, of in all", number(counts["bytes"]), "", "", "", ""])
    return rows


def explained(measured: float, formula: float, words: str, padding: float) -> list[str]:
    """Cells of a row: measured, by the formula, the formula itself, padding, and what neither explains."""
    return [number(measured), number(formula), words, number(padding), number(measured - formula - padding)]


def table(rows: list[list[str]]) -> str:
    """Lines with the first row as head; columns of words to the left, of numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        numbers = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *numbers]).rstrip())
    lines.insert(1, "─" * max(map(len, lines)))
    return "\n".join(lines)
