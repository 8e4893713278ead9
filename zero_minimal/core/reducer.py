"""Reducer (DDP's name): tells a stage when a bucket's gradients are complete, so that their
reduction overlaps with the rest of the backward pass.

    autograd ── a gradient ──► Reducer ─── hooks ──► stage

Autograd calls a hook when a parameter's gradient is there. The reducer counts these calls; with
the last gradient of its parameters a bucket is complete, and is handed over to the stage. Two
things make this less simple than it sounds:

- All ranks must start the same collectives in the same order, but a parameter may get a gradient on
  one rank and none on another. So buckets are handed over in one fixed order, and at the end of the
  pass the incomplete ones too: a gradient that is missing counts as zero.
- A parameter that never gets a gradient would hold up all buckets behind its own until the end. So
  after the first pass that hands over, all ranks take the order in which rank 0's buckets became
  complete, with incomplete ones last.

A pass under `accumulate()` hands over nothing. "The pass" below is any other one.

A pass begins at the model's output, and ends when autograd calls _end:

    model's output ── begin ──► first gradient … last gradient ── _end
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero_minimal.core import collectives
from zero_minimal.core.layout import Bucket, Flat
from zero_minimal.core.seams import tell
from zero_minimal.core.weak_hooks import WeakHook


class Hooks:
    """What a stage is told during a backward pass. It overrides what it needs; these do nothing."""

    def backward_begins(self) -> None:
        """Before the first gradient of any pass. Reducer.reduced is still that of the previous
        pass: it is reset after this."""

    def gradient_arrived(self, param: nn.Parameter, flat: Flat) -> None:
        """param.grad is there, added to that of earlier micro-batches if they left one. param lies
        in `flat`."""

    def bucket_complete(self, bucket: Bucket, done: list[nn.Parameter]) -> None:
        """All gradients of bucket.params that this pass makes have arrived. Where .grad is None
        there was none on this rank: it counts as zero.

        A parameter may lie in several buckets. `done` are those of this bucket that no later
        bucket needs: their .grad is not needed any more.

        Called once for every bucket, in the same order on every rank: in a pass that is not under
        `accumulate()`, or in finish(), which step() calls on a rank that ran no backward.
        """

    def backward_ends(self) -> None:
        """Every bucket was handed over. On a rank that ran no backward, step(), clip_grad_norm_()
        and LossScaler.step() call finish(), which calls this."""


class Reducer:
    """Counts the gradients of each of stage.buckets as they come, and calls the stage's Hooks.

    by_turns: execution_order.py hands over the buckets, and not the last gradient (stage 3).
    """

    def __init__(self, stage: Hooks, by_turns: bool = False):
        # weakly, since the stage holds this object: so both go as soon as the user drops the stage
        self.stage = weakref.proxy(stage)
        # stage.buckets stays in the planned order, self.buckets comes into the agreed one
        self.buckets, self.by_turns = list(stage.buckets), by_turns
        self._ordered = by_turns  # self.buckets is in its final order
        self.buckets_of: dict[nn.Parameter, list[Bucket]] = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self.buckets_of.setdefault(param, []).append(bucket)
        self.reduced = False  # every bucket was handed over since the last pass began
        self.running = False  # a backward pass is under way
        self.accumulating = False  # passes hand over nothing
        self.needs_zero_grad = False  # since step() has used the gradients
        self._reset()
        stage.model.register_forward_hook(WeakHook(Reducer.watch_output, self))
        for param in self.buckets_of:  # before autograd adds anything to .grad
            param.register_hook(WeakHook(lambda reducer, _: reducer.begin(), self))
        self._listen()
        tell("followed", self)

    def _reset(self) -> None:
        # of each bucket not yet handed over, in order: its parameters that have no gradient yet
        self.waits_for = {bucket: set(bucket.params) for bucket in self.buckets}
        self._completed: list[Bucket] = []  # in the order in which they became complete

    # where a pass begins and ends

    def watch_output(self, module, inputs, output) -> None:
        in_func = torch._C._functorch.peek_interpreter_stack() is not None  # its passes are its own
        for tensor in filter(torch.is_tensor, tree_leaves(output)):
            if tensor.grad_fn is not None and not in_func:
                tensor.grad_fn.register_prehook(WeakHook(lambda reducer, *_: reducer.begin(), self))

    def begin(self) -> None:
        """A pass begins, unless one is under way: backward has come to something of this model."""
        if self.running:
            return
        tell("backward_begins", self)
        self.stage.backward_begins()  # it may refuse: then no pass is under way
        self.running, self.reduced = True, False
        # Autograd runs _end at the end of the pass in which it is queued. A reentrant checkpoint
        # runs a pass of its own inside the user's, and the first gradient may come from there:
        # queued then, _end would run too early. So watch_output queues it at the model's output,
        # where the user's pass begins.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        if not self.accumulating:
            self.finish()

    # a gradient's way: autograd calls _gradient, which counts, and hands over what is complete

    def _listen(self) -> None:
        """Let autograd call _gradient(param) in every pass, as soon as param.grad is there."""
        for param in self.buckets_of:
            param.register_post_accumulate_grad_hook(WeakHook(Reducer._gradient, self))

    def _gradient(self, param: nn.Parameter) -> None:
        """A parameter's gradient has come. (A second one in a pass: guards/used_gradients.py.)"""
        self._arrived(param)
        if not self.accumulating:
            for bucket in self.buckets_of[param]:
                self.waits_for[bucket].discard(param)
                if not self.waits_for[bucket]:
                    self._completed.append(bucket)
            self._hand_over_complete()

    def _arrived(self, param: nn.Parameter) -> None:
        """Tell the stage, and who listens."""
        buckets = self.buckets_of[param]
        tell("gradient_arrives", self, param, buckets)
        self.stage.gradient_arrived(param, buckets[0].flat)

    def _hand_over_complete(self) -> None:
        """Hand over the buckets whose turn has come."""
        # from the head of the order on, up to the first that is incomplete. That may be several:
        # complete buckets have waited behind one that was not
        while not self.by_turns and self.waits_for:
            bucket, missing = next(iter(self.waits_for.items()))
            if missing:
                return
            self.hand_over(bucket)

    def hand_over(self, bucket: Bucket) -> None:
        """Give a bucket to the stage. A second call in the same pass does nothing."""
        if bucket in self.waits_for:
            del self.waits_for[bucket]
            tell("bucket_complete", self, bucket)
            later = self.waits_for.keys()
            done = [param for param in bucket.params if later.isdisjoint(self.buckets_of[param])]
            self.stage.bucket_complete(bucket, done)

    # the end of a pass

    def finish(self) -> None:
        """Hand over what is left: when a pass ends, or when the reduced gradients are asked for (in
        step(), say) and no pass on this rank has handed over."""
        tell("pass_ends", self)
        self._hand_over_rest()
        self.reduced, self.running = True, False
        if not self._ordered:
            self._agree_on_order()
        self._reset()
        self.stage.backward_ends()
        tell("gradients_reduced", self)

    def _hand_over_rest(self) -> None:
        """Hand over all buckets that are left, in order."""
        # a gradient may be there that was not counted: of an earlier pass, or set by the user
        for bucket in list(self.waits_for):
            for param in self.waits_for[bucket]:
                if param.grad is not None:
                    self.stage.gradient_arrived(param, bucket.flat)
            self.hand_over(bucket)

    def _agree_on_order(self) -> None:
        """Take rank 0's order of completion for all passes to come. It costs one broadcast of
        numbers, once."""
        self._ordered = True
        incomplete = [bucket for bucket in self.buckets if bucket not in self._completed]
        seen = [self.buckets.index(bucket) for bucket in [*self._completed, *incomplete]]
        order = torch.tensor(seen, device=self.buckets[0].device)
        collectives.broadcast(order, group=self.stage.group, of="order of the buckets")
        self.buckets = [self.buckets[index] for index in order.tolist()]

    # what a stage calls besides

    def complete(self) -> None:
        """Called before anybody reads the reduced gradients."""
        tell("gradients_asked", self)
        if not self.reduced:
            self.finish()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context in which backward passes hand over nothing: gradients add up in .grad."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    def forget(self) -> None:
        """zero_grad(), perhaps after a backward pass that failed half-way: start afresh."""
        tell("gradients_dropped", self)
        self.reduced = self.running = self.needs_zero_grad = False
        self._reset()
