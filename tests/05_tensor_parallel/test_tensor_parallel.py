"""Lesson 5, tensor parallelism: a cut GPT is the whole one, but for rounding; what a rank holds, sends and draws."""

import contextlib
import functools
import io
import itertools
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import checks
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toys
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from zero_minimal.core import collectives
from zero_minimal.core.mesh import make_mesh
from zero_minimal.core.random_state import parallel_random
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.stage2 import Stage2
from zero_minimal.tensor_parallel import ParallelGPT, f, g
from zero_minimal.workload.model import GPT, GPTConfig

by_world = pytest.mark.parametrize("world_size", toys.WORLDS)

# 12 heads of 3: what 2, 3 and 4 ranks can share. None of them divides the vocabulary or the sequence.
CONFIG = GPTConfig(
    layers=2, hidden=36, heads=12, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0
)
FEW = replace(CONFIG, vocabulary=5)  # on 4 ranks: 2, 2, 1 and no tokens
WITH_DROPOUT = replace(CONFIG, dropout=0.3)

# fp32 rounds by 6e-8. About thirty operations follow one another here, each a sum of at most 144 products, whose
# roundings partly cancel; this allows each tensor 80 roundings. A mistake is of the size of the tensor itself.
ROUNDING = 5e-6

WHOLE = ("norm.weight", "norm.bias", "projection.bias", "position_embedding.weight")  # on every rank: names end so


def lively(config):
    """A GPT whose weights, biases and norms are all far from where they start: each one matters."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model


def cut(config, group=None):
    """The same model, over the ranks of a group."""
    torch.manual_seed(1)  # other values than lively's
    model = ParallelGPT(config, group)
    model.load_whole(lively(config).state_dict())
    return model


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


# ------------------------------------------------------------------------------------------- the same as one process


def against_one_process(config):
    """{what: (loss, loss of one process, {parameter: (distance of the gradients, size of the gradient)}, gradients)}"""
    found = {}
    inputs, targets = toys.tokens(0, 0, vocabulary=config.vocabulary)
    for what, loss_of in {
        "loss": lambda model: model(inputs, targets),
        "logits": lambda model: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()),
    }.items():
        single, model = lively(config), cut(config)
        wanted, loss = loss_of(single), loss_of(model)
        wanted.backward()
        loss.backward()
        theirs, ours = model.shard_of(gradients(single)), gradients(model)
        errors = {name: ((ours[name] - theirs[name]).norm().item(), theirs[name].norm().item()) for name in ours}
        found[what] = loss.detach(), wanted.detach(), errors, ours
    return found


on_ranks = functools.cache(functools.partial(toys.run, against_one_process))


@pytest.mark.thorough
@pytest.mark.parametrize("what", ("loss", "logits"))
@pytest.mark.parametrize("config", (CONFIG, FEW), ids=("31 tokens", "5 tokens"))
@by_world
def test_loss_and_gradients_are_those_of_one_process(world_size, config, what):
    for rank, found in enumerate(on_ranks(world_size, config)):
        loss, wanted, errors, _ = found[what]
        assert loss.dtype == torch.float32 and loss.shape == ()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6), f"rank {rank} of {world_size}"
        assert len(errors) == 4 + 12 * config.layers
        for name, (error, size) in errors.items():
            assert error <= ROUNDING * size, f"rank {rank} of {world_size}, {name}: off by {error} of {size}"


def assert_whole_ones_are_equal(of_ranks):
    """of_ranks: {name: tensor} for each rank."""
    names = [name for name in of_ranks[0] if name.endswith(WHOLE)]
    assert len(names) == 3 + 6 * CONFIG.layers
    for name in names:
        for rank, tensors in enumerate(of_ranks):
            assert torch.equal(tensors[name], of_ranks[0][name]), f"{name} differs between ranks 0 and {rank}"


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_what_every_rank_holds_has_the_same_gradient_bit_for_bit(world_size):
    found = [rank["loss"] for rank in on_ranks(world_size, CONFIG)]
    assert len({loss.item() for loss, *_ in found}) == 1
    assert_whole_ones_are_equal([ours for *_, ours in found])


def in_bf16():
    model, single = cut(CONFIG).bfloat16(), lively(CONFIG)
    loss = model(*toys.tokens(0, 0))
    loss.backward()
    assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}
    return loss.detach(), single(*toys.tokens(0, 0)).item()


def test_bf16():
    for loss, wanted in toys.run(in_bf16, 2):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(wanted, rel=2e-2)


def large_logits():
    """Loss of a model whose logits are too large for exp() in fp32."""
    single, model = lively(CONFIG), cut(CONFIG)
    for either in (single, model):
        nn.init.constant_(either.norm.weight, 100.0)
    inputs, targets = toys.tokens(0, 0)
    return model(inputs, targets).item(), single(inputs, targets).item(), single(inputs).max().item()


def test_large_logits_do_not_overflow():
    for loss, wanted, highest in toys.run(large_logits, 3):
        assert highest > 100
        assert loss == pytest.approx(wanted, rel=1e-5)


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


# ------------------------------------------------------------------------------------------------------------- dropout


def masks():
    """On a 2 x 2 mesh: this rank's masks inside the parallel region, outside it, and the states afterwards."""
    mesh = make_mesh(2)
    model = cut(WITH_DROPOUT, mesh.model_group)
    inside, outside = [], []

    def attention(query, key, value, dropout_p, is_causal):
        mask = F.dropout(torch.ones_like(value), dropout_p)
        inside.append(mask != 0)
        return value * mask

    F.scaled_dot_product_attention = attention  # this process ends with the test
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: outside.append(output != 0))
    torch.manual_seed(7 + mesh.data_rank)
    model(*toys.tokens(0, 0))
    return inside, outside, torch.get_rng_state()


