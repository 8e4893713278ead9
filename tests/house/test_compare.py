"""The command compare, the peers it runs beside the stages, and the formulas it holds them against."""

import json

import checks
import pytest
from thorough import sample

from zero_minimal import __main__ as program
from zero_minimal.paper import formulas
from zero_minimal.pictures.comparison import draw_comparison
from zero_minimal.programs import compare, peers, report
from zero_minimal.stage0 import Stage0
from zero_minimal.workload.settings import Settings

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "batch": 2}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Of one small comparison."""
    folder = tmp_path_factory.mktemp("compare")
    flags = [f"--{name}={value}" for name, value in SMALL.items()]
    program.main(["compare", *flags, "--ranks=2", "--steps=9", "--device=cpu", f"--json={folder / 'rows.json'}"])
    return json.loads((folder / "rows.json").read_text())["rows"]


@pytest.mark.thorough
def test_all_stages_and_peers_run_on_the_same_work(rows):
    others = ["DDP", "FSDP2"] if checks.FSDP2_RUNS_ON_THE_CPU else ["DDP"]
    assert [row["name"] for row in rows] == ["stage 0", "stage 1", "stage 2", "stage 3", *others]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3] + [None] * len(others)
    for row in rows[1:4]:
        assert row["losses"] == rows[0]["losses"]
    for row in rows[4:]:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)


@pytest.mark.thorough
def test_model_states_and_traffic_shrink_and_grow_as_the_paper_says(rows):
    states = [sum(row["memory"][state] for state in formulas.STATES) for row in rows]
    assert states[0] > states[1] > states[2] > states[3]
    sent = [row["traffic"]["sent_bytes"] for row in rows]
    assert sent[0] == sent[1] == sent[2] < sent[3] <= 1.5 * sent[0]


@pytest.mark.thorough
def test_the_table_names_every_run(rows):
    text = compare.describe(rows)
    assert all(row["name"] in text for row in rows)
    assert "agree bit for bit: stage 0, stage 1, stage 2, stage 3" in text


def test_a_difference_between_losses_is_told():
    losses = {"one": [2.0, 4.0], "two": [2.0, 4.0], "three": [2.0, 4.2]}
    rows = [{"name": name, "losses": own} for name, own in losses.items()]
    assert compare.agreement(rows).splitlines() == [
        "losses that agree bit for bit: one, two", "three: within 0.05 of one's",
    ]


@pytest.mark.thorough
def test_a_machine_without_a_loopback_counter_is_drawn_too(rows):
    rows = [row | {"traffic": row["traffic"] | {"wire_bytes": None}} for row in rows]
    draw_comparison(rows, "no counter")
    assert "?" in compare.describe(rows) and "not known here" in report.describe(rows[0])


# -------------------------------------------------------------------------------------------------------------- peers


OPTIONS = [{}, {"clip": 0.5, "accumulate": 2}, {"clip": 0.5, "dtype": "bf16"}, {"dtype": "fp16"}]


@pytest.mark.thorough
@pytest.mark.parametrize("options", sample(OPTIONS, [{"clip": 0.5, "accumulate": 2}]), ids=str)
def test_every_peer_learns_what_stage_0_learns(options):
    settings = Settings(**SMALL, steps=6, **options)
    expected = compare.run(Stage0, settings, 2, "cpu")
    # bf16 and fp16: sums in another order are rounded to 8 or 11 bits, and Adam's first steps make a whole step of it
    tolerance = 1e-5 if settings.dtype == "fp32" else 1e-2
    others = [peers.DDP, peers.ZeroRedundancy] + [peers.FSDP2] * checks.FSDP2_RUNS_ON_THE_CPU
    for peer in others:
        own = compare.run(peer, settings, 2, "cpu")
        assert own["losses"] == pytest.approx(expected["losses"], rel=tolerance), peer.__name__


# ----------------------------------------------------------------------------------------------- formulas and commands


VOLUMES = [(0, 1, 2), (0, 4, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 3), (3, 4, 12)]


@pytest.mark.parametrize(("stage", "accumulate", "volume"), VOLUMES)
def test_the_formulas_of_traffic(stage, accumulate, volume):
    assert formulas.traffic(stage, 1000, 4, "fp32", accumulate) == volume * 1000 * 4 * 3 / 4
    assert formulas.traffic(stage, 1000, 1, "bf16", accumulate) == 0


def test_an_unknown_command_is_answered_with_those_there_are(capsys):
    assert program.main(["compere"]) == 2
    error = capsys.readouterr().err
    assert "unknown command 'compere'" in error and "compare" in error
    assert program.main(["--help"]) is None and "compare" in capsys.readouterr().out


def test_compare_refuses_what_cannot_work(capsys):
    for flags, accepted in [(["--ranks", "0"], "from 1 up"), (["--plot", "/nowhere/plot.png"], "cannot be written")]:
        with pytest.raises(SystemExit):
            program.main(["compare", *flags])
        assert accepted in capsys.readouterr().err


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "rows.json"
    report.write_json({"rows": []}, file)
    with pytest.raises(TypeError):
        report.write_json({"rows": object()}, file)
    assert json.loads(file.read_text()) == {"rows": []}
    assert list(tmp_path.iterdir()) == [file]
