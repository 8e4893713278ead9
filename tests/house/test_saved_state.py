"""A checkpoint, loaded by new ranks of the same stage and number, goes on bit for bit, written before or meanwhile."""

import copy
import gc
import itertools
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from house.saved_models import Model, groups_of, names, wrapped
from misuse import in_ranks
from thorough import sample

from zero_minimal.checkpoint import as_json, saved_state
from zero_minimal.checkpoint.chunks import Chunk, Place, chunks
from zero_minimal.core.loss_scaler import LossScaler

STEPS, SAVED_AT = 6, (3, 4)  # checkpoints have the state after so many


class Training:
    """A run with all that has a state: accumulation, a scheduler, a loss scaler that grows and overflows, dropout."""

    def __init__(self, stage, dtype, first):
        seed = dist.get_rank() + 10 * first  # a new process has another one
        self.zero = wrapped(stage, 100 + seed, lambda: Model().to(dtype), groups=groups_of)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.zero.optimizer, [2, 5], gamma=0.5)
        self.scaler = LossScaler(2.0**26, growth_interval=2) if dtype == torch.float16 else None
        torch.manual_seed(300 + seed)
        self.done = first

    def step(self):
        losses, zero, rank = [], self.zero, dist.get_rank()
        for micro in range(2):
            loss = zero.model(*toys.tokens(rank, 2 * self.done + micro)) / 2
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            losses.append(loss.item())
        if self.scaler:
            self.scaler.unscale_(zero)
        zero.clip_grad_norm_(0.5)
        if self.scaler:
            stepped = self.scaler.step(zero)
            self.scaler.update()
        else:
            stepped = zero.step() is None
        if stepped:
            self.scheduler.step()
        zero.zero_grad()
        self.done += 1
        return losses

    def extra(self):
        return {"done": self.done, "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict() if self.scaler else None}

    def go_on(self, extra):
        self.done = extra["done"]
        self.scheduler.load_state_dict(extra["scheduler"])
        if self.scaler:
            self.scaler.load_state_dict(extra["scaler"])

    def all_that_counts(self):
        return toys.whole_parameters(self.zero), int(self.zero.model.seen), copy.deepcopy(
            self.scaler.state_dict() if self.scaler else None)


def uninterrupted(stage, dtype, folder):
    """Saved twice on the way: at once, and meanwhile."""
    run, losses = Training(stage, dtype, 0), []
    for _ in range(STEPS):
        if run.done in SAVED_AT:
            write = saved_state.save if run.done == SAVED_AT[0] else saved_state.async_save
            write(run.zero, folder, run.extra(), step=run.done)
        losses.append(run.step())
    return losses, run.all_that_counts()


def resumed(stage, dtype, folder):
    found = []
    for step in SAVED_AT:
        run = Training(stage, dtype, 1)
        run.go_on(saved_state.load(run.zero, folder / f"step-{step:08}"))
        found.append(([run.step() for _ in range(STEPS - step)], run.all_that_counts()))
    return found


DTYPES = ("float32", "bfloat16", "float16")
# every two of the three in every combination; and the plain run's with all dtypes
CASES = [(stage, world, DTYPES[(stage + world) % 3]) for stage in range(4) for world in toys.WORLDS]
CASES += [(3, 2, "float32"), (3, 2, "bfloat16")]


def test_every_two_meet():
    for one, other in ((0, 1), (0, 2), (1, 2)):
        every = [{case[place] for case in CASES} for place in (one, other)]
        assert {(case[one], case[other]) for case in CASES} == set(itertools.product(*every))


@pytest.mark.parametrize("stage, world, dtype", sample(CASES, [(3, 2, "float16")]))
def test_goes_on_bit_for_bit(stage, world, dtype, tmp_path):
    dtype = getattr(torch, dtype)
    expected = toys.run(uninterrupted, world, stage, dtype, tmp_path)
    for (losses, (parameters, seen, scaler)), found in zip(
            expected, toys.run(resumed, world, stage, dtype, tmp_path), strict=True):
        for step, (losses_here, (here, seen_here, scaler_here)) in zip(SAVED_AT, found, strict=True):
            assert losses_here == losses[step:]
            assert toys.identical(here, parameters) and seen_here == seen and scaler_here == scaler


# -------------------------------------------------------------------------------------------------- while it is written


def slow(folder):
    """The file system takes its time: what is written must be the state of the moment of the call all the same."""
    from zero_minimal.checkpoint import resharding

    gate, write = threading.Event(), resharding.ChunkSaver.resolve_data
    order = []

    def late(self, item):
        gate.wait(20)
        order.append(item.index.fqn)
        return write(self, item)

    resharding.ChunkSaver.resolve_data = late
    run = Training(2, torch.float32, 0)
    run.step()
    before = toys.whole_parameters(run.zero)
    saving = saved_state.async_save(run.zero, folder, run.extra())
    losses = []
    loss = run.zero.model(*toys.tokens(dist.get_rank(), 9))  # forward and backward run meanwhile
    loss.backward()
    assert not saving.done and not order
    threading.Timer(0.3, gate.set).start()
    run.zero.step()  # waits for each bucket
    losses.append(loss.item())
    assert order, "step() has waited"
    assert not toys.identical(before, toys.whole_parameters(run.zero))
    path = saving.wait()
    again = Training(2, torch.float32, 1)
    saved_state.load(again.zero, path)
    return toys.identical(before, toys.whole_parameters(again.zero))


def test_what_is_written_is_the_state_of_the_call(tmp_path):
    assert toys.run(slow, 2, tmp_path) == [True, True]


def edited_at_once(folder):
    """Whether what is saved is what there was before an edit inside gather_parameters(), at each stage."""
    found = []
    for number, stage in enumerate(toys.STAGES):
        zero = stage(toys.build(toys.MLP, dist.get_rank()), torch.optim.AdamW, bucket_bytes=256)
        before = toys.whole_parameters(zero)
        saving = saved_state.async_save(zero, folder / str(number))
        with zero.gather_parameters(), torch.no_grad():
            for param in zero.model.parameters():
                param.zero_()
        plain = toys.MLP()
        saved_state.load_plain(plain, None, saving.wait())
        found.append(toys.identical(before, list(plain.parameters())))
    return found


@pytest.mark.thorough
def test_an_edit_waits_until_the_state_is_written(tmp_path):
    assert toys.run(edited_at_once, 2, tmp_path) == [[True] * len(toys.STAGES)] * 2


def own_memory():
    """Bytes of this process that are no file's: what it has allocated."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def growth(stage, folder):
    """How far memory grows while a checkpoint is written, next to what a copy of the state would take."""
    zero = toys.STAGES[stage](toys.MLP(1500, 1500, 1500, 1500), torch.optim.AdamW, bucket_bytes=BUCKET)
    toys.learn(zero, zero.model(torch.randn(4, 1500)).sum())
    saved_state.save(zero, folder)  # what is imported, and allocated, once
    gc.collect()
    before, seen, done = own_memory(), [], threading.Event()

    def watch():
        while not done.wait(0.001):
            seen.append(own_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    saved_state.async_save(zero, folder).wait()
    done.set()
    watching.join()
    pieces = sum(bucket.master.numel() for bucket in zero.buckets)
    return max(seen) - before, 3 * 4 * pieces, len(seen)


BUCKET = 2 * 2**20


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("stage, world", sample([(stage, world) for stage in range(4) for world in (1, 2)], [(2, 2)]))
def test_memory_does_not_grow_by_more_than_a_bucket(stage, world, tmp_path):
    for grown, copy_of_all, samples in toys.run(growth, world, stage, tmp_path):
        assert grown <= BUCKET < copy_of_all / 10 and samples > 3, (grown, copy_of_all)


# --------------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.thorough
@in_ranks(2)
def test_keeps_the_newest(tmp_path):
    zero = Training(1, torch.float32, 0).zero
    paths = [saved_state.save(zero, tmp_path, {"number": number}, keep=2) for number in range(4)]
    assert [path.name for path in paths] == [f"step-{number:08}" for number in range(4)]
    again = saved_state.save(zero, tmp_path, {"number": 9}, step=3, keep=2)
    assert again.name == "step-00000003.1", "no finished one is overwritten"
    assert names(tmp_path) == ["step-00000003", "step-00000003.1"]
    assert saved_state.load(zero, tmp_path) == {"number": 9} and saved_state.load(zero, paths[-1]) == {"number": 3}


def test_json_holds_what_programs_keep():
    from collections import Counter

    value = {"tuple": (1, [2.5, None]), 3: "number", "words": "ü", "inf": float("-inf"), "counter": Counter({30: 1}),
             "tensor": torch.randn(2, 3, dtype=torch.float64).bfloat16(), "empty": torch.empty(0, 3),
             "bool": torch.tensor(True), "!": "a key of ours", "dtype": torch.float16, "big": 2**70}
    again = as_json.decoded(as_json.encoded(value))
    tensors = [key for key in value if isinstance(value[key], torch.Tensor)]
    assert toys.identical([again.pop(key) for key in tensors], [value.pop(key) for key in tensors])
    assert again == value and type(again["tuple"]) is tuple and type(again["counter"]) is Counter
    with pytest.raises(ValueError, match="no dtype 'load'"):
        as_json.decoded({"!": "dtype", "name": "load"})


# --------------------------------------------------------------------------------------------------------------- chunks


def test_boxes_are_the_stretch():
    for shape in ((7,), (4, 5), (3, 4, 5), (2, 1, 3, 2), ()):
        whole = torch.arange(torch.Size(shape).numel()).view(shape or (1,))
        for begin in range(whole.numel() + 1):
            for end in range(begin, whole.numel() + 1):
                found = [whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
                         for chunk in chunks(shape, begin, end)]
                assert [each for part in found for each in part.flatten().tolist()] == list(range(begin, end))
                assert len(found) <= max(1, 2 * len(shape) - 1)


def test_places_are_where_the_whole_has_it():
    """The second of two ranks of a matrix that is three blocks, [12, 5], cut by rows; and one cut by columns."""
    whole = torch.arange(60).view(12, 5)
    for place, own in (
        (Place((12, 5), 0, ((0, 2, 2), (2, 6, 2), (4, 10, 2))), whole.view(3, 2, 2, 5)[:, 1].reshape(6, 5)),
        (Place((12, 5), 1, ((0, 3, 2),)), whole[:, 3:]),
    ):
        chunk = Chunk((1, 0), (4, own.shape[1]))
        seen = 0
        for inside, there in place.chunks(chunk):
            cut = [slice(a + b, a + b + size) for a, b, size in zip(chunk.offsets, inside.offsets, inside.sizes,
                                                                    strict=True)]
            rows = [slice(a, a + size) for a, size in zip(there.offsets, there.sizes, strict=True)]
            assert torch.equal(own[tuple(cut)], whole[tuple(rows)])
            seen += there.numel
        assert seen == chunk.numel
