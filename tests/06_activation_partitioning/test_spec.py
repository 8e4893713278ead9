"""Lesson 6, P_a: a checkpoint is cut over the ranks that would hold copies of it, and nothing else changes."""

import warnings

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from torch import nn

from zero_minimal.activation_partitioning import checkpoint, checkpoint_blocks
from zero_minimal.meters.memory import Ledger
from zero_minimal.meters.traffic import TrafficMeter

P_A = dict(group="all")
MODES = {"plain": dict(), "P_a": P_A, "P_a+cpu": P_A | dict(to_host=True), "cpu": dict(to_host=True)}


def options_of(mode):
    return {key: dist.group.WORLD if value == "all" else value for key, value in MODES[mode].items()}


def trained(mode):
    """Losses and parameters of some steps of one model that all ranks work on alike, as model-parallel ranks do."""
    torch.manual_seed(1)
    model = toys.Transformer(dropout=0.2)
    if mode != "no checkpoints":
        checkpoint_blocks(model, **options_of(mode))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(4):
        loss = model(*toys.tokens(0, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.detach() for param in model.parameters()], torch.rand(1).item()


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_losses_and_parameters_agree_bit_for_bit_with_dropout(world_size):
    for found in toys.run(lambda: {mode: trained(mode) for mode in ("no checkpoints", *MODES)}, world_size):
        losses, parameters, drawn_after = found["no checkpoints"]
        assert losses[-1] < losses[0]
        for mode in MODES:
            assert found[mode][0] == losses, mode
            assert toys.identical(found[mode][1], parameters), mode
            assert found[mode][2] == drawn_after, f"{mode} leaves another random state behind"


SHAPE = (3, 7, 5)  # 105 elements: no world divides them


class Blocks(nn.Module):
    def __init__(self, count):
        super().__init__()
        inside = (nn.Sequential(nn.Linear(5, 20), nn.GELU(), nn.Linear(20, 5)) for _ in range(count))
        self.blocks = nn.ModuleList(inside)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def kept_and_sent(mode, blocks):
    """Activation bytes between forward and backward, and after backward while the output still lives; what was sent
    in forward and in backward."""
    ledger = Ledger()
    with ledger:
        model = Blocks(blocks)
        ledger.watch(model)
        checkpoint_blocks(model, **options_of(mode))
        model(torch.ones(SHAPE))  # the first pass of a block compares checksums too
        with TrafficMeter() as forward:
            output = model(torch.ones(SHAPE))
        between = ledger.states()["activations"]
        with TrafficMeter() as backward:
            output.sum().backward()
        return between, ledger.states()["activations"] - output.nbytes, forward.collectives, backward.collectives


def of_each_mode():
    """In plain mode and in P_a: bytes that each block keeps, bytes after backward, what was sent. And what is left."""
    warnings.simplefilter("ignore")  # one rank saves nothing
    found, nothing = {}, checks.live_bytes()
    for mode in ("plain", "P_a"):
        (few, *_), (many, after, *sent) = kept_and_sent(mode, 2), kept_and_sent(mode, 7)
        found[mode] = (many - few) / 5, after, sent
    return found, checks.live_bytes(until=nothing) - nothing


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_a_checkpoint_is_one_share_of_the_input_and_is_gathered_once_in_backward(world_size):
    whole, share = 4 * 105, 4 * -(-105 // world_size)  # bytes
    for found, left in toys.run(of_each_mode, world_size):
        (kept, after, sent), (kept_part, after_parts, sent_by_p_a) = found["plain"], found["P_a"]
        assert (kept, kept_part) == (whole, share)
        assert after <= whole and after_parts <= whole and left == 0, "checkpoints outlive backward"
        assert sent == [{}, {}]
        assert sent_by_p_a == [{}, {"all_gather": {"calls": 7, "bytes": 7 * share * world_size}}]


def test_without_gradients_nothing_is_kept():
    kept = []
    with torch.no_grad():
        assert checkpoint(nn.Linear(5, 3), torch.ones(2, 5), place=kept.append).grad_fn is None
    assert kept == []


def test_a_group_of_one_rank_is_told_that_it_saves_nothing():
    def look():
        with pytest.warns(match="saves nothing.*model-parallel group has one rank") as caught:
            checkpoint(nn.Linear(5, 5), torch.ones(2, 5), group=dist.group.WORLD)
        return len(caught)

    assert toys.run(look, 1) == [1]
