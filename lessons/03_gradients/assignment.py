"""P_os+g: gradients partitioned too. A rank keeps the gradients of the shard it updates, and no others (section 5.2).

Memory a rank, for Ψ parameters on N ranks:
    fp32     4Ψ parameters + 4Ψ/N gradients + 8Ψ/N Adam's momentum and variance
    16 bit   2Ψ            + 2Ψ/N           + 12Ψ/N, of which 4Ψ/N are the fp32 master parameters
and the whole gradients of the open buckets: one that backward fills, one that is being reduced.

Communication plan, a step:
    start      broadcast rank 0's parameters, once
    backward   reduce-scatter each bucket of gradients as soon as it is complete, and free it     Ψ(N−1)/N elements
    step       update the own shard, all-gather the updated parameters                            Ψ(N−1)/N elements
As much as data parallelism. With accumulation each micro-batch is reduced: whole gradients have no place to wait.
"""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from zero_minimal.foundations import collectives, layout, optimizers, precision, saved_state
from zero_minimal.foundations.backward import Backward


class Stage2:
    """Data parallelism over the ranks of `group`, with sharded optimizer state and gradients.

    Args:
        model: any nn.Module, the same on every rank. It stays yours: call it as before.
        optimizer_class: an element-wise torch optimizer; `optimizer_options` go to it (lr=3e-4, fused=True, …).
        bucket_bytes: gradients are reduced in pieces of about this size.
        param_groups: as torch.optim takes them; by default all parameters of the model.
    A parameter that gets no gradient in a step, on this rank or on all, counts as one whose gradient is zero: unlike in
    plain torch, momentum and weight decay still move it.
    Raises: ValueError for an empty model, one that is wrapped already, or an optimizer that is not element-wise.
    """

    def __init__(
        self, model, optimizer_class, *, group=None, bucket_bytes=4 * 2**20, param_groups=None, **optimizer_options
    ):
        groups = layout.parameter_groups(model, param_groups)
        optimizers.check_element_wise(optimizer_class, optimizer_options)
        self.model, self.group = model, group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)

        self.buckets = layout.pack(layout.trained(model, groups), groups, world_size, bucket_bytes)
        layout.adopt(self, model, self.buckets, group)
        layout.flatten(self.buckets)  # parameters [padded] of each bucket
        for bucket in self.buckets:
            collectives.broadcast(bucket.parameters, group=group)
            bucket.parameter_shard = bucket.shard(bucket.parameters, rank)  # [padded / N]
            bucket.master = precision.master_of(bucket.parameter_shard)
        layout.broadcast_rest(model, self.buckets, group)

        self.optimizer = optimizers.on_shards(optimizer_class, optimizer_options, groups, self.buckets)
        self.gradient_scale = None  # what the update multiplies gradients with, if anything
        self.backward = Backward(self)
        self._reducing = None

    # during backward: foundations/backward.py calls these

    def backward_begins(self):
        pass

    def gradient_arrived(self, param, buckets):
        # step 1: param.grad has been copied to its place in each of these buckets, self.backward knows (filled), and
        # param.grad is gone.
        raise NotImplementedError("step 1: gradient_arrived")

    def bucket_complete(self, bucket):
        # step 1: the reduce-scatter of this bucket's average is under way, and the bucket is closed. At most one is
        # under way at a time.
        raise NotImplementedError("step 1: bucket_complete")

    def _wait(self):
        # step 1: what is under way, if anything, has ended: its whole gradients are freed, this rank's part is in
        # bucket.gradient_shard (step 3: added to it).
        raise NotImplementedError("step 1: _wait")

    def backward_ends(self):
        self._wait()

    def no_sync(self):
        """Context for the micro-batches before the last. Here each one is reduced all the same."""
        return nullcontext()

    # after backward

    def reduced_gradients(self):
        """What the update reads: this rank's shard of each bucket's averaged gradient, [padded / N]."""
        if not self.backward.reduced:
            self.backward.finish()
        return [bucket.gradient_shard for bucket in self.buckets]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        """Scale the gradients down to this global norm, if theirs is larger; return the norm they had, []."""
        # step 4: self.gradient_scale brings the global norm down to max_norm.
        raise NotImplementedError("step 4: clip_grad_norm_")

    @torch.no_grad()
    def step(self):
        """Update this rank's shards, then collect everybody's: one bucket travels while the next is updated."""
        # step 2: this rank's shards are updated (with self.gradient_scale), every rank has all new parameters,
        # layout.broadcast_statistics was called, self.backward.spent is True.
        raise NotImplementedError("step 2: step")

    def zero_grad(self):
        """Forget the gradients."""
        # step 3: no gradient and no gradient_scale is left, and self.backward starts afresh (forget).
        raise NotImplementedError("step 3: zero_grad")

    # state

    def state_dict(self):
        """This rank's training state, for a restart with the same number of ranks."""
        return saved_state.shard_state(self)

    def load_state_dict(self, state):
        """Continue from what `state_dict` returned on this rank. Raises ValueError if it does not fit."""
        saved_state.load_shards(self, state)
        for bucket in self.buckets:
            collectives.all_gather(bucket.parameters, bucket.parameter_shard, group=self.group)

    @contextmanager
    def gather_parameters(self):
        """Context in which every parameter is whole, as here it always is. Edits that all ranks make alike are kept."""
        try:
            yield
        finally:
            for bucket in self.buckets:
                precision.keep_changes(bucket)


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Stage2)
