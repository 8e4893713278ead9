"""The pages of lessons whose figures are their notebook's: what a page says was measured is in measured.json, which one
run of the notebook wrote, and nothing else was measured. `python -m zero_minimal.programs.figures` repeats the run.

SAYS has what a page says, a template a sentence or a line of a table: {name} is the value of that name, {name:.1f MB}
the value in that unit, and {name:.1f in MB} the same without the unit's name. KNOWN has the figures in bytes that are
of formulas, of exams, or of settings.
"""

import json
import re

import nbformat
import pages
import pytest

from zero_minimal.classroom.lessons import found
from zero_minimal.programs import figures
from zero_minimal.programs.lesson06_program import MODES
from zero_minimal.programs.ways import CATEGORIES, LADDER

UNITS = {"kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "µs": 1e-6, "ms": 1e-3, "ns": 1e-9, "million": 1e6}
SAYS = {
    "01_data_parallel": (
        "| naive | {ways[naive][0]} | {ways[naive][1]} | {ways[naive][2]} of {ways[naive][3]} |",
        "| buckets of 4 MiB, waited for at once | {ways[buckets, waited for at once][0]} | "
        "{ways[buckets, waited for at once][1]} | {ways[buckets, waited for at once][2]} of "
        "{ways[buckets, waited for at once][3]} |",
        "| stage 0 | {ways[stage 0][0]} | {ways[stage 0][1]} | {ways[stage 0][2]} of {ways[stage 0][3]} |",
        "so {whole:.2f MB} of gradients", "with α = {alpha:.0f µs} and β = {beta:.4f ns} a byte",
        "n½ = α/β, about {half:.0f KB}",
        "The α of 76 all-reduces makes {alphas[0]:.1f ms}, that of 5 makes {alphas[1]:.1f ms}",
        "The bytes take {bytes:.1f ms} in both cases: {together[0]:.1f in ms} and {together[1]:.1f ms} together",
        "took up to {factor:.1f} times as long as it says", "Time to all-reduce {whole:.1f MB}",
        "{sent[without no_sync]:.2f MB} if each backward sends, {sent[no_sync]:.2f MB} with `no_sync()`. One batch "
        "sends {sent[one batch]:.2f MB}, too"),
    "02_optimizer_state": (
        "Ψ = {psi:,.0f} parameters", "a rank has {rows[3][optimizer]:,.0f} bytes",
        *("| {rows[#][ranks]} | {rows[#][stage]} | {rows[#][optimizer]:.2f MB} | {rows[#][peak]:.1f MB} | "
          "{rows[#][sent]:.2f MB} |".replace("#", str(number)) for number in range(6)),
        "nearest number of bf16 is {small_steps[an fp32 master, rounded to bf16][20]:.4f}"),
    "03_gradients": (
        *("| {rows[#][ranks]} | {rows[#][stage]} | {rows[#][gradients]:.2f MB} | {rows[#][peak]:.1f MB} | "
          "{rows[#][sent]:.2f MB} |".replace("#", str(number)) for number in range(4)),
        "peak of the whole step is {rows[0][peak]:.1f MB}",
        "the peak falls by {falls[0]:.1f MB}, and {saved[0]:.1f MB} are saved. On 4 ranks it falls by "
        "{falls[1]:.1f MB}, and {saved[1]:.1f MB} are saved",
        "{rows[0][at peak]:.1f MB} of gradients at stage 1, and {rows[1][at peak]:.1f MB} at stage 2",
        "with buckets of 1 MiB the peak is {by_bucket[1024 KiB]:.1f MB}, with one bucket for all gradients "
        "{by_bucket[32768 KiB]:.1f MB}",
        "With 4 micro-batches stage 1 sends {micro[0][sent]:.1f MB}, and stage 2 sends {micro[1][sent]:.1f MB}. Its "
        "peak is {micro[1][peak]:.1f MB} then"),
    "04_parameters": (
        *("| {rows[#][ranks]} | 3 | {rows[#][parameters]:.2f MB} | {rows[#][peak]:.1f MB} | {rows[#][sent]:.2f MB} |"
          .replace("#", str(number)) for number in range(4)),
        "6 blocks of {block:.2f MB} each, and a root of {root:.2f MB}. At stage 2 on 2 ranks its peak is "
        "{stage_2[peak]:.1f MB}",
        "{rows[1][at peak]:.2f MB}: the shards, {rows[1][parameters]:.2f MB}, and the root, the unit at work and the "
        "next one: {whole:.2f MB}. In the first step it is less",
        "It sends {rows[1][sent]:.2f MB}. When backward begins",
        "There are {rows[1][gathers]}: two for each unit, but",
        "By {falls:.1f MB}. At the peak there are {rows[1][at peak]:.2f MB} of parameters, only "
        "{less:.2f MB} less than at stage 2", "memory rises from {kept[as one unit, by units=][0][peak]:.0f in MB} to "
        "{kept[as one unit, by units=][6][peak]:.0f MB} while what is sent falls from "
        "{kept[as one unit, by units=][0][sent]:.1f in MB} to {kept[as one unit, by units=][6][sent]:.1f MB}",
        "Stage 2 is a point at {stage_2[sent]:.1f in MB} and {stage_2[peak]:.1f MB}",
        "two blocks cost nothing: {kept[each a unit of its own][2][sent]:.2f MB} are sent, and the peak is "
        "{kept[each a unit of its own][2][peak]:.1f MB} as before. With all six it is "
        "{kept[each a unit of its own][6][peak]:.1f MB}",
        "All six as one unit need {kept[as one unit, by units=][6][peak]:.1f MB}",
        "a rank of 4 keeps {rows[3][parameters]:.2f MB} of {rows[0][parameters]:.2f MB}, has "
        "{whole:.2f MB} whole at most, and sends {rows[3][sent]:.2f MB}"),
    "05_tensor_parallel": (
        *("| {rows[#][ranks]} | {rows[#][batch]} | {rows[#][parameters]:,.0f} | {rows[#][forward]} "
          "| {rows[#][backward]} | {rows[#][sent]:.2f MB} |".replace("#", str(number)) for number in range(4)),
        "How many of the {rows[0][parameters]:,.0f} parameters",
        "It has {rows[1][parameters]:,.0f}. The {rows[1][replicated]:,.0f} replicated ones are on both ranks",
        "It sends {rows[1][sent]:.2f MB}", "twice as much: {rows[3][sent]:.2f MB}",
        "the outputs are off by {mixed:.0f}% of their size. With positive numbers alone the error is {positive:.0f}%",
        *(f"| {letter} | {{patients[{mistake}][losses][0]:.4f}} | {mistake} |" for letter, mistake in (
            ("A", "split before GELU"), ("B", "f forgotten"), ("C", "g forgotten"))),
        "In one process the loss is {loss:.4f}"),
    "06_activation_partitioning": (
        *(f"| {count} | {mode} | " + " | ".join(f"{{{name}[{mode}][{size}]:.1f MB}}" for size in (
            "kept", "on_host", "highest", "sent")) + " |"
          for count, name in ((2, "two"), (4, "four")) for mode in MODES),
        "On each rank {two[no checkpoints][kept]:.1f MB} are kept for backward",
        "numbers, {input:.2f MB}. Two ranks share it",
        "| together | {units[1 ranks]:.2f} | {units[2 ranks]:.2f} |",
        "Six times {units[2 ranks]:.2f} · {input:.2f MB} are",
        "Without checkpoints they rise to {two[no checkpoints][kept]:.1f MB} in forward", "six small steps to "
        "{two[checkpoints][kept]:.1f MB}", "steps half as high: {two[P_a][kept]:.1f MB}",
        "Without checkpoints 4 of forward and 4 of backward, {counts[no checkpoints]}",
        "4 of backward, {counts[checkpoints]}. With P_a", "the input is gathered, {counts[P_a]}."),
    "07_constant_buffers": (
        "constant buffers of 4 MiB ({size:.1f MB}) each", "Two constant ones: {constant:.1f MB}, always",
        "every model of less than {least:.1f million} parameters",
        "With {size:.1f MB} it is {prices[4096 KiB][collectives]} collectives, with 16 KiB "
        "{prices[16 KiB][collectives]}. That makes",
        "The {prices[16 KiB][collectives]} took {prices[16 KiB][seconds]:.0f ms}, the "
        "{prices[4096 KiB][collectives]} took {prices[4096 KiB][seconds]:.0f ms}: {times:.0f} times as long",
        "{prices[16 KiB][collectives]:,.0f} collectives of 16 KiB take {prices[16 KiB][seconds]:.0f ms}, "
        "{prices[1024 KiB][collectives]} of 1 MB take {prices[1024 KiB][seconds]:.1f ms}",
        "Its peak is {peaks[4 MiB][0]:.1f MB} on 2 ranks, with buckets of {size:.1f MB}",
        *(f"| {size} MB | {{buckets[#]}} | {{peaks[#][0]:.2f MB}} | {{peaks[#][1]:.2f MB}} |".replace("#", f"{mib} MiB")
          for mib, size in ((1, 1.05), (4, 4.19), (32, 33.55))),
        "all activations are there, {held[activations]:.2f MB}, and both buffers, {held[buffers]:.2f MB}",
        *(f"| {words} | {{#[0]}}, {{#[4]}}, {{#[8]}}, {{#[12]}} |".replace("#", f"sums[torch.{name}]")
          for words, name in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")))),
    "08_defragmentation": (
        *(f"| {name} | {{rows[{name}][allocated]:.1f in MiB}} | {{rows[{name}][least]:.0f in MiB}} |"
          for name in ("without slabs", "with slabs", "other lengths, without slabs")),
        "The device has {capacity:.0f MiB}, {failure[free]:.0f in MiB} of them are free, and "
        "{failure[requested]:.1f in MiB} are asked for",
        "The device has {capacity:.0f MiB}. {failure[allocated]:.1f in MiB} of them are in use when "
        "{failure[requested]:.1f in MiB}", "1. {failure[largest_free]:.0f MiB}. There are two pieces of that size",
        "2. {rows[without slabs][least]:.0f MiB}, a third more than it ever uses",
        "At no moment has this training more than {rows[without slabs][allocated]:.0f MiB} in use",
        "3. {rows[with slabs][least]:.0f MiB}. The slab of checkpoints has {slabs[checkpoints]:.1f MiB} here",
        "that of gradients {slabs[gradients]:.1f in MiB}.", "a request of {failure[requested]:.1f MiB} fits into none",
        "with slabs {rows[with slabs][least]:.0f MiB} are enough for the training of the picture, and without them it "
        "needs {rows[without slabs][least]:.0f in MiB}, though it never uses more than "
        "{rows[without slabs][allocated]:.0f in MiB}.", "recorded and replayed on {capacity:.0f MiB}",
        "with {rows[with slabs][least]:.0f MiB} in place of {rows[without slabs][least]:.0f in MiB}.",
        "best fit, split and merge {pools[best fit, split, merge]:.0f MiB}; first fit {pools[first fit]:.0f in MiB}; "
        "never splits {pools[never splits]:.0f in MiB}; never merges {pools[never merges]:.0f in MiB}; the first one "
        "with slabs {rows[with slabs][least]:.0f in MiB}."),
    "09_offload": (
        *("| {ladder[#][name]} | {ladder[#][each][0]:.2f} | {ladder[#][each][1]:.2f} | {ladder[#][each][2]:.2f} and "
          "{ladder[#][each][3]:.2f} |".replace("#", str(rung)) for rung in range(4)),
        "has {psi:,.0f} parameters", "with {ladder[0][parameters]:.1f million} parameters in bf16",
        "The device holds {ladder[3][ledger][parameters]:.1f MB}, the parameters. The host holds "
        "{ladder[3][host]:.0f MB}", "in a step {ladder[3][bus][to_host]:.1f MB} of gradients go to the host, and "
        "{ladder[3][bus][to_device]:.1f MB} of parameters come back",
        "on one rank the device keeps {ladder[3][each][0]:.2f} of {ladder[0][each][0]:.2f} bytes a parameter, and "
        "{ladder[3][each][2]:.2f} cross the bus each way"),
    "10_whole_system": (
        *(f"| {way} | " + " | ".join(f"{{ladder[{way}][{name}]:.1f in MB}}" for name in (
            *(f"peak_by_category][{category}" for category in CATEGORIES), "peak", "sent")) + " |" for way in LADDER),),
}
KNOWN = {
    "01_data_parallel": ("1 MB", "25 MB", "4 GB", "7 GB", "28 GB"),
    "02_optimizer_state": ("28.93 MB", "120 GB", "31.4 GB", "29.5 GB"),
    "04_parameters": ("9.64 MB", "66 MB", "3.5 GB", "17.5 GB", "413.4 GB", "1.7 GB", "411.7 GB", "275.6 GB"),
    "05_tensor_parallel": ("0.262 MB", "19.28 MB", "16.8 MB", "117.4 MB", "176.2 MB", "3.8 GB", "5.6 GB"),
    "06_activation_partitioning": (
        "1.97 MB", "118.5 MB", "11.8 MB", "6 MB", "5.9 MB", "3.9 MB", "70.8 MB", "134.2 MB", "100.7 MB", "2.568 GB",
        "1.193 GB", "1.092 GB", "20.54 GB", "22.05 GB", "537 MB", "67.1 GB", "4.2 GB", "62.9 GB", "33 GB", "2 GB"),
    "07_constant_buffers": ("4 MB", "4.2 MB", "8.4 MB", "1.05 MB", "4.19 MB", "33.55 MB", "19.28 MB", "12000 MB",
                            "12,000 MB", "1 MB", "20 MB", "200 MB", "100 MB", "120.0 MB", "2.1 MB", "12 GB", "6 GB",
                            "2 GB", "11.8 GB", "5.9 GB", "27.34 MB"),
    "03_gradients": ("19.3 MB", "31.4 GB", "16.6 GB", "14.8 GB", "29.5 GB", "132.9 GB", "0.23 GB", "1 GB", "2.2 GB"),
}
ANSWERS = {  # the pictures that answer what the page asks for, so that they are folded
    "01_data_parallel": {"buckets.png"},
    "02_optimizer_state": {"small_steps.png"},
    "03_gradients": {"gradients.png"},
    "04_parameters": {"kept.png"},
    "08_defragmentation": {"allocators.png"},
    "09_offload": set(),
    "10_whole_system": {"ladder.png", "worth.png"},
    "05_tensor_parallel": set(),
    "06_activation_partitioning": {"staircase.png", "messages.png"},
    "07_constant_buffers": {"sizes.png"},
}
LESSONS = {name: lesson for name, lesson in found().items() if name in SAYS}
each_lesson = pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)


class Number(float):
    """A number that can be written in a unit."""

    def __format__(self, how):
        digits, _, told = how.partition(" ")
        unit = told.removeprefix("in ")
        number = format(float(self) / UNITS.get(unit, 1), digits or "g")
        return f"{number} {unit}" if unit and unit == told else number


def measured(lesson):
    return json.loads((lesson.folder / "measured.json").read_text(), parse_float=Number, parse_int=Number)


def said(lesson):
    """What the page must say, with the figures of the notebook's run."""
    return [template.format(**measured(lesson)) for template in SAYS[lesson.name]]


@each_lesson
def test_the_page_says_what_its_notebook_measured(lesson):
    prose = " ".join((lesson.folder / "README.md").read_text().split())  # wherever lines are broken
    missing = [words for words in said(lesson) if words not in prose]
    assert not missing, f"measured.json says, and {lesson.folder / 'README.md'} does not:\n" + "\n".join(missing)


@pytest.mark.parametrize("name", KNOWN)
def test_no_other_figure_in_bytes_has_crept_in(name):
    figure, lesson = re.compile(r"\d[\d.,]* [MG]B\b"), LESSONS[name]
    known = {*KNOWN[name], *figure.findall(" ".join(said(lesson)))}
    both = [" ".join((lesson.folder / file).read_text().split()) for file in ("README.md", "teacher.md")]
    assert set(figure.findall(" ".join(both))) <= known and len(known) > 3


@each_lesson
def test_the_page_takes_what_its_notebook_gives(lesson):
    """Pictures and values: those of the cells' metadata, no older ones."""
    cells = nbformat.read(figures.NOTEBOOKS / f"{lesson.name}.ipynb", as_version=4).cells
    taken = [cell.metadata.page for cell in cells if "page" in cell.metadata]
    assert {name for page in taken for name in page.get("measured", ())} == set(measured(lesson))
    pictures = [page.picture for page in taken if "picture" in page]
    page = (lesson.folder / "README.md").read_text()
    shown = [file for _, file in pages.IMAGE.findall(page) if "/" not in file]
    assert sorted(pictures) == sorted(shown)
    folded = dict(pages.folded(page))["What was measured"]
    assert {file for _, file in pages.IMAGE.findall(folded)} == ANSWERS[lesson.name]


BOOK = nbformat.v4.new_notebook(cells=[
    nbformat.v4.new_code_cell("x = 21"),
    nbformat.v4.new_code_cell("from zero_minimal.pictures.style import figure\nfigure(1, 1, 10, 2)[0]",
                              metadata={"page": {"picture": "x.png", "measured": {"twice": "2 * x", "b": "'a b'"}}}),
    nbformat.v4.new_markdown_cell("The end"),
    nbformat.v4.new_code_cell("x = 3", metadata={"page": {"measured": {"later": "[x, 1.5]"}}}),
], metadata={"own": True})


@pytest.mark.thorough
def test_a_notebook_gives_pictures_and_values_as_they_are_when_a_cell_has_run(tmp_path):
    book = nbformat.from_dict(BOOK)
    assert figures.run(book, tmp_path) == {"twice": 42, "b": "a b", "later": [3, 1.5]}
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]
    assert [cell.get("execution_count") for cell in book.cells] == [1, 2, None, 3] and book.metadata == {"own": True}
    assert [len(cell.outputs) for cell in book.cells if cell.cell_type == "code"] == [0, 1, 0]


@pytest.mark.thorough
def test_a_picture_that_nobody_can_read_is_not_taken(tmp_path):
    book = nbformat.from_dict(BOOK)
    book.cells[1].source += "\n_fig = figure(1, 1, 10, 2)[0]\n_fig.axes[0].set_title('small', fontsize=5)\n_fig"
    with pytest.raises(Exception, match="too small: small"):
        figures.run(book, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_notebook_is_answered_with_what_to_do(tmp_path, capsys):
    with pytest.raises(SystemExit):
        figures.main([str(tmp_path)])
    assert "of a lesson with a notebook" in capsys.readouterr().err
