"""The grader's part inside pytest: run a lesson's graded tests against a submission, and report each one as it ends.

It reads the tests, and then waits for submissions, with all slow work done:

    grade.py → judge that waits → fork server                 the tests are collected, torch is imported
                    ↓ forks           ↓ forks             for each grade:
                  judge     ───────►  ranks                   all that ends with it

So each grade starts from a clean state, and its ranks come from a process that never held an answer. A request is JSON,
followed by the pipe for reports; one without a source ends the current grade, and is answered by its judge's exit code.
Each report is JSON: "begins" names the next test, so that the grader knows it if this process is killed; then {"test",
"passed", "message"}.
"""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from zero_minimal.classroom import messages, sandbox
from zero_minimal.classroom.accounts import Busy
from zero_minimal.classroom.course_copy import bring_helpers, stage
from zero_minimal.classroom.guard import guarded, unwritten
from zero_minimal.classroom.lessons import UNWRITTEN, USED_UP, Lesson, found, needs
from zero_minimal.classroom.sandboxed_ranks import ForkServer
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
    group.addoption("--serve", type=int, help="a socket for requests")


def pytest_configure(config):
    config.submission = Submission(Path(config.option.submission), found()[config.option.lesson])
    config.pluginmanager.register(Grading(config), "grading")


class Server:
    """The waiting judge: `places` are its ranks' folders."""

    def __init__(self, control: Connection, lesson: Lesson, file: Path):
        self.control, self.file = control, file
        self.places = stage(lesson, file, Path(tempfile.mkdtemp(prefix="grading-")))  # in the judge's own folder
        self.fork_server = ForkServer(self.places)
        self.judge = 0

    def serve(self, tests: list[dict]) -> tuple[dict, Connection]:
        """Tell the grader which tests can be run, and wait for its requests. Returns in a new process for each, with
        the request ("source", "tests" in this order, "seconds") and the pipe for reports; never returns in this one."""
        self._tell({"tests": tests})
        self.fork_server.wait_until_ready()
        while True:
            try:
                request = json.loads(self.control.recv_bytes())
                reports = reduction.recv_handle(self.control) if request else None
            except (EOFError, OSError):  # the grader is gone
                request = None
            code = self._end_judge()
            if request is None:
                self.fork_server.close()
                shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
                os._exit(0)
            if not request:
                self._tell({"code": code})
                continue
            bring_helpers(self.file, Path(self.places["work"]))
            self.judge = os.fork()
            if not self.judge:
                sandbox.end_with_parent()
                self.control.close()
                return request, Connection(reports)
            os.close(reports)

    def _tell(self, entries: dict) -> None:
        self.control.send_bytes(json.dumps(entries).encode())

    def _end_judge(self) -> int | None:
        """End the current judge; return its exit code. The signal does not change one that has already ended."""
        if not self.judge:
            return None
        os.kill(self.judge, signal.SIGKILL)  # its number is not reused until we have waited for it
        _, status = os.waitpid(self.judge, 0)
        self.judge = 0
        with contextlib.suppress(OSError):  # it was ended: each later judge starts another one (supervisor.py)
            self.fork_server.begin_anew()
        return os.waitstatus_to_exitcode(status)


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
        server = Server(Connection(self.config.option.serve), lesson, path)
        items = {item.nodeid: item for item in session.items}
        tests = [{"test": name, **_worth(item)} for name, item in items.items()]
        request, self.reports = server.serve(tests)  # from here on, this process has only this request
        session.items[:] = [items[test] for test in request["tests"]]
        self.config.submission = Submission(path, lesson, request["source"])
        supervisor = Supervisor(lesson, path, server.places, server.fork_server)
        self.runner, self.late = Runner(self.config.submission, request["seconds"], supervisor), Late()
        self.functions = Functions(self.config.submission)
        self.over = self.functions.unwritten_steps()  # {step: the message of all its tests from now on}
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
                    call.excinfo.value, message):
                self.over.setdefault(step, message)
            self._tell(test=item.nodeid, passed=report.passed, message=message)
        return report

    def pytest_sessionfinish(self):
        if self.runner:  # otherwise the tests could not even be read
            self._tell(end=True)
            os._exit(0)  # Python's exit handlers belong to the server

    def _tell(self, **entries):
        self.reports.send_bytes(json.dumps(entries).encode())


class Functions:
    """A submission's functions: which are written, and which step each line belongs to."""

    def __init__(self, submission: Submission):
        self.lesson, self.all = submission.lesson, functions_of(ast.parse(submission.source))

    def unwritten_steps(self) -> dict[int, str]:
        """{step: message} for steps whose functions are all unchanged from the starter."""
        found = {}
        for step in self.lesson.steps:
            holes = [self.all[name] for name in step.tasks if name in self.all and _is_hole(self.all[name])]
            if len(holes) == len(step.tasks):
                found[step.number] = unwritten(holes[0].name, step.label, holes[0].body[-1].lineno)
        return found

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

    def again(self, error: BaseException, message: str) -> bool:
        """Whether to give up on the step: tests timed out at these lines twice, or once before in an earlier step."""
        lines = tuple(re.findall(r"line \d+ of .*", message))
        if not isinstance(error, TimeoutError) or not lines or any(error is known for known in self.errors):
            return False  # tests that share a run share an error
        self.errors.append(error)
        self.times[lines] = self.times.get(lines, 0) + 1
        return self.times[lines] > 1


def _is_hole(function) -> bool:
    body = [line for line in function.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
    return not body or len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.dump(body[0])


def _worth(item) -> dict:
    marker = item.get_closest_marker("step")
    return {"step": marker.args[0], "points": marker.kwargs["points"], "check": item.originalname}
