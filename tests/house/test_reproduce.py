"""The paper's tables and figures beside formulas and running code, which has few blocks here: states depend on Ψ."""

import json

import pytest
from matplotlib.image import imread

from zero_minimal import __main__ as program
from zero_minimal.paper import formulas, published
from zero_minimal.paper.quantities import count
from zero_minimal.pictures import reproductions, style
from zero_minimal.programs import reproduce, tables


@pytest.fixture
def few_blocks(monkeypatch):
    """Short runs."""
    monkeypatch.setattr(reproduce, "BLOCKS", 3)
    monkeypatch.setattr(reproduce, "BUCKETS", 6)


def drawn(picture, folder):
    """Whether there is something on it."""
    style.save(picture, folder / "picture.png")
    pixels = imread(folder / "picture.png")
    return pixels.shape[0] > 700 and pixels[..., :3].std() > 0.05


# -------------------------------------------------------------------------------------------------- tables and figure 1


def test_all_54_cells_of_table_1_are_its_formulas():
    cells = [(count(size), stage, ranks, printed[stage - 1])
             for size, rows in published.TABLE1.items() for ranks, printed in rows.items() for stage in (1, 2, 3)]
    assert len(cells) == 54
    for parameters, stage, ranks, printed in cells:
        value = sum(formulas.model_states(stage, parameters, ranks, "fp16").values()) / 1e9
        assert reproduce.agrees(printed, value), (parameters, stage, ranks)


def test_rounded_and_truncated_numbers_agree_and_others_do_not():
    assert reproduce.agrees("4187", 4187.5) and reproduce.agrees("41.3", 41.25) and reproduce.agrees("1.88", 1.875)
    assert not reproduce.agrees("4187", 4188.0) and not reproduce.agrees("4187", 4185.9)
    assert not reproduce.agrees("41.3", 41.4) and not reproduce.agrees("0.12", 0.135)


@pytest.mark.thorough
def test_cells_of_table_1_from_running_code(few_blocks, tmp_path):
    result = reproduce.table1(sizes=("7.5B", "1T"), ranks=(1024,))
    assert len(result["cells"]) == 6 and result["agree"]
    for cell in result["cells"]:
        assert 0 <= cell["padding_bytes"] < 1e6
        assert cell["code_gb"] == pytest.approx(cell["formula_gb"], rel=1e-4)
        assert sum(cell["states"].values()) / 1e9 == cell["code_gb"]
    text = tables.describe(tables.table1, result)
    assert "6 of 6 cells agree" in text and "4,011.72" in text and "+0.72" in text
    assert drawn(reproductions.draw_table1(result), tmp_path)


@pytest.mark.thorough
def test_a_cell_that_differs_is_marked(few_blocks, monkeypatch):
    monkeypatch.setitem(published.TABLE1["7.5B"], 64, ("31.4", "17.6", "1.88"))
    result = reproduce.table1(sizes=("7.5B",), ranks=(64,))
    assert [cell["agrees"] for cell in result["cells"]] == [True, False, True] and not result["agree"]
    assert "!" in tables.describe(tables.table1, result)


@pytest.mark.thorough
def test_figure_1(few_blocks, tmp_path):
    result = reproduce.figure1()
    assert result["agree"]
    assert [round(sum(bar["states"].values()) / 1e9, 1) for bar in result["bars"]] == [120, 31.4, 16.6, 1.9]
    text = tables.describe(tables.figure1, result)
    assert "3.82x" in text and "7.21x" in text and "112 → 38.5 → 26.25 → 14" in text
    assert drawn(reproductions.draw_figure1(result), tmp_path)


def test_the_search_finds_what_fits_and_tries_what_does_not():
    seen = []

    def states(parameters):
        seen.append(parameters)
        return 16 * parameters + 0.03 * parameters**1.1 + 1e6

    found, runs = reproduce.search(states, start=2.3e9, limit=32e9)
    assert states(found) <= 32e9 < states(found * 1.003)
    assert runs == len(seen) - 2 <= 8 and max(seen[:-2]) > found  # one that does not fit was run
    found, _ = reproduce.search(lambda parameters: 16 * parameters, start=2e9, limit=32e9)
    assert found == 2e9
    with pytest.raises(RuntimeError, match="no model found"):
        reproduce.search(lambda parameters: 1e12, start=2e9, limit=32e9)


@pytest.mark.parametrize("parallel", published.TABLE2)
def test_table_2_is_its_formula(parallel):
    for stage, printed in enumerate(published.TABLE2[parallel][0]):
        formula = formulas.largest_model(stage, 32e9, 64, "fp16", parallel)
        assert reproduce.agrees_with_table2(printed, formula)
        assert not reproduce.agrees_with_table2(printed, 1.1 * formula)
        assert not reproduce.agrees_with_table2(printed, 0.9 * formula)


