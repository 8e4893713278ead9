"""Figures: runs a lesson's notebook in a new kernel, and stores its outputs as the figures of the lesson's page.

    python -m zero_minimal.programs.figures lessons/01_data_parallel

It writes notebooks/01_data_parallel.ipynb with outputs, and measured.json and pictures into the lesson's folder. A
cell's metadata name what the page takes from it: the file of its picture, and named values, each a Python expression
that is evaluated after the cell:

    "page": {"picture": "overlap.png", "measured": {"psi": "world['psi'][0]"}}

("drawn" is an expression, too, for a picture that differs from what the cell shows.)

Seconds depend on this machine. The page's text is updated by hand: tests say which numbers do not agree.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from zero_minimal.processes import interrupts
from zero_minimal.programs import report
from zero_minimal.workload.settings import Parser

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
LONGEST = 600  # seconds that a cell may take on a busy machine
SHOWN = "list(Out.values())[-1]"  # evaluated in the kernel: the last output of a cell
TAKE = """import json  # runs in the kernel, after a cell
from zero_minimal.pictures import style
if {picture!r}:
    drawn = {drawn}
    assert not style.faults(drawn), style.faults(drawn)
    style.save(drawn, {picture!r})
print(json.dumps({{{measured}}}))"""


def run(book, folder: Path) -> dict:
    """Run a notebook, which changes its outputs; write the page's pictures into this folder.

    Args:
        book: a notebook as read by nbformat.
    Returns: what its cells measured for the page, by name.
    Raises: nbclient.exceptions.CellExecutionError, with the cell's traceback, if a cell fails.
    """
    import nbformat  # only when needed: the import takes a second
    from nbclient import NotebookClient

    measured: dict = {}
    own = book.metadata.copy()
    client = NotebookClient(book, timeout=LONGEST, kernel_name="python3", record_timing=False, coalesce_streams=True,
                            resources={"metadata": {"path": str(NOTEBOOKS)}})
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable  # not another Python of that name
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
                book.cells[number] = cell  # undo the client's replacement
                measured |= json.loads(next(output.text for output in taking.outputs if output.get("name") == "stdout"))
    book.metadata = own  # without the kernel's description
    return measured


@interrupts.program
def main(arguments: list[str] | None = None) -> None:
    """The command."""
    import nbformat

    parser = Parser(description="Run a lesson's notebook, and write what it measures and draws for the lesson's page.")
    parser.add_argument("folder", type=Path, help="the lesson's folder: lessons/01_data_parallel")
    folder = parser.parse_args(arguments).folder.resolve()
    file = NOTEBOOKS / f"{folder.name}.ipynb"
    if not folder.is_dir() or not file.exists():
        parser.error(f"there is no folder {folder} of a lesson with a notebook: name one, lessons/01_data_parallel")
    book = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as drawn:  # write all, or nothing if a cell fails
        measured = run(book, Path(drawn))
        nbformat.write(book, file)
        (folder / "measured.json").write_text(on_few_lines(measured), encoding="utf-8")
        for picture in Path(drawn).iterdir():
            shutil.copy(picture, folder)
    report.say(f"{file}, and what the page takes from it: {folder}")


def on_few_lines(content: dict) -> str:
    """JSON in which each list of numbers is on one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


if __name__ == "__main__":
    main()