def test_masks_differ_inside_the_region_and_are_equal_outside():
    ranks = toys.run(masks, 4)
    for inside, outside, _ in ranks:
        assert len(inside) == CONFIG.layers and len(outside) == 1 + 2 * CONFIG.layers
        for mask in inside + outside:
            assert 0.5 < mask.float().mean() < 0.9, "nothing, or not a share of 0.3, was dropped"
    every = [mask for inside, *_ in ranks for mask in inside]
    for one, other in itertools.combinations(every, 2):
        share = (one == other).float().mean()  # by chance 0.3² + 0.7² = 0.58
        assert share < 0.75, "two ranks or blocks dropped the same values inside the region"
    for first, second in ((0, 1), (2, 3)):
        assert toys.identical(ranks[first][1], ranks[second][1]), "masks outside differ within a model-parallel group"
        assert torch.equal(ranks[first][2], ranks[second][2]), "random states drifted apart"
    different_data = zip(ranks[0][1], ranks[2][1], strict=True)
    assert not any(torch.equal(one, other) for one, other in different_data), "replicas drop the same values"
    of_one_rank = itertools.combinations(ranks[0][1][1:], 2)
    assert not any(torch.equal(one, other) for one, other in of_one_rank), "a mask was used twice"


def draws():
    torch.manual_seed(3)
    before = torch.rand(4)
    with parallel_random():
        first = torch.rand(4)
    between = torch.rand(4)
    with contextlib.suppress(KeyError), parallel_random():
        second = torch.rand(4)
        raise KeyError  # as checkpointing does that stops early
    return [before, between, torch.rand(4)], [first, second]


def test_the_outside_state_comes_back():
    ranks = toys.run(draws, 3)
    for outside, _ in ranks:
        assert toys.identical(outside, ranks[0][0])
    numbers = {number for outside, inside in ranks for part in inside for number in part.tolist()}
    assert len(numbers) == 3 * 2 * 4, "ranks drew the same, or a second region the same as the first"
    assert not numbers & {number for part in ranks[0][0] for number in part.tolist()}


