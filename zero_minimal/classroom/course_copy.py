"""Course copy: the copy of the course that a submission's ranks use. It has all that they need, but no answer.

    house/    zero_minimal without modules that solve the lesson; the test files that run in ranks: toys.py, checks.py
    work/     the Python files in the submission's folder, which it may import
    runs/     where ranks may write: a folder for each rank
"""

import os
import shutil
import site
import sys
from pathlib import Path

from zero_minimal.classroom import sandbox
from zero_minimal.classroom.lessons import HOUSE, PACKAGE, Lesson

IN_RANKS = ("toys.py", "checks.py")  # tests/*.py that run in them
SYSTEM = ("/usr", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", "/opt/lib", "/nix/store", "/run/current-system")
LARGE, MANY = 2**20, 100  # the most bytes of a helper file, and the most of these files


def stage(lesson: Lesson, submission: Path, folder: Path) -> dict:
    """Fill the folder; return the paths that a rank reads and writes: house, work, runs, readable, python."""
    house, work, runs = folder / "house", folder / "work", folder / "runs"
    solved = {os.path.join(HOUSE, *name.split(".")) + ".py" for name in lesson.forbidden}
    shutil.copytree(PACKAGE, house / PACKAGE.name, ignore=lambda where, names: [
        name for name in names if name == "__pycache__" or os.path.join(where, name) in solved])
    for name in IN_RANKS:
        shutil.copy(lesson.tests.parents[1] / name, house / name)
    work.mkdir()
    runs.mkdir()
    bring_helpers(submission, work)
    folder.chmod(0o755)  # mkdtemp's folders are closed to other users, and ranks may run as nobody
    places = sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages()
    python = sorted({os.path.realpath(path) for path in places if os.path.exists(path)})
    installed = [os.path.join(path, PACKAGE.name) for path in sys.path]
    answers = [os.path.realpath(path) for path in (HOUSE, *installed) if os.path.isdir(path)]  # they hold the reference
    readable = [part for path in (*SYSTEM, *python) if os.path.exists(path) for part in sandbox.without(path, answers)]
    return {"house": str(house), "work": str(work), "runs": str(runs), "python": python,
            "readable": [*readable, str(house), str(work)]}


def bring_helpers(submission: Path, work: Path) -> None:
    """Replace the files in `work` by the current ones in the submission's folder."""
    for file in work.iterdir():
        file.unlink()
    for file in helpers(submission):
        shutil.copy(file, work / file.name)


def helpers(submission: Path) -> list[Path]:
    """Python files in the submission's folder, without the submission."""
    files = sorted(file for file in submission.parent.glob("*.py") if file.is_file() and not file.is_symlink()
                   and file.stat().st_size <= LARGE and file.name != submission.name)
    return files[:MANY]
