"""The grader's part inside pytest: run a lesson's graded tests against a submission, and report each one as it ends.

It reads the tests, and then waits (grader_server.py). Of each grade lines of JSON go to its own pipe: one with "begins"
says which test is next, so that the grader knows it should this process be killed; then {"test", "passed", "message"}.
"""

import ast
import json
import os
import re
import socket
from pathlib import Path

import pytest

from zero_minimal.classroom import messages
from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.grader_server import Server
from zero_minimal.classroom.guard import guarded, unwritten
from zero_minimal.classroom.lessons import UNWRITTEN, USED_UP, found, needs
from zero_minimal.classroom.starters import functions_of
from zero_minimal.classroom.submission import Submission
from zero_minimal.classroom.supervisor import Supervisor
from zero_minimal.processes import ranks

LAMBDA = ("A lambda that was made in a loop sees the loop's variables as they are when it is called, and not when it "
          "is made: look there first.")
LESS = 1 / 5  # of the patience, once a test has run out of time: the learner waits too


def pytest_addoption(parser):
    group = parser.getgroup("grading")
    group.addoption("--submission", help="the learner's file")
    group.addoption("--lesson", help="its lesson")
    group.addoption("--serve", type=int, help="a socket for requests (grader_server.py)")


def pytest_configure(config):
    config.submission = Submission(Path(config.option.submission), found()[config.option.lesson])
    config.pluginmanager.register(Grading(config), "grading")


class Runner:
    """What tests use as toys.run while a submission is graded: guarded in the ranks, never for long, nothing left."""

    def __init__(self, submission: Submission, seconds: float, supervisor: Supervisor):
        self.submission, self.supervisor = submission, supervisor
        self.patience = submission.lesson.patience  # seconds
        self.until = self.supervisor.spent + seconds
        self.tell = lambda **entries: None  # the grader: that ranks run, or that they cannot

    def install(self) -> None:
        """Into toys, where tests look. The secrets are what random numbers begin from: a rank knows its own alone."""
        import toys  # conftest has made it importable

        toys.runner = self
        toys.secrets, toys.data_secrets = self.supervisor.secrets, self.supervisor.data_secrets

    @property
    def accounts(self) -> list:
        """What the kernel counted in the last run, a rank each."""
        return self.supervisor.accounts

    def __call__(self, function, world_size, *args, timeout=float("inf"), fresh=False, counted=False):
        """fresh: each rank is a Python of its own, as under torchrun. counted: `accounts` are made."""
        left = self.until - self.supervisor.spent
        if left < 1:
            pytest.fail(USED_UP, pytrace=False)
        limit = min(timeout, self.patience, left)
        self.supervisor.beat = lambda: self.tell(runs=True)
        try:
            found = self.supervisor.run(guarded(function, self.submission), world_size, *args, timeout=limit,
                                        fresh=fresh, counted=counted)
        except Busy as busy:
            self.tell(busy=str(busy))
            raise
        except TimeoutError:
            if not self.submission.lesson.draw:  # one that is drawn has nothing to do with the others
                self.patience = min(LESS * self.submission.lesson.patience, self.patience)
            raise
        except ChildProcessError as error:
            pytest.fail(f"{error}: a submission may not signal other processes", pytrace=False)
        if self.supervisor.left:
            pytest.fail(f"it left {self.supervisor.left} of its processes running", pytrace=False)
        return found

    def close(self) -> None:
        self.supervisor.close()


def in_words(error: BaseException, path: str, hints: dict) -> str:
    """A test's failure as a message for the learner; `hints` are those of its mark, `error.hints` those of one run."""
    if isinstance(error, (ranks.RankError, TimeoutError)):
        words = messages.of_failure(error, path)
        return messages.brief(words) + messages.hint(error, words, hints | getattr(error, "hints", {}), path)
    return str(error).split("\nassert ")[0].strip() or type(error).__name__


