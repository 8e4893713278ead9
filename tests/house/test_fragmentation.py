"""The program of lesson 8 answers at any sizes, and its picture shows why an allocation failed."""

from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from zero_minimal.meters.allocator import MIB, fails, find_capacity, unpacked
from zero_minimal.pictures import style
from zero_minimal.pictures.memory_map import ASKED, HOLE, draw_map
from zero_minimal.programs import lesson08_program

pytestmark = pytest.mark.thorough

# ------------------------------------------------------------------------------------------------------ traces by hand


def events(categories, *requests):
    """Of a record as meters/allocator.py has them, in MiB: −k frees the k-th."""
    return unpacked({"requests": [MIB * mib if mib > 0 else mib for mib in requests], "categories": categories})


def scattered():
    """Four tensors of 4 MiB stay, each with a hole of 4 MiB beside it; then 14 MiB are asked for."""
    return events("gagagagaa", *[4] * 8, -2, -4, -6, -8, 14, -9)


def side_by_side():
    """The same, with the four in one slab."""
    return events("gaaaaa", 16, 4, -2, 4, -3, 4, -4, 4, -5, 14, -6)


def test_the_clearest_capacity_is_taken():
    finding = find_capacity(scattered(), side_by_side())
    failure = finding.failure
    assert finding.smallest_with <= finding.capacity < finding.smallest_without
    assert failure.largest_free < failure.requested == 14 * MIB <= failure.free
    assert failure.is_for_want_of_a_block and "cannot use" not in str(failure)


def test_without_such_a_capacity_there_is_an_answer_too():
    for one, other in ((side_by_side(), side_by_side()), (side_by_side(), scattered())):
        finding = find_capacity(one, other)
        assert finding.capacity is None and finding.failure is None
        assert finding.smallest_without <= finding.smallest_with


def test_a_block_that_requests_of_this_size_cannot_use():
    """What is free is in a segment for large requests: the words must not say that it is too small."""
    failure = fails(events("aaaa", 8, 1, 1, 1), 22 * MIB)
    assert failure.largest_free == 12 * MIB > failure.requested == MIB and not failure.is_for_want_of_a_block
    assert "which a request of this size cannot use" in str(failure)


# --------------------------------------------------------------------------------------------------------- the picture


def drawn(without, with_slabs, tmp_path):
    recordings = {name: SimpleNamespace(trace=trace, begins=[0, 1], losses=[])
                  for name, trace in (("without slabs", without), ("with slabs", with_slabs))}
    finding = find_capacity(without, with_slabs)
    picture = draw_map(recordings, finding)
    style.save(picture, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    return picture, finding


def bars_of(axis, look):
    """(start, MiB) of the bars of this look."""
    return [(bar.get_x(), bar.get_width()) for bar in axis.patches
            if to_hex(bar.get_facecolor()) == look["facecolor"].lower() and bar.get_hatch() == look.get("hatch")]


def test_the_bars_show_that_no_hole_is_large_enough(tmp_path):
    picture, finding = drawn(scattered(), side_by_side(), tmp_path)
    failing, serving = picture.axes[2:]
    ((_, asked),) = bars_of(failing, ASKED)
    holes = bars_of(failing, HOLE)
    segments = [(bar.get_x(), bar.get_width()) for bar in failing.patches if bar.get_facecolor()[3] == 0]
    driver = segments[-1][1]
    assert asked == 14 and len(holes) >= 4 and max([driver, *(width for _, width in holes)]) < asked
    assert sum(width for _, width in holes) + driver == pytest.approx(finding.failure.free / MIB), "all that is free"
    assert sum(width for _, width in segments) == pytest.approx(finding.capacity / MIB), "and all of the memory"
    ((place, width),) = bars_of(serving, ASKED)
    assert width == 14 and not any(place < start + size and start < place + width
                                   for start, size in bars_of(serving, HOLE))
    words = [text.get_text() for text in failing.texts]
    assert any("14.0 MiB are asked for, and no free block has so much" in text for text in words)
    assert "4.0" in words, "holes have their size written into them"


def test_what_is_hatched_and_bordered_is_in_the_legend(tmp_path):
    picture, _ = drawn(scattered(), side_by_side(), tmp_path)
    names = [text.get_text() for text in picture.legends[0].get_texts()]
    assert {"gradients", "activations", "free, in a segment", "asked for"} < set(names)
    hatched = [shapes for shapes in picture.axes[0].collections if shapes.get_hatch() == HOLE["hatch"]]
    outlines = [shapes for shapes in picture.axes[0].collections if not len(shapes.get_facecolor())]
    assert len(hatched) == len(outlines) == 1
    assert len(hatched[0].get_paths()) == len(outlines[0].get_paths()), "each segment is hatched and has a border"


def test_a_request_that_only_one_of_them_makes(tmp_path):
    picture, _ = drawn(scattered(), side_by_side()[:-2], tmp_path)
    assert picture.axes[2].get_visible() and not picture.axes[3].get_visible()


def test_there_is_a_picture_where_both_go_through(tmp_path):
    picture, finding = drawn(side_by_side(), scattered(), tmp_path)
    assert finding.failure is None and len(picture.axes) == 2


# --------------------------------------------------------------------------------------------------------- the program

SMALL = "--batch 2 --steps 1"
GRID = {
    "one of everything": "--layers 1 --hidden 8 --heads 1 --vocabulary 256 --longest 1 --batch 1 --steps 1 "
                         "--accumulate 1",
    "small": f"{SMALL} --layers 2 --hidden 32 --heads 4 --vocabulary 256 --longest 16 --accumulate 2",
    "wide": f"{SMALL} --layers 1 --hidden 256 --heads 8 --vocabulary 300 --longest 8 --accumulate 2",
    "deep": f"{SMALL} --layers 9 --hidden 16 --heads 2 --vocabulary 256 --longest 8 --accumulate 2",
    "long": f"{SMALL} --layers 1 --hidden 32 --heads 2 --vocabulary 256 --longest 300 --accumulate 2",
    "once they ended in an error": "--vocabulary 1024 --hidden 512 --heads 8 --layers 6 --longest 64 --steps 1",
    "a large vocabulary": f"{SMALL} --layers 1 --hidden 64 --heads 2 --vocabulary 16384 --longest 32 --accumulate 2",
}


@pytest.mark.parametrize("name", GRID)
def test_any_sizes_have_an_answer(name, tmp_path, capsys):
    lesson08_program.main([*GRID[name].split(), f"--picture={tmp_path / 'map.png'}"])
    said = capsys.readouterr().out
    assert "least capacity that is enough" in said and "the same to the bit" in said
    assert ("M_D saves nothing" in said) != ("do not fit" in said)
    assert (tmp_path / "map.png").exists()


def test_sizes_that_cannot_be(capsys):
    for flags, words in (("--heads 3", "heads"), ("--vocabulary 100", "256 or more"),
                         ("--longest 100000000", "must be less"), ("--layers 0", "from 1 up")):
        with pytest.raises(SystemExit):
            lesson08_program.main(flags.split())
        assert words in capsys.readouterr().err
