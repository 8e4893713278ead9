"""Resume: what --save, --every, --keep and --resume do, in every program that trains.

    torchrun --nproc-per-node 2 --max-restarts 5 zero_minimal/stage2.py --save runs/a --every 50 --resume auto

When a rank is killed torchrun starts all anew, and they go on from the newest checkpoint that is whole.
"""

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.foundations import interrupts, saved_state
from zero_minimal.foundations.precision import LossScaler
from zero_minimal.foundations.ranks import Rank
from zero_minimal.workload.data import Batches
from zero_minimal.workload.settings import Parser, Settings, positive


@dataclass(frozen=True)
class Flags:
    """What was asked for. save: the folder, None to save nothing. resume: "" to begin anew."""

    save: Path | None = None
    every: int = 100  # steps
    keep: int = 3
    resume: str = ""


NO_CHECKPOINTS = Flags()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the four flags."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint to this folder now and then")
    group.add_argument("--every", type=positive, metavar="K", help="steps from one to the next (default: 100)")
    group.add_argument("--keep", type=positive, metavar="COUNT", help="how many stay, the newest (default: 3)")
    group.add_argument("--resume", default="", metavar="DIR", help="go on from the newest checkpoint in this folder; "
                       "auto: in that of --save, and begin anew if there is none")


def read_flags(parser: Parser, arguments: argparse.Namespace) -> Flags:
    """Ends the program, saying what is accepted, for flags that make no sense."""
    for flag in ("every", "keep"):
        if arguments.save is None and getattr(arguments, flag) is not None:
            parser.error(f"--{flag} says how --save saves: give --save DIR, too")
    if arguments.resume == "auto" and arguments.save is None:
        parser.error("--resume auto looks in the folder of --save: give --save DIR, too; or --resume DIR")
    if arguments.save is not None and arguments.save.exists() and not arguments.save.is_dir():
        parser.error(f"--save {arguments.save} is no folder: name one, or a new one")
    given = {flag: getattr(arguments, flag) for flag in ("every", "keep") if getattr(arguments, flag) is not None}
    return Flags(save=arguments.save, resume=arguments.resume, **given)


class Checkpoints:
    """Those of one run.

        checkpoints = Checkpoints(flags, zero, batches, scaler, settings, rank)
        first = checkpoints.resume()
        for step, losses in enumerate(loop.steps(…, first=first), first):
            checkpoints.after(step)
        checkpoints.finish()
    """

    def __init__(
        self, flags: Flags, zero, batches: Batches, scaler: LossScaler | None, settings: Settings, rank: Rank
    ):
        self.flags, self.zero, self.batches, self.scaler, self.settings = flags, zero, batches, scaler, settings
        self.rank, self.saving = rank, None

    def resume(self) -> int:
        """Load what --resume asks for; the step to begin with, settings.steps or more if all are done. Ends the
        program, on all ranks, if there is nothing to go on from."""
        folder = self.flags.save if self.flags.resume == "auto" else self.flags.resume
        if not folder or self.flags.resume == "auto" and not saved_state.any_in(self.zero, folder):
            return 0
        try:
            extra = saved_state.load(self.zero, folder)
        except ValueError as error:
            interrupts.refuse(f"error: --resume {self.flags.resume}: {error}")
        if not isinstance(extra, dict) or "step" not in extra:
            interrupts.refuse(f"error: --resume {self.flags.resume}: this checkpoint was not written by --save")
        self.batches.skip(extra["batches"])
        if self.scaler and extra["scaler"]:
            self.scaler.load_state_dict(extra["scaler"])
        if self.rank.rank == 0:
            print(f"resumed after {extra['step']} steps, from {folder}", file=sys.stderr, flush=True)
        return extra["step"]

    def after(self, step: int) -> None:
        """A step is done; its number counts from 0. Every so many of them, begin to save."""
        done = step + 1
        if self.flags.save is None or done % self.flags.every:
            return
        self.finish()
        extra = {"step": done, "batches": self.batches.drawn, "settings": dataclasses.asdict(self.settings),
                 "scaler": self.scaler.state_dict() if self.scaler else None}
        self.saving = saved_state.async_save(self.zero, self.flags.save, extra, step=done, keep=self.flags.keep)

    def finish(self) -> None:
        """Wait for the last one. If the disk is full, say so, and go on: the next may find room."""
        saving, self.saving = self.saving, None
        try:
            if saving:
                saving.wait()
        except saved_state.NotSaved as error:
            if self.rank.rank == 0:
                print(f"warning: {error}", file=sys.stderr, flush=True)
