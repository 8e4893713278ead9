"""The suite itself: a hang ends as a failed test that shows its stack, and `--thorough` leaves nothing out."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from thorough import each, sample

from zero_minimal.processes import ranks

HOUSE = Path(__file__).parents[2]
SETTINGS = tomllib.loads((HOUSE / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]


def pytest_on(file, *options, plugins=(), before=None):
    """Exit code and output of pytest, with the house's settings, on a file. before: called in the new process first."""
    paths = os.pathsep.join([str(HOUSE), str(HOUSE / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(HOUSE / "pyproject.toml"), "--rootdir", str(HOUSE),
         "-p", "no:cacheprovider", *(f"-p{plugin}" for plugin in plugins), *options, str(file)],
        env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=100, start_new_session=True, preexec_fn=before,
    )
    return done.returncode, done.stdout


def written(path, text):
    path.write_text(textwrap.dedent(text))
    return path


# -------------------------------------------------------------------------------------------------------- time limits


def test_limits_come_in_order():
    """Whoever stands deepest gives up first, and so shows where it stood: rank or cell, test, the whole of pytest."""
    cell = int(re.search(r"--nbval-cell-timeout=(\d+)", SETTINGS["addopts"])[1])
    assert cell + 20 <= SETTINGS["timeout"], "nbval waits twice 5 s more for what an interrupted kernel has to say"
    assert SETTINGS["timeout_method"] == "signal" and SETTINGS["faulthandler_exit_on_timeout"]
    assert 2 * SETTINGS["timeout"] <= SETTINGS["faulthandler_timeout"]


HANGS = """
    import os, time
    from pathlib import Path
    import pytest
    from zero_minimal.processes import ranks

    @pytest.mark.timeout(100)
    def test_that_may_take_longer():
        ranks.run(time.sleep, 2, 1.5)

    def test_that_sleeps():
        time.sleep(1000)

    @pytest.mark.timeout(4)
    def test_with_ranks_that_sleep():  # they come from the server that has imported all
        def stand_still():
            Path({notes!r}, f"{{os.getpid()}}.note").touch()
            print("said by a rank", flush=True)
            time.sleep(1000)

        ranks.run(stand_still, 2, timeout=1000)

    def test_after_them():
        pass
    """


@pytest.mark.thorough
def test_a_test_that_hangs_fails_where_it_stands_and_the_others_run(tmp_path):
    file = written(tmp_path / "test_hangs.py", HANGS.format(notes=str(tmp_path)))
    code, output = pytest_on(file, "--timeout=1", plugins=["conftest"])
    assert code == 1 and "2 failed, 2 passed" in output, output
    for name, seconds, line in (
        ("test_that_sleeps", 1, "time.sleep(1000)"), ("test_with_ranks_that_sleep", 4, "ranks.run(stand_still, 2"),
    ):
        told = output.split(f"_ {name} _")[1]
        assert re.search(rf"^>\s+{re.escape(line)}", told, re.MULTILINE), "the line where it stood"
        assert f"Timeout (>{seconds}.0s)" in told
    assert told.split("Captured stdout call")[1].count("said by a rank") == 2
    notes = list(tmp_path.glob("*.note"))
    assert len(notes) == 2
    assert not [note for note in notes if Path("/proc", note.stem).exists()], "ranks outlive the test"


@pytest.mark.thorough
def test_what_no_signal_reaches_ends_pytest_with_its_stack(tmp_path):
    file = written(tmp_path / "test_deaf.py", """
        import signal, time

        def test_deaf():
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(1000)
        """)
    code, output = pytest_on(file, "--timeout=1", "-o", "faulthandler_timeout=3")
    assert code == 1 and "test_deaf.py\", line 6 in test_deaf" in output, output


def notebook_of(*cells):
    cells = [{"cell_type": "code", "execution_count": None, "id": f"cell-{number}", "metadata": {}, "outputs": [],
              "source": cell} for number, cell in enumerate(cells)]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@pytest.mark.thorough
def test_a_cell_that_hangs_fails_where_it_stands_and_the_others_run(tmp_path):
    """Also from a script in the background, whose children ignore an interrupt until they say otherwise."""
    (tmp_path / "hangs.ipynb").write_text(notebook_of("import time", "time.sleep(1000)", "print('after it')"))
    code, output = pytest_on(tmp_path / "hangs.ipynb", "--nbval-cell-timeout=2", before=ignore_interrupts)
    assert code == 1 and "1 failed, 1 passed, 1 xpassed" in output, output
    assert "Timeout of 2 seconds exceeded" in output and "KeyboardInterrupt" in output and "time.sleep(1000)" in output


def ignore_interrupts():
    """As a shell does for what a script starts with &."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.thorough
@pytest.mark.parametrize("file, count", [("test_ranks.py", 1), ("test_cells.py", 1)])
def test_interrupts_are_tested_also_from_a_script_in_the_background(file, count):
    code, output = pytest_on(HOUSE / "tests/house" / file, "--thorough", "-k", "interrupt", before=ignore_interrupts)
    assert code == 0 and f"{count} passed" in output, output


# ------------------------------------------------------------------------------------------------------------ thorough


def collected(file, *options):
    """Names of the tests that would run."""
    code, output = pytest_on(file, "--collect-only", "-q", *options, plugins=["conftest"])
    assert code == 0, output
    return re.findall(r"::(\S+)", output)


@pytest.mark.thorough
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

        @pytest.mark.step(1, points=2)
        def test_of_few_points():
            pass

        @pytest.mark.step(1, points=4)
        @pytest.mark.parametrize("size", (5, 7))
        def test_of_half_the_points(size):
            pass

        @pytest.mark.step(1, points=2)
        def test_of_others():
            pass
        """)
    plain, rest, everything = collected(file), collected(file, "--thorough-only"), collected(file, "--thorough")
    half = ["test_of_half_the_points[5]", "test_of_half_the_points[7]"]
    assert plain == ["test_worlds[3]", "test_both[5-avg-b]", *half], "of several worlds one"
    assert rest == ["test_worlds[1]", "test_worlds[2]", "test_worlds[4]", "test_both[3-sum-a]", "test_both[3-sum-b]",
                    "test_both[5-avg-a]", "test_alone", "test_of_few_points", "test_of_others"]
    assert sorted(plain + rest) == sorted(everything) and len(everything) == 13
    assert collected(f"{file}::test_alone") == ["test_alone"], "who names a test gets it"
    many = written(tmp_path / "test_many.py", """
        import pytest

        @pytest.mark.thorough
        @pytest.mark.parametrize("number", range(40))
        def test(number):
            pass
        """)
    parts = [collected(many, "--thorough-only", f"--part={number}/3") for number in range(3)]
    assert [len(part) for part in parts] == [16, 16, 8]
    assert sorted(sum(parts, [])) == sorted(collected(many, "--thorough-only"))


def test_cases_of_one_test_are_all_called_and_those_that_fail_are_named():
    called = []

    @each((1, 0, 2, 0), name="case {}".format)
    def divides(number):
        called.append(number)
        assert 4 / number

    with pytest.raises(AssertionError, match=r"^case 0: ZeroDivisionError: .*\ncase 0: ZeroDivision"):
        divides()
    assert called == [1, 0, 2, 0] and divides.__name__ == "divides"


def test_a_sample_names_cases_that_are_there():
    for always in ((5,), (), (2, "3")):
        with pytest.raises(ValueError, match="choose from"):
            sample((1, 2, 3), always)


# ---------------------------------------------------------------------------------------------------------- preloaded


def test_ranks_come_from_a_server_that_has_imported_what_tests_need():
    """And has done nothing else: a thread of its own, or a process group, would be broken in each rank."""

    def look():
        threads = len(os.listdir(f"/proc/{os.getppid()}/task")) if sys.platform == "linux" else 1
        return {"checks", "toys", "zero_minimal.stage3", "zero_minimal.meters.memory"} <= sys.modules.keys(), threads

    assert ranks.run(look, 1) == [(True, 1)]
