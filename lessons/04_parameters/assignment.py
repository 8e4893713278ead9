"""P_os+g+p: parameters partitioned too. A unit of the model is whole only while it works
(section 5.3).

Memory a rank, for Ψ parameters on N ranks:
    fp32     4Ψ/N parameters + 4Ψ/N gradients + 8Ψ/N Adam's momentum and variance
    16 bit   2Ψ/N            + 2Ψ/N           + 12Ψ/N, of which 4Ψ/N are the fp32 master parameters
and, whole, the parameters of the root unit, the unit at work and the one being prefetched, and the
gradients of the root, the unit at work and the one being reduced. On gloo, what the other ranks
send takes another (N−1)/N of the gradients being reduced.

Communication plan, a step; what each rank sends. The units are the model's blocks, and the rest,
the root; each is one bucket, or several if its parameters differ in dtype, device or optimizer
group:
    start      broadcast rank 0's parameters, once; keep its own shard
    forward    all-gather each unit before its turn, free it at the next one      Ψ(N−1)/N elements
    backward   all-gather each unit before its turn, free it at the next one      Ψ(N−1)/N elements
               reduce-scatter its gradients once backward has left it,
               and free them                                                      Ψ(N−1)/N elements
    step       update its own shard: no parameters are sent
Together 1.5 times what data parallelism sends, or a little less: the root and the last block stay
from forward to backward, and the first block from there to the next micro-batch's forward.
Not counted, since small: running statistics (batch norm) at each step, and a norm when clipping.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from zero_minimal.core import collectives, optimizers, precision, replicas
from zero_minimal.core.execution_order import ExecutionOrder
from zero_minimal.core.gradient_memory import GradientMemory, Reduction
from zero_minimal.core.reducer import Hooks, Reducer
from zero_minimal.core.set_up import set_up
from zero_minimal.core.units import find_units, release, restore, whole_parameters


class Stage3(Hooks):
    """Data parallelism over the ranks of `group`, with sharded optimizer state, gradients and
    parameters.

    Args:
        model: any nn.Module, built alike on every rank; all take rank 0's values. Call it as
            before; all ranks use the same units in the same order. One that was built under
            torch.device("meta") gets memory here, unit by unit, on torch's default device: so no
            rank ever needs the whole model.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4,
            fused=True, …).
        bucket_bytes: taken as at the other stages, and not used: here a unit is a bucket, whatever
            its size.
        param_groups: as torch.optim takes them; by default all parameters of the model.
        memory: a class that says where gradients lie; zero_100b.py has another one.
        units: modules to gather as wholes; by default the elements of every nn.ModuleList (of a
            list or dict inside a list, its elements). A model without one is a single unit, whole
            from forward to step().
    If a parameter gets no gradient on a rank, its gradient there counts as zero. If no rank has
    one, earlier momentum and weight decay still move it, unlike in plain torch. After backward only
    reduced_gradients() can be read, and .grad not: clip with clip_grad_norm_(). A parameter can be
    read from its unit's turn until the turn of another one; the root's until step(),
    gather_parameters() or the end of an evaluation. After that it keeps only its shape; to read it,
    use gather_parameters(). While it can be read, a loss may be computed from it (an L1 penalty,
    say), and edits in place are kept. Make them alike on all ranks, else the next backward raises.
    Keep a .clone() of what you read: a view that is taken inside the unit's own forward points to
    freed memory later, without an error.
    Raises: ValueError for a model that is empty or wrapped already, or an optimizer that is not
        element-wise; TypeError for a wrong model, optimizer class or optimizer option; RuntimeError
        if there are no ranks, or if their models differ. set_up() names the rest.
    """

    def __init__(
        self, model: nn.Module, optimizer_class: type, *, group=None,
        bucket_bytes: int | None = 4 * 2**20, param_groups=None, memory: type = GradientMemory,
        units=None, **optimizer_options,
    ):
        self.units = find_units(model, units)  # the root first
        set_up(
            self, model, optimizer_class, optimizer_options,
            group=group, bucket_bytes=bucket_bytes, param_groups=param_groups,
            units=self.units,
        )
        self.memory = memory(self.buckets, group)
        self.reducing = None  # the Reduction under way, if any
        self.inside_gather_parameters = False
        self.reducer = Reducer(self, by_turns=True)
        # after Reducer, whose hook on the model's output runs first
        self.execution_order = ExecutionOrder(self)

    def own(self, bucket):
        """A rank keeps only its shard of every bucket's parameters (core/set_up.py calls this at
        the start)."""
        # step 1: bucket.parameter_shard, which you set, is this rank's shard of bucket.parameters.
        # Of the bucket's parameters the rank holds nothing else.
        # - bucket.parameters [padded]: the parameters lie here side by side. At this moment they
        #   are all here.
        # - bucket.shard(whole [padded], rank): that rank's part of it [padded / N], a view
        raise NotImplementedError("step 1: own")

    # parameters come and go: core/execution_order.py says when

    def _gather(self, unit):
        """Start to gather a unit's parameters."""
        # step 2: the unit's parameters are here or on their way. What is on its way is listed in
        # unit.gathering. Nothing has been waited for. If they were here or on their way before,
        # nothing has changed.
        # - unit.buckets: several, one or none (of an empty root, which is never whole)
        # - unit.whole, unit.gathering: whether its parameters can be read, False at first; a list
        #   of Work, [] at first. You set both.
        # - tensor.untyped_storage().resize_(bytes): gives a storage new memory of that many bytes
        # - bucket.padded, bucket.dtype.itemsize: elements of the bucket, and bytes of each
        # - collectives.all_gather(output [N·s], input [s], group=…, async_op=True): the inputs of
        #   all ranks, in rank order. Returns a Work at once.
        raise NotImplementedError("step 2: _gather")

    def _arrive(self, unit):
        """Wait for the all-gathers."""
        # step 2: nothing of this unit is on its way. If something was, its parameters can be read
        # now, and unit.whole is True.
        # - work.wait(): returns when the collective has ended
        # - bucket.flat.view(whole [padded], param): the parameter's place in it, in the parameter's
        #   shape
        # - restore(param, data): the parameter points to data, and can be read
        raise NotImplementedError("step 2: _arrive")

    def _release(self, unit):
        # step 3: this unit is neither whole nor on its way. What was changed in place while it was
        # whole is in the shards, and will be there when it is gathered again.
        raise NotImplementedError("step 3: _release")

    def _free(self, bucket):
        """Free the parameters of a bucket."""
        # step 1: no memory of this bucket's parameters is left, whoever else refers to it. Reading
        # one of them is an error. bucket.parameters stays, and can be filled again.
        # - bucket.params: the parameters that lie in the bucket
        # - bucket.flat.placeholder(param): one NaN in the shape of the parameter
        # - release(param, placeholder): the parameter points to the placeholder, and whoever reads
        #   it gets an error
        # - collectives.free(tensor): its storage has 0 bytes from now on; it may have 0 already
        raise NotImplementedError("step 1: _free")

    def _release_all(self):
        if self.inside_gather_parameters:
            raise RuntimeError("leave gather_parameters() first: no step runs inside of it")
        for unit in self.units:
            self._release(unit)

    def unit_turn(self, unit, following):
        self._release_others(unit, following)  # first: then two blocks need memory, not three
        self._gather_needed(unit)
        self._prefetch(following)  # after the wait, so as not to slow it

    def _release_others(self, unit, following):
        # step 3: no unit has memory, or is on its way, but those that may: this unit, the units
        # around it, the units inside it, and `following`.
        # - self.units: all units, the root first
        # - other.parents: the units that enclose other
        ...  # until step 3 nothing happens here

    def _gather_needed(self, unit):
        # step 2: this unit can compute, and so can the units around it: they are at work, too.
        # - unit.parents: the units that enclose this one, the root among them
        raise NotImplementedError("step 2: _gather_needed")

    def _prefetch(self, following):
        # step 3: `following`, if there is one, is whole or on its way. Nothing has been waited for.
        ...  # until step 3 nothing happens here

    def evaluation_done(self):
        # step 5: no unit is whole.
        # - self._release_all(): calls your _release for all units; inside gather_parameters() it
        #   raises
        ...  # until step 5 nothing happens here

    # during backward: core/reducer.py calls these; bucket_complete when backward has left a unit

    def backward_begins(self):
        if self.inside_gather_parameters:
            raise RuntimeError("call backward() outside gather_parameters()")
        self.execution_order.begin("backward")

    def bucket_complete(self, bucket, done):
        # step 4: the mean of this bucket's gradients over the ranks is on its way to their shards,
        # and self.reducing, a Reduction, says so. At most one bucket is on its way, and at most one
        # has whole gradients in self.memory. No .grad of this bucket is left.
        # - done: the parameters of the bucket
        # - self.memory.whole(bucket), self.memory.shard(bucket): a new vector [padded] of zeros; a
        #   new one [padded / N], not filled
        # - bucket.fuse_gradients(whole [padded]): copies every param.grad to its place in whole,
        #   and leaves the rest of it
        # - collectives.reduce_scatter(output [s], input [N·s], op="avg" or "sum", group=…,
        #   async_op=True): the mean or the sum of all ranks' inputs, of which this rank's part goes
        #   to output. Returns a Work at once.
        # - Reduction(bucket, whole, shard, pending): its four fields have these names
        raise NotImplementedError("step 4: bucket_complete")

    def _wait(self):
        # step 4: nothing is on its way. What was on its way has arrived: bucket.gradient_shard is
        # this rank's shard of the mean, or of the sum over all backward passes since zero_grad(),
        # and no memory of whole gradients is left.
        # - bucket.gradient_shard: None after zero_grad(). You set it.
        # - self.memory.give_back(whole): frees it
        raise NotImplementedError("step 4: _wait")

    def backward_ends(self):
        self._wait()

    def no_sync(self) -> nullcontext:
        """Context for the micro-batches before the last. Here each of them is reduced too."""
        return nullcontext()

    # after backward

    def reduced_gradients(self) -> list[torch.Tensor]:
        """What the update reads: this rank's shard of each bucket's average, [padded / N]."""
        self.reducer.complete()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Let step() scale the gradients down to this global norm, if theirs is larger. Returns
        theirs, a 0-dim tensor. Only gradient_scale changes: the gradients stay as they are."""
        gradients = self.reduced_gradients()
        norm = precision.global_norm(gradients, self.gradient_scale, group=self.group)
        self.gradient_scale = precision.clip(self.gradient_scale, norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards. No parameters are sent: units gather them when next used."""
        # step 5: the optimizer has updated each shard, with self.gradient_scale times the mean
        # gradient, and no unit is whole. What was changed in place before is in the shards. Inside
        # gather_parameters() it raises before anything is sent. Running statistics are those of
        # rank 0. It also works on a rank that ran no backward. Another backward before zero_grad()
        # is refused.
        # - self.reduced_gradients(): ends what is left of backward, and may send
        # - self.buckets: those of trained parameters
        # - optimizers.update_shard(optimizer, bucket, scale): one optimizer step on this rank's
        #   shard, with scale times its gradient
        # - replicas.broadcast_statistics(model, group): running statistics of rank 0, to all ranks
        # - self.reducer.needs_zero_grad: while it is True, backward raises; zero_grad() sets it
        #   back
        raise NotImplementedError("step 5: step")

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._wait()
        self.reducer.forget()
        self.gradient_scale = None
        for bucket in self.buckets:
            bucket.gradient_shard = None
        for param in self.model.parameters():
            param.grad = None

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Context in which every parameter is whole. All ranks must enter it, and call no
        backward() inside. Edits are kept: make them alike on all ranks, else RuntimeError. An
        error inside undoes them."""
        # step 5: inside, every parameter is whole, and self.inside_gather_parameters is True, so
        # that no unit has turns, and no evaluation ends. Afterwards none is whole, and
        # self.inside_gather_parameters is False. Edits are kept if all ranks made them alike, else
        # it is a RuntimeError; an error inside undoes them.
        # - whole_parameters(self.all_buckets, self.rank, self.group): a context in which all
        #   parameters are whole, in new memory. At its end they go into the shards, unless an error
        #   ended it. It frees nothing, and sets no unit.whole.
        # - replicas.check_alike(model, group): raises RuntimeError on all ranks if their parameters
        #   differ
        raise NotImplementedError("step 5: gather_parameters")


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Stage3)
