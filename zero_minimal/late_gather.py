"""Late gathering: the updated parameters of stages 1 and 2 travel while the next forward begins.

    stage 1     backward ▒▒▒▒▒▒▒▒  update  gather ▒▒▒▒▒▒▒▒  forward          backward ▒▒▒▒▒▒▒▒
    Late1       backward ▒▒▒▒▒▒▒▒  update  forward ▒▒▒▒▒▒▒▒  backward ▒▒▒▒▒▒▒▒

A forward does not need all parameters at once: the embedding comes first, the head last. So step()
starts the all-gathers, in the order of the forward, and returns. Each module then waits only for
its own parameters (extensions/lazy_all_gather.py), as at stage 3. Bytes, memory and losses are
those of stages 1 and 2.

Any other read of a parameter waits for it, too, and gets the whole, new one. Code that bypasses
PyTorch, such as C++ extensions and CUDA graphs, needs `zero.gathering.wait()` before.
"""

import torch

from zero_minimal.core import optimizers, replicas
from zero_minimal.extensions.lazy_all_gather import LazyAllGather
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2


class Late:
    """The changes to a stage. Take Late1 or Late2 in place of Stage1 or Stage2, with the same
    arguments."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gathering = LazyAllGather(self)

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's shards, and start to gather all ranks' shards: first what forward
        needs first."""
        self.gathering.wait()  # for what no forward has used since the last step
        self.reduced_gradients()
        # before the parameters: messages to a rank arrive in the order in which they were sent
        replicas.broadcast_statistics(self.model, self.group)
        for bucket in reversed(self.buckets):  # backward completes the last layers first
            optimizers.update_shard(self.optimizer, bucket, self.gradient_scale)
            self.gathering.start(bucket)
        self.reducer.needs_zero_grad = True

    # code that uses more than one module at a time waits for all

    def load_state_dict(self, state: dict) -> None:
        """Continue from what `state_dict` returned on this rank. ValueError if it does not fit."""
        self.gathering.wait()
        super().load_state_dict(state)

    def gather_parameters(self):
        """Context in which every parameter is whole, as at stages 1 and 2."""
        self.gathering.wait()
        return super().gather_parameters()


class Late1(Late, Stage1):
    """Stage 1 that gathers late."""


class Late2(Late, Stage2):
    """Stage 2 that gathers late."""


if __name__ == "__main__":
    from zero_minimal.programs.train import main

    main(Late2)
