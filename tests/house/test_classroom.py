"""The classroom: the grader names each mistake, and cannot be fooled or hung.

Of the wrong submissions one runs here; all of them with pytest --thorough.
"""

import dataclasses
import functools
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import checks
import cloudpickle
import pytest
import submissions
import torch
import toys

sys.path.insert(0, str(Path(__file__).parent))

import conduct

from zero_minimal.classroom import grade as grader
from zero_minimal.classroom import grader_client, plugin, sandboxed_ranks, supervisor
from zero_minimal.classroom.accounts import Busy, Clock
from zero_minimal.classroom.drawn import as_drawn
from zero_minimal.classroom.grades import Grades
from zero_minimal.classroom.guard import Fault
from zero_minimal.classroom.lessons import HOUSE, found
from zero_minimal.classroom.messages import WHY_CUT
from zero_minimal.classroom.starters import starter
from zero_minimal.classroom.submission import Submission
from zero_minimal.processes.ranks import RankError

LESSONS = found()
COLLECTIVES, GRADIENTS = LESSONS["00_collectives"], LESSONS["03_gradients"]
FOLDERS = (*((lesson, submissions.mistakes(lesson)) for lesson in LESSONS.values()), (GRADIENTS, conduct))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs what Linux tells of processes and memory")


WRONG = [
    pytest.param(lesson, wrong, id=f"{lesson.name}: {name}", marks=[on_linux] * (folder is conduct)
                 + [pytest.mark.thorough] * (folder is not conduct or name != "calls sys.exit")
                 + [pytest.mark.timeout(590)] * wrong.hangs)  # on a busy machine it takes minutes
    for lesson, folder in FOLDERS for name, wrong in folder.WRONG.items()
]
RIGHT = [pytest.param(lesson, text, id=f"{lesson.name}: {name}")
         for lesson in LESSONS.values() for name, text in submissions.right(lesson).items()]


# ------------------------------------------------------------------------------------------------- wrong and right ones


@pytest.fixture
def messages(tmp_path, monkeypatch):
    """messages(lesson, source, test=None, world_size=None): what the tests tell a learner, run as the grader does, but
    in this process. step: of a lesson whose steps are drawn, the one to look at; None: those that are drawn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(supervisor, "SLOWEST", 60)  # a verdict is wanted also where other tests have the processors

    def run(lesson, source, only=None, world_size=3, patience=30.0, step=None):
        file = tmp_path / "assignment.py"
        file.write_text(source)
        submission = Submission(file, lesson)
        runner = plugin.Runner(submission, 3600, submissions.supervisor(lesson))
        runner.patience = patience
        for name in ("runner", "secrets", "data_secrets"):
            monkeypatch.setattr(toys, name, getattr(toys, name))  # to be as it was afterwards
        runner.install()
        return [message for name, test in graded_tests(lesson).items() if only in (None, name) for message in (
            told_of_drawn(test, submission, step) if lesson.draw else told_by(test, submission, world_size))]

    yield run
    torch.set_num_threads(threads)
    checks._runs.clear()


@functools.cache
def graded_tests(lesson):
    """{name: test} of the lesson's tests, all of which earn points."""
    module = submissions.module_in(lesson.tests)
    cloudpickle.register_pickle_by_value(module)
    return {name: test for name, test in vars(module).items() if name.startswith("test_")}


