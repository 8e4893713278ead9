"""Notebooks: ranks start with one line, and never outlive the notebook; what the files hold and the pictures show."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from cells import cells_of, notebook_on
from matplotlib.colors import to_rgb
from processes import alive, ended
from thorough import sample

from zero_minimal import notebook
from zero_minimal.core import collectives, ring
from zero_minimal.meters import deliveries
from zero_minimal.meters.events import Collective, Events, Span, overlap
from zero_minimal.meters.memory import Moment
from zero_minimal.paper import formulas
from zero_minimal.pictures.benchmark import draw_speeds
from zero_minimal.pictures.memory_chart import draw_bucket_sizes, draw_holdings, draw_memory_of_a_step
from zero_minimal.pictures.ring_chart import HELD, draw_ring
from zero_minimal.pictures.style import LOOKS
from zero_minimal.pictures.time_line import draw_time_line
from zero_minimal.pictures.traffic_chart import draw_ring_traffic, draw_sent_by_stage

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"

def test_the_environment_has_the_last_word(monkeypatch):
    monkeypatch.setenv("ZERO_RANKS", "two")
    with pytest.raises(ValueError, match="whole number from 1 up, not 'two'"):
        notebook.start(4)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_that_cannot_start_say_why():
    with pytest.raises(RuntimeError, match="2 ranks could not be started:\nValueError: device cuda was asked for, but"):
        notebook.start(2, device="cuda")


# ------------------------------------------------------------------------------------------------- nothing stays behind

ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "an error": "raise RuntimeError('of the notebook')",
}
SCRIPT = """
import os, signal, subprocess, time
from zero_minimal import notebook
world = notebook.start(2, device="cpu")
world.run("import subprocess\\nchild = subprocess.Popen(['sleep', '1000'])")
print(world._controller.pid, *world.processes, *world["child.pid"], world._folder, flush=True)
# one rank in C code that lets no other thread run, the other in a collective
for rank, code in ((0, "sum(iter(int, 1))"), (1, "dist.barrier()")):
    world._client[rank].apply_async(notebook.notebook_rank.run_cell, code, "cell")
time.sleep(0.5)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", sample(ENDS, ["killed"]))
def test_no_process_outlives_the_notebook(end):
    script = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT + ENDS[end]], capture_output=True, text=True, timeout=60
    )
    lines = script.stdout.splitlines()
    *processes, folder = lines[1].split()
    assert len(processes) == 5, script.stderr
    ended(processes, seconds=5)
    left = [process for process in processes if alive(process)]
    for process in left:
        os.kill(int(process), signal.SIGKILL)
    assert not left, "processes were left behind"
    assert not Path(folder).exists(), "files were left behind"


# ------------------------------------------------------------------------------------------------- the notebooks' files


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_notebooks_hold_the_outputs_of_one_whole_run(name):
    cells = cells_of(name)
    assert 12 <= len(cells) <= 25
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "not run from top to end"
    for cell in cells:
        failed = any(output["output_type"] == "error" for output in cell["outputs"])
        assert failed == ("raises-exception" in cell["tags"])
        text = json.dumps(cell["outputs"], ensure_ascii=False)
        assert "/home/" not in text and "/tmp/" not in text and "Warning" not in text
        assert "execution" not in cell["metadata"], "times of that run"
    assert sum("nbval-check-output" in cell["tags"] for cell in cells) >= 5, "hardly anything is compared"
    outputs = [json.dumps(cell["outputs"]) for cell in cells]
    assert sum("image/png" in output or "<canvas" in output for output in outputs) >= 4


@pytest.mark.thorough
def test_collectives_on_3_ranks(ranks=3):
    with notebook_on(ranks, "00_collectives.ipynb") as (_, world):
        counts = range(2, ranks + 1)
        assert world["shares"][0] == {
            "all-reduce": {n: pytest.approx(2 * (n - 1) / n) for n in counts},
            "reduce-scatter": {n: pytest.approx((n - 1) / n) for n in counts},
        }
        assert world["part[0].item()"] == [pytest.approx(sum(10**rank for rank in range(ranks)) / ranks)] * ranks


@pytest.mark.thorough
def test_gradients_on_3_ranks(ranks=3):
    smaller = ("Settings()", "Settings(layers=2, hidden=48)")
    with notebook_on(ranks, "03_gradients.ipynb", smaller) as (names, world):
        psi = names["psi"]
        for rank, held in enumerate(world["held"]):
            for stage, (_, after) in enumerate(held.values()):
                for state, expected in formulas.model_states(stage, psi, ranks, "fp32").items():
                    assert expected <= after[state] <= 1.02 * expected + 4096, f"stage {stage}, rank {rank}: {state}"
        for losses in world["losses"]:
            assert losses["stage 0"] == losses["stage 1"] == losses["stage 2"] == losses["stage 3"]
        for sent in world["sent"]:
            assert sent["stage 2"] == pytest.approx(formulas.traffic(2, psi, ranks, "fp32"), rel=0.02)
            assert sent["stage 0"] == sent["stage 1"] == sent["stage 2"] < sent["stage 3"]
        gradients = [row["gradients"] for row in world["rows"][0]]
        assert 4 * psi / ranks < gradients[0] < 4 * psi < gradients[-1], "the size of buckets makes no difference"


