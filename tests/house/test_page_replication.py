"""The page of the replication: each figure on it is from the run whose JSON lies beside it, and its sentences say what
that run found."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pages
import pytest

from zero_minimal.pictures.replication_chart import draw_replication
from zero_minimal.programs import replicate
from zero_minimal.programs import replicate_results as results
from zero_minimal.programs.replicate_plan import FULL, NEW, OFFLOADED, PLAIN, SAME, STANDARD, ZERO, sessions

FOLDER = Path(__file__).parents[2] / "lessons/11_reading_critically"
PAGE = (FOLDER / "replication.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
CONTENT = json.loads((FOLDER / "replication.json").read_text(encoding="utf-8"))
SIZE = next(iter(results.tables(CONTENT, SAME)))
PEAKS = results.peaks(CONTENT)
# which first, which second: all four with ZeRO on and off, and offload on either side
PAIRS = (*itertools.product((STANDARD, ZERO), repeat=2), (STANDARD, OFFLOADED), (OFFLOADED, STANDARD))


def spread(values):
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def of_cell(ranks, first, second, model, figure):
    """[seed]: a figure of one cell of the factorial."""
    found = results.passes(CONTENT, "factorial", ranks=ranks, before=first, kind=second, model=model)
    return [each[figure] for each in found]


def signed(values):
    if set(values) == {0.0}:
        return "exactly 0"
    return f"{sum(values) / len(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})"


def assert_rows(*rows):
    """That these are rows of a table on the page, one after the other."""
    assert "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) in PAGE


def test_the_file_is_of_a_whole_run_of_the_plan_as_it_is():
    assert CONTENT["plan"] == json.loads(json.dumps(dataclasses.asdict(FULL)))
    assert set(CONTENT["sessions"]) == {session.name for session in sessions(FULL)}
    assert not replicate.missing(CONTENT, FULL)
    minutes = sum(session["wall_seconds"] for session in CONTENT["sessions"].values()) / 60
    assert f"Its sessions took {minutes:.0f} minutes altogether" in PROSE


@pytest.mark.parametrize(("model", "peak"), [(SAME, "peak_never_reset"), (NEW, "peak")])
def test_the_two_tables_of_the_report(model, peak):
    for size, seeds in results.tables(CONTENT, model).items():
        assert_rows(*((size, f"{number}. {each['kind']}", each["batch"], f"{each['training_loss']:.3f}",
                       f"{each['validation_loss']:.3f}", f"{each['accuracy']:.1%}", f"{each[peak] / 1e6:.2f}",
                       f"{each['parameters']:,}") for number, each in enumerate(seeds[0], 1)))


def test_what_the_page_says_of_the_reports_table():
    data = CONTENT["data"]["shuffled"]
    assert f"over {data['training']:,} sentences" in PROSE and f"{data['held_out']:,} other sentences are held" in PROSE
    for size, seeds in results.tables(CONTENT, SAME).items():
        first, second, third, last = seeds[0]
        for loss in results.LOSSES:  # "The first three rows say so, for each of four models"
            assert second[loss] < first[loss] and third[loss] < first[loss], size
        assert third["training_loss"] < second["training_loss"], "once more"
        assert last["training_loss"] == min(each["training_loss"] for each in seeds[0])
    assert len(results.tables(CONTENT, SAME)) == 4
    for seeds in results.tables(CONTENT, NEW).values():
        for one, other in [(passes[row], passes[row + 1]) for passes in seeds for row in (0, 2)]:
            assert results.same_bits([(one, other)]) == 1, "same in all digits of all losses"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_factorial(ranks):
    assert_rows(*((words, first, second, *(spread(of_cell(ranks, first, second, model, figure))
                                           for figure in results.LOSSES))
                  for model, words in ((NEW, "new model"), (SAME, "same object")) for first, second in PAIRS))
    assert CONTENT["plan"]["factorial_steps"] * 8 == 1600 and "1,600 sentences each" in PROSE


def test_who_comes_second_wins_and_zero_changes_no_bit():
    for ranks in (1, 2):
        for figure in results.LOSSES:
            for first, second in PAIRS:
                pairs = results.in_order(CONTENT, ranks, first, second, figure)
                assert len(pairs) == 5 and all(after < before for before, after in pairs)
            assert of_cell(ranks, STANDARD, ZERO, NEW, figure) == of_cell(ranks, STANDARD, STANDARD, NEW, figure)
    pairs = results.twins(CONTENT)
    assert results.same_bits(pairs) == len(pairs) == 2 * 5 * (5 + 6)
    assert f"**Exactly 0.** {len(pairs)} pairs of passes here differ" in PROSE
    assert f"In {len(pairs)} of them every loss of every step and every trained parameter are the same bits" in PROSE


def test_whose_the_gain_is():
    training, validation = (results.attribution(CONTENT, figure) for figure in results.LOSSES)
    assert_rows(*((whose, signed(training[whose]), signed(validation[whose])) for whose in training))
    for gain in (training, validation):
        assert set(gain["ZeRO"]) == {0.0} and max(gain["twice the batch"]) < 0 < min(gain["earlier training"])
        sums = [sum(gain[whose][seed] for whose in list(gain)[:3]) for seed in range(5)]
        assert sums == pytest.approx(gain["all"]), "the three make up the whole"


def test_the_faster_rate():
    found = results.grouped(results.passes(CONTENT, "rates", rate=0.002), "number", "kind", "batch")
    assert CONTENT["sessions"]["position"]["rate"] * 4 == 0.002
    losses = [[[row[figure] for row in rows] for figure in results.LOSSES] for rows in found.values()]
    assert [len(rows) for rows in found.values()] == [5] * 3
    assert_rows(*((f"{number + 1}. {kind}", batch, *map(spread, losses[number])) for number, kind, batch in found))
    above = sum(third > first for first, third in zip(losses[0][1], losses[2][1], strict=True))
    assert f"In {above} of 5 seeds the third pass ends above the first, in validation loss." in PROSE and above > 0


def test_memory_and_time():
    kinds = (PLAIN, STANDARD, ZERO, OFFLOADED)
    assert_rows(*((ranks, batch, *(f"{PEAKS[ranks, batch, kind] / 1e6:.2f}" if (ranks, batch, kind) in PEAKS else "–"
                                   for kind in kinds)) for ranks, batch in ((1, 8), (1, 16), (2, 8), (2, 16))))
    for batch in (8, 16):  # what the page says of these columns
        assert PEAKS[1, batch, OFFLOADED] < PEAKS[1, batch, PLAIN] < PEAKS[1, batch, STANDARD]
        assert PEAKS[2, batch, OFFLOADED] < PEAKS[2, batch, ZERO] < PEAKS[2, batch, STANDARD]
    assert_rows(*((ranks, what, f"{ratio['median']:.2f}", f"{ratio['min']:.2f} to {ratio['max']:.2f}")
                  for ranks, rows in results.times(CONTENT).items() for what, ratio in rows.items()))


def test_the_trap_and_the_bar():
    right, wrong = CONTENT["data"]["shuffled"], CONTENT["data"]["position"]
    (trapped,) = results.passes(CONTENT, "position")
    assert f"reports an accuracy of {trapped['accuracy']:.1%} on what is held out" in PROSE
    assert (f"{wrong['held_out_positive']:.1%} of the last fifth are positive, and {wrong['training_positive']:.1%} of "
            "the rest") in PROSE
    assert f"is right in {1 - wrong['held_out_positive']:.1%}" in PROSE
    assert f"the class of {right['naive_bayes']:.1%} of the held-out" in PROSE
    seeds = results.tables(CONTENT, SAME)[SIZE]
    one, two = (sum(passes[number]["accuracy"] for passes in seeds) / 5 for number in (0, 1))
    assert f"The model {SIZE} finds {one:.1%} after one pass and {two:.1%} after two" in PROSE
    best, size = max((each["accuracy"], size) for model in (SAME, NEW)
                     for size, seeds in results.tables(CONTENT, model).items() for passes in seeds for each in passes)
    assert f"The best figure in both tables is {best:.1%}, of {size}." in PROSE and best < right["naive_bayes"]


def test_no_other_figure_has_crept_in():
    """Losses, shares and MB in prose, outside of tables."""
    prose = "\n".join(line for line in pages.without_code(PAGE).splitlines() if not line.startswith("|"))
    said = set(re.findall(r"\d+\.\d+%?", prose)) - {"0.002", "0.25", "2.5"}  # rate, MiB of a bucket, MB to load
    assert len(said) == 8 and all(figure.endswith("%") for figure in said), "those of test_the_trap_and_the_bar"


def test_the_picture_is_of_these_figures():
    drawn = results.drawn(CONTENT)
    picture = draw_replication(drawn)
    assert len(picture.axes) == 6 and "](replication.png)" in PAGE and (FOLDER / "replication.png").exists()
    for name, panel in zip(drawn["losses"], picture.axes[::3], strict=True):
        shown = sorted(line.get_ydata()[0] for line in panel.lines if len(line.get_ydata()) == 1)
        wanted = [loss for runs in drawn["losses"][name].values() for losses in runs for loss in losses]
        assert shown == pytest.approx(sorted(wanted)), "every seed is a point"
