"""One page: four systems on plain PyTorch give the losses of PyTorch's own, and hold and send what the formulas say.

With the names that the contracts of lessons 02 to 04 ask for (one_page_adapters.py) the graders give its stages 50, 38
and 57 of 100 points. GRADED says what one page leaves out, and which checks fail for it."""

import copy
import functools
import inspect
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import checks
import pytest
import torch
import torch.distributed as dist
import toys
from thorough import sample
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from zero_minimal import one_page
from zero_minimal.classroom.grader_client import grade
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import found as lessons
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.one_page import Naive, Stage1, Stage2, Stage3

HOUSE = Path(one_page.__file__).parents[1]
SYSTEMS = (Naive, Stage1, Stage2, Stage3)
STEPS = 4
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative, of losses


def test_it_is_one_page_and_the_readme_shows_its_last_stage():
    lines = Path(one_page.__file__).read_text().splitlines()
    readme = (HOUSE / "README.md").read_text()
    assert sum(map(bool, lines)) <= 260 and f"{len(lines)} lines of PyTorch" in readme
    assert len(readme.splitlines()) <= 150 and f"```python\n{inspect.getsource(Stage3)}```" in readme


class Nested(nn.Module):
    """Lists in lists, a tied weight, a part that is not always used, a checkpoint, a frozen layer, a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen = nn.Linear(7, 7), nn.Linear(7, 7).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.ModuleList(nn.Linear(7, 7) for _ in range(2)), nn.Linear(7, 7)])
        self.more = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.more[1].weight = self.more[0].weight
        self.spare = nn.Parameter(torch.ones(7))  # has a gradient on rank 0 alone
        self.register_buffer("offset", torch.randn(7))

    def forward(self, x):
        x = self.frozen(self.first(x)) + self.offset
        for block in (*self.blocks[0], self.blocks[1], self.more[0], self.more[1]):
            x = x + checkpoint(block, x, use_reentrant=False).tanh()
        last = self.more[2](x)
        return last * self.spare if dist.get_rank() == 0 else last

    def loss(self, step):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return self(torch.randn(5, 7, generator=generator).to(self.offset.dtype)).square().sum()


class Words(toys.Transformer):
    def loss(self, step):
        return self(*toys.tokens(dist.get_rank(), step))


def trained(make, model):
    """Losses, with whatever `make(model)` trains it."""
    zero, losses = make(model), []
    for step in range(STEPS):
        loss = model.loss(step)
        loss.backward()
        zero.step()
        losses.append(loss.item())
        if not isinstance(zero, (Naive, Stage1)):
            zero.zero_grad()
    return losses


def ours(dtype, kind):
    """{system: losses}, of models that begin as rank 0's."""
    found = {}
    for system in SYSTEMS if dtype == torch.float32 else SYSTEMS[1:]:
        torch.manual_seed(dist.get_rank())
        make = functools.partial(system, optimizer_class=optim.AdamW, lr=0.01)
        found[system.__name__] = trained(make, kind().to(dtype))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", (Words, Nested))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("world_size", sample((1, 2, 3), (2, 3)))
def test_all_systems_compute_the_same(world_size, dtype, kind):
    for found in toys.run(ours, world_size, dtype, kind):
        first, *others = found.values()
        assert len(set(first)) == STEPS, "it does not train"
        for name, losses in zip([*found][1:], others, strict=True):
            assert losses == pytest.approx(first, rel=TOLERANCE[dtype]), name


def beside_torch():
    """{system: losses}, of ours and of PyTorch's own, in fp32."""
    found = ours(torch.float32, Words)
    torch.manual_seed(0)
    model = Words()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own module
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def redundancy(model):
        wrapped = DistributedDataParallel(model)
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01)
        model.loss = lambda step: wrapped(*toys.tokens(dist.get_rank(), step))
        return zero

    def fsdp(model):
        for block in (each for held in model.modules() if isinstance(held, nn.ModuleList) for each in held):
            fully_shard(block)
        fully_shard(model)
        return optim.AdamW(model.parameters(), lr=0.01)

    found["ZeroRedundancyOptimizer"] = trained(redundancy, copy.deepcopy(model))
    return found | {"FSDP2": trained(fsdp, model)}


def test_losses_are_those_of_pytorchs_own_bit_for_bit():
    for found in toys.run(beside_torch, 2):
        first, *others = found.values()
        for name, losses in zip([*found][1:], others, strict=True):
            assert losses == first, f"{name}: {losses}, and {first}"


def held_and_sent(system, whole, shard):
    """(parameters, with padding; bytes held after backward; bytes sent in a step; those of what is in no block)"""
    nothing, model = checks.live_bytes(), toys.build(Words, dist.get_rank())
    most = nothing + (whole + shard / dist.get_world_size()) * sum(param.numel() for param in model.parameters()) + 200
    zero = system(model, optim.AdamW, lr=0.01)
    for step in range(2):
        with TrafficMeter() as meter:
            model.loss(step).backward()
            held = checks.live_bytes(until=most) - nothing
            zero.step()
    units = getattr(zero, "units", ())
    psi = sum(unit.n for unit in units) or sum(param.numel() for param in zero.params)
    return psi, held, meter.sent_bytes, units[0].n if units else 0


