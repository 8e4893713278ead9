"""What would be lost, mixed or deleted without a word is refused, or does not happen."""

import copy
import os
import re
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
import toys
from house.saved_models import names, wrapped
from torch import nn

from zero_minimal import offload, stage1, stage3
from zero_minimal.checkpoint import as_json, resharding, saved_state, saving, state_folder
from zero_minimal.core.loss_scaler import LossScaler
from zero_minimal.extensions.averages import Average
from zero_minimal.processes import ranks


def words_of(kind, function, *arguments, **options):
    with pytest.raises(kind) as caught:
        function(*arguments, **options)
    return str(caught.value)


# --------------------------------------------------------------------------------- the newest is written last


def went_back(folder):
    """Saves of earlier steps than those that are there; and one of these is damaged."""
    zero, found = wrapped(), []
    for step in (100, 200, 300):
        saved_state.save(zero, folder, {"run": "old"}, step=step)
    for step in (10, 20):
        path = saved_state.save(zero, folder, {"run": step}, step=step)
        found += [path.name, path.exists(), saved_state.load(zero, folder)]
    found.append(saved_state.save(zero, folder, {"run": "anew"}).name)  # one more than the newest's
    dist.barrier()
    found.append(names(folder))
    if dist.get_rank() == 0:
        (path / "rank-1.bin").write_bytes(b"")
        (folder / "step-00000021.1" / "rank-1.bin").write_bytes(b"")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.append(saved_state.load(zero, folder))
    saved_state.save(zero, folder, {"run": "after damage"}, step=15, keep=2)
    dist.barrier()
    return [*found, saved_state.load(zero, folder), names(folder)]


def test_the_newest_is_the_one_that_was_written_last(found_by):
    for found in found_by(went_back):
        assert found == [
            "step-00000010.1", True, {"run": 10}, "step-00000020.1", True, {"run": 20}, "step-00000021.1",
            ["step-00000010.1", "step-00000020.1", "step-00000021.1"], {"run": 10}, {"run": "after damage"},
            # the two that are damaged are not counted: one that is good stays beside the new one
            ["step-00000010.1", "step-00000015.2", "step-00000020.1", "step-00000021.1"],
        ]


def test_what_another_run_writes_is_left_alone(tmp_path):
    """Each lock is one open file's, so that two in one process are as far apart as in two."""
    first, nothing = state_folder.begin(tmp_path, 1)
    second, warning = state_folder.begin(tmp_path, 2)
    assert not nothing and re.match("another run saves to .*: give each run a folder of its own", warning)
    assert names(tmp_path) == sorted([first.name, second.name])
    os.close(state_folder._writing.pop(first))  # as if its process had died
    third, warning = state_folder.begin(tmp_path, 3)
    assert warning.startswith("another run")
    assert names(tmp_path) == sorted([second.name, third.name])
    state_folder.give_up(third)
    (second / state_folder.CONTENTS).touch()
    final = state_folder.publish(second, 2, keep=1)
    assert names(tmp_path) == [final.name]
    with pytest.raises(ValueError, match="is itself a checkpoint: save to the folder that it is in"):
        state_folder.begin(final, 4)


# -------------------------------------------------------------------------------------------- what is refused


def refused(folder):
    zero, rank, found = wrapped(3), dist.get_rank(), {}
    with zero.gather_parameters():
        found["inside"] = words_of(RuntimeError, saved_state.save, zero, folder)
    (zero.model(*toys.tokens(rank, 0)) * torch.inf).backward()
    assert not LossScaler(1.0).step(zero)
    saved_state.save(zero, folder / "good")  # nothing waits for a step
    zero.zero_grad()
    found["extra"] = words_of(ValueError, saved_state.save, zero, folder, {"loss": rank})
    order = ("a", "b") if rank else ("b", "a")
    saved_state.save(zero, folder / "good", {key: 1 for key in order})
    for step in (-1, "12", 1.5):
        found[step] = words_of(ValueError, saved_state.save, zero, folder, step=step)
    for keep in (0, 2.5):
        found[f"keep {keep}"] = words_of(ValueError, saved_state.save, zero, folder, keep=keep)
    found["code"] = words_of(TypeError, saved_state.save, zero, folder, {"a": [1, toys.run]})
    holds_itself = []
    holds_itself.append(holds_itself)
    found["deep"] = words_of(TypeError, saved_state.save, zero, folder, holds_itself)
    found["long"] = words_of(saved_state.Damaged, saved_state.load, zero, "x" * 300)
    state = zero.optimizer.state[zero.buckets[0].master]
    state["last"] = [torch.zeros(2)]
    found["list"] = words_of(ValueError, saved_state.save, zero, folder)
    del state["last"]
    path = saved_state.save(zero, folder / "good", step=7)
    found["itself"] = words_of(saved_state.NotSaved, saved_state.save, zero, path)
    assert names(folder) == ["good"]
    return found


