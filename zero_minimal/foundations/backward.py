"""Backward: when are a bucket's gradients complete, so that its reduction can overlap with the rest of backward?

Autograd tells when a parameter's gradient is there. With the last of its parameters a bucket is complete, and is handed
to the stage. Two things make this less simple than it sounds:

- All ranks must start the same collectives in the same order, and a parameter may get no gradient on one rank alone. So
  buckets are handed over strictly in one order, and when backward ends the incomplete too: what is missing is zero.
- A parameter that never gets a gradient would hold up all buckets behind its own. So after the first backward pass
  buckets are handed over in the order in which rank 0 saw them complete, the incomplete ones last.
"""

import contextlib
import dataclasses
import weakref

import torch
from torch import nn

from zero_minimal.foundations import layout


class Backward:
    """Watches the backward passes of a stage's model, and calls the stage:

    stage.backward_begins()                  nothing has been accumulated yet
    stage.gradient_arrived(param, buckets)   param.grad is there; the stage puts it into the buckets where the parameter
                                             lies, and calls `filled(bucket, param)` for each
    stage.bucket_complete(bucket)            all its gradients are there; in the same order on every rank
    stage.backward_ends()                    every bucket was handed over

    by_turns: buckets are handed over not by their last gradient, but by the stage, which calls `hand_over`.
    """

    def __init__(self, stage, by_turns: bool = False):
        self.stage, self.buckets, self.by_turns = stage, list(stage.buckets), by_turns
        self.reduced = False  # every bucket was handed over since zero_grad()
        self.running = False
        self.spent = False  # step() has used the gradients, zero_grad() has not come yet
        self._accumulating = False
        self._ordered = by_turns
        self._task = None
        self._reset()
        stage.model.register_forward_hook(self._watch_output)
        self._buckets_of: dict = {}
        for bucket in self.buckets:
            for param in bucket.params:
                self._buckets_of.setdefault(param, []).append(bucket)
        weak = weakref.ref(self)  # Python cannot see through these hooks: a strong one would keep the model for ever
        for param in self._buckets_of:
            param.register_post_accumulate_grad_hook(lambda param: weak() and weak()._gradient(param))

    @contextlib.contextmanager
    def accumulate(self):
        """Backward passes inside hand over nothing: gradients add up."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def hand_over(self, bucket) -> None:
        """The bucket's gradients are there. A second call in the same pass does nothing."""
        if bucket in self._left:
            del self._left[bucket]
            self.stage.bucket_complete(bucket)

    def finish(self) -> None:
        """Hand over what is left, in order: when backward ends, or in `step()` if none ran on this rank."""
        layout.check_owner(self.stage.model)
        for bucket in list(self._left):
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
        self._left = {bucket: set(bucket.params) for bucket in self.buckets}  # and the gradients each waits for
        self._completed = []

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
        # Runs when this pass ends. Queued here, not at the first gradient: that may come from a pass within this one
        # (a checkpoint that recomputes), whose end would be too early.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        if not self._accumulating:
            self.finish()

    def filled(self, bucket, param) -> None:
        """The parameter's gradient lies in the bucket. This may complete it, and others that waited behind it."""
        if self._accumulating:
            return
        if param not in self._left.get(bucket, ()):
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward pass, the first is "
                "on its way: torch.utils.checkpoint around a module used several times needs use_reentrant=False, "
                "and activation_partitioning.checkpoint cannot be around it"
            )
        self._left[bucket].discard(param)
        if not self._left[bucket]:
            self._completed.append(bucket)
        while not self.by_turns and self._left and not self._left[first := next(iter(self._left))]:
            self.hand_over(first)

    def _gradient(self, param) -> None:
        self._begin()  # in case the model's output was not used, only a part of the model
        buckets = self._buckets_of[param]
        layout.check_place(param, buckets[0].parameters)
        self.stage.gradient_arrived(param, buckets)

    def _agree_on_order(self) -> None:
        self._ordered = True
        seen = self._completed + [bucket for bucket in self.buckets if bucket not in self._completed]
        order = layout.numbers_of_all_ranks([self.buckets.index(bucket) for bucket in seen], self.stage.group)[0]
        self.buckets = [self.buckets[index] for index in order]


def tensors_in(value, seen=None):
    """The tensors in a module's output: alone, or in tuples, lists, dicts, dataclasses and other plain objects."""
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
