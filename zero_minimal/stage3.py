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
        # [padded / N], a copy: the rest is freed
        bucket.parameter_shard = bucket.shard(bucket.parameters, self.rank).clone()
        self._free(bucket)

    # parameters come and go: core/execution_order.py says when

    def _gather(self, unit):
        """Start to gather a unit's parameters."""
        if unit.whole or unit.gathering:
            return
        for bucket in unit.buckets:
            # here a bucket is a whole flat: no other shares this memory
            bucket.parameters.untyped_storage().resize_(bucket.padded * bucket.dtype.itemsize)
            unit.gathering.append(collectives.all_gather(
                bucket.parameters, bucket.parameter_shard, group=self.group, of=bucket,
                async_op=True,
            ))

    def _arrive(self, unit):
        """Wait for the all-gathers."""
        if unit.gathering:
            for pending in unit.gathering:
                pending.wait()
            for bucket in unit.buckets:
                for param in bucket.params:
                    restore(param, bucket.flat.view(bucket.parameters, param))
            unit.gathering, unit.whole = [], True

    def _release(self, unit):
        self._arrive(unit)
        for bucket in unit.buckets:
            if unit.whole:  # what the user has changed in place stays changed
                bucket.parameter_shard.copy_(bucket.shard(bucket.parameters, self.rank))
            self._free(bucket)
        unit.whole = False

    def _free(self, bucket):
        """Free the parameters of a bucket."""
        for param in bucket.params:
            release(param, bucket.flat.placeholder(param))
        # autograd has saved views of their storage, so dropping our own reference would free
        # nothing: the storage itself shrinks to 0 bytes, and is filled again for backward
        collectives.free(bucket.parameters)

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
        for other in self.units:
            # keep this unit, those around it, the next one, and units inside this one
            stays = other in [unit, *unit.parents, following] or unit in other.parents
            if (other.whole or other.gathering) and not stays:
                self._release(other)

    def _gather_needed(self, unit):
        # for a layer inside a block, unit.parents is [root, block]: they are at work too
        needed = [unit, *unit.parents]
        for one in needed:
            self._gather(one)
        for one in needed:
            self._arrive(one)

    def _prefetch(self, following):
        if following:  # it travels while this unit computes
            self._gather(following)

    def evaluation_done(self):
        self._release_all()

    # during backward: core/reducer.py calls these; bucket_complete when backward has left a unit

    def backward_begins(self):
        if self.inside_gather_parameters:
            raise RuntimeError("call backward() outside gather_parameters()")
        self.execution_order.begin("backward")

    def bucket_complete(self, bucket, done):
        # first wait for the bucket before, under way while autograd made these gradients: its
        # memory is free before this one takes as much
        self._wait()
        whole = self.memory.whole(bucket)  # [padded], zeros: what a missing gradient counts as
        bucket.fuse_gradients(whole)
        for param in done:  # here all of bucket.params, since none lies in two buckets
            param.grad = None  # frees what autograd made: all of it has been copied
        shard = self.memory.shard(bucket)  # [padded / N]
        pending = collectives.reduce_scatter(
            shard, whole, op="avg", group=self.group, of=bucket, async_op=True
        )
        self.reducing = Reduction(bucket, whole, shard, pending)

    def _wait(self):
        if self.reducing:
            bucket, shard = self.reducing.bucket, self.reducing.shard
            self.reducing.pending.wait()
            self.memory.give_back(self.reducing.whole)  # not before: it was being sent
            if bucket.gradient_shard is None:
                bucket.gradient_shard = shard
            else:
                bucket.gradient_shard += shard  # from an earlier micro-batch
            self.reducing = None

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
        self._release_all()  # first: inside gather_parameters() it refuses, before anything is sent
        self.reduced_gradients()
        for bucket in self.buckets:
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
        replicas.broadcast_statistics(self.model, self.group)
        self.reducer.needs_zero_grad = True

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
        self._release_all()
        self.inside_gather_parameters = True
        try:
            with whole_parameters(self.all_buckets, self.rank, self.group):
                yield
                replicas.check_alike(self.model, self.group)
        finally:
            self.inside_gather_parameters = False
            self._release_all()


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Stage3)
