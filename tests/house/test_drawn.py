"""Drawn steps: a name draws the same ones everywhere, one of each group at least, and no name draws none."""

import dataclasses
import json

import pytest

from zero_minimal.classroom import course, drawn, lessons
from zero_minimal.classroom import grade as grader
from zero_minimal.programs import record

LESSONS = {name: lesson for name, lesson in lessons.found().items() if lesson.draw}
LESSON = next(iter(LESSONS.values()))
ADA = 'NAME = "Ada Lovelace"\n'


def numbers(name, lesson=LESSON):
    return [step.number for step in drawn.as_drawn(lesson, f"NAME = {name!r}\n").steps]


def test_each_group_is_drawn_and_each_step_by_somebody():
    drawn_by_somebody = set()
    for number in range(300):
        mine = drawn.as_drawn(LESSON, f'NAME = "learner {number}"').steps
        assert len(mine) == LESSON.draw and {step.group for step in mine} == set(LESSON.groups)
        assert list(mine) == sorted(mine, key=lambda step: step.number)
        drawn_by_somebody |= {step.number for step in mine}
    assert drawn_by_somebody == {step.number for step in LESSON.steps}


def test_a_name_draws_the_same_on_every_machine():
    assert drawn.seed("ada lovelace", "7") == 175362682339923
    assert numbers("Ada Lovelace") == numbers("  ada   LOVELACE ") != numbers("Grace Hopper")


@pytest.mark.parametrize("text", ["", 'NAME = ""\n', "NAME = 3\n", "NAME = input()\n", "def f(:\n", 'NAME = "  "\n'])
def test_without_a_name_nothing_is_drawn(text):
    (only,) = drawn.as_drawn(LESSON, text).steps
    assert only.number == 0 and only.points == LESSON.points
    assert "NAME at the top of the file is empty" in drawn.nameless(LESSON, text)
    assert drawn.nameless(drawn.as_drawn(LESSON, text), text) == drawn.nameless(LESSON, text)
    assert drawn.name_of(text) == ""


def test_a_lesson_without_a_draw_stays_as_it_is():
    other = lessons.found()["03_gradients"]
    assert drawn.as_drawn(other, "") is other and drawn.nameless(other, "") == drawn.in_writing(other, "") == ""


def test_written_answers_are_counted_and_left_to_the_teacher():
    words = " ".join(["word"] * drawn.ENOUGH)
    said = drawn.in_writing(LESSON, f"{LESSON.written[0]} = {words!r}\n{LESSON.written[1]} = 'Short.'\n")
    assert said.startswith("1 of 3 written answers are there") and "does not read them" in said
    assert f"gives up to {100 - LESSON.points:g} points" in said and said.endswith(f"{', '.join(LESSON.written[1:])}.")
    every = "\n".join(f"{name} = {f'{name} {words}'!r}" for name in LESSON.written)
    assert "Still to write" not in drawn.in_writing(LESSON, every)


def test_an_untouched_file_asks_for_the_name(capsys, tmp_path):
    assert grader.main([str(LESSON.starter), "--json", str(tmp_path / "results.json")]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"0 of {LESSON.points:g} points" in printed and printed.count("NAME at the top of the file is empty") == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == 0 and [test["max_score"] for test in results["tests"]] == [LESSON.points]


def test_to_watch_a_file_without_a_name_is_a_wrong_call(capsys):
    with pytest.raises(SystemExit, match="2"):
        grader.main([str(LESSON.starter), "--watch"])
    assert "NAME at the top" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_starter_has_no_points_for_whoever_names_it(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(LESSON.starter.read_text().replace('NAME = ""', ADA.strip()))
    assert grader.main([str(file), "--lesson", LESSON.name]) == 1
    printed = capsys.readouterr().out
    assert f"\n0 of {LESSON.points:g} points" in printed and printed.count("is not written yet (card ") == LESSON.draw
    assert "0 of 3 written answers are there" in printed and "were not looked at" not in printed


def test_progress_shows_the_learners_own_steps(monkeypatch, tmp_path):
    folder = tmp_path / LESSON.name
    folder.mkdir()
    (folder / "lesson.toml").write_text((LESSON.folder / "lesson.toml").read_text())
    (folder / "assignment.py").write_text(ADA)
    monkeypatch.setattr(record, "read", dict)
    (entry,) = course.course(tmp_path)
    assert [step.number for step in entry.lesson.steps] == numbers("Ada Lovelace")


def test_a_step_that_was_not_drawn_is_looked_at_and_not_kept(monkeypatch, capsys):
    kept = []
    monkeypatch.setattr(record, "add_points", lambda *said: kept.append(said))
    monkeypatch.setattr(grader, "grade", lambda *given, **options: None)
    monkeypatch.setattr(grader, "found", lambda: {LESSON.name: dataclasses.replace(LESSON)})
    other = next(step.number for step in LESSON.steps if step.number not in numbers("Ada Lovelace"))
    monkeypatch.setattr(grader, "text_of", lambda file: ADA)
    grader.main([str(LESSON.starter), "--step", str(other)])
    assert "of 10 points" in capsys.readouterr().out
    assert kept[0][1] == {} and set(kept[0][2]) == set(numbers("Ada Lovelace"))


def test_one_text_does_not_answer_three_questions():
    filler = " ".join(["filler"] * drawn.ENOUGH)
    texts = [filler.upper(), filler, f" {filler}\n"]
    same = "\n".join(f"{name} = {text!r}" for name, text in zip(LESSON.written, texts, strict=True))
    said = drawn.in_writing(LESSON, same)
    assert said.startswith("0 of 3 written answers are there") and "Still to write" not in said
    assert said.endswith(f"One text stands in {' and '.join(LESSON.written)}, and does not count: each asks something "
                         "else.")
