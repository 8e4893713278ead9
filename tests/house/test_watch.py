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
import threading
import time
from pathlib import Path

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
from zero_minimal.classroom.watch import Watch

pytestmark = pytest.mark.thorough

LESSON = found()["00_collectives"]
STEPS = LESSON.steps


# ------------------------------------------------------------------------------------------------- what an editor saves


class Editor:
    """Stands in for the clock: whoever sleeps lets the next of these actions happen, and then nothing for ever."""

    def __init__(self, *actions):
        self.now, self.actions = 1000.0, list(actions)
        self.monotonic = self.time = lambda: self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.actions:
            (self.actions.pop(0) or (lambda: None))()
        elif self.now > 1100:
            raise TimeoutError


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text("a = 1\n")
    place = Place(tmp_path / "mine.py")
    place.wait()
    return place


def waits(place, monkeypatch, *actions):
    """What is there after these actions, one every tenth of a second; TimeoutError if nothing new is."""
    monkeypatch.setattr(saving, "time", Editor(*actions))
    return place.wait().text


def test_a_file_that_is_renamed_into_place_is_seen(place, monkeypatch):
    def beside():
        (place.file.parent / ".mine.swp").write_text("a = 2\n")
        os.rename(place.file, place.file.with_name("mine.py~"))  # for a moment there is none

    def renamed():
        os.rename(place.file.parent / ".mine.swp", place.file)

    assert waits(place, monkeypatch, None, beside, renamed) == "a = 2\n"


def test_half_a_file_is_waited_for(place, monkeypatch):
    def write(text):
        return lambda: place.file.write_text(text)

    assert waits(place, monkeypatch, write(""), None, None, write("def f():\n    return (1,"), None, None,
                 write("def f():\n    return (1, 2)\n")) == "def f():\n    return (1, 2)\n"
    assert waits(place, monkeypatch, write("def f(:\n")) == "def f(:\n"  # so it stays
    assert waits(place, monkeypatch, write("\n"), *[None] * 9) == "\n"


def test_what_is_saved_without_a_change_is_nothing_new(place, monkeypatch):
    with pytest.raises(TimeoutError):
        waits(place, monkeypatch, lambda: os.utime(place.file), lambda: place.file.write_text("a = 1\n"))
    assert waits(place, monkeypatch, lambda: place.file.write_text("a = 2\n"),
                 lambda: place.file.write_text("a = 3\n")) == "a = 3\n"  # saved twice


def test_the_dates_of_a_file_need_not_change(place, monkeypatch):
    """As where a file system's clock is coarse: same size, same date."""
    before = place.file.stat()

    def save():
        place.file.write_text("a = 7\n")
        os.utime(place.file, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert waits(place, monkeypatch, save) == "a = 7\n"


def test_a_python_file_beside_it_counts(place, monkeypatch):
    helper = place.file.with_name("helper.py")
    waits(place, monkeypatch, lambda: helper.write_text("b = 1\n"))
    assert not place.changed()
    helper.write_text("b = 2\n")
    assert place.changed()
    place.wait()
    place.file.with_name("notes.txt").write_text("not Python")
    assert not place.changed()


def test_a_file_that_is_gone_is_said_once(place, monkeypatch):
    said, text = [], place.file.read_text()
    monkeypatch.setattr(saving, "time", Editor(place.file.unlink, *[None] * 60,
                                               lambda: place.file.write_text(text + "\n")))
    assert place.wait(missing=lambda: said.append("gone")).text == text + "\n"
    assert said == ["gone"]


# ------------------------------------------------------------------------------------------------------- what is graded


class Judge:
    """Stands in for one that waits. A test passes if the file names it, or its step: "# 1 2a" """

    def __init__(self, *_):
        self.tests = {f"{step.number}{name}": {"step": step.number, "check": name, "points": points,
                                               "message": f"no {step.number}{name}: {step.title}\nand more"}
                      for step in STEPS for name, points in (("a", 5), ("b", step.points - 5))}
        self.ran, self.closed = [], 0

    def wait_until_ready(self):
        pass

    def lives(self):
        return True

    @contextlib.contextmanager
    def begin(self, source, tests, seconds, tick):
        self.source, self.asked = source.split(), tests
        self.ran.append([])
        yield self

    def lines(self):
        for test in self.asked:
            self.ran[-1].append(test)
            passed = test in self.source or test[0] in self.source
            yield b""
            yield json.dumps({"begins": test}).encode()
            message = "" if passed else self.tests[test]["message"]
            yield json.dumps({"test": test, "passed": passed, "message": message}).encode()
        yield b'{"end": true}'


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "GraderClient", Judge)
    handed = []
    watch = Watch(LESSON, tmp_path / "mine.py", Grades(LESSON), lambda steps: handed.append([s.number for s in steps]))
    watch.handed, watch.new = handed, []
    watch.place.changed = lambda: bool(watch.new and watch.new.pop(0))
    return watch


