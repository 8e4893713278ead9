"""What all tests share: the way to `toys`, and the class that a lesson's tests look at."""

import contextlib
import gc
import itertools
import os
import re
import sys
from multiprocessing import forkserver, set_forkserver_preload
from pathlib import Path

import cloudpickle
import pytest
import torch

from zero_minimal.classroom.lessons import found
from zero_minimal.classroom.references import reference
from zero_minimal.classroom.submission import Submission
from zero_minimal.processes import interrupts, ranks

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))  # so that tests can `import toys`, in ranks too
pytest.register_assert_rewrite("checks")
os.environ["ZERO_PROGRESS"] = ""  # what tests grade and guess is nobody's progress


def pytest_addoption(parser):
    group = parser.getgroup("thorough", "what takes long (thorough.py)")
    group.addoption("--thorough", action="store_true", help="run all tests, also those that are marked thorough")
    group.addoption("--thorough-only", action="store_true", help="run those alone that are marked thorough")
    group.addoption("--part", type=_part, metavar="K/N", help="with --thorough-only: part K of N, from 0/N to (N-1)/N")


def _part(words):
    number, of = map(int, words.split("/"))
    if not 0 <= number < of:
        raise ValueError
    return number, of


def pytest_configure(config):
    config.addinivalue_line("markers", "thorough: runs with --thorough and --thorough-only alone, since it takes long")
    config.addinivalue_line("markers", "step(number, points, stuck, left, raised): a check that earns points in an "
                            "assignment. What to look at if ranks wait for each other (stuck), for one that has "
                            "returned (left), for what nobody sends (unsent), or if a line of the file raised (raised)")


def pytest_collection_modifyitems(config, items):
    if getattr(config, "submission", None) or any("::" in name or name.endswith(".ipynb") for name in config.args):
        return  # a learner's file gets every check, and who names a test gets it
    for item in items:
        if item.path.suffix == ".ipynb" and not item.path.name.startswith("00"):  # the first shows that they run
            if config.option.thorough_only or not item.name.endswith("::Cell 0"):  # which the others rest on
                item.add_marker(pytest.mark.thorough)
    if config.option.thorough and not config.option.thorough_only:
        return
    _leave_one_world(items)
    _leave_half_of_the_points(items)
    marked, others = [], []
    for item in items:
        (marked if item.get_closest_marker("thorough") else others).append(item)
    items[:], left_out = (marked, others) if config.option.thorough_only else (others, marked)
    if config.option.thorough_only and config.option.part:
        number, of = config.option.part
        parts = _parts(items, of)
        items[:] = parts.pop(number)
        left_out += sum(parts, [])
    config.hook.pytest_deselected(items=left_out)


def _parts(items, count):
    """`count` lists: sixteen of a file at a time go to the next list, as neighbours may share their ranks; notebooks
    stay whole."""
    pieces = []
    for _, of_file in itertools.groupby(items, lambda item: item.path):
        of_file = list(of_file)
        size = len(of_file) if of_file[0].path.suffix == ".ipynb" else 16
        pieces += [of_file[start : start + size] for start in range(0, len(of_file), size)]
    return [sum(pieces[number::count], []) for number in range(count)]


def _leave_one_world(items):
    """A test for several numbers of ranks runs on 3, which divides least, and thoroughly on the others."""
    sizes = {}
    for item in items:
        params = getattr(item, "callspec", None) and dict(item.callspec.params)
        if params and "world_size" in params and not item.get_closest_marker("thorough"):
            size = params.pop("world_size")
            sizes.setdefault((item.path, item.originalname, repr(params)), {})[size] = item
    for alike in sizes.values():
        chosen = 3 if 3 in alike else max(alike)
        for size, item in alike.items():
            if size != chosen:
                item.add_marker(pytest.mark.thorough)


def _leave_half_of_the_points(items):
    """Of a lesson's checks those that are worth most, until each step has half of its points; the others thoroughly."""
    steps = {}
    for item in items:
        mark = item.get_closest_marker("step")
        if mark and not item.get_closest_marker("thorough"):
            step = steps.setdefault((item.path, mark.args[0]), {})
            step.setdefault((item.originalname, mark.kwargs["points"]), []).append(item)
    for step in steps.values():
        left = sum(points for _, points in step) / 2
        for name, points in sorted(step, key=lambda check: (-check[1], check[0])):
            for item in step[name, points] if left <= 0 else ():
                item.add_marker(pytest.mark.thorough)
            left -= points


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several processes (pytest -n) one gets what shares runs and kernels: a file, or in it a lesson's part. Marks
    of xdist_group do not reach the scheduler with this pytest."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class OneFileOrLesson(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return re.match(r"[^:]*(::\w+\[\d\d_\w+)?", nodeid)[0]

    return OneFileOrLesson(config, log)


def pytest_collection_finish(session):
    gc.freeze()  # what is imported is no garbage: tests that collect, and look at all objects, take no time over it


@pytest.fixture(autouse=True, scope="session")
def ranks_have_imported(request):
    """The server that ranks are forked from imports what tests need (preloaded.py), and meanwhile they begin. While a
    submission is graded its ranks come from elsewhere."""
    if hasattr(request.config, "submission"):
        return
    set_forkserver_preload(["preloaded", "zero_minimal.processes.warm"])
    with contextlib.chdir(TESTS), ranks.main_hidden(), interrupts.held_off():  # it looks for the file where it starts
        forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="module")
def functions_travel(request):
    """Ranks cannot import a test file by its name: send its functions and classes by value."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="module")
def assignment(request, tmp_path_factory):
    """What a lesson's test_assignment.py looks at: the learner's file that is graded, else the lesson's reference."""
    if hasattr(request.config, "submission"):
        return request.config.submission
    lesson = found()[request.path.parent.name]
    file = tmp_path_factory.mktemp(lesson.name) / "reference.py"
    file.write_text(reference(lesson))
    return Submission(file, lesson)


@pytest.fixture(autouse=True, scope="module")
def results_stay_in_their_file(request):
    """What tests share goes with their file, and the rest is no garbage: each ledger that is opened later would look at
    all tensors of it, and each collection at all objects."""
    yield
    for value in list(vars(request.module).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_thread():
    """What is computed here to compare with is small: threads would only wait for each other, and sum in another
    order on another machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
