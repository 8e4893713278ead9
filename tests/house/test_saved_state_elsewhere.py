"""A checkpoint of any stage and any number of ranks goes on under any other, and in plain torch.

All runs learn from the same 12 sequences a step, which their ranks share equally. Where the number of ranks is the
same, losses are too, bit for bit. Else ranks average other parts of the same sums, and how far apart may losses be?

    u   half the distance of 1 to the next number: 2⁻²⁴ in fp32, 2⁻⁵³ in fp64
    n   the terms of a sum: 12 · 9 = 108 tokens
    G   the norm of a token's gradient, here below 5; L the loss, below 4

Added up in another order a sum of n terms changes by at most n·u times the sum of their magnitudes. So a loss, a mean
of positive numbers, changes by n·u·L, and a gradient by n·u·G. SGD with momentum 0.9 multiplies a change by at most
lr / (1 − 0.9) a step, k steps add up, and the loss follows with G: in all n·u·(L + k · 10 lr · G²), 3·10⁻⁴ in fp32 for
lr = 0.01 and k = 3, and much less is found. AdamW divides by the size of the gradient, which may be small; so it runs
in fp64, where the same comes to 6·10⁻¹³, and elements whose gradient is a thousandth of its terms are allowed for.
A momentum that is lost or lies elsewhere changes these losses by more than 10⁻³ (test_the_bound_would_show_it).
"""

import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample

sys.path.insert(0, str(Path(__file__).parent))  # ranks import it too

from saved_models import Wide, groups_of

from zero_minimal.checkpoint import local_chunks, saved_state

pytestmark = pytest.mark.thorough

STEPS, SAVED_AT = 6, 3
RECIPES = {"fp32": (torch.float32, torch.optim.SGD, dict(lr=0.01, momentum=0.9), 3e-4),
           "fp64": (torch.float64, torch.optim.AdamW, dict(lr=0.01), 6e-10)}
EVERY = [(stage, world) for stage in range(4) for world in toys.WORLDS]
FEW = [(0, 1), (2, 3)]  # sources of the plain run


def part(step, rank, world_size):
    """This rank's sequences of a step."""
    return [whole.chunk(world_size)[rank] for whole in toys.tokens(0, step, batch=12)]


def build(stage, recipe, seed):
    dtype, optimizer, options, _ = RECIPES[recipe]
    torch.manual_seed(seed)
    model = Wide().to(dtype)
    return toys.STAGES[stage](model, optimizer, param_groups=groups_of(model) if recipe == "fp64" else None,
                              bucket_bytes=3000 + 1700 * stage, **options)


def steps(zero, first, last):
    """The losses, means of all ranks, from step to step."""
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(first, last):
        loss = zero.model(*part(step, rank, world_size))
        loss.backward()
        zero.step()
        zero.zero_grad()
        every = [torch.zeros_like(loss) for _ in range(world_size)]
        dist.all_gather(every, loss.detach())
        losses.append(torch.stack(every).mean().item())
    return losses


def save(stage, folder):
    """Train with both recipes, save on the way, and go on."""
    losses = {}
    for recipe in RECIPES:
        zero = build(stage, recipe, seed=1)
        steps(zero, 0, SAVED_AT)
        for group in zero.optimizer.param_groups:
            group["lr"] *= 0.7  # as a scheduler would
        saved_state.save(zero, folder / recipe, {"from": [stage, dist.get_world_size()]}, step=SAVED_AT)
        losses[recipe] = steps(zero, SAVED_AT, STEPS), local_chunks.facts_of(local_chunks.holding_of(zero))["groups"]
    return losses


def go_on(stage, folders):
    """Load each of them, and train on."""
    found = []
    for folder in folders:
        losses = {}
        for recipe in RECIPES:
            zero = build(stage, recipe, seed=2)
            extra = saved_state.load(zero, folder / recipe)
            groups = local_chunks.facts_of(local_chunks.holding_of(zero))["groups"]
            losses[recipe] = steps(zero, SAVED_AT, STEPS), groups, tuple(extra["from"])
        found.append(losses)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """(stage, world) → its folder, and its losses by recipe; each is run once."""
    @functools.cache
    def run(stage, world):
        folder = tmp_path_factory.mktemp(f"stage{stage}-{world}")
        return folder, toys.run(save, world, stage, folder)[0]

    return run


