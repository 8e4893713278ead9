"""Lesson 08's page: a recorded run gave each figure on it, and replaying the record gives them again; what the learner
is to find is not there."""

import gc
import itertools
import math
import re

import pytest
import texts
import toys
from cells import cells_of
from house.lesson_pages import texts_of
from thorough import sample

from zero_minimal.core.block_pool import Pool
from zero_minimal.meters import allocator
from zero_minimal.meters.allocator import CachingAllocator, fails, find_capacity, replay, smallest_capacity
from zero_minimal.programs.lesson08_program import Recording, record, varied_lengths
from zero_minimal.workload import data
from zero_minimal.workload.model import GPTConfig

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("08_defragmentation")
RECORDED = MEASURED["traces"]
ROWS, FAILURE = MEASURED["rows"], MEASURED["failure"]
MIB = 2**20
WITHOUT, WITH, OTHER = SEEDS = {"without slabs": 4, "with slabs": 4, "other lengths, without slabs": 3}
CONFIG = GPTConfig(layers=3, hidden=128, heads=2, sequence=192, vocabulary=16384)  # as in the notebook
BATCH, ACCUMULATE = 8, 3
CELLS = {cell["id"]: cell for cell in cells_of("08_defragmentation.ipynb")}
exec(CELLS["kinds"]["source"], names := {"Pool": Pool})  # allocators that lack something
POOLS = names["POOLS"]


# --------------------------------------------------------------------------------------- the figures are those of a run


@pytest.fixture(scope="module")
def recordings():
    return {name: Recording(allocator.unpacked(one), one["begins"], one["losses"]) for name, one in RECORDED.items()}


def recorded(*args):
    """What record() records where nothing was before it: garbage that lies about may be freed in the middle."""
    gc.collect()
    gc.disable()
    recording = record(*args, shown=False)
    return recording.begins, allocator.packed(recording.trace), recording.losses


@pytest.mark.thorough
@pytest.mark.parametrize("name", sample(list(SEEDS), [WITH]))
def test_the_record_is_that_of_a_run_of_today(name):
    """What it asks for, in what order, and what is freed: all but the losses, which another processor may round."""
    lengths, stored = varied_lengths(ACCUMULATE, CONFIG.sequence, SEEDS[name]), RECORDED[name]
    given = (CONFIG, lengths, BATCH, ACCUMULATE, name == WITH, SEEDS[name])
    begins, packed, losses = toys.run(recorded, 1, *given, timeout=90, fresh=True)[0]
    assert stored["lengths"] == lengths and stored["begins"] == begins
    place = packed["requests"].index(len(data.read_tokens()))  # one byte of the text is one of memory
    packed["requests"][place] = texts.RECORDED
    for field in ("requests", "categories"):
        pairs = enumerate(itertools.zip_longest(packed[field], stored[field]))
        assert not [(place, *pair) for place, pair in pairs if len(set(pair)) > 1][:5], field
    assert len(losses) == len(stored["losses"]) and (
        not texts.as_recorded() or losses == pytest.approx(stored["losses"], rel=1e-4))


@pytest.mark.thorough
def test_replaying_the_record_gives_the_figures(recordings):
    finding = find_capacity(recordings[WITHOUT].trace, recordings[WITH].trace)
    assert finding.capacity == MEASURED["capacity"]
    assert {name: getattr(finding.failure, name) for name in FAILURE} == FAILURE
    for name, recording in recordings.items():
        generous = replay(recording.trace, CachingAllocator(2**62))
        assert ROWS[name] == {"allocated": generous.peak_allocated, "reserved": generous.peak_reserved,
                              "least": smallest_capacity(recording.trace)}
    for pools, name in (("pools", WITHOUT), ("pools with slabs", WITH)):
        assert MEASURED[pools] == {
            kind: smallest_capacity(recordings[name].trace, pool=pool) for kind, pool in POOLS.items()}


def test_a_record_is_read_as_it_was_written(recordings):
    for name, recording in recordings.items():
        assert allocator.packed(recording.trace) == {key: RECORDED[name][key] for key in ("requests", "categories")}
        assert {event.storage.category for event in recording.trace} >= {"parameters", "gradients", "optimizer"}


def test_what_is_asked_for_before_a_record_begins_is_left_out(recordings):
    trace = recordings[WITHOUT].trace
    cut = next(number for number, event in enumerate(trace) if event.bytes < 0)
    packed = allocator.packed(trace[cut:])
    assert len(packed["requests"]) < len(trace) - cut and packed["requests"][0] > 0
    assert allocator.packed(allocator.unpacked(packed)) == packed


