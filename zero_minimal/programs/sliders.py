"""Sliders: the calculator with sliders as one HTML file, which needs no network and no server.

    python -m zero_minimal sliders what-if.html
"""

import os
from pathlib import Path

from zero_minimal.programs.what_if import page
from zero_minimal.workload.settings import Parser, output_file


def parser() -> Parser:
    """The flags."""
    result = Parser(prog="python -m zero_minimal sliders",
                    description="The plan with sliders, as one HTML file for a browser: no network, no server.")
    result.add_argument("file", type=output_file, metavar="FILE.html", help="where to write it")
    return result


def main(arguments: list[str]) -> None:
    """The command: write the page, and say how to look at it."""
    file: Path = parser().parse_args(arguments).file
    part = file.with_name(f".{file.name}.{os.getpid()}")  # whoever looks sees the old page or the new one
    try:
        part.write_text(page(), encoding="utf-8")
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    print(f"open in a browser: {file.resolve().as_uri()}")
