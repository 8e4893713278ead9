"""A memory to scrub through shows what the replay did, and lesson 08's notebook runs on any number of ranks."""

import json
import re

import pytest
import texts
from cells import cells_of, notebook_on

from zero_minimal.classroom.lessons import HOUSE, found
from zero_minimal.classroom.references import reference
from zero_minimal.core.block_pool import Pool
from zero_minimal.meters.allocator import MIB, CachingAllocator, fails, replay, rounded, smallest_capacity, unpacked
from zero_minimal.pictures.memory_map import Scrub, moments
from zero_minimal.workload.data import read_tokens

LESSON = found()["08_defragmentation"]
MEASURED = json.loads((LESSON.folder / "measured.json").read_text())
CAPACITY = MEASURED["capacity"]
WITHOUT, WITH = "without slabs", "with slabs"


class NeverSplits(Pool):
    """Another pool than the allocator's own."""

    def __init__(self, slack=0):
        super().__init__(slack=2**62)


@pytest.fixture(scope="module")
def traces():
    return {name: unpacked(one) for name, one in MEASURED["traces"].items()}


def content_of(scrub):
    """What the page's script has."""
    (data,) = re.findall(r"const data = (\{.*\}), box", scrub._repr_html_())
    return json.loads(data)


def used_at(memory, event):
    return sum(bytes for begin, end, _, bytes, _ in memory["rows"] if begin <= event < end)


def test_it_shows_what_the_replay_did(traces):
    names = (WITHOUT, WITH)
    content = content_of(Scrub({name: traces[name] for name in names}, CAPACITY))
    failing, serving = content["memories"]
    assert content["capacity"] == CAPACITY and [memory["name"] for memory in content["memories"]] == list(names)
    assert failing["fails"] == failing["start"] == MEASURED["failure"]["request"] == len(failing["requests"]) - 1
    assert failing["requests"][-1] == traces[WITHOUT][failing["fails"]].bytes
    assert used_at(failing, failing["fails"]) == MEASURED["failure"]["allocated"], "nobody has left at that moment"
    assert serving["fails"] is None and len(serving["requests"]) == len(traces[WITH])
    assert max(used_at(serving, event) for event in range(0, len(serving["requests"]), 7)) <= CAPACITY
    for memory in content["memories"]:
        assert {row[-1] for row in memory["rows"]} <= set(content["looks"])
        for begin, end, address, bytes, _ in memory["rows"]:
            assert any(first <= begin and (last is None or end <= last + 1) and start <= address
                       and address + bytes <= start + size for first, last, start, size in memory["segments"])


def test_it_begins_where_it_is_told(traces):
    pair = [type("", (), {"trace": traces[name], "begins": begins}) for name, begins in begins_of().items()]
    fail, same = moments(*pair, CAPACITY)
    assert fail == MEASURED["failure"]["request"]
    assert traces[WITH][same].bytes == traces[WITHOUT][fail].bytes
    scrub = Scrub({WITH: traces[WITH]}, CAPACITY, {WITH: same})
    assert content_of(scrub)["memories"][0]["start"] == same
    assert repr(scrub) == "with slabs, to be scrubbed through in a notebook"


def begins_of():
    return {name: MEASURED["traces"][name]["begins"] for name in (WITHOUT, WITH)}


def test_another_pool_lays_elsewhere(traces):
    trace = traces[WITH]
    scrub = Scrub({"ours": trace, "whole": trace}, 4 * CAPACITY, pools={"whole": NeverSplits})
    ours, other = content_of(scrub)["memories"]
    assert ours["requests"] == other["requests"] and ours["rows"] != other["rows"]


# ------------------------------------------------------------------------------------------------------------ notebook


@pytest.mark.thorough
def test_the_notebook_on_3_ranks(monkeypatch, tmp_path, world_size=3):
    """With a whole solution as the learner's file."""
    file = tmp_path / "assignment.py"
    file.write_text(reference(LESSON))
    monkeypatch.setenv("ZERO_ATTEMPT", str(file))
    with notebook_on(world_size, "08_defragmentation.ipynb") as (names, world):
        longer = rounded(len(read_tokens())) - rounded(texts.RECORDED)  # this Python's text, which is in memory, too
        assert names["failure"].free == MEASURED["failure"]["free"] - longer
        assert names["pools"] == MEASURED["pools"]
        assert world["same"] == [True] * world_size
        assert world["besides"] == [MIB] * world_size
        assert len(set(map(str, world["enough"]))) == world_size, "each rank has lengths of its own"
        lessons, yours = content_of(world["own"][0])["memories"]
        assert yours["rows"] == lessons["rows"] and yours["name"] == "yours"


def test_the_notebook_has_the_numbers_of_the_page(traces):
    cells = cells_of("08_defragmentation.ipynb")
    shown = {cell["id"]: "".join(part for output in cell["outputs"] for part in output.get("text", ()))
             for cell in cells}
    assert str(fails(traces[WITHOUT], CAPACITY)) in shown["fail"]
    assert f"measured: {MEASURED['failure']['largest_free'] / MIB:.0f} MiB" in shown["fail"]
    for name in (WITHOUT, WITH):
        assert f"measured: {smallest_capacity(traces[name]) / MIB:.0f} MiB" in shown["least"]
        lengths = MEASURED["traces"][name]["lengths"]
        assert f"{name}: sequences of {lengths} tokens, {len(traces[name]):,} requests" in shown["record"]
    assert f"measured: {MEASURED['pools']['never splits'] / MIB:.0f} MiB" in shown["pools"]
    assert "1.00 MiB besides" in shown["piece"]


def test_what_the_notebook_says_in_words(traces):
    """Figures in its text: of the failure, the peak, the slabs, and the gradient that stays."""
    book = json.loads((HOUSE / "notebooks/08_defragmentation.ipynb").read_text())
    words = " ".join("".join(cell["source"]) for cell in book["cells"])
    words = " ".join(words.split())
    failure = MEASURED["failure"]
    free, asked = failure["free"] / MIB, failure["requested"] / MIB
    assert f"on a device of {CAPACITY / MIB:.0f} MiB" in words and f"{free:.1f} MiB are free" in words
    assert f"longer: {asked:.1f} MiB" in words and f"though {free / CAPACITY * MIB:.0%} of the memory is free" in words
    peaks = {replay(traces[name], CachingAllocator(2**62)).peak_allocated for name in (WITHOUT, WITH)}
    (peak,) = peaks
    assert f"{peak / MIB:.0f} MiB in use, with slabs or without" in words
    assert f"in_use - {MEASURED['slabs']['gradients'] / MIB:.1f}" in words
    lengths = MEASURED["traces"][WITHOUT]["lengths"]
    logits = [4 * 8 * length * 16384 / MIB for length in lengths]  # of fp32, for 8 sequences and 16,384 words
    assert f"a segment of {logits[0]:.0f} MiB" in words and logits[1] == asked
