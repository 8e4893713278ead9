"""Report: a run's measurements, as tables for a reader and as JSON for a program."""

import argparse
import contextlib
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zero_minimal.paper import formulas
from zero_minimal.paper.quantities import number
from zero_minimal.programs import trained
from zero_minimal.programs.words import COLUMNS


def write_json(content: dict, path: str | Path) -> None:
    """Write JSON."""
    write(json.dumps(content, indent=1, ensure_ascii=False) + "\n", Path(path))


def keep(flags: argparse.Namespace, content: dict, draw: Callable) -> None:
    """Write the files that --json and --plot name: the content, and the picture that draw() returns."""
    if flags.json:
        write_json(content, flags.json)
    if flags.plot:
        from zero_minimal.pictures import style  # imports matplotlib, which most runs do not need

        style.save(draw(), flags.plot)


def write(text: str, path: Path) -> None:
    """Write a file atomically."""
    with beside(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A context that yields another name to write a file under; at its end the file gets its own name. So a reader sees
    all of it, or the old one. What is no regular file, /dev/stdout say, is written itself."""
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()  # what a link names, and not the link
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def describe(report: dict) -> str:
    """The end of one run's output: memory and traffic compared with the formulas, losses, speed."""
    ranks, dtype = report["ranks"], report["dtype"]
    head = (
        f"\n{report['name']}: {report['parameters']:,} parameters Ψ in {dtype} "
        f"on N = {ranks} {'rank' if ranks == 1 else 'ranks'}, {report['device']}, {report['backend']}"
    )
    head = "\n".join([head, *trained.line(report)])
    first, last = report["losses"][0], report["losses"][-1]
    before, after = report["validation_losses"][0], report["validation_losses"][-1]
    milliseconds, speed = report["step_seconds"] * 1000, report["tokens_per_second"]
    of = "" if ranks == 1 else f"mean of {ranks} ranks, "
    tail = (
        f"loss, {of}nats a {trained.unit(report)}: {first:.3f} → {last:.3f}; validation {before:.3f} → {after:.3f}\n"
        f"speed: {milliseconds:,.1f} ms a step (median), {speed:,.0f} tokens a second"
    )
    away = [offloaded(report)] if "bus" in report else []
    return "\n\n".join((head, table(memory_rows(report)), *away, table(traffic_rows(report)), calls(report), tail))


def offloaded(report: dict) -> str:
    """What the rank's host keeps, and what crosses their bus, compared with the formulas."""
    rows = [["the host of rank 0, bytes", "measured", "formula", "", "padding", "unexplained"]]
    rows += [[f"  {words}", *explained(*cells)] for words, *cells in of_host(report, report["parameters"],
                                                                             report["ranks"])]
    return "\n".join([table(rows), *([in_memory(report)] if "disk" in report else [])])


def of_host(report: dict, elements: int, ranks: int) -> list[tuple[str, float, float, str, float]]:
    """What a rank's host keeps, and what crosses the bus in a step: (label, measured, by the formula, the formula
    itself, padding), in bytes. elements: parameters whose states the `ranks` share."""
    dtype, stage, settings, disk = (report.get(name) for name in ("dtype", "theory_stage", "settings", "disk"))
    size, kept = formulas.BYTES[dtype][0], formulas.host_bytes(1, 1, dtype)
    padding = report["padding"]["parameters"] / size  # elements in the shards of all ranks that share the states
    padding *= ranks if stage >= formulas.SHARDED_FROM["parameters"] else 1
    times = settings["accumulate"] if stage >= formulas.SHARDED_FROM["gradients"] else 1
    parts = [("masters, gradients, state", disk["kept"] if disk else report["host_memory"], kept),
             ("over the bus, a step, to it", report["bus"]["to_host"], times * size),
             ("and back", report["bus"]["to_device"], size)]
    if disk:
        # gradients are read by the update, by further micro-batches, by clipping and by the search for overflows
        looks = times - 1 + (settings["clip"] > 0) + (dtype == "fp16")
        parts += [("from the disk, a step", disk["read"], kept + looks * size),
                  ("to the disk", disk["written"], times * size + kept - size)]
    return [(words, measured, each * elements / ranks, f"{each}Ψ/N", each * padding / ranks)
            for words, measured, each in parts]


def in_memory(report: dict) -> str:
    """A line: all of that is on the disk, and how much memory the host has used."""
    disk = report["disk"]
    allowed = f", of {number(disk['budget'])} that it may take" if disk["budget"] else ""
    return (f"all of it is on the disk; buffers of it take {number(report['host_memory'])} bytes. The host took at\n"
            f"most {number(disk['used'])} bytes of memory beyond Python and torch{allowed}")


def memory_rows(report: dict) -> list[list[str]]:
    """Rows of the memory table: measured = formula + padding + unexplained, in bytes on rank 0."""
    memory, theory = report["memory"], report["theory"]
    rows = [["memory of rank 0, bytes", "measured", "formula", "", "padding", "unexplained"]]
    for state in formulas.STATES:
        if theory[state] == 0:  # offloaded
            rows.append([f"  {state}", *explained(memory[state], 0, "on the host", 0)])
            continue
        words = formulas.formula(report["theory_stage"], state, report["dtype"])
        rows.append([f"  {state}", *explained(memory[state], theory[state], words, report["padding"][state])])
    for part, words in (("activations", "activations"), ("buffers", "buffers"), ("peak", "all at once")):
        rows.append([f"  {words}, at most", number(memory[part]), "", "", "", ""])
    return rows


def traffic_rows(report: dict) -> list[list[str]]:
    """Rows of the traffic table: what a ring sends for a step's collectives, and what the connections carried."""
    traffic = report["traffic"]
    words = f"{traffic['theory_volume']}Ψ(N−1)/N"
    sent = explained(traffic["sent_bytes"], traffic["theory_bytes"], words, traffic["padding_bytes"])
    wire = "not known here" if traffic["wire_bytes"] is None else number(round(traffic["wire_bytes"]))
    return [
        ["sent in a step, bytes", "measured", "formula", "", "padding", "unexplained"],
        ["  as a ring sends", *sent],
        ["  on the wire", wire, "", "", "", ""],
    ]


def calls(report: dict) -> str:
    """A line for each kind of collective: its calls per step, and their payload in bytes."""
    counted = sorted(report["traffic"]["collectives"].items())
    lines = [f"  {number(each['calls'])} × {name} of {number(each['bytes'])} bytes in all" for name, each in counted]
    return "\n".join(["collectives of a step:", *lines]) if lines else "no collectives: a rank alone sends nothing"


def explained(measured: float, formula: float, words: str, padding: float) -> list[str]:
    """Cells of a row: measured, by the formula, the formula itself, padding, and what neither explains."""
    return [number(measured), number(formula), words, number(padding), number(measured - formula - padding)]


def megabytes(count: float | None, decimals: int = 2) -> str:
    """Bytes as MB, by default with enough digits to distinguish small models; None is unknown."""
    return "?" if count is None else f"{count / 1e6:,.{decimals}f}"


# ------------------------------------------------------------------------------------------------------------ terminals


def say(text: str) -> None:
    """Print for a terminal."""
    print(fitted(text))


def fitted(text: str) -> str:
    """The text with long lines broken at blanks; tables have none."""
    lines = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        lines += textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def table(rows: list[list[str]], columns: int = COLUMNS) -> str:
    """Lines of a table, with the first row as head; text is aligned left, numbers right.

    If it is wider than `columns` characters, heads are broken at blanks; if that is not enough, the table is split into
    several, one below the other, which repeat the first column.
    """
    least = [narrowest(cells) for cells in zip(*rows, strict=True)]
    parts = [[0]]
    for column in range(1, len(least)):
        if len(parts[-1]) > 1 and sum(least[other] + 2 for other in parts[-1]) + least[column] > columns:
            parts.append([0])
        parts[-1].append(column)
    cut = [[[row[column] for column in part] for row in rows] for part in parts]
    return "\n\n".join(_one_table(part, columns) for part in cut)


def narrowest(cells: Sequence[str]) -> int:
    """The least width of a column: its cells stay whole, but the first one, its head, may be broken."""
    head, *body = cells
    return max(map(len, (*head.split(), *body, "")))


def _one_table(rows: list[list[str]], columns: int) -> str:
    """A table whose columns fit if heads are broken. Empty rows are left out."""
    rows = [row for row in rows if row is rows[0] or any(row[1:])]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    spare = [width - narrowest(cells) for width, cells in zip(widths, zip(*rows, strict=True), strict=True)]
    while sum(widths) + 2 * len(widths) - 2 > columns and any(spare):
        column = spare.index(max(spare))
        widths[column] -= 1
        spare[column] -= 1
    broken = [textwrap.wrap(head, width) for head, width in zip(rows[0], widths, strict=True)]
    height = max(map(len, broken))
    heads = [[""] * (height - len(head)) + head for head in broken]  # align them at the bottom
    lines = []
    for row in (*zip(*heads, strict=True), *rows[1:]):
        numbers = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *numbers]).rstrip())
    lines.insert(height, "─" * max(map(len, lines)))
    return "\n".join(lines)
