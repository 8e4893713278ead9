"""`grade --watch` and `--step`: what is looked at again after a save, what is said, and that nothing is left behind.

How soon it says so is not tested: a test that measures time fails on a machine that has other things to do.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import submissions
from submissions import function

from zero_minimal.classroom import grade as grader
from zero_minimal.classroom import grader_client, sandbox
from zero_minimal.classroom import saved as saving
from zero_minimal.classroom import watch as watching
from zero_minimal.classroom.accounts import Busy, descendants, lives
from zero_minimal.classroom.grades import Grades, gradescope
from zero_minimal.classroom.lessons import HOUSE, found
from zero_minimal.classroom.saved import Place, Saved

pytestmark = pytest.mark.thorough

LESSON = found()["00_collectives"]

# ------------------------------------------------------------------------------------------------- what an editor saves


def aside(file):
    """As some editors save: beside it first, then under its name. For a moment there is none."""
    file.with_name(".mine.swp").write_text("a = 2\n")
    os.rename(file, file.with_name("mine.py~"))


def of_the_same_date(file):
    """As where a file system's clock is coarse: same size, same date."""
    before = file.stat()
    file.write_text("a = 7\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


GONE = [Path.unlink, *[None] * 60]


@pytest.mark.parametrize("actions, taken", [
    ([None, aside, lambda file: os.rename(file.with_name(".mine.swp"), file)], "a = 2\n"),
    (["", None, None, "def f():\n    return (1,", None, None, "def f():\n    return 1\n"], "def f():\n    return 1\n"),
    (["def f(:\n"], "def f(:\n"), (["\n", *[None] * 9], "\n"),  # so they stay
    ([lambda file: os.utime(file), "a = 1\n"], None), (["a = 2\n", "a = 3\n"], "a = 3\n"),
    ([of_the_same_date], "a = 7\n"), ([*GONE, "a = 4\n"], "a = 4\n"),
])
def test_what_has_been_saved_is_taken_once_it_is_whole(tmp_path, monkeypatch, actions, taken):
    """actions: one every tenth of a second, a text to be written or a function; and then nothing for ever."""
    file, said, clock, is_gone = tmp_path / "mine.py", [], [1000.0], actions[:1] == GONE[:1]
    file.write_text("a = 1\n")
    place, actions = Place(file), list(actions)
    place.wait()

    def sleep(seconds):
        clock[0] += seconds
        if clock[0] > 1100:
            raise TimeoutError
        if actions and (action := actions.pop(0)) is not None:
            file.write_text(action) if isinstance(action, str) else action(file)

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock[0], time=lambda: clock[0], sleep=sleep))
    with contextlib.nullcontext() if taken else pytest.raises(TimeoutError):
        assert place.wait(missing=lambda: said.append("gone")).text == taken
    assert said == ["gone"] * is_gone


def test_a_python_file_beside_it_counts(tmp_path):
    (tmp_path / "mine.py").write_text("a = 1\n")
    place = Place(tmp_path / "mine.py")
    place.wait()
    (tmp_path / "helper.py").write_text("b = 1\n")
    assert place.changed()
    place.wait()
    (tmp_path / "notes.txt").write_text("not Python")
    assert not place.changed()


# ------------------------------------------------------------------------------------------------------- what is graded


