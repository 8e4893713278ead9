"""The figures of a lesson's page are its notebook's: this runs it in a new kernel, and stores what it showed.

    python -m zero_minimal.programs.figures lessons/01_data_parallel

It writes notebooks/01_data_parallel.ipynb with its outputs; and into the lesson's folder measured.json and pictures.
What the page takes from a cell stands in the cell's metadata: the file of the picture that it draws, and values by
their names, each an expression of Python, computed when the cell has run:

    "page": {"picture": "overlap.png", "measured": {"psi": "world['psi'][0]"}}

("drawn" is an expression, too, where the page's picture is not what the cell shows.)

Seconds are of the machine at hand, and the page's words follow by hand: tests say which ones do not agree.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from zero_minimal.pictures import style
from zero_minimal.processes import interrupts
from zero_minimal.programs import report
from zero_minimal.workload.settings import Parser

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LONGEST = 600  # seconds that a cell may take on a busy machine
SHOWN = "list(Out.values())[-1]"  # in the kernel: what the last cell that showed something has shown
TAKE = """import json  # runs in the kernel, after a cell
from zero_minimal.pictures import style
if {picture!r}:
    drawn = {drawn}
    assert not style.faults(drawn), style.faults(drawn)
    style.save(drawn, {picture!r})
print(json.dumps({{{measured}}}))"""


def run(book, folder: Path) -> dict:
    """Run a notebook, whose outputs change; its pages' pictures are written into this folder.

    Args:
        book: as nbformat reads it.
    Returns: what its cells measured for the page, by name.
    Raises: nbclient.exceptions.CellExecutionError, with the cell's traceback, if a cell fails.
    """
    import nbformat  # not before it is needed: it takes a second
    from nbclient import NotebookClient

    measured: dict = {}
    own = book.metadata.copy()
    client = NotebookClient(book, timeout=LONGEST, kernel_name="python3", record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": str(NOTEBOOKS)}})
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable  # and no other Python of that name
    env = os.environ | {"ZERO_READING": "1", "ZERO_PROGRESS": ""}
    with client.setup_kernel(env=env, stderr=subprocess.DEVNULL):
        for number, cell in enumerate(book.cells):
            client.execute_cell(cell, number)
            if page := cell.metadata.get("page"):
                picture = page.get("picture")
                values = ", ".join(f"{name!r}: {code}" for name, code in page.get("measured", {}).items())
                taking = nbformat.v4.new_code_cell(TAKE.format(
                    picture=picture and str(folder / picture), drawn=page.get("drawn", SHOWN), measured=values))
                client.execute_cell(taking, number, store_history=False)
                book.cells[number] = cell  # the client has put the other one into its place
                measured |= json.loads(next(output.text for output in taking.outputs if output.get("name") == "stdout"))
    client.set_widgets_metadata()
    widgets = {name: value for name, value in book.metadata.items() if name == "widgets"}
    book.metadata = own | widgets  # without what the kernel says of itself
    return measured


@interrupts.program
def main(arguments: list[str] | None = None) -> None:
    """The command."""
    import nbformat

    parser = Parser(description="Run a lesson's notebook, and write what it measures and draws for the lesson's page.")
    parser.add_argument("folder", type=Path, help="of the lesson: lessons/01_data_parallel")
    folder = parser.parse_args(arguments).folder.resolve()
    file = NOTEBOOKS / f"{folder.name}.ipynb"
    if not folder.is_dir() or not file.exists():
        parser.error(f"there is no folder {folder} of a lesson with a notebook: name one, lessons/01_data_parallel")
    book = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as drawn:  # all of it, or nothing if a cell fails
        measured = run(book, Path(drawn))
        nbformat.write(book, file)
        (folder / "measured.json").write_text(on_few_lines(measured), encoding="utf-8")
        for picture in Path(drawn).iterdir():
            shutil.copy(picture, folder)
    report.say(f"{file}, and what the page takes from it: {folder}")


def program(lesson: str, measure: Callable[[], dict], pictures: Callable[[dict], dict[str, Figure]],
            table: Callable[[dict], str]) -> Callable:
    """The main(arguments=None) of a program that does the same for a page whose notebook does not measure all of it.

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


if __name__ == "__main__":
    main()