def test_what_is_refused(found_by):
    for found in found_by(refused):
        assert found.pop("inside").startswith("leave gather_parameters() before you save")
        assert found.pop("extra").startswith("extra is not the same on rank 0 and on rank 1")
        for keep in (0, 2.5):
            words = found.pop(f"keep {keep}")
            assert words == f"keep is {keep}: give a whole number; at least one checkpoint is kept"
        assert found.pop("code").startswith("extra['a'][1] is a function")
        assert found.pop("deep") == "extra holds itself, or is nested too deeply to be saved"
        assert found.pop("long").endswith("cannot be looked into (File name too long)")
        assert found.pop("list").startswith("AdamW keeps 'last' of [2] for a shard of [")
        assert "is itself a checkpoint" in found.pop("itself")
        assert {words.partition(":")[0] for words in found.values()} == {
            "step is -1", "step is '12'", "step is 1.5"}


def copies(folder):
    """Each rank reads a checkpoint of the same name from a disk of its own."""
    zero, rank = wrapped(), dist.get_rank()
    for step in (1, 2):
        for disk in range(2):
            toys.step_of(zero, disk * (step - 1))
            path = saved_state.save(zero, folder / str(disk), {"step": step, "disk": disk * (step - 1)}, step=step)
            zero = wrapped()
    assert path.parent.name == "1"
    read = state_folder.read_contents
    state_folder.read_contents = lambda path: read(folder / str(rank) / path.name)
    words = words_of(saved_state.Damaged, saved_state.load, zero, folder / "0" / "step-00000002")
    state_folder.read_contents = read
    return words


def test_copies_that_differ(found_by):
    for words in found_by(copies):
        assert words.endswith("step-00000002 is not the same on rank 0 and on rank 1: give all ranks a folder on one "
                              "disk, or the same copy")


def alone(what, folder):
    zero = wrapped()
    patience = saving.group_to_save(None)._get_backend(torch.device("cpu")).options._timeout
    assert patience == dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    if dist.get_rank() == 0:
        getattr(saved_state, what)(zero, folder)
    toys.step_of(zero, 0)


@pytest.mark.parametrize("what, words", (
    ("async_save", "save after 0 steps"), ("load", "load"), ("any_in", "look for")))
def test_a_rank_that_comes_alone_is_named(what, words, tmp_path):
    stands = f"rank 0 is in all_gather of a checkpoint to {words}, .*Save, load and look"
    with pytest.raises(ranks.RankError, match=stands):
        toys.run(alone, 2, what, tmp_path, timeout=20)


# ----------------------------------------------------------------------------------------- what goes on


def after_failures(folder):
    """A save that could not begin, one that failed, and a folder that is not where it was."""
    from torch.distributed import checkpoint as dcp

    from zero_minimal.checkpoint import resharding

    zero, begin, read, found = wrapped(), dcp.async_save, resharding.ChunkSaver.resolve_data, []

    def no_thread(*_, **__):
        raise RuntimeError("can't start new thread")

    def full(*_):
        raise OSError(28, "No space left on device")

    dcp.async_save = no_thread
    found.append(words_of(RuntimeError, saved_state.async_save, zero, folder))
    dcp.async_save = begin
    toys.step_of(zero, 0)  # does not wait for it
    for call in (saved_state.save, saved_state.load):
        resharding.ChunkSaver.resolve_data = full
        failed = saved_state.async_save(zero, folder, step=1 if call is saved_state.save else None)
        while not failed.done:
            pass
        resharding.ChunkSaver.resolve_data = read
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(zero, folder)
        found.append([str(one.message) for one in caught])
    os.chdir(folder.parent)
    late = saved_state.async_save(zero, folder.name)
    os.chdir("/")
    assert late.wait().parent == folder
    return found


def test_goes_on_after_a_failure(found_by):
    for rank, (stuck, *warned) in enumerate(found_by(after_failures)):
        assert stuck == "can't start new thread"
        assert [len(words) for words in warned] == [rank == 0] * 2
        if rank == 0:
            assert re.match("the checkpoint of step 1 was not written to .*: rank 0: ", warned[0][0])


def averaged(folder):
    """As averages.py says: saved by stage 2, loaded by stage 3, whose shards are others."""
    zero = wrapped(2)
    average = Average(zero, 0.5)
    for step in range(3):
        toys.step_of(zero, step)
        average.update()
    with average.in_place():
        saved_state.save(zero, folder / "averages")
        before = toys.whole_parameters(zero)
    saved_state.save(zero, folder / "a")
    other = wrapped(3, seed=2)
    saved_state.load(other, folder / "averages")
    again = Average(other, 0.5)
    saved_state.load(other, folder / "a")
    same = toys.identical(toys.whole_parameters(other), toys.whole_parameters(zero))
    with again.in_place():
        return same and toys.identical(toys.whole_parameters(other), before)


