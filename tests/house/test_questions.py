"""The manual's page of questions: its program prints what stands below it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MANUAL = Path(__file__).parents[2] / "lessons/manual"
PAGE = (MANUAL / "questions.md").read_text()


@pytest.mark.thorough
def test_the_program_prints_what_the_page_says(tmp_path):
    program = tmp_path / "ask.py"
    program.write_text(re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    printed = re.search(r"of rank 0:\n\n(.*?)\n\n", PAGE, re.DOTALL)[1]
    assert ran.stdout.splitlines() == [line.removeprefix("    ") for line in printed.splitlines()], ran.stderr[-2000:]


def test_memory_is_that_of_the_run_on_a_gpu():
    parts = {part["part"]: part for part in json.loads((MANUAL / "h100.json").read_text())["parts"]}
    run = parts["fragments"]["rows"][0]["allocator"]
    assert f"had {run['allocated'] / 1e6:.0f} MB at the peak" in PAGE
    assert f"the allocator held {run['reserved'] / 1e6:.0f} MB" in PAGE
