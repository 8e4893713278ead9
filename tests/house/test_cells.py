"""Cells marked %%px: who waits for ever is found, who only works or sleeps is left alone; what a failed cell leaves;
what the ranks say arrives, and while they still run."""

import contextlib
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from jupyter_client.manager import start_new_kernel
from processes import alive
from thorough import sample

from zero_minimal import notebook
from zero_minimal.notebook import printed, stack_inspection

LONG = 60  # seconds in which a loaded machine does what takes one


@pytest.fixture(scope="module")
def worlds():
    """The worlds that the tests of this file share, by their number of ranks."""
    started = {}
    yield started
    for world in started.values():
        world.stop()


@pytest.fixture
def world_of(worlds):
    """world_of(count): a world of so many ranks. A test that fails and leaves them at work takes them along."""

    def world_of(count):
        if count not in worlds:
            worlds[count] = notebook.World(count, "cpu")
        return worlds[count]

    yield world_of
    for count, world in list(worlds.items()):
        if world._client.outstanding:
            worlds.pop(count).stop()


@pytest.fixture
def world(world_of):
    return world_of(3)


def message_of(world, code, within=LONG, **options):
    """The message of a cell that must fail within so many seconds."""
    began = time.monotonic()
    with pytest.raises(notebook.CellError) as caught:
        world.run(code, **options)
    assert time.monotonic() - began < within, "the message came late"
    return str(caught.value)


ALL_ALIKE = "collectives.all_reduce(x, op='sum')"


def assert_works(world):
    """The ranks of the world speak with each other."""
    world.run(f"x = torch.tensor([10.0**rank])\n{ALL_ALIKE}")
    assert world["x.item()"] == [111.0] * 3


def test_cells_run_on_every_rank(world, capsys):
    world.run("import math\nx = torch.full((2,), 10.0**rank)\nprint('hello')\nrank, world_size, device.type")
    assert capsys.readouterr().out.splitlines() == [
        line for rank in range(3) for line in (f"rank {rank} │ hello", f"rank {rank} │ ({rank}, 3, 'cpu')")
    ]
    world.run(f"{ALL_ALIKE}\nx")
    assert capsys.readouterr().out == "all ranks │ tensor([111., 111.])\n", "the same on all: told once"
    assert all(torch.equal(x, torch.full((2,), 111.0)) for x in world["x"])
    assert world["math.floor(x[0]) + rank"] == [111, 112, 113]


def test_an_error_on_one_rank_ends_the_cell(world):
    text = message_of(world, f"x = torch.ones(2)\nif rank == 1:\n    x.view(5)\n{ALL_ALIKE}", within=6)
    assert "rank 1 failed: RuntimeError: shape '[5]' is invalid" in text
    assert "rank 1, line 3: x.view(5)" in text
    for rank in (0, 2):
        assert f"rank {rank}, line 4: {ALL_ALIKE}" in text, "who waited for it is named"
    assert "keep their variables" in text
    assert "x.view(5)" in world.tracebacks[1]
    assert world["x.tolist()"] == [[1.0, 1.0]] * 3, "variables are gone"
    assert_works(world)


@pytest.mark.parametrize("code, words", [
    ("def f(:", "all ranks failed: SyntaxError"),
    ("import sys\nsys.exit(3)", "all ranks failed: SystemExit: 3"),
    ("collectives.reduce_scatter(torch.empty(2), torch.empty(5))", "5 elements are not 3 times the output's 2"),
])
def test_the_same_error_on_all_ranks_is_told_once(world, code, words):
    text = message_of(world, code)
    assert words in text
    assert text.count("line ") == 1 + text.count("%%px"), text  # a SyntaxError names the cell once more
    assert_works(world)


@pytest.mark.thorough
def test_who_waits_longer_may_say_so(world):
    world.run("import threading\nthreading.Timer(2, lambda: rank or dist.send(torch.ones(1), 1)).start()\n"
              "if rank == 1: dist.recv(torch.ones(1), 0)", patience=20.0)