# ------------------------------------------------------------------------------------------- messages, spans, pictures


def watched_ring():
    """What is seen of a reduce-scatter, of the all-gather after it, and of a broadcast, on this rank."""
    reduced = deliveries.watch(ring, "reduce_scatter")
    records = [reduced, deliveries.watch(ring, "all_gather", reduced["end"]), deliveries.watch(ring, "broadcast")]
    assert not torch.are_deterministic_algorithms_enabled()
    return records


def test_messages_of_the_ring():
    reduced, gathered, broadcast = map(deliveries.told, zip(*toys.run(watched_ring, 3), strict=True))
    assert [[["".join(map(str, sorted(parts))) for parts in held] for held in state] for state in reduced.states] == [
        [["0", "0", "0"], ["1", "1", "1"], ["2", "2", "2"]],
        [["0", "02", "0"], ["1", "1", "01"], ["12", "2", "2"]],
        [["012", "02", "0"], ["1", "012", "01"], ["12", "2", "012"]],
    ]
    assert [[sent[1] for sent in step] for step in reduced.sends] == [[[2], [0], [1]], [[1], [2], [0]]]
    assert [[[len(parts) for parts in held] for held in state] for state in gathered.states] == [
        [[3, 0, 0], [0, 3, 0], [0, 0, 3]], [[3, 0, 3], [3, 3, 0], [0, 3, 3]], [[3] * 3] * 3]
    came = [[sum(map(bool, held)) for held in state] for state in broadcast.states]
    assert came == [[0, 4, 0], [0, 4, 1], [1, 4, 2], [2, 4, 3], [3, 4, 4], [4, 4, 4]]
    assert [[sent and sent[1] for sent in step] for step in broadcast.sends] == [
        [None, [0], None], [None, [1], [0]], [None, [2], [1]], [None, [3], [2]], [None, None, [3]]]