def saved(watch, capsys, text):
    """What is said after this was saved, and which tests ran, by judge."""
    watch.standby.ran.clear()
    watch.look_at(Saved(f"# {text}", text))
    return capsys.readouterr().out, watch.standby.ran


def test_what_is_right_is_looked_at_again_at_the_end(watch, capsys):
    said, ran = saved(watch, capsys, "1 3 4 5")
    assert ran == [[f"{number}{name}" for number in range(1, 6) for name in "ab"]]
    assert "step 2  is not right yet   reduce-scatter\n        no 2a: reduce-scatter\n        and more\n" in said
    assert "        and more\n        0 of 30 points\n" in said
    assert "step 3   20 of 20" in said and said.endswith("70 of 100 points; next is step 2, reduce-scatter\n")
    said, ran = saved(watch, capsys, "2 3 5")
    assert ran == [["2a", "2b"], ["1a", "1b", "3a", "3b", "4a", "4b", "5a", "5b"]]
    assert "checking steps 1, 3, 4 and 5 again, because the file has changed" in said
    assert "step 1  is not right any more" in said
    assert "full marks" not in said and "step 3" not in said  # as right as before
    assert said.endswith("70 of 100 points; next is step 1, exchange with both neighbours at once\n")
    said, ran = saved(watch, capsys, "1 2 3 4 5")
    assert [tests[0] for tests in ran] == ["1a", "2a"] and said.endswith("100 of 100 points: full marks\n")
    assert watch.handed == [[1, 2, 3, 4, 5], [2], [1, 2, 3, 4, 5], [1, 4], [1, 2, 3, 4, 5]]
    said, ran = saved(watch, capsys, "1 2 3 4 5 again")  # after full marks everything is looked at
    assert ran == [[f"{number}{name}" for number in range(1, 6) for name in "ab"]]
    assert said == "\n100 of 100 points: full marks\n"


def test_the_check_that_failed_last_comes_first(watch, capsys):
    saved(watch, capsys, "1 2a 5a")
    said, ran = saved(watch, capsys, "1 2a")
    assert ran == [["2b", "2a", "3a", "3b", "4a", "4b", "5b", "5a"]]
    assert said.index("no 2b") < said.index("5 of 30 points") and "steps 3 and 4 as before" in said
    assert "step 5    0 of 20" in said and "no 5b: broadcast" in said
    assert said.count("and more") == 1  # of the other steps a line


def test_a_failure_is_told_before_its_step_is_through(watch, capsys):
    class Stop(Exception):
        pass

    def changed():
        if watch.standby.ran[-1] == ["1a", "1b"]:
            raise Stop
        return False

    watch.place.changed = changed
    with pytest.raises(Stop):
        saved(watch, capsys, "")
    assert "step 1  is not right yet" in (said := capsys.readouterr().out) and "no 1a" in said and "of 15" not in said


def test_a_new_save_ends_what_is_under_way(watch, capsys):
    saved(watch, capsys, "1 2")
    watch.new = [False] * 7 + [True]  # in the fourth step
    said, ran = saved(watch, capsys, "1 2 3")
    assert ran == [["3a", "3b", "4a"]] and "of 100 points" not in said
    assert watch.handed[-1] == [3]
    said, ran = saved(watch, capsys, "1 2 3 4 5")
    assert [tests[0] for tests in ran] == ["4a", "1a"] and "full marks" in said


def test_a_file_that_is_no_python_says_so_and_costs_nothing(watch, capsys):
    saved(watch, capsys, "1 2")
    watch.standby.ran.clear()
    watch.look_at(Saved("def f(:\n", "other"))
    assert "the file is not Python, line 1" in capsys.readouterr().out and watch.standby.ran == []
    assert watch.grades.score == 45


