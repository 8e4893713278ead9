"""What the graded lessons rest on: capped steps, ranks that start afresh, and words for what differs."""

import differences
import pytest
import submissions
import torch
import toys
from torch import optim
from toys import Recipe

from zero_minimal.classroom import guard, messages
from zero_minimal.classroom.lessons import found
from zero_minimal.processes import ranks

LESSONS = found()
GRADED = list(LESSONS.values())


@pytest.mark.parametrize("lesson", GRADED, ids=lambda lesson: lesson.name)
def test_what_caps_a_step_is_one_of_its_checks(lesson):
    text = lesson.tests.read_text()
    wrong = {mistake.check: mistake.step for mistake in submissions.mistakes(lesson).WRONG.values()}
    assert lesson.draw or any(step.core for step in lesson.steps)
    for step in lesson.steps:
        for check, most in step.core.items():
            assert f"def {check}(" in text and wrong[check] == step.number
            assert 0 < most < step.points


def names():
    return hash("a"), list({"a", "b", "c", "d", "e"})


@pytest.mark.thorough
def test_fresh_ranks_have_other_hashes():
    forked = ranks.run(names, 2, device="cpu")
    assert forked[0] == forked[1]
    fresh = ranks.run(names, 2, device="cpu", fresh=True)
    assert fresh[0][0] != fresh[1][0] and fresh[0][1] != fresh[1][1]
    assert fresh == ranks.run(names, 2, device="cpu", fresh=True)


# -------------------------------------------------------------------------------------------------------- words


def test_an_element_has_a_name():
    elements = differences.Elements(toys.build(toys.MLP, 0))
    assert elements[0] == "layers.0.weight[0, 0]" and elements[8] == "layers.0.weight[1, 1]"
    assert elements[7 * 13 + 2] == "layers.0.bias[2]" and elements[10**6] == "padding"


def test_what_is_missing_in_shards_is_named():
    elements = differences.Elements(toys.build(toys.MLP, 0))
    wanted = torch.arange(1.0, 1 + sum(shape.numel() for _, shape in elements.params)).double()
    parts = list(wanted.flip(0).clone().split(200))
    place = int((parts[1] == 93).nonzero())
    parts[1][place] = 93.4
    assert differences.in_shards(parts, wanted, elements, 0.01) == (
        "1 of 294 elements are on no rank, in layers.0.bias. For example layers.0.bias[1] must be 93; the nearest "
        "number that belongs to no element is 93.4, on rank 1")


def test_numbers_of_16_bits_are_recognized():
    values = torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert differences.narrow(values) == ""
    assert differences.narrow(values.half().double()) == "float16"
    assert differences.narrow(values.bfloat16().double()) == "bfloat16"
    assert differences.narrow(values.half().double() / 3, 3) == "float16"


def test_what_was_left_out_of_training_is_named():
    recipe = Recipe(make=toys.MLP, batch=toys.numbers, optimizer=optim.SGD, options=dict(lr=0.1, momentum=0.9), steps=3,
                    clip=0.1)
    for words, change in differences.suspects(recipe):
        left_out = toys.plain(Recipe(**{**vars(recipe), **change}), 2)
        assert differences.suspected(recipe, 2, left_out.parameters, 1e-6) == words
    assert differences.suspected(recipe, 2, toys.plain(recipe, 2).parameters, 1e-6) == ""


def test_only_the_starters_own_holes_are_unwritten():
    def raised(text):
        try:
            raise NotImplementedError(text)
        except NotImplementedError as error:
            return guard.in_words(error, __file__)

    assert raised("step 3: zero_grad").startswith("zero_grad() is not written yet (step 3, line ")
    for text in ("", "later", "step by step: soon"):
        assert raised(text).startswith("a branch is not finished: line ") and "(step ," not in raised(text)


RECEIVES = "    ranks 0, 1 and 2 waited in recv, at line 3 of a.py (broadcast): dist.recv(chunk, 0)"


@pytest.mark.parametrize("places, line, hint", [
    (RECEIVES, "dist.isend(chunk, 1)", "may be dropped"),
    (RECEIVES, "sends = [dist.isend(chunk, 1)]", "may be dropped"),  # nothing waits
    (RECEIVES, "for _ in chunk: last = dist.isend(chunk, 1)\n    last.wait()", "may be dropped"),
    (RECEIVES, "dist.isend(chunk, 1).wait()", "who sends"),
    (RECEIVES, "for send in [dist.isend(chunk, 1)]: send.wait()", "who sends"),
    (RECEIVES, "dist.send(chunk, 1)", "who sends"),
    (RECEIVES, "(", "who sends"),  # saved meanwhile, and no Python any more
    ("    rank 2 waited at line 5 of a.py (broadcast): send.wait()\n    rank 0 had returned", "", "who receives"),
    ("    rank 2 waited in send, at line 5 of a.py (broadcast): dist.send(chunk, 0)", "", "who receives"),
    (f"{RECEIVES}\n    rank 3 waited in send, at line 5 of a.py (broadcast): dist.send(chunk, 0)", "", "for whom"),
])
def test_a_hint_fits_what_waits_and_what_is_written(tmp_path, places, line, hint):
    other = "def exchange():\n    dist.isend(0, 1)\n"
    (tmp_path / "a.py").write_text(f"{other}def broadcast(chunk):\n    {line or 'pass'}\n")
    hints = {"points": 7, "stuck": "for whom?", "unsent": "who sends?", "unheard": "who receives?",
             "dropped": "an isend may be dropped"}
    words = f"the ranks had not come to an end\n{places}"
    assert hint in messages.hint(TimeoutError(), words, hints, str(tmp_path / "a.py"))

