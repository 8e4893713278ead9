"""The figures of a lesson's page: a program measures them, writes measured.json into the lesson's folder, and draws.

    main = figures.program("03_gradients", measure, pictures, table)
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from zero_minimal.pictures import style
from zero_minimal.processes import interrupts
from zero_minimal.programs import report
from zero_minimal.workload.settings import Parser


def program(lesson: str, measure: Callable[[], dict], pictures: Callable[[dict], dict[str, Figure]],
            table: Callable[[dict], str]) -> Callable:
    """The main(arguments=None) of such a program.

    Args:
        lesson: its folder's name.
        measure: gives what JSON can hold.
        pictures: draws from that; {name of the file: figure}.
        table: says in words what was measured.
    """

    @interrupts.program
    def main(arguments: list[str] | None = None) -> None:
        parser = Parser(description=f"Measure what the page of lesson {lesson[:2]} says, and draw its pictures.")
        parser.add_argument("folder", type=Path, help=f"of the lesson: lessons/{lesson}")
        parser.add_argument("--draw", action="store_true", help="only draw, from the figures that are there")
        flags = parser.parse_args(arguments)
        file = flags.folder / "measured.json"
        if not flags.folder.is_dir():
            parser.error(f"there is no folder {flags.folder}: name the lesson's, lessons/{lesson}")
        if flags.draw and not file.exists():
            parser.error(f"there is no {file} to draw from: leave --draw out, and it is measured")
        if not flags.draw:
            file.write_text(on_few_lines(measure()), encoding="utf-8")
        measured = json.loads(file.read_text(encoding="utf-8"))
        for name, picture in pictures(measured).items():
            style.save(picture, flags.folder / name)
        report.say(table(measured))

    return main


def on_few_lines(content: dict) -> str:
    """JSON in which a list of numbers takes one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"
