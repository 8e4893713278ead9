"""Data parallelism: every rank holds everything, and works on its own batch. ZeRO starts here
(section 3 of the paper).

Memory a rank, for Ψ parameters:
    fp32     4Ψ parameters + 4Ψ gradients + 8Ψ Adam's momentum and variance
    16 bit   2Ψ            + 2Ψ           + 12Ψ, of which 4Ψ are the fp32 master parameters

Communication plan, a step; what each rank sends:
    start      broadcast rank 0's parameters, once
    backward   all-reduce each bucket of gradients as soon as it is complete     2Ψ(N−1)/N elements
    step       every rank makes the same update: nothing is sent
Not counted, since small: running statistics (batch norm) at each step, and an order of the buckets
once.

naive.py trains the same in fp32, without these, which lie in core/:
    buckets       many gradients in one message         layout.py
    overlap       messages travel during backward       reducer.py
    fp32 masters  so that 16-bit parameters can train   precision.py, optimizers.py
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero_minimal.core import collectives, optimizers, precision, replicas, seams
from zero_minimal.core.layout import Bucket
from zero_minimal.core.reducer import Hooks
from zero_minimal.core.seams import tell
from zero_minimal.core.set_up import set_up
from zero_minimal.core.weak_hooks import WeakHook


class Naive:
    """Data parallelism over the ranks of `group`, for a model in fp32.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values.
        optimizer_class: a torch optimizer; `optimizer_options` go to it (lr=3e-4, …).
        bucket_bytes: accepted as in the stages, but unused: there are no buckets.
    .grad is this rank's own until step() or clip_grad_norm_() averages it.
    Raises: ValueError for trained parameters of less than 32 bits.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = None, **optimizer_options,
    ):
        self.params = [param for param in model.parameters() if param.requires_grad]
        if any(param.element_size() < 4 for param in self.params):
            raise ValueError("the naive way keeps no fp32 masters, so 16-bit parameters would lose "
                             "small updates: use Stage0")
        self.model, self.group = model, group
        self.start_alike()
        self.optimizer = optimizer_class(self.params, **optimizer_options)
        self.averaged = False
        seams.tell("naive_wrapped", self)

    def start_alike(self) -> None:
        """Copy rank 0's parameters and buffers to every rank."""
        # step 1: all of this rank's model is as on rank 0 of the group, also what is not trained.
        # - collectives.broadcast(tensor, group=…): the numbers of the group's rank 0, to all its
        #   ranks, in place. Any shape
        # - tensor.data: the same memory, and autograd does not notice what is written there
        # - self.model
        raise NotImplementedError("step 1: start_alike")

    def average(self) -> None:
        """Each .grad becomes its mean over the ranks."""
        # step 1: each of self.params has the ranks' mean gradient in .grad, on every rank. A
        # gradient that did not come counts as zero.
        # - collectives.all_reduce(tensor, op="avg" or "sum", group=…): of all ranks, in place. Any
        #   shape
        # - param.grad: None where no gradient has come on this rank
        raise NotImplementedError("step 1: average")

    def no_sync(self) -> nullcontext:
        """Context for the micro-batches before the last: gradients add up in .grad anyway."""
        return nullcontext()

    def reduced_gradients(self) -> list[torch.Tensor]:
        """The gradients, averaged over the ranks. A backward pass between this and zero_grad()
        raises RuntimeError: nobody would average its gradients."""
        if not self.averaged:
            seams.tell("naive_averages", self)
            self.average()
            self.averaged = True
        return [param.grad for param in self.params]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to this norm, if theirs is larger. Returns theirs, a 0-dim
        tensor."""
        self.reduced_gradients()
        return nn.utils.clip_grad_norm_(self.params, max_norm)

    def step(self) -> None:
        """Update the parameters: the gradients are equal on all ranks."""
        self.reduced_gradients()
        self.optimizer.step()
        replicas.broadcast_statistics(self.model, self.group)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()
        self.averaged = False


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
        # step 3: autograd calls self._gradient(param) as soon as param.grad is there, in every
        # pass, for each parameter of self.buckets_of.
        # - WeakHook(Reducer._gradient, self): a function that calls self._gradient(…), and does not
        #   keep self alive
        # - param.register_hook(f): f(gradient) is called before the gradient is added to .grad
        # - param.register_post_accumulate_grad_hook(f): f(param) is called after that
        ...  # until step 3 nothing happens here

    def _gradient(self, param: nn.Parameter) -> None:
        """A parameter's gradient has come. (A second one in a pass: guards/used_gradients.py.)"""
        # step 3: the stage was told; under accumulate() that is all. Else the parameter's buckets
        # no longer wait for it, those that wait for nothing are in self._completed, and
        # self._hand_over_complete was called.
        # - self._arrived(param): tells the stage, and who listens
        # - self.accumulating: True under accumulate()
        # - self.buckets_of[param]: the buckets in which it lies; self.waits_for still has them
        # - self._completed: a list of buckets, in order of completion
        raise NotImplementedError("step 3: _gradient")

    def _arrived(self, param: nn.Parameter) -> None:
        """Tell the stage, and who listens."""
        buckets = self.buckets_of[param]
        tell("gradient_arrives", self, param, buckets)
        self.stage.gradient_arrived(param, buckets[0].flat)

    def _hand_over_complete(self) -> None:
        """Hand over the buckets whose turn has come."""
        # step 3: no bucket that could go is left. On every rank they went in the order of
        # self.waits_for: a bucket goes when it waits for nothing, and all before it have gone.
        # - self.hand_over(bucket)
        # - self.by_turns: False here. Stage 3 needs it; leave it aside
        raise NotImplementedError("step 3: _hand_over_complete")

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
        # step 2: every bucket of self.waits_for was handed over, in the order of self.waits_for.
        # Before each, the stage was told of every gradient of the bucket that is in .grad and was
        # not counted: self.waits_for still has its parameter. (Step 3 counts; before it none is
        # counted. To tell of one twice does no harm at this stage.)
        # - self.waits_for: {bucket: set of the parameters it waits for}, in the order that all
        #   ranks have
        # - self.stage.gradient_arrived(param, flat): tells the stage, which puts .grad into its
        #   place; flat is bucket.flat. (_arrived would also tell who listens to autograd, and
        #   autograd brings nothing here)
        # - self.hand_over(bucket): gives it to the stage's bucket_complete, and takes it out of
        #   self.waits_for
        raise NotImplementedError("step 2: _hand_over_rest")

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
        # step 5: a context. Inside it self.accumulating is True; after it, whatever happened,
        # False.
        # - @contextmanager, which stands above: what comes before the one `yield` is done at the
        #   start of the context, what comes after it at the end
        raise NotImplementedError("step 5: accumulate")

    def forget(self) -> None:
        """zero_grad(), perhaps after a backward pass that failed half-way: start afresh."""
        tell("gradients_dropped", self)
        self.reduced = self.running = self.needs_zero_grad = False
        self._reset()


