"""python -m zero_minimal notebooks --clean DIR: copies of the notebooks to hand out, without outputs and answers.

A copy asks every question again. Links into the course still work: inside the checkout they become relative to DIR.
Outside the checkout they would be dead, so they become the names of the files, or links to --links URL.
"""

import ast
import json
import os
import re
import sys
from pathlib import Path

from zero_minimal.workload.settings import Parser

HOUSE = Path(__file__).parents[2]  # the checkout
NOTEBOOKS = HOUSE / "notebooks"
LINK = re.compile(r"\[([^\]]*)\]\(((?!\w+:|#)[^)\s]+)\)")  # [words](a file)


def clean(text: str, folder: Path, links: str = "") -> str:
    """A notebook's text for this folder, without outputs, counts and answers; for links see above."""
    book = json.loads(text)
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            cell["metadata"].pop("execution", None)
            source = unanswered(source)
        else:
            source = LINK.sub(lambda link: _link(link[1], link[2], folder, links), source)
        cell["source"] = source.splitlines(keepends=True)
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def unanswered(source: str) -> str:
    """A cell's code with three dots instead of the answers in its ask(question, answer) calls."""
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except SyntaxError:  # %%px
        return source
    lines = source.splitlines(keepends=True)
    for call in sorted(calls, key=lambda call: -call.lineno):
        if getattr(call.func, "attr", getattr(call.func, "id", "")) == "ask" and len(call.args) > 1:
            first, last = call.args[1], call.args[-1]
            before = lines[first.lineno - 1].encode()[: first.col_offset].decode()  # ast counts columns in bytes
            after = lines[last.end_lineno - 1].encode()[last.end_col_offset :].decode()
            lines[first.lineno - 1 : last.end_lineno] = [before + "..." + after]
    return "".join(lines)


def _link(words: str, target: str, folder: Path, links: str) -> str:
    file, _, part = target.partition("#")
    path, part = (NOTEBOOKS / file).resolve(), f"#{part}" if part else ""
    if path.parent == NOTEBOOKS and path.suffix == ".ipynb":
        return f"[{words}]({target})"  # the target is copied, too
    inside = path.relative_to(HOUSE).as_posix()
    if links:
        return f"[{words}]({links.rstrip('/')}/{inside}{part})"
    if folder.is_relative_to(HOUSE):
        return f"[{words}]({Path(os.path.relpath(path, folder)).as_posix()}{part})"
    return f"{words} (`{inside}` of the course)" if words != inside else f"`{inside}` of the course"


def main(arguments: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m zero_minimal notebooks", description="Copies of the notebooks to hand out, without "
                    "outputs and answers: each question is asked again.")
    parser.add_argument("--clean", metavar="DIR", required=True, help="the folder to write them to, made if missing")
    parser.add_argument("--links", metavar="URL", default="", help="where learners find the course (default: "
                        "links are relative to DIR if that is in the checkout, else the names of the files)")
    parser.add_argument("--force", action="store_true",
                        help="overwrite copies that differ: what a learner wrote into them is lost")
    flags = parser.parse_args(arguments)
    folder = Path(flags.clean).expanduser().resolve()
    if folder == NOTEBOOKS.resolve():
        parser.error(f"{flags.clean} holds the course's own notebooks: name another folder")
    copies = {folder / file.name: clean(file.read_text(), folder, flags.links) for file in NOTEBOOKS.glob("*.ipynb")}
    try:
        others = [file for file, text in copies.items() if file.exists() and file.read_bytes() != text.encode()]
        if others and not flags.force:
            parser.error(f"{', '.join(map(str, sorted(others)))}: there already, and somebody may have worked in it. "
                         "Name another folder, or write over it with --force")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in sorted(copies.items()):
            file.write_text(text)
            print(file)
        if not flags.links and not folder.is_relative_to(HOUSE):
            print("links into the course became names of files, since nobody could follow them from there: "
                  "--links URL makes them links again", file=sys.stderr)
    except OSError as error:
        parser.error(f"{error.filename} cannot be written ({error.strerror})")
