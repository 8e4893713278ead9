"""Attempt page: written by `grade --html`, one page that shows learners what their file did in one small run.

It is the section "Your own attempt" of the lesson's notebook, run on that file and written as HTML. Earlier cells that
the section needs have the tag "attempt", and are not shown.
"""

import functools
import html
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zero_minimal.classroom import sandbox
from zero_minimal.classroom.lessons import HOUSE, Lesson

SECTION = "## Your own attempt"
CELL = 180.0  # seconds that a cell may take on a busy machine
STYLE = """
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 sans-serif; color: #222; background: #fff }
img { max-width: 100% } pre { overflow-x: auto; white-space: pre-wrap } td, th { padding: 0.1rem 1rem 0.1rem 0 }
th, td { text-align: left; vertical-align: top } .anchor-link { display: none }
td:nth-child(2) { white-space: nowrap } td pre { margin: 0 }
"""


def write(path: Path, lesson: Lesson, file: Path, points: list[dict]) -> None:
    """Run the file once more in the lesson's notebook, and write the cells' outputs into an HTML file. With Landlock,
    the run can write only into its own folder, and can read what its user can.

    Args:
        points: a dict for each step, as in results.json.
    Raises: OSError if the file cannot be written.
    """
    title = html.escape(f"{lesson.name[:2]} {lesson.title}")
    rows = "".join(f"<tr><th>{html.escape(step['name'])}<td>{step['score']:g} of {step['max_score']:g}"
                   f"<td><pre>{html.escape(step.get('output', ''))}</pre>" for step in points)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"<p>{html.escape(f'{file.parent.name}/{file.name}')}</p>"
        f"<table>{rows}</table>{_section(lesson, file)}</html>\n",
        encoding="utf-8", errors="replace")


def _section(lesson: Lesson, file: Path) -> str:
    """HTML of the section's texts and outputs, or why there are none."""
    import nbformat  # only for a page: the import takes a second
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbconvert import HTMLExporter

    book = nbformat.read(HOUSE / "notebooks" / f"{lesson.name}.ipynb", as_version=4)
    texts = [cell.source.partition(SECTION) for cell in book.cells]
    start = next(number for number, (_, found, _) in enumerate(texts) if found)
    shown = book.cells[start:]
    shown[0].source = SECTION + texts[start][2]
    needed = [cell for cell in book.cells[:start] if "attempt" in cell.metadata.get("tags", ())]
    for cell in shown:
        cell.get("outputs", []).clear()  # outputs of another file
    book.cells = needed + shown
    client = NotebookClient(book, timeout=CELL, startup_timeout=CELL, allow_errors=True, kernel_name="python3",
                            resources={"metadata": {"path": str(HOUSE / "notebooks")}})
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable  # not another Python of that name
    ended = ""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"ZERO_ATTEMPT": str(file), "ZERO_READING": "1", "TMPDIR": folder, "IPYTHONDIR": folder}
        fence = functools.partial(sandbox.only_files, ["/"], [folder, "/dev/null", "/dev/shm"])
        try:
            client.execute(env=env, preexec_fn=fence, stderr=subprocess.DEVNULL)
        except (CellTimeoutError, DeadKernelError) as error:
            ended = f"<p>It was ended: {html.escape(str(error).partition(chr(10))[0])}</p>"
    book.cells = shown
    exporter = HTMLExporter(template_name="basic", exclude_input=True, exclude_output_prompt=True)
    return exporter.from_notebook_node(book)[0] + ended
