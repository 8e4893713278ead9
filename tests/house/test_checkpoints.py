"""What would go wrong without a word under our checkpoint is refused, on every rank."""

import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from zero_minimal.activation_partitioning import checkpoint, checkpoint_blocks
from zero_minimal.core import mesh
from zero_minimal.meters.traffic import TrafficMeter

# ------------------------------------------------------------------------------- passes that are not a plain backward()


def squared(gradients):
    return sum(gradient.square().sum() for gradient in gradients)


PASSES = {
    "autograd.grad": lambda loss, x, layer: torch.autograd.grad(loss, x),
    "with create_graph": lambda loss, x, layer: torch.autograd.grad(loss, x, create_graph=True),
    "a penalty": lambda loss, x, layer: squared(torch.autograd.grad(loss, [x], create_graph=True)).backward(),
    "backward with create_graph": lambda loss, x, layer: loss.backward(create_graph=True),
    "backward of some inputs": lambda loss, x, layer: loss.backward(inputs=[x]),
}


def refused(name, partition):
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    group = dist.group.WORLD if partition else None
    loss = checkpoint(lambda x: layer(x).tanh(), x * 2, group=group).sum()
    with pytest.raises(RuntimeError, match="cannot go through .*checkpoint"):
        PASSES[name](loss, x, layer)
    assert layer.weight.grad is None and x.grad is None, "it was refused before anything was added"
    checkpoint(lambda x: layer(x).tanh(), x * 2, group=group).sum().backward()  # all goes on
    assert layer.weight.grad.any() and x.grad.any()


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("partition", (False, True), ids=("plain", "P_a"))
def test_only_a_plain_backward_goes_through(world_size, partition):
    def look():
        for name in PASSES:
            refused(name, partition)

    toys.run(look, world_size)


def test_what_does_not_go_through_it_is_free():
    """A gradient penalty beside a checkpointed block, and torch's own checkpoint, which can do all that."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    (checkpoint(layer, x).sum() + gradient.square().sum()).backward()
    inside = checkpoint(lambda x: checkpoint(layer, x).tanh(), x)
    inside.sum().backward()
    assert layer.weight.grad.any()
    loss = torch.utils.checkpoint.checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=False).sum()
    squared(torch.autograd.grad(loss, [x], create_graph=True)).backward()


# ------------------------------------------------------------------------------------------- P_a over what is no copy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x, own_noise=0.0):
        for block in self.blocks:
            x = block(x).tanh() + own_noise
        return x


def own_input(rank, shape=(2, 3)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def net(group):
    torch.manual_seed(0)
    model = Net()
    checkpoint_blocks(model, group=group)
    return model


@pytest.mark.parametrize("world_size", (2, 3))
def test_a_data_parallel_group_is_refused_on_every_rank(world_size):
    def look():
        model, rank = net(dist.group.WORLD), dist.get_rank()
        for x in (
            own_input(rank), own_input(rank).bfloat16(), own_input(0, (2 + rank, 3)),
            own_input(0) if rank else own_input(0).flip(0),  # the same numbers in another order
        ):
            with pytest.raises(RuntimeError, match="mesh.model_group"):
                net(dist.group.WORLD).to(x.dtype)(x)
        model(own_input(0)).sum().backward()  # the same on every rank

    toys.run(look, world_size)


@pytest.mark.parametrize("world_size", (2, 3))
def test_ranks_that_drift_apart_behind_the_first_block_are_refused(world_size):
    """As those of a model-parallel group with another seed each: they drop other values."""
    def look():
        with pytest.raises(RuntimeError, match="the same seed"):
            net(dist.group.WORLD)(own_input(0), own_noise=0.1 * dist.get_rank())

    toys.run(look, world_size)


def test_the_groups_of_a_mesh():
    def look():
        both = mesh.make_mesh(2)
        x = own_input(both.data_rank)
        net(both.model_group)(x).sum().backward()
        for group in (both.data_group, dist.group.WORLD):
            with pytest.raises(RuntimeError, match="mesh.model_group"):
                net(group)(x)

    toys.run(look, 4)


def test_a_module_is_compared_in_its_first_pass_only():
    def look():
        model, weight = net(dist.group.WORLD), torch.eye(3, requires_grad=True)
        found = []
        for _ in range(2):
            with TrafficMeter() as meter:
                model(own_input(0))
                checkpoint(lambda x: x @ weight, own_input(0), group=dist.group.WORLD)
            found.append(meter.collectives)
        return found

    for first, second in toys.run(look, 2):
        assert first == {"all_gather": {"calls": 4, "bytes": 4 * 2 * 8}} and second == {}
