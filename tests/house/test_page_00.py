"""Lesson 00's pages: every figure comes from a run or a formula here, every rule is the grader's, no line dictates."""

import ast
import inspect
import json
import math
import re
import sys

import pytest
import torch
import torch.distributed as dist
import toys

from zero_minimal.classroom import lessons
from zero_minimal.core import ring
from zero_minimal.meters import latency_probe
from zero_minimal.meters.traffic import TrafficMeter
from zero_minimal.paper.quantities import size_text
from zero_minimal.pictures.latency_chart import time_text
from zero_minimal.processes import ranks
from zero_minimal.programs.latency import BYTES, PIECES, describe

LESSON = lessons.found()["00_collectives"]


def one_line(text):
    return " ".join(text.split())


TEXT, TEACHERS_TEXT = ((LESSON.folder / name).read_text() for name in ("README.md", "teacher.md"))
PAGE, TEACHER = one_line(TEXT), one_line(TEACHERS_TEXT)
RUN = json.loads((LESSON.folder.parent / "pictures/latency.json").read_text())
COST = latency_probe.Cost(RUN["alpha"], RUN["beta"])


def programs(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def program_of(text, words):
    return next(program for program in programs(text) if words in program)


# --------------------------------------------------------------------------------------------------------------- bytes

PAYLOAD = 12_000  # bytes, in place of the page's 12 MB


def sent():
    """What this rank sends of PAYLOAD: all-reduce, reduce-scatter, broadcast from rank 0."""
    tensor, counts = torch.zeros(PAYLOAD // 4), []
    for algorithm in (ring.all_reduce, ring.reduce_scatter, ring.broadcast):
        with TrafficMeter() as seen:
            algorithm(tensor)
        counts.append(seen.sent_bytes / 1000)
    return counts


def test_the_bytes_are_those_that_ranks_send():
    (three, *_, last), (four, *_) = toys.run(sent, 3), toys.run(sent, 4)
    assert three[0] == pytest.approx(2 * 12 * 2 / 3) and four[0] == pytest.approx(2 * 12 * 3 / 4)
    assert (f"N = 3: {three[0]:.1f} MB a rank. N = 4: {four[0]:.1f} MB. For reduce-scatter alone {three[1]:.1f} and "
            f"{four[1]:.1f}; in a broadcast {three[2]:.1f}, and {last[2]:.0f} on the last rank") in PAGE
    assert three[2] == 12 and last[2] == 0
    assert f"With 1,000 ranks it would be {2 * 12 * 999 / 1000:.3f} MB (calculated)" in PAGE


# ------------------------------------------------------------------------------------------------------------- latency


def test_the_figures_of_latency_are_those_of_the_run():
    assert latency_probe.fit(RUN["points"]) == pytest.approx(COST) and len(RUN["points"]) >= 8
    first, *_, last = (seconds for _, seconds in RUN["points"])
    small = dict(RUN["points"])[8192]
    flat = max(bytes for bytes, seconds in RUN["points"] if seconds < 1.25 * first)
    one, many = (RUN["all_reduce"]["pieces"][count] for count in ("1", "64"))
    for words in (
        f"8.19 KB took {small / first:.1f} times as long as 8 bytes, and 8.39 MB took {last / first:.0f} times as long",
        f"The all-reduce of {size_text(BYTES)} took {time_text(one)} in one piece, and {time_text(many)} in 64 "
        f"pieces: {many / one:.0f} times as long",
        f"Up to {size_text(flat)} the size hardly matters",
        f"α is {time_text(COST.alpha)}, and 1/β is {size_text(1 / COST.beta, 2)} a second. At "
        f"{size_text(COST.half, 2)}, n½ = α/β, the start takes as long as the bytes",
    ):
        assert words in PAGE


def pieces_table():
    return [f"| {int(count):,} | {size_text(RUN['all_reduce']['bytes'] / int(count))} | {time_text(seconds)} |"
            for count, seconds in RUN["all_reduce"]["pieces"].items()]


def ring_all_reduce(cost, bytes, world_size):
    """Seconds of 2(N−1) messages, one after the other, each of an N-th of the bytes."""
    return 2 * (world_size - 1) * cost.seconds(bytes / world_size)


def tree_all_reduce(cost, bytes, world_size):
    """Seconds, if sums run up a tree and the total runs down: 2·log₂N messages of all bytes, one after the other."""
    return 2 * math.ceil(math.log2(world_size)) * cost.seconds(bytes)


def test_the_pieces_and_the_tree_are_those_of_the_run():
    assert tuple(map(int, RUN["all_reduce"]["pieces"])) == PIECES and RUN["all_reduce"]["bytes"] == BYTES
    assert "\n".join(pieces_table()) + "\n\n" in TEXT
    assert f"The same {size_text(BYTES)}, in pieces, on two ranks" in PAGE
    small, large = ([time_text(each(COST, bytes, 64)) for each in (
        ring_all_reduce, tree_all_reduce)] for bytes in (8, 10**8))
    assert (f"an all-reduce of 8 B on 64 ranks takes {small[0]} in a ring and {small[1]} in a tree. One of 100 MB "
            f"takes {large[0]} and {large[1]} (calculated)") in PAGE


def test_the_rule_to_leave_with_is_that_of_the_run():
    one, many = (RUN["all_reduce"]["pieces"][count] for count in ("1", "64"))
    assert (f"64 small ones of {size_text(BYTES / 64)} took {many / one:.0f} times as long as one of "
            f"{size_text(BYTES)}.") in PAGE


def test_the_command_shows_what_was_measured():
    shown = describe(RUN)
    assert all(time_text(seconds) in shown for _, seconds in RUN["points"]) and len(shown.splitlines()) > 15
    assert max(map(len, shown.splitlines())) <= 80


def test_pieces_are_timed():
    for seconds in toys.run(latency_probe.measure_pieces, 2, (1, 5), 400, 2):
        assert list(seconds) == [1, 5] and all(0 < each < 10 for each in seconds.values())


def test_the_rungs_make_as_many_all_reduces_as_the_manual_says():
    manual = (LESSON.folder.parent / "manual/stages.md").read_text()  # test_readme.py counts them
    naive, stage0 = re.search(r"makes (\d+) all-reduces a step.*?Stage 0 makes (\d+), a", manual, re.DOTALL).groups()
    assert f"has {naive} parameter tensors" in PAGE and f"makes {naive} all-reduces a step" in PAGE
    assert f"makes {stage0}, with as many bytes" in PAGE


def test_buckets_of_ddp():
    assert "default size of 25 MiB" in one_line(torch.nn.parallel.DistributedDataParallel.__doc__)
    assert "all-reduces buckets of 25 MiB" in PAGE


# --------------------------------------------------------------------------------------------------- code on the page


def test_the_time_is_honest():
    """A hundred words a minute, up to the assignment."""
    said = re.search(r"estimate: (\d+) minutes to read, .* to write about (\d+) lines", PAGE)
    minutes, lines = map(int, said.groups())
    assert minutes == pytest.approx(len(TEXT.split("## The assignment")[0].split()) / 100, rel=0.25)
    bodies = [ast.parse(inspect.getsource(getattr(ring, name))).body[0].body[1:] for name in LESSON.tasks]
    code = sum(len(ast.unparse(body).splitlines()) for body in bodies)
    assert lines == pytest.approx(code, abs=4)


def test_what_to_try_by_hand_prints_what_the_page_says(monkeypatch):
    monkeypatch.setitem(sys.modules, "assignment", ring)
    program = program_of(TEXT, "import assignment")
    space = {"__name__": "page"}
    exec(compile(program, "README.md", "exec"), space)
    assert f"rank 0's answer first: {ranks.run(space['try_it'], 3, device='cpu')}" in program


def test_what_must_be_known_before_is_true():
    x = torch.zeros(6)
    y = x.view(3, 2)
    y[0] += 1
    assert f"`{[int(number) for number in x]}`" in PAGE
    assert f"It is {(0 - 1) % 3}. In Python" in PAGE


def test_the_page_does_not_dictate():
    """No line of the reference in which a chunk or a neighbour is chosen stands on it, whole or as a formula."""
    code = [line.split("#")[0].strip() for line in inspect.getsource(ring).splitlines()]
    chosen = [line for line in code if re.search(r"chunks\[\(|isend\(|recv\(|-\(-tensor|distance [<>]", line)]
    assert len(chosen) > 6
    for line in chosen:
        assert " ".join(line.split()) not in PAGE
    assert not re.search(r"\(?(rank|r)\)? [-−] (step|s)\)? [-−] \d", TEXT)


def test_the_list_of_rules_names_the_interface_and_the_least_points():
    rules = one_line(LESSON.contract.read_text())
    for name in LESSON.tasks:
        arguments = [parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default}"
                     for parameter in inspect.signature(getattr(ring, name)).parameters.values()]
        assert f"`{name}({', '.join(arguments)})`" in rules
    two, three, four, five = (f"{min(step.core.values()):g}" for step in LESSON.steps[1:])
    assert f"step 2 earns {two} points at most, and step 3 earns {three}." in rules
    assert f"step 4 earns {four} points at most." in rules and rules.count(f"step 5 earns {five} points at most.") == 2


# -------------------------------------------------------------------------------------------------- the teacher's page


def test_the_first_exam_question():
    cost = latency_probe.Cost(50e-6, 1 / 10e9)
    ring, tree = ([each(cost, bytes, 4) * 1e3 for bytes in (100e6, 100)]
                  for each in (ring_all_reduce, tree_all_reduce))  # ms
    assert f"6 · (0.05 ms + 2.5 ms) = {ring[0]:.1f} ms" in TEACHER
    assert f"4 · (0.05 ms + 10 ms) = {tree[0]:.1f} ms" in TEACHER
    assert f"6 · 50 µs = {ring[1]:.2f} ms" in TEACHER and f"one after the other: {tree[1]:.2f} ms" in TEACHER


def test_the_graders_messages_are_as_large_as_teachers_are_told():
    elements = int(re.search(r"LARGE = .*2\*\*(\d+)$", LESSON.tests.read_text(), re.MULTILINE)[1])
    assert f"The grader's have {4 * 2**elements / 1e6:.0f} MB" in TEACHER


def examined(program):
    """What the exam's function returns, and what becomes of the tensor, of rank r's numbers 10^r."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((world_size,), 10.0**rank)
    space = dict(torch=torch, exchange=ring.exchange, rank=rank, world_size=world_size, tensor=tensor)
    exec(program.replace("return chunks[rank]", "result = chunks[rank].tolist()"), space)
    return space["result"], tensor.tolist()


def test_the_second_exam_question():
    program = program_of(TEACHERS_TEXT, "return chunks[rank]")
    result, tensor = toys.run(examined, 3, program)[0]
    assert result == [1.0], "rank 0 returns its own part of chunk 0 alone"
    assert tensor[1] == 111.0, "the whole sum of chunk 1; it is in the caller's tensor"
    mended = program.replace("rank - step - 1", "rank - step - 2").replace("(rank - step)", "(rank - step - 1)")
    assert [result for result, _ in toys.run(examined, 3, mended)] == [[111.0]] * 3
