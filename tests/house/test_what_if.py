"""What if: the formulas that write themselves down are those of `plan`, and the page calculates with nothing else."""

import html
import json
import math
import operator
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import nbclient
import nbformat
import pytest

from zero_minimal import __main__ as program
from zero_minimal.notebook import slider_cell
from zero_minimal.paper.formulas import STATES
from zero_minimal.paper.hardware import GPUS
from zero_minimal.paper.quantities import seconds_text, size_text
from zero_minimal.paper.shapes import usual_shape
from zero_minimal.processes import ranks
from zero_minimal.programs import what_if
from zero_minimal.programs.offload_flags import Offload
from zero_minimal.programs.planning import Speeds
from zero_minimal.programs.registry import STAGES
from zero_minimal.programs.train import train
from zero_minimal.workload.settings import Settings

HOUSE = Path(__file__).parents[2]
PAGE = HOUSE / "lessons/10_whole_system/what-if.html"


def settings(count=200, seed=7):
    """Random settings, each of them one that `plan` accepts."""
    draw = random.Random(seed)
    found = []
    while len(found) < count:
        shared, dtype = draw.choice(what_if.SHARES), draw.choice(("fp32", "bf16", "fp16"))
        if draw.random() < 0.5:
            try:
                shape = usual_shape(int(draw.choice(what_if.SIZES)), 1024, shared, True)
            except ValueError:
                continue
            sizes = {name: getattr(shape, name) for name in what_if.SHAPE}
        else:
            heads = shared * draw.randint(1, 6)
            sizes = {"layers": draw.randint(1, 150), "heads": heads, "hidden": heads * draw.choice((16, 24, 64, 128)),
                     "vocabulary": draw.randint(2, 60000)}
        gpu = GPUS[draw.choice(list(GPUS))]
        found.append({
            **sizes, "sequence": draw.choice((1, 64, 1024, 2048, 32768)), "batch": draw.randint(1, 40),
            "data_parallel": draw.choice((1, 2, 3, 7, 8, 64, 100, 1024)), "model_parallel": shared, "dtype": dtype,
            "kept": draw.choice(what_if.KEPT if shared > 1 else what_if.KEPT[:2]),
            "offload": draw.choice(what_if.OFFLOADS), "optimizer_bytes": draw.choice((4, 8, 12, 6.5)),
            "device_bytes": gpu.memory * draw.choice((1, 0.1, 3)),
            **vars(Speeds(gpu.rate(dtype), gpu.link, draw.choice((1, 4, gpu.node)), draw.choice((1.25e9, 12.5e9)),
                          gpu.bus)),
        })
    return found


def differences(told, shown):
    """Figures that are not alike: the page has doubles, and Python whole numbers of any size."""
    def alike(one, other):
        if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
            return one is other or one == other and type(one) is type(other)
        return math.isclose(one, other, rel_tol=1e-12)

    return {name: (told[name], shown[name]) for name in shown if not alike(told[name], shown[name])}


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "floor": math.floor,
              "<": operator.lt, "<=": operator.le, "=": operator.eq}


def on_a_page(formulas, setting):
    """What a page says of a setting, calculated in Python as the page does it: {name: value}."""
    known = {}

    def value_of(number):
        if number not in known:
            operation, *arguments = formulas["nodes"][number]
            if operation == "input":
                known[number] = setting[arguments[0]]
            elif operation == "number":
                known[number] = arguments[0]
            elif operation == "if":  # only the way that is taken: the other may divide by 0
                condition, yes, no = arguments
                known[number] = value_of(yes if value_of(condition) else no)
            else:
                known[number] = OPERATIONS[operation](*map(value_of, arguments))
        return known[number]

    numbers = formulas["results"][what_if.case(setting["dtype"], setting["kept"], setting["offload"])]
    return {name: value_of(number) for name, number in zip(formulas["figures"], numbers, strict=True)}


@pytest.fixture(scope="module")
def formulas():
    return what_if.expressions()


@pytest.mark.thorough
def test_what_is_written_down_says_what_plan_says_in_200_settings(formulas):
    """And every figure of the page is one of plan's."""
    moments, fit = set(), set()
    for setting in settings():
        told, shown = what_if.flat(what_if.asked(setting)), on_a_page(formulas, setting)
        assert not differences(told, shown), setting
        moments |= {shown[f"{stage} moment"] for stage in range(4)}
        fit |= {shown[f"{stage} fits"] for stage in range(4)}
    assert moments == {"logits", "top block", "bottom block", "embedding", "update"} and fit == {True, False}


