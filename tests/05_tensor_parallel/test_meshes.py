"""Tensor parallelism in use: beside data parallelism on a mesh, with dropout and recomputation; what it refuses."""

import contextlib
import io
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from torch import optim
from torch.utils.checkpoint import checkpoint

from zero_minimal.core.mesh import make_mesh
from zero_minimal.stage2 import Stage2
from zero_minimal.tensor_parallel import ParallelGPT
from zero_minimal.workload.model import GPT, GPTConfig

# 12 heads of 3: what 2, 3 and 4 ranks can share
CONFIG = GPTConfig(layers=2, hidden=36, heads=12, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)


def whole():
    return toys.build(lambda: GPT(CONFIG), 0)


def cut(config=CONFIG, group=None):
    """The same model, over the ranks of a group."""
    model = ParallelGPT(config, group)
    model.load_whole(whole().state_dict())
    return model


# -------------------------------------------------------------------------------------------------------------- meshes


def neighbours():
    mesh = make_mesh(2)
    members = [dist.get_process_group_ranks(group) for group in (mesh.model_group, mesh.data_group)]
    return members, mesh.model_rank, mesh.data_rank


def test_model_parallel_ranks_are_neighbours():
    assert toys.run(neighbours, 4) == [
        ([[0, 1], [0, 2]], 0, 0), ([[0, 1], [1, 3]], 1, 0), ([[2, 3], [0, 2]], 0, 1), ([[2, 3], [1, 3]], 1, 1),
    ]


def on_meshes():
    """DP alone, and meshes of the same 4 ranks, on the same global batches:
    {M (0: the plain GPT): (losses, data rank, distance of the parameters from DP alone's)}; how far DP has moved them.
    """
    found, trained = {}, None
    for model_parallel in (0, 1, 2, 4):
        if model_parallel:
            mesh = make_mesh(model_parallel)
            model, group, data_rank = cut(CONFIG, mesh.model_group), mesh.data_group, mesh.data_rank
        else:
            model, group, data_rank = whole(), dist.group.WORLD, dist.get_rank()
        zero = Stage2(model, optim.AdamW, group=group, bucket_bytes=4096, **checks.ADAM)
        losses = []
        for step in range(4):
            tokens = toys.tokens(0, step, batch=8)
            loss = model(*(part.chunk(dist.get_world_size(group))[data_rank] for part in tokens))
            loss.backward()
            zero.step()
            zero.zero_grad()
            losses.append(loss.item())
        params = {name: param.detach() for name, param in model.named_parameters()}
        trained = trained or params
        wanted = model.shard_of(trained) if model_parallel else trained
        found[model_parallel] = losses, data_rank, toys.distance(params.values(), wanted.values())
    return found, toys.distance(whole().parameters(), trained.values())


@pytest.mark.thorough
def test_meshes_train_as_data_parallelism_alone_and_tell_ranks_their_data():
    ranks = toys.run(on_meshes, 4)
    means = {of: torch.tensor([found[of][0] for found, _ in ranks]).mean(0).tolist() for of in (0, 1, 2, 4)}
    for model_parallel in (1, 2, 4):
        assert means[model_parallel] == pytest.approx(means[0], rel=1e-6)
        assert [found[model_parallel][1] for found, _ in ranks] == [rank // model_parallel for rank in range(4)]
        different = {tuple(found[model_parallel][0]) for found, _ in ranks}
        assert len(different) == 4 // model_parallel, "ranks that share a model share losses, and no others do"
        for found, moved in ranks:
            distance = found[model_parallel][2]  # as few roundings as in test_spec.py, from the same gradients
            assert distance <= 5e-6 * moved, f"parameters moved by {moved}, and end {distance} away from DP alone's"


# ------------------------------------------------------------------------------------------- start, and recomputation


def from_a_seed():
    """Whether the same seed gives the same model at every M; and its weights, from an M of 1."""
    torch.manual_seed(5)
    alone = ParallelGPT(CONFIG, make_mesh(1).model_group)
    torch.manual_seed(5)
    model = ParallelGPT(CONFIG)
    wanted = model.shard_of(alone.state_dict())
    return all(torch.equal(param, wanted[name]) for name, param in model.named_parameters()), alone.state_dict()


def test_a_seed_gives_the_same_model_at_any_m():
    for same, state in toys.run(from_a_seed, 3):
        assert same
        for name, param in whole().named_parameters():  # GPT-2's initialisation, as GPT's
            assert state[name].shape == param.shape
            assert state[name].mean().item() == pytest.approx(param.mean().item(), abs=5e-3), name
            assert state[name].std().item() == pytest.approx(param.std().item(), rel=0.15), name


def with_dropout():
    """Loss, gradients and random state of a step: activations kept, and recomputed."""
    found = []
    for way in (None, lambda block, x: checkpoint(block.inside, x, use_reentrant=False)):
        model = cut(replace(CONFIG, dropout=0.3))
        model.run_block = way
        torch.manual_seed(7)
        loss = model(*toys.tokens(0, 0))
        loss.backward()
        found.append([loss.detach(), *(param.grad for param in model.parameters()), torch.get_rng_state()])
    return found


def test_checkpointing_that_restores_torchs_state_recomputes_the_same_masks():
    for kept, recomputed in toys.run(with_dropout, 2):
        assert toys.identical(kept, recomputed)


# ------------------------------------------------------------------------------------------------------------ refusals


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
