"""Saving: a checkpoint leaves while training goes on.

What is to be saved changes in step() alone. So a thread writes it during the next forward and
backward, in the order in which step() updates it, and step() waits before each bucket until that
one's bytes have been handed to the system. Nothing is copied: memory does not grow.
"""

import shutil
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from zero_minimal.foundations import as_json, joining, pieces, precision, random_state

_groups = weakref.WeakKeyDictionary()  # of ranks that train → a group of the same, to save with
_under_way: list["Saving"] = []


class NotSaved(RuntimeError):
    """A checkpoint could not be written, on any rank. Those before it are as they were."""


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, future: Future, writer):
        self.future, self.writer = future, writer

    @property
    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self.future.done()

    def wait(self) -> Path:
        """Where it is, when it is whole and on the disk. All ranks must wait for it.

        Raises: NotSaved, on all ranks, if it could not be written on one of them.
        """
        from torch.distributed.checkpoint import CheckpointException

        if self in _under_way:
            _under_way.remove(self)
        try:
            return self.future.result().planner_data
        except CheckpointException as error:  # no Exception: `except Exception` would miss it
            rank, reason = first_of(error)
        if self.writer.own is not None:
            shutil.rmtree(self.writer.own, ignore_errors=True)  # the disk may be full
        raise NotSaved(f"the checkpoint of step {self.writer.facts['step']} was not written to "
                       f"{self.writer.folder}: rank {rank}: {reason}; those before it are still "
                       "there")


def first_of(error: BaseException) -> tuple[int, BaseException]:
    """A rank that failed, and why, of what DCP raises on all ranks."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return rank, reason


def start(zero, folder: Path, extra, step: int | None, keep: int, meanwhile: bool) -> Saving:
    """Begin to write a checkpoint; all ranks must call it. Unless `meanwhile`, it is done when this
    returns, or has failed. One that is still being written is waited for first."""
    from torch.distributed import checkpoint as dcp

    from zero_minimal.foundations.resharding import PieceSaver, Writer

    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint is kept")
    finish()
    holding = pieces.holding_of(zero)
    buckets = holding.stage.buckets
    if any(bucket.away is not None for bucket in buckets):
        meanwhile = False  # the bus is training's: it carries the state before that goes on
    for bucket in buckets:
        precision.keep_changes(bucket)
    facts = {"step": step, "extra": as_json.encoded(extra), **pieces.facts_of(holding)}
    own = {"data_rank": holding.data_rank,
           "random": as_json.encoded(random_state.random_state())}
    to_save = pieces.to_save(holding)
    for bucket in buckets:
        bucket.leaving = threading.Event()
    for bucket in set(buckets) - {piece.bucket for piece in to_save}:
        bucket.leaving.set()  # nothing but padding lies here
    writer = Writer(folder, facts, keep)
    asked = dict(storage_writer=writer, planner=PieceSaver(to_save, own),
                 process_group=group_to_save(holding.group))
    if meanwhile:
        future = dcp.async_save({}, **asked)
    else:
        future = Future()
        try:
            future.set_result(dcp.save({}, **asked))
        except BaseException as error:
            future.set_exception(error)
        for bucket in buckets:
            bucket.leaving = None
    future.add_done_callback(lambda _: [bucket.leaving and bucket.leaving.set()
                                        for bucket in buckets])  # if it failed, too
    _under_way.append(saving := Saving(future, writer))
    return saving


def write_alone(folder: Path, facts: dict, to_save: list[pieces.Piece], keep: int) -> Path:
    """A checkpoint of these pieces, written by one process without ranks. Returns its path."""
    from zero_minimal.foundations.resharding import PieceSaver, Writer

    saver, writer = PieceSaver(to_save, {}), Writer(folder, facts, keep)
    plans, contents = saver.create_global_plan([saver.create_local_plan()])
    plan = saver.finish_plan(*writer.prepare_global_plan(plans))
    writer.finish(contents, [writer.write_data(plan, saver).value()])
    return contents.planner_data


def finish() -> None:
    """Wait for what is being written. The end of the ranks does so, too."""
    while _under_way:
        _under_way[0].wait()


joining.before_the_end(finish)


def group_to_save(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The same ranks once more, on gloo: what the thread sends is not mixed with what training
    sends meanwhile. All of them must ask for it."""
    own = group or dist.group.WORLD
    if own not in _groups:
        ranks = dist.get_process_group_ranks(own)
        _groups[own] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _groups[own]
