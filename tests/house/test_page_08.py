"""Lesson 08's page: a recorded run gave each figure on it, and replaying the record gives them again; what the learner
is to find is not there."""

import gc
import itertools
import json
import math
import re

import pages
import pytest
import texts
import toys
from house.lesson_pages import texts_of
from thorough import sample

from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.core.blocks import Pool
from zero_minimal.meters import traces
from zero_minimal.meters.allocator import CachingAllocator, fails, smallest_capacity
from zero_minimal.programs import lesson08_figures as program
from zero_minimal.programs.lesson08_program import record, varied_lengths
from zero_minimal.workload import data

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("08_defragmentation")
RECORDED = MEASURED["traces"]
ROWS, FAILURE = MEASURED["rows"], MEASURED["failure"]
MIB = 2**20


# --------------------------------------------------------------------------------------- the figures are those of a run


@pytest.fixture(scope="module")
def recordings():
    return program.recordings(MEASURED)


def recorded(*args):
    """What record() records where nothing was before it: garbage that lies about may be freed in the middle."""
    gc.collect()
    gc.disable()
    recording = record(*args, shown=False)
    return recording.begins, traces.packed(recording.trace), recording.losses


@pytest.mark.thorough
@pytest.mark.parametrize("name, seed, slabs", sample(
    [(program.WITHOUT, program.SEED, False), (program.WITH, program.SEED, True),
     (program.OTHER, program.OTHER_SEED, False)], [(program.WITH, program.SEED, True)]))
def test_the_record_is_that_of_a_run_of_today(name, seed, slabs):
    """What it asks for, in what order, and what is freed: all but the losses, which another processor may round."""
    lengths, stored = varied_lengths(program.ACCUMULATE, program.CONFIG.sequence, seed), RECORDED[name]
    given = (program.CONFIG, lengths, program.BATCH, program.ACCUMULATE, slabs, seed)
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
    assert json.loads(json.dumps(program.replayed(recordings))) | {"traces": RECORDED} == MEASURED


def test_a_record_is_read_as_it_was_written(recordings):
    for name, recording in recordings.items():
        assert traces.packed(recording.trace) == {key: RECORDED[name][key] for key in ("requests", "categories")}
        assert {event.storage.category for event in recording.trace} >= {"parameters", "gradients", "optimizer"}


def test_what_is_asked_for_before_a_record_begins_is_left_out(recordings):
    trace = recordings[program.WITHOUT].trace
    cut = next(number for number, event in enumerate(trace) if event.bytes < 0)
    packed = traces.packed(trace[cut:])
    assert len(packed["requests"]) < len(trace) - cut and packed["requests"][0] > 0
    assert traces.packed(traces.unpacked(packed)) == packed


def test_pools_that_lack_something_lack_it():
    """What the picture calls first fit, and so on, is that, and nothing else."""
    for name, kind in program.POOLS.items():
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


def test_the_table_on_the_page_is_what_was_measured():
    for name, row in ROWS.items():
        cells = [name, f"{row['allocated'] / MIB:.1f}", f"{row['least'] / MIB:.0f}"]
        assert "| " + " | ".join(cells) + " |" in PROSE


def test_what_the_page_says_of_the_failure():
    capacity, free, asked = (size / MIB for size in (MEASURED["capacity"], FAILURE["free"], FAILURE["requested"]))
    assert f"The device has {capacity:.0f} MiB, {free:.0f} of them are free, and {asked:.1f} are asked for" in PROSE
    used = FAILURE["allocated"] / MIB
    assert f"The device has {capacity:.0f} MiB. {used:.1f} of them are in use when {asked:.1f}" in PROSE
    assert f"1. {FAILURE['largest_free'] / MIB:.0f} MiB. There are two pieces of that size" in PROSE
    assert free / capacity > 1 / 3 and "with more than a third of it free" in PROSE
    assert f"{free / capacity:.0%} of a memory is free, and a request for {asked / capacity:.0%} of it fails" in PROSE
    least, with_slabs = ROWS[program.WITHOUT]["least"], ROWS[program.WITH]["least"]
    used = ROWS[program.WITHOUT]["allocated"]
    assert used == ROWS[program.WITH]["allocated"], "both runs have the same peak"
    assert f"2. {least / MIB:.0f} MiB, a third more than it ever uses" in PROSE and 1.3 < least / used < 1.36
    assert f"At no moment has this training more than {used / MIB:.0f} MiB in use" in PROSE
    checkpoints, gradients = (MEASURED["slabs"][name] / MIB for name in ("checkpoints", "gradients"))
    assert f"3. {with_slabs / MIB:.0f} MiB. The slab of checkpoints has {checkpoints:.1f} MiB here" in PROSE
    assert f"that of gradients {gradients:.1f}." in PROSE
    assert f"with {with_slabs / MIB:.0f} MiB in place of {least / MIB:.0f}" in PROSE
    assert (f"with slabs {with_slabs / MIB:.0f} MiB are enough for the training of the picture, and without them it "
            f"needs {least / MIB:.0f}, though it never uses more than {used / MIB:.0f}.") in PROSE
    assert f"a request of {asked:.1f} MiB fits into none" in PROSE
    assert f"recorded and replayed on {capacity:.0f} MiB" in PROSE
    (*first, second), (*others, last) = (RECORDED[name]["lengths"] for name in (program.WITHOUT, program.OTHER))
    assert f"have {', '.join(map(str, first))} and {second} tokens, in the last row" in PROSE
    assert f"in the last row {', '.join(map(str, others))} and {last} (`--seed {program.OTHER_SEED}`)." in PROSE
    assert MEASURED["same losses"] and "bit for bit" in PROSE