def told_by(test, submission, world_size):
    """Messages of one test's failures, in a world of this size, or in the largest if it does not ask for this one."""
    worlds = [mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"]
    step = next(mark for mark in test.pytestmark if mark.name == "step")
    for size in [world_size if world_size in worlds[0] else max(worlds[0])] if worlds else [None]:
        try:
            test(submission, size) if "world_size" in inspect.signature(test).parameters else test(submission)
        except (Exception, pytest.fail.Exception) as error:
            yield plugin.in_words(error, submission.path, step.kwargs)


def told_of_drawn(test, submission, step):
    """The same for a lesson whose steps are drawn: its tests are parametrized by the step."""
    numbers = [step] if step else [each.number for each in as_drawn(submission.lesson, submission.source).steps]
    for number in numbers:
        try:
            test(submission, number)
        except (Exception, pytest.fail.Exception) as error:
            yield plugin.in_words(error, submission.path, hints_of(test)[number])


def hints_of(test):
    """{step: the arguments of its mark} of a test that is parametrized by steps."""
    cases = next(mark for mark in test.pytestmark if mark.name == "parametrize").args[1]
    marks = [mark for case in cases for mark in case.marks if mark.name == "step"]
    return {mark.args[0]: mark.kwargs for mark in marks}


def test_each_check_has_a_mistake_to_catch():
    for of, folder in FOLDERS:
        assert folder is conduct or {wrong.check for wrong in folder.WRONG.values()} == graded_tests(of).keys()


@pytest.mark.parametrize("lesson, wrong", WRONG)
def test_a_mistake_is_caught_and_named(messages, lesson, wrong):
    told = messages(lesson, submissions.spliced(lesson, wrong.code, wrong.top), wrong.check, wrong.world_size or 3,
                    patience=3.0 if wrong.hangs else 30.0, step=wrong.step)
    assert told, f"{wrong.check} did not catch it"
    assert re.search(wrong.message, told[0]), f"it said: {told[0]}"
    assert "Traceback" not in told[0]


AT_ONCE = submissions.edited("01_data_parallel", "Stage0.bucket_complete",
                             ("self.reducing = ", ""), ("of=bucket, async_op=True", "of=bucket"))
FIRST = {  # what a learner writes in place of a line of the reference to which a later step belongs
    "01_data_parallel: step 2": AT_ONCE, "01_data_parallel: step 3": AT_ONCE,
    "06_activation_partitioning: step 2": submissions.edited(
        "06_activation_partitioning", "_Checkpoint.backward",
        ("random_state_of(ctx.random), autocast_as(ctx.precision), ", "")),
}
EARLY = [pytest.param(lesson, step, FIRST.get(name, {}), id=name) for lesson in LESSONS.values() if not lesson.draw
         for step in lesson.steps[:-1] for name in [f"{lesson.name}: {step.label}"]]


@pytest.mark.thorough
@pytest.mark.parametrize("lesson, step, first", EARLY)
def test_a_step_has_its_points_before_the_next_is_written(lesson, step, first, tmp_path):
    later = dataclasses.replace(lesson, steps=lesson.steps[step.number :])
    file = tmp_path / "mine.py"
    file.write_text(starter(later, submissions.spliced(lesson, first)))
    code, printed = submissions.grade(file, "--lesson", lesson.name, "--step", step.number)
    assert code == 0, printed


@pytest.mark.thorough
@pytest.mark.parametrize("lesson, right", RIGHT)
def test_other_ways_are_right_too(messages, lesson, right):
    assert messages(lesson, right) == []


# -------------------------------------------------------------------------------------------------- hints, and points


def late(*stacks, finished=()):
    """What ranks.run says when it gave up: for each rank the lines where it stands, innermost first."""
    ranks = [rank for rank in range(len(stacks)) if rank not in finished]
    told = f"after 3 s rank {', '.join(map(str, ranks))} of {len(stacks)} had not finished"
    for rank in ranks:
        told += f"\nrank {rank} stands here (innermost first):\n" + "\n".join(
            f'  File "{file}", line {line} in {function}' for file, line, function in stacks[rank])
    return TimeoutError(told)


HINTS = {"stuck": "who waits for whom?", "left": "wait for each isend", "raised": "is it padded?"}
FILE = str(HOUSE / "zero_minimal/core/ring.py")


def line(text):
    """The number of the line of FILE that holds this text."""
    return next(number for number, line in enumerate(Path(FILE).read_text().splitlines(), 1) if text in line)


RECEIVES = [("torch/distributed.py", 7, "recv"), ("torch/wrapper.py", 5, "wrapper"),
            (FILE, line("dist.recv(incoming"), "exchange")]
WAITS = [(FILE, line("sending.wait()"), "exchange")]
COMPUTES = [(FILE, line("chunks[rank] = part"), "all_gather")]


@pytest.mark.parametrize("error, says, does_not_say", [
    (late(RECEIVES, RECEIVES),
     r"ranks 0 and 1 waited in recv, at line \d+ .*\n    To look at: who waits for whom\?$", "returned|loop|\\?\\."),
    (late(RECEIVES, None, None, finished=(1, 2)),
     r"    rank 0 waited in recv.*\n    ranks 1 and 2 had returned.*\n    To look at: wait for each isend\.$",
     "whom|loop"),
    (late(WAITS, WAITS), r"ranks 0 and 1 waited at line \d+ .*sending.wait\(\)\n    To look at: who", "loop"),
    (late(COMPUTES, COMPUTES), r"ranks 0 and 1 stood at line \d+ .*\n    A rank that stood .* is slow .* never ends$",
     "To look at"),
    (late(RECEIVES, COMPUTES), r"rank 0 waited in recv.*\n    rank 1 stood at line .*\n    A rank that", "To look at"),
], ids=("all wait", "one waits for those that returned", "they wait in C", "all compute", "one computes"))
def test_a_hint_fits_what_the_ranks_do(error, says, does_not_say):
    told = plugin.in_words(error, FILE, HINTS)
    assert re.search(says, told) and not re.search(does_not_say, told), told


@pytest.mark.parametrize("raised, says", [
    ("it raised IndexError: out of range", "it raised IndexError: out of range\n    To look at: is it padded?"),
    ("it printed more than 1 MB", "it printed more than 1 MB"),
    ("it raised RuntimeError: [/pytorch/third_party/gloo/tcp/pair.cc:544] Connection closed by peer",
     f"it raised {WHY_CUT}\n    To look at: who waits for whom?"),
    ("it raised RuntimeError: [enforce fail at /pytorch/gloo/tcp/pair.cc:450] op.nbytes == 8. 4 vs 8",
     "it raised RuntimeError: op.nbytes == 8. 4 vs 8\n    To look at: who waits for whom?"),
])
def test_hints_for_what_was_raised(raised, says):
    error = RankError(1, "")
    error.__cause__ = Fault(raised)
    assert plugin.in_words(error, FILE, HINTS) == f"rank 1: {says}"


@pytest.mark.parametrize("is_late, code, words, others", [
    (True, None, "did not come to an end: the machine may be busy.* --step 7", "signal"),
    (False, -9, r"brought down while this test ran \(SIGKILL\): memory may .* may not signal other processes", "busy"),
    (False, 3, "brought down while this test ran: memory may have run out", "signal"),
    (False, None, "brought down while this test ran: memory may have run out", "signal"),
])
def test_nobody_is_accused_whose_test_was_only_late(is_late, code, words, others):
    """Of a judge that is gone: only a signal that was seen is spoken of."""
    said = grader_client.Run(None, is_late, code=code).why_it_ended(7)
    assert re.search(words, said) and others not in said


def test_a_run_says_whether_its_time_was_over(monkeypatch):
    monkeypatch.setattr(grader_client, "SILENCE", 0.05)
    reads, writes = Pipe(duplex=False)
    writes.send_bytes(b"a report")
    silent = grader_client.Run(reads)
    assert [report for report in silent.reports(0.02) if report] == [b"a report"] and silent.is_late
    writes.close()
    ended = grader_client.Run(reads)
    assert list(ended.reports(60)) == [] and not ended.is_late


def test_later_steps_point_to_the_first_that_failed():
    grades = Grades(GRADIENTS)
    grades.add(1, "one", 12, False, "stuck in _wait\n    To look at: this step")
    grades.add(2, "two", 10, False, "the ranks had not come to an end\n    To look at: that step")
    grades.add(3, "three", 6, False, "it raised\n    To look at: None")
    assert grades.of(GRADIENTS.steps[0]) == (0, "stuck in _wait\n    To look at: this step")
    assert grades.of(GRADIENTS.steps[1]) == (
        0, "the ranks had not come to an end\nStep 1 has failed, too. If this step uses it, mend that one first.")
    assert grades.of(GRADIENTS.steps[2]) == (
        0, "it raised\n    To look at: None\nStep 1 has failed, too. If this step uses it, mend that one first.")
    drawn = Grades(LESSONS["11_reading_critically"])
    drawn.add(4, "one", 10, False, "no host")
    drawn.add(9, "one", 10, False, "no bf16")
    assert drawn.of(drawn.steps[8]) == (0, "no bf16"), "cards do not rest on one another"


# ----------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.thorough
def test_what_is_not_written_yet_is_not_run(tmp_path):
    """Neither a step that is as in the starter, nor the rest of one in which a test has met a hole."""
    source = submissions.spliced(COLLECTIVES, {
        "reduce_scatter": """
            def reduce_scatter(tensor, group=None):
                # to do
                raise NotImplementedError("step 2: reduce_scatter")
            """,
        "all_reduce": """
            def all_reduce(tensor, group=None):
                while dist.get_world_size(group) == 4:
                    pass
                raise NotImplementedError("step 4: all_reduce")
            """})
    file = tmp_path / "mine.py"
    file.write_text(source)
    grades = Grades(COLLECTIVES)
    grader.grade(COLLECTIVES, file, grades, only="reduce|all_gather_in_a_group")
    told = {step: {message for number, *_, message in grades.results if number == step} for step in (2, 3, 4)}
    number = source[: source.index("step 2: reduce_scatter")].count("\n") + 1
    assert told[2] == {f"reduce_scatter() is not written yet (step 2, line {number})"}
    assert told[3] == {""} and grades.of(COLLECTIVES.steps[2])[0] == 3
    assert len(told[4]) == 1 and "all_reduce() is not written yet (step 4" in told[4].pop()  # the 4 ranks did not run


def test_an_untouched_starter_has_no_points(tmp_path):
    code, printed = submissions.grade(GRADIENTS.starter, "--json", tmp_path / "results.json")
    assert code == 1 and "0 of 100 points" in printed
    assert re.findall(r"(\w+)\(\) is not written yet \(step (\d), line \d+\)", printed) == [
        ("bucket_complete", "1"), ("step", "2"), ("zero_grad", "3"), ("clip_grad_norm_", "4")]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == 0 and results["execution_time"] > 0
    assert sum(test["max_score"] for test in results["tests"]) == 100
    assert all(test["score"] == 0 and "not written yet" in test["output"] for test in results["tests"])


@pytest.mark.thorough
@pytest.mark.parametrize("lesson", LESSONS.values(), ids=LESSONS)
def test_no_untouched_starter_has_points(lesson):
    code, printed = submissions.grade(lesson.starter)
    assert code == 1 and re.search(r"^0 of \d+ points", printed, re.MULTILINE), printed


@pytest.mark.thorough
@on_linux
def test_the_nursery_may_die_between_tests(messages):
    """A kill that shows late is not charged to the next tests."""
    reference, check = submissions.spliced(COLLECTIVES, {}), "test_broadcast_returns_its_tensor"
    assert messages(COLLECTIVES, reference, check) == []
    fork_server = submissions.supervisor(COLLECTIVES).fork_server.process
    fork_server.kill()
    fork_server.wait()
    for _ in range(2):
        checks._runs.clear()
        assert messages(COLLECTIVES, reference, check) == []


def test_points_are_as_announced():
    """The marks of a lesson's tests add up to the points of its steps."""
    for lesson in LESSONS.values():
        points = dict.fromkeys((step.number for step in lesson.steps), 0)
        for test in graded_tests(lesson).values():
            if lesson.draw:
                for step, worth in hints_of(test).items():
                    points[step] += worth["points"]
            else:
                step = next(mark for mark in test.pytestmark if mark.name == "step")
                points[step.args[0]] += step.kwargs["points"]
        assert points == {step.number: step.points for step in lesson.steps}
        if lesson.draw:  # as many of them, all worth the same
            assert len(set(points.values())) == 1 and lesson.draw * points[1] == lesson.points < 100
        else:
            assert sum(points.values()) == lesson.points == (40 if lesson.name.startswith("10") else 100)


@pytest.mark.parametrize("arguments, says", [
    (["nothing.py"], "nothing.py is not a file: name the assignment.py that you filled in"),
    (["pyproject.toml"], "which lesson is pyproject.toml"),
    (["tests"], "tests has no 00_collectives/assignment.py"),
    (["lessons", "--step", "2"], "--step is for one file, and lessons is a folder"),
    (["pyproject.toml", "--lesson", "03"], "invalid choice: '03'"),
    (["pyproject.toml", "--lesson", "03_gradients", "--json", "nowhere/results.json"], "cannot be written"),
])
def test_wrong_calls(arguments, says):
    code, printed = submissions.grade(*arguments)
    assert code == 2 and says in " ".join(printed.split())


@pytest.mark.thorough
def test_a_folder_is_graded_as_a_whole(tmp_path):
    """All assignments in it, one after the other; what is missing does not count."""
    for lesson, text in ((GRADIENTS, "def step(:\n"), (COLLECTIVES, "x = 1\n")):
        (tmp_path / lesson.name).mkdir()
        (tmp_path / lesson.name / "assignment.py").write_text(text)
    code, printed = submissions.grade(tmp_path, "--json", tmp_path / "results.json")
    assert code == 1 and printed.index("lesson 00_collectives") < printed.index("lesson 03_gradients")
    assert re.search(r"\n00_collectives +0 of 100\n03_gradients +0 of 100\n +0 of 200 points, \d+ s\n", printed)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == 0 and [test["number"] for test in results["tests"]] == [
        f"{lesson.name[:2]}.{step.number}" for lesson in (COLLECTIVES, GRADIENTS) for step in lesson.steps]


@pytest.mark.thorough
def test_a_class_is_graded_as_a_whole(tmp_path):
    """A folder for each learner, with the file or with folders of lessons in it."""
    files = ["ada/assignment.py", "ben/assignment.py", "cem/03_gradients/assignment.py", "dora.py",
             "cem/00_collectives/assignment.py", ".old/assignment.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("def step(:\n")
    code, printed = submissions.grade(tmp_path)
    assert code == 1 and "ada/assignment.py is not graded: its folder is none of the lessons'" in printed
    beside = tmp_path / ".." / tmp_path.name  # points are parts of where a folder is, too
    code, printed = submissions.grade(beside, "--lesson", "03_gradients", "--json", tmp_path / "class.json")
    *_, first, second, third, fourth, last = printed.splitlines()
    assert [line.split() for line in (first, second, third, fourth)] == [
        [who, "0", "of", "100"] for who in ("ada", "ben", "cem/03_gradients", "dora.py")], printed
    assert code == 1 and "points" not in last
    results = json.loads((tmp_path / "class.json").read_text())
    assert list(results) == ["ada", "ben", "cem/03_gradients", "dora.py"]
    assert all(len(one["tests"]) == len(GRADIENTS.steps) for one in results.values())
    for name in files[2:]:
        (tmp_path / name).unlink()
    code, printed = submissions.grade(tmp_path)
    assert code == 2 and "ada/assignment.py? Its folder is none of" in printed and "say --lesson NAME" in printed


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_what_a_teacher_uploads_to_gradescope(tmp_path):
    """Both scripts of the page; the second is run, with this Python and a folder in the place of the service's."""
    page = (HOUSE / "lessons" / "README.md").read_text().partition("**Gradescope.**")[2].partition("**GitHub")[0]
    setup, run = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    for script in (setup, run):
        assert script.startswith("#!/usr/bin/env bash\n")
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "/opt/grader" in setup
    (tmp_path / "source").symlink_to(HOUSE)
    for folder in ("results", "submission"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "run_autograder"
    file.write_text(run.replace("/autograder/", f"{tmp_path}/").replace("/opt/grader/bin/python", sys.executable))
    file.chmod(0o755)
    results = tmp_path / "results" / "results.json"
    for text, is_graded in (("def step(:\n", True), (None, False)):
        submitted = tmp_path / "submission" / "assignment.py"
        submitted.write_text(text) if text else submitted.unlink()
        subprocess.run([file], capture_output=True, timeout=100)
        assert results.exists() == is_graded
        assert not is_graded or json.loads(results.read_text())["score"] == 0


def test_a_file_that_is_not_python(tmp_path):
    (tmp_path / "mine.py").write_text("def step(:\n")
    code, printed = submissions.grade(tmp_path / "mine.py", "--lesson", "03_gradients")
    assert code == 1 and printed.count("the file is not Python, line 1") == 1 and "0 of 100 points" in printed


@pytest.mark.thorough
def test_the_command_itself():
    done = subprocess.run([sys.executable, "-m", "zero_minimal", "grade", "nothing.py"], cwd=HOUSE, text=True,
                          capture_output=True)
    assert done.returncode == 2 and done.stdout == "" and "nothing.py is not a file" in done.stderr


# ----------------------------------------------------------------------------------------------- a machine that is busy


def _child(work):
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def _spin():
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize("work", [_spin, lambda: time.sleep(20)], ids=["runs", "sleeps"])
def test_time_is_spent_by_who_runs_and_by_who_waits(work):
    child, clock = _child(work), Clock()
    try:
        for _ in range(5):
            time.sleep(0.1)
            clock.look([child])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert 0 < clock.spent <= clock.passed


@pytest.mark.thorough
def test_time_without_a_processor_is_nobodys():
    """Three processes share one processor, and one of them is looked at: a third of the time is its own."""
    allowed = os.sched_getaffinity(0)

    def alone():
        os.sched_setaffinity(0, [min(allowed)])
        _spin()

    clock, children = Clock(), [_child(alone) for _ in range(3)]
    try:
        for _ in range(12):
            time.sleep(0.1)
            clock.look(children[:1])
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert clock.spent < 0.7 * clock.passed


def test_a_machine_that_is_too_busy_takes_no_points(messages, monkeypatch, tmp_path, capsys):
    """The judge tells it, and its points are not 0: there are none."""
    monkeypatch.setattr(supervisor, "SLOWEST", 0)
    told = []
    runner = plugin.Runner(Submission(COLLECTIVES.starter, COLLECTIVES), 60, submissions.supervisor(COLLECTIVES))
    runner.tell = lambda **entries: told.append(entries)
    with pytest.raises(Busy, match="too busy to judge"):
        runner(time.sleep, 1, 5.0)
    assert "No points are taken" in told[-1]["busy"]
    with pytest.raises(Busy):
        grader_client.Reported(COLLECTIVES, Grades(COLLECTIVES), whole=True).take(json.dumps(told[-1]).encode())
    unread = SimpleNamespace(reports=lambda tick: iter(()), is_late=True)
    with pytest.raises(Busy, match="too busy to judge: the tests could not be read"):
        nothing = grader_client.Reported(COLLECTIVES, Grades(COLLECTIVES), whole=False)
        client = SimpleNamespace(begin=lambda *_: nullcontext(unread))
        list(grader_client.GraderClient.reports(client, "", [], nothing))
    beats = []
    monkeypatch.setattr(sandboxed_ranks, "START", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Busy, match="too busy to judge: ranks could not be started"):
        sandboxed_ranks.ForkServer.wait_until_ready(SimpleNamespace(control=ours), lambda: beats.append(1))
    assert beats, "the grader counts a judge as stopped that reports nothing meanwhile"

    def busy(*_, **__):
        raise Busy(told[-1]["busy"])

    monkeypatch.setattr(grader, "grade", busy)
    file, results = tmp_path / "assignment.py", tmp_path / "results.json"
    file.write_text(submissions.reference(COLLECTIVES))
    assert grader.main([str(file), "--lesson", COLLECTIVES.name, "--json", str(results)]) == 3
    assert "too busy to judge" in capsys.readouterr().err and not results.exists()