class Grading:
    """Hooks of pytest: only graded tests, each reported as it ends. Once a test finds that a function is not written
    yet, or two have run out of time at the same line, the others of the step are not run: they would say the same."""

    def __init__(self, config):
        self.config, self.runner = config, None

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((item for item in items if item.get_closest_marker("step")),
                          key=lambda item: _worth(item)["step"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:  # they could not be read: pytest says so
            return
        path, lesson = Path(self.config.submission.path), self.config.submission.lesson
        server = Server(socket.socket(fileno=self.config.option.serve), lesson, path)
        server.announce([{"test": item.nodeid, **_worth(item)} for item in session.items])
        request = server.serve()  # from here on in a process for this one request
        items = {item.nodeid: item for item in session.items}
        session.items[:] = [items[test] for test in request.tests]
        self.config.submission = Submission(path, lesson, request.source)
        supervisor = Supervisor(lesson, path, server.places, request.fork_server)
        self.runner = Runner(self.config.submission, request.seconds, supervisor)
        self.reports, self.late = os.fdopen(request.reports, "w", buffering=1), Late()
        self.over = unwritten_steps(self.config.submission)  # step: the message of all its tests from now on
        self.functions = Functions(self.config.submission)
        self.runner.tell = self._tell
        self.runner.install()

    def pytest_runtest_protocol(self, item):
        self._tell(begins=item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if message := self.over.get(_worth(pyfuncitem)["step"]):
            pytest.fail(message, pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or report.failed:
            hints = item.get_closest_marker("step").kwargs
            message = "" if report.passed else in_words(call.excinfo.value, self.config.submission.path, hints)
            step = _worth(item)["step"]
            message = self.functions.judge(message, step)
            later = needs(message, step, self.config.submission.lesson.steps) > step
            if 0 < needs(message) <= step or not (report.passed or later) and self.late.again(
                    step, call.excinfo.value, message):
                self.over.setdefault(step, message)
            self._tell(test=item.nodeid, passed=report.passed, message=message)
        return report

    def pytest_sessionfinish(self):
        if self.runner:  # else the tests could not even be read
            self.runner.close()
            self._tell(end=True)
            os._exit(0)  # what ends with a process of Python's is not this one's

    def _tell(self, **entries):
        self.reports.write(json.dumps(entries) + "\n")


class Functions:
    """Of a submission: which are written, and which step each line belongs to."""

    def __init__(self, submission: Submission):
        self.lesson, self.all = submission.lesson, functions_of(ast.parse(submission.source))

    def judge(self, message: str, step: int) -> str:
        """A message of one of the step's checks, if need be with other words: what is written is not waited for, and
        an error that a function of an earlier step has raised is looked for there."""
        name = message.partition(UNWRITTEN)[0].rpartition(" ")[2]
        if needs(message) > step and not any(
                _is_hole(function) for label, function in self.all.items() if label.rpartition(".")[2] == name):
            return f"{name}() is written, and raises NotImplementedError all the same: take that line out"
        lines = re.findall(r"\bline (\d+) in \w+: ", message) if "it raised" in message else []
        for name, function in self.all.items() if lines else ():
            owner = next((each.number for each in self.lesson.steps if name in each.tasks), step)
            if function.lineno <= int(lines[-1]) <= function.end_lineno and owner < step:
                if " in <lambda>: " in message:
                    return f"{message}\n{LAMBDA}"
                return f"{message}\n{name} is a function of step {owner}: look there first."
        return message


class Late:
    """Which lines tests have run out of time at."""

    def __init__(self):
        self.errors, self.times = [], {}  # the errors; {lines: how often}

    def again(self, step: int, error: BaseException, message: str) -> bool:
        """Whether the step is hopeless: it stood at these lines twice. What did so in an earlier step has one try."""
        lines = tuple(re.findall(r"line \d+ of .*", message))
        if not isinstance(error, TimeoutError) or not lines or any(error is known for known in self.errors):
            return False  # tests that share a run share its error
        self.errors.append(error)
        self.times[lines] = self.times.get(lines, 0) + 1
        return self.times[lines] > 1


def unwritten_steps(submission: Submission) -> dict[int, str]:
    """{step: message} of the steps whose functions are all as the starter has them."""
    found = {}
    functions = functions_of(ast.parse(submission.source))
    for step in submission.lesson.steps:
        holes = [functions[name] for name in step.tasks if name in functions and _is_hole(functions[name])]
        if len(holes) == len(step.tasks):
            found[step.number] = unwritten(holes[0].name, step.label, holes[0].body[-1].lineno)
    return found


def _is_hole(function) -> bool:
    body = [line for line in function.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return not body or len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.dump(body[0])


def _worth(item) -> dict:
    marker = item.get_closest_marker("step")
    return {"step": marker.args[0], "points": marker.kwargs["points"], "check": item.originalname}
