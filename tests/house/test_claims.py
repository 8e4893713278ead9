"""Lesson 11's workbench, and the cards that run on it: verdicts hold at any setting, numbers follow it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from zero_minimal.paper import published
from zero_minimal.processes import ranks
from zero_minimal.programs.claims.cards import CARDS, VERDICTS, examine, words
from zero_minimal.programs.lab import Lab
from zero_minimal.programs.setting import Setting, draw

pytestmark = pytest.mark.thorough

WORLD = 2
PAGE = Path(__file__).parents[2] / "lessons/11_reading_critically/measured.json"
SMALL = Setting(layers=2, hidden=64, sequence=12, steps=10)
OTHER = Setting(  # than the page's, in whatever a card can ask for
    seed=11, layers=2, hidden=80, sequence=12, batch=3, steps=10, parameters=8_000_000_000, devices=12,
    model_parallel=2, sequences=16, tokens=1024, elements=300_000_000, row=2, gpus=128, without=6, largest=140,
    config="C2")


def in_ranks(function, *args, world_size=WORLD):
    return ranks.run(function, world_size, *args, device="cpu", timeout=300)


def several(setting, numbers):
    """In a rank: {card: (verdict, number)}."""
    return {number: examine(number, setting)[:2] for number in numbers}


def test_there_are_28_cards_and_each_says_what_it_asks():
    assert sorted(CARDS) == list(range(1, 29))
    for number in CARDS:
        said = words(number)
        assert all(said.values())
        assert not [verdict for verdict in VERDICTS if f'"{verdict}"' in " ".join(said.values())]


def test_what_the_paper_prints_is_read_as_it_is_asked_for():
    setting = Setting(gpus=128, without=10, row=8, largest=120)
    found = in_ranks(several, setting, (24, 25, 26, 27), world_size=1)[0]
    mean = sum(published.FIGURE4.values()) / 9
    assert found[24] == ("false", pytest.approx(41.1 - mean)) and mean == pytest.approx(39.0, abs=0.05)
    assert found[25] == ("true if", pytest.approx(36.6 / 37.5))
    assert found[26] == ("false", pytest.approx(60.8 - 50))
    assert found[27] == ("true if", pytest.approx(3.0))


def test_numbers_are_those_of_the_formulas():
    found = in_ranks(several, replace(SMALL, devices=12), (2, 6, 9, 11, 12, 13, 15, 18, 19))[0]
    h, elements = 64, 2 * (12 * 64**2 + 13 * 64) + (256 + 12 + 2) * 64
    assert found[2] == ("false", pytest.approx(6 * elements / 1e6, rel=0.01))  # of 16Ψ fp32 bytes 4Ψ + 12Ψ/2 stay
    assert found[6] == ("false", pytest.approx(16 / (4 + 12 / 12), rel=0.01))
    assert found[9] == ("true if", pytest.approx(12 * elements / 1e6, rel=0.01))
    assert found[11] == ("false", pytest.approx(4 * elements / 2 / 1e6, rel=0.01))
    assert found[12] == ("false", pytest.approx(2 * elements / 1e6, rel=0.01))
    assert found[13] == ("false", pytest.approx(4 * elements / 1e6, rel=0.01))
    assert found[15][0] == "true if" and 0 < found[15][1] < 4 * elements / 2 / 1e6
    assert found[18] == ("false", pytest.approx(2 * 12 * h * 4 / 1e3))
    assert found[19] == ("true", pytest.approx(50, abs=4))


def at_work():
    """In a rank: what the methods of a lab give."""
    with ranks.start() as rank:
        lab = Lab(SMALL, rank)
        plain = lab.train(0)
        peaks = [lab.peak]
        zero = lab.train(3)
        peaks.append(lab.peak)
        lab.reset_peak()
        again = lab.train(3)
        peaks.append(lab.peak)
        further = lab.train(2, model=plain.model, steps=3)
        alone = lab.train(2, ranks=1, steps=2)
        late = lab.arguments()
        late.zero = {"stage": 3}
        in_time = lab.arguments(zero={"stage": 3})
        stages = [lab.train(arguments=arguments, steps=1).stage for arguments in (late, in_time)]
        faults = []
        for wrong in (lambda: lab.train(4), lambda: lab.train("ZeRO"), lambda: lab.published("table 9"),
                      lambda: lab.train(0, offload=True), lambda: lab.train(1, ranks=7),
                      lambda: lab.simulate(1, hiden=3)):
            try:
                wrong()
            except ValueError as error:
                faults.append(str(error))
        wire = plain.wire, plain.sent
        return dict(same=plain.losses == zero.losses, peaks=peaks, again=again.peak,
                    starts=(plain.losses[0], further.losses[0]), alone=(alone.ranks, alone.sent, alone.states),
                    plain=plain.states, stages=stages, faults=faults, wire=wire, journal=lab.journal)


def test_a_lab_measures_and_keeps_a_journal():
    found = in_ranks(at_work)[0]
    assert found["same"], "ZeRO has changed the losses"
    first, second, third = found["peaks"]
    assert first == second > third == found["again"], "a meter only rises, until it is reset"
    fresh, handed_on = found["starts"]
    assert handed_on < fresh - 0.3, "a model that is handed on has learned"
    assert found["alone"] == (1, 0, found["plain"])
    assert found["stages"] == [0, 3], "a configuration that comes late does nothing"
    assert len(found["faults"]) == 6
    wire, sent = found["wire"]
    assert wire is None or wire == pytest.approx(sent, rel=0.05)
    kinds = [entry["kind"] for entry in found["journal"]]
    assert kinds[:4] == ["train", "train", "reset_peak", "train"]
    assert found["journal"][0] | {"stage": 0, "ranks": WORLD, "seed": 0, "fresh": True} == found["journal"][0]
    assert not found["journal"][4]["fresh"]


def simulated_and_real():
    with ranks.start() as rank:
        lab = Lab(SMALL, rank)
        size = dict(batch=2, dtype="bf16")
        simulated = lab.simulate(2, ranks=WORLD, sequence=12, recompute=False, bucket_bytes=2**18, **size)
        real = lab.train(2, **size)
        return simulated.memory, real.memory, simulated.sent, real.sent


def test_a_simulated_rank_is_that_of_the_ranks_that_are_there():
    simulated, real, sent, really_sent = in_ranks(simulated_and_real)[0]
    assert simulated == real and sent == really_sent


def test_a_setting_is_drawn():
    assert draw("Ada") == draw("Ada") != draw("Bob")
    drawn = [draw(number) for number in range(200)]
    for setting in drawn:
        assert setting.devices % setting.model_parallel == 0 and setting.hidden % setting.heads == 0
        assert setting.without in published.FIGURE4 and setting.row in published.TABLE2
    assert len(set(drawn)) == 200


def card_of(page, number):
    return next(card for card in page["cards"] if card["card"] == number)


@pytest.mark.parametrize("number", [2, 26])
def test_the_page_has_what_a_card_gives(number):
    page = json.loads(PAGE.read_text(encoding="utf-8"))
    verdict, found, _ = in_ranks(examine, number, Setting(**page["setting"]), world_size=page["ranks"])[0]
    of_page = card_of(page, number)
    assert (of_page["verdict"], of_page["value"]) == (verdict, pytest.approx(found, rel=1e-3))


@pytest.mark.parametrize("number", sorted(CARDS))
def test_a_verdict_holds_and_its_number_follows_the_setting(number):
    of_page = card_of(json.loads(PAGE.read_text(encoding="utf-8")), number)
    verdict, found, journal = in_ranks(examine, number, OTHER)[0]
    assert verdict == of_page["verdict"] and isinstance(found, float) and math.isfinite(found)
    assert [entry for entry in journal if entry["kind"] != "reset_peak"], "nothing ran"
    assert abs(found - of_page["value"]) > 0.01 * abs(of_page["value"])
    assert of_page["seconds"] < 120