def test_what_the_page_says_of_slabs(recordings):
    """The formulas of the table."""
    config, lengths = program.CONFIG, RECORDED[program.WITH]["lengths"]
    factors = config.layers, program.BATCH, max(lengths), config.hidden, 4
    assert MEASURED["slabs"]["checkpoints"] == math.prod(factors)
    assert f"({'·'.join(map(str, factors))} bytes)" in PROSE
    trace = recordings[program.WITH].trace
    parameters = {event.storage for event in trace if event.storage.category == "parameters"}
    assert MEASURED["slabs"]["gradients"] <= sum(one.bytes for one in parameters)
    assert "with more than 30% of it free (section 3.2)" in PROSE
    assert "one of Ψ elements" in PROSE and "one of L·b·s·h, for L blocks whose largest input is [b, s, h]" in PROSE


def test_what_the_page_says_of_allocators_that_lack_something():
    pools = {name: size / MIB for name, size in MEASURED["pools"].items()}
    assert pools["first fit"] == pools["best fit, split, merge"] and "First fit needs the same" in PROSE
    assert f"merging is worth {pools['never merges'] - pools['best fit, split, merge']:.0f} MiB here" in PROSE
    told = (f"best fit, split and merge {pools['best fit, split, merge']:.0f} MiB; first fit {pools['first fit']:.0f}; "
            f"never splits {pools['never splits']:.0f}; never merges {pools['never merges']:.0f}; the first one with "
            f"slabs {ROWS[program.WITH]['least'] / MIB:.0f}.")
    assert told in PROSE
    slabs = {name: size / MIB for name, size in MEASURED["pools with slabs"].items()}
    assert f"With slabs merging is worth {slabs['never merges'] - slabs['best fit, split, merge']:.0f} MiB" in PROSE
    less = slabs["best fit, split, merge"] - slabs["first fit"]
    assert f"with slabs {less:.0f} MiB less, one step of the search" in TOLD


def test_the_lengths_with_which_slabs_save_nothing():
    """Those of the notebook's rank 1, which has the next seed."""
    lengths = varied_lengths(program.ACCUMULATE, program.CONFIG.sequence, program.SEED + 1)
    book = json.loads((HOUSE / "notebooks/08_defragmentation.ipynb").read_text(encoding="utf-8"))
    printed = "".join(line for cell in book["cells"] for made in cell.get("outputs", ())
                      for line in made.get("text", ()))
    (least, with_slabs), = re.findall(rf"{re.escape(str(lengths))}: (\d+) MiB without slabs, (\d+) with them", printed)
    *first, last = lengths
    assert least == with_slabs and (f"With {', '.join(map(str, first))} and {last} (`--seed {program.SEED + 1}`) slabs "
                                    f"save nothing: {least} MiB with and without.") in PROSE


def test_the_gradient_that_lies_alone(recordings):
    """The picture's and the teacher's: a segment of 50 MiB is pinned by one gradient of 8 MiB."""
    allocator, blocks = CachingAllocator(MEASURED["capacity"]), {}
    for event in recordings[program.WITHOUT].trace[: FAILURE["request"]]:
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


# -------------------------------------------------------------------------------------------------------- the pictures


@pytest.mark.thorough
def test_the_pictures_show_what_the_page_says():
    drawn = program.pictures(MEASURED)
    assert set(drawn) == {"map.png", "allocators.png"}
    told, measured = pages.without_folded(PAGE), dict(pages.folded(PAGE))["What was measured"]
    assert "](map.png)" in told and "](allocators.png)" not in told and "](allocators.png)" in measured
    bars = drawn["allocators.png"].axes[0].patches
    assert [round(bar.get_width()) for bar in bars] == [276, 276, 752, 288, 220]


def test_another_pool_can_be_replayed(recordings):
    trace = recordings[program.WITH].trace
    assert fails(trace, MEASURED["capacity"], program.NeverSplits)
    assert smallest_capacity(trace, pool=program.FirstFit) == MEASURED["pools with slabs"]["first fit"]