@pytest.mark.parametrize("world_size", sample((1, 2, 4), [2]))
def test_holds_and_sends_what_the_formulas_say(world_size):
    shares = {Naive: (16, 0, 2), Stage1: (8, 8, 2), Stage2: (4, 12, 2), Stage3: (0, 16, 3)}
    for system, (whole, shard, times) in shares.items():
        for psi, held, sent, root in toys.run(held_and_sent, world_size, system, whole, shard):
            counted = held - (whole + shard / world_size) * psi
            assert -64 <= counted <= 4 * 50, system.__name__  # Adam counts steps, once a tensor; naive pads nothing
            # what is in no block stays from forward to backward
            numbers = times * psi - (root if system is Stage3 else 0)
            assert sent == round(4 * numbers * (1 - 1 / world_size)), system.__name__


@pytest.mark.thorough
def test_its_table():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", one_page.__file__]
    told = subprocess.run(command, capture_output=True, text=True, timeout=200)
    rows = re.findall(r"(\w+): loss (\S+), holds (\S+) MB \(formula (\S+)\)", told.stdout)
    assert [name for name, *_ in rows] == ["Naive", "Stage1", "Stage2", "Stage3"], told.stderr
    assert len({loss for _, loss, *_ in rows}) == 1
    assert all(abs(float(held) - float(by_formula)) < 0.01 for *_, held, by_formula in rows)


GRADED = {  # lesson: the points of its steps, and the checks that fail, by what one page leaves out
    "02_optimizer_state": ([20, 8, 8, 5, 9], {
        "parameter groups": ("test_groups_stay_groups", "test_a_step_is_the_optimizers",
                             "test_trains_as_one_process_would", "test_trains_in_16_bits"),
        "groups of some ranks": ("test_backward_in_a_group", "test_a_step_in_a_group", "test_clips_in_a_group"),
        "buckets: a model without blocks is one unit": ("test_the_kernel_counts_a_backward",
                                                        "test_the_kernel_counts_a_step"),
        "running statistics": ("test_running_statistics_are_alike",),
        "refusals": ("test_a_backward_after_step_is_refused",),
        "sums of 16-bit gradients in fp32": ("test_gradients_of_16_bits_are_added_in_32",),
        "units of two dtypes: they are refused": ("test_small_steps_in_bf16_add_up",),
    }),
    "03_gradients": ([10, 10, 6, 12], {
        "parameter groups": ("test_a_step_is_the_optimizers",),
        "groups of some ranks": ("test_backward_in_a_group", "test_a_step_in_a_group", "test_clips_in_a_group"),
        "buckets: a model without blocks is one unit": (
            "test_no_whole_gradients_during_backward", "test_memory_stays_as_in_the_first_backward",
            "test_the_kernel_counts_a_backward", "test_the_kernel_counts_a_step",
            "test_the_kernel_counts_micro_batches"),
        "one shard after the other in the update: all have their gradients in fp32, or scaled, at once": (
            "test_holds_shards_after_a_step", "test_clipping_returns_a_tensor_and_leaves_the_gradients"),
        "running statistics": ("test_running_statistics_are_alike", "test_running_statistics_stay_alike"),
        "refusals": ("test_a_backward_after_step_is_refused",),
        "sums of 16-bit gradients in fp32": ("test_gradients_of_16_bits_are_added_in_32",),
        "units of two dtypes: they are refused": ("test_small_steps_in_bf16_add_up",),
    }),
    "04_parameters": ([2, 14, 15, 19, 7], {
        "parameter groups": ("test_trains_as_one_process_would",),
        "units inside a unit: a block is one unit": ("test_units_inside_a_unit",),
        "groups of some ranks": ("test_a_forward_in_a_group", "test_backward_in_a_group", "test_a_step_in_a_group"),
        "prefetch": ("test_the_next_unit_is_on_its_way", "test_backward_prefetches"),
        "units that stay: each is freed after its forward": ("test_units_inside_the_one_at_work_stay",
                                                             "test_root_and_last_block_stay_for_backward"),
        "values that are changed in place": ("test_what_is_changed_in_place_stays",),
        "shards of frozen parameters; edits in gather_parameters()": (
            "test_a_rank_keeps_its_shard_alone", "test_to_read_a_released_parameter_is_an_error",
            "test_all_is_whole_inside_gather_parameters"),
        "an end of evaluations: what is in no block stays": ("test_an_evaluation_leaves_nothing_whole",),
        "running statistics; refusals": ("test_statistics_and_a_backward_too_many",),
        "sums of 16-bit gradients in fp32": ("test_gradients_of_16_bits_are_added_in_32",),
    }),
}


@pytest.mark.thorough
@pytest.mark.timeout(300)  # half a minute each, where nothing else runs
@pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux tells of processes and memory")
@pytest.mark.parametrize("name", GRADED)
def test_what_the_graders_say(name, tmp_path):
    points, left_out = GRADED[name]
    for file in (Path(one_page.__file__), Path(__file__).with_name("one_page_adapters.py")):
        shutil.copy(file, tmp_path)
    lesson = lessons()[name]
    grades = Grades(lesson)
    grade(lesson, tmp_path / "one_page_adapters.py", grades, show=lambda step: None)
    failed = {check: message for _, check, _, passed, message in grades.results if not passed}
    assert set(failed) == {check for checks in left_out.values() for check in checks}, failed
    assert [grades.of(step)[0] for step in lesson.steps] == points
