"""Saving: a checkpoint is written while training goes on.

step() changes the state to save, and edits by hand do. So a thread writes it during the next
forward and backward, in the order in which step() updates it. Before each bucket step() waits until
the bucket's bytes are handed to the system; gather_parameters() waits for all of them. Nothing but
buffers is copied: memory hardly grows.
"""

import json
import threading
import warnings
import weakref
import zlib
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from zero_minimal.checkpoint import as_json, local_chunks, state_folder
from zero_minimal.checkpoint.sharded_state import check_moment, keep_edits
from zero_minimal.core import random_state
from zero_minimal.guards.collective_fingerprint import CHECKPOINT
from zero_minimal.guards.same_on_all_ranks import numbers_of_all_ranks
from zero_minimal.guards.training_moment import steps_taken
from zero_minimal.processes import joining

_groups = weakref.WeakKeyDictionary()  # group that trains → a group of the same ranks, which saves
_under_way: list["Saving"] = []


class NotSaved(RuntimeError):
    """A checkpoint was not written, since a rank failed. The ones before it are unchanged."""


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, future: Future, writer):
        self.future, self.writer = future, writer

    @property
    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self.future.done()

    def wait(self) -> Path:
        """Wait until all of it is on the disk; return its path. All ranks must call this.

        Raises: NotSaved, on all ranks, if it could not be written on one of them.
        """
        from torch.distributed.checkpoint import CheckpointException

        try:
            return self.future.result().planner_data
        except CheckpointException as error:  # no Exception: `except Exception` would miss it
            _give_up(self.writer)
            rank, reason = first_of(error)
        finally:
            if self.done and self in _under_way:  # Ctrl-C ends the wait, and not the writing
                _under_way.remove(self)
            if self.writer.warning:
                warnings.warn(self.writer.warning, stacklevel=3)
        step = self.writer.facts["step"]
        which = "the checkpoint" if step is None else f"the checkpoint of step {step}"
        raise NotSaved(f"{which} was not written to {self.writer.folder}: rank {rank}: {reason}; "
                       "what was there before still is")


def _give_up(writer) -> None:
    if writer.own is not None:  # on rank 0
        state_folder.give_up(writer.own)


def first_of(error: BaseException) -> tuple[int, BaseException]:
    """A rank that failed, and its error, from what DCP raises on all ranks. Ctrl-C and sys.exit(),
    which DCP catches, too, are raised here."""
    rank, (reason, _) = next(iter(error.failures.items()))
    if not isinstance(reason, Exception):
        raise reason from None
    return rank, reason


def start(zero, folder: Path, extra, step: int | None, keep: int, meanwhile: bool) -> Saving:
    """Begin to write a checkpoint; all ranks must call it. Unless `meanwhile`, it is written, or
    has failed, when this returns. This first waits for one that is still being written."""
    from zero_minimal.checkpoint.resharding import ChunkSaver, Writer

    _check_numbers(step, keep)
    holding = local_chunks.holding_of(zero)
    check_moment(holding.stage)
    encoded = as_json.encoded(extra)
    finish_earlier()
    _check_alike(encoded, holding)
    buckets = holding.stage.buckets
    if any(bucket.away is not None for bucket in buckets):
        meanwhile = False  # the bus must carry the state before training uses it again
    keep_edits(holding.stage)
    facts = {"step": step, "extra": encoded, **local_chunks.facts_of(holding)}
    own = {"data_rank": holding.data_rank,
           "random": as_json.encoded(random_state.random_state())}
    to_save = local_chunks.to_save(holding)
    writer = Writer(folder.absolute(), facts, keep)  # the current directory may change
    asked = dict(storage_writer=writer, planner=ChunkSaver(to_save, own),
                 process_group=group_to_save(holding.group))
    leaving = {local.bucket for local in to_save}  # of others only padding is here
    try:
        future = _begin(asked, [bucket for bucket in buckets if bucket in leaving], meanwhile)
    except BaseException:
        _give_up(writer)
        raise
    _under_way.append(saving := Saving(future, writer))
    return saving


