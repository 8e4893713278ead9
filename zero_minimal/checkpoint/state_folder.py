"""A folder of checkpoints: which are complete, and which is the newest.

    DIR/step-00000040/          a checkpoint
        contents.json           what there is: names, shapes, where each chunk is; checksums
        rank-0.bin              the bytes of the chunks that rank 0 had, one after the other
        rank-1.bin
    DIR/step-00000030.1/        a newer one, though of an earlier step: a run went back
    DIR/.writing-…              one that is not finished, or never will be

A checkpoint is written under a name of the last kind, and renamed when every byte is on the disk. A
rename is atomic: so a reader finds all of a checkpoint or none of it, whenever the ranks were
killed. Older ones are deleted only after that.

The newest is the one that was written last, whatever its step. Its name shows that: to save a step
that is not above the newest one's raises the number after the point by one. A higher number is
newer; among equal numbers a higher step is.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

FORMAT, VERSION = "zero_minimal training state", 2
CONTENTS, WRITING, LEAVING = "contents.json", ".writing-", ".deleting-"
BLOCK = 2**19  # bytes read or written at once
NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")

_passed_over: set[Path] = set()  # damaged ones: `keep` does not count them
_writing: dict[Path, int] = {}  # folder that this process writes: its lock


class Damaged(ValueError):
    """A checkpoint that cannot be trusted; the message names the file."""


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint, as contents.json has it."""

    folder: Path
    facts: dict  # what local_chunks.facts_of() says, and what the program keeps
    tensors: dict  # name: {"shape", "dtype", "chunks": [[offsets, sizes, file, byte], …]}
    files: dict  # name: [[how many bytes, their crc32], …], one stretch after the other
    crc32: int = 0  # of all this, in the file

    @property
    def step(self) -> int:
        return self.facts["step"]

    @functools.cached_property
    def kinds(self) -> list[str]:
        """What the optimizer kept for each element: "optimizer/exp_avg", …"""
        found = (name.split("/", 2) for name in self.tensors if name.startswith("optimizer/"))
        return list(dict.fromkeys(f"optimizer/{kind}" for _, kind, _ in found))


# ------------------------------------------------------------------------------------------ reading


def finished(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first; the folder itself if it is one. Raises:
    Damaged if it cannot be read."""
    try:
        if (folder / CONTENTS).is_file():
            return [folder]
        found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Damaged(f"{folder} cannot be looked into ({error.strerror})") from None
    return sorted(found, key=_order, reverse=True)


def _order(path: Path) -> tuple[int, int]:
    """A key that grows with each checkpoint: how often the run went back; then the step."""
    step, number = NAME.fullmatch(path.name).groups()
    return int(number or 0), int(step)


def next_step(folder: Path) -> int:
    """One more than the newest checkpoint's. A folder that is one itself is left to begin()."""
    newest = [path for path in finished(folder)[:1] if path != folder]
    return _order(newest[0])[1] + 1 if newest else 0


def pass_over(damaged: Path) -> None:
    """Remember a damaged checkpoint: it is not counted among those to keep."""
    _passed_over.add(damaged)


def read_contents(folder: Path) -> Contents:
    """Raises: Damaged if contents.json is missing, damaged, foreign, or of a newer format."""
    file = folder / CONTENTS
    try:
        text = file.read_bytes()
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror}): this is no checkpoint, or a part "
                      "of one") from None
    head, _, rest = text.partition(b"\n")
    try:
        header = json.loads(head + b"0}")
        is_ours = header["format"] == FORMAT
        version, checksum = int(header["version"]), int(header["crc32"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        is_ours = False
    if not is_ours:
        raise Damaged(f"{file} is not a checkpoint's, or its beginning is damaged: it should begin "
                      f'with "format": "{FORMAT}"')
    if version > VERSION:
        raise Damaged(f"{file} is of format {version}, and this program reads up to {VERSION}: it "
                      "was written by a newer version of zero_minimal; update this one")
    if head != _head(checksum, version) or zlib.crc32(rest) != checksum:
        raise Damaged(f"{file} is damaged: its checksum is {zlib.crc32(rest)}, and should be "
                      f"{checksum}")
    return Contents(folder, **json.loads(rest[:-1]), crc32=checksum)


def check_file(contents: Contents, name: str) -> None:
    """Read a file once, block by block. Raises: Damaged if it is not as it was written."""
    file, checksums = contents.folder / name, contents.files[name]
    wanted = sum(length for length, _ in checksums)
    try:
        size = file.stat().st_size
        if size != wanted:
            words = "truncated" if size < wanted else "too long"
            raise Damaged(f"{file} is {words}: it has {size:,} bytes, and should have {wanted:,}")
        with open(file, "rb") as stream:
            for length, crc32 in checksums:
                if _checksum(stream, length) != crc32:
                    raise Damaged(f"{file} is damaged: a checksum differs, of {length:,} bytes up "
                                  f"to byte {stream.tell():,}")
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror})") from None


