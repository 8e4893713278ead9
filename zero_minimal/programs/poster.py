"""Poster: the course on one page, from its lessons' measurements: poster.png and poster.pdf.

    python -m zero_minimal poster lessons/10_whole_system

Nothing runs again: it reads the lessons' measured.json and compare.json, and takes every number in its text from them.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.image import imread

from zero_minimal.meters.allocator import find_capacity, unpacked
from zero_minimal.paper.formulas import STATES, formula, volume
from zero_minimal.pictures.activation_chart import draw_staircase
from zero_minimal.pictures.memory_map import draw_map
from zero_minimal.pictures.poster_page import Panel, draw_ladder, draw_poster, image_of
from zero_minimal.programs.lesson08_program import Recording
from zero_minimal.programs.planning import NAMES
from zero_minimal.workload.settings import Parser

LESSONS = Path(__file__).parents[2] / "lessons"
DOTS = {"png": 150, "pdf": 250}
STEPS = ("no checkpoints", "checkpoints", "P_a")  # of lesson 06, as its page draws them


def measured(lesson: str) -> dict:
    """A lesson's measurements. Raises: FileNotFoundError if the lessons are missing."""
    return json.loads((LESSONS / lesson).read_text(encoding="utf-8"))


def ladder() -> Panel:
    """Memory and traffic of stages 0 to 3."""
    rows = [row for row in measured("pictures/compare.json")["rows"] if row["name"].startswith("stage")]
    peaks = [row["memory"]["peak"] / 1e6 for row in rows]
    sent = [row["traffic"]["sent_bytes"] / 1e6 for row in rows]
    first = rows[0]
    return Panel("lessons 01 to 04", "Each stage holds less, and only stage 3 sends more", (
        f"{first['parameters']:,} parameters in {first['dtype']} on {first['ranks']} ranks. At its peak a rank holds "
        f"{', '.join(f'{peak:.0f}' for peak in peaks[:-1])} and {peaks[-1]:.0f} MB. It sends {sent[0]:.1f} MB a step "
        f"at stages 0 to 2, and {sent[3]:.1f} MB at stage 3."), image_of(draw_ladder(rows)))


def conveyor() -> Panel:
    """Units of stage 3, turn by turn."""
    belt = measured("04_parameters/measured.json")["belt"]
    whole = sum(belt["whole"]) / 1e6
    return Panel("lesson 04", "Stage 3 is a conveyor", (
        f"A block is whole when its turn comes, and gone after it. Of {whole:.1f} MB of parameters a rank of "
        f"{belt['ranks']} has {max(belt['bytes']) / 1e6:.2f} MB whole at a time, at most. Its shards stay."),
        imread(LESSONS / "04_parameters/conveyor.png"))


def staircase() -> Panel:
    """Activations, with checkpoints and with P_a."""
    stairs = measured("06_activation_partitioning/measured.json")["stairs"]
    kept = [stairs[mode]["activations"][stairs[mode]["backward"] - 1] / 1e6 for mode in STEPS]
    return Panel("lesson 06", "P_a: nobody keeps what another rank has", (
        f"When backward begins, a rank of two that share a model keeps {kept[0]:.1f} MB of activations; "
        f"{kept[1]:.1f} MB with checkpoints, and {kept[2]:.1f} MB when each rank keeps its part of them."),
        image_of(draw_staircase(stairs), height=2.8))


def trays() -> Panel:
    """Two buffers of one size."""
    found = measured("07_constant_buffers/measured.json")
    most = max(found["rows"], key=lambda row: row["parameters"])
    return Panel("lesson 07", "C_B: two buffers serve a model of any size", (
        f"They take turns. With {most['parameters'] / 1e6:,.0f} million parameters the two take "
        f"{most['constant'] / 1e6:.1f} MB, where one buffer for all gradients takes {most['fused'] / 1e6:,.0f} MB."),
        imread(LESSONS / "07_constant_buffers/trays.png"))


def holes() -> Panel:
    """Free memory that cannot be used."""
    found = measured("08_defragmentation/measured.json")
    failure = found["failure"]
    pair = {name: Recording(unpacked(found["traces"][name]), found["traces"][name]["begins"], [])
            for name in ("without slabs", "with slabs")}
    picture = draw_map(pair, find_capacity(*(one.trace for one in pair.values())))
    bars = [axis for axis in picture.axes if axis.get_label().startswith("bar")]
    return Panel("lesson 08", "M_D: free memory that is of use", (
        f"A training is out of memory in {found['capacity'] / 2**20:.0f} MiB: {failure['requested'] / 2**20:.1f} MiB "
        f"are asked for, {failure['free'] / 2**20:.1f} MiB are free, in pieces of at most "
        f"{failure['largest_free'] / 2**20:.1f} MiB. What lives long is laid side by side, and it goes on."),
        image_of(picture, bars))


def formulas() -> list[list[str]]:
    """Bytes and elements of each stage, with Ψ parameters on N ranks."""
    rows = [["stage", *(f"{state}, bytes" for state in STATES), "sent, elements"]]
    for stage, name in enumerate(NAMES):
        rows.append([f"{stage}  {name}", *(formula(stage, state, "fp16") for state in STATES),
                     f"{volume(stage)}Ψ(N−1)/N"])
    return rows


def poster() -> Figure:
    """The whole page."""
    return draw_poster(
        "ZeRO: who holds what, and when", "Ranks that train together need not all hold the same. Each picture is drawn "
        "from a run of this course, on a CPU.",
        ((ladder(), conveyor()), (staircase(), trays(), holes())), formulas(),
        "zero-minimal, a course in PyTorch, after ZeRO (arXiv:1910.02054) · formulas: Ψ parameters on N ranks, 16 bit, "
        "Adam",
    )


def main(arguments: list[str]) -> None:
    """The command: draw, and write both files."""
    parser = Parser(prog="python -m zero_minimal poster",
                    description="The course on one A3 page, from its lessons' measurements.")
    parser.add_argument("folder", type=Path, help="where poster.png and poster.pdf are written")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        parser.error(f"there is no folder {folder}: name one that exists")
    picture = poster()
    picture.savefig(folder / "poster.png", dpi=DOTS["png"])
    picture.savefig(folder / "poster.pdf", dpi=DOTS["pdf"], metadata={"CreationDate": None})  # the same file each time
    print(f"poster: {folder / 'poster.png'}, {folder / 'poster.pdf'}", file=sys.stderr)