def test_pools_that_lack_something_lack_it():
    """What the picture calls first fit, and so on, is that, and nothing else."""
    for name, kind in POOLS.items():
        pool = kind()
        for address, size in ((0, 50), (100, 30), (200, 30)):
            pool.add(address, size)
        block = pool.take(20)
        assert block.address == (0 if name == "first fit" else 100)
        assert block.size == (30 if name == "never splits" else 20)
        one, two = pool.take(30 if name == "first fit" else 25), pool.take(25)
        for each in (block, one, two):
            pool.give(each)
        whole = [(0, 50), (100, 30), (200, 30)]
        assert (pool.holes == whole) == (name != "never merges")
        assert sum(size for _, size in pool.holes) == 110


# ------------------------------------------------------------------------------------------- what the page says of them


def test_the_run_of_the_page_is_the_one_that_the_words_mean():
    """Their figures are held by test_measured.py; here, what the words say of them."""
    least = ROWS[WITHOUT]["least"]
    free, asked = (FAILURE[size] / MEASURED["capacity"] for size in ("free", "requested"))
    assert free > 1 / 3 and "with more than a third of it free" in PROSE
    assert f"{free:.0%} of a memory is free, and a request for {asked:.0%} of it fails" in PROSE
    used = ROWS[WITHOUT]["allocated"]
    assert used == ROWS[WITH]["allocated"], "both runs have the same peak"
    assert "a third more than it ever uses" in PROSE and 1.3 < least / used < 1.36
    (*first, second), (*others, last) = (RECORDED[name]["lengths"] for name in (WITHOUT, OTHER))
    assert f"have {', '.join(map(str, first))} and {second} tokens, in the last row" in PROSE
    assert f"in the last row {', '.join(map(str, others))} and {last} (`--seed {SEEDS[OTHER]}`)." in PROSE
    assert MEASURED["same losses"] and "bit for bit" in PROSE


def test_what_the_page_says_of_slabs(recordings):
    """The formulas of the table."""
    factors = CONFIG.layers, BATCH, max(RECORDED[WITH]["lengths"]), CONFIG.hidden, 4
    assert MEASURED["slabs"]["checkpoints"] == math.prod(factors)
    assert f"({'·'.join(map(str, factors))} bytes)" in PROSE
    trace = recordings[WITH].trace
    parameters = {event.storage for event in trace if event.storage.category == "parameters"}
    assert MEASURED["slabs"]["gradients"] <= sum(one.bytes for one in parameters)
    assert "with more than 30% of it free (section 3.2)" in PROSE
    assert "one of Ψ elements" in PROSE and "one of L·b·s·h, for L blocks whose largest input is [b, s, h]" in PROSE


