"""Ranks that do something else than the others, where nothing waits: the next bucket's note tells them. And processes
that are no ranks, or no ranks any more.
"""

import contextlib
import io
import os
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toys
from misuse import in_ranks
from torch import nn, optim

from zero_minimal.checkpoint import saved_state
from zero_minimal.core import collectives
from zero_minimal.guards import watchdog
from zero_minimal.late_gather import Late1, Late2
from zero_minimal.processes import failures

pytestmark = pytest.mark.thorough

STAGES = {**dict(enumerate(toys.STAGES)), "late 1": Late1, "late 2": Late2}


class SetByFirstBatch(nn.Module):
    """ActNorm's way. by_data: past autograd."""

    def __init__(self, by_data):
        super().__init__()
        self.shift, self.by_data, self.is_set = nn.Parameter(torch.zeros(8)), by_data, False

    def forward(self, x):
        if not self.is_set:
            with torch.no_grad():
                (self.shift.data if self.by_data else self.shift).copy_(-x.detach().mean(0))
            self.is_set = True
        return x + self.shift


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 8))

    def forward(self, words):
        return F.embedding(words, self.weight, max_norm=1.0)


class Alike(nn.Module):
    """Changes its parameters in forward, as on all ranks."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return x * self.weight


class Codebook(nn.Module):
    """Not trained, and moved by each batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        self.weight.lerp_(x.detach().mean(0), 0.1)
        return x + self.weight


LAYERS = {"frozen": Codebook, "in place": lambda: SetByFirstBatch(False), "by .data": lambda: SetByFirstBatch(True),
          "alike": Alike}


class Model(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.embedding = Renormed() if case == "renormed" else nn.Embedding(10, 8)
        layer = LAYERS.get(case, nn.Identity)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), layer()) for _ in range(3))

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return x


def edit(model, rank, by_data=False):
    with torch.no_grad():
        (model.embedding.weight.data if by_data else model.embedding.weight).clamp_(max=0.5 + rank)


