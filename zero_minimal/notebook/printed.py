"""Printed: what ranks print and draw. It goes through files, so that the notebook sees it while the cell still runs.

    a rank       with printed.into(file, shell): …     each piece is appended, as a line of JSON
    notebook     Printed(file).read()                  all new pieces
                 Screen().update(…)                    shows them while the cell runs; at its end, show() replaces that
"""

import contextlib
import functools
import io
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from IPython import get_ipython
from IPython.core.displaypub import DisplayPublisher
from IPython.core.pylabtools import print_figure
from IPython.display import clear_output, display

LIMIT = 500_000  # characters per rank and cell: an endless loop of prints must not fill the disk
DPI = 90  # resolution of pictures
WIDGET = "application/vnd.jupyter.widget-view+json"
SOON = 1.0  # seconds: a shorter cell shows nothing while it runs
LINES = 40  # the last lines of all ranks together

# ------------------------------------------------------------------------------------------------------------ on a rank


@contextlib.contextmanager
def into(file: Path, shell) -> Iterator[None]:
    """A context in which prints and displays go to the file; at its end, open pyplot figures, too."""
    _pages.turn(file)
    draw = functools.partial(print_figure, fmt="png", base64=True, dpi=DPI)  # by name, without importing matplotlib
    shell.display_formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", draw)
    before, shell.display_pub = shell.display_pub, _Display(_pages)
    try:
        with contextlib.redirect_stdout(_pages), contextlib.redirect_stderr(_pages):
            yield
    finally:
        shell.display_pub = before


def bars_as_text() -> None:
    """Let tqdm.auto and tqdm.notebook draw text: widgets need a front end, which a rank does not have."""
    with contextlib.suppress(ImportError):
        import tqdm.std

        sys.modules["tqdm.notebook"] = sys.modules["tqdm.autonotebook"] = tqdm.std


def show_value(value, shell) -> None:
    """Show the value of a cell's last line: as a picture if it is one, otherwise as text."""
    data, _ = shell.display_formatter.format(value, include={"image/png"})
    if "image/png" in data:
        shell.display_pub.publish(data | {"text/plain": repr(value)})
    else:
        print(repr(value))


def show_figures() -> None:
    """Display the figures that pyplot still has open, as a notebook does at the end of a cell, and close them."""
    if "matplotlib.pyplot" in sys.modules:
        from matplotlib_inline import backend_inline

        backend_inline.show(close=True)


class _Pages(io.TextIOBase):
    """A rank's stdout and stderr. All cells share it: a progress bar or a thread may outlive its cell."""

    encoding = "utf-8"

    def __init__(self):
        self.file, self.left = None, LIMIT

    def turn(self, file: Path) -> None:
        """Write into this file from now on."""
        if self.file:
            self.file.close()
        self.file, self.left = open(file, "a", buffering=1), LIMIT

    def writable(self):
        return True

    def write(self, text):
        if self.left > 0:
            self.left -= len(text)
            self.add("text", text if self.left > 0 else f"\n… more than {LIMIT:,} characters: the rest is not shown\n")
        return len(text)

    def add(self, kind: str, *content) -> None:
        self.file.write(json.dumps([kind, *content]) + "\n")


_pages = _Pages()


class _Display(DisplayPublisher):
    """The publisher that display() calls on a rank."""

    def __init__(self, pages: _Pages):
        super().__init__()
        self.pages = pages

    def publish(self, data, *args, **kwargs):
        words = data.get("text/plain", "")
        if "image/png" in data:
            self.pages.add("picture", data["image/png"], words)
        elif WIDGET in data:
            self.pages.write(f"{words}    (a widget, as it is now: ranks show text and pictures)\n")
        else:
            self.pages.write(words + "\n")

    def clear_output(self, wait=False):
        self.pages.add("clear")


# ------------------------------------------------------------------------------------------------------ in the notebook


