"""The record of what a learner has done: kept whole, never lost, and no trouble for who keeps it."""

import json
import os
import stat
import threading

import pytest

from zero_minimal.programs import record


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO_PROGRESS", str(tmp_path / "mine.json"))
    monkeypatch.setattr(record, "_said", set())
    return tmp_path / "mine.json"


def test_guesses_are_kept_in_the_order_made(file):
    for guess in (24, 24, 12.5):
        record.add_guess("03_gradients", "MB on rank 0?", guess, 12.3, unit="MB")
    record.add_guess("03_gradients", "how many messages?", 4, 4)
    made = record.read()["03_gradients"].guesses
    assert [(guess.guess, guess.measured, guess.unit) for guess in made["MB on rank 0?"]] == [
        (24, 12.3, "MB"), (12.5, 12.3, "MB")]
    assert made["how many messages?"][0].guess == 4
    record.add_guess("03_gradients", "what is 0/0?", float("nan"), 1)
    assert "what is 0/0?" not in record.read()["03_gradients"].guesses


def test_the_best_and_the_last_points_are_kept(file, monkeypatch):
    of, days = {1: 40, 2: 25}, iter(f"2026-11-{day}T10:00:00+00:00" for day in range(10, 30))
    monkeypatch.setattr(record, "_now", lambda: next(days))
    record.add_points("03_gradients", {1: 40, 2: 0}, of)
    record.add_points("03_gradients", {1: 12, 2: 0}, of)
    record.add_points("03_gradients", {2: 25}, of)  # one step alone
    kept = record.read()["03_gradients"]
    one, two = kept.steps[1], kept.steps[2]
    assert (one.best, one.last, two.best, two.last) == (40, 12, 25, 25)
    assert one.best_at < one.last_at < two.last_at
    assert (kept.whole.best, kept.whole.last, kept.whole.of) == (40, 12, 65)  # the step alone is no whole grade
    assert (kept.together.best, kept.together.last, kept.together.of) == (40, 37, 65)  # of both, the last of each
    record.add_points("03_gradients", {1: 10}, {1: 50, 2: 25})  # another course: its points are others
    assert record.read()["03_gradients"].steps[1].best == 10


def test_a_file_of_before_is_read(file):
    """It says nothing of points added up."""
    record.add_points("a lesson", {1: 10}, {1: 10})
    kept = json.loads(file.read_text())
    assert kept["lessons"]["a lesson"]["steps"]["1"]["best"] == 10
    del kept["lessons"]["a lesson"]["together"]
    file.write_text(json.dumps(kept))
    assert record.read()["a lesson"].whole.best == 10 and record.read()["a lesson"].together is None
    record.add_points("a lesson", {1: 5}, {1: 10})
    assert record.read()["a lesson"].whole.best == 10


def test_who_write_at_once_lose_nothing(file):
    """Each thread opens the lock anew, as another process does."""
    threads = [threading.Thread(target=record.add_guess, args=("a lesson", f"question {number}", number, 1))
               for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(record.read()["a lesson"].guesses) == 20
    assert os.listdir(file.parent) == [file.name]  # nothing is left beside it


@pytest.mark.parametrize("text", [
    "", "{", "[]", '{"lessons": {"a": 1}}', '{"lessons": {"a": {"guesses": {}, "steps": {"1": {}}, "whole": null}}}',
    '{"lessons": {"a": {"guesses": {}, "steps": {}, "whole": '
    '{"of": 1, "best": NaN, "best_at": "", "last": 1, "last_at": ""}}}}', "\0"])
def test_a_broken_file_is_set_aside(file, capsys, text):
    file.write_text(text)
    record.add_guess("a lesson", "a question", 1, 2)
    assert "mine.json could not be read. It is kept as mine.json.broken-1" in capsys.readouterr().err
    assert file.with_name("mine.json.broken-1").read_text() == text
    assert list(record.read()) == ["a lesson"]
    file.write_text(text)
    assert record.read() == {} and file.with_name("mine.json.broken-2").exists()


def test_who_cannot_write_says_so_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "_said", set())
    monkeypatch.setenv("ZERO_PROGRESS", str(tmp_path / "no such folder" / "mine.json"))
    for _ in range(2):
        record.add_guess("a lesson", "a question", 1, 2)
        record.add_points("a lesson", {1: 10}, {1: 10})
    assert capsys.readouterr().err.count("your progress is not kept") == 1
    assert record.read() == {}


def test_nothing_is_kept_where_that_is_asked_for(monkeypatch, capsys):
    for named in ("", os.devnull):
        monkeypatch.setenv("ZERO_PROGRESS", named)
        record.add_points("a lesson", {1: 10}, {1: 10})
        assert record.read() == {}
    assert capsys.readouterr().err == ""
    assert not stat.S_ISREG(os.stat(os.devnull).st_mode)


def test_it_lies_at_the_top_of_the_checkout_and_git_ignores_it(monkeypatch):
    monkeypatch.delenv("ZERO_PROGRESS")
    assert record.place() == record.HOUSE / ".progress.json"
    assert ".progress.json*" in (record.HOUSE / ".gitignore").read_text().split()
