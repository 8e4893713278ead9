"""Failing together: when one rank fails, all end, and learn which one failed first and why.

A rank that fails leaves the others in collectives that can never end. Some of them notice at once
that a peer is gone, but that is a consequence, not the reason. So a rank that only lost a peer
keeps quiet, and the first other failure counts.

    under torchrun       each rank ends itself: the reason travels through the store (end_together)
    under `ranks.run`    each rank sends its Failure, and the process that asked for them raises it
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import cloudpickle
import torch.distributed as dist

from zero_minimal.guards import watchdog
from zero_minimal.processes import interrupts

GRACE = 2.0  # seconds in which the other ranks may still tell their side of a failure


class RankError(RuntimeError):
    """A rank failed. `.rank` says which one was first; `__cause__` is its own exception, if it
    could be sent."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away or never came."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "connection refused",
             "timed out", "timeout")
    return (isinstance(error, RuntimeError) and any(sign in text for sign in signs)
            and "dataloader" not in text)  # its workers are no peers


def end_together(notes: dist.Store, rank: int, error: BaseException) -> NoReturn:
    """Say which rank failed first, then exit with code 1; or 130, if it was stopped by Ctrl-C.

    A rank that only lost its peer waits a moment for the peer's message.
    Args: notes is a store that all ranks share, used only for this.
    """
    words = f"rank {rank} failed: {type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        words = f"rank {rank} was stopped by Ctrl-C"
    if not lost_a_peer(error):
        _within(GRACE, lambda: notes.add("count", 1) == 1 and notes.set("first", words))
        if isinstance(error, KeyboardInterrupt):
            interrupts.stop(traceback.extract_tb(error.__traceback__))
        traceback.print_exc()
        print(f"\n{words}", file=sys.stderr, flush=True)
    else:
        interrupts.end_if_torchrun_is_gone()
        leave_word(notes, rank, f"waited in {_waited_in(error)}")
        first = _within(GRACE, lambda: _first_failure(notes))
        if not first:
            traceback.print_exc()
            reason, where = str(error).strip().splitlines()[0], _who_stands_where(notes) or ""
            first = ("no rank has said why: one is gone, never came, or waits elsewhere "
                     f"({reason}){where}")
        print(f"rank {rank} stops: {first}", file=sys.stderr, flush=True)
    _exit()


def _first_failure(notes: dist.Store) -> str:
    """The words of the rank that failed first, as soon as they are there. notes.get() would wait
    for them, too, but meanwhile the store would answer nothing else."""
    while not notes.check(["first"]):
        time.sleep(0.05)
    return notes.get("first").decode()


def leave_word(notes: dist.Store, rank: int, words: str) -> None:
    """Leave words for ranks that lose this one, or that wait for it while it waits for them."""
    _within(GRACE, lambda: notes.set(f"word of {rank}", f"rank {rank} {words}"))


def _waited_in(error: BaseException) -> str:
    """The collective in which this rank waited, and the last line of the user's code."""
    line = watchdog.users_line(traceback.extract_tb(error.__traceback__))
    notes = getattr(error, "__notes__", ())[:1]
    return ", at ".join(filter(None, [*notes, line])) or "a collective"


def _who_stands_where(notes: dist.Store) -> str | None:
    def ask():
        words = []
        for other in range(int(os.environ.get("WORLD_SIZE", 1))):
            key = f"word of {other}"
            words.append(notes.get(key).decode() if notes.check([key]) else
                         f"rank {other} left no word (os._exit(), a crash, a kill, or it hangs)")
        return ". " + "; ".join(words)

    return _within(GRACE, ask)


def end_alone(words: str, error: BaseException) -> NoReturn:
    """Print what this rank could not do, with no other rank there to tell; exit with code 1."""
    reason = str(error).strip().partition("\n")[0]
    print(f"rank {os.environ.get('RANK', 0)} stops: {words} ({reason})", file=sys.stderr)
    _exit()


def _exit() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: a collective that waits for a lost rank would hold the interpreter's shutdown
    os._exit(1)


def _within(seconds: float, ask: Callable[[], object]):
    """What ask() returns from the store; None if it fails, or takes longer. The store may be gone,
    and over a dead link a call does not even notice that: it would wait for ever."""
    found = []

    def run():
        with contextlib.suppress(Exception):
            found.append(ask())

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    return found[0] if found else None


@dataclass(frozen=True)
class Failure:
    """How a rank failed, in a form that can be sent."""

    seconds: float  # the time at which it failed
    lost_a_peer: bool  # then it is a consequence of another failure
    words: str  # the traceback
    pickled: bytes | None = None  # the exception, if it can be pickled

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Of an exception that is being handled."""
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        return cls(time.time(), lost_a_peer(error), traceback.format_exc(), pickled)

    @classmethod
    def of_death(cls, exitcode: int | None) -> "Failure":
        """Of a process that ended without a word."""
        if exitcode is not None and exitcode < 0:
            words = f"it was killed by {signal.Signals(-exitcode).name}"
        else:
            words = f"it ended with exit code {exitcode} before its function returned"
        return cls(time.time(), False, words)


def raise_first(failures: dict[int, Failure], world_size: int) -> NoReturn:
    """Raise the RankError of the rank that failed first. failures: {rank: its failure}."""
    # a rank that only lost its peer is a consequence, however early it noticed
    rank = min(failures, key=lambda rank: (failures[rank].lost_a_peer, failures[rank].seconds))
    first, others = failures[rank], sorted(set(failures) - {rank})
    after = f"\n(after it, rank {', '.join(map(str, others))} failed too)" if others else ""
    message = f"rank {rank} of {world_size} failed:\n{first.words.rstrip()}{after}"
    raise RankError(rank, message) from (pickle.loads(first.pickled) if first.pickled else None)