class Printed:
    """What one rank has printed in a cell so far."""

    def __init__(self, file: Path):
        self.file, self.read_to = file, 0
        self.pieces: list[list[str]] = []  # ["text", words] or ["picture", png as base64, words]

    def read(self) -> None:
        """Read what is new."""
        with contextlib.suppress(FileNotFoundError), open(self.file, "rb") as file:
            file.seek(self.read_to)
            come = file.read()
            come = come[: come.rfind(b"\n") + 1]  # a partial line is still being written
            self.read_to += len(come)
            for line in come.splitlines():
                piece = json.loads(line)
                if piece[0] == "clear":
                    self.pieces.clear()
                elif piece[0] == "text" and self.pieces and self.pieces[-1][0] == "text":
                    self.pieces[-1][1] += piece[1]
                else:
                    self.pieces.append(piece)

    def lines(self) -> list[str]:
        """All pieces as text; a picture's text instead of the picture."""
        return [line for kind, *content in self.pieces
                for line in (on_screen(content[0]) if kind == "text" else content[-1:])]


def show(everybody: list[Printed]) -> None:
    """Print what all ranks have printed: once, if it is the same on all of them."""
    for name, pieces in named([printed.pieces for printed in everybody]).items():
        for kind, *content in pieces:
            for line in on_screen(content[0]) if kind == "text" else content[-1:]:
                print(f"{name} │ {line}")
            if kind == "picture" and get_ipython():
                get_ipython().display_pub.publish({"image/png": content[0], "text/plain": content[-1]})


def named(contents: list[list]) -> dict[str, list]:
    """What each rank has, by its name; once, if all have the same."""
    alike = len(contents) > 1 and all(content == contents[0] for content in contents)
    return {"all ranks": contents[0]} if alike else {f"rank {rank}": content for rank, content in enumerate(contents)}


def on_screen(text: str) -> list[str]:
    """The lines that a screen would show: a progress bar overwrites itself, with \\r and by moving up."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\n|\r|\x1b\[A)", text):
        if part == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row = max(0, row - 1)
        else:
            line = lines[row]
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    while lines and not lines[-1].strip():
        lines.pop()
    return [line.rstrip() for line in lines]


# ---------------------------------------------------------------------------------------------------- while a cell runs


def anybody_there() -> bool:
    """Whether a person is watching, who can answer questions, and not a program that runs and stores the notebook."""
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", False))


class Screen:
    """The output of a running cell."""

    def __init__(self):
        self.began, self.shown, self.handle = time.monotonic(), "", None

    def update(self, everybody: list[Printed], positions: dict[int, dict | None]) -> None:
        """Show what the ranks have printed, and where unfinished ranks are."""
        seconds = time.monotonic() - self.began
        if seconds < SOON:
            return
        texts = named([printed.lines() for printed in everybody])
        lines = [f"{name} │ {line}" for name, text in texts.items() for line in text[-(LINES // len(texts)) :]]
        known = {rank: position for rank, position in positions.items() if position}
        text = "\n".join([*lines, f"running for {seconds:.0f} s:", *stand(known, len(everybody))])
        if text == self.shown:
            return
        self.shown, data = text, {"text/plain": text}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)

    def clear(self, something_follows: bool) -> None:
        """Clear the output: when the next output arrives, to avoid flicker, or at once if none will. (JupyterLab does
        not clear for an error.)"""
        if self.handle is not None:
            clear_output(wait=something_follows)


def stand(positions: dict[int, dict], world_size: int = 0) -> list[str]:
    """A line for each rank: its line in the cell and its function. One line if all ranks of the world agree."""
    lines = {}
    for rank, position in sorted(positions.items()):
        cell = " of an earlier cell" if position["earlier"] else ""
        where = f"line {position['line']}{cell}: {position['source']}" if position["line"] else "not in the cell"
        where = position["attempt"] or where  # the cell only calls the learner's file
        lines[rank] = where + (f"    ({position['inside']})" if position["inside"] else "")
    if len(lines) == world_size > 1 and len(set(lines.values())) == 1:
        return [f"  all ranks, {line}" for line in set(lines.values())]
    return [f"  rank {rank}, {line}" for rank, line in lines.items()]