def reports(stage):
    """Of real ranks: a report without offload, and one with it."""
    settings = Settings(layers=4, hidden=256, heads=8, sequence=64, batch=2, steps=2, dtype="bf16", dropout=0.0)
    with ranks.start() as rank:
        return [train(STAGES[stage], settings, rank, away=Offload(cpu)) for cpu in (False, True)]


@pytest.mark.thorough
def test_offload_spares_what_the_ledger_counts_on_real_ranks(formulas, stage=2):
    """Exact are the states, what the host keeps, and what crosses. On a CPU the buffers of the bus lie on the rank."""
    plain, away = ranks.run(reports, 2, stage, device="cpu", timeout=100)[0]
    shape = {"layers": 4, "hidden": 256, "heads": 8, "sequence": 64, "vocabulary": 256}
    told = [on_a_page(formulas, what_if.setting() | shape | {
        "batch": 2, "dtype": "bf16", "kept": "all", "data_parallel": 2, "offload": offload})
        for offload in what_if.OFFLOADS]
    row = {name: told[1][f"{stage} {name}"] for name in what_if.ROW}
    assert away["parameters"] == told[1]["parameters"]
    assert [away["memory"][state] for state in STATES] == [row[state] for state in STATES]
    assert away["host_memory"] == row["host_bytes"]
    assert away["bus"] == {"to_host": row["bus_bytes"], "to_device": row["bus_bytes"]}
    others = [report["memory"]["peak_by_category"]["other"] for report in (plain, away)]
    spared = plain["memory"]["peak"] - away["memory"]["peak"] + others[1] - others[0]
    assert spared == pytest.approx(told[0][f"{stage} together"] - row["together"], rel=0.05)


# ------------------------------------------------------------------------------------------------------------ the page