def with_dropout():
    """Loss, gradients and random state of a step: activations kept, and recomputed."""
    found = []
    for way in (None, lambda block, x: checkpoint(block.inside, x, use_reentrant=False)):
        model = cut(WITH_DROPOUT)
        model.run_block = way
        torch.manual_seed(7)
        loss = model(*toys.tokens(0, 0))
        loss.backward()
        found.append((loss.item(), gradients(model), torch.get_rng_state()))
    return found


def test_checkpointing_that_restores_torchs_state_recomputes_the_same_masks():
    ranks = toys.run(with_dropout, 2)
    for (loss, kept, state), (again, recomputed, state_again) in ranks:
        assert loss == again
        assert toys.identical(kept.values(), recomputed.values())
        assert torch.equal(state, state_again)
    assert_whole_ones_are_equal([kept for (_, kept, _), _ in ranks])


def evaluation():
    single, model = lively(CONFIG), cut(WITH_DROPOUT).eval()
    state = torch.get_rng_state()
    loss = model(*toys.tokens(0, 0)).item()
    untouched = torch.equal(state, torch.get_rng_state())
    return loss, single(*toys.tokens(0, 0)).item(), untouched


def test_evaluation_drops_nothing_and_draws_nothing():
    for loss, wanted, untouched in toys.run(evaluation, 2):
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert untouched


