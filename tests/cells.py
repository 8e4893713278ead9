"""The notebooks' cells, and how to run them without Jupyter, on another number of ranks."""

import contextlib
import functools
import json
from pathlib import Path

import pytest

from zero_minimal import notebook

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def cells_of(name):
    """The code cells of a notebook, as stored: source, tags, outputs."""
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return [cell | {"source": "".join(cell["source"]), "tags": cell["metadata"].get("tags", [])}
            for cell in cells if cell["cell_type"] == "code"]


def sources_of(lesson):
    """{id: source} of the code cells of a lesson's notebook."""
    return {cell["id"]: cell["source"] for cell in cells_of(f"{lesson}.ipynb")}


@contextlib.contextmanager
def notebook_on(ranks, name, *replacing):
    """Run a notebook's cells here, on another number of ranks, but for the timings: the names that they leave, and the
    world. replacing: pairs of what stands there, and what is run in its place."""
    names = {}
    assert all(any(old in cell["source"] for cell in cells_of(name)) for old, _ in replacing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZERO_RANKS", str(ranks))
        patch.setenv("ZERO_READING", "1")
        for cell in cells_of(name):
            source = functools.reduce(lambda text, pair: text.replace(*pair), replacing, cell["source"])
            first, _, rest = source.partition("\n")
            if "timing" in first + rest or "world[\"runs\"]" in first:
                continue
            with pytest.raises(notebook.CellError) if "raises-exception" in cell["tags"] else contextlib.nullcontext():
                if first.startswith("%%px"):
                    notebook._px_cell(first.removeprefix("%%px"), rest)
                else:
                    exec(source, names)
        try:
            yield names, names["world"]
        finally:
            names["world"].stop()
