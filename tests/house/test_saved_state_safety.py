"""What is damaged, foreign, of a newer format or of another model is refused by name, and nothing is changed by it."""

import json
import os
import pickle
import re
import shutil
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
import toys
from house.saved_models import Wide, disk_has, groups_of, names, wrapped
from misuse import in_ranks
from torch import nn

from zero_minimal.checkpoint import saved_state, state_folder

# ---------------------------------------------------------------------------------------------------------- damage


def flip(file, place, bit=3):
    """Another bit at this place of the file: a number of bytes, or a share of them."""
    held = bytearray(file.read_bytes())
    held[int(place * len(held)) if isinstance(place, float) else place] ^= 1 << bit
    file.write_bytes(held)


def shorten(file, left):
    file.write_bytes(file.read_bytes()[: int(left * file.stat().st_size)])


def bomb():
    """A pickle that would end the process which loads it."""
    class Bomb:
        def __reduce__(self):
            return os._exit, (7,)

    return pickle.dumps(Bomb())


def newer(folder):
    file = folder / "contents.json"
    file.write_text(file.read_text().replace('"version": 2', '"version": 3', 1))


def first_line(folder, before, after):
    file = folder / "contents.json"
    file.write_bytes(file.read_bytes().replace(before, after, 1))


def of_dcp(folder):
    """What torch.distributed.checkpoint itself writes, with code inside."""
    for file in folder.iterdir():
        file.unlink()
    (folder / ".metadata").write_bytes(bomb())
    (folder / "__0_0.distcp").write_bytes(bomb())


DAMAGE = {  # what is done to a checkpoint's folder: what the refusal says
    "flipped in a file": (lambda folder: flip(folder / "rank-1.bin", 0.7), r"rank-1\.bin is damaged: a checksum"),
    "its first bit": (lambda folder: flip(folder / "rank-0.bin", 0, 0), r"rank-0\.bin is damaged"),
    "truncated": (lambda folder: shorten(folder / "rank-0.bin", 0.5), r"rank-0\.bin is truncated: it has"),
    "one byte more": (lambda folder: (folder / "rank-0.bin").open("ab").write(b"0"), r"rank-0\.bin is too long"),
    "empty": (lambda folder: (folder / "rank-1.bin").write_bytes(b""), r"rank-1\.bin is truncated: it has 0 bytes"),
    "a file is missing": (lambda folder: (folder / "rank-1.bin").unlink(), r"rank-1\.bin cannot be read"),
    "flipped in the contents": (lambda folder: flip(folder / "contents.json", 0.5), r"contents\.json is damaged"),
    "a format of its own": (lambda folder: flip(folder / "contents.json", 15), r"contents\.json is not a checkpoint's"),
    "contents truncated": (lambda folder: shorten(folder / "contents.json", 0.9), r"contents\.json is damaged"),
    "no contents left": (lambda folder: shorten(folder / "contents.json", 0), r"contents\.json is not a checkpoint's"),
    "a newer format": (newer, r"contents\.json is of format 3, and this program reads up to 2.*newer"),
    "a version without end": (lambda folder: first_line(folder, b'"version": 2', b'"version": Infinity'),
                              "not a checkpoint's"),
    "nested without end": (lambda folder: first_line(folder, b'"version": 2', b'"version": ' + b"[" * 99_999),
                           "not a checkpoint's"),
    "other JSON": (lambda folder: (folder / "contents.json").write_text('{"a": 1}'), "not a checkpoint's"),
    "a pickle in its place": (lambda folder: (folder / "contents.json").write_bytes(bomb()), "not a checkpoint's"),
    "DCP's own": (of_dcp, r"contents\.json cannot be read .*no checkpoint"),
}


def damaged_and_loaded(folder):
    """Of each kind of damage to the newer of two checkpoints: what was warned of, what was loaded, and what is said if
    there is no other."""
    good, found = folder / "good", {}
    zero = wrapped()
    for step in (1, 2):
        toys.step_of(zero, step)
        saved_state.save(zero, good, {"step": step}, step=step)
    for words, (damage, _) in DAMAGE.items():
        own = folder / words
        if dist.get_rank() == 0:
            shutil.copytree(good, own)
            damage(own / "step-00000002")
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            extra = saved_state.load(zero, own)
        before = toys.whole_parameters(zero)
        with pytest.raises(saved_state.Damaged) as alone:
            saved_state.load(zero, own / "step-00000002")
        assert toys.identical(before, toys.whole_parameters(zero))
        found[words] = extra, [str(one.message) for one in caught], str(alone.value)
    return found


def test_damage_is_named_and_the_one_before_taken(tmp_path):
    for rank, found in enumerate(toys.run(damaged_and_loaded, 2, tmp_path, timeout=100)):
        for words, (extra, warned, alone) in found.items():
            assert extra == {"step": 1} and len(warned) == (rank == 0), (words, warned)
            for message in warned:
                assert re.search(DAMAGE[words][1], message), f"{words}: {message}"
                assert "step-00000002" in message and message.endswith("The checkpoint before it is taken")
            if words == "DCP's own":
                assert alone == f"there is no checkpoint in {tmp_path / words / 'step-00000002'}"
            else:
                assert re.search(DAMAGE[words][1], alone), f"{words}: {alone}"