def test_averages_go_on_elsewhere(found_by):
    assert found_by(averaged) == [True, True]


# ------------------------------------------------------------------------------- what a module has beside weights


class Holder(nn.Module):
    """Two modules have one buffer; the first does not save it under its own name. And a state of another kind."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.linear = nn.Module(), nn.Module(), nn.Linear(3, 3)
        table, hidden, self.seen = torch.zeros(2), torch.zeros(2), 0
        for module, persistent in ((self.one, False), (self.two, True)):
            module.register_buffer("table", table)
            module.register_buffer("hidden", hidden, persistent=persistent)

    def forward(self, x):
        self.seen += 1
        return self.linear(x)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def shared(folder):
    zero = wrapped(make=Holder)
    toys.learn(zero, zero.model(torch.ones(1, 3)).sum())
    zero.model.one.table.fill_(3)
    zero.model.one.hidden.fill_(4)
    saved_state.save(zero, folder)
    other = wrapped(3, make=Holder)
    saved_state.load(other, folder)
    return other.model.one.table.tolist(), other.model.two.hidden.tolist(), other.model.seen, folder


def test_shared_buffers_and_extra_state(found_by, tmp_path, capsys):
    from safetensors.torch import load_file

    from zero_minimal.__main__ import main

    expected = [3.0, 3.0], [4.0, 4.0], 1
    every = found_by(shared)
    assert [found for *found, _ in every] == [list(expected)] * 2
    folder = every[0][-1]
    plain = Holder()
    saved_state.load_plain(plain, None, folder)
    assert (plain.one.table.tolist(), plain.one.hidden.tolist(), plain.seen) == expected
    main(["export", str(folder), str(tmp_path / "m.safetensors")])
    assert "get_extra_state() of the model is not in the file" in capsys.readouterr().err
    missing, unexpected = Holder().load_state_dict(load_file(tmp_path / "m.safetensors"), strict=False)
    assert missing == ["_extra_state"] and not unexpected


# ------------------------------------------------------------------------------- all that needs ranks, on the same


def each(folder):
    found = {}
    for function in (went_back, refused, copies, averaged, shared, after_failures):
        found[function.__name__] = function(folder / function.__name__)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found_by(tmp_path_factory):
    """function → what each rank found."""
    every = toys.run(each, 2, tmp_path_factory.mktemp("care"))
    return lambda function: [found[function.__name__] for found in every]


# ------------------------------------------------------------------------------------- Ctrl-C, and edits by hand


def ctrl_c(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("owner, name", ((resharding.Writer, "write_data"), (dist, "scatter_object_list")))
def test_ctrl_c_ends_a_save_and_the_next_one_works(owner, name, tmp_path):
    def interrupted():
        zero = stage1.Stage1(nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, ctrl_c)
            saved_state.save(zero, tmp_path)
        return saved_state.save(zero, tmp_path), [path.name for path in tmp_path.iterdir()]

    assert toys.run(interrupted, 1) == [(tmp_path / "step-00000000", ["step-00000000"])]


def test_a_wait_that_ctrl_c_ends_leaves_the_save_to_be_waited_for(tmp_path):
    def interrupted():
        zero = stage1.Stage1(nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
        gate, read = threading.Event(), resharding.ChunkSaver.resolve_data
        resharding.ChunkSaver.resolve_data = lambda *args: gate.wait(60) and read(*args)
        saving_one = saved_state.async_save(zero, tmp_path)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(saving_one.future, "result", ctrl_c)
            saving_one.wait()
        left = saving_one in saving._under_way
        gate.set()
        return left, saving_one.wait().name, saving_one in saving._under_way

    assert toys.run(interrupted, 1, fresh=True) == [(True, "step-00000000", False)]


@pytest.mark.parametrize("kind", (stage1.Stage1, stage3.Stage3, offload.Offloaded3))
def test_an_edit_between_steps_is_saved(kind, tmp_path):
    """At stage 3 the root is whole then, and the edit is not in its shard yet."""
    def edited():
        model = nn.Linear(4, 4)
        zero = kind(model, torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 4))
        with torch.no_grad():
            model.weight.fill_(2.0)
        saved_state.save(zero, tmp_path)
        state = copy.deepcopy(zero.state_dict())
        found = []
        for load in (lambda: zero.load_state_dict(state), lambda: saved_state.load(zero, tmp_path)):
            with zero.gather_parameters(), torch.no_grad():
                model.weight.zero_()
            load()
            with zero.gather_parameters():
                found.append(model.weight.unique().tolist())
        return found

    assert toys.run(edited, 1) == [[[2.0], [2.0]]]


def test_json_takes_a_conjugate():
    value = torch.tensor([1 + 2j, 3j]).conj()
    assert torch.equal(as_json.decoded(as_json.encoded(value)), value.resolve_conj())
