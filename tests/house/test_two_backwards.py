"""Two backward passes in one step: a parameter without a gradient on one rank counts as zero there, in both."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_minimal.processes import ranks
from zero_minimal.stage0 import Stage0
from zero_minimal.stage1 import Stage1
from zero_minimal.stage2 import Stage2
from zero_minimal.stage3 import Stage3

pytestmark = pytest.mark.thorough


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 5, bias=False), nn.Linear(3, 7, bias=False)

    def forward(self, x, both):
        loss = self.always(x).sum()
        return loss + self.sometimes(x).sum() if both else loss


def moves(stage_class, world_size):
    """How far plain SGD moves each parameter: lr × the mean over ranks of the sum over the two passes."""
    rank = dist.get_rank()
    model = Fork()
    zero = stage_class(model, torch.optim.SGD, lr=1.0, bucket_bytes=64)
    with zero.gather_parameters():
        before = [param.detach().clone() for param in model.parameters()]
    # rank 0 uses both layers in the first pass only, the last rank in the second only, others never
    for micro in range(2):
        both = (rank == 0 and micro == 0) or (rank == world_size - 1 and micro == 1)
        model(torch.full((1, 3), 1.0 + rank + 10 * micro), both).backward()
    zero.step()
    with zero.gather_parameters():
        return [(old - new.detach()) for old, new in zip(before, model.parameters(), strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage_class", [Stage0, Stage1, Stage2, Stage3])
def test_a_missing_gradient_is_zero_in_each_pass(stage_class, world_size):
    always = sum(1.0 + rank + 10 * micro for rank in range(world_size) for micro in range(2)) / world_size
    sometimes = (1.0 + (1.0 + world_size - 1 + 10)) / world_size
    for always_moved, sometimes_moved in ranks.run(moves, world_size, stage_class, world_size):
        # numbers below 64 with 24 bits of mantissa, subtracted from weights below 1: 64 × 2⁻²³ and room to spare
        torch.testing.assert_close(always_moved, torch.full((5, 3), always), rtol=0, atol=2e-5)
        torch.testing.assert_close(sometimes_moved, torch.full((7, 3), sometimes), rtol=0, atol=2e-5)
