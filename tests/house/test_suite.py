"""The suite itself: `--thorough` leaves nothing out."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from thorough import sample

HOUSE = Path(__file__).parents[2]


def pytest_on(file, *options, plugins=()):
    """Exit code and output of pytest, with the house's settings, on a file."""
    paths = os.pathsep.join([str(HOUSE), str(HOUSE / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(HOUSE / "pyproject.toml"), "--rootdir", str(HOUSE),
         "-p", "no:cacheprovider", *(f"-p{plugin}" for plugin in plugins), *options, str(file)],
        env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=100, start_new_session=True,
    )
    return done.returncode, done.stdout


def written(path, text):
    path.write_text(textwrap.dedent(text))
    return path


# ------------------------------------------------------------------------------------------------------------ thorough


def collected(file, *options):
    """Names of the tests that would run."""
    code, output = pytest_on(file, "--collect-only", "-q", *options, plugins=["conftest"])
    assert code == 0, output
    return re.findall(r"::(\S+)", output)


def test_thorough_and_plain_runs_share_nothing_and_leave_nothing_out(tmp_path):
    file = written(tmp_path / "test_some.py", """
        import pytest
        from thorough import sample

        @pytest.mark.parametrize("world_size", sample((1, 2, 3, 4), (3, 2)))
        def test_worlds(world_size):
            pass

        @pytest.mark.parametrize("name", sample({"a": 1, "b": 2}, ("b",)))
        @pytest.mark.parametrize("size, op", sample([(3, "sum"), (5, "avg")], [(5, "avg")]))
        def test_both(size, op, name):
            pass

        @pytest.mark.thorough
        def test_alone():
            pass
        """)
    plain, rest, everything = collected(file), collected(file, "--thorough-only"), collected(file, "--thorough")
    assert plain == ["test_worlds[2]", "test_worlds[3]", "test_both[5-avg-b]"]
    assert rest == ["test_worlds[1]", "test_worlds[4]", "test_both[3-sum-a]", "test_both[3-sum-b]",
                    "test_both[5-avg-a]", "test_alone"]
    assert sorted(plain + rest) == sorted(everything) and len(everything) == 9


def test_a_sample_names_cases_that_are_there():
    for always in ((5,), (), (2, "3")):
        with pytest.raises(ValueError, match="choose from"):
            sample((1, 2, 3), always)