def test_what_the_page_says_of_allocators_that_lack_something():
    pools = MEASURED["pools"]
    assert pools["first fit"] == pools["best fit, split, merge"] and "First fit needs the same" in PROSE
    assert f"Without splits it is {pools['never splits'] // MIB}" in PROSE
    for name, words in (("pools", "merging is worth {} MiB here"),
                        ("pools with slabs", "With slabs merging is worth {} MiB")):
        worth = MEASURED[name]["never merges"] - MEASURED[name]["best fit, split, merge"]
        assert words.format(worth // MIB) in PROSE
    slabs = MEASURED["pools with slabs"]
    less = slabs["best fit, split, merge"] - slabs["first fit"]
    assert f"with slabs {less // MIB} MiB less, one step of the search" in TOLD


def test_the_lengths_with_which_slabs_save_nothing():
    """Those of the notebook's rank 1, which has the next seed."""
    lengths = varied_lengths(ACCUMULATE, CONFIG.sequence, SEEDS[WITH] + 1)
    printed = "".join(line for cell in CELLS.values() for made in cell["outputs"] for line in made.get("text", ()))
    (least, with_slabs), = re.findall(rf"{re.escape(str(lengths))}: (\d+) MiB without slabs, (\d+) with them", printed)
    *first, last = lengths
    assert least == with_slabs and (f"With {', '.join(map(str, first))} and {last} (`--seed {SEEDS[WITH] + 1}`) slabs "
                                    f"save nothing: {least} MiB with and without.") in PROSE


def test_the_gradient_that_lies_alone(recordings):
    """The picture's and the teacher's: a segment of 50 MiB is pinned by one gradient of 8 MiB."""
    allocator, blocks = CachingAllocator(MEASURED["capacity"]), {}
    for event in recordings[WITHOUT].trace[: FAILURE["request"]]:
        if event.bytes > 0:
            blocks[event.storage] = allocator.allocate(event.bytes)
        else:
            allocator.free(blocks.pop(event.storage))
    segment = next(segment for segment in allocator.segments if segment.bytes == 50 * MIB and any(
        hole[0] in range(segment.address, segment.address + segment.bytes) for hole in allocator.holes))
    inside = [(storage.category, block.size) for storage, block in blocks.items()
              if segment.address <= block.address < segment.address + segment.bytes]
    assert inside == [("gradients", 8 * MIB)]
    assert "A gradient of 8 MiB lies in the middle of a segment of 50 MiB" in PROSE
    assert "a segment of 50 MiB is pinned by one gradient of 8 MiB" in TOLD
    large = [size / MIB for _, size in allocator.holes if size > 3 * MIB]
    driver = (MEASURED["capacity"] - allocator.reserved) / MIB
    assert "50 alone would not be enough" in PROSE and FAILURE["requested"] > 50 * MIB
    assert f"which has {driver:.0f} already" in PROSE
    assert f"It would have {driver + 50:.0f} MiB in one piece, more than enough" in PROSE
    assert driver + 50 > FAILURE["requested"] / MIB
    assert f"free pieces of {', '.join(f'{size:.0f}' for size in large)} and {driver:.0f} MiB between" in PROSE


def test_the_game_on_the_sheet_of_paper():
    """The page's table can be played, and filled in it says what a pool does."""
    filled = PAGE.split("| request | lies at | free then |\n")[1].split("</details>")[0]
    lines = [line for line in filled.split("\n") if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 9 and f"and play: {', '.join(request for request, *_ in rows)} <details>" in PROSE
    pool, blocks = Pool(), {}
    pool.add(0, 100)
    for request, place, free in rows:
        before = {f"{size} at {address}" for address, size in pool.holes}
        name, _, size = request.rpartition("take ")
        if request.startswith("give "):
            pool.give(blocks[request[-1]])
            assert not place
        elif (block := pool.take(int(size))) is None:
            assert place == "none" and f"{sum(size for _, size in pool.holes)} are free" in filled
        else:
            blocks[name[:1]] = block
            assert place == str(block.address)
        told = ", ".join(f"{size} at {address}" for address, size in pool.holes)
        assert free == told or free == "the same" and before == set(told.split(", "))


def test_the_exam_on_the_teachers_page():
    pool = Pool()
    pool.add(0, 100)
    a, b, c, _ = (pool.take(size) for size in (20, 30, 10, 25))
    pool.give(a)
    pool.give(c)
    assert [pool.take(size).address for size in (10, 15)] == [50, 85]
    pool.give(b)
    assert pool.holes == [(0, 50)]
    said = TOLD
    assert f"elements of 2 bytes are {24 * 4 * 4096 * 2048 * 2 / 1e9:.1f} GB" in said
    assert f"An eighth, {24 * 4 * 4096 * 2048 * 2 / 8 / 1e9:.1f} GB" in said


def test_every_figure_in_mib_is_a_known_one():
    """No other ones have crept in."""
    sizes = [*MEASURED["pools"].values(), *MEASURED["slabs"].values(), MEASURED["capacity"], 50 * MIB, 8 * MIB, 2 * MIB,
             MIB, *(MEASURED[name]["never merges"] - MEASURED[name]["best fit, split, merge"]
                    for name in ("pools", "pools with slabs"))]
    sizes += [FAILURE[key] for key in ("requested", "free", "largest_free", "allocated")]
    sizes += [FAILURE["largest_free"] + 50 * MIB, 244 * MIB]  # the last one: of the notebook
    sizes += [row[key] for row in ROWS.values() for key in ("allocated", "reserved", "least")]
    known = {f"{size / MIB:.{digits}f} MiB" for size in sizes for digits in (0, 1)}
    said = {figure for text in (PAGE, TEACHER) for figure in re.findall(r"\d[\d.,]* MiB\b", text)}
    assert len(said) > 10 and not said - known




def test_another_pool_can_be_replayed(recordings):
    trace = recordings[WITH].trace
    assert fails(trace, MEASURED["capacity"], POOLS["never splits"])
    assert smallest_capacity(trace, pool=POOLS["first fit"]) == MEASURED["pools with slabs"]["first fit"]