class Stage0(Hooks):
    """Data parallelism over the ranks of `group`.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values. It stays yours:
            call it as before.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4,
            fused=True, …).
        bucket_bytes: gradients are reduced in buckets of about this size; None: as few as can be.
        param_groups: as torch.optim takes them; by default all parameters of the model.
    If a parameter gets no gradient on a rank, its gradient there counts as zero. If no rank has
    one, earlier momentum and weight decay still move it, unlike in plain torch. After backward
    .grad holds the average of all ranks; clip with clip_grad_norm_().
    Raises: ValueError for a model that is empty or wrapped already, or an optimizer that is not
        element-wise; TypeError for a wrong model, optimizer class or optimizer option; RuntimeError
        if there are no ranks, or if their models differ. set_up() names the rest.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = 4 * 2**20, param_groups=None, **optimizer_options,
    ):
        set_up(
            self, model, optimizer_class, optimizer_options,
            group=group, bucket_bytes=bucket_bytes, param_groups=param_groups,
        )
        self.reducer = Reducer(self)
        self.reducing = None  # the all-reduce under way, if any

    def own(self, bucket):
        """A rank keeps all of every bucket (core/set_up.py calls this at the start)."""
        bucket.gradients = bucket.whole_gradients()  # [padded]
        bucket.parameter_shard, bucket.gradient_shard = bucket.parameters, bucket.gradients

    # during backward: core/reducer.py calls these

    def gradient_arrived(self, param, flat):
        flat.keep_gradient(param)  # in its buckets, where later micro-batches add to it

    def bucket_complete(self, bucket, done):
        # step 2: either bucket.gradients are the mean over the ranks already, or its all-reduce has
        # started and self.reducing is its Work. (Step 4 asks for the second.) A gradient that did
        # not come counts as zero. (`done` is for later lessons.)
        # - bucket.gradients [padded]: this rank's gradients of the bucket, side by side; zeros fill
        #   it up, so that N divides its size
        # - bucket.zero_missing(): writes zeros there for each parameter whose .grad is None
        # - collectives.all_reduce(tensor, op="avg" or "sum", group=…, async_op=…): in place. With
        #   async_op=True it only starts, and returns a Work
        raise NotImplementedError("step 2: bucket_complete")

    def _wait(self):
        # step 4: what was under way, if anything, has arrived, and self.reducing is None.
        # bucket_complete uses it from now on, before its own bucket starts, which travels while
        # autograd goes on.
        # - self.reducing: None, or the Work that bucket_complete has put there
        # - work.wait(): returns when the collective has ended. On gloo it also sends the second
        #   half of an all-reduce, behind all that was started before
        ...  # until step 4 nothing happens here

    def backward_ends(self):
        self._wait()
        for bucket in self.buckets:
            bucket.show_gradients()

    def no_sync(self) -> AbstractContextManager:
        """Context for the micro-batches before the last: gradients add up here, nothing is sent."""
        return self.reducer.accumulate()

    # after backward

    def reduced_gradients(self) -> list[torch.Tensor]:
        """What the update reads: the averaged gradient of each bucket, [padded]."""
        self.reducer.complete()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Let step() scale the gradients down to this global norm, if theirs is larger. Returns
        theirs, a 0-dim tensor. Only gradient_scale changes: the gradients stay as they are."""
        gradients = self.reduced_gradients()
        norm = precision.global_norm(gradients, self.gradient_scale, sharded=False)
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters; on every rank alike, since the gradients are."""
        self.reduced_gradients()
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = True

    def zero_grad(self) -> None:
        """Forget the gradients."""
        # step 5: nothing is under way, no .grad is left, self.gradient_scale is None, and
        # self.reducer starts afresh.
        # - self.reducer.forget(): forgets what was counted
        # - self.model.parameters()
        # - self.gradient_scale: after clipping, the factor that step() multiplies gradients with
        raise NotImplementedError("step 5: zero_grad")

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Context in which every parameter is whole: here it always is. All ranks must enter it.
        Edits are kept: make them alike on all ranks, else RuntimeError."""
        try:
            yield
            replicas.check_alike(self.model, self.group)
        finally:
            for bucket in self.buckets:
                precision.keep_changes(bucket)


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Stage0)