def _begin(asked: dict, buckets: list, meanwhile: bool) -> Future:
    """Let DCP write, and let step() wait for each of the buckets until it is written. The result:
    the metadata, or the failures that DCP reports to all ranks."""
    from torch.distributed import checkpoint as dcp

    future, events = Future(), [threading.Event() for _ in buckets]
    for bucket, event in zip(buckets, events, strict=True):
        bucket.leaving = event

    def let_go(_=None):  # of this checkpoint alone: the next may have begun
        for event in events:
            event.set()

    try:
        if meanwhile:
            future = dcp.async_save({}, **asked)
        else:
            future.set_result(dcp.save({}, **asked))
    except dcp.CheckpointException as error:
        future.set_exception(error)
    except BaseException:  # it has not begun: step() must not wait for ever
        let_go()
        raise
    future.add_done_callback(let_go)
    return future


def _check_numbers(step: int | None, keep: int) -> None:
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ValueError(f"step is {step!r}: give a whole number from 0 up, or None to count on")
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep is {keep!r}: give a whole number; at least one checkpoint is kept")


def _check_alike(encoded_extra, holding: local_chunks.Holding) -> None:
    """Raises: ValueError, on all ranks, if `extra` is not the same on all of them."""
    own = zlib.crc32(json.dumps(encoded_extra, sort_keys=True).encode())
    every = meet(f"save after {steps_taken(holding.stage)} steps", holding.group, own)
    odd = [str(rank) for rank, one in enumerate(every) if one != every[0]]
    if odd:
        raise ValueError(f"extra is not the same on rank 0 and on rank {', '.join(odd)}, and a "
                         "checkpoint has one for all: give what is alike on all ranks (of "
                         "numbers their mean, collectives.all_reduce; averages.py says how "
                         "averages of weights are saved)")


def meet(to_do: str, group: dist.ProcessGroup | None, number: int = 0) -> list[int]:
    """Every rank's number, once all ranks have come to save or to load. This is a collective of
    training's, so a rank that is elsewhere is named at once."""
    every = numbers_of_all_ranks([number], group, of=CHECKPOINT + to_do)
    return [number for [number] in every]


def write_alone(
    folder: Path, facts: dict, to_save: list[local_chunks.LocalChunk], keep: int
) -> Path:
    """A checkpoint of these chunks, written by one process without ranks. Returns its path."""
    from zero_minimal.checkpoint.resharding import ChunkSaver, Writer

    saver, writer = ChunkSaver(to_save, {}), Writer(folder, facts, keep)
    plans, contents = saver.create_global_plan([saver.create_local_plan()])
    plan = saver.finish_plan(*writer.prepare_global_plan(plans))
    try:
        writer.finish(contents, [writer.write_data(plan, saver).value()])
    except BaseException:
        state_folder.give_up(writer.own)
        raise
    return contents.planner_data


def finish() -> None:
    """Wait for what is being written. Raises: NotSaved, as wait() does."""
    while _under_way:
        _under_way[0].wait()


def finish_earlier() -> None:
    """Like finish(), before a call that can go on after a failure: rank 0 warns of a checkpoint
    that was not written."""
    try:
        finish()
    except NotSaved as error:
        if dist.get_rank() == 0:
            warnings.warn(str(error), stacklevel=4)


joining.before_the_end(finish)


def group_to_save(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A second group of the same ranks, on gloo: so the thread's messages do not mix with
    training's. All of them must call this."""
    own = group or dist.group.WORLD
    if own not in _groups:
        ranks = dist.get_process_group_ranks(own)
        # torch names the new group after its ranks, and after how many groups this process is in:
        # let all ranks be in as many, or they wait for each other under different names
        names = dist.distributed_c10d._world.pg_names
        most = max(number for [number] in numbers_of_all_ranks([len(names)], own))
        while len(names) < most:
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        patience = own._get_backend(own._device_types[0]).options._timeout
        _groups[own] = dist.new_group(ranks, backend="gloo", timeout=patience,
                                      use_local_synchronization=True)
    return _groups[own]
