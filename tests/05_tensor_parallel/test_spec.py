"""Lesson 5, tensor parallelism: a GPT that is cut over M ranks is the whole one, but for rounding."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toys
from cut import is_cut

from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.tensor_parallel import ParallelGPT, f, g
from zero_minimal.workload.model import GPT, GPTConfig

by_world = pytest.mark.parametrize("world_size", toys.WORLDS)

# 12 heads of 3: what 2, 3 and 4 ranks can share. None of them divides the vocabulary or the sequence.
CONFIG = GPTConfig(layers=2, hidden=36, heads=12, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)
FEW = replace(CONFIG, vocabulary=5)  # on 4 ranks: 2, 2, 1 and no tokens

# fp32 rounds by 6e-8. About thirty operations follow one another here, each a sum of at most 144 products, whose
# roundings partly cancel; this allows each tensor 80 roundings. A mistake is of the size of the tensor itself.
ROUNDING = 5e-6


def lively(config):
    """A GPT whose weights, biases and norms are all far from where they start: each one matters."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model


def cut(config):
    """The same model, over all ranks."""
    torch.manual_seed(1)  # other values than lively's
    model = ParallelGPT(config)
    model.load_whole(lively(config).state_dict())
    return model


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


# The graded checks hold each layer, and the loss of 2 and 3 ranks, against one process. What they leave open follows.


def twice_differentiated():
    """f and g against their meaning: the ranks' parts add up. Gradients, and gradients of gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(1.0, 4.0).requires_grad_()
    y = g((rank + 1) * f(x) ** 3)  # the sum of (rank + 1), times x^3
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    total = world_size * (world_size + 1) / 2
    return [torch.equal(ours, total * theirs) for ours, theirs in ((y, x**3), (first, 3 * x**2), (second, 6 * x))]


@by_world
def test_f_and_g_are_each_others_backward(world_size):
    assert toys.run(twice_differentiated, world_size) == [[True] * 3] * world_size


def against_one_process(config):
    """Loss of a step, by the model's own and by its whole logits; that of one process; gradients, and the right ones;
    bytes that this rank owns of each parameter."""
    inputs, targets = toys.tokens(0, 0, vocabulary=config.vocabulary)
    single, model = lively(config), cut(config)
    wanted, loss = (either(inputs, targets) + F.cross_entropy(either(inputs).flatten(0, 1), targets.flatten())
                    for either in (single, model))
    wanted.backward()
    loss.backward()
    owned = {name: param.untyped_storage().nbytes() for name, param in model.named_parameters()}
    return loss.item(), wanted.item(), gradients(model), model.shard_of(gradients(single)), owned


@pytest.mark.thorough
@pytest.mark.parametrize("config", (CONFIG, FEW), ids=("31 tokens", "5 tokens"))
@by_world
def test_loss_logits_and_gradients_are_those_of_one_process(world_size, config):
    whole = {name: param.numel() for name, param in GPT(config).named_parameters()}
    whole["token_embedding.weight"] = -(-config.vocabulary // world_size) * world_size * config.hidden  # filled up
    ranks = toys.run(against_one_process, world_size, config)
    for rank, (loss, wanted, ours, theirs, owned) in enumerate(ranks):
        assert loss == ranks[0][0] == pytest.approx(wanted, rel=1e-6), f"rank {rank} of {world_size}"
        assert ours.keys() == whole.keys()
        for name, gradient in ours.items():
            where = f"rank {rank} of {world_size}, {name}"
            assert (gradient - theirs[name]).norm() <= ROUNDING * theirs[name].norm(), where
            assert is_cut(name) or torch.equal(gradient, ranks[0][2][name]), f"{where} differs from rank 0's"
            assert owned[name] == 4 * whole[name] // (world_size if is_cut(name) else 1), where


def counted():
    """What the meter counts in a block's forward, in its backward, and in both of the whole model."""
    model = cut(CONFIG)
    x = torch.ones(3, toys.SEQUENCE, CONFIG.hidden, requires_grad=True)
    with TrafficMeter() as forward:
        y = model.blocks[0](x)
    with TrafficMeter() as backward:
        y.sum().backward()
    with TrafficMeter() as whole:
        model(*toys.tokens(0, 0)).backward()
    return [meter.per_step(1)["collectives"] for meter in (forward, backward, whole)], whole.sent_bytes


@pytest.mark.parametrize("world_size", (2, 3))
def test_a_block_sends_two_all_reduces_forward_and_two_backward(world_size):
    tokens = 3 * toys.SEQUENCE
    each = 4 * tokens * CONFIG.hidden  # bytes
    for (*of_a_block, model), sent in toys.run(counted, world_size):
        assert of_a_block == [{"all_reduce": {"calls": 2, "bytes": 2 * each}}] * 2
        # the embedding's and the head's; for the loss the highest logit, then two sums, of each token
        wanted = {"calls": 4 * CONFIG.layers + 2 + 2, "bytes": (4 * CONFIG.layers + 2) * each + 3 * 4 * tokens}
        assert model == {"all_reduce": wanted}
        assert sent == pytest.approx(2 * wanted["bytes"] * (world_size - 1) / world_size, abs=1)
