"""Screen: what a cell shows while it runs. At the cell's end, the ordered output of all ranks replaces it."""

import time

from IPython import get_ipython
from IPython.display import clear_output, display

from zero_minimal.notebook.printed import Printed, named

SOON = 1.0  # seconds: a shorter cell shows nothing while it runs
LINES = 40  # the last lines of all ranks together


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