def trained(steps=25):
    torch.manual_seed(0)
    model = ParallelGPT(replace(CONFIG, dropout=0.1))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(*toys.tokens(0, step, batch=6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.thorough
def test_trains_with_dropout():
    ranks = toys.run(trained, 3)
    losses = ranks[0][0]
    assert losses[0] == pytest.approx(3.43, abs=0.2)  # ln 31
    assert sum(losses[-5:]) / 5 < 0.7 * losses[0], f"nothing was learned: {losses}"
    assert all(others == losses for others, _ in ranks)
    assert_whole_ones_are_equal([params for _, params in ranks])


# -------------------------------------------------------------------------------------------------------------- meshes

STEPS, GLOBAL_BATCH = 4, 8


def on_meshes():
    """DP alone, and meshes of the same 4 ranks, on the same global batches:
    {M (0: the plain GPT): (losses, data rank, distance of the parameters from DP alone's)}"""
    found, whole = {}, None
    for model_parallel in (0, 1, 2, 4):
        if model_parallel:
            mesh = make_mesh(model_parallel)
            model, group, data_rank = cut(CONFIG, mesh.model_group), mesh.data_group, mesh.data_rank
        else:
            model, group, data_rank = lively(CONFIG), dist.group.WORLD, dist.get_rank()
        zero = Stage2(model, optim.AdamW, group=group, bucket_bytes=4096, **checks.ADAM)
        losses = []
        for step in range(STEPS):
            inputs, targets = (
                part.chunk(dist.get_world_size(group))[data_rank] for part in toys.tokens(0, step, batch=GLOBAL_BATCH)
            )
            loss = model(inputs, targets)
            loss.backward()
            zero.step()
            zero.zero_grad()
            losses.append(loss.item())
        params = {name: param.detach() for name, param in model.named_parameters()}
        whole = whole or params
        wanted = whole.values() if not model_parallel else model.shard_of(whole).values()
        found[model_parallel] = losses, data_rank, toys.distance(params.values(), wanted)
    start = toys.distance(lively(CONFIG).parameters(), whole.values())
    return found, start


@functools.cache
def meshes():
    return toys.run(on_meshes, 4)


def mean_losses(found, model_parallel):
    return [sum(losses) / 4 for losses in zip(*(rank[model_parallel][0] for rank, _ in found), strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("model_parallel", (1, 2, 4))
def test_meshes_train_as_data_parallelism_alone(model_parallel):
    found = meshes()
    assert mean_losses(found, model_parallel) == pytest.approx(mean_losses(found, 0), rel=1e-6)
    for rank, start in found:
        _, _, distance = rank[model_parallel]
        assert distance <= ROUNDING * start, f"parameters moved by {start}, and end {distance} away from DP alone's"


@pytest.mark.thorough
@pytest.mark.parametrize("model_parallel", (1, 2, 4))
def test_a_mesh_tells_ranks_their_data(model_parallel):
    ranks = [rank[model_parallel] for rank, _ in meshes()]
    assert [data_rank for _, data_rank, _ in ranks] == [rank // model_parallel for rank in range(4)]
    different = {tuple(losses) for losses, *_ in ranks}
    assert len(different) == 4 // model_parallel, "ranks that share a model share losses, and no others do"


def neighbours():
    mesh = make_mesh(2)
    members = [dist.get_process_group_ranks(group) for group in (mesh.model_group, mesh.data_group)]
    return members, mesh.model_rank, mesh.data_rank


def test_model_parallel_ranks_are_neighbours():
    assert toys.run(neighbours, 4) == [
        ([[0, 1], [0, 2]], 0, 0), ([[0, 1], [1, 3]], 1, 0), ([[2, 3], [0, 2]], 0, 1), ([[2, 3], [1, 3]], 1, 1),
    ]


# ---------------------------------------------------------------------------------------------------- start and errors


def from_a_seed():
    """Whether the same seed gives the same model at every M; and its weights, from an M of 1."""
    torch.manual_seed(5)
    whole = ParallelGPT(CONFIG, make_mesh(1).model_group)
    torch.manual_seed(5)
    model = ParallelGPT(CONFIG)
    wanted = model.shard_of(whole.state_dict())
    return all(torch.equal(param, wanted[name]) for name, param in model.named_parameters()), whole.state_dict()


def test_a_seed_gives_the_same_model_at_any_m():
    torch.manual_seed(5)
    theirs = GPT(CONFIG)
    for same, state in toys.run(from_a_seed, 3):
        assert same
        for name, param in theirs.named_parameters():  # GPT-2's initialisation, as GPT's
            assert state[name].shape == param.shape
            assert state[name].mean().item() == pytest.approx(param.mean().item(), abs=5e-3), name
            assert state[name].std().item() == pytest.approx(param.std().item(), rel=0.15), name


def message(function, *args):
    with pytest.raises(ValueError) as caught:
        function(*args)
    return str(caught.value)


def refusals():
    model, state = ParallelGPT(CONFIG), GPT(CONFIG).state_dict()
    tokens = torch.zeros(2, 3, dtype=torch.long)
    return {
        "no mesh": message(make_mesh, 2),
        "no rank": message(make_mesh, 0),
        "heads": message(ParallelGPT, replace(CONFIG, heads=4)),
        "long": message(model, torch.zeros(1, 10, dtype=torch.long)),
        "token": message(model, tokens + 31),
        "target": message(model, tokens, tokens - 1),
        "missing": message(model.load_whole, {name: state[name] for name in state if name != "norm.bias"}),
        "vocabulary": message(model.load_whole, GPT(replace(CONFIG, vocabulary=40)).state_dict()),
        "wider": message(model.load_whole, GPT(replace(CONFIG, hidden=72)).state_dict()),
        "odd": message(model.load_whole, state | {"blocks.0.mlp.expansion.bias": torch.zeros(25)}),
    }


def test_errors_come_on_every_rank_and_say_what_is_accepted():
    ranks = toys.run(refusals, 3)
    assert all(rank == ranks[0] for rank in ranks[1:])
    for name, words in {
        "no mesh": ("3 ranks", "groups of 2", "D × M", "1, 3"),
        "no rank": ("groups of 0", "1, 3"),
        "heads": ("3 model-parallel ranks", "4 attention heads", "1, 2, 4"),
        "long": ("at most 9", "10"),
        "token": ("0 to 30", "31"),
        "target": ("0 to 30", "-1"),
        "missing": ("norm.bias", "same config"),
        "vocabulary": ("31", "40"),
        "wider": ("72)", "36)", "same config"),
        "odd": ("25", "multiple of 3"),
    }.items():
        for word in words:
            assert word in ranks[0][name], f"{name}: {ranks[0][name]}"


# -------------------------------------------------------------------------------------------------- memory and traffic


def owned():
    """{name: bytes of the storages of this rank's parameter and of its gradient}, and those of the whole ones."""
    model, single = cut(CONFIG), lively(CONFIG)
    model(*toys.tokens(0, 0)).backward()
    ours = {name: [part.untyped_storage().nbytes() for part in (param.data, param.grad)]
            for name, param in model.named_parameters()}
    return ours, {name: param.nbytes for name, param in single.named_parameters()}


@pytest.mark.thorough
@by_world
def test_a_rank_owns_its_share(world_size):
    for ours, whole in toys.run(owned, world_size):
        assert ours.keys() == whole.keys()
        for name, sizes in ours.items():
            share = whole[name] // world_size
            if name == "token_embedding.weight":
                share = -(-31 // world_size) * 36 * 4  # its vocabulary is filled up
            elif name.endswith(WHOLE):
                share = whole[name]
            assert sizes == [share, share], f"{name} on one of {world_size} ranks; whole {whole[name]} bytes"


def counted():
    """What the meter counts in a block's forward, in its forward and backward, and in those of the whole model."""
    model = cut(CONFIG)
    x = torch.randn(3, toys.SEQUENCE, CONFIG.hidden, requires_grad=True)
    collectives.all_reduce(x.data)  # the same on all ranks
    found = []
    with TrafficMeter() as meter:
        y = model.blocks[0](x)
        found.append(meter.per_step(1)["collectives"])
        y.sum().backward()
        found.append(meter.per_step(1)["collectives"])
        meter.reset()
        model(*toys.tokens(0, 0)).backward()
        found.append(meter.per_step(1)["collectives"])
    return found, meter.sent_bytes


@pytest.mark.parametrize("world_size", (2, 3))
def test_a_block_sends_two_all_reduces_forward_and_two_backward(world_size):
    tokens = 3 * toys.SEQUENCE
    each = 4 * tokens * CONFIG.hidden  # bytes
    for (forward, both, model), sent in toys.run(counted, world_size):
        assert forward == {"all_reduce": {"calls": 2, "bytes": 2 * each}}
        assert both == {"all_reduce": {"calls": 4, "bytes": 4 * each}}
        # the embedding's and the head's; for the loss the highest logit, then two sums, of each token
        wanted = {"calls": 4 * CONFIG.layers + 2 + 2, "bytes": (4 * CONFIG.layers + 2) * each + 3 * 4 * tokens}
        assert model == {"all_reduce": wanted}
        assert sent == pytest.approx(2 * wanted["bytes"] * (world_size - 1) / world_size, abs=1)


# --------------------------------------------------------------------------------------------------------- the program

PROGRAM = Path(__file__).parents[2] / "zero_minimal" / "tensor_parallel.py"
FLAGS = ("--device", "cpu", "--layers", "2", "--hidden", "32", "--heads", "4", "--sequence", "16", "--steps", "9",
         "--lr", "0.1", "--dropout", "0.1")


def program(*flags):
    """What the program writes on this rank, and its exit code."""
    sys.argv = [str(PROGRAM), *FLAGS, *flags]
    written, code = io.StringIO(), 0
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        except SystemExit as error:
            code = error.code
    return written.getvalue(), code


@pytest.mark.thorough
def test_the_program_trains_on_a_mesh():
    outputs = toys.run(program, 4, "--model-parallel", "2", "--recompute")
    assert [code for _, code in outputs] == [0] * 4
    last = " ".join(outputs[0][0].split()).partition("D × M = 2 × 2: loss on held-out text")[2].split()
    before, after = (float(word) for word in last if word.replace(".", "", 1).isdigit() and "." in word)
    assert before == pytest.approx(5.5, abs=0.2) and after < before - 0.5  # ln 256 = 5.55


@pytest.mark.parametrize("flags, word", [
    (("--model-parallel", "3"), "accepted here: 1, 2"),
    (("--model-parallel", "0"), "from 1 up"),
    (("--heads", "1"), "1 attention heads"),
    (("--clip", "1"), "--clip 0"),
])
def test_the_program_refuses(flags, word):
    for text, code in toys.run(program, 2, *flags):
        assert code == 2
        assert word in text
