"""DeepSpeed files as people write them (tests/deepspeed_files.py): each is read, or refused with a line."""

import json
import re

import deepspeed_files as files
import deepspeed_runs as runs
import pytest

from zero_minimal.workload import deepspeed_file
from zero_minimal.workload.deepspeed_config import Wanted

IGNORED = re.compile(r"(?P<key>\S+) is ignored: (?P<why>\S.+)")


def wanted(tmp_path, content, ranks, given):
    file = tmp_path / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return Wanted(deepspeed_file.read(str(file)), given, runs.DEFAULTS | given, ranks)


@pytest.mark.parametrize("name", files.READ)
def test_a_file_is_read_and_each_key_it_has_for_nothing_is_named(name, tmp_path):
    content, ranks, given, flags, ignored = files.READ[name]
    asked = wanted(tmp_path, content, ranks, given)
    assert {flag: asked.flags.get(flag) for flag in flags} == flags
    said = [match for note in asked.notes if (match := IGNORED.fullmatch(note))]
    assert sorted(match["key"] for match in said) == sorted(ignored)
    assert asked.stage == content.get("zero_optimization", {}).get("stage", 0)


@pytest.mark.parametrize("name", files.REFUSED)
def test_a_file_is_refused_with_the_right_line(name, tmp_path):
    content, ranks, given, line = files.REFUSED[name]
    with pytest.raises(ValueError) as refused:
        wanted(tmp_path, content, ranks, given)
    assert line in str(refused.value)


@pytest.mark.parametrize("name", files.TEXTS)
def test_a_text_that_is_no_json_is_refused(name, tmp_path):
    text, line = files.TEXTS[name]
    with pytest.raises(ValueError) as refused:
        wanted(tmp_path, text, 1, {})
    assert line in str(refused.value)


def open_to(asked):
    """The keys that are "auto", and that no flag says."""
    note, = (each for each in asked.notes if each.startswith('"auto"'))
    assert note.endswith(": no flag says it")
    return set(note.removeprefix('"auto" is DeepSpeed\'s default for ').partition(":")[0].split(", "))


def test_auto_is_the_flag_or_named(tmp_path):
    """What Hugging Face's Trainer fills in from its arguments: batch, clipping, rates and steps have flags here."""
    content, ranks, given, *_ = files.READ["Trainer, stage 2 with offload"]
    asked = wanted(tmp_path, content, ranks, given | {"lr": 5e-4, "clip": 0.5})
    assert asked.flags["lr"] == asked.scheduler["warmup_max_lr"] == 5e-4 and asked.flags["clip"] == 0.5
    assert open_to(asked) == {f"optimizer.params.{key}" for key in ("betas", "eps", "weight_decay")} | {
        f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_num_steps")}
    assert asked.optimizer["betas"] == [0.9, 0.999] and asked.scheduler["warmup_num_steps"] == 1000
    content = files.READ["Trainer, stage 1, scale from 2^32"][0]
    assert wanted(tmp_path, content, 2, {"steps": 30, "dtype": "fp16"}).scheduler["total_num_steps"] == 30
    every = {"fp16": {"enabled": "auto"} | dict.fromkeys(files.SCALE, "auto")}
    asked = wanted(tmp_path, every, 1, {"dtype": "fp16"})
    assert open_to(asked) == {f"fp16.{key}" for key in files.SCALE} and asked.fp16["initial_scale_power"] == 16
    assert not [note for note in wanted(tmp_path, files.TRAINER, 1, {}).notes if "auto" in note]


def test_buckets_are_elements_in_the_file_and_bytes_here(tmp_path):
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        content = {dtype: {"enabled": True}} if dtype != "fp32" else {}
        asked = wanted(tmp_path, content | files.zero(1, reduce_bucket_size=5e8), 1, {})
        assert asked.flags["bucket_mb"] * 2**20 == 5e8 * size