@pytest.mark.thorough
def test_the_committed_page_is_what_the_command_makes(tmp_path, capsys):
    program.main(["sliders", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text() == PAGE.read_text(), (
        f"formulas, shapes or devices are others now: python -m zero_minimal sliders {PAGE.relative_to(HOUSE)}")
    assert "page.html" in capsys.readouterr().out


def test_the_page_needs_no_network():
    """It loads nothing, and links to nothing: it is copied to where the course is not."""
    text = PAGE.read_text()
    assert not re.search(r"(src|href)=|https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def in_chromium(script, tmp_path):
    """What a script writes that runs behind those of the page, and the page as it is then."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium here; node, or the expressions evaluated in Python, test the same formulas")
    page = tmp_path / "page.html"
    page.write_text(PAGE.read_text().replace("</body>", f'<pre id="said"></pre><script>{script}</script></body>'))
    run = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return html.unescape(re.search(r'<pre id="said">(.*?)</pre>', run.stdout, re.DOTALL)[1]), run.stdout


def in_node(script, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here; a browser, or the expressions evaluated in Python, test the same formulas")
    calculator = re.search(r'<script id="calculator">(.*?)</script>', PAGE.read_text(), re.DOTALL)[1]
    file = tmp_path / "page.js"
    file.write_text(f"const said = {{}}, document = {{getElementById: () => said}};\n{calculator}\n{script}\n"
                    "console.log(said.textContent);")
    return subprocess.run([node, file], capture_output=True, text=True, timeout=60, check=True).stdout, ""


MOVE = """
    const move = (name, value) => { const one = document.getElementById(name);
      one.value = value; one.dispatchEvent(new Event(one.tagName === "SELECT" ? "change" : "input")); };"""
SAID = 'document.getElementById("said").textContent = JSON.stringify({});'.format


@pytest.mark.thorough
@pytest.mark.parametrize("engine", [in_chromium, in_node])
def test_the_page_calculates_what_plan_says_in_200_settings(engine, tmp_path):
    drawn = settings()
    text, _ = engine(SAID(f"{json.dumps(drawn)}.map(calculate)"), tmp_path)
    shown = json.loads(text)
    assert len(shown) == len(drawn) == 200
    for setting, figures in zip(drawn, shown, strict=True):
        assert not differences(what_if.flat(what_if.asked(setting)), figures), setting


@pytest.mark.thorough
def test_the_page_shows_them_and_the_command_that_says_the_same(tmp_path, capsys):
    """What stands on the page after the sliders were moved; every control has a label."""
    moved = MOVE + """
        move("size", 9); move("model_parallel", 2); move("kept", "P_a"); move("batch", 3);
        move("device", "A100-40GB"); move("dtype", "bf16");
        document.getElementById("stage3").click();
        const all = [...document.querySelectorAll("input, select")];
    """ + SAID("[all.filter(one => !one.labels.length).length, all.length, document.querySelector('code').textContent]")
    text, page = in_chromium(moved, tmp_path)
    without_label, controls, command = json.loads(text)
    assert without_label == 0 and controls > 15
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "zero_minimal"] and "--mp 4" in command and "--checkpoints P_a" in command
    program.main([*words[3:], f"--json={tmp_path / 'plan.json'}"])
    told = json.loads((tmp_path / "plan.json").read_text())
    assert "offload" not in command
    assert f"first that fits into {size_text(told['device_bytes'])}" in " ".join(capsys.readouterr().out.split())
    shown = html.unescape(page).replace("\N{NO-BREAK SPACE}", " ")
    assert f"Stage {told['first_stage_that_fits']} is the first that fits into 40 GB." in shown
    for row in told["rows"]:
        assert f">{size_text(row['together'])} <" in shown
    row = told["rows"][3]
    for name in ("states", "activations", "passing", "sent_bytes"):
        assert f">{size_text(row[name])}<" in shown, name
    assert f"sends {seconds_text(row['send_seconds'])}<" in shown


@pytest.mark.thorough
def test_the_command_of_the_page_has_offload_too(tmp_path, capsys):
    moved = MOVE + """
        move("offload", "cpu");
        document.getElementById("stage2").click();
    """ + SAID("[document.querySelector('code').textContent]")
    text, page = in_chromium(moved, tmp_path)
    [command] = json.loads(text)
    assert command.endswith(" --offload cpu")
    program.main([*shlex.split(command)[3:], f"--json={tmp_path / 'plan.json'}"])
    row = json.loads((tmp_path / "plan.json").read_text())["offload"]["rows"][1]
    assert "offloaded, " in capsys.readouterr().out
    assert f"Its host keeps {size_text(row['host'])}." in html.unescape(page).replace("\N{NO-BREAK SPACE}", " ")


# -------------------------------------------------------------------------------------------------------- in a notebook


@pytest.mark.thorough
def test_sliders_of_a_notebook_are_the_page_with_its_initial_values(monkeypatch):
    monkeypatch.delenv("ZERO_READING", raising=False)
    shown = []
    monkeypatch.setattr(slider_cell, "display", lambda data, raw: shown.append(data["text/html"]))
    slider_cell.sliders()
    assert html.unescape(shown[0].partition('"')[2].partition('" style')[0]) == PAGE.read_text()
    slider_cell.sliders(parameters=1.5e9, data_parallel=8, batch=3, device="T4")
    page = html.unescape(shown[1])
    assert '"device":"T4"' in page and '"size":1500000000' in page and '"batch":3' in page
    with pytest.raises(TypeError, match="ranks"):
        slider_cell.sliders(ranks=3)


@pytest.mark.thorough
def test_who_only_reads_gets_picture_and_tables(monkeypatch, capsys):
    monkeypatch.setenv("ZERO_READING", "1")
    slider_cell.sliders(parameters=1.5e9)
    said = capsys.readouterr().out
    assert "is the first that fits into 32 GB" in said and "sent in a step" in said and "Image" in said


@pytest.mark.thorough
def test_a_notebook_shows_them(monkeypatch):
    """On a kernel, without a front end; then to one who only reads."""
    monkeypatch.setenv("ZERO_READING", "0")
    cells = ["from zero_minimal.notebook.slider_cell import sliders\nsliders()",
             "import os\nos.environ['ZERO_READING'] = '1'\nsliders()"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=60).execute()
    shown = [{kind for output in cell.outputs for kind in output.get("data", [output.get("name")])}
             for cell in book.cells]
    assert shown == [{"text/plain", "text/html"}, {"text/plain", "image/png", "stdout"}]
    assert "stderr" not in shown[0]