def test_results_say_what_was_looked_at(watch, capsys):
    saved(watch, capsys, "1 2")
    assert "output" not in gradescope(watch.grades, 1.0)
    saved(watch, capsys, "1 2 3")
    assert gradescope(watch.grades, 1.0)["output"] == (
        "Not the whole of this file: the points of steps 1 and 2 are of an earlier text.")
    results = gradescope(Grades(LESSON, STEPS[1:2]), 1.0)
    assert results["output"] == "Not the whole of this file: steps 1, 3, 4 and 5 were not looked at."
    assert [test["number"] for test in results["tests"]] == ["2"]


# ---------------------------------------------------------------------------------------------------------- the command


def test_one_step_alone(tmp_path):
    """Not written, so that no rank starts; and a wrong number."""
    file = LESSON.starter
    code, printed = submissions.grade(file, "--step", "2", "--json", tmp_path / "results.json")
    assert code == 1 and re.findall(r"step \d  .*", printed) == ["step 2    0 of 30   reduce-scatter"]
    assert "reduce_scatter() is not written yet (step 2" in printed
    assert "0 of 30 points" in printed and "steps 1, 3, 4 and 5 were not looked at" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert [test["max_score"] for test in results["tests"]] == [30]
    assert "steps 1, 3, 4 and 5 were not looked at" in results["output"]
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


class Watched:
    """A watch in a process of its own, and what it prints."""

    def __init__(self, *arguments, **environment):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where this runs in the background, ignored
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zero_minimal", "grade", *map(str, arguments), "--watch"], cwd=HOUSE, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, bufsize=1,
            env={**os.environ, **environment})
        signal.signal(signal.SIGINT, before)
        self.said, self.news = "", threading.Condition()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        with self.process.stdout as printed:
            for line in printed:
                with self.news:
                    self.said += line
                    self.news.notify()

    def says(self, words, seconds=80):
        with self.news:
            assert self.news.wait_for(lambda: words in self.said, seconds), self.said
            self.said = self.said.split(words, 1)[1]


@pytest.fixture
def started():
    """started(*arguments, **environment): a watch, that ends with the test."""
    watches = []

    def start(*arguments, **environment):
        watches.append(Watched(*arguments, **environment))
        return watches[-1]

    yield start
    for watch in watches:
        watch.process.kill()
        watch.process.wait()
        watch.reader.join()


@pytest.fixture
def temporary():
    """A folder for temporary files that is open to all, as ranks may be nobody's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


def test_a_slow_start_is_the_machines(monkeypatch):
    monkeypatch.setattr(grader_client, "START", 0.01)
    with contextlib.closing(grader_client.GraderClient(LESSON, LESSON.starter)) as client, pytest.raises(Busy):
        client.wait_until_ready()


@pytest.mark.timeout(300)  # ranks start five times
def test_the_whole_of_a_watch(tmp_path, temporary, started):
    """Not written, no Python, what is denied, a loop, a right file, Ctrl-C; and no process and no folder stays."""
    file = tmp_path / "assignment.py"
    file.write_text(LESSON.starter.read_text())
    watched = started(file, "--lesson", LESSON.name, "--step", "1", TMPDIR=str(temporary))
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
    below = descendants(watched.process.pid)
    watched.process.send_signal(signal.SIGINT)
    assert watched.process.wait(30) == 130
    watched.reader.join()
    assert "Traceback" not in watched.said and "stopped" not in watched.said
    until = time.monotonic() + 10
    while any(map(lives, below)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(filter(lives, below)) and list(temporary.iterdir()) == []


def test_a_watch_that_is_killed_leaves_nothing(tmp_path, temporary, started):
    """As when its terminal is closed."""
    watched = started(LESSON.starter, "--step", "1", TMPDIR=str(temporary),
                      ZERO_PROGRESS=str(tmp_path / "kept.json"))
    watched.says("0 of 15 points")
    kept = tmp_path / "kept.json"
    until = time.monotonic() + 20
    while not kept.exists() and time.monotonic() < until:  # which comes after the words
        time.sleep(0.05)
    below = descendants(watched.process.pid)
    watched.process.kill()
    watched.process.wait()
    until = time.monotonic() + 20
    while (any(map(lives, below)) or any(temporary.iterdir())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not list(filter(lives, below)) and list(temporary.iterdir()) == []
    assert "00_collectives" in kept.read_text()