@contextlib.contextmanager
def interrupted_after(seconds):
    """This process gets a SIGINT then, and heeds it: what a script starts in the background would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
@pytest.mark.timeout(30)
def test_an_interrupt_reaches_the_ranks(world):
    with interrupted_after(1.0):
        text = message_of(world, "if rank == 0:\n    while True: pass\ndist.barrier()", within=6)
    assert text.startswith("interrupted")
    assert "rank 0, line 2" in text and "rank 1, line 3: dist.barrier()" in text
    assert_works(world)


@pytest.mark.thorough
def test_a_rank_that_dies_is_told_and_all_start_again(world, capsys):
    before = world.processes
    text = message_of(world, "import os\nprint('so far')\nif rank == 2:\n    os._exit(7)\ndist.barrier()")
    assert "all ranks │ so far" in capsys.readouterr().out
    assert "rank 2: ended, exit code 7" in text and "variables are gone" in text
    assert not any(map(alive, before)), "ranks of before still live"
    assert_works(world)


# ------------------------------------------------------------------------------------------------- who waits for ever

NEIGHBOURS = "x = torch.zeros(4)\nright, left = (rank + 1) % world_size, (rank - 1) % world_size\n"
STUCK = {
    "wait() of a receive": ("dist.irecv(x, right).wait()", "waits in wait()"),
    "one all-reduce": ("if rank == 0: dist.all_reduce(x)", "waits in all_reduce"),
    "one of ours": ("if rank == 0: collectives.all_reduce(x)", "waits in all_reduce, 16 bytes of float32"),
    "ours and torch's": ("if rank == 0: collectives.all_reduce(x)\nelse: dist.barrier()", "waits in barrier"),
    "objects": ("if rank == 0: dist.all_gather_object([None] * world_size, 3)", "waits in all_gather_object"),
    "a ring without rank 0": ("if rank: ring.all_reduce(x)", "waits in recv from rank 0"),
    "a thread that waits too": (
        "import threading\ndef receive():\n    try: dist.recv(torch.zeros(4), right, tag=5)\n"
        "    except RuntimeError: pass\nthreading.Thread(target=receive).start()\ndist.recv(x, left)",
        "waits in recv from rank"),
    "one steps more": (
        "from zero_minimal.stage2 import Stage2\nzero = Stage2(torch.nn.Linear(4, 4), torch.optim.AdamW)\n"
        "for _ in range(1 + rank):\n    zero.zero_grad()\n    zero.model(x).sum().backward()\n    zero.step()",
        "waits in reduce_scatter of bucket 0"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", sample((2, 4, 6), [4]))
def test_all_receive_at_default_patience(world_of, ranks):
    text = message_of(world_of(ranks), f"{NEIGHBOURS}dist.recv(x, right)")
    assert text.startswith("stuck: for 5 s each rank has waited for another one.")
    for rank in range(ranks):
        assert f"rank {rank}, line 3: dist.recv(x, right)    (waits in recv from rank {(rank + 1) % ranks})" in text
    assert "keep their variables: mend the cell" in text


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", sample((2, 3), [3]))
@pytest.mark.parametrize("case", sample(tuple(STUCK), ["wait() of a receive", "one of ours"]))
def test_ranks_that_wait_for_each_other(world_of, case, ranks):
    code, words = STUCK[case]
    text = message_of(world_of(ranks), NEIGHBOURS + code, patience=1.0)
    assert text.startswith("stuck: for 1 s each rank"), text
    assert words in text
    world_of(ranks).run("x = torch.ones(1)\ndist.all_reduce(x)")
    assert world_of(ranks)["x.item()"] == [ranks] * ranks


@pytest.mark.thorough
def test_the_other_rank_is_through(world_of):
    text = message_of(world_of(2), "if rank == 0: dist.barrier()", patience=1.0)
    assert "rank 0, line 1" in text and "rank 1 is through with the cell" in text


@pytest.mark.parametrize("ranks", sample((2, 3), [3]))
def test_ranks_in_different_collectives_are_told_once(world_of, ranks):
    code = "if rank == 0:\n    collectives.broadcast(x)\nelse:\n    collectives.all_reduce(x)"
    first, *lines = message_of(world_of(ranks), f"x = torch.ones(2)\n{code}").splitlines()
    assert first.startswith("the ranks are not in the same collective: rank 0 is in broadcast, 8 bytes")
    assert lines[:2] == ["  rank 0, line 3: collectives.broadcast(x)", "  rank 1, line 5: collectives.all_reduce(x)"]
    assert sum(line.startswith("  rank") for line in lines) == ranks


NEVER_STUCK = {
    "sleep": "time.sleep(3)",
    "print and sleep": "for i in range(3): time.sleep(1); print(i)",
    "one computes": "end = time.time() + 3\nwhile rank == 0 and time.time() < end: pass\ndist.barrier()",
    "one sleeps": "if rank == 0: time.sleep(3)\ndist.barrier()",
    "one waits for a program": "import subprocess\nif rank == 0: subprocess.run(['sleep', '3'])\ndist.barrier()",
    "an event": "import threading\nthreading.Event().wait(3)",
    "one in C code": "if rank == 0: sum(range(100_000_000))\ndist.barrier()",
    "nothing but collectives":
        "end = time.time() + 3\ngo = torch.ones(1)\nwhile go:\n    go.fill_(time.time() < end)\n"
        "    dist.broadcast(go, 0)",
    "a thread that will send":
        "import threading\ndef send():\n    time.sleep(3)\n    dist.send(x, right)\n"
        "helper = threading.Thread(target=send)\nhelper.start()\ndist.recv(torch.zeros(4), left)\nhelper.join()",
}


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", sample((2, 3), [3]))
@pytest.mark.parametrize("case", sample(tuple(NEVER_STUCK), ["print and sleep"]))
def test_who_works_or_sleeps_is_left_alone(world_of, case, ranks):
    world_of(ranks).run(f"import time\n{NEIGHBOURS}{NEVER_STUCK[case]}", patience=1.0)


@pytest.mark.thorough
def test_many_failed_cells_use_up_nothing(world_of):
    world = world_of(2)
    files = "len(__import__('os').listdir('/dev/fd'))"
    message_of(world, "if rank: fail\ndist.barrier()")
    before = world[files]
    for _ in range(3):
        message_of(world, "if rank: fail\ndist.barrier()")
    assert max(after - begin for after, begin in zip(world[files], before, strict=True)) < 6, "files are left open"


# -------------------------------------------------------------------------------------------- what a failed cell leaves

BUILD = """
from zero_minimal.stage{0} import Stage{0}
torch.manual_seed(0)
zero = Stage{0}(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.optim.AdamW, lr=1e-3)
def step():
    zero.zero_grad()
    loss = zero.model(torch.ones(2, 8)).sum()
    loss.backward()
    zero.step()
    return loss.item()