def each_bit(folder):
    zero = wrapped()
    toys.step_of(zero, 0)
    path = saved_state.save(zero, folder)
    missed = []
    for file in sorted(path.iterdir()):
        held = file.read_bytes()
        for place in sorted({*range(130), *range(0, len(held), 41)}):  # the first line of the contents, too
            flip(file, place, place % 8)
            try:
                contents = state_folder.read_contents(path)
                for name in contents.files:
                    state_folder.check_file(contents, name)
                missed.append((file.name, place))
            except state_folder.Damaged as error:
                assert file.name in str(error)
            file.write_bytes(held)
    return missed


def test_no_flipped_bit_is_missed(tmp_path):
    assert toys.run(each_bit, 1, tmp_path, timeout=110) == [[]]


@in_ranks(2)
def test_an_empty_folder(tmp_path):
    zero = wrapped()
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(saved_state.Damaged, match="there is no checkpoint in"):
            saved_state.load(zero, path)
        assert not saved_state.any_in(zero, path)


def test_contents_are_json_with_a_checksum(tmp_path):
    """A person, or another program, reads them without us."""
    toys.run(lambda folder: saved_state.save(wrapped(), folder, {"epoch": 3}), 1, tmp_path)
    text = (tmp_path / "step-00000000" / "contents.json").read_bytes()
    contents = json.loads(text)
    assert zlib.crc32(text.partition(b"\n")[2]) == contents["crc32"]
    assert contents["contents"]["facts"]["extra"] == {"epoch": 3}
    [[offsets, sizes, file, place]] = contents["contents"]["tensors"]["model/norm.weight"]["chunks"]
    held = (tmp_path / "step-00000000" / file).read_bytes()
    one = torch.frombuffer(bytearray(held[place : place + 4 * sizes[0]]), dtype=torch.float32)
    assert offsets == [0] and torch.equal(one, torch.ones(15))
    for length, crc32 in contents["contents"]["files"][file]:
        assert zlib.crc32(held[:length]) == crc32
        held = held[length:]
    assert not held


# ---------------------------------------------------------------------------------------------------- another model


class Renamed(Wide):
    def __init__(self):
        super().__init__()
        self.blocks[1].first, self.blocks[1].norm1 = self.blocks[1].norm1, None

    def forward(self, inputs, targets):
        raise AssertionError("not used")


class Wider(Wide):
    def __init__(self):
        super().__init__()
        self.blocks[2].up = nn.Linear(15, 40)
        self.register_buffer("more", torch.zeros(2))


class Frozen(Wide):
    def __init__(self):
        super().__init__()
        self.norm.weight.requires_grad_(False)


OTHERS = {
    "renamed": (dict(make=Renamed), r"parameters that it alone has: blocks\.1\.norm1\.weight, blocks\.1\.norm1\.bias; "
                                    r"parameters that the model alone has: blocks\.1\.first\.weight, "
                                    r"blocks\.1\.first\.bias$"),
    "wider": (dict(make=Wider), r"other shapes: blocks\.2\.up\.weight \(\[37, 15\], and \[40, 15\] here\), "
                                r"blocks\.2\.up\.bias \(\[37\], and \[40\] here\); buffers that the model alone has: "
                                r"more$"),
    "dtype": (dict(make=lambda: Wide().bfloat16()), r"other dtypes: frozen \(float32, and bfloat16 here\), embedding"),
    "frozen": (dict(make=Frozen), r"other optimizer groups: norm\.weight \(0, and frozen here\)$"),
    "optimizer": (dict(optimizer=torch.optim.Adam), r"its optimizer was AdamW, and is Adam here$"),
    "groups": (dict(groups=groups_of), r"other optimizer groups: .*; its optimizer had 1 groups, and has 2 here$"),
}


@in_ranks(2)
def test_another_model_is_told_by_its_names(tmp_path):
    saved = wrapped()
    toys.step_of(saved, 0)
    saved_state.save(saved, tmp_path)
    for options, words in OTHERS.values():
        for stage in (1, 3):
            zero = wrapped(seed=3, stage=stage, **options)
            before = toys.whole_parameters(zero)
            with pytest.raises(ValueError, match=f"^this checkpoint is not of this model: .*{words}"):
                saved_state.load(zero, tmp_path)
            assert toys.identical(before, toys.whole_parameters(zero))


# -------------------------------------------------------------------------------------------------- a disk that is full


@pytest.mark.parametrize("meanwhile", (False, True))
@in_ranks(2)
def test_a_disk_that_is_full(meanwhile, tmp_path):
    """Rank 1 cannot write more than a few bytes: both hear it, and what was there before stays."""
    zero, write = wrapped(), saved_state.async_save if meanwhile else saved_state.save
    toys.step_of(zero, 0)
    saved_state.save(zero, tmp_path, {"good": True}, step=1)
    toys.step_of(zero, 0)
    disk_has(1000 if dist.get_rank() == 1 else None)
    with pytest.raises(saved_state.NotSaved, match=r"step 2 was not written.*: rank 1: \[Errno \d+\] File too large"):
        saving = write(zero, tmp_path, {"good": False}, step=2)
        if meanwhile:
            toys.step_of(zero, 0)  # goes on
            saving.wait()
    disk_has(None)
    dist.barrier()
    assert names(tmp_path) == ["step-00000001"] and saved_state.load(zero, tmp_path) == {"good": True}
    saved_state.save(zero, tmp_path, {"good": "again"}, step=2)
    assert saved_state.load(zero, tmp_path) == {"good": "again"}