@pytest.mark.thorough
def test_cells_of_table_2_from_running_code(few_blocks, tmp_path):
    result = reproduce.table2(groups=(4,), stages=(1, 3))
    assert result["agree"] and len(result["cells"]) == 2
    for cell in result["cells"]:
        assert cell["code"] == pytest.approx(cell["formula"], rel=0.01) and cell["code"] <= cell["formula"]
    assert "62% to 82%" in tables.describe(tables.table2, result)
    assert drawn(reproductions.draw_table2(result), tmp_path)


# ------------------------------------------------------------------------------------------------------ figures 2 and 7


@pytest.mark.thorough
def test_figure_7_in_small(monkeypatch, tmp_path):
    shape = published.Shape(layers=3, hidden=64, heads=8, batch=16, model_parallel=4)
    bars = dict.fromkeys(("C1", "C2", "C3", "C4", "C5"), 25.0) | {"C1": None}
    monkeypatch.setattr(published, "FIGURE7", {"40B": (shape, bars), "100B": published.FIGURE7["100B"]})
    monkeypatch.setattr(reproduce, "VOCABULARY", 500)
    result = reproduce.figure7(sizes=("40B",), ranks=16)
    allocated = {bar["config"]: bar["allocated_gb"] for bar in result["bars"]}
    checkpoints = 3 * 16 * 1024 * 64 * 2 / 1e9
    for whole, cut in (("C1", "C2"), ("C3", "C4")):  # P_a keeps a quarter of them
        assert allocated[whole] - allocated[cut] == pytest.approx(0.75 * checkpoints)
    assert allocated["C4"] - allocated["C5"] == pytest.approx(0.25 * checkpoints)
    for bar in result["bars"]:
        assert bar["cached_gb"] > bar["allocated_gb"] * 0.999
        assert sum(bar["by_category_gb"].values()) == pytest.approx(bar["allocated_gb"])
        assert (bar["host_gb"] > 0) == (bar["config"] == "C5")
    text = tables.describe(tables.figure7, result)
    assert "no bar for C1 (its largest model is 40B; the code" in text and "67.1 GB, and 4.2 GB" in text
    assert "is not known" in text and "What differs" not in text
    assert drawn(reproductions.draw_figure7(result), tmp_path)


def test_what_figure_7_rules_out_is_ruled_out():
    """What its notes say of causes follows from the paper's own numbers and the formula."""
    small, large = (published.FIGURE7[name][0] for name in ("40B", "100B"))
    bars = published.FIGURE7["40B"][1]
    assert large.batch * large.heads > small.batch * small.heads, "scores are larger where the bars agree"
    whole, cut = tables.checkpoints_of("40B")
    assert (whole - cut) / 1e9 == pytest.approx(12.58, abs=0.01)
    for without, with_cut in (("C1", "C2"), ("C3", "C4")):
        assert bars[without] - bars[with_cut] < (whole - cut) / 2e9, "less than half of it off the paper's bars"


@pytest.mark.thorough
def test_figure_2_is_arithmetic_and_says_so(tmp_path):
    result = reproduce.figure2()
    rows = {row["name_billions"]: row for row in result["rows"]}
    for name, row in rows.items():
        assert row["parameters"] / 1e9 == pytest.approx(name, rel=0.05)
        assert row["zero_states_gb"] < 32 and row["baseline_states_gb"] < 32  # all of these ran
        assert (row["baseline_states_inside_a_node_gb"] > 32) == (name >= 40)  # … the baseline by leaving the node
        assert row["baseline_model_parallel"] > 16 or name < 40
    assert rows[100]["speed_up_paper"] == pytest.approx(10.2, abs=0.05)
    assert rows[100]["zero_estimate"] > 20 * rows[100]["baseline_estimate"]
    assert any("From 40B on" in note for note in result["notes"])
    text = tables.describe(tables.figure2, result)
    assert "no speed is reproduced here" in text and "39.0" in text and "1.47x" in text
    assert drawn(reproductions.draw_figure2(result), tmp_path)


# -------------------------------------------------------------------------------------------------------------- command


def test_the_command(tmp_path, capsys):
    program.main(["reproduce", "figure2", f"--json={tmp_path / 'figures.json'}", f"--plot={tmp_path / 'figure.png'}"])
    assert "baseline" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "figures.json").read_text())["figure2"]["rows"]) == 9
    assert (tmp_path / "figure.png").exists()


def test_figures_are_written_though_a_picture_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(style, "save", fail)
    with pytest.raises(OSError, match="no room"):
        program.main(["reproduce", "figure2", f"--json={tmp_path / 'f.json'}", f"--plot={tmp_path / 'f.png'}"])
    assert json.loads((tmp_path / "f.json").read_text())["figure2"]


@pytest.mark.thorough
def test_runs_in_processes_come_in_order():
    keys = [(7, 31), (2, 5), (1, 2)]
    assert reproduce.run_all(max, keys, processes=2, name="order") == [31, 5, 2]


def test_the_command_refuses(capsys):
    for flags, accepted in ((["table3"], "figure7"), (["table1", "--processes=0"], "from 1 up"),
                            (["figure2", "--plot=picture.txt"], ".png, .svg")):
        with pytest.raises(SystemExit):
            program.main(["reproduce", *flags])
        assert accepted in capsys.readouterr().err
