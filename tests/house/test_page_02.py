"""Lesson 02's page: a run or a formula gave each figure on it; what the learner is to find is not there."""

import pytest
import torch
import toys
from cells import notebook_on
from house.lesson_pages import texts_of

from zero_minimal.meters.buckets import Written
from zero_minimal.paper import formulas
from zero_minimal.pictures.bucket_chart import starts, writers

LESSON, PAGE, TEACHER, PROSE, TOLD, MEASURED = texts_of("02_optimizer_state")


def row(stage, world_size):
    """The report of the run of this stage on so many ranks."""
    return next(row for row in MEASURED["rows"] if (row["stage"], row["ranks"]) == (stage, world_size))


# -------------------------------------------------------------------------------------------------------- the figures


def test_what_was_measured_agrees_with_the_formulas():
    psi = MEASURED["psi"]
    for row in MEASURED["rows"]:
        wanted = formulas.model_states(row["stage"], psi, row["ranks"], "fp32")["optimizer"]
        padding = row["optimizer"] - wanted
        assert padding == 0 if row["ranks"] in (2, 4) else 0 < padding <= 8 * 5 * 16 * row["ranks"]
        assert row["sent"] == pytest.approx(formulas.traffic(row["stage"], psi, row["ranks"], "fp32"), rel=1e-4)
    assert psi % 2 == psi % 4 == 0 and psi % 3 and f"a third of 8Ψ would be {8 * psi / 3:,.0f}" in PROSE
    assert f"send 3 halves in place of 2: {3 * 4 * psi / 2 / 1e6:.2f} MB on 2 ranks" in PROSE


def test_the_exam_is_right():
    assert (16 * 7.5, round((4 + 12 / 64) * 7.5, 1), round(2 * 2 * 7.5 * 63 / 64, 1)) == (120, 31.4, 29.5)
    assert 16 / (4 + 12 / 56) < 3.8 <= 16 / (4 + 12 / 57) and "from 57 ranks on" in TEACHER


def test_small_updates_are_lost_in_bf16_and_kept_by_a_master():
    with_master, alone = MEASURED["small_steps"].values()
    assert set(alone) == {1.0} and with_master[-1] == torch.tensor(0.9).bfloat16().item() == 0.8984375
    assert "1000 updates of 0.0001 are taken away" in PROSE
    assert torch.tensor(1 - 1 / 256).bfloat16() != 1 and torch.tensor(1 - 0.9 / 512).bfloat16() == 1


# ------------------------------------------------------------------------------------------------------- the pictures


def test_the_picture_of_the_halves_shows_what_the_page_says():
    zero, one = MEASURED["halves"].values()
    world_size = 4
    assert list(zero) == ["backward", "reduce-scatter", "all-gather", "update"]
    assert list(one) == ["backward", "reduce-scatter", "update", "all-gather"], "two panels have changed places"
    for phases, middle in ((zero, "mean"), (one, "new")):
        last = list(phases.values())[-1]
        assert all(kinds == ["new"] * world_size for kinds in last)
        for rank in range(world_size):
            assert [kind == "mean" for kind in phases["reduce-scatter"][rank]] == [one == rank
                                                                                   for one in range(world_size)]
        assert phases["all-gather"][0] == [middle] * world_size
    held = MEASURED["shares"]
    assert held["stage 1"][0] == {"parameters": 1, "gradients": 1, "optimizer": 0.25}
    assert set(held["stage 0"][0].values()) == {1}


def test_the_map_shows_one_owner_for_each_element():
    written_by = [rank for rows in MEASURED["map"].values() for line in rows for rank in line]
    shares = [written_by.count(rank) for rank in range(2)]
    assert sum(shares) == len(written_by) and max(shares) - min(shares) <= 16 * 3
    first = MEASURED["map"]["first.weight"]
    places = [(row, column) for row, line in enumerate(first) for column in range(len(line))]
    begin = [place for place in places if starts(first, *place)]
    assert [first[row][column] for row, column in begin] == [1, 0, 1], "the alt text of the picture says so"
    assert any(column for _, column in begin), "a stripe begins in the middle of a row"


def test_of_each_element_the_map_says_who_wrote_it():
    masks = [{"x": [[True, True, False, False]]}, {"x": [[False, True, True, False]]}]
    assert writers(masks) == {"x": [[0, -2, 1, -1]]}


# ------------------------------------------------------------------------------------------------------------ real runs


def written_by_us():
    """Whether the masks of two steps are alike, and each time what has changed of this rank's shards."""
    zero = toys.STAGES[1](toys.build(toys.MLP, 0), torch.optim.SGD, lr=1.0, bucket_bytes=256)
    masks = []
    for step in range(2):
        zero.model(*toys.numbers(0, step)).backward()
        zero.reduced_gradients()
        with Written(zero) as written:
            zero.step()
        zero.zero_grad()
        masks.append(written.masks)
    return [torch.cat([mask.flatten() for mask in one]) for one in masks]


def test_what_a_rank_writes_is_its_own_in_every_step():
    one, two = toys.run(written_by_us, 2)
    assert torch.equal(one[0], one[1]) and torch.equal(two[0], two[1])
    assert torch.equal(one[0], ~two[0]), "each element has one owner"


@pytest.mark.thorough
def test_the_notebook_on_3_ranks(world_size=3):
    smaller = ("Settings()", "Settings(layers=2, hidden=48)")
    with notebook_on(world_size, "02_optimizer_state.ipynb", smaller) as (names, world):
        psi = names["psi"]
        for size in world["states_of(Stage1)[1]['optimizer']"]:
            assert 8 * psi / world_size <= size <= 8 * (psi / world_size + 5 * 16 * (world_size + 1))
        assert world["losses == other_losses and torch.equal(parameters, other_parameters)"] == [True] * world_size
        assert sum(world["sent['DDP, ZeRO']"]) / world_size == pytest.approx(
            1.5 * world["sent['stage 1']"][0], rel=0.02)
