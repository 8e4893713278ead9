"""What all tests share: the way to `toys`, and the class that a lesson's tests look at."""

import gc
import sys
from pathlib import Path

import cloudpickle
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that tests can `import toys`, in ranks too
pytest.register_assert_rewrite("checks")

STAGES = {"01_data_parallel": 0, "02_optimizer_state": 1, "03_gradients": 2, "04_parameters": 3}  # folder: stage


def pytest_collection_finish(session):
    gc.freeze()  # what is imported is no garbage: tests that collect, and look at all objects, take no time over it


@pytest.fixture(autouse=True, scope="module")
def functions_travel(request):
    """Ranks cannot import a test file by its name: send its functions and classes by value."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def stage_class(request):
    """The class under test in a lesson's folder: the reference's, where nobody puts a submission in its place."""
    import toys

    return toys.STAGES[STAGES[request.path.parent.name]]