class Judge(grader_client.GraderClient):
    """Stands in for one that waits. A test passes if the file names it, or its step: "# 1 2a" """

    def __init__(self, lesson, file):
        self.tests = {f"{step.number}{name}": {"step": step.number, "check": name, "points": points,
                                               "message": f"no {step.number}{name}: {step.title}\nand more"}
                      for step in lesson.steps for name, points in (("a", 5), ("b", step.points - 5))}
        self.ran = []

    def is_ready(self):
        return True

    @contextlib.contextmanager
    def begin(self, source, tests, seconds):
        self.ran.append([])
        yield SimpleNamespace(reports=lambda tick: self.of_a_run(source.split(), tests))

    def of_a_run(self, right, tests):
        for test in tests:
            self.ran[-1].append(test)
            passed = test in right or test[0] in right
            for report in ({"begins": test}, {"test": test, "passed": passed,
                                              "message": "" if passed else self.tests[test]["message"]}):
                yield b""
                yield json.dumps(report).encode()
        yield b'{"end": true}'


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Its `saved(text)` is what is said after this was saved, and which tests ran, by judge."""
    monkeypatch.setattr(watching, "GraderClient", Judge)
    handed = []
    watch = watching.Watch(LESSON, tmp_path / "mine.py", Grades(LESSON), lambda steps: handed.append(
        [step.number for step in steps]))
    watch.handed, watch.place.changed = handed, lambda: False
    return watch


@pytest.fixture
def saved(watch, capsys):
    def saved(text):
        watch.client.ran = []
        watch.look_at(Saved(f"# {text}", text))
        return capsys.readouterr().out, watch.client.ran

    return saved


def test_what_is_right_is_looked_at_again_at_the_end(watch, saved):
    said, ran = saved("1 3 4 5")
    assert ran == [[f"{number}{name}" for number in range(1, 6) for name in "ab"]]
    assert "step 2  is not right yet   reduce-scatter\n        no 2a: reduce-scatter\n        and more\n" in said
    assert "        and more\n        0 of 30 points\n" in said
    assert "step 3   20 of 20" in said and said.endswith("70 of 100 points; next is step 2, reduce-scatter\n")
    said, ran = saved("2 3 5")
    assert ran == [["2a", "2b"], ["1a", "1b", "3a", "3b", "4a", "4b", "5a", "5b"]]
    assert "checking steps 1, 3, 4 and 5 again, because the file has changed" in said
    assert "step 1  is not right any more" in said
    assert "full marks" not in said and "step 3" not in said  # as right as before
    assert said.endswith("70 of 100 points; next is step 1, exchange with both neighbours at once\n")
    said, ran = saved("1 2 3 4 5")
    assert [tests[0] for tests in ran] == ["1a", "2a"] and said.endswith("100 of 100 points: full marks\n")
    assert watch.handed == [[1, 2, 3, 4, 5], [2], [1, 2, 3, 4, 5], [1, 4], [1, 2, 3, 4, 5]]
    said, ran = saved("1 2 3 4 5 again")  # after full marks everything is looked at
    assert ran == [[f"{number}{name}" for number in range(1, 6) for name in "ab"]]
    assert said == "\n100 of 100 points: full marks\n"


def test_the_check_that_failed_last_comes_first(saved):
    saved("1 2a 5a")
    said, ran = saved("1 2a")
    assert ran == [["2b", "2a", "3a", "3b", "4a", "4b", "5b", "5a"]]
    assert said.index("no 2b") < said.index("5 of 30 points") and "steps 3 and 4 as before" in said
    assert "step 5    0 of 20" in said and "no 5b: broadcast" in said
    assert said.count("and more") == 1  # of the other steps a line


def test_a_failure_is_told_before_its_step_is_through_and_a_new_save_ends_what_is_under_way(watch, saved):
    watch.place.changed = lambda: watch.client.ran[-1] == ["1a", "1b"]
    said, ran = saved("")
    assert "step 1  is not right yet" in said and "no 1a" in said and "of 15" not in said and ran == [["1a", "1b"]]
    watch.place.changed = lambda: 4 in [number for number, *_ in watch.grades.results]
    said, ran = saved("1 2 3")
    assert ran[-1][-1] == "4a" and "of 100 points" not in said and watch.handed == [[1, 2, 3]]
    watch.place.changed = lambda: False
    said, ran = saved("1 2 3 4 5")
    assert [tests[0] for tests in ran] == ["4a", "1a"] and "full marks" in said


def test_a_file_that_is_no_python_says_so_and_costs_nothing(watch, saved, capsys):
    saved("1 2")
    watch.look_at(Saved("def f(:\n", "other"))
    assert "the file is not Python, line 1" in capsys.readouterr().out and len(watch.client.ran) == 1
    assert watch.grades.score == 45
    of_a_run = watch.client.of_a_run
    watch.client.of_a_run = lambda *_: [*of_a_run(*_)][:10] + [b'{"busy": "the machine is too busy"}']
    said, ran = saved("1 2 3")
    assert said.endswith("the machine is too busy\n") and "step 3   20 of 20" in said
    assert watch.handed == [[1, 2, 3, 4, 5], [3]] and watch.grades.score == 65


def test_results_say_what_was_looked_at(watch, saved):
    saved("1 2")
    assert "output" not in gradescope(watch.grades, 1.0)
    saved("1 2 3")
    assert gradescope(watch.grades, 1.0)["output"] == (
        "Not the whole of this file: the points of steps 1 and 2 are of an earlier text.")


# ---------------------------------------------------------------------------------------------------------- the command


def test_one_step_alone(tmp_path):
    """Not written, so that no rank starts; and a wrong number."""
    file = LESSON.starter
    code, printed = submissions.grade(file, "--step", "2", "--json", tmp_path / "results.json")
    assert code == 1 and re.findall(r"step \d  .*", printed) == ["step 2    0 of 30   reduce-scatter"]
    assert "reduce_scatter() is not written yet (step 2" in printed
    assert "0 of 30 points" in printed and "steps 1, 3, 4 and 5 were not looked at" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(test["number"], test["max_score"]) for test in results["tests"]] == [("2", 30)]
    assert results["output"] == "Not the whole of this file: steps 1, 3, 4 and 5 were not looked at."
    for number in ("9", "two"):
        code, printed = submissions.grade(file, "--lesson", LESSON.name, "--step", number)
        assert code == 2 and f"there is no step {number}: lesson 00_collectives has steps 1 to 5" in printed


def test_only_a_lessons_own_file_is_the_learners_progress(tmp_path, monkeypatch, capsys):
    def graded(lesson, file, grades, show):
        for step in grades.steps:
            grades.add(step.number, "all", step.points, True)

    kept, other = tmp_path / "kept.json", tmp_path / "assignment.py"
    monkeypatch.setenv("ZERO_PROGRESS", str(kept))
    monkeypatch.setattr(grader, "grade", graded)
    other.write_text(LESSON.starter.read_text())
    assert grader.main([str(other), "--lesson", LESSON.name]) == 0 and not kept.exists()
    (tmp_path / "link.py").symlink_to(LESSON.starter)
    assert grader.main([str(tmp_path / "link.py"), "--lesson", LESSON.name, "--step", "2"]) == 0
    lessons = json.loads(kept.read_text())["lessons"]
    assert list(lessons) == [LESSON.name] and list(lessons[LESSON.name]["steps"]) == ["2"]
    assert lessons[LESSON.name]["whole"] is None
    assert grader.main([str(LESSON.starter)]) == 0
    assert json.loads(kept.read_text())["lessons"][LESSON.name]["whole"]["best"] == 100


def until(condition, seconds=20, said=lambda: ""):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, said()
        time.sleep(0.05)


class Watched:
    """A watch in a process of its own: what it prints, and what it leaves behind in `temporary`."""

    def __init__(self, folder, *arguments):
        self.temporary, self.printed, self.at = folder / "temporary", folder / "printed", 0
        self.temporary.mkdir()
        for path in (folder, self.temporary):
            path.chmod(0o711)  # ranks may be nobody's
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where this runs in the background, ignored
        with self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zero_minimal", "grade", *map(str, arguments), "--watch"], cwd=HOUSE,
                stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary), "ZERO_PROGRESS": str(folder / "kept.json")})
        signal.signal(signal.SIGINT, before)

    def said(self):
        return self.printed.read_text()[self.at:]

    def says(self, words):
        until(lambda: words in self.said(), 80, self.said)
        self.at += self.said().index(words) + len(words)

    def ends(self, end):
        """No process and no folder stays. Returns the exit code."""
        below = descendants(self.process.pid)
        end()
        code = self.process.wait(30)
        until(lambda: not any(map(lives, below)) and not any(self.temporary.iterdir()))
        return code


@pytest.fixture
def started():
    """started(*arguments): a watch, that ends with the test."""
    watches = []
    with tempfile.TemporaryDirectory() as folder:
        yield lambda *arguments: watches.append(Watched(Path(folder), *arguments)) or watches[-1]
        for watch in watches:
            watch.process.kill()
            watch.process.wait()


def test_a_slow_start_is_the_machines(monkeypatch):
    monkeypatch.setattr(grader_client, "START", 0.01)
    with contextlib.closing(grader_client.GraderClient(LESSON, LESSON.starter)) as client, pytest.raises(Busy):
        client.wait_until_ready()


@pytest.mark.timeout(300)  # ranks start five times
def test_the_whole_of_a_watch(tmp_path, started):
    """Not written, no Python, what is denied, a loop, a right file, Ctrl-C."""
    file = tmp_path / "assignment.py"
    file.write_text(LESSON.starter.read_text())
    watched = started(file, "--lesson", LESSON.name, "--step", "1")
    watched.says("exchange() is not written yet (step 1")
    watched.says("0 of 15 points; steps 2 to 5 were not looked at")
    file.write_text("def exchange(:\n")
    watched.says("the file is not Python, line 1")
    if sandbox.holds():
        file.write_text("import torch\ntorch.from_file('{}', size=9, dtype=torch.uint8)\n{}".format(
            HOUSE / "zero_minimal/core/ring.py", submissions.spliced(LESSON, {})))
        watched.says("Permission denied")
    file.write_text(submissions.spliced(LESSON, {"exchange": function("def exchange(*_):", "while True:\n    pass")}))
    watched.says("saved, ")
    time.sleep(1.5)  # until ranks are in the loop; if they are not yet, that is right too
    (tmp_path / "beside").write_text(submissions.spliced(LESSON, {}))
    os.rename(tmp_path / "beside", file)
    watched.says("15 of 15 points")
    assert watched.ends(lambda: watched.process.send_signal(signal.SIGINT)) == 130
    assert "Traceback" not in watched.said() and "stopped" not in watched.said()


def test_a_watch_that_is_killed_leaves_nothing(started):
    """As when its terminal is closed."""
    watched = started(LESSON.starter, "--step", "1")
    watched.says("0 of 15 points")
    kept = watched.printed.with_name("kept.json")
    until(kept.exists)  # which comes after the words
    watched.ends(watched.process.kill)
    assert "00_collectives" in kept.read_text()
