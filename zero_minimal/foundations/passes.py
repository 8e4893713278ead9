"""Passes: where a backward pass begins, where it ends, and what may not come between.

    model's output ── the pass begins ──► first gradient … last gradient ── autograd calls _end

A model may be called inside of torch.utils.checkpoint, or have its gradients asked for in several
passes, and a pass may fail half-way. What backward.py does between begin and end is free of that.
"""

import weakref

import torch
from torch import nn

from zero_minimal.foundations import handed_over, notes, optimizers, ownership, values
from zero_minimal.foundations.changed_in_forward import ChangedInForward, Frozen, edited_by_hand
from zero_minimal.foundations.layout import Bucket, Flat
from zero_minimal.foundations.outputs import tensors_in
from zero_minimal.foundations.ties import Tie
from zero_minimal.foundations.wrappers import refuse_inside_ddp


class Passes:
    """Follows the backward passes of stage.model. Its heir says in finish() what is done at the end
    of one that is not under accumulate().

    flats: where each trained parameter lies; None for an assignment's own kind of bucket.
    """

    by_turns = False  # stage 3's

    def __init__(self, stage, flats: dict[nn.Parameter, Flat | None]):
        # weakly, since the stage holds this object: so both go as soon as the user drops the stage
        self.stage = weakref.proxy(stage)
        self.reduced = False  # every bucket was handed over since the last pass began
        self.running = False  # a backward pass is under way
        self.begun = False  # a pass has begun since the last zero_grad()
        self.skipped = False  # the loss scaler has left these gradients out
        self.spent = False  # step() has used the gradients, and zero_grad() was not called since
        self.scaled = ""  # in words, how the last step() scaled them: clipped or unscaled
        self.steps, self.passes = 0, 0  # step() calls; passes that handed over since
        self.loads = 0  # load_state_dict() calls
        self.accumulating = False  # passes hand over nothing
        self._task: int | None = None  # autograd's number for the pass under way
        self.left = handed_over.Left(self.stage, flats)
        stage.model.register_forward_pre_hook(Tie(Passes._before_forward, self))
        stage.model.register_forward_hook(Tie(Passes._watch_output, self))
        self.frozen: list[Frozen] = []
        self.watched: list[ChangedInForward] = []
        for one in [stage] if not self.by_turns else stage.units:
            module = one.model if one is stage else one.module
            held = module.parameters() if one is stage else one.params
            self.frozen.append(Frozen([param for param in held if param not in flats]))
            trained = [bucket for bucket in one.buckets if bucket in stage.buckets]
            self.watched.append(ChangedInForward(module, [*trained, self.frozen[-1]]))
        for param in flats:
            # before autograd adds anything to .grad
            param.register_hook(Tie(lambda passes, _: passes.begin(), self))

    @property
    def accumulated(self) -> bool:
        """Whether there are gradients that no step() has used."""
        return self.begun and not self.spent

    def complete(self) -> None:
        """Called before anybody reads the reduced gradients. Raises: RuntimeError if the user has
        put something else in the place of a gradient that is reduced already, or of a parameter, or
        has frozen or unfrozen one."""
        self.left.look()
        ownership.check_trained(self.stage.model)
        if not self.by_turns:  # at stage 3 turns.py knows where they are
            for bucket in self.stage.buckets:
                for param in bucket.params:
                    ownership.check_place(param, bucket.parameters)
                bucket.edited = bucket.edited or edited_by_hand(bucket)  # step() mixes shards
        if not self.reduced:
            self.finish()

    def forget(self) -> None:
        """zero_grad(), perhaps after a backward pass that failed half-way: start afresh."""
        self.left.forget()
        self.scaled = self._scale_in_words() if self.spent else ""
        self.steps, self.passes = self.steps + self.spent, 0
        for bucket in (*self.stage.buckets, *self.frozen):
            bucket.changed = ""
        self.reduced = self.running = self.begun = self.spent = self.skipped = False

    def moment_of(self, bucket: Bucket) -> str:
        """Of training, in words, what the last step() did, and with which learning rate the bucket
        will be updated: all must be alike on all ranks."""
        rate = optimizers.rate_of(self.stage, bucket)
        loaded = f"{notes.LOADED}{self.loads}" if self.loads else ""
        changed = bucket.changed or "".join(frozen.changed for frozen in self.frozen)
        edited = "" if self.by_turns else bucket.edited or edited_by_hand(bucket)
        bucket.edited = ""
        return (f"backward {self.passes + 1} of step {self.steps + 1}{self.scaled}{rate}{loaded}"
                f"{changed}{edited}")

    def _scale_in_words(self) -> str:
        """Nothing, if step() did not scale; without the number where it lies on a GPU: to read it
        would take a wait."""
        scale = self.stage.gradient_scale
        if scale is None:
            return ""
        at_hand = values.present() and torch.as_tensor(scale).is_cpu
        return f"{notes.SCALED} ({float(scale):.6g})" if at_hand else notes.SCALED

    def _before_forward(self, *_) -> None:
        refuse_inside_ddp()
        torch.clear_autocast_cache()  # a cast that it kept would lead backward into an older graph
        self.left.look()
        self.left.put_aside()

    def _watch_output(self, module, inputs, output) -> None:
        self.left.come_back()
        in_func = torch._C._functorch.peek_interpreter_stack() is not None  # its passes are its own
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and not in_func:
                tensor.grad_fn.register_prehook(Tie(Passes._begin_at_output, self))

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
            which = getattr(self.stage.buckets[0], "model", "") or " of model 1"
            raise RuntimeError(f"call zero.zero_grad() after zero.step(){which}, a "
                               f"{type(self.stage.model).__name__}: this backward() comes to its "
                               "parameters, and step() has used their gradients already")
        if self.reduced and self.stage.gradient_scale is not None:
            raise RuntimeError("the gradients were clipped or unscaled already, and what step() "
                               "multiplies them with, gradient_scale, does not hold for another "
                               "backward pass: call zero.clip_grad_norm_() and scaler.unscale_() "
                               "once, after the last micro-batch; or drop the gradients with "
                               "zero.zero_grad(), also after a step that the scaler has skipped")
        self.left.take_away()
        self.running, self.begun, self.skipped = True, True, False
        self._task = torch._C._current_graph_task_id()
        self.stage.backward_begins()
        self.reduced = False
        # Autograd runs _end at the end of the pass in which it is queued. A reentrant checkpoint
        # runs a pass of its own inside the user's, and the first gradient may come from there:
        # queued then, _end would run too early. So _watch_output queues it at the model's output,
        # where the user's pass begins.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.running = False
        if not self.accumulating:
            self.finish()
