"""Recording: run a submission once more, small and watched, in the same sandbox as in grading; read what its ranks
wrote down.

What they wrote is data of limited size, checked for its form, and believed by nobody: no points depend on it.
"""

import importlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.classroom import messages
from zero_minimal.classroom.guard import guarded
from zero_minimal.classroom.report.recorder import FILE, MOST
from zero_minimal.classroom.submission import Submission
from zero_minimal.classroom.supervisor import Supervisor
from zero_minimal.processes.ranks import RankError

PATIENCE, LESS_PATIENCE = 15.0, 3.0  # seconds for a run; once one has used them up, for the others
MOST_EVENTS = 2000  # of a rank: ten times what a right run has
LONG = 300  # characters of a text


@dataclass(frozen=True)
class Recorded:
    """What ranks wrote down in one run, and how it ended: "" if all of them came to its end."""

    name: str
    ranks: list[list[dict]]  # [rank][event]
    ended: str


def record(supervisor: Supervisor, submission: Submission, kind: str, names: list[str],
           world_size: int) -> list[Recorded]:
    """One run for each name, of what KIND_in_ranks.py watches. Raises: RuntimeError if no ranks can be started."""
    runs, patience = [], PATIENCE
    for name in names:
        ended = ""
        try:
            supervisor.run(guarded(in_a_rank, submission), world_size, kind, name, submission, timeout=patience)
        except TimeoutError as error:
            ended, patience = messages.of_failure(error, submission.path), LESS_PATIENCE
        except RankError as error:
            ended = messages.of_failure(error, submission.path)
        except ChildProcessError as error:
            ended = str(error)
        folder = Path(supervisor.places["runs"], str(supervisor.number))
        ranks = [read(folder / str(rank) / FILE) for rank in range(world_size)]
        runs.append(Recorded(name, ranks, messages.brief(ended)))
    return runs


def in_a_rank(kind: str, name: str, submission: Submission) -> None:
    """What is run there. Only ranks have what these modules import."""
    importlib.import_module(f"zero_minimal.classroom.report.{kind}_in_ranks").watch(name, submission)


def read(path: Path) -> list[dict]:
    """The events of a rank, up to the first line that is none. The folder is the rank's: anything may be there."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        data = os.read(file, MOST) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    finally:
        os.close(file)
    events = []
    for line in data.split(b"\n")[:MOST_EVENTS]:
        try:
            event = _short(json.loads(line, parse_constant=lambda name: None))
        except (ValueError, RecursionError):
            break
        if not isinstance(event, dict) or not isinstance(event.get("what"), str):
            break
        events.append(event)
    return events


def _short(value):
    """The same, with texts cut short."""
    if isinstance(value, dict):
        return {str(key)[:LONG]: _short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return value[:LONG] if isinstance(value, str) else value