losses = [step()]
"""
STEP = "losses.append(step())"


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", sample((2, 3), [3]))
@pytest.mark.parametrize("stage", sample((0, 1, 2, 3), [3]))
def test_a_stage_at_rest_goes_on(world_of, stage, ranks):
    world = world_of(ranks)
    world.run(BUILD.format(stage) + f"{STEP}\n{STEP}")
    expected = world["losses"]
    world.run(BUILD.format(stage))
    assert "keep their variables: mend the cell, and run it again" in message_of(world, f"{STEP}\nlosses.appendix")
    world.run(STEP)
    assert world["losses"] == expected


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", sample((2, 3), [3]))
@pytest.mark.parametrize("stage", sample((0, 1, 2, 3), [3]))
def test_a_stage_amid_its_work_is_closed_on_all_ranks(world_of, stage, ranks):
    world = world_of(ranks)
    world.run(BUILD.format(stage))
    text = message_of(world, f"for i in range(3):\n    if rank == 1 and i == 1: fail\n    {STEP}")
    assert "rank 1 failed: NameError" in text
    assert "variables, but for zero (a step may be half done)." in text
    assert "Run again the cells that make these, and their models" in text
    for use in ("step()", "zero.step()", "zero.model", "zero.gather_parameters()"):
        assert "all ranks failed: RuntimeError: this stage cannot go on after a cell" in message_of(world, use)
    world.run(BUILD.format(stage) + STEP)
    assert len(world["losses"][0]) == 2


@pytest.mark.thorough
def test_what_an_error_in_the_update_leaves(world_of):
    world = world_of(2)
    world.run(BUILD.format(2) + "model = zero.model")
    assert "but for zero (a step" in message_of(world, "zero.optimizer.step = None\nstep()")
    assert "this stage cannot go on" in message_of(world, "model(torch.ones(2, 8))")


@pytest.mark.thorough
def test_a_stage_that_was_refused_closes_no_other(world_of):
    world = world_of(2)
    world.run(BUILD.format(2))
    assert "keep their variables: mend" in message_of(world, "Stage2(torch.nn.Linear(2, 2), torch.optim.LBFGS)")
    world.run(STEP)


@pytest.mark.thorough
def test_groups_that_end_are_named(world_of):
    world = world_of(2)
    world.run(BUILD.format(2) + "from torch.nn.parallel import DistributedDataParallel\n"
              "group = dist.new_group([0, 1])\nddp = DistributedDataParallel(torch.nn.Linear(2, 2))\n"
              "other = Stage2(torch.nn.Linear(2, 2), torch.optim.AdamW, group=group)")
    text = message_of(world, "fail")
    assert "variables, but for group, ddp, other (of the old group)." in text
    assert "this stage cannot go on" in message_of(world, "other.zero_grad()")
    world.run(f"{STEP}\ndel group, ddp, other")
    assert "keep their variables: mend" in message_of(world, "fail")


# ---------------------------------------------------------------------------------------------------- what ranks say


@pytest.mark.parametrize("expression, words", [
    ("typo", "world['typo']: NameError: name 'typo' is not defined"),
    ("1 / rank", "world['1 / rank']: ZeroDivisionError: division by zero (rank 0)"),
    ("1 +", "world['1 +']: SyntaxError: invalid syntax (<world['1 +']>, line 1)"),
    ("(i for i in [])", "world['(i for i in [])']: TypeError: an object of type generator cannot be sent to the "
                        "notebook (cannot pickle 'generator' object): ask for a part of it, or for its repr()"),
])
def test_a_value_that_is_not_there_takes_one_line(world, expression, words):
    with pytest.raises(notebook.CellError) as caught:
        world[expression]
    assert str(caught.value) == words
    assert caught.value._render_traceback_() == [words], "a notebook shows more"
    assert world["rank"] == [0, 1, 2]


def test_objects_of_a_class_made_in_a_cell(world):
    world.run("class Point:\n    def __init__(self, x): self.x = x\n    def twice(self): return 2 * self.x")
    world.run("p = Point(rank)")
    assert [point.twice() for point in world["p"]] == [0, 2, 4]
    assert [point.x for point in world["{'p': [p]}"][2]["p"]] == [2]


@pytest.mark.thorough
def test_a_value_that_waits_for_ever(world_of):
    with pytest.raises(notebook.CellError, match=r"(?s)stuck: .*rank 1, line 1: dist\.recv.*waits in recv from rank 0"):
        world_of(2)["dist.recv(torch.zeros(1), 1 - rank)"]
    assert world_of(2)["rank"] == [0, 1]


class Watcher:
    """A screen that keeps what it was shown."""

    def __init__(self):
        self.seen = []

    def update(self, everybody, positions):
        self.seen.append([text.lines() for text in everybody] + [positions])

    def clear(self, something_follows):
        self.something_follows = something_follows


@pytest.mark.thorough
def test_what_ranks_print_comes_at_once(world_of, capsys):
    screen = Watcher()
    world_of(2).run("import time\nprint('begin', rank)\ntime.sleep(2)\nprint('end', rank)", screen=screen)
    assert any(seen[:2] == [["begin 0"], ["begin 1"]] for seen in screen.seen)
    positions = [seen[2][1] for seen in screen.seen if seen[2].get(1)]
    assert any((place["line"], place["source"]) == (3, "time.sleep(2)") for place in positions)
    assert screen.something_follows
    assert capsys.readouterr().out == "rank 0 │ begin 0\nrank 0 │ end 0\nrank 1 │ begin 1\nrank 1 │ end 1\n"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", sample(("std", "auto", "notebook"), ["auto"]))
def test_progress_bars_and_pictures(world_of, capsys, kind):
    world_of(2).run(f"from tqdm.{kind} import tqdm\nfor _ in tqdm(range(3)): pass\n"
                    "import matplotlib.pyplot as plt\nplt.plot([1, rank])\nplt.show()\nplt.plot([2]);")
    lines = capsys.readouterr().out.splitlines()
    for rank in range(2):
        told = [line.removeprefix(f"rank {rank} │ ") for line in lines if line.startswith(f"rank {rank} ")]
        assert told[0].startswith("100%") and told[1:] == ["<Figure size 640x480 with 1 Axes>"] * 2


@pytest.mark.thorough
def test_who_prints_for_ever_fills_no_disk(world_of, capsys):
    world_of(2).run("for i in range(100_000): print('0123456789')")
    told = capsys.readouterr().out
    assert 40_000 < told.count("0123456789") < printed.LIMIT / 10
    assert told.endswith("more than 500,000 characters: the rest is not shown\n")


def test_a_screen_shows_what_was_written_last():
    assert printed.on_screen("a\nb\n\n") == ["a", "b"]
    assert printed.on_screen("10%\r100%\rx") == ["x00%"]
    assert printed.on_screen("outer 1\n\rinner 1\x1b[A\router 2\n\rinner 2\n") == ["outer 2", "inner 2"]
    assert printed.on_screen("") == []


KERNEL = """
from zero_minimal import notebook
world = notebook.start(2, device="cpu")
"""
CELL = "%%px\nimport time\nprint('begin', rank)\ntime.sleep(3)\nprint('end', rank)"


@pytest.mark.thorough
@pytest.mark.timeout(3 * LONG)
def test_a_notebook_shows_the_cell_as_it_runs():
    manager, client = start_new_kernel()
    try:
        client.execute_interactive(KERNEL, timeout=LONG, output_hook=lambda message: None)
        for watched in (True, False):
            came = []
            client.execute_interactive(CELL, timeout=LONG, allow_stdin=watched,
                                       output_hook=lambda message, came=came: came.append(message))
            kinds = [message["msg_type"] for message in came if message["msg_type"] not in ("status", "execute_input")]
            stream = "".join(message["content"]["text"] for message in came if message["msg_type"] == "stream")
            assert stream == "rank 0 │ begin 0\nrank 0 │ end 0\nrank 1 │ begin 1\nrank 1 │ end 1\n"
            assert set(kinds) == ({"display_data", "update_display_data", "clear_output", "stream"} if watched
                                  else {"stream"}), "what is stored must not depend on time"
            first = next((message["content"]["data"]["text/plain"] for message in came
                          if message["msg_type"] == "display_data"), "")
            assert not watched or first.splitlines()[:2] == ["rank 0 │ begin 0", "rank 1 │ begin 1"]
            assert not watched or "all ranks, line 3: time.sleep(3)" in first
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_who_asks_where_a_rank_stands_keeps_nothing_of_it_alive(monkeypatch):
    """A tensor that lives longer because somebody looked at the stack is one too many in what a cell measures."""
    held, asked, looked_up, gone = weakref.WeakSet(), threading.Event(), threading.Event(), threading.Event()

    def slow(file):  # as reading a file for the first time is
        looked_up.set()
        assert gone.wait(20)

    monkeypatch.setattr(stack_inspection.linecache, "checkcache", slow)
    answers = []
    asker = threading.Thread(target=lambda: asked.wait(20) and answers.append(stack_inspection.here("<%%px 1>")))
    asker.start()

    def at_work():
        tensor = torch.zeros(8)
        held.add(tensor)
        asked.set()
        assert looked_up.wait(20)
        return tensor.numel()

    assert at_work() == 8 and not len(held)
    gone.set()
    asker.join(20)
    assert answers[0]["line"] is None and not answers[0]["waits"]