def trained(stage, case):
    """"" if three steps end well, else what was said; and what forward is said to have changed."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model(case)
    model.embedding.requires_grad_("frozen" not in case)
    zero = stage(model, optim.AdamW, lr=1e-2)
    batches = torch.Generator().manual_seed(rank)
    try:
        for step in range(3):
            if case == "loaded" and step == 1 and rank == 0:
                zero.load_state_dict(zero.state_dict())
            if case == "optimizer loaded" and step == 1 and rank == 0:
                zero.optimizer.load_state_dict(zero.optimizer.state_dict())
            zero.model(torch.randint(0, 10, (4,), generator=batches)).square().mean().backward()
            changed = {bucket.changed for bucket in zero.buckets}
            if case == "weight decay":
                zero.optimizer.param_groups[0]["weight_decay"] = 0.1 * rank
            if "edited before step" in case:
                edit(zero.model, rank, "data" in case)
            if case == "clipped":
                zero.clip_grad_norm_(0.01 if rank else 0.02)
            zero.step()
            zero.zero_grad()
            if case == "edited" or "edited on a rank" in case and rank:
                edit(zero.model, rank, "data" in case)
            if case == "edited alike":
                edit(zero.model, 0)
                with zero.gather_parameters():
                    if rank:
                        edit(zero.model, 1)
                    for param in zero.model.parameters():
                        collectives.broadcast(param.data)
    except RuntimeError as error:
        return str(error), set()
    return "", changed


SAID = {
    "in place": "forward has changed parameters by what a rank has seen.*before the model is wrapped",
    "by .data": "forward has changed parameters by what a rank has seen",
    "renormed": "forward has changed parameters by what a rank has seen",
    "frozen": "forward has changed parameters by what a rank has seen",
    "weight decay": "the learning rates differ, or other options.*weight_decay=0.1",
    "edited": "edited, or loaded, on some ranks only.*all ranks",
    "edited before step": "edited, or loaded, on some ranks only.*all ranks",
    "edited on a rank": "edited, or loaded, on some ranks only.*all ranks",
    "edited on a rank, by .data": "edited, or loaded, on some ranks only.*all ranks",
    "edited before step, by .data": "edited, or loaded, on some ranks only.*all ranks",
    "frozen, edited on a rank": "edited, or loaded, on some ranks only.*all ranks",
    "clipped": r"the last step\(\) scaled the gradients differently.*\(0\.0.*the same max_norm",
    "loaded": r"load_state_dict\(\) was not called equally often.*states loaded: 1",
    "optimizer loaded": r"load_state_dict\(\) was not called equally often.*states loaded: 1",
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", SAID)
def test_ranks_that_differ_are_told_before_the_next_step(stage, case):
    if case == "loaded" and stage not in (0, 3):
        pytest.skip("load_state_dict() gathers there, and says so at once")
    if "edited" in case and stage == 3:
        pytest.skip("parameters are in shards there: see Stage3")
    if "by .data" in case and "edited" in case and stage == 0:
        pytest.skip("nobody gathers there, and two machines may round differently")
    for words, _ in toys.run(trained, 2, STAGES[stage], case):
        assert re.search(SAID[case], words), words


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_changed_alike_on_all_ranks_is_fine(stage):
    for words, changed in toys.run(trained, 2, STAGES[stage], "alike"):
        assert not words and changed != {""}
    for words, _ in toys.run(trained, 2, STAGES[stage], "edited alike") if stage != 3 else ():
        assert not words, words
    for words, changed in toys.run(trained, 2, STAGES[stage], "plain"):
        assert not words and changed == {""}, "the stage's own changes are none"


def step(zero, number):
    toys.learn(zero, zero.model(toys.numbers(dist.get_rank(), number)[0]).square().mean())


def in_a_child(stage):
    """What a forward says in a forked process, and whether the rank goes on after it."""
    zero = stage(toys.build(toys.MLP, 0), optim.SGD, lr=0.1)
    step(zero, 0)
    reads, writes = os.pipe()
    if not (child := os.fork()):
        said = "fine"
        try:
            zero.model(toys.numbers(0, 1)[0])
        except BaseException as error:
            said = str(error)
        os.write(writes, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    step(zero, 1)
    return os.read(reads, 1000).decode()


def test_a_forked_child_leaves_the_connections_alone():
    assert toys.run(in_a_child, 2, toys.STAGES[2]) == ["fine"] * 2
    for said in toys.run(in_a_child, 2, toys.STAGES[3]):
        assert "forked from a rank" in said and "let the rank itself call the model" in said


def parted(stage):
    step(stage(toys.build(toys.MLP, 0), optim.SGD, lr=0.1), 0)
    dist.destroy_process_group()
    return "a result"


def test_a_rank_may_leave_its_group_at_the_end():
    assert toys.run(parted, 2, toys.STAGES[1]) == ["a result"] * 2


@pytest.mark.parametrize("stage", range(4))
@in_ranks(2)
def test_nothing_is_saved_while_gradients_wait_for_a_step(stage, tmp_path):
    zero = toys.STAGES[stage](toys.build(toys.MLP, 0), optim.SGD, lr=0.1)
    for how in ("backward", "clip", "no_sync"):
        with zero.no_sync() if how == "no_sync" else contextlib.nullcontext():
            zero.model(toys.numbers(dist.get_rank(), 0)[0]).square().mean().backward()
        if how == "clip":
            zero.clip_grad_norm_(0.1)
        for save in (zero.state_dict, lambda: saved_state.save(zero, tmp_path),
                     lambda: saved_state.async_save(zero, tmp_path)):
            with pytest.raises(RuntimeError, match=r"save and load after zero\.step\(\)"):
                save()
        zero.zero_grad()
    zero.state_dict()


def waiting_in_turn(stage):
    """What each rank has said after rank 1 has waited for rank 0, and then rank 0 for rank 1."""
    watchdog.PATIENCE, said = 0.6, io.StringIO()
    zero = stage(toys.build(toys.MLP, 0), optim.SGD, lr=0.1)
    step(zero, 0)
    with contextlib.redirect_stderr(said):
        for late, meet in enumerate((dist.barrier, zero.gather_parameters)):
            if dist.get_rank() == late:
                time.sleep(1.5)
            with meet() or contextlib.nullcontext():
                pass
    return said.getvalue()


@pytest.mark.parametrize("stage", (2, 3))
def test_a_rank_that_waits_long_says_where(stage):
    first, second = toys.run(waiting_in_turn, 2, toys.STAGES[stage])
    assert re.match(r"rank 0 has waited 0.6 s for other ranks, in all_gather of .* gather_parameters\(\).*, "
                    r"at line \d+ of test_disagreeing.py\. All ranks must", first) and first.count("has waited") == 1
    assert re.match(r"rank 1 has waited .* in torch\.distributed\.barrier\(\), at line", second)


def test_who_waits_in_vain_says_where_each_rank_waited(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as under torchrun
    assert failures._within(0.2, lambda: failures._first_failure(store)) is None
    try:
        raise RuntimeError("timed out")
    except RuntimeError as error:
        error.add_note("all_reduce of bucket 1")
        waited = failures._waited_in(error)
    assert re.fullmatch(r"all_reduce of bucket 1, at line \d+ of test_disagreeing.py", waited)
    failures.leave_word(store, 0, f"waited in {waited}")
    failures.leave_word(store, 1, "has ended by sys.exit(3)")
    said = failures._who_stands_where(store)
    assert "rank 0 waited in all_reduce of bucket 1" in said and "rank 1 has ended by sys.exit(3)" in said
    assert "rank 2 left no word (os._exit()" in said
