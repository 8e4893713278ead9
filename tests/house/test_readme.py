"""The README says what is there, and its figures are those of the run whose JSON lies beside the picture."""

import json
import re
from pathlib import Path

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


def test_every_file_that_the_readme_links_to_is_there():
    links = re.findall(r"\]\(((?!http)[^)]+)\)", README)
    assert links
    for link in links:
        assert (HOUSE / link).exists(), link