def of_target(stage, world):
    """Four sources for a target, of each stage one and of each number of ranks one. Of the four numbers, two of the
    source and two of the target, any three have every combination."""
    return [source for source in EVERY if (sum(source) + stage + world) % 4 == 0]


def test_every_three_meet():
    met = [(*source, *target) for target in EVERY for source in of_target(*target)]
    for three in itertools.combinations(range(4), 3):
        assert len({tuple(numbers[place] for place in three) for numbers in met}) == 4**3 == len(met)


TARGETS = [(3, 3, "few"), *((stage, world, "four") for stage, world in EVERY)]


@pytest.mark.parametrize("stage, world, sources", sample(TARGETS, TARGETS[:1]))
def test_goes_on_elsewhere(stage, world, sources, source):
    sources = FEW if sources == "few" else of_target(stage, world)
    folders = [source(*one)[0] for one in sources]
    for one, losses in zip(sources, toys.run(go_on, world, stage, folders)[0], strict=True):
        for recipe, (_, _, _, bound) in RECIPES.items():
            (expected, groups), (found, groups_here, extra) = source(*one)[1][recipe], losses[recipe]
            assert groups_here == groups and extra == one
            if world == one[1]:
                assert found == expected, (one, recipe)
            assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= bound, (one, recipe)


# ------------------------------------------------------------------------------------------------------- in plain torch


def plainly(folder, recipe, lose=""):
    """The same steps in this process, with a model and an optimizer of torch's own."""
    dtype, make, options, _ = RECIPES[recipe]
    torch.manual_seed(3)
    model = Wide().to(dtype)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = make(groups_of(model) if recipe == "fp64" else params, **options)
    saved_state.load_plain(model, optimizer, folder / recipe)
    for state in optimizer.state.values():
        if lose in state:
            state[lose].zero_()
    losses = []
    for step in range(SAVED_AT, STEPS):
        loss = model(*part(step, 0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage, world", sample(EVERY, FEW))
def test_goes_on_in_plain_torch(stage, world, source):
    folder, expected = source(stage, world)
    for recipe, (_, _, _, bound) in RECIPES.items():
        found = plainly(folder, recipe)
        assert max(abs(a - b) for a, b in zip(found, expected[recipe][0], strict=True)) <= bound


def test_the_bound_would_show_it(source):
    """Without momentum, the losses are others, and far beyond the bound."""
    folder, expected = source(*FEW[0])
    for recipe, lost in (("fp32", "momentum_buffer"), ("fp64", "exp_avg")):
        found = plainly(folder, recipe, lose=lost)
        assert max(abs(a - b) for a, b in zip(found, expected[recipe][0], strict=True)) > 1e-3


def test_stages_0_to_2_write_the_same(tmp_path):
    """What is saved has nothing of shards or stages in it: these have the same buckets, and so the same chunks."""
    files = []
    for stage in range(3):
        toys.run(save_alike, 2, stage, tmp_path / str(stage))
        files.append([(tmp_path / str(stage) / "step-00000000" / f"rank-{rank}.bin").read_bytes() for rank in range(2)])
    assert files[0] == files[1] == files[2] and all(files[0])


def save_alike(stage, folder):
    torch.manual_seed(1)
    zero = toys.STAGES[stage](Wide(), torch.optim.AdamW, lr=0.01, bucket_bytes=3000)
    steps(zero, 0, 2)
    saved_state.save(zero, folder)


def beside_groups_of_some(folder):
    """Rank 0 is in two groups more than the others, as for a log of its own."""
    for _ in range(2):
        dist.new_group([0])
    zero = build(2, "fp64", 1)
    saved_state.save(zero, folder)
    return saved_state.load(zero, folder)


def test_ranks_that_are_in_different_numbers_of_groups_save(tmp_path):
    """torch goes by that number where ranks make one more by themselves, and they would wait for each other."""
    assert toys.run(beside_groups_of_some, 2, tmp_path, timeout=50) == [None, None]
