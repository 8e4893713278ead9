"""Nobody gets points without the work: each cheat earns nothing for what it cheats, and leaves nothing behind."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import checks
import pytest
import submissions
import torch
import toys

sys.path.insert(0, str(Path(__file__).parent))

import cheats
from test_classroom import COLLECTIVES, GRADIENTS, messages, on_linux  # noqa: F401  (messages is a fixture)

from zero_minimal.classroom import accounts, grader_client, results, sandbox
from zero_minimal.classroom import grade as grader
from zero_minimal.classroom.accounts import descendants, lives
from zero_minimal.classroom.grader_client import Reported
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.lessons import HOUSE
from zero_minimal.classroom.submission import syntax_error, text_of

pytestmark = pytest.mark.thorough

fenced = pytest.mark.skipif(not sandbox.holds(), reason="needs a kernel that can fence a submission in")
CHEATS = [pytest.param(lesson, cheat, id=name, marks=pytest.mark.thorough if number % 6 else ()) for lesson, all_of in (
    (GRADIENTS, cheats.IN_LESSON_3), (COLLECTIVES, cheats.IN_LESSON_0))
    for number, (name, cheat) in enumerate(all_of.items())]


@fenced
@pytest.mark.parametrize("lesson, cheat", CHEATS)
def test_a_cheat_earns_nothing(messages, lesson, cheat):  # noqa: F811
    told = messages(lesson, submissions.spliced(lesson, cheat.code, cheat.top), cheat.check, cheat.world_size or 3)
    assert told, f"{cheat.check} let it through"
    assert re.search(cheat.message, told[0]), f"it said: {told[0]}"
    assert not Path("/tmp/unpickled").exists() and not (HOUSE / "results.json").exists()
    assert not (HOUSE / "tests/checks.py").stat().st_mode & 0o002


def test_results_are_data():
    value = {"a": [1, 2.5, None, True, "x"], 3: (torch.arange(6).view(2, 3), torch.tensor(1.5), torch.empty(0, 4)),
             "call": checks.Call("send", 8, 1, 0.5), "run": toys.Run([1.0], [], [torch.tensor([True, False])])}
    back = results.decode(results.encode(value))
    assert str(back) == str(value) and type(back["call"]) is checks.Call and type(back["run"]) is toys.Run
    assert back[3][0].dtype == torch.int64
    with pytest.raises(TypeError, match="the submission gave a object"):
        results.encode(object())


@pytest.mark.parametrize("data", [
    b"", b"garbage", b"[1]", b'["os.system", "x"]', b'["checks.time", 1]', b'["tensor", 9]',
    b'["tensor", "save", [1], ""]', b'["tensor", "float32", [-1], ""]', b'["tensor", "float32", [2], "eHg="]',
    b'["tensor", "float32", [2], ""]', b"[" * 10**5, b'["checks.Call", 1]', b"1\nrest"])
def test_what_no_rank_sends_is_refused(data):
    with pytest.raises(ValueError, match="answered with what no rank sends"):
        results.decode(data)


TESTS = {"a": {"step": 1, "points": 40, "check": "a"}}


@pytest.mark.parametrize("lines, says", [
    ([b"rubbish"], "is no report"), ([b"[]"], "is no report"), ([b'{"begins": "b"}'], "is no report"),
    ([b'{"test": "b", "passed": true, "message": ""}'], "not known, or a second time"),
    ([b'{"test": "a", "passed": true, "message": ""}'] * 2, "not known, or a second time"),
])
def test_each_test_is_known_and_taken_once(lines, says):
    grades = Grades(GRADIENTS)
    reported = Reported(GRADIENTS, grades, whole=False)
    reported.announced(TESTS)
    with pytest.raises(RuntimeError, match=says):
        for line in lines:
            reported.take(line)
    assert grades.score == 40 * (len(lines) - 1)


def test_tests_that_are_worth_more_are_refused():
    with pytest.raises(RuntimeError, match="the tests of the steps are worth"):
        Reported(GRADIENTS, Grades(GRADIENTS), whole=True).announced(TESTS)


# ------------------------------------------------------------------------------------------------------------- hanging


def judged(lesson, file, only, what):
    """Grades of a file; what(process of the judge) is called once a test is under way. Its parent is the process that
    waits, and has the fork server beside it."""
    grades = Grades(lesson)
    grading = threading.Thread(target=grader.grade, args=(lesson, file, grades), kwargs=dict(only=only))
    before = set(descendants(os.getpid()))
    grading.start()
    judge = None
    while judge is None and grading.is_alive():
        time.sleep(0.05)
        below = set(descendants(os.getpid())) - before
        if len(below) > 3:  # what waits, a fork server, a judge, and a rank
            judge = next((process for process in below if b"pytest" in Path(f"/proc/{process}/cmdline").read_bytes()
                          and not descendants(process)), None)
    what(judge)
    grading.join(120)
    assert not grading.is_alive()
    assert not [process for process in set(descendants(os.getpid())) - before if lives(process)]
    return grades


@on_linux
@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP))
def test_tests_go_on_when_the_judge_is_gone_or_stands_still(tmp_path, monkeypatch, number):
    monkeypatch.setattr(grader_client, "SILENCE", 60.0 if number == signal.SIGKILL else 30.0)
    file = tmp_path / "mine.py"
    file.write_text(submissions.spliced(COLLECTIVES, {}))
    grades = judged(COLLECTIVES, file, "in_a_group", lambda judge: os.kill(judge, number))
    told = [message for *_, message in grades.results if message]
    # which of the two it is depends on the instant: the judge is missed, or what it was about to say
    words = {signal.SIGSTOP: "this test did not come to an end",
             signal.SIGKILL: r"brought down while this test ran \(SIGKILL\)"}[number]
    assert len(told) == 1 and re.search(f"{words}|a process of the grader's was killed while this test ran", told[0])
    assert len(grades.results) == 5


@on_linux
@pytest.mark.timeout(400)  # 40 s on a quiet machine: time in which others have the processors does not count
def test_a_loop_costs_two_time_outs_a_step(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("while True:\n    try:\n        print('again' * 99)\n    except BaseException:\n        pass\n")
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "zero_minimal", "grade", file, "--lesson", "03_gradients", "--json",
               tmp_path / "results.json"]
    done = subprocess.run(list(map(str, command)), cwd=HOUSE, text=True, capture_output=True)
    assert done.returncode == 1 and "0 of 100 points" in done.stdout and "Traceback" not in done.stderr
    assert "line " in done.stdout and json.loads((tmp_path / "results.json").read_text())["score"] == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 150  # of two ranks, or more: 70 are usual


# --------------------------------------------------------------------------------------------------- right all the same


@pytest.mark.parametrize("data, says", [
    ("x = 'größer'".encode("utf-8-sig"), "x = 'größer'"), ("x = 'größer'".encode("latin-1"), "x = 'größer'"),
    (b"# -*- coding: latin-1 -*-\nx = '\xf6'\r\n", "# -*- coding: latin-1 -*-\nx = 'ö'\n")])
def test_a_file_in_any_usual_encoding_is_read(tmp_path, data, says):
    (tmp_path / "mine.py").write_bytes(data)
    assert text_of(tmp_path / "mine.py") == says
    assert syntax_error(text_of(tmp_path / "mine.py")) == ""


def test_ranks_that_are_nobodys_can_reach_their_folder(monkeypatch):
    """It lies in the judge's own, which is closed to all others unless it is opened."""
    environments = []
    monkeypatch.setattr(grader_client.subprocess, "Popen", lambda *_, env, **__: environments.append(env))
    client = grader_client.GraderClient(COLLECTIVES, COLLECTIVES.starter)
    assert os.stat(environments[0]["TMPDIR"]).st_mode & 0o077 == 0o011
    client.folder.cleanup()
    client.output.close()
    client.control.close()


@on_linux
def test_a_file_beside_it_and_threads_may_help(tmp_path):
    """A helper file can be imported; what is sent from a thread counts as sent."""
    lesson = submissions.mistakes(COLLECTIVES)
    (tmp_path / "helper.py").write_text(
        "import threading\n\ndef in_a_thread(function, *args):\n"
        "    thread = threading.Thread(target=function, args=args)\n    thread.start()\n    return thread\n")
    right = "_global(rank + 1, group)"
    code = lesson.exchange(send=f"sending = in_a_thread(dist.send, outgoing, {right}, group)", wait="sending.join()")
    file = tmp_path / "mine.py"
    file.write_text(submissions.spliced(COLLECTIVES, code, top="from helper import in_a_thread\n"))
    grades = Grades(COLLECTIVES)
    grader.grade(COLLECTIVES, file, grades, only="exchange|sends_one")
    assert [message for *_, message in grades.results if message] == []


def test_a_process_that_ends_holds_nothing(monkeypatch):
    figures = iter((5, None))  # it was there for the first look, and not for the second
    monkeypatch.setattr(accounts, "_figure", lambda file, label: next(figures))
    assert accounts.held_by(1) is None
