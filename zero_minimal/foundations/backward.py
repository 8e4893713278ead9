"""Backward: when are a bucket's gradients complete, so that its reduction can overlap with the rest
of backward?

    autograd ── a gradient ──► Backward ── hooks ──► stage

Autograd tells when a parameter's gradient is there. Backward counts; with the last gradient of its
parameters a bucket is complete, and is handed to the stage. Two things make this less simple than
it sounds:

- All ranks must start the same collectives in the same order, and a parameter may get no gradient
  on one rank alone. So
  buckets are handed over strictly in one order, and when backward ends the incomplete too: what is
  missing is zero.
- A parameter that never gets a gradient would hold up all buckets behind its own. So after the
  first backward pass buckets are handed over in the order in which rank 0 saw them complete, the
  incomplete ones last.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from zero_minimal.foundations import ownership


class Hooks:
    """What a stage hears of a backward pass. It overrides what it needs; these do nothing."""

    def backward_begins(self) -> None:
        """Before the first gradient."""

    def gradient_arrived(self, param, flat) -> None:
        """param.grad is there, with those of earlier micro-batches in it if they were kept. `flat`
        holds param."""

    def bucket_complete(self, bucket, done: list) -> None:
        """All gradients of bucket.params have arrived. One that is None did not come on this rank:
        it counts as zero. `done` are the parameters whose gradients no later bucket needs, since it
        holds no piece of them. Every bucket comes once a pass, in the same order on every rank;
        none comes under `accumulate()`."""

    def backward_ends(self) -> None:
        """Every bucket was handed over. Also called by step() on a rank where no backward ran."""


class Backward:
    """Watches the backward passes of stage.model for the buckets of stage.buckets, and calls the
    stage's Hooks.

    by_turns: a bucket is handed over not with its last gradient but when somebody else says so
        (units.Turns).
    """

    def __init__(self, stage: Hooks, by_turns: bool = False):
        self.stage, self.buckets, self.by_turns = stage, list(stage.buckets), by_turns
        self.reduced = False  # every bucket was handed over since zero_grad()
        self.running = False
        self.spent = False  # step() has used the gradients, zero_grad() has not come yet
        self._accumulating = False
        self._ordered = by_turns
        self._task = None
        self._buckets_of: dict = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self._buckets_of.setdefault(param, []).append(bucket)
        self._reset()
        stage.model.register_forward_hook(self._watch_output)
        # Python cannot see through these hooks: a strong one would keep the model for ever
        weak = weakref.ref(self)
        for param in self._buckets_of:
            param.register_post_accumulate_grad_hook(lambda param: weak() and weak()._gradient(param))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside hand over nothing: gradients add up."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def finish(self) -> None:
        """Hand over what is left, in order: when backward ends, or in `step()` if none ran on this
        rank."""
        ownership.check_owner(self.stage.model)
        for bucket in list(self._waits_for):
            self.hand_over(bucket)
        self.reduced, self.running = True, False
        if not self._ordered:
            self._agree_on_order()
        self._reset()
        self.stage.backward_ends()

    def forget(self) -> None:
        """zero_grad(), perhaps after a backward pass that failed half-way: start afresh."""
        self.reduced = self.running = self.spent = False
        self._reset()

    def _reset(self) -> None:
        # the gradients that have not come
        self._waits_for = {bucket: set(bucket.params) for bucket in self.buckets}
        self._completed: list = []

    # a gradient's way: autograd calls _gradient, which counts, and hands over what is complete

    def _gradient(self, param) -> None:
        self._begin()  # in case the model's output was not used, only a part of the model
        buckets = self._buckets_of[param]
        ownership.check_place(param, buckets[0].parameters)
        self.stage.gradient_arrived(param, buckets[0].flat)
        if not self._accumulating:
            for bucket in buckets:
                self._count(bucket, param)
            self._hand_over_complete()

    def _count(self, bucket, param) -> None:
        if param not in self._waits_for.get(bucket, ()):
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward pass, the first is "
                "on its way: torch.utils.checkpoint around a module used several times needs use_reentrant=False, "
                "and activation_partitioning.checkpoint cannot be around it"
            )
        self._waits_for[bucket].discard(param)
        if not self._waits_for[bucket]:
            self._completed.append(bucket)

    def _hand_over_complete(self) -> None:
        """Those at the head of the order: one that is complete may have waited behind one that was
        not."""
        while not self.by_turns and self._waits_for and not self._waits_for[first := next(iter(self._waits_for))]:
            self.hand_over(first)

    def hand_over(self, bucket) -> None:
        """The bucket is the stage's now. A second call in the same pass does nothing."""
        if bucket in self._waits_for:
            del self._waits_for[bucket]
            done = [param for param in bucket.params if not self._waits_for.keys() & self._buckets_of[param]]
            self.stage.bucket_complete(bucket, done)

    # where a pass begins and ends

    def _watch_output(self, module, inputs, output) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda *_: self._begin_at_output())

    def _begin_at_output(self) -> None:
        if self.running and self._task != torch._C._current_graph_task_id():
            raise RuntimeError(
                "a backward pass begins while another one has not ended. If that one failed, call zero.zero_grad() "
                "first; if torch.utils.checkpoint is around the whole model, it needs use_reentrant=False"
            )
        self._begin()

    def _begin(self) -> None:
        if self.running:
            return
        if self.spent:
            raise RuntimeError("call zero.zero_grad() after zero.step(): model.zero_grad() does not reach the shards")
        self.running, self._task = True, torch._C._current_graph_task_id()
        self.stage.backward_begins()
        self.reduced = False
        # Runs when this pass ends. Queued here, not at the first gradient: that may come from a
        # pass within this one (a checkpoint that recomputes), whose end would be too early.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        if not self._accumulating:
            self.finish()

    def _agree_on_order(self) -> None:
        self._ordered = True
        seen = self._completed + [bucket for bucket in self.buckets if bucket not in self._completed]
        order = ownership.numbers_of_all_ranks([self.buckets.index(bucket) for bucket in seen], self.stage.group)[0]
        self.buckets = [self.buckets[index] for index in order]


def tensors_in(value, seen: set | None = None) -> Iterator[torch.Tensor]:
    """The tensors in a module's output: alone, or in tuples, lists, dicts, dataclasses and other
    plain objects."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, (nn.Module, type)):
        seen.add(id(value))
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, (tuple, list)):
            inner = list(value)
        elif dataclasses.is_dataclass(value):
            inner = [getattr(value, entry.name) for entry in dataclasses.fields(value)]
        else:
            inner = list(getattr(value, "__dict__", {}).values())
        for item in inner:
            yield from tensors_in(item, seen)
