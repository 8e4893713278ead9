"""The grader's part inside pytest: run a lesson's graded tests against a submission, and report each one as it ends.

It reads the tests, and then waits (grader_server.py). Each grade writes lines of JSON to its own pipe: "begins" names
the next test, so that the grader knows it if this process is killed; then {"test", "passed", "message"}.
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
LESS = 1 / 5  # of the patience, once a test has timed out: the learner is waiting


def pytest_addoption(parser):
    group = parser.getgroup("grading")
    group.addoption("--submission", help="the learner's file")
    group.addoption("--lesson", help="its lesson")
    group.addoption("--serve", type=int, help="a socket for requests (grader_server.py)")


def pytest_configure(config):
    config.submission = Submission(Path(config.option.submission), found()[config.option.lesson])
    config.pluginmanager.register(Grading(config), "grading")


class Runner:
    """Replaces toys.run while a submission is graded: guards ranks, limits their time, and leaves nothing behind."""

    def __init__(self, submission: Submission, seconds: float, supervisor: Supervisor):
        self.submission, self.supervisor = submission, supervisor
        self.patience = submission.lesson.patience  # seconds
        self.until = self.supervisor.spent + seconds
        self.tell = lambda **entries: None  # tells the grader that ranks run, or cannot
        self.accounts = []  # what the kernel counted in the last run, for each rank

    def install(self) -> None:
        """Install it in toys, where tests look. The secrets seed random numbers: a rank knows only its own."""
        import toys  # conftest makes it importable

        toys.runner = self
        toys.secrets, toys.data_secrets = self.supervisor.secrets, self.supervisor.data_secrets

    def __call__(self, function, world_size, *args, timeout=float("inf"), fresh=False, counted=False):
        """fresh: each rank is a separate Python, as under torchrun. counted: `accounts` are then this run's."""
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
            if not self.submission.lesson.draw:  # drawn steps are independent of each other
                self.patience = min(LESS * self.submission.lesson.patience, self.patience)
            raise
        except ChildProcessError as error:
            pytest.fail(f"{error}: a submission may not signal other processes", pytrace=False)
        self.accounts = self.supervisor.accounts
        if self.supervisor.left:
            pytest.fail(f"it left {self.supervisor.left} of its processes running", pytrace=False)
        return found


def in_words(error: BaseException, path: str, hints: dict) -> str:
    """A test's failure as a message for the learner; `hints`: those of its mark; `error.hints`: those of one run."""
    if isinstance(error, (ranks.RankError, TimeoutError)):
        words = messages.of_failure(error, path)
        return messages.brief(words) + messages.hint(error, words, hints | getattr(error, "hints", {}), path)
    return str(error).split("\nassert ")[0].strip() or type(error).__name__


class Grading:
    """Hooks of pytest: only graded tests run, each reported as it ends. Once a test finds an unwritten function, or two
    tests have timed out at the same line, the step's other tests do not run: they would say the same."""

    def __init__(self, config):
        self.config, self.runner = config, None

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((item for item in items if item.get_closest_marker("step")),
                          key=lambda item: _worth(item)["step"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed:  # the tests could not be read: pytest reports it
            return
        path, lesson = Path(self.config.submission.path), self.config.submission.lesson
        server = Server(socket.socket(fileno=self.config.option.serve), lesson, path)
        server.announce([{"test": item.nodeid, **_worth(item)} for item in session.items])
        request = server.serve()  # from here on, this process has only this request
        items = {item.nodeid: item for item in session.items}
        session.items[:] = [items[test] for test in request.tests]
        self.config.submission = Submission(path, lesson, request.source)
        supervisor = Supervisor(lesson, path, server.places, request.fork_server)
        self.runner = Runner(self.config.submission, request.seconds, supervisor)
        self.reports, self.late = os.fdopen(request.reports, "w", buffering=1), Late()
        self.over = unwritten_steps(self.config.submission)  # {step: the message of all its tests from now on}
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
        if self.runner:  # otherwise the tests could not even be read
            self._tell(end=True)
            os._exit(0)  # Python's exit handlers belong to the server

    def _tell(self, **entries):
        self.reports.write(json.dumps(entries) + "\n")


class Functions:
    """A submission's functions: which are written, and which step each line belongs to."""

    def __init__(self, submission: Submission):
        self.lesson, self.all = submission.lesson, functions_of(ast.parse(submission.source))

    def judge(self, message: str, step: int) -> str:
        """The message of one of the step's checks, corrected: for a function that is written but raises
        NotImplementedError, and for an error raised in a function of an earlier step."""
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
    """The lines at which tests have timed out."""

    def __init__(self):
        self.errors, self.times = [], {}  # errors; {lines: count}

    def again(self, step: int, error: BaseException, message: str) -> bool:
        """Whether to give up on the step: tests timed out at these lines twice, or once before in an earlier step."""
        lines = tuple(re.findall(r"line \d+ of .*", message))
        if not isinstance(error, TimeoutError) or not lines or any(error is known for known in self.errors):
            return False  # tests that share a run share an error
        self.errors.append(error)
        self.times[lines] = self.times.get(lines, 0) + 1
        return self.times[lines] > 1


def unwritten_steps(submission: Submission) -> dict[int, str]:
    """{step: message} for steps whose functions are all unchanged from the starter."""
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
