"""Resume: implements --save, --every, --keep and --resume in every program that trains.

    torchrun --nproc-per-node 2 --max-restarts 5 zero_minimal/stage2.py --save runs/a --every 50 --resume auto

When a rank is killed, torchrun restarts all ranks, and they continue from the newest complete checkpoint. The state
after the last step is written, too.
"""

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_minimal.checkpoint import saved_state, state_folder
from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.processes import interrupts
from zero_minimal.processes.ranks import Rank
from zero_minimal.programs import trained
from zero_minimal.workload.data import Batches
from zero_minimal.workload.settings import Parser, Settings, positive


@dataclass(frozen=True)
class Flags:
    """The values of these flags. save: the folder, None to save nothing. resume: "" to start a new run."""

    save: Path | None = None
    every: int = 100  # steps
    keep: int = 3
    resume: str = ""


NO_CHECKPOINTS = Flags()
KEPT = {"step", "batches", "scaler"}  # entries of a checkpoint's `extra` that --resume needs
WITHOUT_EFFECT = {"bucket_mb", "recompute"}  # settings that do not change the losses


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser the four flags."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", type=lambda word: Path(_some(word)), metavar="DIR",
                       help="regularly write a checkpoint to this folder")
    group.add_argument("--every", type=positive, metavar="K", help="steps between checkpoints (default: 100)")
    group.add_argument("--keep", type=positive, metavar="COUNT", help="how many of the newest to keep (default: 3)")
    group.add_argument("--resume", type=_some, metavar="DIR", help="resume the newest checkpoint in this folder; "
                       "auto: in that of --save, or start a new run if it has none")


def _some(word: str) -> str:
    if not word:
        raise argparse.ArgumentTypeError("it names nothing: give a folder, or leave the flag out")
    return word


def read_flags(parser: Parser, arguments: argparse.Namespace) -> Flags:
    """Read the flags. If they contradict each other, ends the program and says what is accepted."""
    for flag in ("every", "keep"):
        if arguments.save is None and getattr(arguments, flag) is not None:
            parser.error(f"--{flag} says how --save saves: give --save DIR, too")
    if arguments.resume == "auto" and arguments.save is None:
        parser.error("--resume auto looks in the folder of --save: give --save DIR, too; or --resume DIR")
    if arguments.save is not None:
        _check_folder(parser, arguments.save, is_new=not _goes_on_in(arguments.save, arguments.resume))
    given = {flag: getattr(arguments, flag) for flag in ("every", "keep") if getattr(arguments, flag) is not None}
    return Flags(save=arguments.save, resume=arguments.resume or "", **given)


def _goes_on_in(folder: Path, resume: str | None) -> bool:
    """Whether --resume names a checkpoint of this folder, or the newest of them."""
    return resume == "auto" or resume is not None and folder.resolve() in (Path(resume).resolve(),
                                                                           Path(resume).resolve().parent)


def _check_folder(parser: Parser, folder: Path, is_new: bool) -> None:
    """Refuse a folder of another run: a new run would delete its checkpoints, the oldest first."""
    try:
        there = state_folder.finished(folder)
    except saved_state.Damaged as error:
        parser.error(f"--save: {error}")
    if folder.exists() and not folder.is_dir():
        parser.error(f"--save {folder} is no folder: name one, or a new one")
    if there == [folder]:
        parser.error(f"--save {folder} is itself a checkpoint: name the folder that it is in")
    if there and is_new:
        parser.error(f"--save {folder} has checkpoints already: give --resume auto, too, to go on from the newest; "
                     "or name a new folder")


def end(report: dict | None) -> None:
    """After a run, on all ranks: end the program with an exit code if the last state was not saved. A script that
    continues with the folder would use an older one."""
    if lost := (report or {}).get("not_saved"):
        interrupts.refuse(f"error: {lost}")