def _checksum(stream, left: int) -> int:
    checksum = 0
    while left > 0 and (block := stream.read(min(left, BLOCK))):
        checksum, left = zlib.crc32(block, checksum), left - len(block)
    return checksum


# ------------------------------------------------------------------------------------------ writing


def begin(folder: Path, step: int) -> tuple[Path, str]:
    """A new folder inside `folder` to write to, until publish() or give_up(), and a warning or "".
    This deletes what ended processes left unfinished; what another process writes stays. Raises:
    ValueError if `folder` is itself a checkpoint."""
    if (folder / CONTENTS).is_file():
        raise ValueError(f"{folder} is itself a checkpoint: save to the folder that it is in")
    folder.mkdir(parents=True, exist_ok=True)
    warning = ""
    for path in folder.iterdir():
        if path.name.startswith((WRITING, LEAVING)):
            if (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
            elif path.exists():
                warning = (f"another run saves to {folder}, too, and only the newest are kept, "
                           "whosever they are: give each run a folder of its own")
    own = folder / f"{WRITING}{step:08}-{os.getpid()}"
    own.mkdir()
    if (lock := _locked(own)) is not None:
        _writing[own] = lock
    return own, warning


def give_up(written: Path) -> None:
    """Delete what cannot be finished: the disk may be full."""
    shutil.rmtree(written, ignore_errors=True)
    _unlock(written)


def _locked(path: Path) -> int | None:
    """A lock on a folder, until it is closed or this process ends; None if another has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # gone
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # some file systems have no locks: begin() deletes what is there
        pass
    return descriptor


def _unlock(written: Path) -> None:
    if (lock := _writing.pop(written, None)) is not None:
        os.close(lock)


def write_contents(contents: Contents) -> None:
    """contents.json: JSON that begins with one line about the rest of the file."""
    # a line for each tensor, so that people can read it, too
    lines = [f"{json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in
             contents.tensors.items()]
    rest = (f'{{"facts": {json.dumps(contents.facts)},\n"files": {json.dumps(contents.files)},\n'
            '"tensors": {\n' + ",\n".join(lines) + "\n}}}").encode()
    with open(contents.folder / CONTENTS, "wb") as stream:
        stream.write(_head(zlib.crc32(rest), VERSION) + b"\n" + rest)
        sync(stream)


def _head(crc32: int, version: int) -> bytes:
    """The first line."""
    words = json.dumps({"format": FORMAT, "version": version, "crc32": crc32})
    return f'{words[:-1]}, "contents":'.encode()


def publish(written: Path, step: int, keep: int) -> Path:
    """Give a checkpoint the newest name, once all its files are on the disk, and delete all but the
    `keep` newest."""
    folder = written.parent
    _sync_folder(written)
    number, newest = max(map(_order, finished(folder)), default=(0, -1))
    number += step <= newest
    final = folder / (f"step-{step:08}" + (f".{number}" if number else ""))
    os.rename(written, final)  # overwrites nothing: the name is new
    _unlock(written)
    _sync_folder(folder)
    _passed_over.discard(final)
    for old in [path for path in finished(folder) if path not in _passed_over][keep:]:
        leaving = folder / f"{LEAVING}{old.name}"
        with contextlib.suppress(OSError):
            os.rename(old, leaving)  # first, so that no half of one has a checkpoint's name
            shutil.rmtree(leaving, ignore_errors=True)
    return final


def sync(stream) -> None:
    """Wait until a file's bytes are on the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    """The same for the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(descriptor)