def spans_of_some_collectives():
    rank = dist.get_rank()
    x, part = torch.ones(30000), torch.empty(30000 // dist.get_world_size())
    with Events() as seen:
        with seen.span("backward"):
            pending = collectives.reduce_scatter(part, x, async_op=True)
            time.sleep(0.2)
            pending.wait()
        with seen.span("update"):
            time.sleep(0.1 * rank)
            collectives.all_reduce(x)
    collectives.all_reduce(x)  # not watched any more
    return seen.computing, seen.collectives, overlap(seen.collectives)


def test_spans():
    for computing, seen, share in toys.run(spans_of_some_collectives, 2):
        assert [span.name for span in computing] == ["backward", "update"]
        assert [(each.name, each.bytes) for each in seen] == [("reduce_scatter", 120000), ("all_reduce", 120000)]
        asynchronous, blocking = seen
        assert computing[0].start <= asynchronous.start < asynchronous.wait <= asynchronous.end <= computing[0].end
        assert 0.2 <= asynchronous.wait - asynchronous.start < 0.3, "the time in which it was not waited for"
        assert 0 <= blocking.wait - blocking.start < 0.1, "it was waited for at once"
        assert 0.3 < share < 1.0


def test_overlap_counts_time_once():
    ended = [Collective("a", 0.0, 3.0, 4.0, 1), Collective("b", 1.0, 3.5, 5.0, 1), Collective("c", 7.0, 7.0, 8.0, 1)]
    assert overlap(ended) == pytest.approx(3 / 6)  # 0 to 5 and 7 to 8 under way; 3 to 5 and 7 to 8 in a wait


def test_picture_of_a_ring():
    states = [[[(0,), ()], [(1,), (1,)]], [[(0, 1), (0,)], [(0, 1), (0, 1)]]]
    drawn = draw_ring(deliveries.Story(states, [[(1, [0]), None]], []), "title")
    first, second = drawn.axes
    assert [text.get_text() for text in first.texts] == ["0", "", "1", "1"]
    assert [text.get_text() for text in second.texts] == ["all", "0", "all", "all"]
    outlined = [patch for patch in first.patches if patch.get_linewidth() > 2]
    assert len(outlined) == 1 and not any(patch.get_linewidth() > 2 for patch in second.patches)
    assert outlined[0].get_xy() == pytest.approx((-0.44, -0.42)), "not rank 0's chunk 0"
    greys = [to_rgb(look)[0] * 0.3 + to_rgb(look)[1] * 0.59 + to_rgb(look)[2] * 0.11 for look in HELD]
    assert all(fewer > more + 0.1 for fewer, more in itertools.pairwise(greys)), "in grey, fuller cells must be darker"


def test_picture_of_holdings():
    whole = {"parameters": 100, "gradients": 100, "optimizer": 200}
    half = whole | {"gradients": 50}
    nothing = dict.fromkeys(whole, 0)
    drawn = draw_holdings({"stage 2": [[nothing, half], [nothing, half]]}, whole)
    before, after = drawn.axes
    filled = [patch for patch in after.patches if patch.get_facecolor()[3]]
    assert [round(patch.get_width() / 0.9, 2) for patch in filled] == [1, 0.5, 1] * 2
    own, other = filled[1], filled[4]
    assert other.get_x() - own.get_x() == pytest.approx(0.45), "rank 1's half stands beside rank 0's"
    assert all(patch.get_width() == 0 for patch in before.patches if patch.get_facecolor()[3])


def moment(seconds, what, **bytes_of):
    held = {name: bytes_of.get(name, 0) for name in (*LOOKS, "scalars")}
    return Moment(seconds, what, held, sum(held.values()))


def test_picture_of_memory_over_a_step():
    timeline = [moment(0.0, "x, forward", parameters=4e6), moment(0.01, "x, backward", parameters=4e6, gradients=2e6),
                moment(0.03, "x, backward", parameters=4e6, gradients=3e6), moment(0.04, "x, outside", parameters=4e6)]
    drawn = draw_memory_of_a_step({"stage 1": [timeline], "stage 2": [timeline]})
    assert [axis.get_title() for axis in drawn.axes] == ["stage 1, rank 0", "stage 2, rank 0"]
    assert len({axis.get_ylim() for axis in drawn.axes}) == 1, "panels that cannot be compared"
    axis = drawn.axes[0]
    assert "highest: 7 MB" in [text.get_text() for text in axis.texts]
    assert [line.get_xdata()[0] for line in axis.lines[:2]] == [10.0, 30.0]  # backward's begin and end, in ms
    gradients = axis.collections[list(LOOKS).index("gradients")]
    assert max(gradients.get_paths()[0].vertices[:, 1]) == 7.0, "stacked on the parameters, in MB"
    assert drawn.axes[-1].get_xlabel().startswith("ms") and axis.get_ylabel() == "MB"


def test_picture_of_a_time_line():
    computing = [Span("forward", 0.0, 0.01), Span("backward", 0.01, 0.03), Span("update", 0.03, 0.04)]
    under_way = [Collective("reduce_scatter", 0.015, 0.02, 0.022, 8), Collective("all_gather", 0.03, 0.035, 0.04, 8)]
    axis = draw_time_line([(computing, under_way)] * 2).axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in axis.patches]
    assert len(bars) == 2 * (3 + 2 * 2)
    assert (pytest.approx(15.0), pytest.approx(7.0)) in bars and (pytest.approx(20.0), pytest.approx(2.0)) in bars


def test_pictures_of_bytes():
    drawn = draw_sent_by_stage({"stage 0": 5e6, "stage 3": 7e6}, {"stage 0": 5e6, "stage 3": 7.5e6}).axes[0]
    assert [bar.get_height() for bar in drawn.patches] == [5, 7]
    assert [line.get_ydata()[0] for line in drawn.lines] == [5, 7.5]
    rows = [{"bucket_bytes": 2**16, "gradients": 3e6, "buffers": 1e6},
            {"bucket_bytes": 2**22, "gradients": 5e6, "buffers": 2e6}]
    drawn = draw_bucket_sizes(rows, shards=2.5e6, whole=5e6).axes[0]
    assert [bar.get_height() for bar in drawn.patches] == [3, 5, 1, 2]
    assert [bar.get_y() for bar in drawn.patches] == [0, 0, 3, 5]
    assert [line.get_ydata()[0] for line in drawn.lines] == [2.5, 5]
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["64 KiB", "4 MiB"]
    drawn = draw_ring_traffic({"all-reduce": {2: 1.0, 4: 1.5}}, {"all-reduce": lambda n: 2 * (n - 1) / n}).axes[0]
    assert list(drawn.lines[1].get_ydata()) == [1.0, 1.5] and drawn.lines[0].get_ydata()[-1] == 1.75


def test_picture_of_speeds():
    report = [{"seconds": [2.0, 2.0, 9.0], "wire_bytes": 3e6}] * 3
    slower = [{"seconds": [3.0, 3.0, 9.0], "wire_bytes": None}] * 3
    left, right = draw_speeds([{"DDP": report, "stage 2": report}, {"DDP": report, "stage 2": slower}]).axes
    assert [text.get_text() for text in left.texts] == ["1.000", "1.500"], "the slower rank's time over DDP's"
    assert [bar.get_width() for bar in right.patches] == [3, 3]