class Checkpoints:
    """The checkpoints of one run.

        checkpoints = Checkpoints(flags, zero, batches, scaler, settings, rank)
        first = checkpoints.resume()
        for step, losses in enumerate(loop.steps(…, first=first), first):
            checkpoints.after(step)
        report = {…} | checkpoints.finish()
    and, at the end of the program, end(report).
    """

    def __init__(
        self, flags: Flags, zero, batches: Batches, scaler: LossScaler | None, settings: Settings, rank: Rank
    ):
        self.flags, self.zero, self.batches, self.scaler, self.settings = flags, zero, batches, scaler, settings
        self.rank, self.saving = rank, None

    def resume(self) -> int:
        """Load the checkpoint of --resume; return the step to begin with, settings.steps or more if all are done. Ends
        the program, on all ranks, if there is no such checkpoint."""
        folder = self.flags.save if self.flags.resume == "auto" else self.flags.resume
        if not folder:
            return 0
        if self.flags.resume == "auto" and not saved_state.any_in(self.zero, folder):
            self._say(f"there is no checkpoint in {folder} yet: this run begins anew")
            return 0
        try:
            with warnings.catch_warnings(record=True) as passed_over:
                warnings.simplefilter("always")
                extra = saved_state.load(self.zero, folder)
        except ValueError as error:
            self._refuse(str(error))
        if not isinstance(extra, dict) or not extra.keys() >= KEPT:
            self._refuse("this checkpoint was not written by --save")
        self._compare(extra.get("settings", {}), extra.get("model"), extra.get("world_size", self.rank.world_size))
        options = self.settings.optimizer_options()
        del options["lr"]  # which the schedule sets, as these settings say
        for group in self.zero.optimizer.param_groups:
            group.update(options)
        self.batches.skip(extra["batches"])
        if self.scaler and extra["scaler"]:
            self.scaler.load_state_dict(extra["scaler"])
        lost = [f"; not from a newer checkpoint, and the steps since are lost: {one.message}" for one in passed_over]
        self._say(f"resumed after {extra['step']} steps, from {folder}{''.join(lost)}")
        return extra["step"]

    def _compare(self, before: dict, model: dict | None, ranks: int) -> None:
        """End the program if settings make another model of the same shapes; name the other settings that differ."""
        now = dataclasses.asdict(self.settings)
        if other := trained.differ(model, self.settings):
            self._refuse(f"this checkpoint is of another model: {other}")
        if not self.settings.model and (heads := before.get("heads", self.settings.heads)) != self.settings.heads:
            self._refuse(f"this checkpoint is of a model with {heads} heads: give --heads {heads}")
        differ = [f"{name} was {before[name]!r} and is {now[name]!r}" for name in before
                  if name in now and name not in WITHOUT_EFFECT and before[name] != now[name]]
        if differ:
            self._say("other settings than before: " + "; ".join(differ))
        if ranks != self.rank.world_size:
            each = self.settings.batch * self.settings.accumulate
            self._say(f"another number of ranks than before: {ranks}, and now {self.rank.world_size}. A step now "
                      f"learns from {each * self.rank.world_size} sequences, and not {each * ranks}: set --batch or "
                      "--accumulate for what you want")

    def _refuse(self, why: str) -> None:
        interrupts.refuse(f"error: --resume {self.flags.resume}: {why}")

    def after(self, step: int) -> None:
        """Call after each step, numbered from 0. Begins to save after every `every` steps, and after the last."""
        done = step + 1
        if self.flags.save is None or done % self.flags.every and done != self.settings.steps:
            return
        self.finish()
        extra = {"step": done, "batches": self.batches.drawn, "settings": dataclasses.asdict(self.settings),
                 "world_size": self.rank.world_size, "scaler": self.scaler.state_dict() if self.scaler else None,
                 **trained.configuration(self.settings)}
        with self._warned():
            self.saving = saved_state.async_save(self.zero, self.flags.save, extra, step=done, keep=self.flags.keep)

    def finish(self) -> dict:
        """Wait for the last checkpoint. If writing fails, as on a full disk, warn and go on: the next may fit. Returns
        entries of a report: {"not_saved": why} if it could not be written, else {}."""
        saving, self.saving = self.saving, None
        try:
            if saving:
                with self._warned():
                    saving.wait()
        except saved_state.NotSaved as error:
            self._say(f"warning: {error}")
            return {"not_saved": str(error)}
        return {}

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """A context whose warnings are printed like this program's own messages."""
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            yield
        for one in given:
            self._say(f"warning: {one.message}")

    def _say(self, line: str) -> None:
        if self.rank.rank == 0:
            interrupts.take_back()
            print(line, file=sys.stderr, flush=True)
