"""Lesson 05's page: a run or a formula gave each figure on it; what the learner is to find is not there."""

import re
import subprocess
import sys

import pages
import pytest
import texts
import torch
from cells import cells_of, notebook_on
from house.lesson_pages import texts_of

from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.meters.layer_errors import label
from zero_minimal.paper import formulas
from zero_minimal.pictures.tensor_chart import RIGHT, draw_sent_by_batch
from zero_minimal.programs import patients
from zero_minimal.workload.settings import Settings

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("05_tensor_parallel")
MB = 1e6
BATCH = Settings().batch
PATIENTS = {"split before GELU": "A", "f forgotten": "B", "g forgotten": "C"}  # as the page calls them


def row(world_size, batch=BATCH):
    return next(row for row in MEASURED["rows"] if (row["ranks"], row["batch"]) == (world_size, batch))


def layers(mistake):
    return {one["layer"]: one for one in MEASURED["patients"][mistake]["layers"]}


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_the_page_says_of_messages():
    settings, two = Settings(), row(2)
    assert len({row["loss"] for row in MEASURED["rows"] if row["batch"] == 4}) == 1, "M changes no loss"
    assert f"6 blocks, h = {settings.hidden}, b = {settings.batch} and s = {settings.sequence}" in PROSE
    each = 4 * settings.batch * settings.sequence * settings.hidden
    assert f"b·s·h numbers are {each / MB:.3f} MB" in PROSE and f"26 times {each / MB:.3f} MB" in PROSE
    assert round(26 * 0.262 + 3 * 4 * settings.batch * settings.sequence / MB, 2) == round(two["sent"] / MB, 2)
    assert two["forward"] + two["backward"] == 4 * settings.layers + 4
    assert f"There are {4 * settings.layers + 4}. Each block has two in forward and two in backward, 24 in all" in PROSE
    assert two["sent"] == (4 * settings.layers + 2) * each + 3 * 4 * settings.batch * settings.sequence
    assert row(2, 8)["sent"] == 2 * two["sent"]
    data_parallel = formulas.traffic(0, row(1)["parameters"], 2, "fp32")
    assert f"Data parallelism sends {data_parallel / MB:.2f} MB" in PROSE


def test_what_the_page_says_of_parameters():
    whole, two = row(1), row(2)
    assert two["parameters"] == (whole["parameters"] - two["replicated"]) // 2 + two["replicated"]


def test_what_the_page_says_of_the_patients():
    assert MEASURED["loss"] == pytest.approx(MEASURED["patients"]["no mistake"]["losses"][0], rel=1e-6)
    for mistake in PATIENTS:
        first, second = MEASURED["patients"][mistake]["losses"]
        assert first == second, "loss on both ranks"
    model = next(cell["source"] for cell in cells_of("05_tensor_parallel.ipynb") if cell["id"] == "model")
    assert "layers=3" in model and "steps=40" in model and "of three blocks was trained for 40 steps" in PROSE
    assert f"always in the MLP of block {patients.ILL}" in PROSE and MEASURED["positive"] < 1e-4
    ill = f"blocks.{patients.ILL}"
    b = layers("f forgotten")
    c, before = layers("g forgotten"), [name for name in b if name.startswith("blocks.") and name < f"{ill}.mlp"]
    assert {f"{b[name]['error']:.0%}" for name in before} == {"7%"} and len(before) == 6
    norm = b[ill + ".mlp_norm"]["error"]
    assert f"Patient B is off by {norm:.0%} at the norm and by about 7% in the blocks before" in PROSE
    apart = [f"{one['position_embedding']['spread']:.1%}" for one in (b, c)]
    assert "positions of patients B and C differ, by {} and {}".format(*apart) in PROSE
    ill_losses, right_losses = (MEASURED["patients"][name]["losses"] for name in ("f forgotten", "no mistake"))
    assert ill_losses == right_losses and "The loss is the same as without the mistake" in PROSE
    assert b[ill + ".mlp"]["error"] < RIGHT < b[ill + ".mlp_norm"]["spread"]


def test_the_patients_are_as_they_are_told():
    """What the diagnosis on the page rests on."""
    names = [one["layer"] for one in MEASURED["patients"]["no mistake"]["layers"]]
    place = names.index(f"blocks.{patients.ILL}.mlp")
    assert all(one["error"] < RIGHT and (one["spread"] or 0) == 0 for one in layers("no mistake").values())
    a, b, c = ([layers(mistake)[name] for name in names] for mistake in PATIENTS)
    assert all(one["error"] > RIGHT for one in (*a, *b[:place], *c))
    assert all(one["error"] < RIGHT for one in b[place:]), "right down to the ill MLP"
    assert not any(one["spread"] for one in a), "its ranks agree"
    norms = [number for number, name in enumerate(names) if name.endswith("norm")]
    assert [number for number in norms if b[number]["spread"] > RIGHT] == [place - 1]
    assert [number for number in norms if c[number]["spread"] > RIGHT] == [number for number in norms if number > place]
    assert c[1]["spread"] > 0 and b[1]["spread"] > 0, "positions, by the residual stream"


