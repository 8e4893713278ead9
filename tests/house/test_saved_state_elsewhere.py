"""A checkpoint of any stage and any number of ranks goes on under any other, and in plain torch; ZeRO-100B's under
another mesh: parts of matrices are saved as chunks of the whole ones.

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
import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from house.saved_models import Wide, groups_of, part, steps, wrapped
from misuse import in_ranks

from zero_minimal.checkpoint import local_chunks, saved_state, state_folder
from zero_minimal.core.mesh import make_mesh
from zero_minimal.workload.model import GPT, GPTConfig
from zero_minimal.zero_100b import System

pytestmark = pytest.mark.thorough

STEPS, SAVED_AT = 6, 3
RECIPES = {"fp32": (torch.float32, torch.optim.SGD, dict(lr=0.01, momentum=0.9), 3e-4),
           "fp64": (torch.float64, torch.optim.AdamW, dict(lr=0.01), 6e-10)}
EVERY = [(stage, world) for stage in range(4) for world in toys.WORLDS]


def build(stage, recipe, seed):
    dtype, optimizer, options, _ = RECIPES[recipe]
    return wrapped(stage, seed, lambda: Wide().to(dtype), optimizer, groups_of if recipe == "fp64" else None,
                   bucket_bytes=3000 + 1700 * stage, **options)


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


@pytest.mark.parametrize("stage, world", EVERY)
def test_goes_on_elsewhere(stage, world, source):
    sources = of_target(stage, world)
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
        losses.append(toys.learn(optimizer, model(*part(step, 0, 1))))
    return losses


@pytest.mark.parametrize("stage, world", EVERY)
def test_goes_on_in_plain_torch(stage, world, source):
    folder, expected = source(stage, world)
    for recipe, (_, _, _, bound) in RECIPES.items():
        found = plainly(folder, recipe)
        assert max(abs(a - b) for a, b in zip(found, expected[recipe][0], strict=True)) <= bound


def test_the_bound_would_show_it(source):
    """Without momentum, the losses are others, and far beyond the bound."""
    folder, expected = source(0, 1)
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
    zero = wrapped(stage)
    steps(zero, 0, 2)
    saved_state.save(zero, folder)


@in_ranks(2)
def test_ranks_that_are_in_different_numbers_of_groups_save(tmp_path):
    """torch goes by that number where ranks make one more by themselves, and they would wait for each other."""
    for _ in range(2):
        dist.new_group([0])  # as for a log of its own
    zero = build(2, "fp64", 1)
    saved_state.save(zero, tmp_path)
    assert saved_state.load(zero, tmp_path) is None


# ---------------------------------------------------------------------------------------- ZeRO-100B, whose model is cut

# 31 tokens are no multiple of 2 or 4: the embedding's last part is padded
SIZES = GPTConfig(layers=2, hidden=8, heads=4, sequence=toys.SEQUENCE, vocabulary=toys.VOCABULARY, dropout=0.0)


def system(config, model_parallel, seed):
    warnings.filterwarnings("ignore", "P_a saves nothing here")  # in a group of one
    torch.manual_seed(seed)
    dtype, optimizer, options, _ = RECIPES["fp32"]
    return System(config, SIZES, make_mesh(model_parallel), 12, dtype, "cpu", optimizer, bucket_bytes=3000, **options)


def save_system(config, model_parallel, folder):
    zero = system(config, model_parallel, 1)
    steps(zero, 0, SAVED_AT)
    saved_state.save(zero, folder, {"mesh": model_parallel})
    return steps(zero, SAVED_AT, STEPS)


def move_system(config, model_parallel, folder, other):
    """Load it, save it anew as it is, and train on."""
    zero = system(config, model_parallel, 2)
    saved_state.load(zero, folder)
    saved_state.save(zero, other)
    return steps(zero, SAVED_AT, STEPS)


def other_kind(folder):
    torch.manual_seed(2)
    zero = toys.STAGES[2](GPT(SIZES), torch.optim.SGD, lr=0.01, momentum=0.9)
    with pytest.raises(ValueError) as caught:
        saved_state.load(zero, folder)
    return str(caught.value)


def in_plain_torch(folder):
    """The whole model and the optimizer's state."""
    parameters = state_folder.read_contents(state_folder.finished(folder)[0]).facts["parameters"]
    model = GPT(SIZES)
    groups = [[param for name, param in model.named_parameters() if parameters[name]["group"] == group]
              for group in (0, 1)]
    optimizer = torch.optim.SGD([{"params": params} for params in groups], lr=1.0)
    saved_state.load_plain(model, optimizer, folder)
    return model, optimizer


SYSTEMS = [((2, 2), (2, 1), "C4"), *(((4, 2), (ranks, model_parallel), config) for config in ("C1", "C4", "C5")
                                     for ranks, model_parallel in ((4, 1), (4, 4), (4, 2), (1, 1), (3, 1)))]


@pytest.mark.parametrize("before, after, config", SYSTEMS)
def test_goes_on_under_another_mesh(before, after, config, tmp_path):
    expected = toys.run(save_system, before[0], "C4", before[1], tmp_path / "a")[0]
    found = toys.run(move_system, after[0], config, after[1], tmp_path / "a", tmp_path / "b")[0]
    bound = RECIPES["fp32"][-1]
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= bound
    assert config != "C4" or before != after or found == expected
    (model, optimizer), (again, other) = in_plain_torch(tmp_path / "a"), in_plain_torch(tmp_path / "b")
    assert toys.identical(model.parameters(), again.parameters())
    states = [[state["momentum_buffer"] for state in one.state.values()] for one in (optimizer, other)]
    assert toys.identical(*states) and len(states[0]) == len(list(model.parameters()))
    [words] = toys.run(other_kind, 1, tmp_path / "a")
    assert words.startswith("this checkpoint is not of this model: it was saved by zero_100b, and a stage has other "
                            "optimizer groups: go on with what saved it, or take its weights alone")
    # the whole model computes what the parts computed
    assert abs(model(*toys.tokens(0, SAVED_AT, batch=12)).item() - expected[0]) <= bound
