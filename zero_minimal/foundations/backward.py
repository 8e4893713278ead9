"""Backward: tells a stage when a bucket's gradients are complete, so that their reduction overlaps
with the rest of the backward pass.

    autograd ── a gradient ──► Backward ── hooks ──► stage

Autograd calls a hook when a parameter's gradient is there. Backward counts these calls; with the
last gradient of its parameters a bucket is complete, and is handed over to the stage. Two things
make this less simple than it sounds:

- All ranks must start the same collectives in the same order, but a parameter may get a gradient on
  one rank and none on another. So buckets are handed over in one fixed order, and at the end of the
  pass the incomplete ones too: a gradient that is missing counts as zero.
- A parameter that never gets a gradient would hold up all buckets behind its own until the end. So
  after the first pass that hands over, the planned order gives way to an agreed one: that in which
  rank 0 saw the buckets complete, with those that stayed incomplete last.

A pass under `accumulate()` hands over nothing. "The pass" below is one that does.

What .grad is between that pass and zero_grad(): handed_over.py.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from zero_minimal.foundations import handed_over, ownership
from zero_minimal.foundations.layout import Bucket, Flat
from zero_minimal.foundations.outputs import tensors_in
from zero_minimal.foundations.ties import Tie


class Hooks:
    """What a stage is told during a backward pass. It overrides what it needs; these do nothing."""

    def __reduce__(self):  # for copy and pickle
        raise TypeError("a stage is tied to its ranks and cannot be copied or pickled: keep "
                        "zero.state_dict(), or copy the model under "
                        "`with zero.gather_parameters():`")

    def backward_begins(self) -> None:
        """Before the first gradient of any pass. Backward.reduced still speaks of the pass before:
        it is set back after this call."""

    def gradient_arrived(self, param: nn.Parameter, flat: Flat) -> None:
        """param.grad is there, added to that of earlier micro-batches if they left one. param lies
        in `flat`."""

    def bucket_complete(self, bucket: Bucket, done: list[nn.Parameter]) -> None:
        """All gradients of bucket.params that this pass makes have arrived. Where .grad is None
        there was none on this rank: it counts as zero.

        A parameter may lie in several buckets. `done` are those of this bucket that lie in no
        bucket still to come: their .grad is not needed any more.

        Called once for every bucket, in the same order on every rank: in a pass that is not under
        `accumulate()`, or in finish(), which step() may call anywhere.
        """

    def backward_ends(self) -> None:
        """Every bucket was handed over. Where no pass did so, as on a rank that ran no backward,
        step(), clip_grad_norm_() and LossScaler.step() call finish(), and so this too."""


class Backward:
    """Watches the backward passes of stage.model, counts the gradients of each of stage.buckets,
    and calls the stage's Hooks.

    by_turns: do not hand over a bucket with its last gradient: turns.Turns says when (stage 3).
    """

    def __init__(self, stage: Hooks, by_turns: bool = False):
        # stage.buckets stays in the planned order, self.buckets comes into the agreed one
        # weakly, since the stage holds this object: so both go as soon as the user drops the stage
        self.stage = weakref.proxy(stage)
        self.buckets, self.by_turns = list(stage.buckets), by_turns
        self.reduced = False  # every bucket was handed over since the last pass began
        self.running = False  # a backward pass is under way
        self.spent = False  # step() has used the gradients, and zero_grad() was not called since
        self.steps, self.passes = 0, 0  # step() calls; passes that handed over since
        self._accumulating = False
        self._ordered = by_turns  # self.buckets is in its final order
        self._task: int | None = None  # autograd's number for the pass under way
        self._buckets_of: dict[nn.Parameter, list[Bucket]] = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self._buckets_of.setdefault(param, []).append(bucket)
        flats = {param: buckets[0].flat for param, buckets in self._buckets_of.items()}
        self.left = handed_over.Left(self.stage, flats)
        self._reset()
        stage.model.register_forward_pre_hook(Tie(Backward._before_forward, self))
        stage.model.register_forward_hook(Tie(Backward._watch_output, self))
        for param in self._buckets_of:
            # before autograd adds anything to .grad
            param.register_hook(Tie(lambda backward, _: backward.begin(), self))
            param.register_post_accumulate_grad_hook(Tie(Backward._gradient, self))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context in which backward passes hand over nothing: gradients add up in .grad."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def complete(self) -> None:
        """Called before anybody reads the reduced gradients. Raises: RuntimeError if the user has
        put something else in the place of a gradient that is reduced already."""
        self.left.look()
        if not self.reduced:
            self.finish()

    def finish(self) -> None:
        """Hand over what is left, in order: when a pass ends, or when the reduced gradients are
        asked for (in step(), say) and no pass on this rank has handed over."""
        ownership.check_owner(self.stage.model)
        for bucket in list(self._waits_for):
            for param in self._waits_for[bucket]:
                if handed_over.has_gradient(param):  # of a pass before, or the user's own
                    self.stage.gradient_arrived(param, bucket.flat)
            self.hand_over(bucket)
        self.reduced, self.running = True, False
        self.passes += 1
        if not self._ordered:
            self._agree_on_order()
        self._reset()
        self.stage.backward_ends()
        self.left.leave()

    def forget(self) -> None:
        """zero_grad(), perhaps after a backward pass that failed half-way: start afresh."""
        self.left.forget()
        self.steps, self.passes = self.steps + self.spent, 0
        self.reduced = self.running = self.spent = False
        self._reset()

    def _reset(self) -> None:
        # of each bucket not yet handed over, in order: the parameters whose gradient has not come
        self._waits_for = {bucket: set(bucket.params) for bucket in self.buckets}
        self._completed: list[Bucket] = []  # in the order in which they became complete

    # a gradient's way: autograd calls _gradient, which counts, and hands over what is complete

    def _gradient(self, param: nn.Parameter) -> None:
        buckets = self._buckets_of[param]
        ownership.check_place(param, buckets[0].parameters)
        self.stage.gradient_arrived(param, buckets[0].flat)
        if not self._accumulating:
            for bucket in buckets:
                self._count(bucket, param)
            self._hand_over_complete()

    def _count(self, bucket: Bucket, param: nn.Parameter) -> None:
        if param not in self._waits_for.get(bucket, ()):
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward "
                "pass, the first is on its way: torch.utils.checkpoint around a module used "
                "several times needs use_reentrant=False, and activation_partitioning.checkpoint "
                "cannot be around it"
            )
        self._waits_for[bucket].discard(param)
        if not self._waits_for[bucket]:
            self._completed.append(bucket)

    def _hand_over_complete(self) -> None:
        """Hand over from the head of the order on, up to the first bucket that is incomplete. That
        may be several: complete buckets have waited behind one that was not."""
        while not self.by_turns and self._waits_for:
            bucket, missing = next(iter(self._waits_for.items()))
            if missing:
                return
            self.hand_over(bucket)

    def hand_over(self, bucket: Bucket) -> None:
        """Give a bucket to the stage. A second call in the same pass does nothing."""
        if bucket in self._waits_for:
            del self._waits_for[bucket]
            bucket.moment = f"backward {self.passes + 1} of step {self.steps + 1}"
            later = self._waits_for.keys()
            done = [param for param in bucket.params if later.isdisjoint(self._buckets_of[param])]
            self.stage.bucket_complete(bucket, done)

    # where a pass begins and ends

    def _before_forward(self, *_) -> None:
        torch.clear_autocast_cache()  # a cast that it kept would lead backward into an older graph
        self.left.look()
        self.left.put_aside()

    def _watch_output(self, module, inputs, output) -> None:
        self.left.come_back()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(Tie(Backward._begin_at_output, self))

    def _begin_at_output(self, *_) -> None:
        if self.running and self._task != torch._C._current_graph_task_id():
            raise RuntimeError(
                "a backward pass begins while another one has not ended. If that one failed, call "
                "zero.zero_grad() first; if torch.utils.checkpoint is around the whole model, it "
                "needs use_reentrant=False"
            )
        self.begin()

    def begin(self) -> None:
        """A pass begins, unless one is under way: backward has come to something of this model."""
        if self.running:
            return
        self.left.look()
        if self.spent:
            raise RuntimeError("call zero.zero_grad() after zero.step()")
        self.left.take_away()
        self.running, self._task = True, torch._C._current_graph_task_id()
        self.stage.backward_begins()
        self.reduced = False
        # Autograd runs _end at the end of the pass in which it is queued. A reentrant checkpoint
        # runs a pass of its own inside the user's, and the first gradient may come from there:
        # queued then, _end would run too early. So _watch_output queues it at the model's output,
        # where the user's pass begins.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        if not self._accumulating:
            self.finish()

    def _agree_on_order(self) -> None:
        """Take rank 0's order of completion for all passes to come. It costs one all-gather of
        numbers, once."""
        self._ordered = True
        incomplete = [bucket for bucket in self.buckets if bucket not in self._completed]
        seen = [self.buckets.index(bucket) for bucket in [*self._completed, *incomplete]]
        of_rank_0 = ownership.numbers_of_all_ranks(seen, self.stage.group)[0]
        self.buckets = [self.buckets[index] for index in of_rank_0]