def test_the_alt_text_of_the_patients():
    (words,) = re.findall(r"!\[(.*?)\]\(patients.png\)", PAGE)
    names = [one["layer"] for one in MEASURED["patients"]["no mistake"]["layers"]]
    place = names.index(f"blocks.{patients.ILL}.mlp")
    for mistake, letter in PATIENTS.items():
        rows = MEASURED["patients"][mistake]["layers"]
        wrong = [round(100 * one["error"]) for one in rows if one["error"] > RIGHT]
        apart = [round(100 * one["spread"]) for one in rows if (one["spread"] or 0) > 0.01]
        part = words.partition(f"Patient {letter}:")[2].partition("Patient")[0]
        if letter == "B":
            before = [round(100 * one["error"]) for one in rows[: place - 1]]
            assert f"the {('', 'six')[len(names) - place == 6]} layers at the right end" in part
            assert f"wrong by {wrong[place - 1]} percent" in part and f"differ by {apart[0]} percent" in part
            assert min(one["error"] for one in rows[: place - 1]) < 0.01
            assert f"by less than {min(before)} to {max(before)} percent" in part
        else:
            assert f"all {len(names)}" in part and f"by {min(wrong)} to {max(wrong)} percent" in part
            assert not apart or f"differ by {min(apart)} to {max(apart)} percent" in part
            assert ("no two ranks differ" in part) == (not apart)
    assert {label(name) for name in names} == {"tokens", "positions", "norm", "attention", "MLP"}


def test_the_exam_is_right():
    assert exam_figures() <= set(re.findall(r"\d[\d.,]* [MG]B\b", TEACHER))


def exam_figures():
    """Of the first exam question: h = 4096, s = 2048, b = 1, 16 bits, M = 8, 32 blocks."""
    one = 2048 * 4096 * 2
    ring = 2 * 7 / 8 * one
    block = {f"{size / MB:.1f} MB" for size in (one, 4 * ring, 6 * ring)}
    return block | {f"{32 * count * ring / 1e9:.1f} GB" for count in (4, 6)}


# --------------------------------------------------------------------------------------------------- a run of today


@pytest.mark.thorough
def test_the_training_that_a_learner_compares_with():
    told = re.search(r"held-out text was ([\d.]+) before and ([\d.]+) after", PROSE)
    assert Settings().dropout == 0.0 and "It runs without dropout" in PROSE
    words = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "zero_minimal/tensor_parallel.py",
         "--steps", "20"], cwd=HOUSE, capture_output=True, text=True, timeout=200, check=True)
    words = " ".join((words.stdout + words.stderr).split())
    found = re.search(r"held-out text ([\d.]+) before and ([\d.]+) after", words)
    before, after = map(float, found.groups())
    assert after < before - 1
    if texts.as_recorded():
        assert [before, after] == pytest.approx([float(number) for number in told.groups()], abs=0.003)


# ------------------------------------------------------------------------------------------------------- what is told


def test_a_learner_trains_the_learners_own():
    assert LESSON.starter.read_text().endswith("    main(ParallelGPT)\n")


def test_the_diagnosis_is_folded():
    assert "f forgotten |" not in pages.without_folded(PAGE)


def test_the_notebooks_bars_of_batches_are_what_was_sent():
    axis = draw_sent_by_batch({2: 700_000, 4: 1_400_000}, 1_000_000).axes[0]
    assert [bar.get_height() for bar in axis.patches] == [0.7, 1.4]
    assert {text.get_text() for text in axis.texts} == {"0.70", "1.40"} and set(axis.lines[0].get_ydata()) == {1.0}


@pytest.mark.thorough
def test_the_notebook_on_3_ranks(ranks_of_it=3):
    with notebook_on(ranks_of_it, "05_tensor_parallel.ipynb") as (_, world):
        assert world["right"] == [True] * ranks_of_it and max(world["positive"]) < 1e-6
        ill = {name: {one["layer"]: one for one in rows} for name, (rows, _) in world["ill"][0].items()}
        place = f"blocks.{patients.ILL}"
        assert ill["f forgotten"][f"{place}.mlp"]["error"] < RIGHT < ill["f forgotten"][f"{place}.mlp_norm"]["spread"]
        assert ill["g forgotten"]["norm"]["spread"] > RIGHT and not ill["split before GELU"]["norm"]["spread"]
        each = 4 * 4 * 64 * 96 * 2 * (ranks_of_it - 1) / ranks_of_it
        assert world["sent[4]"][0] == pytest.approx(14 * each, rel=0.01) and world["sent[8]"][0] > 27 * each


def test_what_torch_does_is_what_the_page_says():
    from torch.distributed.tensor import parallel

    for name in ("parallelize_module", "ColwiseParallel", "RowwiseParallel", "loss_parallel", "SequenceParallel"):
        assert f"`{name}`" in PAGE and hasattr(parallel, name)
    assert torch.relu(torch.tensor(3.0 - 2.0)) != torch.relu(torch.tensor(3.0)) + torch.relu(torch.tensor(-2.0))
