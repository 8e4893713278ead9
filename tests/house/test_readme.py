"""The README says what is there, and its figures are those of the run whose JSON lies beside the picture."""

import json
import re
from pathlib import Path

import pytest

from zero_minimal.classroom.lessons import found

HOUSE = Path(__file__).parents[2]
README = (HOUSE / "README.md").read_text()
RUN = json.loads((HOUSE / "lessons/pictures/compare.json").read_text())


def line(row: dict) -> str:
    """A row of the README's table, from a report: MB are a million bytes."""
    memory, traffic = row["memory"], row["traffic"]
    cells = [row["name"]]
    cells += [f"{memory[state] / 1e6:.1f} ({row['theory'][state] / 1e6:.1f})" for state in row["theory"]]
    cells += [f"{memory['peak'] / 1e6:.0f}"]
    cells += [f"{traffic['sent_bytes'] / 1e6:.1f} ({traffic['theory_bytes'] / 1e6:.1f})"]
    cells += [f"{traffic['wire_bytes'] / 1e6:.1f}"]
    return "| " + " | ".join([*cells, f"{row['losses'][-1]:.5f}"]) + " |"


def test_the_table_holds_the_figures_of_the_run():
    for row in RUN["rows"]:
        assert line(row) in README


def test_there_are_two_commands_and_ci_finds_them():
    commands = re.findall(r"^    (pip install -r requirements.txt && .*)$", README, re.MULTILINE)
    assert [command.split(" && ")[1] for command in commands] == [
        "torchrun --nproc-per-node 2 zero_minimal/stage2.py", "pytest",
    ]


PAGES = [HOUSE / "README.md", *sorted((HOUSE / "lessons").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOUSE)))
def test_every_file_that_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(((?!http)[^)]+)\)", page.read_text())
    assert links
    for link in links:
        assert (page.parent / link).exists(), link


def test_the_points_on_the_course_page_are_those_of_the_graders():
    page = (HOUSE / "lessons/README.md").read_text().split("## For teachers")[1]
    said = [int(points) for points in re.findall(r"^\|.*\| (\d+) \|$", page, re.MULTILINE)]
    assert said == [step.points for lesson in found().values() for step in lesson.steps]
    for lesson in found().values():
        own = (HOUSE / "lessons" / lesson.name / "README.md").read_text().split("## The assignment")[1]
        rows = re.findall(r"^\| \d \|(.*)\|$", own, re.MULTILINE)
        for row, step in zip(rows, lesson.steps, strict=True):
            assert str(step.points) in [cell.strip() for cell in row.split("|")], row
