"""python -m zero_minimal board FOLDER: a class's table for the budget (part B of lesson 10), best first.

Each system.py below the folder is a submission, named after its folder; a Python file in the folder itself is one, too,
named after itself. Scores depend only on the files, so the board is the same on every machine.
"""

import argparse
import csv
import html
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom import sandbox
from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.open_part import FILE, illegal, judge
from zero_minimal.paper.quantities import size_text
from zero_minimal.programs import report
from zero_minimal.programs.budget import TRACKS, Score
from zero_minimal.workload.settings import output_file

HEAD = ("place", "who", "points", *(f"{track.number} {track.name}" for track in TRACKS), "what was wrong")
STYLE = ("body{font:16px/1.5 sans-serif;margin:2rem;max-width:75rem}table{border-collapse:collapse}"
         "th,td{padding:.4rem .7rem;border-bottom:1px solid #ccc;text-align:left;vertical-align:top}"
         ".gold{background:#f7e6a1}.silver{background:#e3e6ea}.bronze{background:#f0d9c4}")


@dataclass(frozen=True)
class Row:
    """A submission and its scores, one for each track."""

    who: str
    scores: list[Score]

    @property
    def points(self) -> int:
        return sum(score.points for score in self.scores)

    @property
    def faults(self) -> str:
        """Why it got no medal on some tracks, each reason once."""
        said: dict[str, list[str]] = {}
        for score in self.scores:
            if not score.medal:
                said.setdefault(score.words, []).append(str(score.track))
        return "; ".join(f"track {', '.join(tracks)}: {words}" for words, tracks in said.items())


def rows_of(folder: Path, judged=judge, tell=lambda row: None) -> list[Row]:
    """A row for each submission, sorted: most points first, then nearest to the bounds, then by name. The row of a
    submission that cannot be judged has the reason."""
    rows = []
    for who, file in submissions_in(folder).items():
        try:
            scores = judged(file)
        except Busy:
            raise
        except Exception as error:  # one broken submission must not prevent the board
            words = f"it could not be judged: {type(error).__name__}: {error}".splitlines()[0]
            scores = [illegal(track, words) for track in TRACKS]
        rows.append(Row(who, scores))
        tell(rows[-1])
    return sorted(rows, key=lambda row: (-row.points, _off(row), row.who))


def submissions_in(folder: Path) -> dict[str, Path]:
    """{who: file}. Raises: ValueError if there is none."""
    files = {file.stem: file for file in sorted(folder.glob("*.py")) if file.name != FILE}
    for file in sorted(folder.rglob(FILE)):
        files[str(file.parent.relative_to(folder)) if file.parent != folder else FILE] = file
    if not files:
        raise ValueError(f"{folder} holds no submission: a {FILE} in a folder for each, or a Python file each")
    return files


def _off(row: Row) -> float:
    """The mean ratio to the bounds; a track without a medal counts as 2."""
    return sum(score.off if score.medal else 1.0 for score in row.scores) / len(row.scores)


def table(rows: list[Row]) -> list[list[str]]:
    """The rows below HEAD. Equal points give the same place."""
    return [[str(1 + sum(other.points > row.points for other in rows)), row.who, str(row.points),
             *map(_cell, row.scores), row.faults] for row in rows]


def _cell(score: Score) -> str:
    if not score.medal:
        return "–"
    return f"{score.medal}, {size_text(score.counts, 4)}, +{score.off:.1%}"


def as_markdown(rows: list[Row]) -> str:
    """A table for a page or a pull request."""
    lines = [HEAD, ["---"] * len(HEAD), *table(rows)]
    return "".join(f"| {' | '.join(_one_line(cell).replace('|', chr(92) + '|') for cell in line)} |\n"
                   for line in lines)


def as_html(rows: list[Row]) -> str:
    """A complete page."""
    body = "".join("<tr>" + "".join(_html_cell(cell) for cell in line) + "</tr>\n" for line in table(rows))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEAD)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>The budget</title><style>{STYLE}</style>"
            f"<h1>The budget</h1><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></html>\n")


def _html_cell(cell: str) -> str:
    medal = next((name for name in ("gold", "silver", "bronze") if cell.startswith(f"{name},")), "")
    return f"<td{f' class={medal}' if medal else ''}>{html.escape(_one_line(cell))}</td>"


def as_csv(rows: list[Row]) -> str:
    """For a spreadsheet: bytes and points as numbers, a line for each submission."""
    written = io.StringIO()
    names = [f"{track.name} {part}" for track in TRACKS for part in ("medal", "points", "bytes", "above bound")]
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["place", "who", "points", *names, "what was wrong"])
    for line, row in zip(table(rows), rows, strict=True):
        cells = [cell for score in row.scores for cell in (
            score.medal, score.points, "" if score.counts is None else score.counts,
            "" if score.off is None else f"{score.off:.6f}")]
        writer.writerow([*map(_harmless, line[:3]), *cells, _harmless(_one_line(line[-1]))])
    return written.getvalue()


def _harmless(cell: str) -> str:
    """Quote a cell that a spreadsheet would read as a formula."""
    return f"'{cell}" if cell[:1] in "=+-@" else cell


def _one_line(cell: str) -> str:
    return " ".join(cell.split())


WRITERS = {".md": as_markdown, ".html": as_html, ".csv": as_csv}


def main(arguments: list[str]) -> int:
    """Exit code: 0, 2 for a wrong call, or 3 where the machine is too busy to judge."""
    parser = argparse.ArgumentParser(prog="python -m zero_minimal board", allow_abbrev=False,
                                     description="A class's table for the budget, part B of lesson 10.")
    parser.add_argument("folder", type=Path, help=f"contains a folder for each learner, with {FILE} in it")
    parser.add_argument("--write", type=output_file, action="append", default=[], metavar="FILE",
                        help="also write the table: FILE.md, FILE.html or FILE.csv; may be given several times")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    for file in options.write:
        if file.suffix not in WRITERS:
            parser.error(f"{file} must end in {', '.join(WRITERS)}")
    if not sandbox.holds():
        print("This system cannot fence a submission in (Linux 5.13 can): judge nobody's file but your own.\n")
    try:
        rows = rows_of(options.folder, tell=lambda row: print(f"{row.who}: {row.points} of 60", file=sys.stderr))
    except ValueError as error:
        parser.error(str(error))
    except Busy as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    print(as_markdown(rows), end="")
    for file in options.write:
        report.write(WRITERS[file.suffix](rows), file)
    return 0
